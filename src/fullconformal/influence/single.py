"""The direct approximation of the deleted scheme from kept 𝓗⁻¹g_i, in single precision wherever that decides.

Every α_i − τ = b_i − k_i − τ is formed in float32, which takes half the time. With u = 2⁻²⁴, K the longest sum and ĝ, U_i = 𝓗⁻¹g_i cut into
the blocks of parameters (each an outer product ĝ = D ⊗ a, whose length is |D||a|), it errs by less than

    (K + …)·u·Σ |ĝ||U_i|  +  …·u·(|b_i| + |τ|)

by Cauchy–Schwarz, whatever the order of the sums. What exceeds that and the tie tolerance is decided, and the few pairs that do not are
formed again in float64: the counts are those of `count_scores`. Objects too many of whose pairs would be left go there as a whole.

Points are sorted by b and cut into blocks. A candidate does not meet the blocks that |k_i| ≤ |U_i||ĝ| tells it from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fullconformal import pvalues
from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import (
    HUGE,
    LARGE,
    TINY,
    UNIT,
    Counts,
    Progress,
    Scorer,
    candidate_gradients,
    count_scores,
)
from fullconformal.problem import Rows
from fullconformal.runtime.numerics import single_is_whole

OBJECTS, ROWS, POINTS = 1024, 512, 80  # taken together; and of a cell, so that it stays in the cache
WHOLE = 16  # points, of which a block is a multiple: others take a fifth longer
FEW = 2  # candidates of an object, on average, up to which each meets a block by itself
NUMBERS = 2**21  # of the gradients of such candidates, at a time
LEAST = 2**26  # operations below which there is nothing to gain
MOST = 64  # one pair in so many may be formed again


def is_worth_it(training: Training, m: int) -> bool:
    """Whether counting in single precision is possible and pays for m objects."""
    problem = training.problem
    possible = training.solved is not None and problem.X.dtype == torch.float64 and not problem.prefix_names
    possible = possible and problem.X.device.type == "cpu" and single_is_whole()
    fits = 4 * problem.n * problem.p <= training.memory // 8 and all(b.i <= LARGE for b in problem.blocks)
    return possible and fits and 2 * m * problem.n * problem.p >= LEAST


class _Points:
    """Training points in the order of b, in blocks of `step`, the last filled up with points below all candidates.

    In float32 b (blocks, step) and 𝓗⁻¹g_i (blocks, step, o, i) of each parameter block. What |α_i − τ| must exceed is u + v·|ĝ| + w: u and
    v (blocks, step) of points, w (m, C) of candidates, ties included.
    """

    def __init__(self, training: Training):
        assert training.solved is not None
        self.training, self.solved = training, training.solved
        n, shapes = training.problem.n, [(b.o, b.i) for b in training.problem.blocks]
        sums = sum(o for o, _ in shapes) + 2 * len(shapes) + 4
        self.own, self.product = 1.01 * UNIT * sums, 1.01 * UNIT * (max(i for _, i in shapes) + sums)
        self.longer = (
            1.01 * UNIT * (2 * training.problem.p + sums) / self.product
        )  # where all make one sum, which may begin with b − τ
        self.b, self.order = torch.sort(training.loss + training.self_influence)
        self.slack = training.slack[self.order]
        self.step = WHOLE * -(-n // (WHOLE * -(-n // POINTS)))
        missing = -n % self.step
        self.filled = torch.cat([self.order, self.order[-1:].expand(missing)])
        self.U = [
            whole.float().index_select(0, self.filled).view(-1, self.step, *whole.shape[1:]) for whole in self.solved
        ]
        lengths = torch.stack([vector_norm(part, dim=(1, 2)) for part in self.solved])
        length = vector_norm(lengths, dim=0)[self.filled]
        b, slack = (torch.cat([v, v[-1:].expand(missing)]) for v in (self.b, self.slack))
        self.u, self.v = (part.view(-1, self.step) for part in (self.own * b.abs() + slack, self.product * length))
        self.low, self.high = b[:: self.step], b[self.step - 1 :: self.step]
        self.most_u, self.most_v = self.u.amax(1), self.v.amax(1)
        self.b32 = b.float().view(-1, self.step)
        self.b32.view(-1)[n:] = -torch.inf
        self.sizes = torch.full_like(self.low, self.step)
        self.sizes[-1] -= missing

    def w(self, tau: Tensor) -> Tensor:
        """The candidates' part (m, C) of the error."""
        return (self.own + self.training.rounding) * tau.abs() + TINY

    def sieve(self, tau: Tensor, norm: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Points surely above candidates (m, C), of the blocks that |k_i| ≤ |U_i||ĝ| decides; and blocks it does not, (blocks, m, C)."""
        low, high, most_u, most_v = (part[:, None, None] for part in (self.low, self.high, self.most_u, self.most_v))
        reach = torch.addcmul(w + most_u, norm, (1 + self.longer + 1 / self.product) * most_v)
        above = low - tau > reach
        met = ~(above | (tau - high > reach))
        return (self.sizes @ above.double().flatten(1)).view_as(tau), met


@torch.no_grad()
def single_counts(direct: Scorer, training: Training, X: Tensor, progress: Progress | None = None) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1."""
    problem, points, formed, done = training.problem, _Points(training), 0, 0
    counts = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64)
    step = _objects(points)
    for part, out in zip(X.split(step), counts.split(step, dim=1), strict=True):
        logits, J = problem.jacobian(part)
        found, met = _count(points, candidate_gradients(problem.loss, J, logits), problem.loss.candidates(logits))
        if found is None:
            double = count_scores(direct, training, part, 1.0)
            found = torch.stack([torch.as_tensor(double.greater), torch.as_tensor(double.equal)])
        out.copy_(found)
        formed, done = formed + met, done + len(part)
        if progress is not None:
            progress(done, len(X))
    greater, equal = counts.numpy()
    return Counts(greater, equal, formed / (problem.n * problem.n_classes * len(X)))


