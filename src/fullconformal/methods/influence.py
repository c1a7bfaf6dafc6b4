"""The paper's method: one fit, one curvature, one gradient per training point, and influences instead of refits."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fullconformal.curvature import CURVATURES, Curvature, Factor
from fullconformal.curvature.select import Choice, check, choose, held_parameters, hold_fixed, trainable
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.influence import APPROXIMATIONS, shards
from fullconformal.influence.counter import direct_counts
from fullconformal.influence.prepared import Known, Prepared, prepare
from fullconformal.influence.scores import all_scores, check_far, count_scores
from fullconformal.influence.shards import Fit
from fullconformal.linear.span import Span, span_of
from fullconformal.methods.base import Bag, Config, FloatArray, Method, Query
from fullconformal.methods.fitting import FittedProblem, fit_problem, settings_of
from fullconformal.models.adapters import penalises
from fullconformal.models.requirements import check_squares, name_of
from fullconformal.problem import Problem
from fullconformal.pvalues import Counts
from fullconformal.runtime.numerics import alone
from fullconformal.runtime.tasks import stage
from fullconformal.storage import budget, expect, printable, require, savable


@savable
class FittedInfluence(FittedProblem):
    """A problem at its fit, and what is prepared of its training points."""

    method = "influence"

    def __init__(
        self, prepared: Prepared, curvature: str, damping_chosen: bool, held: str = "", estimates: tuple[str, ...] = (),
        span: Span | None = None,
    ):  # fmt: skip
        """`held` names the parameters that the curvature leaves out, `estimates` what the curvatures considered would take.

        Where there is a `span` the problem's inputs are coordinates in it.
        """
        super().__init__(prepared.problem)
        self.prepared, self.span = prepared, span
        self.curvature, self.damping_chosen, self.held, self.estimates = curvature, damping_chosen, held, estimates

    def holds(self, X: Any) -> bool:
        return super().holds(X if self.span is None else self.span.coordinates(X))

    def inputs(self, X: Any) -> Tensor:
        if self.span is None:
            return super().inputs(X)
        if self.problem.X.dtype != torch.float64:
            # Whose error names a column.
            super().inputs(X)
        return super().inputs(self.span.coordinates(X))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        X, prepared = self.inputs(X), self.prepared
        check_far(APPROXIMATIONS[query.approximation], prepared, X)
        if query.work.shared:
            # What travels to workers: no weights, which are cut to their shards, and nothing of this process.
            asked = Query(query.q, query.approximation, query.prune, None, query.class_conditional)
            factor = prepared.factor
            key = repr((asked.q, asked.approximation, asked.class_conditional, type(factor).__name__, factor.damping))
            rule = partial(shard_counts, query=asked)
            weights = None if query.points is None else torch.as_tensor(query.points, device=X.device)
            greater, equal = shards.counts(prepared, X, weights, rule, key, query.work, query.progress)
            return greater, equal
        with alone(max(self.n, len(X) * self.problem.n_classes) * self.problem.size):
            out = influence_counts(prepared, X, query)
        return out.greater, out.equal

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        alpha, tau = all_scores(APPROXIMATIONS[query.approximation], self.prepared, self.inputs(X), query.q)
        return alpha.double().cpu().numpy(), tau.double().cpu().numpy()

    @cached_property
    def diagnostics(self) -> Diagnostics:
        return self._diagnose()

    @property
    def warnings(self) -> list[str]:
        return self._diagnose(search=False).warnings

    def _diagnose(self, search: bool = True) -> Diagnostics:
        return diagnose(self.prepared, self.curvature, self.damping_chosen, False, self.held, self.estimates, search)

    def state(self) -> dict[str, Any]:
        """What the curvature cost; gradients and half-solved gradients are made again, which takes less than a prediction."""
        prepared = ("problem", "factor", "loss", "self_influence", "memory")
        own = ("span", "curvature", "damping_chosen", "held", "estimates")
        return {name: getattr(self.prepared, name) for name in prepared} | {name: getattr(self, name) for name in own}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same, without a factorisation."""
        problem, factor = expect(state["problem"], Problem), expect(state["factor"], Factor)
        memory = budget(state["memory"])
        known = tuple(expect(state[name], Tensor) for name in ("loss", "self_influence"))
        require(all(part.shape == problem.y.shape and part.dtype == problem.X.dtype for part in known), "losses")
        require(all(bool(part.isfinite().all()) for part in known), "losses")
        solved = factor.solve(problem.theta[None])
        require(solved.shape == (1, problem.p) and bool(solved.isfinite().all()), "curvature")
        estimates = tuple(map(printable, expect(state["estimates"], tuple)))
        prepared = prepare(problem, factor, memory, known)
        named = printable(state["curvature"]), expect(state["damping_chosen"], bool), printable(state["held"])
        return cls(prepared, *named, estimates, expect(state["span"], Span, type(None)))


