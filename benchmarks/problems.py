"""The two problems whose speed is measured: the paper's MLP_C on MNIST and its CNN on CIFAR-10, and where their time goes.

Data come from a file made by `python benchmarks/gpu.py --prepare`, or from the folder FULLCONFORMAL_DATA, or are
synthetic, of the same size.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.curvature import dense, ggn
from fullconformal.data import Dataset, load_cifar10, load_mnist
from fullconformal.methods import engines
from fullconformal.models import Autoencoder, paper_network
from fullconformal.models.training import train

L2, DAMPING = 1e-5, 0.01  # the paper's
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


@dataclass
class Run:
    """One fit and prediction: seconds of each stage, p-values, and what pruning left to do."""

    seconds: dict[str, float] = field(default_factory=dict)
    p: np.ndarray = field(default_factory=lambda: np.empty(0))
    touched: float = 1.0
    solved: float = 1.0


def run(data: Dataset, net: nn.Module, memory_budget: float, m: int | None = None, **options: object) -> Run:
    """Curvature, factor, self-influences and p-values of all labels through the public face, and where the time went."""
    out = Run()
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
    with stages(out), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        fit = timed(out.seconds, "fit", clf.fit)
        fit(data.X, data.y)
        out.p = timed(out.seconds, "predict", clf.predict_p)(data.X_test[:m])
    return out


@contextmanager
def stages(out: Run) -> Iterator[None]:
    """Time the stages inside `fit` and `predict_p`, the device waited for at the ends of each."""
    places = [
        ("curvature", ggn, "dense_curvature"),
        ("factor", dense, "factorise"),
        ("self-influences", engines, "prepare"),
        ("p-values", engines, "direct_counts"),
    ]
    before = [getattr(module, name) for _, module, name in places]
    for stage, module, name in places:
        setattr(module, name, timed(out.seconds, stage, getattr(module, name), out))
    try:
        yield
    finally:
        for (_, module, name), work in zip(places, before, strict=True):
            setattr(module, name, work)


def timed(
    seconds: dict[str, float], stage: str, work: Callable[..., object], out: Run | None = None
) -> Callable[..., object]:
    """The same function, its time added to the stage's."""

    def measured(*args: object, **options: object) -> object:
        wait()
        start = time.perf_counter()
        result = work(*args, **options)
        wait()
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
        if out is not None and hasattr(result, "touched"):
            out.touched, out.solved = result.touched, result.solved
        return result

    return measured


def wait() -> None:
    """Until the device has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sets(p: np.ndarray, y: np.ndarray, level: float = 0.1) -> str:
    """Error rate and mean size of the sets at a significance level."""
    error = (p[np.arange(len(p)), y[: len(p)]] <= level).mean()
    return f"error {error:.3f}, mean set size {(p > level).sum(1).mean():.2f} at ε = {level}"
