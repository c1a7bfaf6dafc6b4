"""What split, cross and aggregated conformal prediction hold: models, each with the scores of points that did not train it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from joblib import Parallel, delayed
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import check_is_fitted

from fullconformal import pvalues
from fullconformal.conformity import APS, RAPS, SCORES, ConformityScore
from fullconformal.estimators.base import ConformalClassifier
from fullconformal.estimators.inputs import encode_labels, first_rows, uniforms
from fullconformal.estimators.validation import warn_unreachable
from fullconformal.methods.base import Bag, Config
from fullconformal.methods.probability import Model, fit_model
from fullconformal.models.requirements import finite_rows
from fullconformal.runtime.tasks import progress_bar
from fullconformal.storage import expect, require, savable

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Part = tuple[IntArray, IntArray]  # points that train, points that are scored

#: parameters that say how labels are scored; what was calibrated with others is of no use
SCORING = ("conformity_score", "randomized", "k_reg", "lambda_reg", "class_conditional", "allow_empty")


@savable
@dataclass(frozen=True)
class Calibrated:
    """A model and the scores, in ascending order, of points that did not train it: all together, or an array for each class."""

    model: Any
    ordered: list[FloatArray]


@savable
@dataclass(frozen=True)
class HeldOut:
    """Calibrated models, and how labels are scored; sizes are the numbers of points that calibrate, of all or of each class."""

    score: ConformityScore
    randomized: bool
    class_conditional: bool
    seed: int
    n_classes: int
    parts: list[Calibrated]
    sizes: npt.NDArray[np.int64]

    def proba(self, X: Any) -> FloatArray:
        """Probabilities (m, C): the mean over the models."""
        out: FloatArray = np.mean([np.exp(finite_rows(part.model(X))) for part in self.parts], axis=0)
        return out

    def uniform(self, X: Any) -> FloatArray | None:
        """The uniforms (m,) of randomised scores; None where they are not."""
        return uniforms(X, self.seed) if self.randomized and self.score.randomised else None

    def smoothing(self, X: Any, smoothing: bool) -> FloatArray | None:
        """The uniforms (m, 1) of smoothed p-values: others than those of the scores."""
        return uniforms(X, self.seed + 1)[:, None] if smoothing else None

    def counts(self, part: Calibrated, X: Any, uniform: FloatArray | None) -> tuple[Any, Any]:
        """Calibration points of a part above and tied with every candidate, (m, C) each.

        Equal objects in batches of different sizes have scores that differ by rounding; they are tied.
        """
        log_proba = finite_rows(part.model(X))
        tau = self.score.scores(log_proba, uniform)
        tie = self.score.rounding(tau, log_proba, part.model.precision(X))
        return pvalues.rank_counts(part.ordered, tau, tie)

    def pooled(self, X: Any) -> tuple[Any, Any]:
        """Points above and tied with every candidate, (m, C) each, over all models."""
        uniform = self.uniform(X)
        counts = [self.counts(part, X, uniform) for part in self.parts]
        return np.sum([greater for greater, _ in counts], axis=0), np.sum([equal for _, equal in counts], axis=0)

    def p_values(self, X: Any, smoothing: bool = False) -> FloatArray:
        """(1 + #{i : s_i ≥ s^(−k(i))(x, y)})/(n + 1) (m, C); smoothed where asked for."""
        return pvalues.p_values(*self.pooled(X), self.sizes, uniform=self.smoothing(X, smoothing))

    def verify(self, n_classes: int) -> None:
        """Raise where a loaded one is not whole."""
        expect(self.score, ConformityScore)
        require(0 <= self.seed < 2**32 and self.n_classes == n_classes, "seed")
        sizes = n_classes if self.class_conditional else 1
        require(self.sizes.dtype == np.int64 and self.sizes.shape == (sizes,), "sizes")
        for part in self.parts:
            require(len(part.ordered) == sizes, "scores")
            require(all(group.ndim == 1 and bool((group[:-1] <= group[1:]).all()) for group in part.ordered), "scores")


@dataclass(frozen=True)
class Start:
    """What every fit on a part of the data begins with: the bag, the score, how models are trained, and random numbers."""

    estimator: Any
    bag: Bag
    config: Config
    score: ConformityScore
    randomized: bool
    class_conditional: bool
    rng: np.random.RandomState
    n_jobs: int | None
    verbose: bool

    @property
    def seed(self) -> int:
        return self.config.seed

    def models(self, parts: Sequence[Part]) -> Iterator[tuple[Model, FloatArray]]:
        """Models fitted to the first half of each part, with their log-probabilities of the second, in order."""
        with progress_bar("training", self.verbose) as progress:
            alone = len(parts) == 1  # the bar then shows the training itself
            config = Config(**{**vars(self.config), "progress": progress if alone else None})
            jobs = (delayed(_fit_and_apply)(self.estimator, self.bag, part, config) for part in parts)
            found = Parallel(n_jobs=self.n_jobs, return_as="generator")(jobs)
            for done, fitted in enumerate(found, 1):
                if progress is not None and not alone:
                    progress(done, len(parts))
                yield fitted

    def calibrated(self, model: Model, log_proba: FloatArray, y: IntArray, uniform: FloatArray) -> Calibrated:
        """A model with the scores of points y (k,) it was not trained on."""
        scores = own_scores(self.score, log_proba, y, uniform if self.randomized else None)
        n_classes, conditional = self.bag.n_classes, self.class_conditional
        return Calibrated(model, pvalues.ordered_scores(scores, y, n_classes, class_conditional=conditional))

    def folds(self, parts: list[Part], remedy: str) -> list[Calibrated]:
        """Models trained on the first half of each part and calibrated on the second, where every point is scored once."""
        y = self.bag.y
        check_folds(parts, len(y))
        for k, (train, _) in enumerate(parts):
            check_trained(y[train], self.bag.classes, f"what trains for fold {k} of {len(parts)}", remedy)
        uniform = self.rng.uniform(size=len(y))
        return [
            self.calibrated(model, log_proba, y[rest], uniform[rest])
            for (model, log_proba), (_, rest) in zip(self.models(parts), parts, strict=True)
        ]

    def held_out(self, parts: list[Calibrated], y: IntArray, score: ConformityScore | None = None) -> HeldOut:
        """What is held of calibrated models, of which points y (k,) calibrate."""
        n_classes = self.bag.n_classes
        sizes = np.bincount(y, minlength=n_classes) if self.class_conditional else np.array([len(y)])
        fixed = self.score if score is None else score
        return HeldOut(fixed, self.randomized, self.class_conditional, self.seed, n_classes, parts, sizes)


def own_scores(score: ConformityScore, log_proba: FloatArray, y: IntArray, uniform: FloatArray | None) -> FloatArray:
    """Scores (k,) of points with labels y (k,)."""
    out: FloatArray = score.scores(log_proba, uniform if score.randomised else None)[np.arange(len(y)), y]
    return out


def _fit_and_apply(estimator: Any, bag: Bag, part: Part, config: Config) -> tuple[Model, FloatArray]:
    """A model fitted to the first half of a part, and its log-probabilities of the second."""
    train, rest = part
    model = fit_model(estimator, Bag(_safe_indexing(bag.X, train), bag.y[train], bag.classes), config)
    return model, finite_rows(model(_safe_indexing(bag.X, rest)), "to be calibrated with")


def score_of(clf: Any) -> ConformityScore:
    """The conformity score that a classifier's parameters ask for."""
    asked = clf.conformity_score
    if isinstance(asked, ConformityScore):
        return asked
    kind, never_empty = SCORES[asked], not getattr(clf, "allow_empty", True)
    if kind is RAPS:
        return RAPS(never_empty, clf.k_reg, clf.lambda_reg)
    return APS(never_empty) if kind is APS else kind()


def check_trained(y: IntArray, classes: npt.NDArray[Any], what: str, remedy: str) -> None:
    """Raise where training labels y lack a class."""
    missing = np.setdiff1d(np.arange(len(classes)), y)
    if len(missing):
        name = classes.tolist()[missing[0]]
        raise ValueError(f"{what} has no point of class {name!r}; {remedy}, or give more points of that class.")


def check_folds(parts: list[Part], n: int) -> None:
    """Raise unless every one of n points is scored once, by a model that has not seen it."""
    scored = np.bincount(np.concatenate([rest for _, rest in parts]), minlength=n)
    if len(scored) > n or (scored != 1).any():
        raise ValueError(
            f"cv must put each of the {n} points into one fold, but point {int((scored != 1).argmax())} is in "
            f"{int(scored[(scored != 1).argmax()])}; give KFold, StratifiedKFold or LeaveOneOut, for instance."
        )
    for k, (train, rest) in enumerate(parts):
        if len(np.intersect1d(train, rest)):
            raise ValueError(f"cv trains on points of fold {k} that it also scores there; the two must be apart.")


def no_p_values(clf: Any) -> ValueError:
    """The error of CV+ and jackknife+, whose rule has no p-values."""
    return ValueError(
        f"{type(clf).__name__} has no p-values: its rule compares a label with each point by the model without that point, which "
        "guarantees 1 − 2ε. predict_epsilon(X) gives the largest ε at which each label is still in the set, by that rule."
    )


def no_options(clf: Any, options: dict[str, Any]) -> None:
    """Raise where the rule of CV+ and jackknife+ is given an option of p-values."""
    if options:
        raise TypeError(
            f"{type(clf).__name__} takes no {', '.join(options)}: its rule compares a label with each point for itself, "
            "which leaves no ties to be broken; leave it out."
        )


class HeldOutClassifier(ConformalClassifier):
    """Base of the classifiers that hold a `HeldOut`; they give the constructor, the checks, `fit` and what sets are taken from."""

    _held_out: HeldOut

    @abstractmethod
    def check_params(self) -> None:
        """Raise where a parameter cannot be meant."""

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model, or the mean of several models'; they carry no guarantee."""
        return self._held_out.proba(self._objects(X))

    def warn_unreachable(self, levels: Any, stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more calibration points than there are."""
        warn_unreachable(self._held_out.sizes, self.classes_, np.asarray(levels), "calibration", stacklevel)

    def verify(self) -> None:
        self.check_params()
        self._held_out.verify(self.verify_labels())
        self.verify_p()

    def _start(self, X: Any, y: Any, encode: Any = encode_labels) -> Start:
        """Begin a fit with checked objects X and labels y; notes what later predictions are checked against."""
        self.check_params()
        X, y = self._checked(X, y, reset=True)
        classes, index = encode(y)
        rng = check_random_state(self.random_state)
        config = Config(l2=self.l2, max_epochs=self.max_epochs, seed=int(rng.randint(2**31)))
        self.classes_, self.n_samples_fit_, self._sample = classes, len(index), first_rows(X)
        self._scored_by = self._scoring()
        bag, n_jobs = Bag(X, index, classes), getattr(self, "n_jobs", None)
        scored = score_of(self), self.randomized, self.class_conditional
        return Start(self.estimator, bag, config, *scored, rng, n_jobs, bool(self.verbose))

    def _finish(self, held_out: HeldOut) -> Self:
        """Keep what was fitted; warn where the points that calibrate are too few."""
        self._held_out = held_out
        self.warn_unreachable(self.confidence_level, stacklevel=4)
        return self

    def _objects(self, X: Any) -> Any:
        """Checked objects, to be scored as the calibration points were."""
        check_is_fitted(self)
        if self._scored_by != self._scoring():
            raise ValueError("conformity_score or an option of it was changed after fit; call fit again.")
        X = self._checked(X, reset=False)
        shapes = [part.shape[1:] for part in (X, self._sample) if isinstance(part, np.ndarray)]
        if len(set(shapes)) > 1:
            raise ValueError(f"X has objects of shape {shapes[0]}, but those of fit had {shapes[1]}.")
        return X

    def _scoring(self) -> tuple[Any, ...]:
        """The values of the parameters that say how labels are scored."""
        return tuple(getattr(self, name, None) for name in SCORING)
