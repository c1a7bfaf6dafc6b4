"""Scores of full CP for linear discriminant analysis and Gaussian naive Bayes: counts, means and variances updated by one point.

A point is scored by the log loss of the fit to the bag Z ∪ {(x, y)} without itself (deleted), or with itself (ordinary). Fits are closed
formulas of counts N, means μ and scatter of each class, so leaving z_i out and adding x to class c are two small updates:

    μ ← μ ± (x − μ)/(N ± 1)        scatter ← scatter ± N/(N ± 1) (x − μ)(x − μ)ᵀ        N ← N ± 1

**Naive Bayes** has the diagonal of each class's scatter, divided by N, plus var_smoothing times the largest variance of a column in the
bag, which each pair (z_i, x) changes for all classes: all densities of the n points are computed anew, O(nCd) an object.

**LDA** has M = W + rI, W the sum of all classes' scatters, r = s tr(W)/(d(1 − s)) with shrinkage s, else 0; and the log density of class k
is log π_k − f/2 (x − μ_k)ᵀM⁻¹(x − μ_k), up to what all classes share, f = n/(1 − s) (before its version 1.9 scikit-learn's solver "svd" had
n − C). With B the inverse of M without z_i (Sherman and Morrison), z_k = x_i − μ_k for the means without z_i, w = x − x_i and u = w + z_c,
adding x gives

    z_kᵀM⁻¹z_k = z_kᵀBz_k − p (z_kᵀBu)²/(1 + p uᵀBu),        p = N/(N + 1);        z_c is z_c − u/(N + 1) then

so what is needed of an object are products of w with z_k and with itself. In the coordinates of W's eigenvectors B is diagonal but for
one term, so r, which depends on the candidate, costs no more than that.

A class that is left without points has probability 0: its point's score is +inf, the most nonconforming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal.models.distances import FloatArray, log_sum
from fullconformal.storage import savable

IntArray = npt.NDArray[np.int64]
EPS = float(np.finfo(np.float64).eps)
# A variance without a point is computed anew from the others where less than this share of it would be left: rounding is 1/LEFT units.
LEFT = 1e-3


class Moments(NamedTuple):
    """Counts (...,), means (..., d) and variances (..., d), divided by counts, of sets of points."""

    size: FloatArray
    mean: FloatArray
    var: FloatArray

    def without(self, x: FloatArray) -> Moments:
        """Each without its point x (..., d); zero where none is left."""
        left = np.maximum(self.size - 1, 1)[..., None]
        gap = x - self.mean
        var = (self.size[..., None] * self.var - gap**2 * self.size[..., None] / left) / left
        return Moments(self.size - 1, self.mean - gap / left, np.maximum(var, 0.0))

    def joined(self, x: FloatArray) -> Moments:
        """Each with one more point x (..., d)."""
        size, gap = self.size[..., None], x - self.mean
        return Moments(
            self.size + 1, self.mean + gap / (size + 1), (size * self.var + gap**2 * size / (size + 1)) / (size + 1)
        )

    def at(self, rows: Any) -> Moments:
        """Those in some rows."""
        return Moments(*(part[rows] for part in self))


def moments(X: FloatArray) -> Moments:
    """Of points X (n, d)."""
    return Moments(np.array(float(len(X))), X.mean(0), X.var(0))


def each_without(X: FloatArray) -> Moments:
    """Of points X (n, d) without each of them, (n,) and (n, d): relative errors of variances are below EPS/LEFT."""
    whole = moments(X)
    out = Moments(*(np.broadcast_to(part, (len(X), *part.shape)) for part in whole)).without(X)
    for i in np.flatnonzero((out.var < LEFT * whole.var).any(1)) if len(X) > 1 else ():
        out.var[i] = np.delete(X, i, 0).var(0)
    return out


def losses(density: FloatArray, own: FloatArray) -> FloatArray:
    """−log of the probability of one class, from log densities (..., C) times priors and that of the class (...)."""
    with np.errstate(invalid="ignore"):
        out = log_sum(density.reshape(-1, density.shape[-1])).reshape(density.shape[:-1]) - own
    # Where a class has no points, or numbers ran out of range: as nonconforming as can be.
    return np.where(np.isnan(out) | (own == -np.inf), np.inf, np.maximum(out, 0.0))


@dataclass(frozen=True)
class Densities(ABC):
    """Training points X (n, d), labels y (n,) in 0..C−1, and the priors (C,) that were given, None for the classes' shares."""

    X: FloatArray
    y: IntArray
    n_classes: int
    priors: FloatArray | None

    @abstractmethod
    def density(self, X: FloatArray) -> FloatArray:
        """Log densities times priors (m, C), up to a summand of each object, by the fit to Z."""

    @abstractmethod
    def candidates(self, x: FloatArray, deleted: bool) -> tuple[FloatArray, FloatArray | None]:
        """Scores (C, n) of the points beside every label of an object (d,), and its own (C,) where it is in the bag it is scored by."""

    @abstractmethod
    def rounding(self, X: FloatArray) -> FloatArray:
        """Bound (m, 1) on the rounding of the scores of objects X (m, d), and of training points equal to them."""

    @cached_property
    def centre(self) -> FloatArray:
        """The mean (d,) of the points, which is subtracted: that changes nothing but rounding."""
        return np.asarray(self.X.mean(0))

    @cached_property
    def sizes(self) -> FloatArray:
        """Points of each class (C,)."""
        return np.bincount(self.y, minlength=self.n_classes).astype(np.float64)

    def log_priors(self, sizes: FloatArray, n: int) -> FloatArray:
        """Logarithms (..., C) of priors where classes have so many of n points; −inf of a class without any."""
        with np.errstate(divide="ignore"):
            shares = np.log(np.asarray(sizes) / n)
        return shares if self.priors is None else np.where(sizes > 0, np.log(self.priors), -np.inf)

    def losses(self, X: FloatArray) -> FloatArray:
        """Loss (m, C) of every label of objects X (m, d) by the fit to Z."""
        density = self.density(X)
        return losses(density[:, None], density)


