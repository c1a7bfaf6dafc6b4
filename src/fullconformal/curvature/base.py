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

SMALL = 128  # parameters up to which a product costs less than a solve
MANY = 8  # points a parameter from which it does so with up to LARGE
LARGE, IDLE = 4096, 16  # parameters up to which a copy of 𝓗 costs nothing; one in so many must be idle for it to pay


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

    Where there is a half, 𝓗 = RRᵀ, `half` is R⁻¹ so that |half(g)|² = gᵀ𝓗⁻¹g, and solve = back ∘ half.
    """

    damping: float
    smallest_eigenvalue: float
    floor: float  # a lower bound of the eigenvalues that holds by construction; 0 where none is known
    positive_definite: bool = True
    has_half: bool = True
    travels: bool = True  # whether it can go to another process, without the training points
    accuracy: float = 0.0  # bound of |solve(g) − 𝓗⁻¹g| relative to |𝓗⁻¹g|, in the norm of 𝓗; 0: rounding only

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory held."""

    @property
    @abstractmethod
    def flops(self) -> float:
        """Operations of half a solve, one row."""

    @abstractmethod
    def half(self, rows: Tensor) -> Tensor:
        """rows · R⁻ᵀ, (k, p)."""

    @abstractmethod
    def back(self, rows: Tensor) -> Tensor:
        """rows · R⁻¹, (k, p)."""

    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p)."""
        return self.back(self.half(rows))

    def influence(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Self-influences g𝓗⁻¹gᵀ (k,) of rows g, and what `solved` makes 𝓗⁻¹g of at no more than half a solve, (k, p)."""
        if self.has_half:
            half = self.half(rows)
            return torch.linalg.vector_norm(half, dim=1).square_(), half
        solved = self.solve(rows)
        return (solved * rows).sum(1), solved

    def halves(self, problem: Problem, memory: int) -> Halves | None:
        """A shorter way to half-solved gradients of points, with about `memory` bytes; None where there is none."""
        return None

    def solved(self, kept: Tensor) -> Tensor:
        """rows · 𝓗⁻¹ from what `influence` returned second."""
        return self.back(kept) if self.has_half else kept


