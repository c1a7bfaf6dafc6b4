"""Networks with few points: K-fold full CP beside the paper's method and those that hold points out. About ten minutes on two cores.

    python benchmarks/networks.py [n ...]
    python benchmarks/networks.py --approximations     direct, indirect and newton side by side, of the paper's method, by l2; five seeds

Digits, a network 64-16-10 trained on n points (default 100, 300 and 1,000), l2 = 1e-2. Error rate and mean labels in a set at ε = 0.1, and
the area under the curve of the size over ε ≤ 0.2, on 500 images left over; means of ten seeds, each its own split and initial weights, with
the standard error between seeds. Seconds are of fit and prediction, beside those of training one network on all n points.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fullconformal import CrossConformalClassifier, FullConformalClassifier, SplitConformalClassifier
from fullconformal.metrics import size_auc
from fullconformal.models import mlp, train

SEEDS, EPOCHS, TEST, L2 = 10, 100, 500, 1e-2


def methods(net: torch.nn.Module, seed: int) -> dict[str, object]:
    """What is compared, unfitted."""
    options = {"l2": L2, "max_epochs": EPOCHS, "random_state": seed}
    full = {"method": "folds", **options}
    return {
        "folds, K = 10": FullConformalClassifier(net, **full),
        "folds, K = 10, influence": FullConformalClassifier(net, update="influence", **full),
        "cross-CP, K = 10": CrossConformalClassifier(net, n_folds=10, **options),
        "split 80/20": SplitConformalClassifier(net, calibration_size=0.2, **options),
        "split 50/50": SplitConformalClassifier(net, calibration_size=0.5, **options),
        "ACP, direct": FullConformalClassifier(net, method="influence", **options),
    }


def one(n: int, seed: int) -> dict[str, tuple[float, float, float, float]]:
    """Error, size, area and time, as a multiple of one training, of each method."""
    X, y = load_digits(return_X_y=True)
    # Not class by class: points are to be exchangeable.
    X, Xt, y, yt = train_test_split(X / 16, y, train_size=n, test_size=TEST, random_state=seed)
    torch.manual_seed(seed)
    net = mlp(64, (16,), 10)
    alone = copy.deepcopy(net)
    penalty = {name: n * L2 for name, _ in alone.named_parameters()}
    start = time.perf_counter()
    train(alone, torch.tensor(X).float(), torch.tensor(y), penalty, max_epochs=EPOCHS, seed=seed)
    once = time.perf_counter() - start
    out = {}
    for name, clf in methods(net, seed).items():
        start = time.perf_counter()
        try:
            p = clf.fit(X, y).predict_p(Xt)  # type: ignore[attr-defined]
        except ValueError:
            # What trains lacks a class.
            out[name] = (np.nan,) * 4
            continue
        seconds = time.perf_counter() - start
        columns = np.searchsorted(clf.classes_, yt)  # type: ignore[attr-defined]
        errors = (p[np.arange(TEST), columns] <= 0.1).mean()
        out[name] = float(errors), float((p > 0.1).sum(1).mean()), size_auc(p).value, seconds / once
    return out


APPROXIMATIONS = ("direct", "indirect", "newton")


def approximated(n: int, l2: float, seed: int) -> dict[str, tuple[float, float, float]]:
    """Error, size and seconds of each approximation of the paper's method."""
    X, y = load_digits(return_X_y=True)
    X, Xt, y, yt = train_test_split(X / 16, y, train_size=n, test_size=250, random_state=seed, stratify=y)
    torch.manual_seed(seed)
    net = mlp(64, (16,), 10)
    clf = FullConformalClassifier(net, method="influence", l2=l2, random_state=seed, max_epochs=EPOCHS).fit(X, y)
    out = {}
    for name in APPROXIMATIONS:
        start = time.perf_counter()
        p = clf.set_params(approximation=name).predict_p(Xt)
        seconds = time.perf_counter() - start
        out[name] = (float((p[np.arange(len(yt)), yt] <= 0.1).mean()), float((p > 0.1).sum(1).mean()), seconds)
    return out


def print_approximations() -> None:
    """Error rate and set size at ε = 0.1 by n and l2."""
    for n in (100, 300, 1000):
        for l2 in (1e-4, 1e-3, 1e-2):
            runs, cells = [approximated(n, l2, seed) for seed in range(5)], []
            for name in APPROXIMATIONS:
                values = np.array([run[name] for run in runs])
                error, size, seconds = values.mean(0)
                cells.append(
                    f"{name} {error:.3f} ± {values[:, 0].std(ddof=1) / 5**0.5:.3f} / {size:.2f} in {seconds:.1f} s"
                )
            print(n, l2, *cells, sep="   ", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--approximations"]:
        print_approximations()
        sys.exit()
    table = Table(box=None, padding=(0, 2), title=f"ε = 0.1, {SEEDS} seeds", title_justify="left")
    for head in ("n", "method", "error", "labels", "AUC", "time / training"):
        table.add_column(head, justify="right")
    for n in [int(size) for size in sys.argv[1:]] or (100, 300, 1000):
        runs = [one(n, seed) for seed in range(SEEDS)]
        for name in runs[0]:
            values = np.array([run[name] for run in runs])
            error, size, area, _ = np.nanmean(values, 0)
            spread = np.nanstd(values[:, :3], 0, ddof=1) / np.isfinite(values[:, 0]).sum() ** 0.5
            cells = f"{error:.3f} ± {spread[0]:.3f}", f"{size:.2f} ± {spread[1]:.2f}", f"{area:.3f} ± {spread[2]:.3f}"
            table.add_row(f"{n:,}", name, *cells, f"{np.nanmedian(values[:, 3]):.1f}")
            print(n, name, *cells, f"{np.nanmedian(values[:, 3]):.1f}", flush=True)
    Console(width=130).print(table)
