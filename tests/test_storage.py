"""Saved predictors: the same p-values after loading, and nothing but our own error from files that are not right."""

import copy
import json
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
import pytest
import torch
from forged import assembled, found, header_and_data, nodes, signed
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from scipy.sparse import coo_matrix, csc_array, csr_array, csr_matrix
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.naive_bayes import BernoulliNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)
from torch import nn
from typing_extensions import TypeAliasType

import fullconformal
from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
    StorageError,
)
from fullconformal.curvature import Hessian
from fullconformal.models import KernelDensityClassifier, mlp
from fullconformal.storage import container
from fullconformal.storage.values import Packer, conforms

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

N, M = 80, 30


def points(seed=0, shape=(4,)):
    """Three classes with string labels, (n, ...) and (n,); the first N train."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=N + M)
    X = rng.normal(size=(N + M, *shape))
    X.reshape(N + M, -1)[:, 0] += y
    return X, np.array(["ant", "bee", "centipede"])[y]


def frame(seed=0):
    """The same with mixed types and missing values."""
    X, y = points(seed)
    rng = np.random.default_rng(seed + 1)
    table = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    table.loc[rng.random(len(y)) < 0.1, "b"] = np.nan
    table["colour"] = rng.choice(["red", "green", None], len(y))
    table["count"] = rng.integers(5, size=len(y))
    return table, y


def columns():
    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    words = make_pipeline(SimpleImputer(strategy="constant", fill_value="?"), OneHotEncoder(handle_unknown="ignore"))
    return ColumnTransformer(
        [("n", numbers, ["a", "b"]), ("w", words, ["colour"]), ("o", OrdinalEncoder(), ["count"])],
        remainder="passthrough",
    )


class Residual(nn.Module):
    """A network that no list of layers describes."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(x + torch.tanh(self.inner(x)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 3),
    ).eval()


CASES = {
    "built-in, symmetric": lambda: FullConformalClassifier(),
    "built-in, influence": lambda: FullConformalClassifier(method="influence", scheme="ordinary"),
    "built-in, exact": lambda: FullConformalClassifier(method="exact"),
    "logistic, influence": lambda: FullConformalClassifier(LogisticRegression(C=2.0), method="influence"),
    "logistic, class-conditional": lambda: FullConformalClassifier(LogisticRegression(), class_conditional=True),
    "perceptron": lambda: FullConformalClassifier(MLPClassifier((5,), max_iter=60, random_state=1), method="influence"),
    "network": lambda: FullConformalClassifier(mlp(4, (6,), 3), method="influence", max_epochs=5, random_state=0),
    "folds": lambda: FullConformalClassifier(mlp(4, (6,), 3), folds=3, max_epochs=5, random_state=0),
    "network, indefinite Hessian": lambda: FullConformalClassifier(mlp(4, (6,), 3), max_epochs=2, curvature=Hessian(0.0)),
    "network, float64, pruned": lambda: FullConformalClassifier(
        mlp(4, (6,), 3), method="influence", max_epochs=5, dtype="float64", prune=True),
    "network, newton": lambda: FullConformalClassifier(mlp(4, (3,), 3), max_epochs=5, approximation="newton"),
    "network, last layer": lambda: FullConformalClassifier(mlp(4, (6,), 3), max_epochs=5, curvature="last_layer"),
    "network, Kronecker last layer": lambda: FullConformalClassifier(
        make_pipeline(StandardScaler(), mlp(4, (6,), 3)), max_epochs=5, curvature="last_layer_kron"),
    "network, head": lambda: FullConformalClassifier(mlp(4, (6,), 3), max_epochs=5, head="auto"),
    "neighbours": lambda: FullConformalClassifier(KNeighborsClassifier(3, metric="manhattan")),
    "density": lambda: FullConformalClassifier(make_pipeline(RobustScaler(), KernelDensityClassifier(0.7))),
    "pipeline": lambda: FullConformalClassifier(
        make_pipeline(
            MinMaxScaler(), QuantileTransformer(n_quantiles=9), PowerTransformer(), PCA(3), LogisticRegression()
        )
    ),
    "pipeline, discriminants": lambda: FullConformalClassifier(
        make_pipeline(LinearDiscriminantAnalysis(n_components=1), KNeighborsClassifier(3))),
    "pipeline, network": lambda: FullConformalClassifier(make_pipeline(StandardScaler(), mlp(4, (5,), 3)), max_epochs=5),
    "forest": lambda: FullConformalClassifier(RandomForestClassifier(8), random_state=3),
    "forest, pipeline": lambda: FullConformalClassifier(
        make_pipeline(StandardScaler(), ExtraTreesClassifier(20, bootstrap=True, max_depth=3)), random_state=3),
    "bagging": lambda: FullConformalClassifier(
        BaggingClassifier(LogisticRegression(), 20, max_samples=0.5, max_features=0.5), random_state=3),
    "split, boosting": lambda: SplitConformalClassifier(HistGradientBoostingClassifier(max_iter=4), random_state=3),
    "CV+, boosting": lambda: CVPlusClassifier(
        make_pipeline(StandardScaler(), HistGradientBoostingClassifier(max_iter=4)), n_folds=3, random_state=3),
    "split, forest": lambda: SplitConformalClassifier(RandomForestClassifier(5), random_state=3),
    "split": lambda: SplitConformalClassifier(random_state=3),
    "split, logistic": lambda: SplitConformalClassifier(LogisticRegression(), random_state=3),
    "split, network": lambda: SplitConformalClassifier(mlp(4, (5,), 3), max_epochs=5, random_state=3, class_conditional=True),
    "split, pipeline, aps": lambda: SplitConformalClassifier(
        make_pipeline(StandardScaler(), mlp(4, (5,), 3)), max_epochs=5, random_state=3, conformity_score="aps"),
    "split, whole pipeline, raps": lambda: SplitConformalClassifier(
        make_pipeline(StandardScaler(), LogisticRegression()), random_state=3, conformity_score="raps"),
    "aggregated": lambda: AggregatedConformalClassifier(n_estimators=3, random_state=3),
    "cross": lambda: CrossConformalClassifier(mlp(4, (5,), 3), max_epochs=5, n_folds=3, random_state=3),
    "CV+": lambda: CVPlusClassifier(LogisticRegression(), n_folds=4, random_state=3, class_conditional=True),
    "jackknife+": lambda: JackknifePlusClassifier(random_state=3),
    "jackknife+, refits": lambda: JackknifePlusClassifier(KNeighborsClassifier(), random_state=3),
}  # fmt: skip


