"""Networks of one hidden layer for benchmarks/uci.py: of the mean, with penalties by the marginal likelihood; and of a quantile.

`Network` follows Tailor et al. (ICLR 2025), who train by Adam, choose a penalty for each tensor of weights and the noise by the marginal
likelihood of the Laplace approximation, and stop where that is largest. Here steps are Levenberg–Marquardt's and the penalties MacKay's
fixed points (as Foresee and Hagan, 1997): some 40 steps for their 10,000.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Self

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.lapack import dpotri
from scipy.special import erf
from sklearn.base import BaseEstimator, RegressorMixin
from torch import nn


class Network(RegressorMixin, BaseEstimator):
    """One hidden layer of GELU units; X and y come in units of their standard deviations."""

    def __init__(self, hidden: int = 50, steps: int = 100, patience: int = 20, random_state: int = 0):
        self.hidden, self.steps, self.patience, self.random_state = hidden, steps, patience, random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> Self:
        """Train on points X (n, d), y (n,) until the marginal likelihood has not grown for `patience` steps."""
        (n, d), h = X.shape, self.hidden
        rng = np.random.default_rng(self.random_state)
        self.sizes_ = np.array([h * d, h, h, 1])
        # As PyTorch draws the weights of a layer.
        bounds = np.repeat([d**-0.5, d**-0.5, h**-0.5, h**-0.5], self.sizes_)
        theta, tensor = rng.uniform(-bounds, bounds), np.repeat(np.arange(4), self.sizes_)
        penalty, noise, damping, best, since = np.ones(4), 1.0, 0.1, np.inf, 0
        for step in range(self.steps):
            f, J = self._jacobian(X, theta)
            G, error, squares = J.T @ J, y - f, np.bincount(tensor, theta**2)
            factor = cho_factor(G + np.diag(penalty[tensor]), lower=True, check_finite=False)[0]
            logdet = 2 * np.log(np.diag(factor)).sum() - (self.sizes_ * np.log(penalty)).sum()
            evidence = (error @ error + penalty @ squares) / noise + n * np.log(noise) + logdet
            since += 1
            if step >= 5 and evidence < best:
                best, since, self.theta_, self.penalty_ = evidence, 0, theta, penalty
            if since > self.patience:
                break
            if step >= 5:
                # How many parameters of each tensor the data decide.
                decided = self.sizes_ - penalty * np.bincount(tensor, np.diag(dpotri(factor, lower=1)[0]))
                noise = error @ error / (n - decided.sum())
                goal = noise * np.maximum(decided, 1e-3) / squares
                penalty = np.clip(penalty * np.clip(goal / penalty, 1 / 3, 3), 1e-8, 1e6)
            theta, damping = self._step(X, y, theta, G, J.T @ error, error, penalty[tensor], damping)
        return self

    def _step(self, X, y, theta, G, slope, error, penalty, damping):  # type: ignore[no-untyped-def]
        """A step of Levenberg–Marquardt's that lowers the objective, and the next damping."""
        gradient, now = slope - penalty * theta, error @ error + penalty @ theta**2
        while True:
            factor = cho_factor(G + np.diag(penalty + damping), lower=True, check_finite=False)
            new = theta + cho_solve(factor, gradient, check_finite=False)
            if ((y - self._outputs(X, new)[0]) ** 2).sum() + penalty @ new**2 <= now or damping > 1e8:
                return new, max(damping / 4, 1e-6)
            damping *= 4

    def _tensors(self, theta: np.ndarray) -> tuple[np.ndarray, ...]:
        W, b, w, c = np.split(theta, np.cumsum(self.sizes_)[:-1])
        return W.reshape(self.hidden, -1), b, w, c

    def _outputs(self, X: np.ndarray, theta: np.ndarray) -> tuple[np.ndarray, ...]:
        """Outputs (n,), hidden units (n, h), and their inputs and Gaussian cdf there."""
        W, b, w, c = self._tensors(theta)
        z = X @ W.T + b
        cdf = (1 + erf(z / 2**0.5)) / 2
        return (z * cdf) @ w + c, z * cdf, z, cdf

    def _jacobian(self, X: np.ndarray, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f, units, z, cdf = self._outputs(X, theta)
        bend = (cdf + z * np.exp(-(z**2) / 2) / (2 * np.pi) ** 0.5) * self._tensors(theta)[2]
        first = (bend[:, :, None] * X[:, None, :]).reshape(len(X), -1)
        return f, np.concatenate([first, bend, units, np.ones((len(X), 1))], axis=1)

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Outputs (m,)."""
        return self._outputs(np.asarray(X), self.theta_)[0]

    def module(self) -> nn.Module:
        """The same as a module whose objective is half the sum of squares of errors and of all its parameters."""
        return Scaled(self._tensors(self.theta_), np.sqrt(self.penalty_))


class Scaled(nn.Module):
    """A network whose tensors stand in units of their penalties."""

    def __init__(self, tensors: tuple[np.ndarray, ...], roots: np.ndarray):
        super().__init__()
        self.tensors = nn.ParameterList(torch.tensor(t * r) for t, r in zip(tensors, roots, strict=True))
        self.roots = roots.tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs (n, 1)."""
        W, b, w, c = (t / r for t, r in zip(self.tensors, self.roots, strict=True))
        return nn.functional.gelu(x @ W.T + b) @ w[:, None] + c


@lru_cache(maxsize=1)
def _of_the_mean(X: bytes, y: bytes, n: int, hidden: int, seed: int) -> Network:
    """The network of the mean, trained once for all quantiles of the same points."""
    return Network(hidden, random_state=seed).fit(np.frombuffer(X).reshape(n, -1), np.frombuffer(y))


class QuantileNetwork(RegressorMixin, BaseEstimator):
    """The network of the mean, trained further by Adam for a quantile of y, with the penalties that it has."""

    def __init__(self, hidden: int = 50, steps: int = 500, quantile: float = 0.5, random_state: int = 0):
        self.hidden, self.steps, self.quantile, self.random_state = hidden, steps, quantile, random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> Self:
        """Train on points X (n, d), y (n,)."""
        X, y = np.ascontiguousarray(X, dtype=np.float64), np.ascontiguousarray(y, dtype=np.float64)
        network = _of_the_mean(X.tobytes(), y.tobytes(), len(y), self.hidden, self.random_state)
        self.module_ = network.module().float()
        inputs, targets = torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]
        optimiser = torch.optim.Adam(self.module_.parameters(), lr=0.005)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
        tau, n = self.quantile, len(y)
        for _ in range(self.steps):
            error = targets - self.module_(inputs)
            loss = torch.maximum(tau * error, (tau - 1) * error).mean()
            loss = loss + sum((t**2).sum() for t in self.module_.parameters()) / (2 * n)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Quantiles (m,)."""
        with torch.no_grad():
            return self.module_(torch.tensor(X, dtype=torch.float32))[:, 0].double().numpy()
