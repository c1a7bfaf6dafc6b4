"""What bounds know of the fit on Z before any candidate is added: how its points would be left out, and how far its Hessian can move.

The curvature of a point with probabilities π is vᵀSv = min_a Σ_k π_k (v_k − a)², and is least at the mean a under π. So where π becomes π',

    vᵀS'v ≤ (1 + P)vᵀSv + Σ_k (π'_k − (1 + P)π_k)₊ (v_k − a)²        vᵀS'v ≥ (1 − P)vᵀSv − Σ_k ((1 − P)π_k − π'_k)₊ (v_k − a')²

for any P ≥ 0. A mean lies between: (v_k − a)² ≤ (1 − π_k)² max_l (v_k − v_l)², which for v = J_jw is at most (1 − π_k)² m_jk |w|² in the
norm of H, m_jk = max_l (e_k − e_l)ᵀA_j(e_k − e_l). With the sum E(P), over all points and classes, of the excess beyond the common part P

    (1 − P − E(P))H ≤ H' ≤ (1 + P + E(P))H

Without a point i the same holds with E/(1 − t_i) in place of E. Two classes have S = π(1 − π) in place of π, and A in place of (1 − π)²m.
Where penalties change, the columns are like points: that of column j is a part of H whose leverage is at most Λ_j tr(T(H⁻¹)_jj), and
changes by its factor.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, Change, LinearBag, logits
from fullconformal.linear.hessian import TOGETHER, Curvature, curvature
from fullconformal.linear.hessian import rounding as logit_rounding
from fullconformal.linear.products import squares
from fullconformal.losses import relative

KEPT = 2**27  # bytes of flows to keep
# Multiples of the mean change that are tried as the part P common to all points.
MULTIPLES = (6.0, 20.0, 60.0)


@dataclass(frozen=True)
class Reference:
    """The fit on Z point by point: probabilities (C, n), margins (n,), A° (n, K, K), and of A and A° the spreads (n,); m (C, n) as above.

    A margin is that of the own class against the others, so what moves it is m of that class: ``apart`` of A and ``left_out_apart`` of
    A° (n,), at most the spreads; ``left_out_against`` (n, C) has that of each class against the own.

    A° = (A⁻¹ − S)⁻¹ is the leverage a point has in the bag without it, so that A°r is the step of its logits that leaves it out.
    ``odds`` (n,) is a bound on t/(1 − t), t its largest leverage; infinite where rounding leaves nothing of 1 − t. ``columns`` (d,) are
    the leverages of the columns' penalties. ``own`` (C, n) is 1 for the class that a point is of, else 0, in float32; ``rough_error`` is
    that which rounding to float32 leaves in logits of a fit.
    """

    pi: Tensor
    margin: Tensor
    most_apart: Tensor
    left_out: Tensor
    spread: Tensor
    left_out_spread: Tensor
    apart: Tensor
    left_out_apart: Tensor
    left_out_against: Tensor
    odds: Tensor
    columns: Tensor
    own: Tensor
    rounding: float
    rough_error: float

    @property
    def rough(self) -> torch.dtype:
        """What to take rough logits in."""
        return torch.float32 if self.rough_error < 1e-2 else torch.float64

    @cached_property
    def mass(self) -> tuple[Tensor, Tensor]:
        """What curvature is made of, π or S (C or 1, n), and what an excess of it weighs, in float32."""
        here, weight = mass(self.pi, self.most_apart)
        return here.float().contiguous(), weight.float().contiguous()

    @cached_property
    def rest(self) -> Tensor:
        """1/(1 − t) (n,), by which an excess grows without a point; where nothing is known of it its spread is infinite already."""
        return 1 + self.odds.clamp(max=1 / EPS)

    @cached_property
    def typical(self) -> float:
        """The median of it."""
        return float(self.rest.median())

    @cached_property
    def total(self) -> float:
        """The weight of all of it."""
        here, weight = mass(self.pi, self.most_apart)
        return max(float((here * weight).sum()), EPS)


@torch.no_grad()
def reference(bag: LinearBag) -> Reference:
    """The reference of a bag's fit on Z."""
    theta = bag.base.theta[:, :, None]
    z = logits(bag, theta)
    S = relative.second(z)
    C = curvature(bag, None, theta, S.clone())
    pi, margin = relative.all_probabilities(z)[:, :, 0].T.contiguous(), relative.margin(z[:, :, 0].T, bag.y)
    own = (torch.arange(bag.n_classes, device=z.device)[:, None] == bag.y).float()
    off = len(z) ** 0.5 * logit_rounding(bag, None, theta, torch.float32)
    rough_error = float(bag.base.kappa * (off + torch.finfo(torch.float32).eps * C.spread.sqrt().sum()))
    blocks = C.inverse[0].view(*(bag.base.theta.shape * 2)).diagonal(dim1=0, dim2=2)
    columns = (bag.penalty * (bag.coupling[:, :, None] * blocks).sum((0, 1))).clamp(0.0, 1.0)
    most_apart = relative.most_apart(C.A)[:, :, 0].T.contiguous()
    return Reference(pi, margin, most_apart, columns=columns, own=own, rough_error=rough_error, **_leverages(bag, C, S))


