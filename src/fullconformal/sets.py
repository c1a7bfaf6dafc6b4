"""From p-values to prediction sets, at one or several confidence levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]

# 1 - 0.9 is 0.09999999999999998 in floating point, and a p-value of 0.1 must not enter a 90 % set through that gap.
# Plain p-values are multiples of 1/(n + 1), so no other one is this close.
ROUNDING = 1e-12


def prediction_sets(
    p: npt.ArrayLike,
    confidence_level: float | Sequence[float] | npt.NDArray[Any] = 0.9,
    *,
    allow_empty: bool = True,
    proba: npt.ArrayLike | None = None,
) -> BoolArray:
    """Labels whose p-value exceeds 1 - confidence_level.

    Sets at several levels are nested: raising the level never removes a label.

    Parameters
    ----------
    p : array (m, C)
        p-values.
    confidence_level : float or sequence of L floats, default=0.9
        Levels, each strictly between 0 and 1.
    allow_empty : bool, default=True
        Whether a set may be empty. If False, an empty set receives its likeliest label: the one of the largest p-value.
    proba : array (m, C), optional
        Decides between labels of equal p-value where a likeliest label is needed; without it the first one is taken.

    Returns
    -------
    sets : bool array (m, C), or (m, C, L) for a sequence of levels

    Examples
    --------
    >>> prediction_sets([[0.7, 0.1, 0.02]], 0.9)
    array([[ True, False, False]])
    >>> prediction_sets([[0.7, 0.1, 0.02]], [0.2, 0.95]).sum(axis=1)
    array([[0, 2]])
    >>> prediction_sets([[0.7, 0.1, 0.02]], 0.2, allow_empty=False)
    array([[ True, False, False]])
    """
    p = check_p(p)
    levels = check_levels(confidence_level)
    sets = members(p[:, :, None], 1.0 - levels.ravel())
    if not allow_empty:
        empty: BoolArray = np.logical_not(sets.any(axis=1))  # (m, L)
        # Among the labels of largest p only, or a set at a higher level could lose the label added here.
        sets |= likeliest(p, proba)[:, :, None] & empty[:, None, :]
    return sets if levels.ndim else sets[:, :, 0]


def members(p: npt.NDArray[np.float64], epsilon: float | npt.NDArray[np.float64]) -> BoolArray:
    """Whether labels are in the set at significance ε: p > ε, and not where the two are equal up to rounding."""
    inside: BoolArray = p > epsilon + ROUNDING
    return inside


def as_labels(sets: npt.ArrayLike, classes: npt.ArrayLike) -> list[npt.NDArray[Any]]:
    """Labels of each of m sets (m, C), in the order of ``classes`` (C,).

    Examples
    --------
    >>> [labels.tolist() for labels in as_labels([[True, False, True], [False, False, False]], ["cat", "dog", "fox"])]
    [['cat', 'fox'], []]
    """
    sets, classes = np.asarray(sets), np.asarray(classes)
    if sets.dtype != np.bool_ or sets.ndim != 2:
        raise ValueError(
            f"sets must be a boolean array of shape (m, C), got {sets.dtype} of shape {sets.shape}; "
            "pass prediction_sets(p, confidence_level) with a single level, or sets[:, :, k] for one level of several."
        )
    if classes.shape != sets.shape[1:]:
        raise ValueError(f"classes must hold one label for each of the {sets.shape[1]} columns, got {classes.shape}.")
    return [classes[row] for row in sets]


def check_p(p: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """p-values (m, C) as float64, or an error that says what is wrong with them."""
    if np.asarray(p).dtype == np.bool_:
        raise ValueError("p must hold p-values, got booleans; pass predict_p(X), not predict_set(X).")
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 2 or p.size == 0:
        raise ValueError(f"p must be a non-empty array of shape (m, C), got shape {p.shape}; pass predict_p(X).")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("p must hold p-values in [0, 1]: found NaN or values outside; pass predict_p(X), not scores.")
    return p


def check_levels(confidence_level: Any) -> npt.NDArray[np.float64]:
    """Levels () or (L,) as float64, each in (0, 1), or an error that says which is not."""
    try:
        levels = np.asarray(confidence_level)
        levels = np.empty(0) if levels.dtype.kind in "US" else levels.astype(np.float64)  # "0.9" is no number
    except (TypeError, ValueError):
        levels = np.empty(0)
    if levels.ndim > 1 or levels.size == 0 or not ((levels > 0) & (levels < 1)).all():
        raise ValueError(
            f"confidence_level must be a number strictly between 0 and 1, or a non-empty sequence of such numbers, "
            f"got {confidence_level!r}; for 90 % write 0.9."
        )
    return levels


def likeliest(p: npt.NDArray[np.float64], proba: npt.ArrayLike | None) -> BoolArray:
    """One True per row (m, C): the largest p, ties decided by proba (m, C), then by order."""
    largest = p == p.max(axis=1, keepdims=True)
    if proba is None:
        proba = np.zeros_like(p)
    proba = np.asarray(proba, dtype=np.float64)
    if proba.shape != p.shape or not np.isfinite(proba).all():
        raise ValueError(f"proba must be finite and of the shape of p, {p.shape}, got shape {proba.shape}.")
    chosen = np.where(largest, proba, -np.inf).argmax(axis=1)
    mask: BoolArray = chosen[:, None] == np.arange(p.shape[1])
    return mask
