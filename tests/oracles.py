"""Slow, literal versions of the formulas, written from the paper: what the fast code is compared with.

Everything here loops over single points, forms the Hessian by `torch.func`, inverts it explicitly and works in the paper's mean form:
influence of z on the parameters −(1/N)·H⁻¹∇ℓ(z), with H the Hessian of the mean risk, penalty included.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev

import mpmath
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev


class Oracle:
    """A model at θ_Z in the order of its named parameters."""

    def __init__(self, model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float] | float):
        self.model, self.X, self.y = model, X, y
        self.params = {n: q.detach() for n, q in model.named_parameters() if q.requires_grad}
        self.theta = torch.cat([q.reshape(-1) for q in self.params.values()])
        by_name = penalty if isinstance(penalty, dict) else dict.fromkeys(self.params, penalty)
        self.penalty = torch.cat([X.new_full((q.numel(),), by_name.get(n, 0.0)) for n, q in self.params.items()])

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        out, at = {}, 0
        for name, q in self.params.items():
            out[name] = theta[at : at + q.numel()].view_as(q)
            at += q.numel()
        return out

    def logits(self, theta: Tensor, X: Tensor) -> Tensor:
        return functional_call(self.model, self.unpack(theta), (X,))

    def loss(self, theta: Tensor, x: Tensor, label: int) -> Tensor:
        return -torch.log_softmax(self.logits(theta, x[None])[0], 0)[label]

    def gradient(self, theta: Tensor, x: Tensor, label: int) -> Tensor:
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(self.loss(theta, x, label), theta)[0]

    def risk(self, theta: Tensor) -> Tensor:
        f = self.logits(theta, self.X)
        total = -torch.log_softmax(f, 1)[torch.arange(len(self.y)), self.y].sum() + (self.penalty * theta**2).sum() / 2
        return total / len(self.y)

    def hessian(self) -> Tensor:
        return hessian(self.risk)(self.theta)

    def ggn(self) -> Tensor:
        J = jacrev(lambda t: self.logits(t, self.X))(self.theta)
        pi = torch.softmax(self.logits(self.theta, self.X), 1)
        total = torch.diag(self.penalty)
        for i in range(len(self.X)):
            total = total + J[i].T @ (torch.diag(pi[i]) - torch.outer(pi[i], pi[i])) @ J[i]
        return total / len(self.X)


def algorithm_2(oracle: Oracle, H: Tensor, damping: float, X: Tensor, q: float, approximation: str) -> tuple:
    """The paper's Algorithm 2, point by point: p-values (m, C), α (m, n, C), τ (m, C). q = 1 deleted, 0 ordinary."""
    n, theta = len(oracle.X), oracle.theta
    # The pseudo-inverse, because unpenalised softmax intercepts leave one direction without curvature.
    Hinv = torch.linalg.pinv(H + damping * torch.eye(len(H), dtype=H.dtype), hermitian=True)
    n_classes = oracle.logits(theta, X[:1]).shape[1]
    g = [oracle.gradient(theta, oracle.X[i], int(oracle.y[i])) for i in range(n)]
    losses = [oracle.loss(theta, oracle.X[i], int(oracle.y[i])) for i in range(n)]
    alpha = np.zeros((len(X), n, n_classes))
    tau, p = np.zeros((len(X), n_classes)), np.zeros((len(X), n_classes))
    for j, x in enumerate(X):
        for label in range(n_classes):
            ghat = oracle.gradient(theta, x, label)
            add = -Hinv @ ghat / n  # influence of ẑ on the parameters
            for i in range(n):
                remove = -(-Hinv @ g[i] / n)
                if approximation == "direct":
                    alpha[j, i, label] = losses[i] + g[i] @ add + q * (g[i] @ remove)
                else:
                    alpha[j, i, label] = oracle.loss(theta + add + q * remove, oracle.X[i], int(oracle.y[i]))
            # ẑ itself: added, and (deleted) removed again.
            if approximation == "direct":
                tau[j, label] = oracle.loss(theta, x, label) + (1 - q) * (ghat @ add)
            else:
                tau[j, label] = oracle.loss(theta + (1 - q) * add, x, label)
            p[j, label] = (1 + sum(alpha[j, i, label] >= tau[j, label] for i in range(n))) / (n + 1)
    return p, alpha, tau


