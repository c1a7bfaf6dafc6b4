"""The counter: for every candidate the training points above it and tied with it, by the direct approximation, 𝓗 positive definite.

A candidate only meets the points of its range (`bag`): the others are surely above it or below. Candidates whose ranges are alike make a
tile, which meets the points of all its ranges in one matrix product of rows. There are three kinds of rows, k_i = row of i · row of ĝ:

1. L⁻¹g_i, which are kept where n·p numbers fit the memory, and L⁻¹ĝ. Candidates whose range is empty by the bound ŝ ≤ |ĝ|²/floor need
   no rows, nor do, in the deleted scheme, those whose range lies among the few points of largest b: these meet
2. 𝓗⁻¹g_i, of as many points as make the fewest solves for both, and ĝ. Most wrong labels are among them.
3. Where nothing is kept, ŝ of all candidates comes first. Then points are taken in portions as large as the memory allows, each made
   once, and the candidates whose ranges reach there pass by. Rows are g_i and 𝓗⁻¹ĝ; or half-solved gradients straight from the layers,
   R⁻¹g_i and R⁻¹ĝ, where the factor has those.

In float64, kept rows meet in float32 wherever that decides. With u = 2⁻²⁴, b_i − k_i − τ errs by less than

    u·((2p + 10)·σ_i·ρ + 2·(|b_i| + |τ|)) + σ_i·ε

by Cauchy–Schwarz, whatever the order of the sums, where rows of candidates are off by ε: p additions to Σ|v||w| ≤ σ_i·ρ, whose factors are
rounded, and to b_i − τ, which is about σ_i·ρ at most where the sign is in doubt. Numbers that vanish, below 2⁻¹²⁶, are granted apart. What
exceeds that and the tie tolerance is decided, and the few pairs that do not are formed again in float64: the counts are those of
`count_scores`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal.influence.bag import sorted_bag
from fullconformal.influence.candidates import TINY, UNIT, Candidates, every_candidate, solved_one_by_one
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.sources import Source, Top, source_of
from fullconformal.pvalues import Counts
from fullconformal.runtime.numerics import full_precision
from fullconformal.runtime.tasks import Progress

# Candidates in a tile at most, and the operations that starting a product costs: a GPU would rather multiply more than start often.
TILE = {"cpu": (128, 3e6), "cuda": (2048, 1e10)}
COUNTED = 32  # operations that it takes to count a pair besides its product
FETCH = 8  # what gathering a point's row costs, in products with it
AGAIN = 64  # one pair in so many may be formed again in float64; where they are more, all products are formed in it
PAIR = 160  # bytes that a pair takes while it is counted, at most
CACHE = 2**18  # numbers of rows that meet pair by pair, which stay in the cache
Index = npt.NDArray[np.int64]


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


class _Points(NamedTuple):
    """Points whose rows are at hand, in the order of the bag, (n,) each; `beyond` is the weight from each point on, (n + 1,)."""

    b: Tensor
    order: Tensor
    slack: Tensor
    sigma: Tensor
    weight: Tensor | None
    beyond: Tensor


class _Tiles(NamedTuple):
    """Candidates in the order of their tiles, (k,); of each tile the number of candidates, the first point and the one after the last."""

    order: Index
    size: Index
    first: Index
    last: Index


class _Counter:
    """Weight above and tied with candidates, total (2, m·C), of the points of a bag, which may have weights (n,)."""

    def __init__(self, source: Source, weight: Tensor | None):
        self.source, self.bag, self.prepared = source, source.bag, source.prepared
        self.formed, self.solved = 0, 1.0  # pairs that met, and the share of candidates that were solved for
        bag, device = self.bag, source.X.device
        size = len(source.X) * self.prepared.problem.n_classes
        self.total = torch.zeros(2, size, dtype=torch.float64, device=device)
        weight = None if weight is None else weight.to(device, torch.float64)[bag.order]
        self.points = _Points(bag.b, bag.order, bag.slack, bag.sigma, weight, _from_there_on(bag.b, weight))

    def count(self, found: Candidates, progress: Progress | None) -> None:
        """Count all candidates."""
        source, bag, beyond, m = self.source, self.bag, self.points.beyond, len(self.source.X)
        low, high = torch.tensor([bag.starts, bag.stops], device=beyond.device)[:, self._class(found)]
        end = beyond[high]
        if source.is_bounded:
            low, high = self._ranges(source, found, found.loss)
        self._add(found, beyond[high] - end)
        left = (high > low).nonzero()[:, 0]
        if source.has_top and len(left):
            left = self._count_top(found, low, high, left)
        self.solved = len(left) / max(1, len(found))
        source.begin(found[left])
        done = len(found) - len(left)
        for index in self._portions(low[left], high[left]):
            mine, lows, highs, points = left, low[left], high[left], self.points
            if index is not None:
                lows, highs = (ends.clamp(int(index[0]), int(index[-1]) + 1) for ends in (lows, highs))
                mine, lows, highs = (v[highs > lows] for v in (left, lows, highs))
                b, order, slack, sigma = (v[index] for v in points[:4])
                weight = None if points.weight is None else points.weight[index]
                points = _Points(b, order, slack, sigma, weight, _from_there_on(b, weight))
            source.hold(index)
            for at, *ends in zip(*(v.split(source.room) for v in (mine, lows, highs)), strict=True):
                if not self._count_some(found[at], ends[0], ends[1], points, index, single=True):
                    self._count_some(found[at], ends[0], ends[1], points, index, single=False)
                done += len(at)
                if progress is not None:
                    progress(min(m, m * done // len(found)), m)
        if progress is not None:
            progress(m, m)

    def _count_top(self, found: Candidates, low: Tensor, high: Tensor, left: Tensor) -> Tensor:
        """Count candidates (left,) that meet points of largest b only, without solving for them; returns the others."""
        top = Top(self.prepared, self.bag, self.source.X, self.source.q, low[left])
        covered = low[left] >= top.first
        if covered.any():
            top.hold(None)
            for at in left[covered].split(top.room):
                self._meet(top, top.make(found[at], single=False), low[at], high[at], self.points)
        return left[~covered]

    def _count_some(
        self, found: Candidates, low: Tensor, high: Tensor, points: _Points, index: Tensor | None, single: bool
    ) -> bool:
        """Count candidates, of which ranges low … high (k,) hold what is needed, among the points at some places of the bag, or all.

        Whether it is done: float32 may leave too many pairs to be formed again.
        """
        made, beyond = self.source.make(found, single), self.points.beyond
        first, last = (torch.minimum(torch.maximum(e, low), high) for e in self._ranges(self.source, made, made.tau))
        surely = beyond[last] - beyond[high]
        if index is not None:
            first, last = (torch.searchsorted(index, ends) for ends in (first, last))
        done = self._meet(self.source, made, first, last, points)
        if done:
            self._add(made, surely)
        return done

    def _class(self, found: Candidates) -> Tensor:
        """The class of points that candidates are compared with; 0 where there is but one."""
        return found.y if len(self.bag.stops) > 1 else torch.zeros_like(found.y)

    def _add(self, found: Candidates, weight: Tensor) -> None:
        """Add weight (k,) to what is above candidates."""
        self.total[0].index_add_(0, found.x * self.prepared.problem.n_classes + found.y, weight)

    def _ranges(self, source: Source, found: Candidates, highest: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges of candidates with τ no higher than `highest` (k,)."""
        # What a product errs by, what is granted for that, and the rounding of the bound itself.
        rho = found.rho * (1 + 3 * (source.error + self.prepared.rounding))
        return self.bag.ranges(found.tau, highest, rho, source.own(found), found.y)

    def _portions(self, low: Tensor, high: Tensor) -> list[Tensor | None]:
        """Places of the points that are in some range, in portions; None for all of them at once."""
        n = len(self.bag)
        if self.source.portion >= n:
            return [None] if len(low) else []
        ends = torch.zeros(n + 1, dtype=torch.long, device=low.device)
        ends.index_add_(0, low, torch.ones_like(low)).index_add_(0, high, -torch.ones_like(high))
        needed = (ends.cumsum(0) > 0).nonzero()[:, 0]
        return list(needed.split(self.source.portion)) if len(needed) else []

    def _meet(self, source: Source, made: Candidates, low: Tensor, high: Tensor, points: _Points) -> bool:
        """Count the points in the ranges low … high (k,) of candidates, tile by tile; False where too many are left to float64."""
        single, p, device = made.single, self.prepared.problem.p, low.device
        tiles = _cut(low, high, self._class(made), p, 0 if single else FETCH)
        if not len(tiles.size):
            return True
        order = torch.as_tensor(tiles.order, device=device)
        first = torch.as_tensor(np.repeat(tiles.first, tiles.size), device=device)
        below = torch.zeros(len(order), dtype=torch.int32 if points.weight is None else torch.float64, device=device)
        near = _Near(source, made, points, order, room := self.prepared.memory // 16 // PAIR)
        most = near.largest(tiles)
        dtype = torch.float32 if single else made.tau.dtype
        tau, s_hat = made.tau[order].to(dtype), made.influence[order]
        scores = self.bag.single[1] if single else points.b
        assert made.rows is not None
        stop = pairs = 0
        for size, lo, hi, least in zip(*(v.tolist() for v in (*tiles[1:], most)), strict=True):
            c = slice(stop, stop := stop + size)
            rows, step = made.rows.index_select(0, order[c]), max(1, room // size)
            for i in (slice(start, min(start + step, hi)) for start in range(lo, hi, step)):
                excess = scores[i, None] - tau[c]
                source.subtract(excess, source.rows(i, single), rows, points.sigma[i], s_hat[c])
                below[c] += _below(excess, None if points.weight is None else points.weight[i])
                near.look(_Met(c, i, excess, excess.abs(), least))
                pairs += excess.numel()
                if single and near.count > max(room, pairs) // AGAIN + 2**12:
                    return False
        near.look_again()
        near.settle()
        self.formed += pairs
        # Points of a tile after a candidate's range have been counted as surely above.
        near.counts[0].index_add_(0, order, points.beyond[first] - below - points.beyond[high[order]])
        self.total.index_add_(1, near.column, near.counts)
        return True


class _Met(NamedTuple):
    """Candidates and points that met, by their places, their α − τ and its distance from 0 (points, k); none below `least` is decided."""

    candidates: slice
    points: slice
    excess: Tensor
    distance: Tensor
    least: float


class _Near:
    """Pairs too close to be decided by products as they are: of float32 they are formed again, and ties are found among them."""

    def __init__(self, source: Source, made: Candidates, points: _Points, order: Tensor, room: int):
        """Candidates meet in some order (k,); there is room for so many pairs."""
        self.source, self.made, self.points, self.order, self.room = source, made, points, order, room
        self.prepared, self.own = source.prepared, source.own(made)
        self.column = made.x * self.prepared.problem.n_classes + made.y
        self.counts = torch.zeros(2, len(made), dtype=torch.float64, device=made.x.device)
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.count = self.held = 0
        # A GPU would wait for every answer, so it is asked about many tiles at once.
        self.met: list[_Met] = []
        self.waiting, self.patience = 0, room if made.x.is_cuda else 0
        p, rho = self.prepared.problem.p, made.rho
        of_score, of_product, of_point = self.own, source.error * rho, points.slack
        if made.single:
            of_score = self.own + 2 * UNIT * made.tau.abs() + p * TINY * (1 + rho)
            of_product = UNIT * (2 * p + 10) * rho + p * TINY + (0.0 if made.error is None else made.error)
            of_point = points.slack + 2 * UNIT * points.b.abs()
        dtype = torch.float32 if made.single else made.tau.dtype
        #: what |α − τ| must exceed to decide is the sum of the first and the last, and the second times σ
        self.of_score, self.of_product, self.of_point, self.sigma = (
            v.to(dtype) for v in (1.02 * of_score[order], 1.02 * of_product[order], 1.02 * of_point, points.sigma)
        )

    def largest(self, tiles: _Tiles) -> npt.NDArray[np.float64]:
        """The largest bound (tiles,) of the pairs of each tile, of candidates in the order of the tiles."""
        starts = np.cumsum(tiles.size) - tiles.size
        score, product = (
            np.maximum.reduceat(v.double().cpu().numpy(), starts) for v in (self.of_score, self.of_product)
        )
        last = torch.as_tensor(tiles.last - 1, device=self.of_score.device)
        point, sigma = (v.cummax(0).values[last].double().cpu().numpy() for v in (self.of_point, self.sigma))
        return np.asarray(score + product * sigma + point) * (1 + 2.0**-20)

    def look(self, met: _Met) -> None:
        """Look for near pairs among those that met, now or with those to come."""
        self.met.append(met)
        self.waiting += met.excess.numel()
        if self.waiting > self.patience:
            self.look_again()

    def look_again(self) -> None:
        """Keep the near pairs of all that wait."""
        if not self.met:
            return
        closest = torch.stack([met.distance.amin() for met in self.met]).tolist()
        for (c, i, excess, distance, least), distance_of_closest in zip(self.met, closest, strict=True):
            if distance_of_closest > least:
                continue
            bound = torch.addcmul(self.of_point[i, None] + self.of_score[c], self.sigma[i, None], self.of_product[c])
            at, column = (~(distance > bound)).nonzero(as_tuple=True)
            self.add(self.order[c][column], at + i.start, excess[at, column])
            if self.held > self.room:
                self.settle()
        self.met, self.waiting = [], 0

    def add(self, c: Tensor, i: Tensor, excess: Tensor) -> None:
        """Keep pairs of candidates and points with their α − τ."""
        self.pairs.append((c, i, excess))
        self.count += len(c)
        self.held += len(c)

    def settle(self) -> None:
        """Count what is kept, ties apart, in place of the signs that were counted."""
        if not self.held:
            return
        points, step = self.points, max(1, self.prepared.memory // 16 // (4 * self.prepared.problem.p * 8))
        for c, i, excess in zip(*(torch.cat(v).split(step) for v in zip(*self.pairs, strict=True)), strict=True):
            counted, own = ~excess.signbit(), self.own[c]
            if self.made.single:
                excess, own = self._again(c, i)
            tolerance = own + points.slack[i] + self.source.error * points.sigma[i] * self.made.rho[c]
            above, not_below = excess > tolerance, excess >= -tolerance
            parts = torch.stack([above.double() - counted.double(), (not_below & ~above).double()])
            self.counts.index_add_(1, c, parts if points.weight is None else parts * points.weight[i])
        self.pairs, self.held = [], 0

    def _again(self, c: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """α − τ and the rounding granted to τ, (pairs,), of candidates c with points i, in the problem's precision."""
        (which, row), (whom, column) = (torch.unique(v, return_inverse=True) for v in (c, i))
        exact = solved_one_by_one(self.prepared, self.source.X, self.made[which], self.source.q, single=False)
        assert exact.rows is not None
        half, tau = self.prepared.half_rows(self.points.order[whom]), exact.tau[row]
        k, step = torch.empty_like(tau), max(1, CACHE // half.shape[1])
        for out, *at in zip(*(v.split(step) for v in (k, row, column)), strict=True):
            torch.linalg.vecdot(exact.rows[at[0]], half[at[1]], out=out)
        return self.points.b[i] - k - tau, self.source.own(exact)[row]


def _from_there_on(b: Tensor, weight: Tensor | None) -> Tensor:
    """Weight (n + 1,) of the points from each on, none at the end."""
    if weight is None:
        return torch.arange(len(b), -1, -1, dtype=torch.float64, device=b.device)
    return torch.cat([weight, weight.new_zeros(1)]).flip(0).cumsum(0).flip(0)


def _below(excess: Tensor, weight: Tensor | None) -> Tensor:
    """Weight (k,) of the points where α − τ (points, k) has a minus sign. On a CPU bits are summed three times faster than truths."""
    if weight is not None:
        return weight @ excess.signbit().double()
    if excess.is_cuda:
        return excess.signbit().sum(0)
    bits = excess.view(torch.int64 if excess.element_size() == 8 else torch.int32)
    return (bits >> (8 * excess.element_size() - 1)).sum(0, dtype=torch.int32).neg_()


def _cut(low: Tensor, high: Tensor, label: Tensor, p: int, fetch: int) -> _Tiles:
    """Tiles of candidates of one class that share much of their ranges low … high (k,); those without points are in none.

    Wide ranges come with wide ones, neighbours with neighbours. Merging two tiles saves a start and the rows that they share, and costs
    products that neither needs. Of all ways to cut that come of halving again and again the cheapest is found from the bottom up; costs
    are in products of a candidate with a point. By NumPy, which is quicker to start.
    """
    most, operations = TILE.get(low.device.type, TILE["cpu"])
    start, at = operations / (2 * p + COUNTED), (high > low).nonzero()[:, 0]
    first, last, kind = (v[at].cpu().numpy() for v in (low, high, label))
    width = np.frexp((last - first).astype(np.float64))[1] // 2
    key = np.lexsort((first, width, kind))
    order, first, last, kind = (v[key] for v in (at.cpu().numpy(), first, last, kind))
    k, missing = len(order), -len(order) % most
    # Classes are so far apart that no tile reaches from one to the next; what fills up the last tile has no range.
    lows = np.concatenate([first + (kind << 40), np.full(missing, 2**60)])
    highs = np.concatenate([last + (kind << 40), np.full(missing, -(2**60))])
    least, size = start + (highs - lows).clip(0) * (fetch + 1.0), np.ones(len(lows), dtype=np.int64)
    for count in (2**j for j in range(1, most.bit_length())):
        lows, highs = np.minimum(lows[::2], lows[1::2]), np.maximum(highs[::2], highs[1::2])
        whole, parts = start + (highs - lows).clip(0) * float(fetch + count), least[::2] + least[1::2]
        size[np.repeat(whole < parts, count)] = count
        least = np.minimum(whole, parts)
    begin = np.flatnonzero(np.arange(k) % size[:k] == 0)
    if not len(begin):
        return _Tiles(order, begin, begin, begin)
    sizes = np.diff(begin, append=k)
    return _Tiles(order, sizes, np.minimum.reduceat(first, begin), np.maximum.reduceat(last, begin))