def same(one, other, X):
    """Whether two predictors say the same of X, to the bit."""
    assert np.array_equal(one.classes_, other.classes_) and one.classes_.dtype == other.classes_.dtype
    assert np.array_equal(one.predict_epsilon(X), other.predict_epsilon(X))
    assert np.array_equal(one.predict_proba(X), other.predict_proba(X))
    assert np.array_equal(one.predict_set(X, [0.5, 0.9]), other.predict_set(X, [0.5, 0.9]))


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_predictor_says_the_same_to_the_bit(name, tmp_path):
    X, y = points()
    clf = CASES[name]().fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    again = fullconformal.load(tmp_path / "it")
    same(clf, again, X[N : N + 4])
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert repr(again) == repr(clf)
    again.save(tmp_path / "twice")  # and can be saved again
    same(again, fullconformal.load(tmp_path / "twice"), X[N : N + 2])


@pytest.mark.parametrize("words", ["str", object])
def test_tables_recalibration_and_smoothing_survive(words, tmp_path):
    table, y = frame()
    # Among objects None is a word of its own, and no missing one.
    table["colour"] = table["colour"].astype(words).where(table["colour"].notna(), None)
    clf = FullConformalClassifier(make_pipeline(columns(), LogisticRegression()), method="influence", random_state=4)
    clf.fit(table[:N], y[:N]).recalibrate(table[N : N + 20], y[N : N + 20])
    clf.save(tmp_path / "it")
    again = fullconformal.load(tmp_path / "it")
    test = table[N + 20 :].assign(colour="never seen")
    same(clf, again, test)
    assert np.array_equal(clf.predict_p(test, smoothing=True), again.predict_p(test, smoothing=True))
    assert list(again.feature_names_in_) == list(table.columns)
    with pytest.raises(ValueError, match="recalibrated with other options"):
        again.set_params(scheme="ordinary").predict_p(test)


@pytest.mark.parametrize("form", [csr_array, csr_matrix, csc_array, coo_matrix])
@pytest.mark.parametrize("cls", [FullConformalClassifier, SplitConformalClassifier, JackknifePlusClassifier])
def test_predictors_of_sparse_matrices_survive(cls, form, tmp_path):
    X, y = points()
    X[np.abs(X) < 0.5] = 0
    clf = cls(make_pipeline(MaxAbsScaler(), LogisticRegression()), random_state=0).fit(form(X[:N]), y[:N])
    clf.save(tmp_path / "it")
    same(clf, fullconformal.load(tmp_path / "it"), form(X[N:]))


