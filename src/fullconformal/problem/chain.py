"""A model read as a prefix followed by a chain of dense layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

ELEMENTWISE = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
INERT_IN_EVAL = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
NOTHING = nn.Sequential()  # after a layer without an activation


@dataclass(frozen=True)
class Dense:
    """A linear layer and the elementwise function after it."""

    linear: nn.Linear
    activation: nn.Sequential
    parameters: list[nn.Parameter]

    @property
    def trainable(self) -> bool:
        return self.linear.weight.requires_grad


class Trace(NamedTuple):
    """One pass through the tail: inputs a (1 appended where there is a bias), slopes φ′ and φ″ after each layer, logits."""

    inputs: list[Tensor]
    slopes: list[Tensor]
    bends: list[Tensor | None]
    logits: Tensor


def read_model(model: nn.Module, x: Tensor) -> tuple[nn.Module, list[Dense]]:
    """Split a model into prefix and dense tail; the tail is empty where the end of the model is not a chain of dense layers."""
    steps = _steps(model)
    start, tail, after = len(steps), list[Dense](), list[nn.Module]()
    for k in range(len(steps) - 1, -1, -1):
        step = steps[k]
        own = list(step.parameters())
        if isinstance(step, nn.Linear) and len({q.requires_grad for q in own}) == 1:
            tail.insert(0, Dense(step, nn.Sequential(*after) if after else NOTHING, own))
            start, after = k, []
        elif isinstance(step, ELEMENTWISE):
            after.insert(0, step)
        elif not isinstance(step, (nn.Identity, *INERT_IN_EVAL)) or (isinstance(step, INERT_IN_EVAL) and step.training):
            break
    prefix = nn.Sequential(*steps[:start])
    ids = [id(q) for part in (prefix.parameters(), *(layer.parameters for layer in tail)) for q in part]
    if not tail or len(tail[-1].activation) or len(set(ids)) < len(ids):
        return model, []
    with torch.no_grad():
        return (prefix, tail) if (prefix(x[:1]) if start else x).ndim == 2 else (model, [])


def _steps(module: nn.Module) -> list[nn.Module]:
    """A nested nn.Sequential as one list; anything else is one step."""
    if type(module) is nn.Sequential:
        return [step for child in module for step in _steps(child)]
    return [module]


def with_one(layer: Dense, a: Tensor) -> Tensor:
    """Inputs (k, i) of a layer as its block of parameters meets them: a 1 appended where there is a bias."""
    return a if layer.linear.bias is None else torch.cat([a, a.new_ones(len(a), 1)], dim=1)


def activate(layer: Dense, z: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ(z), φ′(z) and, where asked for, φ″(z)."""
    if not len(layer.activation):
        return z, torch.ones_like(z), None
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        a = layer.activation(z.clone())  # it may work in place
        (slope,) = torch.autograd.grad(a.sum(), z, create_graph=second)
        bend = None
        if second and slope.requires_grad:
            (bend,) = torch.autograd.grad(slope.sum(), z, allow_unused=True)
    return a.detach(), slope.detach(), bend
