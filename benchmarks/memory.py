"""Peak memory of the whole process at n = 60,000, p = 9,580, 100 test points (synthetic), against memory_budget + 300 MB.

python benchmarks/memory.py            a budget of 3 GiB, about two minutes on two cores
python benchmarks/memory.py 4          a budget in GiB
"""

from __future__ import annotations

import resource
import sys
import time
import warnings

import numpy as np
import torch

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.models import mlp


def peak() -> float:
    """Largest resident size of the process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(budget: float) -> None:
    n, m = 60_000, 100
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 32)).astype(np.float32)
    y = rng.integers(0, 10, n + m)
    X = centres[y] + rng.normal(size=(n + m, 32)).astype(np.float32)
    torch.manual_seed(0)
    net = mlp(32, (100, 50, 20), 10)
    print(f"imports and data: {peak():.0f} MB")
    clf = FullConformalClassifier(
        net, method="influence", curvature="ggn", max_epochs=2, memory_budget=budget, random_state=0
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        clf.fit(X[:n], y[:n])
    print(f"fit: {peak():.0f} MB, {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    p = clf.predict_p(X[n:])
    print(
        f"predict: {peak():.0f} MB, {time.perf_counter() - start:.1f} s, error at 0.1: {(p[np.arange(m), y[n:]] <= 0.1).mean():.2f}"
    )
    allowed = budget * 1024 + 300
    verdict = "within" if peak() <= allowed else "ABOVE"
    print(f"peak {peak():.0f} MB, {verdict} {allowed:.0f} MB (memory_budget {budget:g} GiB + 300 MB)")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
