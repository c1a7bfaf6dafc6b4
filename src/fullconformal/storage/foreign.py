"""Objects of other libraries: scikit-learn's estimators, data frames and sparse matrices; lists say which may be loaded."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import csr_array, csr_matrix
from sklearn.base import BaseEstimator
from sklearn.gaussian_process import kernels
from sklearn.gaussian_process.kernels import Kernel

from fullconformal.runtime.files import one_line
from fullconformal.storage.columns import MAKERS, check_codes, check_steps, learn_polynomials, longest_name, width
from fullconformal.storage.container import StorageError
from fullconformal.storage.limits import LIMITS
from fullconformal.storage.trees import boosted_again, boosted_parts, check_forest
from fullconformal.storage.values import KINDS, Kind, Packer, Unpacker, among, defaults, expect, require

# What the classes that may be loaded learn, by module and name. None of them calls what it is given, but for `check`.
LEARNED: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("learned.toml").read_text(encoding="utf-8"))
HOMES = {name: module for module, classes in LEARNED.items() for name in classes}
# What any of them may have learnt.
COMMON = "n_features_in_:count feature_names_in_:labels _sklearn_output_config:output"
# Left behind: the state of training, which no prediction needs.
DROPPED = {"_optimizer", "_random_state", "_no_improvement_count", "_best_coefs", "_best_intercepts"}
# And what each call of `transform` sets anew.
DROPPED |= {"_transformers_feature_names_out"}
# Those that hold more than what is listed, which no prediction needs.
ROOMS = ("discriminant_analysis", "tree", "ensemble")
MORE = {"PolynomialFeatures", "Lasso", "SGDClassifier", "GaussianProcessRegressor"}.union(
    *(LEARNED[f"sklearn.{room}"] for room in ROOMS)
)
# Transformers that do not say how many columns they take, or by another name.
WITHOUT = {"LabelBinarizer", "MissingIndicator"}
# Kernels that may be loaded: none calls what it is given.
KERNELS = (
    "ConstantKernel", "WhiteKernel", "RBF", "Matern", "RationalQuadratic", "ExpSineSquared", "DotProduct", "Sum", "Product",
    "Exponentiation",
)  # fmt: skip
# Functions of NumPy's that may be saved, by name: of numbers, and without effect on anything else.
FUNCTIONS = (
    "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "sqrt", "cbrt", "square", "arcsinh", "sinh", "reciprocal", "negative",
)  # fmt: skip
# What whoever loads a file decides, and no file: such a parameter has its default.
OURS = {"memory", "n_jobs", "verbose", "precompute"}
# What may not be larger, as memory or time would be.
MOST = dict.fromkeys(("n_bins", "n_estimators"), LIMITS.bins) | dict.fromkeys(("n_oversamples", "n_iter"), LIMITS.work)
MOST |= dict.fromkeys(("max_iter", "max_leaf_nodes", "max_samples"), LIMITS.steps)


def home(name: str) -> Any:
    """The class of a name that may be loaded."""
    return getattr(import_module(HOMES[name]), name)


@cache
def kinds_of(name: str) -> dict[str, str]:
    """By the attribute that a class learns, the kinds of value it may have."""
    return dict(part.split(":") for part in f"{LEARNED[HOMES[name]][name]} {COMMON}".split())


def pack_estimator(estimator: Any, packer: Packer) -> dict[str, Any]:
    """Class, parameters and fitted attributes of an estimator."""
    cls = type(estimator)
    if cls.__name__ not in HOMES or home(cls.__name__) is not cls:
        raise StorageError(
            f"{cls.__module__}.{cls.__qualname__} cannot be saved: these files hold numbers and no programs, of the classes that "
            "docs/howto/save.rst lists. Apply a transformer to the data outside the predictor, or keep a pickle, which only those should "
            "load who trust it."
        )
    params = estimator.get_params(deep=False)
    fitted = {name: value for name, value in vars(estimator).items() if name not in params and name not in DROPPED}
    params |= defaults(cls, OURS)
    check(cls.__name__, params)
    if cls.__name__.startswith("KNeighbors"):
        # Its tree is planted again.
        y = estimator.classes_[estimator._y] if hasattr(estimator, "classes_") else getattr(estimator, "_y", None)
        fitted = {"X": estimator._fit_X, "y": y} if "_fit_X" in fitted else {}
    if "_predictors" in fitted:
        fitted = boosted_parts(estimator)
    if cls.__name__ in MORE:
        fitted = {name: value for name, value in fitted.items() if name in kinds_of(cls.__name__)}
    if "bin_edges_" in fitted:
        fitted["bin_edges_"] = list(fitted["bin_edges_"])
    check_fitted(cls.__name__, fitted)
    if cls.__name__ in MAKERS:
        packer.widest = max(packer.widest, width(estimator))
    return {"class": cls.__name__, "params": params, "fitted": fitted}


def unpack_estimator(values: dict[str, Any], unpacker: Unpacker) -> Any:
    """The estimator again."""
    name = among(values["class"], HOMES)
    params, fitted = expect(values["params"], dict), expect(values["fitted"], dict)
    check(name, params)
    cls = home(name)
    estimator = cls(**params | defaults(cls, OURS))
    if hasattr(estimator, "_parameter_constraints"):
        try:
            estimator._validate_params()
        except ValueError as error:
            raise StorageError(one_line(error)) from error
    check_fitted(name, fitted)
    # Those that are not fitted have it, too.
    vars(estimator).update({at: fitted.pop(at) for at in ("_sklearn_output_config",) if at in fitted})
    if name.startswith("KNeighbors") and fitted:
        # A copy and a tree of all points, in float64, whatever they are kept in.
        n, numbers = len(fitted["y"]), fitted["X"].size
        unpacker.take(16 * (numbers + n) + 64 * (numbers + 2 * n) // estimator.leaf_size)
        return estimator.fit(fitted["X"], fitted["y"])
    counted = not fitted or not hasattr(cls, "transform") or "n_features_in_" in fitted or name in WITHOUT
    # Fitted again, it makes a matrix of columns by columns.
    most = 2**13 if params.get("svd_solver") == "covariance_eigh" else max(unpacker.size, LIMITS.sparse_columns)
    require(counted and fitted.get("n_features_in_", 0) <= most, f"number of columns that {name} takes")
    if name.startswith("HistGradientBoosting") and fitted:
        return boosted_again(estimator, fitted)
    if name == "PolynomialFeatures" and fitted:
        learn_polynomials(estimator, fitted, LIMITS.columns(unpacker.size))
    if "bin_edges_" in fitted:
        edges = np.empty(len(fitted["bin_edges_"]), dtype=object)
        edges[:] = fitted["bin_edges_"]
        fitted["bin_edges_"] = edges
    vars(estimator).update(fitted)
    check_forest(estimator)
    if name == "QuadraticDiscriminantAnalysis" and fitted:
        parts = list(zip(fitted["rotations_"], fitted["scalings_"], strict=True))
        shapes = all(R.shape == (fitted["n_features_in_"], len(S)) for R, S in parts)
        require(shapes and len(parts) == len(fitted["classes_"]), "discriminant analysis")
    if name == "OneHotEncoder" and "categories_" in fitted:
        check_codes(estimator)
    if name == "ColumnTransformer" and "transformers_" in fitted:
        check_steps(estimator)
    if name in MAKERS and width(estimator) > LIMITS.columns(unpacker.size):
        raise StorageError(f"{name} makes {width(estimator):,} columns, more than a file of its size can bear out")
    if hasattr(cls, "transform"):
        # Each column may be given a name that is made of others.
        unpacker.take(width(estimator) * longest_name(estimator))
    return estimator


def check_fitted(name: str, fitted: dict[str, Any]) -> None:
    """Raise unless a class learns these attributes, and their values are of the kinds it learns; letters of shapes stand for one size."""
    kinds, sizes = kinds_of(name), {"d": fitted["n_features_in_"]} if "n_features_in_" in fitted else {}
    for attribute, value in fitted.items():
        if attribute not in kinds:
            raise StorageError(f"{name} learns no attribute {str(attribute)[:60]!r} that can be saved or loaded")
        if not any(is_a(value, kind, sizes) for kind in kinds[attribute].split("|")):
            raise StorageError(f"{attribute} of {name} is not what it should be")


def is_a(value: Any, kind: str, sizes: dict[str, int]) -> bool:
    """Whether a value is of a kind: "(kd)" is an array of numbers of shape (k, d), "x*" a list of x, a name a class of `HOMES`."""
    if kind.endswith("*"):
        # Shapes may differ from one to the next.
        return isinstance(value, list) and all(item is None or is_a(item, kind[:-1], {}) for item in value)
    if kind in HOMES:
        return type(value).__name__ == kind and type(value) is home(kind)
    if shape := re.fullmatch(r"\((\w+)\)", kind):
        numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.ndim == len(shape[1])
        return numbers and all(sizes.setdefault(*pair) == pair[1] for pair in zip(shape[1], value.shape, strict=True))
    if kind == "any":
        return type(value).__name__ in HOMES
    whole = type(value) is int or isinstance(value, np.integer)
    tests: dict[str, Callable[[], bool]] = {
        "none": lambda: value is None,
        "flag": lambda: isinstance(value, (bool, np.bool_)),
        "count": lambda: whole and value >= 0,
        "number": lambda: whole or type(value) is float or isinstance(value, np.floating),
        "text": lambda: isinstance(value, str),
        "kernel": lambda: isinstance(value, Kernel),
        "tree": lambda: type(value).__name__ == "Tree",
        "dtype": lambda: isinstance(value, np.dtype) and (value.kind != "U" or value.itemsize <= 4 * LIMITS.unproved),
        "labels": lambda: isinstance(value, np.ndarray) and value.ndim == 1,
        "points": lambda: isinstance(value, (np.ndarray, csr_matrix, csr_array)) and value.ndim == 2,
        "columns": lambda: columns(value),
        # A name, a transformer or what stands for one, and its columns.
        "step": lambda: isinstance(value, tuple) and len(value) == 3 and transforms(value[1]) and columns(value[2]),
        "counts": lambda: isinstance(value, dict) and all(is_a(item, "count", {}) for item in value.values()),
        "named": lambda: isinstance(value, dict) and all(isinstance(at, str) for at in value)
        and all(isinstance(item, (list, np.ndarray, slice)) for item in value.values()),
        "output": lambda: isinstance(value, dict) and set(value) == {"transform"} and value["transform"] in (None, "default", "pandas"),
    }  # fmt: skip
    return tests[kind]()


def columns(value: Any) -> bool:
    """Whether a value says which columns are meant: names, numbers, truth values or a slice."""
    if isinstance(value, list):
        return all(isinstance(item, (str, int)) for item in value)
    return isinstance(value, (str, int, slice)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def transforms(value: Any) -> bool:
    """Whether a value may be a step of a ColumnTransformer."""
    return value in ("drop", "passthrough") if isinstance(value, str) else type(value).__name__ in HOMES


def check(name: str, params: dict[str, Any]) -> None:
    """Raise where an estimator would call a function, or cannot be made the same again."""
    if any(params.get(key) is not None and not is_function(params[key]) for key in ("func", "inverse_func")):
        raise StorageError(
            f"{name} holds a function, which no file may carry but for np.{', np.'.join(FUNCTIONS)}; apply it outside the predictor."
        )
    for key, value in params.items():
        # Such would be met by arrays of all points, make as many columns, or run as long.
        if (
            (isinstance(value, np.ndarray) and value.ndim > 1)
            or (key in ("bandwidth", "n_oversamples", "n_iter") and np.ndim(value))
            or (isinstance(value, np.dtype) and value.kind == "U")
            or (key in MOST and not isinstance(value, (str, type(None))) and not np.max(value) <= MOST[key])
            or (key == "hidden_layer_sizes" and np.sum(value, dtype=np.float64) > LIMITS.bins // 4)
            or (key == "alphas" and np.size(value) > LIMITS.work)
            or (key == "tol" and name in ("Lasso", "ElasticNet") and not value > 0)
            # Compiled code takes matrices of distances in any shape.
            or (key in ("metric_params", "kw_args", "inv_kw_args") and value)
            or (key == "metric" and not isinstance(value, str))
            # A format of names, which may be as long as it says.
            or (key == "verbose_feature_names_out" and not isinstance(value, bool))
            or (
                key == "transformer_weights"
                and not all(isinstance(weight, (int, float, np.number)) for weight in (value or {}).values())
            )
            or (key == "kernel_params" and "n_jobs" in (value or {}))
        ):
            raise StorageError(f"{name} holds {key}={str(value)[:40]}, which cannot be saved or loaded.")
    if params.get("n_targets") not in (None, 1):
        raise StorageError(f"{name} holds n_targets={params['n_targets']!r}, and predictors are of one number.")
    state = params.get("random_state")
    if state is not None and type(state) is not int:
        raise StorageError(f"{name} holds random_state={state!r}, which cannot be saved; give a whole number.")


def is_function(value: Any) -> bool:
    """Whether a value is one of the functions of NumPy's that may be saved."""
    return isinstance(value, np.ufunc) and value.__name__ in FUNCTIONS and getattr(np, value.__name__) is value


