"""Problems × curvatures that the tests share: one line each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fullconformal.curvature import EKFAC, GGN, KFAC, Dual, Hessian
from fullconformal.models import linear, mlp

CURVATURES = {
    "ggn": GGN,
    "hessian": Hessian,
    "kfac": KFAC,
    "ekfac": EKFAC,
    "dual": Dual,
}
DENSE = ("ggn", "hessian")

WEIGHT_CHECKS = (
    "check_sample_weight_equivalence_on_dense_data",
    "check_sample_weight_equivalence_on_sparse_data",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_not_overwritten",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
)


def expected_failures(estimator):
    """scikit-learn's checks that conformal predictors do not pass: a point of weight 0 is not trained with, and is scored all the same."""
    if type(estimator).__name__ == "CVPlusRegressor":
        # Of which the check gives the folds, and looks at the mean of the models alone.
        return {}
    # Neighbours are trained with no weights at all.
    neighbours = "KNeighbors" in type(estimator.estimator).__name__
    return dict.fromkeys(WEIGHT_CHECKS if neighbours else WEIGHT_CHECKS[:2], "weights are of training, not of scores")


class Residual(nn.Module):
    """A module that is no chain of layers: everything goes through torch.func."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(x + torch.tanh(self.inner(x)))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def frozen():
    return nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 3))


def odd():
    """Dropout in eval mode, a layer without bias, two activations, nesting."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5)),
        nn.Linear(8, 4, bias=False),
        nn.ELU(),
        nn.Sigmoid(),
        nn.Linear(4, 3),
    )


class ResNet(nn.Module):
    """A small residual network: convolutions without bias, a stride, a dilation, batch normalisation, a pooled dense end."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.inner = nn.Conv2d(3, 3, 3, padding=2, dilation=2)
        self.down, self.skip = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(3, 4, 1, stride=2, bias=False)
        self.relu, self.end = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        x = self.relu(x + self.inner(x))
        x = self.relu(self.down(x) + self.skip(x))
        return self.end(x.mean((2, 3)))


def resnet():
    """Its normalisation has seen other data, and is held fixed."""
    model = ResNet()
    nn.init.normal_(model.norm.running_mean, 0, 0.3)
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    model.norm.requires_grad_(False)
    return model


def resnet18(width: int) -> nn.Module:
    """The network of the example, its normalisation held fixed."""
    path = Path(__file__).parents[1] / "examples" / "resnet_cifar.py"
    spec = importlib.util.spec_from_file_location("resnet_cifar", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.resnet18(width).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return model


# name → (model factory, shape of an object, number of classes)
MODELS = {
    "binary": (lambda: linear(6, 2), (6,), 2),
    "logistic": (lambda: linear(6, 5), (6,), 5),
    "mlp": (lambda: mlp(6, (20, 10), 3), (6,), 3),
    "cnn": (cnn, (1, 6, 6), 3),
    "frozen": (frozen, (6,), 3),
    "odd": (odd, (6,), 3),
    "residual": (Residual, (6,), 3),
    "resnet": (resnet, (1, 6, 6), 3),
}


def draw(name: str, seed: int, n: int = 12, m: int = 2, close: int = 0):
    """A float64 model with random weights, a bag (X, y) and m objects; the last `close` points are the first moved by about 1e-9.

    Deterministic in the seed.
    """
    factory, shape, n_classes = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = factory().double().eval()
        X, Xt = torch.randn(n, *shape).double(), torch.randn(m, *shape).double()
        y = torch.randint(n_classes, (n,))
    for k in range(close):
        X[n - 1 - k], y[n - 1 - k] = X[k] * (1 + 1e-9 * k), y[k]
    return model, X, y, Xt


def bad_data(X, y):
    """Objects and labels of which no classifier can be made, from good ones, and a word of what is said of them."""
    return [
        (np.where(X > 2, np.nan, X), y, "NaN"),
        (np.where(X > 2, np.inf, X), y, "infinity"),
        (X, y[:-1], "must be as many"),
        (X[:0], y[:0], "0 sample"),
        (X, np.zeros(len(y)), "one class"),
        (X, X[:, 0], "continuous"),
    ]
