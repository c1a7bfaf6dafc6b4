"""The networks of one setting, all seeds and roles trained together and kept in the cache.

Roles: "whole" (ACP: all of Z by the paper's recipe), "split" (four fifths, for split CP and RAPS), "fold 1 of 5" … (CV+, full CP by folds),
"ours" (all of Z, to a gradient tolerance). Those that no method needs are not trained.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from fullconformal.models import paper_network, polish
from paper.config import Real, key
from paper.inputs import Inputs
from paper.recipe import Job, Progress, Recipe, Trained, hold_out, weights_only
from paper.records import Records
from paper.stacked import train_stacked

# What the parameters of a network depend on: its inputs, and how it is trained.
INPUTS = ("data", "seeds", "n_train", "autoencoder", "max_epochs", "patience", "hold_out", "lam")
RECIPE = (*INPUTS, "cnn_epochs", "calibration")
OURS = (*INPUTS, "ours_l2", "ours_epochs", "polish", "cnn_polish")
TOLERANCE = 1e-5  # of the mean gradient of our own fits


@dataclass(frozen=True)
class Network:
    """A trained network, the points it did not train or calibrate on apart: `train` it saw (to stop, too), `rest` it did not."""

    model: nn.Module
    train: np.ndarray
    rest: np.ndarray
    epochs: int
    seconds: float


Parts = dict[str, tuple[np.ndarray, np.ndarray]]


def full_folds(config: Real, model: str) -> int:
    """K of full CP by folds."""
    return config.cnn_full_folds if model == "CNN" else config.full_folds


def fold_roles(folds: int) -> list[str]:
    """The networks without each of so many folds."""
    return [f"fold {k + 1} of {folds}" for k in range(folds)]


def parts(config: Real, n: int, seed: int, folds: int | None = None) -> Parts:
    """What each role of a seed trains on and leaves out, positions in 0 … n − 1: the roles of that many folds, or those without any."""
    order = np.random.RandomState(seed).permutation(n)
    cut = n - round(config.calibration * n)
    if folds is None:
        return {"whole": (order, order[:0]), "split": (order[:cut], order[cut:])}
    rests = np.array_split(order, folds)
    return {role: (np.setdiff1d(order, rest), rest) for role, rest in zip(fold_roles(folds), rests, strict=True)}


def stacks(config: Real, model: str, methods: Collection[str]) -> list[int | None]:
    """What is trained for some methods, each with its roles: networks without folds (None), and those of K folds."""
    folds = {"cv_plus": config.folds, "folds": full_folds(config, model)}
    others = [None] if set(methods) - {*folds, "ours", "ours_studentized"} else []
    return [*others, *sorted({folds[method] for method in methods if method in folds})]


def train_setting(
    config: Real, model: str, inputs: Inputs, records: Records, device: str, methods: Collection[str],
    progress: Progress | None = None,
) -> dict[tuple[int, str], Network]:  # fmt: skip
    """Networks by (seed, role), those that the methods need."""
    factory = partial(paper_network, model, inputs.X.shape[2:], inputs.n_classes)
    n, y = len(inputs.y), torch.as_tensor(inputs.y, device=device)

    def by_recipe(roles: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        start, jobs = time.perf_counter(), []
        for (seed, _role), (train, _) in roles.items():
            fit, stop = hold_out(torch.as_tensor(train), config.hold_out, seed)
            jobs.append(Job(seed, fit, stop, inputs.version(config.seeds.index(seed))))
        epochs = config.cnn_epochs if model == "CNN" else config.max_epochs
        recipe = Recipe(max_epochs=epochs, patience=config.patience)
        ridge = weights_only(factory(), config.lam)
        trained = train_stacked(factory, inputs.X, y, jobs, ridge, recipe, progress=progress)
        return packed(trained, time.perf_counter() - start)

    def by_ours() -> dict[str, np.ndarray]:
        start = time.perf_counter()
        whole = [Job(seed, torch.arange(n), None, inputs.version(at)) for at, seed in enumerate(config.seeds)]
        ridge = {name: config.ours_l2 for name, _ in factory().named_parameters()}
        recipe = Recipe(max_epochs=config.ours_epochs, cosine=True)
        trained = train_stacked(factory, inputs.X, y, whole, ridge, recipe, progress=progress)
        most = config.cnn_polish if model == "CNN" else config.polish
        for job, one in zip(whole, trained, strict=True):
            penalty = {name: n * value for name, value in ridge.items()}
            polish(one.model, inputs.X[job.source], y, penalty, TOLERANCE, most)
        return packed(trained, time.perf_counter() - start)

    name, out = f"{config.data}-{model}", dict[tuple[int, str], Network]()
    for folds in stacks(config, model, methods):
        roles = {(seed, role): part for seed in config.seeds for role, part in parts(config, n, seed, folds).items()}
        kept = records.cached(f"networks-{name}-{folds or 'whole'}-{key(config, *RECIPE)}", partial(by_recipe, roles))
        out |= {which: unpacked(factory, kept, at, *part) for at, (which, part) in enumerate(roles.items())}
    if any(method.startswith("ours") for method in methods):
        kept = records.cached(f"ours-{name}-{key(config, *OURS)}", by_ours)
        every = np.arange(n)
        for at, seed in enumerate(config.seeds):
            out[seed, "ours"] = unpacked(factory, kept, at, every, every[:0])
    return out


def packed(trained: list[Trained], seconds: float) -> dict[str, np.ndarray]:
    """Parameters of all networks as rows of one matrix, the epochs they took, and the seconds a network."""
    rows = [np.concatenate([q.detach().cpu().numpy().ravel() for q in one.model.parameters()]) for one in trained]
    epochs = np.array([one.epochs for one in trained])
    return {"theta": np.stack(rows), "epochs": epochs, "seconds": np.array(seconds / len(trained))}


def unpacked(
    factory: partial[nn.Sequential], kept: dict[str, np.ndarray], at: int, train: np.ndarray, rest: np.ndarray
) -> Network:
    """One of the networks that were kept."""
    model = factory().eval()
    row, start = torch.as_tensor(kept["theta"][at]), 0
    with torch.no_grad():
        for q in model.parameters():
            q.copy_(row[start : start + q.numel()].view_as(q))
            start += q.numel()
    return Network(model, train, rest, int(kept["epochs"][at]), float(kept["seconds"]))
