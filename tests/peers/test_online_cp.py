"""Ridge regression against online-cp.

Its interval at ε has two ends of ε/2 each, from signed residuals: quantiles of the conformal predictive distribution; `predict_interval` is
the set of p > ε by |residual|. So quantiles are compared, of rank ⌊(ε/2)(n + 1)⌋ below and ⌈(1 − ε/2)(n + 1)⌉ above. No intercept.
"""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from fullconformal import FullConformalRegressor

online_cp = pytest.importorskip("online_cp")


@pytest.mark.parametrize("studentised", [False, True])
@pytest.mark.parametrize("a", [0.1, 5.0])
def test_ridge(a, studentised):
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(100, 4)), rng.normal(size=(10, 4))
    y = X.sum(axis=1) + rng.normal(size=100)
    theirs = online_cp.ConformalRidgeRegressor(a=a, studentised=studentised)
    theirs.learn_initial_training_set(X, y)
    scheme = "studentized" if studentised else "ordinary"
    reg = FullConformalRegressor(Ridge(alpha=a, fit_intercept=False), scheme=scheme).fit(X, y)
    for epsilon in (0.1, 0.2):
        ranks = np.floor(epsilon / 2 * 101), np.ceil((1 - epsilon / 2) * 101)
        ours = reg.predict_quantile(new, np.array(ranks) / 101)
        for x, (lower, upper) in zip(new, ours, strict=True):
            found = theirs.predict(x, epsilon=epsilon, bounds="both")
            np.testing.assert_allclose([found.lower, found.upper], [lower, upper], atol=1e-8)
