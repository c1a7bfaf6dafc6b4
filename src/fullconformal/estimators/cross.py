"""Cross-conformal prediction and CV+: every point is scored by the model of the folds it is not in."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.model_selection import KFold

from fullconformal import pvalues
from fullconformal.estimators.calibrated import CalibratedClassifier, FloatArray, IntArray, Part
from fullconformal.estimators.checks import check_whole


class PooledClassifier(CalibratedClassifier):
    """Base of cross-conformal prediction, CV+ and jackknife+: comparisons counted over all folds together."""

    def _fit_folds(self, X: Any, y: IntArray, parts: list[Part], rng: np.random.RandomState) -> None:
        """Train on each fold's complement and score the fold."""
        check_folds(parts, len(y))
        for k, (train, _) in enumerate(parts):
            self._check_trained(y[train], f"what trains for fold {k} of {len(parts)}", self._remedy)
        uniform = rng.uniform(size=len(y))
        self._parts = [
            self._calibrated(model, log_proba, y[rest], uniform[rest])
            for (model, log_proba), (_, rest) in zip(self._fit_parts(X, y, parts), parts, strict=True)
        ]

    _remedy = "take other folds (n_folds, random_state)"

    def _pooled(self, X: Any, uniform: FloatArray | None) -> tuple[Any, Any]:
        """Points above and tied with every candidate, (m, C) each, over all folds."""
        counts = [self._counts(part, X, uniform) for part in self._parts]
        return np.sum([greater for greater, _ in counts], axis=0), np.sum([equal for _, equal in counts], axis=0)

    def _rank(self, X: Any, *, smoothing: bool = False) -> FloatArray:
        """(1 + #{i : s_i ≥ s^(−k(i))(x, y)})/(n + 1), (m, C); smoothed where asked for."""
        X = self._objects(X)
        greater, equal = self._pooled(X, self._score_uniforms(X))
        return pvalues.p_values(greater, equal, self._sizes, uniform=self._smoothing(X, smoothing))


def check_folds(parts: list[Part], n: int) -> None:
    """Raise unless every one of n points is scored once, by a model that has not seen it."""
    scored = np.bincount(np.concatenate([rest for _, rest in parts]), minlength=n)
    if len(scored) > n or (scored != 1).any():
        raise ValueError(
            f"cv must put each of the {n} points into one fold, but point {int((scored != 1).argmax())} is in "
            f"{int(scored[(scored != 1).argmax()])}; give KFold, StratifiedKFold or LeaveOneOut, for instance."
        )
    for k, (train, rest) in enumerate(parts):
        if len(np.intersect1d(train, rest)):
            raise ValueError(f"cv trains on points of fold {k} that it also scores there; the two must be apart.")


class PlusRule(PooledClassifier):
    """The rule of CV+ and jackknife+, which has no p-values but is had from `_rank` as they are."""

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """Raise: the method has no p-values; see `predict_epsilon`."""
        raise ValueError(
            f"{type(self).__name__} has no p-values: its rule compares a label with each point by the model without that point, which "
            "guarantees 1 − 2ε. predict_epsilon(X) gives the largest ε at which each label is still in the set, by that rule."
        )

    def _epsilon(self, X: Any, **options: Any) -> Any:
        if options:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(options)}: its rule compares a label with each point for itself, "
                "which leaves no ties to be broken; leave it out."
            )
        return self._rank(X)


class FoldsClassifier(PooledClassifier):
    """Constructor and fit of cross-conformal prediction and CV+."""

    n_folds: int
    cv: Any

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, conformity_score: str = "loss",
        randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        confidence_level: float = 0.9, class_conditional: bool = False, l2: float | None = None, max_epochs: int = 200,
        n_jobs: int | None = None, random_state: Any = None, verbose: int = 0,
    ):  # fmt: skip
        self._keep(locals())

    def _check_params(self) -> None:
        super()._check_params()
        check_whole("n_folds", self.n_folds, 2, "a whole number ≥ 2")
        if self.cv is not None and not (hasattr(self.cv, "split") or isinstance(self.cv, list)):
            raise ValueError(
                f"cv={self.cv!r} is not allowed; give a scikit-learn splitter or a list of pairs (train, test) of indices."
            )

    def fit(self, X: Any, y: Any) -> Self:
        """Train on all folds but one, score that one, for each fold of (X, y)."""
        X, index, rng = self._start(X, y)
        if self.cv is None and self.n_folds > len(index):
            raise ValueError(f"n_folds={self.n_folds!r} exceeds the {len(index)} points given; take at most as many.")
        # At random, not class by class: what is left out must be exchangeable with what is to come.
        cv = KFold(self.n_folds, shuffle=True, random_state=self._seed) if self.cv is None else self.cv
        pairs = cv if isinstance(cv, list) else cv.split(np.zeros((len(index), 1)), index)
        parts = [(np.asarray(train), np.asarray(rest)) for train, rest in pairs]
        self._fit_folds(X, index, parts, rng)
        self._finish(index)
        return self


class CVPlusClassifier(PlusRule, FoldsClassifier):
    """CV+ (Romano, Sesia and Candès 2020): every point trains all models but one, and is scored by that one.

    A label y of object x is in the set when #{i : s_i < s^(−k(i))(x, y)} < (1 − ε)(n + 1), where s^(−k) is the score by the model that
    has not seen fold k, and s_i that of point i by the model that has not seen it. Sets hold the true label with probability at
    least 1 − 2ε − O(√(1/n)), and mostly 1 − ε. They are the sets of `CrossConformalClassifier`; the two papers differ in what they prove.

    Parameters
    ----------
    n_folds : int, default=5
        Folds, drawn at random, and models.
    cv : splitter or list of (train, test) indices, optional
        Other folds, instead of `n_folds`; each point must be in one.
    estimator, conformity_score, randomized, confidence_level, class_conditional, l2, max_epochs
        As in `SplitConformalClassifier`.
    k_reg, lambda_reg : int, float
        Both needed with ``conformity_score="raps"``.
    n_jobs : int, optional
        Models trained at a time; any joblib backend.
    random_state : int, RandomState or None, default=None
        Seeds the folds, training and randomised scores.
    verbose : int, default=0
        1 shows a progress bar.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import CVPlusClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> CVPlusClassifier(conformity_score="aps", random_state=0).fit(X[::2], y[::2]).predict_set(X[1::2]).shape
    (75, 3)
    """


class CrossConformalClassifier(FoldsClassifier):
    """Cross-conformal prediction (Vovk 2015): split conformal prediction with each fold in turn, ranks pooled.

    The p-value of a label is (1 + Σ_k #{i in fold k : s_i ≥ s^(−k)(x, y)})/(n + 1), where s^(−k) is the score by the model that has not
    seen fold k. All data train and calibrate. Sets hold the true label with probability about 1 − 2ε for sure, and mostly 1 − ε.

    Parameters
    ----------
    estimator, conformity_score, randomized, confidence_level, class_conditional, l2, max_epochs
        As in `SplitConformalClassifier`.
    n_folds, cv, k_reg, lambda_reg, n_jobs, verbose
        As in `CVPlusClassifier`.
    random_state : int, RandomState or None, default=None
        Seeds the folds, training, randomised scores and smoothing.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import CrossConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> CrossConformalClassifier(random_state=0).fit(X[::2], y[::2]).predict_p(X[1::2]).shape
    (75, 3)
    """

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """Pooled p-values (m, C) of every label, columns as in ``classes_``.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random.
        """
        return self._rank(X, smoothing=smoothing)
