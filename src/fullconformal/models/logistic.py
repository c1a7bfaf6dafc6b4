"""Newton's method for two-class logistic regression, with nothing in its loop but five products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullconformal.models.fitting import NotFinite


def fit_binary(a: Tensor, y: Tensor, penalty: Tensor, w: Tensor, tol: float, max_iter: int = 100) -> Tensor:
    """Minimise Σ softplus(∓aᵀw) + ½ Σ Λw² over w (i,) until |∇|∞ ≤ tol; inputs a (n, i), labels y (n,) 0 or 1, Λ (i,).

    Stops early where no step decreases the objective: without a penalty, separable data have no minimum.
    """
    target = y.to(a.dtype)
    rounding = 8 * torch.finfo(a.dtype).eps

    def objective(z: Tensor, w: Tensor) -> float:
        return float(softplus(z).sum() - target.dot(z) + (penalty * w).dot(w) / 2)

    z = a @ w
    F, before = objective(z, w), float("inf")
    L: Tensor | None = None
    for _ in range(max_iter):
        pi = torch.sigmoid(z)
        g = torch.addmv(penalty * w, a.T, pi - target)
        size = float(g.abs().max())
        if not size < float("inf"):
            raise NotFinite("the gradient of the loss is not finite; scale the features or raise l2")
        if size <= tol:
            break
        if L is None or size > before / 8:  # the last factor serves as long as a step with it gains most of a digit
            H = (a.T * torch.addcmul(pi, pi, pi, value=-1)) @ a
            H.diagonal().add_(penalty)
            L, failed = torch.linalg.cholesky_ex(H)
            if failed:
                break
        before = size
        d = torch.cholesky_solve(g[:, None], L)[:, 0]
        moved, slope, t = a @ d, float(g.dot(d)), 1.0
        ahead = objective(z - moved, w - d)
        while not ahead <= F - 1e-4 * t * slope + rounding * abs(F) and t > 1e-10:
            t /= 2
            ahead = objective(z - t * moved, w - t * d)
        if t <= 1e-10:
            break
        w, z, F = w - t * d, z - t * moved, ahead
    return w
