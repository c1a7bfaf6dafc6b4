"""The problem: a model, one objective and the training bag; its losses, gradients and Jacobians."""

from fullconformal.problem.base import CHUNK, Block, Problem
from fullconformal.problem.rows import Rows, flat, join, select, squared_norms, summed

__all__ = ["CHUNK", "Block", "Problem", "Rows", "flat", "join", "select", "squared_norms", "summed"]
