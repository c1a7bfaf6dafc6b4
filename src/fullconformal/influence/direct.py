"""The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

    α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y,  ĝ_y = Jᵀ(π − e_y)

𝓗⁻¹ meets the candidates' gradients, C an object, or those of the training points, never a pair.
"""

from __future__ import annotations

from torch import Tensor

from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Alpha, candidate_gradients, half_solved
from fullconformal.problem import flat


def direct(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem, factor = prepared.problem, prepared.factor
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    ghat = candidate_gradients(problem.loss, J, logits)
    tau = problem.loss.candidates(logits)
    if prepared.half is not None:
        rows = half_solved(factor, ghat)
        s_hat = (rows**2).sum(-1)
    else:
        # Not the rows of J, which lie along directions of no curvature as well: their differences would cancel.
        written = flat(ghat)
        rows = factor.solve(written.flatten(0, 1)).view_as(written)
        s_hat = (written * rows).sum(-1)
    tau = tau - (1 - q) * s_hat
    b = prepared.loss + q * prepared.self_influence

    def alpha(block: slice) -> Tensor:
        points = flat(prepared.rows(block)) if prepared.half is None else prepared.half[block]
        return b[block] - (rows.flatten(0, 1) @ points.T).view(m, n_classes, -1)

    return tau, alpha
