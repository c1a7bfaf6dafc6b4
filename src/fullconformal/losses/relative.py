"""The softmax loss of points: logits z (..., K, B) relative to class 0, labels y (..., 1 or B), symmetric matrices packed.

Two classes have a branch of their own where it counts: together they save the exact method four of ten seconds.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


@lru_cache(maxsize=64)
def pairs(k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns (2, Q) of the entries i ≤ j of a k × k matrix, packed, and the place (k, k) of each entry among them."""
    return torch.triu_indices(k, k, device=device), triangle(k, device)


def triangle(k: int, device: torch.device) -> Tensor:
    """The place (k, k) of each entry of a symmetric matrix among those packed, i ≤ j row by row."""
    at = torch.arange(k, device=device)
    row, column = torch.minimum(at[:, None], at), torch.maximum(at[:, None], at)
    return row * (2 * k - row - 1) // 2 + column


def unpacked(A: Tensor) -> Tensor:
    """Packed (..., Q, B) to full (..., K, K, B)."""
    K = math.isqrt(2 * A.shape[-2])
    return A[..., pairs(K, A.device)[1], :]


def probabilities(z: Tensor) -> Tensor:
    """Probabilities (..., K, B) of the classes 1 … K."""
    return all_probabilities(z)[..., 1:, :]


def all_probabilities(z: Tensor) -> Tensor:
    """Probabilities (..., C, B) of all classes, of logits z (..., K, B)."""
    if z.shape[-2] == 1:
        return torch.cat([-z, z], -2).sigmoid_()
    out = z.new_empty(*z.shape[:-2], z.shape[-2] + 1, z.shape[-1])
    top = z.amax(-2, keepdim=True).clamp_(min=0.0)
    torch.sub(z, top, out=out[..., 1:, :])
    torch.neg(top, out=out[..., :1, :])
    out.exp_()
    return out.div_(out.sum(-2, keepdim=True))


def residual(z: Tensor, y: Tensor) -> Tensor:
    """ℓ' = π − e_y (..., K, B) of logits z (..., K, B). That of the own class is minus the sum of the others, which keeps its digits."""
    if z.shape[-2] == 1:
        sign = y.to(z.dtype).mul(-2).add_(1).unsqueeze(-2)
        return (sign * z).sigmoid_().mul_(sign)
    pi = all_probabilities(z)
    own = y.unsqueeze(-2).expand(*pi.shape[:-2], 1, pi.shape[-1])
    pi.scatter_(-2, own, 0.0).scatter_(-2, own, -pi.sum(-2, keepdim=True))
    return pi[..., 1:, :].contiguous()


def second(z: Tensor) -> Tensor:
    """ℓ'' = diag(π) − ππᵀ of logits z (..., K, B), packed (..., Q, B)."""
    if z.shape[-2] == 1:
        e = z.abs().neg_().exp_()
        return e / (1 + e).square_()
    return second_at(all_probabilities(z), 1.0)


def least_second(pi: Tensor) -> Tensor:
    """A matrix (n, Q, 1) below ℓ'' at all probabilities π (B, C, n): min_a Σ_k π_k (v_k − a)² grows with every π_k."""
    pi = pi.double()
    if pi.shape[1] == 2:
        return pi.prod(1).amin(0)[:, None, None]
    least = pi.amin(0).T[:, :, None]
    return second_at(least, least.sum(1, keepdim=True))


def second_at(pi: Tensor, total: Tensor | float) -> Tensor:
    """diag(π) − ππᵀ/Σπ (..., Q, B) of weights π (..., C, B) and their total: what the largest leaves of it is the sum of the others."""
    top = pi.argmax(-2, keepdim=True)
    rest = (total - pi).scatter_(-2, top, pi.scatter(-2, top, 0.0).sum(-2, keepdim=True))[..., 1:, :] / total
    pi, ((i, j), _) = pi[..., 1:, :], pairs(pi.shape[-2] - 1, pi.device)
    S: Tensor = -pi[..., i, :] * pi[..., j, :] / total
    S[..., i == j, :] = pi * rest
    return S


def margin(z: Tensor, y: Tensor) -> Tensor:
    """log(e^ℓ − 1) = logsumexp_{k≠y} f_k − f_y (..., B), which orders points as the loss ℓ = softplus(margin) does."""
    if z.shape[-2] == 1:
        return z.squeeze(-2) * (1 - 2 * y).to(z.dtype)
    f = torch.cat([torch.zeros_like(z[..., :1, :]), z], -2)
    index = y.unsqueeze(-2).expand(*f.shape[:-2], 1, f.shape[-1])
    return f.scatter(-2, index, -torch.inf).logsumexp(-2) - f.gather(-2, index).squeeze(-2)


def spread(A: Tensor) -> Tensor:
    """max over classes of (e_k − e_l)ᵀA(e_k − e_l) (..., B), A packed: what a step's norm can do to a range of logits."""
    if A.shape[-2] == 1:
        return A.squeeze(-2)
    (i, j), place = pairs(math.isqrt(2 * A.shape[-2]), A.device)
    entries = A.movedim(-2, 0)
    diagonal = entries[place.diagonal()]
    return torch.maximum(diagonal.amax(0), diagonal[i].add_(diagonal[j]).sub_(entries, alpha=2).amax(0))


def most_apart(A: Tensor) -> Tensor:
    """max over l of (e_k − e_l)ᵀA(e_k − e_l) for each of all C classes k, (..., C, B), A packed (..., Q, B)."""
    full = unpacked(A)
    whole = full.new_zeros(*full.shape[:-3], full.shape[-2] + 1, full.shape[-2] + 1, full.shape[-1])
    whole[..., 1:, 1:, :] = full
    diagonal = whole.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)
    return (diagonal.unsqueeze(-2) + diagonal.unsqueeze(-3) - 2 * whole).amax(-2)


def apart(A: Tensor, y: Tensor) -> Tensor:
    """The same of the own class y (..., 1 or B) alone, (..., B): the square of what a step's norm can do to a margin."""
    most = most_apart(A)
    return most.gather(-2, y.unsqueeze(-2).expand(*most.shape[:-2], 1, most.shape[-1])).squeeze(-2)


def against(A: Tensor, y: Tensor) -> Tensor:
    """(e_k − e_y)ᵀA(e_k − e_y) (b, C) of all classes k against the own, A (b, K, K)."""
    whole, place = pad(A, (1, 0, 1, 0)), y[:, None, None].expand(len(y), A.shape[1] + 1, 1)
    diagonal = whole.diagonal(dim1=1, dim2=2)
    return (diagonal + diagonal.gather(1, y[:, None]) - 2 * whole.gather(2, place)[:, :, 0]).clamp(min=0.0)


def range_of(z: Tensor) -> Tensor:
    """Range (..., B) of the logits (0, z), z (..., K, B)."""
    if z.shape[-2] == 1:
        return z.squeeze(-2).abs()
    return z.amax(-2).clamp(min=0.0) - z.amin(-2).clamp(max=0.0)
