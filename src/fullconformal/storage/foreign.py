"""Objects of other libraries: scikit-learn's estimators, data frames and sparse matrices; lists say which may be loaded."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import BaseEstimator, is_classifier

from fullconformal.storage.container import StorageError
from fullconformal.storage.values import KINDS, Kind, Packer, Unpacker, among, expect

# Where each class that may be loaded lives. None of them calls what it is given, the exceptions in `check`.
HOMES = {
    name: module
    for module, names in {
        "sklearn.preprocessing": (
            "StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler", "Normalizer", "Binarizer", "OneHotEncoder",
            "OrdinalEncoder", "QuantileTransformer", "PowerTransformer", "PolynomialFeatures", "KBinsDiscretizer",
            "FunctionTransformer", "LabelBinarizer",
        ),
        "sklearn.impute": ("SimpleImputer", "MissingIndicator", "KNNImputer"),
        "sklearn.decomposition": ("PCA", "TruncatedSVD"),
        "sklearn.feature_selection": ("VarianceThreshold",),
        "sklearn.compose": ("ColumnTransformer",),
        "sklearn.pipeline": ("Pipeline", "FeatureUnion"),
        "sklearn.linear_model": (
            "LogisticRegression", "Ridge", "RidgeCV", "LinearRegression", "Lasso", "ElasticNet", "QuantileRegressor",
        ),
        "sklearn.kernel_ridge": ("KernelRidge",),
        "sklearn.neural_network": ("MLPClassifier", "MLPRegressor"),
        "sklearn.neighbors": ("KNeighborsClassifier", "KNeighborsRegressor"),
        "fullconformal.models.density": ("KernelDensityClassifier",),
    }.items()
    for name in names
}  # fmt: skip
NEIGHBORS = ("KNeighborsClassifier", "KNeighborsRegressor")
# Left behind: the state of training, which no prediction needs.
DROPPED = {"_optimizer", "_random_state", "_no_improvement_count"}


def home(name: str) -> Any:
    """The class of a name that may be loaded."""
    return getattr(import_module(HOMES[name]), name)


def pack_estimator(estimator: Any, _: Packer) -> dict[str, Any]:
    """Class, parameters and fitted attributes of an estimator."""
    cls = type(estimator)
    if cls.__name__ not in HOMES or home(cls.__name__) is not cls:
        other = f"use one of {', '.join(sorted(HOMES))}, or apply it to the data outside the predictor"
        if is_classifier(estimator):
            other = "these files hold numbers and no programs; a pickle keeps any classifier, for those who trust it"
        raise StorageError(f"{cls.__module__}.{cls.__qualname__} cannot be saved; {other}.")
    params = estimator.get_params(deep=False)
    if "memory" in params:
        params["memory"] = None  # a cache of this machine
    fitted = {name: value for name, value in vars(estimator).items() if name not in params and name not in DROPPED}
    check(cls.__name__, params)
    if "_fit_X" in fitted and cls.__name__ in NEIGHBORS:  # their trees are planted again
        labels = getattr(estimator, "classes_", None)
        fitted = {"X": estimator._fit_X, "y": estimator._y if labels is None else labels[estimator._y]}
    return {"class": cls.__name__, "params": params, "fitted": fitted}


def unpack_estimator(values: dict[str, Any], _: Unpacker) -> Any:
    """The estimator again."""
    name = among(values["class"], HOMES)
    params, fitted = expect(values["params"], dict), expect(values["fitted"], dict)
    check(name, params)
    cls = home(name)
    estimator = cls(**params)
    if name in NEIGHBORS and "X" in fitted:
        return estimator.fit(fitted["X"], fitted["y"])
    for attribute in fitted:
        if attribute.startswith("__") or callable(getattr(cls, attribute, None)):
            raise StorageError(f"{name} has no fitted attribute {attribute[:60]!r}")
    vars(estimator).update(fitted)
    return estimator


def check(name: str, params: dict[str, Any]) -> None:
    """Raise where an estimator would call a function, or read and write a cache."""
    if any(params.get(key) is not None for key in ("func", "inverse_func")):
        raise StorageError(
            f"{name} holds a function, which no file is let carry; apply it to the data outside the predictor."
        )
    if params.get("memory") is not None:
        raise StorageError(f"{name} asks for a cache on disk, which no file is let do")
    state = params.get("random_state")
    if state is not None and type(state) is not int:
        raise StorageError(f"{name} holds random_state={state!r}, which cannot be saved; give a whole number.")


KINDS["scikit-learn"] = Kind(BaseEstimator, pack_estimator, unpack_estimator)


MOST_COLUMNS = 2**22  # of a sparse matrix: no number bears out the empty ones, and transformers may make it dense


def pack_frame(frame: pd.DataFrame, _: Packer) -> dict[str, Any]:
    """The columns of a DataFrame: numbers as they are, all else as objects."""
    columns = []
    for _, column in frame.items():
        numbers = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        columns.append(column.to_numpy() if numbers else column.to_numpy(dtype=object, na_value=np.nan))
    return {"names": list(frame.columns), "columns": columns}


def unpack_frame(values: dict[str, Any], _: Unpacker) -> pd.DataFrame:
    """The DataFrame again."""
    return pd.DataFrame(dict(zip(values["names"], values["columns"], strict=True)))


def pack_sparse(X: Any, _: Packer) -> dict[str, Any]:
    """The numbers of a matrix in rows, and where they are."""
    if X.shape[1] > MOST_COLUMNS:
        raise StorageError(f"a sparse matrix of {X.shape[1]:,} columns cannot be saved; {MOST_COLUMNS:,} are allowed.")
    return {"data": X.data, "indices": X.indices, "indptr": X.indptr, "n_columns": X.shape[1]}


def unpack_sparse(cls: type[Any], values: dict[str, Any], _: Unpacker) -> Any:
    """The sparse matrix again: compiled code will trust its indices, so that all of them are checked here."""
    parts = tuple(expect(values[name], np.ndarray) for name in ("data", "indices", "indptr"))
    n_columns = expect(values["n_columns"], int)
    numbers = all(
        part.ndim == 1 and part.dtype.kind in kinds for part, kinds in zip(parts, ("biuf", "i", "i"), strict=True)
    )
    if not numbers or not len(parts[2]) or not 0 <= n_columns <= MOST_COLUMNS:
        raise StorageError("a sparse matrix is not what it should be")
    X = cls(parts, shape=(len(parts[2]) - 1, n_columns))
    X.check_format(full_check=True)
    return X


KINDS["frame"] = Kind(pd.DataFrame, pack_frame, unpack_frame)
for sparse in (csr_matrix, csr_array):
    KINDS[sparse.__name__] = Kind(sparse, pack_sparse, partial(unpack_sparse, sparse))
