"""Candidates' rows, which meet the points' rows in products: half-solved gradients L⁻¹ĝ, in the problem's precision or in float32.

In float32 each row comes with a bound of its error, and so does ŝ, which other schemes than the deleted have in τ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fullconformal.curvature.base import SMALL
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import candidate_gradients
from fullconformal.problem import flat, select, squared_norms

UNIT = 2.0**-24  # of float32's rounding
TINY, HUGE = 2.0**-120, 2.0**60  # which its exponents hold with room to spare
OBJECTS = 128  # whose rows are made together, so that they stay in the cache


@dataclass(frozen=True)
class Candidates:
    """Candidates of objects x with labels y: ℓ̂, ŝ or a bound of it, and the lowest τ there may be, (k,) each; once made, rows (k, p).

    Rows in float32 are off by no more than `error`, and τ by no more than `off`, (k,) each.
    """

    x: Tensor
    y: Tensor
    loss: Tensor
    influence: Tensor
    tau: Tensor
    rows: Tensor | None = None
    error: Tensor | None = None
    off: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor | slice) -> Candidates:
        """Some of them."""
        parts = [getattr(self, field.name) for field in fields(self)]
        some: list[Any] = [None if part is None else part[index] for part in parts]
        return Candidates(*some)

    @property
    def rho(self) -> Tensor:
        """√ŝ (k,), or an upper bound."""
        return self.influence.sqrt()


def every_candidate(prepared: Prepared, X: Tensor, q: float) -> Candidates:
    """Every label of objects X (m, ...), object by object, with ŝ ≤ |ĝ|²/floor: nothing is solved for."""
    problem, floor = prepared.problem, prepared.factor.floor
    step = max(1, prepared.memory // 16 // (4 * problem.n_classes * problem.p * X.element_size()))
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


def with_rows(found: Candidates, rows: Tensor | None, s_hat: Tensor, q: float) -> Candidates:
    """With rows that are as good as the problem's precision, and ŝ (k,)."""
    return replace(found, rows=rows, influence=s_hat, tau=lowest(found.loss, s_hat, q))


def written(prepared: Prepared, X: Tensor, found: Candidates) -> Tensor:
    """Gradients ĝ (k, p) written out."""
    return flat(prepared.problem.gradients(X[found.x], found.y))


def solved_one_by_one(prepared: Prepared, X: Tensor, found: Candidates, q: float, single: bool) -> Candidates:
    """L⁻¹ĝ by one half-solve for each candidate."""
    half = prepared.factor.half(written(prepared, X, found))
    s_hat = torch.linalg.vector_norm(half, dim=1).square_()
    found = with_rows(found, half, s_hat, q)
    if not single:
        return found
    size, tiny = s_hat.sqrt(), prepared.problem.p * TINY
    return replace(found, rows=half.float(), error=UNIT * size + tiny, off=torch.zeros_like(size))


def root_pays(prepared: Prepared, found: Candidates) -> bool:
    """Whether L⁻ᵀ, written out, makes rows of all labels of the candidates' objects with fewer operations than half-solves."""
    problem, p = prepared.problem, prepared.problem.p
    if problem.prefix_names or p**2 * problem.X.element_size() > prepared.memory // 8:
        return False
    write = 0 if getattr(prepared.factor, "inverted", False) else p
    return len(found) >= 2 * len(torch.unique(found.x)) + write


def written_root(prepared: Prepared) -> list[Tensor]:
    """L⁻ᵀ, one (i, o·p) tensor for each parameter block: an object's a meets it once for all labels."""
    root = prepared.factor.written_half(prepared.problem.theta)
    return [root[b.start : b.stop].reshape(b.o, b.i, -1).transpose(0, 1).flatten(1) for b in prepared.problem.blocks]


def solved_by_root(
    prepared: Prepared, root: list[Tensor], X: Tensor, found: Candidates, q: float, single: bool
) -> Candidates:
    """L⁻¹ĝ = Σ D·V over blocks of parameters with ĝ = D ⊗ a and V = a·root, the same for all labels of an object: 2p² operations.

    V is in the problem's precision; the sum, in float32, errs by its length times |D||V|.
    """
    problem, p, tiny = prepared.problem, prepared.problem.p, prepared.problem.p * TINY
    dtype, terms = torch.float32 if single else X.dtype, sum(b.o for b in problem.blocks)
    objects, at = torch.unique(found.x, return_inverse=True)
    rows = torch.empty(len(found), p, dtype=dtype, device=X.device)
    error = torch.zeros_like(found.loss)
    logits, J = problem.jacobian(X[objects])
    every = candidate_gradients(problem.loss, J, logits)
    order = torch.argsort(at, stable=True)  # candidates by object
    stops = torch.searchsorted(at[order], torch.arange(0, len(objects) + OBJECTS, OBJECTS, device=X.device)).tolist()
    for k, start in enumerate(range(0, len(objects), OBJECTS)):
        ghat, mine = select(every, slice(start, start + OBJECTS)), order[stops[k] : stops[k + 1]]
        half = torch.empty(*ghat[0].left.shape[:2], p, dtype=dtype, device=X.device)
        off = torch.zeros_like(half[..., 0])
        for block, ((D, a), part) in enumerate(zip(ghat, root, strict=True)):
            assert a is not None  # there is no prefix
            V = (a @ part).to(dtype)
            D = D.to(dtype)
            torch.baddbmm(half, D, V.view(len(V), D.shape[2], -1), beta=float(block > 0), out=half)
            if single:  # what vanishes, below 2⁻¹²⁶, is granted apart
                size = torch.linalg.vector_norm(V, dim=1)[:, None] + tiny**0.5
                off += (terms + 3) * (torch.linalg.vector_norm(D, dim=2) + tiny**0.5) * size
        rows[mine] = half[at[mine] - start, found.y[mine]]
        error[mine] = off[at[mine] - start, found.y[mine]].to(error.dtype)
    norm = torch.linalg.vector_norm(rows, dim=1).to(found.loss.dtype)
    if not single:
        return with_rows(found, rows, norm**2, q)
    error = 1.02 * UNIT * error + tiny
    length = norm * (1 + UNIT * p) + tiny**0.5 + error
    off = length**2 - norm**2  # of ŝ
    tau = lowest(found.loss, norm**2, q)
    return replace(found, rows=rows, influence=length**2, tau=tau, error=error, off=(1 - q) * off)
