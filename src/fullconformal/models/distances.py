"""Distances between points: the nearest of each, kernels and their sums, block by block; and a classifier by kernel densities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

FloatArray = npt.NDArray[np.float64]

# Orders of Minkowski's distance, by the names of metrics; 0 where the model has it.
ORDERS = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "minkowski": 0.0}


def order_of(model: Any) -> float:
    """The order of Minkowski's distance by which a k-NN model compares objects; 0 for other metrics and weights, and orders below 1."""
    known = model.weights == "uniform" and model.metric in ORDERS
    order = ORDERS[model.metric] or float(model.p) if known else 0.0
    return order if order >= 1 else 0.0


@dataclass(frozen=True)
class Near:
    """Of each point its L nearest: |x − x'|^p by columns (n, L, d), which are there (n, L), how far at least the others are (n,)."""

    gaps: FloatArray
    there: npt.NDArray[np.bool_]
    beyond: FloatArray
    own: bool

    @classmethod
    def of(cls, X: FloatArray, y: npt.NDArray[np.intp], own: bool, size: int, p: float) -> Self:
        """Of points X (n, d), among those with the same label of y (n,), or with another; never the point itself."""
        n, size = len(X), min(size, len(X))
        index, far, beyond = np.empty((n, size), dtype=np.intp), np.empty((n, size)), np.empty(n)
        for at in blocks(n, 32 * n, 2**24):
            D = without_self(cdist(X[at], X, "minkowski", p=p), at, np.inf)
            D[(y[at, None] == y) != own] = np.inf
            index[at] = np.argpartition(D, size - 1, axis=1)[:, :size]
            far[at] = np.take_along_axis(D, index[at], 1)
            beyond[at] = np.where(np.isfinite(D).sum(1) > size, far[at].max(1), np.inf)
        return cls(np.abs(X[:, None] - X[index]) ** p, np.isfinite(far), beyond, own)

    def among(self, i: int, y: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which points (n,) with labels y (n,) are neighbours that count for point i."""
        out: npt.NDArray[np.bool_] = (y == y[i]) == self.own
        out[i] = False
        return out


def blocks(length: int, row: int, size: int) -> Iterator[slice]:
    """Slices of as many rows of so many bytes as fit a block of this size."""
    return gen_batches(length, max(1, size // max(row, 1)))  # type: ignore[no-any-return]


def without_self(block: FloatArray, at: slice, nothing: float) -> FloatArray:
    """The rows `at` (b, n) of a matrix of pairs, what a point is to itself overwritten by what a missing point is."""
    block[np.arange(len(block)), np.arange(at.start, at.stop)] = nothing
    return block


def smallest(D: FloatArray, k: int) -> FloatArray:
    """The k smallest (b, k) of each row of D (b, n), sorted; inf where there are fewer."""
    out = np.full((len(D), k), np.inf)
    least = np.partition(D, k - 1, axis=1)[:, :k] if D.shape[1] > k else D
    out[:, : least.shape[1]] = np.sort(least, axis=1)
    return out


def nearest(D: FloatArray, y: npt.NDArray[Any], n_classes: int, k: int) -> FloatArray:
    """The k smallest distances (b, C, k) to the points of each label, sorted, of D (b, n); inf where there are fewer."""
    return np.stack([smallest(D[:, y == c], k) for c in range(n_classes)], axis=1)


def log_kernel(A: FloatArray, B: FloatArray, bandwidth: float) -> FloatArray:
    """log K (a, b) of the rows of A (a, d) and B (b, d), up to the kernel's constant."""
    squared: FloatArray = cdist(A, B, "sqeuclidean")
    return -squared / (2 * bandwidth**2)


def log_sum(log_K: FloatArray) -> FloatArray:
    """log Σ exp of each row of (b, n); −inf for an empty sum."""
    top: FloatArray = log_K.max(axis=1, initial=-np.inf)
    top[np.isinf(top)] = 0.0
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(np.exp(log_K - top[:, None]).sum(1)))


def own_log_sums(
    X: FloatArray, y: npt.NDArray[np.intp], points: npt.NDArray[np.intp], bandwidth: float, block: int
) -> FloatArray:
    """log Σ K (k,) over the other points of its label, of some of the points X (n, d) with labels y (n,)."""
    out = np.empty(len(points))
    for c in np.unique(y[points]):
        members, mine = np.flatnonzero(y == c), np.flatnonzero(y[points] == c)
        for at in blocks(len(mine), 32 * len(members), block):
            some = points[mine[at]]
            log_K = log_kernel(X[some], X[members], bandwidth)
            log_K[np.arange(len(some)), np.searchsorted(members, some)] = -np.inf
            out[mine[at]] = log_sum(log_K)
    return out


class KernelDensityClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Bayes' rule with a Gaussian kernel density for each class and the class frequencies as priors.

    Parameters
    ----------
    bandwidth : float, default=1.0
        Standard deviation h of the kernel; scale the features first.

    Attributes
    ----------
    classes_ : array (C,)
        The labels.
    X_, y_ : arrays (n, d), (n,)
        The training points and the positions of their labels in ``classes_``.

    Examples
    --------
    >>> from fullconformal.models import KernelDensityClassifier
    >>> model = KernelDensityClassifier(bandwidth=0.5).fit([[0.0], [1.0], [4.0]], ["a", "a", "b"])
    >>> model.predict([[2.0], [3.0]])
    array(['a', 'b'], ...)
    """

    def __init__(self, bandwidth: float = 1.0) -> None:
        self.bandwidth = bandwidth

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike) -> Self:
        """Keep the training points X (n, d) with their labels y (n,)."""
        if not 0 < self.bandwidth < np.inf:
            raise ValueError(f"bandwidth is {self.bandwidth}; it must be positive and finite")
        X, y = validate_data(self, X, y, dtype=np.float64)
        # Whole numbers are always labels; looking closer takes half a small fit, and warns of many.
        if np.asarray(y).dtype.kind not in "biu":
            check_classification_targets(y)
        self.X_: FloatArray = np.asarray(X)
        self.classes_, self.y_ = np.unique(y, return_inverse=True)
        return self

    def predict_proba(self, X: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Probabilities (m, C) of the labels at X (m, d): the frequency n_c/n cancels the mean's 1/n_c, sums of kernels remain."""
        check_is_fitted(self)
        objects: npt.NDArray[np.float64] = validate_data(self, X, reset=False, dtype=np.float64)
        log_sums = np.empty((len(objects), len(self.classes_)))
        for at in gen_batches(len(objects), 256):
            log_K = log_kernel(objects[at], self.X_, self.bandwidth)
            for c in range(len(self.classes_)):
                log_sums[at, c] = log_sum(log_K[:, self.y_ == c])
        return np.asarray(softmax(log_sums, axis=1))

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        """The most probable label (m,) at X (m, d)."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])
