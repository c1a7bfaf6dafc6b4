"""What is kept of each engine and of each calibrated model.

Kept are the training points as the model sees them, the model's weights, and of the curvature the factor with the losses and
self-influences: forming, factorising and solving for every point is what a fit spends its time on. Made again, because it costs less
than a prediction of a few points: gradients, half-solved ones where they fit the memory (they would be most of the file), the convex base
fit (a few Hessians from where it started), and scikit-learn's neighbour trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor, nn

from fullconformal.curvature import Factor
from fullconformal.estimators.calibrated import Calibrated, Piped
from fullconformal.estimators.jackknife import LeaveOneOut
from fullconformal.influence.prepared import prepare
from fullconformal.last_layer.bag import Figures
from fullconformal.last_layer.bag import LastLayer as LastLayerBag
from fullconformal.last_layer.head import Head
from fullconformal.linear.span import Span
from fullconformal.methods.convex import Exact, Symmetric
from fullconformal.methods.engines import Differentiable, Influence
from fullconformal.methods.last_layer import LastLayer, OnFeatures
from fullconformal.methods.probability import LogProba, Neighbors, Refit
from fullconformal.models.heads import Backbone
from fullconformal.problem import Problem
from fullconformal.storage import Kind, Packer, StorageError, Unpacker, exactly, expect, of_dataclass

Values = dict[str, Any]
Made = TypeVar("Made", bound=Differentiable)


def pack_influence(engine: Influence, _: Packer) -> Values:
    """What the curvature cost, and how the rest is to be made again."""
    prepared = exactly(Influence, engine).prepared
    return {
        "problem": engine.problem,
        "span": engine.span,
        "factor": prepared.factor,
        "loss": prepared.loss,
        "self_influence": prepared.self_influence,
        "memory": prepared.memory,
        "name": engine.name,
        "damping_chosen": engine.damping_chosen,
        "held": engine.held,
        "foretold": engine.foretold,
    }


def unpack_influence(values: Values, _: Unpacker) -> Influence:
    """The engine again, without a factorisation."""
    engine = bare(Influence, values["problem"])
    engine.span = expect(values.get("span"), Span, type(None))
    problem, factor, memory = engine.problem, values["factor"], expect(values["memory"], int)
    engine.curvature, factor = None, expect(factor, Factor)
    known = expect(values["loss"], Tensor), expect(values["self_influence"], Tensor)
    require(all(part.shape == problem.y.shape and part.dtype == problem.X.dtype for part in known), "losses")
    require(all(bool(part.isfinite().all()) for part in known), "losses")
    # A file of an earlier version may have self-influences that err by more than their rounding: they are computed anew.
    slack = values.get("influence_slack")
    anew = slack is not None and bool(expect(slack, Tensor).any())
    solved = factor.solve(problem.theta[None])
    require(solved.shape == (1, problem.p) and bool(solved.isfinite().all()), "curvature")
    engine.prepared = prepare(problem, factor, memory, None if anew else known)
    engine.name, engine.damping_chosen = expect(values["name"], str), expect(values["damping_chosen"], bool)
    engine.held, engine.foretold = expect(values["held"], str), expect(values["foretold"], tuple)
    require(all(type(text) is str for text in engine.foretold), "estimates")
    return engine


def pack_symmetric(engine: Symmetric, _: Packer) -> Values:
    """The problem, the span its inputs have coordinates in, and where its base fit started from."""
    return {"problem": engine.problem, "start": engine.bag.start, "memory": engine.memory, "span": engine.span}


def unpack_symmetric(cls: type[Symmetric]) -> Callable[[Values, Unpacker], Symmetric]:
    """How a symmetric or exact engine is made again: the base fit anew from the same start, which gives the same bits."""

    def unpack(values: Values, _: Unpacker) -> Symmetric:
        engine = bare(cls, values["problem"])
        require(expect(values["memory"], int) > 0, "memory")
        engine.open(values["start"], values["memory"], expect(values.get("span"), Span, type(None)))
        require(engine.bag.base.error < 1, "base fit")  # made here, and a bag without a minimum found
        return engine

    return unpack


def pack_neighbors(engine: Neighbors, _: Packer) -> Values:
    """Prepared scores, and the classifier's parameters."""
    return {"model": clone(engine.model), "bag": engine.bag, "memory": engine.memory}


def unpack_neighbors(values: Values, _: Unpacker) -> Neighbors:
    """The engine again; the classifier finds its neighbours anew."""
    engine = Neighbors.__new__(Neighbors)
    engine.bag, engine.memory = values["bag"], expect(values["memory"], int)
    X, y = engine.bag.X, engine.bag.y
    require(X.ndim == 2 and y.shape == X.shape[:1] and bool(np.isfinite(X).all()) and engine.memory > 0, "points")
    engine.n, engine.model = len(y), values["model"].fit(X, y)
    return engine


def refuse_refit(engine: Refit, _: Packer) -> Values:
    """Refits train a classifier of any kind anew for every candidate."""
    raise StorageError(
        "method='exact' by refits trains the model anew for every candidate, so there is nothing to save but the data; save these, or "
        "use method='influence'."
    )


