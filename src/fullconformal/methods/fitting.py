"""From what the user gave to fitted models: problems with their bag as tensors, and functions that give log-probabilities or values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.utils.validation import has_fit_parameter
from torch import Tensor, nn

from fullconformal.linear.from_problem import fit_linear
from fullconformal.losses import NotFinite
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, IntArray, Values, starts_with
from fullconformal.methods.outputs import LogProba, Model, Piped, Prediction, problem_log_proba
from fullconformal.models.adapters import adapt, is_skorch, read
from fullconformal.models.networks import with_new_head, zero_linear
from fullconformal.models.requirements import (
    check_classes,
    check_outputs,
    check_squares,
    finite_rows,
    fit_transformer,
    name_of,
    naming_columns,
    split_pipeline,
    to_tensor,
)
from fullconformal.models.training import train
from fullconformal.models.transformers import seeded
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import alone

L2_LINEAR, L2_NETWORK = 1e-3, 1e-2


# Problems -------------------------------------------------------------------------------------------------------------


def fit_problem(
    model: Any, bag: Bag, config: Config, linear_fit: bool = True, check: Callable[[Problem], object] | None = None
) -> Problem:
    """Fit a classifier to a bag, and state the problem at its parameters.

    Without ``linear_fit`` a linear problem is left to who asked, who fits it as a bag (`methods.convex`). ``check`` is given the problem
    before anything is trained here; not that of a head, which needs the features of the rest.
    """
    if not isinstance(model, nn.Module):
        check_squares(bag.X, name_of(config.dtype or torch.float64))
    module, penalty = _module(model, bag, config)
    module = to_device(module, config)
    X = to_tensor(bag.X, config.device, next(module.parameters()).dtype, training=True)
    y = torch.as_tensor(bag.y, device=config.device)
    # A pretrained backbone may know other classes.
    if model is not None and not (config.head is not None and config.prefit):
        check_outputs(module, X, bag.n_classes)
    if config.head is None:
        # Training is in place: the problem is of the parameters as they will be.
        problem = Problem(module, X, y, penalty, loss=config.loss)
        if check is not None:
            check(problem)
    if isinstance(model, nn.Module) and not config.prefit:
        train(
            module, X, y, penalty, max_epochs=config.max_epochs, seed=config.seed, progress=config.progress, loss=config.loss
        )  # fmt: skip
    if config.head is not None:
        # As objects will be given later.
        X = to_tensor(bag.X, config.device, torch.float64, training=True)
        return _head_problem(module, config.head, X, y, bag.n_classes, config.l2, linear_fit)
    with alone(problem.n * problem.size):
        if config.prefit or not problem.is_linear:
            check_finite(problem)
        elif linear_fit:
            fit_linear(problem)
    return problem


def to_device(module: nn.Module, config: Config) -> nn.Module:
    """A module where and in what it computes, of its own precision where none was asked for: ready to be evaluated."""
    # Half precision has no factorisations.
    dtype = config.dtype or torch.promote_types(next(module.parameters()).dtype, torch.float32)
    return module.to(device=config.device, dtype=dtype).eval()


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
    # Of a logistic regression the objective alone, which is minimised later as a bag.
    unfitted = None if config.prefit else read(model, tuple(bag.X.shape[1:]), len(classes))
    if unfitted is not None:
        return unfitted
    labels = bag.y if is_skorch(model) else classes[bag.y]
    fitted = model if config.prefit else fit_foreign(model, bag.X, labels, config.seed)
    check_classes(fitted, classes)
    return adapt(fitted, n)


def _head_problem(
    network: nn.Module, head: str, X: Tensor, y: Tensor, n_classes: int, l2: float | None, linear_fit: bool
) -> Problem:
    """The head refitted as a logistic regression on the features of the frozen rest; X (n, ...) in float64."""
    module, features = with_new_head(network, head, X, n_classes)
    penalty = len(y) * (L2_LINEAR if l2 is None else l2)
    if linear_fit:
        # Which shares the head's parameters with the whole.
        fit_linear(Problem(nn.Sequential(*list(module)[1:]), features, y, {"0.weight": penalty}))
    problem = Problem(module, X, y, {"1.weight": penalty})
    check_finite(problem)
    return problem


class FittedProblem(Fitted):
    """What methods share that keep the fitted problem, training objects and all."""

    def __init__(self, problem: Problem):
        super().__init__(np.asarray(problem.y.cpu().numpy()), problem.n_classes)
        self.problem = problem

    @property
    def device(self) -> torch.device:
        return self.problem.X.device

    def holds(self, X: Any) -> bool:
        return starts_with(self.problem.X.cpu().numpy(), X)

    def inputs(self, X: Any) -> Tensor:
        """Objects (m, ...) as the problem knows them."""
        return to_tensor(X, self.problem.X.device, self.problem.X.dtype)

    def log_proba(self, X: Any) -> FloatArray:
        return finite_rows(problem_log_proba(self.problem, self.inputs(X)))

    def precision(self, X: Any) -> float:
        return torch.finfo(self.problem.X.dtype).eps


# Models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitScore:
    """Trains a model anew on a bag, which may lack classes, and returns its outputs as a function; without classes, a regressor."""

    estimator: Any
    config: Config
    classes: npt.NDArray[Any] | None

    def __call__(self, X: Any, y: Any) -> Model:
        bag = Values(X, y) if self.classes is None else Bag(X, y, self.classes)
        return fit_model(self.estimator, bag, self.config)


def fit_model(estimator: Any, bag: Bag | Values, config: Config) -> Model:
    """Log-probabilities of a classifier, or of a Pipeline that ends in one, fitted to a bag; with prefit, of one fitted already.

    The bag may lack classes. Of values, the predictions of a regressor.
    """
    if isinstance(bag, Values):
        return _fit_values(estimator, bag, config)
    transformers, final = split_pipeline(estimator)
    every = np.arange(bag.n_classes)
    present = every if config.prefit else np.unique(bag.y)
    if bag.is_trivial and not config.prefit:
        return LogProba(None, present if len(present) else every, len(every))
    if bag.weights is not None and final is None:
        l2 = L2_LINEAR if config.l2 is None else config.l2
        final = LogisticRegression(C=1 / (len(bag.y) * l2), tol=1e-10, max_iter=10_000)
        estimator = final if transformers is None else make_pipeline(transformers, final)
    # One of scikit-learn's kind, a whole Pipeline too.
    if bag.weights is not None or (not trained_here(final) and not is_skorch(final)):
        # XGBoost knows no labels but 0, 1, ..., as many as there are.
        numbers = type(final).__module__.startswith("xgboost.")
        labels = np.searchsorted(present, bag.y) if numbers else bag.classes[bag.y]
        fitted = estimator if config.prefit else fit_foreign(estimator, bag.X, labels, config.seed, bag.weights)
        return LogProba(fitted, present if numbers else columns(fitted, bag.classes, present), len(every))
    transformers, X = fit_steps(transformers, bag.X, bag.y, config)
    if trained_here(final):
        fitted = fit_problem(final, replace(bag, X=X), config)
    else:
        fitted = final if config.prefit else fit_foreign(final, X, bag.y, config.seed)
    # A network has an output for every class, present or not.
    model = LogProba(fitted, every, len(every))
    return model if transformers is None else Piped(transformers, model)


def _fit_values(estimator: Any, bag: Values, config: Config) -> Prediction | Piped:
    """Predictions of a regressor, or of a Pipeline that ends in one, fitted to a bag."""
    transformers, final = split_pipeline(estimator)
    if bag.is_trivial:
        return Prediction(None)
    if final is not None and (bag.weights is not None or not (isinstance(final, nn.Module) or is_skorch(final))):
        return Prediction(fit_foreign(estimator, bag.X, bag.y, config.seed, bag.weights))
    transformers, X = fit_steps(transformers, bag.X, bag.y, config)
    if isinstance(final, nn.Module):
        model = Prediction(*fit_network(final, replace(bag, X=X), config))
    else:
        final = Ridge(len(bag.y) * (L2_LINEAR if config.l2 is None else config.l2)) if final is None else final
        model = Prediction(fit_foreign(final, X, bag.y, config.seed, bag.weights))
    return model if transformers is None else Piped(transformers, model)


def fit_network(model: nn.Module, bag: Values, config: Config) -> tuple[Problem, float, float]:
    """A copy of a module trained on values less their mean in units of their deviation, as a problem; and these two.

    With prefit the copy is as it is, and the units are those of the values.
    """
    n, l2 = len(bag.y), L2_NETWORK if config.l2 is None else config.l2
    centre, scale = (0.0, 1.0) if config.prefit else units_of(bag.y)
    module = to_device(copy.deepcopy(model), config)
    penalty = {name: n * l2 for name, q in module.named_parameters() if q.requires_grad}
    X = to_tensor(bag.X, config.device, next(module.parameters()).dtype, training=True)
    check_outputs(module, X, None)
    y = torch.as_tensor((bag.y - centre) / scale, device=config.device).to(X.dtype)[:, None]
    if not config.prefit:
        train(
            module, X, y, penalty, max_epochs=config.max_epochs, seed=config.seed, progress=config.progress, loss=config.loss
        )  # fmt: skip
    problem = Problem(module, X, y, penalty, loss=config.loss)
    check_finite(problem)
    return problem, centre, scale


def units_of(y: FloatArray) -> tuple[float, float]:
    """Mean and standard deviation of values (n,); one where they are all the same."""
    return float(y.mean()), float(y.std()) or 1.0


def fit_steps(transformers: Any, X: Any, y: Any, config: Config) -> tuple[Any, Any]:
    """Transformers fitted to a bag, the same whenever they are fitted to it, and its objects through them; both as they are where None."""
    # Open random states are closed, so that transformers can be fitted to other bags in the same way.
    unfitted = transformers if transformers is None or config.prefit else seeded(transformers, config.seed)
    return fit_transformer(unfitted, X, y, config.prefit)


def trained_here(final: Any) -> bool:
    """Whether this library trains the classifier: the built-in logistic regression, or a module."""
    return final is None or isinstance(final, nn.Module)


def fit_foreign(estimator: Any, X: Any, y: Any, seed: int, weights: FloatArray | None = None) -> Any:
    """A clone of the estimator fitted to all of (X, y), of weights (n,); open random states, a Pipeline's too, are seeded."""
    told = weighted(estimator, weights)
    if is_skorch(estimator):
        estimator = clone(estimator)
        # Full conformal prediction trains on every labelled point: no internal hold-out.
        estimator.set_params(train_split=None)
        y = np.asarray(y)
        # Numbers as a column, as the module returns them.
        y = y.astype(np.float32)[:, None] if y.dtype.kind == "f" else y.astype(np.int64)
        return estimator.fit(np.asarray(X, dtype=np.float32), y)
    with naming_columns(X):
        return seeded(estimator, seed).fit(X, y, **told)


