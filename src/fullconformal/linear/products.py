"""Products of two features: sums of S ⊗ xxᵀ over points, and quadratic forms xᵀNx, as matrix products.

A weighted Gram matrix Σ w xxᵀ is linear in the weights and a quadratic form is linear in N. With the products of the features of each
point laid out once, either is one matrix product for any number of columns of weights. Symmetric matrices are packed: the entries i ≤ j,
row by row (`pairs`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fullconformal.losses.relative import pairs, triangle


def squares(x: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Products of two features, (d(d+1)/2, k), of points x (d, k); on a CPU in a buffer."""
    d, k = x.shape
    if x.is_cuda:  # one kernel rather than d
        (i, j), _ = pairs(d, x.device)
        return x[i] * x[j]
    size = d * (d + 1) // 2 * k
    rows, out = x.contiguous(), (x.new_empty(size) if buffer is None else buffer[:size]).view(-1, k)
    for row, part in enumerate(out.split(list(range(d, 0, -1)))):
        torch.mul(rows[row:], rows[row], out=part)
    return out


def places(outer: int, inner: int, device: torch.device) -> Tensor:
    """Where the entries (a, b), (a', b') of a sum of A ⊗ B are among the packed pairs (a, a'), (b, b'): ((outer·inner)²,)."""
    a, b = triangle(outer, device), triangle(inner, device)  # not kept: layers may be wide
    return (a[:, None, :, None] * (inner * (inner + 1) // 2) + b[None, :, None, :]).flatten()


def laid_out(total: Tensor, outer: int, inner: int) -> Tensor:
    """A sum of A ⊗ B as a matrix (outer·inner, outer·inner) from both triangles packed, (outer pairs, inner pairs)."""
    at = places(outer, inner, total.device)
    return total.reshape(-1).index_select(0, at).view(outer * inner, outer * inner)


def gram(B: Tensor) -> Tensor:
    """BᵀB (p, p). NumPy sees the symmetry, which halves the work; torch does not."""
    if B.device.type != "cpu" or B.dtype not in (torch.float32, torch.float64):
        return B.T @ B
    array = B.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told by the factorisation
        return torch.from_numpy(array.T @ array)


class Products:
    """Weighted sums of the products of features of points x (d, n), in their precision.

    Products are kept where they take no more than ``memory`` bytes. Up to ``few`` columns meet the features one by one: making the
    products costs as much as about 8 columns, where they are made anew each time as about 100.
    """

    def __init__(self, x: Tensor, few: tuple[int, int] = (8, 100), memory: int = 2**28) -> None:
        (self.d, self.n), self.x = x.shape, x
        self.step = max(1, memory // (4 * self.d * (self.d + 1)))
        self.few = few[self.step < self.n]
        self.kept: Tensor | None = None

    def gram(self, W: Tensor) -> Tensor:
        """Σ_i w_i x_i x_iᵀ, packed (d(d+1)/2, J), for columns of weights W (n, J)."""
        i, j = pairs(self.d, W.device)[0]
        if W.shape[1] <= self.few:
            return torch.stack([((self.x * w) @ self.x.T)[i, j] for w in W.T], 1)
        out = W.new_zeros(len(i), W.shape[1])
        for rows, P in self._slices():
            out.addmm_(P, W[rows])
        return out

    def quadratic(self, N: Tensor) -> Tensor:
        """Σ_{i≤j} N_ij x_i x_j (n, J) for columns of packed N (d(d+1)/2, J)."""
        if N.shape[1] > self.few:
            return torch.cat([P.T @ N for _, P in self._slices()])
        (i, j), full = pairs(self.d, N.device)[0], N.new_zeros(self.d, self.d)
        out = N.new_empty(N.shape[1], self.n)
        for one, into in zip(N.T, out, strict=True):
            full[i, j] = one
            torch.sum((full @ self.x).mul_(self.x), 0, out=into)
        return out.T

    def _slices(self) -> Iterator[tuple[slice, Tensor]]:
        """Products (d(d+1)/2, k) for slices of the points."""
        if self.step < self.n:
            for start in range(0, self.n, self.step):
                yield slice(start, start + self.step), squares(self.x[:, start : start + self.step])
            return
        if self.kept is None:
            self.kept = squares(self.x)
        yield slice(0, self.n), self.kept
