"""Fitting networks: Adam, followed by L-BFGS on the whole bag."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
