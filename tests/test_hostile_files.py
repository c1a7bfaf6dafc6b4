"""Files that mean harm: each attack is written out, and must end in our own error, without code, files, processes or much memory."""

import errno
import functools
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forged
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forged import estimator, opened, signed
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import VarianceThreshold
from sklearn.frozen import FrozenEstimator
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.impute import KNNImputer, MissingIndicator, SimpleImputer
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import (
    ElasticNet,
    Lasso,
    LinearRegression,
    LogisticRegression,
    QuantileRegressor,
    Ridge,
    RidgeCV,
    SGDClassifier,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    KBinsDiscretizer,
    LabelBinarizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeClassifier, ExtraTreeRegressor
from torch import nn

import fullconformal
from fullconformal import FullConformalClassifier, FullConformalRegressor, SplitConformalClassifier, StorageError
from fullconformal.cli import main
from fullconformal.cli.tables import for_spreadsheets, visible
from fullconformal.estimators.categories import Categories
from fullconformal.models import KernelDensityClassifier, RoundedImputer, mlp
from fullconformal.models.gaussian import Discriminant
from fullconformal.models.networks import Backbone
from fullconformal.runtime.files import finished_or_nothing, one_line
from fullconformal.storage import LIMITS, foreign
from fullconformal.storage.modules import check_activations, walk
from fullconformal.storage.trees import pack_tree, unpack_tree
from fullconformal.storage.values import Packer, Unpacker

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


def activations(module, shape):
    """How many numbers each of the known layers makes of one object of a shape."""
    return [math.prod(after) for _, _, after in walk(module, shape)]


def points(n=40, d=3):
    rng = np.random.default_rng(0)
    y = np.array(["a", "b"])[np.arange(n) % 2]
    return rng.normal(size=(n, d)) + (y == "b")[:, None], y


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """A file of a predictor with a Pipeline."""
    X, y = points()
    path = tmp_path_factory.mktemp("piped") / "it"
    FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression()), method="influence").fit(X, y).save(
        path
    )
    return path


def at(content, *names):
    """The value of nested dicts as files write them."""
    node = content["predictor"]
    for name in names:
        node = dict(node["items"])[name] if node.get("is") == "dict" else node[name]
    return node


