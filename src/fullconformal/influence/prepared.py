"""The training bag at θ_Z: what every approximation of full CP needs of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fullconformal.curvature.base import SMALL, Factor, Halves
from fullconformal.curvature.linear import influence_error, linear_influences
from fullconformal.problem import Problem, Rows, flat, join, select
from fullconformal.runtime.numerics import single_is_whole
from fullconformal.runtime.progress import stage

PORTION = 1024  # points whose gradients are written out together on a CPU
LOGITS = 1024  # units in the last place that logits may err by: dozens of layers, and numbers of size ten
ILL = 2.0**-34  # of a score, that a self-influence may err by

Known = tuple[Tensor, Tensor, Tensor]  # ℓ, s and what s may err by besides its own rounding, (n,) each


@dataclass(frozen=True)
class Training:
    """The bag at θ_Z: losses ℓ_i (n,), self-influences s_i = g_iᵀ𝓗⁻¹g_i (n,), gradients, and 𝓗⁻¹g_i where kept."""

    problem: Problem
    factor: Factor
    loss: Tensor
    self_influence: Tensor
    influence_slack: Tensor  # what s_i may err by besides its own rounding, (n,)
    gradients: list[Rows] | None
    solved: list[Tensor] | None  # one (n, o, i) tensor a parameter block
    memory: int
    kept_half: Tensor | None = None  # L⁻¹g_i (n, p), kept for pruning
    inverse: Tensor | None = None  # 𝓗⁻¹ (p, p) of a linear problem that keeps no L⁻¹g_i

    @property
    def known(self) -> Known:
        """What need not be computed again."""
        return self.loss, self.self_influence, self.influence_slack

    def rows(self, index: Tensor | slice) -> list[Rows]:
        """Gradients of the training points at the given positions."""
        if self.gradients is not None:
            return select(self.gradients, index)
        return self.problem.gradients(self.problem.X[index], self.problem.y[index])

    def solved_rows(self, index: slice) -> Tensor:
        """𝓗⁻¹g_i (k, p) of the training points at the given positions."""
        if self.solved is not None:
            return torch.cat([part[index].flatten(1) for part in self.solved], dim=1)
        return self.factor.solve(flat(self.rows(index)))

    @cached_property
    def halved(self) -> Tensor | None:
        """L⁻¹g_i (n, p) for pruning; where self-influences came from 𝓗⁻¹, made when something first asks for them."""
        if self.inverse is None:
            return self.kept_half
        out = self.problem.X.new_empty(self.problem.n, self.problem.p)
        for start in range(0, len(out), PORTION):
            at = slice(start, start + PORTION)
            out[at] = self.half_rows(at)
        return out

    def half_rows(self, index: Tensor | slice) -> Tensor:
        """L⁻¹g_i (k, p) of the training points at the given positions."""
        return self.factor.half(flat(self.rows(index))) if self.kept_half is None else self.kept_half[index]

    @cached_property
    def halves(self) -> Halves | None:
        """What makes half-solved gradients where none are kept and the factor has a shorter way to them."""
        return (
            self.factor.halves(self.problem, self.memory // 8)
            if self.gradients is None and self.halved is None
            else None
        )

    @cached_property
    def sorted(self) -> dict[tuple[type, float, int | None], object]:
        """The points in the order of their scores, by q and class, as `windows` and `tiles` keep them."""
        return {}

    @property
    def slack(self) -> Tensor:
        """Rounding error granted to each training point's score, (n,): that of its terms."""
        return self.loss_rounding * self.loss.abs() + self.rounding * self.self_influence.abs() + self.influence_slack

    @property
    def loss_rounding(self) -> float:
        """Relative error granted to a loss: that of the logits, however many parameters there are, and what an iterative solve leaves."""
        return loss_rounding(self.problem.p, torch.finfo(self.problem.X.dtype).eps) + 2 * self.factor.accuracy

    @property
    def rounding(self) -> float:
        """Relative error granted to a product gᵀ𝓗⁻¹g: that of p terms, and twice what an iterative solve leaves.

        A solve of accuracy δ leaves δ√(s_i ŝ) ≤ δ(2s_i + ŝ/8) in k_i. Granted are 2δ of ℓ_i + s_i and of |τ|: enough where
        ŝ ≤ 16(ℓ_i + |τ|), that is but for candidates that have many times the influence on themselves which they have loss.
        """
        return rounding(self.problem.p, torch.finfo(self.problem.X.dtype).eps) + 2 * self.factor.accuracy


