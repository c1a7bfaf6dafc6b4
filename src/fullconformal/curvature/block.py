"""The Gauss–Newton matrix with everything between layers left out: one dense block a layer, never the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.curvature.base import Curvature, CurvatureError, Factor, check_finite, softmax_root
from fullconformal.curvature.dense import DenseFactor, factorise, fix_gauge
from fullconformal.problem import Problem, Rows


@dataclass(frozen=True)
class BlockFactor(Factor):
    """A dense factor a block."""

    places: list[slice]
    factors: list[DenseFactor]
    damping: float
    smallest_eigenvalue: float
    floor: float

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for factor in self.factors)

    @property
    def flops(self) -> float:
        return sum(factor.flops for factor in self.factors)

    def half(self, rows: Tensor) -> Tensor:
        """rows · L⁻ᵀ, block by block, (k, p)."""
        return torch.cat(
            [factor.half(rows[:, place]) for place, factor in zip(self.places, self.factors, strict=True)], dim=1
        )

    def back(self, rows: Tensor) -> Tensor:
        """rows · L⁻¹, block by block, (k, p)."""
        return torch.cat(
            [factor.back(rows[:, place]) for place, factor in zip(self.places, self.factors, strict=True)], dim=1
        )


@dataclass(frozen=True)
class BlockGGN(Curvature):
    """Gauss–Newton curvature of each module's own parameters, nothing between modules; any kind of module."""

    def factor(self, problem: Problem, memory: int = 2**28) -> BlockFactor:
        places = module_slices(problem)
        blocks = _blocks(problem, places, memory)
        gauge = problem.gauge()
        if gauge.numel():
            fix_gauge(blocks[-1], gauge - places[-1].start)

        def parts(damping: float | None) -> list[DenseFactor]:
            floors = [float(problem.penalty[place].min()) for place in places]
            return [
                factorise(H.clone(), problem.n, damping, floor, problem.X.dtype)
                for H, floor in zip(blocks, floors, strict=True)
            ]

        found = parts(self.damping)
        damping = max(factor.damping for factor in found)
        if any(factor.damping != damping for factor in found):  # one for the whole, the largest that a block needs
            found = parts(damping)
        if not all(factor.positive_definite for factor in found):
            raise CurvatureError(
                f"a layer's block is as good as singular with damping={damping:g}; leave damping=None, or give more."
            )
        floor, smallest = (min(getattr(f, name) for f in found) for name in ("floor", "smallest_eigenvalue"))
        return BlockFactor(places, found, max(f.damping for f in found), smallest, floor)

    def memory(self, problem: Problem) -> int:
        """The blocks as `DenseCurvature` has its one."""
        squares: int = sum((place.stop - place.start) ** 2 for place in module_slices(problem))
        size = problem.X.element_size()
        return squares * (24 + size) + 6 * problem.n_classes * problem.p * size

    def flops(self, problem: Problem) -> float:
        n, prefix = float(problem.n), sum(problem.params[name].numel() for name in problem.prefix_names)
        total = 0.0
        for place in module_slices(problem):
            w = float(place.stop - place.start)
            total += 2 * n * w * w * (problem.n_classes if place.stop <= prefix else 1) + w**3 / 3 + n * w * w
        return total


def module_slices(problem: Problem) -> list[slice]:
    """Where each module's own parameters lie in the flat vector."""
    owner: dict[str, list[int]] = {}
    at = 0
    for name in problem.prefix_names:
        size = problem.params[name].numel()
        owner.setdefault(name.rpartition(".")[0], []).extend((at, at + size))
        at += size
    return [slice(min(ends), max(ends)) for ends in owner.values()] + [
        slice(b.start, b.stop) for b in problem.blocks if b.layer >= 0
    ]


@torch.no_grad()
def _blocks(problem: Problem, places: list[slice], memory: int) -> list[Tensor]:
    """Diagonal blocks of 𝓗, float64, penalty included."""
    sums = [torch.diag(problem.penalty[place].double()) for place in places]
    size, C = problem.X.element_size(), problem.n_classes
    width = problem.blocks[0].o if problem.prefix_names else 0
    numbers = 3 * C * width + max([0, *(b.o**2 + b.i**2 + C * b.o for b in problem.blocks if b.layer >= 0)])
    for X in problem.X.split(max(1, min(problem.chunk, memory // (numbers * size)))):
        logits, J = problem.jacobian(X)
        B = softmax_root(logits)
        rows = [Rows(B.mT @ left, right) for left, right in J]
        at = 0
        for H, place in zip(sums, places, strict=True):
            if place.start < width:
                part = rows[0].left[:, :, place].flatten(0, 1)
                H += part.T @ part
            else:
                left, right = rows[bool(width) + at]
                assert right is not None
                S, aa = left.mT @ left, right[:, :, None] * right[:, None, :]
                product = S.flatten(1).T @ aa.flatten(1)
                H += product.view(S.shape[1], S.shape[1], *aa.shape[1:]).permute(0, 2, 1, 3).reshape(H.shape)
                at += 1
    for H in sums:
        check_finite(H)
    return sums