def test_neighbours_of_sparse_matrices_survive(tmp_path):
    X, y = points()
    clf = SplitConformalClassifier(make_pipeline(MaxAbsScaler(), KNeighborsClassifier()), random_state=0)
    clf.fit(csr_array(X[:N]), y[:N]).save(tmp_path / "it")  # the classifier keeps its points, as they are
    same(clf, fullconformal.load(tmp_path / "it"), csr_array(X[N:]))


def test_sparse_matrices_point_inside_themselves(saved, tmp_path):
    """Compiled code follows the indices of a sparse matrix without looking."""
    path, objects, right = saved["sparse"]
    content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
    fitted = dict(content["predictor"]["fitted"]["items"])
    at = fitted["_sample"]["indices"]["tensor"]
    for wrong in (10**6, -(10**6), 4):
        changed = tensors[at].clone()
        changed[0] = wrong
        signed(content, {**tensors, at: changed}, tmp_path / "it")
        assert loaded_or_refused(tmp_path / "it", objects) is None
    fitted["_sample"]["n_columns"] = 2**40
    signed(content, tensors, tmp_path / "it")
    assert loaded_or_refused(tmp_path / "it", objects) is None
    fitted["_sample"]["n_columns"] = 4
    signed(content, tensors, tmp_path / "it")
    assert np.array_equal(loaded_or_refused(tmp_path / "it", objects), right)


@pytest.mark.parametrize(("field", "node", "wrong"), [
    ("left_child", 0, 10**6), ("right_child", 0, 10**6), ("left_child", 0, 0), ("right_child", 1, 1), ("left_child", 0, -7),
    ("right_child", 0, -1), ("feature", 0, 4), ("feature", 0, -2), ("feature", 0, 10**9),
])  # fmt: skip
def test_trees_point_inside_themselves(field, node, wrong, saved, tmp_path):
    """Compiled code follows the nodes of a tree without looking: a walk must end, and look at columns that are there."""
    path, objects, right = saved["forest"]
    content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
    signed(content, tensors, tmp_path / "it")
    assert np.array_equal(loaded_or_refused(tmp_path / "it", objects), right)
    fitted = dict(content["predictor"]["fitted"]["items"])
    tree = dict(dict(fitted["_fitted"]["forest"]["model"]["fitted"]["items"])["estimators_"][0]["fitted"]["items"])[
        "tree_"
    ]
    assert (
        len(tensors[dict(tree["nodes"]["items"])["feature"]["tensor"]]) > 3
    )  # splits at its root and at its first child
    at = dict(tree["nodes"]["items"])[field]["tensor"]
    tensors["changed"] = tensors[at].clone()
    tensors["changed"][node] = wrong
    dict(tree["nodes"]["items"])[field]["tensor"] = "changed"
    signed(content, tensors, tmp_path / "it")
    assert loaded_or_refused(tmp_path / "it", objects) is None


@pytest.mark.parametrize(("field", "wrong"), [
    ("left", 0), ("left", 10**6), ("right", 10**6), ("feature_idx", 4), ("feature_idx", -1), ("is_categorical", 1),
])  # fmt: skip
def test_boosted_trees_point_inside_themselves(field, wrong, saved, tmp_path):
    path, objects, right = saved["boosting"]
    content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
    text = json.dumps(content)
    nodes = re.search(r'\["nodes", (\{"is": "dict", "items": \[.*?\]\]\})', text)
    at = dict(json.loads(nodes[1])["items"])[field]["tensor"]
    tensors["changed"] = tensors[at].clone()
    tensors["changed"][0] = wrong
    pattern = f'\\["{field}", {{"is": "array", "tensor": "{at}"'
    changed = re.sub(pattern, f'["{field}", {{"is": "array", "tensor": "changed"', text)
    assert changed != text
    signed(json.loads(changed), tensors, tmp_path / "it")
    assert loaded_or_refused(tmp_path / "it", objects) is None
    signed(content, {**load_file(path)}, tmp_path / "it")
    assert np.array_equal(loaded_or_refused(tmp_path / "it", objects), right)