def _leverages(bag: LinearBag, C: Curvature, S: Tensor) -> dict[str, Any]:
    """What a reference holds of leverages, by a Hessian made of curvature S (n, Q, 1)."""
    K, rounding, eye = bag.K, float(C.rounding), torch.eye(bag.K, dtype=S.dtype, device=S.device)
    left_out, odds = S.new_empty(len(S), K, K), S.new_empty(len(S))
    step = max(1, TOGETHER // (K * K))
    for at in range(0, len(S), step):
        A, s = (relative.unpacked(part[at : at + step])[..., 0] for part in (C.A, S))
        found, _ = torch.linalg.solve_ex(eye - A @ s, A)
        left_out[at : at + step] = found
        # I + A°S = (I − AS)⁻¹ has eigenvalues 1/(1 − t).
        odds[at : at + step] = (found * s).sum((1, 2))
    # The relative error of 1 − t is that of A times t/(1 − t).
    sure = (odds >= 0) & (odds * rounding < 1e-3) & torch.isfinite(left_out).all(2).all(1)
    packed, against = left_out[:, *relative.pairs(K, S.device)[0], None], relative.against(left_out, bag.y)
    left_out_spread, left_out_apart = (
        torch.where(sure, part, torch.inf) for part in (relative.spread(packed)[:, 0], against.amax(1))
    )
    return {
        "left_out": left_out, "spread": C.spread[:, 0], "left_out_spread": left_out_spread, "left_out_apart": left_out_apart,
        "apart": relative.apart(C.A, bag.y[:, None])[:, 0], "left_out_against": against, "odds": torch.where(sure, odds, torch.inf),
        "rounding": rounding,
    }  # fmt: skip


@torch.no_grad()
def below(bag: LinearBag, pi: Tensor, factors: Tensor | None) -> LinearBag:
    """The bag with a Hessian for its base that is below those of all bags with probabilities π (B, C, n) and factors (d, B) of penalties.

    Leverages by it are above theirs: as far as some of them have moved their Hessians, hardly further for there being many of them. Fits by
    it go on from others: what `hessian_factors` are taken from stays that of the fit on Z.
    """
    S, d = relative.least_second(pi), len(bag.penalty)
    least = None if factors is None else factors.amin(1, keepdim=True)
    # A point of zeros adds nothing.
    change = Change(bag.X.new_zeros(d, 1), bag.y.new_zeros(1), factors=least)
    C = curvature(bag, change, bag.base.theta[:, :, None], S.clone())
    base = replace(
        bag.base, hessian=C.hessian[0], inverse=C.inverse[0], kappa=float(C.spread.amax() ** 0.5 * (1 + C.rounding))
    )
    # What is kept of it is kept of the other, too.
    seen = copy(bag)
    vars(seen).update(energies=bag.energies, base=base, reference=replace(bag.reference, **_leverages(bag, C, S)))
    return seen


@dataclass(frozen=True)
class HessianFactors:
    """Factors by which Hessians have changed: those without a point are within ``least`` and ``most`` of its 1/(1 − t).

    They are low − low_excess/(1 − t), at least the floor, and high + high_excess/(1 − t), each (B,); ``whole`` and ``top`` (B,) are bounds
    on those of the Hessian of the training points, with all of them and without the added one.
    """

    low: Tensor
    low_excess: Tensor
    floor: Tensor
    high: Tensor
    high_excess: Tensor
    whole: Tensor
    top: Tensor

    def __getitem__(self, columns: Tensor | tuple[slice, None]) -> HessianFactors:
        """Those of some columns."""
        return HessianFactors(*(getattr(self, field.name)[columns] for field in fields(self)))

    def least(self, rest: Tensor) -> Tensor:
        """The least factors, of points with 1/(1 − t), one for each column, or (n,) for columns (B, 1)."""
        return torch.maximum(torch.addcmul(self.low, self.low_excess, rest, value=-1.0), self.floor)

    def most(self, rest: Tensor) -> Tensor:
        """The largest ones."""
        return torch.addcmul(self.high, self.high_excess, rest)

    def widened(self, error: Tensor) -> HessianFactors:
        """The same where logits are off by ranges ≤ error (B,)."""
        shrink, grow = torch.exp(-error), torch.exp(error)
        return HessianFactors(
            self.low * shrink, self.low_excess * shrink, self.floor * shrink, self.high * grow, self.high_excess * grow,
            self.whole * shrink, self.top * grow,
        )  # fmt: skip


def hessian_factors(at: Reference, pi: Tensor, added: Tensor, factors: Tensor | None = None) -> HessianFactors:
    """Factors of the Hessians where probabilities are π (B, C, n), with an added point of leverage t (B,) at the fit on Z.

    ``factors`` (d, B) of the penalties, where they change.
    """
    (before, weight), now = at.mass, _matter(pi.float())

    def above(P: Tensor, every: int, now: Tensor, before: Tensor, weight: Tensor) -> Tensor:
        excess = torch.addcmul(now, before, 1 + P[:, None, None], value=-1.0).clamp_(min=0.0)
        E = _bounded(at, excess.flatten(1) @ weight.flatten(), every)
        return E if factors is None else E + at.columns @ (factors - 1 - P).clamp(min=0.0)

    P, E = _smallest(at, above, (now, before, weight), added, torch.inf)
    low = least_factors(at, pi, factors)
    return replace(low, high=1 + P, high_excess=E + added, top=1 + P + E)


def least_factors(at: Reference, pi: Tensor, factors: Tensor | None = None) -> HessianFactors:
    """The same where only the least factors are asked for: of the largest nothing is known."""
    before, (now, weight) = at.mass[0], mass(pi.float(), at.most_apart.float())

    def below(P: Tensor, every: int, now: Tensor, before: Tensor, weight: Tensor) -> Tensor:
        excess = torch.addcmul(now, before, P[:, None, None] - 1).clamp_(max=0.0)
        sums = torch.linalg.vecdot(excess.flatten(1), weight.expand_as(excess).flatten(1))
        E = _bounded(at, -sums, every)
        return E if factors is None else E + at.columns @ (1 - P - factors).clamp(min=0.0)

    P, E = _smallest(at, below, (now, before, weight), pi[:, 0, 0].double(), 0.9)
    # No Hessian is below zero, and a change by factors of all parts is the last resort.
    floor, unknown, far = torch.zeros_like(P), torch.full_like(P, torch.inf), P + E * at.typical > 0.5
    if bool(far.any()):
        last = (pi[far] / at.pi.clamp(min=torch.finfo(pi.dtype).tiny)).amin((1, 2)).clamp(max=1.0).double()
        floor[far] = last if factors is None else torch.minimum(last, factors[:, far].amin(0))
    return HessianFactors(1 - P, E, floor, unknown, unknown, torch.maximum(1 - P - E, floor), unknown)


def _bounded(at: Reference, sums: Tensor, every: int) -> Tensor:
    """What sums (B,) in float32 over one of ``every`` so many points can be: off by units of each term, and by one for each term."""
    unit = torch.finfo(torch.float32).eps
    return every * sums.double() * (1 + unit * at.mass[0].numel()) + 8 * unit * at.total


def mass(pi: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """What curvature is made of, π (..., C, n) or S (..., 1, n), and what an excess of it weighs."""
    return _matter(pi), apart[..., :1, :] if pi.shape[-2] == 2 else (1 - pi).square_().mul_(apart)


def _matter(pi: Tensor) -> Tensor:
    """The former alone."""
    return pi[..., :1, :] * pi[..., 1:, :] if pi.shape[-2] == 2 else pi


def _smallest(
    at: Reference, excess: Callable[..., Tensor], parts: tuple[Tensor, ...], like: Tensor, largest: float
) -> tuple[Tensor, Tensor]:
    """P and E(P) (B,) whose sum, E as it is without a point, is about the least among zero and multiples of the mean change.

    P is chosen by some of the points, 100 or more: the parts (..., n) of ``excess(P, every, *parts)`` that are theirs.
    """
    P, every, rest = torch.zeros_like(like, dtype=torch.float32), max(1, at.pi.shape[1] // 100), at.typical
    some = [part[..., ::every].contiguous() for part in parts]
    E = first = excess(P, every, *some)
    for times in MULTIPLES:
        common = (times * first / at.total).clamp(max=largest).float()
        beyond = excess(common, every, *some)
        better = common + beyond * rest < P + E * rest
        P, E = torch.where(better, common, P), torch.where(better, beyond, E)
    return P.double(), E if every == 1 else excess(P, 1, *parts)


class Energies:
    """Bounds on the leverage A'_i that a point has in a bag without it, where probabilities π of the fit on Z become π'.

    With W = H⁻¹Jᵢᵀ, H without the point, a step Wv moves the logit of class k of a point j by b_jkᵀv more than their mean under π. The
    energy of a flow that carries Jᵢᵀv through the points bounds vᵀA'v from above (Thomson), that of a step from below (Rayleigh):

        A°V⁻¹A° ≤ A' ≤ U        U = Σ_jk (π_jk²/π'_jk) b_jk b_jkᵀ + Σ_a P_a/f_a        V = Σ_jk π'_jk b_jk b_jkᵀ + Σ_a f_a P_a

    over j ≠ i, in V the added point too, with P_a = Λ_a W_aᵀTW_a and factors f_a of the penalties. Where nothing has moved both are A°, and
    they differ by the square of what has.
    """

    def __init__(self, bag: LinearBag) -> None:
        self.bag, self.kept = bag, dict[int, tuple[Tensor, Tensor, Tensor]]()

    def __getstate__(self) -> dict[str, object]:
        """Without what is kept, which can be made again."""
        return {"bag": self.bag, "kept": {}}

    def _flows(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W (h, K, K, d), directions v first, b (h, K, C·n) and P (h, K, K, d) of points (h,)."""
        bag, at = self.bag, self.bag.reference
        d, K = bag.base.theta.shape
        pi, eye = at.pi[1:, points].T, torch.eye(K, dtype=at.pi.dtype, device=at.pi.device)
        S = torch.diag_embed(pi) - pi[:, :, None] * pi[:, None]
        V = bag.base.solve_points(bag.X[points].T).view(d, K, K, -1)
        W = torch.einsum("akmh,hmv->hvka", V, eye + S @ at.left_out[points]).contiguous()
        u = W @ bag.columns(W.dtype)
        mean = (u * at.pi[1:]).sum(2, keepdim=True)
        b = torch.cat([-mean, u.sub_(mean)], 2)
        b[torch.arange(len(points), device=b.device), :, :, points] = 0.0
        return W, b.flatten(2), torch.einsum("hvka,huka->hvua", W, bag.coupling @ W) * bag.penalty

    def _of(self, point: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of one point, b in float32."""
        found = self.kept.get(point)
        if found is None:
            W, b, P = self._flows(torch.tensor([point], device=self.bag.y.device))
            found = W[0].flatten(0, 1), b[0].float(), P[0].flatten(0, 1)
            if len(self.kept) < KEPT // (4 * b.numel()):
                self.kept[point] = found
        return found

    def enclose(self, change: Change, pi: Tensor, own: Tensor, column: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds L and U (b, K, K) on A' of pairs of a column and a point (b,), probabilities (B, C, n) and, of those added, (C, B)."""
        at, K, now = self.bag.reference, self.bag.K, pi.double().flatten(1)
        weights, place = torch.stack([at.pi.flatten().square() / now, now], 1), relative.pairs(K, pi.device)[1]
        out, u = now.new_empty(len(column), 2, K, K), now.new_empty(len(column), K, K)
        factors = torch.ones_like(change.x) if change.factors is None else change.factors
        pairs = point.argsort(stable=True)
        present, sizes = point[pairs].unique_consecutive(return_counts=True)
        for i, part in zip(present.tolist(), pairs.split(sizes.tolist()), strict=True):
            (W, b, P), c = self._of(i), column[part]
            f = factors[:, c]
            held = (P @ torch.stack([1 / f, f])).view(2, K, K, -1).permute(3, 0, 1, 2)
            b = b.double()
            # Where few candidates ask about a point, weights meet its flow before products of two classes are summed.
            if 4 * len(c) < K:
                summed = ((weights[c][:, :, None] * b).view(-1, b.shape[1]) @ b.T).view(-1, 2, K, K)
            else:
                summed = (weights[c] @ squares(b).T)[..., place]
            out[part] = summed + held
            u[part] = (W @ change.x[:, c]).T.view(-1, K, K)
        p = own[:, column].T[:, None]
        mean = (u * p[..., 1:]).sum(2, keepdim=True)
        u = torch.cat([-mean, u - mean], 2)
        A, (U, V) = at.left_out[point], out.unbind(1)
        return A @ torch.linalg.solve_ex(V + (u * p) @ u.mT, A)[0], U
