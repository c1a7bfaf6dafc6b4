"""The problem: a model, one objective and the training bag; its losses, gradients and Jacobians."""

from fullconformal.problem.base import CHUNK, Block, Problem
from fullconformal.problem.contrasts import contrast_layers, contrasts_of, in_contrasts
from fullconformal.problem.convolutions import full_precision
from fullconformal.problem.loss import candidate_losses, losses, residuals, softmax, softmax_curvature
from fullconformal.problem.rows import Rows, contract, flat, join, select, squared_norms, summed

__all__ = [
    "CHUNK",
    "Block",
    "Problem",
    "Rows",
    "candidate_losses",
    "contract",
    "contrast_layers",
    "contrasts_of",
    "flat",
    "full_precision",
    "in_contrasts",
    "join",
    "losses",
    "residuals",
    "select",
    "softmax",
    "softmax_curvature",
    "squared_norms",
    "summed",
]
