"""Literal, slow versions of what the convex solvers and the exact and symmetric scores compute: one fit at a time, NumPy.

The softmax model here has all C weight rows and a damped gauge direction, unlike the library's, so the two share no formula.
"""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from threadpoolctl import threadpool_limits

from fullconformal.linear.bag import LinearBag


def one_hot(y, C):
    return np.eye(C)[y]


def logits(theta, X, C):
    """Logits (n, C) of weights (d, K): K = 1 for two classes, (0, xᵀθ); else K = C."""
    f = X @ theta
    return np.hstack([np.zeros((len(X), 1)), f]) if C == 2 else f


def losses(theta, X, y, C):
    return loss_of(logits(theta, X, C), y)


def loss_of(f, y):
    """ℓ = log(1 + Σ_{k≠y} e^(f_k − f_y)), which keeps its digits when it is small."""
    gap = f - np.take_along_axis(f, y[:, None], 1)
    gap[np.arange(len(y)), y] = -np.inf
    return np.logaddexp(0.0, logsumexp(gap, axis=1))


def outputs(M, C):
    """What of a C-vector or C × C matrix belongs to the model's outputs: class 1 alone for two classes."""
    return M[1:] if C == 2 else M


def second(pi, C):
    S = np.diag(pi) - np.outer(pi, pi)
    return S[1:, 1:] if C == 2 else S


def penalty_matrix(penalty, K):
    return np.kron(np.diag(penalty), np.eye(K))


def gauge(penalty, K):
    """Projector onto the directions nothing depends on: one number added to all C weights of an unpenalised feature."""
    if K == 1:
        return np.zeros((len(penalty), len(penalty)))
    return np.kron(np.diag((np.asarray(penalty) == 0).astype(float)), np.ones((K, K)))


def hessian(theta, X, y, C, penalty):
    K = theta.shape[1]
    pi = softmax(logits(theta, X, C), axis=1)
    J = np.einsum("nd,kl->nkdl", X, np.eye(K)).reshape(len(X), K, -1)
    S = pi[:, :, None] * np.eye(C) - pi[:, :, None] * pi[:, None, :]
    S = S[:, 1:, 1:] if C == 2 else S
    SJ = (S @ J).reshape(len(X) * K, -1)
    return J.reshape(len(X) * K, -1).T @ SJ + penalty_matrix(penalty, K) + gauge(penalty, K)


def gradient(theta, X, y, C, penalty):
    r = softmax(logits(theta, X, C), axis=1) - one_hot(y, C)
    r = r[:, 1:] if C == 2 else r
    return X.T @ r + np.asarray(penalty)[:, None] * theta


def objective(theta, X, y, C, penalty):
    return losses(theta, X, y, C).sum() + 0.5 * (np.asarray(penalty)[:, None] * theta**2).sum()


def fit(X, y, C, penalty, theta=None, tolerance=1e-12):
    """Newton with backtracking, to |∇F|∞ ≤ tolerance or to where rounding stops it."""
    K = 1 if C == 2 else C
    theta = np.zeros((X.shape[1], K)) if theta is None else theta
    for _ in range(200):
        g = gradient(theta, X, y, C, penalty)
        if np.abs(g).max() <= tolerance:
            return theta
        step = np.linalg.solve(hessian(theta, X, y, C, penalty), g.ravel()).reshape(theta.shape)
        F, t = objective(theta, X, y, C, penalty), 1.0
        while objective(theta - t * step, X, y, C, penalty) > F + 1e-13 * abs(F) and t > 1e-10:
            t /= 2
        if t * np.ptp(logits(step, X, C), axis=1).max() <= 1e-12:
            return theta - t * step
        theta = theta - t * step
    raise RuntimeError("no convergence")


def exact_scores(X, y, C, penalty, x, label, q):
    """Scores (n,) of the training points and of the candidate: full CP itself, q = 0 ordinary, q = 1 deleted."""
    X1, y1 = np.vstack([X, x]), np.append(y, label)
    full = fit(X1, y1, C, penalty)
    if q == 0:
        alpha = losses(full, X1, y1, C)
    else:
        alpha = np.empty(len(y1))
        for i in range(len(y1)):
            keep = np.arange(len(y1)) != i
            theta = fit(X1[keep], y1[keep], C, penalty, full)
            alpha[i] = losses(theta, X1[i : i + 1], y1[i : i + 1], C)[0]
    return alpha[:-1], alpha[-1]


def symmetric_scores(X, y, C, penalty, q):
    """Scores (n,) of all points of one bag: ℓ(y_i, f_i + A^½ φ_q(A^½ S A^½) A^½ r) at the bag's own fit."""
    theta = fit(X, y, C, penalty)
    K = theta.shape[1]
    H = hessian(theta, X, y, C, penalty)
    f = logits(theta, X, C)
    pi = softmax(f, axis=1)
    alpha = np.empty(len(y))
    for i, x in enumerate(X):
        J = np.kron(x, np.eye(K))
        A = J @ np.linalg.solve(H, J.T)
        r, S = outputs(pi[i] - one_hot(y[i], C), C), second(pi[i], C)
        values, vectors = np.linalg.eigh((A + A.T) / 2)
        root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
        t, U = np.linalg.eigh(root @ S @ root)
        phi = np.array([((1 - v) ** -q - 1) / v if v > 1e-8 else q + q * (q + 1) / 2 * v for v in t])
        shifted = f[i].copy()
        shifted[-K:] += root @ (U * phi @ U.T) @ root @ r
        alpha[i] = loss_of(shifted[None], y[i : i + 1])[0]
    return alpha


def p_value(alpha, tau, weight=None, own=1.0, tolerance=1e-8):
    """p-value from scores; two closer than the tolerance are tied."""
    weight = np.ones(len(alpha)) if weight is None else weight
    return (own + weight[alpha >= tau - tolerance * min(1.0, tau)].sum()) / (own + weight.sum())


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products wait for their threads longer than they take where others use the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


@st.composite
def problems(draw, max_size=200, max_features=30):
    """A random classification problem with its penalty, and one test point."""
    C = draw(st.sampled_from([2, 3]))
    n = draw(st.integers(20, max_size))
    d = draw(st.integers(1, max_features))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    separable = draw(st.booleans())
    X = rng.normal(size=(n + 1, d)) * np.exp(draw(st.floats(-1, 1)))
    scores = X @ rng.normal(size=(d, C)) + rng.normal(size=C) / 2
    y = (scores if separable else scores + 2 * rng.gumbel(size=scores.shape)).argmax(1)[:n]
    y[: 2 * C] = np.arange(2 * C) % C  # every class at least twice
    intercept = draw(st.booleans())
    penalty = np.full(d, 10 ** draw(st.floats(-2, 1)))
    if intercept:
        X, penalty = np.hstack([X, np.ones((n + 1, 1))]), np.append(penalty, 0.0)
    if draw(st.booleans()):
        X[-1] = X[0]  # the test point is a training point: a tie
    return X[:n], y, C, penalty, X[n:]


def bag_of(X, y, C, penalty):
    """The library's bag of a problem."""
    return LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))
