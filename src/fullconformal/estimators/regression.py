"""What all conformal regressors share: intervals, unions of intervals and p-values from the step function p(y) of each object."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from scipy.sparse import issparse
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted

from fullconformal import sets
from fullconformal.estimators import inputs
from fullconformal.estimators.base import Conformal, whole_or_nothing
from fullconformal.estimators.calibrated_bands import CalibratedBands, RegressionFit
from fullconformal.estimators.categories import Categories, cell_sizes, warn_unreachable
from fullconformal.estimators.validation import check_sample_weight
from fullconformal.guarantees import Guarantee
from fullconformal.intervals import Steps
from fullconformal.methods.base import Config, ConformalWarning, FloatArray, IntArray, Values
from fullconformal.runtime.files import check_writable
from fullconformal.runtime.tasks import Work
from fullconformal.storage import require


class ConformalRegressor(RegressorMixin, Conformal):  # type: ignore[misc]
    """Base of the regressors: whoever gives `predict` and `predict_steps` gets the rest."""

    _targets = staticmethod(inputs.targets)

    @abstractmethod
    def predict(self, X: Any) -> FloatArray:
        """The model's prediction (m,); it carries no guarantee."""

    @abstractmethod
    def predict_steps(self, X: Any, **options: Any) -> Iterator[Steps]:
        """p(y) of all objects as step functions, a block of objects at a time."""

    def predict_interval(
        self, X: Any, confidence_level: float | Sequence[float] | None = None, **options: Any
    ) -> FloatArray:
        """The smallest interval that holds every y with a p-value above 1 − confidence_level.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        confidence_level : float or sequence of float, optional
            One level, or several; the regressor's own where not given.
        **options
            Those of `predict_p`.

        Returns
        -------
        ndarray (m, 2), or (m, 2, L) for L levels
            Lower and upper ends; infinite where the level needs more points than there are, NaN where no y has such a p-value.
        """
        return self._intervals(X, self._levels(confidence_level, options), **options)

    def _intervals(self, X: Any, levels: FloatArray, **options: Any) -> FloatArray:
        """Intervals (m, 2), or (m, 2, L), at checked levels."""
        return np.concatenate([steps.interval(levels) for steps in self._steps(X, levels=levels, **options)])

    def _steps(self, X: Any, levels: Any = None, values: Any = None, **options: Any) -> Iterator[Steps]:
        """Step functions of which intervals at some levels, or p-values of numbers (m, k), are asked, where given, and nothing else."""
        return self.predict_steps(X, **options)

    def predict_set(self, X: Any, confidence_level: float | None = None, **options: Any) -> list[FloatArray]:
        """All y with a p-value above 1 − confidence_level, as a union of closed intervals.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        confidence_level : float, optional
            The regressor's own where not given.
        **options
            Those of `predict_p`.

        Returns
        -------
        list of m arrays (k, 2)
            Lower and upper ends of each interval, ascending and apart.
        """
        levels = self._levels(confidence_level, options)
        if levels.ndim:
            raise ValueError("predict_set needs one confidence_level; call it once for each level.")
        return [union for steps in self.predict_steps(X, **options) for union in steps.unions(float(levels))]

    def predict_p(self, X: Any, y: Any, **options: Any) -> FloatArray:
        """p-values of numbers as the value of objects.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        y : array-like (m,) or (m, k)
            One number for each object, or k of them.
        **options
            Of the method.

        Returns
        -------
        ndarray of the shape of y
        """
        return self._at_numbers(X, y, lambda columns: self._steps(X, values=columns, **options), Steps.p)

    def _at_numbers(self, X: Any, y: Any, blocks: Any, ask: Any) -> FloatArray:
        """What is asked of blocks of objects at numbers y, one or k for each, in the shape of y."""
        numbers = self._numbers(X, y)
        columns = numbers[:, None] if numbers.ndim == 1 else numbers
        parts, start = [], 0
        for block in blocks(columns):
            parts.append(ask(block, columns[start : start + len(block)]))
            start += len(block)
        return np.concatenate(parts).reshape(numbers.shape)

    def report(
        self, X: Any, y: Any, path: str | Path = "report.html", *, feature_names: Sequence[Any] | None = None, others:
        Mapping[str, Any] | None = None, title: str = "Prediction intervals", identifiers: Sequence[Any] | None = None, by: Any =
        None, diagnostics: Sequence[str] = (), **options: Any,
    ) -> Path:  # fmt: skip
        """Write a page about the intervals of labelled objects: one HTML file that needs no network.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        y : array-like (m,)
            Their true values.
        path : path, default="report.html"
            Where the page goes.
        feature_names : sequence of str, optional
            Names of the columns of X; a DataFrame brings its own.
        others : mapping, optional
            Methods to stand beside this one: a name, and a fitted conformal regressor.
        title : str, default="Prediction intervals"
        identifiers : sequence of m names, optional
            What the objects are called; by default they are numbered.
        by : name, sequence of names, or mapping of names to arrays (m,), optional
            Columns of X, or others, to show the coverage by first.
        diagnostics : sequence of str, optional
            Sentences to add; a warning begins with ``!``.
        **options
            Those of `predict_interval`.

        Examples
        --------
        >>> import tempfile
        >>> from sklearn.datasets import load_diabetes
        >>> from fullconformal import JackknifePlusRegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> reg = JackknifePlusRegressor().fit(X[::2], y[::2])
        >>> reg.report(X[1::2], y[1::2], f"{tempfile.mkdtemp()}/diabetes.html").name
        'diabetes.html'
        """
        from fullconformal.report.interval_page import write_interval_report
        from fullconformal.report.page import slider_levels

        check_is_fitted(self)
        check_writable(path)
        truth = self._numbers(X, inputs.targets(y))
        methods = {self.display_name: self, **(others or {})}
        if self.display_name in (others or {}):
            raise ValueError(f"others has a method named {self.display_name!r}, as this one is; give it another name.")
        for name, method in methods.items():
            if not isinstance(method, ConformalRegressor):
                raise TypeError(f"others[{name!r}] is {method!r}; give a fitted conformal regressor.")
        levels = slider_levels(self.confidence_level)
        with warnings.catch_warnings():
            # The page shows which levels have infinite intervals.
            warnings.simplefilter("ignore", ConformalWarning)
            ends = {name: method.predict_interval(X, levels, **options) for name, method in methods.items()}
        return write_interval_report(
            path, ends, truth, levels, prediction=self.predict(X), confidence_level=self.confidence_level, title=title,
            n_train=self.n_samples_fit_, rows=X.toarray() if issparse(X) else X, feature_names=feature_names,
            guarantee=str(self.guarantee_), identifiers=identifiers, by=by, diagnostics=[*self.notes(), *diagnostics],
        )  # fmt: skip

    def _levels(self, confidence_level: Any, options: Any) -> FloatArray:
        """Checked levels; a warning where there are too few points for one that was given."""
        check_is_fitted(self)
        levels = sets.check_levels(self.confidence_level if confidence_level is None else confidence_level)
        if confidence_level is not None and options.get("weights") is None:
            self.warn_unreachable(levels)
        return levels

    @staticmethod
    def _numbers(X: Any, y: Any) -> FloatArray:
        """Numbers (m,) or (m, k), finite, for the objects X."""
        numbers = np.asarray(y, dtype=np.float64)
        if numbers.ndim not in (1, 2) or len(numbers) != _num_samples(X):
            raise ValueError(
                f"y must have shape ({_num_samples(X)},), a number for each object, or ({_num_samples(X)}, k); "
                f"got {numbers.shape}."
            )
        if np.isnan(numbers).any():
            raise ValueError("y holds NaN; give numbers.")
        return numbers

    def warn_unreachable(self, levels: FloatArray, stacklevel: int = 4) -> None:
        """Warn where a level needs more points than candidates are compared with: intervals are then infinite."""
        sizes, kind = self._compared()
        infinite = "every interval{} is infinite"
        warn_unreachable(sizes, np.empty(0), self._categories, levels, kind, stacklevel, infinite)

    def _compared(self) -> tuple[IntArray, str]:
        """How many points candidates are compared with, (G, 1) in each category, and what these points are."""
        return cell_sizes(np.zeros(self.n_samples_fit_, dtype=np.int64), 1, self._categories), "training"

    def verify_intervals(self, quick: bool = True, **options: Any) -> None:
        """Raise unless the regressor gives predictions of the objects it kept, and intervals where these need no fit."""
        m = self.verify_sample()
        predicted = self.predict(self._sample)
        require(predicted.shape == (m,) and bool(np.isfinite(predicted).all()), "model")
        if not quick:
            return
        found = self.predict_interval(self._sample, **options)
        require(found.shape == (m, 2) and not bool((found[:, 0] > found[:, 1]).any()), "intervals")


