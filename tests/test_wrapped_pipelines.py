"""Models around Pipelines, functions of the target, and what `diagnose` says of methods without curvature."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier

from fullconformal import (
    ConformalWarning,
    CVPlusRegressor,
    FullConformalClassifier,
    FullConformalRegressor,
    SplitConformalClassifier,
    SplitConformalRegressor,
    load,
)
from fullconformal.storage import StorageError

ENCODER = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["word"]), (SimpleImputer(), ["a", "gaps"]))
RIDGE, LOGISTIC = make_pipeline(ENCODER, Ridge()), make_pipeline(ENCODER, LogisticRegression())
REGRESSORS = {
    "search": GridSearchCV(RIDGE, {"ridge__alpha": [1, 10]}, cv=2),
    "vote": VotingRegressor([("a", RIDGE)]),
    "stack": StackingRegressor([("a", RIDGE)], cv=2),
    "logarithm": TransformedTargetRegressor(RIDGE, func=np.log, inverse_func=np.exp),
    "scaled target": TransformedTargetRegressor(RIDGE, transformer=StandardScaler()),
}
CLASSIFIERS = {
    "search": GridSearchCV(LOGISTIC, {"logisticregression__C": [1, 10]}, cv=2),
    "vote": VotingClassifier([("a", LOGISTIC)], voting="soft"),
    "stack": StackingClassifier([("a", LOGISTIC)], cv=2),
}


def table(n=90):
    """Words, numbers and gaps, a positive quantity and labels."""
    rng = np.random.default_rng(0)
    gaps = np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n))
    X = pd.DataFrame({"a": rng.normal(size=n), "word": rng.choice(["x", "y", "z"], n), "gaps": gaps})
    y = np.exp(X.a + (X.word == "x") + 0.3 * rng.normal(size=n)).to_numpy()
    return X, y, np.where(y > 1.3, "high", "low")


@pytest.mark.parametrize("kind", [FullConformalRegressor, SplitConformalRegressor, CVPlusRegressor])
@pytest.mark.parametrize("name", REGRESSORS)
def test_regressors_that_hold_a_pipeline_take_what_it_takes(name, kind):
    X, y, _ = table()
    options = {"folds": 3} if kind is FullConformalRegressor else {}
    ends = (
        kind(REGRESSORS[name], random_state=0, confidence_level=0.8, **options)
        .fit(X[:60], y[:60])
        .predict_interval(X[60:])
    )
    # 30 objects of probability 0.8 or so: fewer than 15 have one of 1e-4.
    assert ((ends[:, 0] <= y[60:]) & (y[60:] <= ends[:, 1])).sum() >= 15


@pytest.mark.parametrize("kind", [FullConformalClassifier, SplitConformalClassifier])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_that_hold_a_pipeline_take_what_it_takes(name, kind):
    X, _, y = table()
    options = {"folds": 3} if kind is FullConformalClassifier else {}
    clf = kind(CLASSIFIERS[name], random_state=0, confidence_level=0.8, **options).fit(X[:60], y[:60])
    sets = clf.predict_set(X[60:])
    assert (sets[np.arange(30), np.searchsorted(clf.classes_, y[60:])]).sum() >= 15


def test_boosting_takes_pandas_categories_and_others_are_told_to_encode_words():
    X, y, labels = table()
    X = X.assign(word=X.word.astype("category"))
    options = {"folds": 3, "random_state": 0}
    assert FullConformalClassifier(HistGradientBoostingClassifier(max_iter=5), **options).fit(X, labels).predict_p(
        X[:2]
    ).shape == (2, 2)
    assert FullConformalRegressor(HistGradientBoostingRegressor(max_iter=5), **options).fit(X, y).predict_interval(
        X[:2]
    ).shape == (2, 2)
    with pytest.raises(ValueError, match=r"not numbers: 'word'.*make_pipeline"):
        FullConformalRegressor(Ridge()).fit(X, y)
    with pytest.raises(TypeError, match="estimator=StandardScaler has no fit and predict"):
        FullConformalRegressor(StandardScaler()).fit(X, y)


@pytest.mark.parametrize("name", ["logarithm", "scaled target"])
def test_transformed_targets_are_saved(name, tmp_path):
    X, y, _ = table()
    reg = FullConformalRegressor(REGRESSORS[name], folds=3, random_state=0).fit(X, y)
    reg.save(tmp_path / "r.safetensors")
    assert np.array_equal(load(tmp_path / "r.safetensors").predict_interval(X[:5]), reg.predict_interval(X[:5]))


def test_functions_of_numpys_are_saved_by_name_and_no_others(tmp_path):
    X, _, y = table()
    X = np.abs(X[["a"]].to_numpy())
    clf = FullConformalClassifier(make_pipeline(FunctionTransformer(np.log1p), LogisticRegression())).fit(X, y)
    clf.save(tmp_path / "c.safetensors")
    assert np.array_equal(load(tmp_path / "c.safetensors").predict_p(X[:5]), clf.predict_p(X[:5]))
    for function in (np.add, np.frompyfunc(abs, 1, 1), lambda x: x):
        clf.transformer_.steps[0][1].func = function
        with pytest.raises(StorageError, match="function"):
            clf.save(tmp_path / "d.safetensors")


def test_what_has_no_curvature_still_has_its_guarantee_diagnosed():
    X, y, labels = table()
    clf = FullConformalClassifier(CLASSIFIERS["vote"], folds=3, random_state=0).fit(X, labels)
    reg = FullConformalRegressor(REGRESSORS["vote"], folds=3, random_state=0).fit(X, y)
    for found in (clf.diagnose(), reg.diagnose()):
        assert "folds" in str(found) and "approximate" in str(found) and found.n_points == 90 and found.warnings == []
    report = str(FullConformalRegressor(Ridge()).fit(X[["a"]], y).audit(X[["a"]], n_pairs=3, max_refits=30))
    assert "pairs (object, value)" in report and "values that change sides" in report and "drawn points alone" in report


FROZEN = {
    "classes": lambda tree: (FullConformalClassifier, FrozenEstimator(tree)),
    "behind a scaler": lambda tree: (FullConformalClassifier, make_pipeline(StandardScaler(), FrozenEstimator(tree))),
    "calibrated": lambda tree: (SplitConformalClassifier, CalibratedClassifierCV(FrozenEstimator(tree), cv=2)),
}


@pytest.mark.parametrize("name", FROZEN)
def test_models_that_are_frozen_are_warned_of(name):
    """A tree that knows these labels by heart, frozen, looks as if it had foreseen them: its sets hold far too few of new ones."""
    X, _, labels = table()
    kind, model = FROZEN[name](DecisionTreeClassifier(random_state=0).fit(X[["a"]], labels))
    with pytest.warns(ConformalWarning, match="FrozenEstimator, which fit does not train"):
        kind(model, random_state=0).fit(X[["a"]], labels)


def test_frozen_regressors_are_warned_of_and_what_is_said_to_be_trained_is_not():
    X, y, labels = table()
    a = X[["a"]].to_numpy()
    frozen = TransformedTargetRegressor(FrozenEstimator(Ridge().fit(a, np.log(y))), func=np.log, inverse_func=np.exp)
    for kind in (FullConformalRegressor, SplitConformalRegressor, CVPlusRegressor):
        with pytest.warns(ConformalWarning, match="FrozenEstimator"):
            kind(frozen).fit(a, y)
    trained = FrozenEstimator(LogisticRegression().fit(a, labels))
    scaled = make_pipeline(FrozenEstimator(StandardScaler().fit(a)), LogisticRegression())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SplitConformalClassifier(trained, prefit=True).fit(a, labels)
        FullConformalClassifier(scaled).fit(a, labels)
