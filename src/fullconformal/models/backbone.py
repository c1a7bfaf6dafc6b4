"""All of a network before its head."""

from __future__ import annotations

from torch import Tensor, nn


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
