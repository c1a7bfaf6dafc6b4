"""Networks with few points: direct, indirect and newton side by side, to choose a default by. About five minutes on two cores.

    python benchmarks/networks.py

Digits, a network 64-16-10 trained on n points; error rate and mean set size at ε = 0.1 on the images left over, mean of five seeds
(each its own split and initial weights), the standard error between seeds behind it.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fullconformal import FullConformalClassifier
from fullconformal.models import mlp

APPROXIMATIONS = ("direct", "indirect", "newton")


def one(n: int, l2: float, seed: int) -> dict[str, tuple[float, float, float]]:
    """Error, size and seconds of each approximation."""
    X, y = load_digits(return_X_y=True)
    X, Xt, y, yt = train_test_split(X / 16, y, train_size=n, test_size=250, random_state=seed, stratify=y)
    torch.manual_seed(seed)
    clf = FullConformalClassifier(mlp(64, (16,), 10), method="influence", l2=l2, random_state=seed, max_epochs=100).fit(
        X, y
    )
    out = {}
    for name in APPROXIMATIONS:
        start = time.perf_counter()
        p = clf.set_params(approximation=name).predict_p(Xt)
        seconds = time.perf_counter() - start
        out[name] = (float((p[np.arange(len(yt)), yt] <= 0.1).mean()), float((p > 0.1).sum(1).mean()), seconds)
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    table = Table(box=None, padding=(0, 2), title="Error rate / set size at ε = 0.1", title_justify="left")
    for head in ("n", "l2", *APPROXIMATIONS, "seconds, each"):
        table.add_column(head, justify="right")
    for n in (100, 300, 1000):
        for l2 in (1e-4, 1e-3, 1e-2):
            runs = [one(n, l2, seed) for seed in range(5)]
            cells = []
            for name in APPROXIMATIONS:
                values = np.array([run[name] for run in runs])
                error, size, _ = values.mean(0)
                cells.append(f"{error:.3f} ± {values[:, 0].std(ddof=1) / 5**0.5:.3f} / {size:.2f}")
            took = " / ".join(f"{np.mean([run[name][2] for run in runs]):.1f}" for name in APPROXIMATIONS)
            table.add_row(f"{n:,}", f"{l2:g}", *cells, took)
            print(n, l2, cells, took, flush=True)
    Console(width=130).print(table)