def newton_scores(oracle: Oracle, H: Tensor, damping: float, X: Tensor, q: float) -> tuple:
    """Section 5's approximation with the updated curvature formed and inverted: α (m, n, C), τ (m, C)."""
    n, theta = len(oracle.X), oracle.theta
    full = n * (H + damping * torch.eye(len(H), dtype=H.dtype))
    n_classes = oracle.logits(theta, X[:1]).shape[1]
    alpha, tau = np.zeros((len(X), n, n_classes)), np.zeros((len(X), n_classes))
    jac = jacrev(lambda t, x: oracle.logits(t, x[None])[0])
    for j, x in enumerate(X):
        f, J = oracle.logits(theta, x[None])[0], jac(theta, x)
        pi = torch.softmax(f, 0)
        S = torch.diag(pi) - torch.outer(pi, pi)
        # The pseudo-inverse of the curvature with ẑ in it.
        added = torch.linalg.pinv(full + J.T @ S @ J, hermitian=True)
        for label in range(n_classes):
            r = pi - torch.eye(n_classes, dtype=pi.dtype)[label]
            step = -added @ J.T @ r
            if q == 1:
                fhat = f
            else:  # f + S⁺((I + SA)^{q−1} − I)r, by the matrix function itself
                A = J @ torch.linalg.pinv(full, hermitian=True) @ J.T
                fhat = f + pseudo_shift(A, S, r, lambda M: fractional(M, q - 1), +1)
            tau[j, label] = torch.logsumexp(fhat, 0) - fhat[label]
            for i in range(n):
                fi, Ji = oracle.logits(theta, oracle.X[i][None])[0], jac(theta, oracle.X[i])
                fbar = fi + Ji @ step
                Abar = Ji @ added @ Ji.T
                pbar = torch.softmax(fbar, 0)
                Sbar = torch.diag(pbar) - torch.outer(pbar, pbar)
                rbar = pbar - torch.eye(n_classes, dtype=pi.dtype)[oracle.y[i]]
                fbar = fbar + pseudo_shift(Abar, Sbar, rbar, lambda M: fractional(M, -q), -1)
                alpha[j, i, label] = torch.logsumexp(fbar, 0) - fbar[oracle.y[i]]
    return alpha, tau


def newton_digits(W: list, X: list, y: list, penalty: float, x: list, q: int) -> tuple:
    """`newton_scores` of one object and a linear model W (C, d) in 60 digits, q = 0 or 1: α (n, C), τ (C,), largest eigenvalue of SA."""
    with mpmath.workdps(60):
        W, n_classes = mpmath.matrix(W), len(W)

        def soft(f):
            e = [mpmath.exp(v) for v in f]
            return mpmath.matrix([v / sum(e) for v in e])

        def curvature(pi):
            return mpmath.diag(list(pi)) - pi * pi.T

        def unit(label):
            return mpmath.matrix([int(c == label) for c in range(n_classes)])

        def jacobian(point):
            return mpmath.matrix([[v * (c == k) for k in range(n_classes) for v in point] for c in range(n_classes)])

        def loss(f, label):
            return float(mpmath.log1p(sum(mpmath.exp(f[c] - f[label]) for c in range(n_classes) if c != label)))

        J, own = [jacobian(point) for point in X], jacobian(x)
        F, f = [W * mpmath.matrix(point) for point in X], W * mpmath.matrix(x)
        H = penalty * mpmath.eye(own.cols)
        for Ji, fi in zip(J, F, strict=True):
            H += Ji.T * curvature(soft(fi)) * Ji
        S, A, eye = curvature(soft(f)), own * mpmath.inverse(H) * own.T, mpmath.eye(n_classes)
        added = mpmath.inverse(H + own.T * S * own)
        alpha, tau, largest = np.zeros((len(X), n_classes)), np.zeros(n_classes), 0.0
        for label in range(n_classes):
            r = soft(f) - unit(label)
            tau[label] = loss(f if q else f - A * mpmath.lu_solve(eye + S * A, r), label)
            for i, (Ji, fi) in enumerate(zip(J, F, strict=True)):
                fbar, Abar = fi - Ji * (added * (own.T * r)), Ji * added * Ji.T
                if q:
                    T = curvature(soft(fbar)) * Abar
                    largest = max(largest, *(float(abs(v)) for v in mpmath.eig(T, left=False, right=False)))
                    fbar = fbar + Abar * mpmath.lu_solve(eye - T, soft(fbar) - unit(y[i]))
                alpha[i, label] = loss(fbar, y[i])
        return alpha, tau, largest


