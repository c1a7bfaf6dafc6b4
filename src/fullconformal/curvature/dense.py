"""Curvatures that are written out, (p, p), and factorised: 𝓗 = LLᵀ, damped where that fails."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from scipy.linalg import lapack
from torch import Tensor

from fullconformal.curvature.base import (
    Curvature,
    CurvatureError,
    Factor,
    check_finite,
    generator,
    smallest_eigenvalue,
)
from fullconformal.problem import Problem
from fullconformal.runtime.tasks import stage
from fullconformal.storage import require, savable
from fullconformal.storage.values import from_fields


@savable
@dataclass(frozen=True)
class DenseFactor(Factor):
    """𝓗 = LLᵀ where it is positive definite; P L U, without a half, where it is not."""

    matrix: Tensor
    pivots: Tensor | None
    damping: float
    floor: float
    smallest_eigenvalue: float = math.nan
    #: the matrix is L⁻¹: a GPU multiplies many times faster than it solves
    inverted: bool = False

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same again; compiled code swaps rows by the pivots, on GPUs without looking whether they are there."""
        made: Self = from_fields(cls, state)
        p = made.pivots
        require(p is None or bool(((p >= 1) & (p <= len(made.matrix))).all()), "pivots")
        return made

    @property
    def positive_definite(self) -> bool:  # type: ignore[override]
        return self.pivots is None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def half(self, rows: Tensor) -> Tensor:
        """rows · L⁻ᵀ, (k, p)."""
        if self.inverted:
            return rows @ self.matrix.mT
        out: Tensor = torch.linalg.solve_triangular(self.matrix, rows.mT, upper=False).mT
        return out

    def written_half(self, like: Tensor) -> Tensor:
        """L⁻ᵀ (p, p)."""
        return (self.matrix if self.inverted else inverse_triangular(self.matrix.clone())).mT

    def back(self, rows: Tensor) -> Tensor:
        """rows · L⁻¹, (k, p)."""
        if self.inverted:
            return rows @ self.matrix
        out: Tensor = torch.linalg.solve_triangular(self.matrix.mT, rows.mT, upper=True).mT
        return out

    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p)."""
        if self.pivots is None:
            return super().solve(rows)
        out: Tensor = torch.linalg.lu_solve(self.matrix, self.pivots, rows.mT).mT
        return out


@dataclass(frozen=True)
class DenseCurvature(Curvature):
    """A curvature whose matrix is written out. Subclasses say how; the factorisation is common."""

    #: whether the matrix without its penalty is positive semi-definite whatever the model
    semidefinite = False

    @abstractmethod
    def matrix(self, problem: Problem) -> Tensor:
        """𝓗 (p, p) in sum form, penalty included, damping not."""

    def memory(self, problem: Problem) -> int:
        """The matrix, its blocks, and two float64 copies while it is factorised."""
        return problem.p**2 * (16 + 2 * problem.X.element_size())

    def flops(self, problem: Problem) -> float:
        n, p = float(problem.n), float(problem.p)
        width = problem.blocks[0].o if problem.prefix_names else 0
        return n * p**2 + 2 * n * problem.n_classes * width**2 + p**3 / 3 + n * p**2

    def factor(self, problem: Problem, memory: int = 2**28) -> DenseFactor:
        """Form and factorise 𝓗 in float64; the factor is returned in the problem's dtype."""
        with stage("curvature"):
            H = self.matrix(problem).double()
        return self.factor_of(H, problem)

    def factor_of(self, H: Tensor, problem: Problem) -> DenseFactor:
        """Factorise 𝓗 (p, p), float64, which is overwritten."""
        check_finite(H)
        fix_gauge(H, problem.gauge())
        floor = float(problem.penalty.min()) if self.semidefinite else -1.0
        return factorise(H, problem.n, self.damping, floor, problem.X.dtype)


def fix_gauge(H: Tensor, index: Tensor) -> None:
    """Add γuuᵀ along each unpenalised gauge direction u of index (g, C). Gradients are orthogonal to u: products stay as they are."""
    if index.numel():
        index = index.to(H.device)
        scale = H.diagonal()[index].mean().clamp_min(1.0)
        rows, cols = index[:, :, None].expand(-1, -1, index.shape[1]), index[:, None, :].expand(-1, index.shape[1], -1)
        H[rows, cols] += scale / index.shape[1]


