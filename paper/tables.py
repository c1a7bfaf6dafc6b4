"""Tables from the lines of a run: means over seeds, standard errors, Welch's marks; each cell beside what the paper prints.

Nothing is fitted or predicted here. A cell's standard error is that of the mean over test points (the seeds share them), widened by
the spread between seeds: √(mean of se² + variance between seeds / number of seeds).
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

Line = dict[str, Any]

PRINTED = Path(__file__).with_name("printed.toml")
LABELS = {
    "acp_d": "ACP (D)", "acp_o": "ACP (O)", "scp": "SCP", "raps": "RAPS", "cv_plus": "CV+", "folds": "folds", "ours": "GGN (ours)",
    "ours_studentized": "GGN, studentized", "symmetric": "exactly valid head", "raps_nonempty": "RAPS, never empty",
}  # fmt: skip
MODELS = ("MLP_A", "MLP_B", "MLP_C", "LR", "CNN")
WITH_P = (
    "acp_d",
    "acp_o",
    "scp",
    "folds",
    "ours",
    "ours_studentized",
    "symmetric",
)  # the paper measures fuzziness of p-values only


def printed() -> dict[str, Any]:
    """The paper's numbers."""
    return tomllib.loads(PRINTED.read_text(encoding="utf-8"))


def latest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each experiment, model, method, size and seed."""
    names = ("experiment", "model", "method", "seed", "n_features", "features", "l2")
    found = {}
    for line in lines:
        size = line["n"] if line.get("measure") else None
        found[(*(line.get(name) for name in names), size)] = line
    return list(found.values())


@dataclass(frozen=True)
class Mean:
    """A metric over seeds: mean, standard error, test points, seeds."""

    value: float
    se: float
    m: int
    seeds: int


def mean_of(lines: list[Line], part: str, metric: str) -> Mean | None:
    """A metric's mean over the lines of one cell."""
    pairs = [line[part][metric] for line in lines]
    if not pairs:
        return None
    values, ses = np.array([value for value, _ in pairs]), np.array([se for _, se in pairs])
    between = values.var(ddof=1) / len(values) if len(values) > 1 else 0.0
    return Mean(float(values.mean()), math.sqrt(float((ses**2).mean()) + between), lines[0][part]["m"], len(pairs))


def welch(larger: Mean, smaller: Mean) -> float:
    """One-sided p-value of Welch's test that the first mean is the larger."""
    a, b = larger.se**2, smaller.se**2
    if not (a + b > 0 and larger.m > 1 and smaller.m > 1):
        return 1.0
    df = (a + b) ** 2 / (a**2 / (larger.m - 1) + b**2 / (smaller.m - 1))
    return float(student.sf((larger.value - smaller.value) / math.sqrt(a + b), df))


@dataclass(frozen=True)
class Cell:
    """What one cell shows."""

    all: str
    first: str
    paper: str
    failed: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table of one data set."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    note: str


def select(lines: list[Line], data: str, model: str, method: str) -> list[Line]:
    """Lines of one cell, one a seed."""
    return [line for line in lines if (line["data"], line.get("model"), line.get("method")) == (data, model, method)]


def marks(cells: dict[str, Mean | None], method: str, shown: str) -> str:
    """* and †: significantly larger than ACP (D) and ACP (O), one-sided Welch tests, p < 0.1."""
    own = cells[method]
    if method in ("acp_d", "acp_o") or own is None:
        return shown
    for other, sign in (("acp_d", "*"), ("acp_o", "†")):
        base = cells.get(other)
        if base is not None and welch(own, base) < 0.1:
            shown += sign
    return shown


