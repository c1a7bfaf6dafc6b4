"""The Gauss–Newton matrix from the side of the data: exact, for few points and many parameters (n·C < p).

With B = S^½ J Λ^-½ (nC, p) and BBᵀ = U diag(κ) Uᵀ, Woodbury's identity for the symmetric root is

    𝓗 = Λ^½ (I + BᵀB) Λ^½        (I + BᵀB)^-½ = I − BᵀU diag(1/(√(1+κ)(1 + √(1+κ)))) UᵀB

All in float64, whatever the model is in: the difference leaves 1/√(1+κ) of what is in B's rows, and κ = 10⁸ is nothing unusual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.curvature.base import Curvature, Factor, check_finite, shifted_penalty
from fullconformal.problem import Problem, flat
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class DualFactor(Factor):
    """half and back are (I + BᵀB)^-½ and Λ^-½, in one order and the other."""

    B: Tensor  # (nC, p), float64
    inner: Tensor  # (nC, nC), float64
    root: Tensor  # Λ^½ (p,), float64
    damping: float
    floor: float

    @property
    def nbytes(self) -> int:
        return self.B.nbytes + self.inner.nbytes

    def _apply(self, rows: Tensor) -> Tensor:
        return rows - (rows @ self.B.T) @ self.inner @ self.B

    def half(self, rows: Tensor) -> Tensor:
        """rows · Λ^-½ (I + BᵀB)^-½, (k, p)."""
        return self._apply(rows / self.root).to(rows.dtype)

    def back(self, rows: Tensor) -> Tensor:
        """rows · (I + BᵀB)^-½ Λ^-½, (k, p)."""
        return (self._apply(rows.double()) / self.root).to(rows.dtype)


@savable
@dataclass(frozen=True)
class Dual(Curvature):
    """Gauss–Newton curvature by Woodbury's identity; needs a penalty on every parameter, and n·C·p numbers of memory."""

    @torch.no_grad()
    def factor(self, problem: Problem, memory: int = 2**28) -> DualFactor:
        shift = shifted_penalty(problem, self.damping, "dual")
        root = shift.sqrt()
        C, p, like = problem.n_classes, problem.p, problem.X
        B = torch.empty(problem.n * C, p, dtype=torch.float64, device=like.device)
        chunk = max(1, min(problem.chunk, memory // (3 * C * p * B.element_size())))
        for start in range(0, problem.n, chunk):
            logits, J = problem.jacobian(like[start : start + chunk])
            part = problem.loss.root(logits).mT @ flat(J)
            B[start * C : start * C + len(logits) * C] = part.flatten(0, 1) / root
        K = B @ B.T
        check_finite(K)
        kappa, U = torch.linalg.eigh(K)
        tall = (1 + kappa.clamp_min(0)).sqrt()
        inner = (U / (tall * (1 + tall))) @ U.T
        return DualFactor(B, inner, root, self.damping or 0.0, float(shift.min()))

    def memory(self, problem: Problem) -> int:
        """B, four matrices of its products while they are decomposed, and a block of rows."""
        rows = problem.n * problem.n_classes
        return 8 * rows * problem.p + 32 * rows**2 + 48 * problem.n_classes * problem.p

    def flops(self, problem: Problem) -> float:
        rows, p = float(problem.n * problem.n_classes), float(problem.p)
        return 2 * rows**2 * p + 10 * rows**3 + problem.n * (4 * rows * p + 2 * rows**2)
