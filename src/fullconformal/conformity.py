"""Conformity scores: how badly each label fits what a classifier's probabilities π (m, C) say, and a number what regressors say.

    loss      −log π_y
    lac       1 − π_y                                    least ambiguous sets (Sadinle, Lei and Wasserman 2019)
    margin    max_{k≠y} π_k − π_y
    aps       Σ_{k : o(k) ≤ o(y)} π_k − u·π_y            adaptive sets (Romano, Sesia and Candès 2020)
    raps      aps + λ·max(0, o(y) − k_reg)               regularised (Angelopoulos, Bates, Malik and Jordan 2021)

o(k) is the rank of label k, 1 for the likeliest; equal probabilities are ranked by the order of the labels. u is uniform on [0, 1], one per
object, or 0 where sets are not randomised; the paper of RAPS writes 1 − u for it.

A band is a lower value l, an upper value u and a scale s, and the score of a number is how far it lies outside, in units of the scale:

    score(x, y) = max(l − y, y − u)/s, negative inside              {y : score ≤ t} = [l − t·s, u + t·s]

    absolute residuals     l = u = f(x), s = 1                      |y − f(x)|
    normalised residuals   l = u = f(x), s = σ(x) + β               |y − f(x)|/(σ(x) + β)      (Papadopoulos et al. 2008)
    quantiles              l, u = q_lo(x), q_hi(x), s = 1           CQR                         (Romano, Patterson and Candès 2019)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fullconformal.storage import savable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# The published choice for RAPS.
LAMBDAS = (0.001, 0.01, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class ConformityScore(ABC):
    """A score of every label from log-probabilities, because probabilities near 1 lose precision."""

    @abstractmethod
    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        """Scores (m, C) of all labels from log-probabilities (m, C); uniforms (m,) where the score is randomised, else None."""

    #: whether it is randomised by uniforms
    takes_uniform = False

    def rounding(self, scores: FloatArray, log_proba: FloatArray, eps: float) -> FloatArray:
        """How far scores (..., C) may be from those of the same objects in another batch, by a model of precision eps.

        A batch of another size is multiplied in another order: logits differ by δ, 32 units of their range, and scores by up to 2δ times
        `sensitivity`.
        """
        delta = 32 * eps * (1 + np.minimum(np.ptp(log_proba, axis=-1, keepdims=True), 1e3))
        own = 4 * np.finfo(np.float64).eps * np.clip(np.abs(scores), 1, 1e12)
        return np.asarray(2 * delta * self.sensitivity(scores, log_proba) + own)

    @abstractmethod
    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """½ Σ_j |∂s/∂f_j| (..., C) for logits f, or a bound on it: how much scores change with the logits."""

    def tuned(self, log_proba: FloatArray, y: IntArray, epsilon: float, uniform: FloatArray | None) -> Self:
        """The score with parameters that were left open chosen on points (m, C), y (m,) that serve nothing else."""
        return self

    @property
    def complete(self) -> bool:
        """Whether no parameter is left open."""
        return True


@savable
class LogLoss(ConformityScore):
    """−log π_y.

    Examples
    --------
    >>> LogLoss().scores(np.log([[0.5, 0.25, 0.25]])).round(3)
    array([[0.693, 1.386, 1.386]])
    """

    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        return -log_proba

    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """1 − π_y."""
        return -np.expm1(-scores)


@savable
class LAC(ConformityScore):
    """1 − π_y."""

    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        return 1.0 - np.exp(log_proba)

    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """π_y(1 − π_y)."""
        return scores * (1 - scores)


@savable
class Margin(ConformityScore):
    """The largest probability among the other labels less the label's own."""

    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        proba = np.exp(log_proba)
        two = np.partition(proba, -2, axis=1)[:, -2:]
        first = proba.argmax(axis=1)[:, None] == np.arange(proba.shape[1])
        other: FloatArray = np.where(first, two[:, :1], two[:, 1:])
        return other - proba

    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """Of sums and differences of probabilities at most 2(1 − |s|)."""
        return np.asarray(2 * np.maximum(1 - np.abs(scores), 0))


