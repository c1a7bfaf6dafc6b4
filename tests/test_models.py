"""Ordinary models as they are: each is fitted, its guarantee named, its sets cover, and it is saved or refused in words."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.stats import binom
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    StackingClassifier,
)
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeClassifier, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch import nn

from fullconformal import FullConformalClassifier, SplitConformalClassifier, load
from fullconformal.storage import StorageError

rng = np.random.default_rng(0)
X = rng.normal(size=(160, 3))
Y = np.array(["low", "middle", "top"])[(X[:, 0] > 0).astype(int) + (X[:, 1] + rng.normal(size=160) > 0.5)]
TRAIN, TEST = slice(0, 90), slice(90, 160)
SAGA = {"solver": "saga", "max_iter": 300, "tol": 1e-2}


def booster(package, name, **options):
    """A classifier of a package that may be missing."""
    return lambda: getattr(pytest.importorskip(package), name)(n_estimators=8, n_jobs=1, **options)


# A model, the method it gets, whether its guarantee is exact, and whether it is saved.
MODELS = {
    "random forest": (RandomForestClassifier(8), "oob", True),
    "extra trees": (ExtraTreesClassifier(20), "folds", True),
    "extra trees, bootstrap": (ExtraTreesClassifier(20, bootstrap=True), "oob", True),
    "forest, balanced": (RandomForestClassifier(8, class_weight="balanced"), "oob", True),
    "histogram boosting": (HistGradientBoostingClassifier(max_iter=8, min_samples_leaf=5), "folds", True),
    "boosting": (GradientBoostingClassifier(n_estimators=5), "folds", False),
    "LightGBM": (booster("lightgbm", "LGBMClassifier", verbose=-1), "folds", False),
    "XGBoost": (booster("xgboost", "XGBClassifier"), "folds", False),
    "SVC": (SVC(probability=True), "folds", False),
    "grid": (GridSearchCV(LogisticRegression(), {"C": [0.1, 1.0]}, cv=2), "folds", False),
    "logistic, CV": (LogisticRegressionCV(Cs=[0.1, 1.0], cv=2, use_legacy_attributes=False), "folds", False),
    "calibrated": (CalibratedClassifierCV(LinearSVC(), cv=2), "folds", False),
    "stack": (StackingClassifier([("a", GaussianNB())], cv=2), "folds", False),
    "LDA": (LinearDiscriminantAnalysis(), "exact", True),
    "QDA": (QuadraticDiscriminantAnalysis(reg_param=0.1), "folds", True),
    "naive Bayes": (GaussianNB(), "exact", True),
    "perceptron": (MLPClassifier((4,), max_iter=30), "folds", True),
    "neighbours": (KNeighborsClassifier(), "exact", True),
    "neighbours, weighted": (KNeighborsClassifier(weights="distance"), "folds", True),
    "SGD": (SGDClassifier(loss="log_loss"), "folds", True),
    "logistic": (LogisticRegression(), "symmetric", True),
    "logistic, balanced": (LogisticRegression(class_weight="balanced"), "folds", True),
    "logistic, L1": (LogisticRegression(l1_ratio=1.0, **SAGA), "folds", True),
    "logistic, elastic net": (LogisticRegression(l1_ratio=0.5, **SAGA), "folds", True),
    "one against the rest": (OneVsRestClassifier(LogisticRegression()), "folds", False),
    "nearest centroid": (NearestCentroid(), "folds", False),
    "scaled SVC": (make_pipeline(StandardScaler(), SVC(probability=True)), "folds", False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_as_they_are(name, tmp_path):
    model, method, saved = MODELS[name]
    model = model if hasattr(model, "fit") else model()
    clf = FullConformalClassifier(model, folds=4, random_state=0).fit(X[TRAIN], Y[TRAIN])
    p = clf.predict_p(X[TEST])
    hits = int((p[np.arange(70), np.searchsorted(clf.classes_, Y[TEST])] > 0.1).sum())
    assert clf.method_ == method and clf.guarantee_.word == (
        "exact" if method in ("exact", "symmetric") else "approximate"
    )
    # A bag has a coverage of its own, beta with 81 and 10: three of its deviations below 0.9, then a band of 1 in 1,000.
    assert hits >= binom.ppf(1e-3, 70, 0.9 - 3 * np.sqrt(0.09 / 90))
    if saved:
        clf.save(tmp_path / "p.safetensors")
        assert np.array_equal(load(tmp_path / "p.safetensors").predict_p(X[TEST]), p)
    else:
        with pytest.raises(StorageError, match=r"cannot be saved: .*(pickle|outside)"):
            clf.save(tmp_path / "p.safetensors")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [RidgeClassifier(), SVC(), SGDClassifier()])
@pytest.mark.parametrize("kind", [FullConformalClassifier, SplitConformalClassifier])
def test_models_without_probabilities_are_told_how_to_get_them(kind, model):
    with pytest.raises(TypeError, match=rf"CalibratedClassifierCV\({type(model).__name__}\(\.\.\.\)\)"):
        kind(model).fit(X, Y)


@pytest.mark.parametrize(
    "model", [None, LogisticRegression(), KNeighborsClassifier(), RandomForestClassifier(10), GaussianNB()]
)
def test_sparse_matrices_are_those_numbers(model):
    """With and without a Pipeline's transformers, of which none is needed."""
    sparse = csr_array(np.where(np.abs(X) > 0.5, X, 0))
    clf = FullConformalClassifier(model, folds=3, random_state=0)
    p = clf.fit(sparse[TRAIN], Y[TRAIN]).predict_p(sparse[TEST])
    dense = sparse.toarray()
    assert np.array_equal(p, clf.fit(dense[TRAIN], Y[TRAIN]).predict_p(dense[TEST]))
    with pytest.raises(MemoryError, match="as an array more than 1e-09 GiB; put it into a Pipeline"):
        clf.set_params(memory_budget=1e-9).fit(sparse[TRAIN], Y[TRAIN])


