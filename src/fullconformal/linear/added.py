"""Fits of bags with a candidate added, and steps that leave a point out of them, without a Hessian of their own.

With the rest of the bag quadratic, the logits of an added point x move from z to z̄ = z − E r(z̄) with E = J_x H⁻¹ J_xᵀ: K equations for a
candidate. Newton's method goes on from there; its steps, and those that leave a point out, are solved for by conjugate gradients which the
inverse Hessian of the fit on Z preconditions: a product with the Hessian of a bag is two products with the points.

Steps are held as rows (B, K, d) and logits as (B, K, n): every pass goes along memory, and columns that are done are left out at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from fullconformal.linear.bag import (
    Change,
    LinearBag,
    at_points,
)
from fullconformal.linear.hessian import Fits, inner, largest_logit, rounding
from fullconformal.linear.newton import CONVERGED, quadratic, refit, repulled
from fullconformal.linear.reference import HessianFactors, below, hessian_factors, least_factors
from fullconformal.losses import relative

# Steps, or products of one, after which a fit is left to a method with line search.
MOST = 60

Stop = Callable[..., Tensor]


@dataclass(frozen=True)
class Added:
    """Fits of all columns' bags: Θ (d, K, B), logits of the training (B, K, n) and the added points (K, B), and their errors.

    ``pi`` (B, C, n) are probabilities of the training points.

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
    factors_at_fit: HessianFactors

    def __getitem__(self, columns: Tensor) -> Added:
        """What later fits of some columns start from."""
        parts, last = {f.name: getattr(self, f.name) for f in fields(self)}, ("theta", "z_added", "E")
        return Added(**{name: v[..., columns] if name in last else v[columns] for name, v in parts.items()})

    @cached_property
    def factors(self) -> HessianFactors:
        """How far the Hessian has moved from the fit on Z to the minimisers; ``factors_at_fit`` to Θ."""
        return self.factors_at_fit.widened(self.error)

    @cached_property
    def rough(self) -> Tensor:
        """Probabilities (B, K, n) in float32."""
        return self.pi[:, 1:].float().contiguous()

    @property
    def spread(self) -> Tensor:
        """Spread (B,) of the added points at the fit on Z."""
        i, j = relative.pairs(len(self.E), self.E.device)[0]
        return relative.spread(self.E[i, j])


