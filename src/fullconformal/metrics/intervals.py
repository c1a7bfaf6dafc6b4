"""Metrics of prediction intervals (m, 2), lower and upper end, and of predictive distributions of a number.

Ends may be infinite; an empty interval has NaN at both ends. Ends belong to the interval.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.metrics.classification import Slab, Strata, worst_slice
from fullconformal.metrics.estimates import BoolArray, Estimate, FloatArray, check_level, mean


def interval_coverage(intervals: npt.ArrayLike, y: npt.ArrayLike) -> Estimate:
    """Fraction of the m points whose interval (m, 2) holds the true value ``y`` (m,).

    Examples
    --------
    >>> print(interval_coverage([[0.0, 1.0], [2.0, 3.0]], [0.5, 5.0]))
    0.500 ± 0.500
    """
    return mean(held(*checked(intervals, y)))


def mean_width(intervals: npt.ArrayLike) -> Estimate:
    """Mean width of intervals (m, 2); an empty interval has width 0, and one infinite interval makes the mean infinite.

    Examples
    --------
    >>> print(mean_width([[0.0, 1.0], [2.0, 5.0]]))
    2.000 ± 1.000
    """
    return mean(widths(check_intervals(intervals)))


def median_width(intervals: npt.ArrayLike) -> Estimate:
    """Median width of intervals (m, 2), which a few infinite ones do not make infinite.

    The standard error is half the distance between the order statistics one binomial standard deviation, √m/2, to either side of the
    middle: it assumes nothing of the widths.

    Examples
    --------
    >>> print(median_width([[0.0, 1.0], [2.0, 5.0], [0.0, np.inf]]))
    3.000 ± inf
    """
    width = np.sort(widths(check_intervals(intervals)))
    m = len(width)
    if m == 1:
        return Estimate(float(width[0]), float("nan"))
    below = max(int(np.floor((m - 1 - np.sqrt(m)) / 2)), 0)
    low, high = width[below], width[m - 1 - below]
    # Of infinite widths on both sides the difference is not known.
    return Estimate(float(np.median(width)), float((high - low) / 2) if np.isfinite(low) else float("nan"))


def interval_score(intervals: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9) -> Estimate:
    """Mean interval score (Winkler 1972): the width, plus 2/ε times the distance of y from the interval; small is good.

    The score is proper: of all intervals at ``confidence_level`` = 1 − ε, the one between the quantiles ε/2 and 1 − ε/2 of the true
    distribution has the smallest expected score. An empty interval scores infinity.

    Parameters
    ----------
    intervals : array (m, 2)
    y : array (m,)
        True values.
    confidence_level : float, default=0.9
        The level the intervals were made for.

    Examples
    --------
    >>> print(interval_score([[0.0, 1.0], [2.0, 3.0]], [0.5, 3.5], 0.9))
    6.000 ± 5.000
    """
    epsilon = 1 - check_level(confidence_level)
    ends, truth = checked(intervals, y)
    outside = np.maximum(np.maximum(ends[:, 0] - truth, truth - ends[:, 1]), 0.0)
    outside[np.isnan(outside)] = np.inf
    return mean(widths(ends) + 2 / epsilon * outside)


def crps(
    points: npt.ArrayLike, y: npt.ArrayLike, *, cdf: npt.ArrayLike | None = None, levels: npt.ArrayLike | None = None
) -> Estimate:
    """Mean continuous ranked probability score ∫(F(z) − 1{y ≤ z})² dz of distributions F that are step functions, exactly; small is good.

    A step of mass w from F − w to F at x adds 2w·ρ(y − x) with the quantile loss ρ at the middle of the step, F − w/2: the score is the
    integral of twice the quantile loss over all levels. A distribution with mass at infinity has an infinite score.

    Parameters
    ----------
    points : array (m, K)
        The points where each distribution jumps, in ascending order; or its quantiles at ``levels``.
    y : array (m,)
        True values.
    cdf : array (K,) or (m, K), optional
        The value of F from each jump on, ending in 1. By default all K jumps are equal: an ensemble.
    levels : array (K,), optional
        The points are quantiles at these levels; the mass between two of them is shared between them half and half.

    Examples
    --------
    >>> print(crps([[0.0, 1.0]], [0.5]))
    0.250
    >>> print(crps([[0.0, 1.0]], [0.5], levels=[0.25, 0.75]))
    0.250
    """
    x = np.asarray(points, dtype=np.float64)
    if x.ndim != 2 or 0 in x.shape or np.isnan(x).any() or (x[:, 1:] < x[:, :-1]).any():
        raise ValueError(
            f"points must be an array (m, K) of numbers, each row in ascending order, got shape {x.shape}; np.sort(points, axis=1) orders "
            "them."
        )
    truth = check_truth(y, len(x))
    upper = step_tops(x.shape, cdf, levels)
    mass = np.diff(upper, prepend=0.0, axis=1)
    # Where there is no mass there may be infinities.
    error = np.where(mass > 0, truth[:, None] - x, 0.0)
    # ρ(e) at level τ is τe for positive errors and (τ − 1)e for negative ones.
    loss = np.abs((upper - mass / 2 - (error < 0)) * error)
    return mean(2 * (mass * loss).sum(axis=1))


def step_tops(shape: tuple[int, int], cdf: Any, levels: Any) -> FloatArray:
    """F from each jump on, (1, K) or (m, K), from what `crps` was given."""
    m, K = shape
    if cdf is not None and levels is not None:
        raise ValueError("cdf and levels were both given; give cdf for jumps, levels for quantiles.")
    if levels is not None:
        tau = np.asarray(levels, dtype=np.float64)
        if tau.shape != (K,) or not ((tau > 0) & (tau < 1)).all() or (np.diff(tau) <= 0).any():
            raise ValueError(f"levels must be {K} increasing numbers strictly between 0 and 1, got {levels!r}.")
        return np.append((tau[1:] + tau[:-1]) / 2, 1.0)[None]
    if cdf is None:
        return np.arange(1, K + 1)[None] / K
    F = np.asarray(cdf, dtype=np.float64)
    if F.shape not in ((K,), (m, K)):
        raise ValueError(f"cdf must have shape ({K},) or ({m}, {K}), one value for each jump, got {F.shape}.")
    F = F.reshape(-1, K)
    # Of sums of K masses.
    if (np.diff(F, prepend=0.0, axis=1) < 0).any() or (np.abs(F[:, -1] - 1) > 1e-12 * K).any():
        raise ValueError("cdf must ascend from at least 0 to 1 along the jumps.")
    return F


def coverage_by(intervals: npt.ArrayLike, y: npt.ArrayLike, by: Any = "y", bins: Any = 5) -> Strata:
    """Coverage of intervals (m, 2) among points that are alike: by the true value, by the width, or by a feature.

    Conformal prediction promises the coverage of all points together. Coverage by the true value is low at both ends even for ideal
    intervals, since the value of an object is not known beforehand; by the width and by features it shows where intervals are too narrow.

    Parameters
    ----------
    intervals : array (m, 2)
    y : array (m,)
        True values.
    by : "y", "width", or array (m,)
        What the points are put into bins by; an array of words has a bin for each word.
    bins : int or increasing sequence of numbers, default=5
        Number of bins with about equally many points, or the inner edges of the bins; a number on an edge is in the bin above.

    Returns
    -------
    Strata
        Named by (smallest, largest value) of the points in the bin, or by the word; bins without points are left out.

    Examples
    --------
    >>> intervals = [[0.0, 1.0], [0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]
    >>> strata = coverage_by(intervals, [0.5, 0.6, 3.0, 1.0], by="width", bins=2)
    >>> {ends: str(estimate) for ends, estimate in strata.coverage.items()}
    {(1.0, 1.0): '1.000', (2.0, 2.0): '0.500 ± 0.500'}
    """
    ends, truth = checked(intervals, y)
    hit = held(ends, truth)
    if isinstance(by, str):
        if by not in ("y", "width"):
            raise ValueError(
                f"by={by!r} is unknown; give 'y', 'width', or one number or word for each of the {len(truth)} points."
            )
        values = truth if by == "y" else widths(ends)
    else:
        values = np.asarray(by)
    if values.shape != truth.shape:
        raise ValueError(f"by must hold one value for each of the {len(truth)} points, got shape {values.shape}.")
    names, stratum = strata(values, bins)
    coverage = {name: mean(hit[stratum == k]) for k, name in enumerate(names)}
    points = {name: int((stratum == k).sum()) for k, name in enumerate(names)}
    return Strata(coverage, points, min(coverage, key=lambda name: coverage[name].value))


def strata(values: npt.NDArray[Any], bins: Any) -> tuple[list[Any], npt.NDArray[np.intp]]:
    """Names of the bins that have points, and the bin (m,) of each value (m,)."""
    if values.dtype.kind not in "biuf":
        words, word = np.unique(values.astype(str), return_inverse=True)
        return words.tolist(), word
    values = values.astype(np.float64)
    if np.isnan(values).any():
        raise ValueError(f"by holds NaN for {int(np.isnan(values).sum())} points; leave these points out.")
    if isinstance(bins, (int, np.integer)) and not isinstance(bins, bool) and bins >= 1:
        # Of observed values: interpolation would fail between infinite ones.
        inner = np.quantile(values, np.arange(1, bins) / bins, method="higher")
    else:
        inner = np.asarray(bins, dtype=np.float64)
        if inner.ndim != 1 or not inner.size or (np.diff(inner) <= 0).any():
            raise ValueError(f"bins must be a whole number ≥ 1 or increasing inner edges, got {bins!r}.")
    found, stratum = np.unique(np.searchsorted(inner, values, side="right"), return_inverse=True)
    groups = [values[stratum == k] for k in range(len(found))]
    return [(float(group.min()), float(group.max())) for group in groups], stratum


def interval_worst_slice_coverage(
    X: npt.ArrayLike,
    intervals: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    delta: float = 0.1,
    n_directions: int = 1000,
    random_state: Any = 0,
) -> Slab:
    """Coverage in the worst slab {x : lo ≤ v·x ≤ hi} that holds a share delta of the points, as `worst_slice_coverage`.

    Parameters
    ----------
    X : array (m, d)
        Objects; standardise them.
    intervals : array (m, 2)
    y : array (m,)
        True values.
    delta : float, default=0.1
        Smallest share of the points that a slab must hold.
    n_directions : int, default=1000
    random_state : int, Generator or None, default=0
        Seeds the halves and the directions.

    Examples
    --------
    >>> X = np.random.default_rng(0).uniform(-1, 1, size=(2000, 2))
    >>> intervals = np.stack([X[:, 0] - 1, np.full(2000, 0.5)], axis=1)  # misses what is above 0.5
    >>> print(interval_worst_slice_coverage(X, intervals, X[:, 0]).coverage)
    0.000
    """
    return worst_slice(X, held(*checked(intervals, y)), delta, n_directions, random_state)


def interval_summary(intervals: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9) -> dict[str, Estimate]:
    """Every single-number metric of intervals (m, 2) at one level, by name.

    Examples
    --------
    >>> for name, estimate in interval_summary([[0.0, 1.0], [2.0, 4.0]], [0.5, 3.0]).items():
    ...     print(f"{name:17}  {estimate}")
    interval_coverage  1.000
    mean_width         1.500 ± 0.500
    median_width       1.500 ± 0.500
    interval_score     1.500 ± 0.500
    """
    return {
        "interval_coverage": interval_coverage(intervals, y),
        "mean_width": mean_width(intervals),
        "median_width": median_width(intervals),
        "interval_score": interval_score(intervals, y, confidence_level),
    }


def held(ends: FloatArray, truth: FloatArray) -> BoolArray:
    """Whether each interval (m, 2) holds its value (m,); an empty one holds none."""
    return (ends[:, 0] <= truth) & (truth <= ends[:, 1])


def widths(ends: FloatArray) -> FloatArray:
    """Widths (m,) of intervals (m, 2); 0 of empty ones."""
    return np.where(np.isnan(ends[:, 0]), 0.0, ends[:, 1] - ends[:, 0])


def checked(intervals: npt.ArrayLike, y: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Checked intervals (m, 2) and true values (m,)."""
    ends = check_intervals(intervals)
    return ends, check_truth(y, len(ends))


def check_truth(y: npt.ArrayLike, m: int) -> FloatArray:
    """Check finite true values (m,)."""
    if np.ma.is_masked(y):
        raise ValueError("y is a masked array with masked values; leave these points out of both y and the intervals.")
    truth = np.asarray(y, dtype=np.float64)
    if truth.shape != (m,) or not np.isfinite(truth).all():
        raise ValueError(
            f"y must hold one finite number for each of the {m} points, shape ({m},), got shape {truth.shape}."
        )
    return truth


def check_intervals(intervals: npt.ArrayLike) -> FloatArray:
    """Check intervals (m, 2): lower ≤ upper, or NaN at both ends."""
    ends = np.asarray(intervals, dtype=np.float64)
    if ends.ndim != 2 or ends.shape[1] != 2 or not len(ends):
        several = "; for one of several levels pass intervals[:, :, k]" if ends.ndim == 3 else ""
        raise ValueError(f"intervals must have shape (m, 2), lower and upper end of each, got {ends.shape}{several}.")
    empty = np.isnan(ends).all(axis=1)
    wrong = ~empty & ~(ends[:, 0] <= ends[:, 1])
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"intervals[{i}] is {ends[i].tolist()}: its lower end must not exceed its upper one, and an empty interval has NaN at "
            f"both; {int(wrong.sum())} such in all."
        )
    return ends
