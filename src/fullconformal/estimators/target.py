"""Values as the model sees them: a function of y that goes up or down all the way, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import Pipeline

from fullconformal.intervals import Distribution, FloatArray, Steps
from fullconformal.models.requirements import split_pipeline
from fullconformal.models.transformers import learn_from_labels
from fullconformal.storage import expect, require, savable


def split_target(estimator: Any) -> tuple[Any, TransformedTargetRegressor | None]:
    """The regressor in a TransformedTargetRegressor, and that; an estimator of another kind as it is."""
    if not isinstance(estimator, TransformedTargetRegressor):
        return estimator, None
    # As scikit-learn does.
    return LinearRegression() if estimator.regressor is None else estimator.regressor, estimator


def learns_values(estimator: Any) -> str:
    """What in an estimator, before or around its model, is fitted to y, and would have to be with every candidate; empty for nothing."""
    inner, outer = split_target(estimator)
    transformers, model = split_pipeline(inner)
    wrapper = outer or split_target(model)[1]
    if wrapper is not None and wrapper.transformer is not None:
        return type(wrapper.transformer).__name__
    return learn_from_labels(transformers)


def without_target(estimator: Any) -> Any:
    """An estimator, or a Pipeline that ends in one, without its transformation of y."""
    inner = split_target(estimator)[0]
    if not isinstance(inner, Pipeline):
        return inner
    return Pipeline([*inner.steps[:-1], (inner.steps[-1][0], split_target(inner[-1])[0])])


@savable
@dataclass(frozen=True)
class Target:
    """A function of y and its inverse, None where the model sees y itself; whether it goes up."""

    func: Callable[[Any], Any] | None = None
    inverse: Callable[[Any], Any] | None = None
    rising: bool = True

    @classmethod
    def of(cls, estimator: Any, y: FloatArray) -> Self:
        """What an estimator, or the last step of a Pipeline, does to values y (n,)."""
        inner, outer = split_target(estimator)
        last = split_target(split_pipeline(inner)[1])[1]
        if outer is not None and last is not None:
            raise ValueError("estimator transforms y twice; give one TransformedTargetRegressor.")
        wrapper = outer or last
        if wrapper is None or (wrapper.func is None and wrapper.inverse_func is None and wrapper.transformer is None):
            return cls()
        if wrapper.transformer is not None or wrapper.func is None or wrapper.inverse_func is None:
            raise ValueError(
                "estimator=TransformedTargetRegressor needs func and inverse_func, which do not depend on the data: a transformer would be "
                "fitted to y without the candidate."
            )
        with np.errstate(all="ignore"):
            values = np.asarray(wrapper.func(np.sort(y)), dtype=np.float64)
        if values.shape != y.shape or not np.isfinite(values).all():
            raise ValueError("func of the TransformedTargetRegressor gives no finite number for some values of y.")
        steps = np.diff(values)
        if not ((steps >= 0).all() or (steps <= 0).all()):
            raise ValueError(
                "func of the TransformedTargetRegressor must rise or fall all the way; it does both on the values of y."
            )
        return cls(wrapper.func, wrapper.inverse_func, bool(values[-1] >= values[0]))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same again: functions of NumPy's, or none."""
        pair = state["func"], state["inverse"]
        require(pair == (None, None) or all(isinstance(part, np.ufunc) for part in pair), "target")
        return cls(*pair, expect(state["rising"], bool))

    def forward(self, y: FloatArray) -> FloatArray:
        """Values as the model sees them."""
        return y if self.func is None else np.asarray(self.func(y), dtype=np.float64)

    def back(self, values: FloatArray) -> FloatArray:
        """y of values as the model sees them; an end beyond all numbers is infinite."""
        if self.inverse is None:
            return values
        with np.errstate(all="ignore"):
            found = np.asarray(self.inverse(values), dtype=np.float64)
        return np.where(np.isnan(found), values if self.rising else -values, found)

    def steps(self, steps: Steps) -> Steps:
        """The same step functions of y."""
        if self.inverse is None:
            return steps
        ends = self.back(steps.lower), self.back(steps.upper)
        lower, upper = ends if self.rising else ends[::-1]
        empty = steps.lower == np.inf
        return replace(steps, lower=np.where(empty, np.inf, lower), upper=np.where(empty, np.inf, upper))

    def distribution(self, part: Distribution) -> Distribution:
        """The same distributions of y."""
        if not self.rising:
            raise ValueError("predict_cdf and predict_quantile need a func of y that rises.")
        return part if self.inverse is None else Distribution.of(self.back(part.thresholds))
