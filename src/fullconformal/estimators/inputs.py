"""Objects and labels as users hand them over: what they hold, and what is wrong with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, column_or_1d, validate_data
from torch import Tensor, bfloat16

from fullconformal.methods.base import ConformalWarning
from fullconformal.models.requirements import REMEDY, place, split_pipeline, unwrap
from fullconformal.storage import LIMITS


def array(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor as an array; NumPy does not know bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == bfloat16 else tensor).numpy()


def first_rows(X: Any, most: int = LIMITS.rows) -> Any:
    """Copies of the first rows, on which a saved predictor is tried when it is loaded."""
    return X[:most].copy() if isinstance(X, np.ndarray) else _safe_indexing(X, np.arange(min(_num_samples(X), most)))


def double(X: Any) -> Any:
    """X with its numbers of less precision in float64, for transformers.

    In float32 the same object comes out of a product of matrices with other last bits in another batch: too far apart to be tied with
    its equal among the training points.
    """
    if hasattr(X, "iloc") and getattr(X, "ndim", 0) == 2:
        narrow = [name for name, kind in X.dtypes.items() if kind in (np.float16, np.float32)]
        return X.astype(dict.fromkeys(narrow, np.float64)) if narrow else X
    return X.astype(np.float64) if getattr(X, "dtype", None) in (np.float16, np.float32) else X


def dense(X: Any, gib: float) -> npt.NDArray[Any]:
    """A sparse matrix (n, d) as an array, where that takes no more than so many GiB."""
    if 8 * X.shape[0] * X.shape[1] > gib * 2**30:
        remedy = "make_pipeline(TruncatedSVD(100), model), or any other of a model that takes such matrices itself, with method='folds'"
        raise MemoryError(
            f"X is a sparse matrix {X.shape}, as an array more than {gib:g} GiB; put it into a Pipeline: {remedy}."
        )
    return np.asarray(X.toarray())


def one_array(X: Any) -> Any:
    """X as it is; an error where it is several arrays by name."""
    if isinstance(X, Mapping) and not hasattr(X, "iloc"):
        apart = unwrap("self.net(first=x[:, :3], second=x[:, 3:])")
        raise TypeError(f"X is a mapping of {', '.join(map(repr, X))}; give one array, with these side by side.{apart}")
    return X


def unmasked(name: str, array: Any) -> Any:
    """Data of a masked array in which nothing is masked; an error where something is, as scikit-learn would take it for a value."""
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if masked := int(np.ma.getmaskarray(array).sum()):
        remedy = "leave such points out" if name == "y" else "impute them, or leave such objects out"
        raise ValueError(f"{name} is a masked array with {masked} of its {array.size} values masked; {remedy}.")
    return array.data


def labels(y: Any) -> Any:
    """Labels as NumPy has them, none missing: pandas' whole numbers and truth values, and objects that all are such, keep their kind."""
    if isinstance(y, str):
        raise ValueError(f"y={y!r} is one word; give the labels, one for each object (of a table: X[{y!r}]).")
    # scikit-learn raises its own error for this.
    if y is None:
        return y
    y = unmasked("y", y)
    # A table of one column.
    if hasattr(y, "iloc") and y.ndim == 2 and y.shape[1] == 1:
        y = y.iloc[:, 0]
    if isinstance(y, np.ndarray) and not y.dtype.isnative:
        y = y.astype(y.dtype.newbyteorder("="))
    held = np.asarray(y)
    if held.ndim == 1 and held.dtype.kind == "S":
        raise ValueError("y holds bytes; give strings, for instance y.astype(str).")
    if held.ndim == 1 and held.dtype.kind not in "biuU":
        # Most labels are numbers or texts, for which it is not imported.
        import pandas

        if (missing := pandas.isna(held)).any():
            raise ValueError(
                f"y has no label at {missing.sum()} of its {len(held)} places, the first at {int(missing.argmax())} (counted from 0); "
                "leave such points out."
            )
    # Of extension arrays.
    kind = getattr(getattr(y, "dtype", None), "numpy_dtype", None)
    if kind is not None and kind.kind in "biu":
        return np.asarray(y, dtype=kind)
    if getattr(getattr(y, "dtype", None), "kind", "") == "O" and len({type(label) for label in y}) == 1:
        found = np.asarray(y.tolist())
        return found if found.shape == y.shape and found.dtype.kind in "biu" else y
    return y


