"""What all conformal classifiers share: sets, labels and point predictions from p-values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import _num_samples, check_is_fitted
from torch import Tensor

from fullconformal import sets
from fullconformal.estimators import inputs
from fullconformal.estimators.conformal import Conformal
from fullconformal.storage import require

Array = npt.NDArray[Any]


class ConformalClassifier(ClassifierMixin, Conformal):  # type: ignore[misc]
    """Base of the classifiers: whoever gives `predict_p` and `predict_proba` gets the rest."""

    classes_: Array
    class_conditional: bool

    @staticmethod
    def _targets(y: Any) -> Any:
        return inputs.labels(y)

    @abstractmethod
    def predict_p(self, X: Any, *, smoothing: bool = False) -> npt.NDArray[np.float64]:
        """p-values (m, C), columns as in ``classes_``."""

    @abstractmethod
    def predict_proba(self, X: Any) -> Array:
        """Probabilities (m, C) of the fitted model; they carry no guarantee."""

    def predict_epsilon(self, X: Any, **options: Any) -> npt.NDArray[np.float64]:
        """The largest ε (m, C) at which each label is still in the set, by the method's own rule; p-values where it has them.

        A label is in the set at confidence_level where this exceeds 1 − confidence_level.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        **options
            Those of `predict_p`, where the method has it.
        """
        p: Any = self.predict_p(X, **options)
        # Of bounds, the upper gives valid sets.
        return np.asarray(p[1] if isinstance(p, tuple) else p)

    def predict(self, X: Any) -> Array:
        """The model's likeliest label (m,)."""
        proba = self.predict_proba(X)
        labels: Array = self.classes_[proba.argmax(axis=1)]
        return labels

    def predict_set(
        self,
        X: Any,
        confidence_level: float | Sequence[float] | None = None,
        *,
        as_labels: bool = False,
        allow_empty: bool = True,
        **options: Any,
    ) -> Any:
        """Prediction sets: the labels whose p-value exceeds 1 − confidence_level.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects.
        confidence_level : float or sequence of float, optional
            One level, or several; the classifier's own where not given.
        as_labels : bool, default=False
            Return a list of m arrays of labels instead of a mask (one level only).
        allow_empty : bool, default=True
            Whether a set may be empty; if False an empty one receives its likeliest label.
        **options
            Passed on to `predict_epsilon`.

        Returns
        -------
        ndarray of bool (m, C), or (m, C, L) for L levels, or a list of arrays of labels
        """
        level: Any = self.confidence_level if confidence_level is None else confidence_level
        levels = np.asarray(sets.check_levels(level))
        if as_labels and levels.ndim:
            raise ValueError("as_labels=True needs one confidence_level; call predict_set once for each level.")
        check_is_fitted(self)
        if confidence_level is not None and not options.get("smoothing") and options.get("weights") is None:
            self.warn_unreachable(levels)
        p = self.predict_epsilon(X, **options)
        proba = None if allow_empty else self.predict_proba(X)
        chosen = sets.prediction_sets(p, level, allow_empty=allow_empty, proba=proba)
        return sets.as_labels(chosen, self.classes_) if as_labels else chosen

    def report(
        self,
        X: Any,
        y: Any,
        path: str | Path = "report.html",
        *,
        images: Any = None,
        feature_names: Sequence[Any] | None = None,
        others: Mapping[str, Any] | None = None,
        title: str = "Prediction sets",
    ) -> Path:
        """Write a page about the sets of labelled objects: one HTML file that needs no network.

        Parameters
        ----------
        X : array-like (m, ...)
            Objects, shown as pictures where they are arrays (m, H, W) or (m, channels, H, W), else as rows.
        y : array-like (m,)
            Their true labels.
        path : path, default="report.html"
            Where the page goes.
        images : array, optional
            Pictures of the objects, (m, H, W), (m, H, W, channels) or (m, channels, H, W), to be shown instead of X.
        feature_names : sequence of str, optional
            Names of the columns of X; a DataFrame brings its own.
        others : mapping, optional
            Methods to stand beside this one: a name, and a fitted conformal classifier or p-values (m, C).
        title : str, default="Prediction sets"

        Returns
        -------
        Path

        Examples
        --------
        >>> import tempfile
        >>> from sklearn.datasets import load_iris
        >>> from fullconformal import FullConformalClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> clf = FullConformalClassifier(l2=0.01).fit(X[::2], y[::2])
        >>> clf.report(X[1::2], y[1::2], f"{tempfile.mkdtemp()}/iris.html").name
        'iris.html'
        """
        from fullconformal.report.page import check_folder, write_report

        check_is_fitted(self)
        check_folder(path)
        if _num_samples(X) != len(y):
            raise ValueError(f"X has {_num_samples(X)} objects and y {len(y)} labels; give one label for each object.")
        p = self._beside(X, others or {})
        X = inputs.array(X) if isinstance(X, Tensor) else X
        images = X if images is None and np.ndim(X) > 2 else images
        return write_report(
            path, p, y, classes=self.classes_, confidence_level=self.confidence_level, title=title,
            n_train=self.n_samples_fit_, images=images,
            rows=None if images is not None else X.toarray() if issparse(X) else X, feature_names=feature_names,
            proba=self.predict_proba(X), diagnostics=self.notes(),
        )  # fmt: skip

    def _beside(self, X: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """By the name of the method, the largest ε (m, C) of this one, and those of others or what was given for them."""
        if self.display_name in others:
            raise ValueError(f"others has a method named {self.display_name!r}, as this one is; give it another name.")
        methods = {self.display_name: self, **others}
        return {k: v.predict_epsilon(X) if isinstance(v, ConformalClassifier) else v for k, v in methods.items()}

    def verify_labels(self) -> int:
        """The number of classes, which must be distinct and in order."""
        classes = self.classes_
        require(isinstance(classes, np.ndarray) and classes.ndim == 1 and len(classes) > 1, "classes")
        require(bool((classes[:-1] < classes[1:]).all()), "classes")
        require(isinstance(self.confidence_level, float) and 0 < self.confidence_level < 1, "confidence level")
        require(isinstance(self.class_conditional, bool), "class_conditional")
        return len(classes)

    def verify_p(self) -> None:
        """Raise unless the classifier gives p-values of the objects it kept."""
        p = self.predict_epsilon(self._sample)
        whole = p.shape == (_num_samples(self._sample), len(self.classes_))
        require(whole and bool(((p >= 0) & (p <= 1)).all()), "p-values")
