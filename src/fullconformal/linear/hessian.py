"""Hessians of many changed bags at once, their inverses, the leverages of all points, and bounds on the errors of fits.

A weighted Gram matrix is linear in the weights, Σ_i w_i x_i x_iᵀ, and a leverage x_iᵀMx_i is linear in M: with the products of the
features of each point laid out once, both are one matrix product for all bags together.

Every bound rests on one fact. For the softmax loss D³ℓ[u, u, δ] = E(u − Eu)²(δ − Eδ) ≤ range(δ)·D²ℓ[u, u], so moving all logits
of a bag by ranges ≤ R changes its Hessian by factors within e^(±R). Let H be the bag's Hessian at a reference point whose logits
are within range R of those at Θ, μ = |∇F(Θ)| in the norm of H⁻¹ and κ² = max_j spread(J_j H⁻¹ J_jᵀ). Then −∇F(Θ)ᵀδ ≥ e^(−R)
|δ|²(1 − e^(−κ|δ|))/(κ|δ|) for the way δ to the minimiser, hence |δ| ≤ −log(1 − κ e^R μ)/κ in the norm of H (`radius`), and the
logits of a point are off by a range of at most spread^½ times that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fullconformal.linear.bag import Change, LinearBag, at_points, without
from fullconformal.linear.products import gram, places
from fullconformal.losses.relative import pairs, second, spread, unpacked
from fullconformal.runtime.numerics import alone

# Numbers of the matrices of points that a CPU takes together, so that they stay in the cache.
TOGETHER = 2**19


def hessian(bag: LinearBag, change: Change | None, theta: Tensor, S: Tensor) -> Tensor:
    """∇²F (B, p, p) given ℓ'' (n, Q, B) of the training points, of which those of removed points are set to zero."""
    d, K, B = theta.shape
    p, Q = d * K, K * (K + 1) // 2
    weights = without(change, S).reshape(-1, Q * B)
    if Q * B == 1:
        # They are not negative, and the sum is a square.
        H = gram(bag.X * weights.sqrt())[None]
    else:
        packed = bag.products.gram(weights).view(-1, B).T.contiguous()
        H = packed.index_select(1, _places(d, K, S.device)).view(B, p, p)
    if change is not None and change.factors is not None:
        own = (bag.penalty[:, None] * change.factors).T[:, None, None]
        H.view(B, d, K, d, K).diagonal(dim1=1, dim2=3).add_(bag.coupling[:, :, None] * own)
    else:
        H += bag.penalty_matrix
    if change is not None:
        x, S = change.x, unpacked(second(at_points(change.x, theta)))
        left = torch.einsum("ib,klb->bikl", x, S)
        H += torch.einsum("bikl,jb->bikjl", left, x).reshape(B, p, p)
    return H


# A table of p² places, made once for all the steps of a fit and all blocks of candidates.
_places = lru_cache(maxsize=16)(places)


def factor(H: Tensor) -> Tensor | None:
    """Cholesky factors (B, p, p) of Hessians; None where one has none."""
    L: Tensor
    # Many small matrices are factorised one by one: threads only wait for one another there.
    with alone(H.shape[1] ** 3 / 16):
        L, info = torch.linalg.cholesky_ex(H)
    return L if not info.any() and math.isfinite(L.diagonal(dim1=1, dim2=2).sum()) else None


@dataclass(frozen=True)
class Curvature:
    """Hessians and their inverses M (B, p, p) of the columns' bags, A = J M Jᵀ of their points, and the relative error of A (B,)."""

    hessian: Tensor
    inverse: Tensor
    A: Tensor  # (n, Q, B), of the training points
    A_added: Tensor  # (Q, B), of the added points
    rounding: Tensor
    mass: Tensor  # Σ tr S (B,) of all points

    @cached_property
    def spread(self) -> Tensor:
        """spread(A) (n, B)."""
        return spread(self.A)

    @cached_property
    def spread_added(self) -> Tensor:
        """spread(A) (B,) of the added points."""
        return spread(self.A_added)


def curvature(bag: LinearBag, change: Change | None, theta: Tensor, S: Tensor) -> Curvature:
    """Curvature of the columns' bags at Θ (d, K, B), given ℓ'' (n, Q, B) of the training points."""
    d, K, B = theta.shape
    H = hessian(bag, change, theta, S)
    L = factor(H)
    if L is None:
        raise bag.no_minimiser(change)
    with alone((d * K) ** 3 / 16):
        M = torch.cholesky_inverse(L).mT.contiguous()  # symmetric, and laid out by columns
    flat, corners = M.view(B, -1), _corners(d, K, M.device)
    packed = flat.index_select(1, corners[0])
    packed = (packed.mul_(2) if K == 1 else packed.add_(flat.index_select(1, corners[1]))).T.reshape(-1, S.shape[1], B)
    packed[pairs(d, M.device)[1].diagonal()] *= 0.5
    A = bag.products.quadratic(packed.flatten(1)).view_as(S)
    A_added, own = A.new_zeros(packed.shape[1:]), pairs(K, M.device)[1].diagonal()
    mass = S[:, own].sum((0, 1))
    if change is not None:
        mass = mass + second(at_points(change.x, theta))[own].sum(0)
        x, (k, m) = change.x, pairs(K, M.device)[0]
        U = torch.einsum("bikjl,jb->bikl", M.view(B, d, K, d, K), x)
        A_added = torch.einsum("bikl,ib->klb", U, x)[k, m]
    return Curvature(H, M, A, A_added, _rounding(len(bag.X), K, H, M), mass)


