"""The p-value of every number as a candidate, a step function of it; and intervals, unions of intervals and distributions from it.

A training point is at least as strange as the candidate (x, y) for y in some closed intervals: its pieces. The p-value of y is the weight
of the pieces that hold y, and of the candidate itself, as a share of all. Pieces are (lower, upper) with −inf and inf for rays; one that
holds no number has both at inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import sets

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """The step functions p(y) of m objects, by K pieces each.

    Attributes
    ----------
    lower, upper : array (m, K)
        Closed intervals of y on which a training point is at least as strange as the candidate.
    total : array (m,)
        Weight of all training points that the candidate is compared with.
    weight : array (K,), optional
        Weight of the point that each piece belongs to; all one where not given.
    own : array (m,), optional
        Weight of the candidate; one where not given.
    wider : int, default=0
        Pieces that are not listed because they hold all that others hold: `interval` counts them, and is then all that may be asked.

    Examples
    --------
    >>> steps = Steps(np.array([[1.0, 2.0, 0.0]]), np.array([[4.0, 3.0, 9.0]]), np.array([3.0]))
    >>> steps.p([[2.5, 3.5, 20.0]])
    array([[1.  , 0.75, 0.25]])
    >>> steps.interval(0.4)
    array([[1., 4.]])
    """

    lower: FloatArray
    upper: FloatArray
    total: FloatArray
    weight: FloatArray | None = None
    own: FloatArray | None = None
    wider: int = 0

    def __len__(self) -> int:
        return len(self.lower)

    def apart(self) -> Iterator[Steps]:
        """Those of each object by themselves."""
        for row in range(len(self)):
            at = slice(row, row + 1)
            own = None if self.own is None else self.own[at]
            yield replace(self, lower=self.lower[at], upper=self.upper[at], total=self.total[at], own=own)

    def p(self, y: npt.ArrayLike) -> FloatArray:
        """p-values of numbers y (m, k), k for each object."""
        y = np.asarray(y, dtype=np.float64)
        return np.stack([self._line(row).p(y[row]) for row in range(len(self))])

    def interval(self, confidence_level: float | Sequence[float] | npt.NDArray[Any]) -> FloatArray:
        """The smallest intervals (m, 2), or (m, 2, L) for L levels, that hold all y with p(y) > 1 − confidence_level; NaN for none."""
        levels = sets.check_levels(confidence_level)
        out = np.empty((len(self), 2, levels.size))
        nested = self._nested() if self.weight is None and self.own is None else np.zeros(len(self), dtype=bool)
        out[nested] = self._by_rank(nested, 1 - levels.ravel())
        for row in np.flatnonzero(~nested).tolist():
            line = self._line(row)
            for k, level in enumerate(levels.ravel()):
                union = line.union(float(level))
                out[row, :, k] = (union[0, 0], union[-1, 1]) if len(union) else np.nan
        return out if levels.ndim else out[:, :, 0]

    def unions(self, confidence_level: float) -> list[FloatArray]:
        """Of each object the closed intervals (k, 2), ascending and apart, of all y with p(y) > 1 − confidence_level."""
        return [self._line(row).union(confidence_level) for row in range(len(self))]

    def jumps(self, row: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of one object where p(y) jumps (J,), ascending, its values there (J,), and on the open intervals between (J + 1,)."""
        line = self._line(row)
        ends = np.concatenate([line.lower, line.upper])
        at = np.unique(ends[np.isfinite(ends)])
        # Past a jump are the pieces that began at it or earlier and have not ended.
        after = line.share(line.begun(at, "right") - line.ended(at, "right"))
        everywhere = line.share(line.begun(np.array([-np.inf]), "right"))
        return at, line.p(at), np.concatenate([everywhere, after])

    def _nested(self) -> npt.NDArray[np.bool_]:
        """Whether (m,) all pieces that hold a number hold a common one: sets then are intervals between two order statistics."""
        innermost = np.where(self.lower < np.inf, self.lower, -np.inf).max(axis=1, initial=-np.inf)
        return np.asarray(innermost <= self.upper.min(axis=1, initial=np.inf))

    def _by_rank(self, rows: npt.NDArray[np.bool_], epsilons: FloatArray) -> FloatArray:
        """Intervals (r, 2, L) of the objects among `rows`, whose pieces are nested and weigh one each: ends by their rank."""
        out = np.full((int(rows.sum()), 2, len(epsilons)), np.nan)
        lower, upper, total = self.lower[rows], self.upper[rows], self.total[rows]
        # Pieces that hold no number are put last, on both sides.
        upper[lower == np.inf] = -np.inf
        held = (lower < np.inf).sum(axis=1)
        lower.sort(axis=1)
        upper.sort(axis=1)
        for k, epsilon in enumerate(epsilons.tolist()):
            count = needed(total, epsilon)
            # No piece is needed where a candidate alone is enough, and none is enough where there are too few.
            out[count == 0, :, k] = -np.inf, np.inf
            listed = count - self.wider
            of = np.flatnonzero((listed > 0) & (listed <= held))
            out[of, 0, k], out[of, 1, k] = lower[of, listed[of] - 1], upper[of, -listed[of]]
        return out

    def _line(self, row: int) -> _Line:
        own = 1.0 if self.own is None else float(self.own[row])
        return _Line.of(self.lower[row], self.upper[row], float(self.total[row]), self.weight, own)


