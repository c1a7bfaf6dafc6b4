"""Coverage of exact full conformal regression against binomial bands, with fixed seeds, one object a bag.

p-values of exact methods are uniform on 1/(n + 1), …, 1 where scores have no ties, so that errors at ε have the rate ⌊ε(n + 1)⌋/(n + 1)
exactly; the band holds their number with probability 99.9 %. Where scores tie, the rate is a bound. Nothing is assumed of the noise.
"""

import warnings

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.decomposition import PCA
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline

from fullconformal import FullConformalRegressor

LEVELS = (0.05, 0.1, 0.2)
# (n, d) and how many bags.
SIZES = [(30, 5, 600), (40, 60, 400), (200, 10, 300)]


def noise(kind, rng, X):
    n = len(X)
    if kind == "Gaussian":
        return rng.normal(size=n)
    if kind == "heavy-tailed":
        return rng.standard_t(1.5, size=n)
    return rng.normal(size=n) * np.exp(X[:, 0])


def errors(make, n, d, trials, kind):
    """How many bags' objects have a p-value of at most ε, at each ε."""
    p = np.empty(trials)
    for trial in range(trials):
        rng = np.random.default_rng([7, trial])
        X = rng.normal(size=(n + 1, d))
        y = X[:, :3].sum(axis=1) + noise(kind, rng, X)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            p[trial] = make().fit(X[:n], y[:n]).predict_p(X[n:], y[n:])[0]
    return [(p <= epsilon + 1e-12).sum() for epsilon in LEVELS]


def check(make, n, d, trials, kind, ties=False):
    for wrong, epsilon in zip(errors(make, n, d, trials, kind), LEVELS, strict=True):
        low, high = binom.interval(0.999, trials, np.floor(epsilon * (n + 1) + 1e-9) / (n + 1))
        assert (0 if ties else low) <= wrong <= high, (wrong / trials, epsilon)


@pytest.mark.parametrize("kind", ["Gaussian", "heavy-tailed", "heteroscedastic"])
@pytest.mark.parametrize(("n", "d", "trials"), SIZES)
@pytest.mark.parametrize("scheme", ["ordinary", "studentized", "deleted"])
def test_ridge(scheme, n, d, trials, kind):
    check(lambda: FullConformalRegressor(Ridge(1.0), scheme=scheme), n, d, trials, kind)


def whitened():
    """A transformer that follows the training objects closely: fitted without the object, 0.13 of 300 bags erred at 0.1."""
    return make_pipeline(PCA(whiten=True), Ridge(1.0))


MODELS = {
    "whitened columns in the bag": (whitened(), [(40, 36, 450)]),
    "least squares": (LinearRegression(), SIZES),
    "chosen penalty": (RidgeCV(alphas=(0.1, 1.0, 10.0)), SIZES),
    "kernel ridge": (KernelRidge(alpha=1.0, kernel="rbf", gamma=0.1), SIZES),
    "Gaussian process": (GaussianProcessRegressor(RBF(3.0) + WhiteKernel(0.5), optimizer=None), SIZES),
    "lasso": (Lasso(alpha=0.2), SIZES),
    "elastic net": (ElasticNet(alpha=0.3, l1_ratio=0.5), SIZES),
    "k-NN": (KNeighborsRegressor(3), SIZES),
}


@pytest.mark.parametrize("kind", ["Gaussian", "heavy-tailed", "heteroscedastic"])
@pytest.mark.parametrize("name", MODELS)
def test_other_models(name, kind):
    model, sizes = MODELS[name]
    for n, d, trials in sizes:
        # Of two points that are each other's nearest neighbours the scores may be equal; a wide table without penalty has all p = 1.
        ties = name == "k-NN" or (name == "least squares" and d > n)
        check(lambda: FullConformalRegressor(model), n, d, trials // 3, kind, ties)


def test_categories_are_covered_one_by_one():
    """The noise of one category is ten times that of the other: each has its own rate."""
    trials, n = 600, 60
    p = np.empty((trials, 2))
    for trial in range(trials):
        rng = np.random.default_rng([8, trial])
        kind = np.arange(n + 2) % 2
        X = np.column_stack([rng.normal(size=(n + 2, 3)), kind])
        y = X[:, :3].sum(axis=1) + rng.normal(size=n + 2) * np.where(kind, 10.0, 1.0)
        p[trial] = FullConformalRegressor(Ridge(1.0), categories=3).fit(X[:n], y[:n]).predict_p(X[n:], y[n:])
    for category in (0, 1):
        for epsilon in (0.1, 0.2):
            low, high = binom.interval(0.999, trials, np.floor(epsilon * 31 + 1e-9) / 31)
            assert low <= (p[:, category] <= epsilon + 1e-12).sum() <= high


class Line(RegressorMixin, BaseEstimator):
    """A line through the origin by least squares: a learner of a few microseconds, which one point moves a lot."""

    def fit(self, X, y):
        self.slope_ = X[:, 0] @ y / (X[:, 0] @ X[:, 0])
        return self

    def predict(self, X):
        return self.slope_ * X[:, 0]


def test_honest_candidates_of_folds_are_exact():
    """One object a bag, n = 30, K = 5; scores have no ties, so that P(p ≤ ε) = ⌊31ε⌋/31, and a band of 99.9 % holds the errors."""
    trials, p = 500, np.empty(500)
    for trial in range(trials):
        rng = np.random.default_rng([9, trial])
        X = rng.standard_t(2, size=(31, 1))
        y = X[:, 0] + rng.normal(size=31)
        fitted = FullConformalRegressor(Line(), folds=5, random_state=trial).fit(X[:30], y[:30])._fitted
        alpha, tau = fitted.refits().scores(X[30:], y[30], np.arange(30), 1.0, lambda: None)
        p[trial] = (1 + (alpha >= tau).sum()) / 31
    for epsilon in LEVELS:
        low, high = binom.interval(0.999, trials, np.floor(31 * epsilon + 1e-9) / 31)
        assert low <= (p <= epsilon + 1e-12).sum() <= high


UNSEEN = {
    "boosting by folds": lambda: GradientBoostingRegressor(n_estimators=8, max_depth=2),
    "forest, out-of-bag": lambda: RandomForestRegressor(15),
}


@pytest.mark.parametrize("kind", ["Gaussian", "heavy-tailed", "heteroscedastic"])
@pytest.mark.parametrize("name", UNSEEN)
def test_candidates_that_were_not_seen_hardly_matter(name, kind):
    """Errors of 40 objects in each of 10 bags of 100, at most two and a half standard errors between bags above ε (six such tests)."""
    errors = []
    for trial in range(10):
        rng = np.random.default_rng([10, trial])
        X = rng.normal(size=(140, 3))
        y = X.sum(axis=1) + noise(kind, rng, X)
        reg = FullConformalRegressor(UNSEEN[name](), folds=5, random_state=trial).fit(X[:100], y[:100])
        p = reg.predict_p(X[100:], y[100:])
        errors.append([(p <= epsilon).mean() for epsilon in LEVELS])
    mean, error = np.mean(errors, 0), np.std(errors, 0, ddof=1) / np.sqrt(10)
    assert (mean <= np.array(LEVELS) + 2.5 * error).all() and mean[-1] > 0.1, (mean, error)
