"""The exactly valid scores: every point of Z ∪ {ẑ} by the same function of the fit on Z ∪ {ẑ}.

    α_i = ℓ(y_i, z_i + A^½ φ_q(A^½ S A^½) A^½ r)        q = 0 ordinary, ½ studentized, 1 deleted (approximate leave-one-out)

with A, S, r of the point at the augmented fit and its own Hessian. Permuting the bag permutes the scores, so P(p ≤ ε) ≤ ε however
good the approximation is. Scores are held as margins log(e^α − 1), which order points as α does and keep their digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, conjugate, fit_added, leave_out
from fullconformal.linear.bag import (
    Change,
    Counted,
    FloatArray,
    LinearBag,
    as_objects,
    at_points,
    chunks,
    comparison,
    count_all,
    count_objects,
    gradient,
    logits,
    residuals,
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import deletion, score_error
from fullconformal.linear.newton import ROUGH, first_step, refit
from fullconformal.losses import relative
from fullconformal.runtime.tasks import Progress

# Logits are granted this error beside the bounds, so that what the full accuracy calls a tie is one here.
FLOOR = 1e-9
# The error of a logit, by its bound, with which most comparisons are decided; and that with which most p-values are compared with a level.
ACCURATE, COARSE = ROUGH, 0.1
BLOCK = 2**27  # bytes for the candidates that go through together; on the CPU more are slower, for want of cache


Enough = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    enough: Enough | None = None,
    factors: Tensor | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Counts for the C candidates of every test point X_test (m, d); weight (n, C) as in `pvalues.count`.

    Rough scores settle most candidates; those with a point they cannot tell from the candidate are scored to full accuracy.
    Scores closer than what both may be off are tied then, so that p-values can only err upwards. ``enough(labels, surely, possibly)``
    may say of candidates with some labels (B,) that the weight surely and possibly counted (B,) need not be told apart; ``factors`` (m, d)
    are those of the penalties in the bags of each test point.
    """
    memory = memory_budget if X_test.is_cuda else min(memory_budget, BLOCK)

    @torch.no_grad()
    def scored(change: Change, theta: Tensor) -> Counted:
        slopes = gradient(bag, change, theta, residuals(bag, theta))
        # The bags' own Hessians tell the errors.
        fits = Fits(theta, torch.full_like(theta[0, 0], torch.inf), slopes)
        above, tied = _counts(_scores(bag, change, fits, q, bag.precision), change, weight)
        near = tied.nonzero().squeeze(1)
        if len(near):
            change = change[near]
            fits = refit(bag, change, theta[:, :, near])
            above[near], tied[near] = _counts(_scores(bag, change, fits, q, torch.float64), change, weight)
        return above, tied

    def decided(change: Change) -> Counted:
        x = change.x
        above, tied = x.new_zeros(2, len(change.y))
        columns, theta = torch.arange(len(change.y), device=x.device), x
        for accuracy in (ACCURATE,) if enough is None else (COARSE, ACCURATE):
            if not len(columns):
                break
            part = change[columns]

            def left(order: Tensor, columns: Tensor = columns, part: Change = part) -> Tensor:
                """Count, and say which candidates (B,) are still to be decided."""
                found = pvalues.count(order, 0, 0, comparison(weight, part))
                above[columns], tied[columns] = (each.to(x.dtype) for each in found)
                unsure = (order == 0).any(0)
                return unsure if enough is None else unsure & ~enough(part.y, found[0], found[0] + found[1])

            order, theta = bounded_order(bag, change, columns, q, accuracy, left)
            unsure = left(order)
            columns, theta = columns[unsure], theta[:, :, unsure]
        for at in chunks(bag, torch.arange(len(columns), device=x.device), memory):
            found = scored(change[columns[at]], theta[:, :, at])
            above[columns[at]], tied[columns[at]] = (each.to(x.dtype) for each in found)
        return above, tied

    return count_objects(bag, as_objects(X_test, factors), decided, memory, progress)


