"""K-fold full CP: exact with honest candidates, and within chance of it with those that K − 1 models have not seen."""

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.svm import SVC

from fullconformal import FullConformalClassifier
from fullconformal.models import mlp

pytestmark = pytest.mark.filterwarnings("ignore")
LEVELS = (0.05, 0.1, 0.2)


def sample(rng, n, d=3):
    """Three classes around means that overlap."""
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, d)) + 1.2 * np.eye(3, d)[y], y


class Means(ClassifierMixin, BaseEstimator):
    """Probabilities from distances to the classes' means: a learner of a few microseconds, which one point moves a lot."""

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        self.means_ = np.stack([X[y == label].mean(0) for label in self.classes_])
        return self

    def predict_proba(self, X):
        f = -((X[:, None] - self.means_) ** 2).sum(-1)
        proba = np.exp(f - f.max(1, keepdims=True))
        return proba / proba.sum(1, keepdims=True)


def test_honest_candidates_are_exact():
    """One object a bag, n = 30, K = 5; scores have no ties, so that P(p ≤ ε) = ⌊31ε⌋/31, and a band of 99.9 % holds the errors."""
    trials, wrong = 1000, np.zeros(3)
    for trial in range(trials):
        X, y = sample(np.random.default_rng(trial), 31)
        clf = FullConformalClassifier(Means(), method="folds", folds=5, random_state=trial).fit(X[:30], y[:30])
        label = int(np.searchsorted(clf.classes_, y[30]))
        if label == len(clf.classes_) or clf.classes_[label] != y[30]:
            # A label that was never seen is an error.
            wrong += 1
            continue
        alpha, tau = clf._fitted.refits().scores(X[30:], label, np.arange(30), 1.0, lambda: None)
        wrong += (1 + (alpha >= tau).sum()) / 31 <= np.asarray(LEVELS) + 1e-12
    for count, epsilon in zip(wrong, LEVELS, strict=True):
        low, high = binom.interval(0.999, trials, np.floor(31 * epsilon + 1e-9) / 31)
        assert low <= count <= high, (count / trials, epsilon)


def network(update):
    torch.manual_seed(0)
    return FullConformalClassifier(
        mlp(3, (5,), 3, "tanh"), method="folds", folds=5, update=update, l2=0.03, max_epochs=10, random_state=0
    )


MODELS = {
    "network": lambda: network("none"),
    "network, influence": lambda: network("influence"),
    "boosting": lambda: FullConformalClassifier(
        GradientBoostingClassifier(n_estimators=8, max_depth=2), folds=5, random_state=0
    ),
    "support vectors": lambda: FullConformalClassifier(SVC(probability=True), folds=5, random_state=0),
}


@pytest.mark.parametrize("n", [40, 100, 300])
@pytest.mark.parametrize("name", MODELS)
def test_candidates_that_were_not_seen_hardly_matter(name, n):
    """Errors at ε = 0.05, 0.1 and 0.2 of 60 objects in each of 40 bags (networks: 8), at most two standard errors between bags above ε.

    That is no proof of ε: with bags like these an excess of 0.02 (networks: 0.04) is found every other time. By chance alone one figure in
    forty is above the band; the seeds were set before the first run. 200 bags of 300 points from the same seeds, at the three levels:
    boosting 0.047, 0.096, 0.195, support vectors 0.047, 0.098, 0.199, standard errors 0.002, 0.003, 0.004.
    """
    errors, bags = [], 8 if name.startswith("network") else 40
    for trial in range(bags):
        rng = np.random.default_rng([20, n, trial])
        (X, y), (Xt, yt) = sample(rng, n), sample(rng, 60)
        p = MODELS[name]().fit(X, y).predict_p(Xt)[np.arange(60), yt]
        errors.append([(p <= epsilon + 1e-12).mean() for epsilon in LEVELS])
    mean, error = np.mean(errors, 0), np.std(errors, 0, ddof=1) / np.sqrt(bags)
    assert (mean <= np.array(LEVELS) + 2 * error).all(), (mean, error)
