"""What every curvature gives: `factor(problem)` once, `Factor.solve(V)` many times.

Damping is added to the mean-form matrix, as in the paper: 𝓗 + n·damping·I. Left at None it is 0 where the Cholesky factorisation
succeeds, else the smallest (to within a third) that makes it succeed. A number is taken as it is: where the damped
matrix is not positive definite it is factorised by LU, the factor says so, and the caller warns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.problem import Problem


class CurvatureError(ValueError):
    """The curvature cannot be formed or factorised."""


@dataclass(frozen=True)
class Factor:
    """A factorised 𝓗, acting on rows: `solve` maps (k, p) to rows times 𝓗⁻¹.

    Positive definite: 𝓗 = L Lᵀ, and `half` is L⁻¹ so that |half(g)|² = gᵀ𝓗⁻¹g. Indefinite: P L U, and there is no half.
    """

    matrix: Tensor
    pivots: Tensor | None
    damping: float
    smallest_eigenvalue: float
    floor: float  # a lower bound of the eigenvalues that holds by construction; 0 where none is known
    inverted: bool = False  # the matrix is L⁻¹: a GPU multiplies many times faster than it solves

    @property
    def positive_definite(self) -> bool:
        return self.pivots is None

    def half(self, rows: Tensor) -> Tensor:
        """rows · L⁻ᵀ, (k, p)."""
        if self.inverted:
            return times_triangular(rows, self.matrix)
        out: Tensor = torch.linalg.solve_triangular(self.matrix.mT, rows, upper=True, left=False)
        return out

    def back(self, rows: Tensor) -> Tensor:
        """rows · L⁻¹, (k, p)."""
        if self.inverted:
            return rows @ self.matrix
        out: Tensor = torch.linalg.solve_triangular(self.matrix, rows, upper=False, left=False)
        return out

    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p)."""
        if self.pivots is None:
            return self.back(self.half(rows))
        out: Tensor = torch.linalg.lu_solve(self.matrix, self.pivots, rows.mT).mT
        return out


@dataclass(frozen=True)
class Curvature(ABC):
    """A way to form 𝓗. Subclasses say how; the factorisation is common."""

    damping: float | None = None

    @abstractmethod
    def matrix(self, problem: Problem) -> Tensor:
        """𝓗 (p, p) in sum form, penalty included, damping not."""

    #: whether the matrix without its penalty is positive semi-definite whatever the model
    semidefinite = False

    def memory(self, problem: Problem) -> int:
        """Estimate of the peak memory in bytes: the matrix, its blocks, and two float64 copies while it is factorised."""
        return problem.p**2 * (16 + 2 * problem.X.element_size())

    def factor(self, problem: Problem) -> Factor:
        """Form and factorise 𝓗 in float64; the factor is returned in the problem's dtype."""
        H = self.matrix(problem).double()
        if not torch.isfinite(H).all():
            raise CurvatureError("the curvature has entries that are not finite: the loss or the parameters overflow")
        _fix_gauge(H, problem)
        floor = float(problem.penalty.min()) if self.semidefinite else -1.0
        return factorise(H, problem.n, self.damping, floor, problem.X.dtype)


def _fix_gauge(H: Tensor, problem: Problem) -> None:
    """Add γuuᵀ along each unpenalised gauge direction u. All gradients are orthogonal to u: their products stay as they are."""
    index = problem.gauge().to(H.device)
    if index.numel():
        scale = H.diagonal()[index].mean().clamp_min(1.0)
        rows, cols = index[:, :, None].expand(-1, -1, index.shape[1]), index[:, None, :].expand(-1, index.shape[1], -1)
        H[rows, cols] += scale / index.shape[1]


def factorise(H: Tensor, n: int, damping: float | None, floor: float, dtype: torch.dtype) -> Factor:
    """Factor of H + n·damping·I; H (p, p) float64 is overwritten."""
    scale = float(H.diagonal().abs().mean()) / n
    # A pivot at rounding level is a singular matrix that happened to pass.
    least = len(H) * torch.finfo(H.dtype).eps * n * scale
    added = 0.0

    def cholesky(rung: float) -> Tensor | None:
        nonlocal added
        H.diagonal().add_(n * (rung - added))
        added = rung
        L, failed = torch.linalg.cholesky_ex(H)
        return None if failed or float(L.diagonal().min()) ** 2 <= least else L

    if damping is not None:
        rung, L = damping, cholesky(damping)
    else:
        rung, L = _smallest_that_works(cholesky, scale)
    if L is not None:
        bound = max(floor + n * rung, 0.0) if floor >= 0 else 0.0
        smallest = _smallest_eigenvalue(L)
        if not L.is_cuda:
            return Factor(L.to(dtype), None, rung, smallest, bound)
        return Factor(inverse_triangular(L).to(dtype), None, rung, smallest, bound, inverted=True)
    LU, pivots = torch.linalg.lu_factor(H)
    return Factor(LU.to(dtype), pivots, rung, _lanczos_smallest(H), 0.0)


def inverse_triangular(L: Tensor) -> Tensor:
    """L⁻¹ of a lower triangular matrix."""
    out: Tensor = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return out


def times_triangular(rows: Tensor, M: Tensor, stripes: int = 8) -> Tensor:
    """rows · Mᵀ (k, p) for a lower triangular M, at 9/16 of the operations of the whole product."""
    step = -(-len(M) // stripes)
    parts = [rows[:, : start + step] @ M[start : start + step, : start + step].mT for start in range(0, len(M), step)]
    return torch.cat(parts, dim=1)


def _smallest_that_works(cholesky: Callable[[float], Tensor | None], scale: float) -> tuple[float, Tensor]:
    """Smallest damping, to within a third, with which Cholesky succeeds: a ladder of tens, then three bisections."""
    L = cholesky(0.0)
    if L is not None:
        return 0.0, L
    for k in range(-12, 5):
        high = scale * 10.0**k
        L = cholesky(high)
        if L is not None:
            break
    else:
        raise CurvatureError("no damping up to 10,000 times the mean diagonal makes the curvature positive definite")
    low = high / 10
    for _ in range(3):
        middle = math.sqrt(low * high)
        better = cholesky(middle)
        if better is None:
            low = middle
        else:
            high, L = middle, better
    return high, L


def _smallest_eigenvalue(L: Tensor, steps: int = 4) -> float:
    """Smallest eigenvalue of LLᵀ by inverse iteration; an upper estimate, close after a few steps."""
    v = torch.randn(len(L), 1, dtype=L.dtype, device=L.device, generator=torch.Generator(L.device).manual_seed(0))
    norm = 0.0
    for _ in range(steps):
        v = torch.cholesky_solve(v / v.norm(), L)
        norm = float(v.norm())
    return 1.0 / norm if norm and math.isfinite(norm) else 0.0


def _lanczos_smallest(H: Tensor, steps: int = 60) -> float:
    """Smallest eigenvalue of a symmetric matrix by Lanczos with full reorthogonalisation; an upper estimate."""
    p = len(H)
    if p <= 500:
        return float(torch.linalg.eigvalsh(H)[0])
    Q = torch.zeros(p, steps, dtype=H.dtype, device=H.device)
    q = torch.randn(p, dtype=H.dtype, device=H.device, generator=torch.Generator(H.device).manual_seed(0))
    Q[:, 0] = q / q.norm()
    for k in range(1, steps):
        w = H @ Q[:, k - 1]
        for _ in range(2):
            w = w - Q[:, :k] @ (Q[:, :k].T @ w)
        Q[:, k] = w / w.norm()
    return float(torch.linalg.eigvalsh(Q.T @ (H @ Q))[0])
