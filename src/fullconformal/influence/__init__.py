"""Influence functions: prepared training points, the approximations of their scores, and the counter."""

from fullconformal.influence.direct import direct
from fullconformal.influence.indirect import indirect
from fullconformal.influence.newton import newton

#: scorers by the name that users give
APPROXIMATIONS = {"direct": direct, "indirect": indirect, "newton": newton}

__all__ = ["APPROXIMATIONS", "direct", "indirect", "newton"]
