"""Forests and boosted trees on four tables: full CP (out-of-bag, folds) beside split, CV+ (ours, MAPIE's) and crepes' out-of-bag scores.

    python benchmarks/trees.py                     writes results/trees.md
    python benchmarks/trees.py --bags 3            a quick look, printed only

A bag of n rows is drawn at random, and up to 200 others are predicted. Standard errors are over bags, seconds are medians of fit and
prediction on one core. ACSIncome is taken where FULLCONFORMAL_DATA names a folder that has it. What is not installed, and a method that
this version does not have, is left out with a line.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

from fullconformal import CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier
from fullconformal.data import load_acsincome

OUT = Path(__file__).parent / "results" / "trees.md"
SIZES = (100, 200, 500, 1000, 2000)
M, EPSILON, BAGS = 200, 0.1, 20
FOREST = RandomForestClassifier(100)
BOOSTING = HistGradientBoostingClassifier(max_iter=50)

Bag = tuple[np.ndarray, np.ndarray, np.ndarray, int]
# Sets (m, C) of the objects of a bag (X, y, objects, seed).
Predict = Callable[[Bag], np.ndarray]


def ours(clf: Any) -> Predict:
    """Sets by a classifier of this library."""

    def predict(bag: Bag) -> np.ndarray:
        X, y, objects, seed = bag
        return clone(clf).set_params(random_state=seed).fit(X, y).predict_set(objects, confidence_level=1 - EPSILON)

    return predict


def crepes_out_of_bag(forest: Any) -> Predict:
    """Out-of-bag scores of the training points, objects scored by all trees."""
    from crepes import WrapClassifier

    def predict(bag: Bag) -> np.ndarray:
        X, y, objects, seed = bag
        wrapped = WrapClassifier(clone(forest).set_params(random_state=seed, oob_score=True))
        wrapped.fit(X, y)
        wrapped.calibrate(X, y, oob=True, seed=seed)
        return wrapped.predict_p(objects, smoothing=False) > EPSILON

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


def has_folds() -> bool:
    """Whether this version has K-fold full CP."""
    rng = np.random.default_rng(0)
    try:
        FullConformalClassifier(RandomForestClassifier(2), method="folds").fit(
            rng.normal(size=(30, 2)), np.arange(30) % 2
        )
    except ValueError:
        return False
    return True


def methods() -> Iterator[tuple[str, Predict]]:
    """The methods that there are, by name."""
    yield "forest, full (oob)", ours(FullConformalClassifier(FOREST, method="oob"))
    if find_spec("crepes"):
        yield "forest, crepes out-of-bag", crepes_out_of_bag(FOREST)
    else:
        print("crepes is not installed: left out")
    yield "forest, split", ours(SplitConformalClassifier(FOREST))
    yield "forest, split, half", ours(SplitConformalClassifier(FOREST, calibration_size=0.5))
    yield "forest, CV+", ours(CVPlusClassifier(FOREST))
    if find_spec("mapie"):
        yield "forest, MAPIE's CV+", mapie_cv_plus(FOREST)
    else:
        print("MAPIE is not installed: left out")
    if has_folds():
        yield "boosting, full (folds)", ours(FullConformalClassifier(BOOSTING, method="folds"))
        yield "boosting, split", ours(SplitConformalClassifier(BOOSTING))
        yield "boosting, CV+", ours(CVPlusClassifier(BOOSTING))
    else:
        print("this version has no method='folds': boosting is left out")


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


def measure(predict: Predict, bag: Bag, truth: np.ndarray) -> tuple[float, float, float]:
    """Error rate, mean set size and seconds."""
    start = time.perf_counter()
    sets = predict(bag)
    seconds = time.perf_counter() - start
    return 1 - sets[np.arange(len(truth)), truth].mean(), sets.sum(1).mean(), seconds


def page(results: dict[tuple[str, int], dict[str, np.ndarray]], bags: int) -> str:
    """Results (bags, 3) by table, n and method, as Markdown."""
    lines = [
        "# Forests and boosted trees",
        "",
        f"Error rate where {EPSILON:g} is asked for and mean set size, each ± one standard error over {bags} bags, and the median seconds",
        f"to fit and to predict up to {M} objects on one core. Forests of {FOREST.n_estimators} trees.",
        "Made by `python benchmarks/trees.py`.",
    ]
    for (name, n), by_method in results.items():
        lines += ["", f"## {name}, n = {n:,}", "", "| method | error rate | set size | seconds |", "|---|---|---|---|"]
        for method, found in by_method.items():
            mean, se = found.mean(0), found.std(0, ddof=1) / np.sqrt(bags)
            error, size = (f"{mean[j]:.3f} ± {se[j]:.3f}" for j in (0, 1))
            lines.append(f"| {method} | {error} | {size} | {np.median(found[:, 2]):.2f} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--bags", default=BAGS, show_default=True)
@click.option("--trees", default=FOREST.n_estimators, show_default=True, help="Other numbers are printed only.")
def main(bags: int, trees: int) -> None:
    torch.set_num_threads(1)
    usual = FOREST.n_estimators
    FOREST.set_params(n_estimators=trees)
    results: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = dict(methods())
        for name, (X, y) in tables().items():
            # Enough rows are left to predict.
            for n in (size for size in SIZES if size + 0.3 * M <= len(y)):
                drawn = [draw(X, y, n, seed) for seed in range(bags)]
                results[name, n] = {
                    method: np.array([measure(predict, *bag) for bag in drawn]) for method, predict in every.items()
                }
                print(
                    f"{name}, n = {n}: {sum(found[:, 2].sum() for found in results[name, n].values()):.0f} s",
                    flush=True,
                )
    print(page(results, bags))
    if bags >= BAGS and trees == usual:
        OUT.write_text(page(results, bags), encoding="utf-8")


if __name__ == "__main__":
    main()
