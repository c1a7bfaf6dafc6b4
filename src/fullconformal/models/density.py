"""A kernel density classifier for scikit-learn, which has the density but not the classifier."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data


class KernelDensityClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Bayes' rule with a Gaussian kernel density for each class and the class frequencies as priors.

    Parameters
    ----------
    bandwidth : float, default=1.0
        Standard deviation h of the kernel; scale the features first.

    Attributes
    ----------
    classes_ : array (C,)
        The labels.
    X_, y_ : arrays (n, d), (n,)
        The training points and the positions of their labels in ``classes_``.

    Examples
    --------
    >>> from fullconformal.models import KernelDensityClassifier
    >>> model = KernelDensityClassifier(bandwidth=0.5).fit([[0.0], [1.0], [4.0]], ["a", "a", "b"])
    >>> model.predict([[2.0], [3.0]])
    array(['a', 'b'], ...)
    """

    def __init__(self, bandwidth: float = 1.0) -> None:
        self.bandwidth = bandwidth

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike) -> Self:
        """Keep the training points X (n, d) with their labels y (n,)."""
        if not 0 < self.bandwidth < np.inf:
            raise ValueError(f"bandwidth is {self.bandwidth}; it must be positive and finite")
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.X_ = X
        self.classes_, self.y_ = np.unique(y, return_inverse=True)
        return self

    def predict_proba(self, X: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Probabilities (m, C) of the labels at X (m, d): the frequency n_c/n cancels the mean's 1/n_c, sums of kernels remain."""
        check_is_fitted(self)
        objects: npt.NDArray[np.float64] = validate_data(self, X, reset=False, dtype=np.float64)
        log_sums = np.empty((len(objects), len(self.classes_)))
        for at in gen_batches(len(objects), 256):
            log_kernel = -cdist(objects[at], self.X_, "sqeuclidean") / (2 * self.bandwidth**2)
            for c in range(len(self.classes_)):
                log_sums[at, c] = np.logaddexp.reduce(log_kernel[:, self.y_ == c], axis=1)
        return np.asarray(softmax(log_sums, axis=1))

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        """The most probable label (m,) at X (m, d)."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])
