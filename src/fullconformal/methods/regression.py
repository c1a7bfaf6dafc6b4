"""What every method of full conformal regression is: it fits a bag of points with values, and gives p(y) of objects as step functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from sklearn.utils import gen_batches

from fullconformal.diagnostics import Figures
from fullconformal.intervals import Distribution, Steps, crossings, needed
from fullconformal.linear.ridge import Lines
from fullconformal.methods.base import AnyMethod, Config, FittedModel, FloatArray, IntArray, Values, starts_with
from fullconformal.runtime.tasks import Progress, nobody
from fullconformal.storage import require

EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class RegressionQuery:
    """With whom candidates are compared: the scheme q, weights of points (n,) and objects (m,), and the categories (n,) and (m,) of both.

    Where `levels` are given, only intervals at these confidence levels are asked of the step functions: `Steps` may be of fewer pieces.
    Not `several` are asked of a fit for one object: what prepares many does not pay.
    """

    q: float
    points: FloatArray | None = None
    own: FloatArray | None = None
    categories: tuple[IntArray, IntArray] | None = None
    progress: Progress = nobody
    levels: FloatArray | None = None
    #: numbers (m, k), where p-values of these are asked and nothing else
    values: FloatArray | None = None
    several: bool = True
    #: weights (m,) of the candidates in the fit, where the training points have such
    mass: FloatArray | None = None

    def of(self, rows: npt.NDArray[np.intp], several: bool) -> RegressionQuery:
        """The same about some of the objects; of one fit that is asked about several."""
        own = None if self.own is None else self.own[rows]
        categories = None if self.categories is None else (self.categories[0], self.categories[1][rows])
        mass = None if self.mass is None else self.mass[rows]
        return replace(self, own=own, categories=categories, progress=nobody, several=several, values=None, mass=mass)

    def ranks(self, n: int) -> tuple[int, int] | None:
        """Between which ranks, from the widest of n pieces, intervals end; None where every piece may matter."""
        if self.levels is None or self.points is not None or self.own is not None or self.categories is not None:
            return None
        ranks = [int(needed(np.array([n]), 1 - level)[0]) for level in self.levels.ravel().tolist()]
        return max(1, min(ranks)), max(1, *ranks)

    def steps(self, lower: FloatArray, upper: FloatArray, owner: npt.NDArray[np.intp], n: int, at: slice) -> Steps:
        """Step functions of the objects `at`, from the pieces (b, K) of training points `owner` (K,)."""
        weight = np.ones(n) if self.points is None else self.points
        total = np.full(len(lower), weight.sum())
        if self.categories is not None:
            same = self.categories[0] == self.categories[1][at, None]
            total = same @ weight
            apart = ~same[:, owner]
            lower, upper = np.where(apart, np.inf, lower), np.where(apart, np.inf, upper)
        own = None if self.own is None else self.own[at]
        return Steps(lower, upper, total, None if self.points is None else self.points[owner], own)


class FittedRegression(FittedModel):
    """A fitted model that knows, for every object, which training points are at least as strange as it at which values."""

    #: whether residuals are scaled by leverages, as the scheme says; else a point is always scored without it
    takes_scheme: ClassVar[bool] = True

    #: whether the training points are kept
    keeps_points: ClassVar[bool] = True
    #: whether candidates have weights in the fit, as the training points have
    weighs_candidates: bool = False

    def __init__(self, bag: Values):
        self.bag, self.n = bag, len(bag.y)

    def holds(self, X: Any) -> bool:
        return starts_with(self.bag.X, X)

    def residuals(self) -> FloatArray:
        """y − f (n,) of the training points."""
        return self.bag.y - self.predict(self.bag.X)

    @abstractmethod
    def predict(self, X: Any) -> FloatArray:
        """The fit (m,) at objects X."""

    @abstractmethod
    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        """p(y) of objects X, a block at a time."""

    def distributions(self, X: Any, query: RegressionQuery) -> Iterator[Distribution]:
        """Predictive distributions of objects X, from signed residuals, a block at a time."""
        raise ValueError(
            "predict_cdf and predict_quantile need residuals that are linear in y: use Ridge, LinearRegression, KernelRidge, a "
            "GaussianProcessRegressor or KNeighborsRegressor."
        )

    def at(self, X: Any) -> tuple[FittedRegression, Any]:
        """What answers for object X (1, ...), and the object as that sees it."""
        return self, X

    def refits(self) -> Any:
        """What scores points by honest refits, for methods with refits of their own kind; None for others."""
        return None

    @property
    def figures(self) -> Figures:
        """What is known of the fit."""
        return Figures(self.n, np.nan, np.nan, {})


class RegressionMethod(AnyMethod):
    """One of numbers."""

    @abstractmethod
    def fit(self, bag: Values, config: Config) -> FittedRegression:
        """Fit the model to the bag and prepare what every prediction needs."""


class FittedLines(FittedRegression):
    """One whose scores are lines in the candidate's value."""

    @abstractmethod
    def _lines(self, X: Any, query: RegressionQuery) -> Iterator[tuple[slice, Lines]]:
        """Scores at objects X, a block at a time, and which objects these are."""

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        return (steps_of(lines, query, at) for at, lines in self._lines(X, query))

    def distributions(self, X: Any, query: RegressionQuery) -> Iterator[Distribution]:
        return (distribution_of(lines) for _, lines in self._lines(X, query))


def check_points(bag: Values) -> None:
    """Raise where the training points of a saved predictor are not whole."""
    require(isinstance(bag.X, np.ndarray) and bag.X.ndim >= 2 and bag.y.shape == bag.X.shape[:1], "points")
    require(bool(np.isfinite(bag.y).all()), "values")


def rows_in_cache(n: int) -> int:
    """How many rows of n numbers stay in the cache together."""
    return max(1, 2**17 // max(n, 1))


def blocks(X: Any, n: int, progress: Progress = nobody, many: bool = False) -> Iterator[slice]:
    """Slices of objects X (m, ...), as many as stay in the cache with n training points; or so many that products of matrices are fast."""
    step = rows_in_cache(n) * (32 if many else 1)
    for at in gen_batches(len(X), step):
        yield at
        progress(at.stop, len(X))


def just_below(end: float) -> float:
    """The largest number below, by which of two ranges that meet one holds the end they share; an infinite end stays."""
    return end if np.isinf(end) else float(np.nextafter(end, -np.inf))


def steps_of(lines: Lines, query: RegressionQuery, at: slice) -> Steps:
    """p(y) of the objects `at` from the scores at them."""
    lower, upper, owner = crossings(lines.size, lines.slope, lines.edge, lines.centre, lines.slack, lines.tie)
    lower[lines.free], upper[lines.free] = -np.inf, np.inf
    if lines.free.any():
        # The second pieces of a point are in the first already.
        lower[np.ix_(lines.free, np.arange(len(lines.size), len(owner)))] = np.inf
    return query.steps(lower, upper, owner, len(lines.size), at)


def distribution_of(lines: Lines) -> Distribution:
    """The distribution in which a threshold is where a point's signed score meets the candidate's, from below in all of them."""
    # slope carries the residual's sign, so that signed · slope is that of the residual itself.
    meets = lines.edge + lines.slope * lines.sign
    if (meets <= 0).any() or lines.free.any():
        raise ValueError(
            "the predictive distribution of an object cannot be formed: the residual of a point of high leverage changes faster "
            "than the candidate's. Use scheme='studentized', or a larger penalty."
        )
    return Distribution.of(lines.centre[:, None] + lines.sign * lines.size / meets)
