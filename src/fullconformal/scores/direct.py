"""The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

    α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y,  ĝ_y = Jᵀ(π − e_y)

All labels share one Jacobian: 𝓗⁻¹ meets its C rows, or the training gradients, never a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.problem import candidate_losses, flat
from fullconformal.scores.base import Alpha, Training, candidate_gradients, half_solved, products


def direct(training: Training, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem, factor = training.problem, training.factor
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    ghat = candidate_gradients(J, logits)
    tau = candidate_losses(logits)
    solved = torch.empty(0)
    if training.halved is not None:
        solved = half_solved(factor, ghat)
        tau = tau - (1 - q) * (solved**2).sum(-1)
    elif q < 1 or training.solved is None:
        # Solved for the C rows of J, of which the candidates' gradients are differences.
        written = flat(J)
        solved = factor.solve(written.flatten(0, 1)).view_as(written)
        E = torch.softmax(logits, -1)[:, None, :] - torch.eye(n_classes, dtype=X.dtype, device=X.device)  # π − e_y
        tau = tau - (1 - q) * torch.einsum("myc,mcd,myd->my", E, written @ solved.mT, E)
        solved = E @ solved
    b = training.loss + q * training.self_influence

    def alpha(block: slice) -> Tensor:
        if training.solved is not None:
            return b[block] - products(training.solved, ghat, block)
        if training.halved is not None:
            return b[block] - (solved.flatten(0, 1) @ training.halved[block].T).view(m, n_classes, -1)
        return b[block] - (solved.flatten(0, 1) @ flat(training.rows(block)).T).view(m, n_classes, -1)

    return tau, alpha
