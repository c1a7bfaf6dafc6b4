"""Intervals of split conformal regression, CQR, CV+ and jackknife+ against MAPIE and crepes.

MAPIE takes ⌈(1 − ε)(n + 1)⌉ of floating-point numbers, which is one more than it should be where (1 − ε)(n + 1) is a whole number that
rounding exceeds; we take the whole number. So levels here are at whole numbers less a half. Ends are moved outwards by 32 units of
rounding, ours only.
"""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LinearRegression, QuantileRegressor, Ridge
from sklearn.model_selection import KFold, LeaveOneOut
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import scale

from fullconformal import CVPlusRegressor, JackknifePlusRegressor, SplitConformalRegressor

MODELS = [Ridge(), KNeighborsRegressor(5)]


def load(name):
    """Training points, calibration points and objects, y of standard deviation one."""
    X, y = load_diabetes(return_X_y=True) if name == "diabetes" else make_friedman1(300, random_state=0)
    order = np.random.default_rng(0).permutation(len(y))[:300]
    X, y = scale(X[order]), scale(y[order])
    return [(X[part], y[part]) for part in np.array_split(np.arange(300), 3)]


def levels(n):
    """Confidence levels at which (1 − ε)(n + 1) is a whole number less a half."""
    return [(k - 0.5) / (n + 1) for k in (n // 2, int(0.8 * n), int(0.9 * n), n)]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["diabetes", "friedman"])
def parts(request):
    return load(request.param)


@pytest.fixture
def mapie():
    return pytest.importorskip("mapie.regression")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_split_intervals_are_those_of_mapie(mapie, parts, model):
    (X, y), (X_cal, y_cal), (objects, _) = parts
    model = clone(model).fit(X, y)
    at = levels(len(y_cal))
    theirs = mapie.SplitConformalRegressor(model, confidence_level=at, prefit=True).conformalize(X_cal, y_cal)
    ours = SplitConformalRegressor(model, prefit=True).fit(X_cal, y_cal)
    close(ours.predict_interval(objects, at), theirs.predict_interval(objects)[1])


@pytest.mark.parametrize(
    "model",
    [QuantileRegressor(alpha=0.0), GradientBoostingRegressor(loss="quantile", n_estimators=30, random_state=0)],
    ids=lambda model: type(model).__name__,
)
def test_cqr_intervals_are_those_of_mapie(mapie, parts, model):
    """With its symmetric correction: one number for both ends, as in the paper's first theorem. Ends that cross are an empty interval."""
    (X, y), (X_cal, y_cal), (objects, _) = parts
    level = levels(len(y_cal))[2]
    name = "quantile" if isinstance(model, QuantileRegressor) else "alpha"
    low, high, middle = (
        clone(model).set_params(**{name: q}).fit(X, y) for q in ((1 - level) / 2, (1 + level) / 2, 0.5)
    )
    theirs = mapie.ConformalizedQuantileRegressor([low, high, middle], confidence_level=level, prefit=True)
    theirs.conformalize(X_cal, y_cal)
    ours = SplitConformalRegressor((low, high), conformity_score="cqr", prefit=True).fit(X_cal, y_cal)
    _, intervals = theirs.predict_interval(objects, symmetric_correction=True)
    crossed = intervals[:, 0, 0] > intervals[:, 1, 0]
    assert crossed.mean() < 0.1
    close(ours.predict_interval(objects, level), np.where(crossed[:, None], np.nan, intervals[:, :, 0]))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("minmax", [False, True])
@pytest.mark.parametrize("kind", ["CV+", "jackknife+"])
def test_intervals_of_cv_plus_and_jackknife_plus_are_those_of_mapie(mapie, parts, model, minmax, kind):
    """On the same folds; the one-fit jackknife+ of Ridge against MAPIE's n fits."""
    (X, y), _, (objects, _) = parts
    if kind == "jackknife+":
        X, y = X[:60], y[:60]
    at = levels(len(y))
    cv = KFold(5, shuffle=True, random_state=0) if kind == "CV+" else LeaveOneOut()
    method = "minmax" if minmax else "plus"
    theirs = mapie.CrossConformalRegressor(clone(model), confidence_level=at, cv=cv, method=method)
    _, intervals = theirs.fit_conformalize(X, y).predict_interval(objects)
    if kind == "CV+":
        ours = CVPlusRegressor(model, cv=cv, minmax=minmax).fit(X, y)
    else:
        ours = JackknifePlusRegressor(model, minmax=minmax).fit(X, y)
        assert ours.n_fits_ == (1 if isinstance(model, Ridge) else 60)
    # Ridge by two algorithms: condition below 1e2 here.
    np.testing.assert_allclose(ours.predict_interval(objects, at), intervals, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("mondrian", [False, True])
def test_split_intervals_are_those_of_crepes(parts, normalised, mondrian):
    """Absolute and normalised residuals, all together or by category (bins). crepes takes the residual of rank ⌊ε(n + 1)⌋ from above."""
    crepes = pytest.importorskip("crepes")
    (X, y), (X_cal, y_cal), (objects, _) = parts
    model = LinearRegression().fit(X, y)
    spread = KNeighborsRegressor(25).fit(X, np.abs(y - model.predict(X)))
    theirs = crepes.ConformalRegressor()
    rule = lambda X: np.where(X[:, 0] > 0, "up", "down")  # noqa: E731
    bins, own_bins = rule(X_cal), rule(objects)
    sigmas = {"sigmas": spread.predict(X_cal)} if normalised else {}
    own_sigmas = {"sigmas": spread.predict(objects)} if normalised else {}
    theirs.fit(y_cal - model.predict(X_cal), **sigmas, **({"bins": bins} if mondrian else {}))
    options = {"conformity_score": "normalized", "difficulty": spread, "beta": 0.0} if normalised else {}
    ours = SplitConformalRegressor(model, prefit=True, categories=rule if mondrian else None, **options)
    ours.fit(X_cal, y_cal)
    for level in (0.513, 0.807, 0.893):
        expected = theirs.predict_int(
            model.predict(objects), confidence=level, **own_sigmas, **({"bins": own_bins} if mondrian else {})
        )
        close(ours.predict_interval(objects, level), expected)
