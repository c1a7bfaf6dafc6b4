"""The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

    α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y,  ĝ_y = Jᵀ(π − e_y)

𝓗⁻¹ meets the candidates' gradients, C an object, or those of the training points, never a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Alpha, candidate_gradients
from fullconformal.problem import Rows, flat


def direct(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem, factor = prepared.problem, prepared.factor
    logits, J = problem.jacobian(X)
    ghat = candidate_gradients(problem.loss, J, logits)
    tau = problem.loss.candidates(logits)
    # With one output the labels' gradients are multiples of one another: one row an object, met once.
    one = len(ghat) == 1 and ghat[0].left.shape[2] == 1
    times = ghat[0].left if one else logits.new_ones(1)
    # Not the rows of J, which lie along directions of no curvature as well: their differences would cancel.
    written = flat([Rows(torch.ones_like(times[:, :1]), ghat[0].right)]) if one else flat(ghat)
    own, rows = factor.influence(written.flatten(0, 1))
    rows = factor.back(rows) if prepared.half is None and factor.positive_definite else rows
    rows, s_hat = rows.view_as(written), times.squeeze(-1) ** 2 * own.view(len(X), -1)
    tau = tau - (1 - q) * s_hat
    b = prepared.loss + q * prepared.self_influence

    def alpha(block: slice) -> Tensor:
        points = flat(prepared.rows(block)) if prepared.half is None else prepared.half[block]
        return torch.addcmul(b[block], times, (rows.flatten(0, 1) @ points.T).view(len(X), -1, len(points)), value=-1)

    return tau, alpha
