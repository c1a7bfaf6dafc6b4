"""Candidates as rows in float32, for `tiles`: half-solved gradients L⁻¹ĝ, or 𝓗⁻¹ĝ where 𝓗⁻¹ is written out, and what each is off by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import TINY, UNIT, candidate_gradients, half_solved, written_roots
from fullconformal.problem import Rows, select, squared_norms

OBJECTS = 128  # whose rows are made together, so that they stay in the cache
LOST = 2.0**-32  # of |𝓗⁻¹||ĝ|, in float64


class Candidates(NamedTuple):
    """Candidates of some objects: ℓ̂ and τ (k,), rows (k, p) in float32, what τ and rows are off by, bounds of their lengths and of ρ."""

    loss: Tensor
    tau: Tensor
    off: Tensor
    rows: Tensor
    error: Tensor
    length: Tensor
    rho: Tensor


def roots_of(training: Training, m: int) -> list[Tensor]:
    """L⁻ᵀ, or 𝓗⁻¹, as `written_roots` has it; none where solving for the labels of m objects costs less."""
    problem, p = training.problem, training.problem.p
    if problem.prefix_names or p + 2 * m > problem.n_classes * m or p**2 > training.memory // 64:
        return []
    return written_roots(training, training.inverse)


def candidates_of(training: Training, roots: list[Tensor], X: Tensor, q: float) -> Candidates:
    """Every label of objects X (m, ...): L⁻¹ĝ, or 𝓗⁻¹ĝ where that is written out.

    Either is Σ D·V with V = a·root in float64, and the sum in float32 errs by its length times |D||V|.
    """
    problem, tiny = training.problem, training.problem.p * TINY
    vanished = tiny**0.5  # what a sum of squares may not see
    logits, J = problem.jacobian(X)
    ghat, rows = (
        candidate_gradients(problem.loss, J, logits),
        torch.empty(*logits.shape, problem.p, dtype=torch.float32),
    )
    error, terms = torch.zeros_like(logits), sum(b.o for b in problem.blocks)
    for block, ((D, a), root) in enumerate(zip(ghat, roots, strict=False)):
        assert a is not None  # there is no prefix
        length = torch.empty(len(X), dtype=torch.float32)
        some = max(1, min(OBJECTS, training.memory // 16 // (12 * root.shape[1])))
        for left, right, out, norm in zip(*(v.split(some) for v in (D.float(), a, rows, length)), strict=True):
            V = (right @ root).float()
            torch.linalg.vector_norm(V, dim=1, out=norm)
            torch.baddbmm(out, left, V.view(len(V), D.shape[2], -1), beta=float(block > 0), out=out)
        error += (terms + 3) * (torch.linalg.vector_norm(D, dim=2) + vanished) * (length[:, None] + vanished)
    if not roots:
        for start in range(0, len(X), OBJECTS):
            at = slice(start, start + OBJECTS)
            half = half_solved(training.factor, select(ghat, at))
            rows[at] = half if training.inverse is None else training.factor.back(half.flatten(0, 1)).view_as(half)
    norm = torch.linalg.vector_norm(rows, dim=2).double()
    size = norm * (1 + UNIT * problem.p) + vanished
    error = 1.01 * UNIT * (error if roots else size) + tiny
    if training.inverse is not None:  # of which float64 loses more than of half-solves, but not much: see `training`
        error += LOST * training.inverse.abs().sum(1).max() * squared_norms(ghat).sqrt()
    length = size + error
    s_hat, off = norm**2, length**2 - norm**2
    if training.inverse is not None:
        s_hat, off = _own_influence(ghat[0], rows, size, error)
    rho, loss = (s_hat + off).sqrt(), problem.loss.candidates(logits)
    tau, off = (loss, torch.zeros_like(loss)) if q == 1 else (loss - (1 - q) * s_hat, (1 - q) * off)
    loss, tau, off, error, length, rho = (v.flatten() for v in (loss, tau, off, error, length, rho))
    return Candidates(loss, tau, off, rows.flatten(0, 1), error, length, rho)


def _own_influence(ghat: Rows, rows: Tensor, size: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """ŝ = ĝ·𝓗⁻¹ĝ and what it is off by (m, C), from 𝓗⁻¹ĝ (m, C, p) in float32, which has some size and is off by an error (m, C)."""
    D, a = ghat
    assert a is not None  # there is no prefix
    met = torch.bmm(rows.view(len(a), -1, a.shape[1]), a.float()[:, :, None]).view_as(D)
    off = 1.01 * UNIT * (a.shape[1] + D.shape[2] + 8) * size + error
    vanished = rows.shape[2] * TINY * (1 + size) * (1 + torch.linalg.vector_norm(D, dim=2))
    return (met * D).sum(2), squared_norms([ghat]).sqrt() * off + vanished
