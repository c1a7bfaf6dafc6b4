"""The models that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "identity": nn.Identity,
    "gelu": nn.GELU,
}


def linear(n_features: int, n_classes: int, bias: bool = True) -> nn.Sequential:
    """Logits of a logistic regression: one weight vector and logits (0, z) for two classes, as in scikit-learn, else C vectors."""
    return mlp(n_features, (), n_classes, bias=bias, binary_as_one=True)


def mlp(
    n_features: int,
    hidden: Sequence[int],
    n_classes: int,
    activation: str = "relu",
    *,
    bias: bool = True,
    binary_as_one: bool = False,
) -> nn.Sequential:
    """A multi-layer perceptron that returns logits.

    Examples
    --------
    >>> from fullconformal.models import mlp
    >>> sum(q.numel() for q in mlp(32, (100, 50, 20), 10).parameters())
    9580
    """
    outputs = 1 if binary_as_one and n_classes == 2 else n_classes
    sizes = [n_features, *hidden, outputs]
    steps: list[nn.Module] = []
    for k, (i, o) in enumerate(pairwise(sizes)):
        steps.append(nn.Linear(i, o, bias=bias))
        if k < len(sizes) - 2 and activation != "identity":
            steps.append(ACTIVATIONS[activation]())
    if outputs < n_classes:
        steps.append(zero_first())
    return nn.Sequential(*steps)


def zero_first() -> nn.Linear:
    """The constant map z ↦ (0, z)."""
    layer = nn.Linear(1, 2, bias=False).requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0], [1.0]]))
    return layer


def is_zero_first(layer: nn.Linear) -> bool:
    """Whether a layer is the constant map z ↦ (0, z)."""
    constant = not any(q.requires_grad for q in layer.parameters()) and len(list(layer.parameters())) == 1
    return constant and layer.weight.flatten().tolist() == [0.0, 1.0]
