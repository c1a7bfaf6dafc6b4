"""Errors of forests by their out-of-bag points: at most two standard errors above ε, in small bags.

The trees that would have drawn a candidate are grown without it, so nothing is proved; this is what is measured. A trial draws a fresh bag
and five objects. The objects of a trial share a bag, so that a trial is one observation of the standard error.
"""

import numpy as np
import pytest
from sklearn.ensemble import BaggingClassifier, ExtraTreesClassifier, RandomForestClassifier
from sklearn.tree import DecisionTreeClassifier

from fullconformal import FullConformalClassifier

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
LEVELS = np.array([0.05, 0.1, 0.2])
MEANS = np.array([[0.0, 0.0], [2.0, 0.0], [1.0, 0.8]])
# Each grows 25 trees, of which as many score a point as are asked for.
FORESTS = {
    "random forest": RandomForestClassifier(9),
    "extra trees, half the points": ExtraTreesClassifier(15, bootstrap=True, max_samples=0.5),
    "bagged shallow trees": BaggingClassifier(DecisionTreeClassifier(max_depth=3), n_estimators=9),
}


def draw(rng, n):
    """Three normal classes that overlap, the rarest between the others, and three columns of noise."""
    y = rng.choice(3, p=[0.45, 0.35, 0.2], size=n)
    return np.hstack([rng.normal(size=(n, 2)) + MEANS[y], rng.normal(size=(n, 3))]), y


@pytest.mark.parametrize(("n", "trials"), [(40, 80), (100, 60), (300, 40)])
@pytest.mark.parametrize("name", FORESTS)
def test_errors_are_near_epsilon(name, n, trials):
    errors, sizes = np.empty((trials, len(LEVELS))), np.empty(trials)
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        X, y = draw(rng, n)
        objects, truth = draw(rng, 5)
        p = FullConformalClassifier(FORESTS[name], random_state=seed).fit(X, y).predict_p(objects)
        errors[seed] = (p[np.arange(5), truth][:, None] <= LEVELS + 1e-12).mean(0)
        sizes[seed] = (p > 0.2).sum(1).mean()
    above = errors.mean(0) - LEVELS
    assert (above <= 2 * errors.std(0, ddof=1) / np.sqrt(trials)).all(), errors.mean(0)
    # Sets of all three labels would err never.
    assert sizes.mean() < 2.5 and errors.mean(0)[-1] > 0.05
