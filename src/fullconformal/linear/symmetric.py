"""The exactly valid scores: every point of Z ∪ {ẑ} by the same function of the fit on Z ∪ {ẑ}.

    α_i = ℓ(y_i, z_i + A^½ φ_q(A^½ S A^½) A^½ r)        q = 0 ordinary, ½ studentized, 1 deleted (approximate leave-one-out)

with A, S, r of the point at the augmented fit and its own Hessian. Permuting the bag permutes the scores, so P(p ≤ ε) ≤ ε however
good the approximation is. Scores are held as margins log(e^α − 1), which order points as α does and keep their digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.bag import (
    Change,
    Counted,
    FloatArray,
    LinearBag,
    at_points,
    comparison,
    count_all,
    gradient,
    logits,
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import deletion, score_error
from fullconformal.linear.newton import ROUGH, first_step, refit
from fullconformal.losses import relative
from fullconformal.runtime.tasks import Progress

BLOCK = 2**27  # bytes for the candidates that go through together; on the CPU more are slower, for want of cache


@dataclass(frozen=True)
class Scores:
    """Margins of the training points (n, B) and of the candidates (B,), and the error of each."""

    alpha: Tensor
    tau: Tensor
    alpha_error: Tensor
    tau_error: Tensor


@torch.no_grad()
def symmetric_scores(bag: LinearBag, change: Change, q: float) -> Scores:
    """Scores of all points of the columns' augmented bags."""
    return _scores(bag, change, refit(bag, change), q, torch.float64)


def _scores(bag: LinearBag, change: Change, fits: Fits, q: float, dtype: torch.dtype) -> Scores:
    """The same at given fits, with leverages of given precision."""
    z, z_added, y = logits(bag, fits.theta), at_points(change.x, fits.theta), bag.y[:, None]
    grain = rounding(bag, change, fits.theta)
    if q == 0:
        error = fits.error + grain
        return Scores(relative.margin(z, y), relative.margin(z_added, change.y), error.expand(z.shape[0], -1), error)
    pi, pi_added = relative.probabilities(z), relative.probabilities(z_added)
    S = relative.second(pi)
    C = curvature(bag, change, fits.theta, S, dtype)
    error = certify(bag, change, fits.theta, fits.gradient, C)[2]
    out = deletion(C.A, S, relative.residual_(pi, y), q)
    out_added = deletion(C.A_added, relative.second(pi_added), relative.residual(pi_added, change.y), q)
    return Scores(
        relative.margin(z.add_(out.shift), y),
        relative.margin(z_added + out_added.shift, change.y),
        score_error(C.spread, out, error, C.rounding) + grain,
        score_error(C.spread_added, out_added, error, C.rounding) + grain,
    )


def symmetric_counts(
    bag: LinearBag,
    X_test: Tensor,
    q: float,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
) -> tuple[FloatArray, FloatArray]:
    """Counts for the C candidates of every test point X_test (m, d); weight (n, C) as in `pvalues.count`.

    Rough scores settle most candidates; those with a point they cannot tell from the candidate are scored to full accuracy.
    Scores closer than what both may be off are tied then, so that p-values can only err upwards.
    """

    @torch.no_grad()
    def counted(change: Change) -> Counted:
        fits = refit(bag, change, tolerance=ROUGH)
        above, tied = _counts(_scores(bag, change, fits, q, bag.precision), change, weight)
        near = tied.nonzero().squeeze(1)
        if len(near):
            change = change[near]
            fits = refit(bag, change, fits.theta[:, :, near])
            above[near], tied[near] = _counts(_scores(bag, change, fits, q, torch.float64), change, weight)
        return above, tied

    memory = memory_budget if X_test.is_cuda else min(memory_budget, BLOCK)
    return count_all(bag, X_test, counted, memory, progress)


def _counts(s: Scores, change: Change, weight: Tensor | FloatArray | None) -> Counted:
    """Weight of the training points above and tied with each candidate, (B,) each."""
    return pvalues.count(s.alpha, s.tau, (s.alpha_error, s.tau_error), comparison(weight, change))


@torch.no_grad()
def symmetric_bounds(
    bag: LinearBag,
    X_test: Tensor,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
    one_step: bool = True,
) -> tuple[FloatArray, FloatArray]:
    """Weight (m, C) of the training points whose ordinary score surely, and possibly, is at least the candidate's.

    By the exact augmented fit, which one Newton step (or convergence) and its error enclose; where the bound says nothing (κμ ≥ 1) every
    training point is between them.
    """

    def counted(change: Change) -> Counted:
        theta = first_step(bag, change) if one_step else refit(bag, change).theta
        z = logits(bag, theta)
        pi = relative.probabilities(z)
        G, C = (
            gradient(bag, change, theta, relative.residual(pi, bag.y[:, None])),
            curvature(bag, change, theta, relative.second(pi)),
        )
        _, kappa, error = certify(bag, change, theta, G, C)
        reach, grain = error / kappa, rounding(bag, change, theta)
        alpha, tau = relative.margin(z, bag.y[:, None]), relative.margin(at_points(change.x, theta), change.y)
        slack, own_slack = (part.sqrt() * reach + grain for part in (C.spread, C.spread_added))
        return pvalues.count(alpha, tau, (slack, own_slack), comparison(weight, change))

    surely, between = count_all(bag, X_test, counted, memory_budget, progress)
    return surely, surely + between
