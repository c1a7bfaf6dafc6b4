"""Engines: how the scores of full CP are had, once the model is fitted. One class a method."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.validation import _num_samples
from torch import Tensor, nn
from torch.nn.functional import softplus

from fullconformal.convex import Change, LinearBag
from fullconformal.curvature import GGN, Curvature, Factor
from fullconformal.curvature.base import SMALL as FEW
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.estimators import shards
from fullconformal.estimators.base import ConformalWarning
from fullconformal.estimators.fitting import Settings, fit_foreign, fit_problem, to_tensor
from fullconformal.estimators.shards import Fit, Work
from fullconformal.models.adapters import is_skorch
from fullconformal.models.fitting import alone
from fullconformal.problem import Problem
from fullconformal.scores.base import Counts, Progress, Training, all_scores, count_scores, prepare
from fullconformal.scores.direct import direct
from fullconformal.scores.exact import exact_counts
from fullconformal.scores.indirect import indirect
from fullconformal.scores.neighbors import KernelDensity, NearestNeighbors
from fullconformal.scores.newton import newton
from fullconformal.scores.pruned import pruned_counts
from fullconformal.scores.refits import refit_counts
from fullconformal.scores.single import is_worth_it, single_counts
from fullconformal.scores.symmetric import symmetric_bounds, symmetric_counts, symmetric_scores
from fullconformal.scores.windows import windowed_counts

APPROXIMATIONS = {"direct": direct, "indirect": indirect, "newton": newton}
FLOPS, PATIENCE = 5e9, 60.0  # what small Hessians reach a second (measured); seconds nobody is warned of
SMALL = 2**18  # entries of 𝓗⁻¹G below which one product is cheaper than pruning
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """What is asked about objects: the scheme q, how to approximate, comparison weights (n, C), where to tell progress."""

    q: float
    approximation: str = "direct"
    prune: bool | str = "auto"
    weight: FloatArray | None = None
    progress: Progress | None = None
    points: FloatArray | None = (
        None  # weights (n,) and class_conditional are what `weight` is made of; separable engines read these
    )
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


class Differentiable(Engine):
    """An engine around a model with parameters at θ_Z."""

    def __init__(self, problem: Problem):
        self.problem, self.n = problem, problem.n

    def inputs(self, X: Any) -> Tensor:
        """Objects as the model takes them."""
        return to_tensor(X, self.problem.X.device, self.problem.X.dtype)

    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""
        return problem_log_proba(self.problem, X)

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
    formed: float | None = None  # share of the pairs whose product the last counts took

    def __init__(
        self, problem: Problem, curvature: Curvature, name: str, memory: int, prune: bool | str, held: str = "",
        foretold: tuple[str, ...] = (), fit: Fit | None = None,
    ):  # fmt: skip
        """`held` names the parameters that the curvature leaves out, `foretold` what the curvatures considered would take.

        `fit` shares the work out where it is given.
        """
        super().__init__(problem)
        with alone(problem.n * problem.size):
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

    @cached_property
    def diagnostics(self) -> Diagnostics:
        return diagnose(self.training, self.name, self.damping_chosen, held=self.held, foretold=self.foretold)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        X, training = self.inputs(X), self.training
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


def influence_counts(training: Training, X: Tensor, weight: Tensor | None, query: Query) -> Counts:
    """Counts for the candidates of every x in X (m, ...), pruned where that is cheaper."""
    prunable = query.approximation == "direct" and training.factor.positive_definite
    # Other schemes than the deleted need ŝ anyway, which is most of the cost of pruning.
    cheaper = training.solved is None or query.q < 1
    if prunable and query.prune is not False and training.halved is not None and training.problem.p <= FEW:
        few = windowed_counts(training, X, query.q, weight, query.progress)
        if few is not None:
            return few
        cheaper = False
    if prunable and (query.prune is True or (query.prune == "auto" and cheaper)):
        return pruned_counts(training, X, query.q, weight, query.progress)
    if query.approximation == "direct" and query.q == 1 and weight is None and is_worth_it(training, len(X)):
        return single_counts(direct, training, X, query.progress)
    return count_scores(APPROXIMATIONS[query.approximation], training, X, query.q, weight, query.progress)


def shard_counts(
    problem: Problem, factor: Factor, memory: int, known: tuple[Tensor, Tensor], X: Tensor, weight: Tensor | None,
    query: Query,
) -> FloatArray:  # fmt: skip
    """Counts (2, m, C) of a shard of the training points, a problem of its own with losses and self-influences known."""
    training = prepare(problem, factor, memory, keeps_solved(problem, factor, query.prune), known)
    out = influence_counts(training, X, weight, query)
    return np.stack([out.greater, out.equal])


class Symmetric(Differentiable):
    """Every point of Z ∪ {ẑ} scored by the same function of the fit on Z ∪ {ẑ}: exactly valid. Linear models."""

    def __init__(self, problem: Problem, memory: int):
        super().__init__(problem)
        self.memory = memory
        (block,) = problem.blocks
        n_classes = problem.logits(problem.X[:1]).shape[1]
        penalty, W = (v.view(block.o, block.i).double() for v in (problem.penalty, problem.theta))
        start = W.T if block.o == 1 else (W[1:] - W[0]).T  # logits relative to the first class
        self.bag = LinearBag(self.design(problem.X), problem.y, n_classes, penalty[0], start)
        # Fitted now, so that what has no minimum is found now; and the model predicts with the better of the two fits.
        problem.assign(self.bag.base.coefficients().reshape(-1).to(problem.X.dtype))

    def design(self, X: Tensor) -> Tensor:
        """Inputs (k, d) of the linear layer, the intercept's one included, float64."""
        return self.problem.trace(X).inputs[self.problem.blocks[0].layer].double()

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        self.foretell(len(X))
        out = symmetric_counts(
            self.bag, self.design(self.inputs(X)), query.q, query.weight, query.progress, self.memory
        )
        return out.greater, out.equal

    def foretell(self, m: int) -> None:
        """Warn where the Hessians of all candidates will take long."""
        (n, d), K = self.bag.X.shape, self.bag.K
        flops = 2.0 * n * (K * (K + 1) / 2) * d * (d + 1) + 2.0 * (d * K) ** 3
        seconds = m * self.bag.n_classes * flops / FLOPS
        if seconds > PATIENCE:
            warnings.warn(
                f"exactly valid p-values of {m} objects may take about {seconds / 60:.0f} minutes ({self.bag.n_classes} classes, "
                f"{d * K} parameters); verbose=1 shows the progress, method='influence' approximates them in much less.",
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


class Neighbors(Engine):
    """Full CP itself for nearest neighbours and kernel densities, by updates of scores prepared once; no refits."""

    def __init__(self, estimator: Any, X: FloatArray, y: npt.NDArray[np.int64], n_classes: int, memory: int):
        X = np.asarray(X, dtype=np.float64)
        self.n = len(y)
        self.bag: NearestNeighbors | KernelDensity
        if isinstance(estimator, KNeighborsClassifier):
            orders = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "minkowski": float(estimator.p)}
            if estimator.weights != "uniform" or estimator.metric not in orders:
                raise ValueError(
                    f"estimator=KNeighborsClassifier(weights={estimator.weights!r}, metric={estimator.metric!r}) is not "
                    f"supported; use weights='uniform' and a metric among {sorted(orders)}."
                )
            k, order = int(estimator.n_neighbors), orders[estimator.metric]
            self.bag = NearestNeighbors.fit(X, y, n_classes, k, order, memory_budget=memory)
        else:
            self.bag = KernelDensity.fit(X, y, n_classes, estimator.bandwidth, memory_budget=memory)
        self.model, self.memory = clone(estimator).fit(X, y), memory

    def log_proba(self, X: Any) -> FloatArray:
        return _log(self.model.predict_proba(X))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q != 1:
            raise ValueError("these scores leave a point out of its own neighbours: use scheme='deleted'.")
        return self.bag.counts(X, query.weight, query.progress, self.memory)


