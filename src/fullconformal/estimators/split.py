"""Split conformal prediction: a part of the data is kept from training and calibrates; and the aggregate of several such."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted
from torch import nn

from fullconformal.conformity import RAPS
from fullconformal.estimators.held_out import AGGREGATIONS, HeldOut, HeldOutClassifier, HeldOutFit, check_trained
from fullconformal.estimators.validation import check_flag, check_held_out, check_option, check_share, check_whole
from fullconformal.guarantees import EXACT, TWICE
from fullconformal.methods.base import FloatArray
from fullconformal.methods.fitting import fit_model
from fullconformal.methods.parts import Part
from fullconformal.models.requirements import finite_rows, split_pipeline
from fullconformal.sets import likeliest
from fullconformal.storage import savable


def split(fit: HeldOutFit, calibration_size: float, seed: int, what: str) -> Part:
    """Points that train and points that calibrate.

    At random, not class by class: the guarantee needs calibration points that are exchangeable with those to come.
    """
    y = fit.bag.y
    train, rest = train_test_split(np.arange(len(y)), test_size=calibration_size, random_state=seed)
    remedy = f"lower calibration_size={calibration_size!r}, choose another random_state"
    check_trained(y[train], fit.bag, what, remedy)
    return train, rest


@savable
class SplitConformalClassifier(HeldOutClassifier):
    """Split (inductive) conformal prediction: one part of the data trains, the other calibrates.

    Sets hold the true label with probability at least `confidence_level`, whatever the classifier and the score. A label is in the
    set when its score is at most the ⌈(1 − ε)(n + 1)⌉-th smallest of the n calibration scores, which is p > ε.

    Parameters
    ----------
    estimator : None, nn.Module, scikit-learn classifier with predict_proba, skorch net, or Pipeline ending in one, default=None
        The classifier; None is the built-in multinomial logistic regression.
    conformity_score : {"loss", "lac", "margin", "aps", "raps"} or ConformityScore, default="loss"
        What is compared: −log π_y (the paper's choice); 1 − π_y, which orders labels as the loss does; the largest other probability
        less π_y; the adaptive score of Romano et al. (2020); its regularised form of Angelopoulos et al. (2021).
    calibration_size : float, default=0.2
        Share of the data that calibrates and does not train.
    prefit : bool, default=False
        Take the estimator as it is; all of the data given to `fit` then calibrate. It must not have seen them.
    randomized : bool, default=True
        Whether "aps" and "raps" are randomised: exact coverage, instead of more than was asked for.
    k_reg : int, optional
        RAPS: the number of labels that cost nothing. By default tuned on 30 % of the calibration points, as published.
    lambda_reg : float, optional
        RAPS: the cost λ of each further label. By default the one of 0.001, 0.01, 0.1, 0.2, 0.5 with the smallest sets there.
    allow_empty : bool, default=True
        False always includes the label of largest p-value, of equal ones the likeliest ("aps" and "raps" then do not randomise the
        model's likeliest label, as published). Such sets have no p-values: use `predict_epsilon`.
    confidence_level : float, default=0.9
        Of the sets, where `predict_set` is not told otherwise; and that for which RAPS is tuned.
    class_conditional : bool, default=False
        Compare a candidate with the calibration points of its own label only: the guarantee then holds for each class.
    categories : str, int or callable, optional
        Compare an object with the calibration points of its own category only, as in `FullConformalClassifier`.
    l2 : float, optional
        As in `FullConformalClassifier`; for None and modules.
    max_epochs : int, default=200
        For modules.
    random_state : int, RandomState or None, default=None
        Seeds the split, training, randomised scores and smoothing.
    verbose : int or None, default=None
        1 shows progress bars, 0 nothing; None shows progress where work takes more than about ten seconds.

    Attributes
    ----------
    classes_ : ndarray (C,)
    k_reg_, lambda_reg_ : int, float
        What RAPS uses.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import SplitConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> SplitConformalClassifier(random_state=0).fit(X[::2], y[::2]).predict_set(X[1::2]).shape
    (75, 3)
    """

    def __init__(
        self, estimator: Any = None, *, conformity_score: str = "loss", calibration_size: float = 0.2,
        prefit: bool = False, randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        allow_empty: bool = True, confidence_level: float = 0.9, class_conditional: bool = False, categories: Any = None,
        l2: float | None = None, max_epochs: int = 200, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = EXACT.because("the calibration points trained nothing")
    k_reg_: Any
    lambda_reg_: Any

    def check_params(self) -> None:
        check_held_out(self, tunes=True)
        check_share(self)
        final = split_pipeline(self.estimator)[1]
        if self.prefit and final is None:
            raise ValueError("prefit=True needs a fitted estimator; estimator=None is fitted here.")
        if self.prefit and not isinstance(final, nn.Module):
            check_is_fitted(final)

    def _calibrate(self, fit: HeldOutFit) -> HeldOut:
        bag, rng = fit.bag, fit.rng
        if self.prefit:
            rest = rng.permutation(len(bag.y))
            model = fit_model(self.estimator, bag, replace(fit.config, prefit=True))
            log_proba = finite_rows(model(bag.X), "to be calibrated with")[rest]
        else:
            part = split(fit, self.calibration_size, fit.config.seed, "the training part")
            ((model, log_proba),) = fit.models([part])
            rest = part[1]
        labels, uniform = bag.y[rest], rng.uniform(size=len(rest))
        if not fit.score.complete:
            # The first 30 %, as published, choose the open parameters of the score, and serve nothing else.
            held = int(0.3 * len(labels))
            if not held:
                raise ValueError(
                    f"{len(labels)} calibration points are too few to tune RAPS on a part of them; give k_reg and lambda_reg, "
                    "or more points."
                )
            drawn = uniform[:held] if fit.randomized else None
            score = fit.score.tuned(log_proba[:held], labels[:held], 1 - self.confidence_level, drawn)
            fit, log_proba, rest, uniform = replace(fit, score=score), log_proba[held:], rest[held:], uniform[held:]
        if isinstance(fit.score, RAPS):
            self.k_reg_, self.lambda_reg_ = fit.score.k_reg, fit.score.lambda_reg
        return fit.held_out([fit.calibrated(model, log_proba, rest, uniform)], rest)

    def predict_p(self, X: Any, *, smoothing: bool = False) -> FloatArray:
        """p-values (m, C) of every label, columns as in ``classes_``.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random: p-values of the true labels are then uniform, not merely larger.
        """
        if not self.allow_empty:
            raise ValueError(
                "sets that are never empty (allow_empty=False) have no p-values; predict_epsilon(X) gives the largest ε at which "
                "each label is still in the set."
            )
        return super().predict_p(X, smoothing=smoothing)

    def predict_epsilon(self, X: Any, *, smoothing: bool = False) -> FloatArray:  # type: ignore[override]
        """The largest ε (m, C) at which each label is still in the set: p-values, and 1 for the label that is always included.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        smoothing : bool, default=False
            Break ties at random.
        """
        check_flag("smoothing", smoothing)
        (X, places), held = self._objects(X), self._held_out
        p = held.p_values(X, places, smoothing)
        return self._every_p(p if self.allow_empty else np.where(likeliest(p, held.proba(X)), 1.0, p), places)


@savable
class AggregatedConformalClassifier(HeldOutClassifier):
    """Aggregated conformal prediction (Carlsson, Eklund and Norinder 2014): p-values of several split predictors, combined.

    Sets are steadier than those of one split. They hold the true label with probability at least 1 − 2ε, twice the error asked for: that
    is what a mean or median of dependent p-values guarantees. In practice the error is mostly below ε, and sets are larger than need be,
    because averaging draws p-values to the middle.

    Parameters
    ----------
    n_estimators : int, default=10
        Splits, and models.
    aggregation : {"mean", "median", "sequential"}, default="mean"
        How p-values are combined; ``"sequential"`` as in `CrossConformalClassifier`.
    estimator, conformity_score, calibration_size, randomized, confidence_level, class_conditional, categories, l2
        As in `SplitConformalClassifier`.
    max_epochs, random_state
        As in `SplitConformalClassifier`.
    k_reg, lambda_reg, n_jobs, verbose
        As in `CVPlusClassifier`.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import AggregatedConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> AggregatedConformalClassifier(n_estimators=3, random_state=0).fit(X[::2], y[::2]).predict_p(X[1::2]).shape
    (75, 3)
    """

    def __init__(
        self, estimator: Any = None, *, n_estimators: int = 10, aggregation: str = "mean",
        conformity_score: str = "loss", calibration_size: float = 0.2, randomized: bool = True,
        k_reg: int | None = None, lambda_reg: float | None = None, confidence_level: float = 0.9,
        class_conditional: bool = False, categories: Any = None, l2: float | None = None, max_epochs: int = 200,
        n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = TWICE.because("dependent p-values are combined")

    def check_params(self) -> None:
        check_held_out(self)
        check_share(self)
        check_option("aggregation", self.aggregation, tuple(AGGREGATIONS))
        check_whole("n_estimators", self.n_estimators, 1, "a whole number ≥ 1")

    def _calibrate(self, fit: HeldOutFit) -> HeldOut:
        rng = fit.rng
        seeds = np.asarray(rng.randint(2**31, size=self.n_estimators)).tolist()
        parts = [
            split(fit, self.calibration_size, seed, f"the training part of split {k}") for k, seed in enumerate(seeds)
        ]
        calibrated = [
            fit.calibrated(model, log_proba, rest, rng.uniform(size=len(rest)))
            for (model, log_proba), (_, rest) in zip(fit.models(parts), parts, strict=True)
        ]
        # Warned of is the split with the fewest points in a cell.
        fewest = min(zip(calibrated, parts, strict=True), key=lambda pair: min(map(len, pair[0].ordered)))[1][1]
        return fit.held_out(calibrated, fewest)
