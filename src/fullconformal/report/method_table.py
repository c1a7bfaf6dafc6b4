"""Numbers of several methods as records and as a table: what comparisons of sets and of intervals share."""

from __future__ import annotations

import io
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal.metrics.estimates import Estimate, FloatArray, Welch, welch, wilson
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


class MethodTable(ABC):
    """Records of methods measured on the same objects; prints as a table."""

    methods: list[str]
    levels: FloatArray
    y: npt.NDArray[Any]
    records: list[Record]
    errors: dict[str, Exception]
    guarantees: dict[str, str]

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

    def guarantee_group(self) -> Group:
        """What is promised, by method."""
        return Group("", {"guarantee": {k: self.guarantees.get(k, "") for k in self.methods if k not in self.errors}})

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


def smallest_marked(coverage: dict[str, Estimate], size: dict[str, Estimate], level: float, m: int) -> dict[str, Any]:
    """Sizes or widths by method as cells; marked is the smallest among the methods whose coverage of m objects agrees with the level."""
    from rich.text import Text

    # Of few objects a standard error is too small, and zero where none is covered.
    valid = [k for k, found in coverage.items() if wilson(round(found.value * m), m)[1] >= level - SAME_LEVEL]
    smallest = min((size[name].value for name in valid), default=NOT_MEASURED)
    best = [name for name in valid if size[name].value == smallest]
    return {k: Text(f"{v}*", style="bold green") if k in best else Text(f"{v} ") for k, v in size.items()}


def coverage_text(found: Estimate, m: int) -> str:
    """A coverage of m objects; where all or none are covered, with the end of Wilson's 95 % interval, as the standard error is zero."""
    if 0 < found.value < 1 or not m:
        return str(found)
    low, high = wilson(round(found.value * m), m)
    return f"{found.value:.3f} (≥ {low:.3f})" if found.value else f"{found.value:.3f} (≤ {high:.3f})"


def seconds_text(time: Estimate) -> str:
    """A time in seconds or milliseconds."""
    return f"{time.value:.3g} s" if time.value >= 0.1 else f"{1e3 * time.value:.3g} ms"