@torch.no_grad()
def fit_added(
    bag: LinearBag,
    change: Change,
    columns: Tensor,
    tolerance: float,
    start: Added | None = None,
    dtype: torch.dtype = torch.float64,
) -> Added:
    """Fits of the bags with some of the candidates of objects added, columns (B,) of the m·C changes, label fastest; from rougher ones.

    Logits and probabilities are of some precision.
    """
    base, C, K = bag.base, bag.n_classes, bag.K
    objects = change[::C]
    x, (d, m) = objects.x, objects.x.shape
    if start is None:
        V, without = base.solve_points(x), _repenalised(bag, objects)
        E, z = (part.repeat_interleave(C, -1) for part in (inner(x, V), at_points(x, without)))
        step = torch.einsum("pkm,kmc->pmc", V, quadratic(E, z, change.y).view(K, m, C)).reshape(d, K, m * C)
        E, theta = E[..., columns], without[:, :, columns // C] - step[:, :, columns]
    else:
        E, theta = start.E, start.theta
    change = change[columns]
    kappa = relative.spread(E[tuple(relative.pairs(K, E.device)[0])]).sqrt().clamp(min=base.kappa)
    theta, mu, z, pi, gone = _newton(bag, change, theta, tolerance / kappa, dtype)
    z_added = at_points(change.x, theta)
    leverage = (relative.unpacked(relative.second(z_added)) * E).sum((0, 1))
    grain, mu = rounding(bag, change, theta, dtype), mu + granted(bag, change, theta, dtype)
    # Bounds at rougher fits hold here, too, up to the ranges that logits have moved since, which are small as a rule.
    far = start.factors_at_fit.widened(gone) if start else hessian_factors(bag.reference, pi, leverage, change.factors)
    far = far.widened(grain)
    # μ and κ of the bag's own Hessian are larger than those of the fit on Z by whole^(−½) at most.
    error = fit_error(kappa * mu / far.whole)
    return Added(theta, z, pi, z_added, E, kappa, mu, error / kappa, error, far)


@torch.no_grad()
def fit_below(
    bag: LinearBag, change: Change, columns: Tensor, tolerance: float, fits: Added
) -> tuple[LinearBag, Added]:
    """The bag with a Hessian `below` those of some columns' bags for its base, and their fits by it, from others."""
    own, one = change[columns], torch.ones_like(fits.mu)
    seen, grain = below(bag, fits.pi, own.factors), rounding(bag, own, fits.theta, fits.z.dtype)
    # None of them is less than once that Hessian, of how much more nothing is known.
    far = HessianFactors(one, 0 * one, one, torch.inf * one, 0 * one, one, torch.inf * one).widened(grain)
    start = replace(fits, E=inner(own.x, seen.base.solve_points(own.x)), factors_at_fit=far)
    return seen, fit_added(seen, change, columns, tolerance, start, fits.z.dtype)


def granted(bag: LinearBag, change: Change, theta: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rounding (B,) granted to a gradient, in the norm of H⁻¹: of the logits, and of residuals off by units of one."""
    units = torch.finfo(dtype).eps * bag.reference.spread.sqrt().sum()
    granted: Tensor = len(bag.X) ** 0.5 * rounding(bag, change, theta, dtype) + units
    return granted


def _repenalised(bag: LinearBag, objects: Change) -> Tensor:
    """About the fits Θ (d, K, m) on Z with the penalties of objects: a step by the Hessian of the fit on Z."""
    base, (d, m) = bag.base, objects.x.shape
    if objects.factors is None:
        return base.theta[:, :, None].expand(d, bag.K, m)
    pull = repulled(bag, objects)
    return base.theta[:, :, None] - turn(base.solve(turn(pull)))


@torch.no_grad()
def fit_repenalised(bag: LinearBag, objects: Change, tolerance: float) -> tuple[Tensor, Tensor]:
    """Fits Θ (d, K, m) on Z with the penalties of objects, and the errors (m,) of the objects' logits at them."""
    if objects.factors is None:
        return _repenalised(bag, objects), bag.base.error_at(objects.x)
    # A point of zeros has a constant loss: nothing is added.
    alone, kappa = replace(objects, x=torch.zeros_like(objects.x)), objects.x.new_full(objects.y.shape, bag.base.kappa)
    theta, mu, _, pi, _ = _newton(bag, alone, _repenalised(bag, objects), tolerance / kappa)
    mu = mu + granted(bag, alone, theta)
    whole = least_factors(bag.reference, pi, objects.factors).whole
    return theta, bag.base.spread_at(objects.x).sqrt() * fit_error(kappa * mu / whole) / kappa


@torch.no_grad()
def refine(bag: LinearBag, change: Change, theta: Tensor, tolerance: float = CONVERGED) -> Fits:
    """Fits of bags with points added, from Θ (d, K, B), with logits off by about the tolerance; what is left of them is not bounded."""
    kappa = bag.base.spread_at(change.x).sqrt().clamp(min=bag.base.kappa)
    # Rounding keeps a gradient from being smaller.
    goal = torch.maximum(tolerance / kappa, len(bag.X) ** 0.5 * rounding(bag, change, theta))
    theta, mu, _, pi, _ = _newton(bag, change, theta, goal)
    slopes = turn(_gradient(bag, change, turn(theta), pi))
    fits, lost = Fits(theta, torch.full_like(mu, torch.inf), slopes), (mu > goal).nonzero().squeeze(1)
    if len(lost):
        again = refit(bag, change[lost], theta[:, :, lost])
        fits.theta[:, :, lost], fits.gradient[:, :, lost] = again.theta, again.gradient
    return fits


def fit_error(share: Tensor) -> Tensor:
    """The error of logits −log(1 − κμ), infinite where nothing is known."""
    return torch.where(share < 1, -torch.log1p(-share.clamp(max=1.0)), torch.inf)


@torch.no_grad()
def fit_without(
    bag: LinearBag, change: Change, theta: Tensor, kappa: Tensor, tolerance: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Fits Θ (d, K, B) of bags with a point added and one left out, from Θ, and the error (B,) of the logits of those left out.

    κ (B,) is the root of the largest spread at the fit on Z.
    """
    at, removed = bag.reference, torch.as_tensor(change.removed)
    theta, mu, _, pi, _ = _newton(bag, change, theta, tolerance / kappa, dtype)
    grain, mu = rounding(bag, change, theta, dtype), mu + granted(bag, change, theta, dtype)
    least = least_factors(at, pi, change.factors).widened(grain).least(at.rest[removed])
    # The Hessian without the point is at least 1 − t, and then the least factor, of that of the fit on Z.
    return theta, at.spread[removed].sqrt() * fit_error(kappa * mu * (1 + at.odds[removed]) / least) / kappa


def turn(part: Tensor) -> Tensor:
    """Θ (d, K, B) as rows (B, K, d), and rows as Θ."""
    return part.permute(2, 1, 0).contiguous()


def logits_of(bag: LinearBag, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits (B, K, n) of the training points, in a precision."""
    B, K, d = rows.shape
    return (rows.to(dtype).view(B * K, d) @ bag.columns(dtype)).view(B, K, -1)


def _summed(bag: LinearBag, change: Change, r: Tensor) -> Tensor:
    """Σ_i r_i x_iᵀ (B, K, d) of r (B, K, n), of which that of removed points is set to zero."""
    B, K, n = r.shape
    if change.removed is not None:
        r[torch.arange(B, device=r.device), :, change.removed] = 0.0
    return (bag.columns(r.dtype) @ r.view(B * K, n).T).T.double().contiguous().view(B, K, -1)


def _pulled_(bag: LinearBag, change: Change, rows: Tensor, out: Tensor) -> Tensor:
    """Add ΛTΘ, the gradient of the columns' penalties, to out (B, K, d)."""
    penalty = bag.penalty if change.factors is None else (bag.penalty[:, None] * change.factors).T[:, None]
    return out.addcmul_(bag.coupling @ rows, penalty.expand_as(out))


def _gradient(bag: LinearBag, change: Change, rows: Tensor, pi: Tensor) -> Tensor:
    """∇F (B, K, d) given probabilities (B, C, n) of the training points."""
    x = change.x.T[:, None]
    r = relative.residual((rows * x).sum(2).T, change.y)
    G = _summed(bag, change, pi[:, 1:] - bag.reference.own[1:])
    return _pulled_(bag, change, rows, G).add_(r.T[:, :, None] * x)


def _newton(
    bag: LinearBag, change: Change, theta: Tensor, goal: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Minimisers Θ (d, K, B) from Θ and their |∇F| in the norm of H⁻¹ at the fit on Z, below the goal (B,) where all went well.

    And the logits (B, K, n) and probabilities (B, C, n) of the training points there, in some precision, and the ranges (B,) that logits
    have moved by at most.
    """
    rows, left, gone = turn(theta), theta.new_full(goal.shape, torch.inf), torch.zeros_like(goal)
    columns, z = torch.arange(len(goal), device=theta.device), logits_of(bag, rows, dtype)
    found = rows, z, relative.all_probabilities(z)
    pi, bold = found[2], torch.ones_like(columns, dtype=torch.bool)
    for _ in range(MOST):
        G = _gradient(bag, change, rows, pi)
        mu = bag.base.length(G, dtype)
        bold[columns] &= mu < left[columns]
        better = (mu < left[columns]).nonzero().squeeze(1)
        at = columns[better]
        left[at] = mu[better]
        if len(at) == len(left):
            found = rows, z, pi
        else:
            for into, part in zip(found, (rows, z, pi), strict=True):
                into[at] = part[better]
        on = (mu > goal[columns]).nonzero().squeeze(1)
        if not len(on):
            break
        if len(on) < len(columns):
            columns, change = columns[on], change[on]
            G, mu, rows, z, pi = (part.index_select(0, on) for part in (G, mu, rows, z, pi))
        # The nearer the goal, the more is to be left of the gradient by the next step, whose error is of second order.
        enough = torch.maximum(0.5 * goal[columns], mu * mu.clamp(max=0.02))

        def stop(at: Tensor, *rest: Tensor, enough: Tensor = enough) -> Tensor:
            return rest[-2] + rest[-1] <= enough[at]

        # A step need not be exact: the next gradient tells what it left.
        step = conjugate(bag, change, pi[:, 1:].float(), turn(rows), G, stop, torch.float32)
        dz = logits_of(bag, step, dtype)
        R = torch.maximum(_widest(dz).double(), relative.range_of((step * change.x.T[:, None]).sum(2).T))
        t = torch.where(R > 1, (torch.where(bold[columns], 4.0, torch.log1p(R)) / R).clamp(max=1.0), 1.0)
        gone[columns] += t * R
        t = t[:, None, None]
        rows, z = rows - t * step, torch.addcmul(z, t.to(dtype), dz, value=-1.0)
        pi = relative.all_probabilities(z)
    return turn(found[0]), left, found[1], found[2], gone


def _widest(dz: Tensor) -> Tensor:
    """The largest range (B,) of logits (B, K, n) of a point; where that of all points is below one, rather that, in a third of the time."""
    of_all = dz.amax((1, 2)).clamp(min=0.0) - dz.amin((1, 2)).clamp(max=0.0)
    return relative.range_of(dz).amax(1) if bool((of_all > 1).any()) else of_all


def conjugate(
    bag: LinearBag,
    change: Change,
    pi: Tensor,
    theta: Tensor | None,
    right: Tensor,
    stop: Stop,
    solves: torch.dtype = torch.float64,
) -> Tensor:
    """H̄⁻¹ right (B, K, d) for the Hessians of the columns' bags, without the points added where Θ is None, given probabilities (B, K, n).

    Products are of their precision, solves by the Hessian of the fit on Z of another. ``stop(columns, solution, step, rest, norm,
    lost)`` says of some columns whether the rest of the right side is small enough: its norm is that of H⁻¹ at the fit on Z, which times
    the rest is the step; rounding of products is not among it, and has a norm of at most what is lost.
    """
    own = None if theta is None else relative.probabilities(at_points(change.x, theta)).T
    unit = 4 * torch.finfo(pi.dtype).eps * len(bag.X) ** 0.5
    out, columns = torch.zeros_like(right), torch.arange(len(right), device=right.device)
    w, r, v, before, lost = out, right, out, right.new_ones(len(columns)), right.new_zeros(len(columns))
    if not len(columns):
        return out
    for _ in range(MOST):
        s = bag.base.solve(r, solves)
        now = (r * s).sum((1, 2))
        norm = now.clamp(min=0.0).sqrt()
        on = ~stop(columns, w, s, r, norm, lost) & (norm > lost)
        if not bool(on.all()):
            out[columns[~on]] = w[~on]
            keep = on.nonzero().squeeze(1)
            columns, change = columns[keep], change[keep]
            if not len(keep):
                return out
            w, r, v, s, now, before, lost, pi = (
                part.index_select(0, keep) for part in (w, r, v, s, now, before, lost, pi)
            )
            own = None if own is None else own[keep]
        v = torch.addcmul(s, (now / before)[:, None, None], v)
        before = now
        Hv = _product(bag, change, pi, own, v)
        length = (now / (v * Hv).sum((1, 2)))[:, None, None]
        w, r = torch.addcmul(w, length, v), torch.addcmul(r, length, Hv, value=-1.0)
        # Logits of a step are rounded as those of a fit, which passes into products as into gradients.
        lost = lost + unit * largest_logit(bag, change, (length * v).permute(2, 1, 0))
    out[columns] = w
    return out


def _product(bag: LinearBag, change: Change, pi: Tensor, own: Tensor | None, v: Tensor) -> Tensor:
    """H̄v (B, K, d) of rows v."""
    out = _summed(bag, change, second_product_(pi, logits_of(bag, v, pi.dtype)))
    _pulled_(bag, change, v, out)
    if own is not None:
        x = change.x.T[:, None]
        out += second_product_(own[:, :, None], (v * x).sum(2, keepdim=True)) * x
    return out


def second_product_(pi: Tensor, u: Tensor) -> Tensor:
    """ℓ''u (..., K, B) in place of u."""
    u *= pi
    return u.sub_(pi * u.sum(-2, keepdim=True))
