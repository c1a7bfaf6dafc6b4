"""Full conformal prediction itself: every score from its own fit, for L2-penalised logistic regression.

    ordinary (q = 0)    α_i = ℓ(z_i; Θ_{Z∪ẑ})              α_{n+1} = ℓ(ẑ; Θ_{Z∪ẑ})
    deleted  (q = 1)    α_i = ℓ(z_i; Θ_{Z∪ẑ∖z_i})          α_{n+1} = ℓ(ẑ; Θ_Z)

A p-value needs only the order of α_i and α_{n+1}. For most points the Newton step that leaves z_i out of Z, taken from the fit on Z ∪ {ẑ},
decides it with its bound; only the rest are fitted, all together, each until its own order is decided or it has converged (then: a tie).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, fit_added, fit_repenalised, fit_without, logits_of, second_product_, turn
from fullconformal.linear.bag import Change, Counted, FloatArray, LinearBag, as_objects, at_points, comparison
from fullconformal.linear.bounded import BLOCK, COARSE, FLOOR
from fullconformal.linear.hessian import radius, rounding
from fullconformal.linear.newton import CONVERGED, ROUGH, refit
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
    at, every = bag.reference, torch.arange(len(change.y), device=change.y.device)
    fits = fit_added(bag, change, every, COARSE, dtype=bag.reference.rough)
    theta, y, (tau, tau_error) = fits.theta, bag.y, _own_scores(bag, change)
    out = LeftOut(bag, change, fits)
    order = out.order(tau, tau_error)
    # Its loss is no less than with it.
    known = out.grain + at.spread.sqrt() * fits.reach[:, None]
    order[relative.margin(fits.z, y) - known > (tau + tau_error)[:, None]] = 1
    _count_last_points(bag, change, order.T)
    width = max(1, min(memory // 4, BLOCK // 32) // (8 * len(bag.X) * bag.K))
    left_open = (order == 0) & left(order.T)[:, None]
    # A walk takes as long as two of the fits that it saves.
    c, points = left_open.any(1).nonzero().squeeze(1), (left_open.sum(0) > 2).nonzero().squeeze(1)
    out = LeftOut(bag, change[c], fits[c])
    for i in points.split(width) if len(points) else ():
        order[c[:, None], i] += out.order(tau[c], tau_error[c], i) * (order[c[:, None], i] == 0)
    for accuracy in (torch.inf, COARSE, ROUGH, 0.0):
        column, point = ((order == 0) & left(order.T)[:, None]).nonzero(as_tuple=True)
        for first in range(0, len(column), width):
            c, i = column[first : first + width], point[first : first + width]
            still = left(order.T)[c]
            c, i = c[still], i[still]
            if not len(c):
                continue
            own = replace(change[c], removed=i)
            r = relative.residual(fits.z[c, :, i].T.double(), y[i])
            start = theta[:, :, c] + turn(own_steps(bag, i, r, at.rough)[0])
            if accuracy:
                dtype = torch.float64 if accuracy <= ROUGH else bag.reference.rough
                start, error = fit_without(bag, own, start, fits.kappa[c], accuracy, dtype)
                order[c, i] = _against(bag, own, start, tau[c], tau_error[c] + error + FLOOR).nan_to_num(0)
            else:
                order[c, i] = _refitted_order(bag, own, start, tau[c], tau_error[c])
    return order.T


@dataclass(frozen=True)
class LeftOut:
    """Scores of training points left out of the bags of columns (B,), by the steps that leave them out of Z.

    Without i the Hessian on Z is H∖, and the Newton step w = H∖⁻¹Jᵢᵀrᵢ moves logits of points j by δ_j. With r and S at the fit on Z, and
    r' and S' at that of a column, Θ', the gradient of its bag without i at Θ' + tw is, summed over j ≠ i,

        ∇F(Θ') − Jᵢᵀ(r'ᵢ − trᵢ) + t Σ J_jᵀ(S'_j − S_j)δ_j + t Σ J_jᵀ∫(S'_j(a) − S'_j)δ_j da

    and what the added point and other penalties give, which are not in H∖; S'(a) is S' a share a of the way. Its length in the norm of M⁻¹,
    M the Hessian without i at Θ', bounds the distance to the minimiser (`radius`). As M is a sum over points, parts Q_j with
    vᵀJ_jᵀ(…) ≤ (v_jᵀS'_jv_j)^½ Q_j for all v are (Σ Q_j²)^½ long together. Where M itself counts, it is at least H∖ times the least factor.
    """

    bag: LinearBag
    change: Change
    fits: Added

    @cached_property
    def grain(self) -> Tensor:
        """Rounding (B, 1) of logits at the fits, and as much as it takes to round probabilities."""
        grain = rounding(self.bag, self.change, self.fits.theta, self.fits.pi.dtype) + FLOOR
        return (grain + 2 * self.bag.n_classes * torch.finfo(self.fits.pi.dtype).eps)[:, None]

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """(π' − π)²/π' and π' (B, C·n); one near the least numbers of a precision grants v nothing that counts."""
        pi = self.fits.pi.clamp(min=torch.finfo(self.fits.pi.dtype).tiny ** 0.8)
        moved = (pi - self.bag.reference.pi.to(pi.dtype)).abs_()
        moved.addcmul_(pi, torch.expm1(self.grain)[:, :, None].to(pi.dtype)).square_().div_(pi)
        return moved.flatten(1), pi.flatten(1)

    def order(self, tau: Tensor, tau_error: Tensor, i: Tensor | None = None) -> Tensor:
        """Order (B, b) of points i (b,) against τ (B,)."""
        margin, error = self.scores(i)
        slack = (error + tau_error[:, None]).nan_to_num(torch.inf, torch.inf)
        return torch.as_tensor(pvalues.order(margin, tau[:, None], slack))

    def scores(self, i: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Margins (B, b) of points i (b,) at Θ' + tw, tw nearest to the column's own step, and errors; of all by that itself."""
        at, fits, some = self.bag.reference, self.fits, slice(None) if i is None else i
        A, rest, z, y = at.left_out[some], at.rest[some], fits.z[:, :, some].double(), self.bag.y[some]
        least, r = fits.factors[:, None].least(rest), relative.residual(z, y)
        spread, grown = at.left_out_spread[some] / least, (rest / least).sqrt()
        off, kappa = self.grain + 4 * at.rounding * rest, grown * fits.kappa[:, None]
        if i is None:
            # H∖⁻¹Jᵢᵀr'ᵢ leaves what M, within factors of H∖, differs by, and moves by ranges ≤ κ|w|; or no step, if that leaves less.
            s, most = (r.permute(2, 0, 1) @ A).permute(1, 2, 0), fits.factors[:, None].most(rest)
            nu = (r * s).sum(1).clamp(min=0.0).sqrt()
            R = (least.sqrt() * kappa * nu).clamp(min=1e-4)
            linear = torch.maximum((most - 1) / most.sqrt(), (1 - least) / least.sqrt())
            beyond = linear + (torch.expm1(R) / R - 1) * most.sqrt()
            t = (beyond * torch.exp(R) < least.rsqrt()).double()
            beyond, R, z = torch.where(t > 0, beyond, least.rsqrt()) * nu, R * t, z + t[:, None] * s
        else:
            own = (at.pi - at.own)[1:, i]
            w, s = own_steps(self.bag, i, own)
            t = ((r * s).sum(1) / (own * s).sum(0)).clamp(min=0.0)
            beyond, R = self.beyond(i, w, t)
            z, r = z + t[:, None] * s, (r - t[:, None] * own).permute(2, 0, 1)
            beyond = beyond + ((r @ A * r).sum(2).clamp(min=0.0).T / least).sqrt()
        mu = beyond + grown * fits.mu[:, None] + off / 4 * spread.sqrt()
        error = spread.sqrt() * radius(mu, R + off, kappa)
        return relative.margin(z, y), error + off * (1 + spread)

    def beyond(self, i: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """What shares t (B, b) of steps w (b, K, d) leave beyond ∇F(Θ') and the points' own part, and the ranges they move logits by.

        With means E under π and E' under π', vᵀ(S' − S)δ = Σ_k (π'_k − π_k)(v_k − E'v)(δ_k − Eδ): Q² = Σ_k (π'_k − π_k)²/π'_k (δ_k − Eδ)².
        Moved by a range R = t range(δ), S' changes by factors within e^(±R): the integral has Q = ((e^R − 1)/R − 1)(δᵀS'δ)^½, where
        δᵀS'δ ≤ Σ_k π'_k (δ_k − Eδ)²; the added point has (e^R − 1)/R (δᵀS'δ)^½; of f times the penalties Q² is Λ(f − 1)²/f wᵀTw.
        """
        bag, change, dtype = self.bag, self.change, self.fits.pi.dtype
        unit = rounding(bag, None, turn(w), dtype).to(dtype)[:, None]
        delta, pi = logits_of(bag, w, dtype), bag.reference.pi[1:].to(dtype)
        delta[torch.arange(len(i), device=i.device), :, i] = 0.0
        ranges, mean = relative.range_of(delta).add_(unit), (delta * pi).sum(1, keepdim=True)
        squares = torch.cat([-mean, delta.sub_(mean)], 1).abs_().add_(unit[:, None]).square_()
        # Sums of so many terms are rounded.
        grown = 1 + torch.finfo(dtype).eps * squares[0].numel()
        moved = (self.weights[0] @ squares.flatten(1).T).double().sqrt()
        bent = (self.weights[1] @ squares.mul_(ranges.square()[:, None]).flatten(1).T).double().sqrt()
        added, pi = w @ change.x, relative.all_probabilities(self.fits.z_added)
        # No less than rounding leaves digits of: all that is made of them grows with them.
        R, R_added = ((t * v).clamp(min=1e-4) for v in (ranges.amax(1), relative.range_of(added).T))
        # By squares, which keep their digits where one class is nearly sure.
        apart = (added * pi[1:]).sum(1, keepdim=True)
        apart = (pi * torch.cat([-apart, added - apart], 1).square()).sum(1)
        rest = (torch.expm1(R_added) / R_added).square() * apart.T
        if change.factors is not None:
            held = bag.penalty * (w * (bag.coupling @ w)).sum(1)
            rest = rest + ((change.factors - 1).square() / change.factors).T @ held.T
        points = grown * (moved + t * (torch.expm1(R) / R - 1) / R * bent)
        return t * (points.square() + rest).sqrt(), torch.maximum(R, R_added)


def own_steps(bag: LinearBag, point: Tensor, r: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """H∖⁻¹Jᵀr (b, K, d) of training points with residuals r (K, b) at the fit on Z, and the points' own logits (K, b) of them, A°r."""
    s = torch.bmm(bag.reference.left_out[point], r.T[:, :, None])[:, :, 0].T
    dual = r + second_product_(bag.reference.pi[1:, point], s.clone())
    return bag.base.solve(dual.T[:, :, None] * bag.X[point][:, None], dtype), s


def _own_scores(bag: LinearBag, change: Change) -> tuple[Tensor, Tensor]:
    """Scores (B,) of the candidates of objects at the fits without them, which all labels share, and their errors."""
    objects = change[:: bag.n_classes]
    theta, error = (part.repeat_interleave(bag.n_classes, -1) for part in fit_repenalised(bag, objects, CONVERGED))
    return relative.margin(at_points(change.x, theta), change.y), error + rounding(bag, change, theta)


def _count_last_points(bag: LinearBag, change: Change, order: Tensor) -> None:
    """Put the last point of a class above in an order (n, B): without it a free intercept runs away, and with it the point's loss."""
    if bag.free_intercept:
        last = torch.bincount(bag.y, minlength=bag.n_classes)[bag.y] == 1
        order[last[:, None] & (bag.y[:, None] != change.y)] = 1


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
