"""Whether one method is better than another by more than chance."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

ROUNDING = 1e-12  # relative: sums that differ by less are equal


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

    Welch's t-test, which does not assume equal variances. It takes the two samples for independent: where both were measured on the same
    objects and go up and down together, the p-value is larger than it need be.

    Parameters
    ----------
    values_a, values_b : array (m,)
        A number an object, such as ``per_object(size_auc, p)``.

    Examples
    --------
    >>> print(welch([1.0, 2.0, 1.5, 1.0], [3.0, 2.5, 4.0, 3.5]))
    t = -4.67, p = 0.0021 (5.5 degrees of freedom)
    """
    a, b = _sample("values_a", values_a), _sample("values_b", values_b)
    if not any(np.ptp(sample) > ROUNDING * np.abs(sample).max() for sample in (a, b)):
        raise ValueError("values_a and values_b do not vary, so there is nothing to test: compare the two numbers.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)  # one of the two may be constant
        result = stats.ttest_ind(a, b, equal_var=False, alternative="less")
    return Welch(float(result.statistic), float(result.pvalue), float(result.df))


def _sample(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError(f"{name} must hold at least two finite numbers, shape (m,), got shape {sample.shape}.")
    return sample
