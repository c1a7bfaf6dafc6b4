"""scikit-learn's transformers and classifiers as their parameters and fitted attributes; a list says which may be loaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
        "sklearn.linear_model": ("LogisticRegression",),
        "sklearn.neural_network": ("MLPClassifier",),
        "sklearn.neighbors": ("KNeighborsClassifier",),
        "fullconformal.models.density": ("KernelDensityClassifier",),
    }.items()
    for name in names
}  # fmt: skip
# Left behind: the state of training, which no prediction needs.
DROPPED = {"_optimizer", "_random_state", "_no_improvement_count"}


def known(cls: type) -> bool:
    """Whether this very class may be saved."""
    return cls.__name__ in HOMES and getattr(import_module(HOMES[cls.__name__]), cls.__name__) is cls


def pack_estimator(estimator: Any, _: Packer) -> dict[str, Any]:
    """Class, parameters and fitted attributes of an estimator."""
    cls = type(estimator)
    if not known(cls):
        other = f"use one of {', '.join(sorted(HOMES))}, or apply it to the data outside the predictor"
        if is_classifier(estimator):
            other = "these files hold numbers and no programs; a pickle keeps any classifier, for those who trust it"
        raise StorageError(f"{cls.__module__}.{cls.__qualname__} cannot be saved; {other}.")
    params = estimator.get_params(deep=False)
    if "memory" in params:
        params["memory"] = None  # a cache of this machine
    fitted = {name: value for name, value in vars(estimator).items() if name not in params and name not in DROPPED}
    check(cls.__name__, params)
    if "_fit_X" in fitted and cls.__name__ == "KNeighborsClassifier":  # its tree is planted again
        fitted = {"X": estimator._fit_X, "y": estimator.classes_[estimator._y]}
    return {"class": cls.__name__, "params": params, "fitted": fitted}


def unpack_estimator(values: dict[str, Any], _: Unpacker) -> Any:
    """The estimator again."""
    name = among(values["class"], HOMES)
    params, fitted = expect(values["params"], dict), expect(values["fitted"], dict)
    check(name, params)
    cls = getattr(import_module(HOMES[name]), name)
    estimator = cls(**params)
    if name == "KNeighborsClassifier" and "X" in fitted:
        return estimator.fit(fitted["X"], fitted["y"])
    for attribute in fitted:
        if attribute.startswith("__") or callable(getattr(cls, attribute, None)):
            raise StorageError(f"{name} has no fitted attribute {attribute[:60]!r}")
    vars(estimator).update(fitted)
    return estimator


def check(name: str, params: dict[str, Any]) -> None:
    """Raise where an estimator would call a function, or read and write a cache."""
    called = [key for key in ("func", "inverse_func") if params.get(key) is not None]
    if called:
        raise StorageError(
            f"{name} holds a function, which no file is let carry; apply it to the data outside the predictor."
        )
    if params.get("memory") is not None:
        raise StorageError(f"{name} asks for a cache on disk, which no file is let do")
    state = params.get("random_state")
    if state is not None and type(state) is not int:
        raise StorageError(f"{name} holds random_state={state!r}, which cannot be saved; give a whole number.")


KINDS["scikit-learn"] = Kind(BaseEstimator, pack_estimator, unpack_estimator)
