"""The Gauss–Newton matrix by its products alone: conjugate gradients, preconditioned by the diagonal, many rows at once.

Stops when |r|² ≤ δ²·floor·bᵀx for every row: floor ≤ λ_min and bᵀx ≤ bᵀ𝓗⁻¹b make that a bound of the error, |x − 𝓗⁻¹b|_𝓗 ≤ δ|𝓗⁻¹b|_𝓗.
There is no half, so the self-influence of every training point is a solve of its own: for moderate n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from fullconformal.curvature.base import Curvature, CurvatureError, Factor, shifted_penalty, softmax_root
from fullconformal.problem import Problem, Rows, softmax_curvature, summed

BATCH = 64  # right-hand sides that share a pass over the bag


@dataclass(frozen=True)
class CGFactor(Factor):
    """Products with 𝓗 and a preconditioner."""

    product: Callable[[Tensor], Tensor]
    diagonal: Tensor  # of 𝓗, (p,)
    max_iterations: int
    work: float
    damping: float
    smallest_eigenvalue: float
    floor: float
    accuracy: float = 0.0
    origin: tuple[CG, Problem, int] | None = None  # what it was made of
    has_half = False
    travels = False

    def __reduce__(self) -> Any:
        """Products are functions, which cannot be pickled: made again."""
        return CG.factor, self.origin

    @property
    def nbytes(self) -> int:
        return self.diagonal.nbytes

    @property
    def flops(self) -> float:
        return self.work

    def half(self, rows: Tensor) -> Tensor:
        """There is none."""
        raise NotImplementedError("conjugate gradients have no half of a solve; use `influence` and `solve`")

    back = half

    @torch.no_grad()
    def solve(self, rows: Tensor) -> Tensor:
        """rows · 𝓗⁻¹, (k, p), to the accuracy promised."""
        return torch.cat([self._solve(part) for part in rows.split(BATCH)]) if len(rows) else rows.clone()

    def _solve(self, b: Tensor) -> Tensor:
        x, r = torch.zeros_like(b), b.clone()
        z = r / self.diagonal
        d, rho = z, (r * z).sum(1)
        for _ in range(self.max_iterations):
            q = self.product(d)
            curved = (d * q).sum(1)
            step = torch.where(curved > 0, rho / curved.clamp_min(torch.finfo(b.dtype).tiny), 0)[:, None]
            x, r = x + step * d, r - step * q
            if bool(((r**2).sum(1) <= self.accuracy**2 * self.floor * (b * x).sum(1)).all()):
                return x
            z = r / self.diagonal
            rho, last = (r * z).sum(1), rho
            d = z + (rho / last.clamp_min(torch.finfo(b.dtype).tiny))[:, None] * d
        raise CurvatureError(
            f"conjugate gradients did not come within {self.accuracy:g} in {self.max_iterations} iterations; raise l2 or damping, give "
            "curvature=CG(tolerance=…, max_iterations=…), or dtype='float64'."
        )


@dataclass(frozen=True)
class CG(Curvature):
    """Gauss–Newton curvature without its matrix.

    Parameters
    ----------
    damping : float, optional
    tolerance : float, optional
        Relative error of a solve in the norm of 𝓗; by default 1e-8 in float64 and 1e-3 in float32.
    max_iterations : int, default=1000
    """

    tolerance: float | None = None
    max_iterations: int = 1000

    def factor(self, problem: Problem, memory: int = 2**28) -> CGFactor:
        shift = shifted_penalty(problem, self.damping, "cg")
        floor = float(shift.min())
        shift = shift.to(problem.X.dtype)
        double = problem.X.dtype == torch.float64
        tolerance = self.tolerance if self.tolerance is not None else (1e-8 if double else 1e-3)
        diagonal = shift + _diagonal(problem, memory)
        # The floor stands for the smallest eigenvalue, which solves alone would find slowly.
        product = ggn_product(problem, memory)
        return CGFactor(
            lambda rows: product(rows) + shift * rows, diagonal, self.max_iterations,
            self._work(problem), self.damping or 0.0, floor, floor, tolerance, (self, problem, memory),
        )  # fmt: skip

    def _work(self, problem: Problem) -> float:
        """Operations of one solve, taken as 100 passes over the bag: a guess, since conditioning decides."""
        return 100.0 * 6 * problem.n * problem.p

    def memory(self, problem: Problem) -> int:
        """A few vectors for each row of a batch."""
        return 8 * BATCH * problem.p * problem.X.element_size()

    def flops(self, problem: Problem) -> float:
        return problem.n * self._work(problem)


def ggn_product(problem: Problem, memory: int) -> Callable[[Tensor], Tensor]:
    """The map of rows (k, p) to rows · Σ JᵀSJ: from factored Jacobians where all layers are dense, else by derivatives of the model."""
    if not problem.prefix_names and problem.n * problem.n_classes * sum(b.o for b in problem.blocks) < memory // 32:
        return _factored_product(problem)
    theta, numbers = problem.theta, 4 * _activations(problem) * problem.X.element_size()

    def product(rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for X in problem.X.split(max(1, min(problem.chunk, memory // (numbers * len(rows))))):
            S = softmax_curvature(problem.logits(X))
            out += _pushed_and_pulled(problem, theta, X, S, rows)
        return out

    return product


def _pushed_and_pulled(problem: Problem, theta: Tensor, X: Tensor, S: Tensor, rows: Tensor) -> Tensor:
    """rows · JᵀSJ of one chunk, (k, p), by a forward and a reverse derivative each."""

    def logits(theta: Tensor) -> Tensor:
        return problem.logits_at(theta, X)

    pull = vjp(logits, theta)[1]

    def one(v: Tensor) -> Tensor:
        Jv = jvp(logits, (theta,), (v,))[1]
        out: Tensor = pull((S @ Jv[..., None])[..., 0])[0]
        return out

    return vmap(one)(rows)


def _factored_product(problem: Problem) -> Callable[[Tensor], Tensor]:
    """The same where the Jacobian is (n, C, o) ⊗ (n, i) in every layer, and kept so."""
    logits, J = problem.jacobian(problem.X)
    S, n = softmax_curvature(logits), problem.n

    def product(rows: Tensor) -> Tensor:
        k = len(rows)
        Jv = torch.zeros(n, S.shape[1], k, dtype=rows.dtype, device=rows.device)
        for (T, a), b in zip(J, problem.blocks, strict=True):
            assert a is not None
            V = rows[:, b.start : b.stop].reshape(k * b.o, b.i)
            Jv += T @ (a @ V.T).view(n, k, b.o).mT
        SJv, parts = S @ Jv, []
        for T, a in J:
            assert a is not None
            parts.append(((T.mT @ SJv).flatten(1).T @ a).view(T.shape[2], k, -1).transpose(0, 1).flatten(1))  # (k, o·i)
        return torch.cat(parts, dim=1)

    return product


@torch.no_grad()
def _activations(problem: Problem) -> int:
    """Numbers that one point leaves in the model: the sizes of what its modules return."""
    sizes: list[int] = []
    handles = [
        part.register_forward_hook(
            lambda module, args, out: sizes.append(out.numel() if isinstance(out, Tensor) else 0)
        )
        for part in problem.model.modules()
    ]
    try:
        problem.model(problem.X[:1])
    finally:
        for handle in handles:
            handle.remove()
    return max(1, sum(sizes))


@torch.no_grad()
def _diagonal(problem: Problem, memory: int) -> Tensor:
    """Diagonal (p,) of Σ JᵀSJ."""
    total = torch.zeros_like(problem.penalty)
    numbers = 3 * problem.n_classes * sum(b.o for b in problem.blocks)
    for X in problem.X.split(max(1, min(problem.chunk, memory // (numbers * total.element_size())))):
        logits, J = problem.jacobian(X)
        B = softmax_root(logits).mT
        total += summed([Rows(((B @ left) ** 2).sum(1), None if a is None else a**2) for left, a in J])
    return total
