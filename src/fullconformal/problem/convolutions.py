"""Convolutions of a prefix, whose gradients are products of unfolded patches and derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fullconformal.problem.chain import Dense
from fullconformal.runtime.numerics import full_precision


def plain_convolutions(prefix: nn.Module, names: Sequence[str]) -> list[nn.Conv2d]:
    """The convolutions of a prefix, in order, where they hold all its trainable parameters and each is an unfolded product; else none."""
    steps = list(prefix) if isinstance(prefix, nn.Sequential) else []
    found = [s for s in steps if isinstance(s, nn.Conv2d) and any(q.requires_grad for q in s.parameters())]
    plain = all(
        type(s) is nn.Conv2d and s.groups == 1 and s.padding_mode == "zeros" and not isinstance(s.padding, str)
        and all(q.requires_grad for q in s.parameters())
        for s in found
    )  # fmt: skip
    ids = [id(q) for s in found for q in s.parameters()]
    return found if plain and len(ids) == len(set(ids)) == len(names) else []


def convolution_rows(
    prefix: nn.Module, convolutions: Sequence[nn.Conv2d], tail: Sequence[Dense], X: Tensor, weights: Tensor
) -> Tensor:
    """`Problem.prefix_rows` of plain convolutions: R passes back for all points together, then patches times derivatives, one product."""
    a, inputs, outputs = X, [], []
    with torch.enable_grad(), full_precision():
        for step in prefix.children():
            if step in convolutions:
                inputs.append(a.detach())
                a = step(a).requires_grad_()
                outputs.append(a)
                a = a.clone()  # the next step may work in place
            else:
                a = step(a)
        for layer in tail:
            a = layer.activation(layer.linear(a))
        rows = [torch.autograd.grad(a, outputs, w, retain_graph=True) for w in weights.unbind(1)]
    parts = []
    for conv, a, delta in zip(convolutions, inputs, zip(*rows, strict=True), strict=True):
        D = torch.stack(delta, 1).flatten(3)  # (k, R, o, positions)
        assert not isinstance(conv.padding, str)
        patches = unfold(a, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        parts.append((D.flatten(1, 2) @ patches.mT).view(*D.shape[:2], -1))
        if conv.bias is not None:
            parts.append(D.sum(-1))
    return torch.cat(parts, dim=2)
