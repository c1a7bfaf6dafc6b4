"""The report on intervals: one HTML file with a slider for the confidence level, which needs no network.

Intervals are computed at every position of the slider before the page is made, and so are all its numbers; the script only looks them up
and draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import Estimate, FloatArray
from fullconformal.metrics.intervals import check_truth, held, strata, widths
from fullconformal.report.page import base64, fill_template, write_page
from fullconformal.report.plots import COLOURS, STYLES, wilson

FIFTHS = ["the narrowest fifth", "second fifth", "third fifth", "fourth fifth", "the widest fifth"]


def write_interval_report(
    path: str | Path, intervals: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, levels: npt.ArrayLike, **options: Any
) -> Path:
    """Write the page of `render_interval_report` to a file, completely or not at all, and return its path.

    Examples
    --------
    >>> import tempfile
    >>> ends = np.array([[[0.0, -1.0], [1.0, 2.0]]] * 5)
    >>> path = f"{tempfile.mkdtemp()}/report.html"
    >>> write_interval_report(path, {"ours": ends}, [0.5, 0.2, 1.5, 3.0, 0.0], [0.8, 0.9]).name
    'report.html'
    """
    return write_page(path, render_interval_report(intervals, y, levels, **options))


def render_interval_report(
    intervals: Mapping[str, npt.ArrayLike],
    y: npt.ArrayLike,
    levels: npt.ArrayLike,
    *,
    prediction: npt.ArrayLike | None = None,
    confidence_level: float = 0.9,
    title: str = "Prediction intervals",
    n_train: int | None = None,
    rows: Any = None,
    feature_names: Sequence[Any] | None = None,
    guarantee: str = "",
    diagnostics: Sequence[str] = (),
) -> str:
    """The report as HTML.

    Parameters
    ----------
    intervals : mapping of str to array (m, 2, L)
        Intervals at the levels by the name of the method. Those of the first method are shown; the others are compared with it.
    y : array (m,)
        True values.
    levels : array (L,)
        Confidence levels, increasing: the positions of the slider.
    prediction : array (m,), optional
        Predictions of the first method.
    confidence_level : float, default=0.9
        Where the slider starts: the nearest of the levels.
    title : str, default="Prediction intervals"
    n_train : int, optional
        Number of training points.
    rows : array or DataFrame (m, d), optional
        The objects, for coverage by their features.
    feature_names : sequence of d names, optional
        Names of the columns of ``rows``; a DataFrame has its own.
    guarantee : str, optional
        What is promised, in words.
    diagnostics : sequence of str, optional
        Sentences to show; a warning begins with ``!``.

    Returns
    -------
    str
        It draws up to 400 objects, evenly spaced if there are more; the numbers are computed from all.
    """
    at = np.asarray(levels, dtype=np.float64)
    values = checked(intervals, at)
    main = next(iter(values.values()))
    truth, m = check_truth(y, len(main)), len(main)
    start = int(np.abs(at - confidence_level).argmin())
    numbers = {
        name: [summary(value[:, :, k], truth, level) for k, level in enumerate(at)] for name, value in values.items()
    }
    shown = np.arange(m) if m <= 400 else np.linspace(0, m - 1, 400).astype(np.intp)
    point = None if prediction is None else np.asarray(prediction, dtype=np.float64)
    groupings = grouped(main, truth, rows, feature_names)
    data = {
        "levels": at.tolist(),
        "start": start,
        "m": m,
        "methods": list(values),
        "numbers": [[[finite(x) for x in of.values()] for of in per_level] for per_level in numbers.values()],
        "names": list(numbers[next(iter(values))][0]),
        "shown": shown.tolist(),
        "truth": truth[shown].tolist(),
        "prediction": None if point is None else point[shown].tolist(),
        # As (shown, L), infinite and missing ends included.
        "lower": base64(main[shown, 0].astype("<f4")),
        "upper": base64(main[shown, 1].astype("<f4")),
        "groupings": groupings,
    }
    facts = {
        "title": title,
        "n_train": n_train,
        "m": m,
        "n_shown": len(shown),
        "level": float(at[start]),
        "guarantee": guarantee,
        "methods": {name: per_level[start] for name, per_level in numbers.items()},
        "groupings": [(group["name"], counts(group, start)) for group in groupings],
        "warnings": [line[1:].strip() for line in diagnostics if line.startswith("!")],
        "notes": [line for line in diagnostics if not line.startswith("!")],
    }
    return fill_template(data, facts, None, "intervals")


def summary(ends: FloatArray, truth: FloatArray, level: float) -> dict[str, float]:
    """What the page says of intervals (m, 2) at one level."""
    found = metrics.interval_summary(ends, truth, level)
    covered = int(held(ends, truth).sum())
    low, high = wilson(covered, len(truth))
    infinite = float(np.isinf(ends).any(axis=1).mean())

    def named(name: str, estimate: Estimate) -> dict[str, float]:
        return {name: estimate.value, f"{name}_se": estimate.se}

    return {
        **named("coverage", found["interval_coverage"]), "low": low, "high": high, **named("width", found["mean_width"]),
        "median": found["median_width"].value, **named("score", found["interval_score"]), "infinite": infinite,
    }  # fmt: skip


def grouped(ends: FloatArray, truth: FloatArray, rows: Any, names: Sequence[Any] | None) -> list[dict[str, Any]]:
    """By what coverage is shown: a name, labels of the bins, points in each, and of these the covered ones at each level (L, B)."""
    L = ends.shape[2]
    hit = np.stack([held(ends[:, :, k], truth) for k in range(L)], axis=1)
    out = []
    # By width the bins change with the level: fifths by rank, ties in the order of the data.
    m = len(truth)
    if m >= len(FIFTHS):
        fifth = np.stack(
            [np.argsort(np.argsort(widths(ends[:, :, k]), kind="stable")) * 5 // m for k in range(L)], axis=1
        )
        covered = [[int(hit[fifth[:, k] == b, k].sum()) for b in range(5)] for k in range(L)]
        points = [int((fifth[:, 0] == b).sum()) for b in range(5)]
        out.append({"name": "width of the interval", "labels": FIFTHS, "points": points, "covered": covered})
    for name, column in [("true value", truth), *columns_of(rows, names)]:
        try:
            labels, stratum = strata(column, 5)
        except ValueError:
            # Missing values.
            continue
        if not 1 < len(labels) <= 30:
            continue
        texts = [label if isinstance(label, str) else f"{label[0]:.4g} to {label[1]:.4g}" for label in labels]
        inside = [stratum == b for b in range(len(labels))]
        covered = [[int(hit[bin_, k].sum()) for bin_ in inside] for k in range(L)]
        out.append({"name": name, "labels": texts, "points": [int(bin_.sum()) for bin_ in inside], "covered": covered})
    return out


def columns_of(rows: Any, names: Sequence[Any] | None) -> list[tuple[str, npt.NDArray[Any]]]:
    """The first 30 columns of an array or DataFrame (m, d) by name."""
    if rows is None or np.ndim(rows) != 2:
        return []
    frame = hasattr(rows, "iloc")
    given = list(rows.columns) if frame and names is None else names
    d = rows.shape[1]
    if given is not None and len(given) != d:
        raise ValueError(f"feature_names must hold one name for each of the {d} columns of the rows, got {len(given)}.")
    columns = [rows.iloc[:, j].to_numpy() if frame else np.asarray(rows)[:, j] for j in range(min(d, 30))]
    return [
        (str(j if given is None else given[j]) if given is not None else f"x{j}", column)
        for j, column in enumerate(columns)
    ]


def counts(group: dict[str, Any], at: int) -> list[tuple[str, int, int]]:
    """Label, covered and points of each bin at one level."""
    return list(zip(group["labels"], group["covered"][at], group["points"], strict=True))


def finite(x: float) -> float | None:
    """A number for JSON, which has no infinities."""
    return float(x) if np.isfinite(x) else None


def checked(intervals: Mapping[str, npt.ArrayLike], levels: FloatArray) -> dict[str, FloatArray]:
    """Intervals (m, 2, L) by name, all of one shape."""
    most = len(COLOURS) * len(STYLES)
    if not isinstance(intervals, Mapping) or not 1 <= len(intervals) <= most:
        raise ValueError(f"intervals must map 1 to {most} names of methods to intervals (m, 2, L).")
    if levels.ndim != 1 or not levels.size or (np.diff(levels) <= 0).any() or levels[0] <= 0 or levels[-1] >= 1:
        raise ValueError("levels must be increasing numbers strictly between 0 and 1.")
    values = {str(name): np.asarray(value, dtype=np.float64) for name, value in intervals.items()}
    shape = (len(next(iter(values.values()))), 2, len(levels))
    for name, value in values.items():
        if value.shape != shape:
            raise ValueError(f"intervals[{name!r}] has shape {value.shape}, but {shape} is meant: (m, 2, levels).")
    return values
