"""The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

    α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y = (Vπ)_i − V_iy,  V = G𝓗⁻¹Jᵀ

One product V serves all labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.problem import Rows, candidate_losses, flat
from fullconformal.scores.base import Alpha, Training


def direct(training: Training, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, k, C) of the training points in a slice."""
    problem, factor = training.problem, training.factor
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    pi = torch.softmax(logits, -1)
    tau = candidate_losses(logits)
    written = solved = torch.empty(0)
    if q < 1 or training.solved is None:
        written = flat(J).flatten(0, 1)
        solved = factor.solve(written)
    if q < 1:
        A = written.view(m, n_classes, -1) @ solved.view(m, n_classes, -1).mT
        E = pi[:, None, :] - torch.eye(n_classes, dtype=pi.dtype, device=pi.device)  # π − e_y
        tau = tau - (1 - q) * torch.einsum("myc,mcd,myd->my", E, A, E)

    def alpha(block: slice) -> Tensor:
        if training.solved is not None:
            V = products(training.solved, J, block)
        else:
            V = (solved @ flat(training.rows(block)).T).view(m, n_classes, -1).mT
        k = (V @ pi[:, :, None]) - V
        return (training.loss + q * training.self_influence)[block, None] - k

    return tau, alpha


def products(solved: list[Tensor], J: list[Rows], block: slice) -> Tensor:
    """V (m, k, C) from kept 𝓗⁻¹g_i (n, o, i) and the candidates' Jacobian rows, which stay factored."""
    total: Tensor | None = None
    for U, (T, a) in zip(solved, J, strict=True):
        k, o, i = U[block].shape
        m = len(T)
        if a is None:
            part = (T.flatten(0, 1) @ U[block].view(k, o).T).view(m, -1, k).mT
        else:
            part = (a @ U[block].view(k * o, i).T).view(m, k, o) @ T.mT
        total = part if total is None else total + part
    assert total is not None
    return total
