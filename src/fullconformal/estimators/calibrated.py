"""What split, cross and aggregated conformal prediction share: models fitted to a part of the data and scored on the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from joblib import Parallel, delayed
from sklearn.base import clone
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from fullconformal import pvalues
from fullconformal.conformity import SCORES, rounding, score_labels
from fullconformal.estimators.base import ConformalClassifier, warn_unreachable
from fullconformal.estimators.checks import (
    check_flag,
    check_flags,
    check_number,
    check_option,
    check_running,
    check_whole,
)
from fullconformal.estimators.inputs import encode_labels, first_rows
from fullconformal.methods.fitting import Settings, fit_problem, fit_transformer, transform
from fullconformal.methods.probability import FitScore, LogProba, columns
from fullconformal.models.adapters import is_skorch
from fullconformal.models.requirements import check_estimator_kind, check_instance, split_pipeline
from fullconformal.models.tensors import finite_rows
from fullconformal.runtime.progress import progress_bar
from fullconformal.sets import check_levels

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Part = tuple[IntArray, IntArray]  # points that train, points that are scored


@dataclass(frozen=True)
class Piped:
    """A model behind transformers."""

    head: Any
    model: LogProba

    def __call__(self, X: Any) -> FloatArray:
        return self.model(transform(self.head, X))

    def precision(self, X: Any) -> float:
        """The unit of rounding in which it gives log-probabilities of objects X."""
        return self.model.precision(X)


Model = LogProba | Piped  # log-probabilities (m, C) of objects


@dataclass(frozen=True)
class Calibrated:
    """A model and the scores, in ascending order, of points that did not train it: all together, or an array for each class."""

    model: Model
    ordered: list[FloatArray]


def fit_model(estimator: Any, X: Any, y: IntArray, classes: npt.NDArray[Any], settings: Settings) -> Model:
    """Log-probabilities, as a function of objects, of a classifier fitted to label indices y; prefit: of one fitted already."""
    head, final = split_pipeline(estimator)
    every = np.arange(len(classes))
    if not trained_here(final) and not is_skorch(final):  # one of scikit-learn's kind, a whole Pipeline too
        fitted = estimator if settings.prefit else _seeded(estimator, settings.seed).fit(X, classes[y])
        return LogProba(fitted, columns(fitted, classes, every), len(every))
    head, X = fit_transformer(head, X, y, settings.prefit)
    if trained_here(final):
        model = LogProba(fit_problem(final, X, y, classes, settings), every, len(every))
    else:
        model = LogProba(final, every, len(every)) if settings.prefit else FitScore(final, settings, classes)(X, y)
    return model if head is None else Piped(head, model)


def trained_here(final: Any) -> bool:
    """Whether this library trains the classifier: the built-in logistic regression, or a module."""
    return final is None or isinstance(final, nn.Module)


def _seeded(estimator: Any, seed: int) -> Any:
    """A clone whose random states that were left open, a Pipeline's steps included, are seeded."""
    estimator = clone(estimator)
    unset = [k for k, v in estimator.get_params().items() if k.split("__")[-1] == "random_state" and v is None]
    if unset:
        estimator.set_params(**dict.fromkeys(unset, seed))
    return estimator


def _fit_and_apply(
    estimator: Any, X: Any, y: IntArray, classes: npt.NDArray[Any], part: Part, settings: Settings
) -> tuple[Model, FloatArray]:
    """A model fitted to the first half of a part, and its log-probabilities of the second."""
    train, rest = part
    model = fit_model(estimator, _safe_indexing(X, train), y[train], classes, settings)
    return model, finite_rows(model(_safe_indexing(X, rest)), "to be calibrated with")


