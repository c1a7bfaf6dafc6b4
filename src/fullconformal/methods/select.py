"""Which method a model gets, and why: the one place that decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from torch import nn

from fullconformal.last_layer.network import Stream, is_mapped
from fullconformal.methods.base import Config, Method, Unsuitable
from fullconformal.methods.convex import Exact, Symmetric, check_memory, symmetric_seconds
from fullconformal.methods.folds import Folds
from fullconformal.methods.gaussian import Gaussian, is_gaussian
from fullconformal.methods.influence import Influence
from fullconformal.methods.influence_regression import TangentRegression
from fullconformal.methods.lasso import LassoRegression
from fullconformal.methods.last_layer import LastLayer
from fullconformal.methods.neighbors import Neighbors
from fullconformal.methods.neighbors_regression import NeighborsRegression
from fullconformal.methods.oob import OutOfBag, check_forest, is_forest
from fullconformal.methods.refit import Refit
from fullconformal.methods.refit_regression import RefitRegression
from fullconformal.methods.regression import RegressionMethod
from fullconformal.methods.ridge import RidgeRegression
from fullconformal.methods.unseen import FoldsRegression, OutOfBagRegression
from fullconformal.models.adapters import is_known, is_skorch
from fullconformal.models.distances import ORDERS, KernelDensityClassifier, order_of
from fullconformal.runtime.tasks import duration
from fullconformal.storage import require

METHODS = ("auto", "influence", "symmetric", "exact", "oob", "folds")
LINEAR, KERNELS = (Ridge, RidgeCV, LinearRegression, Lasso, ElasticNet), (KernelRidge, GaussianProcessRegressor)
REGRESSION_METHODS = ("auto", "exact", "influence", "oob", "folds")


@dataclass(frozen=True)
class Selection:
    """A method, and the reason in words."""

    method: Any
    reason: str


def is_neighbors(model: Any) -> bool:
    """Whether a model is scored by its neighbours and has no loss."""
    return isinstance(model, KernelDensityClassifier) or (
        isinstance(model, KNeighborsClassifier) and order_of(model) > 0
    )


def is_convex(model: Any, head: str | None) -> bool:
    """Whether the fit is convex and its solver here: a logistic regression (None is the built-in one), or a network's head."""
    return model is None or is_known(model) or head is not None


def takes_folds(model: Any, asked: Any, given: Any, deleted: bool) -> bool:
    """Whether a model is trained without each fold: where that is asked for, or where it is trained here and has no exact method.

    `given` has the options of a `Config` or of the estimator; `deleted` is whether that is the scheme.
    """
    if asked != "auto":
        return bool(asked == "folds")
    exact = is_neighbors(model) or is_gaussian(model) or is_convex(model, given.head)
    return deleted and not (exact or given.prefit or influence_asked(given))


def influence_asked(given: Any) -> bool:
    """Whether an option was given that only influence functions have."""
    return given.approximation != "direct" or given.curvature != "auto" or given.damping is not None


def _given(asked: Any, model: Any) -> Selection:
    """A method that was given as an object, with the estimator as its model."""
    if asked.model is not None:
        raise ValueError(
            f"method={asked!r} names a model, which is the estimator; name what you give, e.g. Folds(score=...)."
        )
    return Selection(replace(asked, model=model), "it was given as an object")


