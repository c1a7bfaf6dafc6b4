"""The direct approximation of the deleted scheme from kept L⁻¹g_i, tile by tile, in single precision wherever that decides.

As in `windows`, a candidate need only meet the points with |b_i − τ| ≤ σ_i·ρ, which are a range in the order of b. Candidates that are
neighbours in the order of τ have ranges that hardly differ: a tile of them meets the points of all in one matrix product.

The products h_i·ĥ of h = L⁻¹g are formed in float32. With u = 2⁻²⁴ and ĥ off by ε, α_i − τ errs by less than

    u·((2p + 8)·σ_i·ρ + 2·(|b_i| + |τ|)) + σ_i·ε

by Cauchy–Schwarz, whatever the order of the sums: p additions to Σ|h||ĥ|, and to b_i − τ, which is about σ_i·ρ at most where the sign is
in doubt. Numbers that vanish, below 2⁻¹²⁶, are granted apart. What exceeds all that and the tie tolerance is decided, and the few pairs
that do not are formed again in float64: the counts are those of `count_scores`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import candidate_losses, flat, select
from fullconformal.scores.base import (
    HUGE,
    TINY,
    UNIT,
    Counts,
    Progress,
    Training,
    candidate_gradients,
    half_solved,
    single_is_whole,
    written_roots,
)
from fullconformal.scores.windows import Sorted, products

TILE, TILES = 64, 6  # candidates of a tile, and tiles that meet their points together
OBJECTS = 128  # whose L⁻¹ĝ are made together, so that they stay in the cache
MOST = 64  # one pair in so many may be formed again
PAIR = 128  # bytes that such a pair takes
FEW = 8  # tiles that must be filled
# Products formed for one that is needed, at most: the first, and so many times that more as the second is of p.
WASTE = 4, 256
LARGE = 2**17  # parameters up to which p additions err by p·u


class Candidates(NamedTuple):
    """Candidates of some objects: τ (k,), L⁻¹ĝ (k, p) in float32, what that is off by (k,), and a bound of its length (k,)."""

    tau: Tensor
    half: Tensor
    error: Tensor
    rho: Tensor


def is_worth_it(training: Training, m: int) -> bool:
    """Whether what is kept of the points can be met tile by tile, and the candidates of m objects fill some tiles."""
    problem, like = training.problem, training.problem.X
    possible = training.halved is not None and like.dtype == torch.float64 and like.device.type == "cpu"
    possible = possible and problem.p <= LARGE and single_is_whole()
    return possible and problem.n_classes > 2 and m * problem.n_classes >= FEW * TILE


@torch.no_grad()
def tiled_counts(training: Training, X: Tensor, progress: Progress | None = None) -> Counts | None:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1.

    None where float64 must do it, or neighbours in the order of τ are too far apart to be met together.
    """
    problem, bag, roots = training.problem, Sorted.of(training, 1.0), _roots(training, len(X))
    counts, formed = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64), 0
    step = max(1, training.memory // 16 // (8 * problem.n_classes * problem.p))
    for at in (slice(start, start + step) for start in range(0, len(X), step)):
        candidates = _candidates(training, roots, X[at])
        largest = (1 + candidates.rho.max()) * (1 + bag.sigma[-1]) + bag.b[-1].abs() + candidates.tau.max()
        found = _count(bag, candidates, training.rounding, training.memory // 8) if float(largest) < HUGE else None
        if found is None:
            return None
        above, near, met = found
        formed += met
        counts[:, at] = _again(training, bag, X[at], candidates.tau, above, near).view(2, -1, problem.n_classes)
        if progress is not None:
            progress(min(at.stop, len(X)), len(X))
    greater, equal = counts.numpy()
    return Counts(greater, equal, formed / (problem.n * problem.n_classes * len(X)))


def _roots(training: Training, m: int) -> list[Tensor]:
    """`written_roots`; none where solving for the labels of m objects costs less."""
    problem, p = training.problem, training.problem.p
    if problem.prefix_names or p + 2 * m > problem.n_classes * m or p**2 > training.memory // 64:
        return []
    return written_roots(training)


def _candidates(training: Training, roots: list[Tensor], X: Tensor) -> Candidates:
    """Every label of objects X (m, ...): ĥ = Σ D·V with V = a·L⁻ᵀ in float64, and the sum in float32 errs by its length times |D||V|."""
    problem, tiny = training.problem, training.problem.p * TINY
    vanished = tiny**0.5  # what a sum of squares may not see
    logits, J = problem.jacobian(X)
    ghat, half = candidate_gradients(J, logits), torch.empty(*logits.shape, problem.p, dtype=torch.float32)
    error, terms = torch.zeros_like(logits), sum(b.o for b in problem.blocks)
    for block, ((D, a), root) in enumerate(zip(ghat, roots, strict=False)):
        assert a is not None  # there is no prefix
        length = torch.empty(len(X), dtype=torch.float32)
        some = max(1, min(OBJECTS, training.memory // 16 // (12 * root.shape[1])))
        for left, right, out, norm in zip(*(v.split(some) for v in (D.float(), a, half, length)), strict=True):
            V = (right @ root).float()
            torch.linalg.vector_norm(V, dim=1, out=norm)
            torch.baddbmm(out, left, V.view(len(V), D.shape[2], -1), beta=float(block > 0), out=out)
        error += (terms + 3) * (torch.linalg.vector_norm(D, dim=2) + vanished) * (length[:, None] + vanished)
    if not roots:
        for start in range(0, len(X), OBJECTS):
            at = slice(start, start + OBJECTS)
            half[at] = half_solved(training.factor, select(ghat, at))
    size = torch.linalg.vector_norm(half, dim=2).double() * (1 + UNIT * problem.p) + vanished
    error = 1.01 * UNIT * (error if roots else size).flatten() + tiny
    return Candidates(candidate_losses(logits).flatten(), half.flatten(0, 1), error, size.flatten() + error)


def _ranges(low: Tensor, high: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """First point, step and width (rows,) of the ranges of tiles that meet their points together, which need low … high (rows, TILES).

    Ranges of one width at equal distances, none beyond the n points, are a view of these.
    """
    tile = torch.arange(1, TILES)
    first = low.amin(1)
    step = torch.minimum((low[:, 1:] - first[:, None]) // tile, (n - high[:, :-1]) // tile.flip(0)).amin(1)
    width = (high - first[:, None] - step[:, None] * torch.arange(TILES)).amax(1)
    return first, step, width


def _count(bag: Sorted, candidates: Candidates, eps: float, room: int) -> tuple[Tensor, Tensor, int] | None:
    """Points above candidates (k,), as float32 has it; pairs that are near; the number of pairs that met.

    Near pairs are candidates, points in the order of b, and whether these are counted, (3, pairs). None where they are too many, or those
    that must meet, or either for some bytes of room.
    """
    n, p, k = len(bag.b), bag.half.shape[1], len(candidates.tau)
    order = torch.argsort(candidates.tau)
    order = torch.cat([order, order[-1:].expand(-k % (TILES * TILE))])  # the last stands for those that are missing
    tau, rho, error = (v[order] for v in (candidates.tau, candidates.rho, candidates.error))
    low, high = (ends.view(-1, TILES, TILE) for ends in bag.window(tau, rho, eps))
    needed = k + int((high - low).sum())  # windows may be empty
    first, step, width = _ranges(low.amin(2), high.amax(2), n)
    met, widest = TILES * TILE * int(width.sum()), int(width.max())
    if met > WASTE[0] * (1 + WASTE[1] / p) * needed or 8 * TILES * TILE * widest > room:
        return None
    start = first[:, None] + step[:, None] * torch.arange(TILES)
    above = (n - start)[:, :, None].repeat(1, 1, TILE).int()
    limit = _limit(bag, (start[:, -1] + width - 1).clamp_min_(0), tau, rho, error, eps)
    rooms, rows = (torch.empty(size, dtype=torch.float32) for size in ((2, TILES * TILE * widest), (TILES * TILE, p)))
    near, left = [torch.zeros(3, 0, dtype=torch.long)], min(n * k // MOST, room // PAIR)
    (points, b), t = bag.single, tau.float().view(-1, TILES, 1, TILE)
    together = zip(*(v.tolist() for v in (first, step, width, limit)), order.split(TILES * TILE), t, above, strict=True)
    for row, (at, gap, some, least, c, own, out) in enumerate(together):
        if not some:
            continue
        excess, size = rooms[:, : some * len(c)].view(2, TILES, some, TILE)
        torch.sub(b.as_strided((TILES, some, 1), (gap, 1, 1), at), own, out=excess)
        half = torch.index_select(candidates.half, 0, c, out=rows).view(TILES, TILE, p)
        excess.baddbmm_(points.as_strided((TILES, some, p), (gap * p, p, 1), at * p), half.mT, alpha=-1)
        signs = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        out += signs.sum(1, dtype=torch.int32)
        column, i, counted = _near(excess, torch.abs(excess, out=size), least, k - row * len(c))
        if (left := left - len(i)) < 0:
            return None
        near.append(torch.stack([c[column], at + column // TILE * gap + i, counted]))
    above = torch.empty(k, dtype=torch.int32).index_copy_(0, order[:k], above.view(-1)[:k])
    return above, torch.cat(near, dim=1), met


def _near(excess: Tensor, size: Tensor, least: float, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of the first k candidates and the points of their tiles, where |α − τ| (TILES, points, TILE) does not exceed what it must.

    Candidates, points and whether α − τ is not below 0, (pairs,) each.
    """
    nearest = size.amin(1).view(-1)[:k]
    if float(nearest.amin()) > least:
        none = torch.zeros(0, dtype=torch.long)
        return none, none, none
    column = (~(nearest > least)).nonzero()[:, 0]
    pair, i = (~(size[column // TILE, :, column % TILE] > least)).nonzero(as_tuple=True)
    column = column[pair]
    return column, i, ~torch.signbit(excess[column // TILE, i, column % TILE])


def _limit(bag: Sorted, last: Tensor, tau: Tensor, rho: Tensor, error: Tensor, eps: float) -> Tensor:
    """What |α − τ| in float32 must exceed (rows,) to decide, for candidates (k,) in rows that meet no point after the last (rows,)."""
    p = bag.half.shape[1]
    own, reach = (2 * UNIT + eps) * tau.abs() + p * TINY * (1 + rho), UNIT * (2 * p + 8) * rho + error
    own, reach = (v.view(len(last), -1).amax(1) for v in (own, reach))
    return 1.02 * (own + reach * bag.sigma[last] + 2 * UNIT * bag.b[last].abs() + bag.granted[last])


def _again(training: Training, bag: Sorted, X: Tensor, tau: Tensor, above: Tensor, near: Tensor) -> Tensor:
    """Counts (2, k) for the candidates of X, with the pairs that are near formed in float64."""
    counts, (c, i, counted) = torch.stack([above, torch.zeros_like(above)]).double(), near
    if not len(c):
        return counts
    which, row = torch.unique(c, return_inverse=True)
    x, y = which // training.problem.n_classes, which % training.problem.n_classes
    half = training.factor.half(flat(training.problem.gradients(X[x], y)))
    own = tau[c]
    excess = bag.b[i] - products(half, bag.half, row, bag.order[i]) - own
    tolerance = bag.slack[i, None], training.rounding * own.abs()[:, None]
    greater, equal = pvalues.count(excess[:, None], 0.0, tolerance, axis=-1)
    counts[0].index_add_(0, c, (greater - counted).double())
    counts[1].index_add_(0, c, equal.double())
    return counts
