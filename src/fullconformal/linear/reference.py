"""What bounds know of the fit on Z before any candidate is added: how its points would be left out, and how far its Hessian can move.

The curvature S = diag(π) − ππᵀ is vᵀSv = min_a Σ_k π_k (v_k − a)², so where the probabilities of point j change by factors within
[1 − low_j, 1 + high_j] its curvature does too. What of a change exceeds a part P that all points may share counts with the point's
leverage t_j, as J_jᵀS_jJ_j ≤ t_j H:

    H' ≤ (1 + P + E)H    for any P ≥ 0 with    E = Σ_j (high_j − P)₊ t_j        and H' ≥ (1 − P − E)H likewise from low_j

Without a point i the same holds with E/(1 − t_i) in place of E. Where penalties change, the columns are like points: that of column j is a
part of H whose leverage is at most Λ_j tr(T(H⁻¹)_jj), and changes by its factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, LinearBag, logits
from fullconformal.linear.hessian import TOGETHER, curvature
from fullconformal.losses import relative

# Shares of the largest change that are tried as the part common to all points.
SHARES = tuple(2.0**-k for k in range(8))


@dataclass(frozen=True)
class Reference:
    """The fit on Z point by point: log-probabilities (n, C, 1), A° (n, K, K), and of A and A° the spreads (n,).

    A° = (A⁻¹ − S)⁻¹ is the leverage a point has in the bag without it, so that A°r is the step of its logits that leaves it out.
    ``odds`` (n,) is a bound on t/(1 − t), t its largest leverage; infinite where rounding leaves nothing of 1 − t. ``columns`` (d,) are
    the leverages of the columns' penalties.
    """

    log_pi: Tensor
    left_out: Tensor
    spread: Tensor
    left_out_spread: Tensor
    odds: Tensor
    columns: Tensor
    rounding: float

    @property
    def leverage(self) -> Tensor:
        """t (n,)."""
        return torch.where(self.odds < torch.inf, self.odds / (1 + self.odds), 1.0)


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
    return Reference(relative.log_probabilities(z), left_out, C.spread[:, 0], left_out_spread, odds, columns, rounding)


@dataclass(frozen=True)
class Moved:
    """How far the Hessian has moved: bounds (n, B), for every point, on the factors of the Hessian without it."""

    least: Tensor
    most: Tensor

    @property
    def whole(self) -> Tensor:
        """The least factor (B,) of the whole Hessian: that of the bag without the point of the least leverage is no larger."""
        return self.least.amax(0)


def moved(at: Reference, z: Tensor, added: Tensor, error: Tensor, factors: Tensor | None = None) -> Moved:
    """Factors of the Hessians at logits z (n, K, B), off by ranges ≤ error (B,), with an added point of leverage t (B,) at the fit on Z.

    ``factors`` (d, B) of the penalties, where they change.
    """
    change = relative.log_probabilities(z).sub_(at.log_pi)
    up, down, t = change.amax(1), change.amin(1), at.leverage[:, None]
    if factors is not None:
        up, down = (torch.cat([part, factors.log()]) for part in (up, down))
        t = torch.cat([t, at.columns[:, None]])
    # Where nothing is known of a point its spread is infinite already.
    rest = 1 + at.odds[:, None].clamp(max=1 / EPS)
    common, excess = _split(torch.expm1(up), t)
    most = (1 + common + (excess + added) * rest) * torch.exp(error)
    common, excess = _split(-torch.expm1(down), t)
    least = torch.maximum(1 - common - excess * rest, torch.exp(down.amin(0))) * torch.exp(-error)
    return Moved(least, most)


def _split(change: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """P and E (B,) of changes (n, B) whose sum is least among the shares tried."""
    largest = change.amax(0).clamp(min=0.0)
    best = largest, torch.zeros_like(largest)
    for share in SHARES[1:]:
        common = share * largest
        excess = ((change - common).clamp_(min=0.0).mul_(t)).sum(0)
        better = common + excess < best[0] + best[1]
        best = torch.where(better, common, best[0]), torch.where(better, excess, best[1])
    return best
