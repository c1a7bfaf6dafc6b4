"""Fit several methods on the same data and measure them on the same objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, clone, is_regressor
from sklearn.utils.validation import _num_samples, column_or_1d

from fullconformal.estimators.base import ConformalClassifier
from fullconformal.estimators.cross import CVPlusClassifier
from fullconformal.estimators.cross_regression import CVPlusRegressor, JackknifePlusRegressor, is_ridge
from fullconformal.estimators.full import FullConformalClassifier
from fullconformal.estimators.full_regression import FullConformalRegressor
from fullconformal.estimators.inputs import labels as labels_of
from fullconformal.estimators.inputs import targets as targets_of
from fullconformal.estimators.regression import ConformalRegressor
from fullconformal.estimators.split import SplitConformalClassifier
from fullconformal.estimators.split_regression import SplitConformalRegressor
from fullconformal.methods.convex import symmetric_seconds
from fullconformal.metrics.estimates import BoolArray, Estimate, FloatArray
from fullconformal.models.adapters import is_logistic
from fullconformal.models.requirements import split_pipeline
from fullconformal.report.comparison import NOT_MEASURED, Comparison, IntervalComparison
from fullconformal.runtime.tasks import progress_bar, timed
from fullconformal.sets import check_levels, prediction_sets


def compare(
    methods: Mapping[str, Any] | Sequence[Any] | None,
    X: Any,
    y: Any,
    X_test: Any,
    y_test: Any,
    levels: Sequence[float] = (0.8, 0.9, 0.95),
    *,
    estimator: Any = None,
    random_state: Any = 0,
    verbose: int | None = None,
) -> Comparison | IntervalComparison:
    """Fit methods on the same data and measure them on the same objects.

    Parameters
    ----------
    methods : mapping of name to conformal classifier or regressor, sequence of them, or None
        They are cloned, not changed. None means full CP, split CP, RAPS and CV+ around a classifier. For logistic regressions there
        are two rows of full CP, exactly valid and by influence functions; only the latter if the former would take more than about a
        minute. Around a regressor, None means full CP where it needs no refits, split CP (absolute and normalised), CV+ and, where it
        takes one fit, jackknife+.
    X, y : array-like (n, ...), (n,)
        Training data; every method splits them as it needs.
    X_test, y_test : array-like (m, ...), (m,)
        Objects to predict, and their labels.
    levels : sequence of float, default=(0.8, 0.9, 0.95)
        Confidence levels.
    estimator : optional
        With ``methods=None``: the classifier or regressor that all of them wrap; None is the built-in logistic regression.
    random_state : int, RandomState or None, default=0
        With ``methods=None``: the seed of all methods.
    verbose : int or None, default=None
        1 shows progress; None leaves it to the methods, which show it where it takes long.

    Returns
    -------
    Comparison, or IntervalComparison of regressors
        Prints as a table, and has ``to_frame()``, ``plot()`` and ``welch(a, b)``. A method that fails is listed there and does
        not stop the others.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import FullConformalClassifier, SplitConformalClassifier, compare
    >>> X, y = load_iris(return_X_y=True)
    >>> methods = {"full": FullConformalClassifier(), "split": SplitConformalClassifier(random_state=0)}
    >>> comparison = compare(methods, X[::2], y[::2], X[1::2], y[1::2], levels=[0.8, 0.9])
    >>> comparison.welch("full", "split").pvalue < 0.1
    True
    """
    at = np.unique(check_levels(levels))
    _check_lengths(X, y, X_test, y_test)
    if _of_regressors(methods, estimator):
        regressors = default_regressors(estimator, random_state) if methods is None else _named(methods, estimator)
        _, truth = targets_of(y), targets_of(y_test)
        intervals = IntervalComparison(methods=list(regressors), levels=at, y=truth)
        _measure_all(intervals, regressors, (X, y), X_test, bool(verbose), _run_regressor)
        return intervals
    truth, classes = _check_labels(y, y_test)
    inputs = int(np.prod(np.shape(X)[1:])) + 1
    seconds = symmetric_seconds(len(truth), _num_samples(X), inputs, len(classes))
    named = default_methods(estimator, random_state, seconds) if methods is None else _named(methods, estimator)
    out = Comparison(methods=list(named), levels=at, y=truth, classes=classes)
    _measure_all(out, named, (X, y), X_test, bool(verbose), _run)
    return out


def _measure_all(
    out: Any, named: dict[str, Any], data: tuple[Any, Any], X_test: Any, verbose: bool, run: Callable[..., float]
) -> None:
    """Fit and run every method, timed; one that fails is listed and does not stop the others."""
    for k, (name, method) in enumerate(named.items()):
        shown = progress_bar(f"{name} ({k + 1} of {len(named)})", verbose)
        with shown as progress, warnings.catch_warnings(record=True) as caught:
            progress(k, len(named))
            try:
                fresh = _unfitted(method, verbose)
                _, fit_seconds = timed(fresh.fit, *data)
                out.guarantees[name] = fresh.guarantee_.word
                seconds = {"fit_seconds": fit_seconds, "predict_seconds": run(out, name, fresh, X_test)}
                out.add(name, NOT_MEASURED, {k: Estimate(v, NOT_MEASURED) for k, v in seconds.items()})
            except Exception as error:
                # Whatever the error is, the other methods go on.
                out.errors[name] = error
        for warning in caught:
            warnings.warn(f"{name}: {warning.message}", warning.category, stacklevel=3)
    if len(out.errors) == len(named):
        reasons = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in out.errors.items())
        raise ValueError(f"every method failed. {reasons}") from next(iter(out.errors.values()))


def default_methods(estimator: Any = None, random_state: Any = 0, seconds: float = 0.0) -> dict[str, Any]:
    """The methods that `compare` takes by default, around the same classifier; `seconds` is the time of the symmetric one."""
    final = split_pipeline(estimator)[1]
    convex = final is None or is_logistic(final)
    full = {}
    # About a minute is the longest to wait for one row of the table.
    if not convex or seconds <= 60:
        full["full CP"] = FullConformalClassifier(estimator, random_state=random_state)
    if convex:
        full["full CP, influence"] = FullConformalClassifier(estimator, method="influence", random_state=random_state)
    return full | {
        "split": SplitConformalClassifier(estimator, random_state=random_state),
        "RAPS": SplitConformalClassifier(estimator, conformity_score="raps", random_state=random_state),
        "CV+": CVPlusClassifier(estimator, random_state=random_state),
    }


def default_regressors(estimator: Any = None, random_state: Any = 0) -> dict[str, Any]:
    """The methods that `compare` takes around a regressor; jackknife+ where it takes one fit."""
    found: dict[str, Any] = {
        "full CP": FullConformalRegressor(estimator, random_state=random_state),
        "split": SplitConformalRegressor(estimator, random_state=random_state),
        "split, normalized": SplitConformalRegressor(
            estimator, conformity_score="normalized", random_state=random_state
        ),
        "CV+": CVPlusRegressor(estimator, random_state=random_state),
    }
    return found | ({"jackknife+": JackknifePlusRegressor(estimator)} if is_ridge(estimator) else {})


def _of_regressors(methods: Any, estimator: Any) -> bool:
    """Whether regressors are compared: those given, or the default ones around a regressor."""
    if methods is None:
        return isinstance(estimator, BaseEstimator) and bool(is_regressor(estimator))
    given = list(methods.values()) if isinstance(methods, Mapping) else methods
    return isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], ConformalRegressor)


def _run_regressor(out: IntervalComparison, name: str, method: Any, X_test: Any) -> float:
    """Put the intervals (m, 2, L) and records of a fitted regressor into the comparison; seconds that the intervals took."""
    intervals, seconds = timed(method.predict_interval, X_test, out.levels.tolist())
    out.measure(name, intervals, method.predict(X_test))
    return seconds


def _run(out: Comparison, name: str, method: Any, X_test: Any) -> float:
    """Put p (m, C), sets (m, C, L) and records of a fitted classifier into the comparison; seconds that p took."""
    if method.classes_.tolist() != out.classes.tolist():
        raise ValueError(f"it knows the classes {method.classes_.tolist()}, but y holds {out.classes.tolist()}.")
    p, seconds = timed(method.predict_epsilon, X_test)
    # Whether sets are nested is checked on a grid of levels.
    grid = np.union1d(out.levels, np.linspace(0.5, 0.99, 50))
    path = _path(method, X_test, p, grid)
    # Warns if there are too few points for a level.
    method.warn_unreachable(out.levels)
    out.measure(name, p, path[:, :, np.searchsorted(grid, out.levels)], path)
    return seconds


def _path(method: ConformalClassifier, X: Any, p: FloatArray, grid: FloatArray) -> BoolArray:
    """Sets (m, C, G) at a grid of levels, by the method's own rule if it has another one than p > ε."""
    if type(method).predict_set is ConformalClassifier.predict_set:
        # The same as predict_set, without computing p again.
        return prediction_sets(p, grid)
    sets: BoolArray = method.predict_set(X, grid.tolist())
    return sets


