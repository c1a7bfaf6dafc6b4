"""What every method of full conformal prediction is: it fits a bag of points, and what it fitted counts for candidates.

A method is told of the model, the bag and one frozen `Config`; it knows no estimator. What it returns, a `Fitted`, answers every question
that is asked later: counts, predictions, diagnostics, what it guarantees, and what is saved of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.curvature import Curvature
from fullconformal.diagnostics import Diagnostics
from fullconformal.losses import SOFTMAX, Loss
from fullconformal.problem import Problem
from fullconformal.runtime.tasks import Work

CPU = torch.device("cpu")
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


class ConformalWarning(UserWarning):
    """Something a user of conformal prediction should know before trusting the sets."""


@dataclass(frozen=True)
class Config:
    """How to fit: the estimator's arguments, with everything resolved that depends on the machine or the data."""

    l2: float | None = None
    prefit: bool = False
    head: str | None = None
    max_epochs: int = 200
    loss: Loss = SOFTMAX
    curvature: str | Curvature = "auto"
    damping: float | None = None
    q: float = 1.0
    approximation: str = "direct"
    prune: bool | str = "auto"
    device: torch.device = CPU
    #: None is the model's own; float64 for linear models
    dtype: torch.dtype | None = None
    memory: int = 2**32
    seed: int = 0
    work: Work = field(default_factory=Work)
    verbose: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class Bag:
    """The training points: objects X (n, ...) as the model sees them, label indices y (n,), and the classes (C,) they stand for."""

    X: Any
    y: IntArray
    classes: npt.NDArray[Any]

    @property
    def n_classes(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class Query:
    """What is asked about objects: the scheme q, how to approximate, weights (n,) of the points, who is compared with whom."""

    q: float
    approximation: str = "direct"
    prune: bool | str = "auto"
    points: FloatArray | None = None
    class_conditional: bool = False
    progress: Progress | None = None
    work: Work = field(default_factory=Work)

    def weight(self, y: IntArray, n_classes: int) -> FloatArray | None:
        """Weight (n, C) of points with labels y (n,) against a candidate of each label; None where all are one."""
        return pvalues.comparison_weight(
            y, n_classes, class_conditional=self.class_conditional, weights=self.points
        )  # fmt: skip


@dataclass(frozen=True)
class Method(ABC):
    """A way to do full conformal prediction with a model."""

    model: Any = None

    #: what users call it
    name: ClassVar[str]

    @abstractmethod
    def fit(self, bag: Bag, config: Config) -> Fitted:
        """Fit the model to the bag, unless it is fitted, and prepare what every prediction needs."""


class Fitted(ABC):
    """A fitted model that can count, for every candidate, the training points above it and tied with it."""

    #: what users call the method
    method: ClassVar[str]
    #: "exact": sets hold the true label with the probability asked for, whatever the data; or "approximate"
    guarantee: ClassVar[str] = "exact"
    #: whether p-values take so little time that a loaded predictor is tried on a few objects
    quick: ClassVar[bool] = True
    #: number of training points, and of classes
    n: int
    n_classes: int
    #: shape of an object, where the training points came as a stream
    input_shape: tuple[int, ...] = ()

    @abstractmethod
    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""

    @abstractmethod
    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Weight of the training points above and tied with each candidate, (m, C) each."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What is saved."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same from what was saved, or a StorageError."""

    @property
    @abstractmethod
    def labels(self) -> IntArray:
        """Label indices (n,) of the training points."""

    def holds(self, X: Any) -> bool:
        """Whether objects X are the first training points, up to rounding; True where these were not kept."""
        return True

    @property
    def refittable(self) -> Problem | None:
        """The problem that an audit refits; None where the method is full CP itself, or kept no training objects."""
        return None

    def inputs(self, X: Any) -> Tensor:
        """Objects X (m, ...) as the problem that an audit refits knows them."""
        raise NotImplementedError

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        """Scores α (m, C, n) and τ (m, C) of a few objects; None where the method orders points without scoring them."""
        return None

    def precision(self, X: Any) -> float:
        """The unit of rounding of `log_proba` for objects X."""
        return float(np.finfo(np.float64).eps)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return CPU

    @property
    def diagnostics(self) -> Diagnostics:
        """Figures about the fit."""
        raise ValueError(
            "this method approximates nothing, so there is nothing to diagnose: its sets are exactly valid."
        )

    @property
    def warnings(self) -> list[str]:
        """What must be known before the sets are trusted."""
        return []
