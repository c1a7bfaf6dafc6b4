"""Engines for networks too large for a curvature of all parameters: their last layer, from one pass over the training points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fullconformal.diagnostics import Diagnostics
from fullconformal.estimators.engines import Engine, FloatArray, Query
from fullconformal.estimators.fitting import to_tensor
from fullconformal.estimators.heads import Backbone, last_step
from fullconformal.estimators.streams import BATCH, Stream
from fullconformal.models.fitting import NotFinite
from fullconformal.models.networks import is_zero_first
from fullconformal.scores import last_layer
from fullconformal.scores.base import Progress
from fullconformal.scores.last_layer import Passing, last_layer_counts


@dataclass(frozen=True)
class Head:
    """A network in two: the frozen backbone that makes features, and the linear layer that makes logits of them."""

    backbone: Backbone
    layer: nn.Linear
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, network: nn.Module, x: Tensor) -> Head:
        """Split a network in eval mode; x is a batch of objects it takes."""
        name = last_step(network, "auto", x[:2])
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if is_zero_first(layer):
            raise ValueError(
                "curvature='last_layer_kron' needs a last layer with one output a class; a logistic regression of two classes has "
                "a single one, for which curvature='ggn' is exact and as cheap."
            )
        return cls(Backbone(network, name), layer, x.device, x.dtype)

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
        parts = [self(to_tensor(X[at : at + BATCH], self.device, self.dtype)) for at in range(0, len(X), BATCH)]
        phi, logits = (torch.cat(part) for part in zip(*parts, strict=True))
        return phi, logits

    @property
    def weights(self) -> Tensor:
        """The layer's parameters (C, d), the bias the last column, float64."""
        bias = self.layer.bias
        W = self.layer.weight if bias is None else torch.cat([self.layer.weight, bias[:, None]], 1)
        return W.detach().double()


class LastLayer(Engine):
    """The paper's approximation for the last layer alone, its curvature a Kronecker product.

    Kept of a training point are its whitened features and its solved residual, d + C numbers; never the object itself.
    """

    valid, separable = False, True

    def __init__(
        self,
        network: nn.Module,
        stream: Stream,
        l2: tuple[float, float],
        damping: float | None,
        q: float,
        device: torch.device | str,
        memory: int,
        half: bool = False,
        progress: Progress | None = None,
    ):
        stream.check()
        self.damping_chosen, self.memory, self.ordered = damping is None, memory, stream.ordered
        dtype = next(network.parameters()).dtype
        batches = stream.batches(device, dtype)
        first = next(batches)
        self.input_shape = tuple(first[0].shape[1:])
        self.head = Head.of(network.eval(), first[0])
        weights = self.head.weights
        self.n_classes, d = weights.shape
        check_memory(stream.expected, d, self.n_classes, dtype.itemsize, half, memory)
        passing = Passing(d, self.n_classes, first[0].device, dtype, stream.expected)
        labels = self._pass(chain([first], batches), passing, stream.expected, progress)
        self.labels: npt.NDArray[np.int64] = np.concatenate(labels)
        self.n = len(self.labels)
        penalty = torch.full((d,), l2[0], dtype=torch.float64, device=weights.device)
        if self.head.layer.bias is not None:
            penalty[-1] = l2[1]
        self.bag = passing.finish(weights, penalty, damping or 0.0, q, half)

    def _pass(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        passing: Passing,
        expected: int | None,
        progress: Progress | None,
    ) -> list[npt.NDArray[np.int64]]:
        """Take in every batch; returns the labels."""
        labels = []
        for x, y in batches:
            check_labels(y, self.n_classes)
            phi, logits = self.head(x)
            if not torch.isfinite(logits).all() or not torch.isfinite(phi).all():
                raise NotFinite(
                    f"the model's features or logits are not finite on points {passing.n} to {passing.n + len(y) - 1} of X."
                )
            passing.add(phi, logits, y)
            labels.append(y.cpu().numpy())
            if progress is not None and expected:
                progress(passing.n, expected)
        return labels

    def log_proba(self, X: Any) -> FloatArray:
        return torch.log_softmax(self.head.split(X)[1].double(), -1).cpu().numpy()

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.approximation != "direct":
            raise ValueError(
                f"approximation={query.approximation!r} is not there with curvature='last_layer_kron'; use 'direct', or "
                "curvature='last_layer'."
            )
        phi, logits = self.head.split(X)
        weights = None if query.points is None else torch.as_tensor(query.points, device=phi.device)
        if weights is not None and not self.ordered:
            raise ValueError(
                "weights of the training points need their order, and the DataLoader given to fit shuffled them."
            )
        state = self.bag.T.nbytes + self.bag.Q.nbytes
        out = last_layer_counts(
            self.bag, phi, logits, query.q, weights, query.class_conditional, bool(query.prune),
            max(self.memory - state, 2**28), query.progress,
        )  # fmt: skip
        return out.greater, out.equal

    @cached_property
    def diagnostics(self) -> Diagnostics:
        bag, n = self.bag, self.n
        s, loss = bag.self_influence[:n].double(), bag.loss[:n].double()
        tiny = torch.finfo(bag.loss.dtype).eps
        return Diagnostics(
            n_points=n,
            n_parameters=bag.figures.gradient.numel(),
            curvature="Kronecker product of the last layer",
            gradient=float(bag.figures.gradient.abs().max()),
            newton_decrement=bag.figures.newton_decrement,
            largest_influence=float(s.max().sqrt()),
            damping=bag.figures.damping,
            damping_chosen=self.damping_chosen,
            smallest_eigenvalue=bag.figures.smallest_eigenvalue,
            positive_definite=True,
            largest_leverage=float((s / torch.expm1(loss).clamp_min(tiny)).max()),
            negative_scores=int((loss < s).sum()),
        )


def check_labels(y: Tensor, n_classes: int) -> None:
    """Raise where a label is not the index of one of the network's outputs."""
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= n_classes:
        raise ValueError(
            f"X yields the label {low if low < 0 else high}, which the estimator has no output for: labels must be 0 to "
            f"{n_classes - 1}, the indices of its {n_classes} outputs."
        )


def check_memory(n: int | None, d: int, n_classes: int, size: int, half: bool, memory: int) -> None:
    """Raise, before the pass, where what is kept of the training points cannot fit."""
    if n is None:
        return
    needed = n * ((d + n_classes) * size + (2 * d if half else 0)) + 8 * (3 * d**2 + 3 * n_classes**2)
    needed += 8 * last_layer.PASS * (2 * d + 3 * n_classes)
    if needed > memory:
        raise MemoryError(
            f"features and residuals of {n:,} points ({d} + {n_classes} numbers each) need about {needed / 2**30:.3g} GiB, "
            f"memory_budget is {memory / 2**30:.3g} GiB; raise it, or give fewer points."
        )
