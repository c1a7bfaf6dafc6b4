"""What every approximation of full CP needs of the training bag, and the loop that turns scores into counts.

An approximation is a function ``scorer(training, X, q)`` that returns the candidates' scores τ (m, C) and a function from a slice of
training points to their scores α (m, C, k). Training points and candidates pass in blocks; n × (m·C) scores are never held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.curvature.base import SMALL, CurvatureError, Factor, Halves
from fullconformal.problem import Problem, Rows, contract, flat, join, losses, residuals, select, softmax

PORTION = 1024  # points whose gradients are written out together on a CPU
UNIT = 2.0**-24  # of float32's rounding
TINY, HUGE = 2.0**-120, 2.0**60  # which its exponents hold with room to spare
LOGITS = 1024  # units in the last place that logits may err by: dozens of layers, and numbers of size ten
Alpha = Callable[[slice], Tensor]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Training:
    """The bag at θ_Z: losses ℓ_i (n,), self-influences s_i = g_iᵀ𝓗⁻¹g_i (n,), gradients, and 𝓗⁻¹g_i where kept."""

    problem: Problem
    factor: Factor
    loss: Tensor
    self_influence: Tensor
    gradients: list[Rows] | None
    solved: list[Tensor] | None  # one (o, n, i) tensor a parameter block
    memory: int
    halved: Tensor | None = None  # L⁻¹g_i (n, p), kept for pruning

    def rows(self, index: Tensor | slice) -> list[Rows]:
        """Gradients of the training points at the given positions."""
        if self.gradients is not None:
            return select(self.gradients, index)
        return self.problem.gradients(self.problem.X[index], self.problem.y[index])

    def solved_rows(self, index: slice) -> Tensor:
        """𝓗⁻¹g_i (k, p) of the training points at the given positions."""
        if self.solved is not None:
            return torch.cat([part[:, index].transpose(0, 1).flatten(1) for part in self.solved], dim=1)
        return self.factor.solve(flat(self.rows(index)))

    @cached_property
    def halves(self) -> Halves | None:
        """What makes half-solved gradients where none are kept and the factor has a shorter way to them."""
        return (
            self.factor.halves(self.problem, self.memory // 8)
            if self.gradients is None and self.halved is None
            else None
        )

    @cached_property
    def sorted(self) -> dict[float, object]:
        """The points in the order of their scores, by q, as `windows` keeps them."""
        return {}

    @property
    def slack(self) -> Tensor:
        """Rounding error granted to each training point's score, (n,): that of its terms."""
        return self.loss_rounding * self.loss.abs() + self.rounding * self.self_influence.abs()

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


