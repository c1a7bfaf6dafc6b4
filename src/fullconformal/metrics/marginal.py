"""Means over all points: coverage, sizes of sets, and whether sets are nested."""

from __future__ import annotations

import numpy.typing as npt

from fullconformal.metrics.estimates import Estimate, check_sets, covered, mean


def coverage(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Fraction of the m points whose set holds the true label.

    Examples
    --------
    >>> print(coverage([[True, False], [True, True]], [0, 1]))
    1.000 ± 0.000
    """
    return mean(covered(sets, y, classes)[0])


def error_rate(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Fraction of the m points whose set misses the true label: 1 - coverage.

    Examples
    --------
    >>> print(error_rate([[True, False], [False, True]], [0, 0]))
    0.500 ± 0.500
    """
    return mean(~covered(sets, y, classes)[0])


def mean_size(sets: npt.ArrayLike) -> Estimate:
    """Mean number of labels in a set.

    Examples
    --------
    >>> print(mean_size([[True, False], [True, True]]))
    1.500 ± 0.500
    """
    return mean(check_sets(sets).sum(axis=1))


def empty_rate(sets: npt.ArrayLike) -> Estimate:
    """Fraction of the sets that hold no label.

    Examples
    --------
    >>> print(empty_rate([[False, False], [True, True]]))
    0.500 ± 0.500
    """
    return mean(check_sets(sets).sum(axis=1) == 0)


def singleton_rate(sets: npt.ArrayLike) -> Estimate:
    """Fraction of the sets that hold exactly one label.

    Examples
    --------
    >>> print(singleton_rate([[True, False], [True, True]]))
    0.500 ± 0.500
    """
    return mean(check_sets(sets).sum(axis=1) == 1)


def nestedness_violations(sets: npt.ArrayLike) -> Estimate:
    """Mean number of labels that leave an object's set as the confidence level rises; 0 if the sets are nested.

    Parameters
    ----------
    sets : bool array (m, C, L)
        Sets at L increasing confidence levels. A label that leaves more than once counts once.

    Examples
    --------
    >>> import numpy as np
    >>> low, high = [[True, False], [True, True]], [[True, True], [False, True]]
    >>> print(nestedness_violations(np.stack([low, high], axis=2)))
    0.500 ± 0.500
    """
    sets = check_sets(sets, levels=True)
    left = (sets[:, :, :-1] & ~sets[:, :, 1:]).any(axis=2)
    return mean(left.sum(axis=1))