@savable
@dataclass(frozen=True)
class APS(ConformityScore):
    """Probability of all labels up to and with each label, less u of its own; u = 0 for the likeliest where sets are never empty.

    Examples
    --------
    >>> APS().scores(np.log([[0.5, 0.3, 0.2]])).round(12)
    array([[0.5, 0.8, 1. ]])
    """

    never_empty: bool = False
    takes_uniform = True

    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        proba = np.exp(log_proba)
        order, rank = ranks(proba)
        total = np.cumsum(np.take_along_axis(proba, order, axis=1), axis=1)
        # The last is then one for every object, not one up to rounding: scores of last labels tie as they should.
        total /= total[:, -1:]
        out: FloatArray = np.take_along_axis(total, rank, axis=1)
        if uniform is None:
            return out
        taken = uniform[:, None] * proba
        return out - (np.where(rank == 0, 0.0, taken) if self.never_empty else taken)

    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """Of sums and differences of probabilities at most 2(1 − |s|)."""
        return np.asarray(2 * np.maximum(1 - np.abs(scores), 0))


@savable
@dataclass(frozen=True)
class RAPS(APS):
    """APS plus λ for each rank beyond k_reg; what is None is tuned.

    Examples
    --------
    >>> RAPS(k_reg=1, lambda_reg=0.1).scores(np.log([[0.5, 0.3, 0.2]]), np.array([0.5])).round(12)
    array([[0.25, 0.75, 1.1 ]])
    """

    k_reg: int | None = None
    lambda_reg: float | None = None

    @property
    def complete(self) -> bool:
        return self.k_reg is not None and self.lambda_reg is not None

    def added(self, log_proba: FloatArray) -> FloatArray:
        """λ·max(0, o(y) − k_reg) (m, C)."""
        return (self.lambda_reg or 0.0) * np.maximum(ranks(np.exp(log_proba))[1] + 1 - (self.k_reg or 0), 0)

    def scores(self, log_proba: FloatArray, uniform: FloatArray | None = None) -> FloatArray:
        return super().scores(log_proba, uniform) + self.added(log_proba)

    def sensitivity(self, scores: FloatArray, log_proba: FloatArray) -> FloatArray:
        """That of APS: what is added is exact."""
        rows = log_proba.reshape(-1, scores.shape[-1])
        return super().sensitivity(scores - self.added(rows).reshape(scores.shape), log_proba)

    def tuned(self, log_proba: FloatArray, y: IntArray, epsilon: float, uniform: FloatArray | None) -> Self:
        """As published: k_reg is the rank that a share 1 − ε of the true labels does not exceed, λ the one with the smallest sets."""
        at, out = np.arange(len(y)), self
        if out.k_reg is None:
            rank = ranks(np.exp(log_proba))[1][at, y].astype(np.float64) + 1
            out = replace(out, k_reg=int(min(threshold(rank, epsilon), log_proba.shape[1])))
        if out.lambda_reg is None:
            sizes = []
            for value in LAMBDAS:
                scores = replace(out, lambda_reg=value).scores(log_proba, uniform)
                sizes.append((scores <= threshold(scores[at, y], epsilon)).sum())
            out = replace(out, lambda_reg=LAMBDAS[int(np.argmin(sizes))])
        return out


#: scores by the name that users give
SCORES: dict[str, type[ConformityScore]] = {
    "loss": LogLoss,
    "lac": LAC,
    "margin": Margin,
    "aps": APS,
    "raps": RAPS,
}


def ranks(proba: FloatArray) -> tuple[IntArray, IntArray]:
    """Labels in the order of falling probability, and the rank of every label, from 0, (m, C) each.

    Probabilities that differ in their last digits only are equal: another batch may round them the other way.
    """
    order = np.argsort(-np.round(proba, 12), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(proba.shape[1])[None], axis=1)
    return order, rank


def threshold(scores: FloatArray, epsilon: float) -> float:
    """The ⌈(1 − ε)(n + 1)⌉-th smallest of the scores (n,), infinite where there is none: sets are {y : s(x, y) ≤ it}."""
    k = int(np.ceil((1 - epsilon) * (len(scores) + 1) - 1e-9))
    return float(np.sort(scores)[k - 1]) if k <= len(scores) else np.inf


# Of numbers -----------------------------------------------------------------------------------------------------------


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
