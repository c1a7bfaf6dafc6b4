"""Exact full CP: the paper's five-day problem, a larger one, and what the approximations cost and miss beside it.

python benchmarks/exact.py            everything, about three minutes on two cores
python benchmarks/exact.py five-days  one part: five-days, large, symmetric, neighbors
"""

from __future__ import annotations

import sys
import warnings

import neighbors
import numpy as np
from measure import console, seconds, show
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression

from fullconformal import FullConformalClassifier


def problem(n: int, d: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    X, y = make_classification(n + m, d, n_informative=min(d // 2, 20), random_state=0)
    return X[:n], y[:n], X[n:]


def refit_seconds(X: np.ndarray, y: np.ndarray, penalty: float, sample: int) -> float:
    """Mean time of a scikit-learn refit on the bag less one point, gradient tolerance 1e-10, warm start where it helps."""
    model = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=1000, solver="newton-cholesky")
    model.fit(X, y)

    def work() -> None:
        for i in range(sample):
            keep = np.arange(len(y)) != i
            LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=1000, solver="newton-cholesky").fit(X[keep], y[keep])

    return seconds(work) / sample


def five_days() -> None:
    X, y, Xt = problem(1000, 50, 100)
    exact = FullConformalClassifier(method="exact", l2=1e-3).fit(X, y)
    mine = seconds(lambda: exact.predict_p(Xt))
    p = exact.predict_p(Xt)
    fits = 200 * 1001
    each = refit_seconds(X, y, 1.0, 200)
    rows = [
        (f"scikit-learn, {fits:,} refits, extrapolated from 200", f"{fits * each:,.0f} s", "1×", ""),
        ("exact (this library)", f"{mine:.1f} s", f"{fits * each / mine:,.0f}×  (bar: 60×)", ""),
    ]
    others: dict[str, dict[str, str]] = {
        "direct": {"method": "influence"},
        "indirect": {"method": "influence", "approximation": "indirect"},
        "newton": {"method": "influence", "approximation": "newton"},
        "symmetric": {"method": "symmetric"},
    }
    for name, options in others.items():
        clf = FullConformalClassifier(l2=1e-3, **options).fit(X, y)
        took = seconds(lambda clf=clf: clf.predict_p(Xt), 3)
        far = np.abs(clf.predict_p(Xt) - p)
        rows.append((name, f"{took:.3f} s", f"{fits * each / took:,.0f}×", f"{far.mean():.1e} / {far.max():.1e}"))
    show(
        "n = 1,000, d = 50, 100 test points, 2 labels, deleted (the paper: five days)",
        rows,
        ("", "time", "ratio", "p-value distance from exact, mean / largest"),
    )


def large() -> None:
    X, y, Xt = problem(10_000, 30, 10)
    exact = FullConformalClassifier(method="exact", l2=1e-3).fit(X, y)
    mine = seconds(lambda: exact.predict_p(Xt))
    p = exact.predict_p(Xt)
    acp = FullConformalClassifier(method="influence", l2=1e-3).fit(X, y).predict_p(Xt)
    each = refit_seconds(X, y, 10.0, 20)
    fits = 20 * 10_001
    show(
        "n = 10,000, d = 30, 10 test points, 2 labels, deleted",
        [
            (f"scikit-learn, {fits:,} refits, extrapolated from 20", f"{fits * each:,.0f} s", "1×"),
            ("exact", f"{mine:.1f} s", f"{fits * each / mine:,.0f}×"),
            (
                "distance of direct's p-values, mean / largest",
                f"{np.abs(acp - p).mean():.1e} / {np.abs(acp - p).max():.1e}",
                "",
            ),
        ],
        ("", "time", "ratio"),
    )


def symmetric() -> None:
    X, y, Xt = problem(1000, 50, 100)
    rows, first = [], 0.0
    for name in ("influence", "symmetric"):
        clf = FullConformalClassifier(method=name, l2=1e-3)
        clf.fit(X, y).predict_p(Xt)
        took = seconds(lambda clf=clf: clf.fit(X, y).predict_p(Xt), 7)
        first = first or took
        rows.append((name, f"{1e3 * took:.1f} ms", f"{took / first:.1f}×"))
    show(
        "Fit and 100 test points, n = 1,000, d = 50 (bar: symmetric at most 10× influence)", rows, ("", "time", "cost")
    )
    rows = []
    for n in (100, 300, 1000, 3000, 10_000):
        X, y, Xt = problem(n, 20, 50)
        clf = FullConformalClassifier(method="symmetric", scheme="ordinary", l2=1e-3).fit(X, y)
        low, high = clf.predict_p(Xt, bounds=True)
        p = clf.predict_p(Xt)
        rows.append(
            (f"{n:,}", f"{(high - low).mean():.2e}", f"{((low <= p + 1e-12) & (p <= high + 1e-12)).mean():.0%}")
        )
    show("Certificate from one step: mean width p_hi − p_lo, d = 20", rows, ("n", "width", "encloses"))
    inside, width = zip(*(certificate(seed) for seed in range(1000)), strict=True)
    console.print(
        f"1,000 random bags (n 20–200, d 1–10, 2 or 3 classes): the exact p-values of all labels lie inside in {sum(inside):,}"
    )
    console.print(f"of them; mean width {np.mean(width):.3f}\n")


def certificate(seed: int) -> tuple[bool, float]:
    """Whether the certificate encloses the exact ordinary p-values of one object of a random bag, and its mean width."""
    rng = np.random.default_rng(seed)
    n, d, n_classes = int(rng.integers(20, 201)), int(rng.integers(1, 11)), int(rng.integers(2, 4))
    X = rng.normal(size=(n + 1, d)) * rng.uniform(0.3, 2)
    y = np.r_[np.arange(n_classes), rng.integers(0, n_classes, n - n_classes)]
    X[:n, 0] += y * rng.uniform(0, 3)
    options = {"scheme": "ordinary", "l2": float(10 ** rng.uniform(-3, -0.5))}
    low, high = FullConformalClassifier(method="symmetric", **options).fit(X[:n], y).predict_p(X[n:], bounds=True)
    p = FullConformalClassifier(method="exact", **options).fit(X[:n], y).predict_p(X[n:])
    return bool(((low <= p + 1e-12) & (p <= high + 1e-12)).all()), float((high - low).mean())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parts = {"five-days": five_days, "large": large, "symmetric": symmetric, "neighbors": neighbors.main}
    for chosen in sys.argv[1:] or parts:
        parts[chosen]()
