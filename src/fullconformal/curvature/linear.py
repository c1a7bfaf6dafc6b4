"""Sums of S ⊗ aaᵀ: the curvature of models that are linear in their parameters.

One product with the products of two inputs, of which there are i(i + 1)/2, and of two outputs, o(o + 1)/2.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from fullconformal.linear.products import gram, laid_out, squares
from fullconformal.problem import Problem

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
                total.addmm_(weights, squares(some.T, buffer).T)
    if block.o > 1:
        H = laid_out(total, block.o, block.i)
    H.diagonal().add_(problem.penalty)
    return H


def narrow(o: int, i: int) -> bool:
    """Whether weighting the inputs by each entry of S is cheaper than forming the products of the inputs."""
    return o * (o + 1) <= i // 2
