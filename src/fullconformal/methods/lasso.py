"""Exact full CP for Lasso and ElasticNet: on every range of y where the active columns stay the same, residuals are lines in y."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.linear_model import ElasticNet

from fullconformal.diagnostics import Figures
from fullconformal.guarantees import EXACT
from fullconformal.intervals import Steps, crossings
from fullconformal.linear.lasso import Lasso, Segment, Stop
from fullconformal.linear.ridge import ALONE
from fullconformal.methods.base import Config, FloatArray, Values
from fullconformal.methods.regression import (
    EPS,
    FittedRegression,
    RegressionMethod,
    RegressionQuery,
    check_points,
    just_below,
)
from fullconformal.storage import LIMITS, require, savable


@savable
class FittedLasso(FittedRegression):
    """A lasso of the training points, from which the way to every candidate begins."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, bag: Values, fit: Lasso, model: ElasticNet):
        super().__init__(bag)
        self.fit, self.model = fit, model

    def predict(self, X: Any) -> FloatArray:
        return np.asarray(self.model.predict(X), dtype=np.float64)

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        X = np.asarray(X, dtype=np.float64)
        tie = 64 * (self.fit.X.shape[1] + 8) * EPS
        slack = tie * (float(np.abs(self.fit.y).max(initial=0.0)) + EPS * abs(self.fit.shift))
        ranks = query.ranks(self.n)
        for row, x in enumerate(X):
            stop = None if ranks is None else self._stop(x, query.q, ranks[0], slack, tie)
            if query.values is not None:
                stop = beyond(query.values[row] - self.fit.shift)
            parts = [pieces(segment, query.q, slack, tie, self.fit.shift) for segment in self.fit.segments(x, stop)]
            lower, upper, owner = (np.concatenate(part) for part in zip(*parts, strict=True))
            yield query.steps(lower[None], upper[None], owner, self.n, slice(row, row + 1))
            query.progress(row + 1, len(X))

    def _stop(self, x: FloatArray, q: float, fewest: int, slack: float, tie: float) -> Stop | None:
        """Whether fewer than so many points can be as strange as the candidate at t or any further out; None where that is not known.

        With S = I − H on the active columns, of eigenvalues in [0, 1], the candidate's residual has slope s = S_xx and those of the points
        Σ slope² = (S²)_xx − s² ≤ s(1 − s). So the candidate's score gains on that of a point from where it is behind, whatever columns
        become active, if √((1 − s)/s) ≤ ρ, ρ the least that (share of the point/share of the candidate)^q can be.
        """
        if (bounds := self.fit.bounds(x)) is None:
            return None
        share, own = bounds
        ratio = (1 - tie) * np.maximum(share, 0.0) ** q
        # Those that the candidate may never overtake count always.
        ratio[ratio < ((1 - own) / own) ** 0.5 * (1 + tie)] = 0.0

        def stop(segment: Segment, t: float) -> bool:
            size, own = np.abs(segment.first + segment.slope * t), abs(segment.own_first + segment.own_slope * t)
            return int((size + slack >= ratio * own).sum()) < fewest

        return stop

    @property
    def figures(self) -> Figures:
        active = int((self.fit.weight != 0).sum())
        return Figures(self.n, np.nan, np.nan, {"columns with a weight": f"{active} of {len(self.fit.weight)}"})

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        bag, fit = state["bag"], state["fit"]
        check_points(bag)
        n, d = bag.X.shape
        require(fit.X.shape == (n, d) and fit.y.shape == (n,) and fit.weight.shape == (d,) == fit.mean.shape, "fit")
        # Its steps take matrices (d, d), which few points do not bear out.
        require(d * d <= LIMITS.activations(n * d), "number of columns")


def beyond(t: FloatArray) -> Stop:
    """Whether all numbers t (k,) that are asked about are passed: of a wide table that is a fraction of the way."""
    low, high = t.min(initial=np.inf), t.max(initial=-np.inf)
    return lambda segment, at: segment.start < segment.end and bool(at > high if at == segment.end else at < low)


def pieces(
    segment: Segment, q: float, slack: float, tie: float, shift: float
) -> tuple[FloatArray, FloatArray, np.ndarray[Any, Any]]:
    """Lower and upper ends (K,) of y = t + shift within a segment at which points `owner` (K,) are at least as strange as the candidate."""
    start, end = segment.start, segment.end
    # Of neighbouring segments one holds the end they share: as a number y, since two t may round to one.
    first_y, last_y = start + shift, just_below(end + shift)
    if last_y < first_y:
        return np.empty(0), np.empty(0), np.empty(0, dtype=np.intp)
    n, ratio = len(segment.first), np.full(len(segment.first), 1 - tie)
    if q > 0:
        # With as many columns as points leverages are one and residuals are not zero: such scores are infinite, and tied.
        if segment.own_share <= ALONE:
            return np.full(n, first_y), np.full(n, last_y), np.arange(n)
        ratio *= np.where(segment.share <= ALONE, 0.0, np.maximum(segment.share, 0.0) / segment.own_share) ** q
    if segment.own_slope == 0:
        # No residual moves.
        owner = np.flatnonzero(np.abs(segment.first) + slack >= ratio * abs(segment.own_first))
        return np.full(len(owner), first_y), np.full(len(owner), last_y), owner
    # As lines a + b·u in the candidate's residual u.
    b = segment.slope / segment.own_slope
    a = segment.first - b * segment.own_first
    zero = np.zeros(1)
    ends = crossings(np.abs(a), -b[None] * np.where(a < 0, -1.0, 1.0), ratio[None], zero, zero, slack)
    lower, upper = ((part[0] - segment.own_first) / segment.own_slope for part in ends[:2])
    held = (ends[0][0] < np.inf) & (lower <= end) & (upper >= start)
    # Ends lie outwards by their rounding, but not beyond the segment.
    lower, upper = (np.clip(part[held] + shift, first_y, last_y) for part in (lower - slack, upper + slack))
    return lower, upper, ends[2][held]


@savable
class LassoRegression(RegressionMethod):
    """Full CP itself for Lasso and ElasticNet, by following the fit over all values of the candidate."""

    name = "exact"

    def fit(self, bag: Values, config: Config) -> FittedLasso:
        X, y, model = np.asarray(bag.X, dtype=np.float64), bag.y, self.model
        n = len(y)
        ratio = float(model.l1_ratio)
        # The penalty of a bag of n + 1 points, on the n there are.
        alpha = float(model.alpha) * (n + 1) / n
        near = clone(model).set_params(alpha=alpha, tol=1e-10, max_iter=max(model.max_iter, 10_000), warm_start=False)
        start = near.fit(X, y).coef_
        l1, l2 = (n + 1) * float(model.alpha) * ratio, (n + 1) * float(model.alpha) * (1 - ratio)
        fit = Lasso.fit(X, y, l1, l2, bool(model.fit_intercept), np.asarray(start))
        return FittedLasso(Values(X, y), fit, clone(model).fit(X, y))
