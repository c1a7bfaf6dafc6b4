"""Newton's step 𝓗⁻¹∇F of changed bags, by factorised Hessians or, for one large bag, by conjugate gradients; and how far to go along it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fullconformal.linear.bag import Change, LinearBag, at_points, pulled, without
from fullconformal.linear.hessian import factor, hessian
from fullconformal.linear.products import gram
from fullconformal.losses.relative import all_probabilities, residual, second

# Multiplications of one Hessian from which conjugate gradients are faster: 2 to 3 times with 10 classes or 10,000 points of 30 features;
# below, their many small steps take longer. Those of a Hessian that is a single square count a quarter: half of it is formed, in place.
LARGE = 2**20
MOST = 100  # products of a step at most, before the Hessian is factorised instead


class Steps:
    """Newton's steps for the columns of one minimisation."""

    def __init__(self, bag: LinearBag, change: Change | None) -> None:
        (n, d), K = bag.X.shape, bag.K
        self.bag, self.change = bag, change
        self.iterative = change is None and n * d * d * (K * (K + 1) / 2 if K > 1 else 0.25) > LARGE
        self.inverse: Any = None
        #: the factors of a Hessian, and how far logits have moved since
        self.factors: Tensor | None = None
        self.moved = math.inf

    def __call__(self, theta: Tensor, z: Tensor, G: Tensor, left: float) -> Tensor | None:
        """Steps (d, K, B) at Θ with logits (n, K, B) and gradients G (d, K, B); None where a Hessian is singular.

        Conjugate gradients may leave a share ``left`` of the gradient, in the norm of the preconditioner.
        """
        if self.iterative:
            # Of one bag points may stand where bags do: sums over classes take half the time, and nothing is laid out anew.
            step = self._conjugate(all_probabilities(z[:, :, 0].T), G[:, :, 0].T.contiguous(), left)
            if step is not None:
                self.moved = 0.0
                return step.T[:, :, None]
        # A Hessian is within about as much of itself as logits have moved since: the last one makes a step that leaves a hundredth at
        # most, by a solve in place of products of all features.
        if self.moved > 1e-2:
            self.factors, self.moved = factor(hessian(self.bag, self.change, theta, second(z))), 0.0
        if self.factors is None:
            return None
        return torch.cholesky_solve(G.flatten(0, 1).T[:, :, None], self.factors).squeeze(2).T.reshape(G.shape)

    def _conjugate(self, pi: Tensor, G: Tensor, left: float) -> Tensor | None:
        """The step (K, d) of one bag, given probabilities (C, n) and the gradient (K, d); None where it takes too many products.

        Only what arrays of NumPy and of torch have in common: on a CPU NumPy's small products take half the time, but those with the
        points half as long again.
        """
        self.inverse = self._blocks(pi) if self.inverse is None else self.inverse
        if self.inverse is None:
            return None
        bag = self.bag
        penalty, T, inverse, p, r = (arrays(v) for v in (bag.penalty, bag.coupling, self.inverse, pi[1:], G))
        step, v, rows = 0 * r, 0 * r, arrays(G.new_empty(bag.n_classes, G.shape[1]))
        before, goal = 1.0, 0.0
        for products in range(MOST):
            # Blocks of all C classes treat them alike, those of the K relative to the first would not.
            rows[1:], rows[0] = r, -r.sum(0)
            solved = (rows.reshape(len(inverse), -1, rows.shape[1]) @ inverse).reshape(rows.shape)
            s = solved[1:] - solved[0]
            rs = float(r.ravel() @ s.ravel())
            goal = goal or left**2 * rs
            if not goal < rs < torch.inf:
                # Another preconditioner costs as much as about d/4 products, and pays in all steps that follow.
                self.inverse = None if products > max(12, bag.X.shape[1] / 6) else self.inverse
                return torch.as_tensor(step) if rs <= goal else None
            v = s + rs / before * v
            before = rs
            u = arrays(torch.as_tensor(v) @ bag.X.T)
            u *= p
            u -= p * u.sum(0)
            Hv = arrays(torch.as_tensor(u) @ bag.X) + (T @ v) * penalty
            t = rs / float(v.ravel() @ Hv.ravel())
            step, r = step + t * v, r - t * Hv
        self.inverse = None
        return None

    def _blocks(self, pi: Tensor) -> Tensor | None:
        """Inverses (C, d, d) of the Hessian's diagonal blocks Σ π_c(1 − π_c) xxᵀ + Λ, or one for all; None where one is singular."""
        X, weights = self.bag.X, pi * (1 - pi)
        # At the start, and of two classes, they are all the same but for rounding.
        distinct = weights[:1] if bool((weights - weights[0]).abs().max() < 1e-12) else weights
        L, failed = torch.linalg.cholesky_ex(
            torch.stack([gram(X * w.sqrt()[:, None]) for w in distinct]) + torch.diag(self.bag.penalty)
        )
        return None if bool(failed.any()) else torch.cholesky_inverse(L)


def length(
    bag: LinearBag, change: Change | None, theta: Tensor, step: Tensor, z: Tensor, dz: Tensor, R: Tensor, slope: Tensor
) -> Tensor:
    """How far (B,) to go along −step, which moves logits by ranges ≤ R and along which F falls by ``slope`` at first.

    To where its slopes at 0 and 1 say that F is least: far from the minimum curvature decreases, and whole steps are too short. Halved
    while F grows there so much that it may not have fallen; no less than log(1 + R)/R, up to where it surely falls.
    """

    def slope_at(t: Tensor | float) -> Tensor:
        # By the logits along the way, without another product with the points.
        ahead, r = theta - t * step, residual(z - t * dz, bag.y[:, None])
        own = (without(change, r) * dz).sum((0, 1)) + (pulled(bag, change, ahead) * step).sum((0, 1))
        if change is None:
            return own
        return own + (residual(at_points(change.x, ahead), change.y) * at_points(change.x, step)).sum(0)

    safe = torch.where(R > 1, torch.log1p(R) / R, 1.0)
    t = torch.where(R > 1, torch.maximum(slope / (slope - slope_at(1.0)).clamp(min=slope / 4), safe), 1.0)
    while bool((t > safe).any()):
        enough = slope_at(t) >= -0.1 * safe * slope
        if bool((enough | (t <= safe)).all()):
            break
        t = torch.where(enough, t, torch.maximum(t / 2, safe))
    return t


def arrays(x: Tensor) -> Any:
    """A tensor as an array of NumPy where it is on a CPU."""
    return x if x.is_cuda else x.numpy()
