"""Leaving a point out without a refit, at the fit Θ̄ and Hessian H̄ of the bag it is in (approximate leave-one-out).

With A = J H̄⁻¹ Jᵀ, S = ℓ'', r = ℓ' of the point and T = A^½ S A^½, the logits of a share q of the way to leaving it out are

    z + A^½ φ_q(T) A^½ r        φ_q(t) = ((1 − t)^(−q) − 1)/t        so φ_0 = 0 and φ_1 = 1/(1 − t): one Newton step

`bounds` says how far the exact leave-one-out fit can be from that step, `score_error` how errors of Θ̄ and A pass through the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.convex.bag import EPS, Change, LinearBag, logits
from fullconformal.convex.fits import Fits, radius, refit
from fullconformal.convex.hessian import curvature
from fullconformal.convex.loss import probabilities, residual, second, spread, unpacked


@dataclass(frozen=True)
class Deletion:
    """Shift of the logits (..., K, B), |A^½ r| (..., B), and e = det(I − T) (..., B), which is at most 1 − max t."""

    shift: Tensor
    norm: Tensor
    slack: Tensor


def deletion(A: Tensor, S: Tensor, r: Tensor, q: float) -> Deletion:
    """The shift by which a point is left out, from packed A, S (..., Q, B) and residuals r (..., K, B)."""
    if A.shape[-2] == 1:
        t = (A * S).clamp_(max=1 - EPS)
        shift = phi(t, q).mul_(A).mul_(r)
        return Deletion(shift, A.sqrt().mul_(r).abs_().squeeze(-2), t.neg_().add_(1).squeeze(-2))
    L = _cholesky(unpacked(A))
    T = _product(L.transpose(-2, -3), _product(unpacked(S), L))
    b = _product(L.transpose(-2, -3), r.unsqueeze(-2))
    G = _cholesky(torch.eye(T.shape[-2], dtype=T.dtype, device=T.device)[..., None] - T)
    v = _backward(G, _forward(G, b)) if q == 1 else _phi_eigen(T, b, q)
    shift = _product(L, v).squeeze(-2).nan_to_num_(0.0, 0.0, 0.0)  # not finite only where the slack is zero
    slack = G.diagonal(dim1=-3, dim2=-2).prod(-1).square()
    return Deletion(shift, b.square().sum(-3).squeeze(-2).sqrt(), slack)


def phi(t: Tensor, q: float) -> Tensor:
    """φ_q(t) = ((1 − t)^(−q) − 1)/t for 0 ≤ t < 1."""
    if q == 1:
        return (1 - t).reciprocal_()
    return torch.where(t > EPS, torch.expm1(-q * torch.log1p(-t)) / t.clamp(min=EPS), q)


def score_error(A: Tensor, out: Deletion, logit_error: Tensor, A_error: Tensor) -> Tensor:
    """How far the shifted logits (..., B) can be off, in range, for any q ≤ 1: from errors of Θ̄ and from relative errors of A.

    Logits off by ranges ≤ R put A and S off by factors within e^(±R), and r by S times that. Term by term of the power
    series of φ_q, whose coefficients are at most one, |A^(−½) dshift| ≤ R((1 + t)|A^½ r|/(1 − t)² + ½ t^½/(1 − t)) to first
    order. Twice that covers the higher orders while the errors are small against 1 − t; where they are not, nothing is known.
    """
    e, root = out.slack, spread(A).sqrt()
    root = root.div_(e)
    by_A = (2 - e).mul_(2 * out.norm).div_(e).mul_(root)
    error = root.add_(1).add_(by_A).mul_(logit_error).add_(by_A.mul_(A_error))
    return error.masked_fill_(e < 4 * (2 * logit_error + A_error), torch.inf)


def bounds(A: Tensor, r: Tensor, kappa: Tensor, mu: Tensor, out: Deletion) -> Tensor:
    """How far logits (..., B) can be, in range, from those of the exact leave-one-out fit, where ``out`` is for q = 1.

    The bag without the point has Hessian H̄ − JᵀSJ, gradient −Jᵀr + (what is left, μ in the norm of H̄⁻¹), and κ grows by at most
    (1 − t)^(−½). The Newton step has length ν = (r·shift)^½ and moves logits by ranges ≤ R = κν, so the gradient behind it is at
    most ((e^R − 1)/R − 1)ν, which `radius` turns into a distance.
    """
    root = out.slack.sqrt()
    kappa, mu = kappa / root, mu / root
    nu = (r * out.shift).sum(-2).clamp(min=0.0).sqrt()
    R = kappa * nu
    behind = torch.where(R > 1e-4, torch.expm1(R) / R.clamp(min=1e-4) - 1, 0.5 * R * (1 + R)) * nu
    return spread(A).sqrt() / root * radius(behind + mu, R, kappa)


def duals(S: Tensor, r: Tensor, shift: Tensor) -> Tensor:
    """u = r + S·shift (n, K, B), the point's share of the gradient after it was left out: the step is H̄⁻¹Jᵀu."""
    return r + (S * shift if r.shape[-2] == 1 else torch.einsum("nklb,nlb->nkb", unpacked(S), shift))


