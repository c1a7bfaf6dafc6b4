"""A trained network, split at its last layer, and its training points, a batch at a time.

One pass suffices, and labels come with their objects, so a loader may shuffle. Nothing larger than a batch is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from fullconformal.losses import SOFTMAX
from fullconformal.models.networks import Backbone, is_zero_first, last_step
from fullconformal.storage import LIMITS, expect, require, savable
from fullconformal.storage.modules import check_activations

# Objects that go through the network together.
BATCH = 1024


def is_stream(X: Any) -> bool:
    """Whether X is a dataset or a loader, which yield objects with their labels."""
    return isinstance(X, (Dataset, DataLoader))


def is_mapped(X: Any) -> bool:
    """Whether an array, or what it is a view of, is a memory-mapped file."""
    while isinstance(X, np.ndarray):
        if isinstance(X, np.memmap):
            return True
        X = X.base
    return False


@dataclass(frozen=True)
class Stream:
    """Batches (x, label) of a dataset, a loader, or arrays X (n, ...) and label indices y (n,)."""

    source: Any
    y: Any = None

    @property
    def loader(self) -> Any:
        if isinstance(self.source, DataLoader):
            return self.source
        return DataLoader(self.source, batch_size=BATCH)

    @property
    def expected(self) -> int | None:
        """Number of points, where it can be known before the pass."""
        if self.y is not None:
            return len(self.y)
        for counted in (self.loader.sampler, self.loader.dataset):
            try:
                return len(counted)
            except TypeError:
                continue
        return None

    @property
    def ordered(self) -> bool:
        """Whether the points come in an order the user knows."""
        if self.y is not None or not isinstance(self.source, DataLoader):
            return True
        plain = isinstance(self.source.sampler, SequentialSampler) or isinstance(self.source.dataset, IterableDataset)
        return plain and (self.source.batch_sampler is None or type(self.source.batch_sampler) is BatchSampler)

    def raw(self) -> Iterator[tuple[Any, Any]]:
        """Batches as the source gives them; an error where it would not yield every training point once."""
        if self.y is not None:
            for at in range(0, len(self.y), BATCH):
                part = self.source[at : at + BATCH]
                # A copy of the batch alone: torch takes no read-only memory.
                yield part if isinstance(part, Tensor) else np.array(part), self.y[at : at + BATCH]
            return
        if getattr(self.loader.sampler, "replacement", False):
            raise ValueError(
                f"X draws with replacement ({type(self.loader.sampler).__name__}); full conformal prediction needs every training "
                "point once. Give a DataLoader without that sampler."
            )
        for item in self.loader:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                got = f"{len(item)} parts" if isinstance(item, (tuple, list)) else type(item).__name__
                raise ValueError(f"X must yield pairs (objects, labels), got {got}; y cannot be given beside it.")
            yield item[0], item[1]

    def batches(self, device: torch.device | str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked batches on a device: objects (k, ...) and whole labels (k,)."""
        shape, n = None, 0
        for objects, labels in self.raw():
            x, y = torch.as_tensor(objects), torch.as_tensor(labels)
            if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or y.is_floating_point() or y.is_complex():
                raise ValueError(
                    "X must yield batches of objects (k, ...) with whole-number labels (k,), got shapes "
                    f"{tuple(x.shape)} and {tuple(y.shape)} of {y.dtype}; give a DataLoader that makes batches."
                )
            shape = shape or tuple(x.shape[1:])
            if tuple(x.shape[1:]) != shape:
                raise ValueError(f"X yields objects of shape {tuple(x.shape[1:])} after others of shape {shape}.")
            n += len(y)
            yield x.to(device=device, dtype=dtype), y.to(device=device, dtype=torch.long)
        if not n:
            raise ValueError("X yields no points: the dataset or the loader is empty.")
        if self.expected is not None and n != self.expected:
            raise ValueError(
                f"X yielded {n} of its {self.expected} points; full conformal prediction needs every training point once: leave "
                "out drop_last, and samplers that repeat or skip."
            )


@savable
@dataclass(frozen=True)
class Head:
    """A network in two: the frozen backbone that makes features, and the linear layer that makes logits of them."""

    backbone: Backbone
    name: str
    layer: nn.Linear
    device: torch.device
    dtype: torch.dtype
    #: shape of an object
    input_shape: tuple[int, ...]

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
                "curvature='last_layer_kron' needs a last layer with one output per class; a logistic regression of two classes has "
                "a single one, for which curvature='ggn' is exact and as cheap."
            )
        return cls(Backbone(network, name), name, layer, x.device, x.dtype, tuple(x.shape[1:]))

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
        """The network, the name of its last layer, and the shape of an object."""
        return {"network": self.backbone.network, "name": self.name, "input_shape": self.input_shape}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Head:
        """A network, split at its last layer again."""
        network, name = expect(state["network"], nn.Module), expect(state["name"], str)
        layer, shape = expect(network.get_submodule(name), nn.Linear), expect(state["input_shape"], tuple)
        sizes = len(shape) <= LIMITS.axes and all(type(size) is int and size > 0 for size in shape)
        sizes = sizes and math.prod(shape) <= LIMITS.numbers
        require(sizes, "shape of objects")
        check_activations(network, shape, 1, 0)
        return cls(Backbone(network, name), name, layer, layer.weight.device, layer.weight.dtype, shape)

    def penalty(self, penalties: Mapping[str, float], part: str) -> float:
        """The penalty of the layer's weight or bias, of those of the network's parameters; the layer may be the network."""
        return penalties.get(f"{self.name}.{part}".lstrip("."), 0.0)

    @property
    def weights(self) -> Tensor:
        """The layer's parameters (C, d), the bias the last column, float64."""
        bias = self.layer.bias
        W = self.layer.weight if bias is None else torch.cat([self.layer.weight, bias[:, None]], 1)
        return W.detach().double()
