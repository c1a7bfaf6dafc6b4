"""Methods for networks too large for a curvature of all parameters: their last layer, from one pass over the training points."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fullconformal.curvature import GGN
from fullconformal.diagnostics import Diagnostics
from fullconformal.last_layer.bag import PASS, Collector, LayerBag
from fullconformal.last_layer.counts import last_layer_counts
from fullconformal.last_layer.network import Head, Stream
from fullconformal.losses import NotFinite
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, IntArray, Method, Progress, Query
from fullconformal.methods.fitting import L2_NETWORK, fit_problem, to_device
from fullconformal.methods.influence import FittedInfluence, prepare_with
from fullconformal.models.requirements import check_outputs
from fullconformal.problem import Problem
from fullconformal.storage import expect, require, savable


@savable
class FittedLastLayer(Fitted):
    """The paper's approximation for the last layer alone, its curvature a Kronecker product.

    Kept of a training point are its whitened features and its solved residual, d + C numbers; never the object itself.
    """

    method = "influence"
    guarantee = "approximate"

    def __init__(
        self, head: Head, bag: LayerBag, labels: IntArray, input_shape: tuple[int, ...], damping_chosen: bool, memory: int,
        ordered: bool,
    ):  # fmt: skip
        """`ordered` where the points came in an order that the user knows."""
        super().__init__(labels, head.layer.out_features)
        self.head, self.bag, self.input_shape = head, bag, input_shape
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
            largest_leverage=bag.largest_leverage,
            negative_scores=int((loss < s).sum()),
        )

    @property
    def warnings(self) -> list[str]:
        return self.diagnostics.warnings

    def state(self) -> dict[str, Any]:
        """The network, and what is kept of the training points."""
        names = ("bag", "labels", "input_shape", "damping_chosen", "memory", "ordered")
        return {"head": self.head} | {name: getattr(self, name) for name in names}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        kinds = {"head": Head, "bag": LayerBag, "labels": np.ndarray, "input_shape": tuple}
        kinds |= {"damping_chosen": bool, "memory": int, "ordered": bool}
        head, bag, *rest = (expect(state[name], kind) for name, kind in kinds.items())
        rows = [getattr(bag, name) for name in ("T", "Q", "loss", "self_influence", "y", "spread", "w")]
        require(all(len(part) == len(rows[0]) for part in rows) and 0 < bag.n <= len(rows[0]), "training points")
        order = bag.order.sort().values
        require(torch.equal(order, torch.arange(bag.n, device=order.device)), "order of the training points")
        require(bool(((bag.y >= 0) & (bag.y < head.layer.out_features)).all()), "labels")
        return cls(head, bag, *rest)


@savable
class FittedOnFeatures(Fitted):
    """The exact GGN of the last layer of a network whose training points came as a stream: what is kept is their features."""

    method = "influence"
    guarantee = "approximate"

    def __init__(self, head: Head, inner: FittedInfluence, input_shape: tuple[int, ...]):
        super().__init__(inner.labels, inner.n_classes)
        self.head, self.inner, self.input_shape = head, inner, input_shape

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

    def state(self) -> dict[str, Any]:
        """The network, and what was fitted on its features."""
        return {"head": self.head, "inner": self.inner, "input_shape": self.input_shape}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        inner, shape = expect(state["inner"], FittedInfluence), expect(state["input_shape"], tuple)
        return cls(expect(state["head"], Head), inner, shape)


@dataclass(frozen=True)
class LastLayer(Method):
    """Influence of the last layer of a network alone.

    With ``curvature="last_layer_kron"`` by a Kronecker product, with "last_layer" by the whole GGN of a trained network's features. The
    bag may hold a `Stream` as X, whose labels come with its objects.
    """

    def fit(self, bag: Bag, config: Config) -> FittedLastLayer | FittedOnFeatures:
        whole = config.curvature == "last_layer"
        if not whole:
            check_approximation(config.approximation)
        if not (config.prefit and config.head is None and isinstance(self.model, nn.Module)):
            problem = fit_problem(self.model, bag, config)
            parts = problem.unpack(problem.penalty).items()
            penalty = {name: float(part.mean()) / problem.n for name, part in parts}
            opened = Opened.of(problem.model, Stream(problem.X, problem.y), penalty, config.device, None)
            return self._kronecker(opened, config)
        network = to_device(copy.deepcopy(self.model), config)
        streamed = isinstance(bag.X, Stream)
        if not streamed:
            dtype = next(network.parameters()).dtype
            check_outputs(network, torch.as_tensor(np.array(bag.X[:2])).to(config.device, dtype), bag.n_classes)
        penalty = dict.fromkeys(dict(network.named_parameters()), L2_NETWORK if config.l2 is None else config.l2)
        stream = bag.X if streamed else Stream(bag.X, bag.y)
        opened = Opened.of(network, stream, penalty, config.device, config.progress)
        return self._on_features(opened, config) if whole else self._kronecker(opened, config)

    def _kronecker(self, opened: Opened, config: Config) -> FittedLastLayer:
        """The curvature as a Kronecker product; features that are float32 are kept in float16 on a GPU."""
        head, stream = opened.head, opened.stream
        half = config.device.type == "cuda" and config.dtype is None and head.dtype == torch.float32
        weights = head.weights
        n_classes, d = weights.shape
        check_memory(stream.expected, d, n_classes, head.dtype.itemsize, half, config.memory)
        collector = Collector(d, n_classes, head.device, head.dtype, stream.expected)
        labels = []
        for phi, logits, y in opened.batches():
            collector.add(phi, logits, y)
            labels.append(y.cpu().numpy())
        lam = torch.full((d,), opened.penalty("weight"), dtype=torch.float64, device=weights.device)
        if head.layer.bias is not None:
            lam[-1] = opened.penalty("bias")
        bag = collector.finish(weights, lam, config.damping or 0.0, config.q, half)
        return FittedLastLayer(
            head, bag, np.concatenate(labels), opened.input_shape, config.damping is None, config.memory, stream.ordered
        )  # fmt: skip

    def _on_features(self, opened: Opened, config: Config) -> FittedOnFeatures:
        """The whole GGN of the last layer."""
        layer, memory = opened.head.layer, config.memory
        p = sum(q.numel() for q in layer.parameters())
        needed = p**2 * (16 + 2 * opened.head.dtype.itemsize)
        if needed > memory:
            raise MemoryError(
                f"the curvature of {p:,} parameters needs about {needed / 2**30:.2g} GiB, memory_budget is {memory / 2**30:.2g} GiB; "
                "curvature='last_layer_kron' needs no such matrix; or raise memory_budget."
            )
        pairs = [(phi[:, : layer.in_features], y) for phi, _, y in opened.batches()]
        features, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        top = nn.Sequential(copy.deepcopy(layer).requires_grad_(True))
        penalty = {name: len(y) * opened.penalty(name.removeprefix("0.")) for name, _ in top.named_parameters()}
        ready = prepare_with(Problem(top, features, y, penalty), GGN(config.damping), memory)
        inner = FittedInfluence(ready, "ggn of the last layer", config.damping is None)
        return FittedOnFeatures(opened.head, inner, opened.input_shape)


@dataclass(frozen=True)
class Opened:
    """A network split at its last layer, penalties by parameter in mean form, and a readable stream whose first batch was looked at."""

    head: Head
    stream: Stream
    penalties: Mapping[str, float]
    first: tuple[Tensor, Tensor]
    rest: Iterator[tuple[Tensor, Tensor]]
    progress: Progress | None

    @classmethod
    def of(
        cls, network: nn.Module, stream: Stream, penalties: Mapping[str, float], device: torch.device, progress: Progress | None
    ) -> Self:  # fmt: skip
        """Check the stream, and split the network by its first batch."""
        stream.check()
        # A frozen backbone may have another dtype than the head that was put on it.
        *_, last = network.parameters()
        rest = stream.batches(device, last.dtype)
        first = next(rest)
        return cls(Head.of(network, first[0]), stream, penalties, first, rest, progress)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of an object."""
        return tuple(self.first[0].shape[1:])

    def penalty(self, part: str) -> float:
        """The penalty of the layer's weight or bias."""
        return self.head.penalty(self.penalties, part)

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features, logits and labels of the batches; to be read once."""
        n, n_classes = 0, self.head.layer.out_features
        for x, y in chain([self.first], self.rest):
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= n_classes:
                raise ValueError(
                    f"X yields the label {low if low < 0 else high}, which the estimator has no output for: labels must be 0 to "
                    f"{n_classes - 1}, the indices of its {n_classes} outputs."
                )
            phi, logits = self.head(x)
            if not torch.isfinite(logits).all() or not torch.isfinite(phi).all():
                raise NotFinite(
                    f"the model's features or logits are not finite on points {n} to {n + len(phi) - 1} of X."
                )
            yield phi, logits, y
            n += len(y)
            if self.progress is not None and self.stream.expected:
                self.progress(n, self.stream.expected)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_approximation(approximation: str) -> None:
    """Raise unless the approximation is the direct one."""
    if approximation != "direct":
        raise ValueError(
            f"approximation={approximation!r} does not go with curvature='last_layer_kron'; use 'direct', or "
            "curvature='last_layer'."
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
