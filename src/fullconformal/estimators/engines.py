"""Engines: how the scores of full CP are had, once the model is fitted. One class a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullconformal.convex import Change, LinearBag
from fullconformal.curvature import GGN, Curvature
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.estimators.fitting import to_tensor
from fullconformal.problem import Problem
from fullconformal.scores.base import Progress, Training, all_scores, count_scores, prepare
from fullconformal.scores.direct import direct
from fullconformal.scores.exact import exact_counts
from fullconformal.scores.indirect import indirect
from fullconformal.scores.newton import newton
from fullconformal.scores.pruned import pruned_counts
from fullconformal.scores.symmetric import symmetric_bounds, symmetric_counts, symmetric_scores

APPROXIMATIONS = {"direct": direct, "indirect": indirect, "newton": newton}
SMALL = 2**20  # entries of 𝓗⁻¹G below which one product is cheaper than pruning
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """What is asked about objects: the scheme q, how to approximate, comparison weights (n, C), where to tell progress."""

    q: float
    approximation: str = "direct"
    prune: bool | str = "auto"
    weight: FloatArray | None = None
    progress: Progress | None = None


class Engine(ABC):
    """A fitted model that can count, for every candidate, the training points above it and tied with it."""

    #: whether sets hold the true label with the probability asked for, whatever the data
    valid = True

    def __init__(self, problem: Problem):
        self.problem = problem

    def inputs(self, X: Any) -> Tensor:
        """Objects as the model takes them."""
        return to_tensor(X, self.problem.X.device, self.problem.X.dtype)

    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""
        return torch.log_softmax(self.problem.logits(self.inputs(X)).double(), -1).cpu().numpy()

    @abstractmethod
    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Weight of the training points above and tied with each candidate, (m, C) each."""

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        """Scores α (m, C, n) and τ (m, C) of a few objects; None where the engine has no scores but orders."""
        return None

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Figures about the fit."""
        training = prepare(self.problem, GGN().factor(self.problem), 2**30, keep_solved=False)
        return diagnose(training, "ggn", True, valid=True)


class Influence(Engine):
    """The paper's approximation: one fit, one curvature, one gradient a point."""

    valid = False

    def __init__(self, problem: Problem, curvature: Curvature, name: str, memory: int, prune: bool | str):
        super().__init__(problem)
        factor = curvature.factor(problem)
        n_classes = problem.logits(problem.X[:1]).shape[1]
        # One product with all of 𝓗⁻¹g_i costs 2np a test point, pruning C half-solves, Cp²; small products beat bookkeeping.
        dense = problem.n * problem.p < max(n_classes * problem.p**2 // 2, SMALL)
        keep = prune is not True and (dense or not factor.positive_definite)
        self.training: Training = prepare(problem, factor, memory - factor.matrix.nbytes, keep)
        self.name, self.damping_chosen = name, curvature.damping is None

    @cached_property
    def diagnostics(self) -> Diagnostics:
        return diagnose(self.training, self.name, self.damping_chosen)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        X, training = self.inputs(X), self.training
        weight = None if query.weight is None else torch.as_tensor(query.weight, device=X.device)
        prunable = query.approximation == "direct" and training.factor.positive_definite
        # Other schemes than the deleted need ŝ anyway, which is most of the cost of pruning.
        cheaper = training.solved is None or query.q < 1
        if prunable and (query.prune is True or (query.prune == "auto" and cheaper)):
            out = pruned_counts(training, X, query.q, weight, query.progress)
        else:
            out = count_scores(APPROXIMATIONS[query.approximation], training, X, query.q, weight, query.progress)
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        alpha, tau = all_scores(APPROXIMATIONS[query.approximation], self.training, self.inputs(X), query.q)
        return alpha.double().cpu().numpy(), tau.double().cpu().numpy()


class Symmetric(Engine):
    """Every point of Z ∪ {ẑ} scored by the same function of the fit on Z ∪ {ẑ}: exactly valid. Linear models."""

    def __init__(self, problem: Problem, memory: int):
        super().__init__(problem)
        self.memory = memory
        (block,) = problem.blocks
        n_classes = problem.logits(problem.X[:1]).shape[1]
        self.bag = LinearBag(
            self.design(problem.X), problem.y, n_classes, problem.penalty.view(block.o, block.i)[0].double()
        )
        _ = self.bag.base  # fitted now, so that what has no minimum is found now

    def design(self, X: Tensor) -> Tensor:
        """Inputs (k, d) of the linear layer, the intercept's one included, float64."""
        return self.problem.trace(X).inputs[self.problem.blocks[0].layer].double()

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        out = symmetric_counts(
            self.bag, self.design(self.inputs(X)), query.q, query.weight, query.progress, self.memory
        )
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        x = self.design(self.inputs(X)).repeat_interleave(self.bag.n_classes, 0)
        labels = torch.arange(self.bag.n_classes, device=x.device).repeat(len(X))
        out = symmetric_scores(self.bag, Change(x.T.contiguous(), labels), query.q)
        alpha, tau = (softplus(margin) for margin in (out.alpha, out.tau))  # margins are log(e^α − 1)
        return alpha.T.view(len(X), self.bag.n_classes, -1).cpu().numpy(), tau.view(len(X), -1).cpu().numpy()

    def bounds(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Counts, below and above, of the training points whose ordinary score is at least the candidate's."""
        out = symmetric_bounds(self.bag, self.design(self.inputs(X)), query.weight, query.progress, self.memory)
        return out.lower, out.upper


class Exact(Symmetric):
    """Full CP itself, every score from its own fit, by the batched leave-one-out solver. Linear models."""

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q not in (0.0, 1.0):
            raise ValueError("method='exact' has scheme='deleted' or 'ordinary'; a studentized score is no refit.")
        out = exact_counts(self.bag, self.design(self.inputs(X)), query.q, query.weight, query.progress, self.memory)
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> None:
        return None
