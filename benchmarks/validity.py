"""Error rates with their standard errors: who keeps the promise with few points and many features, and at what set size.

    python benchmarks/validity.py                      every setting, 2,000 bags each, one test point a bag; results as they come
    python benchmarks/validity.py --trials 200         a quick look
    python benchmarks/validity.py --jobs 16            on more cores
    python benchmarks/validity.py --only pipelines     behind the transformers of a Pipeline only (or: models, without them)
    python benchmarks/validity.py --page               the page from stored results, nothing computed

A trial draws a fresh bag and one test point, so trials are independent. The band holds 99.9 % of the error counts of a method
whose error rate is exactly ε; a valid method may be below it (p-values are discrete), never above, save once in 2,000 times.
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from scipy.stats import binom
from sklearn.compose import make_column_transformer
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, PowerTransformer, StandardScaler

from fullconformal import FullConformalClassifier, SplitConformalClassifier
from fullconformal.models import KernelDensityClassifier, RoundedImputer

RESULTS = Path(__file__).parent / "results" / "validity.jsonl"
PIPED = Path(__file__).parent / "results" / "validity_pipelines.jsonl"
CHUNK = 50  # bags of a setting that are computed and stored together
LEVELS = (0.05, 0.1, 0.2)
SETTINGS = [(40, 15, 0.1), (60, 30, 1.0), (100, 20, 0.1), (1000, 20, 0.5)]  # n, d, Λ
METHODS: dict[str, dict[str, Any]] = {
    "direct": {"method": "influence"},
    "indirect": {"method": "influence", "approximation": "indirect"},
    "newton": {"method": "influence", "approximation": "newton"},
    "symmetric, deleted": {"method": "symmetric"},
    "symmetric, studentized": {"method": "symmetric", "scheme": "studentized"},
    "symmetric, ordinary": {"method": "symmetric", "scheme": "ordinary"},
    "exact": {"method": "exact"},
    "split": {},
}
VALID = ("symmetric, deleted", "symmetric, studentized", "symmetric, ordinary", "exact", "split")


def draw(rng: np.random.Generator, n: int, d: int, n_classes: int, specified: bool) -> tuple[np.ndarray, np.ndarray]:
    """Points from a softmax of linear logits, or of products of features with heavy tails, which no linear logit fits."""
    W = np.random.default_rng(d).normal(size=(d, n_classes)) * 1.5 / np.sqrt(d / 5)
    X = rng.normal(size=(n, d)) if specified else rng.standard_t(3, size=(n, d))
    f = X @ W if specified else (X[:, :-1] * X[:, 1:]) @ W[1:] + 0.5 * X @ W
    return X, (f + rng.gumbel(size=f.shape)).argmax(1)


def trial(seed: int, n: int, d: int, penalty: float, n_classes: int, specified: bool) -> dict[str, np.ndarray]:
    """p-values (C,) of one object by every method, rolled so that the true label comes first."""
    torch.set_num_threads(1)
    rng = np.random.default_rng([seed, n, d, n_classes, specified])
    X, y = draw(rng, n + 1, d, n_classes, specified)
    while len(np.unique(y[:n])) < n_classes or np.bincount(y[:n]).min() < 2:
        X, y = draw(rng, n + 1, d, n_classes, specified)
    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, options in METHODS.items():
            if name == "split":
                clf: Any = SplitConformalClassifier(l2=penalty / n, random_state=seed)
            else:
                clf = FullConformalClassifier(l2=penalty / n, device="cpu", **options)
            p = clf.fit(X[:n], y[:n]).predict_p(X[n:])[0]
            out[name] = np.roll(p, -int(y[n]))
    return out


def run(setting: tuple[int, int, float], n_classes: int, specified: bool, trials: int, jobs: int) -> dict[str, Any]:
    start = time.perf_counter()
    n, d, penalty = setting
    each = Parallel(n_jobs=jobs, batch_size=8)(
        delayed(trial)(k, n, d, penalty, n_classes, specified) for k in range(trials)
    )
    row: dict[str, Any] = {
        "n": n,
        "d": d,
        "penalty": penalty,
        "classes": n_classes,
        "specified": specified,
        "trials": trials,
    }
    for name in METHODS:
        p = np.array([one[name] for one in each])
        row[name] = {
            "errors": [int((p[:, 0] <= e + 1e-12).sum()) for e in LEVELS],
            "size": [float((p > e + 1e-12).sum(1).mean()) for e in LEVELS],
            "size_se": [float((p > e + 1e-12).sum(1).std(ddof=1) / np.sqrt(trials)) for e in LEVELS],
        }
    return row | {"seconds": time.perf_counter() - start}


def page(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown: error rate (and mean set size); bold where it lies above the band."""
    lines = [
        "# Who keeps the promise",
        "",
        "Error rate at ε = 0.05, 0.1, 0.2 and, in brackets, the mean set size. One test point a bag, every bag drawn anew.",
        "**Bold**: above the 99.9 % band of ε, so the method does not hold what it promises there. Made by",
        "`python benchmarks/validity.py`.",
        "",
    ]
    for row in rows:
        bands = [binom.interval(0.999, row["trials"], e) for e in LEVELS]
        kind = "correctly" if row["specified"] else "wrongly"
        lines += [
            f"## n = {row['n']}, d = {row['d']}, Λ = {row['penalty']:g}, {row['classes']} classes, {kind} specified",
            "",
            f"{row['trials']:,} trials; standard errors at ε: "
            + ", ".join(f"{np.sqrt(e * (1 - e) / row['trials']):.4f}" for e in LEVELS)
            + "; band: "
            + ", ".join(f"{low / row['trials']:.3f}–{high / row['trials']:.3f}" for low, high in bands)
            + ".",
            "",
            "| method | 0.05 | 0.1 | 0.2 |",
            "|---|---|---|---|",
        ]
        for name in METHODS:
            cells = []
            for k, (_, high) in enumerate(bands):
                rate, size = row[name]["errors"][k] / row["trials"], row[name]["size"][k]
                text = f"{rate:.3f} ({size:.2f})"
                cells.append(f"**{text}**" if row[name]["errors"][k] > high else text)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    broken = [
        (row, name)
        for row in rows
        for name in VALID
        if any(row[name]["errors"][k] > binom.interval(0.999, row["trials"], e)[1] for k, e in enumerate(LEVELS))
    ]
    lines += [
        "## In short",
        "",
        f"Methods with a guarantee that left the band: {len(broken)} of {len(rows) * len(VALID)}.",
    ]
    return "\n".join(lines) + "\n"


