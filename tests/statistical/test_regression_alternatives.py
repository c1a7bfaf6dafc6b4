"""Coverage of intervals of the alternatives within their own guarantees, against binomial bands with fixed seeds.

Every trial draws a fresh bag and one object. Split conformal regression misses with probability ⌊ε(k + 1)⌋/(k + 1) exactly, k calibration
points and no ties, so its errors are judged on both sides; CV+ and jackknife+ miss at most 2ε, jackknife-minmax ε: one side.
"""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.linear_model import LinearRegression, QuantileRegressor, Ridge
from sklearn.neighbors import KNeighborsRegressor

from fullconformal import CVPlusRegressor, JackknifePlusRegressor, SplitConformalRegressor

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
EPSILONS = np.array([0.05, 0.1, 0.2])
TRIALS = 1000


def noise(kind, rng, X):
    """Gaussian, heavy-tailed, or with a spread that grows with the first feature."""
    if kind == "heavy":
        return rng.standard_t(2, size=len(X))
    spread = 0.1 + np.abs(X[:, 0]) if kind == "uneven" else 1.0
    return spread * rng.normal(size=len(X))


def draw(rng, n, d, kind):
    X = rng.normal(size=(n, d))
    return X, X @ np.linspace(-1, 1, d) + noise(kind, rng, X)


def misses(reg, n, d, kind, trials=TRIALS, **options):
    """How many of the trials' intervals miss, at each ε."""
    missed = np.zeros(len(EPSILONS), dtype=int)
    for seed in range(trials):
        rng = np.random.default_rng([seed, n, d])
        X, y = draw(rng, n + 1, d, kind)
        if "random_state" in reg.get_params():
            reg.set_params(random_state=seed)
        ends = reg.fit(X[:n], y[:n], **options).predict_interval(X[n:], 1 - EPSILONS)[0]
        missed += ~((ends[0] <= y[n]) & (y[n] <= ends[1]))
    return missed


def band(rate, trials=TRIALS):
    return binom.interval(0.999, trials, rate)


def prefit(d, kind):
    """Models that have seen nothing of the trials' data."""
    X, y = draw(np.random.default_rng(99), 60, d, kind)
    model = Ridge().fit(X, y)
    spread = KNeighborsRegressor(10).fit(X, np.abs(y - model.predict(X)))
    pair = tuple(QuantileRegressor(quantile=q, alpha=0).fit(X, y) for q in (0.05, 0.95))
    return {
        "absolute": SplitConformalRegressor(model, prefit=True),
        "normalized": SplitConformalRegressor(model, conformity_score="normalized", difficulty=spread, prefit=True),
        "cqr": SplitConformalRegressor(pair, conformity_score="cqr", prefit=True),
    }


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "uneven"])
@pytest.mark.parametrize("score", ["absolute", "normalized", "cqr"])
def test_split_errs_as_often_as_it_says(score, kind):
    k = 39
    missed = misses(prefit(5, kind)[score], k, 5, kind)
    for count, epsilon in zip(missed, EPSILONS, strict=True):
        low, high = band(np.floor(epsilon * (k + 1) + 1e-9) / (k + 1))
        assert low <= count <= high


def test_split_with_its_own_training_errs_as_often_as_it_says():
    missed = misses(SplitConformalRegressor(LinearRegression(), calibration_size=0.475), 40, 5, "gaussian")
    for count, epsilon in zip(missed, EPSILONS, strict=True):
        low, high = band(np.floor(epsilon * 20 + 1e-9) / 20)
        assert low <= count <= high


@pytest.mark.parametrize(("n", "d"), [(30, 5), (40, 60)])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "uneven"])
@pytest.mark.parametrize("minmax", [False, True])
def test_jackknife_plus_keeps_its_promise(n, d, kind, minmax):
    missed = misses(JackknifePlusRegressor(Ridge(0.1), minmax=minmax), n, d, kind)
    times = 1 if minmax else 2
    for count, epsilon in zip(missed, EPSILONS, strict=True):
        assert count <= band(times * epsilon)[1]
    if not minmax:
        # In practice about ε, not 2ε and not 0: half of it at ε = 0.2.
        assert missed[-1] >= 0.1 * TRIALS


def test_cv_plus_keeps_its_promise():
    missed = misses(CVPlusRegressor(LinearRegression()), 40, 5, "uneven", trials=400)
    for count, epsilon in zip(missed, EPSILONS, strict=True):
        assert count <= band(2 * epsilon, 400)[1]


def test_the_promise_holds_in_each_category():
    """Two categories of unlike noise: without them the noisy one is missed more often than ε, with them it is not."""
    X, y = draw(np.random.default_rng(99), 60, 3, "gaussian")
    model = Ridge().fit(np.column_stack([X, np.zeros(60)]), y)
    missed = {None: 0, -1: 0}
    trials = 600
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        X, y = draw(rng, 61, 3, "gaussian")
        kind = np.arange(61) % 2
        X = np.column_stack([X, kind])
        # The object is of the noisy category.
        y = y + (kind == 0) * rng.normal(size=61) * 4
        for categories in missed:
            reg = SplitConformalRegressor(model, prefit=True, categories=categories).fit(X[:60], y[:60])
            ends = reg.predict_interval(X[60:], 0.8)[0]
            missed[categories] += not ends[0] <= y[60] <= ends[1]
    # 30 of the 60 calibration points are of the category.
    low, high = band(np.floor(0.2 * 31) / 31, trials)
    assert low <= missed[-1] <= high
    assert missed[None] > band(0.2, trials)[1]
