"""Training points in the order of b = ℓ + q·s: the points that could fall on either side of a candidate are a range of them.

Where 𝓗 is positive definite |k_i| ≤ σ_i·ρ with σ_i² = s_i and ρ² = ŝ, so only points with |b_i − τ| ≤ σ_i·ρ need their product. With
M_i = max of σ_j over j ≤ i, a candidate needs no point

    before the first with b_i + ρ·M_i ≥ τ        with b_i > τ + ρ·M_j, j any point with none needed after it

and searches find both ends: b_i + ρ·M_i grows with i. Losses grow with residuals, and so do self-influences: M is close to the σ of the
points in the range, which is hardly longer than what it must hold.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fullconformal.influence.prepared import Prepared


class SortedPoints:
    """Points sorted by b (n,), class by class where candidates are compared within their class.

    `order` (n,) has their places in the training set, `starts` and `stops` where each class begins and ends.
    """

    def __init__(self, prepared: Prepared, q: float, class_conditional: bool):
        s = prepared.self_influence.clamp_min(0)
        b, order = torch.sort(prepared.loss + q * s, stable=True)
        self.prepared, self.stops = prepared, [len(b)]
        if class_conditional:
            y, by_class = torch.sort(prepared.problem.y[order], stable=True)
            b, order = b[by_class], order[by_class]
            self.stops = torch.bincount(y, minlength=prepared.problem.n_classes).cumsum(0).tolist()
        self.b, self.order, self.slack, self.sigma = b, order, prepared.slack[order], s.sqrt()[order]
        self.starts = [0, *self.stops[:-1]]
        self.within = Ranges(b, self.slack, self.sigma, self.stops)
        self.top: Solved | None = None  # the points of largest b, as many as a prediction asked for
        self.spent = 0  # candidates that predictions have solved for so far
        self.root: Any = None  # L⁻ᵀ as `candidates` writes it out, where a prediction asked for it

    def __len__(self) -> int:
        return len(self.b)

    def __getstate__(self) -> dict[str, object]:
        """What copies of a predictor hold: no second copy of the points' rows, which is made again."""
        return {**{name: value for name, value in vars(self).items() if name != "single"}, "top": None, "root": None}

    @cached_property
    def single(self) -> Tensor:
        """L⁻¹g_i (n, p) in float32 and in this order: gathered for each tile, they would be half of its time."""
        assert self.prepared.half is not None
        problem = self.prepared.problem
        rows = self.b.new_empty(len(self), problem.p, dtype=torch.float32)
        for at, out in zip(self.order.split(problem.chunk), rows.split(problem.chunk), strict=True):
            out.copy_(self.prepared.half.index_select(0, at))
        return rows

    def solved(self, count: int) -> Solved:
        """The last points with their 𝓗⁻¹g_i, at least so many."""
        # Another thread may make more of them meanwhile, so the attribute is read once.
        known = self.top
        if known is None or len(known.rows) < count:
            known = self.top = Solved(self, count, known)
        return known


class Solved:
    """The last points of a bag of one class with their rows U_i = 𝓗⁻¹g_i (count, p): |k_i| ≤ |U_i||ĝ|, and no candidate is solved for."""

    def __init__(self, bag: SortedPoints, count: int, known: Solved | None):
        last, stop = slice(len(bag) - count, None), len(bag) - (0 if known is None else len(known.rows))
        rows = bag.prepared.factor.back(bag.prepared.half_rows(bag.order[last.start : stop]))
        self.rows: Tensor = rows if known is None else torch.cat([rows, known.rows])
        self.lengths, self.parameters = torch.linalg.vector_norm(self.rows, dim=1), bag.prepared.problem.blocks
        self.within = Ranges(bag.b[last], bag.slack[last], self.lengths, [count])

    @cached_property
    def single(self) -> Tensor:
        """Rows in float32."""
        return self.rows.float()

    @cached_property
    def blocks(self) -> list[Tensor]:
        """The same as matrices (count, o, i) of each block of parameters."""
        return [self.rows[:, b.start : b.stop].float().view(-1, b.o, b.i) for b in self.parameters]


class Ranges:
    """The ranges of points that candidates need, among points in the order of b (n,) with slack and σ (n,), class by class."""

    def __init__(self, b: Tensor, slack: Tensor, sigma: Tensor, stops: list[int]):
        self.b, self.stops, self.starts = b, stops, [0, *stops[:-1]]
        # The largest up to each point of its class.
        self.most_slack, self.most_sigma = (
            torch.cat([part.cummax(0).values for part in v.tensor_split(stops[:-1])]) for v in (slack, sigma)
        )

    @cached_property
    def searched(self) -> list[tuple[Tensor, Tensor]]:
        """b with its slack, and M, of each class, followed by infinities up to 2^k − 1 points: what bisection looks at."""
        out = []
        for start, stop in zip(self.starts, self.stops, strict=True):
            b, slack, sigma = (v[start:stop] for v in (self.b, self.most_slack, self.most_sigma))
            missing = (1 << (stop - start).bit_length()) - (stop - start)
            out.append((pad(b + 2 * slack, (0, missing), value=torch.inf), pad(sigma, (0, missing))))
        return out

    def find(self, lowest: Tensor, highest: Tensor, rho: Tensor, own: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """First point and the point after the last (k,) that could fall on either side of τ or tie with it.

        For candidates of labels y with τ between lowest and highest, rounding `own` granted to it, and √ŝ ≤ ρ, (k,) each.
        """
        if len(self.stops) == 1:
            return self._find(0, lowest, highest, rho, own)
        out = torch.zeros(2, len(y), dtype=torch.long, device=y.device)
        for label in range(len(self.stops)):
            mine = (y == label).nonzero()[:, 0]
            if len(mine):
                out[:, mine] = torch.stack(self._find(label, *(v[mine] for v in (lowest, highest, rho, own))))
        return out[0], out[1]

    def _find(self, label: int, lowest: Tensor, highest: Tensor, rho: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Among the points of a class, or of all."""
        start, stop = self.starts[label], self.stops[label]
        if start == stop:
            return (torch.full_like(lowest, start, dtype=torch.long),) * 2
        b, (raised, most_sigma) = self.b[start:stop], self.searched[label]
        low, target = torch.zeros_like(lowest, dtype=torch.long), lowest - 2 * own
        # A GPU would rather look at more points than more often, and so would a CPU of few candidates.
        stride, ways = len(raised), 16 if low.is_cuda or len(low) < 1000 else 2
        while stride > 1:  # points before `low` are not needed
            ways = min(ways, stride)
            stride //= ways
            at = low + stride * torch.arange(1, ways, device=low.device)[:, None] - 1
            below = torch.addcmul(raised[at], rho, most_sigma[at]) < target
            low += below.sum(0) * stride
        highest = highest + 2 * own
        high = torch.full_like(low, stop - start)
        for _ in range(2):
            last = start + high.sub(1).clamp_min_(0)
            reach = torch.addcmul(2 * self.most_slack[last], rho, self.most_sigma[last])
            high = torch.searchsorted(b, highest + reach, right=True)
        return start + low, start + torch.maximum(low, high)


def sorted_points(prepared: Prepared, q: float, class_conditional: bool) -> SortedPoints:
    """The points sorted when they are first asked for, and kept for one scheme at a time."""
    key = q, class_conditional
    bag: SortedPoints | None = prepared.sorted.get(key)
    if bag is None:
        bag = SortedPoints(prepared, q, class_conditional)
        prepared.sorted.clear()
        prepared.sorted[key] = bag
    return bag
