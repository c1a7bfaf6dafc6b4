"""Fits of bags with a candidate added, and steps that leave a point out of them, without a Hessian of their own.

With the rest of the bag quadratic, the logits of an added point x move from z to z̄ = z − E r(z̄) with E = J_x H⁻¹ J_xᵀ: K equations for a
candidate. Newton's method goes on from there; its steps, and those that leave a point out, are solved for by conjugate gradients which the
inverse Hessian of the fit on Z preconditions: a product with the Hessian of a bag is two products with the points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullconformal.linear.bag import Change, LinearBag, at_points, gradient, logits, pulled
from fullconformal.linear.hessian import Fits, inner, rounding
from fullconformal.linear.newton import CONVERGED, refit, repulled
from fullconformal.linear.reference import Moved, Reference, moved
from fullconformal.losses import relative

# Steps, or products of one, after which a fit is left to a method with line search.
MOST = 60

Stop = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Added:
    """Fits of all columns' bags: Θ (d, K, B), logits of the training (n, K, B) and the added points (K, B), and their errors.

    ``pi`` (n, C, B) are probabilities of the training points.

    A logit of a point is off by a range of at most spread^½ times ``reach`` (B,), spread at the fit on Z, and the logits of all points by
    ``error`` (B,), infinite where no fit was found. ``E`` (K, K, B) is the added points' leverage at the fit on Z, ``kappa`` (B,)
    the root of the largest spread there, ``mu`` (B,) the length of the gradient left.
    """

    theta: Tensor
    z: Tensor
    pi: Tensor
    z_added: Tensor
    E: Tensor
    kappa: Tensor
    mu: Tensor
    reach: Tensor
    error: Tensor
    moved: Moved

    @property
    def spread(self) -> Tensor:
        """Spread (B,) of the added points at the fit on Z."""
        i, j = relative.pairs(len(self.E), self.E.device)[0]
        return relative.spread(self.E[i, j])


@torch.no_grad()
def fit_added(bag: LinearBag, change: Change, columns: Tensor, tolerance: float, theta: Tensor | None = None) -> Added:
    """Fits of the bags with some of the candidates of objects added, columns (B,) of the m·C changes, label fastest; from Θ (d, K, B)."""
    base, C, K = bag.base, bag.n_classes, bag.K
    objects = change[::C]
    x, (d, m) = objects.x, objects.x.shape
    V, start = base.solve_points(x), _repenalised(bag, objects)
    E = inner(x, V)
    E, z = (part.repeat_interleave(C, -1) for part in (E, at_points(x, start)))
    if theta is None:
        u = _quadratic(E, z, change.y)
        step = torch.einsum("pkm,kmc->pmc", V, u.view(K, m, C)).reshape(d, K, m * C)
        theta = start[:, :, columns // C] - step[:, :, columns]
    E, change = E[..., columns], change[columns]
    kappa = relative.spread(E[tuple(relative.pairs(K, E.device)[0])]).sqrt().clamp(min=base.kappa)
    theta, mu, z, pi = _newton(bag, change, theta, tolerance / kappa)
    z_added = at_points(change.x, theta)
    leverage = (relative.unpacked(relative.second(relative.probabilities(z_added))) * E).sum((0, 1))
    mu = mu + len(bag.X) ** 0.5 * rounding(bag, change, theta)
    first = moved(bag.reference, pi, leverage, torch.zeros_like(mu), change.factors)
    # μ and κ of the bag's own Hessian are larger than those of the fit on Z by whole^(−½) at most.
    error = _error(kappa * mu / first.whole)
    grown = Moved(first.least * torch.exp(-error), first.most * torch.exp(error))
    return Added(theta, z, pi, z_added, E, kappa, mu, error / kappa, error, grown)


def _repenalised(bag: LinearBag, objects: Change) -> Tensor:
    """About the fits Θ (d, K, m) on Z with the penalties of objects: a step by the Hessian of the fit on Z."""
    base, (d, m) = bag.base, objects.x.shape
    if objects.factors is None:
        return base.theta[:, :, None].expand(d, bag.K, m)
    pull = repulled(bag, objects)
    return base.theta[:, :, None] - (base.inverse @ pull.flatten(0, 1)).view_as(pull)


@torch.no_grad()
def fit_repenalised(bag: LinearBag, objects: Change, tolerance: float) -> tuple[Tensor, Tensor]:
    """Fits Θ (d, K, m) on Z with the penalties of objects, and the errors (m,) of the objects' logits at them."""
    if objects.factors is None:
        return _repenalised(bag, objects), bag.base.error_at(objects.x)
    # A point of zeros has a constant loss: nothing is added.
    alone, kappa = replace(objects, x=torch.zeros_like(objects.x)), objects.x.new_full(objects.y.shape, bag.base.kappa)
    theta, mu, _, pi = _newton(bag, alone, _repenalised(bag, objects), tolerance / kappa)
    mu = mu + len(bag.X) ** 0.5 * rounding(bag, alone, theta)
    zero = torch.zeros_like(mu)
    whole = moved(bag.reference, pi, zero, zero, objects.factors).whole
    return theta, bag.base.spread_at(objects.x).sqrt() * _error(kappa * mu / whole) / kappa


