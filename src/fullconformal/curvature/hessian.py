"""The exact Hessian ∇²F: structured for dense layers, Hessian-vector products for the parameters of the prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from fullconformal.curvature.dense import DenseCurvature
from fullconformal.curvature.structured import dense_curvature
from fullconformal.problem import Problem
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class Hessian(DenseCurvature):
    """Exact curvature; indefinite for most networks, equal to the GGN for linear models."""

    def matrix(self, problem: Problem) -> Tensor:
        H = dense_curvature(problem, exact=True)
        if problem.prefix_names:
            width = problem.blocks[0].o
            rows = hessian_rows(problem, width)
            H[:width] = rows
            H[:, :width] = rows.T
            H[:width, :width] = (rows[:, :width] + rows[:, :width].T) / 2
        return H


def hessian_rows(problem: Problem, count: int, batch: int = 64) -> Tensor:
    """First `count` rows of 𝓗, (count, p), by forward-over-reverse products."""
    theta = problem.theta

    def objective(theta: Tensor, X: Tensor, y: Tensor) -> Tensor:
        return problem.loss.value(problem.logits_at(theta, X), y).sum()

    def product(v: Tensor, X: Tensor, y: Tensor) -> Tensor:
        out: Tensor = jvp(lambda t: grad(objective)(t, X, y), (theta,), (v,))[1]
        return out

    rows = torch.zeros(count, problem.p, dtype=theta.dtype, device=theta.device)
    chunk = max(1, problem.chunk // batch)
    for start in range(0, count, batch):
        stop = min(start + batch, count)
        E = torch.zeros(stop - start, problem.p, dtype=theta.dtype, device=theta.device)
        E[:, start:stop].fill_diagonal_(1)
        for X, y in problem.batches(chunk):
            rows[start:stop] += vmap(product, (0, None, None))(E, X, y)
    rows.diagonal().add_(problem.penalty[:count])
    return rows
