"""The indirect approximation: the model evaluated at shifted parameters (equation 1 of the paper).

    α_i = ℓ(z_i; θ − 𝓗⁻¹ĝ + q·𝓗⁻¹g_i)        α_{n+1} = ℓ(ẑ; θ − (1−q)·𝓗⁻¹ĝ)

Taken literally: one evaluation a pair. Where the logits are affine in θ the shift by 𝓗⁻¹g_i is added to the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Alpha, candidate_gradients
from fullconformal.problem import Block, Rows, flat


def indirect(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """Scores τ (m, C) of the candidates and α (m, C, k) of the training points in a slice."""
    problem = prepared.problem
    theta = problem.theta
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    steps = prepared.factor.solve(flat(candidate_gradients(problem.loss, J, logits)).flatten(0, 1))  # 𝓗⁻¹ĝ, (m·C, p)
    labels = torch.arange(n_classes, device=X.device)
    tau = torch.stack([
        problem.loss.value(problem.logits_at(theta - (1 - q) * step, X[c // n_classes][None]), labels[c % n_classes][None])
        for c, step in enumerate(steps)
    ])  # fmt: skip

    def own_logits(theta: Tensor, x: Tensor) -> Tensor:
        return problem.logits_at(theta, x[None])[0]

    def alpha(block: slice) -> Tensor:
        Z, y = problem.X[block], problem.y[block]
        own = q * prepared.factor.solve(flat(prepared.rows(block))) if q else None
        extra = _moved(problem.jacobian(Z)[1], own, problem.blocks) if own is not None and problem.is_linear else None
        columns = []
        for step in steps:
            if own is None:
                f = problem.logits_at(theta - step, Z)
            elif extra is not None:
                f = problem.logits_at(theta - step, Z) + extra
            else:
                f = vmap(own_logits)(theta - step + own, Z)
            columns.append(problem.loss.value(f, y))
        return torch.stack(columns).view(m, n_classes, -1)

    return tau.view(m, n_classes), alpha


def _moved(J: list[Rows], shift: Tensor, blocks: list[Block]) -> Tensor:
    """J_i·shift_i, (k, C)."""
    total: Tensor | None = None
    for (T, a), b in zip(J, blocks, strict=True):
        part = shift[:, b.start : b.stop].view(-1, b.o, b.i)
        z = part.flatten(1) if a is None else torch.einsum("koi,ki->ko", part, a)
        out = torch.einsum("kco,ko->kc", T, z)
        total = out if total is None else total + out
    assert total is not None
    return total
