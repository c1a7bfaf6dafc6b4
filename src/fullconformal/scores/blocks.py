"""Training points in blocks, which bounds decide as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.scores.base import Training

BLOCK = 64  # training points decided together, at least


class Blocks:
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

    def near(self, blocks: Tensor, tau: Tensor, s_hat: Tensor, eps: float) -> Tensor:
        """Which of the points of blocks some candidate, of τ (k, 1) and ŝ (k,), cannot be told from: places among those points."""
        reach = self.s[blocks].flatten().sqrt() * (s_hat.sqrt() * (1 + eps))[:, None]
        margin = 2 * (self.slack[blocks].flatten() + eps * tau.abs())
        return ((self.b[blocks].flatten() - tau).abs() <= reach + margin).any(0).nonzero()[:, 0]