def pseudo_shift(A: Tensor, S: Tensor, r: Tensor, power, sign: int) -> Tensor:
    """S⁺(power(I ± SA) − I)r, plus nothing along the null space of S: literal, and only for well-conditioned S."""
    eye = torch.eye(len(r), dtype=r.dtype)
    # S is singular along the ones: an eigenvalue of zero may round to more than pinv's own cut-off of 3 eps.
    shift = torch.linalg.pinv(S, hermitian=True, rtol=1e-12) @ ((power(eye + sign * S @ A) - eye) @ r)
    return shift  # up to a multiple of the ones vector, to which the loss is blind


def fractional(M: Tensor, exponent: float) -> Tensor:
    """A real power of a matrix with positive eigenvalues, by its (non-symmetric) eigendecomposition."""
    values, vectors = torch.linalg.eig(M)
    return (vectors @ torch.diag(values**exponent) @ torch.linalg.inv(vectors)).real


def label_score(pi, y: int, score: str, u: float = 0.0, k_reg: int = 0, lambda_reg: float = 0.0) -> float:
    """The score of label y from the probabilities pi of one object, label by label; ties ranked by the order of labels."""
    if score == "loss":
        return -np.log(pi[y])
    if score == "lac":
        return 1 - pi[y]
    if score == "margin":
        return max(pi[k] for k in range(len(pi)) if k != y) - pi[y]
    if score not in ("aps", "raps"):
        raise ValueError(f"{score!r} has no literal formula here")
    before = [k for k in range(len(pi)) if pi[k] > pi[y] or (pi[k] == pi[y] and k < y)]
    total = sum(pi[k] for k in before) + pi[y] - u * pi[y]
    return total + (lambda_reg * max(0, len(before) + 1 - k_reg) if score == "raps" else 0.0)


def plus_rule(scores, by_models, epsilon: float) -> bool:
    """CV+ and jackknife+ of one label: #{i : s_i < s^(−k(i))(x, y)} < (1 − ε)(n + 1), scores (n,) of points and of the label (n,)."""
    smaller = sum(own < other for own, other in zip(scores, by_models, strict=True))
    return smaller < (1 - epsilon) * (len(scores) + 1) - 1e-9


def literal_mean(points):
    """Mean and standard error of the mean."""
    values = [float(v) for v in points]
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def folds_scores(train, X, y, fold, candidate, label: int, own: int, n_classes: int, honest: bool) -> tuple:
    """K-fold full CP by a literal loop: scores of the training points (n,) and of the candidate, which is in fold `own`.

    `train(X, y)` returns a function that gives log-probabilities. Where not `honest`, no model has seen the candidate.
    """
    points, labels = np.vstack([X, candidate[None]]), np.append(y, label)
    folds = np.append(fold, own)
    alpha = np.zeros(len(points))
    for j in range(len(points)):
        seen = [i for i in range(len(points)) if folds[i] != folds[j] and (honest or i < len(X))]
        alpha[j] = -train(points[seen], labels[seen])(points[j : j + 1])[0, labels[j]]
    return alpha[:-1], alpha[-1]
