"""The exactly valid scores: every point of Z ∪ {ẑ} by the same function of the fit on Z ∪ {ẑ}.

    α_i = ℓ(y_i, z_i + A^½ φ_q(A^½ S A^½) A^½ r)        q = 0 ordinary, ½ studentized, 1 deleted (approximate leave-one-out)

with A, S, r of the point at the augmented fit and its own Hessian. Permuting the bag permutes the scores, so P(p ≤ ε) ≤ ε however
good the approximation is. Scores are held as margins log(e^α − 1), which order points as α does and keep their digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, conjugate, fit_added, refine
from fullconformal.linear.bag import (
    EPS,
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
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import deletion, score_error
from fullconformal.linear.newton import ROUGH, first_step, refit
from fullconformal.linear.reference import Reference
from fullconformal.losses import relative
from fullconformal.runtime.tasks import Progress

# Logits are granted this error beside the bounds, so that what the full accuracy calls a tie is one here.
FLOOR = 1e-9
# Errors of a logit, by their bound: with the latter most candidates are decided, with the former most of the rest.
ACCURATE, COARSE = ROUGH, 1e-2
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
        above, tied = change.x.new_zeros(2, len(change.y))
        near = torch.arange(len(change.y), device=change.y.device)
        # The bags' own Hessians tell the errors; those of ordinary scores come with the last fits.
        for fitted, precision in (
            (partial(refine, tolerance=torch.inf), torch.float32),
            (refine, torch.float64),
            (refit, torch.float64),
        ):
            if not len(near) or precision != bag.precision == torch.float64 or (q == 0 and fitted is not refit):
                continue
            part = change[near]
            found = _counts(_scores(bag, part, fitted(bag, part, theta[:, :, near]), q, precision), part, weight)
            above[near], tied[near] = (each.to(above.dtype) for each in found)
            near = tied.nonzero().squeeze(1)
        return above, tied

    def decided(change: Change) -> Counted:
        x = change.x
        above, tied = x.new_zeros(2, len(change.y))
        columns, theta, start = torch.arange(len(change.y), device=x.device), x, None
        for accuracy in (COARSE, ACCURATE):
            if not len(columns):
                break
            part = change[columns]

            def left(order: Tensor, part: Change = part) -> Tensor:
                """Which candidates (B,) are still to be decided."""
                unsure = _per_column(order == 0) > 0
                if enough is None:
                    return unsure
                surely, between = pvalues.count(order, 0, 0, comparison(weight, part))
                return unsure & ~enough(part.y, surely, surely + between)

            order, fits = bounded_order(bag, change, columns, q, accuracy, left, start)
            found, unsure = pvalues.count(order, 0, 0, comparison(weight, part)), left(order)
            above[columns], tied[columns] = (each.to(x.dtype) for each in found)
            columns = columns[unsure]
            theta = start = fits[:, :, unsure]
        for at in chunks(bag, torch.arange(len(columns), device=x.device), memory):
            counts = scored(change[columns[at]], theta[:, :, at])
            above[columns[at]], tied[columns[at]] = (each.to(x.dtype) for each in counts)
        return above, tied

    return count_objects(bag, as_objects(X_test, factors), decided, memory, progress)


@torch.no_grad()
def bounded_order(
    bag: LinearBag,
    change: Change,
    columns: Tensor,
    q: float,
    accuracy: float,
    left: Callable[[Tensor], Tensor],
    theta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Order (n, B) of the training points' scores against those of candidates of objects, 0 where it is open; fits (d, K, B).

    The columns (B,) are some of the m·C changes, label fastest; logits of a fit may be off by the accuracy. For 0 < q < 1 all is open.

    A point left out of the bag moves its logits by A'r, r its residual and A' its leverage without it. That of the fit on Z, A°, is off
    by a factor that `moved` bounds, so their range moves by at most spread(A')(1 − π_y). Points which that leaves open have A°r, and where
    that is not enough A'r from a solve, as the candidates have. ``left(order)`` says which candidates (B,) are still to be decided.
    """
    at, fits, change = bag.reference, fit_added(bag, change, columns, accuracy, theta), change[columns]
    y, grain = bag.y[:, None], rounding(bag, change, fits.theta) + FLOOR
    if q < 1:
        error = fits.error + grain if q == 0 else torch.full_like(grain, torch.inf)
        margins = relative.margin(fits.z, y), relative.margin(fits.z_added, change.y)
        return torch.as_tensor(pvalues.order(*margins, 2 * error)), fits.theta
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

    w = conjugate(bag, change, fits.pi[:, 1:], None, right, small).view_as(fits.theta)
    tau = relative.margin(fits.z_added + at_points(change.x, w), change.y)
    tau_error = fits.spread.sqrt() * (fits.reach + norms / whole) + grain + spread * grown
    # The points, by their probabilities: 1 − π_y is off by units of the C of them.
    own = fits.pi.gather(1, y[:, :, None].expand(-1, -1, fits.pi.shape[2]))[:, 0]
    other, unit = fits.pi.sum(1).sub_(own), 2 * EPS * bag.n_classes
    high = at.left_out_spread[:, None] / fits.moved.least
    known = at.spread.sqrt()[:, None] * fits.reach + grain + high * (grown + _rounded(at)[:, None])
    error = (other + unit).mul_(high).add_(known)
    above = (other - unit).clamp_(min=0.0).div_(own).log_() - error > tau + tau_error
    below = other.add_(unit).div_(own).log_() + error < tau - tau_error
    order = above.to(torch.int8) - below.to(torch.int8)
    closest = _left_out(bag, fits, tau, known + tau_error, ((order == 0) & left(order)).nonzero(), order)
    # Where nothing is known of a point, or of a fit, a solve would not help; nor for candidates of which a rough fit leaves a point open.
    unknown = (order == 0) & left(order)
    if accuracy > ACCURATE:
        unknown &= _per_column(unknown & (known + tau_error > closest / 2)) == 0
    unknown &= torch.isfinite(known + tau_error)
    # About ten products each; many more than those take as long as a candidate's Hessian.
    n, p = len(bag.X), bag.base.inverse.shape[0]
    few = max(64, n * p * p // (10 * (4 * n * p + 2 * p * p)))
    pairs = (unknown & (_per_column(unknown) <= few)).nonzero()
    for part in pairs.split(max(1, BLOCK // 32 // (8 * n * bag.K))):
        _solve(bag, change, fits, tau, known + tau_error, part, order)
    return order, fits.theta


def _per_column(mask: Tensor) -> Tensor:
    """How many entries (B,) of a mask (n, B) are set; a matrix product takes a tenth of the time of a sum."""
    return (mask.new_ones(1, len(mask), dtype=torch.float32) @ mask.float())[0]


def _rounded(at: Reference) -> Tensor:
    """Errors (n,) of A° by rounding, as shares of its spread."""
    return 4 * at.rounding * (1 + at.odds)


def _left_out(bag: LinearBag, fits: Added, tau: Tensor, error: Tensor, pairs: Tensor, order: Tensor) -> Tensor:
    """Decide the order (n, B) of pairs (b, 2) of a point and a column by A°r, errors (n, B) beside it; how far scores are from τ (n, B)."""
    at, apart = bag.reference, torch.full_like(error, torch.inf)
    # Some 2²⁰ numbers of A° at a time.
    for point, column in (part.T for part in pairs.split(max(1, 2**20 // bag.K**2))):
        low, high = (1 / factor[point, column] for factor in (fits.moved.most, fits.moved.least))
        y, z = bag.y[point], fits.z[point, :, column].T
        r = relative.residual_(fits.pi[point, 1:, column].T.contiguous(), y)
        s = torch.bmm(at.left_out[point], r.T[:, :, None])[:, :, 0].T
        length = (r * s).sum(0).clamp(min=0.0).sqrt()
        alpha = relative.margin(z + (low + high) / 2 * s, y)
        off = (high - low) / 2 * at.left_out_spread[point].sqrt() * length + error[point, column]
        order[point, column] = pvalues.order(alpha, tau[column], off.nan_to_num(torch.inf, torch.inf)).to(order.dtype)
        apart[point, column] = (alpha - tau[column]).abs()
    return apart


def _solve(
    bag: LinearBag,
    change: Change,
    fits: Added,
    tau: Tensor,
    error: Tensor,
    pairs: Tensor,
    order: Tensor,
) -> None:
    """Decide the order (n, B) of pairs (b, 2) of a point and a column, by a solve for each, but for which their error is known."""
    at, (point, column) = bag.reference, pairs.T
    own = replace(change[column], removed=point)
    x_own, y_own, z_own = bag.X[point].T, bag.y[point], fits.z[point, :, column].T
    tau, fixed = tau[column], error[point, column]
    reach = (at.left_out_spread * (1 + at.odds))[point].sqrt() / fits.moved.least[point, column]

    def stop(pairs: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        shifted = z_own[:, pairs] + at_points(x_own[:, pairs], w.view(*bag.base.theta.shape, -1))
        off = reach[pairs] * norm
        found = pvalues.order(relative.margin(shifted, y_own[pairs]), tau[pairs], off + fixed[pairs])
        order[point[pairs], column[pairs]] = found.to(order.dtype)
        # Where the other errors decide, more products would not.
        decided: Tensor = found != 0
        return decided | (off < 1e-2 * fixed[pairs])

    r = relative.residual_(fits.pi[point, 1:, column].T.contiguous(), y_own)
    right = (x_own[:, None, :] * r).flatten(0, 1)
    conjugate(bag, own, fits.pi[:, 1:, column], fits.theta[:, :, column], right, stop)


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