def peak():
    """KiB of memory that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# Nothing runs ---------------------------------------------------------------------------------------------------------


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_a_cache_beside_the_file_is_not_opened(piped, tmp_path, monkeypatch):
    """`memory` among what a Pipeline is said to have learnt made joblib read pickles from a folder that the file named."""
    monkeypatch.chdir(tmp_path)
    content, tensors = opened(piped)
    at(content, "fitted", "transformer_", "fitted")["items"].append(["memory", "cache"])
    signed(content, tensors, tmp_path / "it")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "output.pkl").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(StorageError, match="learns no attribute 'memory'"):
        fullconformal.load(tmp_path / "it")
    content, tensors = opened(piped)
    at(content, "fitted", "transformer_", "params")["items"].append(["memory", "cache"])
    signed(content, tensors, tmp_path / "it")
    assert fullconformal.load(tmp_path / "it").transformer_.memory is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "it"]


@pytest.mark.parametrize(
    ("name", "value"), [("checkpoint", "planted"), ("n_jobs", 64), ("verbose", 1), ("device", "cuda")]
)
def test_folders_workers_devices_and_what_is_printed_are_not_the_files_to_say(
    name, value, piped, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    X, _ = points()
    content, tensors = opened(piped)
    pairs = at(content, "params")["items"]
    pairs[:] = [pair for pair in pairs if pair[0] != name] + [[name, value]]
    signed(content, tensors, tmp_path / "it")
    clf = fullconformal.load(tmp_path / "it")
    clf.predict_p(X)
    assert getattr(clf, name) == getattr(FullConformalClassifier(), name)
    assert os.listdir() == ["it"] and capsys.readouterr().out == ""
    content, tensors = opened(piped)
    at(content, "fitted")["items"].append([name, value])
    signed(content, tensors, tmp_path / "it")
    with pytest.raises(StorageError, match=name):
        fullconformal.load(tmp_path / "it")


@pytest.mark.parametrize(("attribute", "value"), [
    ("transform", "x"), ("mean_", "x"), ("mean_", [1, 2, 3]), ("with_mean", True), ("__class__", "x"),
    ("scale_", {"is": "scalar", "dtype": "float64", "value": 1.0}),
    ("_sklearn_output_config", {"is": "dict", "items": [["transform", "polars"]]}), ("n_features_in_", -1), ("n_features_in_", 4),
])  # fmt: skip
def test_only_what_a_class_learns_is_set_and_only_in_its_kind_and_shape(attribute, value, piped, tmp_path):
    content, tensors = opened(piped)
    (scaler,) = at(content, "fitted", "transformer_", "params", "steps")
    pairs = scaler["items"][1]["fitted"]["items"]
    pairs[:] = [pair for pair in pairs if pair[0] != attribute] + [[attribute, value]]
    signed(content, tensors, tmp_path / "it")
    with pytest.raises(StorageError, match=f"{attribute}.*|StandardScaler is not"):
        fullconformal.load(tmp_path / "it")


def learners():
    """An estimator of each class that may be loaded, fitted in its different ways."""
    X, y = points()
    holes = np.where(np.arange(120).reshape(40, 3) % 7, X, np.nan)
    words = np.array(["u", "v", "w"], dtype=object)[np.arange(80).reshape(40, 2) % 3]
    for scaler in (StandardScaler(), StandardScaler(with_mean=False, with_std=False), MinMaxScaler(), MaxAbsScaler(), RobustScaler(),
                   Normalizer(), Binarizer(), QuantileTransformer(n_quantiles=5), PowerTransformer(), PowerTransformer(standardize=False),
                   PolynomialFeatures(2), PolynomialFeatures((1, 2), interaction_only=True), KBinsDiscretizer(3), FunctionTransformer(),
                   KBinsDiscretizer(3, encode="ordinal"), PCA(2), TruncatedSVD(2), VarianceThreshold(),
                   StandardScaler().set_output(transform="pandas"),
                   Pipeline([("s", StandardScaler()), ("n", None)]), FeatureUnion([("p", PCA(1)), ("x", "passthrough")]),
                   ColumnTransformer([("n", StandardScaler(), [0]), ("d", "drop", [1])], remainder="passthrough"),
                   ColumnTransformer([("n", StandardScaler(), slice(0, 2))], remainder=MinMaxScaler())):  # fmt: skip
        yield scaler.fit(X), X
    for encoder in (OneHotEncoder(), OneHotEncoder(drop="first", sparse_output=False), OneHotEncoder(max_categories=2), OrdinalEncoder(),
                    OneHotEncoder(min_frequency=14, handle_unknown="infrequent_if_exist"), SimpleImputer(strategy="most_frequent"),
                    OrdinalEncoder(max_categories=2, handle_unknown="use_encoded_value", unknown_value=-1)):  # fmt: skip
        yield encoder.fit(words), words
    for filler in (
        SimpleImputer(add_indicator=True),
        SimpleImputer(),
        RoundedImputer(strategy="median", add_indicator=True),
        KNNImputer(add_indicator=True),
        KNNImputer(),
        MissingIndicator(),
    ):
        yield filler.fit(holes), holes
    yield LabelBinarizer().fit(y), y
    for classifier in (LogisticRegression(), MLPClassifier((2,), max_iter=2), MLPClassifier((2,), max_iter=2, early_stopping=True),
                       KNeighborsClassifier(2), KernelDensityClassifier(), GaussianNB(), LinearDiscriminantAnalysis(),
                       LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.1),
                       QuadraticDiscriminantAnalysis(), SGDClassifier(loss="log_loss")):  # fmt: skip
        yield classifier.fit(X, y), X
    for one in (DecisionTreeClassifier(), ExtraTreeClassifier(), RandomForestClassifier(3), ExtraTreesClassifier(3, bootstrap=True),
                BaggingClassifier(n_estimators=2), HistGradientBoostingClassifier(max_iter=2),
                FrozenEstimator(LogisticRegression().fit(X, y))):  # fmt: skip
        yield one.fit(X, y), X
    for regressor in (Ridge(), Ridge(solver="sag"), RidgeCV(), LinearRegression(), Lasso(), ElasticNet(), QuantileRegressor(),
                      KernelRidge(), GaussianProcessRegressor(2.0 * RBF([1.0, 2.0, 3.0]), alpha=0.1, normalize_y=True),
                      MLPRegressor(hidden_layer_sizes=(2,), max_iter=2), KNeighborsRegressor(2), DecisionTreeRegressor(),
                      ExtraTreeRegressor(), RandomForestRegressor(3), ExtraTreesRegressor(3), BaggingRegressor(n_estimators=2),
                      HistGradientBoostingRegressor(max_iter=2), TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
                      TransformedTargetRegressor(Ridge(), func=np.arcsinh, inverse_func=np.sinh)):  # fmt: skip
        yield regressor.fit(X, X.sum(1)), X


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_lists_of_what_is_learnt_are_what_scikit_learn_learns():
    """Every class of the list, fitted here and now, is packed and unpacked and does the same."""
    seen = set()
    for one, X in learners():
        packer = Packer()
        again = Unpacker(packer.tensors).unpack(json.loads(json.dumps(packer.pack(one))))
        do = next(name for name in ("predict_proba", "predict", "transform") if hasattr(one, name))
        before, after = getattr(one, do)(X), getattr(again, do)(X)
        before, after = (np.asarray(part.toarray() if hasattr(part, "toarray") else part) for part in (before, after))
        assert np.array_equal(before, after, equal_nan=before.dtype.kind == "f"), one
        seen.add(type(one).__name__)
    assert seen == set(foreign.HOMES)


def test_a_parameter_of_workers_or_caches_has_its_default_in_every_class():
    packer = Packer()
    packed = packer.pack(KNeighborsClassifier(3, n_jobs=7))
    assert dict(packed["params"]["items"])["n_jobs"] is None
    packed["params"]["items"] = [["n_jobs", 7]]
    assert Unpacker(packer.tensors).unpack(packed).n_jobs is None


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_named_often_takes_no_more_than_a_file_may(piped, tmp_path):
    content, tensors = opened(piped)
    at(content, "params")["items"].append(["cv", [{"is": "array", "tensor": "big", "order": [0]}] * 500])
    signed(content, {**tensors, "big": torch.zeros(2**20, dtype=torch.uint8)}, tmp_path / "it")
    before = peak()
    with pytest.raises(StorageError, match="more memory than"):
        fullconformal.load(tmp_path / "it")
    assert peak() - before < LIMITS.memory(2**20) // 2**10 + 20 * 1024


def test_wide_strings_take_no_more_than_a_file_may(piped, tmp_path):
    content, tensors = opened(piped)
    words = {"is": "objects", "dtype": "<U60000", "shape": [1000], "items": ["a" * 60000] + ["a"] * 999}
    at(content, "params")["items"].append(["cv", words])
    signed(content, tensors, tmp_path / "it")
    with pytest.raises(StorageError, match="more memory than"):
        fullconformal.load(tmp_path / "it")


def union(step, times):
    return estimator(
        "FeatureUnion", [("transformer_list", [{"is": "tuple", "items": [str(k), step]} for k in range(times)])]
    )


@pytest.mark.parametrize("step", [
    estimator("PolynomialFeatures", [("degree", 9)], [("n_features_in_", 3), ("_n_out_full", 10**9)]),
    estimator("PolynomialFeatures", [("degree", 900)], [("n_features_in_", 3)]),
    estimator("PolynomialFeatures", [("degree", 2)], [("n_features_in_", 10**6)]),
    estimator("OneHotEncoder", [("sparse_output", False)], [("_n_features_outs", [10**9])]),
    estimator("Normalizer", [], [("n_features_in_", 2**40)]),
    union(estimator("PolynomialFeatures", [("degree", 30)], [("n_features_in_", 3)]), 40),
    union(estimator("Normalizer", [], [("n_features_in_", 10**5)]), 10),
    union("passthrough", 3),
    # What learns nothing passes on as many columns as it is given, whatever it says: 64 · 64 · 64 times as many.
    *(functools.reduce(lambda inner, _: union(inner, 64), range(3), estimator(*one)) for one in (
        ("FunctionTransformer", [], []), ("FunctionTransformer", [], [("n_features_in_", 1)]), ("Normalizer", [], []),
        ("Pipeline", [("steps", [])], []), ("FrozenEstimator", [("estimator", estimator("Binarizer", [], []))], []),
    )),
    estimator("ColumnTransformer", [("transformers", [])], [("n_features_in_", 3), ("transformers_", [
        {"is": "tuple", "items": [str(k), estimator("FunctionTransformer", [], []), {"is": "slice", "items": [None, None, None]}]}
        for k in range(30_000)
    ])]),
])  # fmt: skip
def test_transformers_that_make_more_columns_than_the_file_bears_out_are_refused(step, piped, tmp_path):
    content, tensors = opened(piped)
    steps = at(content, "fitted", "transformer_", "params", "steps")
    steps.append({"is": "tuple", "items": ["more", step]})
    signed(content, tensors, tmp_path / "it")
    before = peak()
    with pytest.raises(StorageError):
        fullconformal.load(tmp_path / "it")
    assert peak() - before < 100 * 1024


def test_a_predictor_that_could_not_be_loaded_is_not_saved(tmp_path):
    X, y = points(40, 30)
    wide = make_pipeline(PolynomialFeatures(4), PCA(2), LogisticRegression())
    clf = FullConformalClassifier(wide, method="influence").fit(X, y)
    clf.save(tmp_path / "it")  # 46,376 columns, and PCA's components for each of them
    fullconformal.load(tmp_path / "it")
    packer = Packer()
    packer.pack(PolynomialFeatures(5).fit(X))
    assert packer.widest == 324_632 > LIMITS.columns(2**16)


def test_columns_of_discriminants_are_counted():
    """A file that says how many they are is met by so many for each point."""
    X, y = points()
    forged = LinearDiscriminantAnalysis().fit(X, y)
    forged.scalings_ = np.zeros((3, 30_000))
    packer = Packer()
    packer.pack(forged)
    assert packer.widest == 30_000


def padded(layers):
    return nn.Sequential(
        *[nn.Conv2d(1, 1, 1, padding=128) for _ in range(layers)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1, 2),
    )


def test_convolutions_that_blow_small_objects_up_are_refused(tmp_path):
    """24 layers of padding make 6,145 × 6,145 numbers of one pixel."""
    y = np.arange(20) % 2
    X = np.random.default_rng(0).normal(size=(20, 1, 1, 1)) + y[:, None, None, None]
    SplitConformalClassifier(padded(1), max_epochs=0, random_state=0).fit(X, y).save(tmp_path / "small")
    fullconformal.load(tmp_path / "small")
    content, tensors = opened(tmp_path / "small")
    weights = padded(24)
    packer = Packer()
    packed = packer.pack(weights)

    def grown(node):
        if isinstance(node, dict) and node.get("is") == "module":
            return json.loads(json.dumps(packed).replace('"tensor": "', '"tensor": "w'))
        if isinstance(node, dict):
            return {key: grown(part) for key, part in node.items()}
        return [grown(part) for part in node] if isinstance(node, list) else node

    tensors |= {f"w{name}": value for name, value in packer.tensors.items()}
    signed(grown(content), tensors, tmp_path / "large")
    before = peak()
    with pytest.raises(StorageError, match="network, which makes"):
        fullconformal.load(tmp_path / "large")
    assert peak() - before < 100 * 1024


@pytest.mark.parametrize("network", [
    # 513³ numbers are padded for a kernel that looks at 27 of them.
    nn.Sequential(nn.Conv3d(1, 1, 1, stride=256, padding=256, padding_mode="replicate"), nn.Flatten(), nn.Linear(27, 2)),
    # Without a fast library for float64 torch lays out the 256 numbers under each place of the kernel.
    nn.Sequential(nn.Conv2d(1, 1, 16, padding=256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)).double(),
    # As `padded` makes them, where the network is a part of another.
    nn.Sequential(Backbone(padded(24), "26"), nn.Linear(1, 2)),
])  # fmt: skip
def test_what_convolutions_make_on_their_way_is_counted(network):
    shape = (1,) * (4 if isinstance(network[0], nn.Conv3d) else 3)
    with pytest.raises(StorageError, match="network, which makes"):
        check_activations(network, shape, 1, 1)
    behind = nn.Sequential(
        Backbone(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(50, 3)), "2"), nn.Linear(50, 2)
    )
    assert activations(behind, (1, 7, 7)) == [50, 50, 3, 2]
    assert check_activations(behind, (1, 7, 7), 1, 1) == 50
    assert check_activations(behind.double(), (1, 7, 7), 1, 1) == 9 * 25


def test_there_are_no_more_categories_than_points():
    """Each has a number for each class."""
    assert Categories(0, np.arange(2.0), np.arange(2)).verified(2) == 2
    with pytest.raises(StorageError, match="categories"):
        Categories(0, np.arange(10.0**5), np.arange(2)).verified(2)


def test_keys_of_one_hash_are_not_told_apart(piped, tmp_path):
    """Which of two numbers have one hash as a tuple can be computed: a megabyte of them took six seconds, sixteen half an hour."""
    content, tensors = opened(piped)
    key = {"is": "tuple", "items": [1, 2]}
    at(content, "params")["items"].append(["cv", {"is": "dict", "items": [[key, 0]]}])
    signed(content, tensors, tmp_path / "it")
    with pytest.raises(StorageError, match="names"):
        fullconformal.load(tmp_path / "it")


def test_a_prior_of_many_numbers_is_refused():
    """A Gaussian process that was not fitted predicts as many zeros as it is told to; bagging adds them up."""
    process = estimator("GaussianProcessRegressor", [("n_targets", 10**8)], [])
    with pytest.raises(StorageError, match="n_targets"):
        Unpacker({}, text=2**10).unpack(process)


def test_classes_and_points_that_each_have_a_number_of_the_other_are_counted(tmp_path):
    """A file of half a megabyte took three gigabytes: 12,000 points, 12,000 classes."""
    X, y = points()
    for conditional in (False, True):
        forest = RandomForestClassifier(1, max_depth=1)
        clf = FullConformalClassifier(forest, class_conditional=conditional, random_state=0).fit(X, y)
        fitted, labels = clf._fitted, np.arange(12_000)
        model = fitted.forest.model
        model.estimators_ = model.estimators_[:1]
        for part in (model, model.estimators_[0]):
            part.classes_, part.n_classes_ = labels.astype(np.float64), len(labels)
        packed = pack_tree(model.estimators_[0].tree_, None)
        packed["values"] = np.full((len(packed["values"]), 1, len(labels)), 1 / len(labels))
        model.estimators_[0].tree_ = unpack_tree(packed, None)
        clf.classes_ = fitted.labels = labels
        fitted.alpha, fitted.n_classes = np.linspace(0, 1, len(labels)), len(labels)
        clf.save(tmp_path / "it")
        before = peak()
        if conditional:
            with pytest.raises(StorageError, match="number of classes"):
                fullconformal.load(tmp_path / "it")
        else:
            fullconformal.load(tmp_path / "it")
        assert peak() - before < 200 * 1024


@pytest.mark.parametrize(("n", "d", "classes", "what"), [(8, 12_000, 2, "columns"), (3000, 1, 1500, "classes")])
def test_discriminant_analyses_that_few_points_do_not_bear_out_are_not_made(n, d, classes, what):
    X, y = points()
    fitted = FullConformalClassifier(LinearDiscriminantAnalysis()).fit(X, y)._fitted
    type(fitted).from_state(fitted.state())
    bag = Discriminant(np.zeros((n, d)), np.arange(n) % classes, classes, None, 0.0)
    with pytest.raises(StorageError, match=f"number of {what}"):
        type(fitted).from_state({"bag": bag})


@pytest.mark.parametrize("layer", [
    nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 3, padding=2, stride=2), nn.Conv2d(2, 3, 3, padding="same"), nn.Conv2d(2, 4, 2, dilation=2),
    nn.Conv2d(2, 3, 2, padding="valid"), nn.MaxPool2d(2), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(3, 2, 1),
    nn.AdaptiveAvgPool2d((9, None)),
    nn.Flatten(), nn.Flatten(2), nn.Flatten(1, 2), nn.Linear(7, 5), nn.ReLU(), nn.BatchNorm2d(2).eval(),
])  # fmt: skip
def test_the_sizes_that_layers_make_are_known_without_making_them(layer):
    made = layer(torch.zeros(1, 2, 7, 7)).numel()
    (size,) = activations(layer, (2, 7, 7))
    rounded = 4 if hasattr(layer, "kernel_size") else 1  # pools and strides are rounded up
    assert made <= size <= rounded * made


@pytest.mark.parametrize(("find", "value"), [("n_classes", 10**9), ("k", 10**9)])
def test_numbers_that_stand_for_sizes_are_checked(find, value, tmp_path):
    X, y = points()
    for clf in (
        FullConformalClassifier(KNeighborsClassifier(2)),
        SplitConformalClassifier(LogisticRegression(), random_state=0),
    ):
        clf.fit(X, y).save(tmp_path / "it")
        content, tensors = opened(tmp_path / "it")
        for path in list(forged.nodes(content)):
            if path[-1:] == (find,):
                forged.found(content, path[:-1])[find] = value
                signed(content, tensors, tmp_path / "it")
                with pytest.raises(StorageError):
                    fullconformal.load(tmp_path / "it")


def test_a_hessian_that_few_points_do_not_bear_out_is_not_made(tmp_path):
    """Without the span of its points, a regression of three points on 30,000 columns has a Hessian of 7 GB."""
    rng, y = np.random.default_rng(0), np.array([0, 1, 0])
    for columns, bears in ((1000, True), (30_000, False)):
        FullConformalClassifier(LogisticRegression()).fit(rng.normal(size=(3, columns)), y).save(tmp_path / "it")
        content, tensors = opened(tmp_path / "it")
        (at,) = [path for path in forged.nodes(content) if path[-1:] == ("span",)]
        forged.found(content, at[:-1])["span"] = None
        # Weights (d, K) that start the fit, as they would be without a span.
        tensors[forged.found(content, at[:-1])["start"]["tensor"]] = torch.zeros(columns + 1, 1, dtype=torch.float64)
        signed(content, tensors, tmp_path / "it")
        if bears:
            fullconformal.load(tmp_path / "it")
            continue
        before = peak()
        with pytest.raises(StorageError, match="the Hessian of 30,001 parameters"):
            fullconformal.load(tmp_path / "it")
        assert peak() - before < 200 * 1024


def test_the_folder_a_file_lies_in_is_not_searched_for_modules(piped, monkeypatch, tmp_path):
    """Unless a factory is asked for: what is imported later may have any name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    CliRunner().invoke(main, ["inspect", str(piped)])
    assert str(tmp_path) not in sys.path