def targets(y: Any) -> Any:
    """Numbers (n,) as float64, all finite; words are refused, and whole numbers of few values are asked about: labels are often such."""
    # scikit-learn raises its own error for this.
    if y is None:
        return y
    if isinstance(y, str):
        raise ValueError(f"y={y!r} is one word; give the numbers, one for each object (of a table: X[{y!r}]).")
    y = unmasked("y", y)
    kind = getattr(getattr(y, "dtype", None), "numpy_dtype", None)
    given = np.asarray(y, dtype=kind) if kind is not None and kind.kind in "biu" else np.asarray(y)
    if given.dtype.kind == "c":
        raise ValueError("Complex data not supported: y holds complex numbers; give its real part, or its size.")
    words = given.dtype.kind in "US" or (
        given.dtype.kind == "O" and any(isinstance(v, (str, bytes)) for v in given.flat)
    )
    try:
        numbers = None if words or given.dtype.kind in "mM" else given.astype(np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise ValueError(
            "y holds something else than numbers; regression predicts numbers. Convert it, or take FullConformalClassifier for labels."
        )
    if numbers.ndim == 2 and numbers.shape[1] > 1:
        raise ValueError(
            f"y should be a 1d array, and has {numbers.shape[1]} columns: a regressor predicts one number. Fit one for each column."
        )
    numbers = column_or_1d(numbers, warn=True)
    if (bad := ~np.isfinite(numbers)).any():
        raise ValueError(
            f"y is NaN or infinite at {bad.sum()} of its {len(numbers)} places, the first at {int(bad.argmax())} (counted from 0); "
            "leave such points out."
        )
    if given.dtype.kind in "biu" and len(numbers) > 20:
        values = np.unique(numbers)
        if len(values) <= 10:
            warnings.warn(
                f"y has {len(values)} distinct whole numbers only. If they are labels, take FullConformalClassifier; if they are "
                "quantities, give y.astype(float).",
                UserWarning, stacklevel=5,
            )  # fmt: skip
    return numbers


def check_names(X: Any) -> None:
    """Raise where columns of a DataFrame share a name: by their names they could not be told apart."""
    if hasattr(X, "iloc") and getattr(X, "ndim", 0) == 2 and not X.columns.is_unique:
        shared = X.columns[X.columns.duplicated()].unique().tolist()
        raise ValueError(
            f"X has several columns of the same name: {', '.join(map(repr, shared))}; rename or drop them."
        )


def check_rows(X: Any, width: int) -> None:
    """Raise where X has no objects, or is one where a matrix of some width is meant: a Pipeline's transformers say less."""
    if getattr(X, "shape", (1,))[:1] == (0,) or (isinstance(X, list) and not X):
        raise ValueError("X has no objects; give at least one.")
    if width and len(shape := getattr(X, "shape", (0, 0))) == 1:
        raise ValueError(
            f"X has shape {shape}, and a matrix (objects, {width} columns) is meant; of one object give X.reshape(1, -1), "
            "of a table's row table.iloc[[i]]."
        )


def check_columns(X: Any) -> None:
    """Raise where a DataFrame, which no Pipeline encodes, has columns that are not numbers; or an array holds dates."""
    if getattr(getattr(X, "dtype", None), "kind", "") in ("m", "M"):
        raise ValueError(
            f"X holds dates or times ({X.dtype}); give numbers, for instance X.astype('int64') or days since the first."
        )
    if not hasattr(X, "iloc") or getattr(X, "ndim", 0) != 2:
        return
    words = []
    for j, (name, kind) in enumerate(zip(X.columns, X.dtypes, strict=True)):
        if getattr(kind, "kind", "O") not in "biuf":
            try:
                X.iloc[:, j].astype(float)
            except (TypeError, ValueError):
                words.append(repr(name))
    if words:
        raise ValueError(
            f"X has columns that are not numbers: {', '.join(words)}. Leave them out, or encode them in a Pipeline: "
            "make_pipeline(make_column_transformer((OneHotEncoder(), columns), remainder='passthrough'), model)."
        )


def warn_frozen(estimator: Any, prefit: bool) -> None:
    """Warn where the model to be trained is frozen, or a part of it: on these data, perhaps, whose scores would be too good."""
    final = split_pipeline(estimator)[1]
    held = [final, *final.get_params().values()] if isinstance(final, BaseEstimator) and not prefit else []
    if any(isinstance(part, FrozenEstimator) for part in held):
        told = "estimator holds a FrozenEstimator, which fit does not train: the guarantee asks that it was trained on other data than X"
        remedy = "Take it out of FrozenEstimator to train it here; trained on other data, it goes into SplitConformal… with prefit=True"
        warnings.warn(f"{told}. {remedy}, where all of X calibrates.", ConformalWarning, stacklevel=6)


def is_left_to(clf: Any, estimator: Any, X: Any) -> bool:
    """Whether a model looks after the columns of X itself: it holds a Pipeline, or knows their names or pandas' categories."""
    # One that was trained on a table, and is only calibrated.
    if getattr(clf, "prefit", False) and hasattr(clf, "calibration_size") and hasattr(estimator, "feature_names_in_"):
        return hasattr(X, "iloc")
    # Bagging makes an array of X before its Pipelines see it.
    if not isinstance(estimator, BaseEstimator) or hasattr(estimator, "bootstrap"):
        return False
    if any(isinstance(part, (Pipeline, ColumnTransformer)) for part in estimator.get_params().values()):
        return True
    knows = getattr(estimator, "categorical_features", None) == "from_dtype" or getattr(
        estimator, "enable_categorical", False
    )
    return bool(knows) and any(getattr(kind, "name", "") == "category" for kind in getattr(X, "dtypes", ()))


def native(X: Any) -> Any:
    """An array of numbers that torch knows: in the machine's byte order and in no more than float64; others as they are."""
    if not isinstance(X, np.ndarray):
        return X
    kind = np.dtype(np.float64) if X.dtype.kind == "O" or X.dtype.char == "g" else X.dtype.newbyteorder("=")
    return X.astype(kind, copy=False)


def validated(clf: Any, X: Any, y: Any, **options: Any) -> Any:
    """What scikit-learn's `validate_data` makes of X (n, ...) and y (n,), numbers; errors say where X is not finite, and what to do."""
    try:
        return validate_data(clf, X, y, dtype="numeric", **options)
    except ValueError as error:
        if str(error).endswith("features as input."):
            raise ValueError(f"{error} Give the columns that fit was given, in the same order.") from error
        if not any(word in str(error) for word in ("NaN", "infinity")) or not (sentence := not_finite(X)):
            raise
        raise ValueError(sentence) from error


def not_finite(X: Any) -> str:
    """A sentence on the missing or infinite values of X (n, ...): how many, where the first is, what to do. Empty where there is none."""
    try:
        numbers = X.to_numpy(np.float64, na_value=np.nan) if hasattr(X, "iloc") else np.asarray(X, np.float64)
    except (TypeError, ValueError):
        # No numbers.
        return ""
    bad = np.argwhere(~np.isfinite(numbers)).tolist()
    if not bad:
        return ""
    missing = bool(np.isnan(value := numbers[tuple(bad[0])]))
    name = f", {X.columns[bad[0][1]]!r}" if hasattr(X, "columns") else ""
    count = f"{len(bad)} such value{'s' if len(bad) > 1 else ''} in all"
    remedy = "Impute missing values first (SimpleImputer of scikit-learn's), or leave such objects out."
    kind = "NaN" if missing else f"infinity ({value})"
    return f"X holds {kind} in object {bad[0][0]}, {place(bad[0])}{name}; {count}. {remedy if missing else REMEDY}"


def encode_labels(y: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Classes (C,) and label indices (n,); at least two classes."""
    y = np.asarray(y)
    try:
        # Whole numbers are always labels, and looking closer takes longer than the rest.
        assert_all_finite(y, input_name="y")
        if y.dtype.kind == "f" and y.ndim == 1 and (y != np.floor(y)).any():
            raise ValueError(
                f"y is continuous, with numbers that are not whole, such as {float(y[y != np.floor(y)][0]):.6g}: a quantity, not "
                "classes. Predict it with FullConformalRegressor, or cut it into a few intervals."
            )
        if y.dtype.kind not in "biu":
            check_classification_targets(y)
        classes, index = np.unique(y, return_inverse=True)
    except TypeError as error:
        # They have no order.
        kinds = ", ".join(sorted({type(label).__name__ for label in y.tolist()}))
        raise ValueError(f"y mixes labels of several kinds, {kinds}; give labels of one, and none missing.") from error
    if len(classes) < 2:
        raise ValueError(f"y has one class only, {classes.tolist()[0]!r}; give points of at least two classes.")
    # More than 50 may be something else than labels; numbers already if they are many and do not count from 0 as indices do.
    counted = classes.dtype.kind not in "iuf" or np.array_equal(classes, np.arange(len(classes)))
    if len(classes) > max(50, len(y) / 2) or (not counted and len(classes) > max(100, len(y) / 20)):
        warnings.warn(
            f"y has {len(classes):,} classes for {len(y):,} points; is it a quantity or an identifier? Fits take long with so many.",
            UserWarning, stacklevel=4,
        )  # fmt: skip
    return classes, index.astype(np.int64)


def declared(found: npt.NDArray[Any], classes: Any) -> npt.NDArray[Any]:
    """All classes in order, of those found in y (k,) and those that a user declares, which must hold them."""
    if classes is None:
        return found
    every = np.asarray(labels(classes))
    if every.ndim != 1 or len(np.unique(every)) < len(every):
        raise ValueError(
            f"classes={classes!r} is not allowed; give every class once, those of y and those that it lacks."
        )
    kinds = ["number" if part.dtype.kind in "biuf" else "other" for part in (found, every)]
    if kinds[0] != kinds[1] or set(found.tolist()) - set(every.tolist()):
        raise ValueError(
            f"classes holds {every.tolist()}, but y has the classes {found.tolist()}; declare every class of y, and those that it lacks."
        )
    return np.unique(every)


def index_labels(y: Any, classes: npt.NDArray[Any], problem: str) -> npt.NDArray[np.int64]:
    """Indices (n,) of labels y (n,) among classes (C,) in any order; an error lists those that are not among them."""
    unknown = sorted(set(y.tolist()) - set(classes.tolist()))
    if unknown:
        raise ValueError(f"y holds labels {problem}: {unknown[:5]}; the classes are {classes.tolist()}.")
    order = np.argsort(classes)
    return np.asarray(order[np.searchsorted(classes, y, sorter=order)])
