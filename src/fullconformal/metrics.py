"""How good prediction sets and p-values are: each number with its standard error.

Metrics of sets take a boolean array (m, C), metrics of p-values take floats (m, C); those that need the truth take the
labels ``y`` (m,) and ``classes`` (C,), the label of each column (0, ..., C - 1 unless given).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal.sets import check_p, members, prediction_sets

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Estimate(NamedTuple):
    """A mean and its standard error (NaN where there is one point only).

    Examples
    --------
    >>> print(Estimate(0.9031, 0.0117))
    0.903 ± 0.012
    >>> float(Estimate(0.9031, 0.0117))
    0.9031
    """

    value: float
    se: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.se:.3f}"


class Curve(NamedTuple):
    """Means ``value`` (L,) and their standard errors ``se`` (L,) at ``epsilons`` (L,)."""

    epsilons: FloatArray
    value: FloatArray
    se: FloatArray


def coverage(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Fraction of the m points whose set holds the true label.

    Examples
    --------
    >>> print(coverage([[True, False], [True, True]], [0, 1]))
    1.000 ± 0.000
    """
    return _mean(_covered(sets, y, classes)[0])


def error_rate(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Fraction of the m points whose set misses the true label: 1 - coverage.

    Examples
    --------
    >>> print(error_rate([[True, False], [False, True]], [0, 0]))
    0.500 ± 0.500
    """
    return _mean(~_covered(sets, y, classes)[0])


def class_coverage(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> dict[Any, Estimate]:
    """Coverage among the points of each label; labels absent from ``y`` are left out.

    Examples
    --------
    >>> result = class_coverage([[True, False], [False, True]], ["no", "no"], classes=["no", "yes"])
    >>> {label: str(estimate) for label, estimate in result.items()}
    {'no': '0.500 ± 0.500'}
    """
    covered, codes, labels = _covered(sets, y, classes)
    return {labels[k]: _mean(covered[codes == k]) for k in np.unique(codes)}


def mean_size(sets: npt.ArrayLike) -> Estimate:
    """Mean number of labels in a set.

    Examples
    --------
    >>> print(mean_size([[True, False], [True, True]]))
    1.500 ± 0.500
    """
    return _mean(_check_sets(sets).sum(axis=1))


def empty_rate(sets: npt.ArrayLike) -> Estimate:
    """Fraction of the sets that hold no label.

    Examples
    --------
    >>> print(empty_rate([[False, False], [True, True]]))
    0.500 ± 0.500
    """
    return _mean(_check_sets(sets).sum(axis=1) == 0)


def singleton_rate(sets: npt.ArrayLike) -> Estimate:
    """Fraction of the sets that hold exactly one label.

    Examples
    --------
    >>> print(singleton_rate([[True, False], [True, True]]))
    0.500 ± 0.500
    """
    return _mean(_check_sets(sets).sum(axis=1) == 1)


def size_curve(p: npt.ArrayLike, epsilons: npt.ArrayLike) -> Curve:
    """Mean set size at each significance ε = 1 - confidence_level, for ``p`` (m, C) and ``epsilons`` (L,).

    Examples
    --------
    >>> size_curve([[0.5, 0.1], [0.3, 0.02]], [0.05, 0.2]).value
    array([1.5, 1. ])
    """
    p = check_p(p)
    epsilons = np.asarray(epsilons, dtype=np.float64)
    if epsilons.ndim != 1 or epsilons.size == 0 or not ((epsilons >= 0) & (epsilons <= 1)).all():
        raise ValueError(
            f"epsilons must be a non-empty one-dimensional array of numbers in [0, 1], got shape {epsilons.shape}; "
            "for example np.linspace(0, 0.2, 41)."
        )
    points = [_mean(members(p, epsilon).sum(axis=1)) for epsilon in epsilons]
    return Curve(epsilons, np.array([e.value for e in points]), np.array([e.se for e in points]))


def size_auc(p: npt.ArrayLike, lo: float = 0.0, hi: float = 0.2) -> Estimate:
    """Area under the curve of mean set size against ε in [lo, hi], exactly; small is good.

    A label is in the set for ε < p, so it adds the length of [lo, min(p, hi)]. Not divided by hi - lo.

    Examples
    --------
    >>> print(size_auc([[0.5, 0.1], [0.3, 0.0]]))
    0.250 ± 0.050
    """
    if not 0 <= lo < hi <= 1:
        raise ValueError(f"lo and hi must satisfy 0 <= lo < hi <= 1, got lo={lo!r}, hi={hi!r}.")
    return _mean((np.clip(check_p(p), lo, hi) - lo).sum(axis=1))


def fuzziness(p: npt.ArrayLike) -> Estimate:
    """Mean over points of the sum of all p-values but the largest; small is good.

    Examples
    --------
    >>> print(fuzziness([[0.5, 0.1, 0.1], [0.3, 0.0, 0.0]]))
    0.100 ± 0.100
    """
    p = check_p(p)
    return _mean(p.sum(axis=1) - p.max(axis=1))


def observed_fuzziness(p: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Mean over points of the sum of the p-values of the false labels; small is good.

    Examples
    --------
    >>> print(observed_fuzziness([[0.5, 0.1, 0.1], [0.3, 0.0, 0.0]], [0, 0]))
    0.100 ± 0.100
    """
    p = check_p(p)
    codes, _ = _encode(y, classes, p.shape)
    return _mean(p.sum(axis=1) - p[np.arange(len(p)), codes])


def summary(
    p: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9, classes: npt.ArrayLike | None = None
) -> dict[str, Estimate]:
    """Every single-number metric of p-values (m, C), by name; those of sets at one level.

    Examples
    --------
    >>> for name, estimate in summary([[0.5, 0.05], [0.3, 0.2]], [0, 0]).items():
    ...     print(f"{name:18}  {estimate}")
    coverage            1.000 ± 0.000
    error_rate          0.000 ± 0.000
    mean_size           1.500 ± 0.500
    empty_rate          0.000 ± 0.000
    singleton_rate      0.500 ± 0.500
    size_auc            0.325 ± 0.075
    fuzziness           0.125 ± 0.075
    observed_fuzziness  0.125 ± 0.075
    """
    p = check_p(p)
    if not np.isscalar(confidence_level) or isinstance(confidence_level, str) or not 0 < confidence_level < 1:
        raise ValueError(
            f"confidence_level must be one number strictly between 0 and 1, got {confidence_level!r}; "
            "call summary once for each level."
        )
    sets = prediction_sets(p, confidence_level)
    return {
        "coverage": coverage(sets, y, classes),
        "error_rate": error_rate(sets, y, classes),
        "mean_size": mean_size(sets),
        "empty_rate": empty_rate(sets),
        "singleton_rate": singleton_rate(sets),
        "size_auc": size_auc(p),
        "fuzziness": fuzziness(p),
        "observed_fuzziness": observed_fuzziness(p, y, classes),
    }


def _mean(values: npt.NDArray[Any]) -> Estimate:
    """Mean of values (m,) and its standard error."""
    m = len(values)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(m)) if m > 1 else float("nan"))


