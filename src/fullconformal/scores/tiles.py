"""The direct approximation of the deleted scheme from kept L⁻¹g_i, tile by tile, in single precision wherever that decides.

As in `windows`, a candidate need only meet the points with |b_i − τ| ≤ σ_i·ρ, which are a range in the order of b. Candidates that are
neighbours in the order of τ have ranges that hardly differ: a tile of them meets the points of all in one matrix product.

The products h_i·ĥ of h = L⁻¹g are formed in float32. With u = 2⁻²⁴ and ĥ off by ε, α_i − τ errs by less than

    u·((2p + …)·σ_i·ρ + …·(|b_i| + |τ|)) + σ_i·ε

by Cauchy–Schwarz, whatever the order of the sums. What exceeds that and the tie tolerance is decided, and the few pairs that do not are
formed again in float64: the counts are those of `count_scores`.
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
)
from fullconformal.scores.windows import Sorted, products

TILE, TILES = 64, 6  # candidates of a tile, and tiles that meet their points together
OBJECTS = 128  # whose L⁻¹ĝ are made together, so that they stay in the cache
MOST = 64  # one pair in so many may be formed again
FEW = 8  # tiles that must be filled
WASTE = (
    4,
    256,
)  # products formed for one that is needed, at most, and so many times the share of that number of parameters in p more


class Candidates(NamedTuple):
    """Candidates of some objects: τ (k,), L⁻¹ĝ (k, p) in float32, what that is off by (k,), and a bound of its length (k,)."""

    tau: Tensor
    half: Tensor
    error: Tensor
    rho: Tensor


def is_worth_it(training: Training, m: int) -> bool:
    """Whether what is kept of the points can be met tile by tile, and the candidates of m objects fill some tiles."""
    like = training.problem.X
    possible = training.halved is not None and like.dtype == torch.float64 and like.device.type == "cpu"
    return possible and training.problem.n_classes > 2 and m * training.problem.n_classes >= FEW * TILE


@torch.no_grad()
def tiled_counts(training: Training, X: Tensor, progress: Progress | None = None) -> Counts | None:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1.

    None where float64 must do it, or neighbours in the order of τ are too far apart to be met together.
    """
    problem, bag, roots = training.problem, Sorted.of(training, 1.0), _roots(training, len(X))
    counts, formed, again = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64), 0, 0
    step = max(1, training.memory // 16 // (8 * problem.n_classes * problem.p))
    for at in (slice(start, start + step) for start in range(0, len(X), step)):
        candidates = _candidates(training, roots, X[at])
        largest = (1 + candidates.rho.max()) * (1 + bag.sigma[-1]) + bag.b.abs().max() + candidates.tau.max()
        if not float(largest) < HUGE:
            return None
        found = _count(bag, candidates, training.rounding)
        if found is None or (again := again + found[1].shape[1]) * MOST > problem.n * problem.n_classes * len(X):
            return None
        above, near, met = found
        formed += met
        counts[:, at] = _again(training, bag, X[at], candidates.tau, above, near).view(2, -1, problem.n_classes)
        if progress is not None:
            progress(min(at.stop, len(X)), len(X))
    greater, equal = counts.numpy()
    return Counts(greater, equal, formed / (problem.n * problem.n_classes * len(X)))


def _roots(training: Training, m: int) -> list[Tensor]:
    """L⁻ᵀ, one (i, o·p) tensor a parameter block: an object's a meets it once for all labels. None where solving for m costs less."""
    problem, p = training.problem, training.problem.p
    if problem.prefix_names or p + 2 * m > problem.n_classes * m or p**2 > training.memory // 64:
        return []
    root = training.factor.half(torch.eye(p, dtype=torch.float64))
    return [root[b.start : b.stop].view(b.o, b.i, -1).transpose(0, 1).flatten(1) for b in problem.blocks]


def _candidates(training: Training, roots: list[Tensor], X: Tensor) -> Candidates:
    """Every label of objects X (m, ...): ĥ = Σ D·V with V = a·L⁻ᵀ in float64, and the sum in float32 errs by its length times |D||V|."""
    problem = training.problem
    logits, J = problem.jacobian(X)
    ghat, half = candidate_gradients(J, logits), torch.empty(*logits.shape, problem.p)
    error = torch.zeros(logits.shape, dtype=torch.float64)
    for block, ((D, a), root) in enumerate(zip(ghat, roots, strict=False)):
        assert a is not None  # there is no prefix
        length = torch.empty(len(X))
        for left, right, out, norm in zip(*(v.split(OBJECTS) for v in (D.float(), a, half, length)), strict=True):
            V = (right @ root).float()
            torch.linalg.vector_norm(V, dim=1, out=norm)
            torch.baddbmm(out, left, V.view(len(V), D.shape[2], -1), beta=float(block > 0), out=out)
        error += (D.shape[2] + len(roots) + 3) * torch.linalg.vector_norm(D, dim=2) * length[:, None]
    if not roots:
        for start in range(0, len(X), OBJECTS):
            at = slice(start, start + OBJECTS)
            half[at] = half_solved(training.factor, select(ghat, at))
    size = torch.linalg.vector_norm(half, dim=2).double() * (1 + UNIT * problem.p)
    error = 1.01 * UNIT * (error if roots else size).flatten()
    return Candidates(candidate_losses(logits).flatten(), half.flatten(0, 1), error, size.flatten() + error)


def _count(bag: Sorted, candidates: Candidates, eps: float) -> tuple[Tensor, Tensor, int] | None:
    """Points above candidates (k,), as float32 has it; pairs that are near; the number of pairs that met. None where these are too many.

    Near pairs are candidates, points in the order of b, and whether these are counted, (3, pairs).
    """
    n, p, k = len(bag.b), bag.half.shape[1], len(candidates.tau)
    order = torch.argsort(candidates.tau)
    order = torch.cat([order, order[-1:].expand(-k % (TILES * TILE))])
    tau, rho, error = (v[order] for v in (candidates.tau, candidates.rho, candidates.error))
    low, high = (ends.view(-1, TILES, TILE) for ends in bag.window(tau, rho, eps))
    needed = int((high - low).clamp_min(0).sum())
    low, high, tile = low.amin(2), high.amax(2), torch.arange(TILES)
    # Tiles that meet their points together have ranges of one width at equal distances, which are a view of the points.
    first = low.amin(1)
    step = ((low - first[:, None])[:, 1:] // tile[1:]).amin(1)
    step = torch.minimum(
        step, ((n - high)[:, :-1] // tile[1:].flip(0)).amin(1)
    )  # so that none ends beyond the last point
    start = first[:, None] + step[:, None] * tile
    width = (high - start).amax(1).clamp_min_(0)
    if (met := TILES * TILE * int(width.sum())) > WASTE[0] * (1 + WASTE[1] / p) * needed:
        return None
    above = (n - start)[:, :, None].expand(-1, -1, TILE).int()
    points, b = bag.single
    # What |α − τ| must exceed.
    last = (start[:, -1] + width - 1).clamp_min_(0)
    own, reach = (2 * UNIT + eps) * tau.abs() + TINY, UNIT * (2 * p + 8) * rho + error
    own, reach = (v.view(len(first), -1).amax(1) for v in (own, reach))
    limit = 1.02 * (own + reach * bag.sigma[last] + 2 * UNIT * bag.b[last].abs() + bag.granted[last])
    rooms, rows = torch.empty(2, TILES * TILE * int(width.max())), torch.empty(TILES * TILE, p)
    near, t = [torch.zeros(3, 0, dtype=torch.long)], tau.float().view(-1, TILES, 1, TILE)
    together = zip(
        first.tolist(), step.tolist(), width.tolist(), limit.tolist(), order.split(TILES * TILE), t, above, strict=True
    )
    for at, gap, some, least, c, own_t, out in together:
        if not some:
            continue
        excess, size = rooms[:, : some * len(c)].view(2, TILES, some, TILE)
        torch.sub(b.as_strided((TILES, some, 1), (gap, 1, 1), at), own_t, out=excess)
        half = torch.index_select(candidates.half, 0, c, out=rows).view(TILES, TILE, p)
        excess.baddbmm_(points.as_strided((TILES, some, p), (gap * p, p, 1), at * p), half.mT, alpha=-1)
        signs = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        out += signs.sum(1, dtype=torch.int32)
        nearest = torch.abs(excess, out=size).amin(1)
        if not float(nearest.amin()) > least:
            j, column = (~(nearest > least)).nonzero(as_tuple=True)
            pair, i = (~(size[j, :, column] > least)).nonzero(as_tuple=True)
            j, column = j[pair], column[pair]
            near.append(torch.stack([c[j * TILE + column], at + j * gap + i, ~torch.signbit(excess[j, i, column])]))
    counted = torch.empty(k, dtype=torch.int32).index_copy_(0, order[:k], above.flatten()[:k])
    # The last candidate may stand for those that are missing in its tiles.
    return counted, torch.unique(torch.cat(near, dim=1), dim=1), met


def _again(training: Training, bag: Sorted, X: Tensor, tau: Tensor, above: Tensor, near: Tensor) -> Tensor:
    """Counts (2, k) for the candidates of X, with the pairs that are near formed in float64."""
    counts, (c, i, counted) = torch.stack([above.double(), torch.zeros(len(above), dtype=torch.float64)]), near
    which, row = torch.unique(c, return_inverse=True)
    x, y = which // training.problem.n_classes, which % training.problem.n_classes
    half = training.factor.half(flat(training.problem.gradients(X[x], y)))
    alpha, own = (bag.b[i] - products(half, bag.half, row, bag.order[i]))[:, None], tau[c, None]
    greater, equal = pvalues.count(alpha, own, (bag.slack[i, None], training.rounding * own.abs()), axis=-1)
    counts[0].index_add_(0, c, (greater - counted).double())
    counts[1].index_add_(0, c, equal.double())
    return counts
