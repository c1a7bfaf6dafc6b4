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
_NAMES = {
    "comparison": ("compare",),
    "estimators.cross": ("CrossConformalClassifier", "CVPlusClassifier", "JackknifePlusClassifier"),
    "estimators.cross_regression": ("CVPlusRegressor", "JackknifePlusRegressor"),
    "estimators.full": ("FullConformalClassifier",),
    "estimators.full_regression": ("FullConformalRegressor",),
    "estimators.saving": ("load",),
    "estimators.split": ("AggregatedConformalClassifier", "SplitConformalClassifier"),
    "estimators.split_regression": ("SplitConformalRegressor",),
    "methods.base": ("ConformalWarning",),
    "runtime.tasks": ("ClusterError",),
    "storage": ("StorageError",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"fullconformal.{module}"), name)
    raise AttributeError(f"module 'fullconformal' has no attribute {name!r}")
