"""What every method of full conformal prediction is: it fits a bag of points, and what it fitted counts for candidates.

A method is told of the model, the bag and one frozen `Config`; it knows no estimator. What it returns, a `Fitted`, answers every question
that is asked later: counts, predictions, diagnostics, what it guarantees, and what is saved of it. `Recalibration` makes the p-values of
any of them exactly valid with fresh points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from fullconformal import pvalues
from fullconformal.curvature import Curvature
from fullconformal.diagnostics import Diagnostics
from fullconformal.guarantees import APPROXIMATE, Guarantee
from fullconformal.losses import SOFTMAX, Loss
from fullconformal.models.distances import blocks
from fullconformal.models.objects import joined, take
from fullconformal.runtime.tasks import Progress, Work, nobody, onwards
from fullconformal.storage import StorageError, budget, check_fields, hints_of, parameters, require, savable

CPU = torch.device("cpu")
# Units of rounding, relative, by which two losses may differ and be tied: 2·32(1 + r) for logits that range over r ≤ 63.
TIED = 4096
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class ConformalWarning(UserWarning):
    """Something a user of conformal prediction should know before trusting the sets."""


class Unsuitable(ValueError):
    """A method cannot be had with these data, whatever the model; where it was not asked for, another is taken."""


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
    folds: int = 10
    repeats: int = 1
    update: str = "none"
    device: torch.device = CPU
    #: None is the model's own; float64 for linear models
    dtype: torch.dtype | None = None
    memory: int = 2**32
    seed: int = 0
    work: Work = field(default_factory=Work)
    progress: Progress = nobody


class Points:
    """What bags of labels and of values share: objects X (n, ...), y (n,), and weights (n,) where there are any."""

    X: Any
    y: npt.NDArray[Any]
    weights: FloatArray | None

    def part(self, points: IntArray) -> Self:
        """The bag of some of the points."""
        weights = None if self.weights is None else self.weights[points]
        return replace(self, X=take(self.X, points), y=self.y[points], groups=None, weights=weights)  # type: ignore[type-var]

    def with_candidate(self, X: Any, y: Any) -> Self:
        """The bag with one more point, of object X (1, ...) and weight 1."""
        weights = None if self.weights is None else np.append(self.weights, 1.0)
        return replace(self, X=joined(self.X, X), y=np.append(self.y, y), groups=None, weights=weights)  # type: ignore[type-var]


@dataclass(frozen=True)
class Bag(Points):
    """The training points: objects X (n, ...) as the model sees them, label indices y (n,), and the classes (C,) they stand for.

    Points with the same entry of `groups` (n,), where there are any, belong together. `weights` (n,) are those of losses in training.
    """

    X: Any
    y: IntArray
    classes: npt.NDArray[Any]
    groups: npt.NDArray[Any] | None = None
    weights: FloatArray | None = None

    @property
    def n_classes(self) -> int:
        """C, the outputs of a model."""
        return len(self.classes)

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to learn: points of one label, or none."""
        return len(np.unique(self.y)) < 2


@savable
@dataclass(frozen=True)
class Values(Points):
    """The training points of a regression: objects X (n, ...) as the model sees them, values y (n,); groups and weights as in `Bag`."""

    X: Any
    y: FloatArray
    groups: npt.NDArray[Any] | None = None
    weights: FloatArray | None = None

    #: one output of a model, the value
    n_classes: ClassVar[int] = 1

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to learn from: no point."""
        return not len(self.y)


@dataclass(frozen=True)
class Query:
    """What is asked about objects: the scheme q, how to approximate, weights (n,) of the points, who is compared with whom.

    ``scales`` (m, d), None for ones, are factors s_j of each object's penalties: Λ_j s_j² in place of Λ_j. They are what a diagonal scaler
    that is refitted with the object does to the columns of a penalised linear model.
    """

    q: float
    approximation: str = "direct"
    prune: bool | str = "auto"
    points: FloatArray | None = None
    class_conditional: bool = False
    progress: Progress = nobody
    work: Work = field(default_factory=Work)
    scales: FloatArray | None = None
    #: of the training points (n,) and of the objects (m,), by number, where these are compared within categories; see `by_category`
    categories: IntArray | None = None
    places: IntArray | None = None

    def weight(self, y: IntArray, n_classes: int) -> FloatArray | None:
        """Weight (n, C) of points with labels y (n,) against a candidate of each label; None where all are one."""
        return pvalues.comparison_weight(y, n_classes, class_conditional=self.class_conditional, weights=self.points)

    def total(self, y: IntArray, n_classes: int) -> FloatArray:
        """Weight of all the points that a candidate is compared with, one number or (C,)."""
        return pvalues.comparison_total(y, n_classes, class_conditional=self.class_conditional, weights=self.points)


@dataclass(frozen=True)
class AnyMethod(ABC):
    """A way to do full conformal prediction with a model, of labels or of numbers."""

    model: Any = None

    #: what users call it
    name: ClassVar[str]
    #: whether it trains a Pipeline as a whole, transformers and all, from the objects as they were given
    takes_pipeline: ClassVar[bool] = False
    #: whether it trains with the weights of a bag
    takes_weights: ClassVar[bool] = False


class Method(AnyMethod):
    """One of labels."""

    @abstractmethod
    def fit(self, bag: Bag, config: Config) -> Fitted:
        """Fit the model to the bag, unless it is fitted, and prepare what every prediction needs."""


class FittedModel(ABC):
    """What every method has fitted, for labels or for numbers."""

    #: what users call the method
    method: ClassVar[str]
    #: what is promised of its sets
    guarantee: Guarantee = APPROXIMATE
    #: whether p-values take so little time that a loaded predictor is tried on a few objects
    quick: ClassVar[bool] = True
    #: whether it can be told of scales of columns that differ between objects; shifts of columns must not matter to it then
    takes_scales: ClassVar[bool] = False
    #: number of training points
    n: int
    #: whether a file may hold one only: much is made of little when it is loaded
    once: ClassVar[bool] = True

    def state(self) -> dict[str, Any]:
        """What is saved: what it was made of, if nothing else is said."""
        return {name: getattr(self, name) for name in parameters(type(self))}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The same from what was saved, or a StorageError."""
        check_fields(cls, state, hints_of(cls.__init__))
        cls.check_state(state)
        # How much memory may be taken is not the file's to say.
        return cls(**state | ({"memory": budget(state["memory"])} if "memory" in state else {}))

    @classmethod  # noqa: B027
    def check_state(cls, state: dict[str, Any]) -> None:
        """Raise where parts from a file, all of the annotated types, do not go together."""

    def holds(self, X: Any) -> bool:
        """Whether objects X are the first training points, up to rounding; True where these were not kept."""
        return True

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return CPU

    @property
    def warnings(self) -> list[str]:
        """What must be known before the sets are trusted."""
        return []


