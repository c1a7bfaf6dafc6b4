"""Figures. Each function takes an axes (or makes one) and returns it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.sets import members

BLUE, ORANGE, GREEN, GREY = "#0b6fb8", "#d1651a", "#2a8a5b", "#6b7280"
COLOURS = (BLUE, ORANGE, GREEN, GREY, "#8b5cb1", "#b03060")
STYLES = ("-", "--", "-.")


def plot_size_curve(
    p: Mapping[str, npt.ArrayLike],
    *,
    epsilons: npt.ArrayLike | None = None,
    levels: Iterable[float] = (),
    ax: Any = None,
) -> Any:
    """Mean set size against the significance level ε, with a band of one standard error; ``p`` maps a name to p-values (m, C).

    Confidence levels that are to be marked are given as ``levels``.

    Examples
    --------
    >>> import numpy as np
    >>> ax = plot_size_curve({"ours": np.random.default_rng(0).uniform(size=(50, 3))})
    >>> ax.get_xlabel()
    'significance level ε'
    """
    ax = _axes(ax)
    grid = np.linspace(0, 0.2, 201) if epsilons is None else np.asarray(epsilons, dtype=np.float64)
    for k, (name, values) in enumerate(p.items()):
        colour, style = COLOURS[k % len(COLOURS)], STYLES[k // len(COLOURS) % len(STYLES)]
        curve = metrics.size_curve(values, grid)
        ax.plot(grid, curve.value, color=colour, label=name, lw=1.8, ls=style)
        ax.fill_between(grid, curve.value - curve.se, curve.value + curve.se, color=colour, alpha=0.15, lw=0)
    ax.axhline(1, color="0.6", lw=0.8, ls=":")
    for level in levels:
        ax.axvline(1 - level, color="0.6", lw=0.8, ls=":")
    ax.set(xlabel="significance level ε", ylabel="mean set size", xlim=(grid.min(), grid.max()), yscale="log")
    ax.set_yticks([size for size in (0.5, 1, 2, 5, 10, 20, 50, 100) if size <= 1.2 * ax.get_ylim()[1]])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


def plot_p_values(
    p: npt.ArrayLike, classes: npt.ArrayLike, *, level: float = 0.9, truth: Any = None, ax: Any = None
) -> Any:
    """p-values (C,) of one object as bars; those in the set at the level are filled, the true label is marked.

    Examples
    --------
    >>> plot_p_values([0.6, 0.02, 0.2], ["a", "b", "c"]).get_xlabel()
    'p-value'
    """
    ax = _axes(ax)
    values, names = np.asarray(p, dtype=np.float64), [str(c) for c in np.asarray(classes)]
    inside = members(values, 1 - level)
    ax.barh(names, values, color=[BLUE if inn else "0.82" for inn in inside], height=0.72)
    ax.axvline(1 - level, color=ORANGE, lw=1, ls="--")
    for label in ax.get_yticklabels():
        if truth is not None and label.get_text() == str(truth):
            label.set_fontweight("bold")
    ax.set(xlabel="p-value", xscale="log", xlim=(min(values[values > 0].min(), 1 - level) / 1.6, 1))
    ax.minorticks_off()
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(6, 4), layout="constrained").subplots()