@savable
@dataclass(frozen=True)
class NaiveBayes(Densities):
    """Gaussian naive Bayes.

    Examples
    --------
    >>> bag = NaiveBayes(np.array([[0.0], [1.0], [4.0], [6.0]]), np.array([0, 0, 1, 1]), 2, None, 1e-9)
    >>> bag.losses(np.array([[2.0]])).round(3)
    array([[0.405, 1.099]])
    """

    smoothing: float

    @cached_property
    def points(self) -> FloatArray:
        """The training points (n, d), centred."""
        return self.X - self.centre

    @cached_property
    def classes(self) -> Moments:
        """Of each class."""
        return Moments(
            *map(np.stack, zip(*(moments(self.points[self.y == c]) for c in range(self.n_classes)), strict=True))
        )

    @cached_property
    def own_without(self) -> Moments:
        """Of each point's class without it."""
        out = Moments(np.empty(len(self.y)), *np.empty((2, *self.X.shape)))
        for c in range(self.n_classes):
            members = np.flatnonzero(self.y == c)
            for part, found in zip(out, each_without(self.points[members]), strict=True):
                part[members] = found
        return out

    @cached_property
    def all_without(self) -> Moments:
        """Of all points without each."""
        return each_without(self.points)

    def normal(self, x: FloatArray, of: Moments, smooth: Any) -> FloatArray:
        """Log densities (...) at points x (..., d) of classes with these moments, whose variances are larger by `smooth` (...)."""
        var = of.var + np.asarray(smooth)[..., None]
        # Columns that do not vary at all have no density; `losses` knows.
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.log(2 * np.pi * var) + (x - of.mean) ** 2 / var
            return np.asarray(-0.5 * terms.sum(-1))

    def density(self, X: FloatArray) -> FloatArray:
        smooth = self.smoothing * self.points.var(0).max()
        return self.normal((X - self.centre)[:, None], self.classes, smooth) + self.log_priors(self.sizes, len(self.y))

    def candidates(self, x: FloatArray, deleted: bool) -> tuple[FloatArray, FloatArray | None]:
        x, points, C, rows = x - self.centre, self.points, self.n_classes, np.arange(len(self.y))
        n = len(points) if deleted else len(points) + 1
        every = self.all_without if deleted else moments(points)
        smooth = np.broadcast_to(self.smoothing * every.joined(x).var.max(-1), len(points))
        own = self.own_without if deleted else self.classes.at(self.y)
        # Classes as they are and with x, at each point; the point's own class without it.
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = self.normal(points[:, None], self.classes, smooth[:, None])
            plain[rows, self.y] = self.normal(points, own, smooth)
            joined = self.normal(points[:, None], self.classes.joined(x), smooth[:, None])
            joined[rows, self.y] = self.normal(points, own.joined(x), smooth)
        sizes = np.broadcast_to(self.sizes, (len(points), C)).copy()
        sizes[rows, self.y] = own.size
        plain, joined = plain + self.log_priors(sizes, n), joined + self.log_priors(sizes + 1, n)
        alpha = np.empty((C, len(points)))
        for c in range(C):
            density = plain.copy()
            density[:, c] = joined[:, c]
            alpha[c] = losses(density, density[rows, self.y])
        if deleted:
            return alpha, None
        own_x = self.normal(x, self.classes, smooth[0]) + self.log_priors(self.sizes, n)
        with_x = self.normal(x, self.classes.joined(x), smooth[0]) + self.log_priors(self.sizes + 1, n)
        density = np.where(np.eye(C, dtype=bool), with_x, own_x)
        return alpha, losses(density, np.diag(density))

    def rounding(self, X: FloatArray) -> FloatArray:
        # Each of the d terms of two densities, of the class and of the likeliest, is off by EPS/LEFT of itself and of its logarithm.
        return np.asarray(16 * EPS / LEFT * (self.X.shape[1] + farthest(self.density(X))))


