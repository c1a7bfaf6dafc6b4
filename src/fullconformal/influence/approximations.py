"""The approximations of the scores of full CP: direct, indirect, and by a Newton step.

Each gives the scores τ (m, C) of the candidates of objects X (m, ...), and a function from a slice of training points to their α (m, C, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from fullconformal.influence.prepared import Prepared
from fullconformal.influence.scores import Alpha, Scorer, candidate_gradients
from fullconformal.losses import Loss
from fullconformal.problem import Rows, flat


def direct(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """The direct approximation: the influence of points on the loss itself (equation 2 of the paper).

        α_i = ℓ_i + q·s_i − k_i        α_{n+1} = ℓ̂ − (1−q)·ŝ        k_i(y) = g_iᵀ𝓗⁻¹ĝ_y,  ĝ_y = Jᵀ(π − e_y)

    𝓗⁻¹ meets the candidates' gradients, C an object, or those of the training points, never a pair.
    """
    problem, factor = prepared.problem, prepared.factor
    logits, J = problem.jacobian(X)
    ghat = flat(candidate_gradients(problem.loss, J, logits)).flatten(0, 1)
    s_hat, rows = factor.influence(ghat)
    rows = factor.back(rows) if prepared.half is None and factor.positive_definite else rows
    tau = problem.loss.candidates(logits) - (1 - q) * s_hat.view(len(X), -1)
    b = prepared.loss + q * prepared.self_influence

    def alpha(block: slice) -> Tensor:
        points = flat(prepared.rows(block)) if prepared.half is None else prepared.half[block]
        return b[block] - (rows @ points.T).view(len(X), -1, len(points))

    return tau, alpha


def indirect(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """The indirect approximation: the model evaluated at shifted parameters (equation 1 of the paper).

        α_i = ℓ(z_i; θ − 𝓗⁻¹ĝ + q·𝓗⁻¹g_i)        α_{n+1} = ℓ(ẑ; θ − (1−q)·𝓗⁻¹ĝ)

    Taken literally: one evaluation a pair. Where the logits are affine in θ the shifts are added to the logits.
    """
    problem = prepared.problem
    theta, loss = problem.theta, problem.loss
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    steps = prepared.factor.solve(flat(candidate_gradients(loss, J, logits)).flatten(0, 1))  # 𝓗⁻¹ĝ, (m·C, p)
    tau = loss.candidates(logits)
    if q < 1:
        there = [problem.logits_at(theta - (1 - q) * step, X[c // n_classes][None]) for c, step in enumerate(steps)]
        tau = loss.candidates(torch.cat(there)).view(m, n_classes, n_classes).diagonal(dim1=1, dim2=2)

    def alpha(block: slice) -> Tensor:
        Z, y = problem.X[block], problem.y[block]
        own = q * prepared.factor.solve(flat(prepared.rows(block))) if q else torch.zeros_like(theta)
        if not problem.is_linear:
            at = vmap(lambda theta, x: problem.logits_at(theta, x[None])[0]) if q else problem.logits_at
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


def newton(prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Alpha]:
    """The Newton approximation: ẑ is added by one Newton step with the updated curvature, i removed by ALO at the new point.

        Δ = −𝓗⁻¹Ĵᵀ(I + ŜÂ)⁻¹r̂        f̄_i = f_i + J_iΔ        Ā_i = A_i − B_i(I + ŜÂ)⁻¹ŜB_iᵀ
        α_i = ℓ(y_i, f̄_i + Ā_i(I − S̄_iĀ_i)⁻¹r̄_i)        α_{n+1} = ℓ̂              A_i = J_i𝓗⁻¹J_iᵀ,  B_i = J_i𝓗⁻¹Ĵᵀ

    These are the formulas of q = 1. For other q the removal is taken by `shift` with t ↦ ((1−t)^(−q) − 1)/t and the candidate's own
    addition with t ↦ ((1+t)^(q−1) − 1)/t: nothing removed and all added at q = 0, the reverse at q = 1.

    The loss is blind to what all logits have in common, and so are r and S; J is taken without it, since 𝓗⁻¹ may be huge along there and
    A and B would lose their digits.
    """
    problem, factor, loss = prepared.problem, prepared.factor, prepared.problem.loss
    logits, J = problem.jacobian(X)
    m, n_classes = logits.shape
    written = centred(J)
    solved = factor.solve(written.flatten(0, 1)).view_as(written)  # Ĵ𝓗⁻¹, (m, C, p)
    A = written @ solved.mT
    S = loss.curvature(logits)
    eye = torch.eye(n_classes, dtype=X.dtype, device=X.device)
    every = torch.arange(n_classes, device=X.device).repeat(m)
    r = loss.residual(logits.repeat_interleave(n_classes, 0), every).view(
        m, n_classes, n_classes
    )  # r̂_y, (m, C labels, C)
    M = torch.linalg.inv(eye + S @ A)
    tau = loss.candidates(logits)
    if q < 1:
        moved = logits[:, None, :] + shift(A[:, None], S[:, None], r, lambda t: growth(t, q - 1))
        tau = loss.candidates(moved).diagonal(dim1=1, dim2=2)

    def alpha(block: slice) -> Tensor:
        Z, y = problem.X[block], problem.y[block]
        f, Ji = problem.jacobian(Z)
        Jw = centred(Ji)
        k = len(Z)
        Ai = Jw @ factor.solve(Jw.flatten(0, 1)).view_as(Jw).mT
        scores = []
        for j in range(m):
            B = Jw @ solved[j].T  # (k, C, C)
            Abar = Ai - B @ (M[j] @ S[j]) @ B.mT
            fbar = f[:, None, :] - torch.einsum("kcd,yd->kyc", B @ M[j], r[j])
            fbar = fbar.reshape(k * n_classes, n_classes)
            labels = y.repeat_interleave(n_classes)
            if q > 0:
                fbar = fbar + removal(loss, Abar.repeat_interleave(n_classes, 0), fbar, loss.residual(fbar, labels), q)
            scores.append(loss.value(fbar, labels).view(k, n_classes).T)
        return torch.stack(scores)

    return tau, alpha


def centred(J: list[Rows]) -> Tensor:
    """Jacobians (k, C, p) without the mean of their rows."""
    return flat([Rows(left - left.mean(1, keepdim=True), right) for left, right in J])


def removal(loss: Loss, A: Tensor, f: Tensor, r: Tensor, q: float) -> Tensor:
    """Shift of the logits f (k, C) when a point is removed, wholly (q = 1) or in part.

    An eigenvalue of SA at or above 1 means that the point decides its own prediction: it is taken just below 1, where the
    loss grows without bound, instead of letting the formula change sign.
    """
    S = loss.curvature(f)
    if q < 1:
        return shift(A, S, r, lambda t: -growth(-t, -q))
    # (I − SA)⁻¹ = I + B(I − BᵀAB)⁻¹BᵀA with S = BBᵀ: one Cholesky a point.
    B = loss.root(f)
    Ar = A @ r[..., None]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    L, failed = torch.linalg.cholesky_ex(eye - B.mT @ A @ B)
    out = (Ar + A @ (B @ torch.cholesky_solve(B.mT @ Ar, L)))[..., 0]
    beyond = failed > 0
    if beyond.any():
        out[beyond] = shift(A[beyond], S[beyond], r[beyond], lambda t: 1 / (1 - t).clamp_min(1e-9))
    return out


def shift(A: Tensor, S: Tensor, r: Tensor, phi: Callable[[Tensor], Tensor]) -> Tensor:
    """A^½ φ(A^½ S A^½) A^½ r for positive semi-definite A and S, (..., C)."""
    values, vectors = torch.linalg.eigh((A + A.mT) / 2)
    root = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    t, Q = torch.linalg.eigh(root @ S @ root)
    inner = Q.mT @ (root @ r[..., None])
    out: Tensor = (root @ (Q @ (phi(t)[..., None] * inner)))[..., 0]
    return out


def growth(t: Tensor, power: float) -> Tensor:
    """((1 + t)^power − 1)/t with 1 + t taken no less than 1e-9, and its limit at t = 0."""
    grown = torch.expm1(power * torch.log1p(t.clamp_min(-1)).clamp_min(math.log(1e-9)))
    return torch.where(t == 0, power, grown / t)


#: by the name that users give
APPROXIMATIONS: dict[str, Scorer] = {"direct": direct, "indirect": indirect, "newton": newton}
