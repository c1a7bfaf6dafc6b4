"""The problem: a model, one objective and the training bag; its losses, gradients and Jacobians."""

from fullconformal.problem.base import CHUNK, Block, Problem
from fullconformal.problem.contrasts import contrast_layers, in_contrasts
from fullconformal.problem.rows import Rows, contract, flat, join, select, squared_norms, summed

__all__ = [
    "CHUNK",
    "Block",
    "Problem",
    "Rows",
    "contract",
    "contrast_layers",
    "flat",
    "in_contrasts",
    "join",
    "select",
    "squared_norms",
    "summed",
]
