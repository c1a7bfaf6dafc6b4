"""The counter: for every candidate the training points above it and tied with it, by the direct approximation, 𝓗 positive definite.

A candidate only meets the points of its range (`bag`): the others are surely above it or below. Candidates whose ranges are alike make a
tile, which meets the points of all its ranges in one matrix product of rows. There are three kinds of rows, k_i = row of i · row of ĝ:

1. L⁻¹g_i, which are kept where n·p numbers fit the memory, and L⁻¹ĝ. Candidates that ŝ ≤ |ĝ|²/floor leave no point need none, nor do,
   in the deleted scheme, those whose range lies among the few points of largest b: these meet
2. 𝓗⁻¹g_i, of as many points as make the fewest solves for both, and ĝ. Most wrong labels are among them.
3. Where nothing is kept, ŝ of all candidates comes first. Then points are taken in portions as large as the memory allows, each made
   once, and the candidates whose ranges reach there pass by. Rows are g_i and 𝓗⁻¹ĝ; or half-solved gradients straight from the layers,
   R⁻¹g_i and R⁻¹ĝ, where the factor has those.

In float64, kept rows meet in float32 wherever that decides. With u = 2⁻²⁴ and a candidate's row off by ε, b_i − k_i − τ errs by less than

    u·((p + 6)·σ_i|w| + (p + 2)·σ_i·ρ + 2·(|b_i| + |τ|)) + σ_i·ε

by Cauchy–Schwarz, whatever the order of the sums: p additions to Σ|v||w|, whose factors are rounded, and to b_i − τ, which is about σ_i·ρ
at most where the sign is in doubt. What exceeds that and the tie tolerance is decided, and the few pairs that do not are formed again
in float64: the counts are those of `count_scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.influence.bag import sorted_bag
from fullconformal.influence.candidates import TINY, UNIT, Candidates, every_candidate, solved_one_by_one
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Counts, Progress
from fullconformal.influence.sources import Kept, Source, Top, source_of
from fullconformal.runtime.numerics import full_precision

# Candidates in a tile at most, and the operations that starting a product costs: a GPU would rather multiply more than start often.
TILE = {"cpu": (64, 3e5), "cuda": (512, 1e9)}
FETCH = 8  # what gathering a point's row costs, in products with it
CACHE = 2**18  # numbers of rows that meet pair by pair, which stay in the cache
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
    bag = sorted_bag(prepared, q, class_conditional)
    with full_precision():
        source = source_of(prepared, bag, X, q, half_precision)
        counter = _Counter(source, points)
        counter.count(source.bounded(every_candidate(prepared, X, q)), progress)
    greater, equal = counter.total.view(2, len(X), -1).cpu().numpy()
    return Counts(greater, equal, counter.formed / max(1, len(bag) * counter.total.shape[1]), counter.solved)


class _Counter:
    """Weight above and tied with candidates, total (2, m·C), of the points of a bag, whose weights (n,) are in its order."""

    def __init__(self, source: Source, points: Tensor | None):
        self.source, self.bag, self.prepared = source, source.bag, source.prepared
        self.formed, self.solved = 0, 1.0  # pairs that met, and the share of candidates that were solved for
        like, C = source.X, self.prepared.problem.n_classes
        self.total = torch.zeros(2, len(like) * C, dtype=torch.float64, device=like.device)
        self.weight = None if points is None else points.to(like.device, torch.float64)[self.bag.order]
        w = torch.ones_like(self.bag.b, dtype=torch.float64) if self.weight is None else self.weight
        # Weight of the points of a class, or of all, from each place on.
        self.beyond = torch.cat([w, w.new_zeros(1)]).flip(0).cumsum(0).flip(0)

    def count(self, found: Candidates, progress: Progress | None) -> None:
        """Count all candidates."""
        source, bag, m = self.source, self.bag, len(self.source.X)
        label = found.y if len(bag.stops) > 1 else torch.zeros_like(found.y)
        low, high = torch.tensor([bag.starts, bag.stops], device=label.device)[:, label]
        end = self.beyond[high]
        if source.is_bounded:
            low, high = self._ranges(source, found, found.loss)
        self._add(found, self.beyond[high] - end)
        left = (high > low).nonzero()[:, 0]
        if source.is_bounded and isinstance(source, Kept) and source.q == 1 and len(bag.stops) == 1 and len(left):
            top = Top(self.prepared, bag, source.X, source.q, low[left])
            covered = low[left] >= top.first
            top.hold(None)
            for at in left[covered].split(top.room) if covered.any() else ():
                self._meet(top, top.make(found[at]), low[at], high[at], None)
            left = left[~covered]
        source.begin(found[left])
        self.solved = len(left) / max(1, len(found))
        done = len(found) - len(left)
        for index in self._portions(low[left], high[left]):
            lows, highs, mine = low[left], high[left], left
            if index is not None:
                lows, highs = (ends.clamp(int(index[0]), int(index[-1]) + 1) for ends in (lows, highs))
                mine, lows, highs = (v[highs > lows] for v in (left, lows, highs))
            source.hold(index)
            for at, lo, hi in zip(*(v.split(source.room) for v in (mine, lows, highs)), strict=True):
                made = source.make(found[at])
                ends = self._ranges(source, made, made.tau)
                low_, high_ = (torch.minimum(torch.maximum(e, lo), hi) for e in ends)
                self._add(made, self.beyond[high_] - self.beyond[hi])
                self._meet(source, made, low_, high_, index)
                done += len(at)
                if progress is not None:
                    progress(min(m, m * done // len(found)), m)
                del made  # before the next are made
        if progress is not None:
            progress(m, m)

    def _add(self, found: Candidates, weight: Tensor) -> None:
        """Add weight (k,) to what is above candidates."""
        self.total[0].index_add_(0, found.x * self.prepared.problem.n_classes + found.y, weight)

    def _ranges(self, source: Source, found: Candidates, highest: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges of candidates with τ no higher than `highest` (k,)."""
        off = torch.zeros_like(highest) if found.off is None else found.off
        # What a product errs by, what is granted for that, and the rounding of the bound itself.
        rho = found.rho * (1 + 3 * (source.error + self.prepared.rounding))
        return self.bag.ranges(
            found.tau - off, highest + off, rho, source.own(found) + off * self.prepared.rounding, found.y
        )

    def _portions(self, low: Tensor, high: Tensor) -> list[Tensor | None]:
        """Places of the points that are in some range, in portions; None for all of them at once."""
        n = len(self.bag)
        if self.source.portion >= n:
            return [None] if len(low) else []
        ends = torch.zeros(n + 1, dtype=torch.long, device=low.device)
        ends.index_add_(0, low, torch.ones_like(low)).index_add_(0, high, -torch.ones_like(high))
        needed = (ends.cumsum(0) > 0).nonzero()[:, 0]
        return list(needed.split(self.source.portion)) if len(needed) else []

    def _meet(self, source: Source, made: Candidates, low: Tensor, high: Tensor, index: Tensor | None) -> None:
        """Count the points in the ranges of candidates, tile by tile, among those at some places of the bag or all."""
        bag, weight = self.bag, self.weight
        b, order, slack, sigma = bag.b, bag.order, bag.slack, bag.sigma
        if index is not None:
            b, order, slack, sigma = (v[index] for v in (b, order, slack, sigma))
            weight = None if weight is None else weight[index]
            low, high = (torch.searchsorted(index, ends) for ends in (low, high))
        some = (high > low).nonzero()[:, 0]
        if not len(some):
            return
        single, p = made.error is not None, self.prepared.problem.p
        label = made.y if len(bag.stops) > 1 else torch.zeros_like(made.y)
        # Wide ranges with wide ones, neighbours with neighbours; no tile has two classes.
        width = (high - low)[some].double().log2().div_(2).floor_()
        key = torch.argsort(low[some], stable=True)
        some, width = some[key], width[key]
        key = torch.argsort(label[some] * 64 + width.long(), stable=True)
        made, low, high, label = made[some[key]], low[some[key]], high[some[key]], label[some[key]]
        tile = _tiles(low, high, label, p, 0 if single else FETCH)
        sizes = torch.bincount(tile)
        first = torch.full_like(sizes, len(b)).scatter_reduce(0, tile, low, "amin")
        last = torch.zeros_like(sizes).scatter_reduce(0, tile, high, "amax")
        beyond = torch.arange(len(b), -1, -1, device=b.device, dtype=torch.float64)
        if weight is not None:
            beyond = torch.cat([weight, weight.new_zeros(1)]).flip(0).cumsum(0).flip(0)
        self._add(made, beyond[last[tile]] - beyond[high])  # which the tile counts, and which were counted
        self.formed += int((sizes * (last - first)).sum())
        own = source.own(made)
        limit = self._limits(source, made, own, tile, [v.cummax(0).values[last - 1] for v in (b, slack, sigma)])
        assert made.rows is not None
        tau = made.tau.float() if single else made.tau
        scores = bag.single[1] if single else b
        room = self.prepared.memory // 16 // PAIR
        near: list[tuple[Tensor, ...]] = []
        found = torch.zeros_like(own, dtype=torch.float64)
        at = 0
        for size, lo, hi, least in zip(*(v.tolist() for v in (sizes, first, last, limit)), strict=True):
            c = slice(at, at + size)
            at += size
            rows = made.rows[c]
            for start in range(lo, hi, max(1, room // size)):
                stop = min(hi, start + max(1, room // size))
                excess = scores[start:stop, None] - tau[c]
                excess = source.subtract(excess, source.rows(start, stop, single), made[c], rows, sigma[start:stop])
                found[c] += _signs(excess, None if weight is None else weight[start:stop])
                size_ = excess.abs()
                if bool(size_.amin() > least):
                    continue
                i, j = (~(size_ > least)).nonzero(as_tuple=True)
                value = excess[i, j]
                near.append((j + c.start, i + start, value))
                if sum(len(v[0]) for v in near) > room:
                    self._settle(source, made, own, near, order, b, slack, sigma, weight)
                    near.clear()
        self._add(made, found)
        if near:
            self._settle(source, made, own, near, order, b, slack, sigma, weight)

    def _limits(self, source: Source, made: Candidates, own: Tensor, tile: Tensor, highest: list[Tensor]) -> Tensor:
        """What |α − τ| must exceed (tiles,) to decide, from the largest b, slack and σ (tiles,) among the points of each tile."""
        b, slack, sigma = highest
        p, rho, of_score = self.prepared.problem.p, made.rho, own
        of_product = source.error * rho
        if made.error is not None and made.off is not None:
            of_score = own + 2 * UNIT * made.tau.abs() + made.off * 1.01 + p * TINY * (1 + rho)
            of_product = UNIT * (2 * p + 8) * rho + made.error
        parts = [torch.zeros_like(b).scatter_reduce(0, tile, v, "amax") for v in (of_score, of_product)]
        of_points = slack + (0 if made.error is None else 2 * UNIT * b.abs())
        return 1.02 * (parts[0] + parts[1] * sigma + of_points)

    def _settle(
        self, source: Source, made: Candidates, own: Tensor, near: list[tuple[Tensor, ...]], order: Tensor, b: Tensor,
        slack: Tensor, sigma: Tensor, weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Count near pairs, of candidates, points and α − τ, once more and with ties; of float32 α − τ is formed again in float64."""
        C, pairs = self.prepared.problem.n_classes, [torch.cat(v) for v in zip(*near, strict=True)]
        step = max(1, self.prepared.memory // 16 // (4 * self.prepared.problem.p * b.element_size()))
        for c, i, value in zip(*(v.split(step) for v in pairs), strict=True):
            counted, tolerance = ~value.signbit(), own[c]
            if made.error is not None:
                value, tolerance = self._again(made, c, order[i], b[i])
            tolerance = tolerance + slack[i] + source.error * sigma[i] * made.rho[c]
            above, not_below = value > tolerance, value >= -tolerance
            column = made.x[c] * C + made.y[c]
            for total, part in zip(
                self.total, (above.double() - counted.double(), (not_below & ~above).double()), strict=True
            ):
                total.index_add_(0, column, part if weight is None else part * weight[i])

    def _again(self, made: Candidates, c: Tensor, points: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """α − τ and the rounding granted to τ, (pairs,), of candidates c with training points that have b, in the problem's precision."""
        (which, row), (whom, column) = (torch.unique(v, return_inverse=True) for v in (c, points))
        exact = solved_one_by_one(self.prepared, self.source.X, made[which], self.source.q, single=False)
        assert exact.rows is not None
        half, tau = self.prepared.half_rows(whom), exact.tau[row]
        k, step = torch.empty_like(tau), max(1, CACHE // half.shape[1])
        for out, *at in zip(*(v.split(step) for v in (k, row, column)), strict=True):
            torch.linalg.vecdot(exact.rows[at[0]], half[at[1]], out=out)
        return b - k - tau, self.source.own(exact)[row]


def _signs(excess: Tensor, weight: Tensor | None) -> Tensor:
    """Weight (k,) of the points where α − τ (points, k) has no minus sign. On a CPU bits are summed three times faster than truths."""
    if weight is not None:
        return weight @ (~excess.signbit()).double()
    if excess.is_cuda:
        return (~excess.signbit()).sum(0).double()
    bits = excess.view(torch.int64 if excess.element_size() == 8 else torch.int32)
    return len(excess) + (bits >> (8 * excess.element_size() - 1)).sum(0, dtype=torch.int32)


def _tiles(low: Tensor, high: Tensor, label: Tensor, p: int, fetch: int) -> Tensor:
    """The tile (k,) of each candidate, in order, with ranges low … high (k,): neighbours of one label that share much of their ranges.

    Merging two tiles saves a start and the rows that they share, and costs products that neither needs. Of all ways to cut that come of
    halving again and again the cheapest is found from the bottom up; costs are in products of a candidate with a point.
    """
    most, start = TILE.get(low.device.type, TILE["cpu"])
    k, start = len(low), start / (2 * p)
    pad = -k % most
    # Labels are so far apart that no tile reaches from one to the next; those that fill up the last tile have no range.
    low, high = (torch.cat([v + (label << 40), v.new_full((pad,), e)]) for v, e in ((low, 2**60), (high, -(2**60))))
    least = start + (high - low).clamp_min(0) * (fetch + 1.0)
    size = torch.ones_like(low)
    for width in (2**j for j in range(1, most.bit_length())):
        low, high = torch.minimum(low[::2], low[1::2]), torch.maximum(high[::2], high[1::2])
        whole, parts = start + (high - low).clamp_min(0) * float(fetch + width), least[::2] + least[1::2]
        size = torch.where((whole < parts).repeat_interleave(width), width, size)
        least = torch.minimum(whole, parts)
    return ((torch.arange(len(size), device=size.device) % size == 0).cumsum(0) - 1)[:k]