def _unfitted(method: Any, quiet: bool) -> Any:
    """A clone to be fitted; with prefit=True it shares the classifier, because clones are not fitted."""
    fresh = clone(method)
    if getattr(method, "prefit", False):
        fresh.set_params(estimator=method.estimator)
    # Two progress bars would overwrite each other.
    if quiet and "verbose" in fresh.get_params(deep=False):
        fresh.set_params(verbose=0)
    return fresh


def _named(methods: Any, estimator: Any) -> dict[str, Any]:
    """Methods by name, checked."""
    if estimator is not None:
        raise ValueError("estimator is only used with methods=None; give it to each of the methods instead.")
    if isinstance(methods, Mapping):
        named = dict(methods)
    elif isinstance(methods, Sequence) and not isinstance(methods, str):
        named = {}
        for method in methods:
            kind = type(method).__name__.removesuffix("Classifier").removesuffix("Regressor").removesuffix("Conformal")
            number = sum(name.split(" ")[0] == kind for name in named) + 1
            named[kind if number == 1 else f"{kind} {number}"] = method
    else:
        raise TypeError(
            f"methods must be a mapping of names to conformal classifiers, or a list of them, got {type(methods).__name__}; "
            "for example {'full': FullConformalClassifier(), 'split': SplitConformalClassifier()}."
        )
    if not named:
        raise ValueError("methods is empty; give at least one conformal classifier, or None for the default ones.")
    base = ConformalRegressor if _of_regressors(named, None) else ConformalClassifier
    kind = "regressor" if base is ConformalRegressor else "classifier"
    for name, method in named.items():
        if not isinstance(name, str) or not isinstance(method, base):
            raise TypeError(
                f"methods[{name!r}] is {method!r}; give a name (a string) and an unfitted conformal {kind} of this library, "
                f"for example {'SplitConformalRegressor' if kind == 'regressor' else 'FullConformalClassifier'}()."
            )
    return named


def _check_labels(y: Any, y_test: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """True labels (m,) of the test objects and the classes (C,), checked before anything is fitted."""
    classes = np.unique(column_or_1d(labels_of(y)))
    truth = column_or_1d(labels_of(y_test))
    # Some may be of classes that y lacks, and count as missed.
    if not set(truth.tolist()) & set(classes.tolist()):
        unseen = sorted(set(truth.tolist()))
        raise ValueError(f"y_test holds labels unseen in y: {unseen[:5]}; the classes are {classes.tolist()}.")
    return truth, classes


def _check_lengths(X: Any, y: Any, X_test: Any, y_test: Any) -> None:
    """Raise unless there is one label for each object, and at least one object to measure on."""
    for name, objects, label_name, labels in (("X", X, "y", y), ("X_test", X_test, "y_test", y_test)):
        if _num_samples(objects) != _num_samples(labels):
            raise ValueError(
                f"{name} has {_num_samples(objects)} objects and {label_name} has {_num_samples(labels)} labels; give one label per object."
            )
    if not _num_samples(X_test):
        raise ValueError("X_test has no objects; give at least one to measure on.")
