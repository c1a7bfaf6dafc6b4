"""The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

    α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y,  ĝ_y = Jᵀ(π − e_y)

𝓗⁻¹ meets the candidates' gradients, C an object, or those of the training points, never a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.influence.prepared import Training
from fullconformal.influence.scores import Alpha, candidate_gradients, half_solved, products
from fullconformal.problem import flat


def direct(training: Training, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem, factor = training.problem, training.factor
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    ghat = candidate_gradients(problem.loss, J, logits)
    tau = problem.loss.candidates(logits)
    solved = torch.empty(0)
    if training.halved is not None:
        solved = half_solved(factor, ghat)
        tau = tau - (1 - q) * (solved**2).sum(-1)
    elif q < 1 or training.solved is None:
        # Not the rows of J, which lie along directions of no curvature as well: their differences would cancel.
        written = flat(ghat)
        solved = factor.solve(written.flatten(0, 1)).view_as(written)
        tau = tau - (1 - q) * (written * solved).sum(-1)
    b = training.loss + q * training.self_influence

    def alpha(block: slice) -> Tensor:
        if training.solved is not None:
            return b[block] - products(training.solved, ghat, block)
        if training.halved is not None:
            return b[block] - (solved.flatten(0, 1) @ training.halved[block].T).view(m, n_classes, -1)
        return b[block] - (solved.flatten(0, 1) @ flat(training.rows(block)).T).view(m, n_classes, -1)

    return tau, alpha
