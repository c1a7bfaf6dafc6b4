"""Fitting networks: Adam, followed by L-BFGS on the whole bag; one network, or small ones of one architecture together.

B small networks together take about as long as one: a step of a small network is a few products that take less time than calling them.
Their parameters are the rows of one matrix (B, p), and a layer is one batched product. Each network has its own points, order of batches,
line search and end of training, and ends where `train` would have taken it alone, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lbfgs import _strong_wolfe

from fullconformal.losses import SOFTMAX, Loss, NotFinite
from fullconformal.runtime.numerics import threads
from fullconformal.runtime.tasks import Progress, nobody

# Adam's first rate, which falls to zero along a cosine; steps that L-BFGS remembers.
LEARNING_RATE, HISTORY = 1e-3, 30


def learned(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that training moves."""
    return [q for q in module.parameters() if q.requires_grad]


def train(
    model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float], *, max_epochs: int = 200, batch_size: int = 100,
    max_iter: int = 500, seed: int = 0, progress: Progress = nobody, loss: Loss = SOFTMAX,
) -> None:  # fmt: skip
    """Fit a network in place to all of (X, y): Adam, then L-BFGS on the whole bag until the mean gradient is below 1e-5.

    Parameters
    ----------
    model : torch.nn.Module
        It stays in the mode it is in, training or evaluation.
    X : Tensor (n, ...)
    y : Tensor (n,)
        Labels in 0 … C − 1.
    penalty : dict
        Λ by parameter name: the objective is the mean loss plus ½ Σ (Λ/n) θ². Parameters without an entry are free.
    max_epochs, batch_size
        Of Adam.
    max_iter : int
        Iterations of L-BFGS, at most.
    seed : int
        Of the batches.
    progress : callable, optional
        Called with (epochs done, epochs in all).
    loss : Loss
        By default the cross-entropy.

    Examples
    --------
    >>> import torch
    >>> from fullconformal.models import mlp, train
    >>> X = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    >>> y = torch.tensor([0, 0, 1, 1])
    >>> _ = torch.manual_seed(0)
    >>> net = mlp(1, (4,), 2)
    >>> train(net, X, y, {"0.weight": 0.1, "2.weight": 0.1}, max_epochs=10)
    >>> net(X).argmax(1).tolist()
    [0, 0, 1, 1]
    """
    p = sum(q.numel() for q in model.parameters())
    with threads(1 if batch_size * p < 2**24 else torch.get_num_threads()):
        _adam(model, X, y, penalty, max_epochs, batch_size, seed, progress, loss)
    with threads(1 if len(y) * p < 2**24 else torch.get_num_threads()):
        polish(model, X, y, penalty, 1e-5, max_iter, loss)
    progress(max_epochs + 1, max_epochs + 1)


def _objective(model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float], n: int, loss: Loss) -> Tensor:
    """Mean loss of a batch plus the penalty's share, (1/2n) Σ Λ θ²."""
    value = loss.value(model(X), y).mean()
    for name, q in model.named_parameters():
        if q.requires_grad and penalty.get(name, 0.0):
            value = value + penalty[name] / (2 * n) * (q**2).sum()
    return value


def _adam(
    model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float],
    max_epochs: int, batch_size: int, seed: int, progress: Progress, loss: Loss,
) -> None:  # fmt: skip
    n = len(y)
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(learned(model), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(max_epochs, 1))
    for epoch in range(max_epochs):
        for index in torch.randperm(n, generator=generator).to(y.device).split(batch_size):
            adam.zero_grad()
            value = _objective(model, X[index], y[index], penalty, n, loss)
            value.backward()
            adam.step()
        schedule.step()
        if not torch.isfinite(value):
            raise NotFinite("the training loss is not finite; standardise the features or lower the learning rate")
        progress(epoch + 1, max_epochs + 1)


