"""Cross-conformal prediction and CV+: every point is scored by the model of the folds it is not in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.model_selection import KFold

from fullconformal.estimators.held_out import HeldOut, HeldOutClassifier, Start, no_options, no_p_values
from fullconformal.estimators.validation import check_flag, check_held_out, check_whole
from fullconformal.storage import savable


def check_folds_params(clf: Any) -> None:
    """Raise where a parameter cannot be meant."""
    check_held_out(clf)
    check_whole("n_folds", clf.n_folds, 2, "a whole number ≥ 2")
    if clf.cv is not None and not (hasattr(clf.cv, "split") or isinstance(clf.cv, list)):
        raise ValueError(
            f"cv={clf.cv!r} is not allowed; give a scikit-learn splitter or a list of pairs (train, test) of indices."
        )


def fit_folds(begun: Start, cv: Any, n_folds: int) -> HeldOut:
    """Train on all folds but one, score that one, for each fold."""
    y = begun.bag.y
    if cv is None:
        if n_folds > len(y):
            raise ValueError(f"n_folds={n_folds!r} exceeds the {len(y)} points given; take at most as many.")
        # At random, not class by class: what is left out must be exchangeable with what is to come.
        cv = KFold(n_folds, shuffle=True, random_state=begun.seed)
    pairs = cv if isinstance(cv, list) else cv.split(np.zeros((len(y), 1)), y)
    parts = [(np.asarray(train), np.asarray(rest)) for train, rest in pairs]
    return begun.held_out(begun.folds(parts, "take other folds (n_folds, random_state)"), y)


@savable
class CVPlusClassifier(HeldOutClassifier):
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

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, conformity_score: str = "loss",
        randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        confidence_level: float = 0.9, class_conditional: bool = False, l2: float | None = None, max_epochs: int = 200,
        n_jobs: int | None = None, random_state: Any = None, verbose: int = 0,
    ):  # fmt: skip
        self._keep(locals())

    def check_params(self) -> None:
        check_folds_params(self)

    def fit(self, X: Any, y: Any) -> CVPlusClassifier:
        """Train on all folds but one, score that one, for each fold of (X, y)."""
        begun = self._start(X, y)
        return self._finish(fit_folds(begun, self.cv, self.n_folds))

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """Raise: the method has no p-values; see `predict_epsilon`."""
        raise no_p_values(self)

    def predict_epsilon(self, X: Any, **options: Any) -> npt.NDArray[np.float64]:
        """The largest ε (m, C) at which each label is still in the set, by the rule of CV+.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        """
        no_options(self, options)
        return self._held_out.p_values(self._objects(X))


@savable
class CrossConformalClassifier(HeldOutClassifier):
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

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, conformity_score: str = "loss",
        randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        confidence_level: float = 0.9, class_conditional: bool = False, l2: float | None = None, max_epochs: int = 200,
        n_jobs: int | None = None, random_state: Any = None, verbose: int = 0,
    ):  # fmt: skip
        self._keep(locals())

    def check_params(self) -> None:
        check_folds_params(self)

    def fit(self, X: Any, y: Any) -> CrossConformalClassifier:
        """Train on all folds but one, score that one, for each fold of (X, y)."""
        begun = self._start(X, y)
        return self._finish(fit_folds(begun, self.cv, self.n_folds))

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """Pooled p-values (m, C) of every label, columns as in ``classes_``.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random.
        """
        check_flag("smoothing", smoothing)
        return self._held_out.p_values(self._objects(X), smoothing)
