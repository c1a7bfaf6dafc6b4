"""The direct approximation of models with few parameters, pruned pair by pair: the same counts from hardly more products than needed.

As in `pruned`, |k_i| ≤ σ_i·ρ with σ_i² = s_i and ρ² = ŝ, so that only points with |b_i − τ| ≤ σ_i·ρ need their product. Training points are
sorted by b. With M_j = max of σ_i over i ≤ j, a candidate needs no point

    with b_i < τ − ρ·M_j, j the last point with b_j ≤ τ        with b_i > τ + ρ·M_j, j any point with none needed after it

and a few searches find both ends. Losses grow with residuals, and so do self-influences: M is close to the σ of the points in the
window, which is hardly longer than what it must hold. That meets the candidate, L⁻¹g_i·L⁻¹ĝ, one pair a row: where p is small it costs
less than finding out which candidates might share a matrix product.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import Counts, Progress, candidate_gradients, half_solved

BUFFER = (
    2**24,
    2**17,
)  # numbers of the rows that meet, on a GPU and on a CPU, where fresh memory costs more than the products
PAIR = 128  # bytes that a pair takes besides
DENSE = 16  # a pair by itself costs as much as so many in one product
OBJECTS = 4096  # that pass together, at most


class Sorted:
    """Training points in the order of b, with the running maxima of σ and of the rounding granted to their scores."""

    def __init__(self, training: Training, q: float, label: int | None = None):
        """All points, or those of a class."""
        s = training.self_influence.clamp_min(0)
        self.b, self.order = torch.sort(training.loss + q * s, stable=True)
        if label is not None:
            own = training.problem.y[self.order] == label
            self.b, self.order = self.b[own], self.order[own]
        self.slack = training.slack[self.order]
        self.sigma, self.granted = (
            v.cummax(0).values for v in ((s + training.influence_slack).sqrt()[self.order], 2 * self.slack)
        )

    @classmethod
    def of(cls, training: Training, q: float, label: int | None = None) -> Self:
        """The points as they were sorted when they were first asked for."""
        key = cls, q, label
        if key not in training.sorted:
            for other in [other for other in training.sorted if other[1] != q]:  # each has a copy of the points
                del training.sorted[other]
            training.sorted[key] = cls(training, q, label)
        bag = training.sorted[key]
        assert isinstance(bag, cls)
        return bag

    def window(self, tau: Tensor, rho: Tensor, eps: float, off: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """First point and the point after the last (k,) that candidates with τ, which may be off, and ρ (k,) may not be told from."""
        rho, own = rho * (1 + eps), 2 * eps * tau.abs() + (1 + 2 * eps) * off

        def reach(count: Tensor) -> Tensor:
            """What |b − τ| of the first so many points must exceed."""
            last = count.sub(1).clamp_min_(0)
            return torch.addcmul(own, rho, self.sigma.index_select(0, last)).add_(self.granted.index_select(0, last))

        low = torch.searchsorted(self.b, tau - reach(torch.searchsorted(self.b, tau, right=True)))
        high = torch.searchsorted(self.b, rho * self.sigma[-1] + (self.granted[-1] + own + tau), right=True)
        return low, torch.searchsorted(self.b, tau + reach(high), right=True)


@torch.no_grad()
def windowed_counts(
    training: Training, X: Tensor, q: float, weight: Tensor | None = None, progress: Progress | None = None
) -> Counts | None:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` has them; None where one product is cheaper."""
    problem, eps = training.problem, training.rounding
    n, n_classes = problem.n, problem.n_classes
    bag, points = Sorted.of(training, q), training.halved
    assert points is not None
    weight = None if weight is None else weight[bag.order]
    above = None if weight is None else _from_there_on(weight)
    room, step = training.memory // 16 // PAIR, training.memory // 16 // (4 * n_classes * problem.p * X.element_size())
    counts, formed = torch.zeros(2, len(X), n_classes, dtype=torch.float64, device=X.device), 0
    for at in range(0, len(X), step := max(1, min(OBJECTS, step))):
        objects = slice(at, at + step)
        logits, J = problem.jacobian(X[objects])
        half = half_solved(training.factor, candidate_gradients(problem.loss, J, logits)).flatten(0, 1)
        s_hat = (half**2).sum(1)
        tau = problem.loss.candidates(logits).flatten() - (1 - q) * s_hat
        low, high = bag.window(tau, s_hat.sqrt(), eps)
        pairs = int((high - low).sum())
        if not at and DENSE * pairs > n * len(tau):
            return None
        y = torch.arange(len(tau), device=X.device) % n_classes
        total = torch.zeros(2, len(tau), dtype=torch.float64, device=X.device)
        total[0] = n - high if above is None else above[high, y]
        for some in _portions(high - low, room) if pairs > room else [slice(None)]:
            _count(bag, points, half[some], tau[some], low[some], high[some], y[some], weight, eps, total[:, some])
        counts[:, objects] = total.view(2, -1, n_classes)
        formed += pairs
        if progress is not None:
            progress(min(at + step, len(X)), len(X))
    greater, equal = counts.cpu().numpy()
    return Counts(greater, equal, formed / (n * n_classes * len(X)))


