"""How far a fitted full conformal classifier is to be trusted: diagnoses, audits by refits, and recalibration on fresh points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from fullconformal.diagnostics import Diagnostics
from fullconformal.estimators.audit import Audit, audit_engine
from fullconformal.estimators.base import warn_unreachable
from fullconformal.estimators.checks import check_whole
from fullconformal.estimators.engines import Engine, Query
from fullconformal.estimators.fitting import transform
from fullconformal.estimators.options import SCHEMES, FullOptions
from fullconformal.estimators.recalibration import check_fresh, recalibrated, refined
from fullconformal.report.progress import progress_bar


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

    def _refined(self, X: Any, p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """p-values (m, C) plus less than their spacing, which orders equal ones by the model's loss."""
        return refined(p, self._engine.log_proba(X), len(self._labels))

    def _meaning(self) -> tuple[Any, ...]:
        """What the meaning of a recalibrated p-value rests on."""
        return self.scheme, self.approximation, self.class_conditional

    def _recalibrated(self, X: Any, p: npt.NDArray[np.float64], weights: Any, uniform: Any) -> npt.NDArray[np.float64]:
        """p′ (m, C) of checked objects X from their p-values."""
        assert self._recalibration is not None
        meaning, fresh, labels = self._recalibration
        if meaning != self._meaning() or weights is not None:
            raise ValueError(
                "p-values were recalibrated with other options; call recalibrate again (weights: not at all)."
            )
        precision = self._engine.precision(X) / (len(self._labels) + 1)
        return recalibrated(self._refined(X, p), fresh, labels, self.class_conditional, precision, uniform)

    def _check_reachable(self, levels: npt.NDArray[np.float64], stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more training (after `recalibrate`: fresh) points than there are."""
        labels, kind = self._labels, "training"
        if self._recalibration is not None:
            labels, kind = self._recalibration[2], "fresh"
        sizes = np.bincount(labels, minlength=len(self.classes_)) if self.class_conditional else np.array([len(labels)])
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


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
