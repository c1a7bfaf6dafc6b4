"""Regressions on tables with more columns than points, or with columns that no point uses: coordinates of the span against the columns.

    python benchmarks/wide.py               about a minute on two cores, most of it for the columns

Both sides give the same p-values, which the last column says. Times are of a fit and the objects' p-values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from measure import console, seconds, show

from fullconformal import FullConformalClassifier, JackknifePlusClassifier, SplitConformalClassifier
from fullconformal.estimators import options
from fullconformal.linear import span
from fullconformal.methods import convex


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


CASES: dict[str, tuple[Any, tuple[Any, Any, Any]]] = {
    "influence, 100 × 4,000, 3 classes": (FullConformalClassifier(method="influence"), normal(100, 4000, 3, 100)),
    "symmetric, 100 × 1,000, 2 classes": (FullConformalClassifier(), normal(100, 1000, 2, 20)),
    "split, 100 × 4,000, 3 classes": (SplitConformalClassifier(random_state=0), normal(100, 4000, 3, 100)),
    "jackknife+, 100 × 1,000, 2 classes": (JackknifePlusClassifier(random_state=0), normal(100, 1000, 2, 100)),
    "influence, 1,000 × 1,024 bits, 3 classes": (FullConformalClassifier(method="influence"), bits(1000, 1024, 3, 200)),
    "symmetric, 1,000 × 1,024 bits, 2 classes": (FullConformalClassifier(), bits(1000, 1024, 2, 20)),
}


def p_values(clf: Any, data: tuple[Any, Any, Any]) -> Callable[[], Any]:
    X, y, objects = data
    return lambda: clf.set_params(l2=0.01).fit(X, y).predict_epsilon(objects)


def main() -> None:
    rows = []
    for name, (clf, data) in CASES.items():
        work = p_values(clf, data)
        mine, short = work(), seconds(work, 3)
        nothing: Any = {"span_of": lambda X, penalty=None: None}
        with (
            patch.multiple(options, **nothing),
            patch.multiple(convex, **nothing),
            patch.multiple(span, **nothing),
        ):
            found: list[Any] = []
            long = seconds(lambda work=work, found=found: found.append(work()))
        idle = int((~data[0].any(0)).sum())
        same = "yes" if np.array_equal(mine, found[0]) else "NO"
        rows.append((name, f"{idle:,}", f"{short:.3f} s", f"{long:.2f} s", f"{long / short:,.0f}×", same))
    heads = ("", "idle columns", "span", "columns", "ratio", "same p-values")
    show("Fit and p-values of wide tables, l2 = 0.01", rows, heads)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    console.width = 140
    main()
