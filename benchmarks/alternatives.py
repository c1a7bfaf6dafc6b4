"""What the methods promise, keep and cost on the same bags: full CP, split CP by several scores, CV+, jackknife+, cross, aggregated.

    python benchmarks/alternatives.py                  writes results/alternatives.md
    python benchmarks/alternatives.py --bags 20        a quick look, printed only

A bag is drawn anew with 20 objects to predict, three classes, logistic regressions of the same penalty. Standard errors are over bags.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from validity import draw

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
)

OUT = Path(__file__).parent / "results" / "alternatives.md"
SETTINGS = [(100, 20), (300, 20), (1000, 20)]  # n, d
N_CLASSES, M, EPSILON, PENALTY = 3, 20, 0.1, 0.5
METHODS: dict[str, Any] = {
    "full, symmetric": FullConformalClassifier(method="symmetric"),
    "full, influence": FullConformalClassifier(method="influence"),
    "jackknife+": JackknifePlusClassifier(),
    "CV+, 5 folds": CVPlusClassifier(),
    "cross-conformal, 5 folds": CrossConformalClassifier(),
    "aggregated, 10 splits": AggregatedConformalClassifier(),
    "split, loss": SplitConformalClassifier(),
    "split, margin": SplitConformalClassifier(conformity_score="margin"),
    "split, APS": SplitConformalClassifier(conformity_score="aps"),
    "split, RAPS": SplitConformalClassifier(conformity_score="raps"),
}


def trial(seed: int, n: int, d: int) -> np.ndarray:
    """Error rate, mean set size and seconds (methods, 3) on one bag."""
    rng = np.random.default_rng([seed, n, d])
    X, y = draw(rng, n + M, d, N_CLASSES, specified=True)
    rows = []
    for clf in METHODS.values():
        start = time.perf_counter()
        clf.set_params(l2=PENALTY / n, random_state=seed).fit(X[:n], y[:n])
        sets = clf.predict_set(X[n:], confidence_level=1 - EPSILON)
        seconds = time.perf_counter() - start
        rows.append((1 - sets[np.arange(M), y[n:]].mean(), sets.sum(1).mean(), seconds))
    return np.array(rows)


def page(results: dict[tuple[int, int], np.ndarray], bags: int) -> str:
    """The results (bags, methods, 3) by setting, as Markdown."""
    lines = [
        "# The alternatives on the same bags",
        "",
        f"Error rate where {EPSILON:g} is asked for and mean set size, each ± one standard error over {bags} bags, and the median",
        f"time to fit and to predict {M} objects on one core. Logistic regression, {N_CLASSES} classes.",
        "Made by `python benchmarks/alternatives.py`.",
    ]
    for (n, d), found in results.items():
        mean, se = found.mean(0), found.std(0, ddof=1) / np.sqrt(bags)
        took = np.median(found[:, :, 2], axis=0)
        lines += ["", f"## n = {n:,}, d = {d}", "", "| method | error rate | set size | time |", "|---|---|---|---|"]
        for k, name in enumerate(METHODS):
            error, size = (f"{mean[k, j]:.3f} ± {se[k, j]:.3f}" for j in (0, 1))
            lines.append(f"| {name} | {error} | {size} | {1e3 * took[k]:.0f} ms |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--bags", default=100, show_default=True)
def main(bags: int) -> None:
    torch.set_num_threads(1)
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, d in SETTINGS:
            results[n, d] = np.array([trial(seed, n, d) for seed in range(bags)])
            print(f"n={n} d={d}: {results[n, d][:, :, 2].sum():.0f} s", flush=True)
    print(page(results, bags))
    if bags >= 100:
        OUT.write_text(page(results, bags), encoding="utf-8")


if __name__ == "__main__":
    main()
