"""Counting on a GPU: the scores of all training points against all candidates, formed in registers and never stored.

With a_ix = b_i − c_ix·u_ix the score of point i against candidate (x, y) is a_ix + c_ix·Q_iy. A program holds a tile of Q, points × labels,
and goes through the objects. The points are sorted, so a tile's scores lie close together: `top` and `bottom`, bounds of a block's
scores against an object, settle most tiles by one comparison with the extreme thresholds of the tile's labels.

Written in Triton, which comes with PyTorch for CUDA. Import this module only where it is to be used: Triton takes its time.
"""

# mypy: ignore-errors
# The bodies of kernels are Triton's language, which has no types to check.

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # the kernels below then exist, but cannot run
    triton = tl = None

    def jit(function):
        return function


@jit
def _bounds(c, u, b, slack, spread, w, v, a, top, bottom, n, POINTS: tl.constexpr, BLOCKS: tl.constexpr):
    """a = b − c·u, and the largest and smallest score of a block of points against an object, whatever the label."""
    x = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    i = block[:, None] * POINTS + tl.arange(0, POINTS)[None, :]
    real = i < n
    at = x * n + i
    factor = tl.load(c + at, mask=real, other=0.0)
    value = tl.load(b + i, mask=real, other=0.0) - factor * tl.load(u + at, mask=real, other=0.0)
    tl.store(a + at, value, mask=real)
    room = tl.load(slack + i, mask=real, other=0.0) + tl.load(v + x) * tl.load(w + i, mask=real, other=0.0)
    reach = tl.abs(factor) * tl.load(spread + i, mask=real, other=0.0) + 2 * room
    into = x * (n // POINTS) + block
    tl.store(top + into, tl.max(value + reach, 1), mask=block < n // POINTS)
    tl.store(bottom + into, tl.min(value - reach, 1), mask=block < n // POINTS)


@jit
def _count(
    Q, a, c, slack, w, v, top, bottom, low, high, lowest, highest, greater, not_below, n, m, n_classes,
    POINTS: tl.constexpr, LABELS: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    """Add one tile's counts against every object: a + cQ − room > high, and a + cQ + room ≥ low, room = slack + w·v."""
    block, tile = tl.program_id(0), tl.program_id(1)
    i = block * POINTS + tl.arange(0, POINTS)
    y = tile * LABELS + tl.arange(0, LABELS)
    real = y < n_classes
    q = tl.load(Q + i.to(tl.int64)[:, None] * n_classes + y[None, :], mask=real[None, :], other=0.0)
    fixed, growing = tl.load(slack + i), tl.load(w + i)
    for step in range(m):
        # Programs that run together add to different counters.
        x = (step + block) % m
        row = x.to(tl.int64) * n
        some, all_ = True, False
        if PRUNE:
            edge = x * tl.num_programs(1) + tile
            at = x * tl.num_programs(0) + block
            some = tl.load(top + at) >= tl.load(lowest + edge)
            all_ = tl.load(bottom + at) > tl.load(highest + edge)
        if some:
            into = x * n_classes + y
            if all_:
                whole = tl.full([LABELS], POINTS, tl.int32)
                tl.atomic_add(greater + into, whole, mask=real, sem="relaxed")
                tl.atomic_add(not_below + into, whole, mask=real, sem="relaxed")
            else:
                base, factor = tl.load(a + row + i), tl.load(c + row + i)
                room = fixed + growing * tl.load(v + x)
                product = factor[:, None] * q
                above = (base - room)[:, None] + product > tl.load(high + into, mask=real, other=0.0)[None, :]
                reaching = (base + room)[:, None] + product >= tl.load(low + into, mask=real, other=0.0)[None, :]
                k = tl.sum(above.to(tl.int32), 0)
                tl.atomic_add(greater + into, k, mask=real & (k > 0), sem="relaxed")
                k = tl.sum(reaching.to(tl.int32), 0)
                tl.atomic_add(not_below + into, k, mask=real & (k > 0), sem="relaxed")


def count(
    Q: Tensor,
    b: Tensor,
    slack: Tensor,
    spread: Tensor,
    w: Tensor,
    c: Tensor,
    u: Tensor,
    v: Tensor,
    low: Tensor,
    high: Tensor,
    prune: bool = True,
    points: int = 64,
    labels: int = 64,
    warps: int = 1,
) -> tuple[Tensor, Tensor]:
    """Numbers (m, C) of points surely above, and of those not below, each candidate's interval [low, high] (m, C).

    Q (n, C), b, slack, w and spread = max_y|Q_iy| (n,), c and u (m, n), v (m,), all float32 and contiguous; n a multiple of
    `points`. A point's score may be wrong by slack + w·v. u is overwritten.

    A tile is of points × labels, and some warps share it: as they are, the fastest of 44 on an H200.
    """
    (n, n_classes), m = Q.shape, len(c)
    # Blocks of points whose bounds one program forms.
    blocks = 16
    tiles = -(-n_classes // labels)
    top, bottom = c.new_empty(2, m, n // points)
    grid = -(-n // (points * blocks)), m
    _bounds[grid](c, u, b, slack, spread, w, v, u, top, bottom, n, POINTS=points, BLOCKS=blocks, num_warps=4)
    pad = (0, tiles * labels - n_classes)
    lowest = torch.nn.functional.pad(low, pad, value=torch.inf).view(m, tiles, labels).amin(2)
    highest = torch.nn.functional.pad(high, pad, value=-torch.inf).view(m, tiles, labels).amax(2)
    greater, not_below = torch.zeros(2, m, n_classes, dtype=torch.int32, device=Q.device)
    _count[(n // points, tiles)](
        Q, u, c, slack, w, v, top, bottom, low, high, lowest, highest, greater, not_below, n, m, n_classes,
        POINTS=points, LABELS=labels, PRUNE=prune, num_warps=warps,
    )  # fmt: skip
    return greater, not_below