class Fitted(FittedModel):
    """A fitted model that can count, for every candidate, the training points above it and tied with it."""

    #: shape of an object, where the training points came as a stream
    input_shape: tuple[int, ...] = ()

    def __init__(self, labels: IntArray, n_classes: int):
        """Label indices (n,) of the training points, and the number of classes."""
        self.labels, self.n, self.n_classes = labels, len(labels), n_classes

    @abstractmethod
    def log_proba(self, X: Any) -> FloatArray:
        """Logarithms (m, C) of the model's probabilities."""

    @abstractmethod
    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Weight of the training points above and tied with each candidate, (m, C) each."""

    def p_values(self, X: Any, query: Query, own: Any = 1.0, uniform: FloatArray | None = None) -> FloatArray:
        """p-values (m, C) of objects X; weights (m, 1) of their candidates, uniforms (m, 1) where ties are broken at random."""
        return pvalues.p_values(*self.counts(X, query), query.total(self.labels, self.n_classes), own, uniform)

    def decide(self, X: Any, query: Query, levels: FloatArray) -> FloatArray:
        """Numbers (m, C) on the same side of 1 − level as the p-values, at every level: these themselves where nothing less will do."""
        return self.p_values(X, query)

    def bounds(self, X: Any, query: Query, own: Any = 1.0) -> tuple[FloatArray, FloatArray]:
        """Two arrays (m, C) that enclose the p-values of the ordinary scheme; symmetric scores alone have them."""
        raise ValueError(f"method={self.method!r} has no bounds of its p-values; symmetric scores alone have them.")

    def weight(self, query: Query) -> FloatArray | None:
        """Weight (n, C) of the training points against a candidate of each label; None where all are one."""
        return query.weight(self.labels, self.n_classes)

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray] | None:
        """Scores α (m, C, n) and τ (m, C) of a few objects; None where the method orders points without scoring them."""
        return None

    def at(self, X: Any, label: int) -> tuple[Fitted, Any]:
        """What answers for one candidate, of object X (1, ...), and the object as that sees it."""
        return self, X

    def refits(self) -> Any:
        """What scores points by honest refits (`methods.audit`), for methods with refits of their own kind; None for others."""
        return None

    def precision(self, X: Any) -> float:
        """The unit of rounding of `log_proba` for objects X."""
        return float(np.finfo(np.float64).eps)

    @property
    def diagnostics(self) -> Diagnostics | None:
        """Figures about the fit and its curvature; None where the method has none."""
        return None


def counted(
    ask: Callable[[slice], tuple[FloatArray, FloatArray, FloatArray]], m: int, n_classes: int, row: int,
    weight: FloatArray | None, progress: Progress, block: int = 2**22,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Weight (m, C) of the training points above and tied with candidates, from scores α (b, C, n), τ (b, C) and τ's rounding (b, C).

    Asked for as many objects at a time as fit a block, of so many bytes each; larger blocks are no faster. Weight (n, C) as in `pvalues`.
    """
    greater, equal = np.empty((2, m, n_classes))
    against = None if weight is None else weight.T
    for at in blocks(m, row, block):
        alpha, tau, tie = ask(at)
        greater[at], equal[at] = pvalues.count(alpha, tau[:, :, None], tie[:, :, None], against, axis=-1)
        progress(at.stop, m)
    return greater, equal


