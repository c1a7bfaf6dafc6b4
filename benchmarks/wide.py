"""Regressions on tables with more columns than points, or with columns that no point uses: the library's span against columns.

    python benchmarks/wide.py               about a minute on two cores, most of it for the columns

The library computes in coordinates of the span of the training points by itself. Beside it stands what the same takes in columns, by
scikit-learn's regression: for influence and split CP all of it, for symmetric and jackknife+ no more than the refits that they stand for.
The last column compares with p-values of coordinates made by hand. Times are of a fit and the objects' p-values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import console, seconds, show
from sklearn.linear_model import LogisticRegression

from fullconformal import FullConformalClassifier, JackknifePlusClassifier, SplitConformalClassifier

L2 = 0.01
Data = tuple[Any, Any, Any]  # training objects, labels, objects


def normal(n: int, d: int, n_classes: int, m: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    X, W = rng.normal(size=(n + m, d)), rng.normal(size=(d, n_classes)) / d**0.5
    y = (3 * X @ W + rng.gumbel(size=(n + m, n_classes))).argmax(1)
    return X[:n], y[:n], X[n:]


def bits(n: int, d: int, n_classes: int, m: int) -> tuple[Any, Any, Any]:
    """Bits of which some are in every third object and some in one of a hundred thousand, as of molecules' substructures."""
    rng = np.random.default_rng(0)
    X, W = (rng.random((n + m, d)) < 10 ** rng.uniform(-5, -0.5, d)).astype(float), rng.normal(size=(d, n_classes))
    y = (X @ W + rng.gumbel(size=(n + m, n_classes))).argmax(1)
    return X[:n], y[:n], X[n:]


def ours(clf: Any) -> Callable[[Data], Any]:
    def work(data: Data) -> Any:
        X, y, objects = data
        return clf.set_params(l2=L2).fit(X, y).predict_epsilon(objects)

    return work


def regression(n: int) -> LogisticRegression:
    """The same objective on n points."""
    return LogisticRegression(C=1 / (n * L2), tol=1e-8, max_iter=10_000)


def influence_in_columns(data: Data) -> Any:
    """A model that is trained already is taken as it is, in its columns."""
    X, y, objects = data
    clf = FullConformalClassifier(regression(len(y)).fit(X, y), method="influence", prefit=True)
    return clf.fit(X, y).predict_epsilon(objects)


def split_in_columns(data: Data) -> Any:
    X, y, objects = data
    return SplitConformalClassifier(regression(len(y) * 4 // 5), random_state=0).fit(X, y).predict_epsilon(objects)


def candidate_refits(data: Data) -> None:
    """One for each object and label, the labelled object among the points."""
    X, y, objects = data
    for x in objects:
        for label in np.unique(y):
            regression(len(y) + 1).fit(np.vstack([X, x]), np.append(y, label))


def leave_one_out_refits(data: Data) -> None:
    X, y, _ = data
    for i in range(len(y)):
        regression(len(y) - 1).fit(np.delete(X, i, 0), np.delete(y, i))


def by_hand(data: Data) -> Data:
    """The same objects in coordinates: an orthonormal basis of the points, or the columns they use, and the length of what is left."""
    X, y, objects = data
    basis = np.linalg.qr(X.T)[0] if X.shape[1] > 2 * len(X) else np.eye(X.shape[1])[:, X.any(0)]
    inside = objects @ basis
    beyond = np.linalg.norm(objects - inside @ basis.T, axis=1)
    return np.column_stack([X @ basis, np.zeros(len(X))]), y, np.column_stack([inside, beyond])


influence, symmetric = (
    ours(FullConformalClassifier(method="influence")),
    ours(FullConformalClassifier(method="symmetric")),
)
split, jackknife = ours(SplitConformalClassifier(random_state=0)), ours(JackknifePlusClassifier(random_state=0))
CASES: dict[str, tuple[Callable[[Data], Any], Callable[[Data], Any], Data]] = {
    "influence, 100 × 4,000, 3 classes": (influence, influence_in_columns, normal(100, 4000, 3, 100)),
    "symmetric, 100 × 1,000, 2 classes": (symmetric, candidate_refits, normal(100, 1000, 2, 20)),
    "split, 100 × 4,000, 3 classes": (split, split_in_columns, normal(100, 4000, 3, 100)),
    "jackknife+, 100 × 1,000, 2 classes": (jackknife, leave_one_out_refits, normal(100, 1000, 2, 100)),
    "influence, 1,000 × 1,024 bits, 3 classes": (influence, influence_in_columns, bits(1000, 1024, 3, 200)),
    "symmetric, 1,000 × 1,024 bits, 2 classes": (symmetric, candidate_refits, bits(1000, 1024, 2, 20)),
}


def main() -> None:
    rows = []
    for name, (work, columns, data) in CASES.items():
        mine, short = work(data), seconds(lambda work=work, data=data: work(data), 3)
        long = seconds(lambda columns=columns, data=data: columns(data))
        idle = int((~data[0].any(0)).sum())
        same = "yes" if np.array_equal(mine, work(by_hand(data))) else "NO"
        rows.append((name, f"{idle:,}", f"{short:.3f} s", f"{long:.2f} s", f"{long / short:,.0f}×", same))
    heads = ("", "idle columns", "span", "columns", "ratio", "same p-values")
    show(f"Fit and p-values of wide tables, l2 = {L2}", rows, heads)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    console.width = 140
    main()