@pytest.mark.parametrize("where", ["tree", "member", "forest"])
def test_forests_do_not_feed_trees_fewer_columns_than_they_look_at(where, saved, tmp_path):
    path, objects, _ = saved["forest"]
    content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
    forest = dict(content["predictor"]["fitted"]["items"])["_fitted"]["forest"]["model"]["fitted"]
    member = dict(forest["items"])["estimators_"][1]["fitted"]
    if where == "tree":
        dict(member["items"])["tree_"]["n_features"] = 9
    else:
        rows = (member if where == "member" else forest)["items"]
        next(row for row in rows if row[0] == "n_features_in_")[1] = 9
    signed(content, tensors, tmp_path / "it")
    assert loaded_or_refused(tmp_path / "it", objects) is None


def test_networks_with_idle_parameters_survive(tmp_path):
    """Pixels that are always black."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 40)), np.arange(300) % 3
    X[:, ::2] = 0
    X[:, 1] += y
    clf = FullConformalClassifier(mlp(40, (5,), 3), max_epochs=3, method="influence").fit(X[:280], y[:280])
    clf.save(tmp_path / "it")
    same(clf, fullconformal.load(tmp_path / "it"), X[280:])


def test_files_from_before_a_field_with_a_default_are_read(saved, tmp_path):
    path, objects, right = saved["network"]
    content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
    (factor,) = [node for node in map(partial(found, content), nodes(content)) if is_dense(node)]
    del factor["smallest_eigenvalue"]
    signed(content, tensors, tmp_path / "it")
    assert np.array_equal(loaded_or_refused(tmp_path / "it", objects), right)
    factor |= {"order": factor["matrix"], "roots": factor["matrix"]}
    signed(content, tensors, tmp_path / "it")
    with pytest.raises(StorageError, match="the fields of DenseFactor"):
        fullconformal.load(tmp_path / "it")
    del factor["order"], factor["roots"], factor["pivots"]  # which has no default
    signed(content, tensors, tmp_path / "it")
    assert loaded_or_refused(tmp_path / "it", objects) is None


def is_dense(node):
    return isinstance(node, dict) and node.get("is") == "DenseFactor"


def test_images_and_frozen_layers_survive(tmp_path):
    X, y = points(shape=(1, 4, 4))
    network = convolutions()
    network[0].requires_grad_(False)
    clf = FullConformalClassifier(network, method="influence", max_epochs=3).fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    again = fullconformal.load(tmp_path / "it")
    same(clf, again, X[N:])
    assert not again.estimator[0].weight.requires_grad and again.estimator[5].weight.requires_grad
    for name, value in network.state_dict().items():  # what the user gave, from which it may be fitted again
        assert torch.equal(again.estimator.state_dict()[name], value)


def test_prefit_pipelines_keep_their_fit(tmp_path):
    X, y = points()
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X[:N], y[:N])
    clf = FullConformalClassifier(fitted, method="influence", prefit=True).fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    again = fullconformal.load(tmp_path / "it")
    same(clf, again, X[N:])
    assert np.array_equal(again.estimator.predict_proba(X), fitted.predict_proba(X))


@pytest.mark.parametrize("curvature", ["last_layer", "last_layer_kron"])
def test_predictors_of_streams_survive(curvature, tmp_path):
    X, y = points()
    index = np.unique(y, return_inverse=True)[1]
    pairs = torch.utils.data.TensorDataset(torch.as_tensor(X[:N], dtype=torch.float32), torch.as_tensor(index[:N]))
    clf = FullConformalClassifier(mlp(4, (6,), 3), prefit=True, curvature=curvature).fit(pairs)
    clf.save(tmp_path / "it")
    same(clf, fullconformal.load(tmp_path / "it"), X[N:])


def test_another_process_says_the_same(tmp_path):
    X, y = points()
    clf = FullConformalClassifier(
        make_pipeline(StandardScaler(), mlp(4, (6,), 3)), method="influence", max_epochs=5
    ).fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    np.save(tmp_path / "X.npy", X[N:])
    code = (
        "import sys, numpy as np, torch, fullconformal; torch.set_num_threads(1); folder = sys.argv[1];"
        "clf = fullconformal.load(folder + '/it'); np.save(folder + '/p.npy', clf.predict_p(np.load(folder + '/X.npy')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert np.array_equal(np.load(tmp_path / "p.npy"), clf.predict_p(X[N:]))


def test_integer_and_boolean_labels_survive(tmp_path):
    X, y = points()
    for labels in (np.unique(y, return_inverse=True)[1] - 1, y == "ant"):
        clf = FullConformalClassifier(method="influence").fit(X[:N], labels[:N])
        clf.save(tmp_path / "it")
        same(clf, fullconformal.load(tmp_path / "it"), X[N:])


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", ">i8"])
def test_numbers_without_a_sign_survive(kind, tmp_path):
    """As labels, and as objects: pictures of 16 bits."""
    X, y = points(2)
    X, y = (1000 * np.abs(X)).astype(kind), np.unique(y, return_inverse=True)[1].astype(kind)
    clf = FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(X[:N], y[:N])
    clf.save(tmp_path / "clf.safetensors")
    again = fullconformal.load(tmp_path / "clf.safetensors")
    assert again.classes_.dtype == np.dtype(kind).newbyteorder("=")
    assert np.array_equal(again.predict_p(X[N:]), clf.predict_p(X[N:]))


def test_loading_trains_and_factorises_nothing(tmp_path, monkeypatch):
    X, y = points()
    for name in ("network", "perceptron", "logistic, influence"):
        CASES[name]().fit(X[:N], y[:N]).save(tmp_path / name)

    def never(*_, **__):
        raise AssertionError("loading must not do this again")

    for target in ("fullconformal.curvature.dense.factorise", "fullconformal.curvature.ggn.dense_curvature",
                   "fullconformal.methods.fitting.train", "sklearn.neural_network.MLPClassifier.fit",
                   "sklearn.linear_model.LogisticRegression.fit"):  # fmt: skip
        monkeypatch.setattr(target, never)
    for name in ("network", "perceptron", "logistic, influence"):
        fullconformal.load(tmp_path / name)


def test_tables_with_the_types_of_pandas_are_predicted_after_loading(tmp_path):
    """Numbers and codes came back as objects, which encoders take for words: they then refused the table they were fitted to."""
    X, y = points()
    k = np.arange(len(X)) % 3
    gaps = pd.array(np.where(k == 1, None, k), dtype="Int64")
    table = pd.DataFrame({"x": X[:, 0], "whole": pd.array(k, dtype="Int64"), "gaps": gaps})
    table = table.assign(true=pd.array(k > 1, dtype="boolean"), real=gaps.astype("Float64"), code=pd.Categorical(k))
    encoder = ColumnTransformer([("it", OneHotEncoder(), list(table.columns[1:]))], remainder="passthrough")
    clf = FullConformalClassifier(make_pipeline(encoder, LogisticRegression())).fit(table[:N], y[:N])
    clf.save(tmp_path / "it")
    assert np.array_equal(fullconformal.load(tmp_path / "it").predict_p(table[N:]), clf.predict_p(table[N:]))


# Modules of the user's own ---------------------------------------------------------------------------------------------


def test_modules_of_ones_own_take_a_factory_which_only_the_caller_can_name(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.last(x + torch.tanh(self.inner(x)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    X, y = points()
    clf = FullConformalClassifier(Residual(), max_epochs=5).fit(X[:N], y[:N])
    with pytest.raises(StorageError, match=r"Residual .*factory="):
        clf.save(tmp_path / "it")
    with pytest.raises(StorageError, match=r"has other parameters than what factory='torch\.nn:Identity'"):
        clf.save(tmp_path / "it", factory="torch.nn:Identity")
    clf.save(tmp_path / "it", factory="own_models:Net")
    del sys.modules["own_models"]
    with pytest.raises(StorageError, match="'own_models:Net', and no file is let import code"):
        fullconformal.load(tmp_path / "it")
    assert "own_models" not in sys.modules
    same(clf, fullconformal.load(tmp_path / "it", factory=Residual), X[N:])
    assert "own_models" not in sys.modules
    same(clf, fullconformal.load(tmp_path / "it", factory="own_models:Net"), X[N:])
    with pytest.raises(StorageError, match="names and shapes"):
        fullconformal.load(tmp_path / "it", factory=lambda: mlp(4, (9,), 3))
    for wrong in ("nowhere_at_all:net", "own_models:missing", lambda: 3, "own_models"):
        with pytest.raises(StorageError, match="factory"):
            fullconformal.load(tmp_path / "it", factory=wrong)


def test_a_factory_serves_a_frozen_backbone_and_tied_weights(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))

    X, y = points()
    clf = FullConformalClassifier(Tied(), max_epochs=5, head="last").fit(X[:N], y[:N])
    clf.save(tmp_path / "it", factory=Tied)
    again = fullconformal.load(tmp_path / "it", factory=Tied)
    same(clf, again, X[N:])
    assert again.estimator.one.weight is again.estimator.two.weight


@pytest.mark.parametrize("spoil", [
    lambda network: network[0].register_forward_hook(lambda *_: None),
    lambda network: setattr(network[1], "forward", torch.tanh),
    lambda network: network.append(network[0]),
    lambda network: network.append(nn.MaxPool1d(300)),
])  # fmt: skip
def test_layers_that_do_more_than_they_say_are_not_described(spoil):
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    spoil(network)
    with pytest.raises(StorageError, match="factory"):
        Packer().pack(network)


# What cannot be saved ----------------------------------------------------------------------------------------------------


def piped(step):
    return FullConformalClassifier(make_pipeline(step, LogisticRegression()))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: piped(FunctionTransformer(np.abs)), "FunctionTransformer holds a function"),
    (lambda: piped(PCA(2, random_state=np.random.RandomState(0))), "PCA holds random_state"),
    (lambda: FullConformalClassifier(BernoulliNB(), method="exact"), "BernoulliNB cannot be saved"),
    (lambda: FullConformalClassifier(mlp(4, (3,), 3), method="exact", max_epochs=1), "by refits"),
    (lambda: FullConformalClassifier(random_state=np.random.RandomState(0)), r"set_params\(random_state=0\)"),
    (lambda: CVPlusClassifier(cv=KFold(3)), r"KFold.* cannot be saved; call set_params\(cv=None\)"),
    (lambda: SplitConformalClassifier(AdaBoostClassifier(n_estimators=3)), "AdaBoostClassifier cannot be saved: these files hold numbers"),
])  # fmt: skip
def test_what_cannot_be_saved_is_named_and_leaves_no_file(make, message, tmp_path):
    X, y = points()
    clf = make().fit(X[:N], y[:N])
    with pytest.raises(StorageError, match=message):
        clf.save(tmp_path / "it")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    X, y = points()
    clf = FullConformalClassifier(method="influence").fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    before = (tmp_path / "it").read_bytes()

    def stop(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        clf.save(tmp_path / "it")
    assert (tmp_path / "it").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_paths_that_cannot_be_written_or_read(tmp_path):
    X, y = points()
    clf = FullConformalClassifier(method="influence")
    with pytest.raises(ValueError, match="not fitted"):
        clf.save(tmp_path / "it")
    clf.fit(X[:N], y[:N])
    with pytest.raises(FileNotFoundError, match="create it first"):
        clf.save(tmp_path / "nowhere" / "it")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        clf.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        fullconformal.load(tmp_path / "nothing")
    clf.save(tmp_path / "it")
    with pytest.raises(ValueError, match="device='tpu'"):
        fullconformal.load(tmp_path / "it", device="tpu")


def test_the_file_is_readable_as_other_files_are(tmp_path):
    X, y = points()
    clf = FullConformalClassifier(method="influence").fit(X[:N], y[:N])
    clf.save(tmp_path / "it")
    (tmp_path / "other").touch()
    assert (tmp_path / "it").stat().st_mode == (tmp_path / "other").stat().st_mode


# Files that are not right ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of eleven predictors, with objects to predict and the p-values that are right."""
    folder = tmp_path_factory.mktemp("saved")
    X, y = points()
    table, _ = frame()
    cases = {
        "table": (FullConformalClassifier(make_pipeline(columns(), LogisticRegression()), method="influence"), table),
        "sparse": (FullConformalClassifier(make_pipeline(MaxAbsScaler(), LogisticRegression())), csr_array(X)),
        "network": (
            FullConformalClassifier(make_pipeline(StandardScaler(), mlp(4, (3,), 3)), method="influence", max_epochs=3),
            X,
        ),
        "folds": (FullConformalClassifier(mlp(4, (3,), 3), folds=2, max_epochs=3), X),
        "symmetric": (FullConformalClassifier(), X),
        "neighbours": (FullConformalClassifier(KNeighborsClassifier()), X),
        "last layer": (FullConformalClassifier(mlp(4, (3,), 3), max_epochs=3, curvature="last_layer_kron"), X),
        "forest": (FullConformalClassifier(RandomForestClassifier(3, max_depth=2), random_state=0), X),
        "boosting": (SplitConformalClassifier(HistGradientBoostingClassifier(max_iter=3), random_state=0), X),
        "split": (SplitConformalClassifier(random_state=0), X),
        "jackknife": (JackknifePlusClassifier(random_state=0), X),
        "cross": (CrossConformalClassifier(LogisticRegression(), random_state=0), X),
    }
    out = {}
    for name, (clf, objects) in cases.items():
        clf.fit(objects[:N], y[:N])
        if name == "table":
            clf.recalibrate(objects[N : N + 10], y[N : N + 10])
        clf.save(folder / name)
        out[name] = folder / name, objects[-5:], clf.predict_epsilon(objects[-5:])
    return out


