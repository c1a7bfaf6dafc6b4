"""Problems × curvatures that the tests share: one line each."""

from __future__ import annotations

import torch
from torch import nn

from fullconformal.curvature import GGN, Hessian
from fullconformal.models import linear, mlp

CURVATURES = {"ggn": GGN, "hessian": Hessian}


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


# name → (model factory, shape of an object, number of classes)
MODELS = {
    "binary": (lambda: linear(6, 2), (6,), 2),
    "logistic": (lambda: linear(6, 5), (6,), 5),
    "mlp": (lambda: mlp(6, (20, 10), 3), (6,), 3),
    "cnn": (cnn, (1, 6, 6), 3),
    "frozen": (frozen, (6,), 3),
    "odd": (odd, (6,), 3),
    "residual": (Residual, (6,), 3),
}


def draw(name: str, seed: int, n: int = 12, m: int = 2):
    """A float64 model with random weights, a bag (X, y) and m objects. Deterministic in the seed."""
    factory, shape, n_classes = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = factory().double().eval()
        X, Xt = torch.randn(n, *shape).double(), torch.randn(m, *shape).double()
        y = torch.randint(n_classes, (n,))
    return model, X, y, Xt
