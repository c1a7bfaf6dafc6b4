"""Pairs of candidates and points that are too close for their products to tell which is above."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fullconformal.influence.candidates import TINY, UNIT, Candidates, written_rows
from fullconformal.influence.sources import Source
from fullconformal.influence.tiles import Points, Tiles


class Met(NamedTuple):
    """Candidates (k,), points from the given place on, and their α − τ (k, points): those farther than `least` (k,) are decided."""

    candidate: Tensor
    point: int
    excess: Tensor
    least: Tensor


class Near:
    """Pairs too close to be decided by products as they are: of float32 they are formed again, and ties are found among them."""

    def __init__(self, source: Source, made: Candidates, points: Points, room: int):
        """There is room for so many pairs."""
        self.source, self.made, self.points, self.room = source, made, points, room
        self.prepared, self.own = source.prepared, source.own(made)
        self.column = made.x * self.prepared.problem.n_classes + made.y
        self.counts = torch.zeros(2, len(made), dtype=torch.float64, device=made.x.device)
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.count = self.held = 0
        # A GPU would wait for every answer, so it is asked about many tiles at once.
        self.met: list[Met] = []
        self.waiting, self.patience = 0, room if made.x.is_cuda else 0
        p, rho = self.prepared.problem.p, made.rho
        of_score, of_product, of_point = self.own, source.error * rho, points.slack
        if made.single:
            of_score = self.own + 2 * UNIT * made.tau.abs() + p * TINY * (1 + rho)
            of_product = UNIT * (2 * source.terms + 10) * rho + p * TINY + (0.0 if made.error is None else made.error)
            of_point = points.slack + 2 * UNIT * points.b.abs()
        dtype = torch.float32 if made.single else made.tau.dtype
        #: what |α − τ| must exceed to decide is the sum of the first and the last, and the second times σ
        self.of_score, self.of_product, self.of_point, self.sigma = (
            v.to(dtype) for v in (1.02 * of_score, 1.02 * of_product, 1.02 * of_point, points.sigma)
        )

    def largest(self, tiles: Tiles) -> Tensor:
        """The largest bound (k,) of the pairs of each candidate."""
        last = torch.as_tensor(np.repeat(tiles.last - 1, tiles.size), device=self.of_score.device)
        point, sigma = (v.cummax(0).values[last] for v in (self.of_point, self.sigma))
        return torch.addcmul(point + self.of_score, sigma, self.of_product) * (1 + 2.0**-20)

    def look(self, met: Met) -> None:
        """Look for near pairs among those that met, now or with those to come."""
        if not self.patience:
            # Few candidates have such pairs.
            at = (~(met.excess.abs().amin(1) > met.least)).nonzero()[:, 0]
            if len(at):
                excess = met.excess[at]
                row, i = (~(excess.abs() > met.least[at, None])).nonzero().T
                self._keep(met.candidate[at[row]], i + met.point, excess[row, i])
            return
        self.met.append(met)
        self.waiting += met.excess.numel()
        if self.waiting > self.patience:
            self.look_again()

    def look_again(self) -> None:
        """Keep the near pairs of all that wait."""
        if not self.met:
            return
        excess = torch.cat([met.excess.view(-1) for met in self.met])
        at = torch.cat([~(met.excess.abs() > met.least[:, None]).view(-1) for met in self.met]).nonzero()[:, 0]
        # Of each tile the numbers of pairs and of candidates, up to its last and of its own.
        size, height, start = torch.tensor(
            [(met.excess.numel(), len(met.excess), met.point) for met in self.met], device=excess.device
        ).T.contiguous()
        stop, first = size.cumsum(0), height.cumsum(0) - height
        tile = torch.searchsorted(stop, at, right=True)
        place, width, excess = at - (stop - size)[tile], (size // height)[tile], excess[at]
        c = torch.cat([met.candidate for met in self.met])[first[tile] + place // width]
        self.met, self.waiting = [], 0
        self._keep(c, start[tile] + place % width, excess)

    def _keep(self, c: Tensor, i: Tensor, excess: Tensor) -> None:
        """Keep those pairs of candidates c and points i, with their α − τ, (pairs,), that are near by their own bound."""
        bound = torch.addcmul(self.of_point[i] + self.of_score[c], self.sigma[i], self.of_product[c])
        near = (~(excess.abs() > bound)).nonzero()[:, 0]
        self.pairs.append((c[near], i[near], excess[near]))
        self.count += len(near)
        self.held += len(near)
        if self.held > self.room:
            self.settle()

    def settle(self) -> None:
        """Count what is kept, ties apart, in place of the signs that were counted."""
        if not self.held:
            return
        points, rows = self.points, 4 * self.prepared.problem.p * 8 if self.made.single else 1
        step = max(1, self.prepared.memory // 16 // rows)
        for c, i, excess in zip(*(torch.cat(v).split(step) for v in zip(*self.pairs, strict=True)), strict=True):
            counted, own = ~excess.signbit(), self.own[c]
            if self.made.single:
                excess, own = self._again(c, i)
            tolerance = own + points.slack[i] + self.source.error * points.sigma[i] * self.made.rho[c]
            above, not_below = excess > tolerance, excess >= -tolerance
            parts = torch.stack([above.double() - counted.double(), (not_below & ~above).double()])
            self.counts.index_add_(1, c, parts if points.weight is None else parts * points.weight[i])
        self.pairs, self.held = [], 0

    def _again(self, c: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        """α − τ and the rounding granted to τ, (pairs,), of candidates c with points i, in the problem's precision."""
        (which, row), (whom, column) = (torch.unique(v, return_inverse=True) for v in (c, i))
        exact = self.source.make(self.made[which], single=False)
        rows, points, tau = written_rows(exact), self.source.rows(whom, single=False), exact.tau[row]
        k = torch.linalg.vecdot(rows[row], points[column])
        return self.points.b[i] - k - tau, self.source.own(exact)[row]
