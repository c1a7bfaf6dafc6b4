"""Counts of the direct approximation for a softmax layer on fixed features, `scores.last_layer`; pruned, and by kernels on a GPU.

Points are sorted by b_i = ℓ_i + q·s_i and cut into blocks; a chunk of blocks whose b differ from τ by more than
√(max s·ŝ) is decided for that candidate, and only the others are multiplied with T_x. With c_ix known, |c_ix|·max_y|Q_iy| decides blocks.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from fullconformal.influence.scores import Counts, Progress
from fullconformal.last_layer.bag import Candidates, LayerBag

BLOCK, CHUNK = 64, 4096  # points a block, and points that are multiplied together


@torch.no_grad()
def last_layer_counts(
    bag: LayerBag,
    features: Tensor,
    logits: Tensor,
    q: float,
    weights: Tensor | None = None,
    class_conditional: bool = False,
    prune: bool = True,
    memory: int = 2**30,
    progress: Progress | None = None,
) -> Counts:
    """Counts for the candidates of m objects from their features (m, d) and logits (m, C); weights (n,) of the training points."""
    m, n_classes = logits.shape
    w = torch.zeros(len(bag.T), dtype=torch.float64, device=bag.T.device)
    w[: bag.n] = 1.0 if weights is None else weights[bag.order]
    fused = weights is None and not class_conditional and has_kernels(bag.Q)
    # The kernel holds two numbers for each pair of points; the other ways go by chunks, and by blocks × candidates.
    each = 16 * len(bag.T) if fused else 8 * CHUNK * 8 + 64 * (CHUNK // BLOCK) * n_classes
    step = max(1, min(128 if fused else 512, memory // 4 // each))
    counts = torch.zeros(2, m, n_classes, dtype=torch.float64, device=bag.T.device)
    b, work = bag.base(q), 0
    for start in range(0, m, step):
        at = slice(start, start + step)
        x = bag.candidates(features[at], logits[at], q)
        if class_conditional:
            work += _own_class(bag, b, w, x, counts[:, at])
        elif fused:
            work += _fused(bag, b, x, prune, counts[:, at])
        else:
            work += _pruned(bag, b, w, x, prune, counts[:, at])
        if progress is not None:
            progress(min(start + step, m), m)
    greater, equal = counts.cpu().numpy()
    return Counts(greater, equal, work / max(1, m * n_classes * bag.n))


def has_kernels(like: Tensor) -> bool:
    """Whether there are kernels for scores of a tensor's kind."""
    return like.is_cuda and like.dtype == torch.float32 and _kernels_run(like.device)


@cache
def _kernels_run(device: torch.device) -> bool:
    """Whether Triton is there and compiles: it needs a C compiler, which not every machine has."""
    if find_spec("triton") is None:
        return False
    from fullconformal.last_layer import kernels

    ones = torch.ones(128, 128, device=device)
    one = ones[0]
    try:
        kernels.count(ones, one, one, one, one, ones, ones.clone(), one, ones, ones)
    except Exception as error:  # whatever it is, plain PyTorch counts as well
        warnings.warn(f"the GPU kernels do not compile here, counting is slower without them: {error}", stacklevel=2)
        return False
    return True


def _fused(bag: LayerBag, b: Tensor, x: Candidates, prune: bool, counts: Tensor) -> int:
    """Add the counts (2, m, C) of all training points in one kernel."""
    from fullconformal.last_layer import kernels

    c, u = bag.products(x, slice(None))
    v = x.v[:, 0].contiguous()
    greater, not_below = kernels.count(bag.Q, b, bag.slack, bag.spread, bag.w, c, u, v, x.low, x.high, prune)
    counts[0] += greater
    counts[1] += not_below - greater
    return x.s.numel() * bag.n


def _own_class(bag: LayerBag, b: Tensor, w: Tensor, x: Candidates, counts: Tensor) -> int:
    """Add the counts (2, m, C) where a candidate is compared with the points of its own label: one label a point."""
    for at in (slice(k, min(k + CHUNK, bag.n)) for k in range(0, bag.n, CHUNK)):
        c, u = bag.products(x, at)
        y = bag.y[at]
        alpha = b[at] - c * (u - bag.Q[at].gather(1, y[:, None])[:, 0])
        room = bag.room(x, at)
        above = alpha - room > x.high[:, y]
        tied = (alpha + room >= x.low[:, y]) & ~above
        for into, part in zip(counts, (above, tied), strict=True):
            into.index_add_(1, y, part * w[at])
    return len(x.s) * bag.n


def _pruned(bag: LayerBag, b: Tensor, w: Tensor, x: Candidates, prune: bool, counts: Tensor) -> int:
    """Add the counts (2, m, C), chunk by chunk, of which most are decided; returns the number of scores formed."""
    slack, work = bag.slack, 0
    for at in (slice(k, min(k + CHUNK, len(b))) for k in range(0, len(b), CHUNK)):
        reach = (bag.self_influence[at].amax() * x.s).sqrt() + 2 * (slack[at].amax() + bag.w[at].amax() * x.v)
        surely, never = b[at].amin() - reach > x.high, b[at].amax() + reach < x.low
        if not prune:
            surely, never = torch.zeros_like(surely), torch.zeros_like(never)
        counts[0] += surely * w[at].sum()
        alive = (~(surely | never)).any(1).nonzero()[:, 0]
        if not len(alive):
            continue
        found, formed = _blocks(bag, b, w, x.at(alive), at, (surely | never)[alive], prune)
        counts[:, alive] += found
        work += formed
    return work


def _blocks(
    bag: LayerBag, b: Tensor, w: Tensor, x: Candidates, at: slice, done: Tensor, prune: bool
) -> tuple[Tensor, int]:
    """Counts (2, m, C) over one chunk of training points, of candidates not yet done (m, C); the number of scores formed."""
    m, n_classes = x.s.shape
    c, u = bag.products(x, at)
    a, room = b[at] - c * u, bag.room(x, at)
    reach = c.abs() * bag.spread[at] + 2 * room
    top, bottom = (a + reach).view(m, -1, BLOCK).amax(2), (a - reach).view(m, -1, BLOCK).amin(2)
    open_ = (top[:, :, None] >= x.low[:, None]) & ~done[:, None]
    surely = open_ & (bottom[:, :, None] > x.high[:, None])
    w = w[at].view(-1, BLOCK)
    counts = torch.zeros(2, m, n_classes, dtype=torch.float64, device=w.device)
    if prune:
        counts[0] = torch.einsum("mbc,b->mc", surely.double(), w.sum(1))
        open_ &= ~surely
    else:
        open_ = torch.ones_like(open_)
    Q, a, c, room = bag.Q[at].view(-1, BLOCK, n_classes), *(part.view(m, -1, BLOCK) for part in (a, c, room))
    for i, j, y in zip(*(part.split(2**14) for part in open_.nonzero(as_tuple=True)), strict=True):
        alpha = a[i, j] + c[i, j] * Q[j, :, y]
        above = alpha - room[i, j] > x.high[i, y][:, None]
        tied = (alpha + room[i, j] >= x.low[i, y][:, None]) & ~above
        for into, part in zip(counts, (above, tied), strict=True):
            into.view(-1).index_add_(0, i * n_classes + y, (part * w[j]).sum(1))
    return counts, int(open_.sum()) * BLOCK
