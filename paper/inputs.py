"""From a data set to what the networks read: autoencoders where the paper has them, then standardised features."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fullconformal import data
from fullconformal.models import Autoencoder
from paper.config import Real, key
from paper.recipe import Job, Progress, Recipe, hold_out, squared_errors, weights_only
from paper.records import Records
from paper.stacked import train_stacked

# Numbers that an autoencoder leaves of an image, for each network.
EMBEDDING = {"MLP_A": 8, "MLP_B": 16, "MLP_C": 32, "LR": 8}
LOADERS = {
    "digits": lambda folder: data.load_digits(),
    "mnist": data.load_mnist,
    "cifar10": data.load_cifar10,
    "acsincome": data.load_acsincome,
}


@dataclass(frozen=True)
class Inputs:
    """Objects as networks read them, X (S, n, ...) and X_test (S, m, ...), one version a seed or one for all; labels on the CPU."""

    X: Tensor
    X_test: Tensor
    y: np.ndarray
    y_test: np.ndarray
    n_classes: int
    seconds: float = 0.0

    def version(self, seed_at: int) -> int:
        """Which version the network of a seed reads."""
        return seed_at if len(self.X) > 1 else 0


def load_data(config: Real, folder: str | None) -> data.Dataset:
    """The data set, cut to the config's sizes."""
    if config.data not in LOADERS:
        raise ValueError(f"{config.name}: data={config.data!r} is unknown; allowed: {', '.join(map(repr, LOADERS))}.")
    found = LOADERS[config.data](folder)
    n, m = config.n_train, config.n_test
    cut = {"X": found.X[:n], "y": found.y[:n], "X_test": found.X_test[:m], "y_test": found.y_test[:m]}
    return data.Dataset(found.name, **cut, classes=found.classes, features=found.features, note=found.note)


def make_inputs(
    config: Real, found: data.Dataset, model: str, records: Records, device: str, progress: Progress | None = None
) -> Inputs:
    """What a model reads: embeddings of images, images for the CNN, rows of numbers as they are; all standardised."""
    start = time.perf_counter()
    images = found.X.ndim == 4
    if images and model != "CNN" and config.autoencoder:
        X, X_test = embed(config, found, EMBEDDING[model], records, device, progress)
    else:
        X, X_test = (torch.as_tensor(part).to(device).float()[None] for part in (found.X, found.X_test))
        X, X_test = (X, X_test) if model == "CNN" else (X.flatten(2), X_test.flatten(2))
    axes = tuple(k for k in range(1, X.ndim) if k != 2)  # over points, and over the pixels of a channel
    mean, std = X.mean(axes, keepdim=True), X.std(axes, keepdim=True).clamp_min(1e-6)
    X, X_test = (X - mean) / std, (X_test - mean) / std
    return Inputs(X, X_test, found.y, found.y_test, len(found.classes), time.perf_counter() - start)


def embed(
    config: Real, found: data.Dataset, size: int, records: Records, device: str, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Embeddings (S, n, size) and (S, m, size) of images in [0, 1], one autoencoder a seed."""
    settings = key(config, "data", "seeds", "n_train", "max_epochs", "patience", "hold_out", "lam")
    X, X_test = (torch.as_tensor(part).to(device).float().flatten(1) / 255 for part in (found.X, found.X_test))
    factory = partial(Autoencoder, X.shape[1], size)

    def make() -> dict[str, np.ndarray]:
        jobs = [Job(seed, *hold_out(torch.arange(len(X)), config.hold_out, seed)) for seed in config.seeds]
        recipe = Recipe(max_epochs=config.max_epochs, patience=config.patience)
        ridge = weights_only(factory(), config.lam)
        trained = train_stacked(factory, X[None], X, jobs, ridge, recipe, squared_errors, progress)
        return {
            f"{at}.{name}": value.cpu().numpy()
            for at, one in enumerate(trained)
            for name, value in one.model.encoder.state_dict().items()
        }

    kept = records.cached(f"autoencoder-{config.data}-{size}-{settings}", make)
    parts = []
    for at in range(len(config.seeds)):
        model = factory().to(device)
        model.encoder.load_state_dict(
            {name: torch.as_tensor(kept[f"{at}.{name}"]) for name in model.encoder.state_dict()}
        )
        parts.append((model.encode(X), model.encode(X_test)))
    return torch.stack([train for train, _ in parts]), torch.stack([test for _, test in parts])
