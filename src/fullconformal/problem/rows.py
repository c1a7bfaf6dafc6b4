"""Gradients and Jacobians of many points as rows, one for each block of parameters, outer products not written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows left ⊗ right of one parameter block: left (k, o) or (k, C, o), right (k, i), or None where i = 1 and right = 1."""

    left: Tensor
    right: Tensor | None


def select(rows: Sequence[Rows], index: Tensor | slice) -> list[Rows]:
    """The rows at the given positions."""
    return [Rows(left[index], None if right is None else right[index]) for left, right in rows]


def join(parts: list[list[Rows]]) -> list[Rows]:
    """Rows of consecutive points put together."""
    if len(parts) == 1:
        return parts[0]
    return [
        Rows(
            torch.cat([r.left for r in block]), None if block[0].right is None else torch.cat([r.right for r in block])
        )
        for block in zip(*parts, strict=True)
    ]


def flat(rows: Sequence[Rows]) -> Tensor:
    """Rows written out: (k, p), or (k, C, p) from Jacobians."""
    blocks = []
    for left, right in rows:
        if right is None:
            blocks.append(left)
        elif left.ndim == 2:
            blocks.append((left[:, :, None] * right[:, None, :]).flatten(1))
        else:
            blocks.append((left[..., None] * right[:, None, None, :]).flatten(2))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def summed(rows: Sequence[Rows]) -> Tensor:
    """The sum (p,) of gradients' rows written out."""
    parts = [left.sum(0) if right is None else (left.T @ right).reshape(-1) for left, right in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def squared_norms(rows: Sequence[Rows]) -> Tensor:
    """Squared length of each row: (k,) of gradients, (k, C) of Jacobians."""
    total = torch.zeros((), dtype=rows[0].left.dtype, device=rows[0].left.device)
    for left, right in rows:
        own = (left**2).sum(-1)
        total = total + (own if right is None else own * (right**2).sum(-1).view(-1, *[1] * (own.ndim - 1)))
    return total
