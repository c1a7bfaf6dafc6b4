"""Classifiers of any kind as functions that give log-probabilities, fitted to a bag or as they come."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.utils.validation import _num_samples
from torch import Tensor, nn

from fullconformal.methods.base import Bag, Config, FloatArray, IntArray
from fullconformal.methods.fitting import fit_foreign, fit_problem
from fullconformal.models.adapters import is_skorch
from fullconformal.models.requirements import fit_transformer, split_pipeline, to_tensor, transform
from fullconformal.problem import Problem
from fullconformal.storage import savable


def problem_log_proba(problem: Problem, X: Any) -> FloatArray:
    """Logarithms (m, C) of a model's probabilities, float64, for objects (m, ...) or tensors made of them."""
    X = X if isinstance(X, Tensor) else to_tensor(X, problem.X.device, problem.X.dtype)
    out: FloatArray = problem.loss.log_proba(problem.logits(X).double()).cpu().numpy()
    return out


@savable
@dataclass(frozen=True)
class LogProba:
    """Log-probabilities (m, C) of a fitted model that knows the classes `present`; −inf for the others."""

    model: Any
    present: npt.NDArray[np.int64]
    n_classes: int

    def __call__(self, X: Any) -> FloatArray:
        if isinstance(self.model, Problem):
            return problem_log_proba(self.model, X)
        out = np.full((_num_samples(X), self.n_classes), -np.inf)
        if self.model is None:
            out[:, self.present] = 0.0
        else:
            X = np.asarray(X, dtype=np.float32) if is_skorch(self.model) else X
            proba = self.model.predict_proba(X)
            if np.shape(proba) != (len(out), len(self.present)):
                raise ValueError(
                    f"estimator={type(self.model).__name__}: predict_proba gave {np.shape(proba)} numbers; give a classifier with one "
                    f"probability an object and class, {(len(out), len(self.present))}."
                )
            out[:, self.present] = log_of(np.asarray(proba))
        return out

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        if isinstance(self.model, Problem):
            return torch.finfo(self.model.X.dtype).eps
        single = is_skorch(self.model) or getattr(X, "dtype", None) == np.float32
        return float(np.finfo(np.float32 if single else np.float64).eps)

    def state(self) -> dict[str, Any]:
        """Its fields; of a problem the first point only, as it trains no more."""
        model = self.model
        if isinstance(model, Problem):
            model = Problem(model.model, model.X[:1], model.y[:1], 0.0, model.chunk, model.loss)
        return {"model": model, "present": self.present, "n_classes": self.n_classes}


@savable
@dataclass(frozen=True)
class Piped:
    """A model behind transformers."""

    transformers: Any
    model: LogProba

    def __call__(self, X: Any) -> FloatArray:
        return self.model(transform(self.transformers, X))

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        return self.model.precision(X)


Model = LogProba | Piped  # log-probabilities (m, C) of objects


@dataclass(frozen=True)
class FitScore:
    """Trains a classifier anew on a bag and returns its log-probabilities as a function."""

    estimator: Any
    config: Config
    classes: npt.NDArray[Any]

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    def __call__(self, X: Any, y: IntArray) -> LogProba:
        present = np.unique(y)
        if len(present) == 1:  # nothing to learn: the one label there is
            return LogProba(None, present, self.n_classes)
        if isinstance(self.estimator, nn.Module):
            problem = fit_problem(self.estimator, Bag(X, y, self.classes), self.config)
            return LogProba(problem, present, self.n_classes)
        labels = self.classes[y]
        if is_skorch(self.estimator):  # its module has an output for every class, present or not
            present, labels = np.arange(self.n_classes), y
        fitted = fit_foreign(self.estimator, X, labels, self.config.seed)
        return LogProba(fitted, columns(fitted, self.classes, present), self.n_classes)


def fit_model(estimator: Any, bag: Bag, config: Config) -> Model:
    """Log-probabilities of a classifier, or of a Pipeline that ends in one, fitted to a bag; with prefit, of one fitted already."""
    transformers, final = split_pipeline(estimator)
    every = np.arange(bag.n_classes)
    if not trained_here(final) and not is_skorch(final):  # one of scikit-learn's kind, a whole Pipeline too
        fitted = estimator if config.prefit else seeded(estimator, config.seed).fit(bag.X, bag.classes[bag.y])
        return LogProba(fitted, columns(fitted, bag.classes, every), len(every))
    transformers, X = fit_transformer(transformers, bag.X, bag.y, config.prefit)
    bag = Bag(X, bag.y, bag.classes)
    if trained_here(final):
        model = LogProba(fit_problem(final, bag, config), every, len(every))
    elif config.prefit:
        model = LogProba(final, every, len(every))
    else:
        model = FitScore(final, config, bag.classes)(X, bag.y)
    return model if transformers is None else Piped(transformers, model)


def trained_here(final: Any) -> bool:
    """Whether this library trains the classifier: the built-in logistic regression, or a module."""
    return final is None or isinstance(final, nn.Module)


def seeded(estimator: Any, seed: int) -> Any:
    """A clone whose random states that were left open, a Pipeline's steps included, are seeded."""
    estimator = clone(estimator)
    unset = [k for k, v in estimator.get_params().items() if k.split("__")[-1] == "random_state" and v is None]
    if unset:
        estimator.set_params(**dict.fromkeys(unset, seed))
    return estimator


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
    if is_skorch(fitted) or own is None or set(np.asarray(own).tolist()) != set(classes[present].tolist()):
        return present
    place = {label: k for k, label in enumerate(classes.tolist())}
    return np.array([place[label] for label in np.asarray(own).tolist()])


def log_of(proba: npt.NDArray[Any]) -> FloatArray:
    """Logarithm of probabilities (m, C), finite where they round to zero."""
    return np.log(np.maximum(proba.astype(np.float64), np.finfo(np.float64).tiny))