def needed(total: FloatArray, epsilon: float) -> npt.NDArray[np.int64]:
    """How many (r,) of `total` points must hold a number for its p-value (1 + count)/(1 + total) to exceed ε."""
    guess = np.floor(epsilon * (total + 1)).astype(np.int64) - 1
    out = guess.copy()
    # By the rule for sets itself, as ε(n + 1) is often a whole number up to rounding.
    for step in (0, 1, 2):
        short = ~sets.members((1.0 + guess + step) / (1.0 + total), epsilon)
        out = np.where(short, guess + step + 1, out)
    return np.maximum(out, 0)


@dataclass(frozen=True)
class _Line:
    """The step function of one object: ends of pieces in ascending order, and the weight of the first 0, 1, … of them."""

    lower: FloatArray
    upper: FloatArray
    below: FloatArray
    above: FloatArray
    total: float
    own: float

    @classmethod
    def of(cls, lower: FloatArray, upper: FloatArray, total: float, weight: FloatArray | None, own: float) -> _Line:
        there = lower < np.inf
        lower, upper = lower[there], upper[there]
        if weight is None:
            counts = np.arange(len(lower) + 1, dtype=np.float64)
            return cls(np.sort(lower), np.sort(upper), counts, counts, total, own)
        low, high = np.argsort(lower), np.argsort(upper)
        below, above = (np.concatenate([[0.0], np.cumsum(weight[there][order])]) for order in (low, high))
        return cls(lower[low], upper[high], below, above, total, own)

    def begun(self, y: FloatArray, side: Any) -> FloatArray:
        """Weight of the pieces with a lower end below y; with "right", at y too."""
        return self.below[np.searchsorted(self.lower, y, side)]

    def ended(self, y: FloatArray, side: Any) -> FloatArray:
        """Weight of the pieces with an upper end below y; with "right", at y too."""
        return self.above[np.searchsorted(self.upper, y, side)]

    def share(self, held: FloatArray) -> FloatArray:
        """p-values from the weight of the pieces that hold a number; compared with nothing, a candidate is as good as any."""
        whole = self.total + self.own
        # Sums of weights in two orders may differ by rounding.
        return np.clip((self.own + held) / whole, 0.0, 1.0) if whole > 0 else np.ones_like(held)

    def p(self, y: FloatArray) -> FloatArray:
        """p-values of numbers y."""
        return self.share(self.begun(y, "right") - self.ended(y, "left"))

    def union(self, confidence_level: float) -> FloatArray:
        """Closed intervals (k, 2) of the y with p(y) > 1 − confidence_level."""
        epsilon = 1 - confidence_level
        if sets.members(self.share(np.zeros(1)), epsilon)[0]:
            return np.array([[-np.inf, np.inf]])
        # An interval begins where a piece does and just before it p is too small, and ends likewise.
        starts, ends = np.unique(self.lower), np.unique(self.upper)
        before = self.share(self.begun(starts, "left") - self.ended(starts, "left"))
        after = self.share(self.begun(ends, "right") - self.ended(ends, "right"))
        after[ends == np.inf] = 0.0
        first = sets.members(self.p(starts), epsilon) & ~sets.members(before, epsilon)
        last = sets.members(self.share(self.begun(ends, "right") - self.ended(ends, "left")), epsilon)
        last &= ~sets.members(after, epsilon)
        return np.stack([starts[first], ends[last]], axis=1)


