"""Split conformal regression, CV+ and jackknife+ against literal loops over points and models."""

import math
from itertools import combinations

import numpy as np
import pytest
from cases import expected_failures
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.datasets import load_diabetes
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, QuantileRegressor, Ridge
from sklearn.model_selection import KFold, train_test_split
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fullconformal
from fullconformal import ConformalWarning, CVPlusRegressor, JackknifePlusRegressor, SplitConformalRegressor

INF, NAN = math.inf, math.nan
KINDS = [SplitConformalRegressor, CVPlusRegressor, JackknifePlusRegressor]
few_points = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


def data(n, d=3, seed=0, m=20):
    """Training points and objects of a noisy linear rule whose noise grows with the first feature."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + m, d))
    y = X @ np.arange(1, d + 1) + rng.normal(size=n + m) * (0.2 + np.abs(X[:, 0]))
    return X[:n], y[:n], X[n:], y[n:]


def rank(k, ordered):
    """The k-th smallest, k from 1; infinite beyond the ends."""
    return -INF if k < 1 else INF if k > len(ordered) else ordered[k - 1]


def index(level, n):
    """⌈(1 − ε)(n + 1)⌉, where (1 − ε)(n + 1) is whole up to rounding the whole number."""
    return math.ceil(level * (n + 1) - 1e-9)


def close(found, expected, tolerance=1e-10):
    """Ends are moved outwards by 32 units of rounding of numbers below 100; sums of some hundred terms of size 1 came before."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return True


# Split -----------------------------------------------------------------------------------------------------------------

LEVELS = [0.5, 0.8, 0.9, 0.95]


@few_points
@pytest.mark.parametrize("n", [10, 40, 95, 100])
def test_split_intervals_are_the_prediction_and_the_quantile_of_the_residuals(n):
    X, y, objects, _ = data(n)
    reg = SplitConformalRegressor(random_state=0).fit(X, y)
    seed = int(np.random.RandomState(0).randint(2**31))
    train, rest = train_test_split(np.arange(n), test_size=0.2, random_state=seed)
    model = Ridge().fit(X[train], y[train])
    residuals = sorted(abs(y[i] - model.predict(X[i : i + 1])[0]) for i in rest)
    found = reg.predict_interval(objects, LEVELS)
    for k, level in enumerate(LEVELS):
        reach = rank(index(level, len(rest)), residuals)
        for j, value in enumerate(model.predict(objects)):
            assert close(found[j, :, k], [value - reach, value + reach])
    assert close(reg.predict(objects), model.predict(objects))


@few_points
def test_p_values_count_residuals_and_sets_are_where_they_are_large():
    X, y, objects, truth = data(60)
    reg = SplitConformalRegressor(random_state=1).fit(X, y)
    score = reg._calibrated.score
    p = reg.predict_p(objects, truth)
    for j, value in enumerate(reg.predict(objects)):
        assert p[j] == (1 + sum(s >= abs(truth[j] - value) for s in score)) / (len(score) + 1)
    for level in LEVELS:
        ends = reg.predict_interval(objects, level)
        assert np.array_equal((ends[:, 0] <= truth) & (truth <= ends[:, 1]), p > 1 - level + 1e-12)
        assert all(np.array_equal(union, ends[j : j + 1]) for j, union in enumerate(reg.predict_set(objects, level)))


