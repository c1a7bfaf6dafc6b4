"""Exact full CP for nearest neighbours and kernel densities: scores prepared once on Z, updated for each candidate.

A point is scored in the bag Z ∪ {(x, y)} without itself. With y_i the label of z_i, and own and other labels told apart by it:

    k-NN               α_i = mean distance to the k nearest of its own label / mean distance to the k nearest of other labels
    kernel density     α_i = −log mean over its own label of K(x_i, x_j),        K(x, x') = exp(−|x − x'|²/(2h²))

A candidate changes one list of neighbours, or one sum, of each training point, by one distance; which of the two depends only on
whether y = y_i. So all C labels share one O(n) update, where refits take O(n²) each (Cherubin, Chatzikokolakis and Jaggi, "Exact
optimization of conformal predictors via incremental and decremental learning", ICML 2021).

Where a score is not defined by its formula:

- fewer than k neighbours: the mean is over those there are (with k of them the ratio of means is that of sums);
- no other point of its own label: α = +inf, the most nonconforming score, for both;
- no point of another label (k-NN): α = 0;
- duplicates (k-NN): a positive distance over zero is +inf, zero over zero is 1, as close to its own label as to the others.

The logarithm changes no p-value and keeps far points apart, whose kernels would all round to zero; h and the dimension give a factor
common to all, which is dropped. Infinite scores tie with each other.

Behind a scaler that is fitted with the object, all distances change a little, for each object by other scales s of the columns. The k
nearest are then among a few more than k that were nearest before: a point at distance D is at D/max s or more. Those few are scaled for
many objects at once, as a product of matrices. Densities have bounds, and sums of their own where these leave a comparison open.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier

from fullconformal.guarantees import EXACT
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, Method, Query, counted, starts_with
from fullconformal.methods.outputs import log_of
from fullconformal.models.distances import (
    KernelDensityClassifier,
    Near,
    blocks,
    log_kernel,
    log_sum,
    nearest,
    order_of,
    own_log_sums,
    smallest,
    without_self,
)
from fullconformal.models.requirements import check_distances
from fullconformal.runtime.tasks import Progress, nobody
from fullconformal.storage import expect, require, savable

# Two scores closer than this, times the number of terms in them, are tied. In units of rounding, eps/2, a Euclidean
# distance of d terms is off by d/2 + 2, a mean of k by k more, a ratio by twice that and 1, two ratios by twice that:
# (d + 2k + 5) eps, below the 8 (d + k + 1) eps granted.
TIE = 8 * float(np.finfo(np.float64).eps)

# Bytes of a block; larger ones are no faster.
CACHE = 2**22
# Neighbours that are kept of a point beyond its k nearest.
KEPT = 12


@dataclass(frozen=True)
class Scores(ABC):
    """Training points X (n, d) and labels y (n,) in 0..C−1, with the provisional scores of a subclass."""

    X: FloatArray
    y: npt.NDArray[np.intp]
    n_classes: int

    @abstractmethod
    def scores(self, X_test: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """All scores at once, α (m, C, n) and τ (m, C), for the candidates of X_test (m, d)."""

    @abstractmethod
    def scaled(self, X_test: FloatArray, scales: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The same for objects that divide all columns by scales (m, d)."""

    @abstractmethod
    def tie(self, tau: FloatArray) -> FloatArray:
        """How far from a finite τ (m, C) a score is still tied with it."""

    def counts(
        self, X_test: npt.ArrayLike, weight: FloatArray | None = None, progress: Progress = nobody, block: int = CACHE,
        scales: FloatArray | None = None,
    ) -> tuple[FloatArray, FloatArray]:  # fmt: skip
        """Weight (m, C) of the training points above each candidate and of those tied; weight (n, C) as in `pvalues`.

        ``scales`` (m, d), by which objects divide the columns, where they do.
        """
        X_test = np.asarray(X_test, dtype=np.float64)
        row, size = (32 * self.n_classes + 64) * len(self.y), block
        if scales is not None:
            row, size = row + 64 * len(self.y) * KEPT, 8 * block

        def ask(at: slice) -> tuple[FloatArray, FloatArray, FloatArray]:
            """Scores of the objects `at`, and what τ is off by."""
            alpha, tau = self.scores(X_test[at]) if scales is None else self.scaled(X_test[at], scales[at])
            return alpha, tau, self.tie(np.where(np.isfinite(tau), tau, 0.0))

        return counted(ask, len(X_test), self.n_classes, row, weight, progress, size)

    def by_label(self, if_own: FloatArray, if_other: FloatArray) -> FloatArray:
        """Scores (m, C, n) from those (m, n) with a candidate of the point's own label and those with another's."""
        own = self.y == np.arange(self.n_classes)[:, None]
        return np.where(own, if_own[:, None, :], if_other[:, None, :])


