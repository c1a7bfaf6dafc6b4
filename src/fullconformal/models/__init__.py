"""Models, how they are fitted, and adapters from scikit-learn and skorch."""

from fullconformal.models.distances import KernelDensityClassifier
from fullconformal.models.networks import Autoencoder, cnn, linear, mlp, paper_network
from fullconformal.models.training import polish, train
from fullconformal.models.updates import RoundedImputer

__all__ = [
    "Autoencoder", "KernelDensityClassifier", "RoundedImputer", "cnn", "linear", "mlp", "paper_network", "polish", "train",
]  # fmt: skip
