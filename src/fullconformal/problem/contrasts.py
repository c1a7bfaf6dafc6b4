"""A softmax regression stated with one output fewer than it has classes.

The loss does not change where every logit is raised by the same number, so of C weight vectors C − 1 contrasts matter: f = Bz with
B (C, C − 1) orthonormal and every column's sum zero. Where the classes are penalised alike |Bv|² = |v|² keeps the penalty, the Hessian is
that of the contrasts and a multiple of the identity along the rest, and gradients have no part there: every gᵀ𝓗⁻¹g is the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from fullconformal.problem.base import Problem


@lru_cache(maxsize=8)
def contrasts(n_classes: int) -> Tensor:
    """Helmert's contrasts B (C, C − 1), float64: each of the classes 1 … C − 1 against the mean of those before it."""
    k = torch.arange(1, n_classes, dtype=torch.float64)
    below = torch.ones(n_classes, n_classes - 1, dtype=torch.float64).triu()
    return (torch.diag(k, -1)[:, :-1] - below) / (k * (k + 1)).sqrt()


@torch.no_grad()
def contrast_layers(
    n_features: int, n_classes: int, bias: bool, device: torch.device | str, dtype: torch.dtype
) -> tuple[nn.Linear, nn.Linear]:
    """A layer of C − 1 contrasts, its weights zero, and the constant one that makes C logits of them."""
    inner = nn.Linear(n_features, n_classes - 1, bias, device, dtype)
    outer = nn.Linear(n_classes - 1, n_classes, False, device, dtype).requires_grad_(False)
    for q in inner.parameters():
        q.zero_()
    outer.weight.copy_(contrasts(n_classes))
    return inner, outer


@torch.no_grad()
def in_contrasts(problem: Problem) -> Problem:
    """The same problem in contrasts, where its model is one linear layer that penalises classes alike; itself where it is not."""
    alone = problem.is_linear and len(problem.tail) == 1 and not list(problem.prefix.children())
    if not alone or problem.n_classes == 2:
        return problem
    block, layer = problem.blocks[0], problem.tail[0].linear
    penalty = problem.penalty.view(block.o, block.i)
    if not bool((penalty == penalty[0]).all()):
        return problem
    W, has_bias = layer.weight, layer.bias is not None
    B = contrasts(block.o).to(W.device)  # in float64: what the classes share may be large, and cancels
    inner, outer = contrast_layers(layer.in_features, block.o, has_bias, W.device, W.dtype)
    by_name = {"0.weight": float(penalty[0, 0])}
    inner.weight.copy_(B.T @ W.double())
    if has_bias:
        inner.bias.copy_(B.T @ layer.bias.double())
        by_name["0.bias"] = float(penalty[0, -1])
    out = Problem(nn.Sequential(inner, outer).eval(), problem.X, problem.y, by_name, problem.chunk)
    if "design" in problem.__dict__:  # which is the same
        out.design = problem.design
    return out
