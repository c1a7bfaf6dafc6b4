"""Metrics over all points: coverage, sizes of sets, and criteria of efficiency at one level or over all levels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullconformal.metrics.estimates import Curve, Estimate, at_codes, check_level, check_sets, covered, encode, mean
from fullconformal.sets import check_p, members, prediction_sets


def coverage(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Fraction of the m points whose set holds the true label; labels that are not among the classes are missed, with a warning.

    Examples
    --------
    >>> print(coverage([[True, False], [True, True]], [0, 1]))
    1.000
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


def size_curve(p: npt.ArrayLike, epsilons: npt.ArrayLike) -> Curve:
    """Mean set size at each significance ε = 1 - confidence_level, for ``p`` (m, C) and ``epsilons`` (L,).

    A label is in the set for ε < p. For a method without p-values, give ``predict_epsilon(X)``.

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
    points = [mean(members(p, epsilon).sum(axis=1)) for epsilon in epsilons]
    return Curve(epsilons, np.array([e.value for e in points]), np.array([e.se for e in points]))


def size_auc(p: npt.ArrayLike, lo: float = 0.0, hi: float = 0.2) -> Estimate:
    """Area under the curve of mean set size against ε in [lo, hi], exactly; small is good.

    A label is in the set for ε < p, so it adds the length of [lo, min(p, hi)]. Not divided by hi - lo. For a method
    without p-values, give ``predict_epsilon(X)``.

    Examples
    --------
    >>> print(size_auc([[0.5, 0.1], [0.3, 0.0]]))
    0.250 ± 0.050
    """
    if not 0 <= lo < hi <= 1:
        raise ValueError(f"lo and hi must satisfy 0 <= lo < hi <= 1, got lo={lo!r}, hi={hi!r}.")
    return mean((np.clip(check_p(p), lo, hi) - lo).sum(axis=1))


def fuzziness(p: npt.ArrayLike) -> Estimate:
    """Mean over points of the sum of all p-values but the largest; small is good.

    Examples
    --------
    >>> print(fuzziness([[0.5, 0.1, 0.1], [0.3, 0.0, 0.0]]))
    0.100 ± 0.100
    """
    p = check_p(p)
    return mean(p.sum(axis=1) - p.max(axis=1))


def observed_fuzziness(p: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Estimate:
    """Mean over points of the sum of the p-values of the false labels; small is good.

    Examples
    --------
    >>> print(observed_fuzziness([[0.5, 0.1, 0.1], [0.3, 0.0, 0.0]], [0, 0]))
    0.100 ± 0.100
    """
    p = check_p(p)
    codes, _ = encode(y, classes, p.shape)
    return mean(p.sum(axis=1) - at_codes(p, codes))


def summary(
    p: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9, classes: npt.ArrayLike | None = None
) -> dict[str, Estimate]:
    """Every single-number metric of p-values (m, C), by name; metrics of sets are computed at one level.

    Examples
    --------
    >>> for name, estimate in summary([[0.5, 0.05], [0.3, 0.2]], [0, 0]).items():
    ...     print(f"{name:18}  {estimate}")
    coverage            1.000
    error_rate          0.000
    mean_size           1.500 ± 0.500
    empty_rate          0.000
    singleton_rate      0.500 ± 0.500
    size_auc            0.325 ± 0.075
    fuzziness           0.125 ± 0.075
    observed_fuzziness  0.125 ± 0.075
    """
    sets = prediction_sets(p, check_level(confidence_level))
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


def vovk_criteria(
    p: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9, classes: npt.ArrayLike | None = None
) -> dict[str, Estimate]:
    """The ten criteria of efficiency of Vovk, Fedorova, Nouretdinov and Gammerman (2016), by their letters; small is good.

    Each is a mean over the points. Five do not depend on a level:

    - ``S``: sum of the p-values; ``U``: the second largest p-value (unconfidence); ``F``: sum of all but the largest (`fuzziness`);
    - ``OU``: largest p-value of a false label; ``OF``: sum of the p-values of the false labels (`observed_fuzziness`);

    the others measure the sets at ``confidence_level``:

    - ``N``: number of labels (`mean_size`); ``M``: share of sets with more than one (multiple); ``E``: labels above one (excess);
    - ``OM``: share of sets with a false label; ``OE``: number of false labels.

    Those with an O use the true labels.

    Parameters
    ----------
    p : array (m, C)
        p-values.
    y : array (m,)
        True labels.
    confidence_level : float, default=0.9
    classes : array (C,), optional
        The label of each column.

    Examples
    --------
    >>> for letters, estimate in vovk_criteria([[0.5, 0.05, 0.2], [0.3, 0.0, 0.0]], [0, 0]).items():
    ...     print(f"{letters:2}  {estimate}")
    S   0.525 ± 0.225
    N   1.500 ± 0.500
    U   0.100 ± 0.100
    F   0.125 ± 0.125
    M   0.500 ± 0.500
    E   0.500 ± 0.500
    OU  0.100 ± 0.100
    OF  0.125 ± 0.125
    OM  0.500 ± 0.500
    OE  0.500 ± 0.500
    """
    p = check_p(p)
    sets = prediction_sets(p, check_level(confidence_level))
    true = encode(y, classes, p.shape)[0][:, None] == np.arange(p.shape[1])
    size, false_labels = sets.sum(axis=1), (sets & ~true).sum(axis=1)
    # With a single label there is no second one and no false one: p-values of labels that do not exist are 0.
    second = np.sort(p, axis=1)[:, -2] if p.shape[1] > 1 else np.zeros(len(p))
    return {
        "S": mean(p.sum(axis=1)),
        "N": mean_size(sets),
        "U": mean(second),
        "F": fuzziness(p),
        "M": mean(size > 1),
        "E": mean(np.maximum(size - 1, 0)),
        "OU": mean(np.where(true, 0.0, p).max(axis=1)),
        "OF": observed_fuzziness(p, y, classes),
        "OM": mean(false_labels > 0),
        "OE": mean(false_labels),
    }