def crossings(
    size: FloatArray, slope: FloatArray, edge: FloatArray, centre: FloatArray, slack: FloatArray, tie: float = 0.0
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.intp]]:
    """Pieces on which |size − slope·t| + tie ≥ edge·|t|, for y = centre + t; and the point (K,) that each belongs to.

    A point's residual is size − slope·t, up to its sign, and the candidate's is edge·t in the same units. Where the slope is less steep
    than the edge, the piece is an interval about the centre; where it is steeper, there are two rays; where they are equal, one.

    Parameters
    ----------
    size : array (n,) or (m, n), not negative
    slope, edge : array (m, n)
        edge is not negative.
    centre, slack : array (m,)
        Ends lie outwards by the slack.
    tie : float, default=0
        How far apart two residuals are still tied.
    """
    right, left = edge + slope, edge - slope
    above, below = (centre + slack)[:, None], (centre - slack)[:, None]
    points = np.arange(slope.shape[1])
    if right.min(initial=np.inf) > 0 and left.min(initial=np.inf) > 0:
        size = size + tie
        np.divide(size, right, out=right)
        np.divide(size, left, out=left)
        return np.subtract(below, left, out=left), np.add(above, right, out=right), points
    size = np.broadcast_to(size, slope.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        upper = np.where(right > 0, (size + tie) / right, np.inf)
        lower = np.where(left > 0, -(size + tie) / left, -np.inf)
        # Beyond the piece about the centre, the steeper residual is the larger one again.
        again_from = np.where(left < 0, (tie - size) / left, np.where(right < 0, -np.inf, np.inf))
        again_to = np.where(right < 0, (size - tie) / right, np.inf)
    one = (again_from <= upper) & (again_to >= lower) & (again_from < np.inf)
    lower[one], upper[one], again_from[one], again_to[one] = -np.inf, np.inf, np.inf, np.inf
    second = np.flatnonzero((again_from < np.inf).any(axis=0))
    lower = np.concatenate([lower, again_from[:, second]], axis=1)
    upper = np.concatenate([upper, again_to[:, second]], axis=1)
    return below + lower, above + upper, np.concatenate([points, second])


@dataclass(frozen=True)
class Distribution:
    """Predictive distributions of m objects: the numbers (m, n) at which each training point passes from above the candidate to below.

    Examples
    --------
    >>> one = Distribution.of(np.array([[3.0, 1.0, 2.0]]))
    >>> one.cdf([[0.0, 2.5]])
    array([[0.125, 0.625]])
    >>> one.quantile([0.25, 0.5, 0.9])
    array([[ 1.,  2., inf]])
    """

    thresholds: FloatArray

    @classmethod
    def of(cls, thresholds: FloatArray) -> Distribution:
        """From thresholds (m, n) in any order."""
        return cls(np.sort(thresholds, axis=1))

    def __len__(self) -> int:
        return len(self.thresholds)

    def apart(self) -> Iterator[Distribution]:
        """Those of each object by themselves."""
        return (Distribution(row[None]) for row in self.thresholds)

    def cdf(self, y: npt.ArrayLike, tau: float = 0.5) -> FloatArray:
        """Q (m, k) at numbers y (m, k): the share of thresholds below, with τ of those at y and of the candidate's own place."""
        n = self.thresholds.shape[1]
        sides = [
            np.stack([np.searchsorted(*pair, side) for pair in zip(self.thresholds, np.asarray(y), strict=True)])
            for side in ("left", "right")
        ]
        return np.asarray((sides[0] + tau * (sides[1] - sides[0] + 1)) / (n + 1))

    def quantile(self, q: npt.ArrayLike) -> FloatArray:
        """The smallest threshold (m, k) that the value lies below with probability q (k,) or more; infinite where there are too few."""
        m, n = self.thresholds.shape
        # q(n + 1) is often a whole number up to rounding.
        rank = np.ceil(np.asarray(q, dtype=np.float64) * (n + 1) - sets.ROUNDING * (n + 1)).astype(np.int64)
        padded = np.concatenate([np.full((m, 1), -np.inf), self.thresholds, np.full((m, 1), np.inf)], axis=1)
        return np.asarray(padded[:, np.clip(rank, 0, n + 1)])