def farthest(density: FloatArray) -> FloatArray:
    """The larger size (m, C) of the log densities of a class and of the likeliest one, of which a loss is made.

    Zero where one is not finite: such losses are infinite, and tied with each other.
    """
    size = np.maximum(np.abs(density), np.abs(density.max(1, keepdims=True)))
    return np.where(np.isfinite(size), size, 0.0)


@savable
@dataclass(frozen=True)
class Discriminant(Densities):
    """Linear discriminant analysis of shrinkage s; points are in the coordinates of W's eigenvectors.

    Examples
    --------
    >>> bag = Discriminant(np.array([[0.0], [1.0], [4.0], [6.0]]), np.array([0, 0, 1, 1]), 2, None, 0.0)
    >>> bag.losses(np.array([[2.0]]))[0, 1].round(3)
    np.float64(5.405)
    """

    shrinkage: float

    @cached_property
    def units(self) -> FloatArray:
        """What columns are divided by (d,): where nothing is shrunk, their deviation within classes, for which no density cares."""
        means = self.means_of(self.X)
        deviation = np.sqrt(((self.X - means[self.y]) ** 2).mean(0))
        return np.where(deviation > 0, deviation, 1.0) if self.shrinkage == 0 else np.ones(self.X.shape[1])

    @cached_property
    def basis(self) -> tuple[FloatArray, FloatArray]:
        """Eigenvalues (d,) and eigenvectors (d, d) of W, in units."""
        centred = (self.X - self.means_of(self.X)[self.y]) / self.units
        values, vectors = np.linalg.eigh(centred.T @ centred)
        return np.maximum(values, 0.0), vectors

    @cached_property
    def points(self) -> FloatArray:
        """The training points (n, d) in the coordinates of the eigenvectors."""
        return self.coordinates(self.X)

    @cached_property
    def means(self) -> FloatArray:
        """Of the classes (C, d), in the same coordinates."""
        return self.means_of(self.points)

    def coordinates(self, X: FloatArray) -> FloatArray:
        """Objects (m, d) in the coordinates of the eigenvectors."""
        return np.asarray((X - self.centre) / self.units @ self.basis[1])

    def means_of(self, X: FloatArray) -> FloatArray:
        """Means (C, d) of points (n, d) of each class."""
        return np.stack([X[self.y == c].mean(0) for c in range(self.n_classes)])

    def factor(self, n: int) -> float:
        """f of a bag of n points."""
        return n / (1 - self.shrinkage)

    def ridge(self, trace: Any) -> Any:
        """r of a bag whose W has this trace."""
        d = self.X.shape[1]
        return self.shrinkage / (1 - self.shrinkage) / d * trace

    @cached_property
    def removal(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What leaving each point out takes: q (n,) and v (n, d) of W − q vvᵀ, and z_k = x_i − μ_k (n, C, d) for the means without it."""
        own = self.sizes[self.y]
        v = self.points - self.means[self.y]
        z = self.points[:, None] - self.means
        z[np.arange(len(v)), self.y] *= (own / np.maximum(own - 1, 1))[:, None]
        return np.where(own > 1, own / np.maximum(own - 1, 1), 0.0), v, z

    @property
    def is_singular(self) -> bool:
        """Whether W, with or without a point, is singular or so nearly that rounding would decide."""
        return self.condition > 1e10 or self.left < 1e-6

    @cached_property
    def condition(self) -> float:
        """Largest eigenvalue of M over the smallest."""
        return float(self.diagonal.max() / self.diagonal.min()) if self.diagonal.min() > 0 else np.inf

    @cached_property
    def diagonal(self) -> FloatArray:
        """M of Z in the coordinates of the eigenvectors (d,)."""
        values = self.basis[0]
        return np.asarray(values + self.ridge(values.sum()))

    @cached_property
    def left(self) -> float:
        """What share of M in its direction at least is left without a point."""
        q, v, _ = self.removal
        return float((1 - q * (v**2 @ (1 / self.diagonal))).min())

    def density(self, X: FloatArray) -> FloatArray:
        n, z = len(self.y), self.coordinates(X)[:, None] - self.means
        far = (z**2 / self.diagonal).sum(-1)
        return np.asarray(self.log_priors(self.sizes, n) - 0.5 * self.factor(n) * far)

    def candidates(self, x: FloatArray, deleted: bool) -> tuple[FloatArray, FloatArray | None]:
        n, C, rows = len(self.y), self.n_classes, np.arange(len(self.y))
        x = self.coordinates(x[None])[0]
        q, v, z = self.removal
        sizes = np.broadcast_to(self.sizes, (n, C)).copy()
        if deleted:
            sizes[rows, self.y] -= 1
            return self._losses(x - self.points, z, q, v, sizes, self.y, n), None
        # With x itself as the last point, which is of each class in turn.
        every = np.vstack([self.points, x])
        z, sizes = every[:, None] - self.means, np.vstack([sizes, self.sizes])
        none = np.zeros(n + 1), np.zeros((n + 1, len(x)))
        out = self._losses(x - every, z, *none, sizes, np.append(self.y, -1), n + 1)
        return out[:, :-1], out[:, -1]

    def _losses(
        self, w: FloatArray, z: FloatArray, q: FloatArray, v: FloatArray, sizes: FloatArray, y: IntArray, n: int
    ) -> FloatArray:
        """Scores (C, b) of points for x added to each class: w = x − x_i, z, q and v of the removal, sizes (b, C) and labels without i.

        A label −1 is that of the candidate. The bag has n points.
        """
        values, out, rows = self.basis[0], np.empty((self.n_classes, len(w))), np.arange(len(w))
        shared = _products(1 / values, w, z, q, v) if self.shrinkage == 0 else None
        for c in range(self.n_classes):
            p = sizes[:, c] / (sizes[:, c] + 1)
            if shared is None:
                u = w + z[:, c]
                r = self.ridge(values.sum() - q * (v**2).sum(1) + p * (u**2).sum(1))
                zz, zw, zv_ww = _products(1 / (values + r[:, None]), w, z, q, v)
            else:
                zz, zw, zv_ww = shared
            # Products with u = w + z_c, then with M⁻¹ in place of B.
            zu = zw + zz[:, :, c]
            uu = zv_ww + 2 * zw[:, c] + zz[:, c, c]
            own, share = np.diagonal(zz, axis1=1, axis2=2).copy(), 1 / (sizes[:, c] + 1)
            own[:, c] += -2 * share * zu[:, c] + share**2 * uu
            zu[:, c] -= share * uu
            far = own - (p / (1 + p * uu))[:, None] * zu**2
            counts = sizes.copy()
            counts[:, c] += 1
            density = self.log_priors(counts, n) - 0.5 * self.factor(n) * far
            out[c] = losses(density, density[rows, np.where(y < 0, c, y)])
        return out

    def rounding(self, X: FloatArray) -> FloatArray:
        # Coordinates are products of d terms, of which those of small eigenvalues count most; leaving a point out divides by what is left.
        unit = 16 * EPS * self.X.shape[1] * self.condition / self.left
        return np.asarray(unit * (1 + farthest(self.density(X))))


def _products(
    weight: FloatArray, w: FloatArray, z: FloatArray, q: FloatArray, v: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """zᵀBz (b, C, C), zᵀBw (b, C) and wᵀBw (b,), where B⁻¹ is diag(1/weight) − q vvᵀ, weight (d,) or (b, d)."""
    weighted = z * np.broadcast_to(weight, w.shape)[:, None]
    wv, vv = (w * v * weight).sum(1), (v * v * weight).sum(1)
    zv = (weighted @ v[:, :, None])[:, :, 0]
    more = q / (1 - q * vv)
    zz = weighted @ z.swapaxes(1, 2) + more[:, None, None] * zv[:, :, None] * zv[:, None]
    zw = (weighted @ w[:, :, None])[:, :, 0] + (more * wv)[:, None] * zv
    return zz, zw, (w * w * weight).sum(1) + more * wv**2