@dataclass(frozen=True)
class FitScore:
    """Trains a classifier anew on a bag and returns its log-probabilities as a function."""

    estimator: Any
    settings: Settings
    n_classes: int

    def __call__(self, X: Any, y: npt.NDArray[np.int64]) -> LogProba:
        present, index = np.unique(y, return_inverse=True)
        if len(present) == 1:  # nothing to learn: the one label there is
            return LogProba(None, present, self.n_classes)
        if isinstance(self.estimator, nn.Module):
            problem = fit_problem(self.estimator, X, y, np.arange(self.n_classes), self.settings)
            return LogProba(problem, present, self.n_classes)
        if is_skorch(self.estimator):  # its module has an output for every class, present or not
            present, index = np.arange(self.n_classes), y
        return LogProba(fit_foreign(self.estimator, X, index, self.settings.seed), present, self.n_classes)


@dataclass(frozen=True)
class LogProba:
    """Log-probabilities (m, C) of a fitted model that knows the classes `present`; −inf for the others."""

    model: Any
    present: npt.NDArray[np.int64]
    n_classes: int

    def __call__(self, X: Any) -> FloatArray:
        if isinstance(self.model, Problem):
            return problem_log_proba(self.model, X)
        out = np.full((_num_samples(X), self.n_classes), -np.inf)
        if self.model is None:
            out[:, self.present] = 0.0
        else:
            X = np.asarray(X, dtype=np.float32) if is_skorch(self.model) else X
            out[:, self.present] = _log(self.model.predict_proba(X))
        return out

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        if isinstance(self.model, Problem):
            return torch.finfo(self.model.X.dtype).eps
        single = is_skorch(self.model) or getattr(X, "dtype", None) == np.float32
        return float(np.finfo(np.float32 if single else np.float64).eps)


