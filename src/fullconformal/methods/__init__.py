"""Methods of full conformal prediction, one file each; `select` decides which one a model gets."""

from fullconformal.methods.base import Bag, Config, Fitted, Method, Query

__all__ = ["Bag", "Config", "Fitted", "Method", "Query"]
