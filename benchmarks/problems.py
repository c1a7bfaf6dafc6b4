"""The two problems whose speed is measured: the paper's MLP_C on MNIST and its CNN on CIFAR-10, and where their time goes.

Data come from a file made by `python benchmarks/gpu.py --prepare`, or from the folder FULLCONFORMAL_DATA, or are
synthetic, of the same size.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.data import Dataset, load_cifar10, load_mnist
from fullconformal.models import Autoencoder, paper_network, train

L2, DAMPING = 1e-5, 0.01  # the paper's
STAGES = ("curvature", "factor", "self-influences", "counts")
DIGITS = tuple(map(str, range(10)))


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synthetic(
    n: int, m: int, shape: tuple[int, ...], spread: float, n_classes: int = 10, name: str = "synthetic"
) -> Dataset:
    """Gaussian clouds around random centres; the spread says how far they overlap."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(n_classes, *shape)).astype(np.float32)
    y = rng.integers(0, n_classes, n + m)
    X = centres[y] + spread * rng.normal(size=(n + m, *shape)).astype(np.float32)
    classes = tuple(map(str, range(n_classes)))
    return Dataset(name, X[:n], y[:n], X[n:], y[n:], classes, note="synthetic data of the same size")


def mnist(file: str | None = None) -> Dataset:
    """MNIST in 32 features of an autoencoder, standardised."""
    if file:
        with np.load(file) as parts:
            arrays = [parts[k] for k in ("X", "y", "X_test", "y_test")]
        return Dataset("MNIST, 32 features", *arrays, DIGITS)
    if not os.environ.get("FULLCONFORMAL_DATA"):
        return synthetic(60_000, 10_000, (32,), 1.4, name="clouds like MNIST, 32 features")
    data = load_mnist()
    X, X_test = (
        torch.tensor(part, dtype=torch.float32, device=device()).flatten(1) / 255 for part in (data.X, data.X_test)
    )
    coder = encoder(X)
    X, X_test = coder.encode(X), coder.encode(X_test)
    mean, scale = X.mean(0), X.std(0).clamp_min(1e-6)
    X, X_test = (((part - mean) / scale).cpu().numpy() for part in (X, X_test))
    return Dataset("MNIST, 32 features", X, data.y, X_test, data.y_test, DIGITS)


def encoder(X: torch.Tensor, epochs: int = 10) -> Autoencoder:
    """The paper's autoencoder, trained for a few epochs."""
    torch.manual_seed(0)
    coder = Autoencoder(X.shape[1], 32, dropout=0.0).to(X.device)
    adam = torch.optim.Adam(coder.parameters(), 1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(X)).to(X.device).split(256):
            adam.zero_grad()
            nn.functional.mse_loss(coder(X[index]), X[index]).backward()
            adam.step()
    return coder.eval()


def cifar(folder: str | None = None) -> Dataset:
    """CIFAR-10 as images in [−½, ½]."""
    if folder:
        parts = [dict(np.load(path)) for path in sorted(Path(folder).glob("part_*.npz"))]
        X, y = (np.concatenate([part[k] for part in parts]) for k in ("X", "y"))
        data = Dataset("CIFAR-10", X[:50_000], y[:50_000], X[50_000:], y[50_000:], DIGITS)
    elif os.environ.get("FULLCONFORMAL_DATA"):
        data = load_cifar10()
    else:
        return synthetic(50_000, 10_000, (3, 32, 32), 3.0, name="clouds like CIFAR-10")
    X, X_test = (part.astype(np.float32) / 255 - 0.5 for part in (data.X, data.X_test))
    return Dataset("CIFAR-10", X, data.y, X_test, data.y_test, data.classes)


def fitted(data: Dataset, name: str, epochs: int) -> nn.Module:
    """One of the paper's networks, trained on all of the data."""
    torch.manual_seed(0)
    net = paper_network(name, data.X.shape[1:], 10).to(device())
    X, y = torch.as_tensor(data.X, device=device()), torch.as_tensor(data.y, device=device())
    penalty = {n: len(y) * L2 for n, _ in net.named_parameters()}
    train(net, X, y, penalty, max_epochs=epochs, batch_size=200, max_iter=20)
    return net.eval()


@dataclass(frozen=True)
class Run:
    """One fit and prediction: its p-values, and the seconds of both."""

    p: np.ndarray
    fit: float
    predict: float

    @property
    def total(self) -> float:
        return self.fit + self.predict


def run(data: Dataset, net: nn.Module, memory_budget: float, m: int | None = None, **options: object) -> Run:
    """p-values of all labels of the first m test points, and how long they took."""
    clf = FullConformalClassifier(
        net,
        prefit=True,
        method="influence",
        curvature="ggn",
        l2=L2,
        damping=DAMPING,
        memory_budget=memory_budget,
        **options,
    )
    wait()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        clf.fit(data.X, data.y)
    wait()
    middle = time.perf_counter()
    p = clf.predict_p(data.X_test[:m])
    wait()
    return Run(p, middle - start, time.perf_counter() - middle)


def stages(data: Dataset, net: nn.Module, memory_budget: float, m: int | None = None, **options: object) -> Stages:
    """Seconds of the stages that the library marks for torch's profiler, in a run of their own, which the profiler slows down."""
    with torch.profiler.profile() as profiler:
        run(data, net, memory_budget, m, **options)
    found, kernels = dict.fromkeys(STAGES, 0.0), profiler.key_averages()
    for event in kernels:
        stage = event.key.removeprefix("fullconformal.")
        if stage in found:
            # On a GPU the host may have left a stage while its kernels still run.
            found[stage] = max(found[stage], event.cpu_time_total / 1e6, event.device_time_total / 1e6)
    return Stages(found, kernels)


@dataclass(frozen=True)
class Stages:
    """Seconds by stage, and what the profiler says of each operation."""

    seconds: dict[str, float]
    kernels: Any


def wait() -> None:
    """Until the device has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sets(p: np.ndarray, y: np.ndarray, level: float = 0.1) -> str:
    """Error rate and mean size of the sets at a significance level."""
    error = (p[np.arange(len(p)), y[: len(p)]] <= level).mean()
    return f"error {error:.3f}, mean set size {(p > level).sum(1).mean():.2f} at ε = {level}"
