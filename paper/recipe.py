"""What is to be trained, on which points, and how: the losses, the penalty and the settings of training by batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Progress = Callable[[int, int], None]  # told (epochs done, epochs at most)


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy (k,) of each point."""
    return nn.functional.cross_entropy(logits, y, reduction="none")


def squared_errors(output: Tensor, x: Tensor) -> Tensor:
    """Mean squared error (k,) of each point."""
    return ((output - x) ** 2).flatten(1).mean(1)


@dataclass(frozen=True)
class Recipe:
    """How networks are trained; the defaults are the paper's.

    Parameters
    ----------
    learning_rate, batch_size, max_epochs
        Of Adam.
    patience : int
        Epochs without a better validation loss after which a network stops; the best parameters are kept. Networks without
        validation points train for all epochs.
    cosine : bool
        Let the learning rate fall to zero along a cosine.
    """

    learning_rate: float = 1e-3
    batch_size: int = 100
    max_epochs: int = 200
    patience: int = 10
    cosine: bool = False


@dataclass(frozen=True)
class Job:
    """One network: its seed, the points it trains on and those that stop it, and which of several inputs it reads."""

    seed: int
    train: Tensor
    valid: Tensor | None = None
    source: int = 0


@dataclass(frozen=True)
class Trained:
    """A trained network, the epochs it took, and the validation loss of its parameters (NaN without validation points)."""

    model: nn.Module
    epochs: int
    loss: float


def weights_only(model: nn.Module, lam: float) -> dict[str, float]:
    """The paper's penalty λ|W|², on weights and not on biases, as coefficients of ½θ² by parameter name."""
    return {name: 2 * lam for name, q in model.named_parameters() if q.ndim > 1}


def hold_out(indices: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices split at random into those that train and a share that stops the training."""
    order = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))]
    cut = len(indices) - round(share * len(indices))
    return order[:cut], order[cut:]
