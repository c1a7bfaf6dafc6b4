"""Forests and boosted trees on four tables: full CP (out-of-bag, folds) beside split, CV+ (ours, MAPIE's) and crepes' out-of-bag scores.

    python benchmarks/trees.py --jobs 14           writes results/trees.md
    python benchmarks/trees.py --bags 3            a quick look, printed only

A bag of n rows is drawn at random, and up to 200 others are predicted. Standard errors are over bags, seconds are medians of fit and
prediction, one core a bag. "At equal error" is the mean set size at the ε at which a method errs on a tenth of all objects: what is left
of a difference in size once the difference in coverage is taken away. ACSIncome is taken where FULLCONFORMAL_DATA names a folder that
has it. What is not installed is left out with a line.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before anything starts threads of its own.
os.environ["OMP_NUM_THREADS"] = "1"

import click
import numpy as np
import torch
from joblib import Parallel, delayed
from measure import size_at_error
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

from fullconformal import CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier
from fullconformal.data import load_acsincome

OUT = Path(__file__).parent / "results" / "trees.md"
SIZES = (100, 200, 500, 1000, 2000)
M, EPSILON, BAGS = 200, 0.1, 30
FOREST = RandomForestClassifier(100)
BOOSTING = HistGradientBoostingClassifier(max_iter=50)

Bag = tuple[np.ndarray, np.ndarray, np.ndarray, int]
# Of the objects of a bag (X, y, objects, seed): the largest ε (m, C) at which each label is in the set, or the sets at ε = 0.1 themselves.
Predict = Callable[[Bag], np.ndarray]


def ours(clf: Any) -> Predict:
    """By a classifier of this library."""

    def predict(bag: Bag) -> np.ndarray:
        X, y, objects, seed = bag
        return clone(clf).set_params(random_state=seed).fit(X, y).predict_epsilon(objects)

    return predict


def crepes_out_of_bag(forest: Any) -> Predict:
    """Out-of-bag scores of the training points, objects scored by all trees."""
    from crepes import WrapClassifier

    def predict(bag: Bag) -> np.ndarray:
        X, y, objects, seed = bag
        wrapped = WrapClassifier(clone(forest).set_params(random_state=seed, oob_score=True))
        wrapped.fit(X, y)
        wrapped.calibrate(X, y, oob=True, seed=seed)
        return wrapped.predict_p(objects, smoothing=False)

    return predict


def mapie_cv_plus(model: Any) -> Predict:
    """MAPIE's CV+ with five folds, by the probability of the label."""
    from mapie.classification import CrossConformalClassifier

    def predict(bag: Bag) -> np.ndarray:
        X, y, objects, seed = bag
        wrapped = CrossConformalClassifier(
            clone(model).set_params(random_state=seed), confidence_level=1 - EPSILON, conformity_score="lac", cv=5,
            random_state=seed,
        )  # fmt: skip
        return wrapped.fit_conformalize(X, y).predict_set(objects)[1][:, :, 0]

    return predict


def methods(trees: int) -> Iterator[tuple[str, Predict]]:
    """The methods that there are, by name."""
    forest = clone(FOREST).set_params(n_estimators=trees)
    yield "forest, full (oob)", ours(FullConformalClassifier(forest, method="oob"))
    if find_spec("crepes"):
        yield "forest, crepes out-of-bag", crepes_out_of_bag(forest)
    yield "forest, split", ours(SplitConformalClassifier(forest))
    yield "forest, split, half", ours(SplitConformalClassifier(forest, calibration_size=0.5))
    yield "forest, CV+", ours(CVPlusClassifier(forest))
    if find_spec("mapie"):
        yield "forest, MAPIE's CV+", mapie_cv_plus(forest)
    yield "boosting, full (folds)", ours(FullConformalClassifier(BOOSTING, method="folds"))
    yield "boosting, split", ours(SplitConformalClassifier(BOOSTING))
    yield "boosting, split, half", ours(SplitConformalClassifier(BOOSTING, calibration_size=0.5))
    yield "boosting, CV+", ours(CVPlusClassifier(BOOSTING))
    if find_spec("mapie"):
        yield "boosting, MAPIE's CV+", mapie_cv_plus(BOOSTING)


def tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Objects (n, d) and label indices (n,) by name."""
    loaders = {"wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits}
    found = {name: loader(return_X_y=True) for name, loader in loaders.items()}
    try:
        people = load_acsincome()
        found["ACSIncome"] = people.X, people.y.astype(np.int64)
    except (OSError, ValueError) as error:
        print(f"ACSIncome is left out: {error}")
    return found


def draw(X: np.ndarray, y: np.ndarray, n: int, seed: int) -> tuple[Bag, np.ndarray]:
    """A bag of n rows that has every class, and the labels of the objects to predict."""
    rng = np.random.default_rng([seed, n])
    while True:
        order = rng.permutation(len(y))
        bag, rest = order[:n], order[n : n + M]
        if len(np.unique(y[bag])) == len(np.unique(y)):
            return (X[bag], y[bag], X[rest], seed), y[rest]


class Found:
    """What a method found of one bag: the error rate, the mean size and seconds; ε (m, C) where it has it, and the truth (m,)."""

    def __init__(self, out: np.ndarray, truth: np.ndarray, seconds: float):
        sets = out if out.dtype == bool else out > EPSILON + 1e-12
        self.row = 1 - sets[np.arange(len(truth)), truth].mean(), sets.sum(1).mean(), seconds
        self.epsilon, self.truth = None if out.dtype == bool else out, truth


def measure(drawn: tuple[Bag, np.ndarray], trees: int, part: str) -> dict[str, Found]:
    """All methods, or those with this part in their names, on one bag."""
    torch.set_num_threads(1)
    bag, truth = drawn
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, predict in ((name, how) for name, how in methods(trees) if part in name):
            start = time.perf_counter()
            try:
                out = predict(bag)
            except ValueError as error:
                # What trains lacks a class.
                print(f"bag {bag[3]}, {method}: {error}", flush=True)
                continue
            found[method] = Found(out, truth, time.perf_counter() - start)
    return found


def size_at_equal_error(bags: list[Found]) -> float | None:
    """Mean set size at the ε at which a tenth of all objects err."""
    if any(bag.epsilon is None for bag in bags):
        return None
    return size_at_error(
        np.concatenate([bag.epsilon for bag in bags]), np.concatenate([bag.truth for bag in bags]), EPSILON
    )


def page(results: dict[tuple[str, int], dict[str, list[Found]]], bags: int, trees: int) -> str:
    """Results by table, n and method, as Markdown."""
    lines = [
        "# Forests and boosted trees",
        "",
        f"Error rate where {EPSILON:g} is asked for, mean set size, each ± one standard error over {bags} bags; the mean size at the ε at",
        f"which a tenth of all objects err; and the median seconds to fit and to predict up to {M} objects on one core. Forests of {trees}",
        f"trees, boosting of {BOOSTING.max_iter} rounds. Made by `python benchmarks/trees.py --jobs 14`.",
    ]
    for (name, n), by_method in results.items():
        heads = "| method | error rate | set size | size at equal error | seconds |"
        lines += ["", f"## {name}, n = {n:,}", "", heads, "|---|---|---|---|---|"]
        for method, found in by_method.items():
            rows = np.array([bag.row for bag in found])
            mean, se = rows.mean(0), rows.std(0, ddof=1) / np.sqrt(len(rows))
            error, size = (f"{mean[j]:.3f} ± {se[j]:.3f}" for j in (0, 1))
            equal = size_at_equal_error(found)
            fewer = "" if len(found) == bags else f" ({len(found)} bags)"
            shown = "–" if equal is None else f"{equal:.3f}"
            lines.append(f"| {method}{fewer} | {error} | {size} | {shown} | {np.median(rows[:, 2]):.2f} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--bags", default=BAGS, show_default=True)
@click.option("--trees", default=FOREST.n_estimators, show_default=True, help="Other numbers are printed only.")
@click.option("--jobs", default=1, show_default=True, help="Bags at a time.")
@click.option("--only", multiple=True, help="Tables, by name; by default all.")
@click.option("--methods", "part", default="", help="Part of the names of methods; by default all.")
@click.option("--out", type=click.Path(path_type=Path), help="Another file, written after every table and n.")
def main(bags: int, trees: int, jobs: int, only: tuple[str, ...], part: str, out: Path | None) -> None:
    for peer in ("crepes", "mapie"):
        if not find_spec(peer):
            print(f"{peer} is not installed: left out")
    if out is None and bags >= BAGS and trees == FOREST.n_estimators and not only and not part:
        out = OUT
    results: dict[tuple[str, int], dict[str, list[Found]]] = {}
    every = tables()
    with Parallel(jobs) as parallel:
        # Small bags of all tables first. Enough rows are left to predict.
        cells = [(name, n) for n in SIZES for name, (_, y) in every.items() if n + 0.3 * M <= len(y)]
        for name, n in (cell for cell in cells if not only or cell[0] in only):
            start = time.perf_counter()
            found = parallel(delayed(measure)(draw(*every[name], n, seed), trees, part) for seed in range(bags))
            names = list(dict.fromkeys(method for bag in found for method in bag))
            results[name, n] = {method: [bag[method] for bag in found if method in bag] for method in names}
            print(f"{name}, n = {n}: {time.perf_counter() - start:.0f} s", flush=True)
            if out is not None:
                out.write_text(page(results, bags, trees), encoding="utf-8")
    print(page(results, bags, trees))


if __name__ == "__main__":
    main()