def select(model: Any, asked: str | Method, config: Config, X: Any, whole: str = "") -> Selection:
    """The method of a model for objects X, given what was asked for; an error where that does not go with the model.

    `whole` names the transformers before it that learn from labels, if any do: out-of-bag points would be scored with what these learned.
    """
    if isinstance(asked, Method):
        return _given(asked, model)
    kind = "the built-in regression" if model is None else type(model).__name__
    convex = is_convex(model, config.head)
    if is_neighbors(model) and asked in ("auto", "exact"):
        return Selection(Neighbors(model), f"{kind} has exact scores without refits")
    if is_gaussian(model) and asked in ("auto", "exact") and not config.prefit:
        return Selection(Gaussian(model), f"{kind} has exact scores by updates of its means and variances")
    if asked == "oob" or (asked == "auto" and is_forest(model) and not whole):
        check_forest(model, config.prefit)
        return Selection(OutOfBag(model), f"the trees of {kind} score the points that they have not drawn")
    if asked == "exact" and convex:
        return Selection(Exact(model), f"the fit of {kind} is convex, so its refits are batched Newton steps")
    if asked == "exact":
        if config.prefit:
            raise ValueError(
                "method='exact' trains the model anew for every bag, so prefit=True cannot be combined with it."
            )
        return Selection(Refit(model), f"{kind} has no faster way to exact scores than refits")
    if asked == "symmetric" and not convex:
        raise ValueError(
            f"method='symmetric' needs a convex fit, and {kind} is not: give head= (a network's last linear "
            "layer, refitted on frozen features), or take method='influence'."
        )
    if takes_folds(model, asked, config, config.q == 1):
        reason = f"{kind} is trained without each of {config.folds} folds, so that no point is scored by a model that has seen it"
        return Selection(Folds(model, config.folds, config.repeats, config.update), reason)
    if asked == "symmetric" or (asked == "auto" and convex and not influence_asked(config)):
        reason = f"the fit of {kind} is convex, so symmetric scores are exactly valid"
        return Selection(Symmetric(model), reason)
    read_once = isinstance(X, Stream) or is_mapped(X)
    trained = config.prefit and config.head is None and isinstance(model, nn.Module)
    if config.curvature == "last_layer_kron" or (config.curvature == "last_layer" and trained and read_once):
        return Selection(LastLayer(model), f"curvature={config.curvature!r} is of the last layer alone")
    given = asked == "auto" and influence_asked(config)
    reason = "an option of influence was given" if given else f"{kind} has a loss and gradients"
    return Selection(Influence(model), reason)


def check_wait(method: Method, config: Config, X: Any, n_classes: int) -> None:
    """Raise where a method that was not asked for takes longer for an object (X as the model is given them) than people wait."""
    if not isinstance(method, Symmetric) or config.head is not None or config.prefit or config.q != 1:
        return
    n, d = X.shape
    check_memory(n, min(n, d), n_classes - 1, config.memory)  # so many classes would be trained for long by folds, too
    seconds = symmetric_seconds(1, n, min(n, d), n_classes)
    if seconds > 10:
        raise Unsuitable(
            f"with {n_classes} classes exactly valid sets would take about {duration(seconds)} for each object: "
            "ask for them by method='symmetric'."
        )


# Regressors -----------------------------------------------------------------------------------------------------------


def select_regression(
    model: Any, asked: str | RegressionMethod, config: Config, whole: str = "", weighted: bool = False
) -> Selection:
    """The method of a regressor, given what was asked for; an error where that does not go with the model.

    `whole` names what is fitted to values before or around the model, if anything is: it must be trained as a whole. `weighted` is whether
    points have weights in training.
    """
    if isinstance(asked, RegressionMethod):
        return _given(asked, model)
    kind = "the built-in regression" if model is None else type(model).__name__
    if "precomputed" in (getattr(model, "kernel", None), getattr(model, "metric", None)):
        raise ValueError(
            f"estimator={kind} with a 'precomputed' kernel or metric is not supported: X holds objects; give it by name or as a function."
        )
    if asked == "oob" or (asked == "auto" and is_forest(model) and not weighted and not whole):
        check_forest(model, config.prefit)
        return Selection(OutOfBagRegression(model), f"the trees of {kind} score the points that they have not drawn")
    # Influence is taken unasked where a network came trained, or an option was given that folds do not have.
    tangent = config.prefit or influence_asked(config) or config.q == 0
    if asked == "influence" or (asked == "auto" and is_network(model) and tangent):
        if not is_network(model):
            raise ValueError(
                f"method='influence' is for torch modules, skorch nets and MLPRegressor; for {kind} use method='auto'."
            )
        return Selection(TangentRegression(model), f"{kind} is replaced by its tangent at the fit")
    reason = (
        f"{whole} learns from the values, and would have to be fitted with every candidate"
        if whole
        else why_not_exact(model)
    )
    if weighted and not reason and type(model) not in (type(None), Ridge, LinearRegression):
        reason = f"with sample_weight, Ridge and LinearRegression have exact scores, and {kind} has not"
    if asked == "exact" and reason:
        return Selection(RefitRegression(model), f"there is no faster way to exact scores than refits: {reason}")
    if asked == "folds" or reason:
        found = f"{kind} is trained without each of {config.folds} folds, so that no point is scored by a model that has seen it"
        found = f"{found} ({reason})" if asked == "auto" and (whole or is_usually_exact(model)) else found
        return Selection(FoldsRegression(model, config.folds, config.repeats), found)
    if type(model) is KNeighborsRegressor:
        return Selection(NeighborsRegression(model), f"{kind} has exact scores without refits")
    # Lasso is an ElasticNet.
    if isinstance(model, ElasticNet):
        return Selection(LassoRegression(model), f"the fit of {kind} is piecewise linear in the candidate's value")
    return Selection(RidgeRegression(model), f"the residuals of {kind} are linear in the candidate's value")


