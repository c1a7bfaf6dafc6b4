"""Candidates' rows, which meet the points' rows in products: half-solved gradients L⁻¹ĝ, in the problem's precision or rounded to float32.

Rows in float32 are rounded from the problem's precision, in which ŝ and τ are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullconformal.curvature.base import SMALL
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import candidate_gradients
from fullconformal.problem import Problem, Rows, flat, select, squared_norms

UNIT = 2.0**-24  # of float32's rounding
TINY, HUGE = 2.0**-120, 2.0**60  # which its exponents hold with room to spare
OBJECTS = 128  # whose rows are made together, so that they stay in the cache


@dataclass(frozen=True)
class Candidates:
    """Candidates of objects x with labels y: ℓ̂, ŝ or a bound of it, and the lowest τ there may be, (k,) each; once made, rows (k, p).

    Rows that are gradients may be left as outer products, which are written out when they meet points.
    """

    x: Tensor
    y: Tensor
    loss: Tensor
    influence: Tensor
    tau: Tensor
    rows: Tensor | list[Rows] | None = None
    #: what rows in float32 are off by, besides rounding, (k,); ŝ is then an upper bound, and τ off by as much
    error: Tensor | None = None
    #: rows that were rounded to float32, as they were, and the place (k,) of each candidate among them
    whole: tuple[Tensor, Tensor] | None = None

    @property
    def single(self) -> bool:
        """Whether rows are rounded to float32, and nothing else is."""
        rows = self.rows[0].left if isinstance(self.rows, list) else self.rows
        return rows is not None and rows.dtype == torch.float32 != self.tau.dtype

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor | slice) -> Candidates:
        """Some of them."""
        return Candidates(*(_some(part, index) for part in vars(self).values()))

    @property
    def rho(self) -> Tensor:
        """√ŝ (k,), or an upper bound."""
        return self.influence.sqrt()


def _some(part: Any, index: Tensor | slice) -> Any:
    """Those of a part of candidates at the given positions."""
    if part is None:
        return None
    if isinstance(part, tuple):
        return part[0], part[1][index]
    return select(part, index) if isinstance(part, list) else part[index]


def every_candidate(prepared: Prepared, X: Tensor, q: float) -> Candidates:
    """Every label of objects X (m, ...), object by object, with ŝ ≤ |ĝ|²/floor: nothing is solved for."""
    problem, floor = prepared.problem, prepared.factor.floor
    # Gradients are not written out: an object takes the derivatives of C logits by each layer's outputs, and the layer's inputs.
    layers = [layer.linear.weight.shape for layer in problem.tail] + [(b.o, b.i) for b in problem.blocks if b.layer < 0]
    numbers = sum(problem.n_classes * o + i for o, i in layers)
    step = max(1, min(problem.chunk, prepared.memory // 16 // (4 * max(numbers, 1) * X.element_size())))
    losses, bounds = [], []
    for part in X.split(step):
        if is_bounded(prepared):
            logits, J = problem.jacobian(part)
            bounds.append(squared_norms(candidate_gradients(problem.loss, J, logits)).flatten() / floor)
        else:
            logits = problem.logits(part)
            bounds.append(logits.new_full((logits.numel(),), torch.inf))
        losses.append(problem.loss.candidates(logits).flatten())
    loss, bound = torch.cat(losses), torch.cat(bounds)
    at = torch.arange(len(loss), device=X.device)
    return Candidates(at // problem.n_classes, at % problem.n_classes, loss, bound, lowest(loss, bound, q))


def is_bounded(prepared: Prepared) -> bool:
    """Whether ŝ is bounded before anything is solved for: where that costs less than solving for all."""
    return prepared.factor.floor > 0 and prepared.problem.p > SMALL


def lowest(loss: Tensor, s_hat: Tensor, q: float) -> Tensor:
    """τ = ℓ̂ − (1−q)ŝ (k,)."""
    return loss if q == 1 else loss - (1 - q) * s_hat


def with_rows(found: Candidates, rows: Tensor | None, s_hat: Tensor, q: float, single: bool = False) -> Candidates:
    """With rows that are as good as the problem's precision, rounded to float32 where that is asked for, and ŝ (k,)."""
    found = replace(found, influence=s_hat, tau=lowest(found.loss, s_hat, q), error=None)
    if rows is None or not single:
        return replace(found, rows=rows, whole=None)
    return replace(found, rows=rows.float(), whole=(rows, torch.arange(len(rows), device=rows.device)))


def written_rows(made: Candidates, index: Tensor | slice = slice(None)) -> Tensor:
    """Rows (k, p) of those at the given positions."""
    assert made.rows is not None
    return flat(select(made.rows, index)) if isinstance(made.rows, list) else made.rows[index]


def by_object(problem: Problem, X: Tensor, found: Candidates) -> tuple[Tensor, list[Rows]]:
    """The place (k,) of each candidate's object among those asked about, and gradients (objects, C, o) ⊗ (objects, i) of all labels."""
    objects, at = torch.unique(found.x, return_inverse=True)
    logits, J = problem.jacobian(X[objects])
    return at, candidate_gradients(problem.loss, J, logits)


