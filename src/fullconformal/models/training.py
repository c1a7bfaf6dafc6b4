"""Fitting networks: Adam, followed by L-BFGS on the whole bag."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fullconformal.losses import SOFTMAX, Loss, NotFinite
from fullconformal.runtime.threads import threads

Progress = Callable[[int, int], None]


def train(
    model: nn.Module,
    X: Tensor,
    y: Tensor,
    penalty: dict[str, float],
    *,
    max_epochs: int = 200,
    batch_size: int = 100,
    max_iter: int = 500,
    seed: int = 0,
    progress: Progress | None = None,
    loss: Loss = SOFTMAX,
) -> None:
    """Fit a network in place to all of (X, y): Adam, then L-BFGS on the whole bag until the mean gradient is below 1e-5.

    The objective is the mean loss plus ½ Σ (Λ/n) θ², Λ by parameter name. The model stays in the mode it is in.
    """
    p = sum(q.numel() for q in model.parameters())
    with threads(1 if batch_size * p < 2**24 else torch.get_num_threads()):
        _adam(model, X, y, penalty, max_epochs, batch_size, seed, progress, loss)
    with threads(1 if len(y) * p < 2**24 else torch.get_num_threads()):
        polish(model, X, y, penalty, 1e-5, max_iter, loss)
    if progress is not None:
        progress(max_epochs + 1, max_epochs + 1)


def _objective(model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float], n: int, kind: Loss) -> Tensor:
    """Mean loss of a batch plus the penalty's share, (1/2n) Σ Λ θ²."""
    loss = kind.value(model(X), y).mean()
    for name, q in model.named_parameters():
        if q.requires_grad and penalty.get(name, 0.0):
            loss = loss + penalty[name] / (2 * n) * (q**2).sum()
    return loss


def _adam(
    model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float],
    max_epochs: int, batch_size: int, seed: int, progress: Progress | None, kind: Loss,
) -> None:  # fmt: skip
    n = len(y)
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam([q for q in model.parameters() if q.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(max_epochs, 1))
    for epoch in range(max_epochs):
        for index in torch.randperm(n, generator=generator).to(y.device).split(batch_size):
            adam.zero_grad()
            loss = _objective(model, X[index], y[index], penalty, n, kind)
            loss.backward()
            adam.step()
        schedule.step()
        if not torch.isfinite(loss):
            raise NotFinite("the training loss is not finite; standardise the features or lower the learning rate")
        if progress is not None:
            progress(epoch + 1, max_epochs + 1)


def polish(
    model: nn.Module, X: Tensor, y: Tensor, penalty: dict[str, float], tol: float, max_iter: int, kind: Loss = SOFTMAX
) -> None:
    """L-BFGS with strong Wolfe line search on the whole bag until |∇|∞ ≤ tol."""
    params = [q for q in model.parameters() if q.requires_grad]
    lbfgs = torch.optim.LBFGS(
        params,
        max_iter=max_iter,
        tolerance_grad=tol,
        tolerance_change=0,
        history_size=30,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = _objective(model, X, y, penalty, len(y), kind)
        loss.backward()
        return loss

    lbfgs.step(closure)