class HeldOutRegressor(ConformalRegressor):
    """Base of the regressors that hold `CalibratedBands`; they give the constructor, the checks, and how models are calibrated."""

    _calibrated: CalibratedBands
    #: what is promised of the intervals
    _promise: ClassVar[Guarantee]

    @abstractmethod
    def check_params(self) -> None:
        """Raise if a parameter is invalid."""

    @abstractmethod
    def _calibrate(self, fit: RegressionFit) -> tuple[CalibratedBands, IntArray]:
        """Train the models and score points that did not train them; also which points (k,) those are."""

    @whole_or_nothing
    def fit(self, X: Any, y: Any, *, sample_weight: Any = None) -> Self:
        """Train the models on parts of (X, y), and score the points that they have not seen.

        Parameters
        ----------
        X : array-like (n, ...)
            Objects; an array, DataFrame or tensor.
        y : array-like (n,)
            Numbers.
        sample_weight : array-like (n,), optional
            Weights of points in training, given to the `fit` of the estimator; calibration counts every point alike.
        """
        self.check_params()
        self._categories = Categories.of(self.categories, X)
        X, y = self._checked(X, y, reset=True)
        if len(y) < 2:
            raise ValueError(f"y has n_samples={len(y)}; give at least two points, one to train and one to calibrate.")
        self.n_samples_fit_, self._sample = len(y), inputs.first_rows(X)
        rng = check_random_state(self.random_state)
        config = Config(seed=int(rng.randint(2**31)), work=Work(getattr(self, "n_jobs", None)))
        bag = Values(X, y.astype(np.float64), weights=check_sample_weight(self, sample_weight, X))
        fit = RegressionFit(self.estimator, bag, config, rng, self.verbose)
        found, scored = self._calibrate(fit)
        kept = self._categories
        self._calibrated = found if kept is None else replace(found, category=kept.points[scored])
        self.warn_unreachable(np.asarray(self.confidence_level), stacklevel=4)
        return self

    @property
    def guarantee_(self) -> Guarantee:
        check_is_fitted(self)
        return self._promise

    def predict(self, X: Any) -> FloatArray:
        """The models' prediction (m,), on average; it carries no guarantee."""
        X = self._objects(X)
        return np.concatenate([band.middle for _, band in self._calibrated.blocks(X)])

    def predict_steps(self, X: Any) -> Iterator[Steps]:  # type: ignore[override]
        """p(y) of all objects as step functions, a block of objects at a time.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        """
        objects = self._objects(X)
        yield from self._calibrated.steps(objects, self._places(X))

    def _intervals(self, X: Any, levels: FloatArray) -> FloatArray:  # type: ignore[override]
        objects = self._objects(X)
        found = self._calibrated.intervals(objects, self._places(X), np.atleast_1d(levels))
        return found if levels.ndim else found[:, :, 0]

    def _compared(self) -> tuple[IntArray, str]:
        found, kept = self._calibrated, self._categories
        own = np.zeros(len(found.score), dtype=np.int64) if found.category is None else found.category
        return np.bincount(own, minlength=1 if kept is None else len(kept.known))[:, None], "calibration"

    def verify(self) -> None:
        self.check_params()
        found = self._calibrated
        found.verify(self.verify_categories(self.n_samples_fit_), self._categories is not None)
        # What is exact of one model, or of the hull of several, is not of several by themselves.
        alone = found.rule == "minmax" or (found.rule == "own" and not found.model.any())
        require(alone or not self.guarantee_.is_exact, "number of models")
        self.verify_intervals()

    def _objects(self, X: Any) -> Any:
        """Checked objects."""
        check_is_fitted(self)
        return self._checked(X, reset=False)
