"""Metrics of sets of labels and of p-values: over all points, and the coverage within labels, sizes, and the worst slab of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal.metrics.estimates import (
    BoolArray,
    Curve,
    Estimate,
    FloatArray,
    at_codes,
    check_level,
    check_sets,
    covered,
    encode,
    mean,
)
from fullconformal.sets import check_p, members, prediction_sets

# Over all points --------------------------------------------------------------------------------------------------------


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


# Within parts of the data -----------------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """Distance of coverage from the level: its ``mean`` over the labels, the ``worst``, and the ``label`` of the worst."""

    mean: Estimate
    worst: Estimate
    label: Any


class Strata(NamedTuple):
    """``coverage`` and number of ``points`` by stratum, and the stratum with the ``worst`` coverage."""

    coverage: dict[Any, Estimate]
    points: dict[Any, int]
    worst: Any


class Slab(NamedTuple):
    """The slab lo ≤ ``direction``·x ≤ hi; ``coverage`` and number of the ``points`` in it that were not used to find it."""

    coverage: Estimate
    points: int
    direction: FloatArray
    lo: float
    hi: float


def class_coverage(sets: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> dict[Any, Estimate]:
    """Coverage among the points of each label; labels absent from ``y`` are left out.

    Examples
    --------
    >>> result = class_coverage([[True, False], [False, True]], ["no", "no"], classes=["no", "yes"])
    >>> {label: str(estimate) for label, estimate in result.items()}
    {'no': '0.500 ± 0.500'}
    """
    hit, codes, labels = covered(sets, y, classes)
    return {labels[k]: mean(hit[codes == k]) for k in np.unique(codes)}


def class_coverage_gap(
    sets: npt.ArrayLike, y: npt.ArrayLike, confidence_level: float = 0.9, classes: npt.ArrayLike | None = None
) -> Gap:
    """Absolute distance of each label's coverage from the level: the mean over the labels in ``y``, and the worst.

    The standard errors are those of the coverages. A gap is never negative, so near 0 it is biased upwards, more so with few points; and so
    is the worst of several.

    Examples
    --------
    >>> gap = class_coverage_gap([[True, False], [True, False], [True, True], [False, True]], [0, 0, 1, 0], 0.9)
    >>> print(gap.mean, "|", gap.worst, "|", gap.label)
    0.167 | 0.233 ± 0.333 | 0
    """
    level = check_level(confidence_level)
    by_label = class_coverage(sets, y, classes)
    gaps = {label: Estimate(abs(found.value - level), found.se) for label, found in by_label.items()}
    worst = max(gaps, key=lambda label: gaps[label].value)
    values, errors = np.array(list(gaps.values())).T
    return Gap(Estimate(float(values.mean()), float(np.sqrt((errors**2).sum()) / len(gaps))), gaps[worst], worst)


def size_stratified_coverage(
    sets: npt.ArrayLike, y: npt.ArrayLike, bins: Sequence[int] | None = None, classes: npt.ArrayLike | None = None
) -> Strata:
    """Coverage among the sets of each size; sizes that do not occur are left out.

    Parameters
    ----------
    sets : bool array (m, C)
    y : array (m,)
        True labels.
    bins : sequence of int, optional
        The smallest size of each bin, increasing from 0: (0, 2, 5) for the sizes 0 to 1, 2 to 4, and 5 to C. Strata are then named by
        the pair (smallest, largest size). Without bins every size is a stratum, and empty sets, which never cover, are the worst.
    classes : array (C,), optional
        The label of each column.

    Examples
    --------
    >>> sets = [[True, False, False], [False, True, False], [True, True, False], [True, True, True]]
    >>> strata = size_stratified_coverage(sets, [0, 0, 1, 2], bins=(0, 2))
    >>> {sizes: str(estimate) for sizes, estimate in strata.coverage.items()}
    {(0, 1): '0.500 ± 0.500', (2, 3): '1.000'}
    >>> strata.worst
    (0, 1)
    """
    sets = check_sets(sets)
    hit, size, n_classes = covered(sets, y, classes)[0], sets.sum(axis=1), sets.shape[1]
    if bins is None:
        names: list[Any] = list(range(n_classes + 1))
        stratum = size
    else:
        edges = check_bins(bins, n_classes)
        names = list(zip(edges, [edge - 1 for edge in edges[1:]] + [n_classes], strict=True))
        stratum = np.searchsorted(edges, size, side="right") - 1
    found = np.unique(stratum).tolist()
    by_size = {names[k]: mean(hit[stratum == k]) for k in found}
    points = {names[k]: int((stratum == k).sum()) for k in found}
    return Strata(by_size, points, min(by_size, key=lambda name: by_size[name].value))


def worst_slice_coverage(
    X: npt.ArrayLike,
    sets: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    delta: float = 0.1,
    n_directions: int = 1000,
    classes: npt.ArrayLike | None = None,
    random_state: Any = 0,
) -> Slab:
    """Coverage in the worst slab {x : lo ≤ v·x ≤ hi} that holds a share delta of the points (Cauchois et al. 2021).

    The worst slab along random directions v is searched on one half of the points, and its coverage is measured on the other, so that it is
    not low merely because it was selected. Directions ignore the scales of the features: standardise X.

    Parameters
    ----------
    X : array (m, d)
        Objects.
    sets : bool array (m, C)
    y : array (m,)
        True labels.
    delta : float, default=0.1
        Smallest share of the points that a slab must hold.
    n_directions : int, default=1000
    classes : array (C,), optional
        The label of each column.
    random_state : int, Generator or None, default=0
        Seeds the halves and the directions.

    Returns
    -------
    Slab
        Its coverage is NaN if no point of the other half lies in it.

    Examples
    --------
    >>> X = np.random.default_rng(0).uniform(-1, 1, size=(2000, 2))
    >>> sets = np.stack([X[:, 0] < 0.5, X[:, 0] > 0.5], axis=1)  # misses label 0 on the right
    >>> slab = worst_slice_coverage(X, sets, np.zeros(2000, dtype=int))
    >>> print(slab.coverage)
    0.000
    """
    return worst_slice(X, covered(sets, y, classes)[0], delta, n_directions, random_state)


def worst_slice(X: npt.ArrayLike, hit: BoolArray, delta: float, n_directions: int, random_state: Any) -> Slab:
    """The worst slab of objects X (m, d), of which ``hit`` (m,) are covered."""
    X = np.asarray(X, dtype=np.float64)
    m = len(hit)
    if X.ndim != 2 or len(X) != m or not np.isfinite(X).all():
        raise ValueError(f"X must hold {m} finite objects, shape ({m}, d), got shape {X.shape}; flatten images.")
    if not 0 < delta <= 1 or delta * m < 4:
        raise ValueError(
            f"delta={delta!r} is not allowed: give a share in (0, 1] that leaves at least 4 of the {m} points in a slab."
        )
    if n_directions < 1:
        raise ValueError(f"n_directions={n_directions!r} is not allowed; give a whole number ≥ 1.")
    rng = np.random.default_rng(random_state)
    one, other = np.array_split(rng.permutation(m), 2)
    directions = rng.normal(size=(n_directions, X.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    k, lo, hi = worst_slab(directions, X[one], hit[one], int(np.ceil(delta * len(one))))
    z = X[other] @ directions[k]
    # Objects equal to those at the ends may miss them by rounding.
    slack = 2 * np.finfo(np.float64).eps * X.shape[1] * np.abs(X).max()
    inside = hit[other][(lo - slack <= z) & (z <= hi + slack)]
    found = mean(inside) if len(inside) else Estimate(float("nan"), float("nan"))
    return Slab(found, len(inside), directions[k], lo, hi)


def worst_slab(
    directions: FloatArray, X: FloatArray, hit: BoolArray, least: int, block: int = 2_000_000
) -> tuple[int, float, float]:
    """Direction (its number), lo and hi of the slab of at least `least` points of X (n, d) whose mean of hit (n,) is smallest.

    Dinkelbach's method, in whole numbers: a slab has a mean below a/b if its sum of b·hit − a is negative, and prefix sums find the
    smallest such sum over all slabs in one pass. That slab's mean is the next a/b, until no sum is negative. At most `block`
    projections are held in memory.
    """
    # The search starts from the slab of all points.
    n, a = len(hit), int(hit.sum())
    b, best = n, (0, -np.inf, np.inf)
    never = np.iinfo(np.int64).min // 4
    rows = max(1, block // n)
    for start in range(0, len(directions), rows):
        z = directions[start : start + rows] @ X.T
        order = z.argsort(axis=1)
        z = np.take_along_axis(z, order, axis=1)
        # Hits among the first 0, ..., n points; and whether a slab may begin or end there, as equal points are not separated.
        hits = np.pad(hit[order].cumsum(axis=1, dtype=np.int64), ((0, 0), (1, 0)))
        edge = np.pad(z[:, 1:] > z[:, :-1], ((0, 0), (1, 1)), constant_values=True)
        while True:
            total = b * hits - a * np.arange(n + 1)
            left = np.where(edge, total, never)
            sums = total[:, least:] - np.maximum.accumulate(left, axis=1)[:, : n + 1 - least]
            sums[~edge[:, least:]] = 0
            row, j = divmod(int(sums.argmin()), sums.shape[1])
            if sums[row, j] >= 0:
                break
            i = int(left[row, : j + 1].argmax())
            j += least
            a, b = int(hits[row, j] - hits[row, i]), j - i
            best = start + row, float(z[row, i]), float(z[row, j - 1])
    return best


def check_bins(bins: Sequence[int], n_classes: int) -> list[int]:
    """Check the smallest size of each bin."""
    edges = np.asarray(bins)
    whole = edges.ndim == 1 and edges.size and np.issubdtype(edges.dtype, np.integer)
    if not whole or edges[0] != 0 or (np.diff(edges) <= 0).any() or edges[-1] > n_classes:
        raise ValueError(
            f"bins must be whole numbers that increase from 0 to at most {n_classes}, the smallest size of each bin, got {bins!r}; "
            "for example (0, 2, 5)."
        )
    return [int(edge) for edge in edges]
