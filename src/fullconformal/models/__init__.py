"""Models, how they are fitted, and adapters from scikit-learn and skorch."""

from fullconformal.models.density import KernelDensityClassifier
from fullconformal.models.networks import linear, mlp

__all__ = ["KernelDensityClassifier", "linear", "mlp"]