def test_notes_of_any_kind_are_not_trusted(piped, tmp_path):
    content, tensors = opened(piped)
    for notes in ([], {"table": [1], "source": 7}, {"table": {"numbers": 3}, "source": "\x1b[2J"}, "x"):
        signed(content | {"notes": notes}, tensors, tmp_path / "it")
        for words in (["inspect", str(tmp_path / "it")], ["predict", str(tmp_path / "it"), str(tmp_path / "none.csv")]):
            done = CliRunner().invoke(main, words)
            assert done.exit_code in (0, 2) and "\x1b" not in done.output, done.exception


def test_a_tensor_of_no_number_has_no_trillion_rows(piped, tmp_path):
    content, tensors = opened(piped)
    signed(content, tensors | {"none": torch.zeros(2**40, 0)}, tmp_path / "it")
    with pytest.raises(StorageError, match="impossible place"):
        fullconformal.load(tmp_path / "it")


@pytest.mark.parametrize(("options", "changes"), [
    ({}, {"_n_features_outs": [3, 1]}),
    ({}, {"_n_features_outs": [3, 9]}),
    ({}, {"categories_": [np.arange(3.0)[::-1], np.arange(3.0)]}),
    ({}, {"categories_": [np.array([0.0, np.nan, 2.0]), np.arange(3.0)]}),
    ({}, {"_infrequent_enabled": True, "_infrequent_indices": [np.array([10**6]), None], "_default_to_infrequent_mappings": [None, None]}),
    ({"max_categories": 2}, {"_default_to_infrequent_mappings": [np.array([10**6, 0, 1]), np.array([0, 1, 1])]}),
    ({"max_categories": 2}, {"_default_to_infrequent_mappings": [np.array([-5, 0, 1]), np.array([0, 1, 1])]}),
    ({"max_categories": 2}, {"_default_to_infrequent_mappings": [np.array([0, 1, 1])]}),
    ({"drop": "first"}, {"_drop_idx_after_grouping": np.array([-1, 0], dtype=object)}),
    ({"drop": "first"}, {"_drop_idx_after_grouping": np.array([0], dtype=object)}),
    ({"drop": "if_binary"}, {"_drop_idx_after_grouping": np.array([7, None], dtype=object), "_n_features_outs": [2, 3]}),
])  # fmt: skip
def test_encoders_have_a_column_for_every_code(options, changes):
    """Compiled code writes ones at the columns that an encoder names, without looking whether they are there."""
    X = np.arange(18.0).reshape(9, 2) % 3
    encoder, packer = OneHotEncoder(sparse_output=False, **options).fit(X), Packer()
    again = Unpacker(packer.tensors).unpack(packer.pack(encoder))
    assert np.array_equal(again.transform(X), encoder.transform(X))
    vars(encoder).update(changes)
    packer = Packer()
    packed = packer.pack(encoder)
    with pytest.raises(StorageError, match="other columns than categories"):
        Unpacker(packer.tensors).unpack(packed)


