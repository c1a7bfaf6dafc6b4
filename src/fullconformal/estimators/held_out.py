"""Points that calibrate and do not train: models with the scores of points they have not seen, and the classifiers that hold such."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted
from torch import nn

from fullconformal import pvalues
from fullconformal.conformity import ConformityScore
from fullconformal.estimators.base import ABSENT, ConformalClassifier, whole_or_nothing
from fullconformal.estimators.categories import Categories, tied_at_the_top, warn_unreachable
from fullconformal.estimators.inputs import encode_labels, first_rows, index_labels
from fullconformal.estimators.validation import check_flag, check_sample_weight, score_of
from fullconformal.guarantees import APPROXIMATE, Guarantee
from fullconformal.methods.base import Bag, Config, ConformalWarning, FloatArray, IntArray
from fullconformal.methods.outputs import LogProba, Model, Piped
from fullconformal.methods.parts import Part, fit_parts
from fullconformal.models.adapters import is_skorch
from fullconformal.models.objects import take
from fullconformal.models.requirements import finite_rows, split_pipeline
from fullconformal.runtime.hashing import uniforms
from fullconformal.runtime.tasks import Work, progress_bar
from fullconformal.storage import LIMITS, expect, require, savable

#: how p-values of several parts are made one, of which twice is valid
AGGREGATIONS: dict[str, Callable[..., FloatArray]] = {
    "mean": np.mean, "median": np.median, "sequential": pvalues.sequential_mean,
}  # fmt: skip
#: parameters that say how labels are scored; what was calibrated with others is of no use
SCORING = ("conformity_score", "randomized", "k_reg", "lambda_reg", "class_conditional", "allow_empty")


@savable
@dataclass(frozen=True)
class Calibrated:
    """A model and the scores, in ascending order, of points that did not train it: an array for each of `pvalues.cells`."""

    model: Any
    ordered: list[FloatArray]


@savable
@dataclass(frozen=True)
class HeldOut:
    """Calibrated models, and how labels are scored; sizes are the numbers of points that calibrate in each of `pvalues.cells`.

    Categories of objects X (m, ...) are given by their places (m,), None where there are none.
    """

    score: ConformityScore
    randomized: bool
    class_conditional: bool
    seed: int
    n_classes: int
    parts: list[Calibrated]
    sizes: npt.NDArray[np.int64]

    def proba(self, X: Any) -> FloatArray:
        """Probabilities (m, C): the mean over the models."""
        return np.asarray(sum(np.exp(finite_rows(part.model(X))) for part in self.parts) / len(self.parts))

    def uniform(self, X: Any) -> FloatArray | None:
        """The uniforms (m,) of randomised scores; None where they are not."""
        return uniforms(X, self.seed) if self.randomized else None

    def smoothing(self, X: Any, smoothing: bool) -> FloatArray | None:
        """The uniforms (m, 1) of smoothed p-values: others than those of the scores."""
        return uniforms(X, self.seed + 1)[:, None] if smoothing else None

    @property
    def width(self) -> int:
        """Cells of a category: C where labels are compared with points of their own, else one."""
        return self.n_classes if self.class_conditional else 1

    def totals(self, sizes: Any, places: IntArray | None) -> npt.NDArray[Any]:
        """Numbers of points, (1 or m, width), that objects are compared with, of those in each cell."""
        return pvalues.totals(np.reshape(sizes, (-1, self.width)), places)

    def counts(self, X: Any, places: IntArray | None, uniform: FloatArray | None) -> Iterator[npt.NDArray[Any]]:
        """Calibration points of each part in turn above and tied with every candidate, (2, m, C).

        Equal objects in batches of different sizes have scores that differ by rounding; they are tied.
        """
        for part in self.parts:
            log_proba = finite_rows(part.model(X))
            tau = self.score.scores(log_proba, uniform)
            tie = self.score.rounding(tau, log_proba, part.model.precision(X))
            own, out = np.zeros(len(tau)) if places is None else places, np.zeros((2, *tau.shape), dtype=np.int64)
            for place in np.unique(own).astype(int).tolist():
                rows = np.flatnonzero(own == place)
                ordered = pvalues.in_category(part.ordered, self.width, place)
                out[:, rows] = pvalues.rank_counts(ordered, tau[rows], tie[rows])
            yield out

    def p_values(self, X: Any, places: IntArray | None, smoothing: bool = False) -> FloatArray:
        """(1 + #{i : s_i ≥ s^(−k(i))(x, y)})/(n + 1) (m, C), over the points of all parts; smoothed where asked for."""
        greater, equal = sum(self.counts(X, places, self.uniform(X)), np.zeros((2, 1, 1), dtype=np.int64))
        return pvalues.p_values(greater, equal, self.totals(self.sizes, places), uniform=self.smoothing(X, smoothing))

    def combined(self, X: Any, places: IntArray | None, smoothing: bool, how: str, block: int = 2**22) -> FloatArray:
        """p-values (m, C) by each part for itself, made one: a key of `AGGREGATIONS` says how."""
        uniform, share = self.uniform(X), self.smoothing(X, smoothing)
        # Parts that are not of one size, or were given, are exchangeable only in a random order.
        order = np.random.default_rng(self.seed).permutation(len(self.parts))
        # About so many p-values at a time.
        width, found = max(1, block // (len(order) * self.n_classes)), []
        for rows in np.split(np.arange(m := _num_samples(X)), range(width, m, width)):
            own, drawn, ties = (None if one is None else one[rows] for one in (places, uniform, share))
            totals = [self.totals([len(scores) for scores in part.ordered], own) for part in self.parts]
            counted = zip(self.counts(X if len(rows) == m else take(X, rows), own, drawn), totals, strict=True)
            try:
                p = [pvalues.p_values(above, tied, total, uniform=ties) for (above, tied), total in counted]
            except ValueError:
                # Which names an object by its place among all.
                self.proba(X)
                raise
            found.append(AGGREGATIONS[how](np.stack([p[k] for k in order]), axis=0))
        return np.concatenate(found)

    def verify(self, n_classes: int, n_categories: int) -> None:
        """Raise where a loaded one is not whole."""
        expect(self.score, ConformityScore)
        require(0 <= self.seed < 2**32 and self.n_classes == n_classes, "seed")
        # Few numbers in a file do not bear out the outputs of all of them.
        require(LIMITS.rows * len(self.parts) * n_classes <= LIMITS.budget // 32, "number of models")
        sizes = n_categories * self.width
        require(self.sizes.dtype == np.int64 and self.sizes.shape == (sizes,), "sizes")
        for part in self.parts:
            require(expect(part.model, LogProba, Piped).n_classes == n_classes, "classes")
            require(len(part.ordered) == sizes and all(map(pvalues.is_ordered, part.ordered)), "scores")

    def scored(self) -> Any:
        """Numbers of scores in each cell."""
        return np.sum([[len(cell) for cell in part.ordered] for part in self.parts], axis=0)


@dataclass(frozen=True)
class HeldOutFit:
    """A fit on parts of the data: the bag, how models are trained, how labels are scored, who is compared with whom, random numbers."""

    estimator: Any
    bag: Bag
    config: Config
    score: ConformityScore
    randomized: bool
    class_conditional: bool
    categories: Categories | None
    rng: np.random.RandomState
    verbose: int | None

    def models(self, parts: Sequence[Part]) -> Iterator[tuple[Model, FloatArray]]:
        """Models fitted to the points that train, with their log-probabilities of the points that are scored, part by part."""
        with progress_bar("training", self.verbose) as progress:
            yield from fit_parts(self.estimator, self.bag, parts, self.config, progress)

    def cells(self, points: IntArray) -> tuple[IntArray, int]:
        """The cells (k,) of some points, by their numbers (k,), and how many cells there are."""
        width, kept = self.bag.n_classes if self.class_conditional else 1, self.categories
        own = None if kept is None else kept.points[points]
        return pvalues.cells(self.bag.y[points], width, own), width * (1 if kept is None else len(kept.known))

    def calibrated(self, model: Model, log_proba: FloatArray, rest: IntArray, uniform: FloatArray) -> Calibrated:
        """A model with the scores of points, by their numbers (k,), that it was not trained on."""
        scores = own_scores(self.score, log_proba, self.bag.y[rest], uniform if self.randomized else None)
        return Calibrated(model, pvalues.ordered_scores(scores, *self.cells(rest)))

    def folds(self, parts: list[Part], remedy: str) -> list[Calibrated]:
        """Calibrated models, one for each part; every point must be scored once."""
        y = self.bag.y
        for k, (train, _) in enumerate(parts):
            check_trained(y[train], self.bag, f"what trains for fold {k} of {len(parts)}", remedy)
        uniform = self.rng.uniform(size=len(y))
        return [
            self.calibrated(model, log_proba, rest, uniform[rest])
            for (model, log_proba), (_, rest) in zip(self.models(parts), parts, strict=True)
        ]

    def held_out(
        self, parts: list[Calibrated], rest: IntArray, kind: Callable[..., HeldOut] = HeldOut, **fields: Any
    ) -> HeldOut:
        """What is held of calibrated models, of points, by their numbers (k,), that calibrate."""
        cell, n_cells = self.cells(rest)
        scored = self.score, self.randomized, self.class_conditional, self.config.seed
        return kind(*scored, self.bag.n_classes, parts, np.bincount(cell, minlength=n_cells), **fields)


def own_scores(score: ConformityScore, log_proba: FloatArray, y: IntArray, uniform: FloatArray | None) -> FloatArray:
    """Scores (k,) of points with labels y (k,)."""
    return score.scores(log_proba, uniform)[np.arange(len(y)), y]


def check_trained(y: IntArray, bag: Bag, what: str, remedy: str) -> None:
    """Raise where training labels y lack a class that the bag has points of."""
    missing = np.setdiff1d(bag.y, y)
    if len(missing):
        name = bag.classes.tolist()[missing[0]]
        raise ValueError(f"{what} has no point of class {name!r}; {remedy}, or give more points of that class.")


class HeldOutClassifier(ConformalClassifier):
    """Base of the classifiers that hold a `HeldOut`; they give the constructor, the checks, `fit` and what sets are taken from."""

    _held_out: HeldOut
    #: values of the parameters that say how labels are scored, when it was fitted
    _scored_by: tuple[Any, ...]
    #: how parts are combined
    aggregation: ClassVar[str] = "pooled"
    #: what is promised of the sets
    _promise: ClassVar[Guarantee]

    @abstractmethod
    def check_params(self) -> None:
        """Raise if a parameter is invalid."""

    @abstractmethod
    def _calibrate(self, fit: HeldOutFit) -> HeldOut:
        """Train the models, and score the points that did not train them."""

    @whole_or_nothing
    def fit(self, X: Any, y: Any, classes: Any = None, *, sample_weight: Any = None) -> Self:
        """Train the models on parts of (X, y), and score the points that they have not seen.

        Parameters
        ----------
        X : array-like (n, ...)
            Objects; an array, DataFrame or tensor.
        y : array-like (n,)
            Labels.
        classes : array-like (C,), optional
            Every class there is, where y may lack some, as in scikit-learn's ``partial_fit``. A label that the model does not know counts
            as stranger than all n points that calibrate: p = 1/(n + 1), or 1 where ``class_conditional`` leaves it none.
        sample_weight : array-like (n,), optional
            Weights of points in training, given to the `fit` of the estimator; calibration counts every point alike.
        """
        self.check_params()
        self._categories = Categories.of(self.categories, X)
        X, y = self._checked(X, y, reset=True)
        known = getattr(self.estimator, "classes_", None) if getattr(self, "prefit", False) else None
        if known is None:
            known, index = encode_labels(y)
        else:
            index = index_labels(y, known, "the fitted estimator does not know")
        final = split_pipeline(self.estimator)[1]
        if classes is None:
            # In the fitted estimator's own order.
            self.classes_, self._known = known, None
        else:
            known, place = self._declare(known, classes, isinstance(final, nn.Module) or is_skorch(final))
            index = place[index]
        self.n_samples_fit_, self._sample, self._scored_by = len(index), first_rows(X), self._scoring()
        rng, score = check_random_state(self.random_state), score_of(self)
        work = Work(getattr(self, "n_jobs", None))
        config = Config(l2=self.l2, max_epochs=self.max_epochs, seed=int(rng.randint(2**31)), work=work)
        randomized = self.randomized and score.takes_uniform
        weights = check_sample_weight(self, sample_weight, X)
        fit = HeldOutFit(
            self.estimator, Bag(X, index, known, weights=weights), config, score, randomized, self.class_conditional, self._categories, rng,
            self.verbose,
        )  # fmt: skip
        self._held_out = self._calibrate(fit)
        if self._held_out.width == 1:
            scores = np.concatenate([np.empty(0), *(cell for part in self._held_out.parts for cell in part.ordered)])
            if told := tied_at_the_top(scores, self.confidence_level):
                warnings.warn(f"{told}.", ConformalWarning, stacklevel=3)
        self.warn_unreachable(self.confidence_level, stacklevel=4)
        return self

    def predict_p(self, X: Any, *, smoothing: bool = False) -> FloatArray:
        """p-values (m, C) of every label, columns as in ``classes_``; twice them are valid where those of several models are combined.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random: p-values of the true labels are then uniform, not merely larger.
        """
        check_flag("smoothing", smoothing)
        X, places = self._objects(X)
        if self.aggregation == "pooled":
            return self._every_p(self._held_out.p_values(X, places, smoothing), places)
        return self._every_p(self._held_out.combined(X, places, smoothing, self.aggregation), places)

    def _every_p(self, p: FloatArray, places: IntArray | None) -> FloatArray:
        """p-values (m, C) of all classes, from those of the classes that the models know: no point is above a label of the others."""
        return self._widened(p, 1.0 if self.class_conditional else 1 / (1 + self._held_out.totals(self._sizes, places)))

    @property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """How many points a candidate is compared with, of each group of `Calibrated.ordered`."""
        return self._held_out.sizes

    @property
    def guarantee_(self) -> Guarantee:
        check_is_fitted(self)
        whole = self._known is None or self.class_conditional
        return self._promise if whole else APPROXIMATE.because(ABSENT)

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model, or the mean of several models'; they carry no guarantee."""
        X, _ = self._objects(X)
        return self._widened(self._held_out.proba(X), 0.0)

    def warn_unreachable(self, levels: Any, stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more calibration points than there are."""
        sizes: npt.NDArray[Any] = self._sizes.reshape(-1, self._held_out.width)
        sizes = self._widened(sizes, 0.0) if sizes.shape[1] > 1 else sizes
        warn_unreachable(sizes, self.classes_, self._categories, np.asarray(levels), "calibration", stacklevel)

    def verify(self) -> None:
        self.check_params()
        held = self._held_out
        held.verify(self.verify_known(self.verify_labels()), self.verify_categories(self.n_samples_fit_))
        alike = self.aggregation != "pooled" or np.array_equal(held.scored(), held.sizes)
        require(alike and held.class_conditional == self.class_conditional, "sizes")
        # The p-values of all models for an object are held together.
        require(self.aggregation == "pooled" or len(held.parts) * held.n_classes <= 2**22, "number of models")
        # What is exact of one model is not of several.
        require(not self._promise.is_exact or (type(held) is HeldOut and len(held.parts) == 1), "number of models")
        self.verify_sample()
        self.verify_p()

    def _objects(self, X: Any) -> tuple[Any, IntArray | None]:
        """Checked objects, to be scored as the calibration points were, and the places of their categories."""
        check_is_fitted(self)
        given = X
        if self._scored_by != self._scoring():
            raise ValueError("conformity_score or an option of it was changed after fit; call fit again.")
        X = self._checked(X, reset=False)
        shapes = [part.shape[1:] for part in (X, self._sample) if isinstance(part, np.ndarray)]
        if len(set(shapes)) > 1:
            raise ValueError(f"X has objects of shape {shapes[0]}, but those of fit had {shapes[1]}.")
        return X, self._places(given)

    def _scoring(self) -> tuple[Any, ...]:
        """The values of the parameters that say how labels are scored."""
        return tuple(getattr(self, name, None) for name in SCORING)


class PlusClassifier(HeldOutClassifier):
    """Base of CV+ and jackknife+, whose rule compares a label with each point by the model without that point: no p-values."""

    def predict_p(self, X: Any, *, smoothing: bool = False) -> FloatArray:
        """Raise: the method has no p-values; see `predict_epsilon`."""
        raise ValueError(
            f"{type(self).__name__} has no p-values: its rule compares a label with each point by the model without that point, which "
            "guarantees 1 − 2ε. predict_epsilon(X) gives the largest ε at which each label is still in the set, by that rule."
        )

    def predict_epsilon(self, X: Any, **options: Any) -> FloatArray:
        """The largest ε (m, C) at which each label is still in the set, by the rule of the method.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        """
        if options:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(options)}: its rule compares a label with each point for itself, "
                "which leaves no ties to be broken; leave it out."
            )
        X, places = self._objects(X)
        return self._every_p(self._held_out.p_values(X, places), places)
