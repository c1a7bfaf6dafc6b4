"""Engines for networks too large for a curvature of all parameters: their last layer, from one pass over the training points."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fullconformal.curvature import GGN, Curvature
from fullconformal.diagnostics import Diagnostics
from fullconformal.estimators.options import DTYPES, SCHEMES, FullOptions
from fullconformal.influence.scores import Progress
from fullconformal.last_layer.bag import PASS, Passing
from fullconformal.last_layer.counts import last_layer_counts
from fullconformal.last_layer.head import Head
from fullconformal.last_layer.stream import Stream
from fullconformal.losses import SOFTMAX
from fullconformal.losses.base import NotFinite
from fullconformal.methods.engines import Engine, FloatArray, Influence, Query
from fullconformal.methods.fitting import L2_NETWORK
from fullconformal.models.requirements import check_outputs, split_pipeline
from fullconformal.problem import Problem


class LastLayer(Engine):
    """The paper's approximation for the last layer alone, its curvature a Kronecker product.

    Kept of a training point are its whitened features and its solved residual, d + C numbers; never the object itself.
    """

    valid, separable = False, True

    def __init__(
        self, network: nn.Module, stream: Stream, penalty: Mapping[str, float], damping: float | None, q: float,
        device: torch.device, memory: int, half: bool, progress: Progress | None,
    ):  # fmt: skip
        """Penalties by parameter in mean form; `half` keeps features that are float32 in float16."""
        self.damping_chosen, self.memory, self.ordered = damping is None, memory, stream.ordered
        self.head, self.input_shape, batches = open_stream(network, stream, device, progress)
        half, weights = half and self.head.dtype == torch.float32, self.head.weights
        self.n_classes, d = weights.shape
        check_memory(stream.expected, d, self.n_classes, self.head.dtype.itemsize, half, memory)
        passing = Passing(d, self.n_classes, self.head.device, self.head.dtype, stream.expected)
        labels = []
        for phi, logits, y in batches:
            passing.add(phi, logits, y)
            labels.append(y.cpu().numpy())
        self.labels: npt.NDArray[np.int64] = np.concatenate(labels)
        self.n = len(self.labels)
        lam = torch.full((d,), self.head.penalty(penalty, "weight"), dtype=torch.float64, device=weights.device)
        if self.head.layer.bias is not None:
            lam[-1] = self.head.penalty(penalty, "bias")
        self.bag = passing.finish(weights, lam, damping or 0.0, q, half)

    def log_proba(self, X: Any) -> FloatArray:
        return SOFTMAX.log_proba(self.head.split(X)[1].double()).cpu().numpy()

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
        state = self.bag.T.nbytes + self.bag.Q.nbytes
        out = last_layer_counts(
            self.bag, phi, logits, query.q, weights, query.class_conditional, bool(query.prune),
            max(self.memory - state, 2**28), query.progress,
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
            largest_leverage=float(SOFTMAX.leverage(loss, s).max()),
            negative_scores=int((loss < s).sum()),
        )


class OnFeatures(Engine):
    """The exact GGN of the last layer of a network whose training points came as a stream: what is kept is their features."""

    valid = False

    def __init__(
        self, network: nn.Module, stream: Stream, penalty: Mapping[str, float], curvature: Curvature, device: torch.device,
        memory: int, progress: Progress | None,
    ):  # fmt: skip
        self.head, self.input_shape, batches = open_stream(network, stream, device, progress)
        layer = self.head.layer
        self.n_classes, p = layer.out_features, sum(q.numel() for q in layer.parameters())
        needed = p**2 * (16 + 2 * self.head.dtype.itemsize)
        if needed > memory:
            raise MemoryError(
                f"the curvature of {p:,} parameters needs about {needed / 2**30:.2g} GiB, memory_budget is {memory / 2**30:.2g} GiB; "
                "curvature='last_layer_kron' needs no such matrix; or raise memory_budget."
            )
        pairs = [(phi[:, : layer.in_features], y) for phi, _, y in batches]
        features, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        self.n = len(y)
        self.labels: npt.NDArray[np.int64] = y.cpu().numpy()
        on = {f"0.{part}": self.n * self.head.penalty(penalty, part) for part in ("weight", "bias")}
        top = nn.Sequential(copy.deepcopy(layer).requires_grad_(True))
        problem = Problem(top, features, y, {k: v for k, v in on.items() if k in dict(top.named_parameters())})
        self.inner = Influence(problem, curvature, "ggn of the last layer", memory)

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


# From the classifier's options to an engine ---------------------------------------------------------------------------


def check_stream(options: FullOptions, y: Any) -> None:
    """Raise where a dataset or loader cannot be taken, before it is read."""
    head, final = split_pipeline(options.estimator)
    given = "a Dataset or DataLoader as X"
    if y is not None:
        raise ValueError(f"y was given beside {given}, which yields its own labels; leave y out.")
    if not options.prefit or head is not None or options.head is not None or not isinstance(final, nn.Module):
        raise ValueError(f"{given} needs a trained torch.nn.Module as estimator, with prefit=True and without head=.")
    if options.curvature not in ("last_layer", "last_layer_kron"):
        raise ValueError(
            f"{given} needs curvature='last_layer_kron' or 'last_layer', which keep no training objects; got {options.curvature!r}."
        )
    if options.method not in ("auto", "influence"):
        raise ValueError(f"{given} needs method='influence', got {options.method!r}.")


def prefit_engine(
    options: FullOptions, stream: Stream, progress: Progress | None, n_classes: int | None = None
) -> LastLayer | OnFeatures:
    """Engine of a trained network from one pass over its training points; n_classes where the labels are known."""
    network = copy.deepcopy(split_pipeline(options.estimator)[1])
    device, own = options._device(), next(network.parameters()).dtype
    dtype = DTYPES[options.dtype] or torch.promote_types(own, torch.float32)  # half precision has no factorisations
    network = network.to(device=device, dtype=dtype).eval()
    if n_classes is not None:
        check_outputs(network, torch.as_tensor(np.array(stream.source[:2])).to(device, dtype), n_classes)
    l2 = L2_NETWORK if options.l2 is None else options.l2
    penalty = dict.fromkeys(dict(network.named_parameters()), l2)
    if options.curvature == "last_layer":
        curvature = GGN(options.damping)
        return OnFeatures(network, stream, penalty, curvature, device, options._memory, progress)
    return _kronecker(options, network, stream, penalty, device, progress)


def fitted_engine(options: FullOptions, problem: Problem) -> LastLayer:
    """Engine of the last layer of a model fitted here."""
    parts = problem.unpack(problem.penalty).items()
    penalty = {name: float(part.mean()) / problem.n for name, part in parts}
    return _kronecker(options, problem.model, Stream(problem.X, problem.y), penalty, problem.X.device, None)


def _kronecker(
    options: FullOptions, network: nn.Module, stream: Stream, penalty: Mapping[str, float], device: torch.device,
    progress: Progress | None,
) -> LastLayer:  # fmt: skip
    check_approximation(options.approximation)
    half = device.type == "cuda" and options.dtype == "auto"
    q = SCHEMES[options.scheme]
    return LastLayer(network, stream, penalty, options.damping, q, device, options._memory, half, progress)


def open_stream(
    network: nn.Module, stream: Stream, device: torch.device, progress: Progress | None
) -> tuple[Head, tuple[int, ...], Iterator[tuple[Tensor, Tensor, Tensor]]]:
    """The network split at its last layer, the shape of objects, and features, logits and labels of a readable stream's batches."""
    stream.check()
    *_, last = network.parameters()  # a frozen backbone may have another dtype than the head that was put on it
    batches = stream.batches(device, last.dtype)
    first = next(batches)
    head, expected = Head.of(network, first[0]), stream.expected

    def passes() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        n = 0
        for x, y in chain([first], batches):
            check_labels(y, head.layer.out_features)
            phi, logits = head(x)
            check_finite(phi, logits, n)
            yield phi, logits, y
            n += len(y)
            if progress is not None and expected:
                progress(n, expected)

    return head, tuple(first[0].shape[1:]), passes()


# Checks ---------------------------------------------------------------------------------------------------------------


def check_approximation(approximation: str) -> None:
    """Raise unless the approximation is the direct one."""
    if approximation != "direct":
        raise ValueError(
            f"approximation={approximation!r} does not go with curvature='last_layer_kron'; use 'direct', or "
            "curvature='last_layer'."
        )


def check_finite(phi: Tensor, logits: Tensor, at: int) -> None:
    """Raise where features or logits are not finite; `at` is the first point's place in the stream."""
    if not torch.isfinite(logits).all() or not torch.isfinite(phi).all():
        raise NotFinite(f"the model's features or logits are not finite on points {at} to {at + len(phi) - 1} of X.")


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
