"""What all conformal classifiers share: sets, labels and point predictions from p-values; checks of what users give."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from fullconformal import sets
from fullconformal.estimators.inputs import (
    array,
    check_columns,
    check_names,
    check_rows,
    contents,
    labels,
    native,
    takes_missing,
    unmasked,
    validated,
)
from fullconformal.models.requirements import split_pipeline

Array = npt.NDArray[Any]


class ConformalWarning(UserWarning):
    """Something a user of conformal prediction should know before trusting the sets."""


class ConformalClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the classifiers: whoever gives `predict_p` and `predict_proba` gets the rest."""

    classes_: Array
    estimator: Any
    n_samples_fit_: int
    confidence_level: float

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
        p: Any = self._epsilon(X, **options)
        return np.asarray(p[1] if isinstance(p, tuple) else p)  # of bounds, the upper gives valid sets

    def _epsilon(self, *args: Any, **options: Any) -> Any:
        return self.predict_p(*args, **options)

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
            self._check_reachable(levels)
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
        X = array(X) if isinstance(X, Tensor) else X
        images = X if images is None and np.ndim(X) > 2 else images
        return write_report(
            path, p, y, classes=self.classes_, confidence_level=self.confidence_level, title=title,
            n_train=getattr(self, "n_samples_fit_", None), images=images,
            rows=None if images is not None else X.toarray() if issparse(X) else X, feature_names=feature_names,
            proba=self.predict_proba(X), diagnostics=self._in_words(),
        )  # fmt: skip

    def _beside(self, X: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """By the name of the method, the largest ε (m, C) of this one, and those of others or what was given for them."""
        if self._name() in others:
            raise ValueError(f"others has a method named {self._name()!r}, as this one is; give it another name.")
        methods = {self._name(): self, **others}
        return {k: v.predict_epsilon(X) if isinstance(v, ConformalClassifier) else v for k, v in methods.items()}

    def _name(self) -> str:
        """What the method is called beside others."""
        family = type(self).__name__.removesuffix("Classifier").removesuffix("Conformal")
        return family.replace("Plus", "+") if "Plus" in family else f"{family.lower()} CP"

    def _in_words(self) -> list[str]:
        """What a reader of the sets should know, a sentence each; a warning begins with "!"."""
        return []

    def save(self, path: Any, *, factory: Any = None) -> None:
        """Write the fitted predictor to one safetensors file, which `fullconformal.load` reads; whole or not at all.

        Parameters
        ----------
        path : path
            By custom it ends in ``.safetensors``. A file of that name is replaced.
        factory : str or callable, optional
            For modules that are no sequence of usual layers: ``"package.module:function"`` that returns the architecture.
            Weights are saved, code is not: whoever loads the file gives the factory again.

        Raises
        ------
        StorageError
            Where a part cannot be saved; it says which, and what to do.
        """
        from fullconformal.estimators.saving import save  # the engines it knows build on this module

        save(self, path, factory=factory)

    def _check_reachable(self, levels: npt.NDArray[np.float64]) -> None:
        """Warn of confidence levels at which sets hold all labels, whatever the object; nothing to warn of by default."""

    def _checked(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Checked copies of what the user gave; a Pipeline's transformers do their own checking of X."""
        X, y = (array(part) if isinstance(part, Tensor) else part for part in (X, y))
        X = unmasked("X", X)
        y = y if isinstance(y, str) and y == "no_validation" else labels(y)
        check_names(X)
        X = X.tocsr() if issparse(X) else X  # rows are what is taken of it
        head, final = split_pipeline(self.estimator)
        if head is None:
            if self._is_plain(X, y, reset):
                self.n_features_in_ = X.shape[1]
                return X if isinstance(y, str) else (X, y)
            check_columns(X)
            module = isinstance(final, nn.Module)
            # scikit-learn's wording asks for two dimensions; modules may take images.
            missing = "allow-nan" if takes_missing(final) else True
            out = validated(self, X, y, reset=reset, ensure_2d=not module, allow_nd=module, ensure_all_finite=missing)
            return (native(out[0]), out[1]) if isinstance(out, tuple) else native(out)
        check_rows(X, 0 if reset else getattr(self, "n_features_in_", 0))
        out = validate_data(self, X, y, reset=reset, skip_check_array=True)
        if not isinstance(out, tuple):
            return out
        X, y = out[0], column_or_1d(out[1], warn=True)
        if _num_samples(X) != len(y):
            raise ValueError(f"X has {_num_samples(X)} rows and y has {len(y)} labels; they must be as many.")
        return X, y

    def _is_plain(self, X: Any, y: Any, reset: bool) -> bool:
        """Whether scikit-learn's checks, which take longer than small fits, would find nothing: a finite matrix, and whole numbers."""
        if type(X) is not np.ndarray or X.ndim != 2 or X.dtype.char not in "efd" or not X.size:
            return False
        known = getattr(self, "n_features_in_", None)
        if not X.dtype.isnative or hasattr(self, "feature_names_in_") or not (reset or X.shape[1] == known):
            return False
        labelled = type(y) is np.ndarray and y.shape == (len(X),) and y.dtype.kind in "biu"
        with np.errstate(over="ignore", invalid="ignore"):
            return (labelled or isinstance(y, str)) and bool(np.isfinite(X.sum()))

    def _uniform(self, X: Any, n_classes: int, seed: int | None = None) -> npt.NDArray[np.float64]:
        """The uniforms (m, C) of smoothed p-values: one an object, a function of the seed, the object, and how many equal ones came before.

        So an object has the same p-values in any batch, objects that come one at a time do not share a uniform, and neither do equal
        objects in a batch: their errors would be the same, and coverage would depend on the seed as if there were few objects.
        """
        if seed is None:
            seed = int(check_random_state(getattr(self, "random_state", None)).randint(2**31))
        key = seed.to_bytes(8, "big")
        u, seen = np.empty(_num_samples(X)), Counter[bytes]()
        for row, content in enumerate(contents(X)):
            digest = own = blake2b(content, digest_size=8, key=key).digest()
            if before := seen[own]:
                digest = blake2b(own + before.to_bytes(8, "big"), digest_size=8, key=key).digest()
            seen[own] += 1
            u[row] = int.from_bytes(digest, "big") / 2**64
        return np.broadcast_to(u[:, None], (len(u), n_classes))


def warn_unreachable(sizes: Array, classes: Array, levels: Array, kind: str, stacklevel: int) -> None:
    """Warn where a level needs more points of a kind than there are: sizes (1,) of all, or (C,) of each class."""
    smallest, highest = int(sizes.min()), float(levels.max())
    if not sets.members(np.array(1 / (smallest + 1)), 1 - highest):
        return
    who, what = "", "every set holds all labels"
    if len(sizes) > 1:
        name = classes.tolist()[int(sizes.argmin())]
        who, what = f" of class {name!r}", f"every set holds {name!r}"
    warnings.warn(
        f"confidence_level={highest:g} needs more than the {smallest} {kind} point{'s' * (smallest != 1)}{who} there "
        f"{'are' if smallest != 1 else 'is'}: the smallest significance level possible is 1/{smallest + 1}, the highest "
        f"confidence level {smallest / (smallest + 1):.4g}; above it {what}. Give more points, or lower the level.",
        ConformalWarning,
        stacklevel=stacklevel + 1,
    )
