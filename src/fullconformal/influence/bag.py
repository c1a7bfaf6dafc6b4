"""Training points in the order of b = ℓ + q·s: the points that could fall on either side of a candidate are a range of them.

Where 𝓗 is positive definite |k_i| ≤ σ_i·ρ with σ_i² = s_i and ρ² = ŝ, so only points with |b_i − τ| ≤ σ_i·ρ need their product. With
M_j = max of σ_i over i ≤ j, a candidate needs no point

    with b_i < τ − ρ·M_j, j the last point with b_j ≤ τ        with b_i > τ + ρ·M_j, j any point with none needed after it

and a few searches find both ends. Losses grow with residuals, and so do self-influences: M is close to the σ of the points in the
range, which is hardly longer than what it must hold.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fullconformal.influence.prepared import Prepared

PORTION = 512  # rows that are gathered and rounded together, so that they stay in the cache


class Bag:
    """Points sorted by b (n,), class by class where candidates are compared within their class.

    `order` (n,) has their places in the training set, `stops` where each class ends; slack and σ (n,) are as they are, and as their
    largest up to each point of its class. `highest` has b, slack and σ as their largest up to each point, of whatever class.
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
        self.most_slack, self.most_sigma = (
            torch.cat([part.cummax(0).values for part in v.tensor_split(self.stops[:-1])])
            for v in (self.slack, self.sigma)
        )
        self.top: Tensor | None = None  # 𝓗⁻¹g_i of the points of largest b, as many as a prediction asked for

    def __len__(self) -> int:
        return len(self.b)

    def __getstate__(self) -> dict[str, object]:
        """What copies of a predictor hold: no second copy of the points' rows, which is made again."""
        return {**{name: value for name, value in vars(self).items() if name != "single"}, "top": None}

    @cached_property
    def single(self) -> tuple[Tensor, Tensor]:
        """L⁻¹g_i (n, p) and b (n,) in float32."""
        assert self.prepared.half is not None
        rows = self.b.new_empty(len(self), self.prepared.problem.p, dtype=torch.float32)
        for at, out in zip(self.order.split(PORTION), rows.split(PORTION), strict=True):
            out.copy_(self.prepared.half.index_select(0, at))
        return rows, self.b.float()

    def solved(self, count: int) -> Tensor:
        """𝓗⁻¹g_i (count, p) of the last points."""
        if self.top is None or len(self.top) < count:
            self.top = self.prepared.factor.back(self.prepared.half_rows(self.order[len(self) - count :]))
        return self.top[len(self.top) - count :]

    def ranges(self, lowest: Tensor, highest: Tensor, rho: Tensor, own: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """First point and the point after the last (k,) that could fall on either side of τ or tie with it.

        For candidates of labels y with τ between lowest and highest, rounding `own` granted to it, and √ŝ ≤ ρ, (k,) each.
        """
        if len(self.stops) == 1:
            return self._ranges(0, len(self), lowest, highest, rho, own)
        out = torch.zeros(2, len(y), dtype=torch.long, device=y.device)
        for label, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            mine = (y == label).nonzero()[:, 0]
            if len(mine):
                out[:, mine] = torch.stack(self._ranges(start, stop, *(v[mine] for v in (lowest, highest, rho, own))))
        return out[0], out[1]

    def _ranges(
        self, start: int, stop: int, lowest: Tensor, highest: Tensor, rho: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Among the points from start to stop."""
        if start == stop:
            return (torch.full_like(lowest, start, dtype=torch.long),) * 2
        b, most_sigma, most_slack = (v[start:stop] for v in (self.b, self.most_sigma, self.most_slack))

        def reach(count: Tensor) -> Tensor:
            """What |b − τ| of the first so many points must exceed."""
            last = count.sub(1).clamp_min_(0)
            return torch.addcmul(2 * own, rho, most_sigma[last]).add_(most_slack[last], alpha=2)

        low = torch.searchsorted(b, lowest - reach(torch.searchsorted(b, lowest, right=True)))
        high = torch.searchsorted(b, highest + reach(torch.full_like(low, stop - start)), right=True)
        high = torch.searchsorted(b, highest + reach(high), right=True)
        return start + low, start + torch.maximum(low, high)


def sorted_bag(prepared: Prepared, q: float, class_conditional: bool) -> Bag:
    """The points sorted when they are first asked for, and kept for one scheme at a time."""
    key = q, class_conditional
    if key not in prepared.sorted:
        prepared.sorted.clear()
        prepared.sorted[key] = Bag(prepared, q, class_conditional)
    bag: Bag = prepared.sorted[key]
    return bag
