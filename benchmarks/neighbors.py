"""Growth of the time with n of exact full CP for k-NN and kernel densities: updates beside brute force, in one process.

python benchmarks/neighbors.py        about ten seconds

Brute force scores every point of the bag of every candidate anew, vectorised: one matrix of distances a candidate, as a refit
would need. It is measured on a few candidates of the 60 and extrapolated; ours is measured whole, preparation included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from measure import seconds
from rich.console import Console
from rich.table import Table
from scipy.spatial.distance import cdist
from sklearn.neighbors import KNeighborsClassifier

from fullconformal import FullConformalClassifier
from fullconformal.models import KernelDensityClassifier

SIZES = (250, 500, 1000, 2000, 4000)
M, C, D, K, H = 20, 3, 10, 5, 1.0


def points(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of C classes around centres in D dimensions."""
    rng = np.random.default_rng(seed)
    y = rng.integers(C, size=n)
    return np.random.default_rng(99).normal(size=(C, D))[y] + rng.normal(size=(n, D)), y


def brute_knn(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """k-NN scores (n,) of all points of one bag."""
    distance = cdist(X, X)
    np.fill_diagonal(distance, np.inf)
    own = y[:, None] == y
    near, far = (
        np.partition(np.where(mask, distance, np.inf), K - 1, axis=1)[:, :K].mean(axis=1) for mask in (own, ~own)
    )
    return near / far


def brute_kde(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Kernel density scores (n,) of all points of one bag."""
    kernel = np.exp(-cdist(X, X, "sqeuclidean") / (2 * H**2)) * (y[:, None] == y)
    np.fill_diagonal(kernel, 0.0)
    return -kernel.sum(axis=1) / (np.bincount(y)[y] - 1)


def brute_counts(score: Callable[..., np.ndarray], X: np.ndarray, y: np.ndarray, x: np.ndarray, c: int) -> int:
    """Number of training points whose score is not below the candidate's."""
    alpha = score(np.vstack([X, x]), np.append(y, c))
    return int((alpha[:-1] >= alpha[-1] * (1 - math.copysign(1e-12, alpha[-1]))).sum())


def growth(name: str, clf: FullConformalClassifier, score: Callable[..., np.ndarray]) -> Table:
    """One row for each n: preparation, one candidate, all of it, brute force, and whether the counts agree."""
    table = Table(title=name, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for head in ("n", "prepare", "a candidate", "ours, all", "brute, a candidate", "brute, all", "ratio", "checked"):
        table.add_column(head, justify="right")
    X_test = points(M, seed=1)[0]
    times = []
    for n in SIZES:
        X, y = points(n, seed=0)
        prepare = seconds(lambda X=X, y=y: clf.fit(X, y), 3)
        predict = seconds(lambda: clf.predict_p(X_test), 3)
        # p = (1 + number of points that conform no better)/(n + 1)
        not_below = np.rint(clf.predict_p(X_test) * (n + 1) - 1).astype(int)
        size = min(M * C, 20_000 // n)
        sample = np.random.default_rng(0).permutation([(j, c) for j in range(M) for c in range(C)])[:size]
        start = time.perf_counter()
        same = [brute_counts(score, X, y, X_test[j], c) == not_below[j, c] for j, c in sample]
        brute = (time.perf_counter() - start) / len(sample)
        times.append((prepare, predict, brute))
        ours, theirs = prepare + predict, brute * M * C
        table.add_row(
            f"{n:,}",
            f"{1e3 * prepare:.1f} ms",
            f"{1e6 * predict / (M * C):.0f} µs",
            f"{1e3 * ours:.1f} ms",
            f"{1e3 * brute:.1f} ms",
            f"{theirs:.2f} s",
            f"{theirs / ours:,.0f}×",
            f"{sum(same)} of {len(same)}",
        )
    powers = np.polyfit(np.log(SIZES[-3:]), np.log(times[-3:]), 1)[0]
    growing = zip(("prepare (once)", "a candidate", "brute, a candidate"), powers, strict=True)
    table.caption = "from n = 1,000 on: " + ", ".join(f"{what} ~ n^{power:.1f}" for what, power in growing)
    return table


def main() -> None:
    console = Console(width=110)
    console.print(
        f"{M} test points, {C} labels, d = {D}; brute force on the candidates under 'checked', extrapolated\n"
    )
    nearest, density = KNeighborsClassifier(K), KernelDensityClassifier(H)
    console.print(growth(f"k-NN, k = {K}", FullConformalClassifier(nearest, method="exact"), brute_knn), "")
    console.print(growth(f"Kernel density, h = {H:g}", FullConformalClassifier(density, method="exact"), brute_kde))


if __name__ == "__main__":
    main()
