"""Methods for networks too large for a curvature of all parameters: their last layer, from one pass over the training points."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullconformal.curvature import GGN
from fullconformal.diagnostics import Diagnostics
from fullconformal.last_layer.bag import PASS, Collector, LayerBag, last_layer_counts
from fullconformal.last_layer.network import Head, Stream
from fullconformal.losses import SOFTMAX, NotFinite
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, Method, Query
from fullconformal.methods.fitting import L2_NETWORK, fit_problem, to_device
from fullconformal.methods.influence import FittedInfluence, prepare_with
from fullconformal.models.requirements import check_outputs
from fullconformal.problem import Problem
from fullconformal.runtime.tasks import nobody
from fullconformal.storage import require, savable


@savable
class FittedLastLayer(Fitted):
    """The paper's approximation for the last layer alone, its curvature a Kronecker product.

    Kept of a training point are its whitened features and its solved residual, d + C numbers; never the object itself.
    """

    method = "influence"

    def __init__(self, head: Head, bag: LayerBag, damping_chosen: bool, memory: int, ordered: bool):
        """`ordered` where the points came in an order that the user knows."""
        y = torch.empty_like(bag.order)
        y[bag.order] = bag.y[: bag.n]
        super().__init__(np.asarray(y.cpu().numpy()), head.layer.out_features)
        self.head, self.bag, self.input_shape = head, bag, head.input_shape
        self.damping_chosen, self.memory, self.ordered = damping_chosen, memory, ordered

    @property
    def device(self) -> torch.device:
        return self.head.device

    def log_proba(self, X: Any) -> FloatArray:
        return self.head.log_proba(X)

    def precision(self, X: Any) -> float:
        return torch.finfo(self.head.dtype).eps

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        check_approximation(query.approximation)
        phi, logits = self.head.split(X)
        weights = None if query.points is None else torch.as_tensor(query.points, device=phi.device)
        if weights is not None and not self.ordered:
            raise ValueError(
                "weights of the training points need their order, and the DataLoader given to fit shuffled them."
            )
        held = self.bag.T.nbytes + self.bag.Q.nbytes
        out = last_layer_counts(
            self.bag, phi, logits, query.q, weights, query.class_conditional, bool(query.prune),
            max(self.memory - held, 2**28), query.progress,
        )  # fmt: skip
        return out.greater, out.equal

    @cached_property
    def diagnostics(self) -> Diagnostics:
        bag, n = self.bag, self.n
        s, loss = bag.self_influence[:n], bag.loss[:n]
        leverage = SOFTMAX.leverage(loss, s)
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
            largest_leverage=float(leverage.max()),
            mean_leverage=float(leverage.clamp(max=1.0).mean()),
            negative_scores=int((loss < s).sum()),
        )

    @property
    def warnings(self) -> list[str]:
        return self.diagnostics.warnings

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        head, bag = state["head"], state["bag"]
        rows = [getattr(bag, name) for name in ("T", "Q", "loss", "self_influence", "y", "spread", "w")]
        # Kernels on GPUs read as many numbers of each as there are points.
        whole = len(bag.Q) == len(bag.T) and all(part.shape == bag.T.shape[:1] for part in rows[2:])
        require(whole and 0 < bag.n <= len(bag.T), "training points")
        order = bag.order.sort().values
        require(torch.equal(order, torch.arange(bag.n, device=order.device)), "order of the training points")
        require(bool(((bag.y >= 0) & (bag.y < head.layer.out_features)).all()), "labels")


@savable
class FittedOnFeatures(Fitted):
    """The exact GGN of the last layer of a network whose training points came as a stream: what is kept is their features."""

    method = "influence"

    def __init__(self, head: Head, inner: FittedInfluence):
        super().__init__(inner.labels, inner.n_classes)
        self.head, self.inner, self.input_shape = head, inner, head.input_shape

    @property
    def device(self) -> torch.device:
        return self.head.device

    def features(self, X: Any) -> Any:
        """What the layer is given for objects X (m, ...)."""
        return self.head.split(X)[0][:, : self.head.layer.in_features].cpu().numpy()

    def log_proba(self, X: Any) -> FloatArray:
        return self.inner.log_proba(self.features(X))

    def precision(self, X: Any) -> float:
        return self.inner.precision(X)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        return self.inner.counts(self.features(X), query)

    @property
    def diagnostics(self) -> Diagnostics:
        return self.inner.diagnostics

    @property
    def warnings(self) -> list[str]:
        return self.inner.warnings


@savable
class LastLayer(Method):
    """Influence of the last layer of a network alone.

    With ``curvature="last_layer_kron"`` by a Kronecker product, with "last_layer" by the whole GGN of a trained network's features. The
    bag may hold a `Stream` as X, whose labels come with its objects.
    """

    name = "influence"

    def fit(self, bag: Bag, config: Config) -> FittedLastLayer | FittedOnFeatures:
        streamed = isinstance(bag.X, Stream)
        if not (config.prefit and config.head is None and isinstance(self.model, nn.Module)):
            problem = fit_problem(self.model, bag, config)
            parts = problem.unpack(problem.penalty).items()
            penalty = {name: float(part.mean()) / problem.n for name, part in parts}
            return self._kronecker(
                problem.model, Stream(problem.X, problem.y), penalty, replace(config, progress=nobody)
            )
        network = to_device(copy.deepcopy(self.model), config)
        if not streamed:
            dtype = next(network.parameters()).dtype
            check_outputs(network, torch.as_tensor(np.array(bag.X[:2])).to(config.device, dtype), bag.n_classes)
        penalty = dict.fromkeys(dict(network.named_parameters()), L2_NETWORK if config.l2 is None else config.l2)
        stream = bag.X if streamed else Stream(bag.X, bag.y)
        make = self._on_features if config.curvature == "last_layer" else self._kronecker
        return make(network, stream, penalty, config)

    def _kronecker(
        self, network: nn.Module, stream: Stream, penalty: Mapping[str, float], config: Config
    ) -> FittedLastLayer:
        """From penalties by parameter in mean form; features that are float32 are kept in float16 on a GPU."""
        check_approximation(config.approximation)
        head, batches = open_stream(network, stream, config)
        half = config.device.type == "cuda" and config.dtype is None and head.dtype == torch.float32
        weights = head.weights
        n_classes, d = weights.shape
        check_memory(stream.expected, d, n_classes, head.dtype.itemsize, half, config.memory)
        collector = Collector(d, n_classes, head.device, head.dtype, stream.expected)
        for phi, logits, y in batches:
            collector.add(phi, logits, y)
        lam = torch.full((d,), head.penalty(penalty, "weight"), dtype=torch.float64, device=weights.device)
        if head.layer.bias is not None:
            lam[-1] = head.penalty(penalty, "bias")
        bag = collector.finish(weights, lam, config.damping or 0.0, config.q, half)
        return FittedLastLayer(head, bag, config.damping is None, config.memory, stream.ordered)

    def _on_features(
        self, network: nn.Module, stream: Stream, penalty: Mapping[str, float], config: Config
    ) -> FittedOnFeatures:
        """From penalties by parameter in mean form, by the method for problems: the layer on its inputs is one."""
        head, batches = open_stream(network, stream, config)
        layer, memory = head.layer, config.memory
        p = sum(q.numel() for q in layer.parameters())
        needed = p**2 * (16 + 2 * head.dtype.itemsize)
        if needed > memory:
            raise MemoryError(
                f"the curvature of {p:,} parameters needs about {needed / 2**30:.2g} GiB, memory_budget is {memory / 2**30:.2g} GiB; "
                "curvature='last_layer_kron' needs no such matrix; or raise memory_budget."
            )
        pairs = [(phi[:, : layer.in_features], y) for phi, _, y in batches]
        features, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        top = copy.deepcopy(layer).requires_grad_(True)
        by_name = {f"0.{name}": len(y) * head.penalty(penalty, name) for name, _ in top.named_parameters()}
        ready = prepare_with(Problem(nn.Sequential(top), features, y, by_name), GGN(config.damping), memory)
        return FittedOnFeatures(head, FittedInfluence(ready, "ggn of the last layer", config.damping is None))


def open_stream(
    network: nn.Module, stream: Stream, config: Config
) -> tuple[Head, Iterator[tuple[Tensor, Tensor, Tensor]]]:
    """The network split at its last layer, and features, logits and labels of a readable stream's batches."""
    # A frozen backbone may have another dtype than the head that was put on it.
    *_, last = network.parameters()
    batches = stream.batches(config.device, last.dtype)
    first = next(batches)
    head, expected, progress = Head.of(network, first[0]), stream.expected, config.progress

    def passes() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        n = 0
        for x, y in chain([first], batches):
            check_labels(y, head.layer.out_features)
            phi, logits = head(x)
            if not torch.isfinite(logits).all() or not torch.isfinite(phi).all():
                raise NotFinite(
                    f"the model's features or logits are not finite on points {n} to {n + len(phi) - 1} of X."
                )
            yield phi, logits, y
            n += len(y)
            if expected:
                progress(n, expected)

    return head, passes()


# Checks ---------------------------------------------------------------------------------------------------------------


def check_approximation(approximation: str) -> None:
    """Raise unless the approximation is the direct one."""
    if approximation != "direct":
        raise ValueError(
            f"approximation={approximation!r} does not go with curvature='last_layer_kron'; use 'direct', or "
            "curvature='last_layer'."
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
    needed += 8 * PASS * (2 * d + 3 * n_classes)
    if needed > memory:
        raise MemoryError(
            f"features and residuals of {n:,} points ({d} + {n_classes} numbers each) need about {needed / 2**30:.3g} GiB, "
            f"memory_budget is {memory / 2**30:.3g} GiB; raise it, or give fewer points."
        )