def pack_head(head: Head) -> Values:
    """The network of an engine that looks at its last layer."""
    return {"network": head.backbone.network, "head": head.name}


def unpack_head(values: Values, unpacker: Unpacker) -> Head:
    """A network, split at its last layer again."""
    network, name = values["network"], expect(values["head"], str)
    layer = expect(network.get_submodule(name), nn.Linear)
    return Head(Backbone(network, name), name, layer, unpacker.device, layer.weight.dtype)


def pack_last_layer(engine: LastLayer, _: Packer) -> Values:
    """The network, and what is kept of the training points."""
    names = ("bag", "labels", "input_shape", "damping_chosen", "memory", "ordered")
    return pack_head(engine.head) | {name: getattr(engine, name) for name in names}


def unpack_last_layer(values: Values, unpacker: Unpacker) -> LastLayer:
    """The engine again."""
    engine: LastLayer = object.__new__(LastLayer)
    engine.head, engine.bag = unpack_head(values, unpacker), expect(values["bag"], LastLayerBag)
    engine.n, engine.n_classes = engine.bag.n, engine.head.layer.out_features
    engine.labels, engine.input_shape = expect(values["labels"], np.ndarray), expect(values["input_shape"], tuple)
    engine.damping_chosen, engine.ordered = expect(values["damping_chosen"], bool), expect(values["ordered"], bool)
    engine.memory = expect(values["memory"], int)
    rows = [getattr(engine.bag, name) for name in ("T", "Q", "loss", "self_influence", "y", "spread", "w")]
    require(all(len(part) == len(rows[0]) for part in rows) and 0 < engine.n <= len(rows[0]), "training points")
    order = engine.bag.order.sort().values
    require(torch.equal(order, torch.arange(engine.n, device=order.device)), "order of the training points")
    require(bool(((engine.bag.y >= 0) & (engine.bag.y < engine.n_classes)).all()), "labels")
    return engine


def pack_on_features(engine: OnFeatures, _: Packer) -> Values:
    """The network, and the engine on its features."""
    return pack_head(engine.head) | {"inner": engine.inner, "labels": engine.labels, "input_shape": engine.input_shape}


def unpack_on_features(values: Values, unpacker: Unpacker) -> OnFeatures:
    """The engine again."""
    engine: OnFeatures = object.__new__(OnFeatures)
    engine.head, engine.inner = unpack_head(values, unpacker), expect(values["inner"], Influence)
    engine.n, engine.n_classes = engine.inner.n, engine.head.layer.out_features
    engine.labels, engine.input_shape = expect(values["labels"], np.ndarray), expect(values["input_shape"], tuple)
    return engine


def pack_log_proba(model: LogProba, _: Packer) -> Values:
    """A fitted model; of a problem the first point only, as it trains no more."""
    fitted = model.model
    if isinstance(fitted, Problem):
        fitted = Problem(fitted.model, fitted.X[:1], fitted.y[:1], 0.0, fitted.chunk)
    return {"model": fitted, "present": model.present, "n_classes": model.n_classes}


def unpack_leave_one_out(values: Values, _: Unpacker) -> LeaveOneOut:
    """The leave-one-out models again, without finding them anew."""
    out: LeaveOneOut = object.__new__(LeaveOneOut)
    out.engine, out.theta = expect(values["engine"], Symmetric), expect(values["theta"], Tensor)
    (n, d), K = out.engine.bag.X.shape, out.engine.bag.K
    require(out.theta.shape == (d, K, n) and bool(out.theta.isfinite().all()), "leave-one-out models")
    return out


def bare(cls: type[Made], problem: Any) -> Made:
    """An engine that has its problem only."""
    engine: Made = object.__new__(cls)
    Differentiable.__init__(engine, expect(problem, Problem))
    return engine


def require(condition: bool, what: str) -> None:
    """Raise where a part of a loaded predictor is not what it should be."""
    if not condition:
        raise StorageError(f"its {what} cannot be right")


ENGINE_KINDS = {
    "Influence": Kind(Influence, pack_influence, unpack_influence),
    "Symmetric": Kind(Symmetric, pack_symmetric, unpack_symmetric(Symmetric)),
    "Exact": Kind(Exact, pack_symmetric, unpack_symmetric(Exact)),
    "Neighbors": Kind(Neighbors, pack_neighbors, unpack_neighbors),
    "LastLayer": Kind(LastLayer, pack_last_layer, unpack_last_layer),
    "LastLayerBag": of_dataclass(LastLayerBag),
    "Figures": of_dataclass(Figures),
    "OnFeatures": Kind(OnFeatures, pack_on_features, unpack_on_features),
    "Refit": Kind(Refit, refuse_refit, lambda *_: None),
    "Calibrated": of_dataclass(Calibrated),
    "Piped": of_dataclass(Piped),
    "Span": of_dataclass(Span),
    "LogProba": of_dataclass(LogProba)._replace(pack=pack_log_proba),
    "LeaveOneOut": Kind(LeaveOneOut, lambda value, _: vars(value), unpack_leave_one_out),
}
