"""Cross-conformal prediction, CV+ and jackknife+: every point is scored by a model that has not seen it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import gen_batches
from torch import Tensor
from torch.nn.functional import pad

from fullconformal import pvalues
from fullconformal.estimators.held_out import (
    AGGREGATIONS,
    HeldOut,
    HeldOutClassifier,
    HeldOutFit,
    PlusClassifier,
    check_trained,
    own_scores,
)
from fullconformal.estimators.validation import check_cv, check_held_out, check_option
from fullconformal.guarantees import TWICE
from fullconformal.linear.bag import at_points
from fullconformal.linear.leave_one_out import leave_one_out
from fullconformal.losses import SOFTMAX
from fullconformal.methods.base import FloatArray, IntArray
from fullconformal.methods.convex import FittedSymmetric, Symmetric
from fullconformal.methods.folds import cv_parts
from fullconformal.models.adapters import is_known
from fullconformal.storage import require, savable


class FoldsClassifier(HeldOutClassifier):
    """Base of the classifiers that train on all folds but one and score that one, for each fold."""

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, conformity_score: str = "loss",
        randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        confidence_level: float = 0.9, class_conditional: bool = False, categories: Any = None, l2: float | None = None,
        max_epochs: int = 200, n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = TWICE.because("each fold has a model of its own; of pooled ranks up to a term that vanishes as n grows")

    def check_params(self) -> None:
        check_held_out(self)
        check_cv(self)

    def _calibrate(self, fit: HeldOutFit) -> HeldOut:
        y = fit.bag.y
        parts = cv_parts(self.cv, self.n_folds, np.zeros((len(y), 1)), y, fit.config.seed)
        return fit.held_out(fit.folds(parts, "take other folds (n_folds, random_state)"), np.arange(len(y)))


@savable
class CVPlusClassifier(PlusClassifier, FoldsClassifier):
    """CV+ (Romano, Sesia and Candès 2020): every point trains all models but one, and is scored by that one.

    A label y of object x is in the set when #{i : s_i < s^(−k(i))(x, y)} < (1 − ε)(n + 1), where s^(−k) is the score by the model that
    has not seen fold k, and s_i that of point i by the model that has not seen it. Sets hold the true label with probability at
    least 1 − 2ε − O(√(1/n)), and mostly 1 − ε. They are the sets of `CrossConformalClassifier`; the two papers differ in what they prove.

    Parameters
    ----------
    n_folds : int, default=5
        Folds, drawn at random, and models.
    cv : splitter or list of (train, test) indices, optional
        Other folds, instead of `n_folds`; each point must be in one.
    estimator, conformity_score, randomized, confidence_level, class_conditional, categories, l2, max_epochs
        As in `SplitConformalClassifier`.
    k_reg, lambda_reg : int, float
        Both needed with ``conformity_score="raps"``.
    n_jobs : int, optional
        Models trained at a time; any joblib backend.
    random_state : int, RandomState or None, default=None
        Seeds the folds, training and randomised scores.
    verbose : int or None, default=None
        1 shows progress bars, 0 nothing; None shows progress where work takes more than about ten seconds.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import CVPlusClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> CVPlusClassifier(conformity_score="aps", random_state=0).fit(X[::2], y[::2]).predict_set(X[1::2]).shape
    (75, 3)
    """


@savable
class CrossConformalClassifier(FoldsClassifier):
    """Cross-conformal prediction (Vovk 2015): split conformal prediction with each fold in turn, ranks pooled.

    The p-value of a label is (1 + Σ_k #{i in fold k : s_i ≥ s^(−k)(x, y)})/(n + 1), where s^(−k) is the score by the model that has not
    seen fold k. All data train and calibrate. Sets hold the true label with probability about 1 − 2ε for sure, and mostly 1 − ε.

    Parameters
    ----------
    aggregation : {"pooled", "mean", "median", "sequential"}, default="pooled"
        How folds are combined: their ranks, as above, or their p-values (1 + #{i in fold k : s_i ≥ s^(−k)(x, y)})/(n_k + 1). A mean or
        median of these has the guarantee 1 − 2ε at every n. ``"sequential"`` (Gasparin and Ramdas 2025) takes folds in a random order
        and the least of the running means: the same guarantee, sets that are never larger than the mean's, and errors nearer to 2ε.
        Where a proof is wanted, ask for half the error: 0.95 for 0.9 that is proved. A fold of n_k points has no p-value below 1/(n_k + 1).
    estimator, conformity_score, randomized, confidence_level, class_conditional, categories, l2, max_epochs
        As in `SplitConformalClassifier`.
    n_folds, cv, k_reg, lambda_reg, n_jobs, verbose
        As in `CVPlusClassifier`.
    random_state : int, RandomState or None, default=None
        Seeds the folds, training, randomised scores and smoothing.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import CrossConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> CrossConformalClassifier(random_state=0).fit(X[::2], y[::2]).predict_p(X[1::2]).shape
    (75, 3)
    """

    def __init__(
        self, estimator: Any = None, *, n_folds: int = 5, cv: Any = None, aggregation: str = "pooled",
        conformity_score: str = "loss", randomized: bool = True, k_reg: int | None = None, lambda_reg: float | None = None,
        confidence_level: float = 0.9, class_conditional: bool = False, categories: Any = None, l2: float | None = None,
        max_epochs: int = 200, n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    def check_params(self) -> None:
        super().check_params()
        check_option("aggregation", self.aggregation, ("pooled", *AGGREGATIONS))

    @property
    def _sizes(self) -> npt.NDArray[np.int64]:
        # Where p-values of folds are combined, those of the fold that has the fewest.
        each = [[len(group) for group in part.ordered] for part in self._held_out.parts]
        return super()._sizes if self.aggregation == "pooled" else np.array(min(each, key=min))


@savable
class JackknifePlusClassifier(PlusClassifier):
    """Jackknife+ (Barber et al. 2021; for labels Romano, Sesia and Candès 2020): every point is scored by the model without it.

    A label y of object x is in the set when #{i : s_i < s^(−i)(x, y)} < (1 − ε)(n + 1), where s^(−i) is the score by the model that has
    not seen point i and s_i that of point i itself. Sets hold the true label with probability at least 1 − 2ε, and mostly 1 − ε.

    The n models of a logistic regression (None, or scikit-learn's with an L2 penalty) are found by one fit and a few batched Newton
    steps, exact to rounding. Other classifiers are fitted n times; Pipelines too, whose transformers have to be.

    Parameters
    ----------
    estimator, conformity_score, randomized, confidence_level, class_conditional, categories, max_epochs
        As in `SplitConformalClassifier`.
    k_reg, lambda_reg, n_jobs, verbose
        As in `CVPlusClassifier`.
    l2 : float, optional
        λ of the fit on all n points, for None and modules. The n models of a logistic regression keep its Λ = nλ.
    random_state : int, RandomState or None, default=None
        Seeds training and randomised scores.

    Attributes
    ----------
    classes_ : ndarray (C,)
    n_fits_ : int
        Models that were trained: 1 where leaving points out took no training, else n.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import JackknifePlusClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = JackknifePlusClassifier(random_state=0).fit(X[::2], y[::2])
    >>> clf.predict_set(X[1::2]).shape, clf.n_fits_
    ((75, 3), 1)
    """

    def __init__(
        self, estimator: Any = None, *, conformity_score: str = "loss", randomized: bool = True,
        k_reg: int | None = None, lambda_reg: float | None = None, confidence_level: float = 0.9,
        class_conditional: bool = False, categories: Any = None, l2: float | None = None, max_epochs: int = 200,
        n_jobs: int | None = None, random_state: Any = None, verbose: int | None = None,
    ):  # fmt: skip
        self._keep(locals())

    _promise = TWICE.because("each point has a model of its own")
    n_fits_: int

    def check_params(self) -> None:
        check_held_out(self)

    def _calibrate(self, fit: HeldOutFit) -> HeldOut:
        y, remedy = fit.bag.y, "leave that class out"
        # Leaving a point out of a logistic regression whose objective the solver knows takes no training.
        fast = (self.estimator is None or is_known(self.estimator)) and fit.bag.weights is None
        self.n_fits_ = 1 if fast else len(y)
        every = np.arange(len(y))
        if self.n_fits_ > 1:
            parts = fit.folds([(np.delete(every, i), every[i : i + 1]) for i in every], remedy)
            return fit.held_out(parts, every)
        for i in np.flatnonzero(np.bincount(y)[y] == 1):
            check_trained(np.delete(y, i), fit.bag, f"what trains without point {i}", remedy)
        fitted = Symmetric(self.estimator).fit(fit.bag, fit.config)
        theta = leave_one_out(fitted.bag).theta
        without_it = log_proba(at_points(fitted.bag.X.T, theta).T)
        uniform = fit.rng.uniform(size=len(y)) if fit.randomized else None
        alpha = own_scores(fit.score, without_it, y, uniform)
        cell = fit.cells(every)[0]
        return fit.held_out([], every, LeaveOneOut, fitted=fitted, theta=theta, alpha=alpha, cell=cell)


@savable
@dataclass(frozen=True)
class LeaveOneOut(HeldOut):
    """The n logistic regressions on all points but one: the fit on all, weights (d, K, n), score alpha and cell (n,) of each left out."""

    fitted: FittedSymmetric
    theta: Tensor
    alpha: FloatArray
    cell: IntArray

    def proba(self, X: Any) -> FloatArray:
        """Probabilities (m, C) of the model fitted to all points."""
        return np.exp(self.fitted.log_proba(X))

    def counts(self, X: Any, places: IntArray | None, uniform: FloatArray | None) -> Iterator[npt.NDArray[Any]]:
        # Names an object that cannot be computed with.
        self.fitted.log_proba(X)
        (d, K, n), n_classes = self.theta.shape, self.n_classes
        alone = len(self.sizes) == 1
        first = np.zeros(len(X), dtype=np.int64) if places is None else places * self.width
        # The cells (m, C) of the candidates; a category without points has none.
        asked = np.where(first[:, None] < 0, -1, first[:, None] + np.arange(n_classes) % self.width)
        # About four million scores at a time.
        width, found = max(1, 2**22 // (n * n_classes)), []
        for at in gen_batches(len(X), width):
            x = self.fitted.objects(X[at])
            by_model = log_proba((x @ self.theta.view(d, K * n)).view(-1, K, n).mT)
            u = None if uniform is None else uniform[at].repeat(n)
            tau = self.score.scores(by_model.reshape(-1, n_classes), u).reshape(by_model.shape)
            tie = self.score.rounding(tau, by_model, float(np.finfo(np.float64).eps))
            weight = None if alone else self.cell[:, None] == asked[at, None]
            found.append(pvalues.count(self.alpha[:, None], tau, tie, weight, axis=1))
        yield np.concatenate(found, axis=1)

    def scored(self) -> Any:
        return [int((self.cell == k).sum()) for k in range(len(self.sizes))]

    def verify(self, n_classes: int, n_categories: int) -> None:
        """Raise where a loaded one is not whole."""
        super().verify(n_classes, n_categories)
        (n, d), K = self.fitted.bag.X.shape, self.fitted.bag.K
        require(self.theta.shape == (d, K, n) and bool(self.theta.isfinite().all()), "leave-one-out models")
        require(self.alpha.shape == self.cell.shape == (n,), "scores")


def log_proba(z: Tensor) -> FloatArray:
    """Log-probabilities (..., C) from logits (..., K) relative to the first class."""
    return np.asarray(SOFTMAX.log_proba(pad(z, (1, 0))).cpu().numpy())
