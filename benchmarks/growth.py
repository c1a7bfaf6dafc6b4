"""How the time of a test point grows with the training bag, 10⁴ → 10⁶ at a fixed network: pruned, against the unpruned product.

    python benchmarks/growth.py                 about ten minutes on two cores; results/growth_dense.png and .json
    python benchmarks/growth.py 10000 100000    other sizes

Ten Gaussian clouds in 20 dimensions that overlap as the classes of MNIST do, one network 20-24-16-10 trained on the first 10,000 points,
p = 1,074, deleted scheme, float32, 2,000 test points. Unpruned is timed on a few of them. Times are
processor time of one thread, which other work on the machine disturbs least.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from time import process_time

import numpy as np
import torch
from measure import seconds, show
from problems import DAMPING, L2, synthetic

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.data import Dataset
from fullconformal.models import mlp
from fullconformal.models.training import train

RESULTS = Path(__file__).parent / "results"
POINTS, FEW = 2000, 5


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    data = synthetic(max(sizes), POINTS, (20,), 1.15)
    torch.manual_seed(0)
    net = mlp(20, (24, 16), 10)
    X, y = torch.as_tensor(data.X[:10_000]), torch.as_tensor(data.y[:10_000])
    train(net, X, y, {name: L2 * len(y) for name, _ in net.named_parameters()}, max_epochs=10, max_iter=20)
    found = [point(net.eval(), data, n) for n in sizes]
    first = found[0]
    rows = [
        (f"{r['n']:,}", f"{r['touched']:.3%}", f"{1e3 * r['pruned']:.3f} ms", f"{1e3 * r['unpruned']:.1f} ms",
         f"{r['n'] / first['n']:.0f}×", f"{r['pruned'] / first['pruned']:.2f}×")
        for r in found
    ]  # fmt: skip
    heads = ("n", "products formed", "a test point", "unpruned", "n grew", "time grew")
    show(f"p = {sum(q.numel() for q in net.parameters()):,}, ten labels, {POINTS:,} test points", rows, heads)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "growth_dense.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found)


def point(net: torch.nn.Module, data: Dataset, n: int) -> dict[str, float]:
    """Seconds a test point with a bag of n points, pruned and not, and the share of products formed."""
    from fullconformal.influence.counter import direct_counts

    clf = FullConformalClassifier(
        net, prefit=True, method="influence", l2=L2, damping=DAMPING, prune=True, device="cpu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        clf.fit(data.X[:n], data.y[:n])
    p = clf.predict_p(data.X_test)
    pruned = seconds(lambda: clf.predict_p(data.X_test), 2, process_time) / POINTS
    counts = direct_counts(clf._engine.prepared, torch.as_tensor(data.X_test), 1.0)
    few = clf.set_params(prune=False)
    unpruned = seconds(lambda: few.predict_p(data.X_test[:FEW]), 1, process_time) / FEW
    assert np.abs(few.predict_p(data.X_test[:5]) - p[:5]).max() < 1e-9
    print(f"n = {n:,}: {1e3 * pruned:.3f} ms", flush=True)
    return {"n": n, "pruned": pruned, "unpruned": unpruned, "touched": counts.touched, "solved": counts.solved}


def plot(found: list[dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n, pruned, unpruned = (np.array([r[k] for r in found]) for k in ("n", "pruned", "unpruned"))
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    ax.loglog(n, 1e3 * unpruned, "s-", color="0.5", label="unpruned")
    ax.loglog(n, 1e3 * pruned, "o-", color="C0", label="pruned, the same p-values")
    ax.loglog(n, 1e3 * pruned[0] * n / n[0], ":", color="C0", lw=1, label="ten times n, ten times the time")
    ax.set(xlabel="training points n", ylabel="milliseconds a test point, ten labels")
    ax.grid(alpha=0.3, which="both", lw=0.5)
    ax.legend(frameon=False)
    fig.savefig(RESULTS / "growth_dense.png", dpi=150)


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [10_000, 31_623, 100_000, 316_228, 1_000_000])