def is_network(model: Any) -> bool:
    """Whether a regressor has a tangent."""
    return isinstance(model, (nn.Module, MLPRegressor)) or is_skorch(model)


def is_usually_exact(model: Any) -> bool:
    """Whether a regressor is of a kind that has an exact method without refits, for some of its options."""
    return type(model) in (*LINEAR, *KERNELS, KNeighborsRegressor)


def why_not_exact(model: Any) -> str:
    """Why a regressor has no exact method without refits, in words; empty where it has one."""
    if model is None:
        return ""
    name = type(model).__name__
    if not is_usually_exact(model):
        return f"the residuals of {name} are not lines in the candidate's value"
    if getattr(model, "positive", False):
        return f"{name}(positive=True) has residuals that are not linear in y; positive=False has"
    if isinstance(model, (Ridge, KernelRidge)) and not (np.ndim(model.alpha) == 0 and model.alpha >= 0):
        return f"{name}(alpha={model.alpha!r}) is not one number ≥ 0"
    if isinstance(model, RidgeCV) and not (np.ravel(model.alphas) > 0).all():
        return f"RidgeCV(alphas={model.alphas!r}) are not numbers > 0"
    if isinstance(model, ElasticNet) and not (model.alpha > 0 and model.l1_ratio > 0):
        return f"{name}(alpha={model.alpha!r}, l1_ratio={model.l1_ratio!r}) has no L1 penalty; take Ridge or LinearRegression"
    if isinstance(model, KNeighborsRegressor) and not (order_of(model) and model.p >= 1):
        return (
            f"KNeighborsRegressor(weights={model.weights!r}, metric={model.metric!r}, p={model.p!r}) is not of weights='uniform', a metric "
            f"among {sorted(ORDERS)}, and p ≥ 1"
        )
    if isinstance(model, GaussianProcessRegressor):
        fixed = model.optimizer is None and not model.normalize_y and np.ndim(model.alpha) == 0
        if not fixed:
            return (
                "GaussianProcessRegressor needs optimizer=None, normalize_y=False and one alpha: a kernel that is tuned on the training "
                "points alone is not exactly valid; tune it on other data, and give its kernel_"
            )
    return ""


# Loaded ---------------------------------------------------------------------------------------------------------------


def check_model(method: Any, base: Any, bag: Any) -> None:
    """Raise unless a loaded method has a model that it is chosen for, and fits no more with each object than was fitted once."""
    model, asked = method.model, (method.name, Config())
    of_numbers, weighted = isinstance(method, RegressionMethod), bag.weights is not None
    own = select_regression(model, *asked, weighted=weighted) if of_numbers else select(model, *asked, bag.X)
    require(type(own.method) is type(method), "model")
    require(getattr(model, "n_neighbors", 1) <= len(bag.y), "number of neighbours")
    require(np.size(getattr(model, "alphas", 0)) == len(getattr(base, "fits", [0])), "number of penalties")
