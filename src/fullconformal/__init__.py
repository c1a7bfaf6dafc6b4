"""Full conformal prediction for PyTorch and scikit-learn classifiers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullconformal.estimators.base import ConformalWarning
    from fullconformal.estimators.full import FullConformalClassifier
    from fullconformal.estimators.split import SplitConformalClassifier

__version__ = "0.1.0"
__all__ = ["ConformalWarning", "FullConformalClassifier", "SplitConformalClassifier"]

# Imported when first asked for: the command line's --help must not wait for torch.
_HOMES = {
    "ConformalWarning": "fullconformal.estimators.base",
    "FullConformalClassifier": "fullconformal.estimators.full",
    "SplitConformalClassifier": "fullconformal.estimators.split",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fullconformal' has no attribute {name!r}")
