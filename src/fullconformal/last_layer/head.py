"""A trained network in two: the frozen backbone, and the last layer as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fullconformal.last_layer.stream import BATCH
from fullconformal.losses import SOFTMAX
from fullconformal.models.heads import Backbone, last_step
from fullconformal.models.networks import is_zero_first
from fullconformal.storage import expect, savable


@savable
@dataclass(frozen=True)
class Head:
    """A network in two: the frozen backbone that makes features, and the linear layer that makes logits of them."""

    backbone: Backbone
    name: str
    layer: nn.Linear
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, network: nn.Module, x: Tensor) -> Head:
        """Split a network; x is a batch of objects it takes."""
        try:
            name = last_step(network.eval(), "auto", x[:2])
        except RuntimeError as error:
            raise ValueError(f"estimator does not take objects of shape {tuple(x.shape[1:])}: {error}") from error
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if is_zero_first(layer):
            raise ValueError(
                "curvature='last_layer_kron' needs a last layer with one output a class; a logistic regression of two classes has "
                "a single one, for which curvature='ggn' is exact and as cheap."
            )
        return cls(Backbone(network, name), name, layer, x.device, x.dtype)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (k, d), a one appended where the layer has a bias, and logits (k, C)."""
        phi = self.backbone(x)
        if phi.ndim != 2:
            raise ValueError(
                f"the last layer is given inputs of shape {tuple(phi.shape)}; it must take (batch, features)."
            )
        logits = self.layer(phi)
        return phi if self.layer.bias is None else torch.cat([phi, phi.new_ones(len(phi), 1)], 1), logits

    def split(self, X: Any) -> tuple[Tensor, Tensor]:
        """Features and logits of objects X (m, ...)."""
        batches = (torch.as_tensor(np.array(X[at : at + BATCH])) for at in range(0, len(X), BATCH))
        parts = [self(x.to(self.device, self.dtype)) for x in batches]
        phi, logits = (torch.cat(part) for part in zip(*parts, strict=True))
        if not bool((finite := logits.isfinite().all(1) & phi.isfinite().all(1)).all()):
            raise ValueError(
                f"the model's features or logits of object {int(finite.int().argmin())} of those to be predicted (counted from 0) are "
                "not finite; leave it out, or clip it."
            )
        return phi, logits

    def log_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """Logarithms (m, C) of the probabilities of objects X (m, ...)."""
        return np.asarray(SOFTMAX.log_proba(self.split(X)[1].double()).cpu().numpy())

    def state(self) -> dict[str, Any]:
        """The network, and the name of its last layer."""
        return {"network": self.backbone.network, "name": self.name}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Head:
        """A network, split at its last layer again."""
        network, name = expect(state["network"], nn.Module), expect(state["name"], str)
        layer = expect(network.get_submodule(name), nn.Linear)
        return cls(Backbone(network, name), name, layer, layer.weight.device, layer.weight.dtype)

    def penalty(self, penalties: Mapping[str, float], part: str) -> float:
        """The penalty of the layer's weight or bias, of those of the network's parameters; the layer may be the network."""
        return penalties.get(f"{self.name}.{part}".lstrip("."), 0.0)

    @property
    def weights(self) -> Tensor:
        """The layer's parameters (C, d), the bias the last column, float64."""
        bias = self.layer.bias
        W = self.layer.weight if bias is None else torch.cat([self.layer.weight, bias[:, None]], 1)
        return W.detach().double()
