"""Full conformal regression of any regressor, by honest refits at the values of an object that are asked for, or that a search tries.

Between two values that were tried a training point counts if it does at one of them: ends of sets lie outwards, as far as no score crosses
the candidate's twice between two neighbours. Scores are residuals of fits with the point ("ordinary") or without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.guarantees import APPROXIMATE
from fullconformal.intervals import Steps
from fullconformal.methods.base import Config, FloatArray, NeverSaved, Values
from fullconformal.methods.fitting import FitScore, settings_of
from fullconformal.methods.refit import Refits, Residuals, check, orders
from fullconformal.methods.regression import FittedRegression, RegressionMethod, RegressionQuery
from fullconformal.runtime.files import fingerprint
from fullconformal.runtime.tasks import nobody
from fullconformal.sets import members
from fullconformal.storage import savable

# How far out values are tried, in ranges of y.
FURTHEST = 100


@savable
class FittedRefitRegression(NeverSaved, FittedRegression):
    """The training points of a regressor, and how it is trained on any bag of them."""

    method, takes_scheme, quick = "exact", False, False
    guarantee = APPROXIMATE.because(
        "p-values are those of full CP, by refits; the ends of intervals are searched for, and values apart from the rest could be missed"
    )

    def __init__(self, fit_score: FitScore, bag: Values, grid: int, tolerance: float):
        super().__init__(Values(np.asarray(bag.X), bag.y))
        self.fit_score, self.grid, self.tolerance = fit_score, grid, tolerance
        self.model = fit_score(self.bag.X, bag.y)

    def predict(self, X: Any) -> FloatArray:
        return np.asarray(self.model(X)[:, 0])

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        X = np.asarray(X)
        for row in range(len(X)):
            at = slice(row, row + 1)
            yield self._tried(
                X[at], query, at, None if query.values is None else self._finite(query.values[row])
            ).steps(query, at)
            query.progress(row + 1, len(X))

    @property
    def _span(self) -> float:
        """The range of y, by which values are measured."""
        return float(np.ptp(self.bag.y)) or max(1.0, float(np.abs(self.bag.y).max()))

    def _finite(self, values: FloatArray) -> FloatArray:
        """Values that can be fitted: as far out as the search goes for those beyond all numbers, of which p-values are limits."""
        far = FURTHEST * self._span
        found = np.nan_to_num(values, nan=np.nan, posinf=self.bag.y.max() + far, neginf=self.bag.y.min() - far)
        return found[~np.isnan(found)]

    def _tried(self, x: Any, query: RegressionQuery, at: slice, asked: FloatArray | None) -> Tried:
        """Values that are asked, or as many as it takes until the ends of sets at the query's levels are known."""
        span = self._span
        grid = np.linspace(self.bag.y.min() - span / 2, self.bag.y.max() + span / 2, self.grid)
        grid = np.append(grid, self.predict(x))
        values, tried = grid if asked is None else asked, Tried(np.empty(0), np.empty((0, self.n), dtype=bool))
        levels = [] if query.levels is None or asked is not None else query.levels.ravel().tolist()
        while len(values):
            tried = tried.and_at(values, self, x, query)
            p, gaps = tried.steps(query, at).p(tried.values[None])[0], np.diff(tried.values)
            inside = np.array([members(p, 1 - level) for level in levels], dtype=bool).reshape(len(levels), len(p))
            # Between a member and a value that is none; and beyond the last where that is one, unless all are: a level may have no end.
            cells = (inside[:, 1:] != inside[:, :-1]).any(0) & (gaps > self.tolerance * span)
            values, far = (tried.values[:-1] + gaps / 2)[cells], gaps.sum()
            ended = ~inside.all(1) & (far < FURTHEST * span)
            ends = [(inside[:, 0] & ended).any(), (inside[:, -1] & ended).any()]
            values = np.append(values, np.array([tried.values[0] - far, tried.values[-1] + far])[ends])
        return tried

    def at_least(self, x: Any, values: FloatArray, query: RegressionQuery) -> npt.NDArray[np.bool_]:
        """Whether (k, n) training points are at least as strange as object x (1, ...) with each of the values (k,)."""
        config, bag, deleted = self.fit_score.config, self.bag, query.q > 0
        check(bag.X, x, int(deleted), False)
        residuals = Residuals(float(np.abs(bag.y).max()))
        refits = Refits.of(self.fit_score, bag.X, bag.y, x, values[None], deleted, residuals)
        key = settings_of(self.fit_score.estimator), config.seed, config.l2, config.max_epochs, deleted
        digest = fingerprint(repr(key), bag.X, bag.y, x, values)
        parts, _ = config.work.parts(digest[:16]).open({"fingerprint": digest})
        return np.asarray(orders(refits, parts, self.model.precision(x), config.work.n_jobs, nobody) >= 0)


@dataclass(frozen=True)
class Tried:
    """Values of an object that were tried, ascending (k,), and whether (k, n) each point is at least as strange as it at each of them."""

    values: FloatArray
    holds: npt.NDArray[np.bool_]

    def and_at(self, values: FloatArray, fitted: FittedRefitRegression, x: Any, query: RegressionQuery) -> Tried:
        """With more values."""
        new = np.setdiff1d(values, self.values)
        every = np.concatenate([self.values, new])
        order = np.argsort(every)
        return Tried(every[order], np.concatenate([self.holds, fitted.at_least(x, new, query)])[order])

    def steps(self, query: RegressionQuery, at: slice) -> Steps:
        """p(y): between two values that of the points that count at one of them, beyond the last that at the last."""
        h, v = self.holds.T, self.values
        no = np.zeros((len(h), 1), dtype=bool)
        owner, first = np.nonzero(h & ~np.hstack([no, h[:, :-1]]))
        last = np.nonzero(h & ~np.hstack([h[:, 1:], no]))[1]
        lower = np.append(-np.inf, np.nextafter(v, np.inf)[:-1])[first]
        upper = np.append(np.nextafter(v, -np.inf)[1:], np.inf)[last]
        return query.steps(lower[None], upper[None], owner, len(h), at)


@savable
@dataclass(frozen=True)
class RefitRegression(RegressionMethod):
    """Full CP itself for any regressor, by honest refits at so many values of an object, and at more until ends are known.

    Parameters
    ----------
    model : regressor or Pipeline
        Set by `FullConformalRegressor`.
    grid : int
        Values that are tried of every object, from half a range of y below the training values to half a range above.
    tolerance : float
        How far the ends of intervals may lie outwards, as a share of the range of y.
    """

    grid: int = 24
    tolerance: float = 1e-3

    name = "exact"
    takes_pipeline = True

    def fit(self, bag: Values, config: Config) -> FittedRefitRegression:
        if config.prefit:
            raise ValueError("method='exact' by refits trains the model anew for every bag; leave prefit out.")
        fit_score = FitScore(self.model, replace(config, progress=nobody), None)
        return FittedRefitRegression(fit_score, bag, self.grid, self.tolerance)
