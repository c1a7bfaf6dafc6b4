"""K-FAC: each layer's Gauss–Newton block as a Kronecker product G ⊗ A, plus the penalty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.curvature.kronecker import Basis, Kronecker
from fullconformal.problem import Problem
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class KFAC(Kronecker):
    """Kronecker-factored curvature: 𝓗 = G ⊗ A + Λ for each Linear and Conv2d layer, nothing between layers."""

    def eigenvalues(self, problem: Problem, bases: list[Basis], memory: int) -> list[Tensor]:
        """λ = γ ⊗ α."""
        return [torch.outer(basis.gamma, basis.alpha) for basis in bases]
