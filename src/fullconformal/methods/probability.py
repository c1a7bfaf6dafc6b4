"""Engines of full CP itself for classifiers of any kind: neighbours and densities by updates, the others by honest refits."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.validation import _num_samples
from torch import nn

from fullconformal.methods.engines import Engine, FloatArray, Query, problem_log_proba
from fullconformal.methods.fitting import Settings, fit_foreign, fit_problem
from fullconformal.methods.neighbors import KernelDensity, NearestNeighbors
from fullconformal.methods.refits import refit_counts
from fullconformal.models.adapters import is_skorch
from fullconformal.models.tensors import check_distances
from fullconformal.problem import Problem


class Neighbors(Engine):
    """Full CP itself for nearest neighbours and kernel densities, by updates of scores prepared once; no refits."""

    def __init__(self, estimator: Any, X: FloatArray, y: npt.NDArray[np.int64], n_classes: int, memory: int):
        X = np.asarray(X, dtype=np.float64)
        self.n = len(y)
        self.bag: NearestNeighbors | KernelDensity
        if isinstance(estimator, KNeighborsClassifier):
            orders = {"euclidean": 2.0, "l2": 2.0, "manhattan": 1.0, "l1": 1.0, "minkowski": float(estimator.p)}
            if estimator.weights != "uniform" or estimator.metric not in orders:
                raise ValueError(
                    f"estimator=KNeighborsClassifier(weights={estimator.weights!r}, metric={estimator.metric!r}) is not "
                    f"supported; use weights='uniform' and a metric among {sorted(orders)}."
                )
            k, order = int(estimator.n_neighbors), orders[estimator.metric]
            check_distances(X, order, training=True)
            self.bag = NearestNeighbors.fit(X, y, n_classes, k, order, memory_budget=memory)
        else:
            self.bag = KernelDensity.fit(X, y, n_classes, estimator.bandwidth, memory_budget=memory)
        self.model, self.memory = clone(estimator).fit(X, y), memory

    def log_proba(self, X: Any) -> FloatArray:
        return _log(self.model.predict_proba(X))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q != 1:
            raise ValueError("these scores leave a point out of its own neighbours: use scheme='deleted'.")
        if isinstance(self.bag, NearestNeighbors):
            check_distances(np.asarray(X, dtype=np.float64), self.bag.p, training=False)
        return self.bag.counts(X, query.weight, query.progress, self.memory)


@dataclass(frozen=True)
class FitScore:
    """Trains a classifier anew on a bag and returns its log-probabilities as a function."""

    estimator: Any
    settings: Settings
    classes: npt.NDArray[Any]

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    def __call__(self, X: Any, y: npt.NDArray[np.int64]) -> LogProba:
        present = np.unique(y)
        if len(present) == 1:  # nothing to learn: the one label there is
            return LogProba(None, present, self.n_classes)
        if isinstance(self.estimator, nn.Module):
            problem = fit_problem(self.estimator, X, y, self.classes, self.settings)
            return LogProba(problem, present, self.n_classes)
        labels = self.classes[y]
        if is_skorch(self.estimator):  # its module has an output for every class, present or not
            present, labels = np.arange(self.n_classes), y
        fitted = fit_foreign(self.estimator, X, labels, self.settings.seed)
        return LogProba(fitted, columns(fitted, self.classes, present), self.n_classes)


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
            out[:, self.present] = _log(np.asarray(proba))
        return out

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        if isinstance(self.model, Problem):
            return torch.finfo(self.model.X.dtype).eps
        single = is_skorch(self.model) or getattr(X, "dtype", None) == np.float32
        return float(np.finfo(np.float32 if single else np.float64).eps)


class Refit(Engine):
    """Full CP itself for any classifier, by honest refits."""

    def __init__(
        self, fit_score: FitScore, X: Any, y: npt.NDArray[np.int64], n_jobs: int | None, checkpoint: Any, report: Any
    ):
        self.fit_score, self.X, self.y, self.n = fit_score, np.asarray(X), y, len(y)
        self.n_jobs, self.checkpoint, self.report = n_jobs, checkpoint, report
        self.model = fit_score(self.X, y)

    def log_proba(self, X: Any) -> FloatArray:
        out: FloatArray = self.model(X)
        return out

    def precision(self, X: Any) -> float:
        return self.model.precision(X)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        estimator, settings = self.fit_score.estimator, self.fit_score.settings
        self.model(X)  # names an object that cannot be computed with, which in a bag would be one of the points
        labels = self.fit_score.classes.tolist()  # by which a classifier may have been told of classes
        named = () if labels == list(range(len(labels))) else (labels,)
        key = repr((settings_of(estimator), settings.seed, settings.l2, settings.max_epochs, *named))
        return refit_counts(
            self.fit_score, self.X, self.y, self.fit_score.n_classes, np.asarray(X), query.q, query.weight,
            self.n_jobs, self.checkpoint, query.progress, self.report, key=key, eps=self.precision(self.X),
        )  # fmt: skip


def settings_of(estimator: Any) -> list[tuple[str, str]]:
    """All that a classifier's training depends on, as text: its parameters to the last, or a digest of a module's weights."""
    if estimator is None:
        return []
    if isinstance(estimator, nn.Module):
        state = estimator.state_dict().items()
        return [("", repr(estimator)), *((k, sha256(v.cpu().numpy().tobytes()).hexdigest()) for k, v in state)]
    parameters = [(k, v) for k, v in sorted(estimator.get_params(deep=True).items()) if not hasattr(v, "get_params")]
    return [(type(estimator).__name__, ""), *((k, repr(v)) for k, v in parameters)]


def columns(fitted: Any, classes: npt.NDArray[Any], present: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which of the classes (C,) each column of a fitted classifier's probabilities is of; those present where it does not tell."""
    own = getattr(fitted, "classes_", None)
    if is_skorch(fitted) or own is None or set(np.asarray(own).tolist()) != set(classes[present].tolist()):
        return present
    place = {label: k for k, label in enumerate(classes.tolist())}
    return np.array([place[label] for label in np.asarray(own).tolist()])


def _log(proba: npt.NDArray[Any]) -> FloatArray:
    """Logarithm of probabilities (m, C), finite where they round to zero."""
    return np.log(np.maximum(proba.astype(np.float64), np.finfo(np.float64).tiny))
