"""Full conformal prediction itself: every score from its own fit, for L2-penalised logistic regression.

    ordinary (q = 0)    α_i = ℓ(z_i; Θ_{Z∪ẑ})              α_{n+1} = ℓ(ẑ; Θ_{Z∪ẑ})
    deleted  (q = 1)    α_i = ℓ(z_i; Θ_{Z∪ẑ∖z_i})          α_{n+1} = ℓ(ẑ; Θ_Z)

A p-value needs only the order of α_i and α_{n+1}. For most points the Newton step that leaves z_i out of Z ∪ {ẑ}, with its bound,
decides it; only the rest are fitted, all together, each until its own order is decided or it has converged (then: a tie).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.bag import Change, Counted, FloatArray, LinearBag, at_points, comparison, count_all, logits
from fullconformal.linear.hessian import certify, curvature, rounding
from fullconformal.linear.leave_one_out import bounds, deletion, duals, score_error
from fullconformal.linear.newton import ROUGH, refit
from fullconformal.losses import relative
from fullconformal.runtime.tasks import Progress


def exact_counts(
    bag: LinearBag,
    X_test: Tensor,
    q: float,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
) -> tuple[FloatArray, FloatArray]:
    """Counts for the C candidates of every test point X_test (m, d), q 0 or 1; weight (n, C) as in `pvalues.count`."""

    def counted(change: Change) -> Counted:
        order = deleted_order(bag, change, memory_budget) if q else ordinary_order(bag, change)
        return pvalues.count(order, 0, 0, comparison(weight, change))

    return count_all(bag, X_test, counted, memory_budget, progress)


@torch.no_grad()
def ordinary_order(bag: LinearBag, change: Change) -> Tensor:
    """Order (n, B) of the training points' scores against the candidates'."""
    fits = refit(bag, change)
    alpha = relative.margin(logits(bag, fits.theta), bag.y[:, None])
    tau = relative.margin(at_points(change.x, fits.theta), change.y)
    return torch.as_tensor(pvalues.order(alpha, tau, 2 * (fits.error + rounding(bag, change, fits.theta))))


@torch.no_grad()
def deleted_order(bag: LinearBag, change: Change, memory: int) -> Tensor:
    """Order (n, B) of the training points' scores against the candidates'."""
    fits = refit(bag, change, tolerance=ROUGH)
    theta, y = fits.theta, bag.y[:, None]
    base = bag.base.theta[:, :, None].expand_as(theta)
    tau = relative.margin(at_points(change.x, base), change.y)
    tau_error = bag.base.error_at(change.x) + rounding(bag, change, base)
    z = logits(bag, theta)
    pi = relative.probabilities(z)
    S, r = relative.second(pi), relative.residual(pi, y)
    C = curvature(bag, change, theta, S, bag.precision)
    mu, kappa, _ = certify(bag, change, theta, fits.gradient, C)
    out = deletion(C.A, S, r, 1)
    error = (
        bounds(C.spread, r, kappa, mu, out)
        + score_error(C.spread, out, torch.zeros_like(mu), C.rounding)
        + rounding(bag, change, theta)
    )
    order: Tensor = pvalues.order(relative.margin(z + out.shift, y), tau, error + tau_error)
    if bag.free_intercept:  # without the last point of a class the intercept runs away, and with it that point's loss
        order[(torch.bincount(bag.y, minlength=bag.n_classes)[bag.y] == 1)[:, None] & (y != change.y)] = 1
    column, point = (order.T == 0).nonzero(as_tuple=True)
    dual = duals(S, r, out.shift)
    width = max(1, min(memory // 4, 2**24) // (8 * len(bag.X) * bag.K))
    for at in range(0, len(column), width):
        c, i = column[at : at + width], point[at : at + width]
        start = theta[:, :, c] + _steps(bag, C.inverse, c, i, dual[i, :, c])
        order[i, c] = _refitted_order(bag, replace(change[c], removed=i), start, tau[c], tau_error[c])
    return order


def _steps(bag: LinearBag, inverse: Tensor, column: Tensor, point: Tensor, dual: Tensor) -> Tensor:
    """H̄⁻¹Jᵀu (d, K, b) of training points with duals u (b, K), each by the Hessian of its column; columns ascend."""
    x = bag.seen(bag.X[point].T, inverse.dtype).T
    right = (x[:, :, None] * dual[:, None, :].to(x.dtype)).flatten(1)
    present, sizes = column.unique_consecutive(return_counts=True)
    parts = [part @ inverse[c] for c, part in zip(present, right.split(sizes.tolist()), strict=True)]
    steps = torch.cat(parts).T.reshape(bag.X.shape[1], -1)
    return bag.unseen(steps, inverse.dtype).view(len(steps), bag.K, -1)


def _refitted_order(bag: LinearBag, change: Change, start: Tensor, tau: Tensor, tau_error: Tensor) -> Tensor:
    """Order (b,) of the removed points' scores against τ, each fit refined until it is decided or has converged."""
    x, y = bag.X[change.removed].T, bag.y[change.removed]

    def order(columns: Tensor, theta: Tensor, error: Tensor) -> Tensor:
        alpha = relative.margin(at_points(x[:, columns], theta), y[columns])
        tie = error + rounding(bag, change[columns], theta) + tau_error[columns]
        return torch.as_tensor(pvalues.order(alpha, tau[columns], tie))

    fits = refit(bag, change, start, stop=lambda *state: order(*state) != 0)
    return order(torch.arange(len(tau), device=tau.device), fits.theta, fits.error)
