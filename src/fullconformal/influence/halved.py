"""Pruned counts from half-solved gradients: for networks so large that gradients are neither kept nor solved for one by one.

Products are g_iᵀ𝓗⁻¹ĝ = (R⁻¹g_i)·(R⁻¹ĝ), from halves that the factor makes as they are needed. ŝ = |R⁻¹ĝ|² of every candidate, without
its row, decides most pairs as in `pruned`. Then the training points that some candidate cannot be told from are taken in portions as
large as memory allows, each made once, and the candidates near one of them pass by: they are cheaper to make than points are, because
the labels of an object share its inputs in every layer. A portion takes half of the memory; candidates, what their making needs, and
what is known of pairs an eighth each.

A GPU keeps halves in half precision, as rows of one length. A product then errs by less than 2⁻⁹√(s_i ŝ): an entry is rounded by 2⁻¹¹ of
itself in either factor, and Σ_j |x_j y_j| ≤ |x||y|; 2⁻¹¹ more for the results of the parts in which it is summed, and at most 2⁻¹² for
adding up a part in float32: matrix units cut off what is below the last place, 2⁻²³, once for every 16 of its 2¹⁵ terms. That is
granted to the bounds, and to ties, which count upwards. Halves themselves are made in float32: the turn into the basis spreads
rounding over directions of small λ, where (λ+1)^-½ leaves it as it is and shrinks the gradient, so ten bits would not do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.curvature.base import Halves
from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import Counts, Progress
from fullconformal.runtime.numerics import whole_sums

HALF_ERROR = 2.0**-9  # of a product in half precision, relative to √(s_i ŝ)
LENGTH = 128.0  # of rows in half precision: products stay below 2¹⁴, and entries above the smallest numbers
PART = 2**15  # terms at most that are added up one after the other; the parts of a product are summed side by side


class Halved:
    """Half-solved gradients as rows (k, width): on a GPU in half precision, of one length, filled up to parts of one size."""

    def __init__(self, halves: Halves, p: int, like: Tensor, low: bool | None = None):
        self.halves, self.p = halves, p
        self.low = like.is_cuda and like.dtype == torch.float32 if low is None else low
        self.dtype = torch.float16 if self.low else like.dtype
        self.parts = -(-p // PART)
        self.width = p + (-p % (8 * self.parts) if self.low else 0)
        self.error = HALF_ERROR if self.low else 0.0

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return self.width * self.dtype.itemsize

    def rows(self, X: Tensor, labels: Tensor, s: Tensor) -> Tensor:
        """Rows (k·R, width) of objects with each of their labels (k, R), from self-influences s (k, R)."""
        out = torch.zeros(*labels.shape, self.width, dtype=self.dtype, device=X.device)
        self.halves.half(X, labels, _lengthening(s) if self.low else torch.ones_like(s), out)
        return out.flatten(0, 1)

    def products(self, left: Tensor, s_left: Tensor, right: Tensor, s_right: Tensor) -> Tensor:
        """g𝓗⁻¹g′ (k, l) of rows (k, width) and (l, width)."""
        if not self.low:
            return left @ right.T
        a, b = (rows.view(len(rows), self.parts, -1).transpose(0, 1) for rows in (left, right))
        with whole_sums():
            k = (a @ b.mT).sum(0, dtype=s_left.dtype)
        return k / _lengthening(s_left)[:, None] / _lengthening(s_right)


def _lengthening(s: Tensor) -> Tensor:
    """What makes half-solved gradients with self-influences s (k,) rows of one length."""
    return LENGTH / s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()


class _Pairs:
    """Candidates of losses and ŝ (m, C) against training points: what bounds decide, and what products do."""

    def __init__(self, training: Training, s_hat: Tensor, loss: Tensor, q: float, weight: Tensor | None, error: float):
        self.s, self.rounding = training.self_influence.clamp_min(0), training.rounding
        self.influence_slack = training.influence_slack
        self.b, self.slack, self.weight = training.loss + q * self.s, training.slack, weight
        self.n_classes, self.s_hat, loss = loss.shape[1], s_hat.flatten(), loss.flatten()
        self.tau = loss - (1 - q) * self.s_hat
        self.own = training.loss_rounding * loss + self.rounding * (1 - q) * self.s_hat
        self.error = self.rounding + error  # of a product, relative to √(s ŝ)
        self.counts = torch.zeros(2, len(loss), dtype=torch.float64, device=loss.device)

    def bounded(self, at: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """b − τ, √(s ŝ), and what |b − τ| must exceed for k not to matter, (c, points)."""
        gap = self.b[points] - self.tau[at, None]
        # Roots first: products of small numbers underflow.
        reach = (self.s + self.influence_slack)[points].sqrt() * self.s_hat[at, None].sqrt()
        # What a product errs by, what is granted for that, and the rounding of the reach itself.
        far = reach * (1 + 3 * self.error)
        return gap, reach, far.add_(2 * self.slack[points]).add_(2 * self.own[at, None])

    def weights(self, at: Tensor, points: Tensor, pairs: Tensor) -> Tensor:
        """Weight (c, points) of pairs, 0 for those left out."""
        return pairs.double() if self.weight is None else pairs * self.weight[points].T[at % self.n_classes]

    def decide(self, at: Tensor, points: Tensor, k: Tensor) -> None:
        """Count the near pairs of candidates and points by their products (c, points)."""
        gap, reach, far = self.bounded(at, points)
        tolerance = (reach.mul_(self.error).add_(self.slack[points]), self.own[at, None])
        part = pvalues.count(gap - k, 0.0, tolerance, self.weights(at, points, gap.abs() <= far), axis=-1)
        self.counts[0, at] += part[0]
        self.counts[1, at] += part[1]

    def near(self, points: Tensor, room: int, count: bool = False) -> tuple[Tensor, Tensor]:
        """Candidates (m, C) near one of the points, points (k,) near a candidate; counts what is surely above where asked to."""
        candidates, mine = torch.zeros_like(self.tau, dtype=torch.bool), torch.zeros_like(points, dtype=torch.bool)
        every = torch.arange(len(self.tau), device=self.tau.device)
        for at in every.split(max(1, room // (64 * len(points)))):
            gap, _, far = self.bounded(at, points)
            near = gap.abs() <= far
            candidates[at], mine = near.any(1), mine | near.any(0)
            if count:
                self.counts[0, at] += self.weights(at, points, gap > far).sum(1)
        return candidates.view(-1, self.n_classes), mine


def counts_by_halves(
    training: Training, halved: Halved, X: Tensor, q: float, weight: Tensor | None, progress: Progress | None
) -> Counts:
    """`pruned_counts` from half-solved gradients, those of points and of candidates made as they are needed.

    Scores are tied within the rounding of their losses and (ŝ being known) of their products: in float32 less than `count_scores` grants.
    """
    problem, m, room = training.problem, len(X), training.memory // 8
    loss = problem.loss.candidates(problem.logits(X))
    labels = torch.arange(loss.shape[1], device=X.device).expand_as(loss)
    s_hat = halved.halves.influences(X, labels)
    pairs = _Pairs(training, s_hat, loss, q, weight, halved.error)
    order = torch.argsort(pairs.b, stable=True)
    left, mine = pairs.near(order, room, count=True)
    needed, formed, done = order[mine], 0, 0
    portion = max(1, min(8192, 4 * room // halved.nbytes))
    for points in needed.split(portion) if len(needed) else ():
        rows = halved.rows(problem.X[points], problem.y[points, None], pairs.s[points, None])
        most = room // max(halved.nbytes, (64 + 2 * halved.parts) * len(points))
        for x, y in _batches(pairs.near(points, room)[0], most):
            at = (x[:, None] * loss.shape[1] + y).flatten()
            own = halved.rows(X[x], y, s_hat[x[:, None], y])
            pairs.decide(at, points, halved.products(own, pairs.s_hat[at], rows, pairs.s[points]))
            formed += len(at) * len(points)
            del own  # before the next are made
        del rows
        done += len(points)
        if progress is not None:
            progress(m * done // len(needed), m)
    greater, equal = pairs.counts.view(2, *loss.shape).cpu().numpy()
    return Counts(
        np.asarray(greater), np.asarray(equal), formed / (loss.numel() * problem.n), float(left.double().mean())
    )


def _batches(near: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Objects (k,) and labels (k, R) that hold the candidates near (m, C), `most` rows at a time.

    All labels of an object cost about as much as three of them one by one.
    """
    n_classes, many = near.shape[1], 3 * near.sum(1) > near.shape[1]
    for x in many.nonzero()[:, 0].split(max(1, most // n_classes)):
        if len(x):
            yield x, torch.arange(n_classes, device=near.device).expand(len(x), -1)
    for pair in (near & ~many[:, None]).nonzero().split(max(1, most)):
        if len(pair):
            yield pair[:, 0], pair[:, 1:]
