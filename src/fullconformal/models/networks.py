"""The networks that come with the package, and a network in two: its last linear layer and the frozen rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fullconformal.runtime.replicas import replica
from fullconformal.storage.modules import WRAPPERS

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "identity": nn.Identity,
    "gelu": nn.GELU,
}


def linear(n_features: int, n_classes: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Logits of a logistic regression: one weight vector and logits (0, z) for two classes, as in scikit-learn, else C vectors."""
    return mlp(n_features, (), n_classes, bias=bias, binary_as_one=True, dtype=dtype)


def zero_linear(n_features: int, n_classes: int, bias: bool = True) -> nn.Sequential:
    """A logistic regression before its fit, float64: all weights zero."""
    module = linear(n_features, n_classes, bias, torch.float64)
    with torch.no_grad():
        for q in module[0].parameters():
            q.zero_()
    return module


def mlp(
    n_features: int,
    hidden: Sequence[int],
    n_classes: int,
    activation: str = "relu",
    *,
    bias: bool = True,
    binary_as_one: bool = False,
    dtype: torch.dtype = torch.float32,
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
        steps.append(nn.Linear(i, o, bias=bias, dtype=dtype))
        if k < len(sizes) - 2 and activation != "identity":
            steps.append(ACTIVATIONS[activation]())
    if outputs < n_classes:
        steps.append(zero_first(dtype))
    return nn.Sequential(*steps)


def cnn(
    shape: Sequence[int],
    n_classes: int,
    channels: Sequence[int] = (16, 32),
    kernel: int = 5,
    pool: int = 4,
    stride: int = 2,
) -> nn.Sequential:
    """Convolutions without padding, ReLU and max-pooling after each, one linear layer; images of shape (channels, height, width).

    The defaults are the paper's network, with the pooling stride of its published code.

    Examples
    --------
    >>> from fullconformal.models import cnn
    >>> [sum(q.numel() for q in cnn(shape, 10).parameters()) for shape in ((3, 32, 32), (1, 28, 28))]
    [16938, 14538]
    """
    i, *size = shape
    steps: list[nn.Module] = []
    for o in channels:
        steps += [nn.Conv2d(i, o, kernel), nn.ReLU(), nn.MaxPool2d(pool, stride)]
        size = [(s - kernel + 1 - pool) // stride + 1 for s in size]
        i = o
    if min(size) < 1:
        raise ValueError(
            f"shape={tuple(shape)} is too small for {len(channels)} convolutions of {kernel} pooled by {pool}."
        )
    return nn.Sequential(*steps, nn.Flatten(), nn.Linear(i * size[0] * size[1], n_classes))


# Of the paper: hidden layers of its perceptrons.
HIDDEN: dict[str, tuple[int, ...]] = {"MLP_A": (20, 10), "MLP_B": (100,), "MLP_C": (100, 50, 20), "LR": ()}


def paper_network(name: str, shape: Sequence[int], n_classes: int) -> nn.Sequential:
    """One of the paper's networks, "MLP_A", "MLP_B", "MLP_C", "LR" or "CNN", for objects of a shape.

    Examples
    --------
    >>> from fullconformal.models import paper_network
    >>> sum(q.numel() for q in paper_network("MLP_A", (8,), 10).parameters())
    500
    """
    if name == "CNN":
        return cnn(shape, n_classes)
    if name not in HIDDEN:
        raise ValueError(f"name={name!r} is unknown; allowed: {', '.join(map(repr, (*HIDDEN, 'CNN')))}.")
    (n_features,) = shape
    return mlp(n_features, HIDDEN[name], n_classes)


class Autoencoder(nn.Module):
    """Dense layers of 128 and 64 down to a few numbers and the same way back, ReLU and dropout between them.

    Parameters
    ----------
    n_features : int
        Numbers an object has.
    n_latent : int
        Numbers that are left of it.
    hidden : sequence of int
        Widths of the layers between.
    dropout : float
        Share of the activations dropped in training.

    Examples
    --------
    >>> import torch
    >>> from fullconformal.models import Autoencoder
    >>> Autoencoder(784, 8).encode(torch.rand(3, 1, 28, 28)).shape
    torch.Size([3, 8])
    """

    def __init__(self, n_features: int, n_latent: int, hidden: Sequence[int] = (128, 64), dropout: float = 0.2):
        super().__init__()
        self.encoder = self._chain([n_features, *hidden, n_latent], dropout)
        self.decoder = self._chain([n_latent, *hidden[::-1], n_features], dropout)

    @staticmethod
    def _chain(sizes: Sequence[int], dropout: float) -> nn.Sequential:
        steps: list[nn.Module] = [nn.Linear(sizes[0], sizes[1])]
        for i, o in pairwise(sizes[1:]):
            steps += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(i, o)]
        return nn.Sequential(*steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Objects (k, d) as they come back."""
        out: torch.Tensor = self.decoder(self.encoder(x))
        return out

    @torch.no_grad()
    def encode(self, X: torch.Tensor, chunk: int = 10_000) -> torch.Tensor:
        """What is left (n, n_latent) of objects (n, ...), without dropout, chunk by chunk."""
        training = self.encoder.training
        self.encoder.eval()
        out = torch.cat([self.encoder(part.flatten(1)) for part in X.split(chunk)])
        self.encoder.train(training)
        return out


def zero_first(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """The constant map z ↦ (0, z)."""
    layer = nn.Linear(1, 2, bias=False, dtype=dtype)
    layer.weight = nn.Parameter(torch.tensor([[0.0], [1.0]], dtype=dtype), requires_grad=False)
    return layer


def is_zero_first(layer: nn.Linear) -> bool:
    """Whether a layer is the constant map z ↦ (0, z)."""
    parameters = list(layer.parameters())
    constant = len(parameters) == 1 and not parameters[0].requires_grad
    return constant and layer.weight.flatten().tolist() == [0.0, 1.0]


class Backbone(nn.Module):
    """Everything of a network before its head, frozen: what the head is given, (k, d) in the dtype of the objects."""

    def __init__(self, network: nn.Module, head: str):
        super().__init__()
        self.network, self.head = network.requires_grad_(False).eval(), head

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        # Other threads may be at work with the network itself.
        network = replica(self.network)
        handle = network.get_submodule(self.head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            *_, last = network.parameters()
            network(x.to(last.dtype))
        finally:
            handle.remove()
        return seen[-1].to(x.dtype)


WRAPPERS["Backbone"] = Backbone, "network", "head"


def find_head(network: nn.Module, head: str) -> list[str]:
    """Names of the linear layers that may be the head: the one given, or with "auto" all of them; "" is the whole network."""
    layers: list[str] = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not layers or (head != "auto" and head not in layers):
        raise ValueError(
            f"head={head!r} is no torch.nn.Linear of the estimator; its linear layers: {layers or 'none'}."
        )
    return layers if head == "auto" else [head]


@torch.no_grad()
def last_step(network: nn.Module, head: str, x: Tensor) -> str:
    """Name of the head, which must be the network's last step: its output is the network's."""
    outputs: dict[str, Tensor] = {}
    names = find_head(network, head)
    handles = [
        network.get_submodule(name).register_forward_hook(lambda *call, name=name: outputs.__setitem__(name, call[2]))
        for name in names
    ]
    try:
        out = network(x)
    finally:
        for handle in handles:
            handle.remove()
    for name, value in outputs.items():
        if value is out or torch.equal(value, out):
            return name
    raise ValueError(f"head={head!r} is not the network's last step: what it returns is not what the network returns.")


def with_new_head(network: nn.Module, head: str, X: Tensor, n_classes: int) -> tuple[nn.Sequential, Tensor]:
    """The frozen network with a new logistic head (weights zero), and the features (n, d) of X.

    In float64 where the network allows it, whatever it was trained in: in float32 an object has other last bits in another batch, too
    far apart to be tied with its equal among the training points.
    """
    own = next(network.parameters()).dtype
    try:
        network = network.eval().double()
        name = last_step(network, head, X[:2].double())
    except RuntimeError:
        network = network.to(own)
        try:
            name = last_step(network, head, X[:2].to(own))
        except RuntimeError as error:
            raise ValueError(f"estimator does not take X of shape {tuple(X.shape)}: {error}") from error
    backbone = Backbone(network, name)
    with torch.no_grad():
        features = torch.cat([backbone(part) for part in X.split(1024)])
    if features.ndim != 2:
        raise ValueError(
            f"head={head!r} is given inputs of shape {tuple(features.shape)}; a head takes (batch, features)."
        )
    return nn.Sequential(backbone, *zero_linear(features.shape[1], n_classes).to(X)), features
