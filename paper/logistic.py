"""Logistic regression with two classes, in NumPy: its scores by influence functions, and by refits without each point.

ℓ = log(1 + e^((1 − 2y)f))        f = zθ, z = (x, 1)        g = (π − y)z        𝓗 = Σ π(1 − π)zzᵀ + Λ, the intercept free
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

SETTLED = 1e-12  # relative steps below which a fit has converged
MOST_STEPS = 50


def losses(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    """ℓ of logits f and labels y, of one shape."""
    return np.logaddexp(0.0, np.where(y == 1, -f, f))


@dataclass(frozen=True)
class Fit:
    """The minimiser θ (d + 1,) for points Z (n, d + 1) with labels y (n,) and penalties Λ (d + 1,)."""

    Z: np.ndarray
    y: np.ndarray
    penalty: np.ndarray
    theta: np.ndarray

    @property
    def probability(self) -> np.ndarray:
        return expit(self.Z @ self.theta)

    def hessian(self) -> np.ndarray:
        """𝓗 (d + 1, d + 1)."""
        pi = self.probability
        return (self.Z.T * (pi * (1 - pi))) @ self.Z + np.diag(self.penalty)

    @cached_property
    def factor(self) -> tuple[np.ndarray, bool]:
        return cho_factor(self.hessian())

    def solve(self, rows: np.ndarray) -> np.ndarray:
        """𝓗⁻¹ of each row (k, d + 1)."""
        return cho_solve(self.factor, rows.T).T


def fit(Z: np.ndarray, y: np.ndarray, penalty: float) -> Fit:
    """Fit points (n, d + 1), whose last column is one: scikit-learn's minimiser, then Newton's steps until they vanish."""
    model = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=1000, solver="newton-cholesky").fit(Z[:, :-1], y)
    found = Fit(Z, y, np.append(np.full(Z.shape[1] - 1, penalty), 0.0), np.append(model.coef_[0], model.intercept_))
    for _ in range(MOST_STEPS):
        gradient = Z.T @ (found.probability - y) + found.penalty * found.theta
        step = found.solve(gradient[None])[0]
        found = Fit(Z, y, found.penalty, found.theta - step)
        if np.abs(step).max() <= SETTLED * (1 + np.abs(found.theta).max()):
            break
    return found


def influence_scores(bag: Fit, objects: np.ndarray, label: int) -> dict[str, np.ndarray]:
    """Scores (m, n) of the points for the candidates (z, label), z of objects (m, d + 1).

    "ordinary" and "direct" are equation 2 without and with the point's influence on itself, "indirect" is equation 1.
    """
    r, rest = bag.probability - bag.y, expit(objects @ bag.theta) - label
    own = (bag.Z * bag.solve(bag.Z)).sum(1)  # zᵀ𝓗⁻¹z
    shift = rest[:, None] * (bag.solve(objects) @ bag.Z.T)  # zᵀ𝓗⁻¹ĝ, (m, n)
    ordinary = losses(bag.Z @ bag.theta, bag.y) - r * shift
    indirect = losses(bag.Z @ bag.theta + r * own - shift, np.broadcast_to(bag.y, shift.shape))
    return {"ordinary": ordinary, "direct": ordinary + r**2 * own, "indirect": indirect}


def exact_scores(bag: Fit, x: np.ndarray, label: int, width: int = 2000) -> np.ndarray:
    """Exact deleted scores (n,) for the candidate (x, label): every point left out of the bag and the rest refitted, in batches.

    All refits start at the fit of the whole bag and step with its Hessian less the point's own part (Sherman–Morrison), until steps
    vanish. Where the Hessian changes too much for that, a point's refit is done alone.
    """
    Z, y, penalty = np.vstack([bag.Z, x]), np.append(bag.y, label), float(bag.penalty[0])
    whole = fit(Z, y, penalty)
    pi = whole.probability
    solved = whole.solve(Z)
    weight = pi * (1 - pi)
    less = weight / (1 - weight * (Z * solved).sum(1))
    scores = np.empty(len(bag.y))
    for start in range(0, len(scores), width):
        at = np.arange(start, min(start + width, len(scores)))
        theta, moving = np.tile(whole.theta, (len(at), 1)), np.ones(len(at), dtype=bool)
        for _ in range(MOST_STEPS):
            i, now = at[moving], theta[moving]
            residual = expit(now @ Z.T) - y
            residual[np.arange(len(i)), i] = 0.0
            step = whole.solve(residual @ Z + whole.penalty * now)
            step += (less[i] * (Z[i] * step).sum(1))[:, None] * solved[i]
            theta[moving] = now - step
            moving[moving] = np.abs(step).max(1) > SETTLED * (1 + np.abs(now).max(1))
            if not moving.any() or not np.isfinite(theta).all():
                break
        for k in np.flatnonzero(moving):
            keep = np.arange(len(Z)) != at[k]
            theta[k] = fit(Z[keep], y[keep], penalty).theta
        scores[at] = losses((Z[at] * theta).sum(1), y[at])
    return scores
