"""Full conformal prediction itself: every score from its own fit, for L2-penalised logistic regression.

    ordinary (q = 0)    α_i = ℓ(z_i; Θ_{Z∪ẑ})              α_{n+1} = ℓ(ẑ; Θ_{Z∪ẑ})
    deleted  (q = 1)    α_i = ℓ(z_i; Θ_{Z∪ẑ∖z_i})          α_{n+1} = ℓ(ẑ; Θ_Z)

A p-value needs only the order of α_i and α_{n+1}. For most points the Newton step that leaves z_i out of Z ∪ {ẑ}, with its bound,
decides it; only the rest are fitted, all together, each until its own order is decided or it has converged (then: a tie).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, fit_added, fit_repenalised, fit_without, second_product_, turn
from fullconformal.linear.bag import (
    Change,
    Counted,
    FloatArray,
    LinearBag,
    as_objects,
    at_points,
    comparison,
    logits,
)
from fullconformal.linear.bounded import BLOCK, COARSE, FLOOR
from fullconformal.linear.hessian import certify, curvature, rounding
from fullconformal.linear.leave_one_out import bounds, deletion, duals, score_error
from fullconformal.linear.newton import CONVERGED, ROUGH, refit
from fullconformal.linear.reference import Reference
from fullconformal.linear.symmetric import Enough, count_objects, symmetric_counts
from fullconformal.losses import relative
from fullconformal.runtime.tasks import Progress


def exact_counts(
    bag: LinearBag,
    X_test: Tensor,
    q: float,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
    enough: Enough | None = None,
    factors: Tensor | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Counts for the C candidates of every test point X_test (m, d), q 0 or 1; weight (n, C) as in `pvalues.count`.

    ``enough`` and ``factors`` as in `symmetric_counts`: the ordinary scores are the symmetric ones.
    """
    if q == 0:
        return symmetric_counts(bag, X_test, 0, weight, progress, memory_budget, enough, factors)

    def counted(change: Change) -> Counted:
        def counts(order: Tensor) -> Counted:
            above, tied = pvalues.count(order, 0, 0, comparison(weight, change))
            return above.to(bag.X.dtype), tied.to(bag.X.dtype)

        def left(order: Tensor) -> Tensor:
            """Whether candidates (B,) are still to be decided."""
            if enough is None:
                return torch.ones_like(change.y, dtype=torch.bool)
            above, tied = counts(order)
            return ~enough(change.y, above, above + tied)

        return counts(deleted_order(bag, change, left, memory_budget))

    return count_objects(bag, as_objects(X_test, factors), counted, weight, memory_budget, progress)