@savable
class Influence(Method):
    """Scores by influence functions, for every model with a loss and gradients."""

    name = "influence"

    def fit(self, bag: Bag, config: Config) -> FittedInfluence:
        span = self._span(bag, config)
        if span is not None:
            # Whose error names a column.
            check_squares(bag.X, name_of(config.dtype or torch.float64))
            bag = Bag(span.coordinates(bag.X), bag.y, bag.classes)
        fit = self._shared(bag, config)
        problem, choice = self.problem(bag, config, fit)
        keep = trainable(problem, choice.name)
        held = held_parameters(problem, keep) if choice.name in ("kfac", "ekfac") else ""
        estimates = tuple(map(str, choice.estimates))
        config.work.say(f"curvature {choice.name}, of what was considered: {'; '.join(estimates)}")
        ready = prepare_with(hold_fixed(problem, keep), choice.curvature, config.memory, fit)
        name = {"last_layer": "ggn of the last layer"}.get(choice.name, choice.name)
        return FittedInfluence(ready, name, choice.curvature.damping is None, held, estimates, span)

    def problem(self, bag: Bag, config: Config, fit: Fit | None) -> tuple[Problem, Choice]:
        """The fitted problem, from the parts of a fit that is shared out where there is one; and its curvature.

        Where no curvature fits the memory that is told before any training.
        """
        choices = list[Choice]()

        def fitted(trained: bool) -> Problem:
            trained = trained and isinstance(self.model, nn.Module) and config.head is None
            given = replace(config, prefit=True) if trained else config
            return fit_problem(self.model, bag, given, check=lambda stated: choices.append(choice_of(stated, config)))

        problem = fitted(False) if fit is None else fit.problem(fitted)
        return problem, choices[-1] if choices else choice_of(problem, config)

    def _span(self, bag: Bag, config: Config) -> Span | None:
        """The span of the objects where coordinates in it may be taken: for regressions fitted here, with an L2 penalty.

        Approximations by Kronecker products count the columns, and checkpoints know objects by their bytes, which coordinates that another
        machine makes need not have.
        """
        fitted = penalises(self.model, config.l2) and not config.prefit
        literal = isinstance(config.curvature, str) and config.curvature not in ("kfac", "ekfac")
        plain = config.work.checkpoint is None and isinstance(bag.X, np.ndarray) and bag.X.ndim == 2
        return span_of(bag.X) if fitted and literal and plain else None

    def _shared(self, bag: Bag, config: Config) -> Fit | None:
        """The parts of a fit that is shared out, or None."""
        if not config.work.shared:
            return None
        model = self.model
        # The parameters of a scikit-learn model do not tell what it has learned.
        if config.prefit and not isinstance(model, nn.Module):
            model = fit_problem(model, bag, config).model
        key = settings_of(model), config.l2, config.prefit, config.max_epochs, config.seed, config.head
        how = str(config.dtype), config.curvature, config.damping, config.memory, config.loss
        return Fit.open(config.work, bag.X, bag.y, repr((*key, *how)))


def choice_of(problem: Problem, config: Config) -> Choice:
    """The curvature asked for or chosen, with estimates; a MemoryError where it does not fit."""
    asked, damping = config.curvature, config.damping
    if isinstance(asked, Curvature):
        name = type(asked).__name__
        name = name.lower() if name.lower() in ("kfac", "ekfac") else name
        return check(name, asked, {}, problem, config.memory, config.device)
    if asked == "auto":
        return choose(problem, damping, config.memory, config.device)
    others = {name: kind(damping) for name, kind in CURVATURES.items() if name != "hessian"}
    return check(asked, CURVATURES[asked](damping), others, problem, config.memory, config.device)


def prepare_with(problem: Problem, curvature: Curvature, memory: int, fit: Fit | None = None) -> Prepared:
    """The factor of the curvature and what is prepared of the training points; `fit` shares the work out where it is given."""
    # Up to 64 parameters a half-solved gradient takes no longer than a pass through the model.
    with alone(problem.n * problem.size * problem.p / 64):
        factor = curvature.factor(problem, memory // 4) if fit is None else fit.factor(curvature, problem, memory)
        memory -= factor.nbytes
        if fit is None:
            return prepare(problem, factor, memory)
        return Prepared(problem, factor, *fit.influences(problem, factor, memory), None, None, memory)


@stage("counts")
def influence_counts(prepared: Prepared, X: Tensor, query: Query) -> Counts:
    """Counts for the candidates of every x in X (m, ...): by the counter, or by the literal loop what it does not have."""
    problem = prepared.problem
    if query.approximation == "direct" and prepared.factor.positive_definite and query.prune:
        points = None if query.points is None else torch.as_tensor(query.points, device=X.device)
        return direct_counts(prepared, X, query.q, points, query.class_conditional, query.progress)
    given = query.weight(problem.y.cpu().numpy(), problem.n_classes)
    weight = None if given is None else torch.as_tensor(given, device=X.device)
    return count_scores(APPROXIMATIONS[query.approximation], prepared, X, query.q, weight, query.progress)


def shard_counts(
    problem: Problem, factor: Factor, memory: int, known: Known, X: Tensor, weights: Tensor | None, query: Query
) -> FloatArray:
    """Counts (2, m, C) of a shard of the training points, a problem of its own with losses and self-influences known."""
    points = None if weights is None else weights.cpu().numpy()
    out = influence_counts(prepare(problem, factor, memory, known), X, replace(query, points=points))
    return np.stack([out.greater, out.equal])
