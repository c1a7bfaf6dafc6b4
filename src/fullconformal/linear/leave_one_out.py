"""Leaving a point out without a refit, at the fit Θ̄ and Hessian H̄ of the bag it is in (approximate leave-one-out).

With A = J H̄⁻¹ Jᵀ, S = ℓ'', r = ℓ' of the point and T = A^½ S A^½, the logits of a share q of the way to leaving it out are

    z + A^½ φ_q(T) A^½ r        φ_q(t) = ((1 − t)^(−q) − 1)/t        so φ_0 = 0 and φ_1 = 1/(1 − t): one Newton step

`score_error` says how errors of Θ̄ and A pass through the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, Change, LinearBag, logits
from fullconformal.linear.hessian import TOGETHER, Fits, curvature
from fullconformal.linear.newton import refit
from fullconformal.losses.relative import pairs, residual, second, unpacked
from fullconformal.runtime.numerics import LITTLE, threads


@dataclass(frozen=True)
class Deletion:
    """Shift of the logits (..., K, B), |A^½ r| (..., B), and e = det(I − T) (..., B), which is at most 1 − max t."""

    shift: Tensor
    norm: Tensor
    remaining: Tensor


def deletion(A: Tensor, S: Tensor, r: Tensor, q: float) -> Deletion:
    """The shift by which a point is left out, from packed A, S (..., Q, B) and residuals r (..., K, B)."""
    if A.shape[-2] == 1:
        t = (A * S).clamp_(max=1 - EPS)
        shift = phi(t, q).mul_(A).mul_(r)
        return Deletion(shift, A.sqrt().mul_(r).abs_().squeeze(-2), t.neg_().add_(1).squeeze(-2))
    out = Deletion(torch.empty_like(r), *(torch.empty_like(r.select(-2, 0)) for _ in range(2)))
    K, every = r.shape[-2], slice(None)
    step = max(1, TOGETHER // (K * K * r.shape[-1]))
    parts = [every] if r.dim() == 2 or r.is_cuda else [slice(at, at + step) for at in range(0, len(r), step)]
    place = pairs(K, r.device)[1]
    for at in parts:
        a, s, residuals = (v[at].movedim(-2, 0).contiguous() for v in (A, S, r))
        shift, out.norm[at], out.remaining[at] = _deletion(a[place], s[place], residuals, q)
        out.shift[at] = shift.movedim(0, -2)
    return out


def _deletion(A: Tensor, S: Tensor, r: Tensor, q: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shift (K, ...), |A^½ r| and det(I − T) (...) from A, S (K, K, ...) and residuals r (K, ...); A is overwritten.

    With A = LLᵀ in place of A^½, which changes T by a rotation. Matrices are small and points are many: loops over K, arrays over the
    rest, and of triangular factors only what is not zero.
    """
    L, K = _cholesky_(A), len(r)
    SL, T, b, shift = torch.zeros_like(A), torch.zeros_like(A), torch.zeros_like(r), torch.zeros_like(r)
    for k in range(K):
        SL[:, : k + 1].addcmul_(S[:, k, None], L[k, : k + 1])
        b[: k + 1].addcmul_(L[k, : k + 1], r[k])
    for k in range(K):
        T[: k + 1, : k + 1].addcmul_(L[k, : k + 1, None], SL[k, : k + 1])
    norm = b.square().sum(0).sqrt()
    v = b if q == 1 else _phi_eigen(T, b, q)
    G = T.neg_()
    for k in range(K):
        G[k, k] += 1
    _cholesky_(G)
    remaining = torch.ones_like(norm)
    for k in range(K):
        remaining *= G[k, k]
        if q == 1:
            v[k] /= G[k, k]
            v[k + 1 :].addcmul_(G[k + 1 :, k], v[k], value=-1)
    for k in reversed(range(K)) if q == 1 else ():
        v[k] /= G[k, k]
        v[:k].addcmul_(G[k, :k], v[k], value=-1)
    for k in range(K):
        shift[k:].addcmul_(L[k:, k], v[k])
    return shift.nan_to_num_(0.0, 0.0, 0.0), norm, remaining.square_()  # not finite only where the remaining is zero