@torch.no_grad()
def deleted_order(bag: LinearBag, change: Change, left: Callable[[Tensor], Tensor], memory: int = 2**30) -> Tensor:
    """Order (n, B) of the training points' scores against those of the candidates of objects, label fastest; 0 where they are tied.

    ``left(order)`` says of which candidates (B,) it is still to be decided.
    """
    if bag.K == 1:
        return _binary_order(bag, change, memory)
    at, every = bag.reference, torch.arange(len(change.y), device=change.y.device)
    fits = fit_added(bag, change, every, COARSE, dtype=bag.reference.rough)
    theta, y, (tau, tau_error) = fits.theta, bag.y, _own_scores(bag, change)
    r = relative.residual(fits.z.double(), y)
    step = _leave_out(at, fits, r)
    # Leaving a point out of a bag multiplies squared norms of its inverse Hessian by the odds, that it moved by the least factor.
    grown = ((1 + at.odds) / fits.factors[:, None].least(at.rest)).sqrt()
    grain = rounding(bag, change, theta, bag.reference.rough)[:, None]
    known = grain * (1 + step.spread / 4) + FLOOR + at.spread.sqrt() * fits.reach[:, None]
    error = step.error + bounds(step.spread, step.length, grown * fits.kappa[:, None], grown * fits.mu[:, None]) + known
    slack = (error + tau_error[:, None]).nan_to_num(torch.inf, torch.inf)
    order: Tensor = pvalues.order(relative.margin(fits.z + step.shift, y), tau[:, None], slack)
    # Its loss is no less than with it.
    order[relative.margin(fits.z, y) - known > (tau + tau_error)[:, None]] = 1
    _count_last_points(bag, change, order.T)
    width = max(1, min(memory // 4, BLOCK // 32) // (8 * len(bag.X) * bag.K))
    for accuracy in (torch.inf, COARSE, ROUGH, 0.0):
        column, point = ((order == 0) & left(order.T)[:, None]).nonzero(as_tuple=True)
        for first in range(0, len(column), width):
            c, i = column[first : first + width], point[first : first + width]
            still = left(order.T)[c]
            c, i = c[still], i[still]
            if not len(c):
                continue
            own = replace(change[c], removed=i)
            pull = second_product_(at.pi[1:, i], step.shift[c, :, i].T)
            start = theta[:, :, c] + _steps(bag, i, r[c, :, i] + pull.T)
            if accuracy:
                dtype = torch.float64 if accuracy <= ROUGH else bag.reference.rough
                start, error = fit_without(bag, own, start, fits.kappa[c], accuracy, dtype)
                order[c, i] = _against(bag, own, start, tau[c], tau_error[c] + error + FLOOR).nan_to_num(0)
            else:
                order[c, i] = _refitted_order(bag, own, start, tau[c], tau_error[c])
    return order.T


@dataclass(frozen=True)
class LeftOut:
    """Steps A'r (B, K, n) of the logits of the training points that leave each out of the bag it is in, and their errors (B, n), in range.

    ``length`` (B, n) is a bound on (rᵀA'r)^½, ``spread`` (B, n) one on the spread of A'.
    """

    shift: Tensor
    error: Tensor
    length: Tensor
    spread: Tensor


def _leave_out(at: Reference, fits: Added, r: Tensor) -> LeftOut:
    """The steps of residuals r (B, K, n) at the fits, A' enclosed by A° and the factors by which the Hessian moved."""
    far = fits.factors[:, None]
    low, high = 1 / far.most(at.rest), 1 / far.least(at.rest)
    s, spread = torch.bmm(at.left_out, r.permute(2, 1, 0)).permute(2, 1, 0), at.left_out_spread
    length = (r * s).sum(1).clamp(min=0.0).sqrt()
    rounded = 4 * at.rounding * (1 + at.odds)
    error = (high - low) / 2 * spread.sqrt() * length + rounded * high * spread
    return LeftOut(s * ((low + high) / 2)[:, None], error, high.sqrt() * length, high * spread)


def _own_scores(bag: LinearBag, change: Change) -> tuple[Tensor, Tensor]:
    """Scores (B,) of the candidates of objects at the fits without them, which all labels share, and their errors."""
    objects = change[:: bag.n_classes]
    theta, error = (part.repeat_interleave(bag.n_classes, -1) for part in fit_repenalised(bag, objects, CONVERGED))
    return relative.margin(at_points(change.x, theta), change.y), error + rounding(bag, change, theta)


def _steps(bag: LinearBag, point: Tensor, dual: Tensor) -> Tensor:
    """H⁻¹Jᵀu (d, K, b) of training points with duals u (b, K), by the Hessian of the fit on Z."""
    return turn(bag.base.solve(dual[:, :, None] * bag.X[point][:, None], bag.reference.rough))


def _count_last_points(bag: LinearBag, change: Change, order: Tensor) -> None:
    """Put the last point of a class above in an order (n, B): without it a free intercept runs away, and with it the point's loss."""
    if bag.free_intercept:
        last = torch.bincount(bag.y, minlength=bag.n_classes)[bag.y] == 1
        order[last[:, None] & (bag.y[:, None] != change.y)] = 1


@torch.no_grad()
def _binary_order(bag: LinearBag, change: Change, memory: int) -> Tensor:
    """The same of two classes, whose Hessians cost little: by those of the bags with the candidates, which leave less to be fitted."""
    fits = refit(bag, change, tolerance=ROUGH)
    theta, y, (tau, tau_error) = fits.theta, bag.y[:, None], _own_scores(bag, change)
    z = logits(bag, theta)
    S, r = relative.second(z), relative.residual(z, y)
    C = curvature(bag, change, theta, S)
    mu, kappa, _ = certify(bag, change, theta, fits.gradient, C)
    out = deletion(C.A, S, r, 1)
    root, length = out.remaining.sqrt(), (r * out.shift).sum(1).clamp(min=0.0).sqrt()
    error = (
        bounds(C.spread / out.remaining, length, kappa / root, mu / root)
        + score_error(C.spread, out, torch.zeros_like(mu), C.rounding)
        + rounding(bag, change, theta)
    )
    order: Tensor = pvalues.order(relative.margin(z + out.shift, y), tau, error + tau_error)
    _count_last_points(bag, change, order)
    column, point = (order.T == 0).nonzero(as_tuple=True)
    dual = duals(S, r, out.shift)
    width = max(1, min(memory // 4, 2**24) // (8 * len(bag.X) * bag.K))
    for at in range(0, len(column), width):
        c, i = column[at : at + width], point[at : at + width]
        start = theta[:, :, c] + _own_steps(bag, C.inverse, c, i, dual[i, :, c])
        order[i, c] = _refitted_order(bag, replace(change[c], removed=i), start, tau[c], tau_error[c])
    return order


def _own_steps(bag: LinearBag, inverse: Tensor, column: Tensor, point: Tensor, dual: Tensor) -> Tensor:
    """H̄⁻¹Jᵀu (d, K, b) of training points with duals u (b, K), each by the Hessian of its column; columns ascend."""
    right = (bag.X[point][:, :, None] * dual[:, None, :]).flatten(1)
    present, sizes = column.unique_consecutive(return_counts=True)
    parts = [part @ inverse[c] for c, part in zip(present, right.split(sizes.tolist()), strict=True)]
    return torch.cat(parts).T.reshape(*bag.base.theta.shape, -1)


def _against(bag: LinearBag, change: Change, theta: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """Order (b,) of the removed points' scores at fits Θ (d, K, b) against τ (b,), by errors (b,) of both."""
    alpha = relative.margin(at_points(bag.X[change.removed].T, theta), bag.y[change.removed])
    return torch.as_tensor(pvalues.order(alpha, tau, error + rounding(bag, change, theta)))


def _refitted_order(bag: LinearBag, change: Change, start: Tensor, tau: Tensor, tau_error: Tensor) -> Tensor:
    """Order (b,) of the removed points' scores against τ by fits until it is decided or they converged."""

    def decided(columns: Tensor, theta: Tensor, error: Tensor) -> Tensor:
        return _against(bag, change[columns], theta, tau[columns], tau_error[columns] + error) != 0

    fits = refit(bag, change, start, stop=decided)
    return _against(bag, change, fits.theta, tau, tau_error + fits.error)
