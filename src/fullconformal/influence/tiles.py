"""Candidates whose ranges are alike make a tile: how they are put together, and the points that a tile meets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Candidates in a tile at most, and the operations that starting a product costs: a GPU would rather multiply more than start often.
TILE = {"cpu": (512, 1e7), "cuda": (2048, 4e9)}
Index = npt.NDArray[np.int64]


class Points(NamedTuple):
    """Points whose rows are at hand, in the order of the bag, (n,) each; `beyond` is the weight from each point on, (n + 1,)."""

    b: Tensor
    order: Tensor
    slack: Tensor
    sigma: Tensor
    weight: Tensor | None
    beyond: Tensor

    def at(self, index: Tensor | slice) -> Points:
        """Some of them."""
        weight = None if self.weight is None else self.weight[index]
        b, order, slack, sigma = (v[index] for v in (self.b, self.order, self.slack, self.sigma))
        return Points(b, order, slack, sigma, weight, from_there_on(b, weight))


class Tiles(NamedTuple):
    """Candidates in the order of their tiles, (k,); of each tile the number of candidates, the first point and the one after the last."""

    order: Index
    size: Index
    first: Index
    last: Index


def from_there_on(b: Tensor, weight: Tensor | None) -> Tensor:
    """Weight (n + 1,) of the points from each on, none at the end."""
    if weight is None:
        return torch.arange(len(b), -1, -1, dtype=torch.float64, device=b.device)
    return torch.cat([weight, weight.new_zeros(1)]).flip(0).cumsum(0).flip(0)


def cut(low: Tensor, high: Tensor, label: Tensor, p: int, fetch: int) -> Tiles:
    """Tiles of candidates of one class that share much of their ranges low … high (k,); those without points are in none.

    Wide ranges come with wide ones, neighbours with neighbours. Merging two tiles saves a start and the rows that they share, and costs
    products that neither needs. Of all ways to cut that come of halving again and again the cheapest is found from the bottom up; costs
    are in products of a candidate with a point. By NumPy, which is quicker to start.
    """
    most, operations = TILE.get(low.device.type, TILE["cpu"])
    start, (first, last, kind) = operations / (2 * p), torch.stack([low, high, label]).cpu().numpy()
    at = np.flatnonzero(last > first)
    width = np.frexp((last[at] - first[at]).astype(np.float64))[1] // 2
    order = at[np.lexsort((first[at], width, kind[at]))]
    first, last, kind = (v[order] for v in (first, last, kind))
    k, most = len(order), min(most, 1 << len(order).bit_length())
    missing = -k % most
    # Classes are so far apart that no tile reaches from one to the next; what fills up the last tile has no range.
    lows = np.concatenate([first + (kind << 40), np.full(missing, 2**60)])
    highs = np.concatenate([last + (kind << 40), np.full(missing, -(2**60))])
    least, size = start + np.maximum(highs - lows, 0) * (fetch + 1.0), np.ones(len(lows), dtype=np.int64)
    for count in (2**j for j in range(1, most.bit_length())):
        lows, highs = np.minimum(lows[::2], lows[1::2]), np.maximum(highs[::2], highs[1::2])
        whole, parts = start + np.maximum(highs - lows, 0) * float(fetch + count), least[::2] + least[1::2]
        size.reshape(-1, count)[whole < parts] = count
        least = np.minimum(whole, parts)
    begin = np.flatnonzero(np.arange(k) % size[:k] == 0)
    if not len(begin):
        return Tiles(order, begin, begin, begin)
    sizes = np.diff(begin, append=k)
    return Tiles(order, sizes, np.minimum.reduceat(first, begin), np.maximum.reduceat(last, begin))
