"""The direct approximation, pruned: the same counts from a small share of the products.

Where 𝓗 is positive definite |k_i| ≤ √(s_i ŝ). With b_i = ℓ_i + q·s_i and τ = α_{n+1},

    b_i − √(s_i ŝ) > τ  → above for sure        b_i + √(s_i ŝ) < τ  → below for sure

and only the pairs in between need their product. Four sieves, each cheaper than the next:

1. ŝ ≤ |ĝ|²/floor, floor a lower bound of the eigenvalues: candidates below which every training point lies need no solve;
2. ŝ = |L⁻¹ĝ|² for the others, and whole blocks of training points (sorted by b) decided by their extremes;
3. single points of the remaining blocks;
4. k_i = g_i·(𝓗⁻¹ĝ) for the remaining pairs, from the factored gradients.

A decision must hold by more than the rounding error and the tie tolerance, so the counts are those of the unpruned rule.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import Rows, candidate_losses, flat, squared_norms
from fullconformal.scores.base import Counts, Progress, Training, candidate_gradients, rounding

BLOCK = 64


class _Sorted:
    """Training points sorted by b (within classes where candidates are compared by weight), cut into blocks."""

    def __init__(self, training: Training, q: float, weight: Tensor | None):
        n = training.problem.n
        self.q = q
        b = training.loss + q * training.self_influence
        order = torch.argsort(b, stable=True)
        if weight is not None:
            order = order[torch.argsort(training.problem.y[order], stable=True)]
        pad = -n % BLOCK
        self.order = torch.cat([order, order[-1:].expand(pad)]).view(-1, BLOCK)
        self.real = (torch.arange(n + pad, device=b.device) < n).view(-1, BLOCK)
        self.b, self.s = b[self.order], training.self_influence[self.order].clamp_min(0)
        self.slack = training.slack[self.order]
        self.weight = None if weight is None else weight[self.order] * self.real[..., None]
        self.low, self.high = self.b.amin(1), self.b.amax(1)
        self.s_max, self.slack_max = self.s.amax(1), self.slack.amax(1)
        self.total = self.real.sum(1, keepdim=True).double() if self.weight is None else self.weight.sum(1)
        self.relevant = self.total > 0


@torch.no_grad()
def pruned_counts(
    training: Training, X: Tensor, q: float, weight: Tensor | None = None, progress: Progress | None = None
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` with `direct` gives them."""
    problem = training.problem
    bag = _Sorted(training, q, weight)
    n_classes = problem.logits(X[:1]).shape[1]
    size = X.element_size()
    step = max(1, min(1024, training.memory // 16 // (n_classes * (4 * problem.p + len(bag.b) * 8) * size)))
    counts = torch.zeros(2, len(X), n_classes, dtype=torch.float64, device=X.device)
    touched = 0
    for start in range(0, len(X), step):
        touched += _count_block(training, bag, X[start : start + step], counts[:, start : start + step])
        if progress is not None:
            progress(min(start + step, len(X)), len(X))
    greater, equal = counts.cpu().numpy()
    return Counts(np.asarray(greater), np.asarray(equal), touched / (len(X) * n_classes * problem.n))


def _count_block(training: Training, bag: _Sorted, X: Tensor, counts: Tensor) -> int:
    """Add the counts of one block of objects into counts (2, m, C); returns the number of products formed."""
    logits, J = training.problem.jacobian(X)
    ghat = candidate_gradients(J, logits)
    loss = candidate_losses(logits)
    alive = _first_sieve(training, bag, ghat, loss)
    x, y = alive.nonzero(as_tuple=True)
    if not len(x):
        return 0
    rows = [Rows(left[x, y], None if right is None else right[x]) for left, right in ghat]
    half = training.factor.half(flat(rows))
    s_hat = (half**2).sum(1)
    tau = loss[x, y] - (1 - bag.q) * s_hat
    above, pairs = _second_and_third_sieve(bag, tau, s_hat, y, rounding(training.problem))
    equal = torch.zeros_like(above)
    if len(pairs):
        _fourth_sieve(training, bag, half, tau, y, pairs, above, equal)
    counts[0, x, y] += above
    counts[1, x, y] += equal
    return len(pairs)


def _first_sieve(training: Training, bag: _Sorted, ghat: list[Rows], loss: Tensor) -> Tensor:
    """Candidates (m, C) below which some training point may fail to lie."""
    floor = training.factor.floor
    if floor <= 0:
        return torch.ones_like(loss, dtype=torch.bool)
    m, n_classes = loss.shape
    rows = [
        Rows(left.flatten(0, 1), None if right is None else right.repeat_interleave(n_classes, 0))
        for left, right in ghat
    ]
    s_hat = (squared_norms(rows) / floor).view(m, n_classes)
    tau = loss - (1 - bag.q) * s_hat
    eps = rounding(training.problem)
    reach = (bag.s_max[:, None, None] * s_hat).sqrt() * (1 + eps)
    top = bag.high[:, None, None] + reach + bag.slack_max[:, None, None] + eps * tau.abs()
    return (top >= tau).any(0)


def _second_and_third_sieve(bag: _Sorted, tau: Tensor, s_hat: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Weight (k,) surely above each candidate, and the undecided pairs (block, place, candidate)."""
    reach = (bag.s_max[:, None] * s_hat).sqrt() * (1 + eps)
    margin = 2 * (bag.slack_max[:, None] + eps * tau.abs())
    surely = bag.low[:, None] - reach > tau + margin
    never = bag.high[:, None] + reach < tau - margin
    if bag.weight is None:
        above = (surely * bag.total).sum(0)
        open_ = ~(surely | never)
    else:
        above = (surely * bag.total[:, y]).sum(0)
        open_ = ~(surely | never) & bag.relevant[:, y]
    pairs = []
    for block, c in zip(*(part.split(2**18) for part in open_.nonzero(as_tuple=True)), strict=True):
        b, s = bag.b[block], bag.s[block]
        t = tau[c][:, None]
        reach = (s * s_hat[c][:, None]).sqrt() * (1 + eps)
        margin = 2 * (bag.slack[block] + eps * t.abs())
        surely = b - reach > t + margin
        weight = bag.real[block].double() if bag.weight is None else bag.weight[block, :, y[c]]
        above.index_add_(0, c, (surely * weight).sum(1))
        undecided = ~surely & (b + reach >= t - margin) & (weight > 0)
        at, place = undecided.nonzero(as_tuple=True)
        pairs.append(torch.stack([block[at], place, c[at]], 1))
    return above, torch.cat(pairs) if pairs else torch.empty(0, 3, dtype=torch.long, device=tau.device)


def _fourth_sieve(
    training: Training, bag: _Sorted, half: Tensor, tau: Tensor, y: Tensor, pairs: Tensor, above: Tensor, equal: Tensor
) -> None:
    """Form the products of the undecided pairs, candidate by candidate in padded batches, and add them to the counts."""
    block, place, c = pairs.unbind(1)
    block, place, c = (part[torch.argsort(c, stable=True)] for part in (block, place, c))
    point = bag.order[block, place]
    candidates, sizes = torch.unique_consecutive(c, return_counts=True)
    starts = sizes.cumsum(0) - sizes
    by_size = torch.argsort(sizes, descending=True)
    widest = sum(b.o + b.i for b in training.problem.blocks)
    at = 0
    while at < len(by_size):
        longest = int(sizes[by_size[at]])
        group = by_size[at : at + max(1, training.memory // 16 // (longest * widest * half.element_size()))]
        at += len(group)
        ranks = torch.arange(longest, device=c.device)
        real = ranks < sizes[group][:, None]
        index = (starts[group][:, None] + ranks).clamp_max(len(c) - 1)
        chosen = candidates[group]
        k = pair_products(training, point[index], training.factor.back(half[chosen]))
        i, t = point[index], tau[chosen][:, None]
        alpha = training.loss[i] + bag.q * training.self_influence[i] - k
        w = real.double() if bag.weight is None else real * bag.weight[block[index], place[index], y[chosen][:, None]]
        own_slack = rounding(training.problem) * t.abs()
        part = pvalues.count(alpha, t, (bag.slack[block[index], place[index]], own_slack), w, axis=1)
        above[chosen] += part[0]
        equal[chosen] += part[1]


def pair_products(training: Training, points: Tensor, u: Tensor) -> Tensor:
    """g_i·u_c (B, k) for training points (B, k) and vectors u (B, p), gradients kept factored."""
    B, k = points.shape
    unique, inverse = torch.unique(points, return_inverse=True)
    total = torch.zeros(B, k, dtype=u.dtype, device=u.device)
    for (left, right), b in zip(training.rows(unique), training.problem.blocks, strict=True):
        part = u[:, b.start : b.stop]
        if right is None:
            total += (left[inverse] @ part[:, :, None])[..., 0]
        else:
            total += ((right[inverse] @ part.view(B, b.o, b.i).mT) * left[inverse]).sum(-1)
    return total