@lru_cache(maxsize=16)
def _corners(d: int, K: int, device: torch.device) -> Tensor:
    """Where the packed pairs (i, j), (k, l) are in an inverse Hessian: at (i, k), (j, l) and at (j, k), (i, l), each (T·Q,)."""
    (i, j), (k, m) = pairs(d, device)[0][:, :, None], pairs(K, device)[0]
    return torch.stack([((i * K + k) * d + j) * K + m, ((j * K + k) * d + i) * K + m]).flatten(1)


def _rounding(n: int, K: int, H: Tensor, M: Tensor) -> Tensor:
    """Relative error of A (B,): (p + n^½)Kε times the condition number of H scaled to a unit diagonal, in the norm of row sums.

    Errors of H and of its factor are relative to (H_ii H_jj)^½, those of the sums J M Jᵀ to the row sums of |M| so scaled; and
    A ≥ diag(Σ_j x_j²/H_jj) over the largest row sum of the scaled |H|.
    """
    return _condition(H, M).mul(torch.finfo(M.dtype).eps * (M.shape[1] + n**0.5) * K)


def _condition(H: Tensor, M: Tensor) -> Tensor:
    """A bound on the condition (B,) of Hessians H scaled to a unit diagonal, with inverses M (B, p, p), in the norm of row sums."""
    scale = H.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
    condition: Tensor = (H.abs() @ scale.reciprocal() / scale).amax((1, 2)) * (M.abs() @ scale * scale).amax((1, 2))
    return condition


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

    def solve(self, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """H⁻¹ rows (B, K, d) by a product of some precision; in this order one of few columns takes half the time."""
        (B, K, d), M = rows.shape, self._inverses[dtype]
        found = (rows.transpose(1, 2).reshape(B, d * K).to(M.dtype) @ M).to(rows.dtype)
        return found.view(B, d, K).transpose(1, 2).contiguous()

    def length(self, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Lengths (B,) of rows (B, K, d) in the norm of H⁻¹, no less than they are: a product in some precision and what it rounds off.

        A sum Σ_b M_ab r_b of p terms is off by (p + 2)ε Σ_b |M_ab r_b|, and |M_ab|² ≤ M_aa M_bb.
        """
        p, roots = len(self.inverse), self.inverse.diagonal().sqrt().view(-1, rows.shape[1]).T
        unit = torch.finfo(self._inverses[dtype].dtype).eps
        rounded = (rows.abs() * roots).sum((1, 2)).square_().mul_((p + 2) * unit)
        return (rows * self.solve(rows, dtype)).sum((1, 2)).clamp_(min=0.0).add_(rounded).sqrt_()

    @cached_property
    def _inverses(self) -> dict[torch.dtype, Tensor]:
        """H⁻¹ for products in a precision: of float32 it is not where its rounding hides the least parts, as of columns that are equal."""
        condition = float(_condition(self.hessian[None], self.inverse[None])) * torch.finfo(torch.float32).eps
        return {torch.float64: self.inverse, torch.float32: self.inverse.float() if condition < 0.01 else self.inverse}

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


def largest_logit(bag: LinearBag, change: Change | None, theta: Tensor) -> Tensor:
    """Σ_j |x_j||θ_j| (B,) at Θ (d, K, B), x_j the largest there is."""
    size = bag.largest[:, None]
    if change is not None:
        size = torch.maximum(size, change.x.abs())
    return (size * theta.abs().amax(1)).sum(0)


def rounding(bag: LinearBag, change: Change | None, theta: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rounding error (B,) granted to a logit at Θ (d, K, B): four units of the largest sum of its terms there is."""
    return largest_logit(bag, change, theta).add(1).mul(4 * torch.finfo(dtype).eps)


def certify(
    bag: LinearBag, change: Change | None, theta: Tensor, G: Tensor, C: Curvature
) -> tuple[Tensor, Tensor, Tensor]:
    """μ, κ and the error of every logit (B,) by the bags' own curvature at Θ, where the gradients are G (d, K, B).

    Errors δ of the logits pass into the gradient as JᵀSδ, which in the norm of H⁻¹ is at most (Σ δᵀSδ)^½, and vᵀSv ≤ 8 tr S max|v|².
    """
    g = G.flatten(0, 1).T
    solved = (C.inverse @ g[:, :, None]).squeeze(2)
    mu = (1 + C.rounding) * (g * solved).sum(1).clamp(min=0.0).sqrt()
    mu = mu + (8 * C.mass).clamp(max=len(bag.X)).sqrt() * rounding(bag, change, theta)
    kappa = torch.maximum(C.spread.amax(0), C.spread_added).clamp(min=torch.finfo(mu.dtype).tiny).sqrt()
    kappa = kappa * (1 + C.rounding)
    return mu, kappa, kappa * radius(mu, 0.0, kappa)


def inner(x: Tensor, V: Tensor) -> Tensor:
    """J V (K, K, B) of a point x (d, B) per column, V (p, K, B)."""
    d, B = x.shape
    return torch.einsum("db,dklb->klb", x, V.view(d, -1, V.shape[1], B))