@torch.no_grad()
def leave_one_out(bag: LinearBag, memory: int = 2**28) -> Fits:
    """Fits of the n bags without one point each: a Newton step from the fit on Z, then `refit` until converged."""
    (n, d), base = bag.X.shape, bag.base
    theta = base.theta[:, :, None]
    pi = probabilities(logits(bag, theta))
    S, r = second(pi), residual(pi, bag.y[:, None])
    A = curvature(bag, None, theta, S.clone()).A
    u = duals(S, r, deletion(A, S, r, 1).shift)
    step = (bag.X[:, :, None] * u[:, None, :, 0]).flatten(1) @ base.inverse
    start = theta + step.T.reshape(d, bag.K, n)
    # The added point of zeros has a constant loss: nothing is added.
    change = Change(bag.X.new_zeros(d, n), bag.y.new_zeros(n), torch.arange(n, device=bag.X.device))
    width = max(1, memory // (32 * n * bag.K))
    parts = [slice(at, at + width) for at in range(0, n, width)]
    fits = [refit(bag, change[part], start[:, :, part]) for part in parts]
    return Fits(*(torch.cat([getattr(f, name) for f in fits], -1) for name in ("theta", "error", "gradient")))


# K × K matrices (..., K, K, B), small ones of many points: loops over K, arrays over the rest. Wide ones go to BLAS and LAPACK.
WIDE = 10


def _product(X: Tensor, Y: Tensor) -> Tensor:
    """Matrix products of (..., I, J, B) and (..., J, L, B)."""
    if X.shape[-2] > WIDE and Y.shape[-2] > 1:
        return torch.einsum("...ijb,...jlb->...ilb", X, Y)
    out = X[..., :, :1, :] * Y[..., :1, :, :]
    for j in range(1, X.shape[-2]):
        out += X[..., :, j : j + 1, :] * Y[..., j : j + 1, :, :]
    return out


def _cholesky(A: Tensor) -> Tensor:
    """Lower Cholesky factors (..., K, K, B); a pivot that is zero up to rounding leaves its column zero."""
    if A.shape[-2] > WIDE:
        wide: Tensor
        wide, failed = torch.linalg.cholesky_ex(A.movedim(-1, -3))
        pivots, entries = wide.diagonal(dim1=-2, dim2=-1).square(), A.diagonal(dim1=-3, dim2=-2)
        if not bool(failed.any()) and bool((pivots > EPS * entries).all()):
            return wide.movedim(-3, -1)
    L = torch.zeros_like(A)
    for j in range(A.shape[-2]):
        column = A[..., j:, j, :] - (L[..., j:, :j, :] * L[..., j : j + 1, :j, :]).sum(-2)
        pivot = column[..., :1, :]
        L[..., j:, j, :] = torch.where(
            pivot > EPS * A[..., j : j + 1, j, :], column / pivot.clamp(min=EPS**8).sqrt(), 0.0
        )
    return L


def _forward(L: Tensor, b: Tensor) -> Tensor:
    """L⁻¹b (..., K, 1, B)."""
    x = b.clone()
    for j in range(L.shape[-2]):
        x[..., j, 0, :] = (b[..., j, 0, :] - (L[..., j, :j, :] * x[..., :j, 0, :]).sum(-2)) / L[..., j, j, :]
    return x


def _backward(L: Tensor, b: Tensor) -> Tensor:
    """L⁻ᵀb (..., K, 1, B)."""
    x = b.clone()
    for j in reversed(range(L.shape[-2])):
        x[..., j, 0, :] = (b[..., j, 0, :] - (L[..., j + 1 :, j, :] * x[..., j + 1 :, 0, :]).sum(-2)) / L[..., j, j, :]
    return x


def _phi_eigen(T: Tensor, b: Tensor, q: float) -> Tensor:
    """φ_q(T) b (..., K, 1, B) through the eigenvalues of T."""
    U: Tensor
    t, U = torch.linalg.eigh(T.movedim(-1, 0))
    return (U @ (phi(t.clamp(min=0.0, max=1 - EPS), q)[..., None] * (U.mT @ b.movedim(-1, 0)))).movedim(0, -1)