def test_trees_are_as_deep_as_their_nodes_say_and_have_their_labels():
    """scikit-learn writes the paths of objects into memory as long as a tree is said to be deep."""
    X, y = points()
    tree, packer = DecisionTreeClassifier().fit(X, y), Packer()
    packed = packer.pack(tree)
    again = Unpacker(packer.tensors).unpack(packed)
    assert again.tree_.max_depth == tree.get_depth() > 2
    assert (again.decision_path(X) != tree.decision_path(X)).nnz == 0
    nodes = dict(dict(packed["fitted"]["items"])["tree_"]["nodes"]["items"])
    children = packer.tensors[nodes["left_child"]["tensor"]]
    kept = children.clone()
    children[0] = packer.tensors[nodes["right_child"]["tensor"]][0]
    with pytest.raises(StorageError, match="several parents"):
        Unpacker(packer.tensors).unpack(packed)
    children[:] = kept
    tree.n_classes_ = 10**9
    with pytest.raises(StorageError, match="other classes than labels"):
        Unpacker(packer.tensors).unpack(packer.pack(tree))


def test_no_model_is_trained_by_a_load(tmp_path):
    """What a file says may take for ever to train; neighbours are looked up only by neighbours' classes."""
    X, y = points()
    forever = estimator("MLPClassifier", [("max_iter", 10**9), ("tol", 0.0), ("n_iter_no_change", 10**9)], [])
    saved = {
        "model": (FullConformalClassifier(KNeighborsClassifier(2)).fit(X, y), forever),
        "regressor": (FullConformalRegressor(KNeighborsRegressor(2)).fit(X, X.sum(1)), forever),
        "lasso": (FullConformalRegressor(Lasso(0.1)).fit(X, X.sum(1)),
                  estimator("Lasso", [("max_iter", 10**12), ("tol", 0.0)], [])),
    }  # fmt: skip
    for clf, other in saved.values():
        clf.save(tmp_path / "it")
        content, tensors = opened(tmp_path / "it")
        at(content, "fitted", "_fitted")["model"] = other
        signed(content, tensors, tmp_path / "it")
        with pytest.raises(StorageError):
            fullconformal.load(tmp_path / "it")


