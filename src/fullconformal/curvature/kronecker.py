"""What K-FAC and EK-FAC share: for each layer a product basis in which 𝓗 is diagonal, found from two small matrices.

    A = mean of a aᵀ (i, i)        G = Σ_n Σ_t Σ_c g gᵀ (o, o)        over positions t, and the C columns of S^½ ("type 2", "expand")
    D = Λ + n·damping of each column        D^-½ A D^-½ = U diag(α) Uᵀ        G = V diag(γ) Vᵀ

    𝓗 ≈ (I ⊗ D^½)(V ⊗ U) (diag(λ) + I) (V ⊗ U)ᵀ(I ⊗ D^½)

K-FAC takes λ = γ ⊗ α, so that 𝓗 = G ⊗ A + I ⊗ D to the letter; EK-FAC takes the second moments in that basis. Either way the penalty
and the damping enter exactly, biases may have another penalty than weights, and no layer needs more than its own two matrices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fullconformal.curvature.base import Curvature, Factor, Halves, check_finite, shifted_penalty
from fullconformal.curvature.layers import KEPT, Layer, Place, joined, passes, positions, pulled, read_layers, record
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import full_precision, tensor_cores
from fullconformal.storage import savable


@dataclass(frozen=True)
class Basis:
    """A layer's product basis: left V (o, o) with γ (o,), right D^-½U (i, i) with α (i,); float64."""

    layer: Layer
    left: Tensor
    gamma: Tensor
    right: Tensor
    alpha: Tensor


@savable
@dataclass(frozen=True)
class Part:
    """A layer's part of the factor: its place, left V (o, o), right D^-½U (i, i), and (λ+1)^-½ (o, i)."""

    place: Place
    left: Tensor
    right: Tensor
    scale: Tensor

    def half(self, a: Tensor, delta: Tensor) -> Tensor:
        """(λ+1)^-½ ∘ (Vᵀ (Σ_t δ_t a_tᵀ) D^-½U), (k, R, o, i), from inputs (k, T, i) and gradients of outputs (k, R, T, o).

        A side is turned before the sum over positions where it has fewer rows then, else after.
        """
        k, R, T, o = delta.shape
        a_first, delta_first = R * o >= T, self.place.i >= T
        a = a @ self.right if a_first else a
        delta = delta @ self.left if delta_first else delta
        M = delta.mT.reshape(k, R * o, T) @ a
        M = M if a_first else M @ self.right
        M = M.view(k, R, o, -1)
        M = M if delta_first else self.left.T @ M
        return M.mul_(self.scale)


