"""Lasso and elastic net: the fit to a bag and one more point (x, y) as a function of y, piecewise linear, followed from knot to knot.

The bag Z and one more point have N = n + 1 points, and the objective of scikit-learn's, times N, is

    ½Σr² + λ₁|w|₁ + (λ₂/2)|w|²,        λ₁ = Nαρ, λ₂ = Nα(1 − ρ)

With an intercept, objects and values are taken less their means over Z, and what the point adds to the mean is a multiple of its residual.
Fitted to Z with these penalties, w is also the fit to Z and (x, f(x)): the way to other y begins there, in both directions, with nothing to
solve. On it w = u + v·t for the active columns A, t = y less the mean of Z, until a weight becomes zero or a column as correlated with the
residuals as those in A (Lei, "Fast exact conformalization of lasso using piecewise linear homotopy", Biometrika 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from fullconformal.storage import savable

FloatArray = npt.NDArray[np.float64]

# Relative to its largest value a number below this is rounding.
NOTHING = 1e-10
REMEDY = "remove columns that are sums of others, or raise alpha."


@dataclass(frozen=True)
class Segment:
    """A range of t on which residuals are lines: first + slope·t of the training points (n,) and of the candidate, and 1 − leverages."""

    start: float
    end: float
    first: FloatArray
    slope: FloatArray
    own_first: float
    own_slope: float
    share: FloatArray
    own_share: float


Stop = Callable[[Segment, float], bool]


@savable
@dataclass(frozen=True)
class Lasso:
    """The fit to a bag: objects (n, d) and values (n,) less their means, and the weights (d,)."""

    X: FloatArray
    y: FloatArray
    mean: FloatArray
    shift: float
    intercept: bool
    l1: float
    l2: float
    weight: FloatArray

    @classmethod
    def fit(cls, X: FloatArray, y: FloatArray, l1: float, l2: float, intercept: bool, start: FloatArray) -> Self:
        """From weights `start` (d,) that are nearly right: their active columns are corrected until the equations of these hold."""
        mean = X.mean(axis=0) if intercept else np.zeros(X.shape[1])
        shift = float(y.mean()) if intercept else 0.0
        X, y = X - mean, y - shift
        G, c = X.T @ X, X.T @ y
        G[np.diag_indices_from(G)] += l2
        active, signs = np.flatnonzero(start := independent(G, start)), np.sign(start[start != 0])
        for _ in range(4 * len(c) + 16):
            weight = np.zeros(len(c))
            if len(active):
                weight[active] = cho_solve(_factor(G, active), c[active] - l1 * signs, check_finite=False)
            rho = c - G @ weight
            wrong = weight[active] * signs < 0
            if wrong.any():
                at = int(np.argmin(weight[active] * signs))
                active, signs = np.delete(active, at), np.delete(signs, at)
                continue
            rest = np.abs(rho)
            rest[active] = 0.0
            most = int(rest.argmax())
            if rest[most] <= l1 * (1 + NOTHING):
                return cls(X, y, mean, shift, intercept, l1, l2, weight)
            active, signs = np.append(active, most), np.append(signs, np.sign(rho[most]))
        raise ValueError(f"the lasso of the training points did not settle on its columns; {REMEDY}")

    def predict(self, X: FloatArray) -> FloatArray:
        """The fit (m,) at objects X (m, d)."""
        return (X - self.mean) @ self.weight + self.shift

    @cached_property
    def gram(self) -> FloatArray:
        """Products (d, d) of the columns, without penalty."""
        return self.X.T @ self.X

    @cached_property
    def _all_columns(self) -> tuple[FloatArray, FloatArray] | None:
        """Were all columns active: the factor (d, d) of their products, and 1 − leverages (n,); None where they are too many."""
        n, d = self.X.shape
        try:
            factor = _factor(self.gram + self.l2 * np.eye(d), np.arange(d))[0]
        except np.linalg.LinAlgError:
            return None
        rows = solve_triangular(factor, self.X.T, lower=True)
        return factor, 1 - self.intercept / n - np.einsum("ij,ij->j", rows, rows)

    def bounds(self, x: FloatArray) -> tuple[FloatArray, float] | None:
        """Least 1 − leverage of the points (n,), and of an object x (d,), over all columns that may be active; None where there is none."""
        if self._all_columns is None:
            return None
        factor, share = self._all_columns
        half = solve_triangular(factor, x - self.mean, lower=True)
        # More columns raise leverages, and one more point lowers those of the others.
        return share, 1 / (1 + float(half @ half) + self.intercept / len(self.y))

    def segments(self, x: FloatArray, stop: Stop | None = None) -> Iterator[Segment]:
        """All of the line, for an object x (d,), in ranges that do not overlap; in both directions as far as the first t to stop at."""
        walk = _Walk.of(self, x - self.mean)
        for way in (-1, 1):
            for segment in walk.towards(way):
                yield segment
                t = segment.start if way < 0 else segment.end
                if stop is not None and np.isfinite(t) and stop(segment, t):
                    break


@dataclass(frozen=True)
class _Walk:
    """What one object's way needs: the Gram matrix with it, correlations first + slope·t, and where it begins."""

    bag: Lasso
    x: FloatArray
    G: FloatArray
    largest: FloatArray
    first: FloatArray
    slope: FloatArray
    begin: float

    @classmethod
    def of(cls, bag: Lasso, x: FloatArray) -> _Walk:
        n = len(bag.y)
        part = n / (n + 1) if bag.intercept else 1.0
        G = bag.gram + part * np.outer(x, x)
        G[np.diag_indices_from(G)] += bag.l2
        return cls(bag, x, G, np.abs(G).max(axis=1), bag.X.T @ bag.y, part * x, float(x @ bag.weight))

    def towards(self, way: int) -> Iterator[Segment]:
        """Segments from the beginning to −inf (way −1) or inf (way 1)."""
        bag, t, l1 = self.bag, self.begin, self.bag.l1
        active, signs = np.flatnonzero(bag.weight), np.sign(bag.weight[bag.weight != 0])
        changed, d = -1, len(self.x)
        for _ in range(50 * d + 1000):
            factor = _factor(self.G, active) if len(active) else None
            u, v = np.zeros((2, d))
            if factor is not None:
                u[active] = cho_solve(factor, self.first[active] - l1 * signs, check_finite=False)
                v[active] = cho_solve(factor, self.slope[active], check_finite=False)
            p, q = self.first - self.G @ u, self.slope - self.G @ v
            at, column, sign = self._next(t, way, active, signs, u, v, p, q, changed)
            yield self._segment((min(t, at), max(t, at)), active, u, v, self._share(active, factor))
            if not np.isfinite(at):
                return
            t, changed = at, column
            if sign == 0:
                place = int(np.flatnonzero(active == column)[0])
                active, signs = np.delete(active, place), np.delete(signs, place)
            else:
                active, signs = np.append(active, column), np.append(signs, sign)
        raise ValueError(f"the lasso of an object has too many knots; {REMEDY}")

    def _next(
        self, t: float, way: int, active: npt.NDArray[np.intp], signs: FloatArray, u: FloatArray, v: FloatArray,
        p: FloatArray, q: FloatArray, changed: int,
    ) -> tuple[float, int, float]:  # fmt: skip
        """Where the next column leaves (sign 0) or joins, which, and with which sign; infinite where none does."""
        best, column, sign = way * np.inf, -1, 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            # A weight whose column adds next to nothing to the slope of the fit does not move but for rounding.
            reach = np.abs(v[active]) * np.sqrt(np.diag(self.G)[active])
            moves = (v[active] * signs * way < 0) & (reach > NOTHING * reach.max(initial=0.0))
            zero = np.where(moves, -u[active] / v[active], best)
            # Correlations of the columns outside move towards one of ±λ₁.
            to = np.sign(q * way)
            steep = np.abs(q) > NOTHING * (np.abs(self.slope) + self.largest * np.abs(v).max(initial=0.0))
            meets = np.where(steep, (to * self.bag.l1 - p) / q, best)
        meets[active] = best
        # A column that has just left moves away from its end, or it would be back at once.
        if (
            changed >= 0
            and changed not in active
            and abs(p[changed] + q[changed] * t - to[changed] * self.bag.l1) < self.bag.l1 * 1e-6
        ):
            meets[changed] = best
        if len(active):
            # The column that has just joined is at zero.
            zero[(active == changed) & (np.abs(u[active] + v[active] * t) < NOTHING)] = best
            k = int((way * zero).argmin())
            if np.isfinite(zero[k]):
                best, column, sign = float(zero[k]), int(active[k]), 0.0
        k = int((way * meets).argmin())
        if np.isfinite(meets[k]) and way * meets[k] < way * best:
            best, column, sign = float(meets[k]), k, float(to[k])
        return (max(best, t) if way > 0 else min(best, t)), column, sign

    def _share(self, active: npt.NDArray[np.intp], factor: tuple[FloatArray, bool] | None) -> FloatArray:
        """1 − leverages (n + 1,), the candidate's last, by the factor of the active columns' products."""
        n, x = len(self.bag.y), self.x[active]
        share = np.full(n + 1, 1 - self.bag.intercept / (n + 1))
        if factor is not None:
            # Columns of all points and the candidate, less their mean where there is an intercept.
            columns = np.vstack([self.bag.X[:, active], x]) - self.bag.intercept * x / (n + 1)
            rows = solve_triangular(factor[0], columns.T, lower=True, check_finite=False)
            share -= np.einsum("ij,ij->j", rows, rows)
        return share

    def _segment(
        self, ends: tuple[float, float], active: npt.NDArray[np.intp], u: FloatArray, v: FloatArray, share: FloatArray
    ) -> Segment:
        """Residuals and leverages while these columns are active."""
        bag, n, X = self.bag, len(self.bag.y), self.bag.X[:, active]
        first, slope = bag.y - X @ u[active], -X @ v[active]
        own_first, own_slope = -float(self.x @ u), 1 - float(self.x @ v)
        # With as many columns as points residuals do not move, and what is left of their slopes is rounding.
        slope[np.abs(slope) < NOTHING] = 0.0
        own_slope = own_slope if abs(own_slope) >= NOTHING else 0.0
        if bag.intercept:
            # The intercept takes the mean of all residuals, to which the training points add nothing.
            first, slope = first - own_first / (n + 1), slope - own_slope / (n + 1)
            own_first, own_slope = own_first * n / (n + 1), own_slope * n / (n + 1)
        return Segment(*ends, first, slope, own_first, own_slope, share[:-1], float(share[-1]))


