"""Estimates with their standard errors, a test for their differences, and checks of what metrics are given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Estimate(NamedTuple):
    """A mean and its standard error (NaN for a single point).

    Examples
    --------
    >>> print(Estimate(0.9031, 0.0117))
    0.903 ± 0.012
    >>> float(Estimate(0.9031, 0.0117))
    0.9031

    An error that would be shown as zero says nothing and is left out, as is that of a single point.

    >>> print(Estimate(2.0, 0.0), Estimate(58900.0, 1e-3), Estimate(1.0, float("nan")), Estimate(float("inf"), float("nan")))
    2.000 58900.000 1.000 inf
    """

    value: float
    se: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        shown = self.se >= max(0.0005, 1e-6 * abs(self.value)) and np.isfinite(self.value)
        return f"{self.value:.3f} ± {self.se:.3f}" if shown else f"{self.value:.3f}"


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; unlike a standard error it is not zero if all or none succeed.

    Examples
    --------
    >>> [round(end, 3) for end in wilson(20, 20)]
    [0.839, 1.0]
    """
    z, share = 1.959963984540054**2 / trials, successes / trials
    middle = (share + z / 2) / (1 + z)
    half = np.sqrt(z * (share * (1 - share) + z / 4)) / (1 + z)
    return (0.0 if successes == 0 else float(middle - half)), (1.0 if successes == trials else float(middle + half))


class Curve(NamedTuple):
    """Means ``value`` (L,) and their standard errors ``se`` (L,) at ``epsilons`` (L,)."""

    epsilons: FloatArray
    value: FloatArray
    se: FloatArray


def per_object(
    metric: Callable[..., Estimate], values: npt.ArrayLike, y: npt.ArrayLike | None = None, **options: Any
) -> FloatArray:
    """The metric of each object alone (m,), whose mean is the metric.

    Parameters
    ----------
    metric : callable
        A metric that is a mean over the objects, such as `size_auc` or `coverage`.
    values : array (m, C)
        p-values or sets, whichever the metric takes.
    y : array (m,), optional
        True labels, if the metric needs them.
    **options
        Passed to the metric.

    Examples
    --------
    >>> from fullconformal import metrics
    >>> metrics.per_object(metrics.fuzziness, [[0.5, 0.25], [0.7, 0.0]])
    array([0.25, 0.  ])
    """
    values = np.asarray(values)
    if y is None:
        return np.array([metric(row[None], **options).value for row in values])
    y = np.asarray(y)
    if y.shape != values.shape[:1]:
        raise ValueError(f"y must hold one label for each of the {len(values)} points, got shape {y.shape}.")
    return np.array([metric(row[None], y[i : i + 1], **options).value for i, row in enumerate(values)])


class Welch(NamedTuple):
    """A one-sided Welch test: the ``statistic``, its ``pvalue``, and the degrees of freedom ``df``.

    Examples
    --------
    >>> print(Welch(-2.5, 0.0071, 98.7))
    t = -2.50, p = 0.0071 (98.7 degrees of freedom)
    """

    statistic: float
    pvalue: float
    df: float

    def __str__(self) -> str:
        return f"t = {self.statistic:.2f}, p = {self.pvalue:.2g} ({self.df:.1f} degrees of freedom)"


def welch(values_a: npt.ArrayLike, values_b: npt.ArrayLike) -> Welch:
    """Test whether the mean of a is smaller than the mean of b; a small p-value says it is.

    Welch's t-test, which does not assume equal variances. It assumes that the two samples are independent: if both were measured on the
    same objects and are positively correlated, the p-value is too large.

    Parameters
    ----------
    values_a, values_b : array (m,)
        One number per object, such as ``per_object(size_auc, p)``.

    Examples
    --------
    >>> print(welch([1.0, 2.0, 1.5, 1.0], [3.0, 2.5, 4.0, 3.5]))
    t = -4.67, p = 0.0021 (5.5 degrees of freedom)
    """
    samples = [np.asarray(values, dtype=np.float64) for values in (values_a, values_b)]
    for name, sample in zip(("values_a", "values_b"), samples, strict=True):
        if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
            raise ValueError(f"{name} must hold at least two finite numbers, shape (m,), got shape {sample.shape}.")
    # Sums that differ by less than this relative rounding error are equal.
    if not any(np.ptp(sample) > 1e-12 * np.abs(sample).max() for sample in samples):
        raise ValueError("values_a and values_b do not vary, so there is nothing to test: compare the two numbers.")
    with warnings.catch_warnings():
        # One of the two may be constant.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        result = stats.ttest_ind(*samples, equal_var=False, alternative="less")
    return Welch(float(result.statistic), float(result.pvalue), float(result.df))


