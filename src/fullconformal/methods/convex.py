"""Methods for logistic regressions and for networks with a head, whose fit is convex: symmetric scores, and full CP itself."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fullconformal import pvalues
from fullconformal.curvature import GGN
from fullconformal.diagnostics import Diagnostics, diagnose
from fullconformal.guarantees import EXACT
from fullconformal.influence.prepared import prepare
from fullconformal.linear.bag import as_objects, with_labels
from fullconformal.linear.exact import exact_counts
from fullconformal.linear.from_problem import Regression
from fullconformal.linear.span import Span
from fullconformal.linear.symmetric import Enough, symmetric_bounds, symmetric_counts, symmetric_scores
from fullconformal.methods.base import Bag, Config, ConformalWarning, FloatArray, Method, Query
from fullconformal.methods.fitting import FittedProblem, fit_problem
from fullconformal.methods.outputs import problem_log_proba
from fullconformal.problem import Problem
from fullconformal.sets import members
from fullconformal.storage import budget, expect, require, savable


def symmetric_seconds(m: int, n: int, d: int, n_classes: int) -> float:
    """Roughly how long the symmetric p-values of m objects take, n training points with d inputs: for choices between methods.

    A choice must not depend on how busy a machine is. What people are told of is the pace of the work itself (`runtime.tasks.Watch`).
    """
    # A dozen products with the points and the inverse Hessian a candidate, and some hundred passes through all points and classes.
    K = n_classes - 1
    p = d * K
    return m * n_classes * (5e-10 * (4.0 * n * p + 2.0 * p * p) + 1.1e-7 * n * n_classes + 1.5e-9 * n * K**3)


def check_memory(n: int, d: int, K: int, memory: int) -> None:
    """Raise where the Hessian of a regression of n points on d columns, with K logits a point, does not fit."""
    # The Hessian, its factor and two of their size while they are made; residuals and logits.
    needed = 8 * (4 * (d * K) ** 2 + 4 * n * K)
    if needed > memory:
        raise MemoryError(
            f"the Hessian of {d * K:,} parameters ({K + 1:,} classes) needs about {needed / 2**30:.2g} GiB, memory_budget is "
            f"{memory / 2**30:.2g} GiB; raise it, or give fewer classes or columns."
        )


@savable
class FittedSymmetric(FittedProblem):
    """Every point of Z ∪ {ẑ} scored by the same function of the fit on Z ∪ {ẑ}: exactly valid."""

    method: ClassVar[str] = "symmetric"
    guarantee = EXACT
    quick = False

    def __init__(self, problem: Problem, regression: Regression, memory: int):
        super().__init__(problem)
        self.regression, self.bag, self.memory = regression, regression.bag, memory

    @classmethod
    def of(cls, problem: Problem, memory: int) -> Self:
        """Fit a linear problem as a bag."""
        regression = Regression.of(problem)
        if regression is None:
            raise ValueError("the model is no logistic regression with one L2 penalty for all classes.")
        n, d = regression.bag.X.shape
        check_memory(n, d, regression.bag.K, memory)
        # Fitted now, so that what has no minimum is found now.
        regression.assign(regression.bag.base.theta)
        return cls(problem, regression, memory)

    @property
    def takes_scales(self) -> bool:  # type: ignore[override]
        """Whether scales of columns are factors of the penalties."""
        return self.regression.takes_scales

    def objects(self, X: Any) -> Tensor:
        """Objects (m, ...) as the linear layer is given them."""
        return self.regression.design(self.inputs(X))

    def _scaled(self, X: Any, query: Query) -> tuple[Tensor, Tensor | None]:
        """The same, and factors (m, d) of the penalties where the query scales them."""
        if query.scales is None:
            return self.objects(X), None
        return self.regression.scaled_design(self.inputs(X), query.scales)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        return self._counted(X, query)

    def _counted(self, X: Any, query: Query, enough: Enough | None = None) -> tuple[FloatArray, FloatArray]:
        """Counts (m, C), which need not be told apart where they are enough."""
        (x, factors), weight = self._scaled(X, query), self.weight(query)
        return symmetric_counts(self.bag, x, query.q, weight, query.progress, self.memory, enough, factors)

    def decide(self, X: Any, query: Query, levels: FloatArray) -> FloatArray:
        total, epsilon = query.total(self.labels, self.n_classes), 1.0 - levels.ravel()

        def enough(labels: Tensor, surely: Tensor, possibly: Tensor) -> Tensor:
            """Whether p > ε is the same for the least and the largest count (B,), at every level."""
            whole = np.broadcast_to(total, self.n_classes)[labels.cpu().numpy()]
            least, most = (pvalues.p_values(c.cpu().numpy(), 0.0, whole) for c in (surely, possibly))
            same = members(least[:, None], epsilon) == members(most[:, None], epsilon)
            return torch.as_tensor(same.all(1), device=labels.device)

        found = self._counted(X, query, enough)
        return pvalues.p_values(*found, total)

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        out = symmetric_scores(self.bag, with_labels(self.bag, as_objects(*self._scaled(X, query))), query.q)
        # Margins are log(e^α − 1).
        alpha, tau = (softplus(margin) for margin in (out.alpha, out.tau))
        return alpha.T.view(len(X), self.n_classes, -1).cpu().numpy(), tau.view(len(X), -1).cpu().numpy()

    def bounds(self, X: Any, query: Query, own: Any = 1.0) -> tuple[FloatArray, FloatArray]:
        x, factors = self._scaled(X, query)
        least, most = symmetric_bounds(self.bag, x, self.weight(query), query.progress, self.memory, factors)
        total = query.total(self.labels, self.n_classes)
        return pvalues.p_values(least, 0.0 * least, total, own), pvalues.p_values(most, 0.0 * most, total, own)

    @cached_property
    def diagnostics(self) -> Diagnostics:
        prepared = prepare(self.problem, GGN().factor(self.problem), 2**30)
        told = diagnose(prepared, "ggn", True, valid=True)
        # A Newton step to the fit without a point is good while others hold that fit, too.
        if self.method != "symmetric" or told.largest_leverage <= 0.5:
            return told
        return replace(told, note=(
            f"The largest leverage is {told.largest_leverage:.2f}: scores of points without themselves are one Newton step, which is crude "
            "there, and sets may be larger than those of method='exact'; a stronger penalty (l2, or a smaller C) brings the two together."
        ))  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The problem, the span its inputs have coordinates in, and where its base fit started from."""
        span, start = self.regression.span, self.bag.start
        return {"problem": self.problem, "span": span, "start": start, "memory": self.memory}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same; the base fit anew from the same start, which gives the same bits."""
        problem, memory = expect(state["problem"], Problem), budget(state["memory"])
        start, span = expect(state["start"], Tensor), expect(state["span"], Span, type(None))
        # No more than a gibibyte, or what so many points can bear out: whatever the file says of memory.
        regression = Regression.opened(problem, span, start)
        n, d = regression.bag.X.shape
        check_memory(n, d, regression.bag.K, max(2**30, 2**12 * problem.X.nbytes))
        require(regression.bag.base.error < 1, "base fit")
        return cls(problem, regression, memory)


@savable
class FittedExact(FittedSymmetric):
    """Full CP itself, every score from its own fit, by the batched leave-one-out solver."""

    method = "exact"

    def _counted(self, X: Any, query: Query, enough: Enough | None = None) -> tuple[FloatArray, FloatArray]:
        if query.q not in (0.0, 1.0):
            raise ValueError(
                "method='exact' supports scheme='deleted' and 'ordinary' only: no refit gives a studentized score."
            )
        (x, factors), weight = self._scaled(X, query), self.weight(query)
        return exact_counts(self.bag, x, query.q, weight, query.progress, self.memory, enough, factors)

    def scores(self, X: Any, query: Query) -> None:
        return None


Convex = TypeVar("Convex", bound=FittedSymmetric)


def fit_convex(kind: type[Convex], model: Any, bag: Bag, config: Config) -> Convex:
    """A convex model fitted to the bag; a warning where it came fitted to something else, as what it had learned is then of no use."""
    if config.head is None and bag.X.ndim == 2 and not isinstance(model, nn.Module):
        # Before anything is allocated, where the columns are known, at least: no more are used than there are points.
        check_memory(len(bag.y), min(bag.X.shape), bag.n_classes - 1, config.memory)
    problem = fit_problem(model, bag, config, linear_fit=False)
    given = problem_log_proba(problem, problem.X) if config.prefit and config.head is None else None
    fitted = kind.of(problem, config.memory)
    if given is not None:
        far = float(np.abs(np.exp(given) - np.exp(problem_log_proba(problem, problem.X))).max())
        # By less than this a solver's tolerance moves probabilities.
        if far > 0.01:
            warnings.warn(
                f"prefit=True, but this {type(model).__name__} was not fitted to these data (its probabilities differ by up to {far:.2g} "
                f"from a fresh fit). method={kind.method!r} refits the model with every candidate, so it was fitted again with the same C, "
                "and predict uses the new fit. Give the data it was trained on, or take SplitConformalClassifier(prefit=True), which uses "
                "a model as it is.",
                ConformalWarning,
                stacklevel=5,
            )
    return fitted


@savable
class Symmetric(Method):
    """Exactly valid scores of convex models."""

    name = "symmetric"

    def fit(self, bag: Bag, config: Config) -> FittedSymmetric:
        return fit_convex(FittedSymmetric, self.model, bag, config)


@savable
class Exact(Method):
    """Full CP itself for convex models."""

    name = "exact"

    def fit(self, bag: Bag, config: Config) -> FittedExact:
        return fit_convex(FittedExact, self.model, bag, config)
