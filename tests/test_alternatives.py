"""What split, cross, CV+, jackknife+ and aggregated conformal prediction share: scikit-learn's rules, estimators, bad input."""

import warnings

from sklearn.utils.estimator_checks import parametrize_with_checks

from fullconformal import (
    AggregatedConformalClassifier,
    ConformalWarning,
    CrossConformalClassifier,
    CVPlusClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
)

METHODS = [
    SplitConformalClassifier,
    CVPlusClassifier,
    CrossConformalClassifier,
    JackknifePlusClassifier,
    AggregatedConformalClassifier,
]


@parametrize_with_checks([method() for method in METHODS])
def test_scikit_learn_compliance(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        check(estimator)
