"""Engines: how the scores of full CP are had, once the model is fitted. One class a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal.curvature import GGN, Curvature, Factor
from fullconformal.curvature.base import SMALL as FEW
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.influence import shards, tiles
from fullconformal.influence.direct import direct
from fullconformal.influence.indirect import indirect
from fullconformal.influence.newton import newton
from fullconformal.influence.prepared import Known, Training, prepare
from fullconformal.influence.pruned import pruned_counts
from fullconformal.influence.scores import Counts, Progress, all_scores, check_far, count_scores
from fullconformal.influence.shards import Fit, Work
from fullconformal.influence.single import is_worth_it, single_counts
from fullconformal.influence.windows import windowed_counts
from fullconformal.linear.span import Span
from fullconformal.models.tensors import finite_rows, to_tensor
from fullconformal.problem import Problem
from fullconformal.runtime.progress import stage
from fullconformal.runtime.threads import alone

APPROXIMATIONS = {"direct": direct, "indirect": indirect, "newton": newton}
SMALL = 2**18  # entries of 𝓗⁻¹G below which one product is cheaper than pruning
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
        training = prepare(self.problem, GGN().factor(self.problem), 2**30, keep_solved=False)
        return diagnose(training, "ggn", True, valid=True)


class Influence(Differentiable):
    """The paper's approximation: one fit, one curvature, one gradient a point."""

    valid = False
    span: Span | None = None  # in which the problem's inputs are coordinates
    formed: float | None = (
        None  # share of the pairs whose product the last counts took; the example of a ResNet tells it
    )

    def __init__(
        self, problem: Problem, curvature: Curvature, name: str, memory: int, prune: bool | str, held: str = "",
        foretold: tuple[str, ...] = (), fit: Fit | None = None,
    ):  # fmt: skip
        """`held` names the parameters that the curvature leaves out, `foretold` what the curvatures considered would take.

        `fit` shares the work out where it is given.
        """
        super().__init__(problem)
        with alone(problem.n * problem.size * problem.p / SOLVES):
            factor = curvature.factor(problem, memory // 4) if fit is None else fit.factor(curvature, problem, memory)
            memory -= factor.nbytes
            self.training: Training
            if fit is None or not factor.travels:
                self.training = prepare(problem, factor, memory, keeps_solved(problem, factor, prune))
            else:
                known = fit.influences(problem, factor, memory)
                self.training = Training(problem, factor, *known, None, None, memory)
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
        return diagnose(self.training, self.name, self.damping_chosen, False, self.held, self.foretold, search)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        X, training = self.inputs(X), self.training
        check_far(APPROXIMATIONS[query.approximation], training, X)
        weight = None if query.weight is None else torch.as_tensor(query.weight, device=X.device)
        if training.factor.travels and query.work.shared:
            asked = Query(query.q, query.approximation, query.prune)
            key = repr((asked.q, asked.approximation, type(training.factor).__name__, training.factor.damping))
            rule = partial(shard_counts, query=asked)
            greater, equal = shards.counts(training, X, weight, rule, key, query.work, query.progress)
            return greater, equal
        with alone(max(self.n, len(X) * self.problem.n_classes) * self.problem.size):
            out = influence_counts(training, X, weight, query)
        self.formed = out.touched
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        alpha, tau = all_scores(APPROXIMATIONS[query.approximation], self.training, self.inputs(X), query.q)
        return alpha.double().cpu().numpy(), tau.double().cpu().numpy()


def keeps_solved(problem: Problem, factor: Factor, prune: bool | str) -> bool:
    """Whether to hold 𝓗⁻¹g_i of all points.

    One product with all of them costs 2np a test point (C times for parameters whose rows are written out), pruning at most C half-solves;
    small products beat bookkeeping. Of few parameters half-solved gradients serve both.
    """
    if factor.has_half and problem.p <= FEW:
        return False
    written = problem.blocks[0].o if problem.prefix_names else 0
    product = problem.n * (problem.p + (problem.n_classes - 1) * written)
    dense = product < max(problem.n_classes * factor.flops / 2, SMALL)
    return prune is not True and (dense or not factor.positive_definite)


@stage("counts")
def influence_counts(training: Training, X: Tensor, weight: Tensor | None, query: Query) -> Counts:
    """Counts for the candidates of every x in X (m, ...), pruned where that is cheaper."""
    prunable = query.approximation == "direct" and training.factor.positive_definite
    # Other schemes than the deleted need ŝ anyway, which is most of the cost of pruning.
    cheaper = training.solved is None or query.q < 1
    few_parameters = training.problem.p <= FEW and training.halved is not None
    if prunable and query.prune is not False and few_parameters:
        few = windowed_counts(training, X, query.q, weight, query.progress)
        if few is not None:
            return few
        cheaper = False
    if prunable and (query.prune is True or (query.prune == "auto" and cheaper)):
        by_class, points = query.class_conditional, None if query.points is None else torch.as_tensor(query.points)
        known = weight is None or by_class or points is not None  # what the weights are made of
        if known and tiles.is_worth_it(training, len(X), by_class):
            found = tiles.tiled_counts(training, X, query.q, query.progress, by_class, points)
            if found is not None:
                return found
        return pruned_counts(training, X, query.q, weight, query.progress)
    if query.approximation == "direct" and query.q == 1 and weight is None and is_worth_it(training, len(X)):
        return single_counts(direct, training, X, query.progress)
    return count_scores(APPROXIMATIONS[query.approximation], training, X, query.q, weight, query.progress)


def shard_counts(
    problem: Problem, factor: Factor, memory: int, known: Known, X: Tensor, weight: Tensor | None,
    query: Query,
) -> FloatArray:  # fmt: skip
    """Counts (2, m, C) of a shard of the training points, a problem of its own with losses and self-influences known."""
    training = prepare(problem, factor, memory, keeps_solved(problem, factor, query.prune), known)
    out = influence_counts(training, X, weight, query)
    return np.stack([out.greater, out.equal])


def problem_log_proba(problem: Problem, X: Any) -> FloatArray:
    """Logarithms (m, C) of a model's probabilities, float64, for objects (m, ...) or tensors made of them."""
    X = X if isinstance(X, Tensor) else to_tensor(X, problem.X.device, problem.X.dtype)
    return problem.loss.log_proba(problem.logits(X).double()).cpu().numpy()
