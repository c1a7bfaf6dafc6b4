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
from fullconformal.metrics.estimates import FloatArray, wilson
from fullconformal.metrics.intervals import check_truth, held, widths
from fullconformal.report.objects import chosen_columns, columns_of, evenly, identified, parts
from fullconformal.report.page import base64, check_methods, facts_of, fill_template, write_page

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
    identifiers: Sequence[Any] | None = None,
    by: Any = None,
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
    identifiers : sequence of m names, optional
        What the objects are called; by default they are numbered.
    by : name, sequence of names, or mapping of names to arrays (m,), optional
        Columns to show the coverage by first: those of ``rows``, or others.
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
    drawn = evenly(np.arange(m), 400)
    # Behind those that are drawn come others that are missed, for the table of these.
    missed = np.setdiff1d(np.flatnonzero(~held(main[:, :, start], truth)), drawn)
    shown = np.concatenate([drawn, evenly(missed, 100)])
    columns = chosen_columns(by, m, columns_of(rows, feature_names))
    groupings, names = grouped(main, truth, columns), identified(identifiers, m)
    wanted = columns[0][0] if by is not None and columns else None
    data = {
        **data_of_intervals(at, start, numbers, main, truth, shown),
        "drawn": len(drawn),
        "prediction": None if prediction is None else np.asarray(prediction, dtype=np.float64)[shown].tolist(),
        "identifiers": names and [names[i] for i in shown],
        "groupings": groupings,
        "part": next((k for k, group in enumerate(groupings) if group["name"] == wanted), 0),
    }
    at_start = {name: per_level[start] for name, per_level in numbers.items()}
    facts = {
        **facts_of(title, n_train, m, len(drawn), float(at[start]), at_start, diagnostics),
        "guarantee": guarantee,
        "groupings": [(group["name"], counts(group, start)) for group in groupings],
    }
    return fill_template("intervals", data, facts, "", plain)


def data_of_intervals(
    levels: FloatArray, start: int, numbers: dict[str, list[dict[str, float]]], ends: FloatArray, truth: FloatArray,
    shown: npt.NDArray[np.intp],
) -> dict[str, Any]:  # fmt: skip
    """What the page's script looks up and draws."""
    return {
        "levels": levels.tolist(),
        "start": start,
        "methods": list(numbers),
        "numbers": [[[finite(x) for x in of.values()] for of in per_level] for per_level in numbers.values()],
        "names": list(next(iter(numbers.values()))[0]),
        "shown": shown.tolist(),
        "truth": truth[shown].tolist(),
        # As (shown, L), infinite and missing ends included.
        "lower": base64(ends[shown, 0].astype("<f4")),
        "upper": base64(ends[shown, 1].astype("<f4")),
    }


def summary(ends: FloatArray, truth: FloatArray, level: float) -> dict[str, float]:
    """What the page says of intervals (m, 2) at one level, by the names that its script has."""
    found = metrics.interval_summary(ends, truth, level)
    low, high = wilson(int(held(ends, truth).sum()), len(truth))
    width, score = found["mean_width"], found["interval_score"]
    return {
        "coverage": found["interval_coverage"].value, "coverage_low": low, "coverage_high": high,
        "width": width.value, "width_se": width.se * (width.se > 1e-9 * width.value), "median": found["median_width"].value,
        "score": score.value, "score_se": score.se, "infinite": float(np.isinf(ends).any(axis=1).mean()),
    }  # fmt: skip


def grouped(ends: FloatArray, truth: FloatArray, columns: list[tuple[str, npt.NDArray[Any]]]) -> list[dict[str, Any]]:
    """By what coverage is shown: a name, labels of the bins, points in each, and of these the covered ones at each level (L, B)."""
    L, m, out = ends.shape[2], len(truth), []
    hit = np.stack([held(ends[:, :, k], truth) for k in range(L)], axis=1)
    # By width the bins change with the level: fifths by rank, ties in the order of the data.
    if m >= len(FIFTHS):
        fifth = np.stack(
            [np.argsort(np.argsort(widths(ends[:, :, k]), kind="stable")) * 5 // m for k in range(L)], axis=1
        )
        covered = [[int(hit[fifth[:, k] == b, k].sum()) for b in range(5)] for k in range(L)]
        points = [int((fifth[:, 0] == b).sum()) for b in range(5)]
        out.append({"name": "width of the interval", "labels": FIFTHS, "points": points, "covered": covered})
    for name, labels, of in parts([("true value", truth), *columns]):
        inside = [of == b for b in range(len(labels))]
        covered = [[int(hit[bin_, k].sum()) for bin_ in inside] for k in range(L)]
        out.append({"name": name, "labels": labels, "points": [int(bin_.sum()) for bin_ in inside], "covered": covered})
    return out


def counts(group: dict[str, Any], at: int) -> list[tuple[str, int, int]]:
    """Label, covered and points of each bin at one level."""
    return list(zip(group["labels"], group["covered"][at], group["points"], strict=True))


def plain(value: float) -> str:
    """A number of any size in four digits, or a dash if it is not finite."""
    return f"{value:.4g}" if np.isfinite(value) else "–"


def finite(x: float) -> float | None:
    """A number for JSON, which has no infinities."""
    return float(x) if np.isfinite(x) else None


def checked(intervals: Mapping[str, npt.ArrayLike], levels: FloatArray) -> dict[str, FloatArray]:
    """Intervals (m, 2, L) by name, all of one shape."""
    check_methods("intervals", intervals, "intervals (m, 2, L)")
    if levels.ndim != 1 or not levels.size or (np.diff(levels) <= 0).any() or levels[0] <= 0 or levels[-1] >= 1:
        raise ValueError("levels must be increasing numbers strictly between 0 and 1.")
    values = {str(name): np.asarray(value, dtype=np.float64) for name, value in intervals.items()}
    shape = (len(next(iter(values.values()))), 2, len(levels))
    for name, value in values.items():
        if value.shape != shape:
            raise ValueError(f"intervals[{name!r}] has shape {value.shape}, but {shape} is meant: (m, 2, levels).")
    return values