def rounding(p: int, eps: float) -> float:
    """Relative rounding error granted to a product of p terms."""
    return 32 * math.sqrt(p) * eps


def loss_rounding(p: int, eps: float) -> float:
    """Relative rounding error granted to a loss."""
    return min(rounding(p, eps), LOGITS * eps)


@stage("self-influences")
def prepare(problem: Problem, factor: Factor, memory: int, keep_solved: bool, known: Known | None = None) -> Training:
    """One pass over the bag: losses, gradients and self-influences; 𝓗⁻¹g_i kept where asked and where it fits half the memory.

    What is known already (of a saved predictor, of a shard) is not computed again.
    """
    n, p, size = problem.n, problem.p, problem.X.element_size()
    like = problem.X
    keep_solved = keep_solved and n * p * size <= memory // 2
    keep_gradients = n * sum(b.o + b.i for b in problem.blocks) * size <= memory // 4
    if not keep_solved and not keep_gradients:
        halves = factor.halves(problem, memory // 8)
        if halves is not None:
            s = halves.influences(like, problem.y[:, None])[:, 0] if known is None else known[1]
            known = known or (problem.loss.value(problem.logits(like), problem.y), s, torch.zeros_like(s))
            return Training(problem, factor, *known, None, None, memory)
    may_keep = not keep_solved and factor.has_half and n * p * size <= memory // 4
    if may_keep and keep_gradients and (by_inverse := _by_inverse(problem, factor, memory, known)) is not None:
        return by_inverse
    step = max(1, min(max(4096, problem.chunk), n, memory // 8 // (3 * p * size)))
    loss, self_influence = like.new_empty(n), like.new_empty(n)
    solved: list[Tensor] = []
    keep_halved = may_keep and (known is None or p <= SMALL)
    portion = step if like.is_cuda else PORTION
    halved = like.new_empty(n, p) if keep_halved and min(step, portion) < n else None
    gradients: list[list[Rows]] = []
    start = 0
    for X, y in problem.batches(step):
        logits, rows = problem.logits_and_gradients(X, y)
        loss[start : start + len(y)] = problem.loss.value(logits, y)
        if keep_gradients:
            gradients.append(rows)
        if known is not None and not keep_solved and not keep_halved:
            start += len(y)
            continue
        for first in range(0, len(y), portion):
            part = rows if len(y) <= portion else select(rows, slice(first, first + portion))
            count = len(part[0].left)
            at = slice(start, start := start + count)
            self_influence[at], kept = factor.influence(flat(part))
            if halved is not None:
                halved[at] = kept
            elif keep_halved:  # of all points at once
                halved = kept.contiguous()
            if keep_solved:
                U = factor.solved(kept)
                blocks = [U[:, b.start : b.stop].view(-1, b.o, b.i) for b in problem.blocks]
                if count == n:
                    solved = [own.contiguous() for own in blocks]
                    continue
                solved = solved or [like.new_empty(n, b.o, b.i) for b in problem.blocks]
                for whole, own in zip(solved, blocks, strict=True):
                    whole[at] = own
    known = known or (loss, self_influence, torch.zeros_like(loss))
    return Training(
        problem, factor, *known, join(gradients) if keep_gradients else None, solved or None, memory, halved
    )


def _by_inverse(problem: Problem, factor: Factor, memory: int, known: Known | None) -> Training | None:
    """What is kept of a linear problem with several classes where gradients, which are short, and 𝓗⁻¹ do for `tiles`.

    None where they do not, and where 𝓗 is so badly conditioned that 8u|𝓗⁻¹||g|² is some part of a score: float64 would lose more of
    products with 𝓗⁻¹ than float32 does of sums.
    """
    possible = problem.is_linear and problem.n_classes > 2 and problem.p > SMALL and problem.p**2 <= memory // 64
    possible = possible and problem.X.dtype == torch.float64 and problem.X.device.type == "cpu" and single_is_whole()
    inverse = factor.inverse() if possible else None
    if inverse is None:
        return None
    logits, rows = problem.logits_and_gradients(problem.X, problem.y)
    loss, slack = problem.loss.value(logits, problem.y), influence_error(rows[0], inverse)
    s = linear_influences(rows[0], inverse).clamp_min_(0) if known is None else known[1]
    if not bool((slack <= ILL * (loss + s)).all()):
        return None
    return Training(problem, factor, *(known or (loss, s, slack)), rows, None, memory, None, inverse)