def test_matrices_that_few_points_do_not_bear_out_are_not_made(tmp_path):
    """A lasso takes the products of all columns; transformers in the bag are applied to all points."""
    rng = np.random.default_rng(0)
    FullConformalRegressor(Lasso(0.1)).fit(rng.normal(size=(5, 3)), rng.normal(size=5)).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    text = json.dumps(content).replace('["n_features_in_", 3]', '["n_features_in_", 30000]')
    wide = {
        name: value.new_zeros([30_000 if size == 3 else size for size in value.shape])
        for name, value in tensors.items()
    }
    signed(text, wide, tmp_path / "it")
    with pytest.raises(StorageError, match="number of columns"):
        fullconformal.load(tmp_path / "it")
    X, y = points(300)
    fitted = FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y)._fitted
    type(fitted).from_state(fitted.state())
    many = make_pipeline(PolynomialFeatures(70)).fit(X[:1])
    with pytest.raises(StorageError, match="transformers"):
        type(fitted).from_state(fitted.state() | {"transformers": many})


def test_who_works_and_with_how_much_memory_is_not_the_files_to_say(tmp_path):
    X, y = points()
    FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    text = json.dumps(content)
    signed(text.replace('["memory", 4294967296]', '["memory", 18446744073709551615]'), tensors, tmp_path / "it")
    fitted = fullconformal.load(tmp_path / "it")._fitted
    assert fitted.config.memory == fitted.base.memory == LIMITS.budget
    signed(text.replace('["max_epochs", 200]', '["max_epochs", 200], ["work", "planted"]'), tensors, tmp_path / "it")
    with pytest.raises(StorageError, match="options"):
        fullconformal.load(tmp_path / "it")


