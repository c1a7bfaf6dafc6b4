"""The classifiers people import."""

from fullconformal.estimators.cross import CrossConformalClassifier, CVPlusClassifier, JackknifePlusClassifier
from fullconformal.estimators.full import FullConformalClassifier
from fullconformal.estimators.split import AggregatedConformalClassifier, SplitConformalClassifier

__all__ = [
    "AggregatedConformalClassifier",
    "CVPlusClassifier",
    "CrossConformalClassifier",
    "FullConformalClassifier",
    "JackknifePlusClassifier",
    "SplitConformalClassifier",
]
