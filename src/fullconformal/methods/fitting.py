"""From what the user gave to a fitted problem: the model, its objective, the bag as tensors."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor, nn

from fullconformal.linear.from_problem import fit_linear
from fullconformal.losses import NotFinite
from fullconformal.methods.base import Bag, Config
from fullconformal.models.adapters import adapt, is_skorch, read
from fullconformal.models.networks import with_new_head, zero_linear
from fullconformal.models.requirements import check_classes, check_outputs, check_squares, name_of, to_tensor
from fullconformal.models.training import train
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import alone

L2_LINEAR, L2_NETWORK = 1e-3, 1e-2


def fit_problem(model: Any, bag: Bag, config: Config, linear_fit: bool = True) -> Problem:
    """Fit a classifier to a bag, and state the problem at its parameters.

    Without ``linear_fit`` a linear problem is left to who asked, who fits it as a bag (`methods.convex`).
    """
    if not isinstance(model, nn.Module):
        check_squares(bag.X, name_of(config.dtype or torch.float64))
    module, penalty = _module(model, bag, config)
    # Half precision has no factorisations.
    dtype = config.dtype or torch.promote_types(next(module.parameters()).dtype, torch.float32)
    module = module.to(device=config.device, dtype=dtype).eval()
    X, y = to_tensor(bag.X, config.device, dtype, training=True), torch.as_tensor(bag.y, device=config.device)
    given = config.head is not None and config.prefit  # a pretrained backbone may know other classes
    if model is not None and not given:
        check_outputs(module, X, bag.n_classes)
    if isinstance(model, nn.Module) and not config.prefit:
        train(
            module, X, y, penalty, max_epochs=config.max_epochs, seed=config.seed, progress=config.progress, loss=config.loss
        )  # fmt: skip
    if config.head is not None:
        return _head_problem(module, config.head, X, y, bag.n_classes, config.l2, linear_fit)
    problem = Problem(module, X, y, penalty, loss=config.loss)
    with alone(problem.n * problem.size):
        if linear_fit and problem.is_linear and not config.prefit:
            fit_linear(problem)
        check_finite(problem)
    return problem


def check_finite(problem: Problem) -> None:
    """Raise where the fit ran away."""
    if not math.isfinite(problem.theta.sum() + problem.logits(problem.X).sum()):
        raise NotFinite("the fitted model's parameters or logits are not finite; scale the features, or train again.")


def _module(model: Any, bag: Bag, config: Config) -> tuple[nn.Module, dict[str, float]]:
    """The module to be fitted, or fitted already by its own library, and its penalty."""
    n, classes = len(bag.y), bag.classes
    if model is None:
        if bag.X.ndim != 2:
            raise ValueError(
                f"X has shape {bag.X.shape}; the built-in logistic regression takes (n, features). Flatten X."
            )
        l2 = L2_LINEAR if config.l2 is None else config.l2
        return zero_linear(bag.X.shape[1], len(classes)), {"0.weight": n * l2}
    if isinstance(model, nn.Module):
        copied = copy.deepcopy(model)
        l2 = L2_NETWORK if config.l2 is None else config.l2
        return copied, {name: n * l2 for name, q in copied.named_parameters() if q.requires_grad}
    unfitted = None if config.prefit else read(model, tuple(bag.X.shape[1:]), len(classes))
    if unfitted is not None:  # `fit_linear` fits it
        return unfitted
    labels = bag.y if is_skorch(model) else classes[bag.y]
    fitted = model if config.prefit else fit_foreign(model, bag.X, labels, config.seed)
    check_classes(fitted, classes)
    return adapt(fitted, n)


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