@savable
@dataclass(frozen=True)
class Lists:
    """For each point, of its k nearest: the sum of all but the kth (n,), the kth (n,), inf where missing, how many there are (n,)."""

    rest: FloatArray
    last: FloatArray
    size: npt.NDArray[np.intp]
    k: int

    @classmethod
    def of(cls, nearest: FloatArray) -> Self:
        """From sorted distances (..., n, k), inf where there are fewer."""
        rest, last = nearest[..., :-1], nearest[..., -1]
        there = np.isfinite(nearest)
        return cls(np.where(there[..., :-1], rest, 0.0).sum(-1), last, there.sum(-1), nearest.shape[-1])

    def mean(self) -> FloatArray:
        """Mean distance (n,); inf where there is no neighbour."""
        total = self.rest + np.where(np.isfinite(self.last), self.last, 0.0)
        return np.where(self.size > 0, total / np.maximum(self.size, 1), np.inf)

    def mean_with(self, distance: FloatArray) -> FloatArray:
        """Mean distance (m, n) once a point at distances (m, n) has joined: it takes the kth place where it is nearer."""
        return (self.rest + np.minimum(distance, self.last)) / np.minimum(self.size + 1, self.k)


@savable
@dataclass(frozen=True)
class NearestNeighbors(Scores):
    """k-NN scores under the Minkowski distance of order p: provisional lists of neighbours of the own label and of the others.

    Examples
    --------
    >>> bag = NearestNeighbors.fit([[0.0], [1.0], [4.0], [6.0]], [0, 0, 1, 1], n_classes=2, k=1)
    >>> alpha, tau = bag.scores([[2.0]])
    >>> tau
    array([[0.5, 2. ]])
    >>> bag.counts([[2.0]])
    (array([[1., 0.]]), array([[1., 0.]]))
    """

    k: int
    p: float
    own: Lists
    others: Lists

    @classmethod
    def fit(
        cls, X: npt.ArrayLike, y: npt.ArrayLike, n_classes: int, k: int = 5, p: float = 2.0, block: int = CACHE
    ) -> Self:
        """Provisional lists on the bag X (n, d), y (n,): O(n²), once."""
        X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.intp)
        own, others = np.empty((2, len(y), k))
        for at in blocks(len(y), 32 * len(y) + 32 * n_classes * k, block):
            D = without_self(cdist(X[at], X, "minkowski", p=p), at, np.inf)
            by_class = nearest(D, y, n_classes, k)
            own[at] = by_class[np.arange(len(D)), y[at]]
            by_class[np.arange(len(D)), y[at]] = np.inf
            others[at] = smallest(by_class.reshape(len(D), -1), k)
        return cls(X, y, n_classes, k, p, Lists.of(own), Lists.of(others))

    def scores(self, X_test: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """All scores at once, α (m, C, n) and τ (m, C), for the candidates of X_test (m, d)."""
        return self._scores(
            cdist(np.asarray(X_test, dtype=np.float64), self.X, "minkowski", p=self.p), self.own, self.others
        )

    def scaled(self, X_test: FloatArray, scales: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The same for objects that divide all columns by scales (m, d)."""
        factors = scales**-self.p
        D = np.stack([np.abs(x - self.X) ** self.p @ factor for x, factor in zip(X_test, factors, strict=True)])
        own, others = (self._lists(near, scales, factors) for near in self.near)
        return self._scores(D ** (1 / self.p), own, others)

    @cached_property
    def near(self) -> tuple[Near, Near]:
        """The nearest points of the own label and of the others, some more than k."""
        own, others = (Near.of(self.X, self.y, own, self.k + KEPT, self.p) for own in (True, False))
        return own, others

    def _lists(self, near: Near, scales: FloatArray, factors: FloatArray) -> Lists:
        """Lists of neighbours, (m, n) each, once columns are divided by scales (m, d), which are factors (m, d) of |x − x'|^p."""
        n, kept, d = near.gaps.shape
        D = (factors @ near.gaps.reshape(-1, d).T).reshape(-1, n, kept) ** (1 / self.p)
        D[:, ~near.there] = np.inf
        found = smallest(D.reshape(-1, kept), self.k).reshape(-1, n, self.k)
        # What was not kept may have come nearer than the k-th.
        for r, i in np.argwhere(found[..., -1] > near.beyond / scales.max(1)[:, None] * (1 - 1e-9)):
            row = cdist(self.X[i : i + 1] / scales[r], self.X / scales[r], "minkowski", p=self.p)[
                :, near.among(i, self.y)
            ]
            found[r, i] = smallest(row, self.k)[0]
        return Lists.of(found)

    def _scores(self, D: FloatArray, own: Lists, others: Lists) -> tuple[FloatArray, FloatArray]:
        """Scores α (m, C, n) and τ (m, C) of objects at distances D (m, n), given the lists of the training points."""
        if_own = ratio(own.mean_with(D), others.mean())
        if_other = ratio(own.mean(), others.mean_with(D))
        by_class = nearest(D, self.y, self.n_classes, self.k)
        tau = np.empty(by_class.shape[:2])
        for c in range(self.n_classes):
            rest = smallest(np.delete(by_class, c, axis=1).reshape(len(D), -1), self.k)
            tau[:, c] = ratio(Lists.of(by_class[:, c]).mean(), Lists.of(rest).mean())
        return self.by_label(if_own, if_other), tau

    def tie(self, tau: FloatArray) -> FloatArray:
        """How far from a finite τ (m, C) a score is still tied with it."""
        d: int = self.X.shape[1]
        return TIE * (d + self.k + 1) * tau


@savable
@dataclass(frozen=True)
class KernelDensity(Scores):
    """Gaussian kernel density scores of bandwidth h: provisional log sums over the own label (n,), and class sizes (C,).

    Examples
    --------
    >>> bag = KernelDensity.fit([[0.0], [1.0], [4.0], [6.0]], [0, 0, 1, 1], n_classes=2)
    >>> alpha, tau = bag.scores([[2.0]])
    >>> tau.round(2)
    array([[0.99, 2.69]])
    >>> bag.counts([[2.0]])
    (array([[2., 0.]]), array([[1., 1.]]))
    """

    bandwidth: float
    log_sums: FloatArray
    size: npt.NDArray[np.intp]

    @classmethod
    def fit(
        cls, X: npt.ArrayLike, y: npt.ArrayLike, n_classes: int, bandwidth: float = 1.0, block: int = CACHE
    ) -> Self:
        """Provisional sums on the bag X (n, d), y (n,): O(n²), once."""
        X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.intp)
        total = own_log_sums(X, y, np.arange(len(y)), bandwidth, block)
        return cls(X, y, n_classes, bandwidth, total, np.bincount(y, minlength=n_classes))

    def scores(self, X_test: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """All scores at once, α (m, C, n) and τ (m, C), for the candidates of X_test (m, d)."""
        return self._scores(log_kernel(np.asarray(X_test, dtype=np.float64), self.X, self.bandwidth), self.log_sums)

    def scaled(self, X_test: FloatArray, scales: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The same for objects that divide all columns by scales (m, d).

        Scores that may lie on either side of a candidate's by their bounds are computed; of the others only the side counts.
        """
        log_K = np.vstack(
            [log_kernel(x[None] / s, self.X / s, self.bandwidth) for x, s in zip(X_test, scales, strict=True)]
        )
        log_sums, off = self._bounded(scales)
        alpha, tau = self._scores(log_K, log_sums)
        with np.errstate(invalid="ignore"):
            reach = off[:, None] + 4 * self.tie(np.where(np.isfinite(tau), np.abs(tau), 0.0))[..., None]
            near: npt.NDArray[np.bool_] = np.any(np.abs(alpha - tau[..., None]) <= reach, axis=1)
        for r in np.flatnonzero(near.any(1)):
            points = np.flatnonzero(near[r])
            log_sums[r, points] = own_log_sums(self.X / scales[r], self.y, points, self.bandwidth, CACHE)
        return self._scores(log_K, log_sums) if near.any() else (alpha, tau)

    @cached_property
    def moments(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of each point, weighted by kernels over their sum: mean (x_i − x_j)² (n, d) and (log K)² (n,); the largest −log K (n,)."""
        X = self.X - self.X.mean(0)
        gaps, square, most = np.zeros_like(X), np.zeros(len(X)), np.zeros(len(X))
        for members in (np.flatnonzero(self.y == c) for c in range(self.n_classes) if self.size[c] > 1):
            near = X[members]
            for at in blocks(len(members), 32 * len(members), CACHE):
                some, log_K = members[at], log_kernel(near[at], near, self.bandwidth)
                W = np.exp(without_self(log_K.copy(), at, -np.inf) - self.log_sums[some, None])
                gaps[some] = near[at] ** 2 - 2 * near[at] * (W @ near) + W @ near**2
                square[some], most[some] = (W * log_K**2).sum(1), -log_K.min(1)
        return gaps, square, most

    def _bounded(self, scales: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Log sums (m, n) once columns are divided by scales (m, d), and what they may be off by (m, n).

        They are convex in the columns' factors s⁻², so that the tangent is below them. Log K changes by a random variable Y of the
        kernels' weights, |Y| ≤ ρ|log K| with ρ the largest |s⁻² − 1|, so that they exceed it by log E exp(Y − EY), at most
        E Y² (e^b − 1 − b)/b², where b bounds Y − EY (Bennett's inequality).
        """
        gaps, square, most = self.moments
        change = scales**-2.0 - 1
        rho = np.abs(change).max(1, keepdims=True)
        shift = change @ gaps.T / (-2 * self.bandwidth**2)
        with np.errstate(over="ignore"):
            b = np.maximum(2 * rho * most, 1e-3)
            above = rho**2 * square * (np.expm1(b) - b) / b**2
        # Wider ones decide little, and cost digits.
        off = np.where(above > 1, np.inf, above / 2)
        # Room for rounding of the means.
        return self.log_sums + shift + np.where(above > 1, 0.0, off), off + 1e-9 * (rho + np.abs(shift))

    def _scores(self, log_K: FloatArray, log_sums: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Scores α (m, C, n) and τ (m, C) of objects with kernels log K (m, n), given log sums (n,) or (m, n) of the training points."""
        size = self.size[self.y]
        if_own = np.log(size) - np.logaddexp(log_sums, log_K)
        if_other = np.log(np.maximum(size - 1, 1)) - np.atleast_2d(log_sums)
        sums = np.stack([log_sum(log_K[:, self.y == c]) for c in range(self.n_classes)], axis=1)
        return self.by_label(if_own, if_other), np.log(np.maximum(self.size, 1)) - sums

    def tie(self, tau: FloatArray) -> FloatArray:
        """How far from a finite τ (m, C) a score is still tied with it: the exponents of its d terms are of the size of τ, or 1."""
        d: int = self.X.shape[1]
        return TIE * (d + math.log(len(self.y) + 1)) * (1 + tau)


def ratio(own: FloatArray, others: FloatArray) -> FloatArray:
    """own / others elementwise, with the conventions above."""
    own, others = np.broadcast_arrays(own, others)
    with np.errstate(over="ignore"):
        # A ratio that is too large is inf.
        out: FloatArray = np.where(own > 0, np.inf, 1.0)
        return np.divide(own, others, out=out, where=(others > 0) & (own < np.inf))


# The method -----------------------------------------------------------------------------------------------------------


@savable
class FittedNeighbors(Fitted):
    """Prepared scores of the training points, and the classifier itself for its probabilities."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, bag: Scores, model: Any):
        super().__init__(bag.y.astype(np.int64), bag.n_classes)
        self.bag, self.model = bag, model

    @property
    def takes_scales(self) -> bool:  # type: ignore[override]
        """Whether what is kept of neighbours for that is no more than half a GiB; densities keep little."""
        n, d = self.bag.X.shape
        return not isinstance(self.bag, NearestNeighbors) or bool(16 * n * (self.bag.k + KEPT) * d <= 2**29)

    def holds(self, X: Any) -> bool:
        return starts_with(self.bag.X, X)

    def log_proba(self, X: Any) -> FloatArray:
        return log_of(self.model.predict_proba(X))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q != 1:
            raise ValueError("these scores leave a point out of its own neighbours: use scheme='deleted'.")
        if isinstance(self.bag, NearestNeighbors):
            check_distances(np.asarray(X, dtype=np.float64), self.bag.p, training=False)
        return self.bag.counts(X, self.weight(query), query.progress, scales=query.scales)

    def state(self) -> dict[str, Any]:
        """Prepared scores, and the classifier's parameters."""
        return {"model": clone(self.model), "bag": self.bag}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same; the classifier finds its neighbours anew."""
        bag = expect(state["bag"], Scores)
        shapes = bag.X.ndim == 2 and bag.y.shape == bag.X.shape[:1]
        require(shapes and bool(np.isfinite(bag.X).all()), "points")
        for part in (bag, *(getattr(bag, name) for name in ("own", "others") if hasattr(bag, name))):
            require(1 <= getattr(part, "k", 1) <= len(bag.y), "number of neighbours")
            lists = [part.rest, part.last, part.size] if isinstance(part, Lists) else []
            lists += [bag.log_sums] if isinstance(bag, KernelDensity) else []
            require(all(each.shape == bag.y.shape for each in lists), "neighbours")
        require(not isinstance(bag, KernelDensity) or bag.size.shape == (bag.n_classes,), "class sizes")
        model = expect(state["model"], KNeighborsClassifier, KernelDensityClassifier)
        return cls(bag, model.fit(bag.X, bag.y))


@savable
class Neighbors(Method):
    """Full CP itself for nearest neighbours and kernel densities, by updates of scores prepared once; no refits."""

    name = "exact"

    def fit(self, bag: Bag, config: Config) -> FittedNeighbors:
        X, model = np.asarray(bag.X, dtype=np.float64), self.model
        # Which checks its own parameters.
        fitted = clone(model).fit(X, bag.y)
        if not isinstance(model, KNeighborsClassifier):
            return FittedNeighbors(KernelDensity.fit(X, bag.y, bag.n_classes, model.bandwidth), fitted)
        k, order = int(model.n_neighbors), order_of(model)
        check_distances(X, order, training=True)
        return FittedNeighbors(NearestNeighbors.fit(X, bag.y, bag.n_classes, k, order), fitted)
