"""A network's last layer as a logistic regression on frozen features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullconformal.models.backbone import Backbone
from fullconformal.models.networks import linear


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
    """The frozen network with a new logistic head (weights zero), and the features (n, d) of X."""
    network = network.eval()
    backbone = Backbone(network, last_step(network, head, X[:2].to(next(network.parameters()).dtype)))
    with torch.no_grad():
        features = torch.cat([backbone(part) for part in X.split(1024)])
    if features.ndim != 2:
        raise ValueError(
            f"head={head!r} is given inputs of shape {tuple(features.shape)}; a head takes (batch, features)."
        )
    new = linear(features.shape[1], n_classes).to(X)
    for q in new[0].parameters():
        nn.init.zeros_(q)
    return nn.Sequential(backbone, *new), features
