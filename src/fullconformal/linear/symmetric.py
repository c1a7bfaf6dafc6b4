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
from fullconformal.linear.added import Added, conjugate, count_objects, fit_added, refine
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
    gradient,
    logits,
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import deletion, score_error
from fullconformal.linear.newton import ROUGH, first_step, refit
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
    S = relative.second(z)
    C = curvature(bag, change, fits.theta, S, dtype)
    error = certify(bag, change, fits.theta, fits.gradient, C)[2]
    out = deletion(C.A, S, relative.residual(z, y), q)
    out_added = deletion(C.A_added, relative.second(z_added), relative.residual(z_added, change.y), q)
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
        # Of two classes accurate fits cost little more than coarse ones, which decide fewer: a quarter less time without them.
        for accuracy in (ACCURATE,) if bag.K == 1 and enough is None else (COARSE, ACCURATE):
            if not len(columns):
                break
            part = change[columns]
            against = comparison(weight, part)
            against = None if against is None else against.T

            def left(order: Tensor, part: Change = part, against: Tensor | None = against) -> Tensor:
                """Which candidates (B,) are still to be decided."""
                unsure = (order == 0).any(1)
                if enough is None:
                    return unsure
                surely, between = pvalues.count(order, 0, 0, against, axis=1)
                return unsure & ~enough(part.y, surely, surely + between)

            order, fits = bounded_order(bag, change, columns, q, accuracy, left, start)
            found, unsure = pvalues.count(order, 0, 0, against, axis=1), left(order)
            above[columns], tied[columns] = (each.to(x.dtype) for each in found)
            columns = columns[unsure]
            theta = start = fits[:, :, unsure]
        for at in chunks(bag, torch.arange(len(columns), device=x.device), memory):
            counts = scored(change[columns[at]], theta[:, :, at])
            above[columns[at]], tied[columns[at]] = (each.to(x.dtype) for each in counts)
        return above, tied

    return count_objects(bag, as_objects(X_test, factors), decided, weight, memory, progress)


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
    """Order (B, n) of the training points' scores against those of candidates of objects, 0 where it is open; fits (d, K, B).

    The columns (B,) are some of the m·C changes, label fastest; logits of a fit may be off by the accuracy. For 0 < q < 1 all is open.

    A point left out of the bag moves its logits by A'r, r its residual and A' its leverage without it. That of the fit on Z, A°, is off
    by a factor that `moved` bounds, so their range moves by at most spread(A')(1 − π_y); and its loss does not decrease. Points which that
    leaves open have A°r, and where that is not enough A'r from a solve, as the candidates have. ``left(order)`` says which candidates (B,)
    are still to be decided.
    """
    dtype = torch.float64 if accuracy <= ACCURATE else bag.reference.rough
    at, fits, change = bag.reference, fit_added(bag, change, columns, accuracy, theta, dtype), change[columns]
    grain = rounding(bag, change, fits.theta, dtype) + FLOOR + 2 * bag.n_classes * torch.finfo(dtype).eps
    if q < 1:
        error = fits.error + grain if q == 0 else torch.full_like(grain, torch.inf)
        tau, error = relative.margin(fits.z_added, change.y)[:, None], 2 * error[:, None]
        return torch.as_tensor(pvalues.order(relative.margin(fits.z, bag.y), tau, error)), fits.theta
    tau, tau_error = _own_scores(bag, change, fits, grain, accuracy)
    own = fits.pi.gather(1, bag.y.expand(len(columns), 1, -1))[:, 0]
    other = (fits.pi * (1 - bag.reference.own)).sum(1)
    high = at.left_out_spread / fits.moved.least
    off = at.spread.sqrt() * fits.reach[:, None]
    rounded = 4 * at.rounding * (1 + at.odds)
    slack = off + (tau_error + grain)[:, None]
    error = (turned(off, other) + rounded * other).mul_(high).add_(slack)
    # Of probabilities near the least numbers of a precision no more is known than that they are.
    tiny = torch.finfo(dtype).tiny ** 0.8
    above = ((other * (other > tiny)) / own.clamp(min=tiny)).log_() - slack > tau[:, None]
    below = (other.clamp(min=tiny) / (own * (own > tiny))).log_() + high * other + error < tau[:, None]
    order = above.to(torch.int8) - below.to(torch.int8)
    closest = _left_out(bag, fits, tau, error, ((order == 0) & left(order)[:, None]).nonzero(), order)
    # Where nothing is known of a point, or of a fit, a solve would not help; nor for candidates of which a rough fit leaves a point open.
    unknown = (order == 0) & left(order)[:, None]
    if accuracy > ACCURATE:
        unknown &= ~(unknown & (error > closest / 2)).any(1, keepdim=True)
    unknown &= torch.isfinite(error)
    # About three products each; many more than those take as long as a candidate's Hessian.
    n, p = len(bag.X), bag.base.inverse.shape[0]
    few = max(64, n * p * p // (3 * (4 * n * p + 2 * p * p)))
    pairs = (unknown & (unknown.sum(1, keepdim=True) <= few)).nonzero()
    for precision in dict.fromkeys((bag.reference.rough, dtype)):
        for part in pairs.split(max(1, BLOCK // 32 // (8 * n * bag.K))):
            _solve(bag, change, fits, tau, error, part, order, precision)
        pairs = pairs[order[tuple(pairs.T)] == 0]
    return order, fits.theta


def turned(R: Tensor, other: Tensor) -> Tensor:
    """How far probabilities can be off in all where logits are off by ranges ≤ R and those of the other classes sum to 1 − π_y."""
    return torch.minimum((R / 4).clamp(max=1.0), torch.expm1(R.clamp(max=50.0)) * other)


def _own_scores(bag: LinearBag, change: Change, fits: Added, grain: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """Scores (B,) of the candidates, whose leverage without them is that of the points alone, and their errors."""
    r = relative.residual(fits.z_added, change.y)
    whole, root = fits.moved.whole, fits.spread.sqrt()
    low, high = 1 / fits.moved.top, 1 / whole
    size = (r * torch.einsum("klb,lb->kb", fits.E, r)).sum(0).clamp(min=0.0).sqrt()
    shift, norms, near = torch.zeros_like(r), torch.zeros_like(size), min(accuracy * 10, 0.03)

    x = change.x.T[:, None]

    def small(columns: Tensor, w: Tensor, s: Tensor, norm: Tensor) -> Tensor:
        shift[:, columns] = _ahead(x[columns], w, s, (low + high)[columns] / 2)
        norms[columns] = (high - low)[columns] / 2 * norm
        return norms[columns] <= near * size[columns]

    conjugate(bag, change, fits.pi[:, 1:], None, x * r.T[:, :, None], small)
    other = relative.margin(fits.z_added, change.y).sigmoid()
    off = root * fits.reach
    error = root * norms + off + grain + fits.spread * high * (turned(off, other) + torch.expm1(fits.error) * other)
    return relative.margin(fits.z_added + shift, change.y), error


def _left_out(bag: LinearBag, fits: Added, tau: Tensor, error: Tensor, pairs: Tensor, order: Tensor) -> Tensor:
    """Decide the order (B, n) of pairs (b, 2) of a column and a point by A°r, errors (B, n) beside it; how far scores are from τ (B, n)."""
    at, apart = bag.reference, torch.full_like(error, torch.inf)
    # Some 2²⁰ numbers of A° at a time.
    for column, point in (part.T for part in pairs.split(max(1, 2**20 // bag.K**2))):
        low, high = (1 / factor[column, point] for factor in (fits.moved.most, fits.moved.least))
        y, z, r = _at_pairs(bag, fits, column, point)
        s = torch.bmm(at.left_out[point], r.T[:, :, None])[:, :, 0].T
        length = (r * s).sum(0).clamp(min=0.0).sqrt()
        alpha = relative.margin(z + (low + high) / 2 * s, y)
        off = (high - low) / 2 * at.left_out_spread[point].sqrt() * length + error[column, point]
        order[column, point] = pvalues.order(alpha, tau[column], off.nan_to_num(torch.inf, torch.inf)).to(order.dtype)
        apart[column, point] = (alpha - tau[column]).abs()
    return apart


def _at_pairs(bag: LinearBag, fits: Added, column: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels (b,), logits and residuals (K, b) of pairs of a column and a point."""
    y, z = bag.y[point], fits.z[column, :, point].T.double()
    return y, z, relative.residual(z, y)


def _solve(
    bag: LinearBag,
    change: Change,
    fits: Added,
    tau: Tensor,
    error: Tensor,
    pairs: Tensor,
    order: Tensor,
    dtype: torch.dtype,
) -> None:
    """Decide the order (B, n) of pairs (b, 2) of a column and a point, by a solve of some precision for each, errors (B, n) beside it.

    The Hessian without the point is that of the fit on Z times factors from 1/(1 + odds) of the least to the most.
    """
    at, (column, point) = bag.reference, pairs.T
    own, x = replace(change[column], removed=point), bag.X[point][:, None]
    y, z, r = _at_pairs(bag, fits, column, point)
    most, least = (factor[column, point] for factor in (fits.moved.most, fits.moved.least))
    low, high = 1 / most, (1 + at.odds[point]) / least
    # The Hessian of a solve is that at logits off by the error.
    other = relative.margin(z, y).sigmoid()
    fixed = error[column, point] + torch.expm1(fits.error[column]) * at.left_out_spread[point] / least * other
    reach = (high - low) / 2 * at.spread[point].sqrt()

    def stop(pairs: Tensor, w: Tensor, s: Tensor, norm: Tensor) -> Tensor:
        shifted, off = z[:, pairs] + _ahead(x[pairs], w, s, (low + high)[pairs] / 2), reach[pairs] * norm
        found = pvalues.order(relative.margin(shifted, y[pairs]), tau[column[pairs]], off + fixed[pairs])
        order[column[pairs], point[pairs]] = found.to(order.dtype)
        # Where the other errors decide, more products would not.
        decided: Tensor = found != 0
        return decided | (off < 1e-2 * fixed[pairs])

    pi = fits.rough.index_select(0, column) if dtype == torch.float32 else fits.pi[column, 1:]
    conjugate(bag, own, pi, fits.theta[:, :, column], x * r.T[:, :, None], stop)


def _ahead(x: Tensor, w: Tensor, s: Tensor, share: Tensor) -> Tensor:
    """Logits (K, B) of points x (B, 1, d) of solutions w (B, K, d) and shares (B,) of the steps s that lie ahead."""
    return torch.addcmul(w, share[:, None, None], s).mul_(x).sum(2).T


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
        G, C = (
            gradient(bag, change, theta, relative.residual(z, bag.y[:, None])),
            curvature(bag, change, theta, relative.second(z)),
        )
        _, kappa, error = certify(bag, change, theta, G, C)
        reach, grain = error / kappa, rounding(bag, change, theta)
        alpha, tau = relative.margin(z, bag.y[:, None]), relative.margin(at_points(change.x, theta), change.y)
        slack, own_slack = (part.sqrt() * reach + grain for part in (C.spread, C.spread_added))
        return pvalues.count(alpha, tau, (slack, own_slack), comparison(weight, change))

    surely, between = count_all(bag, as_objects(X_test, factors), counted, memory_budget, progress)
    return surely, surely + between
