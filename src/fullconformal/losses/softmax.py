"""The cross-entropy of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullconformal.losses.base import Loss
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class Softmax(Loss):
    """ℓ = log Σ exp(f) − f_y, to full relative precision: differences that would cancel where a model is sure are not formed."""

    invariant = True

    def mean(self, f: Tensor) -> Tensor:
        """π (k, C)."""
        return _mean(f).contiguous()

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """log(1 + Σ of the other labels' odds) (k,)."""
        odds = torch.logsumexp(_by_class(f).scatter_(-1, y[:, None], -torch.inf), -1) - f.gather(-1, y[:, None])[:, 0]
        # Above the threshold 1 is lost in any case.
        return softplus(odds, threshold=50)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """π − e_y (k, C); at y it is −Σ of the others, since π_y − 1 would cancel where the model is sure."""
        own = y[:, None]
        r = _mean(f).scatter_(-1, own, 0.0)
        return r.scatter_(-1, own, -r.sum(-1, keepdim=True)).contiguous()

    def curvature(self, f: Tensor) -> Tensor:
        """diag(π) − ππᵀ (..., C, C); 1 − π above ½ is the sum of the others, since it would cancel."""
        pi = self.mean(f)
        likely = pi > 0.5  # one at most
        others = torch.where(likely, pi.masked_fill(likely, 0.0).sum(-1, keepdim=True), 1 - pi)
        S = -pi[..., :, None] * pi[..., None, :]
        S.diagonal(dim1=-2, dim2=-1).copy_(pi * others)
        return S

    def root(self, f: Tensor) -> Tensor:
        """diag(√π) − π√πᵀ (..., C, C)."""
        root = self.mean(f).sqrt()
        return torch.diag_embed(root) - (root**2)[..., :, None] * root[..., None, :]

    def summed_curvature(self, f: Tensor) -> Tensor:
        """diag(Σπ) − Σππᵀ (C, C)."""
        pi = self.mean(f)
        return torch.diag(pi.sum(0)) - pi.T @ pi

    def packed_curvature(self, f: Tensor, T: Tensor) -> Tensor:
        """The covariance of T's rows under π.

        With t the likeliest row, ρ the other probabilities, ν = Σ ρT and μ = E[T], each term of E_ρ[TT] − νt − μ(μ − t) is as small as ρ
        where the model is sure, and the rounding is that of the result.
        """
        k, q = torch.triu_indices(T.shape[1], T.shape[1], device=T.device)
        # What all rows have in common would cancel.
        pi, T = _mean(f).T, T - T[:1]
        top = pi.max(0, keepdim=True).indices
        rest = pi.scatter(0, top, 0.0)
        t, nu = T.T.index_select(1, top[0]), T.T @ rest
        away = nu - rest.sum(0) * t
        out = ((T[:, k] * T[:, q]).T @ rest).addcmul_(nu[k], t[q], value=-1)
        return out.addcmul_((t + away)[k], away[q], value=-1)

    def candidates(self, f: Tensor) -> Tensor:
        """ℓ (..., C) at every label.

        At the likeliest label it is log(1 + Σ of the other odds), as small as e^−gap, where logsumexp(f) − f_y is rounding error. Sure
        points would tie by the thousand: they were most of the products that pruning had to form.
        """
        high, top = f.max(-1, keepdim=True)
        own = softplus(torch.logsumexp(_by_class(f).scatter_(-1, top, -torch.inf), -1, keepdim=True) - high)
        return (high - f + own).scatter_(-1, top, own)

    def candidate_gradients(self, J: Tensor, f: Tensor) -> Tensor:
        """Jᵀ(π − e_y) (k, C, o); the likeliest label's is summed by itself, since Jᵀπ − J_y would cancel where the model is sure."""
        pi = self.mean(f)
        x, top = torch.arange(len(f), device=f.device), f.argmax(-1)
        r = torch.stack([pi, self.residual(f, top)], 1)
        # One matrix for all points, as of a last layer, meets them in one product.
        mean, own = (r @ J[0] if J.stride(0) == 0 and len(J) > 1 else r @ J).unbind(1)
        out = mean[:, None, :] - J
        out[x, top] = own
        return out

    def log_proba(self, f: Tensor) -> Tensor:
        """log π (k, C)."""
        return torch.log_softmax(f, dim=-1)

    def leverage(self, value: Tensor, influence: Tensor) -> Tensor:
        """s/(e^ℓ − 1) (k,), because S⁺r = −e_y/π_y up to a constant.

        For two classes this is the leverage; for more a lower bound of the largest eigenvalue of SA, in the direction that removal takes.
        """
        return influence / torch.expm1(value).clamp_min(torch.finfo(value.dtype).eps)


def _by_class(f: Tensor) -> Tensor:
    """A copy of outputs (..., C), laid out class by class on a CPU: sums over a few classes take a half to a fifth of the time."""
    return f.clone() if f.is_cuda else f.mT.clone(memory_format=torch.contiguous_format).mT


def _mean(f: Tensor) -> Tensor:
    """π (..., C) in memory of its own, laid out in some way."""
    if f.is_cuda or f.shape[-1] >= 16:
        return torch.softmax(f, dim=-1)
    # Of few classes a CPU's softmax takes three times as long as its steps one by one.
    e = _by_class(f)
    e = e.sub_(e.amax(-1, keepdim=True)).exp_()
    return e / e.sum(-1, keepdim=True)


SOFTMAX = Softmax()
