"""EK-FAC: K-FAC's eigenvectors with the eigenvalues that fit the Gauss–Newton block best in that basis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.curvature.kronecker import Basis, Kronecker
from fullconformal.curvature.layers import passes
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import tensor_cores
from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class EKFAC(Kronecker):
    """Eigenvalue-corrected Kronecker-factored curvature: of all that are diagonal in K-FAC's basis, the nearest to the GGN's block."""

    def eigenvalues(self, problem: Problem, bases: list[Basis], memory: int) -> list[Tensor]:
        """λ = Σ_n Σ_c (Vᵀ (Σ_t g aᵀ) D^-½U)², the diagonal of the Gauss–Newton block in the basis."""
        layers, like = [basis.layer for basis in bases], problem.X
        left, right = [basis.left.to(like.dtype) for basis in bases], [basis.right.to(like.dtype) for basis in bases]
        out = [torch.zeros(b.layer.o, b.layer.i, dtype=torch.float64, device=like.device) for b in bases]
        widest = max(layer.o * layer.i for layer in layers)
        with tensor_cores():
            for chunk in passes(problem, layers, memory, widest):
                _add_squares(out, *chunk, left, right)
                # Before the next is made.
                del chunk
        return out


def _add_squares(
    out: list[Tensor], inputs: list[Tensor], columns: Iterator[list[Tensor]], left: list[Tensor], right: list[Tensor]
) -> None:
    """Add Σ_n Σ_c (Vᵀ (Σ_t g aᵀ) D^-½U)² of a chunk to each layer's (o, i); the inputs (k, T, i) are turned where they are."""
    for at, R in enumerate(right):
        inputs[at] = inputs[at] @ R
    for gradients in columns:
        for total, g, V, a in zip(out, gradients, left, inputs, strict=True):
            g = g @ V
            if g.shape[1] == 1:
                total += (g[:, 0] ** 2).T @ a[:, 0] ** 2
            else:
                # The norm reads once what squares would write out again.
                total += torch.linalg.vector_norm(g.mT @ a, dim=0) ** 2
