"""Sums of S ⊗ aaᵀ: the curvature of models that are linear in their parameters.

One product with the products of two inputs, of which there are i(i + 1)/2, and of two outputs, o(o + 1)/2.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fullconformal.problem import Block, Problem

TEMPORARY = {"cpu": 2**27, "cuda": 2**32}  # bytes of the factors of one product
PORTION = 1024  # points whose products stay in the cache


@torch.no_grad()
def linear_curvature(problem: Problem) -> Tensor:
    """𝓗 (p, p) of a linear model with outputs z and logits f = Tz + constant: Σ TᵀST ⊗ aaᵀ."""
    (block,) = problem.blocks
    after = [layer.linear.weight for layer in problem.tail[block.layer + 1 :]]
    T = reduce(lambda T, W: W @ T, after, torch.eye(block.o, dtype=problem.X.dtype, device=problem.X.device))
    outputs, inputs = (size * (size + 1) // 2 for size in (block.o, block.i))
    H, total = problem.X.new_zeros(block.i, block.i), problem.X.new_zeros(outputs, inputs)
    room = TEMPORARY.get(T.device.type, TEMPORARY["cpu"]) // (T.element_size() * (inputs + 3 * len(T) ** 2))
    for X, _ in problem.batches(max(1, min(problem.chunk, room))):
        trace = problem.trace(X)
        a, portion = trace.inputs[block.layer], len(X) if X.is_cuda else PORTION
        buffer = a.new_empty(0 if block.o == 1 else inputs * min(portion, len(a)))
        for some, f in zip(a.split(portion), trace.logits.split(portion), strict=True):
            weights = problem.loss.packed_curvature(f, T)
            if block.o == 1:  # whose sum is a square
                H += gram(some * weights.clamp_min_(0).sqrt_().T)
            else:
                total.addmm_(weights, squares(some, buffer).T)
    if block.o > 1:
        H = laid_out(total, block)
    H.diagonal().add_(problem.penalty)
    return H


def laid_out(total: Tensor, block: Block) -> Tensor:
    """Sums of S ⊗ aaᵀ, both triangles packed, (o(o+1)/2, i(i+1)/2), as a matrix (o·i, o·i)."""
    outer, inner = triangle(block.o, total.device), triangle(block.i, total.device)
    at = outer[:, None, :, None] * total.shape[1] + inner[:, None, :]
    return total.view(-1).index_select(0, at.view(-1)).view(block.o * block.i, -1)


def gram(B: Tensor) -> Tensor:
    """BᵀB (p, p). NumPy sees the symmetry, which halves the work; torch does not."""
    if B.device.type != "cpu" or B.dtype not in (torch.float32, torch.float64):
        return B.T @ B
    array = B.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told by the factorisation
        return torch.from_numpy(array.T @ array)


def squares(a: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Products of two inputs, the upper triangle of aaᵀ row by row, (i(i+1)/2, k) of inputs a (k, i); on a CPU in a buffer."""
    k, i = a.shape
    if a.is_cuda:  # one kernel rather than i
        at = torch.triu_indices(i, i, device=a.device)
        return (a[:, at[0]] * a[:, at[1]]).T
    size = i * (i + 1) // 2 * k
    rows, out = a.T.contiguous(), (a.new_empty(size) if buffer is None else buffer[:size]).view(-1, k)
    for row, part in enumerate(out.split(list(range(i, 0, -1)))):
        torch.mul(rows[row:], rows[row], out=part)
    return out


def narrow(o: int, i: int) -> bool:
    """Whether weighting the inputs by each entry of S is cheaper than forming the products of the inputs."""
    return o * (o + 1) <= i // 2


def triangle(size: int, device: torch.device) -> Tensor:
    """Position (size, size) of each entry of a symmetric matrix in its row-major upper triangle."""
    at = torch.arange(size, device=device)
    row, column = torch.minimum(at[:, None], at), torch.maximum(at[:, None], at)
    return row * (2 * size - row - 1) // 2 + column