def _covered(
    sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None
) -> tuple[BoolArray, npt.NDArray[np.intp], list[Any]]:
    """Whether each set holds its true label (m,), the column of that label (m,), and the labels of the columns."""
    sets = _check_sets(sets)
    codes, labels = _encode(y, classes, sets.shape)
    return sets[np.arange(len(sets)), codes], codes, labels


def _encode(
    y: npt.ArrayLike, classes: npt.ArrayLike | None, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.intp], list[Any]]:
    """Column of each label (m,), and the label of each column, for an array of shape (m, C)."""
    m, n_classes = shape
    labels = list(range(n_classes)) if classes is None else np.asarray(classes).ravel().tolist()
    column = {label: k for k, label in enumerate(labels)}
    if len(labels) != n_classes or len(column) != n_classes:
        raise ValueError(
            f"classes must hold {n_classes} distinct labels, one for each column, got {labels}; pass clf.classes_."
        )
    y = np.asarray(y)
    if y.shape != (m,):
        raise ValueError(f"y must hold one label for each of the {m} points, shape ({m},), got shape {y.shape}.")
    unseen = list(dict.fromkeys(label for label in y.tolist() if label not in column))
    if unseen:
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        raise ValueError(
            f"y holds labels that are not among the classes: {unseen[:5]}{more}; the classes are {labels}. "
            "Remove these points, or pass classes=clf.classes_ where the columns carry other labels."
        )
    return np.array([column[label] for label in y.tolist()], dtype=np.intp), labels


def _check_sets(sets: npt.ArrayLike) -> BoolArray:
    """Sets (m, C), or an error that says what is wrong with them."""
    sets = np.asarray(sets)
    if sets.dtype != np.bool_:
        raise ValueError(
            f"sets must be boolean, got {sets.dtype}; turn p-values into sets with prediction_sets(p, level)."
        )
    _check_shape("sets", sets.shape)
    return sets


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raise unless the shape is (m, C) with m and C positive."""
    if len(shape) != 2:
        several = f"; for one of several levels pass {name}[:, :, k]" if len(shape) == 3 else ""
        raise ValueError(
            f"{name} must have shape (m, C), one row a point and one column a label, got {shape}{several}."
        )
    if 0 in shape:
        raise ValueError(f"{name} is empty, shape {shape}; pass at least one point and one label.")