def pack_function(function: np.ufunc, _: Packer) -> dict[str, Any]:
    """The name of a function of NumPy's."""
    if not is_function(function):
        raise StorageError(f"np.{function.__name__} cannot be saved; np.{', np.'.join(FUNCTIONS)} can.")
    return {"name": function.__name__}


KINDS["function"] = Kind(np.ufunc, pack_function, lambda values, _: getattr(np, among(values["name"], FUNCTIONS)))
KINDS["scikit-learn"] = Kind(BaseEstimator, pack_estimator, unpack_estimator)


def pack_kernel(kernel: Kernel, _: Packer) -> dict[str, Any]:
    """Class and parameters of a kernel of Gaussian processes: numbers, or kernels."""
    name = type(kernel).__name__
    if name not in KERNELS or getattr(kernels, name) is not type(kernel):
        raise StorageError(f"a {name} cannot be saved; use kernels among {', '.join(KERNELS)}.")
    return {"class": name, "params": kernel.get_params(deep=False)}


def unpack_kernel(values: dict[str, Any], _: Unpacker) -> Kernel:
    """The kernel again."""
    params = expect(values["params"], dict)
    plain = (bool, int, float, str, np.generic, type(None), Kernel)
    # Bounds are for training, the others are met by all points.
    axes = {name: 0 if isinstance(part, plain) else np.ndim(part) for name, part in params.items()}
    known = all(axes[name] <= 1 + name.endswith("_bounds") for name in axes)
    made: Kernel = getattr(kernels, among(values["class"], KERNELS))(**params)
    # Each may hold a matrix of all points while the others are computed.
    require(known and sum(isinstance(part, Kernel) for part in made.get_params().values()) <= 32, "kernel")
    return made