@torch.no_grad()
def refine(bag: LinearBag, change: Change, theta: Tensor, tolerance: float = CONVERGED) -> Fits:
    """Fits of bags with points added, from Θ (d, K, B), with logits off by about the tolerance; what is left of them is not bounded."""
    kappa = bag.base.spread_at(change.x).sqrt().clamp(min=bag.base.kappa)
    # Rounding keeps a gradient from being smaller.
    goal = torch.maximum(tolerance / kappa, len(bag.X) ** 0.5 * rounding(bag, change, theta))
    theta, mu, _, pi = _newton(bag, change, theta, goal)
    slopes = gradient(bag, change, theta, relative.residual_(pi[:, 1:].contiguous(), bag.y[:, None]))
    fits, lost = Fits(theta, torch.full_like(mu, torch.inf), slopes), (mu > goal).nonzero().squeeze(1)
    if len(lost):
        again = refit(bag, change[lost], theta[:, :, lost])
        fits.theta[:, :, lost], fits.gradient[:, :, lost] = again.theta, again.gradient
    return fits


@dataclass(frozen=True)
class LeftOut:
    """Steps A'r (n, K, B) of the logits of the training points that leave each out of the bag it is in, and their errors (n, B), in range.

    ``length`` (n, B) is a bound on (rᵀA'r)^½, ``spread`` (n, B) one on the spread of A'.
    """

    shift: Tensor
    error: Tensor
    length: Tensor
    spread: Tensor


def leave_out(at: Reference, fits: Added, r: Tensor) -> LeftOut:
    """The steps of residuals r (n, K, B) at the fits, A' enclosed by A° and the factors by which the Hessian moved."""
    low, high = 1 / fits.moved.most, 1 / fits.moved.least
    s, spread = torch.bmm(at.left_out, r), at.left_out_spread[:, None]
    length = (r * s).sum(1).clamp(min=0.0).sqrt()
    rounded = 4 * at.rounding * (1 + at.odds[:, None])
    error = (high - low) / 2 * spread.sqrt() * length + rounded * high * spread
    return LeftOut(s.mul_(((low + high) / 2)[:, None]), error, high.sqrt() * length, high * spread)


def _error(share: Tensor) -> Tensor:
    """The error of logits −log(1 − κμ), infinite where nothing is known."""
    return torch.where(share < 1, -torch.log1p(-share.clamp(max=1.0)), torch.inf)


