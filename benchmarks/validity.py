"""Error rates with their standard errors: who keeps the promise with few points and many features, and at what set size.

    python benchmarks/validity.py                      every setting, 2,000 bags each, one test point a bag; results as they come
    python benchmarks/validity.py --trials 200         a quick look
    python benchmarks/validity.py --jobs 16            on more cores
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
import torch
from joblib import Parallel, delayed
from scipy.stats import binom

from fullconformal import FullConformalClassifier, SplitConformalClassifier

RESULTS = Path(__file__).parent / "results" / "validity.jsonl"
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


@click.command()
@click.option("--trials", default=2000, show_default=True)
@click.option("--jobs", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS)
@click.option("--page", "page_only", is_flag=True)
def main(trials: int, jobs: int, out: Path, page_only: bool) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
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