KINDS["kernel"] = Kind(Kernel, pack_kernel, unpack_kernel)


def pack_frame(frame: pd.DataFrame, _: Packer) -> dict[str, Any]:
    """The columns of a DataFrame: numbers and objects (of which None is another than NaN) as they are, all else as objects.

    Numbers of pandas' own types are floats, as scikit-learn reads them.
    """
    columns = []
    for _, column in frame.items():
        own = not isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf"
        array = column.to_numpy(np.float64, na_value=np.nan) if own else np.asarray(column)
        plain = array.dtype.kind in "biuf" or column.dtype == object
        columns.append(array if plain else column.to_numpy(dtype=object, na_value=np.nan))
    return {"names": list(frame.columns), "columns": columns}


def unpack_frame(values: dict[str, Any], _: Unpacker) -> pd.DataFrame:
    """The DataFrame again."""
    names, columns = (expect(values[part], list) for part in ("names", "columns"))
    shapes = {expect(column, np.ndarray).shape for column in columns}
    whole = len(shapes) < 2 and all(len(shape) == 1 for shape in shapes)
    # Python's hash of other names can be chosen; and transformers that are fitted again make longer names of these.
    short = all(isinstance(name, (str, int, float, np.generic)) and len(str(name)) <= LIMITS.value for name in names)
    require(whole and short and len(set(names)) == len(names), "table's columns")
    return pd.DataFrame(dict(zip(names, (pd.Series(column, dtype=column.dtype) for column in columns), strict=True)))


