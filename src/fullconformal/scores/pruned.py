"""The direct approximation, pruned: the same counts from a small share of the products.

Where 𝓗 is positive definite |k_i| ≤ √(s_i ŝ). With b_i = ℓ_i + q·s_i and τ = α_{n+1},

    b_i − √(s_i ŝ) > τ  → above for sure        b_i + √(s_i ŝ) < τ  → below for sure

and only the pairs in between need their product. Training points are sorted by b and cut into blocks, which are decided as a whole by
their extremes. First for all candidates, without solving for any:

1. the few points of largest b, which most wrong labels cannot be told from, have their 𝓗⁻¹g_i kept (deleted scheme: τ is known);
2. the others meet ŝ ≤ |ĝ|²/floor, floor a lower bound of the eigenvalues. A candidate that leaves no block open is done.

Then for the candidates left, sorted by τ so that neighbours have the same open blocks:

3. ŝ = |L⁻¹ĝ|² decides blocks again;
4. L⁻¹ĝ of a group of neighbours meets the L⁻¹g_i of the blocks open to any of them (where those are not kept, 𝓗⁻¹ĝ meets the
   gradients), one matrix product a group.

Where the factor has a shorter way to half-solved gradients than gradients and solves, `halved` prunes with those.

A decision must hold by more than the rounding error and the tie tolerance, so the counts are those of the unpruned rule.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import Rows, candidate_losses, flat, squared_norms
from fullconformal.scores.base import Counts, Progress, Training, candidate_gradients, count_excess, products
from fullconformal.scores.halved import Halved, counts_by_halves

BLOCK = 64  # training points decided together, at least
GROUP = {"cpu": 128, "cuda": 512}  # candidates that share a product: a GPU would rather multiply more than start often
OBJECTS = 128  # whose labels are solved for together
SMALL = 256  # twice the parameters with which solving costs less than the bookkeeping
KEPT = 128  # one training point in so many has its 𝓗⁻¹g_i kept


class _Sorted:
    """Training points sorted by b (within classes where candidates are compared by weight), cut into blocks."""

    def __init__(self, training: Training, points: Tensor, q: float, weight: Tensor | None):
        n = len(points)
        if weight is not None:
            points = points[torch.argsort(training.problem.y[points], stable=True)]
        size = max(BLOCK, 2 ** (n.bit_length() // 2 - 2))  # about √n / 4: blocks and their points both grow slowly
        pad = -n % size
        self.order = torch.cat([points, points[-1:].expand(pad)]).view(-1, size)
        real = (torch.arange(n + pad, device=points.device) < n).view(-1, size)
        self.s = training.self_influence[self.order].clamp_min(0)
        self.b, self.slack = training.loss[self.order] + q * self.s, training.slack[self.order]
        self.low, self.high = self.b.amin(1), self.b.amax(1)
        self.root, self.slack_max = self.s.amax(1).sqrt(), self.slack.amax(1)
        self.b[~real] = -torch.inf  # never counted
        self.weight = None if weight is None else weight[self.order] * real[..., None]
        self.real = real.sum(1)
        # (blocks, 1) or (blocks, C)
        self.total = self.real[:, None].double() if self.weight is None else self.weight.sum(1)

    def sieve(self, low: Tensor, high: Tensor, s_hat: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Weight surely above candidates with τ between low and high, and whether it is open, of each block, (blocks, k)."""
        reach = self.root[:, None] * (s_hat.sqrt() * (1 + eps))
        margin = 2 * eps * torch.maximum(low.abs(), high.abs())
        surely = (self.low - 2 * self.slack_max)[:, None] - (high + margin) > reach
        never = (low - margin) - (self.high + 2 * self.slack_max)[:, None] > reach
        total = self.total if self.weight is None else self.total[:, y]
        open_ = ~(surely | never)
        return surely * total, open_ if self.weight is None else open_ & (total > 0)


