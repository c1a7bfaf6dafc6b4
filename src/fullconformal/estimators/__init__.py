"""The classifiers people import."""

from fullconformal.estimators.full import FullConformalClassifier

__all__ = ["FullConformalClassifier"]
