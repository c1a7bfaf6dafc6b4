"""L2-penalised logistic regression on bags that differ by a point or two: fits, leaving points out, and error bounds."""

from fullconformal.linear.bag import (
    Change,
    Counted,
    Counts,
    FloatArray,
    LinearBag,
    NoMinimiser,
    Progress,
    at_points,
    candidates,
    comparison,
    count_all,
    gradient,
    logits,
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import bounds, deletion, duals, leave_one_out, score_error
from fullconformal.linear.newton import CONVERGED, ROUGH, first_step, refit
from fullconformal.losses.relative import margin, probabilities, residual, residual_, second, spread

__all__ = [
    "CONVERGED",
    "ROUGH",
    "Change",
    "Counted",
    "Counts",
    "Fits",
    "FloatArray",
    "LinearBag",
    "NoMinimiser",
    "Progress",
    "at_points",
    "bounds",
    "candidates",
    "certify",
    "comparison",
    "count_all",
    "curvature",
    "deletion",
    "duals",
    "first_step",
    "gradient",
    "leave_one_out",
    "logits",
    "margin",
    "probabilities",
    "refit",
    "residual",
    "residual_",
    "rounding",
    "score_error",
    "second",
    "spread",
]
