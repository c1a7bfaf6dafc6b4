"""The result of a comparison of regressors: coverage, width, interval score and time, as records, as a table and as a figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import Estimate, FloatArray, Welch
from fullconformal.report.method_table import (
    NOT_MEASURED,
    Group,
    MethodTable,
    Record,
    coverage_text,
    seconds_text,
    smallest_marked,
)

#: metrics that are means over objects, which can be tested
TESTED = ("mean_width", "interval_score")


@dataclass(frozen=True, repr=False, eq=False)
class IntervalComparison(MethodTable):
    """Regressors measured on the same objects; prints as a table. Returned by `fullconformal.compare`.

    Attributes
    ----------
    methods : list of str
        Names, in the order given.
    levels : ndarray (L,)
        Confidence levels, increasing.
    y : ndarray (m,)
        True values.
    records : list of Record
        Tuples (method, level, metric, value, se). Metrics have the names of the functions in `fullconformal.metrics`; ``fit_seconds`` and
        ``predict_seconds`` are wall-clock times.
    intervals : dict of arrays (m, 2, L)
        By method, its intervals at the levels.
    errors : dict of Exception
        By method, the error of those that failed.
    guarantees : dict of str
        By method, what is promised of its intervals: "exact", "1 − 2ε" or "approximate".

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from fullconformal import CVPlusRegressor, SplitConformalRegressor, compare
    >>> X, y = load_diabetes(return_X_y=True)
    >>> methods = {"split": SplitConformalRegressor(random_state=0), "CV+": CVPlusRegressor(random_state=0)}
    >>> comparison = compare(methods, X[::2], y[::2], X[1::2], y[1::2], levels=[0.9])
    >>> comparison.estimate("CV+", "interval_coverage", 0.9).value > 0.85
    True
    >>> comparison.plot().get_ylabel()
    'mean width'
    """

    methods: list[str]
    levels: FloatArray
    y: npt.NDArray[Any]
    records: list[Record]
    intervals: dict[str, FloatArray]
    errors: dict[str, Exception]
    guarantees: dict[str, str] = field(default_factory=dict)

    def welch(self, a: str, b: str, metric: str = "mean_width", level: float | None = None) -> Welch:
        """The one-sided Welch test that the mean of ``metric`` is smaller for method a than for method b.

        Parameters
        ----------
        a, b : str
            Names of methods.
        metric : {"mean_width", "interval_score"}, default="mean_width"
        level : float, optional
            The confidence level; the middle one by default.
        """
        return self._welch(a, b, metric, self.middle if level is None else level, TESTED)

    def _per_object(self, method: str, metric: str, level: float | None) -> FloatArray:
        level = self.middle if level is None else level
        ends = self.intervals[method][:, :, int(np.abs(self.levels - level).argmin())]
        if metric == "mean_width":
            return metrics.per_object(metrics.mean_width, ends)
        return metrics.per_object(metrics.interval_score, ends, self.y, confidence_level=level)

    @property
    def middle(self) -> float:
        """The middle one of the levels."""
        return float(self.levels[len(self.levels) // 2])

    def plot(self, ax: Any = None) -> Any:
        """Plot the mean width of each method against the confidence level, and return the axes."""
        from fullconformal.report.plots import plot_widths

        if not self.intervals:
            raise ValueError("every method failed and there is nothing to plot; see comparison.errors.")
        return plot_widths(self.intervals, self.levels, ax=ax)

    @property
    def footnote(self) -> str:
        return (
            f"{len(self.y)} objects; ± one standard error, ≥ and ≤ 95 % bounds. * the narrowest among the methods whose coverage, by its "
            "95 % interval, may be the level or more. Interval score: width plus 2/ε times the distance of a value outside; small is good."
        )

    def groups(self) -> list[list[Group]]:
        times = {head: self.estimates(f"{head}_seconds") for head in ("fit", "predict")}
        shown = {head: {name: seconds_text(found) for name, found in of.items()} for head, of in times.items()}
        return [[self._level_group(level) for level in self.levels], [self.guarantee_group(), Group("", shown)]]

    def _level_group(self, level: float) -> Group:
        coverage, width = self.estimates("interval_coverage", level), self.estimates("mean_width", level)
        score = {name: str(found) for name, found in self.estimates("interval_score", level).items()}
        shown = {
            "coverage": {k: coverage_text(v, len(self.y)) for k, v in coverage.items()},
            "width": smallest_marked(coverage, width, level, len(self.y)),
        }
        return Group(f"{100 * level:g} %", {**shown, "interval score": score})


def add_regressor(
    out: IntervalComparison, method: str, intervals: FloatArray, predicted: FloatArray, seconds: dict[str, float]
) -> None:
    """Add a method by its intervals (m, 2, L) at the levels, its predictions (m,) and its times."""
    for k, level in enumerate(out.levels.tolist()):
        found = metrics.interval_summary(intervals[:, :, k], out.y, level)
        out.records.extend(Record(method, level, name, *estimate) for name, estimate in found.items())
    overall = {name: Estimate(value, NOT_MEASURED) for name, value in seconds.items()}
    overall["mean_squared_error"] = metrics.estimates.mean((predicted - out.y) ** 2)
    out.records.extend(Record(method, NOT_MEASURED, name, *estimate) for name, estimate in overall.items())
    out.intervals[method] = intervals