def loaded_or_refused(path, objects):
    """p-values of a file, or None where it was refused by our own error; any other exception is the test's."""
    try:
        clf = fullconformal.load(path)
    except StorageError as error:
        assert "\n" not in str(error)
        return None
    return clf.predict_epsilon(objects)


def test_a_thousand_damaged_files_are_refused(saved, tmp_path):
    rng = np.random.default_rng(0)
    files = list(saved.values())
    target = tmp_path / "damaged"
    refused = 0
    for k in range(1000):
        path, objects, right = files[k % len(files)]
        raw = bytearray(path.read_bytes())
        kind = k // len(files) % 4
        if kind == 0:  # bit flips, anywhere or in the header
            for at in rng.integers(len(raw) if k % 2 else 2000, size=rng.integers(1, 4)):
                raw[at] ^= 1 << rng.integers(8)
        elif kind == 1:  # truncated, or with something behind it
            raw = raw[: rng.integers(len(raw))] if k % 3 else raw + bytes(int(rng.integers(1, 100)))
        elif kind == 2:  # a block overwritten, moved or zeroed
            a, b, size = (int(v) for v in rng.integers(len(raw) // 2, size=3))
            raw[a : a + size] = bytes(size) if k % 2 else raw[b : b + size]
        else:  # the header of one file with the data of another
            header, _ = header_and_data(path)
            _, data = header_and_data(files[int(rng.integers(len(files)))][0])
            raw = assembled(header, data if k % 2 else data[::-1])
        target.write_bytes(raw)
        p = loaded_or_refused(target, objects)
        refused += p is None
        assert p is None or np.array_equal(p, right)
    assert refused > 950  # the rest were the right files after all


def replaced(tree, path, value):
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


def deep(levels):
    out = []
    for _ in range(levels):
        out = [out]
    return out


HOSTILE = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 1e308, -1e-300, 0.5, "", "x", "nan", "../../../etc/passwd", "evil:main",
    "<U99999999", "object", "os.system", [], [[]], {}, {"is": "nothing"}, {"is": "float", "value": "nan"}, [1] * 1000, deep(200),
    {"is": "float", "value": "inf"}, {"is": "type", "name": "evil"}, {"is": "dtype", "name": "<U999999999"},
    {"is": "array", "tensor": "0", "order": [0, 0]}, {"is": "array", "tensor": "../x", "order": []},
    {"is": "tensor", "tensor": "1", "order": [0]}, {"is": "tensor", "tensor": "0", "order": [1, 0]},
    {"is": "objects", "dtype": "<U100000", "shape": [100000], "items": ["a"] * 100},
    {"is": "objects", "dtype": "object", "shape": [10**12], "items": []},
    {"is": "tuple", "items": [1, 2]}, {"is": "dict", "items": [["a", 1]]}, {"is": "dict", "items": [[[], 1]]}, {"is": "slice", "items": []},
    {"is": "scikit-learn", "class": "FunctionTransformer", "params": {"is": "dict", "items": [["func", "evil:main"]]},
     "fitted": {"is": "dict", "items": []}},
    {"is": "scikit-learn", "class": "evil", "params": {"is": "dict", "items": []}, "fitted": {"is": "dict", "items": []}},
    {"is": "scikit-learn", "class": "Pipeline", "params": {"is": "dict", "items": [["steps", []], ["memory", "/tmp/evil"]]},
     "fitted": {"is": "dict", "items": []}},
    {"is": "scikit-learn", "class": "StandardScaler", "params": {"is": "dict", "items": []},
     "fitted": {"is": "dict", "items": [["transform", "evil"], ["__class__", "evil"]]}},
    {"is": "module", "layers": {"is": "dict", "items": [["layer", "factory"], ["name", "evil:main"]]},
     "state": {"is": "dict", "items": []}, "frozen": [], "training": []},
    {"is": "module", "layers": {"is": "dict", "items": [["layer", "Linear"], ["arguments", {"is": "dict", "items": [
        ["in_features", 10**9], ["out_features", 10**9], ["bias", False]]}]]},
     "state": {"is": "dict", "items": []}, "frozen": [], "training": []},
]  # fmt: skip


def test_a_thousand_hostile_files_with_right_checksums_run_nothing_and_stay_small(saved, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(1)
    files = []
    for path, objects, right in saved.values():
        content, tensors = json.loads(header_and_data(path)[0]["__metadata__"]["content"]), load_file(path)
        files.append((content, tensors, list(nodes(content["predictor"], ("predictor",))), objects, right.shape))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target, refused = tmp_path / "hostile", 0
    for k in range(1000):
        content, tensors, paths, objects, shape = files[k % len(files)]
        path = paths[int(rng.integers(len(paths)))]
        if k % 10 == 0:  # a tensor that is not what the content says
            name = rng.choice(sorted(tensors))
            other = [tensors[name].flatten(), torch.full_like(tensors[name], -7 if k % 20 else 99), torch.zeros(0)]
            tensors = {**tensors, name: other[k // 10 % 3].clone()}
        else:
            content = replaced(content, path, HOSTILE[int(rng.integers(len(HOSTILE)))])
        signed(content, tensors, target)
        p = loaded_or_refused(target, objects)
        refused += p is None
        assert p is None or (p.shape == shape and ((p >= 0) & (p <= 1)).all())
    assert 500 < refused < 1000  # a changed verbosity or name of a step harms nobody
    assert "evil" not in sys.modules
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.parametrize(("text", "message"), [
    ("[" * 100_000, "cannot be read"),
    # Python's hashes of these are all zero.
    (json.dumps({"predictor": {"is": "dict", "items": [[k * (2**61 - 1), 0] for k in range(10**5)]}}), "is no number"),
    ('{"predictor": NaN}', "NaN is no number"),
    ('{"predictor": 1e999}', "1e999 is no number"),
    ('{"predictor": ' + "9" * 10_000 + "}", "cannot be read"),
    ("not json", "cannot be read"),
    ("[]", "does not fit together"),
    ('{"predictor": [], "device": "cpu"}', "holds a list, which is no predictor"),
])  # fmt: skip
def test_headers_that_say_nothing_sensible(text, message, tmp_path):
    signed(text, {"0": torch.zeros(3)}, tmp_path / "it")
    with pytest.raises(StorageError, match=message):
        fullconformal.load(tmp_path / "it")


def test_files_of_others_and_of_the_future_are_told_apart(saved, tmp_path):
    target = tmp_path / "it"
    save_file({"weight": torch.zeros(3)}, target)
    with pytest.raises(StorageError, match="no predictor saved by fullconformal"):
        fullconformal.load(target)
    path, *_ = saved["symmetric"]
    header, data = header_and_data(path)
    for version, message in (
        ("3", "upgrade"),
        ("1", "fit and save again"),
        ("99999999999", "none"),
        ("-1", "none"),
        ("²", "none"),
    ):
        header["__metadata__"]["version"] = version
        target.write_bytes(assembled(header, data))
        with pytest.raises(StorageError, match=message):
            fullconformal.load(target)
    for raw in (b"", b"\x80\x04\x95", b"x" * 1000, (2**62).to_bytes(8, "little") + b"{}"):
        target.write_bytes(raw)
        with pytest.raises(StorageError, match="no safetensors file"):
            fullconformal.load(target)


def test_a_declared_shape_beyond_the_file_allocates_nothing(saved, tmp_path):
    path, *_ = saved["neighbours"]
    header, data = header_and_data(path)
    for name in [name for name in header if name != "__metadata__"]:
        hostile = copy.deepcopy(header)
        hostile[name]["shape"] = [2**20, 2**20]
        (tmp_path / "it").write_bytes(assembled(hostile, data))
        with pytest.raises(StorageError):
            fullconformal.load(tmp_path / "it")


def test_storage_has_no_way_to_run_what_a_file_says():
    src = Path(fullconformal.__file__).parent
    for path in [*(src / "storage").glob("*.py"), src / "estimators" / "saving.py"]:
        assert not re.search(
            r"import pickle|joblib|torch\.load|(?<![.\w])(eval|exec)\(|__import__", path.read_text()
        ), path


def test_array_types_by_a_named_alias():
    """From Python 3.12 on NDArray may be one, which is no generic of np.ndarray."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("alias", np.ndarray[tuple, np.dtype[scalar]], type_params=(scalar,))
    for hint in (alias[np.float64], NDArray[np.float64]):
        assert conforms(np.zeros(2), hint) and not conforms(np.zeros(2, dtype=bool), hint) and not conforms([0.0], hint)
        assert conforms(None, hint | None) and conforms([np.zeros(2)], list[hint]) and not conforms([None], list[hint])
