"""ACP against exact full CP for logistic regression: distances of scores and p-values, errors, ranks, the cone of theorem 2.

The points of a smaller bag are the first of the largest, and the test points are the same for all.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau

from fullconformal import FullConformalClassifier, metrics
from fullconformal.curvature import GGN
from fullconformal.data import make_synthetic
from fullconformal.influence.direct import direct
from fullconformal.influence.indirect import indirect
from fullconformal.influence.prepared import prepare
from fullconformal.influence.scores import all_scores
from fullconformal.linear import Change, LinearBag, at_points, margin, refit
from fullconformal.models import linear
from fullconformal.problem import Problem
from fullconformal.sets import prediction_sets
from paper.config import Synthetic


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


def exact_scores(bag: LinearBag, x: torch.Tensor, label: int, width: int = 2000) -> np.ndarray:
    """Exact deleted scores (n,) for one candidate: every training point left out and the rest refitted, in batches."""
    one = Change(x[:, None], torch.tensor([label]))
    start = refit(bag, one).theta
    scores = []
    for removed in torch.arange(len(bag.y)).split(width):
        k = len(removed)
        fits = refit(bag, Change(one.x.expand(-1, k), one.y.expand(k), removed), start.expand(-1, -1, k).contiguous())
        alpha = margin(at_points(bag.X[removed].T, fits.theta), bag.y[removed])
        scores.append(torch.nn.functional.softplus(alpha))  # a margin is log(e^α − 1)
    return torch.cat(scores).numpy()


def compare_scores(config: Synthetic, n: int, features: int, l2: float, seed: int) -> dict[str, Any]:
    """Mean distance of scores, direct and indirect, from the exact ones; how often direct is no worse; how often the cone holds.

    I(z_i, z_i) = −s_i is negative, so the printed lower end is ℓ + I(z_i, ẑ) + g·s_i, above the printed upper end; the two change places.
    """
    X, y, X_test, _ = bag_of(config, n, features, seed)
    m = max(1, min(config.n_test, config.pairs // (2 * n)))
    clf = FullConformalClassifier(l2=l2, method="exact").fit(X, y)
    bag: LinearBag = clf._engine.bag
    x = torch.cat([torch.as_tensor(X_test[:m]), torch.ones(m, 1, dtype=torch.float64)], 1)
    problem = logistic_problem(bag, l2)
    training = prepare(problem, GGN().factor(problem), 2**30, True)
    objects = torch.as_tensor(X_test[:m])
    approximate = {q: all_scores(direct, training, objects, q)[0].numpy() for q in (0.0, 1.0)}
    other = all_scores(indirect, training, objects, 1.0)[0].numpy()
    exact = np.stack([[exact_scores(bag, x[k], label) for label in (0, 1)] for k in range(m)])
    near, far = np.abs(approximate[1.0] - exact), np.abs(other - exact)
    g = cone_factor(problem, l2)
    self_influence = approximate[1.0] - approximate[0.0]
    upper = approximate[0.0] + g * self_influence
    slack = 1e-9 * (1 + np.abs(exact))
    return {
        "m": m,
        "direct": spread(near.mean((1, 2))),
        "indirect": spread(far.mean((1, 2))),
        "direct_no_worse": float((near <= far + slack).mean()),
        "cone_lower": float((approximate[1.0] <= exact + slack).mean()),
        "cone_upper": float((exact <= upper + slack).mean()),
        "cone_as_printed": float(((upper <= exact + slack) & (exact <= approximate[1.0] + slack)).mean()),
        "g": g,
        "shift": {"direct": float((approximate[1.0] - exact).mean()), "indirect": float((other - exact).mean())},
    }


def logistic_problem(bag: LinearBag, l2: float) -> Problem:
    """The problem at the exact minimiser, weights penalised and the intercept free."""
    X = bag.X[:, :-1]
    module = linear(X.shape[1], 2).double()
    problem = Problem(module, X, bag.y, {"0.weight": len(X) * l2})
    problem.assign(bag.base.coefficients().reshape(-1))
    return problem


def cone_factor(problem: Problem, l2: float) -> float:
    """g(λ) = 1 + 3σ/2λ + σ²/2λ², σ the largest eigenvalue of the mean Hessian without its penalty."""
    pi = torch.softmax(problem.logits(problem.X), 1)[:, 1]
    Z = torch.cat([problem.X, torch.ones(len(problem.X), 1, dtype=torch.float64)], 1)
    sigma = float(torch.linalg.eigvalsh((Z.T * (pi * (1 - pi))) @ Z / len(Z))[-1])
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