def comparison(
    lines: list[Line], data: str, metric: str, title: str, methods: Iterable[str], transform: Any = None
) -> Table | None:
    """A metric on one data set, models by methods, on all test points and on the first 100."""
    chosen = [line for line in lines if line["data"] == data and "model" in line]
    models = [model for model in MODELS if any(line["model"] == model for line in chosen)]
    methods = [method for method in methods if any(line["method"] == method for line in chosen)]
    if not models:
        return None
    said = (
        printed()
        .get({"size_auc": "size_auc", "fuzziness": "fuzziness", "error@0.2": "validity"}[metric], {})
        .get(data, {})
    )
    rows = []
    for model in models:
        good = {m: [line for line in select(chosen, data, model, m) if "all" in line] for m in methods}
        means = {part: {m: mean_of(good[m], part, metric) for m in methods} for part in ("all", "first")}
        astray = {m for m in methods if too_many_errors(good[m])}
        values = [mean.value for m, mean in means["all"].items() if mean is not None and m not in astray]
        cells = []
        for method in methods:
            failed = "; ".join(
                sorted({line["failed"] for line in select(chosen, data, model, method) if "failed" in line})
            )
            texts = {}
            for part, found in means.items():
                mean = found[method]
                text = "–" if mean is None else number(mean, transform)
                texts[part] = marks(found, method, text) if transform is None else text
            texts["all"] += "‡" if transform is None and method in astray else ""
            paper = str(said.get(model, {}).get(method, "")).replace("+", "†")
            own = means["all"][method]
            best = transform is None and own is not None and method not in astray and own.value == min(values)
            cells.append(Cell(texts["all"], texts["first"], paper, failed, best))
        rows.append((model, cells))
    return Table(f"{title}: {data}", [LABELS[method] for method in methods], rows, facts(chosen))


def too_many_errors(lines: list[Line]) -> bool:
    """Whether sets at ε = 0.1 err more often than that, by more than two standard errors, on all test points."""
    mean = mean_of(lines, "all", "error@0.1")
    return mean is not None and mean.value > 0.1 + 2 * mean.se


def number(mean: Mean, transform: Any = None) -> str:
    """A mean with its standard error."""
    value = mean.value if transform is None else transform(mean.value)
    return f"{value:.3f} ± {mean.se:.3f}".replace("-0.000 ", "0.000 ")


def facts(lines: list[Line]) -> str:
    """Sizes, seeds and notes of the data a table rests on."""
    good = [line for line in lines if "all" in line]
    if not good:
        return "every method failed"
    sizes = sorted({line["n"] for line in good})
    tests = sorted({line["all"]["m"] for line in good}, reverse=True)
    notes = sorted({line["note"] for line in good if line.get("note")})
    few = f" (exactly valid head: {', '.join(f'{m:,}' for m in tests[1:])})" if len(tests) > 1 else ""
    devices = sorted({line["hardware"]["device"] for line in good})
    count = Counter((line["method"], line["model"]) for line in good)
    most = max(count.values())
    fewer = [f"{LABELS[method]} of {model}: {k} of them" for (method, model), k in count.items() if k < most]
    return (
        f"{', '.join(f'{n:,}' for n in sizes)} training points, {tests[0]:,} test points{few}, "
        f"{len({line['seed'] for line in good})} seeds{''.join(f' ({one})' for one in fewer)}; {', '.join(devices)}."
        + "".join(f" {note}." for note in notes)
    )


def seconds(lines: list[Line]) -> Table | None:
    """Seconds of training (a network's share of a stack), of preparing, and of predicting a thousand test points."""
    good = [line for line in lines if "all" in line]
    methods = [method for method in LABELS if any(line["method"] == method for line in good)]
    settings = sorted({(line["data"], line["model"]) for line in good}, key=lambda s: (s[0], MODELS.index(s[1])))
    rows = []
    for data, model in settings:
        cells = []
        for method in methods:
            chosen = select(good, data, model, method)
            if not chosen:
                cells.append(Cell("–", "", ""))
                continue
            spent = [line["seconds"] for line in chosen]
            train, fit = (np.mean([one[name] for one in spent]) for name in ("train", "fit"))
            predict = np.mean([line["seconds"]["predict"] / line["all"]["m"] * 1000 for line in chosen])
            cells.append(Cell(f"{train:.1f} + {fit:.2f} + {predict:.2f}", "", ""))
        rows.append((f"{data} {model}, p = {chosen_p(good, data, model):,}", cells))
    note = "Seconds of training (its share, where networks trained together) + preparing + predicting 1,000 points; means of the seeds."
    return Table("Time", [LABELS[m] for m in methods], rows, note) if rows else None


def chosen_p(lines: list[Line], data: str, model: str) -> int:
    """Number of parameters of a setting's network."""
    return next(int(line["p"]) for line in lines if (line["data"], line["model"]) == (data, model))
