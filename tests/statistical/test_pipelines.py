"""Transformers in the bag keep the promise where transformers fitted to the training objects alone break it worst.

One test point a bag, so that errors are independent: their number is at most the upper end of the 99.9 % band of ε.
"""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from fullconformal import FullConformalClassifier
from fullconformal.models import KernelDensityClassifier

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

LEVELS = np.array([0.05, 0.1, 0.2])


def normal(rng, n, d):
    """Normal features, of which the first says something of the label."""
    X = rng.normal(size=(n, d))
    return X, (X[:, 0] + rng.normal(size=n) > 0).astype(int)


def identifiers(rng, n, d):
    """A column that names each object, and labels that have nothing to do with it."""
    return rng.integers(0, 10**6, (n, d)).astype(str), rng.integers(0, 2, n)


def errors(pipe, draw, n, d, bags, **options):
    """Errors at each ε over bags of n points with one test point each."""
    wrong = np.zeros(len(LEVELS))
    for bag in range(bags):
        X, y = draw(np.random.default_rng([7, bag]), n + 1, d)
        p = FullConformalClassifier(pipe, **options).fit(X[:n], y[:n]).predict_p(X[n:])[0, y[n]]
        wrong += p <= LEVELS + 1e-12
    return wrong


WORST = {
    "PCA and logistic regression": (make_pipeline(PCA(whiten=True), LogisticRegression()), normal, 40, 36, 150, {}),
    "PCA and kernel density": (make_pipeline(PCA(whiten=True), KernelDensityClassifier(1.0)), normal, 40, 36, 300, {}),
    "PCA and neighbours": (make_pipeline(PCA(25, whiten=True), KNeighborsClassifier()), normal, 40, 30, 300, {}),
    "identifiers": (
        make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression()), identifiers, 59, 1, 150, {"scheme": "ordinary"},
    ),
    "most of the variance": (make_pipeline(PCA(0.95), LogisticRegression()), normal, 60, 30, 60, {"scheme": "ordinary"}),
}  # fmt: skip


@pytest.mark.parametrize("setting", WORST)
def test_in_the_bag_the_promise_is_kept(setting):
    pipe, draw, n, d, bags, options = WORST[setting]
    wrong = errors(pipe, draw, n, d, bags, **options)
    assert (wrong <= binom.interval(0.999, bags, LEVELS)[1]).all(), wrong / bags


@pytest.mark.parametrize("setting", ["PCA and logistic regression", "PCA and kernel density", "identifiers"])
def test_the_band_notices_transformers_that_are_fixed(setting):
    pipe, draw, n, d, bags, options = WORST[setting]
    wrong = errors(pipe, draw, n, d, bags, transformers="fixed", **options)
    assert wrong[1] > binom.interval(0.999, bags, 0.1)[1], wrong / bags