@torch.no_grad()
def fit_without(bag: LinearBag, change: Change, theta: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Fits Θ (d, K, B) of bags with a point added and one left out, from Θ, and the error (B,) of the logits of those left out."""
    at, removed = bag.reference, change.removed
    kappa = bag.base.spread_at(change.x).sqrt().clamp(min=bag.base.kappa)
    theta, mu, _, pi = _newton(bag, change, theta, tolerance / kappa)
    mu = mu + len(bag.X) ** 0.5 * rounding(bag, change, theta)
    zero = torch.zeros_like(mu)
    least = moved(at, pi, zero, zero, change.factors).least[removed, torch.arange(len(mu), device=mu.device)]
    # The Hessian without the point is at least 1 − t, and then the least factor, of that of the fit on Z.
    return theta, at.spread[removed].sqrt() * _error(kappa * mu * (1 + at.odds[removed]) / least) / kappa


def _quadratic(E: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """Residuals r(z̄) (K, B) where z̄ = z − E r(z̄), given E (K, K, B), z (K, B) and labels y (B,)."""
    eye, E = torch.eye(len(z), dtype=z.dtype, device=z.device), E.permute(2, 0, 1)
    now, r = z, z
    for _ in range(MOST):
        pi = relative.probabilities(now)
        r = relative.residual(pi, y)
        left = now - z + (E @ r.T[:, :, None])[:, :, 0].T
        S = relative.unpacked(relative.second(pi)).permute(2, 0, 1)
        found, _ = torch.linalg.solve_ex(eye + E @ S, left.T[:, :, None])
        step = found[:, :, 0].T
        R = relative.range_of(step)
        if not float(R.max()) > 1e-6:
            break
        now = now - torch.where(R > 1, torch.log1p(R) / R, 1.0) * step
    return r


def _newton(bag: LinearBag, change: Change, theta: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimisers Θ (d, K, B) from Θ and their |∇F| in the norm of H⁻¹ at the fit on Z, below the goal (B,) where all went well.

    And the logits (n, K, B) and probabilities (n, C, B) of the training points there.
    """
    inverse, out, left = bag.base.inverse, theta.clone(), theta.new_full(goal.shape, torch.inf)
    columns, z = torch.arange(len(goal), device=theta.device), logits(bag, theta)
    for steps in range(MOST):
        pi = relative.all_probabilities(z)
        r = relative.residual_(pi[:, 1:].contiguous(), bag.y[:, None])
        G = gradient(bag, change, theta, r).flatten(0, 1)
        mu = (G * (inverse @ G)).sum(0).clamp(min=0.0).sqrt()
        better = mu < left[columns]
        out[:, :, columns[better]], left[columns[better]] = theta[:, :, better], mu[better]
        on = (mu > goal[columns]).nonzero().squeeze(1)
        if not len(on):
            if not steps:
                return out, left, z, pi
            break
        if len(on) < len(columns):
            columns, change, G, mu = columns[on], change[on], G[:, on], mu[on]
            theta, z, pi = theta[:, :, on], z[:, :, on], pi[:, :, on]
        # The nearer the goal, the more is to be left of the gradient by the next step, whose error is of second order.
        enough = torch.maximum(0.5 * goal[columns], mu * mu.clamp(max=0.1))

        def stop(at: Tensor, _: Tensor, norm: Tensor, enough: Tensor = enough) -> Tensor:
            return norm <= enough[at]

        # A step need not be exact: the next gradient tells what it left.
        step = conjugate(bag, change, pi[:, 1:], theta, G, stop, torch.float32).double().view_as(theta)
        dz = logits(bag, step)
        R = torch.maximum(relative.range_of(dz).amax(0), relative.range_of(at_points(change.x, step)))
        t = torch.where(R > 1, torch.log1p(R) / R, 1.0)
        theta, z = theta - t * step, z - t * dz
    z = logits(bag, out)
    return out, left, z, relative.all_probabilities(z)


def conjugate(
    bag: LinearBag,
    change: Change,
    pi: Tensor,
    theta: Tensor | None,
    right: Tensor,
    stop: Stop,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """H̄⁻¹ right (p, B) for the Hessians of the columns' bags, without the points added where Θ is None, given probabilities (n, K, B).

    ``stop(columns, solution, norm)`` says of some columns whether what is left of the right side, its norm that of H⁻¹ at the fit on Z, is
    small enough.
    """
    (X, inverse), (d, K) = bag.points(dtype), bag.base.theta.shape
    own = None if theta is None else relative.probabilities(at_points(change.x, theta))
    change = replace(change, x=change.x.to(dtype))
    pi, right, own = pi.to(dtype), right.to(dtype), None if own is None else own.to(dtype)
    out, columns = torch.zeros_like(right), torch.arange(right.shape[1], device=right.device)
    w, r, v = out, right, out
    before = right.new_ones(len(columns))
    if not len(columns):
        return out
    for _ in range(MOST):
        s = inverse @ r
        now = (r * s).sum(0)
        on = ~stop(columns, w, now.clamp(min=0.0).sqrt()) & (now > 0)
        if not bool(on.all()):
            out[:, columns[~on]] = w[:, ~on]
            keep = on.nonzero().squeeze(1)
            columns, change = columns[keep], change[keep]
            w, r, v, s, now, before = (part[..., keep] for part in (w, r, v, s, now, before))
            pi, own = pi[:, :, keep], None if own is None else own[:, keep]
            if not len(keep):
                return out
        v = s + now / before * v
        before = now
        Hv = _product(bag, X, change, pi, own, v.view(d, K, -1)).view_as(v)
        length = now / (v * Hv).sum(0)
        w, r = w + length * v, r - length * Hv
    out[:, columns] = w
    return out


def _product(bag: LinearBag, X: Tensor, change: Change, pi: Tensor, own: Tensor | None, v: Tensor) -> Tensor:
    """H̄v (d, K, B)."""
    u = second_product_(pi, (X @ v.flatten(1)).view(len(X), *v.shape[1:]))
    if change.removed is not None:
        u[change.removed, :, torch.arange(u.shape[2], device=u.device)] = 0.0
    out = (X.T @ u.view(len(u), -1)).view_as(v)
    out += pulled(bag, change, v)
    if own is not None:
        out += change.x[:, None, :] * second_product_(own, at_points(change.x, v))
    return out


def second_product_(pi: Tensor, u: Tensor) -> Tensor:
    """ℓ''u (..., K, B) in place of u."""
    u *= pi
    return u.sub_(pi * u.sum(-2, keepdim=True))
