"""Split conformal regression: a part of the data is kept from training and calibrates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.linear_model import QuantileRegressor
from sklearn.model_selection import KFold, train_test_split
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted

from fullconformal.conformity import Band
from fullconformal.estimators.calibrated_bands import Bands, CalibratedBands, PointBands, RegressionFit
from fullconformal.estimators.regression import HeldOutRegressor
from fullconformal.estimators.validation import (
    check_number,
    check_option,
    check_regressor,
    check_share,
    check_shared,
)
from fullconformal.guarantees import EXACT
from fullconformal.methods.base import IntArray
from fullconformal.methods.outputs import predictions
from fullconformal.models.requirements import split_pipeline
from fullconformal.storage import savable

SCORES = ("absolute", "normalized", "cqr")


@savable
@dataclass(frozen=True)
class NormalizedBands:
    """A regressor of the value, and one of its absolute error, to which `least` is added: bands of no width with a scale."""

    model: Any
    difficulty: Any
    least: float

    def __call__(self, X: Any) -> Band:
        value, eps = predictions(self.model, X)
        difficulty, _ = predictions(self.difficulty, X)
        scale = np.maximum(difficulty, 0.0) + self.least
        if not (scale > 0).all():
            row = int((scale <= 0).argmax())
            raise ValueError(
                f"the difficulty of object {row} (counted from 0) is {difficulty[row]:g} and beta adds nothing to it; give beta > 0."
            )
        return Band(value[:, None], value[:, None], scale[:, None], eps)


@savable
@dataclass(frozen=True)
class QuantileBands:
    """Regressors of a lower and an upper quantile."""

    low: Any
    high: Any

    def __call__(self, X: Any) -> Band:
        (lower, eps), (upper, other) = predictions(self.low, X), predictions(self.high, X)
        return Band(lower[:, None], upper[:, None], np.ones((len(lower), 1)), max(eps, other))


@savable
class SplitConformalRegressor(HeldOutRegressor):
    """Split (inductive) conformal regression: one part of the data trains, the other calibrates.

    Intervals hold the true value with probability at least `confidence_level`, whatever the regressor and the score, on average over
    objects: not for each object. An interval holds all y whose score is at most the ⌈(1 − ε)(n + 1)⌉-th smallest of the n calibration
    scores, which is p(y) > ε; with too few calibration points it is infinite.

    Parameters
    ----------
    estimator : None, regressor of scikit-learn's kind, skorch net, or Pipeline ending in one, default=None
        The regressor; None is ``Ridge()``, or ``QuantileRegressor(alpha=0)`` for "cqr". For "cqr" one with a parameter that says the
        quantile (``QuantileRegressor``, or gradient boosting with ``loss="quantile"``), of which two are fitted, at ε/2 and 1 − ε/2; or
        a pair (lower, upper).
    conformity_score : {"absolute", "normalized", "cqr"}, default="absolute"
        What is compared. "absolute": |y − f(x)|, intervals of one width. "normalized": |y − f(x)|/(σ(x) + β) with the error σ(x) that a
        second regressor expects: wider where errors are larger. "cqr": how far y lies outside the two quantiles (conformalized quantile
        regression).
    difficulty : regressor, optional
        The regressor of σ(x) for "normalized", fitted to out-of-fold absolute errors of the points that train; None is the mean over 25
        nearest neighbours among standardised objects.
    beta : float, default=0.1
        β for "normalized", as a share of the mean absolute error: the larger, the more equal the widths.
    calibration_size : float, default=0.2
        Share of the data that calibrates and does not train.
    prefit : bool, default=False
        Take the estimator (and the difficulty, or the pair of quantiles) as it is; all of the data given to `fit` then calibrate. It must
        not have seen them.
    confidence_level : float, default=0.9
        Of the intervals, where `predict_interval` is not told otherwise; and that whose quantiles "cqr" fits.
    categories : str, int or callable, optional
        Compare an object with points of its own (Mondrian) category only: the promise then holds in each. A column of X, or a function of
        X, as in `FullConformalClassifier`; in a category that no point calibrates every interval is infinite.
    random_state : int, RandomState or None, default=None
        Seeds the split and training.
    verbose : int or None, default=None
        1 shows progress bars, 0 nothing; None shows progress where work takes more than about ten seconds.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from fullconformal import SplitConformalRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> reg = SplitConformalRegressor(random_state=0).fit(X[::2], y[::2])
    >>> reg.predict_interval(X[1::2]).shape, reg.guarantee_.word
    ((221, 2), 'exact')
    """

    def __init__(
        self, estimator: Any = None, *, conformity_score: str = "absolute", difficulty: Any = None, beta: float = 0.1,
        calibration_size: float = 0.2, prefit: bool = False, confidence_level: float = 0.9, categories: Any = None,
        random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = EXACT.because("the calibration points trained nothing")

    def check_params(self) -> None:
        check_shared(self)
        check_share(self)
        check_option("conformity_score", self.conformity_score, SCORES)
        check_number("beta", self.beta, 0, "a number ≥ 0")
        if self.difficulty is not None:
            check_regressor(self.difficulty, "difficulty")
            if self.conformity_score != "normalized":
                raise ValueError(
                    "difficulty was given, but only conformity_score='normalized' uses it; leave one of them out."
                )
        pair = isinstance(self.estimator, (tuple, list))
        if pair and (self.conformity_score != "cqr" or len(self.estimator) != 2):
            raise ValueError("estimator is a pair (lower, upper) for conformity_score='cqr' only; give one regressor.")
        models = list(self.estimator) if pair else [self.estimator]
        for model in models:
            check_regressor(model)
        if self.conformity_score == "cqr" and not pair and not self.prefit:
            self._quantile_models()
        if not self.prefit:
            return
        needed = [*models, *([self.difficulty] if self.conformity_score == "normalized" else [])]
        if any(model is None for model in needed) or (self.conformity_score == "cqr" and not pair):
            what = {
                "cqr": "a pair (lower, upper) of fitted regressors",
                "normalized": "a fitted estimator and difficulty",
            }
            raise ValueError(f"prefit=True needs {what.get(self.conformity_score, 'a fitted estimator')}.")
        for model in needed:
            check_is_fitted(model)

    def _calibrate(self, fit: RegressionFit) -> tuple[CalibratedBands, IntArray]:
        every = np.arange(len(fit.bag.y))
        if self.prefit:
            train, rest = every[:0], every
        else:
            train, rest = train_test_split(every, test_size=self.calibration_size, random_state=fit.config.seed)
        bands = {"absolute": self._point, "normalized": self._normalized, "cqr": self._quantiles}
        fitted = bands[self.conformity_score](fit, train)
        held = fit.bag.part(rest)
        scores = fitted(held.X).scores(held.y)[:, 0]
        return CalibratedBands(fitted, scores, np.zeros(len(rest), dtype=np.int64)), rest

    def _point(self, fit: RegressionFit, train: IntArray) -> Bands:
        return PointBands([self.estimator if self.prefit else fit.fit_to(train)])

    def _normalized(self, fit: RegressionFit, train: IntArray) -> Bands:
        if self.prefit:
            error, _ = predictions(self.difficulty, fit.bag.X)
            return NormalizedBands(self.estimator, self.difficulty, self.beta * float(np.maximum(error, 0.0).mean()))
        if len(train) < 10:
            raise ValueError(
                f"conformity_score='normalized' needs 10 points that train, there are {len(train)}; give more."
            )
        errors = np.zeros_like(fit.bag.y)
        for some, others in KFold(5, shuffle=True, random_state=fit.config.seed).split(train):
            model = fit.fit_to(train[some])
            held = fit.bag.part(train[others])
            errors[train[others]] = np.abs(held.y - predictions(model, held.X)[0])
        # The distance of objects that the estimator encodes is that of their codes.
        encode = split_pipeline(self.estimator)[0]
        near = make_pipeline(
            *([] if encode is None else [clone(encode)]), StandardScaler(), KNeighborsRegressor(min(25, len(train)))
        )
        difficulty = fit.fit_to(train, near if self.difficulty is None else self.difficulty, errors)
        return NormalizedBands(fit.fit_to(train), difficulty, self.beta * float(errors[train].mean()))

    def _quantiles(self, fit: RegressionFit, train: IntArray) -> Bands:
        low, high = self._quantile_models()
        if self.prefit:
            return QuantileBands(low, high)
        return QuantileBands(fit.fit_to(train, low), fit.fit_to(train, high))

    def _quantile_models(self) -> tuple[Any, Any]:
        """Regressors of the quantiles ε/2 and 1 − ε/2, as they were given or by the parameter that says the quantile."""
        if isinstance(self.estimator, (tuple, list)):
            return self.estimator[0], self.estimator[1]
        model = QuantileRegressor(alpha=0.0) if self.estimator is None else self.estimator
        name = quantile_parameter(model)
        low, high = (1 - self.confidence_level) / 2, (1 + self.confidence_level) / 2
        return clone(model).set_params(**{name: low}), clone(model).set_params(**{name: high})


def quantile_parameter(model: Any) -> str:
    """The parameter of a regressor, or of one inside it, that says which quantile it predicts."""
    given = model.get_params(deep=True)
    for name in given:
        inside, _, last = name.rpartition("__")
        loss = given.get(f"{inside}__loss" if inside else "loss")
        if (last == "quantile" and loss in (None, "quantile")) or (last == "alpha" and loss == "quantile"):
            return str(name)
    raise ValueError(
        f"conformity_score='cqr' needs a regressor of quantiles, and {type(model).__name__} has no parameter that says which; give "
        "QuantileRegressor(), HistGradientBoostingRegressor(loss='quantile', quantile=0.5), "
        "GradientBoostingRegressor(loss='quantile'), or a pair (lower, upper) of regressors."
    )