def weighted(estimator: Any, weights: FloatArray | None) -> dict[str, Any]:
    """What tells the fit of an estimator, or of the last step of a Pipeline, the weights (n,) of points; nothing where there are none."""
    if weights is None:
        return {}
    final, prefix = estimator, ""
    while hasattr(final, "steps"):
        name, final = final.steps[-1]
        prefix += f"{name}__"
    if is_skorch(final) or isinstance(final, nn.Module) or not has_fit_parameter(final, "sample_weight"):
        kind = "a torch module" if isinstance(final, nn.Module) else f"{type(final).__name__}"
        raise ValueError(
            f"sample_weight was given, and training of {kind} takes none; leave it out, or give a model whose fit has sample_weight."
        )
    return {f"{prefix}sample_weight": weights}


def settings_of(estimator: Any) -> list[tuple[str, str]]:
    """All that a classifier's training depends on, as text: its parameters to the last, or a digest of a module's weights."""
    if estimator is None:
        return []
    if isinstance(estimator, nn.Module):
        state = estimator.state_dict().items()
        return [("", repr(estimator)), *((k, sha256(v.cpu().numpy().tobytes()).hexdigest()) for k, v in state)]
    parameters = [(k, v) for k, v in sorted(estimator.get_params(deep=True).items()) if not hasattr(v, "get_params")]
    return [(type(estimator).__name__, ""), *((k, repr(v)) for k, v in parameters)]


def columns(fitted: Any, classes: npt.NDArray[Any], present: IntArray) -> IntArray:
    """Which of the classes (C,) each column of a fitted classifier's probabilities is of; those present where it does not tell."""
    own = getattr(fitted, "classes_", None)
    if own is None or set(np.asarray(own).tolist()) != set(classes[present].tolist()):
        return present
    place = {label: k for k, label in enumerate(classes.tolist())}
    return np.array([place[label] for label in np.asarray(own).tolist()])
