"""Engines of logistic regressions and of networks with a head, whose fit is convex: symmetric, and full CP itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullconformal.estimators.base import ConformalWarning
from fullconformal.linear import Change, LinearBag
from fullconformal.linear.exact import exact_counts
from fullconformal.linear.from_problem import Regression
from fullconformal.linear.span import Span
from fullconformal.linear.symmetric import symmetric_bounds, symmetric_counts, symmetric_scores
from fullconformal.methods.engines import Differentiable, FloatArray, Query
from fullconformal.problem import Problem

PATIENCE = 60.0  # seconds nobody is warned of


def symmetric_seconds(m: int, n: int, d: int, n_classes: int) -> float:
    """About how long the symmetric p-values of m objects take, n training points with d inputs, on one core.

    A candidate has Hessians and inverses, products of matrices, and for every point K × K matrices: those are passed through a few
    dozen times, and multiplied and factorised a few times. The coefficients were fitted to measured times from 2 to 100 classes,
    which they meet within a factor of two; where the fit with a candidate takes many steps (features not scaled) it may be four.
    """
    K = n_classes - 1
    pairs = n * K * (K + 1) / 2
    products = 2.0 * pairs * d * (d + 1) + 6.0 * (d * K) ** 3
    return m * n_classes * (2.3e-11 * products + 9e-8 * pairs + 5e-10 * n * K**3)


class Symmetric(Differentiable):
    """Every point of Z ∪ {ẑ} scored by the same function of the fit on Z ∪ {ẑ}: exactly valid. Linear models."""

    def __init__(self, problem: Problem, memory: int):
        """A linear problem, fitted here or from where it is."""
        super().__init__(problem)
        regression = Regression.of(problem)
        if regression is None:
            raise ValueError("the model is no logistic regression with one L2 penalty for all classes.")
        self.regression, self.memory = regression, memory
        # Fitted now, so that what has no minimum is found now.
        regression.assign(self.bag.base.theta)

    def open(self, start: Tensor, memory: int, span: Span | None) -> None:
        """The bag again, whose fit on Z starts from weights (d, K), and bytes for its solvers."""
        self.regression, self.memory = Regression.opened(self.problem, span, start), memory

    @property
    def bag(self) -> LinearBag:
        """The training points."""
        return self.regression.bag

    @property
    def span(self) -> Span | None:
        """In which inputs have their coordinates, where that takes fewer than columns."""
        return self.regression.span

    def design(self, X: Tensor) -> Tensor:
        """Inputs of the model as the bag knows them (k, d)."""
        return self.regression.design(X)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        self.foretell(len(X))
        return symmetric_counts(
            self.bag, self.design(self.inputs(X)), query.q, query.weight, query.progress, self.memory
        )

    def foretell(self, m: int) -> None:
        """Warn where all candidates will take long."""
        n, d = self.bag.X.shape
        seconds = symmetric_seconds(m, n, d, self.bag.n_classes)
        if seconds > PATIENCE:
            warnings.warn(
                f"exactly valid p-values of {m} objects may take about {seconds / 60:.0f} minutes ({self.bag.n_classes} classes, "
                f"{d * self.bag.K} parameters); verbose=1 shows the progress, method='influence' approximates them in much less.",
                ConformalWarning,
                stacklevel=4,
            )

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        x = self.design(self.inputs(X)).repeat_interleave(self.bag.n_classes, 0)
        labels = torch.arange(self.bag.n_classes, device=x.device).repeat(len(X))
        out = symmetric_scores(self.bag, Change(x.T.contiguous(), labels), query.q)
        alpha, tau = (softplus(margin) for margin in (out.alpha, out.tau))  # margins are log(e^α − 1)
        return alpha.T.view(len(X), self.bag.n_classes, -1).cpu().numpy(), tau.view(len(X), -1).cpu().numpy()

    def bounds(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Counts, below and above, of the training points whose ordinary score is at least the candidate's."""
        return symmetric_bounds(self.bag, self.design(self.inputs(X)), query.weight, query.progress, self.memory)


class Exact(Symmetric):
    """Full CP itself, every score from its own fit, by the batched leave-one-out solver. Linear models."""

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q not in (0.0, 1.0):
            raise ValueError("method='exact' has scheme='deleted' or 'ordinary'; a studentized score is no refit.")
        return exact_counts(self.bag, self.design(self.inputs(X)), query.q, query.weight, query.progress, self.memory)

    def scores(self, X: Any, query: Query) -> None:
        return None
