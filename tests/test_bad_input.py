"""Bad input gets an error that names the argument and what to do, before anything is trained."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from torch import nn

from fullconformal import FullConformalClassifier, SplitConformalClassifier, metrics
from fullconformal.curvature import GGN, CurvatureError
from fullconformal.models import mlp
from fullconformal.models.fitting import NotFinite

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)), np.arange(40) % 3


class Explodes(nn.Module):
    """A module that must not be trained: bad input is found first."""

    def __init__(self, outputs=3):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, outputs), 0

    def forward(self, x):
        if x.requires_grad or torch.is_grad_enabled():
            raise AssertionError("training began")
        return self.layer(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method='magic' is unknown; allowed: 'auto'"),
        ({"scheme": "both"}, "scheme='both' is unknown; allowed: 'ordinary', 'studentized', 'deleted'"),
        ({"approximation": 3}, "approximation=3 is unknown"),
        ({"curvature": "kfoc"}, "curvature='kfoc' is unknown"),
        ({"damping": -1}, "damping=-1"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"damping": 0.1, "curvature": GGN()}, "damping was given twice"),
        ({"l2": -1.0}, "l2=-1.0"),
        ({"confidence_level": 1.0}, "confidence_level"),
        ({"confidence_level": 95}, "confidence_level"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"prune": "yes"}, "prune='yes'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"device": "quantum"}, "device='quantum'"),
        ({"prefit": True}, "prefit=True needs a fitted estimator"),
        ({"estimator": nn.ReLU()}, "no trainable parameters"),
        (
            {"estimator": nn.Sequential(nn.Linear(4, 3), nn.Dropout())},
            r"Dropout in training mode.*call estimator.eval\(\)",
        ),
        ({"estimator": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "BatchNorm1d in training mode"),
        ({"estimator": Explodes(5)}, r"logits of shape \(batch, 3\)"),
        ({"estimator": nn.Linear(7, 3)}, "estimator does not take X of shape"),
        ({"estimator": LogisticRegression(class_weight="balanced")}, "class_weight='balanced'"),
        ({"estimator": LogisticRegression(l1_ratio=1.0, solver="saga")}, "L1 penalty"),
        ({"estimator": LogisticRegression(solver="liblinear")}, "penalises the intercept"),
        ({"estimator": LogisticRegression(), "l2": 0.1}, "brings its own penalty"),
        ({"estimator": LogisticRegression(), "prefit": True}, "is not fitted"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier(**options).fit(X, Y)


def test_unsupported_estimators_name_the_supported():
    with pytest.raises(
        TypeError,
        match=r"RandomForestClassifier cannot be wrapped.*LogisticRegression, MLPClassifier or.*method='exact'",
    ):
        FullConformalClassifier(RandomForestClassifier()).fit(X, Y)


@pytest.mark.parametrize("estimator", [None, Explodes()])
@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        (np.where(X > 2, np.nan, X), Y, "NaN"),
        (np.where(X > 2, np.inf, X), Y, "infinity"),
        (X, Y[:-1], "inconsistent"),
        (X[:0], Y[:0], "0 sample"),
        (X, np.zeros(40), "one class"),
        (X, RNG.normal(size=40), "continuous"),
    ],
)
def test_bad_data(estimator, data, labels, message):
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier(estimator).fit(data, labels)


@pytest.mark.parametrize(
    ("data", "message"),
    [(X[:, :3], "3 features"), (X[:0], "0 sample"), (np.full((2, 4), np.nan), "NaN"), (X[0], "1D|1-D|one-dim|2D")],
)
def test_bad_objects(data, message):
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.raises(ValueError, match=message):
        clf.predict_p(data)


def test_not_fitted():
    with pytest.raises(NotFittedError):
        FullConformalClassifier().predict_p(X)
    with pytest.raises(NotFittedError):
        FullConformalClassifier().diagnose()


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, "high", [0.9, 1.0], []])
def test_bad_levels_are_found_before_predicting(level):
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.raises(ValueError, match="confidence_level"):
        clf.predict_set(X, level)


def test_bad_weights():
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    for weights in (np.ones(40), (np.ones(3), np.ones(2)), (np.ones(40), -np.ones(2)), (np.zeros(40), np.ones(2))):
        with pytest.raises(ValueError, match="weights"):
            clf.predict_p(X[:2], weights=weights)


def test_a_curvature_that_does_not_fit_is_refused_before_training():
    net = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))
    with pytest.raises(
        MemoryError, match=r"'ggn' of 24,003 parameters needs about 13 GiB, memory_budget is 4 GiB.*last_layer: 1.8 GiB"
    ):
        FullConformalClassifier(net, max_epochs=10**9, curvature="ggn").fit(X, Y)
    # 24 bytes an entry (float32): √(2³⁰/24) = 6,688.
    with pytest.raises(MemoryError, match=r"memory_budget is 1 GiB.*freeze layers .*6,688 trainable parameters"):
        FullConformalClassifier(net, max_epochs=10**9, memory_budget=1.0, curvature="hessian").fit(X, Y)
    with pytest.raises(
        MemoryError, match=r"'auto': no curvature .*ggn: .*dual: .*ekfac: .*last_layer: .*raise memory_budget"
    ):
        FullConformalClassifier(net, max_epochs=10**9, memory_budget=1e-3).fit(X, Y)


def test_losses_that_are_not_finite():
    net = mlp(4, (5,), 3)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="not finite"):
        FullConformalClassifier(net).fit(X, Y)
    with pytest.raises((NotFinite, CurvatureError), match="not finite"):
        FullConformalClassifier(mlp(4, (5,), 3), max_epochs=20).fit(X * 1e30, Y)


def test_labels_unseen_in_training_are_named_by_metrics():
    clf = FullConformalClassifier(method="influence").fit(X, Y)
    with pytest.raises(ValueError, match=r"y holds labels that are not among the classes: \[7\]"):
        metrics.coverage(clf.predict_set(X[:2]), [0, 7], clf.classes_)


def test_split_checks_its_share():
    with pytest.raises(ValueError, match="calibration_size"):
        SplitConformalClassifier(calibration_size=1.0).fit(X, Y)