def independent(G: FloatArray, weight: FloatArray) -> FloatArray:
    """Weights (d,) of the same fit and the same |w|₁, but of columns none of which is a sum of others; G (d, d) has their products.

    Of columns that add up to nothing, as those of a one-hot encoding do less their means, the lasso has many solutions: Xz = 0 for some z,
    and the optimum asks that Xᵀr = λ₁sign(w), so that sign(w)·z = 0, too. Weights move along z until the first of them is zero.
    """
    weight = weight.copy()
    while len(active := np.flatnonzero(weight)):
        scale = np.sqrt(np.diag(G)[active])
        values, vectors = np.linalg.eigh(G[np.ix_(active, active)] / np.outer(scale, scale))
        if values[0] > NOTHING:
            break
        z = vectors[:, 0] / scale
        first = int(np.abs(z / weight[active]).argmax())
        weight[active] -= z * (weight[active[first]] / z[first])
        weight[active[first]] = 0.0
    return weight


def _factor(G: FloatArray, active: npt.NDArray[np.intp]) -> tuple[FloatArray, bool]:
    """Cholesky factor of the rows and columns of G (d, d) that are active."""
    L, lower = cho_factor(G[np.ix_(active, active)], lower=True, check_finite=False)
    return np.tril(L), bool(lower)
