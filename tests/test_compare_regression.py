"""`compare` of regressors: its numbers are those of the metrics, its table names the narrowest valid method."""

import numpy as np
import pytest
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.datasets import load_diabetes
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from fullconformal import (
    ConformalWarning,
    CVPlusRegressor,
    FullConformalClassifier,
    JackknifePlusRegressor,
    SplitConformalRegressor,
    compare,
    metrics,
)

X, Y = load_diabetes(return_X_y=True)
TRAIN, TEST = slice(0, 200), slice(200, 300)
LEVELS = [0.8, 0.9]


@pytest.fixture(scope="module")
def comparison():
    methods = {
        "split": SplitConformalRegressor(random_state=0),
        "CV+": CVPlusRegressor(random_state=0),
        "jackknife+": JackknifePlusRegressor(Ridge(0.1)),
    }
    return compare(methods, X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], LEVELS)


def test_numbers_are_those_of_the_metrics(comparison):
    reg = CVPlusRegressor(random_state=0).fit(X[TRAIN], Y[TRAIN])
    for level in LEVELS:
        ends = reg.predict_interval(X[TEST], level)
        for name, estimate in metrics.interval_summary(ends, Y[TEST], level).items():
            assert comparison.estimate("CV+", name, level) == estimate
    error = comparison.estimate("CV+", "mean_squared_error")
    assert error.value == pytest.approx(np.mean((reg.predict(X[TEST]) - Y[TEST]) ** 2), rel=1e-12)
    assert comparison.intervals["CV+"].shape == (100, 2, 2)
    assert set(comparison.to_frame().metric) >= {"fit_seconds", "predict_seconds", "median_width"}


def test_the_table_marks_the_narrowest_that_covers(comparison):
    text = str(comparison)
    assert "interval score" in text and "100 objects" in text
    for level in LEVELS:
        valid = [
            name
            for name in comparison.methods
            if (found := comparison.estimate(name, "interval_coverage", level)).value >= level - 2 * found.se
        ]
        best = min((comparison.estimate(name, "mean_width", level) for name in valid), key=float)
        assert f"{best}*" in text


def test_welch_is_that_of_the_widths(comparison):
    widths = [np.diff(comparison.intervals[name][:, :, 1])[:, 0] for name in ("jackknife+", "CV+")]
    assert comparison.welch("jackknife+", "CV+", level=0.9) == pytest.approx(metrics.welch(*widths), rel=1e-9)
    assert 0 <= comparison.welch("jackknife+", "CV+", "interval_score").pvalue <= 1
    with pytest.raises(ValueError, match="'mean_width', 'interval_score'"):
        comparison.welch("CV+", "split", "fuzziness")


def test_the_figure_has_a_line_for_each_method(comparison):
    ax = comparison.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == comparison.methods
    assert ax.lines[0].get_ydata() == pytest.approx(
        [comparison.estimate("split", "mean_width", k).value for k in LEVELS]
    )


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_the_default_methods_wrap_the_regressor():
    ridge = compare(None, X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], [0.9], estimator=Ridge())
    near = compare(None, X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], [0.9], estimator=KNeighborsRegressor())
    assert set(ridge.methods) - set(near.methods) == {"jackknife+"}
    boosted = compare(
        None, X[:60], Y[:60], X[TEST], Y[TEST], [0.8], estimator=GradientBoostingRegressor(n_estimators=3)
    )
    assert {"full CP", "split", "CV+"} < set(near.methods) and not near.errors and not ridge.errors
    assert boosted.methods == ["full CP", "split", "split, normalized", "CV+"] and not boosted.errors


class Broken(RegressorMixin, BaseEstimator):
    def fit(self, X, y):
        raise RuntimeError("no luck")

    def predict(self, X):
        return np.zeros(len(X))


def test_one_that_fails_does_not_stop_the_others():
    methods = [SplitConformalRegressor(Broken()), SplitConformalRegressor(random_state=0)]
    found = compare(methods, X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], [0.9])
    assert found.methods == ["Split", "Split 2"] and list(found.errors) == ["Split"]
    assert "Split failed: RuntimeError: no luck" in str(found)
    with pytest.raises(ValueError, match="every method failed"):
        compare(methods[:1], X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], [0.9])


def test_too_few_points_are_warned_of_and_shown_as_infinite():
    with pytest.warns(ConformalWarning, match="split: confidence_level=0.99"):
        found = compare({"split": SplitConformalRegressor()}, X[:50], Y[:50], X[TEST], Y[TEST], [0.8, 0.99])
    assert np.isinf(found.estimate("split", "mean_width", 0.99).value) and "inf" in str(found)
    assert len(found.plot().lines[0].get_xdata()) == 1


def test_bad_input_is_named():
    split = SplitConformalRegressor()
    with pytest.raises(TypeError, match="conformal regressor of this library"):
        compare({"a": split, "b": FullConformalClassifier()}, X, Y, X, Y)
    with pytest.raises(ValueError, match="one label per object"):
        compare({"a": split}, X, Y[:5], X, Y)
    with pytest.raises(ValueError, match="NaN or infinite"):
        compare({"a": split}, X, Y, X[:2], [1.0, np.nan])


def test_words_behind_an_encoder_have_a_difficulty_too():
    """The neighbours whose errors say how hard an object is are found among encoded objects."""
    rng = np.random.default_rng(0)
    words = rng.choice(["calm", "wild"], 400)
    X = np.column_stack([words, rng.choice(["a", "b"], 400)]).astype(object)
    y = rng.normal(size=400) * np.where(words == "wild", 5.0, 0.5)
    reg = SplitConformalRegressor(
        make_pipeline(OneHotEncoder(), Ridge()), conformity_score="normalized", random_state=0
    )
    low, high = (
        reg.set_params(estimator__onehotencoder__sparse_output=False).fit(X[:300], y[:300]).predict_interval(X[300:]).T
    )
    wild = words[300:] == "wild"
    assert (high - low)[wild].min() > (high - low)[~wild].max()
