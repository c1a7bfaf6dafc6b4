"""What all conformal predictors share: parameters, fits whole or not at all, checked input, what is saved; and what all classifiers do."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, get_origin

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils import get_tags
from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from fullconformal import sets
from fullconformal.estimators import inputs
from fullconformal.estimators.categories import Array, Categories
from fullconformal.guarantees import Guarantee
from fullconformal.models.adapters import is_skorch
from fullconformal.models.requirements import split_pipeline
from fullconformal.runtime.files import check_writable
from fullconformal.storage import LIMITS, StorageError, conforms, defaults, expect, hints_of, parameters, require

Fit = TypeVar("Fit", bound=Callable[..., Any])

#: why a promise is not whole where classes without a training point were declared
ABSENT = (
    "objects of the declared classes without a training point are missed at every level; about as many as there are classes with a single "
    "one, of n; class_conditional=True holds for every class"
)
#: attributes that one fit sets and the next may not
SOMETIMES_SET = ("n_features_in_", "feature_names_in_", "_sample", "k_reg_", "lambda_reg_")


#: parameters that whoever loads a file decides, and no file: folders, workers, the device, what is printed
OURS = {"checkpoint", "n_jobs", "device", "verbose"}


def check_learnt(cls: type, fitted: dict[str, Any]) -> None:
    """Raise unless the class annotates these attributes, and their values are of the annotated types: nothing else is saved or loaded."""
    hints, params = hints_of(cls), parameters(cls)
    for name, value in fitted.items():
        known = name in hints and get_origin(hints[name]) is not ClassVar and name not in params
        require(known, f"attribute {str(name)[:40]!r} (which {cls.__name__} does not annotate)")
        require(conforms(value, hints[name]), f"attribute {name!r}")
        # Of each object one comes back, as wide as the widest there is.
        words = {"classes_": value, "_categories": getattr(value, "known", None)}.get(name)
        require(getattr(words, "itemsize", 0) <= 4 * LIMITS.value, f"attribute {name!r} (of long words)")


def whole_or_nothing(fit: Fit) -> Fit:
    """Let `fit` work on a copy that is taken over once it is fitted: a fit that fails or is interrupted leaves the earlier one."""

    @wraps(fit)
    def fit_a_copy(self: Conformal, *args: Any, **options: Any) -> Any:
        fresh = copy.copy(self)
        for name in SOMETIMES_SET:
            fresh.__dict__.pop(name, None)
        fit(fresh, *args, **options)
        self.__dict__ = fresh.__dict__
        return self

    return cast(Fit, fit_a_copy)


class Conformal(BaseEstimator):  # type: ignore[misc]
    """Base of all predictors."""

    estimator: Any
    n_samples_fit_: int
    confidence_level: float
    #: the first training objects as they were given
    _sample: Any
    n_features_in_: int
    feature_names_in_: Array
    categories: Any
    #: turns y (n,) as given into what the predictor learns from; an error says what is wrong with it
    _targets = staticmethod(inputs.labels)
    #: those of the training points; None where all are compared with all
    _categories: Categories | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Sparse objects are taken, by models that take none as a full matrix.
        tags.input_tags.sparse = True
        return tags

    def _keep(self, given: dict[str, Any]) -> None:
        """Keep a constructor's parameters, its `locals()`, as they are."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """As scikit-learn writes it; of a fitted one, with its guarantee in one word."""
        promise = f"  # guarantee: {self.guarantee_.word}" if hasattr(self, "n_samples_fit_") else ""
        return f"{super().__repr__(N_CHAR_MAX)}{promise}"

    @property
    @abstractmethod
    def guarantee_(self) -> Guarantee:
        """What is promised of the sets: ``word`` ("exact", "1 − 2ε", "approximate"), ``coverage(confidence_level)``, ``reason``."""

    @property
    def display_name(self) -> str:
        """What the method is called beside others."""
        family = type(self).__name__.removesuffix("Classifier").removesuffix("Regressor").removesuffix("Conformal")
        return family.replace("Plus", "+") if "Plus" in family else f"{family.lower()} CP"

    def notes(self) -> list[str]:
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
        # Imported here, since saving imports every estimator.
        from fullconformal.estimators.saving import save

        save(self, path, factory=factory)

    def state(self) -> dict[str, Any]:
        """What is saved: parameters and fitted attributes; of the estimator its fit only where it came fitted."""
        params = self.get_params(deep=False)
        params["estimator"] = self.estimator if params.get("prefit") else clone(self.estimator, safe=False)
        params |= defaults(type(self), OURS)
        if callable(params.get("categories")):
            instead = "put what it returns into a column of X, and give the column's name or number"
            raise StorageError(f"categories={params['categories']!r} is a function, and no file holds code; {instead}.")
        for name, remedy in (("random_state", 0), ("cv", None)):
            value = params.get(name)
            if value is not None and not isinstance(value, (int, np.integer, list)):
                raise StorageError(f"{name}={value!r} cannot be saved; call set_params({name}={remedy}) first.")
        fitted = {name: value for name, value in vars(self).items() if name not in params}
        check_learnt(type(self), fitted)
        return {"params": params, "fitted": fitted}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The predictor again, not yet verified."""
        clf = cls(**expect(state["params"], dict) | defaults(cls, OURS))
        if isinstance(clf.estimator, nn.Module):
            clf.estimator = clf.estimator.cpu()
        fitted = expect(state["fitted"], dict)
        check_learnt(cls, fitted)
        clf.__dict__.update(fitted)
        return clf

    @abstractmethod
    def verify(self) -> None:
        """Raise a StorageError where a loaded predictor is not whole."""

    def warn_unreachable(self, levels: npt.NDArray[np.float64]) -> None:
        """Warn of confidence levels at which sets hold everything, whatever the object; nothing to warn of by default."""

    def _places(self, X: Any) -> npt.NDArray[np.int64] | None:
        """The place of each object's category (m,) among those of training, X as it was given; None where there are no categories."""
        kept = self._categories
        rule = getattr(kept, "rule", None)
        if self.categories is not rule and self.categories != rule:
            raise ValueError(f"categories was changed to {self.categories!r} after fit; call fit again.")
        return None if kept is None else kept.places(X, getattr(self, "feature_names_in_", None))

    def verify_sample(self) -> int:
        """The number of objects that it kept, a few; and one confidence level."""
        level, m = self.confidence_level, _num_samples(self._sample)
        require(isinstance(level, (float, np.floating)) and 0 < level < 1, "confidence level")
        require(m <= LIMITS.rows, "sample")
        # Of many classes fewer are tried: about a million p-values, which the labels in a file do not bear out.
        self._sample = inputs.first_rows(self._sample, max(1, 2**20 // len(getattr(self, "classes_", "y"))))
        return int(m)

    def verify_categories(self, n: int) -> int:
        """The number of categories of n training points, one where there are none."""
        require(self.categories == getattr(self._categories, "rule", None), "categories")
        return 1 if self._categories is None else self._categories.verified(n)

    def _split(self) -> tuple[Any, Any]:
        """Transformers, None where there are none, and the model behind them."""
        return split_pipeline(self.estimator)

    def _checked(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Checked copies of what the user gave; a Pipeline's transformers do their own checking of X."""
        X, y = (inputs.array(part) if isinstance(part, Tensor) else part for part in (X, y))
        X = inputs.unmasked("X", inputs.one_array(X))
        y = y if isinstance(y, str) and y == "no_validation" else self._targets(y)
        inputs.check_names(X)
        # CSR, because we index rows.
        X = X.tocsr() if issparse(X) else X
        transformers, final = self._split()
        # Of y scikit-learn says whether it is missing; the rest is known of labels and numbers by now.
        given = None if y is None else "no_validation"
        if transformers is None and not inputs.is_left_to(self, final, X):
            inputs.check_columns(X)
            X = inputs.dense(X, getattr(self, "memory_budget", 4.0)) if issparse(X) else X
            module = isinstance(final, nn.Module) or is_skorch(final)
            # scikit-learn's wording asks for two dimensions; modules may take images.
            known = isinstance(final, BaseEstimator) and get_tags(final).input_tags.allow_nan
            missing = "allow-nan" if known else True
            asked = {"ensure_2d": not module, "allow_nd": module, "ensure_all_finite": missing}
            X = inputs.native(inputs.validated(self, X, given, reset=reset, **asked))
        else:
            inputs.check_rows(X, 0 if reset else getattr(self, "n_features_in_", 0))
            X = validate_data(self, inputs.double(X), given, reset=reset, skip_check_array=True)
        if isinstance(y, str):
            return X
        y = y if isinstance(y, np.ndarray) and y.ndim == 1 else column_or_1d(y, warn=True)
        if _num_samples(X) != len(y):
            raise ValueError(f"X has {_num_samples(X)} rows and y has {len(y)} labels; they must be as many.")
        return X, y


class ConformalClassifier(ClassifierMixin, Conformal):  # type: ignore[misc]
    """Base of the classifiers: whoever gives `predict_p` and `predict_proba` gets the rest."""

    classes_: Array
    class_conditional: bool
    #: places among classes_ of those that the models know; None where they know all
    _known: npt.NDArray[np.int64] | None = None

    def _declare(self, found: Array, classes: Any, has_outputs: bool) -> tuple[Array, npt.NDArray[np.int64]]:
        """Set ``classes_`` to those found in y (k,) and those declared; which of them models are told of, and where y's are among these.

        Of classes that y lacks, models that have outputs for them are told.
        """
        self.classes_, self._known = inputs.declared(found, classes), None
        place = np.searchsorted(self.classes_, found)
        if len(found) == len(self.classes_) or has_outputs:
            return self.classes_, place
        self._known = place
        return found, np.arange(len(found))

    def _widened(self, columns: Any, rest: Any) -> npt.NDArray[np.float64]:
        """Columns (m, C) of all classes, from those of the classes that the models know; `rest`, broadcast to (m, 1), of the others."""
        if self._known is None or columns.shape[1] == len(self.classes_):
            return np.asarray(columns)
        out = np.empty((len(columns), len(self.classes_)))
        out[:] = rest
        out[:, self._known] = columns
        return out

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

    def _decided(self, X: Any, levels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Numbers (m, C) on the same side of every 1 − level as `predict_epsilon` has them; a method may know less than that."""
        return self.predict_epsilon(X)

    def predict(self, X: Any) -> Array:
        """The model's likeliest label (m,)."""
        proba = self.predict_proba(X)
        return np.asarray(self.classes_[proba.argmax(axis=1)])

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
        # Which label is likeliest is for the p-values to say.
        decided = allow_empty and not any(option is not None and option is not False for option in options.values())
        p = self._decided(X, levels) if decided else self.predict_epsilon(X, **options)
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
        p: Any = None,
        **shown: Any,
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
        p : array (m, C), optional
            The p-values of X, if they are known already; they are computed by default.
        **shown
            ``identifiers`` (m names of the objects), ``by`` (columns of X, or a mapping of names to arrays (m,), to show the coverage
            by) and ``diagnostics`` (sentences to add; a warning begins with ``!``).

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
        from fullconformal.report.page import write_report

        check_is_fitted(self)
        check_writable(path)
        if _num_samples(X) != len(y):
            raise ValueError(f"X has {_num_samples(X)} objects and y {len(y)} labels; give one label for each object.")
        sentences = [f"The guarantee is {self.guarantee_}.", *self.notes(), *shown.pop("diagnostics", ())]
        if self.display_name in (others or {}):
            raise ValueError(f"others has a method named {self.display_name!r}, as this one is; give it another name.")
        methods = {self.display_name: self if p is None else p, **(others or {})}
        found = {k: v.predict_epsilon(X) if isinstance(v, ConformalClassifier) else v for k, v in methods.items()}
        X = inputs.array(X) if isinstance(X, Tensor) else X
        images = X if images is None and np.ndim(X) > 2 else images
        return write_report(
            path, found, y, classes=self.classes_, confidence_level=self.confidence_level, title=title,
            n_train=self.n_samples_fit_, images=images,
            rows=None if images is not None else X.toarray() if issparse(X) else X, feature_names=feature_names,
            proba=self.predict_proba(X), diagnostics=list(dict.fromkeys(sentences)), **shown,
        )  # fmt: skip

    def verify_labels(self) -> int:
        """The number of classes, which must be distinct and in order."""
        classes = self.classes_
        require(classes.ndim == 1 and len(classes) > 1 and bool((classes[:-1] < classes[1:]).all()), "classes")
        return len(classes)

    def verify_known(self, n_classes: int) -> int:
        """The number of classes that the models know, of all of them."""
        known = self._known
        if known is None:
            return n_classes
        require(known.ndim == 1 and 1 < len(known) < n_classes and bool((known[:-1] < known[1:]).all()), "classes")
        require(known[0] >= 0 and bool(known[-1] < n_classes), "classes")
        return len(known)

    def verify_p(self) -> None:
        """Raise unless the classifier gives p-values of the objects it kept."""
        p = self.predict_epsilon(self._sample)
        whole = p.shape == (_num_samples(self._sample), len(self.classes_))
        require(whole and bool(((p >= 0) & (p <= 1)).all()), "p-values")
