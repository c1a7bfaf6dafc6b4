"""Linear and convolutional layers as matrices (o, i), their inputs and output gradients, for any module that holds them.

A layer maps its inputs a_t (i, the bias's 1 included), at T positions (1 for a dense layer on vectors), to z_t = Wa_t. The gradient of
a scalar is then ∂/∂W = Σ_t (∂/∂z_t) a_tᵀ. Inputs come from hooks on the forward pass, ∂/∂z from autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fullconformal.curvature.base import CurvatureError
from fullconformal.problem import Problem
from fullconformal.runtime.replicas import replica
from fullconformal.storage import savable

# Numbers, for each output of a layer, that a pass forward keeps and one back passes on; five or six in a ResNet.
KEPT = 8


def is_layer(module: nn.Module) -> bool:
    """Whether a module is of the kinds known here: Linear, and Conv2d without groups."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


@savable
@dataclass(frozen=True)
class Place:
    """A matrix (o, i) in the flat vector, from `start`. Its last column, the bias, lies behind the weights where `apart`, else in line."""

    start: int
    o: int
    i: int
    apart: bool

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.o * self.i)

    def matrices(self, rows: Tensor) -> Tensor:
        """This part of rows (k, p) as (k, o, i)."""
        part = rows[:, self.slice]
        if not self.apart:
            return part.view(-1, self.o, self.i)
        cut = self.o * (self.i - 1)
        return torch.cat([part[:, :cut].view(-1, self.o, self.i - 1), part[:, cut:, None]], dim=2)

    def flat(self, M: Tensor) -> Tensor:
        """Matrices (k, o, i) as this part of rows, (k, o·i)."""
        return torch.cat([M[:, :, :-1].flatten(1), M[:, :, -1]], dim=1) if self.apart else M.flatten(1)


