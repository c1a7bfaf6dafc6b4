"""The result of a comparison of classifiers or of regressors: its numbers as records, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import BoolArray, Estimate, FloatArray, Welch
from fullconformal.report.method_table import (
    NOT_MEASURED,
    Group,
    MethodTable,
    Record,
    coverage_text,
    seconds_text,
    smallest_marked,
)

# Metrics of intervals that are means over objects, which can be tested.
TESTED = ("mean_width", "interval_score")
# Metrics of p-values, and whether they need the true labels.
ON_P = {"size_auc": False, "fuzziness": False, "observed_fuzziness": True}


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(MethodTable):
    """Methods measured on the same objects; prints as a table. Returned by `fullconformal.compare`.

    Attributes
    ----------
    methods : list of str
        Names, in the order given.
    levels : ndarray (L,)
        Confidence levels, increasing.
    y : ndarray (m,)
        True labels.
    classes : ndarray (C,)
        Labels of the columns.
    records : list of Record
        Tuples (method, level, metric, value, se). Metrics have the names of the functions in `fullconformal.metrics`; the coverage of
        a class is ``class_coverage[label]``; ``fit_seconds`` and ``predict_seconds`` are wall-clock times.
    p : dict of arrays (m, C)
        By method, its p-values or, if it has none, the largest ε at which each label is in the set.
    sets : dict of bool arrays (m, C, L)
        By method, its sets at the levels.
    errors : dict of Exception
        By method, the error of those that failed.
    guarantees : dict of str
        By method, what is promised of its sets: "exact", "1 − 2ε" or "approximate".

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import SplitConformalClassifier, compare
    >>> X, y = load_iris(return_X_y=True)
    >>> methods = {size: SplitConformalClassifier(calibration_size=size, random_state=0) for size in (0.2, 0.5)}
    >>> comparison = compare({f"{size:.0%}": split for size, split in methods.items()}, X[::2], y[::2], X[1::2], y[1::2], levels=[0.9])
    >>> comparison.methods
    ['20%', '50%']
    >>> comparison.estimate("50%", "coverage", 0.9).value > 0.8
    True
    >>> comparison.plot().get_ylabel()
    'mean set size'
    """

    methods: list[str]
    levels: FloatArray
    y: npt.NDArray[Any]
    classes: npt.NDArray[Any]
    records: list[Record]
    p: dict[str, FloatArray]
    sets: dict[str, BoolArray]
    errors: dict[str, Exception]
    guarantees: dict[str, str] = field(default_factory=dict)

    def welch(self, a: str, b: str, metric: str = "size_auc", level: float | None = None) -> Welch:
        """The one-sided Welch test, as in the paper, that the mean of ``metric`` is smaller for method a than for method b.

        Parameters
        ----------
        a, b : str
            Names of methods.
        metric : {"size_auc", "fuzziness", "observed_fuzziness", "mean_size"}, default="size_auc"
        level : float, optional
            The confidence level, for ``metric="mean_size"``.
        """
        return self._welch(a, b, metric, level, (*ON_P, "mean_size"))

    def _per_object(self, method: str, metric: str, level: float | None) -> FloatArray:
        """The metric (m,) of each object alone."""
        if level is not None:
            at = int(np.abs(self.levels - level).argmin())
            return metrics.per_object(metrics.mean_size, self.sets[method][:, :, at])
        return metrics.per_object(getattr(metrics, metric), self.p[method], **self._truth(metric))

    def _truth(self, metric: str) -> dict[str, Any]:
        """The true labels as arguments, if a metric of p-values needs them."""
        return {"y": self.y, "classes": self.classes} if ON_P[metric] else {}

    def plot(self, ax: Any = None) -> Any:
        """Plot the mean set size of each method against ε, with dotted lines at the levels, and return the axes."""
        from fullconformal.report.plots import plot_size_curve

        if not self.p:
            raise ValueError("every method failed and there is nothing to plot; see comparison.errors.")
        top = max(0.2, 1.1 * (1 - self.levels.min()))
        return plot_size_curve(self.p, epsilons=np.linspace(0, min(top, 1), 201), levels=self.levels, ax=ax)

    @property
    def footnote(self) -> str:
        return (
            f"{len(self.y)} objects, {len(self.classes)} labels; ± one standard error, ≥ and ≤ 95 % bounds. * the smallest sets among the "
            "methods whose coverage, by its 95 % interval, may be the level or more. Size AUC: area under set size against ε in [0, 0.2]."
        )

    def groups(self) -> list[list[Group]]:
        return [[self._level_group(level) for level in self.levels], self._overall_groups()]

    def _level_group(self, level: float) -> Group:
        """Coverage and size at a level; marked is the smallest size among methods with enough coverage."""
        coverage, size = self.estimates("coverage", level), self.estimates("mean_size", level)
        found = {
            "coverage": {k: coverage_text(v, len(self.y)) for k, v in coverage.items()},
            "size": smallest_marked(coverage, size, level, len(self.y)),
        }
        return Group(f"{100 * level:g} %", found)

    def _overall_groups(self) -> list[Group]:
        """Metrics that do not depend on a level, and the gap between classes at the middle one."""
        level = self.middle
        heads = {"size_auc": "size AUC", "fuzziness": "fuzziness", "observed_fuzziness": "obs. fuzziness"}

        def cells(metric: str, level: float | None = None, show: Callable[[Estimate], str] = str) -> dict[str, str]:
            return {method: show(found) for method, found in self.estimates(metric, level).items()}

        return [
            self.guarantee_group(),
            *(Group("", {head: cells(metric)}) for metric, head in heads.items()),
            Group(f"{100 * level:g} %", {"class gap": cells("class_coverage_gap", level)}),
            Group("", {"not nested": cells("nestedness_violations", show=lambda n: str(n) if n.value else "0")}),
            Group("", {head: cells(f"{head}_seconds", show=seconds_text) for head in ("fit", "predict")}),
        ]


def add_method(
    out: Comparison, method: str, p: FloatArray, sets: BoolArray, path: BoolArray, seconds: dict[str, float]
) -> None:
    """Add a method by its p (m, C), its sets (m, C, L) at the levels, its sets (m, C, G) at a grid of levels, and its times."""
    y, classes = out.y, out.classes
    for k, level in enumerate(out.levels.tolist()):
        at = sets[:, :, k]
        gap = metrics.class_coverage_gap(at, y, level, classes)
        found = {"coverage": metrics.coverage(at, y, classes), "mean_size": metrics.mean_size(at),
                 "class_coverage_gap": gap.mean, "worst_class_coverage_gap": gap.worst}  # fmt: skip
        by_label = metrics.class_coverage(at, y, classes)
        found |= {f"class_coverage[{label}]": estimate for label, estimate in by_label.items()}
        out.records.extend(Record(method, level, name, *estimate) for name, estimate in found.items())
    overall = {name: getattr(metrics, name)(p, **out._truth(name)) for name in ON_P}
    overall["nestedness_violations"] = metrics.nestedness_violations(path)
    overall |= {name: Estimate(value, NOT_MEASURED) for name, value in seconds.items()}
    out.records.extend(Record(method, NOT_MEASURED, name, *estimate) for name, estimate in overall.items())
    out.p[method], out.sets[method] = p, sets


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
