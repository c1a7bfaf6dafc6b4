"""A comparison of methods: its numbers as records, as a table and as a figure."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics import Estimate, Welch

ON_P = {"size_auc": False, "fuzziness": False, "observed_fuzziness": True}  # whether they need the true labels
SAME_LEVEL = 1e-9  # two levels closer than this are one
NOT_MEASURED = float("nan")


class Record(NamedTuple):
    """One number: ``level`` is NaN where the metric looks at none, ``se`` where the number is no mean."""

    method: str
    level: float
    metric: str
    value: float
    se: float


class Group(NamedTuple):
    """Columns of the table that stay together: a title above, then heads and the cell of each method under them."""

    title: str
    columns: dict[str, dict[str, Any]]


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Methods measured on the same objects; prints as a table. `fullconformal.compare` makes it.

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
        By method, its p-values; where it has none, the largest ε at which each label is in the set.
    sets : dict of bool arrays (m, C, L)
        By method, its sets at the levels.
    errors : dict of Exception
        By method, what stopped those that failed.

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
    levels: npt.NDArray[np.float64]
    y: npt.NDArray[Any]
    classes: npt.NDArray[Any]
    records: list[Record]
    p: dict[str, npt.NDArray[np.float64]]
    sets: dict[str, npt.NDArray[np.bool_]]
    errors: dict[str, Exception]

    # Numbers ----------------------------------------------------------------------------------------------------------

    def estimate(self, method: str, metric: str, level: float | None = None) -> Estimate:
        """One number with its standard error.

        Parameters
        ----------
        method, metric : str
            As in ``records``.
        level : float, optional
            Where the metric looks at one.
        """
        of_method = [record for record in self.records if record.method == method]
        if not of_method:
            known = [name for name in self.methods if name not in self.errors]
            why = f" failed: {self.errors[method]}" if method in self.errors else " is unknown"
            raise ValueError(f"method={method!r}{why}; there are numbers of: {', '.join(map(repr, known))}.")
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
            self.estimate(method, metric, level)  # raises where there is no such number
        return metrics.welch(self._per_object(a, metric, level), self._per_object(b, metric, level))

    def _per_object(self, method: str, metric: str, level: float | None) -> npt.NDArray[np.float64]:
        if level is not None:
            at = int(np.abs(self.levels - level).argmin())
            return metrics.per_object(metrics.mean_size, self.sets[method][:, :, at])
        if ON_P[metric]:
            return metrics.per_object(getattr(metrics, metric), self.p[method], self.y, classes=self.classes)
        return metrics.per_object(getattr(metrics, metric), self.p[method])

    def to_frame(self) -> Any:
        """The records as a pandas DataFrame with columns method, level, metric, value, se."""
        import pandas

        return pandas.DataFrame(self.records, columns=list(Record._fields))

    # Shown ------------------------------------------------------------------------------------------------------------

    def plot(self, ax: Any = None) -> Any:
        """Mean set size of each method against ε; dotted lines at the levels. Returns the axes."""
        from fullconformal.report.plots import plot_size_curve

        if not self.p:
            raise ValueError("every method failed, so there is nothing to plot; see comparison.errors.")
        top = max(0.2, 1.1 * (1 - self.levels.min()))
        return plot_size_curve(self.p, epsilons=np.linspace(0, min(top, 1), 201), levels=self.levels, ax=ax)

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((120, 24)).columns
        console = Console(file=io.StringIO(), width=width)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Tables of as many groups of columns as the width allows, then notes."""
        from rich.text import Text

        for groups in ([self._level_group(level) for level in self.levels], self._overall_groups()):
            while groups:
                count = len(groups)
                while count > 1 and _width(console, options, self._table(groups[:count])) > options.max_width:
                    count -= 1
                yield self._table(groups[:count])
                yield ""
                groups = groups[count:]
        for method, error in self.errors.items():
            yield Text(f"{method} failed: {type(error).__name__}: {error}", style="red")
        yield Text(
            f"{len(self.y)} objects, {len(self.classes)} labels; ± one standard error. * the smallest sets among the methods whose "
            "coverage is not more than two standard errors below the level. Size AUC: area under set size against ε in [0, 0.2].",
            style="dim",
        )

    def _table(self, groups: list[Group]) -> Any:
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
        """Coverage and size at a level, the best size marked."""
        coverage = self._estimates("coverage", level)
        size = self._estimates("mean_size", level)
        best = self._best(coverage, size, level)
        return Group(
            f"{100 * level:g} %",
            {
                "coverage": {name: str(found) for name, found in coverage.items()},
                "size": {name: _marked(str(found), name in best) for name, found in size.items()},
            },
        )

    def _best(self, coverage: dict[str, Estimate], size: dict[str, Estimate], level: float) -> list[str]:
        """The methods with the smallest sets, of those whose coverage is not below the level by more than two standard errors."""
        good = [k for k, found in coverage.items() if found.value >= level - SAME_LEVEL - 2 * np.nan_to_num(found.se)]
        smallest = min((size[name].value for name in good), default=NOT_MEASURED)
        return [name for name in good if size[name].value == smallest]

    def _overall_groups(self) -> list[Group]:
        """What does not look at a level; and the gap between classes at one of the levels."""
        level = float(self.levels[len(self.levels) // 2])
        gap = self._estimates("class_coverage_gap", level)
        seconds = {name: self._estimates(f"{name}_seconds") for name in ("fit", "predict")}
        heads = {"size_auc": "size AUC", "fuzziness": "fuzziness", "observed_fuzziness": "obs. fuzziness"}
        return [
            *(
                Group("", {head: {name: str(found) for name, found in self._estimates(metric).items()}})
                for metric, head in heads.items()
            ),
            Group(f"{100 * level:g} %", {"class gap": {name: str(found) for name, found in gap.items()}}),
            Group("", {"not nested": {k: _or_zero(v) for k, v in self._estimates("nestedness_violations").items()}}),
            Group("", {head: {k: _seconds(v.value) for k, v in cells.items()} for head, cells in seconds.items()}),
        ]

    def _estimates(self, metric: str, level: float | None = None) -> dict[str, Estimate]:
        return {name: self.estimate(name, metric, level) for name in self.methods if name not in self.errors}


def measure(
    method: str,
    p: npt.NDArray[np.float64],
    sets: npt.NDArray[np.bool_],
    path: npt.NDArray[np.bool_],
    y: npt.NDArray[Any],
    levels: npt.NDArray[np.float64],
    classes: npt.NDArray[Any],
) -> list[Record]:
    """Records of a method from its p (m, C), its sets (m, C, L) at the levels, and its sets (m, C, G) at a grid of them."""
    records = []
    for k, level in enumerate(levels.tolist()):
        at = sets[:, :, k]
        gap = metrics.class_coverage_gap(at, y, level, classes)
        found = {"coverage": metrics.coverage(at, y, classes), "mean_size": metrics.mean_size(at),
                 "class_coverage_gap": gap.mean, "worst_class_coverage_gap": gap.worst}  # fmt: skip
        by_label = metrics.class_coverage(at, y, classes)
        found |= {f"class_coverage[{label}]": estimate for label, estimate in by_label.items()}
        records += [Record(method, level, name, *estimate) for name, estimate in found.items()]
    overall = {name: getattr(metrics, name)(p, *([y, classes] if truth else [])) for name, truth in ON_P.items()}
    overall["nestedness_violations"] = metrics.nestedness_violations(path)
    return [*records, *(Record(method, NOT_MEASURED, name, *estimate) for name, estimate in overall.items())]


def _marked(text: str, best: bool) -> Any:
    from rich.text import Text

    return Text(f"{text}*", style="bold green") if best else Text(f"{text} ")


def _width(console: Any, options: Any, table: Any) -> int:
    """Characters that a table would take if it had room."""
    from rich.measure import Measurement

    return Measurement.get(console, options.update(max_width=10_000), table).maximum


def _seconds(time: float) -> str:
    return f"{time:.3g} s" if time >= 0.1 else f"{1e3 * time:.3g} ms"


def _or_zero(estimate: Estimate) -> str:
    return "0" if estimate.value == 0 else str(estimate)
