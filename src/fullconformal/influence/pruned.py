"""The direct approximation, pruned: the same counts from a small share of the products.

Where 𝓗 is positive definite |k_i| ≤ √(s_i ŝ). With b_i = ℓ_i + q·s_i and τ = α_{n+1},

    b_i − √(s_i ŝ) > τ  → above for sure        b_i + √(s_i ŝ) < τ  → below for sure

and only the pairs in between need their product. Training points are sorted by b and cut into blocks, which are decided as a whole by
their extremes. First for all candidates, without solving for any:

1. the few points of largest b, which most wrong labels cannot be told from, keep their 𝓗⁻¹g_i where that pays (deleted scheme: τ is known);
2. the others meet ŝ ≤ |ĝ|²/floor, floor a lower bound of the eigenvalues. A candidate that leaves no block open is done.

Then for the candidates left, sorted by τ so that neighbours have the same open blocks:

3. ŝ = |L⁻¹ĝ|² decides blocks again, and in those still open it decides points;
4. L⁻¹ĝ of a group of neighbours meets the L⁻¹g_i of the points near any of them (where those are not kept, 𝓗⁻¹ĝ meets the
   gradients), one matrix product a group. Groups are cut so that this costs least, mostly to a few candidates with a few dozen points.

Where the factor has a shorter way to half-solved gradients than gradients and solves, `halved` prunes with those. A decision must
hold by more than the rounding error and the tie tolerance, so the counts are those of the unpruned rule.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.influence.halved import Halved, counts_by_halves
from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import Counts, Progress, candidate_gradients, count_excess, products, written_roots
from fullconformal.problem import Rows, flat, squared_norms

BLOCK = 64  # training points decided together, at least
PAIRS = 2**18, 2**24  # candidates by points of open blocks at a time: that a cache holds, that memory holds
# Candidates in a group at most, and the operations that starting a product costs: a GPU would rather multiply more than start often.
GROUP = {"cpu": (128, 3e5), "cuda": (512, 1e9)}
FETCH = 8.0  # what it costs to fetch a training point's row, in products with it; eight times that where gradients are made again
FEW = 16  # candidates for which gradients are not written out
CACHE = 2**24  # bytes that a CPU writes and reads again without asking for memory
OBJECTS = 128  # whose labels are solved for together
SMALL = 256  # twice the parameters with which solving costs less than the bookkeeping; the operations that it takes to count a pair
KEPT = 32  # one training point in so many has its 𝓗⁻¹g_i kept, at most, and 16 at least: fewer are not solved faster
SAMPLE = 64  # objects that tell how many


class _Sorted:
    """Training points sorted by b (within classes where candidates are compared by weight), in blocks of a total (1 or C, blocks)."""

    def __init__(self, training: Training, points: Tensor, q: float, weight: Tensor | None):
        n = len(points)
        if weight is not None:
            points = points[torch.argsort(training.problem.y[points], stable=True)]
        size = max(BLOCK, 2 ** (n.bit_length() // 2 - 2))  # about √n / 4: blocks and their points both grow slowly
        pad = -n % size
        self.order = torch.cat([points, points[-1:].expand(pad)]).view(-1, size)
        real = (torch.arange(n + pad, device=points.device) < n).view(-1, size)
        s = training.self_influence[self.order].clamp_min(0)
        self.b, self.slack = training.loss[self.order] + q * s, training.slack[self.order]
        self.roots = (s + training.influence_slack[self.order]).sqrt()
        self.slack_max, self.root = self.slack.amax(1), self.roots.amax(1)
        self.low, self.high = self.b.amin(1) - 2 * self.slack_max, self.b.amax(1) + 2 * self.slack_max
        self.b[~real] = -torch.inf  # never counted
        self.weight = None if weight is None else weight[self.order] * real[..., None]
        self.total = real.sum(1)[None].double() if self.weight is None else self.weight.sum(1).T.contiguous()

    def sieve(self, low: Tensor, high: Tensor, s_hat: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Weight surely above candidates (k,) with τ between low and high, and which blocks are open to them, (k, blocks)."""
        reach, margin = (s_hat.sqrt() * (1 + eps))[:, None], 2 * eps * torch.maximum(low.abs(), high.abs())
        surely = torch.addcmul(self.low, reach, self.root, value=-1) > (high + margin)[:, None]
        never = torch.addcmul(self.high, reach, self.root) < (low - margin)[:, None]
        total, open_ = self.total[0 if self.weight is None else y], ~(surely | never)
        if self.weight is None:  # all blocks but the last are full
            return surely.sum(1, dtype=torch.int32) * total[0] - surely[:, -1] * (total[0] - total[-1]), open_
        return (surely * total).sum(1), open_ & (total > 0)

    def near(self, block: Tensor, tau: Tensor, s_hat: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """b − τ of points of blocks (e,) and candidates (e, 1), and whether bounds cannot tell them apart, (e, size) each."""
        gap, margin = self.b[block].sub_(tau), 2 * (self.slack_max[block, None] + eps * tau.abs())
        return gap, gap.abs() <= torch.addcmul(margin, self.roots[block], s_hat.sqrt() * (1 + eps))


@torch.no_grad()
def pruned_counts(
    training: Training, X: Tensor, q: float, weight: Tensor | None = None, progress: Progress | None = None
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` with `direct` gives them."""
    if training.halves is not None:
        return counts_by_halves(training, Halved(training.halves, training.problem.p, X), X, q, weight, progress)
    problem, m = training.problem, len(X)
    loss = problem.loss.candidates(problem.logits(X))
    order = torch.argsort(training.loss + q * training.self_influence, stable=True)
    floor, room = training.factor.floor, training.memory // 16 // X.element_size()
    kept = _worth_keeping(training, X, order, 4 * room // (3 * problem.p)) if q == 1 and floor > 0 else 0
    bag = _Sorted(training, order[: problem.n - kept], q, weight)
    counts = torch.zeros(2, *loss.shape, dtype=torch.float64, device=X.device)
    left = torch.ones_like(loss, dtype=torch.bool)
    if floor > 0:
        tail = _Tail(training, order[problem.n - kept :], weight) if kept else None
        width = problem.n_classes * (4 * problem.p + 8 * len(bag.b)) + kept * max(b.o for b in problem.blocks)
        step = max(1, min(4096, room // width))
        for at in (slice(start, start + step) for start in range(0, m, step)):
            left[at] = _without_solving(training, bag, tail, X[at], loss[at], q, counts[:, at])
    x, y = left.nonzero(as_tuple=True)
    formed, done = kept * loss.numel(), 0
    by_tau = torch.argsort(loss[x, y])
    # Where gradients are made again for every group of candidates, groups are as large as they can be.
    room = room if training.gradients is not None else 4 * room
    may = training.factor.has_half and not problem.prefix_names and 2 * problem.p > SMALL and problem.p**2 <= room
    pays = len(x) >= 2 * max(problem.p, int(left.any(1).sum()))
    roots = written_roots(training) if may and pays else []
    for part in by_tau.split(max(1, min(2**14, room // (4 * problem.p + 8 * len(bag.b))))):
        s_hat, half = _halved(training, roots, X, x[part], y[part])
        above, equal, products_ = _by_solving(training, bag, s_hat, half, y[part], loss[x[part], y[part]], q)
        counts[0, x[part], y[part]] += above
        counts[1, x[part], y[part]] += equal
        formed, done = formed + products_, done + len(part)
        if progress is not None:
            progress(m * done // len(by_tau), m)
    greater, equal = counts.cpu().numpy()
    return Counts(np.asarray(greater), np.asarray(equal), formed / loss.numel() / problem.n, len(x) / loss.numel())


def _worth_keeping(training: Training, X: Tensor, order: Tensor, most: int) -> int:
    """How many of the points, in the order of b, keep their 𝓗⁻¹g_i: with fewest solves for them and the candidates of X that they leave.

    Of a sample of X those are left whose τ is not above b + √(s ŝ) for the largest b and s that are not kept.
    """
    problem = training.problem
    sample = X[:: max(1, len(X) // max(1, min(SAMPLE, most // (8 * problem.n_classes))))]
    kept = [0, *(1 << k for k in range(4, 24) if 1 << k <= min(most, problem.n // KEPT))]
    number = torch.tensor(kept, device=X.device)
    s, last = training.self_influence[order].clamp_min(0), problem.n - 1 - number
    b, root = (training.loss[order] + s)[last], s.cummax(0)[0][last].sqrt()
    logits, J = problem.jacobian(sample)
    reach = (squared_norms(candidate_gradients(problem.loss, J, logits)) / training.factor.floor).sqrt()[
        ..., None
    ] * root
    left = (b + reach >= problem.loss.candidates(logits)[..., None]).sum((0, 1)) * (len(X) / len(sample))
    solve, product = max(problem.p, SMALL) ** 2, len(X) * (2 * problem.p + SMALL * problem.n_classes)
    return kept[int((left * solve + number * (solve + product)).argmin())]


class _Tail:
    """Training points that keep their 𝓗⁻¹g_i, one (k, o, i) tensor a parameter block."""

    def __init__(self, training: Training, points: Tensor, weight: Tensor | None):
        self.b = training.loss[points] + training.self_influence[points]
        self.slack = training.slack[points]
        self.weight = None if weight is None else weight[points].T
        halved, factor = training.halved, training.factor
        solved = factor.solve(flat(training.rows(points))) if halved is None else factor.back(halved[points])
        self.solved = [solved[:, b.start : b.stop].reshape(-1, b.o, b.i) for b in training.problem.blocks]

    def count(self, ghat: list[Rows], tau: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Weight above and tied with candidates (m, C), by their products."""
        alpha = self.b - products(self.solved, ghat, slice(0, len(self.b)))
        part = pvalues.count(alpha, tau[..., None], (self.slack, eps * tau.abs()[..., None]), self.weight, axis=-1)
        return part[0], part[1]


def _without_solving(
    training: Training, bag: _Sorted, tail: _Tail | None, X: Tensor, loss: Tensor, q: float, counts: Tensor
) -> Tensor:
    """Add what needs no solve to counts (2, m, C); returns the candidates (m, C) that are left."""
    logits, J = training.problem.jacobian(X)
    ghat, eps = candidate_gradients(training.problem.loss, J, logits), training.rounding
    if tail is not None:
        for total, part in zip(counts, tail.count(ghat, loss, eps), strict=True):
            total += part
    s_hat = squared_norms(ghat) / training.factor.floor
    y = torch.arange(loss.shape[1], device=X.device).repeat(len(X))
    sure, open_ = bag.sieve((loss - (1 - q) * s_hat).flatten(), loss.flatten(), s_hat.flatten(), y, eps)
    left = open_.any(1).view_as(loss)
    counts[0] += torch.where(left, 0, sure.view_as(loss))
    return left


def _halved(training: Training, roots: list[Tensor], X: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What `Factor.influence` gives, ŝ (k,) and L⁻¹ĝ (k, p), of objects x (k,) of X with labels y (k,); roots are L⁻ᵀ where written out.

    ĝ_y = D_y ⊗ a in each block of parameters, so a meets the root once for all labels: 2p² operations an object.
    """
    problem = training.problem
    objects, at = torch.unique(x, return_inverse=True)
    if not roots or 2 * len(objects) > len(x):
        return training.factor.influence(flat(problem.gradients(X[x], y)))
    out, s_hat = X.new_empty(len(x), problem.p), X.new_empty(len(x))
    for start in range(0, len(objects), OBJECTS):
        logits, J = problem.jacobian(X[objects[start : start + OBJECTS]])
        half = X.new_zeros(*logits.shape, problem.p)
        for (D, a), part in zip(candidate_gradients(problem.loss, J, logits), roots, strict=True):
            assert a is not None  # there is no prefix
            half.baddbmm_(D, (a @ part).view(len(D), D.shape[2], -1))
        mine = ((at >= start) & (at < start + len(half))).nonzero()[:, 0]
        out[mine] = rows = half[at[mine] - start, y[mine]]
        s_hat[mine] = (rows**2).sum(1)
    return s_hat, out


def _by_solving(
    training: Training, bag: _Sorted, s_hat: Tensor, half: Tensor, y: Tensor, loss: Tensor, q: float
) -> tuple[Tensor, Tensor, int]:
    """Weight above and tied with candidates (k,) among the training points of the bag, and the number of products formed."""
    eps, tau = training.rounding, loss - (1 - q) * s_hat
    order = torch.argsort(tau)
    order = order if bag.weight is None else order[torch.argsort(y[order], stable=True)]
    s_hat, tau, y = s_hat[order], tau[order], y[order]
    above, open_ = bag.sieve(tau, tau, s_hat, y, eps)
    equal, formed = torch.zeros_like(above), 0
    for some in _portions(training, bag, open_.sum(1, dtype=torch.int32)):
        own, block = open_[some].nonzero(as_tuple=True)
        at, t = some[own], tau[some[own], None]
        excess, near = bag.near(block, t, s_hat[at, None], eps)
        u = half[order[some]] if training.halved is not None else training.factor.solved(half[order[some]])
        k, products_ = _products(training, bag, u, own, block, near)
        w = None if bag.weight is None else bag.weight[block, :, y[at]]
        part = count_excess(excess.sub_(k), bag.slack[block], eps * t.abs(), w)
        above.index_put_((at,), part[0].double(), accumulate=True)
        if isinstance(part[1], Tensor):
            equal.index_put_((at,), part[1].double(), accumulate=True)
        formed += products_
    back = torch.argsort(order)
    return above[back], equal[back], formed


def _portions(training: Training, bag: _Sorted, number: Tensor) -> tuple[Tensor, ...]:
    """Candidates with some open blocks, their number (k,), in portions; these hold 32 at least, so that rows are shared if all is open."""
    some, n = number.nonzero()[:, 0], bag.order.numel()
    pairs = min(PAIRS[1], PAIRS[1] if number.is_cuda else max(PAIRS[0], 32 * n), training.memory // 1024)
    most = max(1, pairs // bag.order.shape[1])
    sizes = torch.unique_consecutive(number[some].cumsum(0) // most, return_counts=True)[1]
    return tuple(some.split(sizes.tolist()))


def _products(
    training: Training, bag: _Sorted, u: Tensor, own: Tensor, block: Tensor, near: Tensor
) -> tuple[Tensor, int]:
    """k_i (e, size) of candidates `own` (e,) with the points of blocks (e,) that are near, 0 for the others; how many were formed.

    u (k, p) is 𝓗⁻¹ĝ, or L⁻¹ĝ where the L⁻¹g_i are kept. A group of candidates meets the points near any of them: columns of its product.
    """
    count, size = bag.order.shape
    group = _groups(training, len(u), own, block, near, count)
    mine = group[own]
    key, at = torch.unique(mine * count + block, return_inverse=True)
    needed = u.new_zeros(len(key), size).index_add_(0, at, near.to(u.dtype)) > 0
    points, column = bag.order[key % count][needed], needed.flatten().cumsum(0, dtype=torch.int32).view_as(needed)
    height = torch.bincount(group)
    width = torch.zeros_like(height).index_add_(0, key // count, needed.sum(1))
    top, left, start = (sizes.cumsum(0) - sizes for sizes in (height, width, height * width))
    heights, widths, sizes = torch.stack([height, width, height * width]).tolist()
    k = u.new_zeros(1 + sum(sizes))  # one after the other, behind the 0 of points that are not near
    for rows, columns, out in zip(u.split(heights), points.split(widths), k[1:].split(sizes), strict=True):
        if len(columns):
            _product(training, rows, columns, out.view(len(rows), -1))
    first = (start[mine] + (own - top[mine]) * width[mine] - left[mine]).int()
    index = (column[at] + first[:, None]).mul_(near)
    return k.index_select(0, index.view(-1)).view(near.shape), len(k) - 1


def _groups(training: Training, k: int, own: Tensor, block: Tensor, near: Tensor, count: int) -> Tensor:
    """The group (k,) of each candidate: neighbours that share much of their open blocks (e,), of `count`.

    Merging two groups saves a start and the rows of what they share, and costs products that neither needs. Of all groupings that come of
    halving again and again the cheapest is found from the bottom up; costs are in products of one candidate with a block's near points.
    """
    most, start = GROUP.get(near.device.type, GROUP["cpu"])
    start /= 2 * training.problem.p * max(1.0, int(near.sum()) / len(near))
    fetch = FETCH if training.halved is not None or training.gradients is not None else 8 * FETCH
    union = torch.zeros(k + -k % most, count, dtype=torch.bool, device=near.device)
    union[own, block] = True
    least = start + union.sum(1, dtype=torch.int32) * (fetch + 1)
    size = torch.ones(len(union), dtype=torch.long, device=near.device)
    for width in (2**j for j in range(1, most.bit_length())):
        union, parts = union[::2] | union[1::2], least[::2] + least[1::2]
        whole = start + union.sum(1, dtype=torch.int32) * (fetch + width)
        size = torch.where((whole < parts).repeat_interleave(width), width, size)
        least = torch.minimum(whole, parts)
    return ((torch.arange(len(size), device=near.device) % size == 0).cumsum(0) - 1)[:k]


def _product(training: Training, u: Tensor, points: Tensor, out: Tensor) -> None:
    """Write k_i (k, points) from u (k, p) to out; a few candidates meet gradients as they are, left ⊗ right."""
    room, again = training.memory // 16, training.halved is None and training.gradients is None
    room = max(1, (room if u.is_cuda or again else min(room, CACHE)) // (2 * u.shape[1] * u.element_size()))
    for at, part in zip(points.split(room), out.split(room, dim=1), strict=True):
        if training.halved is not None:
            torch.mm(u, training.halved[at].T, out=part)
        elif len(u) > FEW:
            torch.mm(u, flat(training.rows(at)).T, out=part)
        else:
            for (left, right), b in zip(training.rows(at), training.problem.blocks, strict=True):
                k = left @ u[:, b.start : b.stop].view(-1, b.o, b.i)
                part += (k if right is None else k.mul_(right)).sum(-1)