@few_points
def test_normalised_intervals_are_wide_where_errors_are():
    X, y, objects, _ = data(300, m=200)
    reg = SplitConformalRegressor(conformity_score="normalized", beta=0.2, random_state=0).fit(X, y)
    bands = reg._calibrated.bands
    rest = train_test_split(np.arange(300), test_size=0.2, random_state=np.random.RandomState(0).randint(2**31))[1]
    sigma = np.maximum(bands.difficulty.predict(X[rest]), 0) + bands.least
    scores = sorted(abs(y[rest] - bands.model.predict(X[rest])) / sigma)
    reach = rank(index(0.9, 60), scores) * (np.maximum(bands.difficulty.predict(objects), 0) + bands.least)
    value = bands.model.predict(objects)
    assert close(reg.predict_interval(objects), np.stack([value - reach, value + reach], axis=1))
    # The noise grows with |x_0|: widths do too.
    assert np.corrcoef(np.diff(reg.predict_interval(objects))[:, 0], np.abs(objects[:, 0]))[0, 1] > 0.5
    # β is a share of the mean absolute error: all is in units of y.
    again = SplitConformalRegressor(conformity_score="normalized", beta=0.2, random_state=0).fit(X, 1e12 * y)
    assert close(again.predict_interval(objects) / 1e12, reg.predict_interval(objects), 1e-6)


