"""CV+ and jackknife+ for regression: every point is scored by a model that has not seen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import Ridge as RidgeModel
from sklearn.model_selection import LeaveOneOut
from sklearn.utils.validation import check_is_fitted

from fullconformal.conformity import Band, FloatArray
from fullconformal.estimators.calibrated_bands import CalibratedBands, RegressionFit
from fullconformal.estimators.regression import HeldOutRegressor
from fullconformal.estimators.validation import check_cv, check_regressor, check_shared
from fullconformal.guarantees import EXACT, TWICE, Guarantee
from fullconformal.linear.ridge import Ridge
from fullconformal.methods.base import IntArray
from fullconformal.methods.folds import cv_parts
from fullconformal.models.objects import dense
from fullconformal.storage import savable


class PlusRegressor(HeldOutRegressor):
    """Base of CV+ and jackknife+: intervals from the ends f_−k(i)(x) ± R_i of every point i, or with the hull of all models."""

    minmax: bool

    def check_params(self) -> None:
        check_shared(self)
        check_regressor(self.estimator)

    def predict_p(self, X: Any, y: Any, **options: Any) -> FloatArray:
        """Raise unless minmax: the method has no p-values; see `predict_epsilon`."""
        if not self.minmax:
            raise ValueError(
                f"{type(self).__name__} has no p-values: its rule takes lower and upper ends for themselves, which guarantees 1 − 2ε. "
                "predict_epsilon(X, y) gives the largest ε at which each y is still in the interval, by that rule; minmax=True has "
                "p-values."
            )
        return super().predict_p(X, y, **options)

    def predict_epsilon(self, X: Any, y: Any) -> FloatArray:
        """The largest ε at which each y is still in the interval, by the rule of the method.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        y : array-like (m,) or (m, k)
            One number for each object, or k of them.
        """
        return super().predict_p(X, y)

    def _rule(self) -> str:
        return "minmax" if self.minmax else "plus"


@savable
class CVPlusRegressor(PlusRegressor):
    """CV+ (Barber, Candès, Ramdas and Tibshirani 2021): every point is scored by the model that has not seen its fold.

    With R_i = |y_i − f_−k(i)(x_i)|, the interval goes from the ⌊ε(n + 1)⌋-th smallest of f_−k(i)(x) − R_i to the ⌈(1 − ε)(n + 1)⌉-th
    smallest of f_−k(i)(x) + R_i. It holds the true value with probability about 1 − 2ε for sure (less a term that vanishes as n grows),
    and mostly 1 − ε. All data train and calibrate.

    Parameters
    ----------
    estimator : None, regressor of scikit-learn's kind, skorch net, or Pipeline ending in one, default=None
        The regressor; None is ``Ridge()``.
    n_folds : int, default=5
        Folds, drawn at random, and models.
    cv : splitter or list of (train, test) indices, optional
        Other folds, instead of `n_folds`; each point must be in one.
    minmax : bool, default=False
        Take the smallest and the largest of all models' predictions instead of the model without the point's fold: wider. With folds of
        more than one point the promise remains 1 − 2ε (`JackknifePlusRegressor` has 1 − ε).
    confidence_level : float, default=0.9
        Of the intervals, where `predict_interval` is not told otherwise.
    categories : str, int or callable, optional
        Compare an object with points of its own (Mondrian) category only: the promise then holds in each. A column of X, or a function of
        X, as in `FullConformalClassifier`; in a category that no point calibrates every interval is infinite.
    n_jobs : int, optional
        Models trained at a time; any joblib backend.
    random_state : int, RandomState or None, default=None
        Seeds the folds and training.
    verbose : int or None, default=None
        1 shows progress bars, 0 nothing; None shows progress where work takes more than about ten seconds.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from fullconformal import CVPlusRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = CVPlusRegressor(random_state=0).fit(X[::2], y[::2])
    >>> reg.predict_interval(X[1::2], [0.8, 0.9]).shape, reg.guarantee_.word
    ((221, 2, 2), '1 − 2ε')
    """

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, minmax: bool = False, confidence_level: float = 0.9,
        categories: Any = None, n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = TWICE.because("each fold has a model of its own")

    def check_params(self) -> None:
        super().check_params()
        check_cv(self)

    def _calibrate(self, fit: RegressionFit) -> tuple[CalibratedBands, IntArray]:
        parts = cv_parts(self.cv, self.n_folds, fit.bag.X, fit.bag.y, fit.config.seed)
        return CalibratedBands(*fit.folds(parts), self._rule()), np.arange(len(fit.bag.y))


@savable
class JackknifePlusRegressor(PlusRegressor):
    """Jackknife+ (Barber, Candès, Ramdas and Tibshirani 2021): every point is scored by the model without it.

    With R_i = |y_i − f_−i(x_i)|, the interval goes from the ⌊ε(n + 1)⌋-th smallest of f_−i(x) − R_i to the ⌈(1 − ε)(n + 1)⌉-th smallest
    of f_−i(x) + R_i. It holds the true value with probability at least 1 − 2ε, and mostly 1 − ε.

    The n models of a ridge regression (None, ``Ridge``, ``LinearRegression``) come from one fit, exact to rounding. Other regressors are
    fitted n times; Pipelines too, whose transformers have to be.

    Parameters
    ----------
    estimator : None, regressor of scikit-learn's kind, skorch net, or Pipeline ending in one, default=None
        The regressor; None is ``Ridge()``.
    minmax : bool, default=False
        Take the smallest and the largest of all models' predictions, and from there the R_i (jackknife-minmax): wider, and the true value
        is held with probability at least 1 − ε.
    confidence_level, categories, n_jobs, random_state, verbose
        As in `CVPlusRegressor`.

    Attributes
    ----------
    n_fits_ : int
        Models that were trained: 1 where leaving points out took no training, else n.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from fullconformal import JackknifePlusRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = JackknifePlusRegressor().fit(X[::2], y[::2])
    >>> reg.predict_interval(X[1::2]).shape, reg.n_fits_
    ((221, 2), 1)
    """

    n_fits_: int

    def __init__(
        self, estimator: Any = None, *, minmax: bool = False, confidence_level: float = 0.9, categories: Any = None,
        n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    @property
    def guarantee_(self) -> Guarantee:
        check_is_fitted(self)
        return (EXACT if self._calibrated.rule == "minmax" else TWICE).because("each point has a model of its own")

    def _calibrate(self, fit: RegressionFit) -> tuple[CalibratedBands, IntArray]:
        every = np.arange(len(fit.bag.y))
        if is_ridge(fit.estimator) and fit.bag.weights is None:
            self.n_fits_ = 1
            bands = LeaveOneOutRidge.fit(fit.estimator, fit.bag.X, fit.bag.y)
            return CalibratedBands(bands, np.abs(bands.residual), every, self._rule()), every
        self.n_fits_ = len(every)
        return CalibratedBands(*fit.folds(list(LeaveOneOut().split(fit.bag.X))), self._rule()), every


def is_ridge(estimator: Any) -> bool:
    """Whether leaving a point out takes no training: a linear regression by least squares with a penalty αI, or none."""
    if estimator is None:
        return True
    plain = type(estimator) in (RidgeModel, LinearRegression) and not estimator.positive
    return plain and np.ndim(getattr(estimator, "alpha", 0.0)) == 0


@savable
@dataclass(frozen=True)
class LeaveOneOutRidge:
    """The n ridge regressions on all points but one, from the one on all.

    A prediction f(x) = Σ h_xi·y_i is linear in the numbers, and left out is a point whose number is replaced by its own prediction:
    f_−i(x) = f(x) − h_xi·r_i, with the residual r_i = (y_i − f(x_i))/(1 − h_i) of point i when it is left out.
    """

    ridge: Ridge
    residual: FloatArray

    @classmethod
    def fit(cls, estimator: Any, X: Any, y: FloatArray) -> LeaveOneOutRidge:
        """From objects X (n, d) and numbers y (n,)."""
        alpha = 1.0 if estimator is None else float(getattr(estimator, "alpha", 0.0))
        ridge = Ridge.fit(dense(X).astype(np.float64), y, alpha, estimator is None or bool(estimator.fit_intercept))
        if (alone := ridge.free_share == 0).any():
            raise ValueError(
                f"the regression fits point {int(alone.argmax())} (counted from 0) whatever its number, leverage 1 "
                f"({int(alone.sum())} such points): without it there is no unique fit. Give a penalty, Ridge(alpha=...), fewer columns, or "
                "more points."
            )
        return cls(ridge, ridge.residual / ridge.free_share)

    def __call__(self, X: Any) -> Band:
        X = dense(X).astype(np.float64)
        value = self.ridge.predict(X)[:, None] - self.ridge.pairs(X) * self.residual
        return Band(value, value, np.ones_like(value))