def polish(
    model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float], tol: float = 1e-5, max_iter: int = 500,
    loss: Loss = SOFTMAX,
) -> None:  # fmt: skip
    """Fit a network in place by L-BFGS on the whole bag, with a strong Wolfe line search, until the mean gradient is below `tol`.

    The objective and its arguments are those of :func:`train`.

    Examples
    --------
    >>> import torch
    >>> from fullconformal.models import linear, polish
    >>> X = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    >>> net = linear(1, 2)
    >>> polish(net, X, torch.tensor([0, 0, 1, 1]), {"0.weight": 1.0})
    >>> net(X).argmax(1).tolist()
    [0, 0, 1, 1]
    """
    lbfgs = torch.optim.LBFGS(
        learned(model), max_iter=max_iter, tolerance_grad=tol, tolerance_change=0, history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        lbfgs.zero_grad()
        value = _objective(model, X, y, penalty, len(y), loss)
        value.backward()
        return value

    lbfgs.step(closure)


# Many together --------------------------------------------------------------------------------------------------------


# Layers that act on each number by itself, whatever the axes before it.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Softsign,
    nn.Hardswish, nn.Identity,
)  # fmt: skip
#: values (b,) and gradients (b, p) of networks `rows` (b,) at parameters (b, p)
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested sequences in order; anything else as it is."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from layers(part)
    else:
        yield module


def is_stackable(module: nn.Module, networks: int, n: int, device: torch.device) -> bool:
    """Whether networks of this architecture can be trained together on n points, and are small enough to gain by it."""
    steps = list(layers(module))
    dense = [step for step in steps if type(step) is nn.Linear]
    shared = len({id(q) for step in dense for q in step.parameters()}) < sum(len(list(s.parameters())) for s in dense)
    known = dense and not shared and all(type(step) is nn.Linear or type(step) in ELEMENTWISE for step in steps)
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    if not known or hooked:
        return False
    p, widest = sum(q.numel() for q in module.parameters()), max(max(step.weight.shape) for step in dense)
    # Parameters of a network whose steps take less time than calling them, and numbers that all may put through a layer.
    return p <= (2**18 if device.type == "cuda" else 2**14) and networks * n * widest <= 2**25


