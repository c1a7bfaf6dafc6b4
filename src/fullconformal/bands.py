"""Bands: what regressors say of objects before calibration, and the scores of numbers by them.

A band is a lower value l, an upper value u and a scale s, and the score of a number is how far it lies outside, in units of the scale:

    score(x, y) = max(l − y, y − u)/s, negative inside              {y : score ≤ t} = [l − t·s, u + t·s]

    absolute residuals     l = u = f(x), s = 1                      |y − f(x)|
    normalised residuals   l = u = f(x), s = σ(x) + β               |y − f(x)|/(σ(x) + β)      (Papadopoulos et al. 2008)
    quantiles              l, u = q_lo(x), q_hi(x), s = 1           CQR                         (Romano, Patterson and Candès 2019)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Bands of m objects by K models: lower and upper values and scales (m, K), and the precision eps they were computed in.

    Examples
    --------
    >>> band = Band(np.array([[1.0]]), np.array([[2.0]]), np.array([[0.5]]))
    >>> band.scores(np.array([4.0]))
    array([[4.]])
    >>> lower, upper = band.pieces(np.array([4.0, -2.0]), np.array([0, 0]))
    >>> lower.round(12), upper.round(12)
    (array([[-1., inf]]), array([[ 4., inf]]))
    """

    lower: FloatArray
    upper: FloatArray
    scale: FloatArray
    eps: float = float(np.finfo(np.float64).eps)

    @property
    def middle(self) -> FloatArray:
        """The middle (m,) of the bands, on average over the models."""
        return np.asarray((self.lower / 2 + self.upper / 2).mean(axis=1))

    def hull(self) -> Band:
        """The smallest band (m, 1) around those of all models; for bands of scale one."""
        lower, upper = self.lower.min(axis=1, keepdims=True), self.upper.max(axis=1, keepdims=True)
        return Band(lower, upper, np.ones_like(lower), self.eps)

    def scores(self, y: FloatArray) -> FloatArray:
        """Scores (m, K) of a number y (m,) for each object."""
        return np.asarray(np.maximum(self.lower - y[:, None], y[:, None] - self.upper) / self.scale)

    def pieces(self, t: FloatArray, model: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """Ends (m, n) of {y : score ≤ t_i} for n thresholds, (n,) or (m, n), each by its model (n,); inf at both ends of an empty set.

        Ends are moved outwards by the rounding of predictions, which differs from batch to batch, and of scores: a number that equals an
        end is inside, so that ties count upwards.
        """
        lower, upper, scale = (part[:, model] for part in (self.lower, self.upper, self.scale))
        reach = t * scale
        slack = 32 * self.eps * (np.maximum(np.abs(lower), np.abs(upper)) + np.abs(reach))
        lower, upper = lower - reach - slack, upper + reach + slack
        empty = lower > upper
        lower[empty] = upper[empty] = np.inf
        return lower, upper
