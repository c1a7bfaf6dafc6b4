"""The generalised Gauss–Newton matrix Σ Jᵀ S J + Λ: positive semi-definite for every model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fullconformal.curvature.dense import DenseCurvature
from fullconformal.curvature.structured import dense_curvature
from fullconformal.problem import Problem
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class GGN(DenseCurvature):
    """Gauss–Newton curvature; the default for networks."""

    semidefinite = True

    def matrix(self, problem: Problem) -> Tensor:
        return dense_curvature(problem, exact=False)