# Paths ----------------------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, error in ((tmp_path / "pipe", StorageError), ("/dev/zero", StorageError), (tmp_path, IsADirectoryError),
                        (tmp_path / "none", FileNotFoundError), ("a\0b", StorageError)):  # fmt: skip
        with pytest.raises(error, match=Path(str(path).split("\0")[0]).name):
            fullconformal.load(path)


def fitted():
    X, y = points()
    return FullConformalClassifier(method="influence").fit(X, y)


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "old")
    clf = fitted()
    clf.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "elsewhere" / "old").is_symlink()
    for path in (tmp_path / "link", tmp_path / "elsewhere" / "old"):
        assert fullconformal.load(path).n_samples_fit_ == 40
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(OSError, match="round"):
        clf.save(tmp_path / "round")
    with pytest.raises(OSError, match="names no file"):
        clf.save("a\0b")


def test_devices_and_pipes_are_written_to_and_never_replaced(tmp_path):
    before = os.stat("/dev/null")
    fitted().save("/dev/null")
    assert os.stat("/dev/null").st_rdev == before.st_rdev and os.stat("/dev/null").st_ino == before.st_ino
    with pytest.raises(OSError) as full:
        fitted().save("/dev/full")
    assert full.value.errno == errno.ENOSPC
    os.mkfifo(tmp_path / "pipe")
    heard = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with finished_or_nothing(tmp_path / "pipe") as part:
        part.write_text("through")
    reader.join(10)
    assert heard == [b"through"] and (tmp_path / "pipe").is_fifo()