def _objects(points: _Points) -> int:
    """How many pass together: as many as a cache likes, or an eighth of the memory holds."""
    problem = points.training.problem
    widths = [b.o for b in problem.blocks]
    met = 16 * points.step * max(problem.n_classes, *widths)  # products with a block of points, and which are near
    each = met + problem.n_classes * (32 * sum(widths) + 32 * len(points.low))  # gradients, and what is known of blocks
    return max(1, min(OBJECTS, points.training.memory // 8 // each))


def _count(points: _Points, ghat: list[Rows], tau: Tensor) -> tuple[Tensor | None, int]:
    """Points above and tied (2, m, C) with candidates of gradients (m, C, o) ⊗ (m, i) and τ (m, C), and how many pairs met.

    None where float64 must do it.
    """
    lengths = [(vector_norm(left, dim=2), vector_norm(right, dim=1)) for left, right in ghat if right is not None]
    parts, w, pairs = [left * right[:, None] for left, right in lengths], points.w(tau), tau.numel() * len(points.b)
    norm = parts[0] if len(parts) == 1 else vector_norm(torch.stack(parts), dim=0)
    longest = max(float((1 + left.max()) * (1 + right.max())) for left, right in lengths)
    longest *= 1 + float(points.v.max()) / points.product
    w += points.training.problem.p * TINY * longest  # what numbers that vanish lose of their products
    if not longest + float(points.u.max() + w.max()) < HUGE:
        return None, pairs
    above, met = points.sieve(tau, norm, w)
    found = _Found(points, above.view(-1), norm.view(-1), w.view(-1))
    for cell in _cells(points, ghat, tau, met):
        found.add(*cell)
        if found.pairs * MOST > pairs:
            return None, pairs
    return _again(points, ghat, tau, above, torch.cat(found.near, dim=1)), found.formed


def _cells(
    points: _Points, ghat: list[Rows], tau: Tensor, met: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """α − τ (k, step), candidates (k,), and the block of points that they meet or one each, for the blocks that are met (blocks, m, C).

    And how much longer the sums are than v grants. Most objects have one candidate that many points are near to, which meets them by
    itself; among the points of largest b they have several, and all labels of an object meet those together.
    """
    (m, n_classes), problem = tau.shape, points.training.problem
    single = [(left.float(), right.float()) for left, right in ghat if right is not None]  # there is no prefix
    tau32, labels, objects = tau.float(), torch.arange(n_classes), met.any(2)
    widest = max(n_classes, *(left.shape[2] for left, _ in single))
    room = [torch.empty(min(m, ROWS) * points.step * widest, dtype=torch.float32) for _ in range(2)]
    numbers = min(NUMBERS, points.training.memory // 64)
    crowded = met.sum((1, 2)) > (FEW if ROWS * problem.p <= numbers else 0) * objects.sum(1)
    for block in crowded.nonzero()[:, 0]:
        for x in objects[block].nonzero()[:, 0].split(ROWS):
            own = [(left.index_select(0, x), right.index_select(0, x)) for left, right in single]
            excess = _by_object(points, block, own, tau32[x].masked_fill_(~met[block, x], torch.inf), room)
            yield excess.flatten(0, 1), (x[:, None] * n_classes + labels).view(-1), block, 1.0
    for at in (met & ~crowded[:, None, None]).nonzero().split(max(1, numbers // (problem.p + 4 * points.step))):
        block, x, y = at.unbind(1)
        own = [(left[x, y], right[x]) for left, right in single]
        yield _by_candidate(points, block, own, tau32[x, y]), x * n_classes + y, block, points.longer


def _by_object(
    points: _Points, block: Tensor, ghat: list[tuple[Tensor, Tensor]], tau: Tensor, room: list[Tensor]
) -> Tensor:
    """α − τ (m, C, step), in the first room, of objects with gradients (m, C, o) ⊗ (m, i) and τ (m, C), with a block of points."""
    m, step = len(tau), points.step
    out = torch.sub(points.b32[block], tau[..., None], out=room[0][: tau.numel() * step].view(*tau.shape, step))
    for (left, right), U in zip(ghat, points.U, strict=True):
        part = U[block].flatten(0, 1)
        V = torch.mm(right, part.T, out=room[1][: m * len(part)].view(m, -1))
        out.baddbmm_(left, V.view(m, step, -1).mT, alpha=-1)
    return out


def _by_candidate(points: _Points, block: Tensor, ghat: list[tuple[Tensor, Tensor]], tau: Tensor) -> Tensor:
    """α − τ (k, step) of candidates with gradients (k, o) ⊗ (k, i) and τ (k,), each with a block (k,), which are in order."""
    out = points.b32[block].sub_(tau[:, None])
    sizes = torch.bincount(block, minlength=len(points.low)).tolist()
    for (left, right), whole in zip(ghat, points.U, strict=True):
        for some, D, a, U in zip(*(v.split(sizes) for v in (out, left, right)), whole.flatten(2), strict=True):
            if len(some):
                some.addmm_((D[:, :, None] * a[:, None, :]).flatten(1), U.T, alpha=-1)
    return out


class _Found:
    """Points above candidates (m·C,), as float32 has it, and the pairs that it leaves undecided."""

    def __init__(self, points: _Points, above: Tensor, norm: Tensor, w: Tensor):
        self.points, self.above, self.norm, self.w = points, above, norm, w
        self.near, self.pairs, self.formed = [torch.zeros(3, 0, dtype=torch.long)], 0, 0

    def add(self, excess: Tensor, candidate: Tensor, block: Tensor, longer: float) -> None:
        """Count one of the cells. Near pairs are candidates, points and whether they are counted, (3, pairs)."""
        points, size = self.points, torch.empty_like(excess)
        bits = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        # Signs: three times faster than comparisons.
        self.above.index_add_(0, candidate, (points.step + bits.sum(-1, dtype=torch.int32)).double())
        norm, w = longer * self.norm.index_select(0, candidate), self.w.index_select(0, candidate)
        torch.abs(excess, out=size)
        row = (~(size.amin(-1) > w + points.most_u[block] + norm * points.most_v[block])).nonzero()[:, 0]
        self.formed += len(candidate) * points.step
        if not len(row):
            return
        block = block.expand(len(candidate))[row]
        least = points.u[block] + points.v[block] * norm[row, None] + w[row, None]
        at, i = (~(size[row] > least)).nonzero(as_tuple=True)
        counted = ~torch.signbit(excess[row[at], i])
        self.near.append(torch.stack([candidate[row[at]], block[at] * points.step + i, counted.long()]))
        self.pairs += len(i)


def _again(points: _Points, ghat: list[Rows], tau: Tensor, above: Tensor, found: Tensor) -> Tensor:
    """Counts (2, m, C) with the pairs found, as candidates, points and whether they were counted (3, pairs), formed in float64."""
    training, counts = points.training, torch.stack([above, torch.zeros_like(above)])
    for c, i, counted in found.split(max(1, training.memory // 64 // training.problem.p), dim=1):
        x, y = c // tau.shape[1], c % tau.shape[1]
        alpha = points.b[i]
        for rows, whole in zip(ghat, points.solved, strict=True):
            assert rows.right is not None  # there is no prefix
            V = (whole[points.order[i]] * rows.right[x, None, :]).sum(2)
            alpha = alpha - (rows.left[x, y] * V).sum(1)
        own = tau[x, y]
        tolerance = points.slack[i, None], (training.rounding * own.abs())[:, None]
        greater, equal = pvalues.count(alpha[:, None], own[:, None], tolerance, axis=-1)
        counts[0].index_put_((x, y), (greater - counted).double(), accumulate=True)
        counts[1].index_put_((x, y), equal.double(), accumulate=True)
    return counts
