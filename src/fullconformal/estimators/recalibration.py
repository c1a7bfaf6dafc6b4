"""Exactly valid p-values from approximate ones: those of fresh points' true labels are split-conformal scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import _num_samples, column_or_1d

from fullconformal import pvalues
from fullconformal.estimators.inputs import labels
from fullconformal.scores.refits import TIED

FloatArray = npt.NDArray[np.float64]


def check_fresh(X: Any, y: Any, classes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Label indices (m,) of fresh points, which must be known labels, one for each object."""
    y = column_or_1d(labels(y))
    unseen = sorted(set(y.tolist()) - set(classes.tolist()))
    if unseen:
        raise ValueError(f"y holds labels unseen in training: {unseen[:5]}; the classes are {classes.tolist()}.")
    if _num_samples(X) != len(y):
        raise ValueError(f"y must hold one label for each of the {_num_samples(X)} objects in X, got {len(y)}.")
    index: npt.NDArray[np.int64] = np.searchsorted(classes, y)
    return index


def refined(p: FloatArray, log_proba: FloatArray, n: int) -> FloatArray:
    """p-values (m, C) of n points plus less than their spacing, which orders equal ones by the model's loss."""
    out: FloatArray = p + 0.999 / (n + 1) / (1 - log_proba)
    return out


def recalibrated(
    p: FloatArray, fresh: FloatArray, labels: npt.NDArray[np.int64], class_conditional: bool, precision: float,
    uniform: FloatArray | None,
) -> FloatArray:  # fmt: skip
    """p′ (m, C) from refined p-values and those of fresh points' labels; `precision` is the unit of rounding of losses × their spacing."""
    weight = pvalues.comparison_weight(labels, p.shape[1], class_conditional=class_conditional)
    total = len(labels) if weight is None else weight.sum(axis=0)
    # Small p-values are the nonconforming ones, so the score is −p.
    compared = None if weight is None else weight[:, None, :]
    # A relative error e of the loss ℓ moves 1/(1 + ℓ), and with it what refines p, by no more than e/4.
    tie = TIED * precision / 4 + 4 * np.finfo(np.float64).eps
    greater, equal = pvalues.count(-fresh[:, None, None], -p, tie, compared)
    return pvalues.p_values(greater, equal, total, uniform=uniform)