@torch.no_grad()
def pruned_counts(
    training: Training, X: Tensor, q: float, weight: Tensor | None = None, progress: Progress | None = None
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` with `direct` gives them."""
    if training.halves is not None:
        return counts_by_halves(training, Halved(training.halves, training.problem.p, X), X, q, weight, progress)
    problem, m = training.problem, len(X)
    loss = candidate_losses(problem.logits(X))
    n_classes = loss.shape[1]
    order = torch.argsort(training.loss + q * training.self_influence, stable=True)
    floor = training.factor.floor
    room = training.memory // 16 // X.element_size()
    # Not more solves for the points kept than they can save, nor more than there is room for.
    kept = min(problem.n // KEPT, m * n_classes // 8, 4 * room // (3 * problem.p)) if q == 1 and floor > 0 else 0
    bag = _Sorted(training, order[: problem.n - kept], q, weight)
    counts = torch.zeros(2, m, n_classes, dtype=torch.float64, device=X.device)
    left = torch.ones_like(loss, dtype=torch.bool)
    if floor > 0:
        tail = _Tail(training, order[problem.n - kept :], weight) if kept else None
        width = n_classes * (4 * problem.p + 8 * len(bag.b)) + kept * max(b.o for b in problem.blocks)
        step = max(1, min(4096, room // width))
        for at in (slice(start, start + step) for start in range(0, m, step)):
            left[at] = _without_solving(training, bag, tail, X[at], loss[at], q, counts[:, at])
    x, y = left.nonzero(as_tuple=True)
    formed, done = torch.tensor(kept * m * n_classes, device=X.device), 0
    by_tau = torch.argsort(loss[x, y])
    # Where gradients are made again for every group of candidates, groups are as large as they can be.
    room = room if training.gradients is not None else 4 * room
    root = None
    if (
        len(x) >= 2 * problem.p > SMALL
        and problem.p**2 <= room
        and training.factor.has_half
        and not problem.prefix_names
    ):
        root = training.factor.half(torch.eye(problem.p, dtype=X.dtype, device=X.device))
    for part in by_tau.split(max(1, min(2**14, room // (4 * problem.p + 8 * len(bag.b))))):
        s_hat, half = _halved(training, root, X, x[part], y[part])
        above, equal, products_ = _by_solving(training, bag, s_hat, half, y[part], loss[x[part], y[part]], q)
        counts[0, x[part], y[part]] += above
        counts[1, x[part], y[part]] += equal
        formed, done = formed + products_, done + len(part)
        if progress is not None:
            progress(m * done // len(by_tau), m)
    greater, equal = counts.cpu().numpy()
    pairs = m * n_classes
    return Counts(np.asarray(greater), np.asarray(equal), int(formed) / (pairs * problem.n), len(x) / pairs)


class _Tail:
    """Training points that keep their 𝓗⁻¹g_i, one (o, k, i) tensor a parameter block."""

    def __init__(self, training: Training, points: Tensor, weight: Tensor | None):
        self.b = training.loss[points] + training.self_influence[points]
        self.slack = training.slack[points]
        self.weight = None if weight is None else weight[points].T
        solved = training.factor.solve(flat(training.rows(points)))
        self.solved = [
            solved[:, b.start : b.stop].view(-1, b.o, b.i).transpose(0, 1).contiguous() for b in training.problem.blocks
        ]

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
    ghat, eps = candidate_gradients(J, logits), training.rounding
    if tail is not None:
        for total, part in zip(counts, tail.count(ghat, loss, eps), strict=True):
            total += part
    s_hat = squared_norms(ghat) / training.factor.floor
    y = torch.arange(loss.shape[1], device=X.device).repeat(len(X))
    low = loss - (1 - q) * s_hat
    sure, open_ = bag.sieve(low.flatten(), loss.flatten(), s_hat.flatten(), y, eps)
    left = open_.any(0).view_as(loss)
    counts[0] += torch.where(left, 0, sure.sum(0).view_as(loss))
    return left


def _halved(training: Training, root: Tensor | None, X: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What `Factor.influence` gives, ŝ (k,) and L⁻¹ĝ (k, p), of objects x (k,) of X with labels y (k,); root is L⁻ᵀ where written out.

    ĝ_y = D_y ⊗ a in each block of parameters, so a meets the root once for all labels: 2p² operations an object.
    """
    problem = training.problem
    objects, at = torch.unique(x, return_inverse=True)
    if root is None or 2 * len(objects) > len(x):
        return training.factor.influence(flat(problem.gradients(X[x], y)))
    out = X.new_empty(len(x), problem.p)
    parts = [root[b.start : b.stop].view(b.o, b.i, -1).transpose(0, 1).flatten(1) for b in problem.blocks]
    for start in range(0, len(objects), OBJECTS):
        logits, J = problem.jacobian(X[objects[start : start + OBJECTS]])
        half = X.new_zeros(*logits.shape, problem.p)
        for (D, a), part in zip(candidate_gradients(J, logits), parts, strict=True):
            assert a is not None  # there is no prefix
            half.baddbmm_(D, (a @ part).view(len(D), D.shape[2], -1))
        mine = ((at >= start) & (at < start + len(half))).nonzero()[:, 0]
        out[mine] = half[at[mine] - start, y[mine]]
    return (out**2).sum(1), out


def _by_solving(
    training: Training, bag: _Sorted, s_hat: Tensor, half: Tensor, y: Tensor, loss: Tensor, q: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight above and tied with candidates (k,) among the training points of the bag, and the number of products formed."""
    eps, tau = training.rounding, loss - (1 - q) * s_hat
    order = torch.argsort(tau)
    s_hat, tau, y = s_hat[order], tau[order, None], y[order]
    sure, open_ = bag.sieve(tau[:, 0], tau[:, 0], s_hat, y, eps)
    u = half[order] if training.halved is not None else training.factor.solved(half[order])
    above, equal = sure.sum(0), torch.zeros(len(u), dtype=torch.float64, device=u.device)
    formed = torch.zeros((), dtype=torch.long, device=u.device)
    most = GROUP.get(u.device.type, GROUP["cpu"])
    kept = training.halved is not None or training.gradients is not None
    width = u.shape[1] if kept else 8 * most  # `_products` sees to what is not kept
    limit = max(1, training.memory // 16 // (bag.order.shape[1] * width * u.element_size()))
    for group in (slice(start, start + most) for start in range(0, len(u), most)):
        t = tau[group]
        for blocks in open_[:, group].any(1).nonzero()[:, 0].split(limit):
            if len(blocks):  # counted whole, so what is sure of them is taken back
                excess = _products(training, bag, u[group], t, s_hat[group], blocks, eps)
                torch.sub(bag.b[blocks].view(-1), excess, out=excess).sub_(t)
                w = None if bag.weight is None else bag.weight[blocks].flatten(0, 1)[:, y[group]].T
                part = count_excess(excess, bag.slack[blocks].view(-1), eps * t.abs(), w)
                above[group] += part[0] - sure[blocks, group].sum(0)
                equal[group] += part[1]
                formed += len(t) * bag.real[blocks].sum()
    back = torch.argsort(order)
    return above[back], equal[back], formed


def _products(
    training: Training, bag: _Sorted, u: Tensor, tau: Tensor, s_hat: Tensor, blocks: Tensor, eps: float
) -> Tensor:
    """k_i (k, points) from u = 𝓗⁻¹ĝ (L⁻¹ĝ where L⁻¹g_i are kept) for the points of blocks and candidates with τ (k, 1) and ŝ (k,).

    Gradients that are not kept are made for the points that some candidate needs, as many at a time as there is room for. The others' place
    holds 0, which decides them as their product would.
    """
    points = bag.order[blocks].flatten()
    if training.halved is not None:
        return u @ training.halved[points].T
    if training.gradients is not None:
        return u @ flat(training.rows(points)).T
    reach = (bag.s[blocks].flatten() * s_hat[:, None]).sqrt() * (1 + eps)
    margin = 2 * (bag.slack[blocks].flatten() + eps * tau.abs())
    near = ((bag.b[blocks].flatten() - tau).abs() <= reach + margin).any(0).nonzero()[:, 0]
    out = u.new_zeros(len(u), len(points))
    for part in near.split(max(1, training.memory // 16 // (2 * u.shape[1] * u.element_size()))):
        if len(part):
            out[:, part] = u @ flat(training.rows(points[part])).T
    return out
