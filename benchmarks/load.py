"""Sizes at the edge of what is promised: time, peak memory, and whether it fits `memory_budget` or is refused beforehand.

``python benchmarks/load.py`` runs all, in less than a minute of one core and 2 GB; names run those alone. Each row is a process of its own,
whose peak is beyond what the libraries take when they are imported.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np

from fullconformal import ConformalWarning, FullConformalClassifier

BUDGET = 2.0  # GiB


def data(n: int, d: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, d) of classes that overlap, and their labels (n,)."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % n_classes
    X = rng.standard_normal((n, d), dtype=np.float32)
    X[:, 0] += y % 7
    return X.astype(np.float64), y


def influence_of_a_million() -> str:
    X, y = data(1_000_000, 20, 3)
    clf = FullConformalClassifier(method="influence", memory_budget=BUDGET).fit(X, y)
    return f"{clf.predict_p(X[:100]).shape[0]} objects"


def ten_thousand_classes() -> str:
    X, y = data(20_000, 20, 10_000)
    try:
        FullConformalClassifier(memory_budget=BUDGET).fit(X, y)
    except MemoryError:
        return "refused before training"
    return "fitted"


def twenty_thousand_columns() -> str:
    X, y = data(500, 20_000, 3)
    clf = FullConformalClassifier(memory_budget=BUDGET, method="influence", l2=0.1).fit(X, y)
    return f"{clf.predict_p(X[:100]).shape[0]} objects"


def symmetric_objects() -> str:
    X, y = data(200, 5, 2)
    clf = FullConformalClassifier(memory_budget=BUDGET).fit(X, y)
    return f"{len(clf.predict_p(data(100_000, 5, 2)[0])):,} objects, {clf.method_}"


def two_hundred_fits() -> str:
    X, y = data(500, 10, 3)
    grown = []
    for _ in range(200):
        FullConformalClassifier(method="influence").fit(X, y).predict_p(X[:20])
        grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return f"{(grown[-1] - grown[19]) / 1024:.0f} MB more after the last than after the 20th"


def eight_threads() -> str:
    X, y = data(2_000, 10, 3)
    clf = FullConformalClassifier(method="influence").fit(X, y)
    alone, found = clf.predict_p(X[:200]), {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: clf.predict_p(X[:200])})) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = sum(np.array_equal(p, alone) for p in found.values())
    return f"{same} of 8 the same"


#: by name: what is done
CASES: dict[str, tuple[str, Callable[[], str]]] = {
    "million": ("1,000,000 × 20 by influence", influence_of_a_million),
    "classes": ("20,000 points of 10,000 classes", ten_thousand_classes),
    "columns": ("500 × 20,000 by influence", twenty_thousand_columns),
    "symmetric": ("100,000 objects, symmetric (200 × 5)", symmetric_objects),
    "fits": ("200 fits in a row (500 × 10)", two_hundred_fits),
    "threads": ("8 threads of one predictor (2,000 × 10)", eight_threads),
}


def one(name: str) -> None:
    """Run a case in this process, and print its figures."""
    warnings.simplefilter("ignore", ConformalWarning)
    FullConformalClassifier(method="influence").fit(*data(50, 3, 2))
    before, began, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    result = CASES[name][1]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{time.perf_counter() - began:.1f}|{time.process_time() - cpu:.1f}|{peak / 2**20:.2f}|{result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="cases to run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(asked.one)
        return
    print(f"{'':42}{'seconds':>9}{'of CPU':>9}{'peak GiB':>10}  (memory_budget={BUDGET:g})")
    for name in asked.names or CASES:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{CASES[name][0]:42}{done.stderr.strip().splitlines()[-1][:100]}", flush=True)
            continue
        wall, cpu, peak, result = done.stdout.strip().splitlines()[-1].split("|")
        print(f"{CASES[name][0]:42}{wall:>9}{cpu:>9}{peak:>10}  {result}", flush=True)


if __name__ == "__main__":
    main()
