"""From nonconformity scores to p-values: counting, smoothing, class-conditional, weighted.

One array says who is compared with whom: ``weight[i, y]`` is the weight of training point ``i`` when the candidate's
label is ``y``. All ones is plain conformal prediction, an indicator of ``y_i = y`` is the class-conditional (Mondrian)
version, ``w(x_i)`` is the version for covariate shift, and their product is both. `count` uses operators only, so it takes
NumPy arrays and torch tensors alike; everything else is NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """Weight of the training points above and tied with each candidate, (m, C) each; what share of the work was done for them."""

    greater: FloatArray
    equal: FloatArray
    touched: float = 1.0  # share of the pairs whose product was formed
    solved: float = 1.0  # share of the candidates that 𝓗⁻¹ met


def comparison_weight(
    y: npt.NDArray[Any], n_classes: int, *, class_conditional: bool = False, weights: npt.NDArray[Any] | None = None
) -> FloatArray | None:
    """Weight (n, C) of each training point against a candidate of each label; None where all are one."""
    if not class_conditional and weights is None:
        return None
    weight = np.ones((len(y), n_classes))
    if class_conditional:
        weight *= np.asarray(y)[:, None] == np.arange(n_classes)
    if weights is not None:
        weight *= np.asarray(weights, dtype=np.float64)[:, None]
    return weight


def comparison_total(
    y: npt.NDArray[Any], n_classes: int, *, class_conditional: bool = False, weights: npt.NDArray[Any] | None = None
) -> FloatArray:
    """Weight of all training points a candidate is compared with, one number or (C,): sums of `comparison_weight`, not formed."""
    ones = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
    total = np.bincount(y, ones, n_classes) if class_conditional else ones.sum(keepdims=True)
    return np.asarray(total, dtype=np.float64)


def count(alpha: Any, tau: Any, tolerance: Any = 0.0, weight: Any = None, *, axis: int = 0) -> tuple[Any, Any]:
    """Weight of the points with alpha above tau and of those tied with it, summed over the training points' axis.

    ``alpha``, ``tau`` and ``weight`` broadcast. Scores closer than the tolerance are tied; a pair of tolerances (of alpha, of tau)
    is their sum, without forming it for every pair of points.
    """
    slack, own = tolerance if isinstance(tolerance, tuple) else (0.0, tolerance)
    above = alpha - slack > tau + own
    not_below = alpha + slack >= tau - own
    if weight is None:
        greater = above.sum(axis)
        return greater, not_below.sum(axis) - greater
    return (above * weight).sum(axis), ((not_below & ~above) * weight).sum(axis)


def order(alpha: Any, tau: Any, tolerance: Any) -> Any:
    """1 where alpha is above tau, −1 where it is below, 0 where they are tied; infinite scores are tied with each other.

    Examples
    --------
    >>> order(np.array([1.0, 2.0, 3.0]), 2.1, 0.5)
    array([-1,  0,  1])
    """
    return (alpha > tau + tolerance) * 1 - (alpha < tau - tolerance) * 1


def cells(y: npt.NDArray[Any], width: int, categories: npt.NDArray[Any] | None = None) -> npt.NDArray[np.int64]:
    """With whom a point of label y (n,) is compared, by number (n,): its label's points (width C) or all (width 1), of its category."""
    own = np.asarray(y) if width > 1 else np.zeros(len(y), dtype=np.int64)
    return np.asarray(own if categories is None else np.where(categories < 0, -1, categories * width + own), np.int64)


def ordered_scores(alpha: FloatArray, cell: npt.NDArray[np.int64], n_cells: int = 1) -> list[FloatArray]:
    """Scores alpha (n,) in ascending order, one array for each cell, whose numbers `cells` gives."""
    return [np.sort(alpha[cell == k]) for k in range(n_cells)]


def is_ordered(scores: FloatArray) -> bool:
    """Whether scores are of one axis, in ascending order and without NaN."""
    return scores.ndim == 1 and not np.isnan(scores).any() and bool((scores[:-1] <= scores[1:]).all())


def totals(sizes: npt.ArrayLike, places: npt.NDArray[np.int64] | None) -> npt.NDArray[Any]:
    """Rows (m, w) of sizes (G, w) at the places (m,) of categories, zeros at −1; all of them where there are no places."""
    sizes = np.asarray(sizes)
    return sizes if places is None else np.vstack([sizes, np.zeros_like(sizes[:1])])[places]


def in_category(ordered: Sequence[FloatArray], width: int, category: int) -> list[FloatArray]:
    """Ordered scores of one category, an array for each of its cells; empty ones of the category −1, which has no points."""
    return list(ordered[category * width : (category + 1) * width]) if category >= 0 else [np.empty(0)] * width


