"""Fits with bounds on their errors.

Every bound rests on one fact. For the softmax loss D³ℓ[u, u, δ] = E(u − Eu)²(δ − Eδ) ≤ range(δ)·D²ℓ[u, u], so moving all logits
of a bag by ranges ≤ R changes its Hessian by factors within e^(±R). Let H be the bag's Hessian at a reference point whose logits
are within range R of those at Θ, μ = |∇F(Θ)| in the norm of H⁻¹ and κ² = max_j spread(J_j H⁻¹ J_jᵀ). Then −∇F(Θ)ᵀδ ≥ e^(−R)
|δ|²(1 − e^(−κ|δ|))/(κ|δ|) for the way δ to the minimiser, hence |δ| ≤ −log(1 − κ e^R μ)/κ in the norm of H (`radius`), and the
logits of a point are off by a range of at most spread^½ times that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, Change, LinearBag
from fullconformal.linear.hessian import Curvature
from fullconformal.losses.relative import pairs, spread


@dataclass(frozen=True)
class Fits:
    """Fits Θ (d, K, B), the bound on the error of every logit of the bag (B,) and the gradients left (d, K, B)."""

    theta: Tensor
    error: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Base:
    """The fit on Z: Θ (d, K), its Hessian and inverse (p, p), κ, and the bound on the error of its logits."""

    theta: Tensor
    hessian: Tensor
    inverse: Tensor
    kappa: float
    error: float

    def coefficients(self) -> Tensor:
        """Weights as scikit-learn has them: (1, d) for two classes, else (C, d) whose rows sum to zero."""
        if self.theta.shape[1] == 1:
            return self.theta.T
        W = torch.cat([torch.zeros_like(self.theta[:, :1]), self.theta], 1).T
        return W - W.mean(0)

    def solve_points(self, x: Tensor) -> Tensor:
        """H⁻¹Jᵀ (p, K, B) of points x (d, B)."""
        d, K = self.theta.shape
        blocks = self.inverse.view(d * K, d, K).transpose(1, 2).reshape(d * K * K, d)
        return (blocks @ x).view(d * K, K, -1)

    def spread_at(self, x: Tensor) -> Tensor:
        """spread(J H⁻¹ Jᵀ) (B,) of points x (d, B)."""
        i, j = pairs(self.theta.shape[1], x.device)[0]
        return spread(inner(x, self.solve_points(x))[i, j])

    def error_at(self, x: Tensor) -> Tensor:
        """The error (B,) of the logits of points x (d, B)."""
        return self.error * (self.spread_at(x).sqrt() / self.kappa).clamp(min=1.0)


def radius(mu: Tensor, R: Tensor | float, kappa: Tensor) -> Tensor:
    """How far the minimiser can be, in the norm of the reference Hessian at range R; infinite where it cannot be told."""
    x = kappa * torch.exp(torch.as_tensor(R)) * mu
    return torch.where(x < 1, -torch.log1p(-x.clamp(max=1.0)) / kappa, torch.inf)


def rounding(bag: LinearBag, change: Change | None, theta: Tensor) -> Tensor:
    """Rounding error (B,) granted to a logit at Θ (d, K, B): four units of Σ_j |x_j||θ_j|, x_j the largest there is."""
    size = bag.largest[:, None]
    if change is not None:
        size = torch.maximum(size, change.x.abs())
    return (size * theta.abs().amax(1)).sum(0).add(1).mul(4 * EPS)


def certify(
    bag: LinearBag, change: Change | None, theta: Tensor, G: Tensor, C: Curvature
) -> tuple[Tensor, Tensor, Tensor]:
    """μ, κ and the error of every logit (B,) by the bags' own curvature at Θ, where the gradients are G (d, K, B).

    The rounding of n logits passes into the gradient by at most n^½/2 of it, in the norm of H⁻¹.
    """
    g = bag.seen(G.flatten(1), C.inverse.dtype).view_as(G).flatten(0, 1).T
    solved = (C.inverse @ g[:, :, None].to(C.inverse.dtype)).squeeze(2)
    mu = (1 + C.rounding) * (g * solved).sum(1).clamp(min=0.0).sqrt()
    mu = mu + len(bag.X) ** 0.5 * rounding(bag, change, theta)
    kappa = torch.maximum(C.spread.amax(0), C.spread_added).clamp(min=torch.finfo(mu.dtype).tiny).sqrt()
    kappa = kappa * (1 + C.rounding)
    return mu, kappa, kappa * radius(mu, 0.0, kappa)


def inner(x: Tensor, V: Tensor) -> Tensor:
    """J V (K, K, B) of a point x (d, B) per column, V (p, K, B)."""
    d, B = x.shape
    return torch.einsum("db,dklb->klb", x, V.view(d, -1, V.shape[1], B))
