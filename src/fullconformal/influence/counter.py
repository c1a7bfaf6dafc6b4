"""The counter: for every candidate the training points above it and tied with it, by the direct approximation, 𝓗 positive definite.

A candidate only meets the points of its range (`bag`): the others are surely above it or below. Candidates whose ranges are alike make a
tile, which meets the points of all its ranges in one matrix product of rows. There are three kinds of rows, k_i = row of i · row of ĝ:

1. L⁻¹g_i, which are kept where n·p numbers fit the memory, and L⁻¹ĝ. Candidates whose range is empty by the bound ŝ ≤ |ĝ|²/floor need
   no rows. In the deleted scheme, those whose range lies among the points of largest b meet
2. 𝓗⁻¹g_i, of as many points as make the fewest solves for both, and ĝ. Most wrong labels are among them; after some predictions all are.
3. Where nothing is kept, ŝ of all candidates comes first. Then points are taken in portions as large as the memory allows, each made
   once, and the candidates whose ranges reach there pass by. Rows are g_i and 𝓗⁻¹ĝ; or half-solved gradients straight from the layers,
   R⁻¹g_i and R⁻¹ĝ, where the factor has those.

In float64, kept rows meet in float32 wherever that decides. With u = 2⁻²⁴, b_i − k_i − τ errs by less than

    u·((2p + 10)·σ_i·ρ + 2·(|b_i| + |τ|)) + σ_i·ε

by Cauchy–Schwarz, whatever the order of the sums, where rows of candidates are off by ε: p additions to Σ|v||w| ≤ σ_i·ρ, whose factors are
rounded, and to b_i − τ, which is about σ_i·ρ at most where the sign is in doubt. Products that labels share (`Top.subtract`) are of
fewer terms, `Source.terms` in place of p. Numbers that vanish, below 2⁻¹²⁶, are granted apart. What
exceeds that and the tie tolerance is decided, and the few pairs that do not are formed again in float64: the counts are those of
`count_scores`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fullconformal.influence.candidates import Candidates, every_candidate
from fullconformal.influence.near import Met, Near
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.sorted_points import sorted_points
from fullconformal.influence.sources import Source, Top, source_of
from fullconformal.influence.tiles import Points, cut, from_there_on
from fullconformal.pvalues import Counts
from fullconformal.runtime.numerics import full_precision
from fullconformal.runtime.tasks import Progress

AGAIN = 64  # one pair in so many may be formed again in float64; where they are more, all products are formed in it
PAIR = 160  # bytes that a pair takes while it is counted, at most


@torch.no_grad()
def direct_counts(
    prepared: Prepared,
    X: Tensor,
    q: float,
    points: Tensor | None = None,
    class_conditional: bool = False,
    progress: Progress | None = None,
    half_precision: bool | None = None,
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation.

    Points may have weights (n,); class-conditionally a label is compared with the points that have it. Rows made straight from the
    layers are in half precision if asked for, by default on a GPU.
    """
    bag = sorted_points(prepared, q, class_conditional)
    with full_precision():
        source = source_of(prepared, bag, X, q, half_precision)
        counter = _Counter(source, points)
        counter.count(source.bounded(every_candidate(prepared, X, q)), progress)
    greater, equal = counter.total.view(2, len(X), -1).cpu().numpy()
    return Counts(greater, equal, counter.formed / max(1, len(bag) * counter.total.shape[1]), counter.solved)


