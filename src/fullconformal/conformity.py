"""Scores of every label from a classifier's probabilities π (m, C): how badly a label fits what the model says.

    loss      −log π_y
    lac       1 − π_y                                    least ambiguous sets (Sadinle, Lei and Wasserman 2019)
    margin    max_{k≠y} π_k − π_y
    aps       Σ_{k : o(k) ≤ o(y)} π_k − u·π_y            adaptive sets (Romano, Sesia and Candès 2020)
    raps      aps + λ·max(0, o(y) − k_reg)               regularised (Angelopoulos, Bates, Malik and Jordan 2021)

o(k) is the rank of label k, 1 for the likeliest; equal probabilities are ranked by the order of the labels. u is uniform on [0, 1], one an
object, or 0 where sets are not randomised; the paper of RAPS writes 1 − u for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

SCORES = ("loss", "lac", "margin", "aps", "raps")
LAMBDAS = (0.001, 0.01, 0.1, 0.2, 0.5)  # the published choice for RAPS


def score_labels(
    log_proba: FloatArray,
    score: str,
    uniform: FloatArray | None = None,
    *,
    k_reg: int = 0,
    lambda_reg: float = 0.0,
    never_empty: bool = False,
) -> FloatArray:
    """Scores (m, C) of all labels from log-probabilities (m, C); uniforms (m,) for "aps" and "raps", None for no randomisation.

    Logarithms, because the loss needs the digits that probabilities near one have lost.

    Examples
    --------
    >>> score_labels(np.log([[0.5, 0.3, 0.2]]), "aps").round(12)
    array([[0.5, 0.8, 1. ]])
    >>> score_labels(np.log([[0.5, 0.3, 0.2]]), "raps", np.array([0.5]), k_reg=1, lambda_reg=0.1).round(12)
    array([[0.25, 0.75, 1.1 ]])
    """
    if score == "loss":
        return -log_proba
    proba = np.exp(log_proba)
    if score == "lac":
        return 1.0 - proba
    if score == "margin":
        return margin(proba)
    if score == "aps":
        return aps(proba, uniform, never_empty=never_empty)
    return raps(proba, k_reg, lambda_reg, uniform, never_empty=never_empty)


def rounding(
    scores: FloatArray, score: str, log_proba: FloatArray, eps: float, *, k_reg: int = 0, lambda_reg: float = 0.0
) -> FloatArray:
    """How far scores (..., C) may be from those of the same objects in another batch, by a model of precision eps.

    A batch of another size is multiplied in another order: logits differ by δ, 32 units of their range, −log π_y hence by up to
    2δ(1 − π_y), π_y by 2δπ_y(1 − π_y), and what is had from probabilities by sums and differences by 4δ(1 − |s|). What RAPS adds is exact.
    """
    delta = 32 * eps * (1 + np.minimum(np.ptp(log_proba, axis=-1, keepdims=True), 1e3))
    if score == "loss":
        share = -np.expm1(-scores)
    elif score == "lac":
        share = scores * (1 - scores)
    else:
        added: FloatArray | float = 0.0
        if score == "raps":
            rows = np.exp(log_proba).reshape(-1, scores.shape[-1])
            added = penalties(rows, k_reg, lambda_reg).reshape(scores.shape)
        share = 2 * np.maximum(1 - np.abs(scores - added), 0)
    own = 4 * np.finfo(np.float64).eps * np.clip(np.abs(scores), 1, 1e12)
    out: FloatArray = 2 * delta * share + own
    return out


def margin(proba: FloatArray) -> FloatArray:
    """The largest probability among the other labels less the label's own (m, C)."""
    two = np.partition(proba, -2, axis=1)[:, -2:]
    first = proba.argmax(axis=1)[:, None] == np.arange(proba.shape[1])
    other: FloatArray = np.where(first, two[:, :1], two[:, 1:])
    return other - proba


def ranks(proba: FloatArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Labels in the order of falling probability, and the rank of every label, from 0, (m, C) each."""
    order = np.argsort(-proba, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(proba.shape[1])[None], axis=1)
    return order, rank


def aps(proba: FloatArray, uniform: FloatArray | None = None, *, never_empty: bool = False) -> FloatArray:
    """Probability of all labels up to and with each label, less u of its own (m, C); u = 0 for the first where never empty."""
    order, rank = ranks(proba)
    total = np.cumsum(np.take_along_axis(proba, order, axis=1), axis=1)
    # The last is then one for every object, not one up to rounding: scores of last labels tie as they should.
    total /= total[:, -1:]
    out: FloatArray = np.take_along_axis(total, rank, axis=1)
    if uniform is None:
        return out
    taken = uniform[:, None] * proba
    return out - (np.where(rank == 0, 0.0, taken) if never_empty else taken)


def raps(
    proba: FloatArray, k_reg: int, lambda_reg: float, uniform: FloatArray | None = None, *, never_empty: bool = False
) -> FloatArray:
    """The same plus λ for each rank beyond k_reg (m, C)."""
    return aps(proba, uniform, never_empty=never_empty) + penalties(proba, k_reg, lambda_reg)


def penalties(proba: FloatArray, k_reg: int, lambda_reg: float) -> FloatArray:
    """What RAPS adds (m, C)."""
    out: FloatArray = lambda_reg * np.maximum(ranks(proba)[1] + 1 - k_reg, 0)
    return out


def threshold(scores: FloatArray, epsilon: float) -> float:
    """The ⌈(1 − ε)(n + 1)⌉-th smallest of the scores (n,), infinite where there is none: sets are {y : s(x, y) ≤ it}."""
    k = int(np.ceil((1 - epsilon) * (len(scores) + 1) - 1e-9))
    return float(np.sort(scores)[k - 1]) if k <= len(scores) else np.inf


def tune_raps(
    proba: FloatArray,
    y: npt.NDArray[np.int64],
    epsilon: float,
    uniform: FloatArray | None = None,
    *,
    k_reg: int | None = None,
    lambda_reg: float | None = None,
    never_empty: bool = False,
) -> tuple[int, float]:
    """k_reg and λ from points (m, C) with labels y (m,) that serve nothing else, as published; what is given stays.

    k_reg is the rank that a share 1 − ε of the true labels does not exceed, λ the one of `LAMBDAS` with the smallest sets.
    """
    at = np.arange(len(y))
    if k_reg is None:
        rank = ranks(proba)[1][at, y].astype(np.float64) + 1
        k_reg = int(min(threshold(rank, epsilon), proba.shape[1]))
    if lambda_reg is None:
        sizes = []
        for value in LAMBDAS:
            scores = raps(proba, k_reg, value, uniform, never_empty=never_empty)
            sizes.append((scores <= threshold(scores[at, y], epsilon)).sum())
        lambda_reg = LAMBDAS[int(np.argmin(sizes))]
    return k_reg, lambda_reg
