"""Ridge regressions, also in kernels: residuals of a bag and one more point (x, y), as functions of y, for all objects x from one factor.

With t = y − f(x), what the fit to the bag predicts, and h_x, h_xi, h_i from the inverse of the Hessian, the fit to the bag and (x, y) has

    residuals     r_i − h_xi·g·t  and  g·t,        g = 1/(1 + h_x)
    leverages     1 − h̄_i = 1 − h_i + g·h_xi²,     1 − h̄ = g

and scores |residual|/(1 − leverage)^q. An intercept that is not penalised is a parameter as any other: 1/n is added to h_x, h_xi and h_i of
objects less their mean. In kernels the same is read from the bordered inverse of M = K + αI.

With weights w_i of the points and w of the object, of ½Σw_i·r_i², the mean is the weighted one, 1/Σw_i is added, and

    residuals     r_i − w·h_xi·g·t  and  g·t,      g = 1/(1 + w·h_x)
    leverages     1 − h̄_i = 1 − w_i·h_i + w_i·w·g·h_xi²
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.linalg.lapack import dtrtri

from fullconformal.storage import savable

FloatArray = npt.NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)

# A point of such a leverage, up to rounding, decides a parameter by itself: its residual is zero whatever its value, and its score is 0.
ALONE = 1e-9


@dataclass(frozen=True)
class Lines:
    """For m objects, the scores of n points as |size − slope·t|/·, against edge·|t| of the candidate; t = y − centre.

    `size` (n,) is not negative and slopes (m, n) carry the sign of the residual. `free` (m,) marks objects that decide a parameter by
    themselves: the candidate's score is 0 for every y. Residuals closer than `tie` are tied.
    """

    size: FloatArray
    sign: FloatArray
    slope: FloatArray
    edge: FloatArray
    centre: FloatArray
    slack: FloatArray
    tie: float
    free: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ranking:
    """Points in the order of their scores in the bag alone, descending (n,), those scores, and the largest √h/(1 − h)^q and h/(1 − h)."""

    order: npt.NDArray[np.intp]
    score: FloatArray
    steepest: float
    heaviest: float


@savable
@dataclass(frozen=True)
class Ridge:
    """A ridge regression of a bag, in the coordinates of the singular vectors of its objects.

    Attributes
    ----------
    mean : array (d,)
        Subtracted from objects; zero without an intercept.
    shift : float
        Subtracted from values.
    axes : array (d, r)
        Right singular vectors; r is the rank.
    root : array (r,)
        Roots of the eigenvalues of the Hessian.
    rows : array (n, r)
        Training objects divided by the root, each with the sign of its residual.
    weight : array (r,)
        The fit.
    residual : array (n,)
    free_share : array (n,)
        1 − leverage.
    constant : float
        What an intercept adds to h: 1/n, or 0.
    penalty : float
        Λ of ½Σr² + (Λ/2)|w|².
    mass : array (n,), optional
        Weights of the points, none of them 0.
    """

    mean: FloatArray
    shift: float
    axes: FloatArray
    root: FloatArray
    rows: FloatArray
    weight: FloatArray
    residual: FloatArray
    free_share: FloatArray
    constant: float
    penalty: float
    rounding: float
    mass: FloatArray | None = None

    @classmethod
    def fit(
        cls, X: FloatArray, y: FloatArray, penalty: float, intercept: bool = True, mass: FloatArray | None = None
    ) -> Self:
        """To objects X (n, d) and values y (n,), of weights (n,) > 0 where they are given."""
        n, d = X.shape
        mean = np.average(X, axis=0, weights=mass) if intercept else np.zeros(d)
        scaled = X - mean if mass is None else (X - mean) * np.sqrt(mass)[:, None]
        U, s, axes = np.linalg.svd(scaled, full_matrices=False)
        # Adding the mean and taking it off again leaves rounding errors of the size of the objects.
        there = s > max(n, d) * EPS * max(float(s.max(initial=0.0)), float(np.abs(X).max(initial=0.0)) * intercept)
        return cls._of(mean, U[:, there], s[there], axes[there].T, y, penalty, intercept, mass)

    def rescaled(self, y: FloatArray, scales: FloatArray) -> Self:
        """The regression of the same points and values (n,), with an intercept, on columns divided by scales (d,).

        From the singular vectors of the objects, U diag(s) Vᵀ: those of diag(s) Vᵀ diag(1/scales) are of a small matrix, turned by U.
        """
        size = np.sqrt(np.maximum(self.root**2 - self.penalty, 0.0))
        U = self.rows * np.where(self.residual < 0, -1.0, 1.0)[:, None] * (self.root / size)
        A, s, axes = np.linalg.svd(size[:, None] * self.axes.T / scales, full_matrices=False)
        return self._of(self.mean / scales, U @ A, s, axes.T, y, self.penalty, True)

    @classmethod
    def _of(
        cls, mean: FloatArray, U: FloatArray, s: FloatArray, axes: FloatArray, y: FloatArray, penalty: float, intercept: bool,
        mass: FloatArray | None = None,
    ) -> Self:  # fmt: skip
        """From the singular vectors and values of objects less their mean, times the roots of their weights."""
        n, shift = len(y), float(np.average(y, weights=mass)) if intercept else 0.0
        w = np.ones(n) if mass is None else mass
        half, constant = np.sqrt(w), intercept / float(w.sum())
        kept = s**2 / (s**2 + penalty)
        values = half * (y - shift)
        along = U.T @ values
        full = U.shape[1] == n - intercept
        # Where the objects span everything, by what the penalty takes away: differences would cancel.
        lost = penalty / (s**2 + penalty)
        residual = (U @ (lost * along) if full else values - U @ (kept * along)) / half
        share = U**2 @ lost if full else 1 - w * constant - U**2 @ kept
        alone = share <= ALONE
        residual, share = np.where(alone, 0.0, residual), np.where(alone, 0.0, share)
        root = np.sqrt(s**2 + penalty)
        rows = U * (s / root) * (np.where(residual < 0, -1.0, 1.0) / half)[:, None]
        size = float(np.abs(values).max(initial=0.0) / half.min(initial=1.0))
        # Rounding of a sum of r products and of the few operations after it, with a factor for safety.
        rounding = 16 * (len(s) + 8) * EPS
        return cls(
            mean, shift, axes, root, np.ascontiguousarray(rows), s / root**2 * along, residual, share, constant, penalty,
            rounding * max(size, EPS * abs(shift)), mass,
        )  # fmt: skip

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.residual)

    def predict(self, X: FloatArray) -> FloatArray:
        """The fit (m,) at objects X (m, d)."""
        return (X - self.mean) @ (self.axes @ self.weight) + self.shift

    def leverage(self) -> FloatArray:
        """h_i (n,)."""
        return 1 - self.free_share

    def pairs(self, X: FloatArray) -> FloatArray:
        """h_xi (m, n) of objects X (m, d) and the points."""
        signs = np.where(self.residual < 0, -1.0, 1.0)
        return (X - self.mean) @ self.axes / self.root @ self.rows.T * signs + self.constant

    def lines(
        self, X: FloatArray, q: float, step: int = 2**62, points: npt.NDArray[np.intp] | slice = slice(None), own: FloatArray | None = None
    ) -> Iterator[Lines]:  # fmt: skip
        """Scores at objects X (m, d), of weights (m,), of all points or some; `step` objects at a time, to stay in the cache."""
        along, scaled, h, free = self._objects(X, own)
        residual = self.residual[points]
        signs = np.where(residual < 0, -1.0, 1.0)
        size, share = np.abs(residual), self.free_share[points]
        centre = along @ self.weight + self.shift
        everything = scaled @ self.rows[points].T
        for start in range(0, len(X), step):
            at = slice(start, start + step)
            pairs = everything[at]
            if self.constant:
                pairs += self.constant * signs
            weights = None if self.mass is None or own is None else (self.mass[points], own[at])
            rounding = self.rounding, self._relative
            yield lines_of(size, signs, share, pairs, h[at], centre[at], q, rounding, free[at], weights)

    @property
    def _relative(self) -> float:
        """Relative rounding of scores."""
        return 16 * (len(self.root) + 8) * EPS

    def _objects(
        self, X: FloatArray, own: FloatArray | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.bool_]]:
        """Of objects X (m, d): coordinates (m, r), these divided by the root, w·h_x (m,), and whether each decides a parameter (m,)."""
        X = X - self.mean
        along = X @ self.axes
        scaled = along / self.root
        h = self.constant + (scaled**2).sum(axis=1)
        free = np.zeros(len(X), dtype=bool)
        if self.axes.shape[1] < self.axes.shape[0]:
            # What no training object has: its weight is penalised only.
            beyond = ((X - along @ self.axes.T) ** 2).sum(axis=1)
            scale = (np.abs(X) + np.abs(self.mean)).sum(axis=1)
            outside = beyond > (len(self.mean) * 8 * EPS * scale) ** 2
            if self.penalty > 0:
                h += np.where(outside, beyond, 0.0) / self.penalty
            else:
                free = outside
        h = h if own is None else h * own
        return along, scaled, h, free | (1 / (1 + h) <= ALONE)

    def ranking(self, q: float) -> Ranking | None:
        """Points by their scores in the bag alone; None where a point decides a parameter by itself, or points have weights."""
        if self.mass is not None or not self.free_share.all():
            return None
        share = _power(self.free_share.copy(), q)
        score = (np.abs(self.residual) + self.rounding) / share
        order = np.argsort(-score)
        h = np.maximum(1 - self.free_share, 0.0)
        return Ranking(order, score[order], float((np.sqrt(h) / share).max()), float((h / self.free_share).max()))

    def near(
        self, X: FloatArray, q: float, ranking: Ranking, first: int, last: int
    ) -> tuple[npt.NDArray[np.intp], int]:
        """Points that may have the `first`- to `last`-widest piece of an object in X (m, d), and how many pieces are surely wider.

        A piece ends at s·g^(q − 1)/((1 + g·h_xi²/(1 − h_i))^q ± g^q·h_xi/(1 − h_i)^q) from the centre, s the score in the bag alone, and
        h_xi² ≤ h_x·h_i: at s times the same number for all points, up to a factor between 1/(1 + more) and 1/(1 − less). So do ranks.
        """
        _, _, h, free = self._objects(X)
        g, n = 1 / (1 + h), len(ranking.order)
        slope = float((g**q * np.sqrt(h)).max()) * ranking.steepest
        less = slope + 4 * self._relative
        more = (1 + float((g * h).max()) * ranking.heaviest) ** q - 1 + less
        if free.any() or less >= 1:
            return np.arange(n), 0
        apart = (1 + more) / (1 - less)
        descending = -ranking.score
        start = int(np.searchsorted(descending, -apart * ranking.score[first - 1], "left"))
        end = int(np.searchsorted(descending, -ranking.score[last - 1] / apart, "right"))
        return ranking.order[start:end], start


@savable
@dataclass(frozen=True)
class KernelRidge:
    """A ridge regression in a kernel, or the mean of a Gaussian process: M = K + αI of a bag, factorised.

    Attributes
    ----------
    factor : array (n, n)
        Cholesky factor L of M, lower.
    dual : array (n,)
        c = M⁻¹y; residuals are α·c.
    diagonal : array (n,)
        Of M⁻¹; α times it is 1 − leverage.
    """

    factor: FloatArray
    dual: FloatArray
    diagonal: FloatArray
    rounding: float

    @classmethod
    def fit(cls, M: FloatArray, y: FloatArray) -> Self:
        """From M (n, n), positive definite and overwritten, and values y (n,)."""
        # The transpose of M is M, in the order of LAPACK: nothing is copied.
        L = cho_factor(M.T, lower=True, overwrite_a=True)[0]
        for k in range(len(L)):
            L[:k, k] = 0.0
        inverse = dtrtri(L, lower=1)[0]
        diagonal = np.einsum("ij,ij->j", inverse, inverse)
        dual = cho_solve((L, True), y)
        # A solution is off by its size times the condition of M, here by the ratio of squares of the factor's diagonal.
        condition = float(np.diag(L).max() / np.diag(L).min()) ** 2
        return cls(L, dual, diagonal, 4 * EPS * condition * float(np.abs(dual).max(initial=0.0)))

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.dual)

    def lines(self, kernel: FloatArray, own: FloatArray, q: float) -> Lines:
        """Scores at objects, by their kernel (m, n) with the training objects and with themselves, α added, (m,)."""
        half = solve_triangular(self.factor, kernel.T, lower=True)
        # The Schur complement of M in the bordered matrix: α(1 + h_x).
        s = own - np.einsum("ij,ij->j", half, half)
        # Lost in rounding: the object lies among the training objects, and nothing tells their values apart.
        free = s <= 64 * len(self.dual) * EPS * own
        s = np.where(free, own, s)
        signs = np.where(self.dual < 0, -1.0, 1.0)
        u = solve_triangular(self.factor, half, lower=True, trans="T").T * signs
        slope = u / s[:, None]
        u *= slope
        u += self.diagonal
        rounding = 16 * (len(self.dual) ** 0.5 + 8) * EPS
        edge = _power(u, q)
        edge *= (s ** (q - 1) * (1 - rounding))[:, None]
        centre = kernel @ self.dual
        return Lines(np.abs(self.dual), signs, slope, edge, centre, 8 * EPS * np.abs(centre), self.rounding, free)


def lines_of(
    size: FloatArray, signs: FloatArray, share: FloatArray, pairs: FloatArray, h: FloatArray, centre: FloatArray, q: float,
    rounding: tuple[float, float], free: npt.NDArray[np.bool_], weights: tuple[FloatArray, FloatArray] | None = None,
) -> Lines:  # fmt: skip
    """Scores from |residuals| and 1 − leverages (n,) of the points; h of objects (m,), and with points (m, n), signed and overwritten.

    `rounding` is the error of residuals, and the relative one of the rest; `weights` are those of the points (n,) and of the objects (m,).
    """
    g = 1 / (1 + h)
    slope = pairs * (g if weights is None else g * weights[1])[:, None]
    pairs *= slope
    if weights is not None:
        pairs *= weights[0]
    pairs += share
    if not share.all():
        pairs[pairs <= ALONE] = 1.0
    edge = _power(pairs, q)
    edge *= (g ** (1 - q) * (1 - rounding[1]))[:, None]
    return Lines(size, signs, slope, edge, centre, 8 * EPS * np.abs(centre), rounding[0], free)


def _power(share: FloatArray, q: float) -> FloatArray:
    """share^q, in place where it can be; the usual powers are not powers."""
    if q == 0:
        return np.ones_like(share)
    return share if q == 1 else np.sqrt(share, out=share) if q == 0.5 else share**q