class Refit(Engine):
    """Full CP itself for any classifier, by honest refits."""

    def __init__(
        self, fit_score: FitScore, X: Any, y: npt.NDArray[np.int64], n_jobs: int | None, checkpoint: Any, report: Any
    ):
        self.fit_score, self.X, self.y, self.n = fit_score, np.asarray(X), y, len(y)
        self.n_jobs, self.checkpoint, self.report = n_jobs, checkpoint, report
        self.model = fit_score(self.X, y)

    def log_proba(self, X: Any) -> FloatArray:
        out: FloatArray = self.model(X)
        return out

    def precision(self, X: Any) -> float:
        return self.model.precision(X)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        estimator, settings = self.fit_score.estimator, self.fit_score.settings
        key = repr((settings_of(estimator), settings.seed, settings.l2, settings.max_epochs))
        return refit_counts(
            self.fit_score, self.X, self.y, self.fit_score.n_classes, np.asarray(X), query.q, query.weight,
            self.n_jobs, self.checkpoint, query.progress, self.report, key=key, eps=self.precision(self.X),
        )  # fmt: skip


def settings_of(estimator: Any) -> list[tuple[str, str]]:
    """All that a classifier's training depends on, as text: its parameters to the last, or a digest of a module's weights."""
    if estimator is None:
        return []
    if isinstance(estimator, nn.Module):
        state = estimator.state_dict().items()
        return [("", repr(estimator)), *((k, sha256(v.cpu().numpy().tobytes()).hexdigest()) for k, v in state)]
    parameters = [(k, v) for k, v in sorted(estimator.get_params(deep=True).items()) if not hasattr(v, "get_params")]
    return [(type(estimator).__name__, ""), *((k, repr(v)) for k, v in parameters)]


def problem_log_proba(problem: Problem, X: Any) -> FloatArray:
    """Logarithms (m, C) of a model's probabilities, float64."""
    X = to_tensor(X, problem.X.device, problem.X.dtype)
    return torch.log_softmax(problem.logits(X).double(), -1).cpu().numpy()


def _log(proba: npt.NDArray[Any]) -> FloatArray:
    """Logarithm of probabilities (m, C), finite where they round to zero."""
    return np.log(np.maximum(proba.astype(np.float64), np.finfo(np.float64).tiny))
