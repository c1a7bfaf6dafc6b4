"""The result of a comparison of methods: its numbers as records, as a table and as a figure."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import BoolArray, Estimate, FloatArray, Welch

# Metrics of p-values, and whether they need the true labels.
ON_P = {"size_auc": False, "fuzziness": False, "observed_fuzziness": True}
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


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
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
        if metric not in (*ON_P, "mean_size"):
            raise ValueError(f"metric={metric!r} is unknown; allowed: {', '.join(map(repr, (*ON_P, 'mean_size')))}.")
        for method in (a, b):
            # Raises if there is no such number.
            self.estimate(method, metric, level)
        return metrics.welch(self._per_object(a, metric, level), self._per_object(b, metric, level))

    def _per_object(self, method: str, metric: str, level: float | None) -> FloatArray:
        """The metric (m,) of each object alone."""
        if level is not None:
            at = int(np.abs(self.levels - level).argmin())
            return metrics.per_object(metrics.mean_size, self.sets[method][:, :, at])
        return metrics.per_object(getattr(metrics, metric), self.p[method], **self._truth(metric))

    def _truth(self, metric: str) -> dict[str, Any]:
        """The true labels as arguments, if a metric of p-values needs them."""
        return {"y": self.y, "classes": self.classes} if ON_P[metric] else {}

    def to_frame(self) -> Any:
        """The records as a pandas DataFrame with columns method, level, metric, value, se."""
        import pandas

        return pandas.DataFrame(self.records, columns=list(Record._fields))

    def plot(self, ax: Any = None) -> Any:
        """Plot the mean set size of each method against ε, with dotted lines at the levels, and return the axes."""
        from fullconformal.report.plots import plot_size_curve

        if not self.p:
            raise ValueError("every method failed and there is nothing to plot; see comparison.errors.")
        top = max(0.2, 1.1 * (1 - self.levels.min()))
        return plot_size_curve(self.p, epsilons=np.linspace(0, min(top, 1), 201), levels=self.levels, ax=ax)

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

        for groups in ([self._level_group(level) for level in self.levels], self._overall_groups()):
            while groups:
                count = len(groups)
                while count > 1 and width(groups[:count]) > options.max_width:
                    count -= 1
                yield self._table(groups[:count])
                yield ""
                groups = groups[count:]
        for method, error in self.errors.items():
            yield Text(f"{method} failed: {type(error).__name__}: {error}", style="red")
        yield Text(
            f"{len(self.y)} objects, {len(self.classes)} labels; ± one standard error. * the smallest sets among the methods whose "
            "coverage is at most two standard errors below the level. Size AUC: area under set size against ε in [0, 0.2].",
            style="dim",
        )

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

    def _level_group(self, level: float) -> Group:
        """Coverage and size at a level; marked is the smallest size among methods with enough coverage."""
        from rich.text import Text

        coverage, size = self._estimates("coverage", level), self._estimates("mean_size", level)
        valid = [k for k, found in coverage.items() if found.value >= level - SAME_LEVEL - 2 * np.nan_to_num(found.se)]
        smallest = min((size[name].value for name in valid), default=NOT_MEASURED)
        best = [name for name in valid if size[name].value == smallest]
        sizes = {k: Text(f"{v}*", style="bold green") if k in best else Text(f"{v} ") for k, v in size.items()}
        return Group(f"{100 * level:g} %", {"coverage": {k: str(v) for k, v in coverage.items()}, "size": sizes})

    def _overall_groups(self) -> list[Group]:
        """Metrics that do not depend on a level, and the gap between classes at the middle one."""
        level = float(self.levels[len(self.levels) // 2])
        heads = {"size_auc": "size AUC", "fuzziness": "fuzziness", "observed_fuzziness": "obs. fuzziness"}

        def cells(metric: str, level: float | None = None, show: Callable[[Estimate], str] = str) -> dict[str, str]:
            return {method: show(found) for method, found in self._estimates(metric, level).items()}

        return [
            Group("", {"guarantee": {k: self.guarantees.get(k, "") for k in self.methods if k not in self.errors}}),
            *(Group("", {head: cells(metric)}) for metric, head in heads.items()),
            Group(f"{100 * level:g} %", {"class gap": cells("class_coverage_gap", level)}),
            Group("", {"not nested": cells("nestedness_violations", show=lambda n: str(n) if n.value else "0")}),
            Group("", {head: cells(f"{head}_seconds", show=_seconds) for head in ("fit", "predict")}),
        ]

    def _estimates(self, metric: str, level: float | None = None) -> dict[str, Estimate]:
        """One number of each method that did not fail."""
        return {name: self.estimate(name, metric, level) for name in self.methods if name not in self.errors}


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


def _seconds(time: Estimate) -> str:
    """A time in seconds or milliseconds."""
    return f"{time.value:.3g} s" if time.value >= 0.1 else f"{1e3 * time.value:.3g} ms"