def written(prepared: Prepared, X: Tensor, found: Candidates) -> Tensor:
    """Gradients ĝ (k, p) written out."""
    return flat(prepared.problem.gradients(X[found.x], found.y))


def solved_one_by_one(prepared: Prepared, X: Tensor, found: Candidates, q: float, single: bool) -> Candidates:
    """L⁻¹ĝ by one half-solve for each candidate."""
    half = prepared.factor.half(written(prepared, X, found))
    s_hat = torch.linalg.vector_norm(half, dim=1).square_()
    return with_rows(found, half, s_hat, q, single)


def root_pays(prepared: Prepared, found: Candidates) -> bool:
    """Whether L⁻ᵀ, written out, makes rows of all labels of the candidates' objects with fewer operations than half-solves."""
    problem, p = prepared.problem, prepared.problem.p
    if problem.prefix_names or p <= SMALL or p**2 * problem.X.element_size() > prepared.memory // 8:
        return False
    write = 0 if getattr(prepared.factor, "inverted", False) else p
    return len(found) >= 2 * len(torch.unique(found.x)) + write


#: L⁻ᵀ for each parameter block and output: the part (i, p − start) from the first column that is not all zero, and where that is
Root = list[list[tuple[int, Tensor]]]


def written_root(prepared: Prepared) -> Root:
    """L⁻ᵀ written out, cut so that an object's a meets it once for all labels; of a triangular one half is zero."""
    root, out = prepared.factor.written_half(prepared.problem.theta), []
    for block in prepared.problem.blocks:
        parts = root[block.start : block.stop].view(block.o, block.i, -1)
        starts = (parts != 0).any(1).int().argmax(1).tolist()
        out.append([(start, part[:, start:].contiguous()) for start, part in zip(starts, parts, strict=True)])
    return out


def solved_by_root(
    prepared: Prepared, root: Root, X: Tensor, found: Candidates, q: float, single: bool, short: bool = True
) -> Candidates:
    """L⁻¹ĝ = Σ D·V over blocks of parameters with ĝ = D ⊗ a and V = a·root, the same for all labels of an object: 2p² operations.

    In float32 V is rounded and summed over the o outputs: that errs by less than u(o + 3)·Σ_o |D_o||V_o|.
    A unit that no point wakes has a huge V_o, and D_o = 0. Along directions of hardly any curvature, such as a unit's weights before and
    after it, which scale one another, huge V cancel: where the first objects' do, rows are not `short`, but rounded once they are made.
    """
    problem, C = prepared.problem, prepared.problem.n_classes
    at, every = by_object(problem, X, found)
    count = len(every[0].left)
    short, outputs = short and single, sum(b.o for b in problem.blocks)
    dtype, unit = torch.float32 if short else X.dtype, 1.01 * UNIT * (outputs + 3)
    rows = torch.empty(len(found), problem.p, dtype=dtype, device=X.device)
    s_hat, error = torch.empty_like(found.loss), torch.zeros_like(found.loss)
    order = torch.argsort(at, stable=True)  # candidates by object
    ends = torch.arange(0, count + OBJECTS, OBJECTS, device=X.device)
    sizes = torch.searchsorted(at[order], ends).diff().tolist()
    # Where all labels of all objects are asked for, in order, they are written where they belong.
    whole = len(found) == C * count and torch.equal(found.y, torch.arange(C, device=X.device).repeat(count))
    for start, mine in zip(range(0, count, OBJECTS), order.split(sizes), strict=True):
        ghat = select(every, slice(start, start + OBJECTS))
        k = len(ghat[0].left)
        half = rows[C * start : C * (start + k)].view(k, C, -1).zero_() if whole else rows.new_zeros(k, C, problem.p)
        off = X.new_zeros(k, C)
        for (D, a), parts in zip(ghat, root, strict=True):
            assert a is not None  # there is no prefix
            first = min(column for column, _ in parts)
            V = half.new_zeros(k, len(parts), problem.p - first)
            for output, (column, part) in enumerate(parts):
                V[:, output, column - first :] = a @ part
            half[..., first:].baddbmm_(D.to(dtype), V)
            if short:
                off += (D.abs() @ torch.linalg.vector_norm(V, dim=2).to(D.dtype)[:, :, None])[..., 0]
        own = at[mine] - start, found.y[mine]
        length = torch.linalg.vector_norm(half, dim=2).to(X.dtype)
        # Where most rows err by so much of their length, too many pairs would be left to float64.
        if short and not start and bool((unit * off > 2.0**-8 * length).double().mean() > 0.5):
            return solved_by_root(prepared, root, X, found, q, single, short=False)
        s_hat[mine], error[mine] = length.square()[own], unit * off[own]
        if not whole:
            rows[mine] = half[own]
    if not short:
        return with_rows(found, rows, s_hat, q, single)
    # Norms in float32 err too.
    error += 1.01 * UNIT * problem.p**0.5 * s_hat.sqrt() + problem.p * TINY
    return replace(with_rows(found, rows, (s_hat.sqrt() + error).square(), q), error=error)