class Nested(nn.Module):
    """A network whose result has more than logits in it."""

    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 3), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda z: {"logits": z}, Output, lambda z: (z, z)])
@pytest.mark.parametrize("method", ["folds", "influence"])
def test_modules_that_return_more_than_logits(wrap, method):
    clf = FullConformalClassifier(Nested(wrap), method=method, folds=3)
    with pytest.raises(
        ValueError, match=r"(?s)but returned \w+;.*class Logits.*def __init__.*def forward\(self, x\): return self.net"
    ):
        clf.fit(X, Y)


def test_several_inputs_are_given_side_by_side():
    with pytest.raises(
        TypeError, match=r"(?s)X is a mapping of 'a', 'b'; give one array.*def forward\(self, x\): return self.net\("
    ):
        FullConformalClassifier(nn.Linear(3, 3)).fit({"a": X[:, :1], "b": X[:, 1:]}, Y)


def test_networks_of_images_with_batch_norm_and_dropout_train_themselves():
    """The error names three lines; they work, and folds train the network as it is."""
    skorch = pytest.importorskip("skorch")
    images, labels = X[:, :, None, None].repeat(2, 2).repeat(2, 3).astype(np.float32), (X[:, 0] > 0).astype(int)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 2))
    with pytest.raises(
        ValueError,
        match=r"(?s)BatchNorm2d, Dropout in training mode.*from skorch import.*Classifier\(model\)",
    ):
        FullConformalClassifier(net).fit(images, labels)
    model = skorch.NeuralNetClassifier(
        net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=0.05, verbose=0
    )
    clf = FullConformalClassifier(model, folds=3, random_state=0).fit(images[TRAIN], labels[TRAIN])
    assert clf.method_ == "folds" and clf.predict_p(images[TEST]).shape == (70, 2)
    assert clf.predict_set(images[TEST])[np.arange(70), labels[TEST]].mean() > 0.75


class Shifted(StandardScaler):
    """A transformer of one's own that looks at labels where it is given some, and says so nowhere."""

    def fit(self, X, y=None):
        super().fit(X)
        self.mean_ = self.mean_ + (0 if y is None else 10 * np.mean(y == "low"))
        return self


@pytest.mark.parametrize(
    "nest", [lambda t: t, lambda t: make_column_transformer((t, [0, 1])), lambda t: make_pipeline(t)]
)
def test_a_transformer_of_ones_own_is_given_no_labels(nest):
    """So that what it learns is a function of the objects, and the promise that is printed holds."""
    clf = FullConformalClassifier(make_pipeline(nest(Shifted()), KNeighborsClassifier(3))).fit(X[TRAIN], Y[TRAIN])
    plain = FullConformalClassifier(make_pipeline(nest(StandardScaler()), KNeighborsClassifier(3))).fit(
        X[TRAIN], Y[TRAIN]
    )
    assert clf.guarantee_.word == "exact"
    assert np.array_equal(clf.predict_p(X[TEST][:5]), plain.predict_p(X[TEST][:5]))
