"""Influence functions: prepared training points, the approximations of their scores, and the counter."""

from fullconformal.influence.approximations import APPROXIMATIONS, direct, indirect, newton

__all__ = ["APPROXIMATIONS", "direct", "indirect", "newton"]
