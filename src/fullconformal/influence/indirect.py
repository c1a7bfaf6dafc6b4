"""The indirect approximation: the model evaluated at shifted parameters (equation 1 of the paper).

    α_i = ℓ(z_i; θ − 𝓗⁻¹ĝ + q·𝓗⁻¹g_i)        α_{n+1} = ℓ(ẑ; θ − (1−q)·𝓗⁻¹ĝ)

Taken literally: one evaluation a pair. Where the logits are affine in θ the shifts are added to the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Alpha, candidate_gradients
from fullconformal.problem import flat


def indirect(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem = prepared.problem
    theta, loss = problem.theta, problem.loss
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    steps = prepared.factor.solve(flat(candidate_gradients(loss, J, logits)).flatten(0, 1))  # 𝓗⁻¹ĝ, (m·C, p)
    tau = loss.candidates(logits)
    if q < 1:
        there = [problem.logits_at(theta - (1 - q) * step, X[c // n_classes][None]) for c, step in enumerate(steps)]
        tau = loss.candidates(torch.cat(there)).view(m, n_classes, n_classes).diagonal(dim1=1, dim2=2)

    def own_logits(theta: Tensor, x: Tensor) -> Tensor:
        return problem.logits_at(theta, x[None])[0]

    def alpha(block: slice) -> Tensor:
        Z, y = problem.X[block], problem.y[block]
        own = q * prepared.factor.solve(flat(prepared.rows(block))) if q else torch.zeros_like(theta)
        if not problem.is_linear:
            at = vmap(own_logits) if q else problem.logits_at
            return torch.stack([loss.value(at(theta - step + own, Z), y) for step in steps]).view(m, n_classes, -1)
        f, ((T, a),) = problem.jacobian(Z)
        assert a is not None  # the layer's inputs, which meet the parameters in the same T for all points
        shape = T.shape[2], a.shape[1]
        f = f + (own.view(-1, *shape) @ a[:, :, None])[:, :, 0] @ T[0].T
        # The labels of an object together.
        moved = (a @ (T[0] @ step.view(-1, *shape)).flatten(0, 1).T for step in steps.split(n_classes))
        labels = y.repeat_interleave(n_classes)
        every = ((f.repeat(1, n_classes) - by).view(-1, n_classes) for by in moved)
        return torch.stack([loss.value(part, labels).view(-1, n_classes) for part in every]).mT

    return tau, alpha