def phi(t: Tensor, q: float) -> Tensor:
    """φ_q(t) = ((1 − t)^(−q) − 1)/t for 0 ≤ t < 1."""
    if q == 1:
        return (1 - t).reciprocal_()
    return torch.where(t > EPS, torch.expm1(-q * torch.log1p(-t)) / t.clamp(min=EPS), q)


def score_error(spread: Tensor, out: Deletion, logit_error: Tensor, A_error: Tensor) -> Tensor:
    """How far the shifted logits (..., B) can be off, in range, for any q ≤ 1: from errors of Θ̄ and relative errors of A, of some spread.

    Logits off by ranges ≤ R put A and S off by factors within e^(±R), and r by S times that. Term by term of the power
    series of φ_q, whose coefficients are at most one, |A^(−½) dshift| ≤ R((1 + t)|A^½ r|/(1 − t)² + ½ t^½/(1 − t)) to first
    order. Twice that covers the higher orders while the errors are small against 1 − t; where they are not, nothing is known.
    """
    e = out.remaining
    root = spread.sqrt().div_(e)
    by_A = (2 - e).mul_(2 * out.norm).div_(e).mul_(root)
    error = root.add_(1).add_(by_A).mul_(logit_error).add_(by_A.mul_(A_error))
    return error.masked_fill_(e < 4 * (2 * logit_error + A_error), torch.inf)


def duals(S: Tensor, r: Tensor, shift: Tensor) -> Tensor:
    """u = r + S·shift (n, K, B), the point's share of the gradient after it was left out: the step is H̄⁻¹Jᵀu."""
    return r + (S * shift if r.shape[-2] == 1 else torch.einsum("nklb,nlb->nkb", unpacked(S), shift))


@torch.no_grad()
def leave_one_out(bag: LinearBag, memory: int = 2**28) -> Fits:
    """Fits of the n bags without one point each: a Newton step from the fit on Z, then `refit` until converged."""
    (n, d), base = bag.X.shape, bag.base
    theta = base.theta[:, :, None]
    z = logits(bag, theta)
    S, r = second(z), residual(z, bag.y[:, None])
    A = curvature(bag, None, theta, S.clone()).A
    u = duals(S, r, deletion(A, S, r, 1).shift)
    step = (bag.X[:, :, None] * u[:, None, :, 0]).flatten(1) @ base.inverse
    start = theta + step.T.reshape(d, bag.K, n)
    # The added point of zeros has a constant loss: nothing is added.
    change = Change(bag.X.new_zeros(d, n), bag.y.new_zeros(n), torch.arange(n, device=bag.X.device))
    width = max(1, memory // (32 * n * bag.K))
    parts = [slice(at, at + width) for at in range(0, n, width)]
    # Of a hundred points two threads took four times as long as one.
    with threads(1 if n * n * d * bag.K <= LITTLE else torch.get_num_threads()):
        fits = [refit(bag, change[part], start[:, :, part]) for part in parts]
    return Fits(*(torch.cat([getattr(f, name) for f in fits], -1) for name in ("theta", "error", "gradient")))


def _cholesky_(A: Tensor) -> Tensor:
    """Lower Cholesky factors in place of matrices (K, K, ...), of which they leave what is above; a pivot that is zero up to rounding
    leaves its column zero."""
    least = EPS * A.diagonal(dim1=0, dim2=1).movedim(-1, 0)
    for j, entry in enumerate(least):
        column, pivot = A[j:, j], A[j, j]
        for k in range(j):
            column.addcmul_(A[j:, k], A[j, k], value=-1)
        column.mul_(torch.where(pivot > entry, pivot.clamp(min=EPS**8).rsqrt(), 0.0))
    return A


def _phi_eigen(T: Tensor, b: Tensor, q: float) -> Tensor:
    """φ_q(T) b (K, ...) through the eigenvalues of T (K, K, ...)."""
    U: Tensor
    t, U = torch.linalg.eigh(T.flatten(2).permute(2, 0, 1))
    right = U.mT @ b.flatten(1).T[:, :, None]
    return (U @ (phi(t.clamp(min=0.0, max=1 - EPS), q)[..., None] * right)).squeeze(2).T.reshape(b.shape)
