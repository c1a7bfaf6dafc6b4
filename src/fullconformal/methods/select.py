"""Which method a model gets, and why: the one place that decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from fullconformal.last_layer.network import Stream, is_mapped
from fullconformal.methods.base import Config, Method
from fullconformal.methods.convex import Exact, Symmetric
from fullconformal.methods.folds import Folds
from fullconformal.methods.influence import Influence
from fullconformal.methods.last_layer import LastLayer
from fullconformal.methods.neighbors import Neighbors
from fullconformal.methods.oob import OutOfBag, check_forest, is_forest
from fullconformal.methods.refit import Refit
from fullconformal.models.adapters import is_logistic
from fullconformal.models.density import KernelDensityClassifier

METHODS = ("auto", "influence", "symmetric", "exact", "oob", "folds")


@dataclass(frozen=True)
class Selection:
    """A method, and the reason in words."""

    method: Method
    reason: str


def is_neighbors(model: Any) -> bool:
    """Whether a model is scored by its neighbours and has no loss."""
    return isinstance(model, (KNeighborsClassifier, KernelDensityClassifier))


def is_convex(model: Any, head: str | None) -> bool:
    """Whether the fit is convex: a logistic regression (None is the built-in one), or a network's head."""
    return model is None or is_logistic(model) or head is not None


def takes_folds(model: Any, asked: Any, given: Any, deleted: bool) -> bool:
    """Whether a model is trained without each fold: where that is asked for, or where it is trained here and has no exact method.

    `given` has the options of a `Config` or of the estimator; `deleted` is whether that is the scheme.
    """
    if asked != "auto":
        return bool(asked == "folds")
    exact = is_neighbors(model) or is_convex(model, given.head)
    return deleted and not (exact or given.prefit or influence_asked(given))


def influence_asked(given: Any) -> bool:
    """Whether an option was given that only influence functions have."""
    return given.approximation != "direct" or given.curvature != "auto" or given.damping is not None


def select(model: Any, asked: str | Method, config: Config, X: Any) -> Selection:
    """The method of a model for objects X, given what was asked for; an error where that does not go with the model."""
    if isinstance(asked, Method):
        return Selection(replace(asked, model=model), "it was given as an object")
    kind = "the built-in regression" if model is None else type(model).__name__
    convex = is_convex(model, config.head)
    if is_neighbors(model) and asked in ("auto", "exact"):
        return Selection(Neighbors(model), f"{kind} has exact scores without refits")
    if asked == "oob" or (asked == "auto" and is_forest(model)):
        check_forest(model)
        if config.prefit:
            raise ValueError(
                "method='oob' needs to know which points each tree drew, so prefit=True cannot be had with it; it is one fit."
            )
        return Selection(OutOfBag(model), f"the trees of {kind} score the points that they have not drawn")
    if asked == "exact" and convex:
        return Selection(Exact(model), f"the fit of {kind} is convex, so its refits are batched Newton steps")
    if asked == "exact":
        if config.prefit:
            raise ValueError(
                "method='exact' trains the model anew for every bag, so prefit=True cannot be had with it."
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
