"""The result of a comparison of classifiers or of regressors: its numbers as records, as a table and as a figure."""

from __future__ import annotations

import io
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import BoolArray, Estimate, FloatArray, Welch, welch, wilson
from fullconformal.runtime.files import one_line

# Levels closer than this are equal.
SAME_LEVEL = 1e-9
NOT_MEASURED = float("nan")


class Record(NamedTuple):
    """One number: ``level`` is NaN if the metric does not depend on one, ``se`` if the number is not a mean."""

    method: str
    level: float
    metric: str
    value: float
    se: float


class Group(NamedTuple):
    """Columns of the table that stay together: their title, and by heading the cell of each method."""

    title: str
    columns: dict[str, dict[str, Any]]


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class MethodTable(ABC):
    """Records of methods measured on the same objects; prints as a table."""

    methods: list[str]
    levels: FloatArray
    y: npt.NDArray[Any]
    records: list[Record] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    guarantees: dict[str, str] = field(default_factory=dict)

    @abstractmethod
    def groups(self) -> list[list[Group]]:
        """The columns: groups that stand in one table as far as its width allows."""

    @abstractmethod
    def _per_object(self, method: str, metric: str, level: float | None) -> FloatArray:
        """The metric (m,) of each object alone."""

    @property
    @abstractmethod
    def footnote(self) -> str:
        """What stands below the table."""

    def estimate(self, method: str, metric: str, level: float | None = None) -> Estimate:
        """One number with its standard error.

        Parameters
        ----------
        method, metric : str
            As in ``records``.
        level : float, optional
            The confidence level, if the metric depends on one.
        """
        of_method = [record for record in self.records if record.method == method]
        if not of_method:
            known = [name for name in self.methods if name not in self.errors]
            why = f" failed: {self.errors[method]}" if method in self.errors else " is unknown"
            raise ValueError(f"method={method!r}{why}; there are results for: {', '.join(map(repr, known))}.")
        for record in of_method:
            same = np.isnan(record.level) if level is None else abs(record.level - level) < SAME_LEVEL
            if record.metric == metric and same:
                return Estimate(record.value, record.se)
        known = sorted({record.metric for record in of_method if np.isnan(record.level) == (level is None)})
        raise ValueError(
            f"metric={metric!r} with level={level!r} is unknown; levels: {self.levels.tolist()}; metrics "
            f"{'without' if level is None else 'with'} a level: {', '.join(known)}."
        )

    def _welch(self, a: str, b: str, metric: str, level: float | None, allowed: Sequence[str]) -> Welch:
        """The one-sided Welch test that the mean of a metric, one of those allowed, is smaller for method a than for method b."""
        if metric not in allowed:
            raise ValueError(f"metric={metric!r} is unknown; allowed: {', '.join(map(repr, allowed))}.")
        for method in (a, b):
            # Raises if there is no such number.
            self.estimate(method, metric, level)
        return welch(self._per_object(a, metric, level), self._per_object(b, metric, level))

    @property
    def middle(self) -> float:
        """The middle one of the levels."""
        return float(self.levels[len(self.levels) // 2])

    def add(self, method: str, level: float, found: Mapping[str, Estimate]) -> None:
        """Add numbers of a method at a level, by the name of the metric."""
        self.records.extend(Record(method, level, name, *estimate) for name, estimate in found.items())

    def guarantee_group(self) -> Group:
        """What is promised, by method."""
        return Group("", {"guarantee": {k: self.guarantees.get(k, "") for k in self.methods if k not in self.errors}})

    def times_group(self) -> Group:
        """Times of fits and predictions."""
        return Group("", {head: self.cells(f"{head}_seconds", show=seconds_text) for head in ("fit", "predict")})

    def level_group(self, level: float, covered: str, metric: str, head: str) -> Group:
        """Coverage, and sizes or widths, at a level; marked is the smallest among the methods whose coverage agrees with the level."""
        from rich.text import Text

        m, size = len(self.y), self.estimates(metric, level)
        # Of few objects a standard error is too small, and zero where none is covered.
        shares = {name: round(found.value * m) for name, found in self.estimates(covered, level).items()}
        valid = [name for name, share in shares.items() if wilson(share, m)[1] >= level - SAME_LEVEL]
        smallest = min((size[name].value for name in valid), default=NOT_MEASURED)
        best = [name for name in valid if size[name].value == smallest]
        marked = {k: Text(f"{v}*", style="bold green") if k in best else Text(f"{v} ") for k, v in size.items()}
        coverage = self.cells(covered, level, lambda found: coverage_text(found, m))
        return Group(f"{100 * level:g} %", {"coverage": coverage, head: marked})

    def to_frame(self) -> Any:
        """The records as a pandas DataFrame with columns method, level, metric, value, se."""
        import pandas

        return pandas.DataFrame(self.records, columns=list(Record._fields))

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((120, 24)).columns
        file = io.StringIO()
        Console(file=file, width=width).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Tables of as many groups of columns as the width allows, then notes."""
        from rich.measure import Measurement
        from rich.text import Text

        wide = options.update(max_width=10_000)

        def width(groups: list[Group]) -> int:
            return Measurement.get(console, wide, self._table(groups)).maximum

        for groups in self.groups():
            while groups:
                count = len(groups)
                while count > 1 and width(groups[:count]) > options.max_width:
                    count -= 1
                yield self._table(groups[:count])
                yield ""
                groups = groups[count:]
        for method, error in self.errors.items():
            yield Text(f"{method} failed: {type(error).__name__}: {one_line(error)}", style="red")
        yield Text(self.footnote, style="dim")

    def _table(self, groups: list[Group]) -> Any:
        """Groups of columns as a table, one row per method."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        table.add_column("\nmethod", no_wrap=True)
        for group in groups:
            for k, head in enumerate(group.columns):
                table.add_column(f"{'' if k else group.title}\n{head}", justify="right", no_wrap=True)
        columns = [cells for group in groups for cells in group.columns.values()]
        for method in self.methods:
            failed = [Text("failed", style="red"), *[""] * (len(columns) - 1)]
            table.add_row(Text(method), *(failed if method in self.errors else [cells[method] for cells in columns]))
        return table

    def estimates(self, metric: str, level: float | None = None) -> dict[str, Estimate]:
        """One number of each method that did not fail."""
        return {name: self.estimate(name, metric, level) for name in self.methods if name not in self.errors}

    def cells(self, metric: str, level: float | None = None, show: Callable[[Estimate], str] = str) -> dict[str, str]:
        """The same as text."""
        return {name: show(found) for name, found in self.estimates(metric, level).items()}


def coverage_text(found: Estimate, m: int) -> str:
    """A coverage of m objects; where all or none are covered, with the end of Wilson's 95 % interval, as the standard error is zero."""
    if 0 < found.value < 1 or not m:
        return str(found)
    low, high = wilson(round(found.value * m), m)
    return f"{found.value:.3f} (≥ {low:.3f})" if found.value else f"{found.value:.3f} (≤ {high:.3f})"


def seconds_text(time: Estimate) -> str:
    """A time in seconds or milliseconds."""
    return f"{time.value:.3g} s" if time.value >= 0.1 else f"{1e3 * time.value:.3g} ms"


# Metrics of intervals that are means over objects, which can be tested.
TESTED = ("mean_width", "interval_score")
# Metrics of p-values, and whether they need the true labels.
ON_P = {"size_auc": False, "fuzziness": False, "observed_fuzziness": True}


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
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

    classes: npt.NDArray[Any]
    p: dict[str, FloatArray] = field(default_factory=dict)
    sets: dict[str, BoolArray] = field(default_factory=dict)

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
        at_levels = [self.level_group(level, "coverage", "mean_size", "size") for level in self.levels]
        heads = {"size_auc": "size AUC", "fuzziness": "fuzziness", "observed_fuzziness": "obs. fuzziness"}
        overall = [
            self.guarantee_group(),
            *(Group("", {head: self.cells(metric)}) for metric, head in heads.items()),
            Group(f"{100 * self.middle:g} %", {"class gap": self.cells("class_coverage_gap", self.middle)}),
            Group("", {"not nested": self.cells("nestedness_violations", show=lambda n: str(n) if n.value else "0")}),
            self.times_group(),
        ]
        return [at_levels, overall]

    def measure(self, method: str, p: FloatArray, sets: BoolArray, path: BoolArray) -> None:
        """Measure a method by its p (m, C), its sets (m, C, L) at the levels, and its sets (m, C, G) at a grid of levels."""
        y, classes = self.y, self.classes
        for k, level in enumerate(self.levels.tolist()):
            at = sets[:, :, k]
            gap = metrics.class_coverage_gap(at, y, level, classes)
            found = {"coverage": metrics.coverage(at, y, classes), "mean_size": metrics.mean_size(at),
                     "class_coverage_gap": gap.mean, "worst_class_coverage_gap": gap.worst}  # fmt: skip
            by_label = metrics.class_coverage(at, y, classes)
            self.add(method, level, found | {f"class_coverage[{label}]": each for label, each in by_label.items()})
        overall = {name: getattr(metrics, name)(p, **self._truth(name)) for name in ON_P}
        self.add(method, NOT_MEASURED, overall | {"nestedness_violations": metrics.nestedness_violations(path)})
        self.p[method], self.sets[method] = p, sets


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
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

    intervals: dict[str, FloatArray] = field(default_factory=dict)

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
        return [[self._level_group(level) for level in self.levels], [self.guarantee_group(), self.times_group()]]

    def _level_group(self, level: float) -> Group:
        title, columns = self.level_group(level, "interval_coverage", "mean_width", "width")
        return Group(title, columns | {"interval score": self.cells("interval_score", level)})

    def measure(self, method: str, intervals: FloatArray, predicted: FloatArray) -> None:
        """Measure a method by its intervals (m, 2, L) at the levels, and its predictions (m,)."""
        for k, level in enumerate(self.levels.tolist()):
            self.add(method, level, metrics.interval_summary(intervals[:, :, k], self.y, level))
        self.add(method, NOT_MEASURED, {"mean_squared_error": metrics.estimates.mean((predicted - self.y) ** 2)})
        self.intervals[method] = intervals
