"""Full conformal prediction for PyTorch and scikit-learn: sets of labels, intervals of numbers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullconformal.comparison import compare
    from fullconformal.estimators.cross import CrossConformalClassifier, CVPlusClassifier, JackknifePlusClassifier
    from fullconformal.estimators.cross_regression import CVPlusRegressor, JackknifePlusRegressor
    from fullconformal.estimators.full import FullConformalClassifier
    from fullconformal.estimators.full_regression import FullConformalRegressor
    from fullconformal.estimators.saving import load
    from fullconformal.estimators.split import AggregatedConformalClassifier, SplitConformalClassifier
    from fullconformal.estimators.split_regression import SplitConformalRegressor
    from fullconformal.methods.base import ConformalWarning
    from fullconformal.runtime.tasks import ClusterError
    from fullconformal.storage import StorageError

__version__ = "0.1.0"
__all__ = [
    "AggregatedConformalClassifier", "CVPlusClassifier", "CVPlusRegressor", "ClusterError", "ConformalWarning",
    "CrossConformalClassifier", "FullConformalClassifier", "FullConformalRegressor", "JackknifePlusClassifier",
    "JackknifePlusRegressor", "SplitConformalClassifier", "SplitConformalRegressor", "StorageError", "compare", "load",
]  # fmt: skip

# Imported when first asked for: the command line's --help must not wait for torch.
_HOMES = {
    "AggregatedConformalClassifier": "fullconformal.estimators.split",
    "ClusterError": "fullconformal.runtime.tasks",
    "ConformalWarning": "fullconformal.methods.base",
    "CrossConformalClassifier": "fullconformal.estimators.cross",
    "CVPlusClassifier": "fullconformal.estimators.cross",
    "CVPlusRegressor": "fullconformal.estimators.cross_regression",
    "FullConformalClassifier": "fullconformal.estimators.full",
    "FullConformalRegressor": "fullconformal.estimators.full_regression",
    "JackknifePlusClassifier": "fullconformal.estimators.cross",
    "JackknifePlusRegressor": "fullconformal.estimators.cross_regression",
    "SplitConformalClassifier": "fullconformal.estimators.split",
    "SplitConformalRegressor": "fullconformal.estimators.split_regression",
    "compare": "fullconformal.comparison",
    "StorageError": "fullconformal.storage",
    "load": "fullconformal.estimators.saving",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fullconformal' has no attribute {name!r}")