# Behind the transformers of a Pipeline ----------------------------------------------------------------------------------

SCHEMES = ("deleted", "studentized", "ordinary")
WORDS = np.array([f"w{k:02d}" for k in range(60)])


def table(rng: np.random.Generator, n: int, n_classes: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Numbers with gaps and words with rare levels."""
    X, y = draw(rng, n, 4, n_classes, True)
    X[rng.random(X.shape) < 0.1] = np.nan
    frame = pd.DataFrame(X, columns=list("abcd"))
    level = np.minimum(rng.geometric(0.3, n), 12)
    frame["word"], frame["kind"] = [f"level {k}" for k in level], rng.choice(["k", "l", "m"], n)
    return frame, (y + (level > 3)) % n_classes


def identifiers(rng: np.random.Generator, n: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """A column that names each object, and labels that have nothing to do with it."""
    return rng.integers(0, 10**6, (n, 1)).astype(str), rng.integers(0, n_classes, n)


def text(rng: np.random.Generator, n: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Lines of eight words, of which some are commoner in a class."""
    y = rng.integers(0, n_classes, n)
    weight = np.ones((n_classes, len(WORDS))) + 2.0 * (
        np.arange(len(WORDS)) % n_classes == np.arange(n_classes)[:, None]
    )
    return np.array([" ".join(rng.choice(WORDS, 8, p=weight[c] / weight[c].sum())) for c in y], dtype=object), y


def encoder(imputer: type[SimpleImputer]) -> Any:
    gaps = make_pipeline(imputer(strategy="median", add_indicator=True), StandardScaler())
    words = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=3, sparse_output=False)
    return make_column_transformer((gaps, list("abcd")), (words, ["word", "kind"]))