def train_together(
    modules: Sequence[nn.Module], X: Tensor, y: Tensor, points: Sequence[Tensor], ridge: dict[str, float], *,
    max_epochs: int = 200, batch_size: int = 100, max_iter: int = 500, seed: int = 0, progress: Progress = nobody,
    loss: Loss = SOFTMAX,
) -> None:  # fmt: skip
    """Fit B networks in place, each to points of its own: Adam, then L-BFGS, as `train` does for one.

    Parameters
    ----------
    modules : sequence of nn.Module
        Of one architecture for which `is_stackable` holds, on the device and of the dtype of X.
    X : Tensor (1, n, d) or (B, n, d)
        Inputs, the same for all networks or for each its own.
    y : Tensor (1, n) or (B, n, ...)
        Labels in 0 … C − 1, or numbers; the same for all networks or for each its own.
    points : sequence of Tensor (n_b,)
        The points that each network is fitted to, in order.
    ridge : dict
        By parameter name: the objective of a network is its mean loss plus ½ Σ ridge θ².
    max_epochs, batch_size, max_iter, seed, progress, loss
        As in `train`; the seed is that of every network.

    Examples
    --------
    >>> import torch
    >>> from fullconformal.models import mlp
    >>> X = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    >>> nets = [mlp(1, (4,), 2) for _ in range(2)]
    >>> train_together(nets, X[None], torch.tensor([[0, 0, 1, 1]]), [torch.arange(4), torch.tensor([0, 3])], {"0.weight": 0.01})
    >>> [net(X).argmax(1).tolist() for net in nets]
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    stack = Stack(modules, X, y, points, ridge, loss)
    width, most = stack.theta.numel(), torch.get_num_threads()
    with threads(1 if batch_size * width < 2**24 else most):
        _adam_together(stack, points, max_epochs, batch_size, seed, progress)
    with threads(1 if X.shape[1] * width < 2**24 else most):
        stack.theta = lbfgs(stack.whole, stack.theta, 1e-5, max_iter)
    stack.assign(modules)
    progress(max_epochs + 1, max_epochs + 1)


class Stack:
    """Networks as rows of a matrix (B, p) of parameters, with the points they are fitted to."""

    def __init__(
        self, modules: Sequence[nn.Module], X: Tensor, y: Tensor, points: Sequence[Tensor], ridge: dict[str, float], loss: Loss
    ):  # fmt: skip
        self.X, self.y, self.loss = X, y, loss
        self.layers = list(layers(modules[0]))
        named = {name: q for name, q in modules[0].named_parameters() if q.requires_grad}
        self.shapes = {id(q): q.shape for q in named.values()}
        self.sizes = [q.numel() for q in named.values()]
        self.theta = torch.stack([parameters_to_vector(learned(module)) for module in modules]).detach()
        self.ridge = torch.cat([X.new_full((q.numel(),), ridge.get(name, 0.0)) for name, q in named.items()])
        # Share (B, n) of each point in the mean loss of each network.
        self.share = X.new_zeros(len(modules), X.shape[1])
        for row, own in zip(self.share, points, strict=True):
            row[own] = 1 / len(own)

    def assign(self, modules: Sequence[nn.Module]) -> None:
        """Give every network its parameters."""
        for module, row in zip(modules, self.theta, strict=True):
            vector_to_parameters(row.clone(), learned(module))

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits (b, k, C) of networks with parameters (b, p) at inputs (b, k, d) or (1, k, d)."""
        parts = zip(self.shapes.items(), theta.split(self.sizes, dim=1), strict=True)
        own = {key: part.view(-1, *shape) for (key, shape), part in parts}
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                # What is frozen is the same in all networks.
                x = x @ own.get(id(layer.weight), layer.weight[None]).mT
                x = x if layer.bias is None else x + own.get(id(layer.bias), layer.bias[None])[:, None]
            else:
                x = layer(x)
        return x

    def objective(self, theta: Tensor, x: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Values (b,) and gradients (b, p) of the objectives on points x (b, k, d), y (b, k, ...) with shares (b, k) of the mean."""
        leaf = theta.detach().requires_grad_()
        f = self.logits(leaf, x)
        values = (self.loss.value(f.flatten(0, 1), y.flatten(0, 1)).view(share.shape) * share).sum(1)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach() + (self.ridge * theta**2).sum(1) / 2, slopes + self.ridge * theta

    def whole(self, theta: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The objectives (b,) of networks `rows` (b,) on all their points, with gradients (b, p)."""
        X = self.X if len(self.X) == 1 else self.X[rows]
        return self.objective(theta, X, self.y[rows % len(self.y)], self.share[rows])


def _adam_together(
    stack: Stack, points: Sequence[Tensor], max_epochs: int, batch_size: int, seed: int, progress: Progress
) -> None:
    theta, device = stack.theta, stack.theta.device
    B, network = len(theta), torch.arange(len(theta), device=device)[:, None]
    source, target = network % len(stack.X), network % len(stack.y)
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    done = theta.new_zeros(B, 1, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(seed) for _ in points]
    steps, own = max(math.ceil(len(part) / batch_size) for part in points), [part.cpu() for part in points]
    for epoch in range(max_epochs):
        # −1 where a network has no point left.
        order = torch.full((B, steps * batch_size), -1)
        for row, part, generator in zip(order, own, generators, strict=True):
            row[: len(part)] = part[torch.randperm(len(part), generator=generator)]
        rate = LEARNING_RATE * (1 + math.cos(math.pi * epoch / max_epochs)) / 2
        for index in order.to(device).split(batch_size, dim=1):
            real = index >= 0
            at, moves = index.clamp_min(0), real[:, :1]
            share = real.to(theta.dtype) / real.sum(1, keepdim=True).clamp_min(1)
            g = stack.objective(theta, stack.X[source, at], stack.y[target, at], share)[1]
            done += moves
            g = torch.where(moves, g, 0.0)
            first += torch.where(moves, 0.1 * (g - first), 0.0)
            second += torch.where(moves, 0.001 * (g * g - second), 0.0)
            bias, root = (1 - 0.9**done).to(g.dtype), (1 - 0.999**done).sqrt().to(g.dtype)
            theta -= torch.where(moves, rate / bias * first / (second.sqrt() / root + 1e-8), 0.0)
        if not bool(theta.isfinite().all()):
            raise NotFinite("the training loss is not finite; standardise the features or lower the learning rate")
        progress(epoch + 1, max_epochs + 1)


def lbfgs(objective: Objective, theta: Tensor, tol: float, max_iter: int) -> Tensor:
    """Parameters (B, p) at which every row's objective has no slope above `tol`: L-BFGS as torch has it, for all rows at once.

    A row that has ended leaves the batch. Most trial steps are taken as they are; rows whose step is not go on with torch's own search.
    """
    out, rows = theta.clone(), torch.arange(len(theta), device=theta.device)
    value, g = objective(theta, rows)
    evals = torch.ones_like(value)
    d, t, before = -g, torch.ones_like(value), g
    scale, history = torch.ones_like(value), list[tuple[Tensor, Tensor, Tensor]]()
    ended = g.abs().amax(1) <= tol
    for iteration in range(max_iter):
        if bool(ended.any()):
            keep = ~ended
            out[rows[ended]] = theta[ended]
            rows, theta, value, g, evals, d, t, before, scale = (
                part[keep] for part in (rows, theta, value, g, evals, d, t, before, scale)
            )
            history = [tuple(part[keep] for part in entry) for entry in history]  # type: ignore[misc]
        if not len(rows):
            return out
        if iteration:
            s, change = d * t[:, None], g - before
            sy = (s * change).sum(1)
            good = sy > 1e-10
            # An entry of weight 0 changes nothing.
            history = [*history[-HISTORY + 1 :], (s, change, torch.where(good, 1 / sy, 0.0))]
            scale = torch.where(good, sy / (change * change).sum(1), scale)
            d = _direction(g, history, scale)
        slope, before = (g * d).sum(1), g
        trial = torch.ones_like(value) if iteration else (1 / g.abs().sum(1)).clamp_max(1.0)
        t, value_new, g_new, used = _search(objective, rows, theta, d, trial, value, g, slope)
        falls = slope <= 0
        t = torch.where(falls, t, 0.0)
        value, g = torch.where(falls, value_new, value), torch.where(falls[:, None], g_new, g)
        theta, evals = theta + t[:, None] * d, evals + used
        still = (d * t[:, None]).abs().amax(1) <= 0
        ended = (g.abs().amax(1) <= tol) | (evals >= max_iter * 5 // 4) | still
    out[rows] = theta
    return out


def _direction(g: Tensor, history: list[tuple[Tensor, Tensor, Tensor]], scale: Tensor) -> Tensor:
    """−H g (b, p) by the two loops of L-BFGS over steps s, changes of the gradient and 1/sᵀy, oldest first."""
    q, shares = -g, list[Tensor]()
    for s, change, rho in reversed(history):
        shares.append(((s * q).sum(1) * rho)[:, None])
        q = torch.addcmul(q, shares[-1], change, value=-1)
    q = q * scale[:, None]
    for (s, change, rho), share in zip(history, reversed(shares), strict=True):
        q = torch.addcmul(q, share - ((change * q).sum(1) * rho)[:, None], s)
    return q


def _search(
    objective: Objective, rows: Tensor, theta: Tensor, d: Tensor, t: Tensor, value: Tensor, g: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps (b,), values, gradients and numbers of evaluations of a strong Wolfe search along d (b, p) from trial steps t (b,)."""
    found, grown = objective(theta + t[:, None] * d, rows)
    used = torch.ones_like(t)
    # The two conditions, with torch's constants.
    good = (found <= value + 1e-4 * t * slope) & ((grown * d).sum(1).abs() <= -0.9 * slope)
    for b in (~good & (slope <= 0)).nonzero()[:, 0].tolist():
        first = [(float(found[b]), grown[b].clone())]

        def at(x: Tensor, step: Any, way: Tensor, b: int = b, known: Any = first) -> tuple[float, Tensor]:
            if known:
                return known.pop()  # type: ignore[no-any-return]
            v, w = objective((x + step * way)[None], rows[b : b + 1])
            return float(v[0]), w[0]

        out = _strong_wolfe(at, theta[b], float(t[b]), d[b], float(value[b]), g[b], slope[b])
        found[b], grown[b], t[b], used[b] = out
    return t, found, grown, used
