"""What fitted models say of objects: log-probabilities (m, C) of labels, or values (m, 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import _num_samples
from torch import Tensor

from fullconformal.methods.base import FloatArray
from fullconformal.models.adapters import is_skorch
from fullconformal.models.objects import take
from fullconformal.models.requirements import naming_columns, to_tensor, transform
from fullconformal.problem import Problem
from fullconformal.storage import savable


def problem_log_proba(problem: Problem, X: Tensor) -> FloatArray:
    """Logarithms (m, C) of a model's probabilities, float64, for inputs (m, ...)."""
    return problem.loss.log_proba(problem.logits(X).double()).cpu().numpy()


class Slim:
    """What models share that are kept to predict: of a problem the first point only, as it trains no more."""

    model: Any

    def slim(self) -> Self:
        """The same with as little as that."""
        return replace(self, model=first_point(self.model))  # type: ignore[type-var]

    def state(self) -> dict[str, Any]:
        """Its fields."""
        return vars(self.slim())


@savable
@dataclass(frozen=True)
class LogProba(Slim):
    """Log-probabilities (m, C) of a fitted model that knows the classes `present`; −inf for the others."""

    model: Any
    present: npt.NDArray[np.int64]
    n_classes: int

    def __call__(self, X: Any) -> FloatArray:
        if isinstance(self.model, Problem):
            return problem_log_proba(self.model, to_tensor(X, self.model.X.device, self.model.X.dtype))
        out = np.full((_num_samples(X), self.n_classes), -np.inf)
        if self.model is None:
            out[:, self.present] = -math.log(len(self.present))
        else:
            X = np.asarray(X, dtype=np.float32) if is_skorch(self.model) else X
            with naming_columns(X):
                proba = np.asarray(self.model.predict_proba(X))
            # NaN is told of with the object.
            if proba.shape != (len(out), len(self.present)) or (np.abs(proba - 0.5) > 0.501).any():
                raise ValueError(
                    f"estimator={type(self.model).__name__}: predict_proba gave {proba.shape} numbers, from {np.nanmin(proba):.3g} to "
                    f"{np.nanmax(proba):.3g}; give a classifier with one probability an object and class, {(len(out), len(self.present))} "
                    "(of a skorch net whose module returns logits, set criterion=torch.nn.CrossEntropyLoss)."
                )
            out[:, self.present] = log_of(proba)
        return out

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        if isinstance(self.model, Problem):
            return torch.finfo(self.model.X.dtype).eps
        single = is_skorch(self.model) or getattr(X, "dtype", None) == np.float32
        return float(np.finfo(np.float32 if single else np.float64).eps)


@savable
@dataclass(frozen=True)
class Prediction(Slim):
    """Values (m, 1) that a fitted regressor predicts; centre + scale times the outputs of a network, and the centre where it is None."""

    model: Any
    centre: float = 0.0
    scale: float = 1.0

    n_classes: ClassVar[int] = 1

    def __call__(self, X: Any) -> FloatArray:
        if self.model is None:
            return np.full((_num_samples(X), 1), self.centre)
        if not isinstance(self.model, Problem):
            return predictions(self.model, X)[0][:, None]
        f = self.model.logits(to_tensor(X, self.model.X.device, self.model.X.dtype)).double().cpu().numpy()
        return self.centre + self.scale * finite_values(f)

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it predicts."""
        if isinstance(self.model, Problem):
            return torch.finfo(self.model.X.dtype).eps
        return 0.0 if self.model is None else predictions(self.model, take(X, [0]))[1]


def first_point(model: Any) -> Any:
    """A problem with the first of its points only; another model as it is."""
    if not isinstance(model, Problem):
        return model
    return Problem(model.model, model.X[:1].clone(), model.y[:1].clone(), 0.0, model.chunk, model.loss)


def predictions(model: Any, X: Any) -> tuple[FloatArray, float]:
    """What a fitted regressor predicts (m,), finite, and the unit of rounding it computed in."""
    found = np.asarray(model.predict(np.asarray(X, dtype=np.float32) if is_skorch(model) else X))
    m = _num_samples(X)
    # Nets of skorch's have one column.
    if found.shape not in ((m,), (m, 1)):
        raise ValueError(
            f"estimator={type(model).__name__}: predict gave an array of shape {found.shape} for {m} objects; give a regressor of "
            "one number per object."
        )
    eps = np.finfo(found.dtype if found.dtype.kind == "f" else np.float64).eps
    return finite_values(found.reshape(m).astype(np.float64)), float(eps)


def finite_values(found: FloatArray) -> FloatArray:
    """Predictions (m, ...) as they are; an error where one is not finite."""
    if not np.isfinite(found).all():
        at = np.argwhere(~np.isfinite(found))[0]
        raise ValueError(
            f"the model's prediction of object {at[0]} (counted from 0) is {found[tuple(at)]}; scale the features and y, or leave it out."
        )
    return found


@savable
@dataclass(frozen=True)
class Piped:
    """A model behind transformers."""

    transformers: Any
    model: LogProba | Prediction

    def __call__(self, X: Any) -> FloatArray:
        return self.model(transform(self.transformers, X))

    def slim(self) -> Piped:
        """The same with the first point only of a problem, as it trains no more."""
        return replace(self, model=self.model.slim())

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        return self.model.precision(X)

    @property
    def n_classes(self) -> int:
        return self.model.n_classes


# Log-probabilities (m, C) of objects, or their values (m, 1).
Model = LogProba | Prediction | Piped


def log_of(proba: npt.NDArray[Any]) -> FloatArray:
    """Logarithm of probabilities (m, C), finite where they round to zero."""
    return np.log(np.maximum(proba.astype(np.float64), np.finfo(np.float64).tiny))
