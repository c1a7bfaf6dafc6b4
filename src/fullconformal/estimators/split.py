"""Split conformal prediction: a part of the data is kept from training and calibrates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from fullconformal import pvalues
from fullconformal.estimators.base import ConformalClassifier, encode_labels
from fullconformal.estimators.fitting import Settings, check_estimator_kind, fit_problem, to_tensor
from fullconformal.problem import Problem


class SplitConformalClassifier(ConformalClassifier):
    """Split (inductive) conformal prediction with the log loss as score, as in the paper.

    Parameters
    ----------
    estimator : None, nn.Module, or scikit-learn classifier with predict_proba, default=None
        The classifier; None is the built-in multinomial logistic regression.
    calibration_size : float, default=0.2
        Share of the data that calibrates and does not train.
    confidence_level : float, default=0.9
        Of the sets, where `predict_set` is not told otherwise.
    class_conditional : bool, default=False
        Compare a candidate with the calibration points of its own label only.
    l2 : float, optional
        As in `FullConformalClassifier`; for None and modules.
    max_epochs : int, default=200
        For modules.
    random_state : int, RandomState or None, default=None
        Seeds the split, training and smoothing.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from fullconformal import SplitConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> SplitConformalClassifier(random_state=0).fit(X[::2], y[::2]).predict_set(X[1::2]).shape
    (75, 3)
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        calibration_size: float = 0.2,
        confidence_level: float = 0.9,
        class_conditional: bool = False,
        l2: float | None = None,
        max_epochs: int = 200,
        random_state: Any = None,
    ):
        self.estimator = estimator
        self.calibration_size = calibration_size
        self.confidence_level = confidence_level
        self.class_conditional = class_conditional
        self.l2 = l2
        self.max_epochs = max_epochs
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> SplitConformalClassifier:
        """Train on a part of (X, y) and score the rest."""
        if not 0 < self.calibration_size < 1:
            raise ValueError(
                f"calibration_size={self.calibration_size!r} is not allowed; give a share between 0 and 1."
            )
        own = self.estimator is None or isinstance(self.estimator, nn.Module)
        if own:
            check_estimator_kind(self.estimator, self.l2)
        X, y = validate_data(self, X, y, allow_nd=own, ensure_2d=not isinstance(self.estimator, nn.Module))
        self.classes_, index = encode_labels(y)
        rng = check_random_state(self.random_state)
        seed = int(rng.randint(2**31))
        # At random, not class by class: the guarantee needs calibration points that are exchangeable with those to come.
        train, rest = train_test_split(np.arange(len(y)), test_size=self.calibration_size, random_state=seed)
        missing = sorted(set(index.tolist()) - set(index[train].tolist()))
        if missing:
            raise ValueError(
                f"the training part has no point of class {self.classes_.tolist()[missing[0]]!r}; lower "
                f"calibration_size={self.calibration_size!r}, choose another random_state, or give more points of that class."
            )
        if own:
            settings = Settings(l2=self.l2, max_epochs=self.max_epochs, seed=seed)
            self._model: Any = fit_problem(self.estimator, X[train], index[train], self.classes_, settings)
        else:
            self._model = clone(self.estimator).fit(X[train], index[train])
        self._labels = index[rest]
        self._scores = -self._log_proba(X[rest])[np.arange(len(rest)), self._labels]
        return self

    def _log_proba(self, X: Any) -> npt.NDArray[np.float64]:
        if isinstance(self._model, Problem):
            like = self._model.X
            logits = self._model.logits(to_tensor(X, like.device, like.dtype))
            return torch.log_softmax(logits.double(), -1).numpy()
        proba: npt.NDArray[np.float64] = self._model.predict_proba(X)
        return np.log(np.maximum(proba, np.finfo(np.float64).tiny))

    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """p-values (m, C) of every label, columns as in ``classes_``."""
        X = self._checked(X)
        tau = -self._log_proba(X)
        weight = pvalues.comparison_weight(self._labels, len(self.classes_), class_conditional=self.class_conditional)
        total = len(self._labels) if weight is None else weight.sum(axis=0)
        greater, equal = pvalues.count(
            self._scores[:, None, None], tau, weight=None if weight is None else weight[:, None, :]
        )
        return pvalues.p_values(greater, equal, total, uniform=self._uniform(X, tau.shape[1]) if smoothing else None)

    def predict_proba(self, X: Any) -> npt.NDArray[Any]:
        """Probabilities (m, C) of the model."""
        return np.exp(self._log_proba(self._checked(X)))

    def _checked(self, X: Any) -> Any:
        check_is_fitted(self)
        module = isinstance(self.estimator, nn.Module)
        return validate_data(self, X, reset=False, allow_nd=module, ensure_2d=not module)