def rank_counts(
    ordered: Sequence[FloatArray], tau: FloatArray, tolerance: FloatArray | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Points above and tied with tau (m, C), to within a tolerance (m, C), among ordered scores, as `count` has them, in O(mC log n).

    For scores of training points that do not depend on the candidate: those of split conformal prediction. Of one array for all labels,
    or one for each.

    Examples
    --------
    >>> rank_counts([np.array([1.0, 2.0, 2.0, 3.0])], np.array([[2.0, 5.0]]))
    (array([[1, 0]]), array([[2, 0]]))
    """
    low, high = (tau, tau) if tolerance is None else (tau - tolerance, tau + tolerance)
    if len(ordered) == 1:
        n, below = len(ordered[0]), np.searchsorted(ordered[0], low)
        equal = np.zeros_like(below)
        tied = np.append(ordered[0], np.inf)[below] <= high  # a second search where it is needed only
        equal[tied] = np.searchsorted(ordered[0], high[tied], "right") - below[tied]
        return n - below - equal, equal
    own = np.zeros_like(tau) if tolerance is None else tolerance
    parts = [rank_counts([group], *columns) for group, *columns in zip(ordered, tau.T, own.T, strict=True)]
    greater, equal = zip(*parts, strict=True)
    return np.stack(greater, axis=1), np.stack(equal, axis=1)


def rank_weights(
    alpha: FloatArray, tau: FloatArray, tolerance: Any, weight: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Weight (m, C) of points with scores alpha (n,) above and tied with tau (m, C), as `count` has it, in O((n + m) C log n).

    For scores that do not depend on the candidate, and weights (n, C) of each point against a candidate of each label.

    Examples
    --------
    >>> rank_weights(np.array([3.0, 1.0, 2.0]), np.array([[2.0]]), 0.0, np.array([[0.5], [1.0], [2.0]]))
    (array([[0.5]]), array([[2.]]))
    """
    order = np.argsort(alpha)
    weight = np.ones((len(alpha), 1)) if weight is None else weight[order]
    # below[i] is the weight of the i smallest scores.
    below, labels = np.vstack([np.zeros(weight.shape[1]), np.cumsum(weight, axis=0)]), np.arange(weight.shape[1])
    low = below[np.searchsorted(alpha, tau - tolerance, "left", sorter=order), labels]
    high = below[np.searchsorted(alpha, tau + tolerance, "right", sorter=order), labels]
    return below[-1] - high, high - low


def p_values(
    greater: npt.ArrayLike,
    equal: npt.ArrayLike,
    total: npt.ArrayLike,
    own: npt.ArrayLike = 1.0,
    uniform: npt.ArrayLike | None = None,
) -> FloatArray:
    """p-values (m, C) from counts over the training points.

    Parameters
    ----------
    greater, equal : array (m, C)
        Weight of the training points whose score is above, or tied with, the candidate's.
    total : array broadcastable to (m, C)
        Weight of all training points the candidate is compared with.
    own : array broadcastable to (m, C)
        Weight of the candidate itself; 1 unless points are weighted.
    uniform : array (m, C), optional
        Uniform variables; where given, ties (the candidate among them) count by that fraction: the smoothed p-value.

    Examples
    --------
    >>> p_values([[1.0]], [[0.0]], 9)
    array([[0.2]])
    >>> p_values([[1.0]], [[0.0]], 9, uniform=[[0.5]])
    array([[0.15]])
    """
    greater, equal, total, own = (np.asarray(a, dtype=np.float64) for a in (greater, equal, total, own))
    share = 1.0 if uniform is None else np.asarray(uniform, dtype=np.float64)
    above, whole = greater + share * (equal + own), total + own
    # Compared with nothing, a candidate is as good as any; and a sum of weights in another order may exceed the total by rounding.
    return np.minimum(np.divide(above, whole, out=np.ones(np.broadcast(above, whole).shape), where=whole > 0), 1.0)


def sequential_mean(p: npt.ArrayLike, axis: int = 0) -> FloatArray:
    """The least running mean of K p-values along an axis, for p-values that come in a random order (Gasparin and Ramdas 2025).

    It is at most ε with probability at most 2ε, as the mean of all is, and never above that mean. Why: e(p) = max(0, 2ε − p)/2ε² has
    mean at most 1, and a running mean of the p's of at most ε is one of the e's of at least 1/2ε. Of exchangeable e(p_1), e(p_2), …
    of mean 1 some running mean reaches 1/2ε with probability at most 2ε (Markov's inequality, for exchangeable variables).

    Examples
    --------
    >>> float(sequential_mean([0.5, 0.1, 0.9]))
    0.3
    """
    p = np.moveaxis(np.asarray(p, dtype=np.float64), axis, -1)
    means: FloatArray = np.cumsum(p, axis=-1) / np.arange(1, p.shape[-1] + 1)
    return np.asarray(means.min(axis=-1))