LR, KNN, KDE = LogisticRegression(max_iter=1000), KNeighborsClassifier(5), KernelDensityClassifier(1.0)
ONE_HOT = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
# Name, Pipeline, n, d, classes, what draws points (None: normal features with linear logits).
PIPELINES: list[tuple[str, Any, int, int, int, Any]] = [
    ("PCA(whiten) + LR", make_pipeline(PCA(whiten=True), LR), 40, 36, 2, None),
    ("PCA(whiten) + density", make_pipeline(PCA(whiten=True), KDE), 40, 36, 2, None),
    ("PCA(25, whiten) + k-NN", make_pipeline(PCA(25, whiten=True), KNN), 40, 30, 2, None),
    ("one-hot identifiers + LR", make_pipeline(ONE_HOT, LR), 59, 1, 2, identifiers),
    ("StandardScaler + LR", make_pipeline(StandardScaler(), LR), 80, 40, 2, None),
    ("StandardScaler + LR", make_pipeline(StandardScaler(), LR), 80, 40, 3, None),
    ("impute, one-hot, scale + LR", make_pipeline(encoder(SimpleImputer), LR), 60, 6, 3, table),
    ("impute, one-hot, scale + LR", make_pipeline(encoder(SimpleImputer), LR), 200, 6, 2, table),
    ("PowerTransformer + LR", make_pipeline(PowerTransformer(), LR), 40, 8, 2, None),
    ("StandardScaler + k-NN", make_pipeline(StandardScaler(), KNN), 30, 10, 3, None),
    ("StandardScaler + density", make_pipeline(StandardScaler(), KDE), 30, 10, 2, None),
    ("PCA(0.95) + LR", make_pipeline(PCA(0.95), LR), 60, 30, 3, None),
    ("TF-IDF + LR", make_pipeline(TfidfVectorizer(), LR), 100, 60, 3, text),
    ("impute rounded, one-hot, scale + LR", make_pipeline(encoder(RoundedImputer), LR), 40, 6, 2, table),
]


def piped_trial(seed: int, k: int) -> dict[str, list[bool]]:
    """Whether the true label of one object is missed at each ε, by transformers fixed and in the bag, by every scheme."""
    torch.set_num_threads(1)
    _, pipe, n, d, n_classes, points = PIPELINES[k]
    rng = np.random.default_rng([seed, n, d, n_classes, k])
    while True:
        X, y = draw(rng, n + 1, d, n_classes, True) if points is None else points(rng, n + 1, n_classes)
        if len(np.unique(y[:n])) == n_classes and np.bincount(y[:n]).min() > 1:
            break
    out = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("fixed", "bag"):
            clf = FullConformalClassifier(pipe, transformers=kind, random_state=0).fit(X[:n], y[:n])
            for scheme in SCHEMES if pipe[-1] is LR else SCHEMES[:1]:
                p = clf.set_params(scheme=scheme).predict_p(X[n:])[0, int(y[n])]
                out[f"{kind}, {scheme}"] = [bool(p <= e + 1e-12) for e in LEVELS]
    return out


def piped_chunk(k: int, start: int) -> dict[str, Any]:
    """Errors of a setting over the bags of one chunk."""
    each = [piped_trial(seed, k) for seed in range(start, start + CHUNK)]
    errors = {name: np.sum([one[name] for one in each], axis=0).tolist() for name in each[0]}
    return {"setting": k, "start": start, "errors": errors}


