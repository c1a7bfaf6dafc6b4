"""The direct approximation, tile by tile, in single precision wherever that decides.

As in `windows`, a candidate need only meet the points with |b_i − τ| ≤ σ_i·ρ, which are a range in the order of b. Candidates that are
neighbours in the order of τ have ranges that hardly differ: a tile of them meets the points of all in one matrix product.

The products k_i = v_i·w of rows v of points and w of candidates are formed in float32: rows L⁻¹g_i and L⁻¹ĝ, or, where a linear problem
has 𝓗⁻¹ written out, g_i as they are and 𝓗⁻¹ĝ. With u = 2⁻²⁴ and w off by ε, α_i − τ errs by less than

    u·((p + 6)·|v_i||w| + (p + 2)·σ_i·ρ + 2·(|b_i| + |τ|)) + |v_i|·ε

by Cauchy–Schwarz, whatever the order of the sums: p additions to Σ|v||w|, whose factors are rounded, and to b_i − τ, which is about σ_i·ρ
at most where the sign is in doubt. Numbers that vanish, below 2⁻¹²⁶, are granted apart. What exceeds all that and the tie tolerance is
decided, and the few pairs that do not are formed again in float64: the counts are those of `count_scores`.

Other schemes than the deleted have ŝ in τ. It is had from the same rows; what it may be off by is granted with the rest.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.influence.candidates import Candidates, candidates_of, roots_of
from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import HUGE, LARGE, TINY, UNIT, Counts, Progress
from fullconformal.influence.windows import Sorted, products
from fullconformal.problem import flat, squared_norms
from fullconformal.runtime.numerics import single_is_whole

Array = npt.NDArray[Any]
TILE, TILES = 64, 6  # candidates of a tile, and tiles that meet their points together
POINTS = 512  # whose rows are laid out together
MOST = 64  # one pair in so many may be formed again
PAIR = 128  # bytes that such a pair takes
FEW = 8  # tiles that must be filled
# Products formed for one that is needed, at most: the first, and so many times that more as the second is of p; and for a candidate, which
# costs as much as the third in terms of products.
WASTE = 4, 256, 2**18


class Points(Sorted):
    """Training points in the order of b, with the running maxima of the lengths of their rows."""

    def __init__(self, training: Training, q: float, label: int | None = None):
        super().__init__(training, q, label)
        self.training, self.length = training, self.sigma
        if training.inverse is not None:
            assert training.gradients is not None
            self.length = squared_norms(training.gradients).sqrt()[self.order].cummax(0).values

    def __getstate__(self) -> dict[str, object]:
        """What is kept with a predictor: not the second copy of the points, which is made again."""
        return {name: value for name, value in vars(self).items() if name != "single"}

    @cached_property
    def single(self) -> tuple[Tensor, Tensor]:
        """Rows (n, p) and b (n,) in the order of b, in float32."""
        training, half = self.training, self.training.kept_half
        rows = torch.empty(len(self.b), training.problem.p, dtype=torch.float32)
        for at, out in zip(self.order.split(POINTS), rows.split(POINTS), strict=True):
            out.copy_(flat(training.rows(at)) if half is None else half.index_select(0, at))
        return rows, self.b.float()


def is_worth_it(training: Training, m: int, by_class: bool = False) -> bool:
    """Whether what is kept of the points can be met tile by tile, and the candidates of m objects fill some tiles."""
    problem, like = training.problem, training.problem.X
    kept = training.inverse is not None or training.kept_half is not None
    possible = kept and like.dtype == torch.float64 and like.device.type == "cpu" and single_is_whole()
    possible = possible and problem.n_classes > 2 and problem.p <= LARGE
    if not by_class:
        return possible and m * problem.n_classes >= FEW * TILE
    return possible and m >= FEW * TILE and len(torch.unique(problem.y)) == problem.n_classes


@torch.no_grad()
def tiled_counts(
    training: Training,
    X: Tensor,
    q: float,
    progress: Progress | None = None,
    by_class: bool = False,
    weight: Tensor | None = None,
) -> Counts | None:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation.

    By class, each label is compared with the points that have it; points may have weights (n,). None where float64 must do it, or
    neighbours in the order of τ are too far apart to be met together.
    """
    problem, roots = training.problem, roots_of(training, len(X))
    bags = [Points.of(training, q, label) for label in (range(problem.n_classes) if by_class else [None])]
    counts, formed = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64), 0
    step = max(1, training.memory // 16 // (8 * problem.n_classes * problem.p))
    for at in (slice(start, start + step) for start in range(0, len(X), step)):
        candidates = candidates_of(training, roots, X[at], q)
        longest = 1 + max(float(bag.length[-1]) for bag in bags), 1 + float(candidates.length.max())
        highest = max(float(bag.b[-1].abs()) for bag in bags) + float((candidates.tau.abs() + candidates.rho).max())
        if not longest[0] * longest[1] + highest < HUGE:
            return None
        above, near = torch.empty_like(candidates.tau), []
        for label, bag in enumerate(bags):
            own = slice(label, None, len(bags))
            mine, weights = Candidates(*(v[own] for v in candidates)), None if weight is None else weight[bag.order]
            part = _count(bag, mine, training.rounding, training.memory // 8, weights)
            if part is None:
                return None
            above[own], (c, i, counted), met = part
            near.append(torch.stack([c * len(bags) + label, bag.order[i], counted]))
            formed += met
        found = _again(training, X[at], q, candidates.loss, above, torch.cat(near, dim=1), weight)
        counts[:, at] = found.view(2, -1, problem.n_classes)
        if progress is not None:
            progress(min(at.stop, len(X)), len(X))
    greater, equal = counts.numpy()
    return Counts(greater, equal, formed / (problem.n * problem.n_classes * len(X)))


def _ranges(low: Tensor, high: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """First point, step and width (rows,) of the ranges of tiles that meet their points together, which need low … high (rows, TILES).

    Ranges of one width at equal distances, none beyond the n points, are a view of these.
    """
    tile = torch.arange(1, TILES)
    first = low.amin(1)
    step = torch.minimum((low[:, 1:] - first[:, None]) // tile, (n - high[:, :-1]) // tile.flip(0)).amin(1)
    width = (high - first[:, None] - step[:, None] * torch.arange(TILES)).amax(1)
    return first, step, width


def _count(
    bag: Points, candidates: Candidates, eps: float, room: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, int] | None:
    """Points above candidates (k,), or their weight, as float32 has it; pairs that are near; the number of pairs that met.

    Weights (n,) are in the order of b. Near pairs are candidates, points in the order of b, and whether these are counted, (3, pairs).
    None where they are too many, or those that must meet, or either for some bytes of room.
    """
    (points, b), k = bag.single, len(candidates.tau)
    n, p = points.shape
    order = torch.argsort(candidates.tau)
    order = torch.cat([order, order[-1:].expand(-k % (TILES * TILE))])  # the last stands for those that are missing
    tau = candidates.tau[order]
    low, high = (
        ends.view(-1, TILES, TILE) for ends in bag.window(tau, candidates.rho[order], eps, candidates.off[order])
    )
    needed = k + int((high - low).sum())  # windows may be empty
    first, step, width = _ranges(low.amin(2), high.amax(2), n)
    met, widest = TILES * TILE * int(width.sum()), int(width.max())
    if met > WASTE[0] * (1 + WASTE[1] / p) * needed + k * WASTE[2] / p or 8 * TILES * TILE * widest > room:
        return None
    start = first[:, None] + step[:, None] * torch.arange(TILES)
    beyond = n - start if weight is None else torch.cat([weight, weight.new_zeros(1)]).flip(0).cumsum(0).flip(0)[start]
    above = beyond[:, :, None].repeat(1, 1, TILE).to(torch.int32 if weight is None else torch.float64)
    limit = _limit(bag, (start[:, -1] + width - 1).clamp_min_(0), candidates, order, eps)
    rooms, rows = (torch.empty(size, dtype=torch.float32) for size in ((2, TILES * TILE * widest), (TILES * TILE, p)))
    near, left = [np.zeros((3, 0), dtype=np.int64)], min(n * k // MOST, room // PAIR)
    t = tau.float().view(-1, TILES, 1, TILE)
    together = zip(*(v.tolist() for v in (first, step, width, limit)), order.split(TILES * TILE), t, above, strict=True)
    for row, (at, gap, some, least, c, own, out) in enumerate(together):
        if not some:
            continue
        excess, size = rooms[:, : some * len(c)].view(2, TILES, some, TILE)
        torch.sub(b.as_strided((TILES, some, 1), (gap, 1, 1), at), own, out=excess)
        mine = torch.index_select(candidates.rows, 0, c, out=rows).view(TILES, TILE, p)
        excess.baddbmm_(points.as_strided((TILES, some, p), (gap * p, p, 1), at * p), mine.mT, alpha=-1)
        signs = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        if weight is None:
            out += signs.sum(1, dtype=torch.int32)
        else:  # −1 for points below
            out += (weight.as_strided((TILES, 1, some), (gap, 1, 1), at) @ signs.double())[:, 0]
        torch.abs(excess, out=size)
        nearest = size.amin(1).view(-1)[: k - row * len(c)].numpy()
        if nearest.min() > least:
            continue
        column, i, counted = _near(excess.numpy(), size.numpy(), np.flatnonzero(~(nearest > least)), least)
        if (left := left - len(i)) < 0:
            return None
        near.append(np.stack([c.numpy()[column], at + column // TILE * gap + i, counted]))
    above = torch.empty(k, dtype=above.dtype).index_copy_(0, order[:k], above.view(-1)[:k])
    return above, torch.from_numpy(np.concatenate(near, axis=1)), met


def _near(excess: Array, size: Array, column: Array, least: float) -> tuple[Array, Array, Array]:
    """Pairs of some candidates and the points of their tiles, where |α − τ| (TILES, points, TILE) does not exceed what it must.

    Candidates, points and whether α − τ is not below 0, (pairs,) each. By NumPy, which is quicker to start.
    """
    pair, i = np.nonzero(~(size[column // TILE, :, column % TILE] > least))
    column = column[pair]
    return column, i, ~np.signbit(excess[column // TILE, i, column % TILE])


def _limit(bag: Points, last: Tensor, candidates: Candidates, order: Tensor, eps: float) -> Tensor:
    """What |α − τ| in float32 must exceed (rows,) to decide, for rows of candidates, as ordered, that meet no point after the last."""
    p = candidates.rows.shape[1]
    own = (2 * UNIT + eps) * candidates.tau.abs() + (1 + eps) * candidates.off + p * TINY * (1 + candidates.length)
    product, gap = UNIT * (p + 6) * candidates.length + candidates.error, UNIT * (p + 2) * candidates.rho
    own, product, gap = (v[order].view(len(last), -1).amax(1) for v in (own, product, gap))
    of_points = 2 * UNIT * bag.b[last].abs() + bag.granted[last]
    return 1.02 * (own + product * bag.length[last] + gap * bag.sigma[last] + of_points)


def _again(
    training: Training, X: Tensor, q: float, loss: Tensor, above: Tensor, near: Tensor, weight: Tensor | None
) -> Tensor:
    """Counts (2, k) for the candidates of X, with the pairs that are near formed in float64; points may have weights (n,)."""
    counts, (c, i, counted) = torch.stack([above, torch.zeros_like(above)]), near
    if not len(c):
        return counts
    (which, row), (whom, column) = (torch.unique(v, return_inverse=True) for v in (c, i))
    x, y = which // training.problem.n_classes, which % training.problem.n_classes
    half = training.factor.half(flat(training.problem.gradients(X[x], y)))
    points = training.half_rows(whom)
    own = (loss[which] - (1 - q) * (half**2).sum(1))[row]
    excess = (training.loss + q * training.self_influence)[i] - products(half, points, row, column) - own
    tolerance = training.slack[i, None], training.rounding * own.abs()[:, None]
    greater, equal = pvalues.count(excess[:, None], 0.0, tolerance, axis=-1)
    each = torch.ones_like(own) if weight is None else weight[i]
    counts[0].index_add_(0, c, (greater - counted) * each)
    counts[1].index_add_(0, c, equal * each)
    return counts
