"""Intervals by exact full conformal regression: time beside refits, beside its floor, and width on diabetes.

    python benchmarks/regression.py            a minute or two on a quiet core

Times are processor seconds, the least of several runs, of one thread (set OMP_NUM_THREADS=1): ratios of two things measured in one process.
Refits are scikit-learn's, one for each of 100 values of y and each object, timed once and multiplied; online-cp stands beside where it is
installed. "All p(y)" are the step functions of the objects, for which all training points are needed and sorted; their floor is the product
of the objects and all training points. Memory is what Python and NumPy held at most while predicting, beside the budget that was given.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import tracemalloc
import warnings

import numpy as np
from measure import seconds, show
from sklearn.datasets import load_diabetes
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso, Ridge
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsRegressor

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
    """An object's interval and p(y), against the product of its row and all training rows."""
    X, y, new = points(n, d, m)
    fit = cpu(lambda: FullConformalRegressor(Ridge(1.0)).fit(X, y), 1)
    reg = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    ours, floor = cpu(lambda: reg.predict_interval(new)) / m, cpu(lambda: new @ X.T) / m
    all_steps = cpu(lambda: reg.predict_p(new, np.zeros(m)), 2) / m
    return [f"Ridge, n = {n:,}, d = {d}", f"{fit:.3g} s", *(f"{1e3 * t:.3g} ms" for t in (ours, all_steps, floor))]


def within_memory(model: object, n: int, d: int, m: int, budget: float) -> list[str]:
    """What predictions of m objects take at most, beside the budget in GiB."""
    X, y, new = points(n, d, m)
    reg = FullConformalRegressor(model, memory_budget=budget).fit(X, y)
    tracemalloc.start()
    reg.predict_interval(new)
    peak = tracemalloc.get_traced_memory()[1] / 2**30
    tracemalloc.stop()
    return [f"{type(model).__name__}, n = {n:,}, d = {d}, {m:,} objects", f"{peak:.2g} GiB", f"{budget:g} GiB"]


def beside_online_cp(ours: object, theirs: object, n: int, d: int, m: int) -> list[str]:
    """How much longer online-cp takes; it predicts objects one by one."""
    X, y, new = points(n, d, m)
    reg = FullConformalRegressor(ours, scheme="deleted").fit(X, y)
    theirs.learn_initial_training_set(X, y)  # type: ignore[attr-defined]
    few = max(1, m // 50)
    their_time = cpu(lambda: [theirs.predict(x, epsilon=0.1) for x in new[:few]], 3) / few  # type: ignore[attr-defined]
    our_time = cpu(lambda: reg.predict_interval(new), 3) / m
    name = f"{type(ours).__name__}, n = {n:,}, d = {d}, {m:,} objects"
    return [name, f"{1e3 * our_time:.3g} ms", f"{1e3 * their_time:.3g} ms", f"{their_time / our_time:,.0f}"]


def online_cp_rows(shrink: int) -> list[list[str]]:
    """Ridge, k-NN and lasso beside online-cp, where it is installed."""
    if importlib.util.find_spec("online_cp") is None:
        return []
    import online_cp  # type: ignore[import-not-found]

    n, d, penalty = 500 // shrink, 100 // shrink, 0.1
    return [
        beside_online_cp(Ridge(1.0), online_cp.ConformalRidgeRegressor(a=1.0), 1000 // shrink, 20, 1000 // shrink),
        beside_online_cp(
            KNeighborsRegressor(5),
            online_cp.ConformalNearestNeighboursRegressor(k=5),
            1000 // shrink,
            20,
            1000 // shrink,
        ),
        beside_online_cp(Lasso(penalty), online_cp.ConformalLassoRegressor(lam=(n + 1) * penalty), n, d, 50),
    ]


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
    show("Large tables", rows, ["model", "fit", "interval of an object", "all p(y) of it", "floor of that"])
    if rows := online_cp_rows(shrink):
        show("Beside online-cp, milliseconds for an object's interval", rows, ["model", "ours", "online-cp", "ratio"])
    rows = [
        within_memory(Ridge(1.0), 100_000 // shrink, 50, 1000 // shrink, 0.5),
        within_memory(KernelRidge(alpha=1.0, kernel="rbf", gamma=0.02), 5000 // shrink, 20, 1000 // shrink, 1.0),
    ]
    show("Memory", rows, ["model", "at most", "memory_budget"])
    rows = diabetes(100 // shrink)
    show(
        "Diabetes, 342 to learn from and 100 to predict, level 0.90", rows, ["method", "coverage", "sd", "width", "sd"]
    )


if __name__ == "__main__":
    main()