@dataclass(frozen=True)
class DenseFactor(Factor):
    """𝓗 = LLᵀ where it is positive definite; P L U, without a half, where it is not."""

    matrix: Tensor
    pivots: Tensor | None
    damping: float
    smallest_eigenvalue: float
    floor: float
    inverted: bool = False  # the matrix is L⁻¹: a GPU multiplies many times faster than it solves, and so does a CPU where p is small
    # Parameters that meet no other in 𝓗, such as those of a dead unit, are divided by the roots of their diagonal entries, (idle,), and
    # are last in this order (p,) of the half-solved; the matrix is that of the others.
    order: Tensor | None = None
    roots: Tensor | None = None

    @property
    def positive_definite(self) -> bool:  # type: ignore[override]
        return self.pivots is None

    @property
    def has_half(self) -> bool:  # type: ignore[override]
        return self.pivots is None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def flops(self) -> float:
        return float(len(self.matrix)) ** 2

    def half(self, rows: Tensor) -> Tensor:
        """rows · L⁻ᵀ, (k, p)."""
        if self.order is None or self.roots is None:
            return self._half(rows)
        columns, p = rows.mT.index_select(0, self.order), len(self.matrix)
        return torch.cat([self._half(columns[:p].mT).mT, columns[p:] / self.roots[:, None]]).mT

    def back(self, rows: Tensor) -> Tensor:
        """rows · L⁻¹, (k, p)."""
        if self.order is None or self.roots is None:
            return self._back(rows)
        p = len(self.matrix)
        columns = torch.cat([self._back(rows[:, :p]).mT, rows[:, p:].mT / self.roots[:, None]])
        return columns.index_select(0, self.order.argsort()).mT

    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p)."""
        if self.pivots is None:
            return self.back(self.half(rows))
        out: Tensor = torch.linalg.lu_solve(self.matrix, self.pivots, rows.mT).mT
        return out

    def _half(self, rows: Tensor) -> Tensor:
        if self.inverted:
            return times_triangular(rows, self.matrix)
        out: Tensor = torch.linalg.solve_triangular(self.matrix.mT, rows, upper=True, left=False)
        return out

    def _back(self, rows: Tensor) -> Tensor:
        if self.inverted:
            return rows @ self.matrix
        out: Tensor = torch.linalg.solve_triangular(self.matrix, rows, upper=False, left=False)
        return out


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
        return self.factor_of(self.matrix(problem).double(), problem)

    def factor_of(self, H: Tensor, problem: Problem) -> DenseFactor:
        """Factorise 𝓗 (p, p), float64, which is overwritten."""
        check_finite(H)
        fix_gauge(H, problem.gauge())
        floor = float(problem.penalty.min()) if self.semidefinite else -1.0
        return factorise(H, problem.n, self.damping, floor, problem.X.dtype)


def check_finite(H: Tensor) -> None:
    """Raise where something overflowed."""
    if not math.isfinite(H.sum()):
        raise CurvatureError("the curvature has entries that are not finite: the loss or the parameters overflow")


def fix_gauge(H: Tensor, index: Tensor) -> None:
    """Add γuuᵀ along each unpenalised gauge direction u of index (g, C). Gradients are orthogonal to u: products stay as they are."""
    if index.numel():
        index = index.to(H.device)
        scale = H.diagonal()[index].mean().clamp_min(1.0)
        rows, cols = index[:, :, None].expand(-1, -1, index.shape[1]), index[:, None, :].expand(-1, index.shape[1], -1)
        H[rows, cols] += scale / index.shape[1]


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


def softmax_root(logits: Tensor) -> Tensor:
    """B = diag(√π) − π√πᵀ, (k, C, C), with BBᵀ = diag(π) − ππᵀ."""
    root = torch.softmax(logits, dim=-1).sqrt()
    return torch.diag_embed(root) - (root**2)[..., :, None] * root[..., None, :]


def smallest_eigenvalue(solve: Callable[[Tensor], Tensor], like: Tensor, steps: int = 4) -> float:
    """Smallest eigenvalue of 𝓗 ≻ 0 by inverse iteration with rows like (p,); an upper estimate, close after a few steps."""
    v = torch.randn(1, len(like), dtype=like.dtype, device=like.device, generator=_generator(like))
    norm = torch.linalg.vector_norm(v)
    for _ in range(steps):
        v = solve(v / norm)
        norm = torch.linalg.vector_norm(v)
    return 1.0 / float(norm) if norm and math.isfinite(norm) else 0.0


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)


def factorise(H: Tensor, n: int, damping: float | None, floor: float, dtype: torch.dtype) -> DenseFactor:
    """Factor of H + n·damping·I; H (p, p) float64 is overwritten."""
    scale = float(H.diagonal().abs().mean()) / n
    # A pivot at rounding level is a singular matrix that happened to pass.
    least = len(H) * torch.finfo(H.dtype).eps * n * scale
    lowest = float(H.diagonal().min())
    meeting, idle = meeting_and_idle(H)
    A, rest = H[meeting][:, meeting] if len(idle) else H, H.diagonal()[idle]
    added = 0.0

    def cholesky(rung: float) -> Tensor | None:
        nonlocal added
        A.diagonal().add_(n * (rung - added))
        added = rung
        if len(rest) and float(rest.min()) + n * rung <= least:
            return None
        L, failed = torch.linalg.cholesky_ex(A)
        return None if failed or float(L.diagonal().min()) ** 2 <= least else L

    if damping is not None:
        rung, L = damping, cholesky(damping)
    else:
        # No pivot exceeds its diagonal entry, which tells what no smaller damping can do: where the loss does not know a parameter that
        # nothing penalises, such as the bias of a dead unit, this is the smallest that works.
        rung, L = _smallest_that_works(cholesky, scale, 1.1 * max(0.0, least - lowest) / n)
    if L is not None:
        inverted = len(L) <= SMALL or L.is_cuda or (n >= MANY * len(L) and len(L) <= LARGE)
        R = inverse_triangular(L) if inverted else L
        smallest = smallest_eigenvalue(lambda v: (v @ R.mT) @ R if inverted else torch.cholesky_solve(v.mT, L).mT, L[0])
        moved = {}
        if len(rest):
            smallest = min(smallest, float(rest.min()) + n * rung)
            moved = {"order": torch.cat([meeting, idle]), "roots": (rest + n * rung).sqrt().to(dtype)}
        # A matrix summed in float32 may have eigenvalues below those that the penalty grants it.
        bound = min(floor + n * rung, smallest) if floor >= 0 else 0.0
        return DenseFactor(R.to(dtype), None, rung, smallest, bound, inverted=inverted, **moved)
    if A is not H:
        H.diagonal().add_(n * rung)
    LU, pivots, singular = torch.linalg.lu_factor_ex(H)
    if singular:
        raise CurvatureError(f"the curvature is singular with damping={rung:g}; leave damping=None, or give more.")
    return DenseFactor(LU.to(dtype), pivots, rung, _lanczos_smallest(H), 0.0)


def meeting_and_idle(H: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters that meet others in 𝓗 (p, p), and those that do not; none of these where leaving them out would not pay."""
    p = len(H)
    idle = torch.zeros(p, dtype=torch.bool, device=H.device)
    if SMALL < p <= LARGE:
        idle = torch.count_nonzero(H, dim=1) == (H.diagonal() != 0)
    if not p <= IDLE * int(idle.sum()) < IDLE * p:
        idle[:] = False
    return (~idle).nonzero()[:, 0], idle.nonzero()[:, 0]


def inverse_triangular(L: Tensor) -> Tensor:
    """L⁻¹ of a lower triangular matrix."""
    out: Tensor = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return out


def times_triangular(rows: Tensor, M: Tensor, stripes: int = 4, chunk: int = 1024) -> Tensor:
    """rows · Mᵀ (k, p) for a lower triangular M, at 5/8 of the operations of the whole product, in chunks that stay in the cache."""
    if len(M) <= SMALL:
        return rows @ M.mT
    out, step, chunk = torch.empty_like(rows), -(-len(M) // stripes), len(rows) if rows.is_cuda else chunk
    for start in range(0, len(M), step):
        stop = min(start + step, len(M))
        for part, into in zip(rows[:, :stop].split(chunk), out[:, start:stop].split(chunk), strict=True):
            torch.mm(part, M[start:stop, :stop].mT, out=into)
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
        middle = math.sqrt(low * high)
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
    q = torch.randn(p, dtype=H.dtype, device=H.device, generator=_generator(H))
    Q[:, 0] = q / q.norm()
    for k in range(1, steps):
        w = H @ Q[:, k - 1]
        for _ in range(2):
            w = w - Q[:, :k] @ (Q[:, :k].T @ w)
        Q[:, k] = w / w.norm()
    return float(torch.linalg.eigvalsh(Q.T @ (H @ Q))[0])
