"""An audit of intervals: p-values of random pairs (x, y) by honest refits, beside what the method said of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone

from fullconformal import pvalues
from fullconformal.methods.audit import Audit
from fullconformal.methods.base import FloatArray
from fullconformal.methods.regression import Comparison, FittedRegression
from fullconformal.runtime.tasks import Progress


def refitted_scores(model: Any, X: FloatArray, y: FloatArray, q: float, points: Any) -> tuple[FloatArray, float, int]:
    """Scores of some points of the bag X (n, d), y (n,), and of its last one, by refits; and how many were needed.

    |r|^(1 − q)·|r₋|^q, for the residual r of the fit to the bag and r₋ of the fit without the point: as r₋ = r/(1 − leverage) where
    residuals are linear in y, this is |r|/(1 − leverage)^q.
    """
    asked, refits = [*points, len(y) - 1], 0
    with_it, without = np.ones((2, len(asked)))
    if q < 1:
        with_it, refits = np.abs(y - clone(model).fit(X, y).predict(X))[asked], 1
    if q > 0:
        for k, i in enumerate(asked):
            rest = np.arange(len(y)) != i
            without[k] = abs(y[i] - clone(model).fit(X[rest], y[rest]).predict(X[[i]])[0])
        refits += len(asked)
    scores = with_it ** (1 - q) * without**q
    return scores[:-1], float(scores[-1]), refits


def audit_regression(
    model: Any, fitted: FittedRegression, X: FloatArray, n_pairs: int, max_refits: int, q: float, confidence_level: float,
    rng: Any, progress: Progress | None,
) -> Audit:  # fmt: skip
    """Of pairs of an object of X (m, d) and the value of a training point, moved to the object's prediction by a residual."""
    bag, n = fitted.bag, fitted.n
    rows = rng.randint(len(X), size=n_pairs)
    drawn = fitted.predict(X[rows]) + rng.choice(bag.y - fitted.predict(bag.X), n_pairs) * rng.choice(
        [0.5, 1.0, 2.0], n_pairs
    )
    n_points = n if q == 0 else min(n, max(1, max_refits // n_pairs))
    p_method = np.concatenate(
        [
            steps.p(drawn[k : k + 1, None])[:, 0]
            for k in range(n_pairs)
            for steps in fitted.steps(X[rows[k : k + 1]], Comparison(q))
        ]
    )
    p_exact, total = np.empty(n_pairs), 0
    for k, (row, value) in enumerate(zip(rows, drawn, strict=True)):
        points = rng.choice(n, n_points, replace=False)
        alpha, tau, refits = refitted_scores(model, np.vstack([bag.X, X[[row]]]), np.append(bag.y, value), q, points)
        # Iterative solvers stop at a tolerance of their own.
        greater, equal = pvalues.count(alpha, tau, 1e-9 * (1 + abs(tau)))
        p_exact[k] = pvalues.p_values(greater * n / n_points, equal * n / n_points, n)
        total += refits
        if progress is not None:
            progress(k + 1, n_pairs)
    return Audit(n_pairs, n_points, n, total, p_method, p_exact, np.empty(0), confidence_level)
