"""Intervals by exact full conformal regression: time beside refits, beside its floor, and width on diabetes.

    python benchmarks/regression.py            a minute or two on a quiet core

Times are processor seconds, the least of several runs, of one thread (set OMP_NUM_THREADS=1): ratios of two things measured in one process.
Refits are scikit-learn's, one for each of 100 values of y and each object, timed once and multiplied; online-cp stands beside where it is
installed. The floor is the matrix product that every object needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings

import numpy as np
from measure import console, seconds, show
from sklearn.datasets import load_diabetes
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso, Ridge
from sklearn.model_selection import train_test_split

from fullconformal import FullConformalRegressor

GRID = 100


def points(n: int, d: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Objects and values of a linear model, and objects to predict."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n + m, d))
    y = X @ (rng.normal(size=d) * (rng.uniform(size=d) < 0.3)) + rng.normal(size=n + m)
    return X[:n], y[:n], X[n:]


def cpu(work: object, repeats: int = 5) -> float:
    return seconds(work, repeats, time.process_time)  # type: ignore[arg-type]


def beside_refits(model: object, n: int, d: int, m: int) -> list[str]:
    """Intervals of m objects, against refits on a grid."""
    X, y, new = points(n, d, m)
    reg = FullConformalRegressor(model).fit(X, y)
    fit = cpu(lambda: FullConformalRegressor(model).fit(X, y), 1 if n > 2000 else 3)
    ours = cpu(lambda: reg.predict_interval(new), 3)
    refit = cpu(lambda: type(model)(**model.get_params()).fit(X, y).predict(X), 3)  # type: ignore[attr-defined]
    refits = refit * GRID * m
    return [
        f"{type(model).__name__}, n = {n:,}, d = {d}, {m:,} objects", f"{fit:.3g} s", f"{1e3 * ours / m:.3g} ms",
        f"{refits:.3g} s", f"{refits / (fit + ours):,.0f}",
    ]  # fmt: skip


def beside_floor(n: int, d: int, m: int) -> list[str]:
    """An object's interval, against the product of its row and all training rows."""
    X, y, new = points(n, d, m)
    fit = cpu(lambda: FullConformalRegressor(Ridge(1.0)).fit(X, y), 1)
    reg = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    ours, floor = cpu(lambda: reg.predict_interval(new)) / m, cpu(lambda: new @ X.T) / m
    return [
        f"Ridge, n = {n:,}, d = {d}",
        f"{fit:.3g} s",
        f"{1e3 * ours:.3g} ms",
        f"{1e3 * floor:.3g} ms",
        f"{ours / floor:.1f}",
    ]


def beside_online_cp(n: int, d: int, m: int) -> str:
    """How many times slower online-cp's ridge regression is; it predicts objects one by one, an interval of two one-sided ends."""
    if importlib.util.find_spec("online_cp") is None:
        return "online-cp is not installed"
    from online_cp import ConformalRidgeRegressor  # type: ignore[import-not-found]

    X, y, new = points(n, d, m)
    reg = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    theirs = ConformalRidgeRegressor(a=1.0)
    theirs.learn_initial_training_set(X, y)
    few = max(1, m // 50)
    their_time = cpu(lambda: [theirs.predict(x, epsilon=0.1) for x in new[:few]], 3) * m / few
    return f"online-cp, the same problem: {their_time / cpu(lambda: reg.predict_interval(new), 3):,.0f} times slower"


def diabetes(splits: int = 100) -> list[list[str]]:
    """Coverage and width over random splits of 342/100, y standardised by the training points; split CP beside it."""
    X, y = load_diabetes(return_X_y=True)
    found = {"exact ridge": np.empty((splits, 2)), "split CP, ridge": np.empty((splits, 2))}
    for seed in range(splits):
        A, B, a, b = train_test_split(X, y, train_size=342, test_size=100, random_state=seed)
        a, b = (a - y.mean()) / y.std(), (b - y.mean()) / y.std()
        low, high = FullConformalRegressor(Ridge(0.1)).fit(A, a).predict_interval(B).T
        found["exact ridge"][seed] = ((low <= b) & (b <= high)).mean(), (high - low).mean()
        half = Ridge(0.1).fit(A[:171], a[:171])
        s = np.sort(np.abs(a[171:] - half.predict(A[171:])))[int(np.ceil(0.9 * 172)) - 1]
        found["split CP, ridge"][seed] = (np.abs(b - half.predict(B)) <= s).mean(), 2 * s
    rows = []
    for name, numbers in found.items():
        mean, sd = numbers.mean(axis=0), numbers.std(axis=0)
        rows.append([name, f"{mean[0]:.4f}", f"{sd[0]:.3f}", f"{mean[1]:.3f}", f"{sd[1]:.3f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: a few seconds")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    shrink = 10 if quick else 1
    heads = ["model", "fit", "an object", f"refits on {GRID} values", "refits / ours"]
    rows = [
        beside_refits(Ridge(1.0), 1000 // shrink, 20, 1000 // shrink),
        beside_refits(KernelRidge(alpha=1.0, kernel="rbf", gamma=0.02), 5000 // shrink, 20, 100 // shrink),
        beside_refits(Lasso(alpha=0.1), 500 // shrink, 100 // shrink, 20 // shrink),
    ]
    show("Exact full CP beside refits", rows, heads)
    rows = [beside_floor(100_000 // shrink, 50, 100 // shrink)]
    show("Large tables", rows, ["model", "fit", "an object", "floor", "ours / floor"])
    console.print(beside_online_cp(1000 // shrink, 20, 1000 // shrink), highlight=False)
    rows = diabetes(100 // shrink)
    show(
        "Diabetes, 342 to learn from and 100 to predict, level 0.90", rows, ["method", "coverage", "sd", "width", "sd"]
    )


if __name__ == "__main__":
    main()