class _Counter:
    """Weight above and tied with candidates, total (2, m·C), of the points of a bag, which may have weights (n,)."""

    def __init__(self, source: Source, weight: Tensor | None):
        self.source, self.bag, self.prepared = source, source.bag, source.prepared
        self.formed, self.solved = 0, 1.0  # pairs that met, and the share of candidates that were solved for
        bag, device = self.bag, source.X.device
        size = len(source.X) * self.prepared.problem.n_classes
        self.total = torch.zeros(2, size, dtype=torch.float64, device=device)
        weight = None if weight is None else weight.to(device, torch.float64)[bag.order]
        self.points = Points(bag.b, bag.order, bag.slack, bag.sigma, weight, from_there_on(bag.b, weight))

    def count(self, found: Candidates, progress: Progress | None) -> None:
        """Count all candidates."""
        source, bag, beyond, m = self.source, self.bag, self.points.beyond, len(self.source.X)
        low, high = torch.tensor([bag.starts, bag.stops], device=beyond.device)[:, self._class(found)]
        end = beyond[high]
        if source.is_bounded:
            low, high = source.ranges(found, found.loss)
        self._add(found, beyond[high] - end)
        left = (high > low).nonzero()[:, 0]
        if source.has_top and len(left):
            left = self._count_top(found, low, high, left)
        total = max(1, len(found))
        done, self.solved = total - len(left), len(left) / total
        bag.spent += len(left)
        found, low, high = found[left], low[left], high[left]
        source.begin(found)
        for index in self._portions(low, high):
            part, lows, highs, points = found, low, high, self.points
            if index is not None:
                lows, highs = (ends.clamp(int(index[0]), int(index[-1]) + 1) for ends in (low, high))
                met = (highs > lows).nonzero()[:, 0]
                part, lows, highs, points = found[met], lows[met], highs[met], points.at(index)
            source.hold(index)
            for at in (slice(start, start + source.room) for start in range(0, len(part), source.room)):
                self._count_some(source, part[at], lows[at], highs[at], points, index)
                done += len(lows[at])
                if progress is not None:
                    progress(min(m, m * done // total), m)
        if progress is not None:
            progress(m, m)

    def _count_top(self, found: Candidates, low: Tensor, high: Tensor, left: Tensor) -> Tensor:
        """Count candidates (left,) that meet points of largest b only, without solving for them; returns the others."""
        top = Top(self.prepared, self.bag, self.source.X, self.source.q, low[left])
        covered = low[left] >= top.first
        if covered.any():
            top.hold(None)
            points = self.points.at(slice(top.first, None))._replace(sigma=top.solved.lengths)
            for at in left[covered].split(top.room):
                self._count_some(top, found[at], low[at] - top.first, high[at] - top.first, points, None)
        return left[~covered]

    def _count_some(
        self, source: Source, found: Candidates, low: Tensor, high: Tensor, points: Points, index: Tensor | None
    ) -> None:
        """Count candidates, of which ranges low … high (k,) hold what is needed, among the points at some places of the bag, or all."""
        for single in (True, False):
            made = source.make(found, single)
            first, last = (torch.minimum(torch.maximum(e, low), high) for e in source.ranges(made, made.tau))
            end = high
            if index is not None:
                first, last, end = (torch.searchsorted(index, ends) for ends in (first, last, high))
            # Float32 may leave too many pairs to be formed again.
            if self._meet(source, made, first, last, points):
                return self._add(made, points.beyond[last] - points.beyond[end])

    def _class(self, found: Candidates) -> Tensor:
        """The class of points that candidates are compared with; 0 where there is but one."""
        return found.y if len(self.bag.stops) > 1 else torch.zeros_like(found.y)

    def _add(self, found: Candidates, weight: Tensor) -> None:
        """Add weight (k,) to what is above candidates."""
        self.total[0].index_add_(0, found.x * self.prepared.problem.n_classes + found.y, weight)

    def _portions(self, low: Tensor, high: Tensor) -> list[Tensor | None]:
        """Places of the points that are in some range, in portions; None for all of them at once."""
        n = len(self.bag)
        if self.source.portion >= n:
            return [None] if len(low) else []
        ends = torch.zeros(n + 1, dtype=torch.long, device=low.device)
        ends.index_add_(0, low, torch.ones_like(low)).index_add_(0, high, -torch.ones_like(high))
        needed = (ends.cumsum(0) > 0).nonzero()[:, 0]
        return list(needed.split(self.source.portion)) if len(needed) else []

    def _meet(self, source: Source, made: Candidates, low: Tensor, high: Tensor, points: Points) -> bool:
        """Count the points in the ranges low … high (k,) of candidates, tile by tile; False where too many are left to float64."""
        single, p, device = made.single, self.prepared.problem.p, low.device
        tiles = cut(low, high, self._class(made), p, 0 if single else source.fetch)
        if not len(tiles.size):
            return True
        order = torch.as_tensor(tiles.order, device=device)
        first = torch.as_tensor(np.repeat(tiles.first, tiles.size), device=device)
        made, high = made[order], high[order]
        below = torch.zeros(len(order), dtype=torch.int32 if points.weight is None else torch.float64, device=device)
        near = Near(source, made, points, room := self.prepared.memory // 16 // PAIR)
        least, places = near.largest(tiles), torch.arange(len(order), device=device)
        dtype = torch.float32 if single else made.tau.dtype
        tau, scores = made.tau.to(dtype), points.b.to(dtype)
        # The bit of a minus sign, moved to all places, makes −1: truth values take a CPU four times as long.
        word, highest = (torch.int32, 31) if dtype == torch.float32 else (torch.int64, 63)
        stop = pairs = 0
        for size, lo, hi in zip(*(v.tolist() for v in tiles[1:]), strict=True):
            c = slice(stop, stop := stop + size)
            step = max(1, room // size)
            for i in (slice(start, min(start + step, hi)) for start in range(lo, hi, step)):
                excess = scores[i] - tau[c, None]
                source.subtract(excess, i, points.sigma[i], made, c)
                minus = excess.view(word) >> highest
                below[c] -= (
                    minus.sum(1, dtype=torch.int32) if points.weight is None else minus.double() @ points.weight[i]
                )
                near.look(Met(places[c], i.start, excess, least[c]))
                pairs += excess.numel()
                if single and near.count > max(room, pairs) // AGAIN + 2**12:
                    return False
        near.look_again()
        near.settle()
        self.formed += pairs
        # Points of a tile after a candidate's range have been counted as surely above.
        near.counts[0] += points.beyond[first] - below - points.beyond[high]
        self.total.index_add_(1, near.column, near.counts)
        return True
