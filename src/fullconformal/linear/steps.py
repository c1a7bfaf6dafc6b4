"""Newton's step 𝓗⁻¹∇F of changed bags: by factorised Hessians, or, for one bag of many classes, by conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal.linear.bag import Change, LinearBag
from fullconformal.linear.hessian import factor, hessian
from fullconformal.linear.products import gram
from fullconformal.losses.relative import second

# Logits from which conjugate gradients are faster than the Hessian: 10 classes of digits take a third of the time, 4 about as much.
MANY = 4
PRODUCTS = 12  # with the Hessian, after which another preconditioner is worth its cost
MOST = 100  # products, after which the Hessian itself is


class Steps:
    """Newton's steps for the columns of one minimisation."""

    def __init__(self, bag: LinearBag, change: Change | None) -> None:
        self.bag, self.change = bag, change
        self.iterative = change is None and bag.K >= MANY
        self.inverse: Tensor | None = None

    def __call__(self, theta: Tensor, pi: Tensor, G: Tensor, left: float) -> Tensor | None:
        """Steps (d, K, B) at Θ with probabilities (n, K, B) and gradients G (d, K, B); None where a Hessian is singular.

        Conjugate gradients may leave a share ``left`` of the gradient, in the norm of the preconditioner.
        """
        if self.iterative:
            step = self._conjugate(pi[:, :, 0].T.contiguous(), G[:, :, 0].T.contiguous(), left)
            if step is not None:
                return step.T[:, :, None]
        H = hessian(self.bag, self.change, theta, second(pi))
        L = factor(H)
        if L is None:
            return None
        return torch.cholesky_solve(G.flatten(0, 1).T[:, :, None], L).squeeze(2).T.reshape(G.shape)

    def _conjugate(self, pi: Tensor, G: Tensor, left: float) -> Tensor | None:
        """The step (K, d) of one bag, given probabilities (K, n) and the gradient (K, d); None where it takes too many products."""
        if self.inverse is None:
            self.inverse = self._blocks(pi)
        if self.inverse is None:
            return None
        X, penalty, T = self.bag.X, self.bag.penalty, self.bag.coupling
        step, r, v, before, goal = torch.zeros_like(G), G, torch.zeros_like(G), 1.0, 0.0
        for products in range(MOST):
            # Rows of all C classes and back: blocks of C classes treat them alike, those of the K contrasts with the first do not.
            s = torch.bmm(self.inverse, torch.cat([-r.sum(0, keepdim=True), r])[:, :, None]).squeeze(2)
            s = s[1:] - s[0]
            rs = float((r * s).sum())
            goal = goal or left**2 * rs
            if not 0 < rs < torch.inf or rs <= goal:
                if products > PRODUCTS:
                    self.inverse = None
                return step if rs <= goal else None
            v = s + rs / before * v
            before = rs
            u = (v @ X.T).mul_(pi)
            u -= pi * u.sum(0)
            Hv = u @ X + (T @ v) * penalty
            t = rs / (v * Hv).sum()
            step, r = step + t * v, r - t * Hv
        self.inverse = None
        return None

    def _blocks(self, pi: Tensor) -> Tensor | None:
        """Inverses (C, d, d) of the Hessian's diagonal blocks Σ π_c(1 − π_c) xxᵀ + Λ, one for each class; None where one is singular."""
        X, pi = self.bag.X, torch.cat([1 - pi.sum(0, keepdim=True), pi])
        weights, blocks = (pi * (1 - pi)).clamp_(min=0.0), list[Tensor]()
        for w in weights:
            same = len(blocks) > 0 and torch.equal(w, weights[0])  # as at the start
            blocks.append(blocks[0] if same else gram(X * w.sqrt()[:, None]) + torch.diag(self.bag.penalty))
        L, failed = torch.linalg.cholesky_ex(torch.stack(blocks))
        return None if bool(failed.any()) else torch.cholesky_inverse(L)