@dataclass(frozen=True)
class LayerHalves(Halves):
    """Half-solved gradients straight from the layers: one pass forward, one back for each label, then one product a layer."""

    problem: Problem
    layers: list[Layer]
    parts: list[Part]
    positions: list[int]
    memory: int

    def half(self, X: Tensor, labels: Tensor, scale: Tensor, out: Tensor) -> None:
        """Rows as `KroneckerFactor.half` has them, times scale (k, R), into out (k, R, ...)."""
        for at, part, M in self._matrices(X, labels):
            out[at, :, part.place.slice] = M.mul_(scale[at, :, None, None]).flatten(2)
            # Before the next is made.
            del M

    def influences(self, X: Tensor, labels: Tensor) -> Tensor:
        """Squared lengths (k, R), layer by layer."""
        out = torch.zeros(labels.shape, dtype=X.dtype, device=X.device)
        for at, _, M in self._matrices(X, labels):
            out[at] += torch.linalg.vector_norm(M, dim=(2, 3)) ** 2
            # Before the next is made.
            del M
        return out

    def _matrices(self, X: Tensor, labels: Tensor) -> Iterator[tuple[slice, Part, Tensor]]:
        """Half-solved gradients (k, R, o, i) of each layer, for slices of the objects."""
        R, C = labels.shape[1], self.problem.n_classes
        chunk = self._chunk(R)
        for at in (slice(start, start + chunk) for start in range(0, len(X), chunk)):
            with full_precision():
                logits, given, returned = record(self.problem, self.layers, X[at])
                every = logits.detach().repeat_interleave(R, 0)
                E = self.problem.loss.residual(every, labels[at].reshape(-1)).view(-1, R, C)
                columns = list(pulled(self.layers, logits, returned, E))
            # And with them what the passes kept.
            del logits, returned
            for k, (layer, part) in enumerate(zip(self.layers, self.parts, strict=True)):
                with full_precision():
                    a = joined([layer.inputs(x) for x in given[k]])
                    M = part.half(a, torch.stack([column[k] for column in columns], dim=1))
                del a
                yield at, part, M
                del M
            # Before those of the next objects are made.
            del given, columns

    def _chunk(self, R: int) -> int:
        """Points that go together: what the passes keep, the gradients of R labels, and a layer's inputs and matrices."""
        sizes = [(T, part.place.o, part.place.i) for T, part in zip(self.positions, self.parts, strict=True)]
        outputs = sum(T * o for T, o, _ in sizes)
        # A layer's inputs and gradients, both turned or not yet, and its matrices, twice where they are turned themselves.
        layer = max(2 * T * (i + R * o) + R * o * i * (1 if R * o >= T and i >= T else 2) for T, o, i in sizes)
        numbers = R * outputs + max(KEPT * outputs, 2 * outputs + layer)
        return max(1, min(self.problem.chunk, self.memory // (numbers * self.problem.X.element_size())))


@savable
@dataclass(frozen=True)
class KroneckerFactor(Factor):
    """𝓗 diagonal in a product basis, layer by layer: half maps a gradient (o, i) to (λ+1)^-½ ∘ (VᵀG D^-½U)."""

    parts: list[Part]
    damping: float
    floor: float

    @property
    def nbytes(self) -> int:
        return sum(part.left.nbytes + part.right.nbytes + part.scale.nbytes for part in self.parts)

    def half(self, rows: Tensor) -> Tensor:
        """rows in the basis, scaled, (k, p)."""
        out = torch.empty_like(rows)
        for part in self.parts:
            M = part.left.T @ part.place.matrices(rows) @ part.right
            out[:, part.place.slice] = (M * part.scale).flatten(1)
        return out

    def halves(self, problem: Problem, memory: int) -> LayerHalves:
        """Half-solved gradients of points, from their passes through the layers."""
        layers = read_layers(problem)
        return LayerHalves(problem, layers, self.parts, positions(problem, layers), memory)

    def back(self, rows: Tensor) -> Tensor:
        """Scaled rows of the basis as gradients, (k, p)."""
        out = torch.empty_like(rows)
        for part in self.parts:
            place = part.place
            M = rows[:, place.slice].view(-1, place.o, place.i) * part.scale
            out[:, place.slice] = place.flat(part.left @ M @ part.right.T)
        return out


@dataclass(frozen=True)
class Kronecker(Curvature):
    """A curvature that is diagonal in the product basis; subclasses give its eigenvalues there."""

    @abstractmethod
    def eigenvalues(self, problem: Problem, bases: list[Basis], memory: int) -> list[Tensor]:
        """λ (o, i) of each layer, float64, for 𝓗 without D."""

    def factor(self, problem: Problem, memory: int = 2**28) -> KroneckerFactor:
        layers = read_layers(problem)
        pairs = kronecker_factors(problem, layers, memory)
        damping = self._damping(problem, pairs)
        bases = []
        for layer, (A, G) in zip(layers, pairs, strict=True):
            # Λ of the layer's columns (i,): one number for the weights and one for the bias.
            penalty = layer.place.matrices(problem.penalty[None])[0, 0].double()
            root = (penalty + problem.n * damping).sqrt()
            alpha, U = torch.linalg.eigh(A / root[:, None] / root)
            gamma, V = torch.linalg.eigh(G)
            bases.append(Basis(layer, V, gamma.clamp_min(0), U / root[:, None], alpha.clamp_min(0)))
        dtype, parts = problem.X.dtype, []
        for basis, values in zip(bases, self.eigenvalues(problem, bases, memory), strict=True):
            scale = (values + 1).rsqrt()
            parts.append(Part(basis.layer.place, basis.left.to(dtype), basis.right.to(dtype), scale.to(dtype)))
        return KroneckerFactor(parts, damping, float(problem.penalty.min()) + problem.n * damping)

    def _damping(self, problem: Problem, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """The damping asked for; by default 0 where every parameter has a penalty, else just enough to divide by it."""
        if self.damping is not None:
            shifted_penalty(problem, self.damping, type(self).__name__.lower())
            return self.damping
        if float(problem.penalty.min()) > 0:
            return 0.0
        mean = sum(float(A.trace() * G.trace()) for A, G in pairs) / problem.p
        eps: float = torch.finfo(problem.X.dtype).eps
        return float(max(mean, eps) / problem.n * eps**0.5)

    def memory(self, problem: Problem) -> int:
        """Three float64 copies of the two matrices of each layer while they are decomposed, the factor, and six rows a label."""
        size = problem.X.element_size()
        squares = sum(layer.o**2 + layer.i**2 for layer in read_layers(problem))
        return squares * (24 + size) + problem.p * (8 + size + 6 * problem.n_classes * size)

    def flops(self, problem: Problem) -> float:
        """Forward and C backward passes, the two matrices, their decompositions, and a half-solve a point."""
        layers, C = read_layers(problem), problem.n_classes
        total = 0.0
        for layer, T in zip(layers, positions(problem, layers), strict=True):
            o, i = float(layer.o), float(layer.i)
            total += problem.n * 2 * (T * (i * i + C * (o * o + 2 * o * i)) + o * i * (o + i)) + 10 * (o**3 + i**3)
        return total


def kronecker_factors(problem: Problem, layers: list[Layer], memory: int) -> list[tuple[Tensor, Tensor]]:
    """A (i, i) and G (o, o) of each layer, float64, summed over one pass through the bag."""
    new = partial(torch.zeros, dtype=torch.float64, device=problem.X.device)
    sums = [(new(layer.i, layer.i), new(layer.o, layer.o)) for layer in layers]
    with tensor_cores():
        for chunk in passes(problem, layers, memory):
            _add_moments(sums, *chunk)
            # Before the next is made.
            del chunk
    for A, G in sums:
        check_finite(A)
        check_finite(G)
        A /= problem.n
    return sums


def _add_moments(sums: list[tuple[Tensor, Tensor]], inputs: list[Tensor], columns: Iterator[list[Tensor]]) -> None:
    """Add Σ aaᵀ/T (i, i) and Σ ggᵀ (o, o) of a chunk's inputs (k, T, i) and gradients (k, T, o) to each layer's sums."""
    for (A, _), a in zip(sums, inputs, strict=True):
        flat = a.flatten(0, 1)
        A += flat.T @ flat / a.shape[1]
    inputs.clear()
    for gradients in columns:
        for (_, G), g in zip(sums, gradients, strict=True):
            flat = g.flatten(0, 1)
            G += flat.T @ flat
