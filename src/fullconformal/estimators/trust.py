"""How far a fitted full conformal classifier is to be trusted: diagnoses, audits by refits, and recalibration on fresh points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d

from fullconformal import pvalues
from fullconformal.diagnostics import Diagnostics
from fullconformal.estimators.base import warn_unreachable
from fullconformal.estimators.checks import check_whole
from fullconformal.estimators.inputs import labels as labels_of
from fullconformal.estimators.options import SCHEMES, FullOptions
from fullconformal.methods.audit import Audit, audit_engine
from fullconformal.methods.engines import Engine, Query
from fullconformal.methods.fitting import transform
from fullconformal.methods.refits import TIED
from fullconformal.runtime.progress import progress_bar

FloatArray = npt.NDArray[np.float64]


class FullTrust(FullOptions):
    """What `FullConformalClassifier` can be asked besides p-values and sets, once it is fitted."""

    _engine: Engine
    _labels: npt.NDArray[np.int64]  # indices (n,)
    _transformer: Any
    _input_shape: tuple[int, ...]
    _recalibration: tuple[Any, Any, Any] | None  # what p-values meant, those of fresh points' labels, and these (m,)

    def diagnose(self) -> Diagnostics:
        """What to know before trusting the approximation; prints as a table."""
        check_is_fitted(self)
        return replace(self._engine.diagnostics, caveat=self._caveat)

    def audit(self, X: Any, n_pairs: int = 20, *, max_refits: int = 2000, random_state: Any = 0) -> Audit:
        """Compare with exact refits on random pairs of an object of X and a label.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects to draw from.
        n_pairs : int, default=20
        max_refits : int, default=2000
            Where n refits a pair are more than this allows, that many training points are drawn at random.
        random_state : int, RandomState or None, default=0

        Returns
        -------
        Audit
            Prints as a table.
        """
        check_whole("n_pairs", n_pairs, 1, "a whole number ≥ 1")
        check_whole("max_refits", max_refits, n_pairs, "a whole number of at least n_pairs")
        X = self._prepare_inputs(X)
        if self.scheme == "studentized" or self.class_conditional or self._recalibration is not None:
            raise ValueError(
                "an audit compares with refits: use scheme='deleted' or 'ordinary', class_conditional=False, no recalibration."
            )
        with progress_bar("refits", bool(self.verbose)) as progress:
            return audit_engine(
                self._engine, X, self._query(), n_pairs, max_refits, self.confidence_level,
                check_random_state(random_state), progress,
            )  # fmt: skip

    def recalibrate(self, X: Any, y: Any) -> Self:
        """Make the p-values exactly valid with fresh labelled points that were not given to `fit`.

        The p-value of a fresh point's true label is a split-conformal score: from now on `predict_p` returns
        p′ = (1 + #{p_j ≤ p})/(m + 1), where equal p-values are ordered by the model's loss (an overfitted model gives
        many labels the smallest p-value there is). The order of labels stays as it was.

        Parameters
        ----------
        X : array-like (m, ...)
            A few hundred objects.
        y : array-like (m,)
            Their labels.
        """
        check_is_fitted(self)
        index = check_fresh(X, y, self.classes_)
        self._recalibration = None
        p = self._refined(self._prepare_inputs(X), self.predict_p(X))
        self._recalibration = (self._meaning(), p[np.arange(len(p)), index], index)
        return self

    def _refined(self, X: Any, p: FloatArray) -> FloatArray:
        """p-values (m, C) plus less than their spacing, which orders equal ones by the model's loss."""
        out: FloatArray = p + 0.999 / (len(self._labels) + 1) / (1 - self._engine.log_proba(X))
        return out

    def _meaning(self) -> tuple[Any, ...]:
        """What the meaning of a recalibrated p-value rests on."""
        return self.scheme, self.approximation, self.class_conditional

    def _recalibrated(self, X: Any, p: FloatArray, weights: Any, uniform: FloatArray | None) -> FloatArray:
        """p′ (m, C) of checked objects X from their p-values."""
        assert self._recalibration is not None
        meaning, fresh, labels = self._recalibration
        if meaning != self._meaning() or weights is not None:
            raise ValueError(
                "p-values were recalibrated with other options; call recalibrate again (weights: not at all)."
            )
        weight = pvalues.comparison_weight(labels, p.shape[1], class_conditional=self.class_conditional)
        total = pvalues.comparison_total(labels, p.shape[1], class_conditional=self.class_conditional)
        compared = None if weight is None else weight[:, None, :]
        # A relative error e of the loss ℓ moves 1/(1 + ℓ), and with it what refines p, by no more than e/4.
        tie = TIED * self._engine.precision(X) / (len(self._labels) + 1) / 4 + 4 * np.finfo(np.float64).eps
        # Small p-values are the nonconforming ones, so the score is −p.
        greater, equal = pvalues.count(-fresh[:, None, None], -self._refined(X, p), tie, compared)
        return pvalues.p_values(greater, equal, total, uniform=uniform)

    def _check_reachable(self, levels: npt.NDArray[np.float64], stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more training (after `recalibrate`: fresh) points than there are."""
        labels, kind = self._labels, "training"
        if self._recalibration is not None:
            labels, kind = self._recalibration[2], "fresh"
        sizes = pvalues.comparison_total(labels, len(self.classes_), class_conditional=self.class_conditional)
        warn_unreachable(sizes, self.classes_, levels, kind, stacklevel)

    def _in_words(self) -> list[str]:
        if self._engine.valid:
            kept = "The sets of this method are exactly valid: their guarantee rests on no approximation."
            return [f"! {_sentence(self._caveat)}" if self._caveat else kept]
        told = self.diagnose()
        facts = f"The p-values are approximate: influence functions on {told.n_points:,} points and {told.n_parameters:,} parameters."
        return [
            *(f"! {_sentence(text)}" for text in told.warnings),
            facts if told.warnings else f"{facts} Nothing to warn of.",
        ]

    def _prepare_inputs(self, X: Any) -> Any:
        if not hasattr(self, "_engine"):  # which is sooner asked than scikit-learn's tags
            check_is_fitted(self)
        X = self._checked(X, reset=False)
        X = X if self._transformer is None else transform(self._transformer, X)
        if tuple(X.shape[1:]) != self._input_shape:
            raise ValueError(f"X has objects of shape {tuple(X.shape[1:])}, but those of fit had {self._input_shape}.")
        return X

    def _query(self, **asked: Any) -> Query:
        return Query(SCHEMES[self.scheme], self.approximation, self.prune, work=self._work(), **asked)


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


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
