"""A network's last layer as a logistic regression on frozen features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fullconformal.models.networks import linear


class Backbone(nn.Module):
    """Everything of a network before its head, frozen: what the head is given, (k, d) in float64."""

    def __init__(self, network: nn.Module, head: str):
        super().__init__()
        self.network, self.head = network.requires_grad_(False).eval(), head
        self.dtype = next(network.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.network.get_submodule(self.head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self.network(x.to(self.dtype))
        finally:
            handle.remove()
        return seen[-1].to(x.dtype)


def find_head(network: nn.Module, head: str) -> str:
    """Name of the head: the one given, or with "auto" the last linear layer. It must be linear and the network's last step."""
    layers: list[str] = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    if head == "auto" and layers:
        return layers[-1]
    if head not in layers:
        raise ValueError(
            f"head={head!r} is no torch.nn.Linear of the estimator; its linear layers: {layers or 'none'}."
        )
    return head


def with_new_head(network: nn.Module, head: str, X: Tensor, n_classes: int) -> tuple[nn.Sequential, Tensor]:
    """The frozen network with a new logistic head (weights zero) in float64, and the features (n, d) of X."""
    if head == "":
        raise ValueError("head='' : the estimator is a single linear layer; leave head=None.")
    backbone = Backbone(network, head)
    with torch.no_grad():
        features = torch.cat([backbone(part) for part in X.split(1024)])
    if features.ndim != 2:
        raise ValueError(
            f"head={head!r} is given inputs of shape {tuple(features.shape)}; a head takes (batch, features)."
        )
    new = linear(features.shape[1], n_classes).to(X)
    nn.init.zeros_(new[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(new[0].bias)  # type: ignore[arg-type]
    return nn.Sequential(backbone, *new), features
