"""Losses: the one room that knows what is minimised."""

from fullconformal.losses.base import Loss, NotFinite
from fullconformal.losses.softmax import SOFTMAX, Softmax
from fullconformal.losses.squared import SQUARED, Squared

#: losses of labels by the name that users give
LOSSES: dict[str, Loss] = {"softmax": SOFTMAX}

__all__ = ["LOSSES", "SOFTMAX", "SQUARED", "Loss", "NotFinite", "Softmax", "Squared"]
