"""Files that are whole by their checksums, and ask for memory, time or memory that is not theirs by a single part: all are refused."""

import copy
import time
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from forged import assembled, estimator, header_and_data, opened, signed
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import VarianceThreshold
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge, RidgeCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    StandardScaler,
)
from torch import nn

from fullconformal import (
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    FullConformalRegressor,
    JackknifePlusClassifier,
    JackknifePlusRegressor,
    SplitConformalClassifier,
    SplitConformalRegressor,
    load,
)
from fullconformal.cli.schema import Schema, TableError
from fullconformal.conformity import LogLoss
from fullconformal.estimators.held_out import AGGREGATIONS, Calibrated, HeldOut
from fullconformal.methods.folds import FittedFolds
from fullconformal.methods.outputs import LogProba
from fullconformal.methods.parts import FoldModels
from fullconformal.methods.ridge import lowest
from fullconformal.models import KernelDensityClassifier, mlp
from fullconformal.models.gaussian import Densities
from fullconformal.runtime.files import Parts
from fullconformal.storage import LIMITS, StorageError

LARGE = 10**9


def points(n=40, d=3):
    rng, y = np.random.default_rng(0), np.array(["a", "b"])[np.arange(n) % 2]
    return rng.normal(size=(n, d)) + (y == "b")[:, None], y


def nodes(node, test):
    """All JSON objects below a node that pass a test."""
    if isinstance(node, dict):
        if test(node):
            yield node
        node = list(node.values())
    for part in node if isinstance(node, list) else ():
        yield from nodes(part, test)


def of_class(name):
    return lambda node: node.get("is") == "scikit-learn" and node.get("class") == name


def put(node, part, name, value):
    """Give a parameter, or what was fitted, of an estimator another value."""
    pairs = node[part]["items"]
    pairs[:] = [pair for pair in pairs if pair[0] != name] + [[name, value]]


def array(name, axes=1):
    return {"is": "array", "tensor": name, "order": list(range(axes))}


def classifier(model):
    X, y = points()
    return SplitConformalClassifier(model, random_state=0, confidence_level=0.7).fit(X, y)


def behind(model):
    """A regressor behind a transformer that is fitted with each object."""
    X, _ = points()
    return FullConformalRegressor(make_pipeline(PCA(2), model)).fit(X, X.sum(1))


def half_a_code(content, tensors):
    tensors["half"] = torch.tensor([1.5] * 3, dtype=torch.float64)
    for node in nodes(content, of_class("OneHotEncoder")):
        put(node, "fitted", "_drop_idx_after_grouping", array("half"))


def no_trees(content, tensors):
    for node in nodes(content, lambda node: node.get("is") == "dict" and "sizes" in dict(node["items"])):
        fitted = dict(node["items"])
        for pair in fitted["nodes"]["items"]:
            tensors[f"none {pair[0]}"] = tensors[pair[1]["tensor"]][:0].clone()
            pair[1]["tensor"] = f"none {pair[0]}"
        tensors["none"] = torch.zeros(0, dtype=torch.int64)
        fitted["sizes"]["tensor"] = "none"


def outputs(content, tensors):
    for node in nodes(content, of_class("RandomForestRegressor")):
        put(node, "fitted", "n_outputs_", LARGE)


def trained(method):
    def forge(content, tensors):
        (node,) = nodes(content, lambda node: "behind" in node)
        node["behind"] = method

    return forge


def uneven_table(content, tensors):
    tensors["long"], tensors["none"] = torch.zeros(10**5, dtype=torch.uint8), torch.zeros(0, dtype=torch.float64)
    names = [f"c{k}" for k in range(900)]
    table = {"is": "frame", "names": names, "columns": [array("long")] + [array("none")] * 899}
    content["predictor"]["params"]["items"].append(["cv", table])


def names_of_one_hash(content, tensors):
    tensors["one"] = torch.zeros(1, dtype=torch.uint8)
    names = [{"is": "tuple", "items": [k, -1]} for k in range(50)]
    content["predictor"]["params"]["items"].append(
        ["cv", {"is": "frame", "names": names, "columns": [array("one")] * 50}]
    )


def parameter(kind, name, value, tensor=None):
    def forge(content, tensors):
        if tensor is not None:
            tensors["big"] = tensor
        found = list(nodes(content, of_class(kind)))
        assert found
        for node in found:
            put(node, "params", name, value)

    return forge


def kernel(**params):
    def forge(content, tensors):
        tensors["big"] = torch.zeros((100, 1, 1), dtype=torch.uint8)
        for node in nodes(content, lambda node: node.get("is") == "kernel" and node.get("class") == "DotProduct"):
            node["params"]["items"] = list(params.items())

    return forge


def many_kernels(content, tensors):
    for node in list(nodes(content, lambda node: node.get("is") == "kernel")):
        one = copy.deepcopy(node)
        for _ in range(40):
            one = {
                "is": "kernel",
                "class": "Sum",
                "params": {"is": "dict", "items": [["k1", copy.deepcopy(node)], ["k2", one]]},
            }
        node.clear()
        node.update(one)


def list_of(kind, name, axes=3):
    def forge(content, tensors):
        tensors["big"] = torch.zeros((50,) + (1,) * (axes - 1), dtype=torch.float64)
        found = list(nodes(content, lambda node: node.get("is") == kind))
        assert found
        for node in found:
            node[name] = array("big", axes)

    return forge


