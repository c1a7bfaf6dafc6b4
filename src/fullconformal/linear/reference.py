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
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, LinearBag, logits
from fullconformal.linear.hessian import TOGETHER, curvature
from fullconformal.losses import relative

# Multiples of the mean change that are tried as the part P common to all points.
MULTIPLES = (6.0, 16.0, 40.0, 100.0)


@dataclass(frozen=True)
class Reference:
    """The fit on Z point by point: probabilities (n, C, 1), A° (n, K, K), and of A and A° the spreads (n,); m (n, C, 1) as above.

    A° = (A⁻¹ − S)⁻¹ is the leverage a point has in the bag without it, so that A°r is the step of its logits that leaves it out.
    ``odds`` (n,) is a bound on t/(1 − t), t its largest leverage; infinite where rounding leaves nothing of 1 − t. ``columns`` (d,) are
    the leverages of the columns' penalties.
    """

    pi: Tensor
    most_apart: Tensor
    left_out: Tensor
    spread: Tensor
    left_out_spread: Tensor
    odds: Tensor
    columns: Tensor
    rounding: float

    @cached_property
    def mass(self) -> tuple[Tensor, Tensor]:
        """What curvature is made of, π or S (n, C or 1, 1), and what an excess of it weighs, in float32."""
        here, weight = mass(self.pi, self.most_apart)
        return here.float(), weight.float()

    @cached_property
    def total(self) -> float:
        """The weight of all of it."""
        here, weight = mass(self.pi, self.most_apart)
        return max(float((here * weight).sum()), EPS)


@torch.no_grad()
def reference(bag: LinearBag) -> Reference:
    """The reference of a bag's fit on Z."""
    theta, K = bag.base.theta[:, :, None], bag.K
    z = logits(bag, theta)
    S = relative.second(relative.probabilities(z))
    C = curvature(bag, None, theta, S.clone())
    rounding, eye = float(C.rounding), torch.eye(K, dtype=z.dtype, device=z.device)
    left_out, odds = z.new_empty(len(z), K, K), z.new_empty(len(z))
    step = max(1, TOGETHER // (K * K))
    for at in range(0, len(z), step):
        A, s = (relative.unpacked(part[at : at + step])[..., 0] for part in (C.A, S))
        found, _ = torch.linalg.solve_ex(eye - A @ s, A)
        left_out[at : at + step] = found
        # I + A°S = (I − AS)⁻¹ has eigenvalues 1/(1 − t).
        odds[at : at + step] = (found * s).sum((1, 2))
    # The relative error of 1 − t is that of A times t/(1 − t).
    sure = (odds >= 0) & (odds * rounding < 1e-3) & torch.isfinite(left_out).all(2).all(1)
    odds = torch.where(sure, odds, torch.inf)
    i, j = relative.pairs(K, z.device)[0]
    left_out_spread = relative.spread(left_out[:, i, j, None])[:, 0]
    left_out_spread = torch.where(sure, left_out_spread, torch.inf)
    blocks = C.inverse[0].view(*(bag.base.theta.shape * 2)).diagonal(dim1=0, dim2=2)
    columns = (bag.penalty * (bag.coupling[:, :, None] * blocks).sum((0, 1))).clamp(0.0, 1.0)
    pi, apart = relative.all_probabilities(z), relative.most_apart(C.A)
    return Reference(pi, apart, left_out, C.spread[:, 0], left_out_spread, odds, columns, rounding)


@dataclass(frozen=True)
class Moved:
    """How far the Hessian has moved: bounds (n, B), for every point, on the factors of the Hessian without it."""

    least: Tensor
    most: Tensor

    @property
    def whole(self) -> Tensor:
        """The least factor (B,) of the whole Hessian: that of the bag without the point of the least leverage is no larger."""
        return self.least.amax(0)


def moved(at: Reference, pi: Tensor, added: Tensor, error: Tensor, factors: Tensor | None = None) -> Moved:
    """Factors of the Hessians where probabilities are π (n, C, B), of logits off by ranges ≤ error (B,), with an added point of leverage
    t (B,) at the fit on Z.

    ``factors`` (d, B) of the penalties, where they change.
    """
    before, weight = at.mass
    now, own_weight = mass(pi.float(), at.most_apart.float())
    # Float32 is off by units of each term, and by one for each term of the sum.
    unit = torch.finfo(torch.float32).eps
    of_sum, of_terms = 1 + unit * now[..., 0].numel(), 8 * unit * at.total

    def above(P: Tensor) -> Tensor:
        excess = torch.addcmul(now, before, 1 + P, value=-1.0).clamp_(min=0.0)
        E = (weight.view(1, -1) @ excess.view(-1, len(P)))[0].double() * of_sum + of_terms
        return E if factors is None else E + at.columns @ (factors - 1 - P).clamp(min=0.0)

    def below(P: Tensor) -> Tensor:
        excess = torch.addcmul(now, before, P - 1).clamp_(max=0.0).mul_(own_weight)
        E = -excess.sum((0, 1)).double() * of_sum + of_terms
        return E if factors is None else E + at.columns @ (1 - P - factors).clamp(min=0.0)

    # Where nothing is known of a point its spread is infinite already.
    rest = 1 + at.odds[:, None].clamp(max=1 / EPS)
    share, typical = at.total, float(rest.median())
    P, E = _smallest(above, error, share, typical, torch.inf)
    most = (1 + P + (E + added) * rest) * torch.exp(error)
    P, E = _smallest(below, error, share, typical, 0.9)
    least = 1 - P - E * rest
    # A change by factors of all parts is the last resort.
    far = (P + E * typical > 0.5).nonzero().squeeze(1)
    if len(far):
        last = (pi[..., far] / at.pi.clamp(min=torch.finfo(pi.dtype).tiny)).amin((0, 1)).clamp(max=1.0)
        last = last if factors is None else torch.minimum(last, factors[:, far].amin(0))
        least[:, far] = torch.maximum(least[:, far], last)
    # No Hessian is below zero: nothing is known there.
    return Moved(least.clamp_(min=0.0) * torch.exp(-error), most)


def mass(pi: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """What curvature is made of, π (n, C, B) or S (n, 1, B), and what an excess of it weighs."""
    if pi.shape[1] == 2:
        return (pi[:, :1] * pi[:, 1:]), apart[:, :1]
    return pi, (1 - pi).square_().mul_(apart)


def _smallest(
    excess: Callable[[Tensor], Tensor], like: Tensor, total: float, rest: float, largest: float
) -> tuple[Tensor, Tensor]:
    """P and E(P) (B,) whose sum, E as it is without a point, is least among zero and multiples of the mean change."""
    P = torch.zeros_like(like, dtype=torch.float32)
    E = first = excess(P)
    for times in MULTIPLES:
        common = (times * first / total).clamp(max=largest).float()
        beyond = excess(common)
        better = common + beyond * rest < P + E * rest
        P, E = torch.where(better, common, P), torch.where(better, beyond, E)
    return P.double(), E