@torch.no_grad()
def bounded_order(
    bag: LinearBag, change: Change, columns: Tensor, q: float, accuracy: float, left: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Order (n, B) of the training points' scores against those of candidates of objects, 0 where it is open; fits (d, K, B).

    The columns (B,) are some of the m·C changes, label fastest; logits of a fit may be off by the accuracy. For 0 < q < 1 all is open.

    A point left out of the bag moves its logits by A'r, r its residual and A' its leverage without it. That of the fit on Z, A°, is off
    by a factor that `moved` bounds. Points it leaves open, and the candidates, have A'r from a solve. ``left(order)`` says for which
    candidates (B,) points are still to be solved for.
    """
    at, fits, change = bag.reference, fit_added(bag, change, columns, accuracy), change[columns]
    y, grain = bag.y[:, None], rounding(bag, change, fits.theta) + FLOOR
    if q < 1:
        error = fits.error + grain if q == 0 else torch.full_like(grain, torch.inf)
        margins = relative.margin(fits.z, y), relative.margin(fits.z_added, change.y)
        return torch.as_tensor(pvalues.order(*margins, 2 * error)), fits.theta
    pi = relative.probabilities(fits.z)
    grown = 1.5 * torch.expm1(fits.error)
    # The candidate: its leverage without it is that of the points alone.
    pi_added = relative.probabilities(fits.z_added)
    r_added = relative.residual(pi_added, change.y)
    whole = fits.moved.whole
    spread = fits.spread / whole
    right = (change.x[:, None, :] * r_added).flatten(0, 1)
    size = (r_added * torch.einsum("klb,lb->kb", fits.E, r_added)).sum(0).clamp(min=0.0).sqrt()
    norms, near = torch.zeros_like(size), min(accuracy * 100, 0.03)

    def small(columns: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        norms[columns] = norm
        return norm <= near * size[columns]

    w = conjugate(bag, change, pi, None, right, small).view_as(fits.theta)
    tau = relative.margin(fits.z_added + at_points(change.x, w), change.y)
    tau_error = fits.spread.sqrt() * (fits.reach + norms / whole) + grain + spread * grown
    # The points.
    r = relative.residual(pi, y)
    step = leave_out(at, fits, r)
    alpha = relative.margin(fits.z + step.shift, y)
    known = at.spread.sqrt()[:, None] * fits.reach + grain + step.spread * grown
    error = step.error + known
    order: Tensor = pvalues.order(alpha, tau, (error + tau_error).nan_to_num(torch.inf, torch.inf))
    # Where nothing is known of a point, or of a fit, a solve would not help.
    unknown = (order == 0) & left(order) & torch.isfinite(known + tau_error)
    # About ten products each; many more than those take as long as a candidate's Hessian.
    n, p = len(bag.X), bag.base.inverse.shape[0]
    few = max(64, n * p * p // (10 * (4 * n * p + 2 * p * p)))
    pairs = (unknown & (unknown.sum(0) <= few)).T.nonzero()
    for part in pairs.split(max(1, BLOCK // 32 // (8 * r[..., 0].numel()))):
        _solve(bag, change, fits, pi, r, tau, known + tau_error, part, order)
    return order, fits.theta


def _solve(
    bag: LinearBag,
    change: Change,
    fits: Added,
    pi: Tensor,
    r: Tensor,
    tau: Tensor,
    error: Tensor,
    pairs: Tensor,
    order: Tensor,
) -> None:
    """Decide the order (n, B) of pairs (b, 2) of a column and a point, by a solve for each, but for which their error is known."""
    at, (column, point) = bag.reference, pairs.T
    own = replace(change[column], removed=point)
    x_own, y_own, z_own = bag.X[point].T, bag.y[point], fits.z[point, :, column].T
    tau, fixed = tau[column], error[point, column]
    reach = (at.left_out_spread * (1 + at.odds))[point].sqrt() / fits.moved.least[point, column]

    def stop(pairs: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        shifted = z_own[:, pairs] + at_points(x_own[:, pairs], w.view(*bag.base.theta.shape, -1))
        off = reach[pairs] * norm
        found = pvalues.order(relative.margin(shifted, y_own[pairs]), tau[pairs], off + fixed[pairs])
        order[point[pairs], column[pairs]] = found
        # Where the other errors decide, more products would not.
        decided: Tensor = found != 0
        return decided | (off < 1e-2 * fixed[pairs])

    right = (x_own[:, None, :] * r[point, :, column].T).flatten(0, 1)
    conjugate(bag, own, pi[:, :, column], fits.theta[:, :, column], right, stop)


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
    factors: Tensor | None = None,
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

    surely, between = count_all(bag, as_objects(X_test, factors), counted, memory_budget, progress)
    return surely, surely + between
