"""A network's last linear layer and the frozen rest: found, taken apart, and made anew as a logistic regression."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullconformal.models.networks import linear
from fullconformal.storage.modules import WRAPPERS


class Backbone(nn.Module):
    """Everything of a network before its head, frozen: what the head is given, (k, d) in the dtype of the objects."""

    def __init__(self, network: nn.Module, head: str):
        super().__init__()
        self.network, self.head = network.requires_grad_(False).eval(), head

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.network.get_submodule(self.head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            *_, last = self.network.parameters()
            self.network(x.to(last.dtype))
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
    """The frozen network with a new logistic head (weights zero), and the features (n, d) of X."""
    network = network.eval()
    try:
        backbone = Backbone(network, last_step(network, head, X[:2].to(next(network.parameters()).dtype)))
    except RuntimeError as error:
        raise ValueError(f"estimator does not take X of shape {tuple(X.shape)}: {error}") from error
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
