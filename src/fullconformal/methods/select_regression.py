"""Which method a regressor gets, and why: the one place that decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from torch import nn

from fullconformal.methods.influence_regression import TangentRegression
from fullconformal.methods.lasso import LassoRegression
from fullconformal.methods.neighbors_regression import NeighborsRegression
from fullconformal.methods.regression import RegressionMethod
from fullconformal.methods.ridge import RidgeRegression

METHODS = ("auto", "exact", "influence")
SUPPORTED = (
    "None, Ridge, RidgeCV, LinearRegression, Lasso, ElasticNet, KernelRidge, GaussianProcessRegressor(optimizer=None), "
    "KNeighborsRegressor, a torch.nn.Module of one output, MLPRegressor, a Pipeline or TransformedTargetRegressor of one of these"
)


@dataclass(frozen=True)
class RegressionSelection:
    """A method, and the reason in words."""

    method: RegressionMethod
    reason: str


def select_regression(model: Any, asked: str | RegressionMethod) -> RegressionSelection:
    """The method of a model, given what was asked for; an error where there is none."""
    if isinstance(asked, RegressionMethod):
        return RegressionSelection(replace(asked, model=model), "it was given as an object")
    kind = "the built-in regression" if model is None else type(model).__name__
    if isinstance(model, (nn.Module, MLPRegressor)):
        if asked == "exact":
            raise ValueError(
                f"method='exact' needs residuals that are linear in y, and those of {kind} are not; take method='influence'."
            )
        return RegressionSelection(TangentRegression(model), f"{kind} is replaced by its tangent at the fit")
    check_model(model)
    if asked == "influence":
        raise ValueError(f"method='influence' is for networks; {kind} has method='exact', which costs no more.")
    if type(model) is KNeighborsRegressor:
        return RegressionSelection(NeighborsRegression(model), f"{kind} has exact scores without refits")
    # Lasso is an ElasticNet.
    if isinstance(model, ElasticNet):
        return RegressionSelection(
            LassoRegression(model), f"the fit of {kind} is piecewise linear in the candidate's value"
        )
    return RegressionSelection(RidgeRegression(model), f"the residuals of {kind} are linear in the candidate's value")


def check_model(model: Any) -> None:
    """Raise where a model has no exact method, or options that it does not know."""
    if model is None:
        return
    name = type(model).__name__
    linear = type(model) in (Ridge, RidgeCV, LinearRegression)
    lasso = isinstance(model, ElasticNet) and name in ("Lasso", "ElasticNet")
    if not (linear or lasso or type(model) in (KernelRidge, GaussianProcessRegressor, KNeighborsRegressor)):
        raise TypeError(f"estimator={name} cannot be wrapped here; give {SUPPORTED}.")
    if linear and getattr(model, "positive", False):
        raise ValueError(
            f"estimator={name}(positive=True) is not supported: its residuals are not linear in y; use positive=False."
        )
    if isinstance(model, (Ridge, KernelRidge)) and not (np.ndim(model.alpha) == 0 and model.alpha >= 0):
        raise ValueError(f"estimator={name}(alpha={model.alpha!r}) is not supported; give one number ≥ 0.")
    if isinstance(model, RidgeCV) and not (np.ravel(model.alphas) > 0).all():
        raise ValueError(f"estimator=RidgeCV(alphas={model.alphas!r}) is not supported; give numbers > 0.")
    if isinstance(model, KernelRidge) and model.kernel == "precomputed":
        raise ValueError(
            "estimator=KernelRidge(kernel='precomputed') is not supported; give a kernel by name or as a function."
        )
    if isinstance(model, GaussianProcessRegressor):
        fixed = model.optimizer is None and not model.normalize_y and np.ndim(model.alpha) == 0
        if not fixed:
            raise ValueError(
                "estimator=GaussianProcessRegressor needs optimizer=None, normalize_y=False and one alpha: a kernel that is tuned on the "
                "training points alone is not exactly valid. Tune it on other data, and give its kernel_."
            )
