"""The engine of small logistic regressions with two classes: what is asked of it first comes from closed forms, the rest is made later."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fullconformal.diagnostics import Diagnostics, leverages
from fullconformal.estimators.curvatures import choose
from fullconformal.estimators.engines import FloatArray, Influence, Query, finite_rows
from fullconformal.estimators.fitting import NEWTON_TOLERANCE, linear_problem
from fullconformal.estimators.inputs import check_squares
from fullconformal.models.logistic import blas_alone, fit_binary
from fullconformal.scores.two_classes import TwoClassBag, two_class_bag, two_class_counts

NUMBERS = 2**18  # of a bag, its Hessian and pairs with objects, up to which starting functions is most of the time
HUGE = 1e100  # a value whose square may overflow


class TwoClasses(Influence):
    """Influence on the built-in logistic regression, which becomes one like any other as soon as more is asked of it."""

    def __init__(
        self, bag: TwoClassBag, a: FloatArray, y: npt.NDArray[np.int64], l2: float, memory: int, prune: bool | str
    ):
        self.n, self.bag, self.a, self.y, self.l2, self.memory, self.prune = len(y), bag, a, y, l2, memory, prune

    def __getattr__(self, name: str) -> Any:
        """What an Influence has and this one does not have yet."""
        if name.startswith("__") or "bag" not in self.__dict__:
            raise AttributeError(name)
        become_influence(self)
        return getattr(self, name)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        Z = self.coordinates(X)
        plain = query.approximation == "direct" and query.weight is None and query.prune == "auto"
        small = len(Z) * max(self.n, Z.shape[1]) <= NUMBERS and float(np.abs(Z).max()) < HUGE
        if not plain or query.work.shared or not small:
            become_influence(self)
            return self.counts(X, query)
        if query.progress is not None:
            query.progress(len(X), len(X))
        with blas_alone(Z.shape):
            return two_class_counts(self.bag, with_one(Z), query.q)

    def log_proba(self, X: Any) -> FloatArray:
        z = with_one(self.coordinates(X)) @ self.bag.w
        return finite_rows(-np.logaddexp(0.0, np.stack([z, -z], axis=1)))

    def precision(self, X: Any) -> float:
        return float(np.finfo(np.float64).eps)

    @property
    def warnings(self) -> list[str]:
        bag, p = self.bag, len(self.bag.w)
        loss, s = torch.from_numpy(bag.loss), torch.from_numpy(bag.self_influence)
        return Diagnostics(
            n_points=self.n,
            n_parameters=p,
            curvature="ggn",
            gradient=float(np.abs(bag.gradient).max()) / self.n,
            newton_decrement=float(np.linalg.norm(bag.inverse @ bag.gradient)),
            largest_influence=math.sqrt(float(s.max())),
            damping=0.0,
            damping_chosen=True,
            smallest_eigenvalue=math.nan,  # which `diagnostics` knows
            positive_definite=True,
            largest_leverage=float(leverages(loss, s).max()),
            negative_scores=0,
        ).warnings


def become_influence(engine: TwoClasses) -> None:
    """Make all that an Influence has, at the weights that are known. No method: another thread may change the class meanwhile.

    Threads that come here together make the same things, and what the closed forms need stays for those that are in them.
    """
    problem = linear_problem(engine.a[:, :-1], engine.y, engine.l2, torch.as_tensor(engine.bag.w))
    choice = choose(problem, None, engine.memory, "cpu")
    foretold = tuple(map(str, choice.estimates))
    Influence.__init__(engine, problem, choice.curvature, choice.name, engine.memory, engine.prune, "", foretold)
    engine.__class__ = Influence  # type: ignore[assignment]


def two_classes(X: Any, y: npt.NDArray[np.int64], l2: float, memory: int, prune: bool | str) -> TwoClasses | None:
    """Fit to objects X (n, d) and labels y (n,) 0 or 1; None where the curvature needs a closer look."""
    check_squares(X, "float64")
    a, target = with_one(X), y.astype(np.float64)
    penalty = np.append(np.full(X.shape[1], len(y) * l2), 0.0)
    with blas_alone(a.shape):
        w = fit_binary(a, target, penalty, np.zeros(a.shape[1]), len(y) * NEWTON_TOLERANCE)
        bag = two_class_bag(a, target, penalty, w)
    return None if bag is None else TwoClasses(bag, a, y, l2, memory, prune)


def with_one(X: Any) -> FloatArray:
    """Objects (k, d) in float64, a 1 for the intercept appended."""
    a = np.empty((len(X), X.shape[1] + 1))
    a[:, :-1], a[:, -1] = X, 1.0
    return a
