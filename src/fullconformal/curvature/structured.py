"""The Hessian and the Gauss–Newton matrix of a chain of dense layers, one matrix product a pair of layers.

With a the inputs, δ_m = ∂ℓ/∂z_m, T_ml = ∂z_m/∂z_l, D = φ′ and S_m = ∂²ℓ/∂z_m², the block of layers l ≤ m is

    H[(i,j),(k,q)] = Σ (S_m T_ml)[i,k] a_m[j] a_l[q]  +  Σ δ_m[i] (D_{m−1} T_{m−1,l})[j,k] a_l[q]
    S_L = S of the loss               S_m = D Wᵀ S_{m+1} W D + diag(φ″ ∘ Wᵀδ_{m+1})

summed over points. Each sum is one product with the points as inner dimension and without a factor C. The Gauss–Newton matrix drops
φ″ and the second sum. Diagonal blocks are symmetric in (i,k) and in (j,q) and cost a quarter.

A model that is linear in its parameters has one block, Σ S ⊗ aaᵀ: one product of the products of two inputs, of which there are
i(i + 1)/2, with those of two outputs, o(o + 1)/2.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from fullconformal.linear.products import gram, laid_out, squares
from fullconformal.losses.relative import triangle
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import tensor_cores


def dense_curvature(problem: Problem, exact: bool) -> Tensor:
    """𝓗 (p, p) with the penalty; the rows and columns of the prefix get their Gauss–Newton part.

    Exact Hessian of the tail where `exact` is set, Gauss–Newton otherwise.
    """
    if problem.is_linear and (problem.blocks[0].o == 1 or not narrow(*problem.blocks[0][2:])):
        return linear_curvature(problem)
    pairs = _Pairs(problem, exact)
    for X, y in problem.batches(pairs.chunk):
        pairs.add(X, y)
    return pairs.matrix()


@torch.no_grad()
def linear_curvature(problem: Problem, memory: int | None = None) -> Tensor:
    """𝓗 (p, p) of a linear model with outputs z and logits f = Tz + constant: Σ TᵀST ⊗ aaᵀ, the factors in `memory` bytes."""
    (block,) = problem.blocks
    after = [layer.linear.weight for layer in problem.tail[block.layer + 1 :]]
    T = reduce(lambda T, W: W @ T, after, torch.eye(block.o, dtype=problem.X.dtype, device=problem.X.device))
    outputs, inputs = (size * (size + 1) // 2 for size in (block.o, block.i))
    H, total = problem.X.new_zeros(block.i, block.i), problem.X.new_zeros(outputs, inputs)
    room = (memory or temporary(T)) // (T.element_size() * (inputs + 3 * len(T) ** 2))
    step = max(1, min(problem.chunk, room))
    buffer = problem.X.new_empty(0 if block.o == 1 else inputs * min(step, problem.n))
    for X, _ in problem.batches(step):
        trace = problem.trace(X)
        a, weights = trace.inputs[block.layer], problem.loss.packed_curvature(trace.logits, T)
        if block.o == 1:
            # The weights are no matrices, and the sum is a square.
            H += gram(a * weights.clamp_min_(0).sqrt_().T)
        else:
            total.addmm_(weights, squares(a.T, buffer).T)
    if block.o > 1:
        H = laid_out(total, block.o, block.i)
    H.diagonal().add_(problem.penalty)
    return H


def narrow(o: int, i: int) -> bool:
    """Whether weighting the inputs by each entry of S is cheaper than forming the products of the inputs.

    Then it takes a seventh of the time at 784 inputs and 3 outputs, 40 % at 200 and 5, and five sixths at 784 and 10.
    """
    return o * (o + 1) <= i // 2


def temporary(like: Tensor) -> int:
    """Bytes for the factors of one product, on the device of a tensor."""
    return 2**32 if like.is_cuda else 2**27


class _Pairs:
    """Running sums for each pair of parameter blocks."""

    def __init__(self, problem: Problem, exact: bool):
        self.problem, self.exact = problem, exact
        self.tail = [b for b in problem.blocks if b.layer >= 0]
        self.first = problem.blocks[0] if problem.prefix_names else None
        like = problem.X
        self.width = 1
        self.sums: dict[tuple[int, int, str], Tensor] = {}
        for at, bm in enumerate(self.tail):
            for bl in self.tail[: at + 1]:
                if bm is bl and narrow(bm.o, bm.i):
                    shape = (bm.o * (bm.o + 1) // 2 * bm.i, bm.i)
                elif bm is bl:
                    # Wide rather than tall: products are a third faster.
                    shape = (bm.o * (bm.o + 1) // 2, bm.i * (bm.i + 1) // 2)
                else:
                    shape = (bm.o * bl.o, bm.i * bl.i)
                self._open((bm.layer, bl.layer, "first"), shape, like)
                if exact and bm is not bl:
                    inner = problem.tail[bm.layer].linear.in_features
                    self._open((bm.layer, bl.layer, "second"), (bm.o * bl.i, inner * bl.o), like)
        if self.first is not None:
            width = self.first.o
            self._open((-1, -1, "first"), (width, width), like)
            for b in self.tail:
                self._open((-1, b.layer, "first"), (width * b.o, b.i), like)
            # Written out, C rows a point; and of the derivatives they are made from, or a second copy, about as much.
            self.width = max(self.width, 3 * width * problem.n_classes)
        self.chunk = max(1, min(problem.chunk, temporary(like) // (self.width * like.element_size())))

    def _open(self, key: tuple[int, int, str], shape: tuple[int, int], like: Tensor) -> None:
        self.sums[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.width = max(self.width, sum(shape))

    @torch.no_grad()
    def add(self, X: Tensor, y: Tensor) -> None:
        """Add the points of one chunk."""
        trace = self.problem.trace(X, second=self.exact)
        last = len(self.problem.tail) - 1
        T = self._transitions(trace.slopes) if len(self.problem.blocks) > 1 else {}
        S = self.problem.loss.curvature(trace.logits)
        if self.first is not None:
            self._add_prefix(X, trace.logits, T, trace.inputs)
        # δ is of the Hessian only.
        delta = self.problem.loss.residual(trace.logits, y) if self.exact else trace.logits
        for m in range(last, -1, -1):
            if self.problem.tail[m].trainable:
                self._add_layer(m, S, delta, T, trace.inputs, trace.slopes)
            if m:
                W, D = self.problem.tail[m].linear.weight, trace.slopes[m - 1]
                S = (S @ W).mT @ W * D[:, :, None] * D[:, None, :]
                if self.exact:
                    back, bend = delta @ W, trace.bends[m - 1]
                    S = S if bend is None else S + torch.diag_embed(bend * back)
                    delta = back * D

    def _transitions(self, slopes: list[Tensor]) -> dict[tuple[int, int], Tensor]:
        """T_ml for l < m, (k, o_m, o_l)."""
        T: dict[tuple[int, int], Tensor] = {}
        start = self.tail[0].layer
        for m in range(start + 1, len(self.problem.tail)):
            WD = self.problem.tail[m].linear.weight * slopes[m - 1][:, None, :]
            T[m, m - 1] = WD
            for low in range(start, m - 1):
                T[m, low] = WD @ T[m - 1, low]
        return T

    def _add_layer(
        self, m: int, S: Tensor, delta: Tensor, T: dict[tuple[int, int], Tensor], a: list[Tensor], slopes: list[Tensor]
    ) -> None:
        k = len(S)
        o = torch.triu_indices(S.shape[1], S.shape[1], device=S.device)
        upper = S[:, o[0], o[1]]
        if narrow(S.shape[1], a[m].shape[1]):
            self.sums[m, m, "first"].addmm_((upper[:, :, None] * a[m][:, None, :]).view(k, -1).T, a[m])
        else:
            self.sums[m, m, "first"].addmm_(upper.T.contiguous(), squares(a[m].T).T)
        for b in self.tail:
            low = b.layer
            if low >= m:
                break
            outer = (a[m][:, :, None] * a[low][:, None, :]).view(k, -1)
            self.sums[m, low, "first"].addmm_((S @ T[m, low]).view(k, -1).T, outer)
            if self.exact:
                left = (delta[:, :, None] * a[low][:, None, :]).view(k, -1)
                D = slopes[m - 1]
                right = torch.diag_embed(D) if low == m - 1 else D[:, :, None] * T[m - 1, low]
                self.sums[m, low, "second"].addmm_(left.T, right.view(k, -1))

    def _add_prefix(self, X: Tensor, logits: Tensor, T: dict[tuple[int, int], Tensor], a: list[Tensor]) -> None:
        R = self.problem.loss.root(logits).mT
        # JᵀSJ = BᵀB.
        B = self.problem.prefix_rows(X, R)
        with tensor_cores():
            add_gram(self.sums[-1, -1, "first"], B.flatten(0, 1))
        last = len(self.problem.tail) - 1
        for b in self.tail:
            product = B.mT @ (R if b.layer == last else R @ T[last, b.layer])
            self.sums[-1, b.layer, "first"].addmm_(product.reshape(len(X), -1).T, a[b.layer])

    def matrix(self) -> Tensor:
        """The sums laid out as one symmetric matrix, penalty added; the sums are released on the way."""
        p, like = self.problem.p, self.problem.X
        H = torch.zeros(p, p, dtype=like.dtype, device=like.device)
        place = {b.layer: b for b in self.problem.blocks}
        for key in list(self.sums):
            total = self.sums.pop(key)
            bm, bl = place[key[0]], place[key[1]]
            part = H[bm.start : bm.stop, bl.start : bl.stop]
            view = H.as_strided((bm.o, bm.i, bl.o, bl.i), (p * bm.i, p, bl.i, 1), part.storage_offset())
            if bm.layer == -1 == bl.layer:
                part += total.tril_()
                part += total.tril_(-1).T
            elif bm.layer == -1:
                part += total.view(part.shape)
            elif key[2] == "second":
                view[:, : total.shape[1] // bl.o] += total.view(bm.o, bl.i, -1, bl.o).permute(0, 2, 3, 1)
            elif bm is bl and narrow(bm.o, bm.i):
                view += total.view(-1, bm.i, bm.i)[triangle(bm.o, H.device)].permute(0, 2, 1, 3)
            elif bm is bl:
                part += laid_out(total, bm.o, bm.i)
            else:
                view += total.view(bm.o, bl.o, bm.i, bl.i).permute(0, 2, 1, 3)
            if bm is not bl:
                H[bl.start : bl.stop, bm.start : bm.stop] = part.T
        H.diagonal().add_(self.problem.penalty)
        return H


def add_gram(total: Tensor, B: Tensor) -> None:
    """Add BᵀB (p, p) to the lower triangle of a total; what is above it is left as it falls."""
    # Eight stripes take 9/16 of the work of the whole.
    step = -(-len(total) // 8)
    for start in range(0, len(total), step):
        stop = min(start + step, len(total))
        total[start:stop, :stop].addmm_(B[:, start:stop].T, B[:, :stop])
