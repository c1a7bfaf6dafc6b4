"""Engines: how the scores of full CP are had, once the model is fitted. One class a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal.curvature import GGN, Curvature, Factor
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.influence import shards
from fullconformal.influence.counter import direct_counts
from fullconformal.influence.direct import direct
from fullconformal.influence.indirect import indirect
from fullconformal.influence.newton import newton
from fullconformal.influence.prepared import Known, Prepared, prepare
from fullconformal.influence.scores import Counts, Progress, all_scores, check_far, count_scores
from fullconformal.influence.shards import Fit, Work
from fullconformal.linear.span import Span
from fullconformal.models.tensors import finite_rows, to_tensor
from fullconformal.problem import Problem
from fullconformal.pvalues import comparison_weight
from fullconformal.runtime.threads import alone

APPROXIMATIONS = {"direct": direct, "indirect": indirect, "newton": newton}
SOLVES = 64  # parameters up to which a half-solved gradient takes no longer than a pass through the model
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """What is asked about objects: the scheme q, how to approximate, comparison weights (n, C), where to tell progress."""

    q: float
    approximation: str = "direct"
    prune: bool | str = "auto"
    weight: FloatArray | None = None
    progress: Progress | None = None
    # What `weight` is made of, the points' own weights (n,) and whether labels must be the same; separable engines read these.
    points: FloatArray | None = None
    class_conditional: bool = False
    work: Work = field(default_factory=Work)


class Engine(ABC):
    """A fitted model that can count, for every candidate, the training points above it and tied with it."""

    #: whether sets hold the true label with the probability asked for, whatever the data
    valid = True
    #: whether it takes the comparison weights as their two parts, so that the (n, C) matrix is never formed
    separable = False
    #: number of training points
    n: int

    @abstractmethod
    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""

    @abstractmethod
    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Weight of the training points above and tied with each candidate, (m, C) each."""

    def precision(self, X: Any) -> float:
        """The unit of rounding of `log_proba` for objects X."""
        return float(np.finfo(np.float64).eps)

    @property
    def diagnostics(self) -> Diagnostics:
        """Figures about the fit."""
        raise ValueError(
            "this method approximates nothing, so there is nothing to diagnose: its sets are exactly valid."
        )

    @property
    def warnings(self) -> list[str]:
        """What must be known before the sets are trusted."""
        return self.diagnostics.warnings


class Differentiable(Engine):
    """An engine around a model with parameters at θ_Z."""

    def __init__(self, problem: Problem):
        self.problem, self.n = problem, problem.n

    def inputs(self, X: Any) -> Tensor:
        """Objects as the model takes them."""
        return to_tensor(X, self.problem.X.device, self.problem.X.dtype)

    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""
        return finite_rows(problem_log_proba(self.problem, self.inputs(X)))

    def precision(self, X: Any) -> float:
        """The unit of rounding of `log_proba`."""
        return torch.finfo(self.problem.X.dtype).eps

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        """Scores α (m, C, n) and τ (m, C) of a few objects; None where the engine has no scores but orders."""
        return None

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Figures about the fit."""
        prepared = prepare(self.problem, GGN().factor(self.problem), 2**30)
        return diagnose(prepared, "ggn", True, valid=True)


class Influence(Differentiable):
    """The paper's approximation: one fit, one curvature, one gradient a point."""

    valid, separable = False, True
    span: Span | None = None  # in which the problem's inputs are coordinates

    def __init__(
        self, problem: Problem, curvature: Curvature, name: str, memory: int, held: str = "",
        foretold: tuple[str, ...] = (), fit: Fit | None = None,
    ):  # fmt: skip
        """`held` names the parameters that the curvature leaves out, `foretold` what the curvatures considered would take.

        `fit` shares the work out where it is given.
        """
        super().__init__(problem)
        with alone(problem.n * problem.size * problem.p / SOLVES):
            factor = curvature.factor(problem, memory // 4) if fit is None else fit.factor(curvature, problem, memory)
            memory -= factor.nbytes
            if fit is None:
                self.prepared = prepare(problem, factor, memory)
            else:
                known = fit.influences(problem, factor, memory)
                self.prepared = Prepared(problem, factor, *known, None, None, memory)
        self.name, self.damping_chosen = name, curvature.damping is None
        self.held, self.foretold = held, foretold
        self.curvature: Curvature | None = curvature

    def coordinates(self, X: Any) -> Any:
        """Objects (m, ...) as the problem knows them."""
        return X if self.span is None else self.span.coordinates(X)

    def inputs(self, X: Any) -> Tensor:
        if self.span is not None and self.problem.X.dtype != torch.float64:
            super().inputs(X)  # whose error names a column
        return super().inputs(self.coordinates(X))

    @cached_property
    def diagnostics(self) -> Diagnostics:
        return self._diagnose()

    @property
    def warnings(self) -> list[str]:
        return self._diagnose(search=False).warnings

    def _diagnose(self, search: bool = True) -> Diagnostics:
        return diagnose(self.prepared, self.name, self.damping_chosen, False, self.held, self.foretold, search)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        X, prepared = self.inputs(X), self.prepared
        check_far(APPROXIMATIONS[query.approximation], prepared, X)
        if query.work.shared:
            asked = Query(query.q, query.approximation, query.prune, class_conditional=query.class_conditional)
            factor = prepared.factor
            key = repr((asked.q, asked.approximation, asked.class_conditional, type(factor).__name__, factor.damping))
            points = None if query.points is None else torch.as_tensor(query.points, device=X.device)
            rule = partial(shard_counts, query=asked)
            greater, equal = shards.counts(prepared, X, points, rule, key, query.work, query.progress)
            return greater, equal
        with alone(max(self.n, len(X) * self.problem.n_classes) * self.problem.size):
            out = influence_counts(prepared, X, query)
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        alpha, tau = all_scores(APPROXIMATIONS[query.approximation], self.prepared, self.inputs(X), query.q)
        return alpha.double().cpu().numpy(), tau.double().cpu().numpy()


def influence_counts(prepared: Prepared, X: Tensor, query: Query) -> Counts:
    """Counts for the candidates of every x in X (m, ...): by the counter, or by the literal loop for what it does not have."""
    points = None if query.points is None else torch.as_tensor(query.points, device=X.device)
    if query.approximation == "direct" and prepared.factor.positive_definite and query.prune is not False:
        return direct_counts(prepared, X, query.q, points, query.class_conditional, query.progress)
    y, n_classes = prepared.problem.y.cpu().numpy(), prepared.problem.n_classes
    weight = comparison_weight(y, n_classes, class_conditional=query.class_conditional, weights=query.points)
    given = None if weight is None else torch.as_tensor(weight, device=X.device)
    return count_scores(APPROXIMATIONS[query.approximation], prepared, X, query.q, given, query.progress)


def shard_counts(
    problem: Problem, factor: Factor, memory: int, known: Known, X: Tensor, points: Tensor | None, query: Query
) -> FloatArray:
    """Counts (2, m, C) of a shard of the training points, a problem of its own with losses and self-influences known."""
    weights = None if points is None else points.cpu().numpy()
    out = influence_counts(prepare(problem, factor, memory, known), X, replace(query, points=weights))
    return np.stack([out.greater, out.equal])


def problem_log_proba(problem: Problem, X: Any) -> FloatArray:
    """Logarithms (m, C) of a model's probabilities, float64, for objects (m, ...) or tensors made of them."""
    X = X if isinstance(X, Tensor) else to_tensor(X, problem.X.device, problem.X.dtype)
    return problem.loss.log_proba(problem.logits(X).double()).cpu().numpy()
