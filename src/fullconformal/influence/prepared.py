"""The training points at θ_Z, prepared once: losses, self-influences, and their rows where these fit the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fullconformal.curvature.base import Factor, Halves
from fullconformal.problem import Problem, Rows, flat, join, select
from fullconformal.runtime.tasks import stage

LOGITS = 1024  # units in the last place granted to logits: dozens of layers, and numbers of size ten

Known = tuple[Tensor, Tensor]  # ℓ and s, (n,) each


@dataclass(frozen=True)
class Prepared:
    """The bag at θ_Z: ℓ_i (n,), s_i = g_iᵀ𝓗⁻¹g_i (n,); gradients and half-solved gradients L⁻¹g_i (n, p) where they are kept."""

    problem: Problem
    factor: Factor
    loss: Tensor
    self_influence: Tensor
    gradients: list[Rows] | None
    half: Tensor | None
    memory: int

    @property
    def known(self) -> Known:
        """What need not be computed again."""
        return self.loss, self.self_influence

    def rows(self, index: Tensor | slice) -> list[Rows]:
        """Gradients of the training points at the given positions."""
        if self.gradients is not None:
            return select(self.gradients, index)
        return self.problem.gradients(self.problem.X[index], self.problem.y[index])

    def half_rows(self, index: Tensor | slice) -> Tensor:
        """L⁻¹g_i (k, p) of the training points at the given positions."""
        return self.factor.half(flat(self.rows(index))) if self.half is None else self.half[index]

    @cached_property
    def halves(self) -> Halves | None:
        """Makes half-solved gradients where none are kept and the factor has a shorter way to them."""
        if self.gradients is not None or self.half is not None:
            return None
        return self.factor.halves(self.problem, self.memory // 8)

    @cached_property
    def sorted(self) -> dict[tuple[float, bool], Any]:
        """The points in the order of their scores, as `influence.sorted_points` keeps them."""
        return {}

    @cached_property
    def slack(self) -> Tensor:
        """Rounding error granted to each training point's score, (n,): that of its terms."""
        return self.loss_rounding * self.loss.abs() + self.rounding * self.self_influence.abs()

    @property
    def loss_rounding(self) -> float:
        """Relative error granted to a loss: that of the logits, however many parameters there are."""
        return min(self.rounding, LOGITS * torch.finfo(self.problem.X.dtype).eps)

    @property
    def rounding(self) -> float:
        """Relative error granted to a product gᵀ𝓗⁻¹g: that of p terms."""
        return rounding(self.problem.p, torch.finfo(self.problem.X.dtype).eps)


def rounding(p: int, eps: float) -> float:
    """Relative rounding error granted to a product of p terms."""
    return 32 * math.sqrt(p) * eps


@stage("self-influences")
def prepare(problem: Problem, factor: Factor, memory: int, known: Known | None = None) -> Prepared:
    """One pass over the bag. Gradients are kept where they fit a quarter of the memory, half-solved ones where they do.

    What is known already (of a saved predictor, of a shard) is not computed again.
    """
    n, p, like, size = problem.n, problem.p, problem.X, problem.X.element_size()
    keep_gradients = n * sum(b.o + b.i for b in problem.blocks) * size <= memory // 4
    keep_half = factor.positive_definite and n * p * size <= memory // 4
    if not keep_gradients and not keep_half:
        halves = factor.halves(problem, memory // 8)
        if halves is not None:
            if known is None:
                s = halves.influences(like, problem.y[:, None])[:, 0]
                known = problem.loss.value(problem.logits(like), problem.y), s
            return Prepared(problem, factor, *known, None, None, memory)
    step = max(1, min(problem.chunk, n, memory // 8 // (3 * p * size)))
    loss, influence = like.new_empty(n), like.new_empty(n)
    half = like.new_empty(n, p) if keep_half else None
    gradients: list[list[Rows]] = []
    for start, (X, y) in zip(range(0, n, step), problem.batches(step), strict=True):
        at = slice(start, start + len(y))
        logits, rows = problem.logits_and_gradients(X, y)
        loss[at] = problem.loss.value(logits, y)
        if keep_gradients:
            gradients.append(rows)
        if known is None or half is not None:
            influence[at], solved = factor.influence(flat(rows))
            if half is not None:
                half[at] = solved
    known = known or (loss, influence)
    return Prepared(problem, factor, *known, join(gradients) if keep_gradients else None, half, memory)
