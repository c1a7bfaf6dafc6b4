"""Jackknife+: CV+ with a fold for each point."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from fullconformal import pvalues
from fullconformal.estimators.calibrated import FloatArray
from fullconformal.estimators.cross import PlusRule
from fullconformal.linear import at_points, leave_one_out
from fullconformal.methods.convex import Symmetric
from fullconformal.methods.fitting import fit_problem
from fullconformal.models.adapters import check_objective, is_logistic

BLOCK, MEMORY = 2**22, 2**30  # entries of scores held at a time; bytes for the solver
EPS = float(np.finfo(np.float64).eps)


class JackknifePlusClassifier(PlusRule):
    """Jackknife+ (Barber et al. 2021; for labels Romano, Sesia and Candès 2020): every point is scored by the model without it.

    A label y of object x is in the set when #{i : s_i < s^(−i)(x, y)} < (1 − ε)(n + 1), where s^(−i) is the score by the model that has
    not seen point i and s_i that of point i itself. Sets hold the true label with probability at least 1 − 2ε, and mostly 1 − ε.

    The n models of a logistic regression (None, or scikit-learn's with an L2 penalty) are found by one fit and a few batched Newton
    steps, exact to rounding. Other classifiers are fitted n times; Pipelines too, whose transformers have to be.

    Parameters
    ----------
    estimator, conformity_score, randomized, confidence_level, class_conditional, max_epochs
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
        class_conditional: bool = False, l2: float | None = None, max_epochs: int = 200, n_jobs: int | None = None,
        random_state: Any = None, verbose: int = 0,
    ):  # fmt: skip
        self._keep(locals())

    _remedy = "leave that class out"

    def fit(self, X: Any, y: Any) -> JackknifePlusClassifier:
        """Fit the model to (X, y) without each point in turn, and score that point."""
        X, index, rng = self._start(X, y)
        self._linear: LeaveOneOut | None = None
        if is_fast(self.estimator):
            for i in np.flatnonzero(np.bincount(index)[index] == 1):
                self._check_trained(np.delete(index, i), f"what trains without point {i}", self._remedy)
            problem = fit_problem(self.estimator, X, index, self.classes_, self._settings(), linear_fit=False)
            self._linear, self._labels = LeaveOneOut(Symmetric(problem, MEMORY)), index
            scores = self._scores(self._linear.of_training_points(), rng.uniform(size=len(index)))
            self._alpha = scores[np.arange(len(index)), index]
        else:
            every = np.arange(len(index))
            self._fit_folds(X, index, [(np.delete(every, i), every[i : i + 1]) for i in every], rng)
        self.n_fits_ = len(index) if self._linear is None else 1
        self._finish(index)
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model fitted to all points where there is one, else the mean of the n models'."""
        X = self._objects(X)
        return super().predict_proba(X) if self._linear is None else np.exp(self._linear.engine.log_proba(X))

    def _pooled(self, X: Any, uniform: FloatArray | None) -> tuple[Any, Any]:
        if self._linear is None:
            return super()._pooled(X, uniform)
        self._linear.engine.log_proba(X)  # names an object that cannot be computed with
        n, n_classes = len(self._labels), len(self.classes_)
        weight = pvalues.comparison_weight(self._labels, n_classes, class_conditional=self.class_conditional)
        counts = []
        width = max(1, BLOCK // (n * n_classes))
        for at in range(0, len(X), width):
            log_proba = self._linear(X[at : at + width])
            u = None if uniform is None else uniform[at : at + width].repeat(n)
            tau = self._scores(log_proba.reshape(-1, n_classes), u).reshape(log_proba.shape)
            own = self._rounding(tau, log_proba, EPS)
            counts.append(pvalues.count(self._alpha[:, None], tau, own, weight, axis=1))
        greater, equal = zip(*counts, strict=True)
        return np.concatenate(greater), np.concatenate(equal)


def is_fast(estimator: Any) -> bool:
    """Whether leaving a point out takes no training: a logistic regression of an objective the solver knows."""
    if not is_logistic(estimator):
        return estimator is None
    try:
        check_objective(estimator)
    except ValueError:
        return False
    return True


class LeaveOneOut:
    """The n logistic regressions on all points but one."""

    def __init__(self, engine: Symmetric):
        self.engine = engine
        self.theta = leave_one_out(engine.bag).theta  # (d, K, n)

    def of_training_points(self) -> FloatArray:
        """Log-probabilities (n, C) of each training point by the model without it."""
        return log_softmax(at_points(self.engine.bag.X.T, self.theta).T)

    def __call__(self, X: Any) -> FloatArray:
        """Log-probabilities (m, n, C) of objects by all models."""
        x = self.engine.design(self.engine.inputs(X))
        d, K, n = self.theta.shape
        return log_softmax((x @ self.theta.view(d, K * n)).view(-1, K, n).mT)


def log_softmax(z: Tensor) -> FloatArray:
    """Log-probabilities (..., C) from logits (..., K) relative to the first class."""
    return torch.log_softmax(pad(z, (1, 0)), -1).cpu().numpy()