def mean(values: npt.NDArray[Any]) -> Estimate:
    """Mean of values (m,) and its standard error; of infinite values the error is NaN."""
    m = len(values)
    with np.errstate(invalid="ignore"):
        return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(m)) if m > 1 else float("nan"))


def covered(
    sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None
) -> tuple[BoolArray, npt.NDArray[np.intp], list[Any]]:
    """Whether each set holds its true label (m,), and codes (m,) and labels as `encode` has them; a label without a column is missed."""
    sets = check_sets(sets)
    codes, labels = encode(y, classes, sets.shape)
    return at_codes(sets, codes), codes, labels


def at_codes(values: npt.NDArray[Any], codes: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Entries (m,) of values (m, C) at the true labels' columns; zero, or False, where a label has none."""
    m, n_classes = values.shape
    return np.where(codes < n_classes, values[np.arange(m), np.minimum(codes, n_classes - 1)], False)


def encode(
    y: npt.ArrayLike, classes: npt.ArrayLike | None, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.intp], list[Any]]:
    """Column of each label (m,), and the label of each column, for an array of shape (m, C).

    With classes given, labels that are not among them have codes from C on, and stand behind the labels of the columns: no set holds them.
    """
    m, n_classes = shape
    labels = list(range(n_classes)) if classes is None else np.asarray(classes).ravel().tolist()
    column = {label: k for k, label in enumerate(labels)}
    if len(labels) != n_classes or len(column) != n_classes:
        raise ValueError(
            f"classes must hold {n_classes} distinct labels, one for each column, got {labels}; pass clf.classes_."
        )
    if np.ma.is_masked(y):
        raise ValueError("y is a masked array with masked labels; leave these points out of both y and the sets.")
    y = np.asarray(y)
    if y.shape != (m,):
        raise ValueError(f"y must hold one label for each of the {m} points, shape ({m},), got shape {y.shape}.")
    unseen = list(dict.fromkeys(label for label in y.tolist() if label not in column))
    if unseen:
        more = f" and {len(unseen) - 5} more" if len(unseen) > 5 else ""
        told = f"y holds labels that are not among the classes: {unseen[:5]}{more}; the classes are {labels}"
        if classes is None or len(unseen) == len(set(y.tolist())):
            raise ValueError(f"{told}. Pass classes=clf.classes_, the labels of the columns.")
        warnings.warn(
            f"{told}. Their objects count as missed; declare classes without training points by fit(X, y, classes=...).",
            UserWarning, stacklevel=4,
        )  # fmt: skip
        column |= {label: n_classes + k for k, label in enumerate(unseen)}
        labels = labels + unseen
    return np.array([column[label] for label in y.tolist()], dtype=np.intp), labels


def check_sets(sets: npt.ArrayLike, *, levels: bool = False) -> BoolArray:
    """Check sets (m, C), or (m, C, L) with `levels`."""
    sets = np.asarray(sets)
    if sets.dtype != np.bool_:
        raise ValueError(
            f"sets must be boolean, got {sets.dtype}; turn p-values into sets with prediction_sets(p, level)."
        )
    if sets.ndim != 2 + levels:
        if levels:
            raise ValueError(f"sets must have shape (m, C, L), the last axis for L levels, got {sets.shape}.")
        several = "; for one of several levels pass sets[:, :, k]" if sets.ndim == 3 else ""
        raise ValueError(
            f"sets must have shape (m, C), one row per point and one column per label, got {sets.shape}{several}."
        )
    if 0 in sets.shape:
        raise ValueError(f"sets is empty, shape {sets.shape}; pass at least one point and one label.")
    return sets


def check_level(confidence_level: Any) -> float:
    """Check one confidence level in (0, 1)."""
    if not np.isscalar(confidence_level) or isinstance(confidence_level, str) or not 0 < confidence_level < 1:  # type: ignore[operator]
        raise ValueError(
            f"confidence_level must be one number strictly between 0 and 1, got {confidence_level!r}; "
            "call once for each level."
        )
    return float(confidence_level)  # type: ignore[arg-type]
