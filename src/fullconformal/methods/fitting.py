"""From what the user gave to a fitted problem: the model, its objective, the bag as tensors."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array
from torch import Tensor, nn

from fullconformal.linear.from_problem import fit_linear
from fullconformal.losses.base import NotFinite
from fullconformal.models.adapters import adapt, is_skorch, read
from fullconformal.models.heads import with_new_head
from fullconformal.models.networks import linear
from fullconformal.models.requirements import check_classes, check_outputs
from fullconformal.models.tensors import check_squares, name_of, place, to_tensor
from fullconformal.models.training import Progress, train
from fullconformal.problem import Problem, contrast_layers
from fullconformal.runtime.threads import alone

L2_LINEAR, L2_NETWORK = 1e-3, 1e-2


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments that say how to fit."""

    l2: float | None = None
    prefit: bool = False
    max_epochs: int = 200
    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    seed: int = 0
    head: str | None = None
    progress: Progress | None = None
    contrasts: bool = False  # whether to state the built-in regression in contrasts


def fit_transformer(head: Pipeline | None, X: Any, y: Any, prefit: bool) -> tuple[Pipeline | None, Any]:
    """Fitted transformers and the transformed X."""
    if head is None:
        return None, X
    head = head if prefit else clone(head).fit(X, y)
    return head, transform(head, X)


def transform(head: Pipeline, X: Any) -> Any:
    """X through the transformers, as a dense, finite array."""
    out = head.transform(X)
    out = out.toarray() if hasattr(out, "toarray") else out
    try:
        return check_array(out, dtype="numeric", ensure_2d=False, allow_nd=True, input_name="X (transformed)")
    except ValueError as error:
        if getattr(getattr(out, "dtype", None), "kind", "") != "f" or np.isfinite(out).all():
            raise
        at = [int(i) for i in np.argwhere(~np.isfinite(out))[0]]
        raise ValueError(
            f"X holds NaN or infinity once it is transformed, first in object {at[0]}, {place(at)}: impute missing values in the "
            "Pipeline, and look for numbers so large that their squares overflow."
        ) from error


def fit_problem(
    final: Any, X: Any, y: np.ndarray, classes: np.ndarray, settings: Settings, linear_fit: bool = True
) -> Problem:
    """Fit the classifier to X (n, ...) and label indices y (n,), and state the problem at its parameters.

    Without ``linear_fit`` a linear problem is left to who asked, who fits it as a bag (`methods.convex.Symmetric`).
    """
    n_classes = len(classes)
    if not isinstance(final, nn.Module):
        check_squares(X, name_of(settings.dtype or torch.float64))
    module, penalty = _module(final, X, y, classes, settings)
    # Half precision has no factorisations.
    dtype = settings.dtype or torch.promote_types(next(module.parameters()).dtype, torch.float32)
    if final is not None or dtype != torch.float64 or torch.device(settings.device).type != "cpu":
        module = module.to(device=settings.device, dtype=dtype)
    module.eval()
    Xt, yt = to_tensor(X, settings.device, dtype, training=True), torch.as_tensor(y, device=settings.device)
    given = settings.head is not None and settings.prefit  # a pretrained backbone may know other classes
    if final is not None and not given:
        check_outputs(module, Xt, n_classes)
    if isinstance(final, nn.Module) and not settings.prefit:
        train(module, Xt, yt, penalty, max_epochs=settings.max_epochs, seed=settings.seed, progress=settings.progress)
    if settings.head is not None:
        return _head_problem(module, settings.head, Xt, yt, n_classes, settings.l2, linear_fit)
    problem = Problem(module, Xt, yt, penalty)
    with alone(problem.n * problem.size):
        if linear_fit and problem.is_linear and not settings.prefit:
            fit_linear(problem)
        check_finite(problem)
    return problem


def check_finite(problem: Problem) -> None:
    """Raise where the fit ran away."""
    if not math.isfinite(problem.theta.sum() + problem.logits(problem.X).sum()):
        raise NotFinite("the fitted model's parameters or logits are not finite; scale the features, or train again.")


def _module(
    final: Any, X: Any, y: np.ndarray, classes: np.ndarray, settings: Settings
) -> tuple[nn.Module, dict[str, float]]:
    """The module to be fitted, or fitted already by its own library, and its penalty."""
    n = len(y)
    if final is None:
        if X.ndim != 2:
            raise ValueError(f"X has shape {X.shape}; the built-in logistic regression takes (n, features). Flatten X.")
        return _logistic(X.shape[1], len(classes), n, settings.l2, settings.contrasts and len(classes) > 2)
    if isinstance(final, nn.Module):
        copied = copy.deepcopy(final)
        l2 = L2_NETWORK if settings.l2 is None else settings.l2
        return copied, {name: n * l2 for name, q in copied.named_parameters() if q.requires_grad}
    unfitted = None if settings.prefit else read(final, tuple(X.shape[1:]), len(classes))
    if unfitted is not None:  # `fit_linear` fits it
        return unfitted
    fitted = final if settings.prefit else fit_foreign(final, X, y if is_skorch(final) else classes[y], settings.seed)
    check_classes(fitted, classes)
    return adapt(fitted, n)


def _logistic(
    n_features: int, n_classes: int, n: int, l2: float | None, contrasts: bool = False
) -> tuple[nn.Module, dict[str, float]]:
    """The built-in logistic regression, in contrasts or not, its weights zero, and its penalty."""
    penalty = {"0.weight": n * (L2_LINEAR if l2 is None else l2)}
    if contrasts:
        return nn.Sequential(*contrast_layers(n_features, n_classes, True, "cpu", torch.float64)), penalty
    module = linear(n_features, n_classes, dtype=torch.float64)
    for q in module[0].parameters():
        nn.init.zeros_(q)
    return module, penalty


def _head_problem(
    network: nn.Module, head: str, X: Tensor, y: Tensor, n_classes: int, l2: float | None, linear_fit: bool
) -> Problem:
    """The head refitted as a logistic regression on the features of the frozen rest."""
    X = X.double()
    module, features = with_new_head(network, head, X, n_classes)
    penalty = len(y) * (L2_LINEAR if l2 is None else l2)
    on_features = Problem(nn.Sequential(*list(module)[1:]), features, y, {"0.weight": penalty})
    if linear_fit:
        fit_linear(on_features)  # shares the head's parameters with the whole
    problem = Problem(module, X, y, {"1.weight": penalty})
    check_finite(problem)
    return problem


def fit_foreign(estimator: Any, X: Any, y: Any, seed: int) -> Any:
    """A clone of the estimator fitted to all of (X, y)."""
    estimator = clone(estimator)
    if is_skorch(estimator):
        # Full conformal prediction trains on every labelled point: no internal hold-out.
        return estimator.set_params(train_split=None).fit(
            np.asarray(X, dtype=np.float32), np.asarray(y, dtype=np.int64)
        )
    if getattr(estimator, "random_state", 0) is None:
        estimator.set_params(random_state=seed)
    return estimator.fit(X, y)
