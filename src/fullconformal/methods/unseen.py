"""Intervals of any regressor, by models that have not seen the point: those without its fold, or the trees that did not draw it.

    r_j = y_j − f_{−j}(x_j)        p(y) = (1 + #{j : |r_j| ≥ |y − f_{−*}(x)|})/(n + 1)

f_{−*} is what would not have seen the candidate: the model without its fold, or a random share of the trees. `methods.folds` and
`methods.oob` say why such scores are exchangeable, and what is left out. The other scores do not move with y, so that p(y) falls with the
distance from f_{−*}(x): an interval from one quantile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullconformal.conformity import Band
from fullconformal.diagnostics import Figures
from fullconformal.guarantees import Guarantee
from fullconformal.intervals import Distribution, Steps
from fullconformal.methods.base import Config, FloatArray, Values
from fullconformal.methods.folds import ByFolds, check_trainings, train_folds
from fullconformal.methods.oob import PROMISE, REGRESSORS, Forest
from fullconformal.methods.parts import FoldModels
from fullconformal.methods.regression import EPS, FittedRegression, RegressionMethod, RegressionQuery, blocks
from fullconformal.storage import require, savable


class FittedUnseen(FittedRegression):
    """Residuals (n,) of the training points by models that have not seen them."""

    takes_scheme, keeps_points = False, False

    def __init__(self, residual: FloatArray):
        self.residual, self.n = residual, len(residual)

    def holds(self, X: Any) -> bool:
        return True

    def residuals(self) -> FloatArray:
        return self.residual

    @abstractmethod
    def candidate_values(self, X: Any) -> FloatArray:
        """Predictions (m,) of objects X by what would not have seen their candidates."""

    @abstractmethod
    def precision(self, X: Any) -> float:
        """The unit of rounding of predictions."""

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        if query.q == 0:
            raise ValueError(
                f"scheme='ordinary' does not go with method={self.method!r}: no model has seen the point that it scores; take 'deleted'."
            )
        f, eps = self.candidate_values(X)[:, None], self.precision(X)
        size, one = np.abs(self.residual), np.zeros(self.n, dtype=np.int64)
        for at in blocks(f, self.n, query.progress):
            lower, upper = Band(f[at], f[at], np.ones_like(f[at]), eps).pieces(size, one)
            yield query.steps(lower, upper, np.arange(self.n), self.n, at)

    def distributions(self, X: Any, query: RegressionQuery) -> Iterator[Distribution]:
        f = self.candidate_values(X)
        for at in blocks(f, self.n, query.progress):
            yield Distribution.of(f[at, None] + self.residual)

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        residual = state["residual"]
        require(residual.ndim == 1 and bool(np.isfinite(residual).all()), "residuals")


@savable
class FittedFoldsRegression(ByFolds, FittedUnseen):
    """Models without each fold."""

    def __init__(self, trained: FoldModels, residual: FloatArray, grouped: bool = False):
        super().__init__(residual)
        self.trained, self.grouped = trained, grouped

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]
        """What is promised of its intervals."""
        return self.trained.promise(grouped=self.grouped)

    def predict(self, X: Any) -> FloatArray:
        return np.asarray(sum(self.trained.outputs(X)) / len(self.trained.models))[:, 0]

    def candidate_values(self, X: Any) -> FloatArray:
        return np.asarray(sum(self.trained.candidate_outputs(X)) / len(self.trained.fold))[:, 0]

    @property
    def figures(self) -> Figures:
        facts = {"folds": f"{self.trained.folds}", "models": f"{len(self.trained.models)}"}
        return Figures(self.n, np.nan, np.nan, facts)

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        state["trained"].verify(len(state["residual"]), 1)
        super().check_state(state)


@savable
class FittedForest(FittedUnseen):
    """A forest, and the mean value, which is predicted where no tree is kept."""

    method, guarantee = "oob", PROMISE

    def __init__(self, forest: Forest, residual: FloatArray, mean: float):
        super().__init__(residual)
        self.forest, self.mean = forest, mean

    def holds(self, X: Any) -> bool:
        return self.forest.holds(X)

    def predict(self, X: Any) -> FloatArray:
        return np.asarray(self.forest.model.predict(X), dtype=np.float64)

    def candidate_values(self, X: Any) -> FloatArray:
        return np.asarray(self.forest.candidates(X, 1, self.mean)[:, 0])

    def precision(self, X: Any) -> float:
        # The mean of B numbers is off by at most B units.
        return (len(self.forest) + 1) * EPS

    @property
    def figures(self) -> Figures:
        return Figures(self.n, np.nan, np.nan, {"out-of-bag": self.forest.few})

    @property
    def warnings(self) -> list[str]:
        """Of too few trees: a point that all of them drew has the mean value for a prediction."""
        if (none := (1 - self.forest.share) ** len(self.forest)) <= 0.01:
            return []
        return [f"{self.forest.few}, and none to score {none:.0%} of them: grow more trees (n_estimators=100)"]

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        state["forest"].verify(REGRESSORS)
        require(bool(np.isfinite(state["mean"])), "forest")
        super().check_state(state)


@savable
@dataclass(frozen=True)
class FoldsRegression(RegressionMethod):
    """Full CP of any regressor from K trainings: every point is scored by the model that has not seen its fold.

    Parameters
    ----------
    model : regressor or Pipeline
        Set by `FullConformalRegressor`.
    folds, repeats : int
        K, and how many times folds are drawn; a point's prediction is then the mean over them.
    """

    folds: int = 10
    repeats: int = 1

    name = "folds"
    takes_pipeline = True
    takes_weights = True

    def fit(self, bag: Values, config: Config) -> FittedFoldsRegression:
        check_trainings(self.folds, len(bag.y), config)
        honest, outputs, models, _ = train_folds(self.model, bag, config, None, self.folds, self.repeats)
        residual = bag.y - outputs.mean(axis=0)[:, 0]
        trained = FoldModels(models, honest.fold, self.folds, config.seed)
        fitted = FittedFoldsRegression(trained, residual, bag.groups is not None)
        fitted.honest = honest
        return fitted


@savable
class OutOfBagRegression(RegressionMethod):
    """Full CP of a forest from one fit: training points and candidates are scored by the trees that have not seen them."""

    name = "oob"

    def fit(self, bag: Values, config: Config) -> FittedForest:
        forest, mean = Forest.fit(self.model, bag.X, bag.y, config.seed), float(bag.y.mean())
        return FittedForest(forest, bag.y - forest.left_out(bag.X, 1, mean)[:, 0], mean)
