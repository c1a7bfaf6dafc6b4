"""Ridge, kernel ridge, k-NN and lasso regressions, and LSPM, against online-cp 0.4.

Where its conventions are ours: the predictive distributions (LSPM) of ridge and kernel ridge, Π(y, τ) for all y and τ; the lasso, whose
interval is the hull of the y with p(y) > ε by |residual|. Where they are not:

- Its intervals of ridge, kernel ridge and k-NN at ε have two ends of ε/2 each, from signed residuals; `predict_interval` is the hull of
  p(y) > ε by |residual|. So they are compared with quantiles of the predictive distribution, of rank ⌊(ε/2)(n + 1)⌋ and
  ⌈(1 − ε/2)(n + 1)⌉.
- None of its models has an intercept.
- Its `compute_p_value` of k-NN leaves the scores of the training points as they are without the candidate, so its `predict` is not the set
  of y with p(y) > ε of it. Ours are compared with refits of the whole bag (tests/test_regression.py).
- Its lasso looks no further than a quarter of the range of y beyond it, and begins at a solution that is right to 1e-6: it is given one
  that is right to rounding.
"""

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Ridge
from sklearn.neighbors import KNeighborsRegressor

from fullconformal import FullConformalRegressor

online_cp = pytest.importorskip("online_cp")

N = 100
RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(N, 4)), RNG.normal(size=(10, 4))
Y = X.sum(axis=1) + RNG.normal(size=N)


def both_ends(reg, epsilon):
    """Quantiles (10, 2) of our predictive distributions, at online-cp's ranks."""
    ranks = np.floor(epsilon / 2 * (N + 1)), np.ceil((1 - epsilon / 2) * (N + 1))
    return reg.predict_quantile(NEW, np.array(ranks) / (N + 1))


def intervals(theirs, epsilon):
    theirs.learn_initial_training_set(X, Y)
    found = [theirs.predict(x, epsilon=epsilon) for x in NEW]
    return np.array([[one.lower, one.upper] for one in found])


@pytest.mark.parametrize("epsilon", [0.1, 0.2])
@pytest.mark.parametrize("scheme", ["ordinary", "studentized"])
@pytest.mark.parametrize("a", [0.1, 5.0])
def test_ridge(a, scheme, epsilon):
    reg = FullConformalRegressor(Ridge(alpha=a, fit_intercept=False), scheme=scheme).fit(X, Y)
    theirs = online_cp.ConformalRidgeRegressor(a=a, studentised=scheme == "studentized")
    np.testing.assert_allclose(both_ends(reg, epsilon), intervals(theirs, epsilon), atol=1e-8)


@pytest.mark.parametrize("scheme", ["ordinary", "studentized"])
def test_kernel_ridge(scheme):
    reg = FullConformalRegressor(KernelRidge(alpha=0.5, kernel="rbf", gamma=0.1), scheme=scheme).fit(X, Y)
    kernel = online_cp.kernels.GaussianKernel(np.sqrt(1 / 0.2))
    theirs = online_cp.KernelConformalRidgeRegressor(kernel, a=0.5, studentised=scheme == "studentized")
    np.testing.assert_allclose(both_ends(reg, 0.1), intervals(theirs, 0.1), atol=1e-8)


@pytest.mark.parametrize("k", [1, 5])
def test_nearest_neighbours(k):
    reg = FullConformalRegressor(KNeighborsRegressor(k), scheme="deleted").fit(X, Y)
    theirs = online_cp.ConformalNearestNeighboursRegressor(k=k)
    np.testing.assert_allclose(both_ends(reg, 0.1), intervals(theirs, 0.1), atol=1e-8)


@pytest.mark.parametrize("l2", [0.0, 3.0])
@pytest.mark.parametrize("l1", [4.0, 20.0])
def test_lasso(l1, l2):
    # Its penalties are of sums of squares over the bag of N + 1 points, scikit-learn's of means.
    alpha, ratio = (l1 + l2) / (N + 1), l1 / (l1 + l2)
    reg = FullConformalRegressor(ElasticNet(alpha=alpha, l1_ratio=ratio, fit_intercept=False), scheme="ordinary")
    theirs = online_cp.ConformalLassoRegressor(lam=l1, rho=l2)
    theirs.learn_initial_training_set(X, Y)
    start = ElasticNet(alpha=(l1 + l2) / N, l1_ratio=ratio, fit_intercept=False, tol=1e-14, max_iter=10**5)
    theirs.beta = start.fit(X, Y).coef_
    for epsilon in (0.1, 0.3):
        found = [theirs.predict(x, epsilon=epsilon) for x in NEW]
        ours = reg.fit(X, Y).predict_interval(NEW, 1 - epsilon)
        np.testing.assert_allclose(ours, [[one.lower, one.upper] for one in found], atol=1e-8)


@pytest.mark.parametrize("kernel", [False, True])
def test_predictive_distributions(kernel):
    model = KernelRidge(alpha=0.5, kernel="rbf", gamma=0.1) if kernel else Ridge(alpha=0.5, fit_intercept=False)
    theirs = (
        online_cp.CPS.KernelRidgePredictionMachine(online_cp.kernels.GaussianKernel(np.sqrt(1 / 0.2)), a=0.5)
        if kernel
        else online_cp.CPS.RidgePredictionMachine(a=0.5)
    )
    theirs.learn_initial_training_set(X, Y)
    reg = FullConformalRegressor(model).fit(X, Y)
    at = np.tile(np.linspace(-6, 6, 41), (len(NEW), 1))
    found = [theirs.predict_cpd(x) for x in NEW]
    for tau in (0.0, 0.3, 1.0):
        expected = [[one(y, tau) for y in row] for one, row in zip(found, at, strict=True)]
        np.testing.assert_allclose(reg.predict_cdf(NEW, at, tau=tau), expected, atol=1e-12)
    levels = np.array([0.05, 0.5, 0.95])
    expected = [[one.quantile(q, tau=0.0) for q in levels] for one in found]
    np.testing.assert_allclose(reg.predict_quantile(NEW, levels), expected, atol=1e-8)