def wide_union(content, tensors):
    tensors["wide"] = torch.zeros((LIMITS.columns(0) // 2, 3), dtype=torch.uint8)
    for node in nodes(content, of_class("PCA")):
        put(node, "fitted", "components_", array("wide", 2))


def listed_columns(content, tensors):
    tensors["many"] = torch.zeros(LIMITS.columns(0), dtype=torch.int8)
    for node in nodes(content, of_class("ColumnTransformer")):
        for pair in node["fitted"]["items"]:
            if pair[0] == "transformers_":
                for step in pair[1]:
                    step["items"][2] = array("many")


def long_shape(content, tensors):
    words = {"is": "objects", "dtype": "object", "shape": [2**63 - 1] * 50_000, "items": []}
    content["predictor"]["params"]["items"].append(["cv", words])


def escapes(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "FittedInfluence")
    node["curvature"] = "\x1b[2Jggn"


def distances(content, tensors):
    tensors["one"] = torch.ones((1, 1), dtype=torch.float64)
    for node in nodes(content, of_class("KNeighborsClassifier")):
        for name, value in (
            ("algorithm", "brute"),
            ("metric", "mahalanobis"),
            ("metric_params", {"is": "dict", "items": [["VI", array("one", 2)]]}),
        ):
            put(node, "params", name, value)


def rotations(content, tensors):
    tensors["r"], tensors["s"] = torch.zeros((3, 1), dtype=torch.float64), torch.ones(500, dtype=torch.float64)
    for node in nodes(content, of_class("QuadraticDiscriminantAnalysis")):
        if node["fitted"]["items"]:
            put(node, "fitted", "rotations_", [array("r", 2)] * 2)
            put(node, "fitted", "scalings_", [array("s")] * 2)


def wide_between(content, tensors):
    wide = LIMITS.columns(0) - 1
    tensors["w"], tensors["back"] = torch.zeros((wide, 3)).to(torch.uint8), torch.zeros((2, wide)).to(torch.uint8)
    tensors["mean"] = torch.zeros(wide, dtype=torch.uint8)
    first, second = [node for node in nodes(content, of_class("PCA")) if node["fitted"]["items"]][:2]
    put(first, "fitted", "components_", array("w", 2))
    for name, value in (("components_", array("back", 2)), ("mean_", array("mean")), ("n_features_in_", wide)):
        put(second, "fitted", name, value)


def many_rows(content, tensors):
    tensors["rows"] = torch.zeros((5000, 3), dtype=torch.uint8)
    dict(content["predictor"]["fitted"]["items"])["_sample"].update(array("rows", 2))
    for node in nodes(content, of_class("PCA")):
        put(node, "params", "whiten", True)


def filled_with_words(content, tensors):
    for node in nodes(content, of_class("SimpleImputer")):
        put(node, "fitted", "_fill_dtype", {"is": "dtype", "name": "<U60000"})


def wide_slice(content, tensors):
    for node in nodes(content, of_class("ColumnTransformer")):
        put(node, "fitted", "n_features_in_", 2**22)
        for pair in node["fitted"]["items"]:
            if pair[0] == "transformers_":
                pair[1][0]["items"][2] = {"is": "slice", "items": [0, 2**22, None]}


def kernel_of_the_target(content, tensors):
    kernel = {"is": "kernel", "class": "WhiteKernel", "params": {"is": "dict", "items": [["noise_level", 1.0]]}}
    dict(content["predictor"]["fitted"]["items"])["_target"]["func"] = kernel


def regressor(model):
    X, _ = points()
    return FullConformalRegressor(model).fit(X, X.sum(1))


def rows_that_overflow(content, tensors):
    for node in nodes(content, of_class("KNeighborsClassifier")):
        if node["fitted"]["items"]:
            n, d = tensors[dict(node["fitted"]["items"])["X"]["tensor"]].shape
            ends = np.arange(n + 1) * d
            ends[1], ends[2], ends[3] = 2**62, -(2**63), -(2**62)
            tensors["p"], tensors["i"] = torch.from_numpy(ends), torch.arange(n * d) % d
            tensors["v"] = torch.ones(n * d, dtype=torch.float64)
            parts = {"data": array("v"), "indices": array("i"), "indptr": array("p"), "n_columns": d}
            put(node, "fitted", "X", {"is": "csr_matrix", **parts})


def steps_to_fit(content, tensors):
    step = {"is": "tuple", "items": ["a", estimator("PolynomialFeatures", [("degree", 200)]), [0, 1]]}
    for node in nodes(content, of_class("ColumnTransformer")):
        put(node, "params", "transformers", [step])


def columns_to_fit(content, tensors):
    tensors["many"] = torch.zeros(60_000, dtype=torch.uint8)
    for node in nodes(content, of_class("ColumnTransformer")):
        put(
            node,
            "params",
            "transformers",
            [{"is": "tuple", "items": ["a", estimator("StandardScaler"), array("many")]}],
        )


def remainder_to_fit(content, tensors):
    for node in nodes(content, of_class("ColumnTransformer")):
        put(node, "params", "remainder", estimator("PolynomialFeatures", [("degree", 200)]))


def numbered_columns(content, tensors):
    tensors["many"] = torch.zeros(60_000, dtype=torch.uint8)
    for node in nodes(content, of_class("ColumnTransformer")):
        if node["fitted"]["items"]:
            many = {"is": "dict", "items": [[name, array("many")] for name in "abcd"]}
            put(node, "fitted", "_transformer_to_input_indices", many)


def side_by_side(*step):
    """A union of a few transformers, each with many numbers of one byte."""

    def forge(content, tensors):
        tensors["many"], tensors["two"] = (torch.zeros(shape, dtype=torch.uint8) for shape in (60_000, (1, 60_000)))
        for node in nodes(content, of_class("FeatureUnion")):
            steps = [{"is": "tuple", "items": [f"s{k}", estimator(*step)]} for k in range(5)]
            put(node, "params", "transformer_list", steps)

    return forge


def categories_to_fit(content, tensors):
    tensors["many"] = torch.arange(30_000, dtype=torch.int16)
    for node in nodes(content, of_class("OneHotEncoder")):
        put(node, "params", "categories", [array("many")] * 3)


def scalars_of_arrays(content, tensors):
    tensors["big"] = torch.zeros(10**5, dtype=torch.uint8)
    many = [{"is": "scalar", "dtype": "float64", "value": array("big")}] * 50
    content["predictor"]["params"]["items"].append(["cv", many])


def model_behind(forge_model):
    def forge(content, tensors):
        (node,) = nodes(content, lambda node: "behind" in node)
        forge_model(node["behind"])

    return forge


def swapped_rows(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "DenseFactor")
    size = len(tensors[node["matrix"]["tensor"]])
    tensors["pivots"] = torch.full((size,), 10**6, dtype=torch.int32)
    node["pivots"] = {"is": "tensor", "tensor": "pivots", "order": [0]}


def no_numbers(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "LayerBag")
    tensors["none"] = torch.zeros(len(tensors[node["w"]["tensor"]]), 0)
    node["w"] = {"is": "tensor", "tensor": "none", "order": [0, 1]}


def pool_of_nothing(content, tensors):
    for node in nodes(content, lambda node: ["layer", "MaxPool2d"] in node.get("items", [])):
        pairs = dict(node["items"])["arguments"]["items"]
        pairs[:] = [[name, 3 if name == "dilation" else value] for name, value in pairs]


def format_of_names(content, tensors):
    for node in nodes(content, of_class("ColumnTransformer")):
        put(node, "params", "verbose_feature_names_out", "{feature_name:>99}")


def long_name(content, tensors):
    tensors["many"] = torch.arange(20_000, dtype=torch.int16)
    name = {"is": "objects", "dtype": "object", "shape": [3], "items": ["n" * 5000, "b", "c"]}
    for node in nodes(content, of_class("OneHotEncoder")):
        if node["fitted"]["items"]:
            fitted = dict(node["fitted"]["items"])
            put(node, "fitted", "feature_names_in_", name)
            put(node, "fitted", "categories_", [array("many"), *fitted["categories_"][1:]])
            put(node, "fitted", "_n_features_outs", [20_000, *fitted["_n_features_outs"][1:]])


def names_of_names(content, tensors):
    """Each union and the product behind it make names that are twice as long."""
    for node in nodes(content, of_class("Pipeline")):
        steps = dict(node["params"]["items"])["steps"]
        if any(step["items"][1]["class"] == "PolynomialFeatures" for step in steps):
            first, *rest = steps
            many = [
                {"is": "tuple", "items": [f"s{k}", copy.deepcopy(step["items"][1])]} for k, step in enumerate(rest * 30)
            ]
            steps[:] = [first, *many]


def long_column(content, tensors):
    tensors["one"] = torch.zeros(1, dtype=torch.uint8)
    table = {"is": "frame", "names": ["n" * 2000], "columns": [array("one")]}
    content["predictor"]["params"]["items"].append(["cv", table])


def small_points(content, tensors):
    """Of which a tree is made in float64, as often as they are named."""
    tensors["X"] = torch.arange(300_000).reshape(-1, 3).to(torch.uint8)
    tensors["y"] = (torch.arange(100_000) % 2).to(torch.uint8)
    for node in nodes(content, of_class("KNeighborsClassifier")):
        put(node, "params", "leaf_size", 1)
        if node["fitted"]["items"]:
            node["fitted"]["items"] = [["X", array("X", 2)], ["y", array("y")]]


def small_values(content, tensors):
    for k, node in enumerate(nodes(content, lambda node: node.get("is") == "tree")):
        tensors[f"small {k}"] = tensors[node["values"]["tensor"]].to(torch.uint8)
        node["values"]["tensor"] = f"small {k}"


def small_indices(content, tensors):
    for node in nodes(content, of_class("KNeighborsClassifier")):
        if node["fitted"]["items"]:
            n, d = tensors[dict(node["fitted"]["items"])["X"]["tensor"]].shape
            tensors["p"], tensors["i"] = torch.arange(n + 1), torch.zeros(n, dtype=torch.int8)
            tensors["v"] = torch.ones(n, dtype=torch.float64)
            parts = {"data": array("v"), "indices": array("i"), "indptr": array("p"), "n_columns": d}
            put(node, "fitted", "X", {"is": "csr_matrix", **parts})


def long_label(content, tensors):
    labels = dict(content["predictor"]["fitted"]["items"])["classes_"]
    labels["items"][1] = "b" * (LIMITS.word + 1)


def many_fits(content, tensors):
    fitted = dict(content["predictor"]["fitted"]["items"])["_fitted"]
    content["predictor"]["params"]["items"].append(["method", {"is": "Exact", "model": [fitted] * 2}])


def told_cost(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "FittedInfluence")
    node["estimates"] = {"is": "tuple", "items": ["\x1b[2J"]}


def told_reason(content, tensors):
    pairs = content["predictor"]["fitted"]["items"]
    pairs[:] = [[name, "\x1b[2J" if name == "method_reason_" else value] for name, value in pairs]


def named_layer(content, tensors):
    """Of the network that is only printed."""
    network = dict(content["predictor"]["params"]["items"])["estimator"]
    for pairs in (
        network["state"]["items"],
        *(node["items"] for node in nodes(network["layers"], lambda node: "items" in node)),
    ):
        for pair in pairs:
            if pair[0] == "inner":
                pair[1][0][0] = "\x1b[2J"
            pair[0] = pair[0].replace("0.", "\x1b[2J.")
    network["training"] = []


def combined(content, tensors):
    content["predictor"]["fitted"]["items"].append(["aggregation", "median"])


def two_models(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "HeldOut")
    node["parts"] *= 2


def many_models(content, tensors, number=1000, n_classes=7000):
    """Of many classes, and each of next to no bytes."""
    fitted = dict(content["predictor"]["fitted"]["items"])
    tensors["classes"], tensors["present"] = torch.arange(n_classes, dtype=torch.int32), torch.tensor([0, 1])
    model = {"is": "LogProba", "model": None, "present": array("present"), "n_classes": n_classes}
    fitted["classes_"].clear()
    fitted["classes_"].update(array("classes"))
    if "_held_out" in fitted:
        held = fitted["_held_out"]
        held["n_classes"], held["parts"] = n_classes, [held["parts"][0] | {"model": model}] * number
    else:
        held = fitted["_fitted"]
        held["n_classes"] = n_classes
        held["trained"] |= {"folds": number, "models": [model] * number}


def other_rule(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "CalibratedBands")
    node["rule"] = "plus"


def told_sizes(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") in ("HeldOut", "LeaveOneOut"))
    tensors["sizes"] = torch.tensor([LARGE])
    node["sizes"] = array("sizes")


def for_each_class(content, tensors):
    """Says so, and compares with all points."""
    pairs = content["predictor"]["params"]["items"]
    pairs[:] = [[name, True if name == "class_conditional" else value] for name, value in pairs]
    dict(content["predictor"]["fitted"]["items"])["_scored_by"]["items"][4] = True


def no_order(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "Recalibration")
    tensors["back"] = tensors[node["ordered"][0]["tensor"]].flip(0).clone()
    node["ordered"] = [array("back")]


def to_refit(name, *params):
    """The model that an audit fits again."""

    def forge(content, tensors):
        pairs = content["predictor"]["params"]["items"]
        pairs[:] = [[key, estimator(name, params) if key == "estimator" else value] for key, value in pairs]

    return forge


def models_of_no_point(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "PointBands")
    node["models"] *= 100


def label_to_repeat(content, tensors):
    dict(content["predictor"]["fitted"]["items"])["classes_"]["items"][1] = "b" * LIMITS.word


def category_to_repeat(content, tensors):
    (node,) = nodes(content, lambda node: node.get("is") == "Categories")
    node["known"]["items"][1] = "v" * LIMITS.word


def of_words():
    X = np.column_stack([np.array(["u", "v"])[np.arange(40) // 2 % 2], points()[0][:, 0].round().astype(str)])
    encoder = OneHotEncoder(handle_unknown="ignore")
    return FullConformalClassifier(make_pipeline(encoder, LogisticRegression()), categories=0).fit(X, points()[1])


def pooled():
    layers = nn.Conv2d(1, 1, 1), nn.MaxPool2d(2, 1, 1), nn.Flatten(), nn.Linear(9, 2)
    X, y = points(20, 4)
    return FullConformalClassifier(nn.Sequential(*layers), method="influence", max_epochs=1).fit(
        X.reshape(20, 1, 2, 2), y
    )


def in_bag(model):
    return FullConformalClassifier(make_pipeline(PCA(2), model)).fit(*points())


def united():
    return classifier(make_pipeline(FeatureUnion([("p", PCA(2))]), LogisticRegression()))


WIDE = estimator("MLPClassifier", [("hidden_layer_sizes", {"is": "tuple", "items": [10**4, 10**3]})])
HEADS = FullConformalClassifier(method="influence")
ATTACKS = {
    "a code between two": (
        lambda: classifier(
            make_pipeline(
                OneHotEncoder(drop="first", sparse_output=False, handle_unknown="ignore"), LogisticRegression()
            )
        ),
        half_a_code,
    ),
    "boosting without trees": (lambda: classifier(HistGradientBoostingClassifier(max_iter=2)), no_trees),
    "a forest of many outputs": (
        lambda: SplitConformalRegressor(RandomForestRegressor(2, max_depth=2), random_state=0).fit(
            points()[0], points()[0].sum(1)
        ),
        outputs,
    ),
    "refits": (
        lambda: behind(Ridge()),
        trained({"is": "RefitRegression", "model": estimator("Ridge"), "grid": LARGE, "tolerance": 0.001}),
    ),
    "training": (
        lambda: behind(Ridge()),
        trained(
            {
                "is": "FoldsRegression",
                "folds": 2,
                "repeats": 1,
                "model": estimator("MLPRegressor", [("max_iter", LARGE)]),
            }
        ),
    ),
    "columns of other lengths": (lambda: classifier(LogisticRegression()), uneven_table),
    "names of one hash": (lambda: classifier(LogisticRegression()), names_of_one_hash),
    "words of a parameter": (
        lambda: classifier(
            make_pipeline(OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), LogisticRegression())
        ),
        parameter("OrdinalEncoder", "dtype", {"is": "dtype", "name": "<U1000"}),
    ),
    "wide words": (
        lambda: classifier(
            make_pipeline(OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), LogisticRegression())
        ),
        parameter("OrdinalEncoder", "dtype", {"is": "dtype", "name": "<U16777216"}),
    ),
    "many bins": (
        lambda: classifier(make_pipeline(KBinsDiscretizer(2), LogisticRegression())),
        parameter("KBinsDiscretizer", "n_bins", LARGE),
    ),
    "passes of a factorisation": (
        lambda: classifier(make_pipeline(PCA(2), LogisticRegression())),
        parameter("PCA", "n_oversamples", LARGE),
    ),
    "weights of a union": (
        lambda: classifier(
            make_pipeline(FeatureUnion([("p", PCA(2))], transformer_weights={"p": 2.0}), LogisticRegression())
        ),
        parameter(
            "FeatureUnion",
            "transformer_weights",
            {"is": "dict", "items": [["p", array("big", 3)]]},
            torch.zeros((100, 1, 1), dtype=torch.uint8),
        ),
    ),
    "a kernel's number": (
        lambda: FullConformalRegressor(GaussianProcessRegressor(DotProduct(), alpha=0.1, optimizer=None)).fit(
            points()[0], points()[0].sum(1)
        ),
        kernel(sigma_0=array("big", 3)),
    ),
    "kernels in kernels": (
        lambda: FullConformalRegressor(GaussianProcessRegressor(RBF(), alpha=0.1, optimizer=None)).fit(
            points()[0], points()[0].sum(1)
        ),
        many_kernels,
    ),
    "a bandwidth": (
        lambda: FullConformalClassifier(KernelDensityClassifier()).fit(*points()),
        parameter("KernelDensityClassifier", "bandwidth", array("big"), torch.zeros(100, dtype=torch.float64)),
    ),
    "lists of neighbours": (
        lambda: FullConformalClassifier(KNeighborsClassifier(2)).fit(*points()),
        list_of("Lists", "rest"),
    ),
    "sums of a density": (
        lambda: FullConformalClassifier(KernelDensityClassifier()).fit(*points()),
        list_of("KernelDensity", "log_sums"),
    ),
    "numbers of neighbours": (
        lambda: FullConformalRegressor(KNeighborsRegressor(2)).fit(points()[0], points()[0].sum(1)),
        list_of("Nearest", "n_nearer"),
    ),
    "components of a union": (
        lambda: classifier(
            make_pipeline(FeatureUnion([("p", PCA(2)), ("q", PCA(1)), ("r", PCA(1))]), LogisticRegression())
        ),
        wide_union,
    ),
    "columns listed": (
        lambda: classifier(
            make_pipeline(
                ColumnTransformer([(f"f{k}", FunctionTransformer(), [0]) for k in range(2)]), LogisticRegression()
            )
        ),
        listed_columns,
    ),
    "axes": (lambda: classifier(LogisticRegression()), long_shape),
    "a matrix of distances": (lambda: classifier(KNeighborsClassifier(3)), distances),
    "endless steps": (lambda: behind(Lasso(0.1)), parameter("Lasso", "max_iter", LARGE)),
    "steps to no end": (lambda: behind(Lasso(0.1)), parameter("Lasso", "tol", 0.0)),
    "many penalties": (lambda: behind(RidgeCV([0.1, 1.0])), parameter("RidgeCV", "alphas", [1.0] * 2000)),
    "rotations": (lambda: classifier(QuadraticDiscriminantAnalysis()), rotations),
    "columns between steps": (lambda: regressor(make_pipeline(PCA(3), PCA(2), Ridge())), wide_between),
    "many rows to try": (lambda: regressor(make_pipeline(PCA(2), Ridge())), many_rows),
    "words to fill in": (
        lambda: classifier(make_pipeline(SimpleImputer(strategy="most_frequent"), LogisticRegression())),
        filled_with_words,
    ),
    "a wide slice": (
        lambda: classifier(make_pipeline(ColumnTransformer([("a", "passthrough", slice(0, 2))]), LogisticRegression())),
        wide_slice,
    ),
    "bins of many columns": (
        lambda: regressor(make_pipeline(KBinsDiscretizer(2, encode="onehot-dense", strategy="uniform"), Ridge())),
        parameter("KBinsDiscretizer", "n_bins", 60_000),
    ),
    "a kernel for a function": (
        lambda: regressor(TransformedTargetRegressor(Ridge(), func=np.arcsinh, inverse_func=np.sinh)),
        kernel_of_the_target,
    ),
    "rows that overflow": (lambda: classifier(KNeighborsClassifier(3, algorithm="brute")), rows_that_overflow),
    "words of a function": (
        lambda: classifier(make_pipeline(FunctionTransformer(np.arcsinh), LogisticRegression())),
        parameter("FunctionTransformer", "kw_args", {"is": "dict", "items": [["where", True]]}),
    ),
    "a list around an array": (
        lambda: classifier(make_pipeline(VarianceThreshold(), LogisticRegression())),
        parameter("VarianceThreshold", "threshold", [array("big", 2)], torch.ones((50, 1), dtype=torch.uint8)),
    ),
    "other steps to fit": (
        lambda: regressor(make_pipeline(ColumnTransformer([("a", StandardScaler(), [0, 1])]), Ridge())),
        steps_to_fit,
    ),
    "other columns to fit": (
        lambda: regressor(make_pipeline(ColumnTransformer([("a", StandardScaler(), [0, 1])]), Ridge())),
        columns_to_fit,
    ),
    "a remainder to fit": (
        lambda: regressor(make_pipeline(ColumnTransformer([("a", StandardScaler(), [0, 1])]), Ridge())),
        remainder_to_fit,
    ),
    "columns by numbers": (
        lambda: classifier(
            make_pipeline(ColumnTransformer([(at, StandardScaler(), [0]) for at in "abcd"]), LogisticRegression())
        ),
        numbered_columns,
    ),
    "marks of what is missing": (
        united,
        side_by_side("MissingIndicator", [], [("n_features_in_", 3), ("features_", array("many"))]),
    ),
    "marks of any columns": (
        united,
        side_by_side("MissingIndicator", [("features", "all")], [("_precomputed", False)]),
    ),
    "marks beside what was filled in": (
        united,
        side_by_side(
            "SimpleImputer",
            [("add_indicator", True)],
            [("n_features_in_", 3), ("indicator_", estimator("MissingIndicator", [], [("features_", array("many"))]))],
        ),
    ),
    "labels side by side": (united, side_by_side("LabelBinarizer", [], [("classes_", array("many"))])),
    "components to fit": (
        united,
        side_by_side("PCA", [], [("n_features_in_", 60_000), ("components_", array("two", 2))]),
    ),
    "categories to fit": (
        lambda: regressor(make_pipeline(OneHotEncoder(sparse_output=False, handle_unknown="ignore"), Ridge())),
        categories_to_fit,
    ),
    "an array for a number": (lambda: classifier(LogisticRegression()), scalars_of_arrays),
    "another model behind": (lambda: in_bag(GaussianNB()), model_behind(lambda node: node.update(model=WIDE))),
    "many neighbours behind": (
        lambda: in_bag(KNeighborsClassifier(2)),
        model_behind(lambda node: put(node["model"], "params", "n_neighbors", LARGE)),
    ),
    "many penalties behind": (
        lambda: behind(RidgeCV([0.1, 1.0])),
        model_behind(lambda node: put(node["model"], "params", "alphas", [1.0] * 1000)),
    ),
    "rows swapped with others' memory": (lambda: HEADS.fit(*points()), swapped_rows),
    "points without numbers": (
        lambda: FullConformalClassifier(mlp(3, (2,), 2), max_epochs=1, curvature="last_layer_kron").fit(*points()),
        no_numbers,
    ),
    "a pool of nothing but padding": (pooled, pool_of_nothing),
    "escapes": (lambda: HEADS.fit(*points()), escapes),
    "p-values combined by a split": (lambda: classifier(LogisticRegression()), combined),
    "two models of a split": (lambda: classifier(LogisticRegression()), two_models),
    "ends for themselves by a split": (
        lambda: SplitConformalRegressor(Ridge(), random_state=0).fit(points()[0], points()[0].sum(1)),
        other_rule,
    ),
    "folds of many models": (lambda: FullConformalClassifier(method="folds", folds=2).fit(*points()), many_models),
    "parts of many models": (lambda: CVPlusClassifier(n_folds=2, random_state=0).fit(*points()), many_models),
    "p-values of many models": (
        lambda: CrossConformalClassifier(n_folds=2, aggregation="median", random_state=0).fit(*points()),
        partial(many_models, n_classes=5000),
    ),
    "a format of names": (
        lambda: classifier(make_pipeline(ColumnTransformer([("a", StandardScaler(), [0])]), LogisticRegression())),
        format_of_names,
    ),
    "a long name of many columns": (
        lambda: classifier(
            make_pipeline(OneHotEncoder(sparse_output=False, handle_unknown="ignore"), LogisticRegression())
        ),
        long_name,
    ),
    "names of names": (
        lambda: classifier(
            make_pipeline(
                PCA(1),
                FeatureUnion([("a", StandardScaler()), ("b", StandardScaler())]),
                PolynomialFeatures((2, 2), interaction_only=True, include_bias=False),
                LogisticRegression(),
            )
        ),
        names_of_names,
    ),
    "a long name in a table": (lambda: classifier(LogisticRegression()), long_column),
    "a tree of small numbers": (
        lambda: CVPlusClassifier(KNeighborsClassifier(3), n_folds=4, random_state=0).fit(*points()),
        small_points,
    ),
    "small numbers in a tree": (lambda: classifier(RandomForestClassifier(2, max_depth=2)), small_values),
    "small indices": (lambda: classifier(KNeighborsClassifier(3, algorithm="brute")), small_indices),
    "a long label": (lambda: classifier(LogisticRegression()), long_label),
    "a fit in a fit": (lambda: HEADS.fit(*points()), many_fits),
    "points that are not there": (lambda: classifier(LogisticRegression()), told_sizes),
    "points left out that are not there": (
        lambda: JackknifePlusClassifier(random_state=0).fit(*points()),
        told_sizes,
    ),
    "classes in name only": (lambda: classifier(LogisticRegression()), for_each_class),
    "fresh points in no order": (
        lambda: FullConformalClassifier(l2=0.1).fit(*points()).recalibrate(points()[0] + 0.1, points()[1]),
        no_order,
    ),
    "columns by columns": (
        lambda: FullConformalRegressor(make_pipeline(PCA(2), Ridge())).fit(*(points(4, 8200)[0], np.arange(4.0))),
        parameter("PCA", "svd_solver", "covariance_eigh"),
    ),
    "trees to audit": (lambda: regressor(Ridge()), to_refit("RandomForestRegressor", ("n_estimators", LARGE))),
    "leaves to audit": (lambda: regressor(Ridge()), to_refit("DecisionTreeRegressor", ("max_leaf_nodes", LARGE))),
    "draws to audit": (lambda: regressor(Ridge()), to_refit("BaggingRegressor", ("max_samples", LARGE))),
    "layers to audit": (
        lambda: regressor(Ridge()),
        to_refit("MLPRegressor", ("hidden_layer_sizes", {"is": "tuple", "items": [15_000, 15_000]})),
    ),
    "models of no point": (
        lambda: SplitConformalRegressor(Ridge(), random_state=0).fit(points()[0], points()[0].sum(1)),
        models_of_no_point,
    ),
    "a long label for each object": (lambda: classifier(LogisticRegression()), label_to_repeat),
    "a long category for each object": (of_words, category_to_repeat),
    "escapes in a cost": (lambda: HEADS.fit(*points()), told_cost),
    "escapes in a reason": (lambda: HEADS.fit(*points()), told_reason),
    "escapes in a layer's name": (lambda: classifier(mlp(3, (2,), 2)), named_layer),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_forged_part_is_refused(name, tmp_path):
    make, forge = ATTACKS[name]
    make().save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    before = copy.deepcopy(content)
    forge(content, tensors)
    assert content != before
    signed(content, tensors, tmp_path / "it")
    # By a look at the part itself, not by what came of it: larger ones would have taken memory or time until then.
    with pytest.raises(StorageError, match=r"^(?!.*does not fit together)"):
        load(tmp_path / "it")


def test_a_table_of_one_column_many_times_and_products_of_columns_are_not_the_files_to_ask_for(tmp_path):
    with pytest.raises(TableError):
        Schema.of_json(vars(Schema("t", ["a"] * 2, [], [])))
    assert Schema.of_json(vars(Schema("t", ["a"], ["b"], []))).columns == ["a", "b"]
    regressor(Lasso(0.1, precompute=True)).save(tmp_path / "it")
    assert load(tmp_path / "it").estimator.precompute is False


def test_models_by_the_thousand_are_asked_one_after_the_other():
    """Whatever the number of objects: a small file may name one model often."""
    X, model = np.zeros((1000, 3)), LogProba(None, np.arange(2), 2)
    held = HeldOut(LogLoss(), False, False, 0, 2, [Calibrated(model, [np.zeros(1)])] * 1000, np.array([1000]))
    folds = FoldModels([model] * 1000, np.zeros((500, 1), dtype=np.int64), 2, 0)
    fitted = FittedFolds(folds, np.zeros(1), np.zeros(1, dtype=np.int64), 2, LogLoss())
    for ask in (
        lambda: held.p_values(X, None),
        lambda: held.proba(X),
        lambda: fitted.log_proba(X),
        lambda: next(folds.candidate_outputs(X)),
    ):
        assert peak(ask) < 2**21
    # Those that are combined, some at a time.
    held = replace(held, parts=held.parts[:100])
    for how in AGGREGATIONS:
        assert peak(lambda how=how: held.combined(X, None, False, how, 2**14)) < 2**20


def peak(ask):
    """Bytes that a call takes in passing."""
    tracemalloc.start()
    try:
        ask()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_p_values_of_several_models_are_the_same_some_objects_at_a_time(how):
    """Equal objects too, whose random numbers depend on those before."""
    X = np.repeat(points()[0], 2, axis=0)
    clf = CrossConformalClassifier(
        n_folds=3, aggregation=how, conformity_score="aps", categories=lambda X: X[:, 0] > 0, random_state=0
    )
    held, places = clf.fit(*points())._held_out, (X[:, 0] > 0).astype(int)
    p = clf.predict_p(X, smoothing=True)
    assert np.array_equal(held.combined(X, places, True, how, block=50), p)
    order = np.random.default_rng(held.seed).permutation(3)
    by_part = [replace(held, parts=[held.parts[k]], sizes=sizes_of(held.parts[k])) for k in order]
    expected = AGGREGATIONS[how]([one.p_values(X, places, True) for one in by_part], axis=0)
    assert np.allclose(p, expected, rtol=0, atol=1e-15)
    assert (p[::2] != p[1::2]).all()


@pytest.mark.filterwarnings("ignore")
def test_an_object_without_p_values_is_named_by_its_place_among_all():
    clf = CrossConformalClassifier(GaussianNB(), n_folds=2, aggregation="mean", random_state=0).fit(*points())
    X = points()[0]
    X[31] = 1e300
    with pytest.raises(ValueError, match="of object 31 "):
        clf._held_out.combined(X, None, False, "mean", block=40)


def test_boosted_trees_of_more_nodes_than_there_are_take_no_room(tmp_path):
    classifier(HistGradientBoostingClassifier(max_iter=2)).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    for node in nodes(content, lambda node: node.get("is") == "dict" and "sizes" in dict(node["items"])):
        sizes = dict(node["items"])["sizes"]["tensor"]
        tensors[sizes] = torch.full_like(tensors[sizes], 2**22)
    signed(content, tensors, tmp_path / "it")

    def ask():
        with pytest.raises(StorageError, match="nodes"):
            load(tmp_path / "it")

    assert peak(ask) < 2**26


def sizes_of(part):
    return np.array([len(scores) for scores in part.ordered])


@pytest.mark.filterwarnings("ignore")
def test_many_classes_are_tried_on_few_objects(tmp_path):
    """A label is of four bytes, and has p-values, in float64 and several times in passing, of every object that is tried."""
    CVPlusClassifier(n_folds=2, random_state=0).fit(*points()).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    many_models(content, tensors, 2, 300_000)
    fitted = dict(content["predictor"]["fitted"]["items"])
    tensors["sizes"] = torch.tensor([40])
    fitted["_held_out"]["sizes"] = array("sizes")
    signed(content, tensors, tmp_path / "it")
    assert peak(lambda: load(tmp_path / "it")) < 2**28
    # And where labels are compared with their own points, each has a number of every point.
    FullConformalClassifier(method="folds", folds=2, class_conditional=True).fit(*points()).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    many_models(content, tensors, 2, 6000)
    held, n = dict(content["predictor"]["fitted"]["items"])["_fitted"], 6000
    tensors |= {
        "labels": torch.arange(n),
        "fold": torch.zeros((1, n), dtype=torch.int64),
        "alpha": torch.zeros(n).double(),
    }
    held |= {"labels": array("labels"), "alpha": array("alpha")}
    held["trained"]["fold"] = array("fold", 2)
    signed(content, tensors, tmp_path / "it")
    assert peak(lambda: load(tmp_path / "it")) < 2**28


def test_column_transformers_that_give_tables_are_saved(tmp_path):
    X = pd.DataFrame(points()[0], columns=list("abc"))
    steps = [("a", StandardScaler(), ["a"]), ("f", FunctionTransformer(), ["b"])]
    columns = ColumnTransformer(steps, remainder="passthrough").set_output(transform="pandas")
    clf = SplitConformalClassifier(make_pipeline(columns, LogisticRegression()), random_state=0, confidence_level=0.7)
    clf.fit(X, points()[1]).save(tmp_path / "it")
    assert np.array_equal(load(tmp_path / "it").predict_p(X), clf.predict_p(X))


def test_the_promise_is_of_the_rule_that_was_fitted():
    X, _ = points()
    reg = JackknifePlusRegressor(Ridge()).fit(X, X.sum(1))
    assert reg.set_params(minmax=True).guarantee_.word == "1 − 2ε"
    assert reg.fit(X, X.sum(1)).guarantee_.is_exact


@pytest.mark.parametrize("header", [
    "(" * 50, "{'descr': '''", "-" * 4000 + "1", "{[]: 1}", "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': '|V2147483647', 'fortran_order': False, 'shape': (1,)}", "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}",
], ids=range(7))  # fmt: skip
def test_a_part_of_a_checkpoint_whose_header_cannot_be_read_is_computed_again(header, tmp_path):
    """With a right digest, which takes what the header says and no more."""
    said = []
    parts = Parts(tmp_path, said.append, "of this fit")
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    path = tmp_path / f"a.{parts.digest('a', content)}.npy"
    path.write_bytes(content)
    assert peak(lambda: list(parts.read("a", lambda _: (1,)))) < 2**20
    assert len(said) == 1 and not path.exists()
    parts.write("a", np.zeros(1))
    assert [(name, part.tolist()) for name, part in parts.read("a", lambda _: (1,))] == [("a", [0.0])]


@pytest.mark.parametrize("model", [GaussianNB(), LinearDiscriminantAnalysis()])
@pytest.mark.parametrize("label", [-1, 2, 10**7, 2**63 - 1])
def test_labels_are_looked_at_before_they_are_counted(model, label, tmp_path):
    """NumPy's bincount makes room up to the largest label, and of the largest there is writes before its array."""
    FullConformalClassifier(model).fit(*points()).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    (bag,) = nodes(content, lambda node: node.get("is") in ("NaiveBayes", "Discriminant"))
    tensors[bag["y"]["tensor"]] = tensors[bag["y"]["tensor"]].clone()
    tensors[bag["y"]["tensor"]][-1] = label
    signed(content, tensors, tmp_path / "it")
    counted = []

    def ask():
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(StorageError, match="its labels cannot be right"),
        ):
            patch.setattr(Densities, "sizes", property(counted.append))
            load(tmp_path / "it")

    assert peak(ask) < 2**24 and not counted


def test_classes_without_a_point_are_not_counted(tmp_path):
    FullConformalClassifier(GaussianNB()).fit(*points()).save(tmp_path / "it")
    content, tensors = opened(tmp_path / "it")
    (bag,) = nodes(content, lambda node: node.get("is") == "NaiveBayes")
    tensors["none"], tensors["nobody"] = torch.zeros((0, 3), dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    bag |= {"X": array("none", 2), "y": array("nobody"), "n_classes": 10**7}
    signed(content, tensors, tmp_path / "it")

    def ask():
        with pytest.raises(StorageError, match="its labels cannot be right"):
            load(tmp_path / "it")

    assert peak(ask) < 2**24


def test_tensors_of_many_axes_are_refused_at_once(tmp_path):
    classifier(LogisticRegression()).save(tmp_path / "it")
    header, data = header_and_data(tmp_path / "it")
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [1] * 200_000
    (tmp_path / "it").write_bytes(assembled(header, data))
    with pytest.raises(StorageError, match="axes"):
        load(tmp_path / "it")


@pytest.mark.filterwarnings("ignore")
def test_networks_of_many_classes_and_weights_of_numpys_are_saved(tmp_path):
    X, y = np.random.default_rng(0).normal(size=(90, 4)), np.array(["a", "b", "c"])[np.arange(90) % 3]
    for model in (
        MLPClassifier((3,), max_iter=3),
        make_pipeline(FeatureUnion([("p", PCA(2))], transformer_weights={"p": np.float64(2)}), LogisticRegression()),
    ):
        clf = SplitConformalClassifier(model, random_state=0, confidence_level=0.7).fit(X, y)
        clf.save(tmp_path / "it")
        assert np.array_equal(load(tmp_path / "it").predict_p(X), clf.predict_p(X))


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    """A bound on what a file may ask of its reader is met when it is written."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 10))
    reg = SplitConformalRegressor(make_pipeline(PolynomialFeatures(10, interaction_only=True), Ridge()), random_state=0)
    reg.fit(X, X.sum(1)).save(tmp_path / "r")
    assert np.array_equal(load(tmp_path / "r").predict(X), reg.predict(X))
    for level in (np.float32(0.9), np.float64(0.9)):
        clf = SplitConformalClassifier(
            LogisticRegression(), confidence_level=level, class_conditional=np.bool_(True), random_state=0
        )
        clf.fit(X, X[:, 0] > 0).save(tmp_path / "c")
        assert load(tmp_path / "c").predict_set(X).shape == (60, 2)
    encoder = make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression())
    words = np.array([["w" * (LIMITS.word + 1)], ["v"]] * 20)
    with pytest.raises(StorageError, match="no dtype of strings"):
        SplitConformalClassifier(encoder, random_state=0, confidence_level=0.6).fit(words, np.arange(40) % 2).save(
            tmp_path / "w"
        )
    assert not (tmp_path / "w").exists()


def test_the_lowest_of_many_parabolas_is_found_in_no_time():
    """400 penalties: 79,800 pairs, whose roots were found one by one in seconds; against a fine grid."""
    rng = np.random.default_rng(0)
    few = [tuple(rng.uniform(1, 2, 3)) for _ in range(6)] + [(1.0, 0.5, 1.5)] * 2 + [(1.2, 0.5, 1.5)]
    ranges, best = lowest(few)
    assert ranges[0][0] == -np.inf and ranges[-1][1] == np.inf
    for y in np.linspace(-30, 30, 2001):
        (at,) = (k for k, (start, end) in enumerate(ranges) if start <= y < end)
        values = [a + b * y + c * y**2 for a, b, c in few]
        assert values[best[at]] <= min(values) * (1 + 1e-12)
    start = time.process_time()
    X = rng.normal(size=(30, 2))
    FullConformalRegressor(RidgeCV(alphas=np.logspace(-3, 3, 60))).fit(X, X[:, 0]).predict_interval(X[:5])
    assert time.process_time() - start < 60