def _from_there_on(weight: Tensor) -> Tensor:
    """Weight (n + 1, C) of the points from each on, none at the end."""
    return torch.cat([weight, torch.zeros_like(weight[:1])]).flip(0).cumsum(0).flip(0)


def _portions(width: Tensor, most: int) -> list[slice]:
    """Candidates with windows of some width (k,), cut so that they meet about as many points as asked for, or one candidate its own."""
    stops = torch.unique_consecutive(width.cumsum(0) // max(1, most), return_counts=True)[1].cumsum(0).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _count(
    bag: Sorted, points: Tensor, half: Tensor, tau: Tensor, low: Tensor, high: Tensor, y: Tensor, weight: Tensor | None, eps: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Add the weight of the points in the windows above and tied with candidates to out (2, k).

    Of points L⁻¹g_i (n, p) as they are, and weights (n, C) in the order of b.
    """
    width = high - low
    c = torch.repeat_interleave(width)
    i = torch.arange(len(c), device=c.device).add_((low - (width.cumsum(0) - width)).index_select(0, c))
    b, slack, order = (v.index_select(0, i) for v in (bag.b, bag.slack, bag.order))
    t = tau.index_select(0, c)
    excess = (b - t).sub_(products(half, points, c, order))
    own = eps * t.abs()
    above, not_below = excess - slack > own, excess + slack >= -own
    w = None if weight is None else weight[i, y[c]]
    for total, counted in zip(out, (above, not_below & ~above), strict=True):
        if counted.any():
            total.index_add_(0, c, counted.double() if w is None else counted * w)


def products(left: Tensor, right: Tensor, c: Tensor, i: Tensor) -> Tensor:
    """Products (pairs,) of rows c of left (k, p) with rows i of right (n, p).

    On a CPU by NumPy, which is quicker to start, and through buffers that stay in the cache.
    """
    out, most = left.new_empty(len(c)), max(1, BUFFER[left.device.type == "cpu"] // left.shape[1])
    if left.is_cuda:
        for part, *at in zip(*(v.split(most) for v in (out, c, i)), strict=True):
            torch.sum(left.index_select(0, at[0]) * right.index_select(0, at[1]), 1, out=part)
        return out
    x, y = np.empty((2, min(most, len(c)), left.shape[1]), out.numpy().dtype)
    sides = (left.numpy(), c.numpy(), x), (right.numpy(), i.numpy(), y)
    for part in (slice(start, start + most) for start in range(0, len(c), most)):
        a, b = (rows.take(at[part], 0, buffer[: len(at[part])], "clip") for rows, at, buffer in sides)
        np.einsum("kp,kp->k", a, b, out=out.numpy()[part])
    return out
