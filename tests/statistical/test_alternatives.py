"""Coverage of the alternatives within their own guarantees, against binomial bands with fixed seeds.

Every trial draws a fresh bag and one or a few test points. Split conformal prediction has P(p ≤ ε) = ⌊ε(k + 1)⌋/(k + 1) with k calibration
points and scores without ties, so its errors are judged on both sides. The others guarantee errors of at most 2ε, one side only; that
their sets are not merely large is judged by their size.
"""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
)
from fullconformal.conformity import SCORES
from fullconformal.pvalues import sequential_mean

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
RAPS = {"k_reg": 1, "lambda_reg": 0.05}
MEANS = np.array([[0.0, 0.0], [2.0, 0.0], [1.0, 0.8]])


def draw(rng, n):
    """Three normal classes that overlap, the rarest between the others."""
    y = rng.choice(3, p=[0.45, 0.35, 0.2], size=n)
    return rng.normal(size=(n, 2)) + MEANS[y], y


def trial(clf, seed, n, m):
    """The largest ε (m, C) at which labels are in the sets of m fresh objects, by a classifier fitted to n; and the true labels."""
    rng = np.random.default_rng(seed)
    X, y = draw(rng, n)
    objects, truth = draw(rng, m)
    return clf.set_params(random_state=seed).fit(X, y).predict_epsilon(objects), truth


def band(total, rate):
    return binom.interval(0.999, total, rate)


# Models that have seen nothing of the data, so that a trial is a draw of calibration points and one object: LDA fitted once.
MODEL = LinearDiscriminantAnalysis().fit(*draw(np.random.default_rng(12345), 60))


def split_errors(trials, k, **options):
    """Whether ε ≤ 0.1 and ≤ 0.2 for the true label (trials, 2), and the true labels."""
    clf = SplitConformalClassifier(MODEL, prefit=True, **options)
    wrong, truths = [], []
    for seed in range(trials):
        epsilon, truth = trial(clf, seed, k, 1)
        wrong.append(epsilon[0, truth[0]] <= np.array([0.1, 0.2]) + 1e-12)
        truths.append(truth[0])
    return np.array(wrong), np.array(truths)


@pytest.mark.parametrize("score", SCORES)
def test_split_is_exact_for_every_score(score):
    """39 calibration points, whose scores do not tie: errors of exactly ⌊40ε⌋/40 = ε, of few points and any score."""
    wrong, _ = split_errors(600, 39, conformity_score=score, **RAPS)
    for i, epsilon in enumerate((0.1, 0.2)):
        low, high = band(600, epsilon)
        assert low <= wrong[:, i].sum() <= high, wrong.mean(0)


@pytest.mark.parametrize(
    "options", [{"randomized": False}, {"allow_empty": False}, {"k_reg": None, "lambda_reg": None}]
)
def test_raps_errs_no_more_than_asked_for(options):
    """Unrandomised, never empty, or tuned on a part of the calibration points (70 % of 41 are 29 left)."""
    wrong, _ = split_errors(400, 41, conformity_score="raps", **{**RAPS, **options})
    assert wrong[:, 0].sum() <= band(400, 0.1)[1] and wrong[:, 1].sum() <= band(400, 0.2)[1], wrong.mean(0)


def test_class_conditional_split_errs_no_more_in_any_class():
    wrong, truth = split_errors(800, 60, class_conditional=True)
    for label in range(3):
        on = truth == label
        assert wrong[on, 1].sum() <= band(on.sum(), 0.2)[1], (label, wrong[on].mean(0))
    plain, _ = split_errors(800, 60)
    rare = truth == 2  # which pays for the others where they are judged together: the test can fail
    assert plain[rare, 1].sum() > band(rare.sum(), 0.2)[1], plain[rare].mean(0)


def test_the_least_running_mean_is_at_most_epsilon_with_probability_two_epsilon():
    """For p-values that make the mean of two as small as it can be: p is 2ε − p' where both are below 2ε. Then the bound is reached."""
    rng, trials, epsilon = np.random.default_rng(0), 20_000, 0.1
    u, v = rng.uniform(size=(2, trials))
    worst = np.stack([u, np.where(u < 2 * epsilon, 2 * epsilon - u, 2 * epsilon + (1 - 2 * epsilon) * v)])
    for p, times in ((worst, 2.0), (rng.uniform(size=(5, trials)), None), (np.stack([u, u, u]), 1.0)):
        assert abs((p[1] <= epsilon).mean() - epsilon) < 4 * (epsilon / trials) ** 0.5
        least = sequential_mean(rng.permuted(p, axis=0))
        low, high = binom.interval(0.9999, trials, (times or 2) * epsilon)
        assert (least <= epsilon + 1e-12).sum() <= high
        assert times is None or (least <= epsilon + 1e-12).sum() >= low


@pytest.mark.parametrize(
    ("clf", "trials"),
    [
        (CVPlusClassifier(LinearDiscriminantAnalysis(), n_folds=4), 60),
        (CVPlusClassifier(LinearDiscriminantAnalysis(), n_folds=4, conformity_score="aps"), 60),
        (CrossConformalClassifier(LinearDiscriminantAnalysis(), n_folds=4), 60),
        (CrossConformalClassifier(LinearDiscriminantAnalysis(), n_folds=4, aggregation="sequential"), 60),
        (AggregatedConformalClassifier(LinearDiscriminantAnalysis(), n_estimators=4), 60),
        (AggregatedConformalClassifier(LinearDiscriminantAnalysis(), n_estimators=4, aggregation="median"), 60),
        (JackknifePlusClassifier(), 40),
        (JackknifePlusClassifier(conformity_score="margin"), 40),
    ],
    ids=["CV+", "CV+ aps", "cross", "cross, sequential", "mean", "median", "jackknife+", "jackknife+ margin"],
)
def test_the_others_err_at_most_twice_as_often(clf, trials):
    wrong, size, m = np.zeros(2), 0.0, 10
    for seed in range(trials):
        epsilon, truth = trial(clf, seed, 50, m)
        wrong += (epsilon[np.arange(m), truth][:, None] <= np.array([0.1, 0.2]) + 1e-12).sum(0)
        size += (epsilon > 0.2 + 1e-12).sum() / (m * trials)
    for count, epsilon in zip(wrong, (0.1, 0.2), strict=True):
        # Points of one bag share it, which widens the spread of their errors: judged as one point in two.
        assert count / 2 <= band(trials * m // 2, 2 * epsilon)[1], wrong / (trials * m)
    assert 0.8 < size < 2.2  # of three labels
