"""ACP against exact full CP for logistic regression: distances of scores and p-values, errors, ranks, the cone of theorem 2.

The points of a smaller bag are the first of the largest, and the test points are the same for all.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from fullconformal import FullConformalClassifier, metrics
from fullconformal.data import make_synthetic
from fullconformal.sets import prediction_sets
from paper.config import Synthetic
from paper.logistic import Fit, exact_scores, fit, influence_scores


def cases(config: Synthetic) -> list[dict[str, Any]]:
    """The lines of an experiment: every size, number of features, λ and seed."""
    return [
        {"n": n, "features": d, "l2": l2, "seed": seed}
        for n in config.n
        for d in config.features
        for l2 in config.l2
        for seed in config.seeds
    ]


def bag_of(config: Synthetic, n: int, features: int, seed: int) -> tuple[np.ndarray, ...]:
    """Training and test points of one line."""
    made = make_synthetic(max(config.n), features, config.n_test, random_state=seed)
    return made.X[:n], made.y[:n], made.X_test, made.y_test


def compare_scores(config: Synthetic, n: int, features: int, l2: float, seed: int) -> dict[str, Any]:
    """Mean distance of scores, direct and indirect, from the exact ones; how often direct is no worse; how often the cone holds.

    I(z_i, z_i) = −s_i is negative, so the printed lower end is ℓ + I(z_i, ẑ) + g·s_i, above the printed upper end; the two change places.
    """
    X, y, X_test, _ = bag_of(config, n, features, seed)
    m = max(1, min(config.n_test, config.pairs // (2 * n)))
    bag, objects = fit(with_intercept(X), y, n * l2), with_intercept(X_test[:m])
    found = [influence_scores(bag, objects, label) for label in (0, 1)]
    ordinary, direct, indirect = (
        np.stack([part[name] for part in found], 1) for name in ("ordinary", "direct", "indirect")
    )
    exact = np.stack([[exact_scores(bag, x, label) for label in (0, 1)] for x in objects])
    near, far = np.abs(direct - exact), np.abs(indirect - exact)
    g = cone_factor(bag, l2)
    upper = ordinary + g * (direct - ordinary)
    slack = 1e-9 * (1 + np.abs(exact))
    return {
        "m": m,
        "direct": spread(near.mean((1, 2))),
        "indirect": spread(far.mean((1, 2))),
        "direct_no_worse": float((near <= far + slack).mean()),
        "cone_lower": float((direct <= exact + slack).mean()),
        "cone_upper": float((exact <= upper + slack).mean()),
        "cone_as_printed": float(((upper <= exact + slack) & (exact <= direct + slack)).mean()),
        "g": g,
        "shift": {"direct": float((direct - exact).mean()), "indirect": float((indirect - exact).mean())},
    }


def with_intercept(X: np.ndarray) -> np.ndarray:
    """Objects (k, d) with a last column of ones."""
    return np.column_stack([X, np.ones(len(X))])


def cone_factor(bag: Fit, l2: float) -> float:
    """g(λ) = 1 + 3σ/2λ + σ²/2λ², σ the largest eigenvalue of the mean Hessian without its penalty."""
    mean = (bag.hessian() - np.diag(bag.penalty)) / len(bag.y)
    sigma = float(np.linalg.eigvalsh(mean)[-1])
    return 1 + 3 * sigma / (2 * l2) + sigma**2 / (2 * l2**2)


def compare_p(config: Synthetic, n: int, features: int, l2: float, seed: int) -> dict[str, Any]:
    """Distance of p-values from the exact ones, Kendall's tau of their ranks, and the errors of both."""
    X, y, X_test, y_test = bag_of(config, n, features, seed)
    p, seconds = {}, {}
    for name, options in (("acp", {"method": "influence"}), ("exact", {"method": "exact"})):
        start = time.perf_counter()
        p[name] = FullConformalClassifier(l2=l2, **options).fit(X, y).predict_p(X_test)
        seconds[name] = time.perf_counter() - start
    distance = np.abs(p["acp"] - p["exact"])
    level = 1 - config.epsilon
    errors = {name: list(metrics.error_rate(prediction_sets(value, level), y_test)) for name, value in p.items()}
    return {
        "m": len(X_test),
        "distance": spread(distance.mean(1)),
        "largest": float(distance.max()),
        "tau": float(kendalltau(p["acp"].ravel(), p["exact"].ravel()).statistic),
        "errors": errors,
        "seconds": seconds,
    }


def spread(values: np.ndarray) -> list[float]:
    """Mean over test points and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")]


MEASURES = {"scores": compare_scores, "p_values": compare_p}
