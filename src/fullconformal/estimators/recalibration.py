"""p-values made exactly valid with fresh labelled points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import _num_samples, column_or_1d

from fullconformal import pvalues
from fullconformal.estimators.inputs import labels as labels_of
from fullconformal.methods.base import Fitted
from fullconformal.methods.refit import TIED
from fullconformal.storage import require, savable

FloatArray = npt.NDArray[np.float64]


@savable
@dataclass(frozen=True)
class Recalibration:
    """p-values (m,) of fresh points' true labels, these labels (m,), and what the p-values meant when they were taken."""

    meaning: tuple  # type: ignore[type-arg]  # scheme, approximation, class_conditional
    fresh: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]

    @classmethod
    def of(cls, fitted: Fitted, X: Any, p: FloatArray, labels: npt.NDArray[np.int64], meaning: tuple[Any, ...]) -> Self:
        """From the p-values (m, C) of fresh objects X with label indices (m,)."""
        return cls(meaning, refined(fitted, X, p)[np.arange(len(p)), labels], labels)

    def p_values(
        self, fitted: Fitted, X: Any, p: FloatArray, meaning: tuple[Any, ...], weights: Any, uniform: FloatArray | None
    ) -> FloatArray:
        """p′ (m, C) of checked objects X from their p-values."""
        if meaning != self.meaning or weights is not None:
            raise ValueError(
                "p-values were recalibrated with other options; call recalibrate again (weights: not at all)."
            )
        conditional = bool(meaning[2])
        weight = pvalues.comparison_weight(self.labels, p.shape[1], class_conditional=conditional)
        total = pvalues.comparison_total(self.labels, p.shape[1], class_conditional=conditional)
        compared = None if weight is None else weight[:, None, :]
        # A relative error e of the loss ℓ moves 1/(1 + ℓ), and with it what refines p, by no more than e/4.
        tie = TIED * fitted.precision(X) / (fitted.n + 1) / 4 + 4 * np.finfo(np.float64).eps
        # Small p-values are the nonconforming ones, so the score is −p.
        greater, equal = pvalues.count(-self.fresh[:, None, None], -refined(fitted, X, p), tie, compared)
        return pvalues.p_values(greater, equal, total, uniform=uniform)

    def verify(self, n_classes: int) -> None:
        """Raise where a loaded one is not whole."""
        inside = bool(np.isfinite(self.fresh).all() and ((self.labels >= 0) & (self.labels < n_classes)).all())
        require(len(self.meaning) == 3 and self.fresh.shape == self.labels.shape and inside, "recalibration")


def refined(fitted: Fitted, X: Any, p: FloatArray) -> FloatArray:
    """p-values (m, C) plus less than their spacing, which orders equal ones by the model's loss."""
    out: FloatArray = p + 0.999 / (fitted.n + 1) / (1 - fitted.log_proba(X))
    return out


def check_fresh(X: Any, y: Any, classes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Label indices (m,) of fresh points, which must be known labels, one for each object."""
    y = column_or_1d(labels_of(y))
    unseen = sorted(set(y.tolist()) - set(classes.tolist()))
    if unseen:
        raise ValueError(f"y holds labels unseen in training: {unseen[:5]}; the classes are {classes.tolist()}.")
    if _num_samples(X) != len(y):
        raise ValueError(f"y must hold one label for each of the {_num_samples(X)} objects in X, got {len(y)}.")
    index: npt.NDArray[np.int64] = np.searchsorted(classes, y)
    return index
