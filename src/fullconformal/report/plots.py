"""Figures. Each function draws on the given axes, or on new ones, and returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import wilson
from fullconformal.sets import check_levels, members, prediction_sets

BLUE, ORANGE, GREEN, GREY = "#0b6fb8", "#d1651a", "#2a8a5b", "#6b7280"
# Distinguishable with red-green colour blindness too.
COLOURS = (BLUE, ORANGE, GREEN, GREY, "#7d2fd6", "#1b2750")
STYLES = ("-", "--", "-.")

# p-values (m, C) by the name of the method.
ByMethod = Mapping[str, npt.ArrayLike]
Labels = npt.ArrayLike | None


def plot_size_curve(
    p: ByMethod, *, epsilons: npt.ArrayLike | None = None, levels: Iterable[float] = (), ax: Any = None
) -> Any:
    """Mean set size against the significance level ε, with a band of one standard error; ``p`` maps a name to p-values (m, C).

    The confidence levels ``levels`` are marked.

    Examples
    --------
    >>> import numpy as np
    >>> ax = plot_size_curve({"ours": np.random.default_rng(0).uniform(size=(50, 3))})
    >>> ax.get_xlabel()
    'significance level ε'
    """
    ax = _axes(ax)
    grid = np.linspace(0, 0.2, 201) if epsilons is None else np.asarray(epsilons, dtype=np.float64)
    for (name, values), (colour, style) in zip(p.items(), _line_styles(), strict=False):
        curve = metrics.size_curve(values, grid)
        _band(ax, grid, curve.value, (curve.value - curve.se, curve.value + curve.se), name, colour, style)
    ax.axhline(1, color="0.6", lw=0.8, ls=":")
    for level in levels:
        ax.axvline(1 - level, color="0.6", lw=0.8, ls=":")
    ax.set(xlabel="significance level ε", ylabel="mean set size", xlim=(grid.min(), grid.max()), yscale="log")
    ax.set_yticks([size for size in (0.5, 1, 2, 5, 10, 20, 50, 100) if size <= 1.2 * ax.get_ylim()[1]])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.legend(frameon=False)
    return ax


def plot_calibration(
    p: ByMethod, y: npt.ArrayLike, *, classes: Labels = None, levels: npt.ArrayLike | None = None, ax: Any = None
) -> Any:
    """Coverage against the confidence level, with bands of 95 % intervals; ``p`` maps a name to p-values (m, C), ``y`` (m,) is the truth.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> ax = plot_calibration({"ours": rng.uniform(size=(50, 3))}, rng.integers(3, size=50))
    >>> ax.get_ylabel()
    'coverage'
    """
    ax = _axes(ax)
    grid, m = np.linspace(0.5, 0.999, 200) if levels is None else check_levels(levels), len(np.asarray(y))
    ax.plot([grid.min(), 1], [grid.min(), 1], color=GREY, lw=1, ls=":", label="confidence level")
    for (name, values), (colour, style) in zip(p.items(), _line_styles(), strict=False):
        share = [metrics.coverage(prediction_sets(values, level), y, classes).value for level in grid]
        _band(ax, grid, share, np.transpose([wilson(round(q * m), m) for q in share]), name, colour, style)
    ax.set(xlabel="confidence level", ylabel="coverage", xlim=(grid.min(), 1), ylim=(None, 1.002))
    _in_percent(ax.xaxis, ax.yaxis)
    ax.legend(frameon=False)
    return ax


def plot_class_coverage(
    p: npt.ArrayLike, y: npt.ArrayLike, *, classes: Labels = None, level: float = 0.9, ax: Any = None
) -> Any:
    """Coverage among the objects of each label as bars with 95 % intervals, for p-values (m, C) and labels ``y`` (m,).

    Examples
    --------
    >>> plot_class_coverage([[0.6, 0.02], [0.3, 0.2]], [0, 1]).get_xlabel()
    'coverage at 90% confidence'
    """
    values, labels = np.asarray(p, dtype=np.float64), np.asarray(y)
    by_class = metrics.class_coverage(prediction_sets(values, level), labels, classes)
    ax = _axes(ax, height=max(4.0, 0.22 * len(by_class)))
    count = [int((labels == label).sum()) for label in by_class]
    share = np.array([estimate.value for estimate in by_class.values()])
    low, high = np.transpose([wilson(round(q * of), of) for q, of in zip(share, count, strict=True)])
    whiskers = {"ecolor": "0.25", "elinewidth": 1, "capsize": 2.5}
    ax.barh(
        range(len(share)), share, xerr=np.abs([share - low, high - share]), color=BLUE, alpha=0.75, error_kw=whiskers
    )
    # The height of a label in points.
    room = 72 * ax.bbox.height / ax.get_figure(root=True).dpi / len(share)
    ax.set_yticks(range(len(share)), [str(label) for label in by_class], fontsize=min(10, 0.8 * room))
    ax.axvline(level, color=ORANGE, lw=1.2, ls="--")
    ax.set(xlabel=f"coverage at {100 * level:.6g}% confidence", xlim=(0, 1))
    _in_percent(ax.xaxis)
    # The first label is on top.
    ax.set_ylim(len(share) - 0.4, -0.6)
    return ax


def plot_comparison(
    p: ByMethod, y: npt.ArrayLike, *, classes: Labels = None, level: float = 0.9, ax: Any = None
) -> Any:
    """Methods by mean set size and coverage at one level, with their standard errors; up and to the left is better.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> ax = plot_comparison({"ours": rng.uniform(size=(50, 3))}, rng.integers(3, size=50))
    >>> ax.get_xlabel()
    'mean set size'
    """
    ax = _axes(ax)
    for (name, values), (colour, _) in zip(p.items(), _line_styles(), strict=False):
        found = metrics.summary(values, y, level, classes)
        size, coverage = found["mean_size"], found["coverage"]
        ax.errorbar(size.value, coverage.value, xerr=size.se, yerr=coverage.se, color=colour, fmt="o", ms=6, capsize=3)
        ax.annotate(
            name, (size.value, coverage.value), (7, 6), textcoords="offset points", color=colour, fontweight="bold"
        )
    ax.axhline(level, color=GREY, lw=1, ls=":")
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    ax.annotate("confidence level", (1, level), (-2, -12), ha="right", color=GREY, **where)
    ax.set(xlabel="mean set size", ylabel=f"coverage at {100 * level:.6g}% confidence")
    ax.margins(0.25)
    _in_percent(ax.yaxis)
    return ax


def plot_widths(intervals: ByMethod, levels: npt.ArrayLike, *, ax: Any = None) -> Any:
    """Mean width against the confidence level with a band of one standard error; ``intervals`` maps a name to (m, 2, L), levels are (L,).

    Examples
    --------
    >>> import numpy as np
    >>> ax = plot_widths({"ours": np.tile([[[0.0, 0.0], [1.0, 2.0]]], (5, 1, 1))}, [0.8, 0.9])
    >>> ax.get_xlabel()
    'confidence level'
    """
    ax, at = _axes(ax), np.asarray(levels, dtype=np.float64)
    for (name, values), (colour, style) in zip(intervals.items(), _line_styles(), strict=False):
        ends = np.asarray(values, dtype=np.float64)
        width, se = np.transpose([metrics.mean_width(ends[:, :, k]) for k in range(len(at))])
        # Infinite intervals have no place on the axis.
        finite = np.isfinite(width)
        width, se = width[finite], np.nan_to_num(se[finite])
        _band(ax, at[finite], width, (width - se, width + se), name, colour, style, marker="o", ms=4)
    ax.set(xlabel="confidence level", ylabel="mean width", ylim=(0, None))
    _in_percent(ax.xaxis)
    ax.legend(frameon=False)
    return ax


def plot_p_values(
    p: npt.ArrayLike, classes: npt.ArrayLike, *, level: float = 0.9, truth: Any = None, ax: Any = None
) -> Any:
    """p-values (C,) of one object as bars; labels in the set at the level are filled, the true label is bold.

    Examples
    --------
    >>> plot_p_values([0.6, 0.02, 0.2], ["a", "b", "c"]).get_xlabel()
    'p-value'
    """
    ax = _axes(ax)
    values, names = np.asarray(p, dtype=np.float64), [str(c) for c in np.asarray(classes)]
    inside = members(values, 1 - level)
    ax.barh(names, values, color=[BLUE if member else "0.82" for member in inside], height=0.72)
    ax.axvline(1 - level, color=ORANGE, lw=1, ls="--")
    for label in ax.get_yticklabels():
        if truth is not None and label.get_text() == str(truth):
            label.set_fontweight("bold")
    ax.set(xlabel="p-value", xscale="log", xlim=(min(values[values > 0].min(), 1 - level) / 1.6, 1))
    ax.minorticks_off()
    ax.invert_yaxis()
    return ax


def _band(ax: Any, x: Any, y: Any, ends: Any, name: str, colour: str, style: str, **options: Any) -> None:
    """A line through (x, y) with a band between its two ends."""
    ax.plot(x, y, color=colour, label=name, lw=1.8, ls=style, **options)
    ax.fill_between(x, *ends, color=colour, alpha=0.15, lw=0)


def _line_styles() -> Iterator[tuple[str, str]]:
    """Colours and styles of lines, without end: every colour solid, then dashed, then dash-dotted."""
    return cycle((colour, style) for style in STYLES for colour in COLOURS)


def _in_percent(*axes: Any) -> None:
    """Show the ticks of axes in per cent."""
    from matplotlib.ticker import PercentFormatter

    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _axes(ax: Any, height: float = 4.0) -> Any:
    """The given axes, or new ones, with a frame on two sides."""
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(6, height), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    return ax
