"""Cross-conformal prediction, CV+ and jackknife+: every point is scored by a model that has not seen it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.model_selection import KFold
from torch import Tensor
from torch.nn.functional import pad

from fullconformal import pvalues
from fullconformal.estimators.held_out import (
    FloatArray,
    HeldOut,
    HeldOutClassifier,
    Start,
    check_trained,
    no_options,
    no_p_values,
    own_scores,
)
from fullconformal.estimators.validation import check_flag, check_held_out, check_whole
from fullconformal.linear import at_points, leave_one_out
from fullconformal.losses import SOFTMAX
from fullconformal.methods.convex import FittedSymmetric, Symmetric
from fullconformal.models.adapters import check_objective, is_logistic
from fullconformal.storage import expect, require, savable


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


BLOCK = 2**22  # entries of scores held at a time
EPS = float(np.finfo(np.float64).eps)


@savable
class JackknifePlusClassifier(HeldOutClassifier):
    """Jackknife+ (Barber et al. 2021; for labels Romano, Sesia and Candès 2020): every point is scored by the model without it.

    A label y of object x is in the set when #{i : s_i < s^(−i)(x, y)} < (1 − ε)(n + 1), where s^(−i) is the score by the model that has
    not seen point i and s_i that of point i itself. Sets hold the true label with probability at least 1 − 2ε, and mostly 1 − ε.

    The n models of a logistic regression (None, or scikit-learn's with an L2 penalty) are found by one fit and a few batched Newton
    steps, exact to rounding. Other classifiers are fitted n times; Pipelines too, whose transformers have to be.

    Parameters
    ----------
    estimator, conformity_score, randomized, confidence_level, class_conditional, max_epochs
        As in `SplitConformalClassifier`.
    k_reg, lambda_reg, n_jobs, verbose
        As in `CVPlusClassifier`.
    l2 : float, optional
        λ of the fit on all n points, for None and modules. The n models of a logistic regression keep its Λ = nλ.
    random_state : int, RandomState or None, default=None
        Seeds training and randomised scores.

    Attributes
    ----------
    classes_ : ndarray (C,)
    n_fits_ : int
        Models that were trained: 1 where leaving points out took no training, else n.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import JackknifePlusClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = JackknifePlusClassifier(random_state=0).fit(X[::2], y[::2])
    >>> clf.predict_set(X[1::2]).shape, clf.n_fits_
    ((75, 3), 1)
    """

    _linear: LeaveOneOut | None  # the n models of a logistic regression, and their points' labels and scores
    _labels: npt.NDArray[np.int64]
    _alpha: FloatArray

    def __init__(
        self, estimator: Any = None, *, conformity_score: str = "loss", randomized: bool = True,
        k_reg: int | None = None, lambda_reg: float | None = None, confidence_level: float = 0.9,
        class_conditional: bool = False, l2: float | None = None, max_epochs: int = 200, n_jobs: int | None = None,
        random_state: Any = None, verbose: int = 0,
    ):  # fmt: skip
        self._keep(locals())

    def check_params(self) -> None:
        check_held_out(self)

    def fit(self, X: Any, y: Any) -> JackknifePlusClassifier:
        """Fit the model to (X, y) without each point in turn, and score that point."""
        begun = self._start(X, y)
        bag, remedy = begun.bag, "leave that class out"
        every = np.arange(len(bag.y))
        self._linear, parts = None, []
        if is_fast(self.estimator):
            for i in np.flatnonzero(np.bincount(bag.y)[bag.y] == 1):
                check_trained(np.delete(bag.y, i), bag.classes, f"what trains without point {i}", remedy)
            linear = LeaveOneOut.of(Symmetric(self.estimator).fit(bag, begun.config))
            uniform = begun.rng.uniform(size=len(bag.y)) if self.randomized else None
            self._labels, self._alpha = bag.y, own_scores(begun.score, linear.of_training_points(), bag.y, uniform)
            self._linear = linear
        else:
            parts = begun.folds([(np.delete(every, i), every[i : i + 1]) for i in every], remedy)
        self.n_fits_ = len(bag.y) if self._linear is None else 1
        return self._finish(begun.held_out(parts, bag.y))

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """Raise: the method has no p-values; see `predict_epsilon`."""
        raise no_p_values(self)

    def predict_epsilon(self, X: Any, **options: Any) -> npt.NDArray[np.float64]:
        """The largest ε (m, C) at which each label is still in the set, by the rule of jackknife+.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        """
        no_options(self, options)
        X, held = self._objects(X), self._held_out
        return held.p_values(X) if self._linear is None else pvalues.p_values(*self._counts(X), held.sizes)

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model fitted to all points where there is one, else the mean of the n models'."""
        X = self._objects(X)
        return self._held_out.proba(X) if self._linear is None else np.exp(self._linear.fitted.log_proba(X))

    def _counts(self, X: Any) -> tuple[FloatArray, FloatArray]:
        """Points above and tied with every candidate, (m, C) each, by the n models of a logistic regression."""
        assert self._linear is not None
        self._linear.fitted.log_proba(X)  # names an object that cannot be computed with
        score, uniform, n, n_classes = (
            self._held_out.score,
            self._held_out.uniform(X),
            len(self._labels),
            len(self.classes_),
        )
        weight = pvalues.comparison_weight(self._labels, n_classes, class_conditional=self.class_conditional)
        counts = []
        width = max(1, BLOCK // (n * n_classes))
        for at in range(0, len(X), width):
            log_proba = self._linear(X[at : at + width])
            u = None if uniform is None else uniform[at : at + width].repeat(n)
            tau = score.scores(log_proba.reshape(-1, n_classes), u).reshape(log_proba.shape)
            tie = score.rounding(tau, log_proba, EPS)
            counts.append(pvalues.count(self._alpha[:, None], tau, tie, weight, axis=1))
        greater, equal = zip(*counts, strict=True)
        return np.concatenate(greater), np.concatenate(equal)


def is_fast(estimator: Any) -> bool:
    """Whether leaving a point out takes no training: a logistic regression of an objective the solver knows."""
    if not is_logistic(estimator):
        return estimator is None
    try:
        check_objective(estimator)
    except ValueError:
        return False
    return True


@savable
class LeaveOneOut:
    """The n logistic regressions on all points but one."""

    def __init__(self, fitted: FittedSymmetric, theta: Tensor):
        self.fitted, self.theta = fitted, theta  # (d, K, n)

    @classmethod
    def of(cls, fitted: FittedSymmetric) -> LeaveOneOut:
        """From the fit on all points."""
        return cls(fitted, leave_one_out(fitted.bag).theta)

    def of_training_points(self) -> FloatArray:
        """Log-probabilities (n, C) of each training point by the model without it."""
        return log_proba(at_points(self.fitted.bag.X.T, self.theta).T)

    def __call__(self, X: Any) -> FloatArray:
        """Log-probabilities (m, n, C) of objects by all models."""
        x = self.fitted.objects(X)
        d, K, n = self.theta.shape
        return log_proba((x @ self.theta.view(d, K * n)).view(-1, K, n).mT)

    def state(self) -> dict[str, Any]:
        """The fit on all points, and the n models, which are not to be found anew."""
        return {"fitted": self.fitted, "theta": self.theta}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LeaveOneOut:
        fitted, theta = expect(state["fitted"], FittedSymmetric), expect(state["theta"], Tensor)
        (n, d), K = fitted.bag.X.shape, fitted.bag.K
        require(theta.shape == (d, K, n) and bool(theta.isfinite().all()), "leave-one-out models")
        return cls(fitted, theta)


def log_proba(z: Tensor) -> FloatArray:
    """Log-probabilities (..., C) from logits (..., K) relative to the first class."""
    return np.asarray(SOFTMAX.log_proba(pad(z, (1, 0))).cpu().numpy())