@dataclass(frozen=True)
class Layer:
    """A layer and where its trainable parameters, `weight` or `bias` or both, lie."""

    name: str
    module: nn.Module
    place: Place
    weight: bool
    bias: bool

    @property
    def o(self) -> int:
        return self.place.o

    @property
    def i(self) -> int:
        return self.place.i

    def inputs(self, x: Tensor) -> Tensor:
        """What the layer was given, as (k, T, i)."""
        if isinstance(self.module, nn.Conv2d):
            conv = self.module
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = patches(pad(x, conv._reversed_padding_repeated_twice, mode).contiguous(), conv)
        else:
            x = x.reshape(len(x), -1, x.shape[-1])
        if not self.weight:
            return x.new_ones(*x.shape[:2], 1)
        return torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2) if self.bias else x

    def outputs(self, g: Tensor) -> Tensor:
        """What the layer returned, or gradients of it, as (k, T, o)."""
        return g.flatten(2).mT if isinstance(self.module, nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """What a convolution sees of padded images (k, c, H, W) at each position, (k, T, i), by one copy."""
    for side, (kernel, dilation, stride) in enumerate(zip(conv.kernel_size, conv.dilation, conv.stride, strict=True)):
        x = x.unfold(2 + side, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def read_layers(problem: Problem) -> list[Layer]:
    """The layers in which the trainable parameters sit, in the order of the flat vector."""
    names = {id(q): name for name, q in problem.model.named_parameters()}
    starts, at = {}, 0
    for name in problem.prefix_names:
        starts[name] = at
        at += problem.params[name].numel()
    tail = {id(problem.tail[b.layer].linear): b for b in problem.blocks if b.layer >= 0}
    out, seen = list[Layer](), set[int]()
    for path, module in problem.model.named_modules():
        own = {kind: q for kind, q in module.named_parameters(recurse=False) if q.requires_grad}
        if not own:
            continue
        if not is_layer(module):
            raise CurvatureError(
                f"{path or 'the model'} ({type(module).__name__}) has trainable parameters outside Linear and ungrouped Conv2d layers; "
                "hold them fixed (requires_grad_(False)), or take curvature='ggn' or 'dual'."
            )
        if any(id(q) in seen for q in own.values()):
            raise CurvatureError(f"{path} shares its parameters with another layer; take curvature='ggn' or 'dual'.")
        seen |= {id(q) for q in own.values()}
        o = next(iter(own.values())).shape[0]
        i = sum(q.numel() // o for q in own.values())
        block = tail.get(id(module))
        start = block.start if block else min(starts[names[id(q)]] for q in own.values())
        weight, bias = "weight" in own, "bias" in own
        place = Place(start, o, i, apart=weight and bias and block is None)
        out.append(Layer(path, module, place, weight, bias))
    return sorted(out, key=lambda layer: layer.place.start)


Pass = tuple[list[Tensor], Iterator[list[Tensor]]]


def passes(problem: Problem, layers: list[Layer], memory: int, extra: int = 0) -> Iterator[Pass]:
    """Inputs (k, T, i) of each layer, and for the C columns of S^½ the gradients (k, T, o), over chunks of the bag.

    The columns are those of `Loss.root`: summed over them, squares give the generalised Gauss–Newton matrix, exactly. Chunks keep to
    about `memory` bytes, `extra` numbers a point of the caller's own included.
    """
    sizes = [(T, layer.o, layer.i) for layer, T in zip(layers, positions(problem, layers), strict=True)]
    numbers = extra + sum(T * (i + KEPT * o) for T, o, i in sizes)
    chunk = max(1, min(problem.chunk, memory // (numbers * problem.X.element_size())))
    for X in problem.X.split(chunk):
        logits, given, returned = record(problem, layers, X)
        vectors = problem.loss.root(logits.detach()).mT
        yield (
            [joined([layer.inputs(x) for x in xs]) for layer, xs in zip(layers, given, strict=True)],
            pulled(layers, logits, returned, vectors),
        )
        # Before the next are made; the caller should do so with what it was given.
        del logits, given, returned


def positions(problem: Problem, layers: list[Layer]) -> list[int]:
    """Number of positions T at which each layer acts on one point."""
    _, _, returned = record(problem, layers, problem.X[:1])
    return [sum(z.numel() // layer.o for z in zs) for layer, zs in zip(layers, returned, strict=True)]


def pulled(
    layers: list[Layer], logits: Tensor, returned: list[list[Tensor]], vectors: Tensor
) -> Iterator[list[Tensor]]:
    """Gradients (k, T, o) of each layer's outputs, one backward pass for each of the R vectors (k, R, C) in logit space."""
    every = [z for zs in returned for z in zs]
    R = vectors.shape[1]
    for r, e in enumerate(vectors.unbind(1)):
        found = iter(torch.autograd.grad(logits, every, e, retain_graph=r < R - 1, materialize_grads=True))
        yield [joined([layer.outputs(next(found)) for _ in zs]) for layer, zs in zip(layers, returned, strict=True)]


def joined(parts: list[Tensor]) -> Tensor:
    """The positions of a layer's calls put together: a layer called twice shares its weights as a convolution does."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def record(problem: Problem, layers: list[Layer], X: Tensor) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
    """Logits of X with their graph, and for each layer what its calls were given and returned."""
    given: list[list[Tensor]] = [[] for _ in layers]
    returned: list[list[Tensor]] = [[] for _ in layers]

    def hook(at: int, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        given[at].append(args[0].detach())
        returned[at].append(out)
        # What comes next may work in place.
        return out.clone()

    # Other threads may be at work with the model itself.
    model = replica(problem.model)
    modules = [model.get_submodule(layer.name) for layer in layers]
    handles = [module.register_forward_hook(partial(hook, at)) for at, module in enumerate(modules)]
    try:
        with torch.enable_grad():
            logits = model(X)
    finally:
        for handle in handles:
            handle.remove()
    for layer, calls in zip(layers, returned, strict=True):
        if not calls:
            raise CurvatureError(
                f"the forward pass never calls {layer.name} ({type(layer.module).__name__}), so its inputs are unknown; hold it "
                "fixed (requires_grad_(False)), or take curvature='ggn' or 'dual'."
            )
    return logits, given, returned