def test_a_load_during_a_save_finds_one_or_the_other(tmp_path):
    """The file was opened twice, and another may lie there the second time."""
    one, other = fitted(), FullConformalClassifier(mlp(3, (40,), 2), max_epochs=1).fit(*points())
    one.save(tmp_path / "it")
    stop, failed = threading.Event(), []

    def loads():
        while not stop.is_set():
            try:
                fullconformal.load(tmp_path / "it")
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=loads) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        other.save(tmp_path / "it")
        one.save(tmp_path / "it")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_disk_that_is_full_is_said_to_be_and_keeps_nothing(tmp_path):
    """A limit on the size of files stands for the disk."""
    code = (
        "import resource, sys; from fullconformal.cli import main; import sklearn.linear_model, torch, fullconformal.estimators.full\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); main(sys.argv[1:])"
    )
    X, y = points()
    lines = ["x,y", *(f"{x:.3f},{label}" for x, label in zip(X[:, 0], y, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    words = ["fit", str(tmp_path / "table.csv"), "--target", "y", "-o", str(tmp_path / "it")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "could not be written" in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )
    assert os.listdir(tmp_path) == ["table.csv"]


def test_a_folder_that_cannot_be_written_is_found_before_the_fit(tmp_path):
    X, y = points()
    (tmp_path / "table.csv").write_text(
        "\n".join(["x,y", *(f"{x},{label}" for x, label in zip(X[:, 0], y, strict=True))])
    )
    words = ["fit", str(tmp_path / "table.csv"), "--target", "y", "-o", "/proc/it"]
    done = CliRunner().invoke(main, words)
    # Nothing was said of the table.
    assert done.exit_code == 2 and done.output.startswith("error: no file can be written in /proc")
    with pytest.raises(OSError, match="no file can be written in /proc"):
        fitted().save("/proc/it")


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    code = (
        "import os, sys; from fullconformal.runtime.files import finished_or_nothing\n"
        "with finished_or_nothing(sys.argv[1]) as part:\n"
        "    part.write_text('half'); print('ready', flush=True); sys.stdin.read()"
    )
    start = [sys.executable, "-c", code, str(tmp_path / "it")]
    first, second = (subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    for process in (first, second):
        assert process.stdout.readline() == b"ready\n"
    assert len(os.listdir(tmp_path)) == 2
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with finished_or_nothing(tmp_path / "it") as part:
        part.write_text("whole")
    # What the other process is still writing is left alone.
    assert len(os.listdir(tmp_path)) == 2 and (tmp_path / "it").read_text() == "whole"
    second.communicate(b"")
    assert os.listdir(tmp_path) == ["it"] and (tmp_path / "it").read_text() == "half"


# Checkpoints ----------------------------------------------------------------------------------------------------------


def network_fit(folder, **options):
    torch.manual_seed(0)
    X, y = points(64)
    options = {"max_epochs": 2, "random_state": 0, "method": "influence", "checkpoint": folder, **options}
    return FullConformalClassifier(mlp(3, (4,), 2), **options).fit(X, y), X[:33]


def test_parts_of_another_fit_with_a_right_checksum_are_not_taken(tmp_path):
    clf, X = network_fit(tmp_path / "one")
    p = clf.predict_p(X)
    network_fit(tmp_path / "two", l2=0.5)[0].predict_p(X)
    kinds = {path.name.rsplit(".", 2)[0] for path in (tmp_path / "one").glob("*.npy")}
    assert {"theta"} < kinds
    for name in kinds:
        (mine,), (theirs,) = (list((tmp_path / folder).glob(f"{name}.*.npy")) for folder in ("one", "two"))
        mine.unlink()
        (tmp_path / "one" / theirs.name).write_bytes(theirs.read_bytes())
    again, _ = network_fit(tmp_path / "one")
    assert np.array_equal(again.predict_p(X), p)


def rewritten(path, change):
    """Change a part's content, and give it a name whose digest is right."""
    from fullconformal.runtime.files import Parts

    name = path.name.rsplit(".", 2)[0]
    header = json.loads((path.parent / "header.json").read_text())
    content = change(np.load(path))
    path.unlink()
    Parts(path.parent, print, header["fingerprint"]).write(name, content)


@pytest.mark.parametrize("change", [
    lambda part: part[..., :-1], lambda part: part[None], lambda part: part * np.nan, lambda part: part.astype(np.int64),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["theta", "curvature-", "influence-", "counts-"])
def test_parts_of_another_shape_or_that_are_no_numbers_are_computed_again(kind, change, tmp_path):
    clf, X = network_fit(tmp_path)
    p = clf.predict_p(X)
    for path in tmp_path.rglob(f"{kind}*.npy"):
        if "shards" not in path.name:
            rewritten(path, change)
    again, _ = network_fit(tmp_path)
    assert np.array_equal(again.predict_p(X), p)


def test_pipes_and_large_files_among_the_parts_are_not_read(tmp_path):
    clf, X = network_fit(tmp_path)
    p = clf.predict_p(X)
    (theta,) = tmp_path.glob("theta.*.npy")
    name = theta.name
    theta.unlink()
    os.mkfifo(theta)
    again, _ = network_fit(tmp_path)
    assert np.array_equal(again.predict_p(X), p) and (tmp_path / name).is_file()
    os.truncate(theta, 2**40)
    assert np.array_equal(network_fit(tmp_path)[0].predict_p(X), p)
    header = tmp_path / "header.json"
    for fault in (
        lambda: header.write_text("[" * 10**5),
        lambda: os.truncate(header, 2**40),
        lambda: os.mkfifo(header),
    ):
        header.unlink(missing_ok=True)
        header.touch()
        if fault.__code__.co_names[-1] == "mkfifo":
            header.unlink()
        fault()
        with pytest.raises(ValueError, match="without a readable header"):
            network_fit(tmp_path)


def test_two_processes_with_different_workers_share_a_folder(tmp_path):
    """Parts name the points and objects they count, and whoever comes second takes the first one's header."""
    from fullconformal.runtime.files import Parts

    clf, X = network_fit(None)
    p = clf.predict_p(X)
    folder = tmp_path / "parts"
    shared, _ = network_fit(folder)
    shared.predict_p(X)
    (inner,) = [path.parent for path in folder.rglob("header.json") if path.parent != folder]
    for name in inner.glob("*.npy"):
        _, start, stop, first, last = name.name.split(".")[0].split("-")
        assert np.load(name).shape == (2, int(last) - int(first), 2) and 0 <= int(start) < int(stop) <= 64
    header = json.loads((inner / "header.json").read_text())
    _, found = Parts(inner, print).open({**header, "blocks": 99, "shards": 99})
    assert found == header
    # One that cut otherwise and wrote its header too late has left parts of its own cut.
    (tmp_path / "other").mkdir()
    (inner / "header.json").rename(tmp_path / "other" / "kept")
    (inner / "header.json").write_text(json.dumps({**header, "blocks": 1, "shards": 2}))
    assert np.abs(network_fit(folder)[0].predict_p(X) - p).max() < 1e-9


# Strings --------------------------------------------------------------------------------------------------------------

BAD = ["=cmd|' /C calc'!A0", "+1+1", "@SUM(1)", "\x1b[31mred\x1b]0;title\x07", "\u202eevil\u2066", "-2+3"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A table whose labels mean harm, and a predictor of it."""
    import pandas as pd

    folder = tmp_path_factory.mktemp("labels")
    X, _ = points(36, 2)
    frame = pd.DataFrame({"=1+1": X[:, 0], "\x1b[2Jx": X[:, 1], "y": BAD * 6})
    frame.to_csv(folder / "table.csv", index=False)
    done = CliRunner().invoke(main, ["fit", str(folder / "table.csv"), "--target", "y", "-o", str(folder / "it")])
    assert done.exit_code == 0, done.output
    return folder, done.output


def test_no_label_or_name_moves_the_terminal(labelled):
    folder, said = labelled
    it, table = str(folder / "it"), str(folder / "table.csv")
    for words in (["inspect", it], ["inspect", it, "--json"], ["predict", it, table, "-o", str(folder / "sets.csv")],
                  ["report", it, table, "-o", str(folder / "page.html")], ["fit", table, "--target", "\x1b[2J", "-o", it]):  # fmt: skip
        said += CliRunner().invoke(main, words).output
    assert "\\u001b[31m" in said and "\\u202e" in said
    assert not any(mark in said for mark in "\x1b\x07\u202e\u2066")
    assert json.loads(CliRunner().invoke(main, ["inspect", it, "--json"]).stdout)["classes"] == sorted(BAD)
    assert visible("é\u200d\n\t") == "é\u200d\n\t"
    # Errors quote what they were given, on terminals too.
    assert one_line(ValueError("unknown \x1b[2J\u202e é")) == "unknown \\x1b[2J\\u202e é"


def test_no_cell_is_a_formula_and_parquet_has_the_labels_as_they_are(labelled):
    import pandas as pd

    folder, _ = labelled
    words = [
        "predict",
        str(folder / "it"),
        str(folder / "table.csv"),
        "--keep",
        "=1+1",
        "--keep",
        "y",
        "--confidence",
        "0.99",
    ]
    done = CliRunner().invoke(main, [*words, "-o", str(folder / "sets.csv")])
    assert done.exit_code == 0 and "was given an apostrophe" in done.stderr
    frame = pd.read_csv(folder / "sets.csv", dtype=str, keep_default_na=False)
    for text in [*frame.columns, *frame[["y", "prediction", "set_0.99"]].to_numpy().ravel()]:
        assert not text or text[0] not in "=+-@\t\r"
    assert frame["y"].str.removeprefix("'").tolist() == BAD * 6
    # Spreadsheets look past spaces and line breaks, and some take the wide signs of Chinese and Japanese type.
    odd = ["=\n1", "\n=1", " =1", "\t=1", "＝1", "＠a"]
    assert for_spreadsheets(pd.DataFrame({"a": [*odd, "a=1"]}), print)["a"].tolist() == [
        *(f"'{one}" for one in odd),
        "a=1",
    ]
    done = CliRunner().invoke(main, [*words, "-o", str(folder / "sets.parquet")])
    assert done.exit_code == 0 and pd.read_parquet(folder / "sets.parquet")["y"].tolist() == BAD * 6
    # Numbers stay numbers.
    assert all(float(value) <= 1 for value in frame.filter(regex="^p_").to_numpy().ravel())


def test_the_page_holds_hostile_strings_as_text_and_stays_small(labelled):
    folder, _ = labelled
    long = "</script><script>alert(1)</script>" + "x" * 2**20
    y = np.array([long, "<img src=x onerror=alert(2)>"])[np.arange(40) % 2]
    clf = FullConformalClassifier(method="influence").fit(points()[0], y)
    page = clf.report(
        points()[0][:10], y[:10], folder / "long.html", title=long, feature_names=[long, "\u202e", "=1"]
    ).read_text()
    assert "<script>alert" not in page and "<img src=x" not in page


# Refused beforehand -----------------------------------------------------------------------------------------------------


def test_what_was_never_fitted_says_so_after_a_fit_that_failed():
    X, _ = points()
    for clf in (FullConformalClassifier(), SplitConformalClassifier()):
        with pytest.raises(ValueError):
            clf.fit(X, np.full(40, np.nan))
        with pytest.raises(NotFittedError):
            clf.predict_p(X)


def test_more_classes_than_the_memory_holds_are_refused_before_training():
    """10,000 classes took six minutes of training, and were refused then."""
    X, y = np.zeros((20_000, 20)), np.arange(20_000) % 10_000
    began = time.process_time()
    for options in (
        {},
        {"method": "influence"},
        {"method": "exact"},
        {"estimator": mlp(20, (8,), 10_000), "method": "influence"},
    ):
        with pytest.raises(MemoryError, match="memory_budget"):
            FullConformalClassifier(**options).fit(X, y)
    assert time.process_time() - began < 60
