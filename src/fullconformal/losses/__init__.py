"""Losses: the one room that knows what is minimised."""

from fullconformal.losses.base import Loss, NotFinite
from fullconformal.losses.softmax import SOFTMAX, Softmax
from fullconformal.losses.squared import Squared

__all__ = ["SOFTMAX", "Loss", "NotFinite", "Softmax", "Squared"]