class NeverSaved:
    """What trains its model anew for every candidate."""

    def state(self) -> dict[str, Any]:
        """Raise: there is nothing."""
        raise StorageError(
            "method='exact' by refits trains the model anew for every candidate, so there is nothing to save but the data; save these, or "
            "use another method."
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Raise: it was never saved."""
        raise StorageError("it holds refits, which are never saved")


class AllTied(NeverSaved, Fitted):
    """Where no fit can be had all points are tied with every candidate, so that p = 1."""

    method = "none"

    def log_proba(self, X: Any) -> FloatArray:
        return np.full((len(X), self.n_classes), -np.log(self.n_classes))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        above = np.zeros((len(X), self.n_classes))
        return above, above + query.total(self.labels, self.n_classes)


def starts_with(points: Any, X: Any) -> bool:
    """Whether objects X (k, ...) are the first of the points (n, ...), up to rounding."""
    return bool(np.allclose(X, points[: len(X)], rtol=1e-5, atol=1e-6, equal_nan=True))


@savable
@dataclass(frozen=True)
class Recalibration:
    """What fresh labelled points say of p-values: scores −p of their true labels in ascending order, of all or for each class.

    With categories, those of each category one after the other.
    """

    #: what the p-values meant when they were taken
    q: float
    approximation: str
    class_conditional: bool
    ordered: list[FloatArray]

    @classmethod
    def of(cls, scores: FloatArray, cell: IntArray, n_cells: int, query: Query) -> Self:
        """From scores (m,) of fresh points, as `refined` has them of their labels, and the cells (m,) they are compared in."""
        return cls(query.q, query.approximation, query.class_conditional, pvalues.ordered_scores(scores, cell, n_cells))

    @property
    def sizes(self) -> IntArray:
        """Numbers of fresh points in each cell."""
        return np.array([len(scores) for scores in self.ordered])

    def p_values(self, fitted: Fitted, X: Any, query: Query, uniform: FloatArray | None) -> FloatArray:
        """p′ (m, C) of objects X of one category, as the model sees them."""
        asked = query.q, query.approximation, query.class_conditional
        if asked != (self.q, self.approximation, self.class_conditional):
            raise ValueError("p-values were recalibrated with other options; call recalibrate again.")
        tau = refined(fitted, X, query)
        # A relative error e of the loss ℓ moves 1/(1 + ℓ), and with it what refines p, by no more than e/4.
        tie = TIED * fitted.precision(X) / (fitted.n + 1) / 4 + 4 * np.finfo(np.float64).eps
        category = 0 if query.places is None else int(query.places[0])
        ordered = pvalues.in_category(self.ordered, fitted.n_classes if self.class_conditional else 1, category)
        greater, equal = pvalues.rank_counts(ordered, tau, np.full_like(tau, tie))
        return pvalues.p_values(greater, equal, [len(scores) for scores in ordered], uniform=uniform)

    def verify(self, n_cells: int) -> None:
        """Raise where a loaded one is not whole."""
        require(len(self.ordered) == n_cells, "recalibration")
        require(all(map(pvalues.is_ordered, self.ordered)), "recalibration")


def refined(fitted: Fitted, X: Any, query: Query) -> FloatArray:
    """Scores −p (m, C), as small p-values are the nonconforming ones; plus less than their spacing, by the model's loss."""
    return -fitted.p_values(X, query) - 0.999 / (fitted.n + 1) / (1 - fitted.log_proba(X))


def by_category(ask: Callable[..., Any], X: Any, query: Query, *by_row: Any) -> FloatArray:
    """What ``ask(X, query, *by_row)`` answers, (..., m, C), of objects X (m, ...); where there are categories, of those of each in turn.

    Points of other categories have weight 0. Of ``by_row``, arrays (m, 1) are divided as X is.
    """
    if query.categories is None or query.places is None:
        return np.asarray(ask(X, query, *by_row))
    m, done, out = len(query.places), 0, np.empty(0)
    for place in np.unique(query.places).tolist():
        rows, inside, work = np.flatnonzero(query.places == place), query.categories == place, query.work
        if work.checkpoint is not None:
            work = replace(work, checkpoint=Path(work.checkpoint) / f"category{place}")
        points = inside * (1.0 if query.points is None else query.points)
        told = onwards(query.progress, done, len(rows), m)
        one = replace(query, points=points, progress=told, work=work, places=query.places[rows])
        found = np.asarray(ask(take(X, rows), one, *(v[rows] if np.ndim(v) else v for v in by_row)))
        out = out if done else np.empty((*found.shape[:-2], m, found.shape[-1]))
        out[..., rows, :] = found
        done += len(rows)
    return out