def run_pipelines(trials: int, jobs: int, out: Path) -> None:
    """Chunks of bags of all settings in turn, each stored as it comes; those stored before are not computed again."""
    done = {(row["setting"], row["start"]) for row in stored(out)}
    todo = [(k, start) for start in range(0, trials, CHUNK) for k in range(len(PIPELINES)) if (k, start) not in done]
    # Chunks at a time: bags of one setting take ten times as long as those of another.
    for row in Parallel(n_jobs=jobs, return_as="generator_unordered")(delayed(piped_chunk)(*one) for one in todo):
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def stored(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def pipelines_page(rows: list[dict[str, Any]]) -> str:
    """Error rates with the transformers fixed and in the bag; bold above the band."""
    lines = [
        "# Behind the transformers of a Pipeline",
        "",
        "Error rate at ε = 0.05, 0.1, 0.2, transformers fitted to the training objects (fixed) and fitted with the object (bag). One test",
        "point a bag. **Bold**: above the 99.9 % band. Made by `python benchmarks/validity.py --only pipelines`.",
        "",
        "| Pipeline | n | d | classes | scheme | bags | fixed | bag |",
        "|---|---|---|---|---|---|---|---|",
    ]
    broken = total = 0
    for k, (name, _, n, d, n_classes, _) in enumerate(PIPELINES):
        parts = [row["errors"] for row in rows if row["setting"] == k]
        if not parts:
            continue
        bags = CHUNK * len(parts)
        tops = [binom.interval(0.999, bags, e)[1] for e in LEVELS]
        for scheme in (s for s in SCHEMES if f"bag, {s}" in parts[0]):
            cells = []
            for kind in ("fixed", "bag"):
                errors = np.sum([part[f"{kind}, {scheme}"] for part in parts], axis=0)
                above = [e > top for e, top in zip(errors, tops, strict=True)]
                cells.append(
                    " / ".join(
                        f"**{e / bags:.3f}**" if b else f"{e / bags:.3f}" for e, b in zip(errors, above, strict=True)
                    )
                )
                broken, total = (broken + any(above), total + 1) if kind == "bag" else (broken, total)
            lines.append(f"| {name} | {n} | {d} | {n_classes} | {scheme} | {bags:,} | {cells[0]} | {cells[1]} |")
    lines += ["", f"Settings called exact that left the band: {broken} of {total}."]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--trials", default=2000, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
@click.option("--pipelines-out", type=click.Path(path_type=Path, dir_okay=False), default=PIPED)
@click.option("--only", type=click.Choice(["models", "pipelines"]), default=None)
@click.option("--page", "page_only", is_flag=True)
def main(trials: int, jobs: int, out: Path, pipelines_out: Path, only: str | None, page_only: bool) -> None:
    if only != "models":
        pipelines_out.parent.mkdir(parents=True, exist_ok=True)
        if not page_only:
            run_pipelines(trials, jobs, pipelines_out)
        page_of_pipelines = pipelines_page(stored(pipelines_out))
        pipelines_out.with_suffix(".md").write_text(page_of_pipelines)
        print(page_of_pipelines)
    if only == "pipelines":
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = stored(out)
    done = {(r["n"], r["d"], r["classes"], r["specified"]) for r in rows if r["trials"] == trials}
    for setting in SETTINGS:
        for n_classes in (2, 3):
            for specified in (True, False):
                if page_only or (setting[0], setting[1], n_classes, specified) in done:
                    continue
                row = run(setting, n_classes, specified, trials, jobs)
                rows.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"n={row['n']} d={row['d']} C={n_classes} specified={specified}: {row['seconds']:.0f} s", flush=True
                )
    out.with_suffix(".md").write_text(page(rows))
    print(page(rows))


if __name__ == "__main__":
    main()
