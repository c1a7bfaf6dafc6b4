"""Every curvature against the exact Gauss–Newton matrix: how far its p-values are, and what they are worth. A few minutes on two cores.

    python benchmarks/curvatures.py                    both networks on digits; benchmarks/results/curvatures.md

MLP_A has hidden layers of 20 and 10, MLP_B one of 100, both trained to their minimum with l2 = 1e-3. One network serves all curvatures, so
differences are the curvature's alone. The distance is the mean |Δp| over objects and labels; the AUC is the area under the mean set size
divided by the number of labels, over all levels, which is the mean p-value; smaller is better where coverage is kept.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import click
import numpy as np
import torch
from measure import show
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fullconformal import FullConformalClassifier
from fullconformal.models import mlp, train

RESULTS = Path(__file__).parent / "results" / "curvatures.md"
APPROXIMATE = ("ekfac", "kfac", "last_layer", "hessian")
# name, hidden layers, training points, and the curvatures that are not too dear there: dual takes (n·C)²
SETTINGS = [
    ("MLP_A", (20, 10), 300, ("ggn", "dual", *APPROXIMATE)),
    ("MLP_A", (20, 10), 1400, ("ggn", *APPROXIMATE)),
    ("MLP_B", (100,), 300, ("ggn", "dual", *APPROXIMATE)),
    ("MLP_B", (100,), 1400, ("ggn", *APPROXIMATE)),
]
HEADS = (
    "curvature",
    "mean |Δp|",
    "largest |Δp|",
    "coverage 0.9",
    "coverage 0.95",
    "set size 0.9",
    "AUC",
    "fit, s",
    "p-values, s",
)


def rows(hidden: tuple[int, ...], points: int, names: tuple[str, ...], seed: int) -> list[list[str]]:
    """One row a curvature."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float64)
    X, Xt, y, yt = train_test_split(X, y, train_size=points, random_state=seed, stratify=y)
    torch.manual_seed(seed)
    options = {"method": "influence", "l2": 1e-3, "random_state": seed, "device": "cpu"}
    net = mlp(64, hidden, 10).double()
    penalty = {key: len(y) * options["l2"] for key, _ in net.named_parameters()}
    train(net, torch.as_tensor(X), torch.as_tensor(y), penalty, seed=seed)
    out, exact = [], None
    for name in names:
        start = time.perf_counter()
        clf = FullConformalClassifier(net, curvature=name, prefit=True, **options).fit(X, y)
        fitted = time.perf_counter()
        p = clf.predict_p(Xt)
        done = time.perf_counter()
        exact = p if exact is None else exact
        true = p[np.arange(len(yt)), yt]
        gap = np.abs(p - exact)
        out.append([
            name, f"{gap.mean():.5f}", f"{gap.max():.4f}", f"{(true > 0.1).mean():.3f}", f"{(true > 0.05).mean():.3f}",
            f"{(p > 0.1).sum(1).mean():.2f}", f"{p.mean():.4f}", f"{fitted - start:.2f}", f"{done - fitted:.2f}",
        ])  # fmt: skip
        print(hidden, *out[-1], flush=True)
    return out


@click.command()
@click.option("--seed", default=0)
def main(seed: int) -> None:
    """Write the tables."""
    warnings.simplefilter("ignore")
    page = [
        "# Curvatures against the exact Gauss–Newton matrix", "",
        f"Digits, all images that are not trained on are tested, seed {seed}, l2 = 1e-3, float64; `python benchmarks/curvatures.py`. Times "
        "are of one run on two shared cores, fit without training: good for orders of magnitude.",
    ]  # fmt: skip
    for network, hidden, points, names in SETTINGS:
        p = sum(q.numel() for q in mlp(64, hidden, 10).parameters())
        title = f"{network}, {p:,} parameters, {points:,} training points"
        table = rows(hidden, points, names, seed)
        show(title, table, HEADS)
        error = (0.09 / (1797 - points)) ** 0.5
        page += ["", f"## {title}", "", f"Standard error of a coverage of 0.9: {error:.3f}.", ""]
        page += ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
        page += ["| " + " | ".join(row) + " |" for row in table]
        RESULTS.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
