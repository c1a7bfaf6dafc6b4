"""The interface of a loss: its value and its derivatives by the outputs of a model, for one label and for every label at once.

    ℓ(y, f)        r = ∂ℓ/∂f        S = ∂²ℓ/∂f² = BBᵀ

All functions take outputs f (k, C) of k points. A loss of labels has labels y (k,) in 0 … C − 1; every label is then a candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class NotFinite(ValueError):
    """The loss or its gradient is not finite."""


class Loss(ABC):
    """A convex, twice differentiable loss of a model's outputs."""

    #: whether ℓ stays the same when all outputs of a point are raised by the same number
    invariant = False

    @abstractmethod
    def value(self, f: Tensor, y: Tensor) -> Tensor:
        """ℓ (k,)."""

    @abstractmethod
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """r (k, C)."""

    @abstractmethod
    def curvature(self, f: Tensor) -> Tensor:
        """S (..., C, C)."""

    @abstractmethod
    def root(self, f: Tensor) -> Tensor:
        """B (..., C, C)."""

    @abstractmethod
    def leverage(self, value: Tensor, influence: Tensor) -> Tensor:
        """rᵀAr/rᵀS⁺r (k,) from ℓ (k,) and rᵀAr (k,): near 1 a point decides its own prediction."""

    def summed_curvature(self, f: Tensor) -> Tensor:
        """ΣS (C, C) over the points."""
        return self.curvature(f).sum(0)

    def packed_curvature(self, f: Tensor, T: Tensor) -> Tensor:
        """The upper triangle of TᵀST (o(o+1)/2, k), row by row, for T (C, o)."""
        k, q = torch.triu_indices(T.shape[1], T.shape[1], device=T.device)
        return (T.T @ self.curvature(f) @ T)[:, k, q].T

    # Losses of labels, for classification -----------------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """μ(f) (..., C), from which residuals are taken: r = μ − e_y."""
        raise TypeError(f"{type(self).__name__} is no loss of labels")

    def candidates(self, f: Tensor) -> Tensor:
        """ℓ (..., C) at every label."""
        raise TypeError(f"{type(self).__name__} is no loss of labels")

    def log_proba(self, f: Tensor) -> Tensor:
        """Logarithms (k, C) of the labels' probabilities."""
        raise TypeError(f"{type(self).__name__} is no loss of labels")

    def candidate_gradients(self, J: Tensor, f: Tensor) -> Tensor:
        """Jᵀr (k, C, o) at every label, from J (k, C, o)."""
        eye = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        return (self.mean(f)[:, None, :] - eye) @ J
