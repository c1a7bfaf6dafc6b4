"""The squared loss of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.losses.base import Loss
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class Squared(Loss):
    """ℓ = ½|f − y|², for targets y (k, C)."""

    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """½|f − y|² (k,)."""
        return (f - y).square().sum(-1) / 2

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """f − y (k, C)."""
        return f - y

    def curvature(self, f: Tensor) -> Tensor:
        """The identity (..., C, C)."""
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])

    root = curvature

    def leverage(self, value: Tensor, influence: Tensor) -> Tensor:
        """s/2ℓ (k,)."""
        return influence / (2 * value).clamp_min(torch.finfo(value.dtype).eps)


SQUARED = Squared()