@stage("factor")
def factorise(H: Tensor, n: int, damping: float | None, floor: float, dtype: torch.dtype) -> DenseFactor:
    """Factor of H + n·damping·I; H (p, p) float64 is overwritten."""
    scale = float(H.diagonal().abs().mean()) / n
    # A pivot at rounding level is a singular matrix that happened to pass.
    least = len(H) * torch.finfo(H.dtype).eps * n * scale
    lowest = float(H.diagonal().min())
    added = 0.0

    def cholesky(rung: float) -> Tensor | None:
        nonlocal added
        H.diagonal().add_(n * (rung - added))
        added = rung
        # LAPACK's columns of Lᵀ are rows of L: this and solves with it wait less often for one another's threads.
        R, failed = torch.linalg.cholesky_ex(H, upper=True)
        return None if failed or float(R.diagonal().min()) ** 2 <= least else R.mT

    if damping is not None:
        rung, L = damping, cholesky(damping)
    else:
        # No pivot exceeds its diagonal entry, which tells what no smaller damping can do: where the loss does not know a parameter that
        # nothing penalises, such as the bias of a dead unit, this is the smallest that works.
        rung, L = _smallest_that_works(cholesky, scale, 1.1 * max(0.0, least - lowest) / n)
    if L is not None:
        R = inverse_triangular(L) if L.is_cuda else L
        # Sums and the factorisation may leave eigenvalues below those that the penalty grants: (n + p)u of the trace in float64, while
        # those of sums in float32 are looked at.
        smallest, bound = math.nan, floor + n * rung - (n + len(H)) * torch.finfo(H.dtype).eps / 2 * n * scale * len(H)
        if dtype != torch.float64:
            smallest = smallest_eigenvalue(
                lambda v: (v @ R.mT) @ R if L.is_cuda else torch.cholesky_solve(v.mT, L.mT, upper=True).mT, L[0]
            )
            bound = min(floor + n * rung, smallest)
        return DenseFactor(R.to(dtype), None, rung, max(bound, 0.0) if floor >= 0 else 0.0, smallest, L.is_cuda)
    LU, pivots, singular = torch.linalg.lu_factor_ex(H)
    if singular:
        raise CurvatureError(f"the curvature is singular with damping={rung:g}; leave damping=None, or give more.")
    return DenseFactor(LU.to(dtype), pivots, rung, 0.0, _lanczos_smallest(H))


def inverse_triangular(L: Tensor) -> Tensor:
    """L⁻¹ of a lower triangular matrix, which may be overwritten.

    A large one by LAPACK, in a third of the operations and in place; its threads would be in the way of torch's where that takes no time.
    """
    if not L.is_cuda and len(L) >= 1024:
        invert = lapack.dtrtri if L.dtype == torch.float64 else lapack.strtri
        return torch.from_numpy(invert(L.mT.numpy(), lower=0, overwrite_c=1)[0]).mT
    out: Tensor = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return out


def _smallest_that_works(
    cholesky: Callable[[float], Tensor | None], scale: float, least: float
) -> tuple[float, Tensor]:
    """Smallest damping, to within a third, with which Cholesky succeeds: `least`, or by a ladder of tens and three bisections."""
    L = cholesky(least)
    if L is not None:
        return least, L
    for k in range(-12, 5):
        high = scale * 10.0**k
        L = cholesky(high) if high > least else None
        if L is not None:
            break
    else:
        raise CurvatureError("no damping up to 10,000 times the mean diagonal makes the curvature positive definite")
    low = max(high / 10, least)
    for _ in range(3):
        # Not √(low·high), which may overflow.
        middle = math.sqrt(low) * math.sqrt(high)
        better = cholesky(middle)
        if better is None:
            low = middle
        else:
            high, L = middle, better
    return high, L


def _lanczos_smallest(H: Tensor, steps: int = 60) -> float:
    """Smallest eigenvalue of a symmetric matrix by Lanczos with full reorthogonalisation; an upper estimate."""
    p = len(H)
    if p <= 500:
        return float(torch.linalg.eigvalsh(H)[0])
    Q = torch.zeros(p, steps, dtype=H.dtype, device=H.device)
    q = torch.randn(p, dtype=H.dtype, device=H.device, generator=generator(H))
    Q[:, 0] = q / q.norm()
    for k in range(1, steps):
        w = H @ Q[:, k - 1]
        for _ in range(2):
            w = w - Q[:, :k] @ (Q[:, :k].T @ w)
        Q[:, k] = w / w.norm()
    return float(torch.linalg.eigvalsh(Q.T @ (H @ Q))[0])
