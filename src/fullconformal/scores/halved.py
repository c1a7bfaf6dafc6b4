"""Pruned counts from half-solved gradients: for networks so large that gradients are neither kept nor solved for one by one.

Products are g_i𝓗⁻¹ĝ = (R⁻¹g_i)·(R⁻¹ĝ), from halves that the factor makes as they are needed. Then:

1. ŝ = |R⁻¹ĝ|² of every candidate, without its row, decides blocks of training points as in `pruned`;
2. the candidates left, sorted by τ, go in groups as large as memory allows: the points that some of a group cannot be told from are
   made again for every group, and meet it in one product.

A GPU keeps halves in half precision, as rows of one length. A product then errs by less than 2⁻⁹√(s_i ŝ): an entry is rounded by 2⁻¹¹ of
itself in either factor, and Σ_j |x_j y_j| ≤ |x||y|; 2⁻¹¹ more for the result, and as much for adding up in float32. That is
granted to the bounds, and to ties, which count upwards. Halves themselves are made in float32: the turn into the basis spreads
rounding over directions of small λ, where (λ+1)^-½ leaves it as it is and shrinks the gradient, so ten bits would not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fullconformal.curvature.base import Halves
from fullconformal.problem import candidate_losses
from fullconformal.scores.base import Counts, Progress, Training, count_excess
from fullconformal.scores.blocks import Blocks

HALF_ERROR = 2.0**-9  # of a product in half precision, relative to √(s_i ŝ)
LENGTH = 128.0  # of rows in half precision: products stay below 2¹⁴, and entries above the smallest numbers
PARTS = 16  # a product of few rows, each of millions of numbers, is summed by so many parts side by side


class Halved:
    """Half-solved gradients as rows (k, width): on a GPU in half precision, of one length, filled up to a whole number of parts."""

    def __init__(self, halves: Halves, p: int, like: Tensor, low: bool | None = None):
        self.halves, self.p = halves, p
        self.low = like.is_cuda and like.dtype == torch.float32 if low is None else low
        self.dtype = torch.float16 if self.low else like.dtype
        self.width = p + (-p % (8 * PARTS) if self.low else 0)
        self.error = HALF_ERROR if self.low else 0.0

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return self.width * self.dtype.itemsize

    def rows(self, X: Tensor, y: Tensor, s: Tensor) -> Tensor:
        """Rows (k, width) of points (x, y) with self-influences s (k,)."""
        out = torch.zeros(len(X), self.width, dtype=self.dtype, device=X.device)
        for start in range(0, len(X), self.halves.step):
            at = slice(start, start + self.halves.step)
            half = self.halves.half(X[at], y[at])
            out[at, : self.p] = half * _lengthening(s[at])[:, None] if self.low else half
        return out

    def products(self, left: Tensor, s_left: Tensor, right: Tensor, s_right: Tensor) -> Tensor:
        """g𝓗⁻¹g′ (k, l) of rows (k, width) and (l, width)."""
        if not self.low:
            return left @ right.T
        a, b = (rows.view(len(rows), PARTS, -1).transpose(0, 1) for rows in (left, right))
        with _whole_sums():
            k = (a @ b.mT).to(s_left.dtype).sum(0)
        return k / _lengthening(s_left)[:, None] / _lengthening(s_right)


def _lengthening(s: Tensor) -> Tensor:
    """What makes half-solved gradients with self-influences s (k,) rows of one length."""
    return LENGTH / s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()


@contextmanager
def _whole_sums() -> Iterator[None]:
    """Products in half precision are added up in float32 throughout, which torch does not insist on by default."""
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before


def counts_by_halves(
    training: Training, halved: Halved, X: Tensor, q: float, weight: Tensor | None, progress: Progress | None
) -> Counts:
    """`pruned_counts` from half-solved gradients, those of candidates and of points made as they are needed."""
    problem, m, eps = training.problem, len(X), training.rounding + 2 * halved.error
    loss = candidate_losses(problem.logits(X))
    labels = torch.arange(loss.shape[1], device=X.device).expand_as(loss)
    s_hat = halved.halves.influences(X, labels)
    tau, s_hat, y = (loss - (1 - q) * s_hat).flatten(), s_hat.flatten(), labels.reshape(-1)
    order = torch.argsort(training.loss + q * training.self_influence, stable=True)
    bag = Blocks(training, order, q, weight)
    counts = torch.zeros(2, len(tau), dtype=torch.float64, device=X.device)
    open_ = torch.zeros_like(tau, dtype=torch.bool)
    every = torch.arange(len(tau), device=X.device)
    for part in every.split(max(1, training.memory // 16 // (8 * 8 * len(bag.b)))):
        sure, blocks = bag.sieve(tau[part], tau[part], s_hat[part], y[part], eps)
        counts[0, part], open_[part] = sure.sum(0), blocks.any(0)
    left = open_.nonzero()[:, 0]
    left, formed, done = left[torch.argsort(tau[left])], 0, 0
    # Half the memory for candidates: the points that a group needs are made again for every group.
    for group in left.split(max(1, min(8192, training.memory // 2 // halved.nbytes))):
        x = X[group // loss.shape[1]]
        above, equal, pairs = _group_by_halves(training, halved, bag, x, y[group], tau[group], s_hat[group])
        counts[0, group] += above
        counts[1, group] += equal
        formed, done = formed + pairs, done + len(group)
        if progress is not None:
            progress(m * done // len(left), m)
    greater, equal = counts.view(2, m, -1).cpu().numpy()
    return Counts(np.asarray(greater), np.asarray(equal), formed / (len(tau) * problem.n), len(left) / len(tau))


def _group_by_halves(
    training: Training, halved: Halved, bag: Blocks, X: Tensor, y: Tensor, tau: Tensor, s_hat: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Weight above, beyond what was sure, and tied with candidates (c,) in the blocks open to any; the number of products formed."""
    problem, eps, t = training.problem, training.rounding + 2 * halved.error, tau[:, None]
    rows = halved.rows(X, y, s_hat)
    sure, open_ = bag.sieve(tau, tau, s_hat, y, eps)
    above, equal = torch.zeros(2, len(tau), dtype=torch.float64, device=X.device)
    formed = 0
    limit = max(1, training.memory // 16 // (8 * bag.order.shape[1] * len(tau) * X.element_size()))
    step = max(1, training.memory // 8 // halved.nbytes)
    for blocks in open_.any(1).nonzero()[:, 0].split(limit):
        points, s = bag.order[blocks].flatten(), bag.s[blocks].flatten()
        k = X.new_zeros(len(tau), len(points))  # 0 decides points that are not near as their product would
        for part in bag.near(blocks, t, s_hat, eps).split(step):
            if len(part):
                own = halved.rows(problem.X[points[part]], problem.y[points[part]], s[part])
                k[:, part] = halved.products(rows, s_hat, own, s[part])
                formed += len(tau) * len(part)
        excess = torch.sub(bag.b[blocks].flatten(), k, out=k).sub_(t)
        slack = bag.slack[blocks].flatten() + halved.error * s.sqrt() * s_hat.sqrt()[:, None]
        w = None if bag.weight is None else bag.weight[blocks].flatten(0, 1)[:, y].T
        part = count_excess(excess, slack, training.rounding * t.abs(), w)
        above += part[0] - sure[blocks].sum(0)
        equal += part[1]
    return above, equal, formed