class CalibratedClassifier(ConformalClassifier):
    """Base of the classifiers that score points which did not train; they give the constructor, `fit` and `predict_p`."""

    conformity_score: str
    randomized: bool
    k_reg: int | None
    lambda_reg: float | None
    class_conditional: bool
    l2: float | None
    max_epochs: int
    random_state: Any
    verbose: int
    _tunes = False  # whether points are kept to choose the parameters of RAPS on
    _parts: list[Calibrated]
    _sizes: npt.NDArray[np.int64]  # calibration points: of all classes together, or of each

    def _keep(self, given: dict[str, Any]) -> None:
        """Keep a constructor's parameters, its `locals()`, as they are."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    # Checks -----------------------------------------------------------------------------------------------------------

    def _check_params(self) -> None:
        check_option("conformity_score", self.conformity_score, SCORES)
        check_levels(self.confidence_level)
        flags = ("randomized", "class_conditional", "prefit", "allow_empty")
        check_flags(self, *(name for name in flags if hasattr(self, name)))
        check_running(self)
        check_whole("max_epochs", self.max_epochs, 0, "a whole number ≥ 0")
        if self.l2 is not None:
            check_number("l2", self.l2, 0, "None or a number ≥ 0")
        if self.k_reg is not None:
            check_whole("k_reg", self.k_reg, 0, "None or a whole number ≥ 0")
        if self.lambda_reg is not None:
            check_number("lambda_reg", self.lambda_reg, 0, "None or a number ≥ 0")
        if self.conformity_score == "raps" and not self._tunes and None in (self.k_reg, self.lambda_reg):
            raise ValueError(
                f"conformity_score='raps' needs k_reg and lambda_reg, got {self.k_reg!r} and {self.lambda_reg!r}; only "
                "SplitConformalClassifier tunes them, on a part of its calibration points."
            )
        final = split_pipeline(self.estimator)[1]
        if trained_here(final):
            check_estimator_kind(self.estimator, self.l2)
            return
        check_instance(final)
        name = type(final).__name__
        if not hasattr(self.estimator, "predict_proba"):
            raise TypeError(
                f"estimator={name} has no predict_proba; give a classifier that has, for instance "
                f"sklearn.calibration.CalibratedClassifierCV({name}(...))."
            )
        if self.l2 is not None:
            raise ValueError(f"l2={self.l2!r} was given, but {name} brings its own penalty; set it there.")

    def _check_trained(self, y: IntArray, what: str, remedy: str) -> None:
        """Raise where training labels y lack a class."""
        missing = np.setdiff1d(np.arange(len(self.classes_)), y)
        if len(missing):
            name = self.classes_.tolist()[missing[0]]
            raise ValueError(f"{what} has no point of class {name!r}; {remedy}, or give more points of that class.")

    def _check_reachable(self, levels: npt.NDArray[np.float64], stacklevel: int = 3) -> None:
        """Warn where a confidence level needs more calibration points than there are."""
        warn_unreachable(self._sizes, self.classes_, levels, "calibration", stacklevel)

    # Fitting ----------------------------------------------------------------------------------------------------------

    def _start(self, X: Any, y: Any) -> tuple[Any, IntArray, np.random.RandomState]:
        """Checked objects, label indices (n,) and a generator; the seeds of training, scores and smoothing are drawn."""
        self._check_params()
        X, y = self._checked(X, y, reset=True)
        self._sample = first_rows(X)
        self.classes_, index = self._encode(y)
        self.n_samples_fit_ = len(index)
        rng = check_random_state(self.random_state)
        self._seed, self._scored_by = int(rng.randint(2**31)), self._scoring()
        return X, index, rng

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], IntArray]:
        """Classes (C,) and label indices (n,)."""
        return encode_labels(y)

    def _settings(self, **options: Any) -> Settings:
        return Settings(l2=self.l2, max_epochs=self.max_epochs, seed=self._seed, **options)

    def _fit_parts(self, X: Any, y: IntArray, parts: Sequence[Part]) -> Iterator[tuple[Model, FloatArray]]:
        """Models fitted to the first half of each part, with their log-probabilities of the second, in order."""
        with progress_bar("training", bool(self.verbose)) as progress:
            alone = len(parts) == 1  # the bar then shows the training itself
            settings = self._settings(progress=progress if alone else None)
            jobs = (delayed(_fit_and_apply)(self.estimator, X, y, self.classes_, part, settings) for part in parts)
            found = Parallel(n_jobs=getattr(self, "n_jobs", None), return_as="generator")(jobs)
            for done, fitted in enumerate(found, 1):
                if progress is not None and not alone:
                    progress(done, len(parts))
                yield fitted

    def _calibrated(self, model: Model, log_proba: FloatArray, y: IntArray, uniform: FloatArray) -> Calibrated:
        """A model with the scores of points y (k,) it was not trained on."""
        scores = self._scores(log_proba, uniform)[np.arange(len(y)), y]
        ordered = pvalues.ordered_scores(scores, y, len(self.classes_), class_conditional=self.class_conditional)
        return Calibrated(model, ordered)

    def _finish(self, y: IntArray) -> None:
        """Note how many points y (k,) of each class, or of all, calibrate; warn where they are too few."""
        if self.class_conditional:
            self._sizes = np.bincount(y, minlength=len(self.classes_))
        else:
            self._sizes = np.array([len(y)])
        self._check_reachable(np.asarray(self.confidence_level), stacklevel=4)

    # Prediction -------------------------------------------------------------------------------------------------------

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model, or the mean of several models'; they carry no guarantee."""
        X = self._objects(X)
        out: npt.NDArray[Any] = np.mean([np.exp(finite_rows(part.model(X))) for part in self._parts], axis=0)
        return out

    def _scores(self, log_proba: FloatArray, uniform: FloatArray | None) -> FloatArray:
        """Scores (m, C) of all labels."""
        return score_labels(
            log_proba,
            self.conformity_score,
            uniform if self._is_random else None,
            **self._raps,
            never_empty=not getattr(self, "allow_empty", True),
        )

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
        names = ("conformity_score", "randomized", "k_reg", "lambda_reg", "class_conditional", "allow_empty")
        return tuple(getattr(self, name, None) for name in names)

    def _score_uniforms(self, X: Any) -> FloatArray | None:
        """The uniforms (m,) of randomised scores; None where they are not."""
        return self._uniform(X, 1, self._seed)[:, 0] if self._is_random else None

    @property
    def _is_random(self) -> bool:
        return self.randomized and self.conformity_score in ("aps", "raps")

    def _smoothing(self, X: Any, smoothing: bool) -> FloatArray | None:
        """The uniforms (m, C) of smoothed p-values: others than those of the scores."""
        check_flag("smoothing", smoothing)
        return self._uniform(X, len(self.classes_), self._seed + 1) if smoothing else None

    def _counts(self, part: Calibrated, X: Any, uniform: FloatArray | None) -> tuple[Any, Any]:
        """Calibration points of a part above and tied with every candidate, (m, C) each."""
        log_proba = finite_rows(part.model(X))
        tau = self._scores(log_proba, uniform)
        return pvalues.rank_counts(part.ordered, tau, self._rounding(tau, log_proba, part.model.precision(X)))

    def _rounding(self, scores: FloatArray, log_proba: FloatArray, eps: float) -> FloatArray:
        """Scores (m, C) closer than this are tied: equal objects in batches of different sizes have scores that differ so."""
        return rounding(scores, self.conformity_score, log_proba, eps, **self._raps)

    @property
    def _raps(self) -> dict[str, Any]:
        """The parameters of RAPS, given or tuned."""
        k_reg, lambda_reg = (getattr(self, f"{name}_", getattr(self, name)) for name in ("k_reg", "lambda_reg"))
        return {"k_reg": k_reg or 0, "lambda_reg": lambda_reg or 0.0}
