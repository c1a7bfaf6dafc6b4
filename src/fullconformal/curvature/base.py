"""The interface of a curvature: `factor(problem)` once, `Factor.solve(V)` many times.

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

# Parameters up to which a product costs less than a solve.
SMALL = 128


class CurvatureError(ValueError):
    """The curvature cannot be formed or factorised."""


class Halves(ABC):
    """Half-solved gradients R⁻¹g of points, made without their gradients g being written out first."""

    @abstractmethod
    def half(self, X: Tensor, labels: Tensor, scale: Tensor, out: Tensor) -> None:
        """R⁻¹g of objects with each of their labels (k, R), times scale (k, R), into the first p columns of out (k, R, ...)."""

    @abstractmethod
    def influences(self, X: Tensor, labels: Tensor) -> Tensor:
        """gᵀ𝓗⁻¹g (k, R) of objects with each of their labels (k, R); the rows themselves are never held."""


class Factor(ABC):
    """A factorised 𝓗, acting on rows: `solve` maps (k, p) to rows times 𝓗⁻¹.

    Where it is positive definite, 𝓗 = RRᵀ, `half` is R⁻¹ so that |half(g)|² = gᵀ𝓗⁻¹g, and solve = back ∘ half.
    """

    damping: float
    #: a lower bound of the eigenvalues that holds by construction; 0 where none is known
    floor: float
    #: NaN where it is not known: only diagnostics ask for it, and look for it then
    smallest_eigenvalue: float = math.nan
    #: whether there is a half
    positive_definite: bool = True

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory held."""

    @abstractmethod
    def half(self, rows: Tensor) -> Tensor:
        """rows · R⁻ᵀ, (k, p)."""

    def written_half(self, like: Tensor) -> Tensor:
        """R⁻ᵀ (p, p), for rows like (p,)."""
        return self.half(torch.eye(len(like), dtype=like.dtype, device=like.device))

    @abstractmethod
    def back(self, rows: Tensor) -> Tensor:
        """rows · R⁻¹, (k, p)."""

    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p)."""
        return self.back(self.half(rows))

    def influence(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Self-influences g𝓗⁻¹gᵀ (k,) of rows g, and the half-solved rows; 𝓗⁻¹g (k, p) where there is no half."""
        if self.positive_definite:
            half = self.half(rows)
            return torch.linalg.vector_norm(half, dim=1).square_(), half
        solved = self.solve(rows)
        return (solved * rows).sum(1), solved

    def halves(self, problem: Problem, memory: int) -> Halves | None:
        """A shorter way to half-solved gradients of points, with about `memory` bytes; None where there is none."""
        return None


@dataclass(frozen=True)
class Curvature(ABC):
    """A way to form and factorise 𝓗."""

    damping: float | None = None

    @abstractmethod
    def factor(self, problem: Problem, memory: int = 2**28) -> Factor:
        """The factorised 𝓗, with about `memory` bytes for what is not kept."""

    @abstractmethod
    def memory(self, problem: Problem) -> int:
        """Estimate in bytes of the peak: the factor, what it is made from, and a block of rows."""

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Estimate of the operations of `factor` and of the training points' self-influences."""


def check_finite(H: Tensor) -> None:
    """Raise where something overflowed."""
    if not math.isfinite(H.sum()):
        raise CurvatureError("the curvature has entries that are not finite: the loss or the parameters overflow")


def shifted_penalty(problem: Problem, damping: float | None, name: str) -> Tensor:
    """Λ + n·damping (p,) in float64, which must be positive for every parameter."""
    shift = problem.penalty.double() + problem.n * (damping or 0.0)
    if not float(shift.min()) > 0:
        free = [n for n, part in problem.unpack(shift).items() if float(part.min()) <= 0]
        raise CurvatureError(
            f"curvature={name!r} needs a penalty on every parameter, and {', '.join(free[:4])} "
            f"{'has' if len(free) == 1 else 'have'} none; give damping > 0 (or l2 > 0), or take curvature='ggn'."
        )
    return shift


def smallest_eigenvalue(solve: Callable[[Tensor], Tensor], like: Tensor, steps: int = 4) -> float:
    """Smallest eigenvalue of 𝓗 ≻ 0 by inverse iteration with rows like (p,); an upper estimate, close after a few steps."""
    v = torch.randn(1, len(like), dtype=like.dtype, device=like.device, generator=generator(like))
    norm = torch.linalg.vector_norm(v)
    for _ in range(steps):
        v = solve(v / norm)
        norm = torch.linalg.vector_norm(v)
    return 1.0 / float(norm) if norm and math.isfinite(norm) else 0.0


def generator(like: Tensor) -> torch.Generator:
    """Random numbers that are the same in every run."""
    return torch.Generator(like.device).manual_seed(0)
