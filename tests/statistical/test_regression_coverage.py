"""Coverage of exact full conformal regression against binomial bands, with fixed seeds, one object a bag.

p-values of exact methods are uniform on 1/(n + 1), …, 1 where scores have no ties, so that errors at ε have the rate ⌊ε(n + 1)⌋/(n + 1)
exactly; the band holds their number with probability 99.9 %. Where scores tie, the rate is a bound. Nothing is assumed of the noise.
"""

import warnings

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor

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


MODELS = {
    "least squares": (LinearRegression(), SIZES),
    "chosen penalty": (RidgeCV(alphas=(0.1, 1.0, 10.0)), SIZES),
    "kernel ridge": (KernelRidge(alpha=1.0, kernel="rbf", gamma=0.1), SIZES),
    "lasso": (Lasso(alpha=0.2), [(30, 5, 300), (40, 60, 90)]),
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


def test_groups_are_covered_one_by_one():
    """The noise of one group is ten times that of the other: each has its own rate."""
    trials, n = 600, 60
    p = np.empty((trials, 2))
    for trial in range(trials):
        rng = np.random.default_rng([8, trial])
        X = rng.normal(size=(n + 2, 3))
        groups = np.arange(n + 2) % 2
        y = X.sum(axis=1) + rng.normal(size=n + 2) * np.where(groups, 10.0, 1.0)
        reg = FullConformalRegressor(Ridge(1.0)).fit(X[:n], y[:n], groups=groups[:n])
        p[trial] = reg.predict_p(X[n:], y[n:], groups=groups[n:])
    for group in (0, 1):
        for epsilon in (0.1, 0.2):
            low, high = binom.interval(0.999, trials, np.floor(epsilon * 31 + 1e-9) / 31)
            assert low <= (p[:, group] <= epsilon + 1e-12).sum() <= high