def pack_sparse(X: Any, _: Packer) -> dict[str, Any]:
    """The numbers of a matrix in rows, and where they are."""
    if X.shape[1] > LIMITS.sparse_columns:
        raise StorageError(f"a sparse matrix may be saved with {LIMITS.sparse_columns:,} columns, not {X.shape[1]:,}.")
    return {"data": X.data, "indices": X.indices, "indptr": X.indptr, "n_columns": X.shape[1]}


def unpack_sparse(cls: type[Any], values: dict[str, Any], _: Unpacker) -> Any:
    """The sparse matrix again: compiled code will trust its indices, so that all of them are checked here."""
    parts = tuple(expect(values[name], np.ndarray) for name in ("data", "indices", "indptr"))
    n_columns = expect(values["n_columns"], int)
    # SciPy makes smaller indices larger, in memory that was not counted.
    numbers = parts[0].dtype.kind in "biuf" and all(part.dtype in (np.int32, np.int64) for part in parts[1:])
    numbers &= all(part.ndim == 1 for part in parts) and len(parts[2]) > 0
    # And looks at differences, which numbers of the file may make overflow.
    ascending = numbers and not (parts[2][1:] < parts[2][:-1]).any()
    require(ascending and 0 <= n_columns <= LIMITS.sparse_columns, "sparse matrix")
    X = cls(parts, shape=(len(parts[2]) - 1, n_columns))
    X.check_format(full_check=True)
    return X


KINDS["frame"] = Kind(pd.DataFrame, pack_frame, unpack_frame)
for sparse in (csr_matrix, csr_array):
    KINDS[sparse.__name__] = Kind(sparse, pack_sparse, partial(unpack_sparse, sparse))
