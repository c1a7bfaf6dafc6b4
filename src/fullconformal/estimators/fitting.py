"""From what the user gave to a fitted problem: the model, its objective, the bag as tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array
from torch import Tensor, nn

from fullconformal.curvature import GGN
from fullconformal.models.adapters import adapt, check_objective, is_skorch, supported
from fullconformal.models.fitting import NotFinite, Progress, newton, train
from fullconformal.models.linear import fit_binary
from fullconformal.models.networks import linear
from fullconformal.problem import Problem

L2_LINEAR, L2_NETWORK = 1e-3, 1e-2
NEWTON_TOLERANCE = 1e-10  # of the mean gradient, in float64

COUPLES_POINTS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class Settings:
    """The constructor's arguments that say how to fit."""

    l2: float | None
    prefit: bool
    max_epochs: int
    device: torch.device
    dtype: torch.dtype | None
    seed: int
    progress: Progress | None


def split_pipeline(estimator: Any) -> tuple[Pipeline | None, Any]:
    """The transformers of a Pipeline (None where there are none) and the classifier at its end."""
    if isinstance(estimator, Pipeline):
        return (estimator[:-1] if len(estimator) > 1 else None), estimator[-1]
    return None, estimator


def check_estimator_kind(estimator: Any, l2: float | None) -> None:
    """Raise where the estimator cannot be wrapped, before anything is fitted."""
    _, final = split_pipeline(estimator)
    if isinstance(final, nn.Module):
        check_module(final)
    elif final is not None:
        if not supported(final):
            raise TypeError(
                f"estimator={type(final).__name__} cannot be wrapped: give None, a torch.nn.Module, scikit-learn's "
                "LogisticRegression or MLPClassifier, a skorch NeuralNetClassifier, or a Pipeline that ends in one of these."
            )
        if l2 is not None:
            raise ValueError(f"l2={l2!r} was given, but {type(final).__name__} brings its own penalty; set it there.")
        check_objective(final)


def check_module(module: nn.Module) -> None:
    """Raise for modules whose loss is not a sum over points, or that have nothing to fit."""
    if not any(q.requires_grad for q in module.parameters()):
        raise ValueError("estimator has no trainable parameters; full conformal prediction needs a model that learns.")
    coupled = [type(part).__name__ for part in module.modules() if isinstance(part, COUPLES_POINTS) and part.training]
    if coupled:
        raise ValueError(
            f"estimator holds {', '.join(sorted(set(coupled)))} in training mode, where the loss of a point is random or depends "
            "on other points; call estimator.eval() first (a trained model: with prefit=True)."
        )


def to_tensor(X: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A fresh tensor of the given device and dtype."""
    return torch.as_tensor(np.array(X, copy=True)).to(device=device, dtype=dtype)


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
    return check_array(out, dtype="numeric", ensure_2d=False, allow_nd=True, input_name="X (transformed)")


def fit_problem(final: Any, X: Any, y: np.ndarray, classes: np.ndarray, settings: Settings) -> Problem:
    """Fit the classifier to X (n, ...) and label indices y (n,), and state the problem at its parameters."""
    n, n_classes = len(y), len(classes)
    penalty: dict[str, float]
    if final is None:
        if X.ndim != 2:
            raise ValueError(f"X has shape {X.shape}; the built-in logistic regression takes (n, features). Flatten X.")
        module: nn.Module = linear(X.shape[1], n_classes)
        nn.init.zeros_(next(module.parameters()))
        nn.init.zeros_(module[0].bias)  # type: ignore[index]
        penalty = {"0.weight": n * (L2_LINEAR if settings.l2 is None else settings.l2)}
        module = module.double()
    elif isinstance(final, nn.Module):
        module = copy.deepcopy(final)
        l2 = L2_NETWORK if settings.l2 is None else settings.l2
        penalty = {name: n * l2 for name, q in module.named_parameters() if q.requires_grad}
    else:
        fitted = (
            final if settings.prefit else _fit_foreign(final, X, y if is_skorch(final) else classes[y], settings.seed)
        )
        _check_classes(fitted, classes)
        module, penalty = adapt(fitted, n)
    dtype = settings.dtype or next(module.parameters()).dtype
    module = module.to(device=settings.device, dtype=dtype).eval()
    Xt, yt = to_tensor(X, settings.device, dtype), torch.as_tensor(y, device=settings.device)
    check_outputs(module, Xt, n_classes)
    if isinstance(final, nn.Module) and not settings.prefit:
        train(module, Xt, yt, penalty, max_epochs=settings.max_epochs, seed=settings.seed, progress=settings.progress)
    problem = Problem(module, Xt, yt, penalty)
    if problem.is_linear and not settings.prefit:
        minimise(problem)
    if not torch.isfinite(problem.theta).all() or not torch.isfinite(problem.logits(Xt)).all():
        raise NotFinite("the fitted model's parameters or logits are not finite; scale the features, or train again.")
    return problem


def minimise(problem: Problem) -> None:
    """Newton's method from the current parameters of a linear problem, in place."""
    tol = problem.n * max(NEWTON_TOLERANCE, 100 * torch.finfo(problem.X.dtype).eps)
    theta = problem.theta
    if len(problem.tail) == 2 and problem.blocks[0].o == 1:  # two classes, logits (0, z)
        a = problem.trace(problem.X).inputs[0]
        problem.assign(fit_binary(a, problem.y, problem.penalty, theta, tol))
        return

    def value(theta: Tensor) -> Tensor:
        with torch.no_grad():
            return problem.value(theta)

    def gradient(theta: Tensor) -> Tensor:
        problem.assign(theta)
        return problem.gradient()

    def step(theta: Tensor, g: Tensor) -> Tensor:
        return GGN().factor(problem).solve(g[None])[0]

    problem.assign(newton(theta, value, gradient, step, tol))


def check_outputs(module: nn.Module, X: Tensor, n_classes: int) -> None:
    """Raise unless the module maps X to one finite logit a class."""
    try:
        with torch.no_grad():
            out = module(X[:2])
    except RuntimeError as error:
        raise ValueError(f"estimator does not take X of shape {tuple(X.shape)}: {error}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[1] != n_classes:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"estimator must return logits of shape (batch, {n_classes}), one a class found in y, but returned {shape}; "
            "change its last layer, or give training labels of all its classes."
        )
    if not torch.isfinite(out).all():
        raise NotFinite("estimator returns logits that are not finite on the training data; check its weights and X.")


def _fit_foreign(estimator: Any, X: Any, y: Any, seed: int) -> Any:
    """A clone of the estimator fitted to all of (X, y)."""
    estimator = clone(estimator)
    if is_skorch(estimator):
        # Full conformal prediction trains on every labelled point: no internal hold-out.
        return estimator.set_params(train_split=None).fit(np.asarray(X, dtype=np.float32), y)
    if getattr(estimator, "random_state", 0) is None:
        estimator.set_params(random_state=seed)
    return estimator.fit(X, y)


def _check_classes(fitted: Any, classes: np.ndarray) -> None:
    known = getattr(fitted, "classes_", None)
    if known is None:
        raise ValueError(f"estimator={type(fitted).__name__} is not fitted; fit it first or leave prefit=False.")
    if not is_skorch(fitted) and list(known) != list(classes):
        raise ValueError(
            f"y has classes {list(classes)}, but the fitted estimator knows {list(known)}; give its training data."
        )