@few_points
@pytest.mark.parametrize(
    "model",
    [
        QuantileRegressor(alpha=0.0),
        GradientBoostingRegressor(loss="quantile", n_estimators=20, random_state=0),
        make_pipeline(StandardScaler(), HistGradientBoostingRegressor(loss="quantile", quantile=0.5, max_iter=20)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_cqr_moves_both_quantiles_by_one_number(model):
    X, y, objects, _ = data(120)
    reg = SplitConformalRegressor(model, conformity_score="cqr", confidence_level=0.8, random_state=0).fit(X, y)
    train, rest = train_test_split(np.arange(120), test_size=0.2, random_state=np.random.RandomState(0).randint(2**31))
    name = next(k for k in model.get_params() if k.split("__")[-1] in ("quantile", "alpha") and "loss" not in k) \
        if not isinstance(model, QuantileRegressor) else "quantile"  # fmt: skip
    low, high = (clone(model).set_params(**{name: q}).fit(X[train], y[train]) for q in ((1 - 0.8) / 2, (1 + 0.8) / 2))
    scores = sorted(max(low.predict(X[[i]])[0] - y[i], y[i] - high.predict(X[[i]])[0]) for i in rest)
    for level in (0.5, 0.8, 0.9):
        move = rank(index(level, len(rest)), scores)
        expected = np.stack([low.predict(objects) - move, high.predict(objects) + move], axis=1)
        expected[expected[:, 0] > expected[:, 1]] = NAN
        assert close(reg.predict_interval(objects, level), expected)


def test_cqr_may_give_empty_intervals():
    """Quantiles far apart, and data in the middle: at low levels the two ends pass each other where quantiles are close."""
    n = 99
    X = np.linspace(0, 1, n)[:, None]
    low, high = (LinearRegression().fit([[0.0], [1.0]], ends) for ends in ([-1.0, -9.0], [1.0, 9.0]))
    reg = SplitConformalRegressor((low, high), conformity_score="cqr", prefit=True).fit(X, np.zeros(n))
    ends = reg.predict_interval(np.array([[0.0], [1.0]]), 0.5)
    assert np.isnan(ends[0]).all() and close(ends[1], [-4.0, 4.0])
    assert [len(union) for union in reg.predict_set(np.array([[0.0], [1.0]]), 0.5)] == [0, 1]


def test_prefit_models_are_taken_as_they_are():
    X, y, objects, _ = data(60)
    model = Ridge(3.0).fit(X[:30], y[:30])
    reg = SplitConformalRegressor(model, prefit=True).fit(X[30:], y[30:])
    assert reg._calibrated.bands.models[0] is model and len(reg._calibrated.score) == 30
    assert close(reg.predict(objects), model.predict(objects))
    spread = KNeighborsRegressor(5).fit(X[:30], np.abs(y[:30] - model.predict(X[:30])))
    reg = SplitConformalRegressor(model, conformity_score="normalized", difficulty=spread, beta=0.0, prefit=True).fit(
        X[30:], y[30:]
    )
    sigma = spread.predict(X[30:])
    reach = rank(index(0.9, 30), sorted(np.abs(y[30:] - model.predict(X[30:])) / sigma)) * spread.predict(objects)
    assert close(reg.predict_interval(objects)[:, 1] - model.predict(objects), reach)


# Plus ------------------------------------------------------------------------------------------------------------------


def literal_plus(models, fold, X, y, objects, level, minmax):
    """Intervals by loops over objects and points; fold (n,) is the model that has not seen a point."""
    n, out = len(y), []
    R = [abs(y[i] - models[fold[i]].predict(X[i : i + 1])[0]) for i in range(n)]
    k = index(level, n)
    for j in range(len(objects)):
        values = [model.predict(objects[j : j + 1])[0] for model in models]
        if minmax:
            reach = rank(k, sorted(R))
            out.append([min(values) - reach, max(values) + reach])
        else:
            low, high = (sorted(values[fold[i]] + sign * R[i] for i in range(n)) for sign in (-1, 1))
            lower, upper = rank(n + 1 - k, low), rank(k, high)
            out.append([lower, upper] if lower <= upper else [NAN, NAN])
    return np.array(out)


@few_points
@pytest.mark.parametrize("minmax", [False, True])
@pytest.mark.parametrize("model", [Ridge(), KNeighborsRegressor(3)], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("n", [12, 39])
def test_cv_plus_equals_the_loop(n, model, minmax):
    X, y, objects, _ = data(n, m=8)
    cv = KFold(4, shuffle=True, random_state=3)
    reg = CVPlusRegressor(model, cv=cv, minmax=minmax).fit(X, y)
    models, fold = [], np.empty(n, dtype=int)
    for k, (train, rest) in enumerate(cv.split(X)):
        models.append(clone(model).fit(X[train], y[train]))
        fold[rest] = k
    for level in (0.3, 0.5, 0.8, 0.9, 0.97):
        expected = literal_plus(models, fold, X, y, objects, level, minmax)
        assert close(reg.predict_interval(objects, level), expected)
    assert close(reg.predict(objects), np.mean([model.predict(objects) for model in models], axis=0))


@few_points
@settings(deadline=None, max_examples=30)
@given(st.data())
def test_jackknife_plus_of_ridge_takes_one_fit_and_equals_the_loop(data_):
    """Tall and wide tables, few distinct values, an intercept or none, a penalty or none where there is a fit without."""
    n, d = data_.draw(st.integers(4, 14)), data_.draw(st.integers(1, 18))
    seed = data_.draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    X = rng.integers(-2, 3, size=(n, d)).astype(float) + (0 if data_.draw(st.booleans()) else rng.normal(size=(n, d)))
    y, objects = rng.normal(size=n), rng.normal(size=(5, d))
    free = data_.draw(st.booleans()) and n > d + 3 and np.linalg.matrix_rank(np.delete(X, 0, 0)) == d
    model = LinearRegression() if free else Ridge(data_.draw(st.sampled_from([1e-3, 1.0, 50.0])))
    model.set_params(fit_intercept=data_.draw(st.booleans()))
    minmax = data_.draw(st.booleans())
    reg = JackknifePlusRegressor(model, minmax=minmax)
    try:
        reg.fit(X, y)
    except ValueError as error:
        # A point that decides its own fit.
        assert "leverage" in str(error) and free
        return
    assert reg.n_fits_ == 1
    models = [clone(model).fit(np.delete(X, i, 0), np.delete(y, i)) for i in range(n)]
    for level in (0.5, 0.8):
        expected = literal_plus(models, np.arange(n), X, y, objects, level, minmax)
        # Solvers of scikit-learn's lose the digits of the condition, at most 1e3 squared here for the penalised.
        assert close(reg.predict_interval(objects, level), expected, 1e-6)


def test_jackknife_plus_of_other_models_is_fitted_n_times():
    X, y, objects, _ = data(15, m=4)
    model = KNeighborsRegressor(3)
    reg = JackknifePlusRegressor(model).fit(X, y)
    assert reg.n_fits_ == 15
    models = [clone(model).fit(np.delete(X, i, 0), np.delete(y, i)) for i in range(15)]
    expected = literal_plus(models, np.arange(15), X, y, objects, 0.9, False)
    assert close(reg.predict_interval(objects), expected)


@few_points
def test_ridge_by_formulas_and_by_refits_are_the_same():
    X, y, objects, _ = data(25)
    fast = JackknifePlusRegressor(Ridge(2.0)).fit(X, y)
    slow = JackknifePlusRegressor(make_pipeline(Ridge(2.0))).fit(X, y)
    assert (fast.n_fits_, slow.n_fits_) == (1, 25)
    assert close(fast.predict_interval(objects, LEVELS), slow.predict_interval(objects, LEVELS))
    assert close(fast.predict(objects), slow.predict(objects))


@few_points
@pytest.mark.parametrize("kind", [CVPlusRegressor, JackknifePlusRegressor])
def test_epsilon_is_where_a_number_leaves_the_interval(kind):
    X, y, objects, truth = data(30)
    for minmax in (False, True):
        reg = kind(minmax=minmax, random_state=0).fit(X, y)
        epsilon = reg.predict_epsilon(objects, truth)
        for level in (0.05, 0.3, 0.5, 0.9):
            ends = reg.predict_interval(objects, level)
            assert np.array_equal((ends[:, 0] <= truth) & (truth <= ends[:, 1]), epsilon > 1 - level + 1e-12)
        if minmax:
            assert np.array_equal(reg.predict_p(objects, truth), epsilon)
        else:
            with pytest.raises(ValueError, match="predict_epsilon"):
                reg.predict_p(objects, truth)


@few_points
def test_words_of_the_guarantee():
    X, y, _, _ = data(30)
    assert SplitConformalRegressor().fit(X, y).guarantee_.word == "exact"
    assert CVPlusRegressor().fit(X, y).guarantee_.word == "1 − 2ε"
    assert JackknifePlusRegressor().fit(X, y).guarantee_.word == "1 − 2ε"
    assert JackknifePlusRegressor(minmax=True).fit(X, y).guarantee_.word == "exact"
    assert CVPlusRegressor(minmax=True).fit(X, y).guarantee_.word == "1 − 2ε"


def perfect_matching(vertices, adjacent):
    """Pairs of adjacent vertices that use each vertex once; found by search."""
    if not vertices:
        return []
    first, rest = vertices[0], vertices[1:]
    for other in rest:
        if adjacent(first, other):
            found = perfect_matching([v for v in rest if v != other], adjacent)
            if found is not None:
                return [(first, other), *found]
    return None


class Chooser(RegressorMixin, BaseEstimator):
    """Given two of the points 0, …, 4 it knows the other three, and finds one of them strange: the one that `choice` names."""

    def __init__(self, choice):
        self.choice = choice

    def fit(self, X, y):
        self.strange_ = self.choice[frozenset(range(5)) - frozenset(X[:, 0].astype(int).tolist())]
        return self

    def predict(self, X):
        return (X[:, 0] == self.strange_).astype(float)


@few_points
def test_why_minmax_over_folds_promises_no_more_than_1_minus_2_epsilon():
    """Folds of two points, a bag of five: over all bags the intervals at ε = 1/5 miss with probability 1/3.

    Each test point and pair of folds {a, b}, {c, d} has two triples, the test point with each fold. Triples are matched so that the two of
    a pair share one point, which both models find strange: in 5 of the 15 bags that is the test point, whose score then exceeds all.
    With folds of one point this cannot be (jackknife-minmax).
    """
    triples = [frozenset(triple) for triple in combinations(range(5), 3)]
    pairs = perfect_matching(triples, lambda a, b: len(a & b) == 1)
    choice = {triple: next(iter(a & b)) for a, b in pairs for triple in (a, b)}
    missed = bags = 0
    for test in range(5):
        rest = [point for point in range(5) if point != test]
        for partner in rest[1:]:
            order = [rest[0], partner, *(point for point in rest[1:] if point != partner)]
            X, y = np.array(order, dtype=float)[:, None], np.zeros(4)
            folds = [([2, 3], [0, 1]), ([0, 1], [2, 3])]
            reg = CVPlusRegressor(Chooser(choice), cv=folds, minmax=True).fit(X, y)
            ends = reg.predict_interval([[float(test)]], 0.8)[0]
            missed += not ends[0] <= 0 <= ends[1]
            bags += 1
    assert (missed, bags) == (5, 15)
    assert missed / bags <= 1 - reg.guarantee_.coverage(0.8)


# Few points, categories, ties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_points_give_infinite_intervals_and_a_warning(kind):
    X, y, objects, _ = data(20)
    with pytest.warns(ConformalWarning, match=r"confidence_level=0.99 needs more than"):
        reg = kind(confidence_level=0.99, random_state=0).fit(X, y)
    assert np.isinf(reg.predict_interval(objects)).all()
    with pytest.warns(ConformalWarning, match="infinite"):
        ends = reg.predict_interval(objects, [0.5, 0.999])
    assert np.isfinite(ends[:, :, 0]).all() and (ends[:, :, 1] == [-INF, INF]).all()


def test_the_last_level_that_n_points_reach():
    """n = 19 calibration points: 0.95 takes the largest residual, a little more the line."""
    X, y, objects, _ = data(20)
    model = Ridge().fit(X, y)
    X, y, _, _ = data(19, seed=1)
    reg = SplitConformalRegressor(model, prefit=True, confidence_level=0.95).fit(X, y)
    reach = np.abs(y - model.predict(X)).max()
    assert close(reg.predict_interval(objects)[:, 1] - model.predict(objects), reach)
    with pytest.warns(ConformalWarning):
        assert np.isinf(reg.predict_interval(objects, 0.951)).all()


@few_points
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("minmax", [False, True])
def test_objects_are_compared_with_points_of_their_own_category(kind, minmax):
    options = {} if kind is SplitConformalRegressor else {"minmax": minmax}
    X, y, objects, _ = data(60)
    X[:, 1], objects[:, 1] = X[:, 1] > 0, objects[:, 1] > 0
    reg = kind(random_state=0, categories=1, **options).fit(X, y)
    all_points = kind(random_state=0, **options).fit(X, y)
    kept = reg._calibrated
    ends = reg.predict_interval(objects, 0.8)
    for name in (0, 1):
        own = kept.category == name
        # The same models, the points of one category.
        alone = clone(all_points).fit(X, y)
        model = kept.model[own]
        alone._calibrated = type(kept)(kept.bands, kept.score[own], model, kept.rule)
        of = objects[:, 1] == name
        # Products of fewer objects may be rounded otherwise.
        assert np.allclose(ends[of], alone.predict_interval(objects[of], 0.8), rtol=1e-12, atol=0)
    assert np.isinf(reg.predict_interval(np.full((1, 3), 7.0), 0.8)).all()
    with pytest.raises(ValueError, match="changed to 1 after fit"):
        all_points.set_params(categories=1).predict_interval(objects)


@few_points
@pytest.mark.parametrize("kind", ["own", "minmax", "plus", "CV+"])
@pytest.mark.parametrize("apart", [False, True])
def test_intervals_without_step_functions_are_those_of_the_step_functions(kind, apart):
    """Empty intervals of CQR, categories without points and infinite levels included."""
    X, y, objects, _ = data(80)
    if kind == "own":
        reg = SplitConformalRegressor(conformity_score="cqr", confidence_level=0.8, random_state=0)
    else:
        reg = CVPlusRegressor(random_state=0) if kind == "CV+" else JackknifePlusRegressor(minmax=kind == "minmax")
    X[:, 0] = np.minimum(X[:, 0], 1)
    reg.set_params(categories=(lambda X: np.digitize(X[:, 0], [0, 1.001])) if apart else None).fit(X, y)
    levels = np.array([0.02, 0.1, 0.5, 0.8, 0.9, 0.99])
    slow = np.concatenate([steps.interval(levels) for steps in reg.predict_steps(objects)])
    found = reg.predict_interval(objects, levels)
    assert np.array_equal(found, slow, equal_nan=True)
    assert np.isinf(found).any() and np.isnan(found).any() == (kind in ("own", "CV+"))
    assert np.array_equal(reg.predict_interval(objects, 0.8), found[:, :, 3], equal_nan=True)


def test_a_small_category_is_warned_of():
    X, y, _, _ = data(60)
    with pytest.warns(ConformalWarning, match=r"category 'few'"):
        SplitConformalRegressor(random_state=0, categories=lambda X: np.where(X[:, 0] > 1.2, "few", "many")).fit(X, y)


def test_numbers_at_the_end_of_an_interval_are_inside():
    """The calibration point that sets the width, as an object again, in batches of all sizes."""
    X, y, _, _ = data(100)
    model = Ridge().fit(X[:50], y[:50])
    reg = SplitConformalRegressor(model, prefit=True).fit(X[50:], y[50:])
    residual = np.abs(y[50:] - model.predict(X[50:]))
    at = 50 + int(np.argsort(residual)[index(0.9, 50) - 1])
    for size in (1, 2, 7, 50):
        batch = np.arange(at, at + size) % 100
        lower, upper = reg.predict_interval(X[batch], 0.9)[0]
        assert lower <= y[at] <= upper and reg.predict_p(X[batch], y[batch])[0] > 0.1


@few_points
def test_many_objects_come_in_blocks():
    """More pieces than are held at a time: the same intervals as object by object."""
    X, y, _, _ = data(2100)
    reg = JackknifePlusRegressor().fit(X, y)
    objects = np.random.default_rng(5).normal(size=(4500, 3))
    ends, some = reg.predict_interval(objects), np.arange(0, 4500, 449)
    assert len(list(reg.predict_steps(objects))) > 1
    assert close(ends[some], np.concatenate([reg.predict_interval(objects[i : i + 1]) for i in some]))
    assert close(reg.predict(objects)[some], reg.predict(objects[some]))


# A user's day ----------------------------------------------------------------------------------------------------------


@few_points
@pytest.mark.parametrize(
    "reg",
    [
        SplitConformalRegressor(random_state=0),
        SplitConformalRegressor(make_pipeline(StandardScaler(), KNeighborsRegressor(3)), random_state=0),
        SplitConformalRegressor(conformity_score="normalized", random_state=0),
        SplitConformalRegressor(conformity_score="cqr", random_state=0),
        SplitConformalRegressor((QuantileRegressor(), QuantileRegressor()), conformity_score="cqr", random_state=0),
        CVPlusRegressor(random_state=0),
        CVPlusRegressor(KNeighborsRegressor(3), minmax=True, random_state=0),
        JackknifePlusRegressor(random_state=0),
        JackknifePlusRegressor(make_pipeline(Ridge()), minmax=True, random_state=0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("categories", [None, 0])
def test_a_saved_regressor_is_the_same_to_the_bit(reg, categories, tmp_path):
    X, y, objects, _ = data(60)
    X[:, 0], objects[:, 0] = X[:, 0] > 0, objects[:, 0] > 0
    reg = clone(reg).set_params(categories=categories).fit(X, y)
    reg.save(tmp_path / "reg.safetensors")
    again = fullconformal.load(tmp_path / "reg.safetensors")
    ends = reg.predict_interval(objects, LEVELS)
    assert np.array_equal(again.predict_interval(objects, LEVELS), ends, equal_nan=True)
    assert np.array_equal(again.predict(objects), reg.predict(objects))
    assert again.get_params()["confidence_level"] == 0.9 and again.guarantee_ == reg.guarantee_


@few_points
@pytest.mark.filterwarnings("ignore:y has")
@parametrize_with_checks(
    [SplitConformalRegressor(), CVPlusRegressor(n_folds=2), JackknifePlusRegressor()],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_checks_pass(estimator, check):
    check(estimator)


@few_points
def test_frames_forests_and_the_same_seed():
    frame, y = load_diabetes(return_X_y=True, as_frame=True)
    model = RandomForestRegressor(10)
    for kind in (SplitConformalRegressor, CVPlusRegressor):
        one, two = (kind(model, random_state=7).fit(frame[:200], y[:200]) for _ in range(2))
        assert np.array_equal(one.predict_interval(frame[200:]), two.predict_interval(frame[200:]))
        with pytest.raises(ValueError, match="feature names"):
            one.predict_interval(frame[200:].rename(columns={"age": "years"}))


def test_workers_change_nothing():
    X, y, objects, _ = data(40)
    alone, shared = (CVPlusRegressor(n_jobs=jobs, random_state=0).fit(X, y) for jobs in (None, 2))
    assert np.array_equal(alone.predict_interval(objects), shared.predict_interval(objects))


@pytest.mark.parametrize(
    ("reg", "words"),
    [
        (SplitConformalRegressor(Ridge), "is a class"),
        (SplitConformalRegressor(LogisticRegression()), "is a classifier"),
        (SplitConformalRegressor(StandardScaler()), "has no fit and predict"),
        (SplitConformalRegressor(confidence_level=90), "strictly between 0 and 1"),
        (SplitConformalRegressor(conformity_score="aps"), "conformity_score='aps' is unknown"),
        (SplitConformalRegressor(calibration_size=2), "calibration_size=2"),
        (SplitConformalRegressor(beta=-1), "beta=-1"),
        (SplitConformalRegressor(prefit=True), "prefit=True needs a fitted estimator"),
        (SplitConformalRegressor(Ridge(), prefit=True), "not fitted"),
        (SplitConformalRegressor(Ridge(), conformity_score="cqr"), "QuantileRegressor()"),
        (SplitConformalRegressor(HistGradientBoostingRegressor(), conformity_score="cqr"), "loss='quantile'"),
        (SplitConformalRegressor((Ridge(), Ridge())), "for conformity_score='cqr' only"),
        (SplitConformalRegressor(difficulty=Ridge()), "only conformity_score='normalized'"),
        (CVPlusRegressor(n_folds=1), "n_folds=1"),
        (CVPlusRegressor(n_folds=100), "n_folds=100 exceeds the 30 points"),
        (CVPlusRegressor(cv=3), "cv=3"),
        (CVPlusRegressor(cv=[([0, 1], [2, 3])]), "each of the 30 points"),
        (CVPlusRegressor(minmax="yes"), "minmax='yes'"),
        (CVPlusRegressor(n_jobs=0), "n_jobs=0"),
        (JackknifePlusRegressor(verbose=-1), "verbose=-1"),
    ],
    ids=repr,
)
def test_bad_parameters_are_named(reg, words):
    X, y, _, _ = data(30)
    with pytest.raises((ValueError, TypeError)) as caught:
        reg.fit(X, y)
    assert words in str(caught.value)


def test_bad_data_are_named():
    X, y, _, _ = data(30)
    with pytest.raises(ValueError, match="numbers"):
        SplitConformalRegressor().fit(X, ["a", "b"] * 15)
    with pytest.raises(ValueError, match="NaN or infinite at 1"):
        SplitConformalRegressor().fit(X, np.where(np.arange(30) == 3, NAN, y))
    with pytest.raises(ValueError, match="leverage"):
        JackknifePlusRegressor(LinearRegression()).fit(np.eye(30), y)


@few_points
def test_constant_numbers_and_large_units():
    X, y, objects, _ = data(60)
    for kind in KINDS:
        constant = kind(DummyRegressor(), random_state=0).fit(X, np.full(60, 7.0)).predict_interval(objects)
        assert close(constant, np.full_like(constant, 7.0))
        small, large = (kind(random_state=0).fit(X, unit * y).predict_interval(objects) for unit in (1, 1e12))
        assert close(large / 1e12, small, 1e-9)
