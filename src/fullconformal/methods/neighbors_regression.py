"""Exact full CP for k-NN regression: what neighbours predict of each point is prepared once on Z, and changed by one for a candidate.

A point is scored by |y_i − the mean of its k nearest, itself left out|, in the bag Z ∪ {(x, y)}. Points that are equally far share the
places that are left, so that their order does not matter: with p places left for τ points at the kth distance, each counts p/τ. A candidate
that is nearer takes one place, one at that very distance shares; all that changes a mean by a multiple of y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.neighbors import KNeighborsRegressor

from fullconformal.guarantees import EXACT
from fullconformal.intervals import Distribution, Steps, crossings
from fullconformal.methods.base import Config, FloatArray, Values
from fullconformal.methods.regression import (
    EPS,
    FittedRegression,
    RegressionMethod,
    RegressionQuery,
    blocks,
    check_points,
)
from fullconformal.models.distances import order_of
from fullconformal.models.requirements import check_distances
from fullconformal.storage import expect, require, savable


@savable
@dataclass(frozen=True)
class Nearest:
    """Of each of n points: the distance of its kth neighbour, inf where there are fewer; sums and numbers of values nearer and at it."""

    distance: FloatArray
    nearer: FloatArray
    n_nearer: FloatArray
    tied: FloatArray
    n_tied: FloatArray
    k: int

    @classmethod
    def of(cls, D: FloatArray, y: FloatArray, k: int, tie: float) -> Self:
        """From distances D (b, n) to points of values y (n,); inf for those that do not count, and equal up to a relative tie."""
        distance = np.partition(D, k - 1, axis=1)[:, k - 1] if D.shape[1] >= k else np.full(len(D), np.inf)
        far, near = (distance * (1 + sign * tie) for sign in (1, -1))
        there = np.isfinite(D)
        nearer = there & (near[:, None] > D)
        tied = there & (far[:, None] >= D) & ~nearer
        return cls(distance, nearer @ y, nearer.sum(1) * 1.0, tied @ y, tied.sum(1) * 1.0, k)

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Those of several blocks of points."""
        fields = [(p.distance, p.nearer, p.n_nearer, p.tied, p.n_tied) for p in parts]
        distance, nearer, n_nearer, tied, n_tied = (np.concatenate(field) for field in zip(*fields, strict=True))
        return cls(distance, nearer, n_nearer, tied, n_tied, parts[0].k)

    def mean(self) -> FloatArray:
        """Mean value (b,) of the k nearest."""
        places = self.k - self.n_nearer
        return (self.nearer + places * self.tied / np.maximum(self.n_tied, 1)) / self.k

    def mean_with(self, D: FloatArray, tie: float) -> tuple[FloatArray, FloatArray]:
        """With one more at distances D (m, n): the mean is the first plus y times the second, (m, n) each."""
        places = self.k - self.n_nearer
        mean_tied = self.tied / np.maximum(self.n_tied, 1)
        nearer = self.distance * (1 - tie) > D
        same = ~nearer & (self.distance * (1 + tie) >= D)
        # Of the places left, one is taken, or all are shared by one more.
        share = places / (self.n_tied + 1)
        without = np.where(same, self.nearer + share * self.tied, self.nearer + places * mean_tied)
        base = np.where(nearer, self.nearer + (places - 1) * mean_tied, without)
        return base / self.k, np.where(nearer, 1.0, np.where(same, share, 0.0)) / self.k


@savable
class FittedNeighborsRegression(FittedRegression):
    """The training points, and the neighbours of each."""

    method = "exact"
    guarantee = EXACT
    takes_scheme = False

    def __init__(self, bag: Values, order: float, lists: Nearest, model: Any):
        super().__init__(bag)
        self.order, self.lists, self.model = order, lists, model

    def predict(self, X: Any) -> FloatArray:
        return np.asarray(self.model.predict(X), dtype=np.float64)

    def _residuals(self, X: Any, query: RegressionQuery) -> Iterator[tuple[slice, FloatArray, FloatArray, FloatArray]]:
        """A block of objects at a time: residuals r − slope·t (b, n) of the points, t that of the candidate, at y = centre + t."""
        if query.q == 0:
            raise ValueError("k-NN scores leave a point out of its own neighbours: use scheme='deleted'.")
        X = np.asarray(X, dtype=np.float64)
        check_distances(X, self.order, training=False)
        k, y, tie = self.lists.k, self.bag.y, rounding(X)
        for at in blocks(X, self.n, query.progress):
            D = cdist(X[at], self.bag.X, "minkowski", p=self.order)
            centre = Nearest.of(D, y, k, tie).mean()
            base, slope = self.lists.mean_with(D, tie)
            yield at, y - base - slope * centre[:, None], slope, centre

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        slack = 8 * (self.lists.k + 8) * EPS * float(np.abs(self.bag.y).max())
        for at, r, slope, centre in self._residuals(X, query):
            signed = np.where(r < 0, -slope, slope)
            # Not less than 1 by a tolerance: of one neighbour, slopes are 1 as well.
            edge = np.ones_like(slope)
            lower, upper, owner = crossings(np.abs(r), signed, edge, centre, np.full(len(centre), slack), slack)
            yield query.steps(lower, upper, owner, self.n, at)

    def distributions(self, X: Any, query: RegressionQuery) -> Iterator[Distribution]:
        # Slopes are not negative: the candidate's residual passes each point's once, from below.
        for _, r, slope, centre in self._residuals(X, query):
            yield Distribution.of(centre[:, None] + r / (1 + slope))

    def state(self) -> dict[str, Any]:
        return {"bag": self.bag, "order": self.order, "lists": self.lists, "model": clone(self.model)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        bag, lists = expect(state["bag"], Values), expect(state["lists"], Nearest)
        check_points(bag)
        parts = (lists.distance, lists.nearer, lists.n_nearer, lists.tied, lists.n_tied)
        require(all(part.shape == bag.y.shape for part in parts) and lists.k >= 1, "neighbours")
        model = expect(state["model"], KNeighborsRegressor)
        return cls(bag, expect(state["order"], float), lists, model.fit(bag.X, bag.y))


def rounding(X: FloatArray) -> float:
    """How far distances of objects X (m, d) that are equal may be apart, relative: each is rounded by d/2 + 2 units at most."""
    d: int = X.shape[1]
    return (d + 4) * EPS


@savable
class NeighborsRegression(RegressionMethod):
    """Full CP itself for k-NN regression."""

    name = "exact"

    def fit(self, bag: Values, config: Config) -> FittedNeighborsRegression:
        X, y, model = np.asarray(bag.X, dtype=np.float64), bag.y, self.model
        # Which checks its own parameters.
        fitted = clone(model).fit(X, y)
        k, order = int(model.n_neighbors), order_of(model)
        if k > len(y):
            raise ValueError(f"n_neighbors={k} is more than n_samples={len(y)}; give fewer neighbours.")
        check_distances(X, order, training=True)
        parts = []
        for at in blocks(X, len(y)):
            D = cdist(X[at], X, "minkowski", p=order)
            D[np.arange(len(D)), np.arange(at.start, at.stop)] = np.inf
            parts.append(Nearest.of(D, y, k, rounding(X)))
        lists = Nearest.joined(parts)
        return FittedNeighborsRegression(Values(X, y), order, lists, fitted)