def single_is_whole() -> bool:
    """Whether products of float32 on a CPU are formed in float32: torch may have been asked for less, which some CPUs have units for."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision in ("ieee", "none")


Scorer = Callable[[Training, Tensor, float], tuple[Tensor, Alpha]]


def prepare(
    problem: Problem, factor: Factor, memory: int, keep_solved: bool, known: tuple[Tensor, Tensor] | None = None
) -> Training:
    """One pass over the bag: losses, gradients and self-influences; 𝓗⁻¹g_i kept where asked and where it fits half the memory.

    Losses and self-influences that are known already (a saved predictor's) are not computed again.
    """
    n, p, size = problem.n, problem.p, problem.X.element_size()
    like = problem.X
    keep_solved = keep_solved and n * p * size <= memory // 2
    keep_gradients = n * sum(b.o + b.i for b in problem.blocks) * size <= memory // 4
    if not keep_solved and not keep_gradients:
        halves = factor.halves(problem, memory // 8)
        if halves is not None:
            known = known or (
                losses(problem.logits(like), problem.y),
                halves.influences(like, problem.y[:, None])[:, 0],
            )
            return Training(problem, factor, *known, None, None, memory)
    step = max(1, min(max(4096, problem.chunk), n, memory // 8 // (3 * p * size)))
    loss, self_influence = like.new_empty(n), like.new_empty(n)
    solved = [like.new_empty(b.o, n, b.i) for b in problem.blocks] if keep_solved else None
    keep_halved = not keep_solved and factor.has_half and n * p * size <= memory // 4 and (known is None or p <= SMALL)
    portion = step if like.is_cuda else PORTION
    halved = like.new_empty(n, p) if keep_halved and min(step, portion) < n else None
    gradients: list[list[Rows]] = []
    start = 0
    for X, y in problem.batches(step):
        logits, rows = problem.logits_and_gradients(X, y)
        loss[start : start + len(y)] = losses(logits, y)
        if keep_gradients:
            gradients.append(rows)
        if known is not None and solved is None and not keep_halved:
            start += len(y)
            continue
        for first in range(0, len(y), portion):
            part = rows if len(y) <= portion else select(rows, slice(first, first + portion))
            at = slice(start, start := start + len(part[0].left))
            self_influence[at], kept = factor.influence(flat(part))
            if halved is not None:
                halved[at] = kept
            elif keep_halved:  # of all points at once
                halved = kept.contiguous()  # solves give columns
            if solved is not None:
                U = factor.solved(kept)
                for whole, b in zip(solved, problem.blocks, strict=True):
                    whole[:, at] = U[:, b.start : b.stop].view(-1, b.o, b.i).transpose(0, 1)
    loss, self_influence = known or (loss, self_influence)
    all_rows = join(gradients) if keep_gradients else None
    return Training(problem, factor, loss, self_influence, all_rows, solved, memory, halved)


def candidate_gradients(J: list[Rows], logits: Tensor) -> list[Rows]:
    """Gradients ĝ_y = Jᵀ(π − e_y) of every candidate as rows (m, C, o) ⊗ (m, i).

    The likeliest label's is summed apart, since Jᵀπ − J_y would cancel where the model is sure.
    """
    pi = softmax(logits)
    if logits.shape[1] == 2:  # whose gradients are π_1(J_1 − J_0) and π_0(J_0 − J_1)
        other = torch.stack([pi[:, 1], -pi[:, 0]], 1)[:, :, None]
        return [Rows(other * (left[:, 1:] - left[:, :1]), right) for left, right in J]
    x, top = torch.arange(len(logits), device=logits.device), logits.argmax(-1)
    out = []
    for rows, mean, own in zip(J, contract(J, pi), contract(J, residuals(logits, top)), strict=True):
        left = mean.left[:, None, :] - rows.left
        left[x, top] = own.left
        out.append(Rows(left, rows.right))
    return out


def half_solved(factor: Factor, ghat: list[Rows]) -> Tensor:
    """L⁻¹ĝ (m, C, p) of candidates' gradients (m, C, o) ⊗ (m, i); with one output the labels' are multiples of one another."""
    if len(ghat) == 1 and ghat[0].left.shape[2] == 1 and ghat[0].right is not None:
        return ghat[0].left * factor.half(ghat[0].right)[:, None, :]
    written = flat(ghat)
    return factor.half(written.flatten(0, 1)).view_as(written)


def written_roots(training: Training) -> list[Tensor]:
    """L⁻ᵀ, one (i, o·p) tensor a parameter block: an object's a meets it once for all labels."""
    root = training.factor.written_half(training.problem.theta)
    return [root[b.start : b.stop].reshape(b.o, b.i, -1).transpose(0, 1).flatten(1) for b in training.problem.blocks]


def products(solved: list[Tensor], rows: list[Rows], block: slice) -> Tensor:
    """k_i (m, C, k) from kept 𝓗⁻¹g_i (o, n, i) and the candidates' gradients (m, C, o) ⊗ (m, i), which stay factored."""
    total: Tensor | None = None
    for whole, (D, a) in zip(solved, rows, strict=True):
        U = whole[:, block]
        o, k, i = U.shape
        V = U.reshape(1, o, k) if a is None else (a @ U.reshape(o * k, i).T).view(-1, o, k)
        part = D * V if o == 1 else D @ V
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@dataclass(frozen=True)
class Counts:
    """Weight of the training points above and tied with each candidate, (m, C) each; what share of the work was done for them."""

    greater: np.ndarray
    equal: np.ndarray
    touched: float  # share of the pairs whose product was formed
    solved: float = 1.0  # share of the candidates that 𝓗⁻¹ met


@torch.no_grad()
def count_scores(
    scorer: Scorer,
    training: Training,
    X: Tensor,
    q: float,
    weight: Tensor | None = None,
    progress: Progress | None = None,
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), block by block."""
    problem = training.problem
    n_classes = problem.logits(X[:1]).shape[1]
    width = max([b.o for b in problem.blocks]) + 8 * n_classes
    limit = max(1, training.memory // 16 // (width * X.element_size()))
    # Blocks that stay in the cache; on a GPU few launches.
    most, pairs = (128, 2**17) if X.device.type == "cpu" else (2**10, 2**24 * n_classes)
    k = max(1, min(problem.n, limit, max(256, pairs // (n_classes * min(len(X), most)))))
    written = training.memory // 8 // (4 * n_classes * problem.p * X.element_size())  # Jacobians of so many objects
    m = max(1, min(len(X), most, limit // k, written))
    slack, eps = training.slack, training.rounding
    greater, equal = [], []
    for start in range(0, len(X), m):
        tau, alpha = scorer(training, X[start : start + m], q)
        tau = tau[:, :, None]
        own_slack = eps * tau.abs()
        above = tied = torch.zeros(tau.shape[:2], dtype=torch.float64, device=tau.device)
        for at in range(0, problem.n, k):
            block = slice(at, min(at + k, problem.n))
            w = None if weight is None else weight[block].T
            part = count_excess(alpha(block).sub_(tau), slack[block], own_slack, w)
            above, tied = above + part[0], tied + part[1]
        greater.append(above)
        equal.append(tied)
        if progress is not None:
            progress(min(start + m, len(X)), len(X))
    return Counts(torch.cat(greater).cpu().numpy(), torch.cat(equal).cpu().numpy(), 1.0)


def count_excess(
    excess: Tensor, slack: Tensor, own_slack: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Weight (...) above and tied, from α − τ (..., k).

    On a CPU signs are summed as bits, three times faster than comparisons, unless something is tied with something.
    """
    if weight is None and not excess.is_cuda:
        bits = excess.view(torch.int64 if excess.element_size() == 8 else torch.int32)
        above = excess.shape[-1] + (bits >> (8 * excess.element_size() - 1)).sum(-1)
        if excess.abs().amin() > slack.max() + own_slack.max():
            return above, 0.0
    return pvalues.count(excess, 0.0, (slack, own_slack), weight, axis=-1)


@torch.no_grad()
def check_far(scorer: Scorer, training: Training, X: Tensor) -> None:
    """Raise where the scores of an object in X (m, ...) overflow; looked for where fourth powers of its values do.

    With q = 0 the score holds ŝ, the largest there is.
    """
    most = torch.finfo(X.dtype).max ** 0.25
    if max(-float((ends := torch.aminmax(X)).min), float(ends.max)) <= most:
        return
    size = X.abs().flatten(1).amax(1)
    for row in (size > most).nonzero()[:, 0].tolist():
        try:
            tau, alpha = scorer(training, X[row : row + 1], 0.0)
            blocks = (alpha(slice(at, at + 256)) for at in range(0, training.problem.n, 256))
            finite = all(bool(part.isfinite().all()) for part in chain([tau], blocks))
        except (torch.linalg.LinAlgError, CurvatureError):  # type: ignore[attr-defined]  # of what is not finite
            finite = False
        if not finite:
            raise ValueError(
                f"object {row} of those to be predicted (counted from 0) holds values up to {float(size[row]):.3g} in size, and its "
                f"scores overflow {str(X.dtype).removeprefix('torch.')}. Look for a wrong unit or a placeholder, and leave such "
                "objects out or clip them."
            )


@torch.no_grad()
def all_scores(scorer: Scorer, training: Training, X: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """All scores at once, α (m, C, n) and τ (m, C): for small problems, diagnostics and tests."""
    tau, alpha = scorer(training, X, q)
    return alpha(slice(0, training.problem.n)), tau
