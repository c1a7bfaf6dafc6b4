"""What transformers in the bag cost beside fixed ones, in one process: milliseconds of one core an object; and a table by the commands.

python benchmarks/in_bag.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from measure import seconds, show
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import FullConformalClassifier
from fullconformal.models import KernelDensityClassifier

ALONE = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def used() -> float:
    """Seconds of a core that finished processes have used."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def points(n: int, d: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Columns of different scales, three classes."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d)) * np.arange(1, d + 1)
    return X, (X[:, 0] + rng.normal(size=n) > 0).astype(int) + (X[:, 1] > 2)


def scalers() -> list[tuple[str, ...]]:
    """Models behind a StandardScaler: an object, once what serves all objects is made, in the bag and fixed."""
    rows, m = [], 20
    for model in (LogisticRegression(), KNeighborsClassifier(5), KernelDensityClassifier(1.0)):
        for n in (1000, 10_000):
            X, y = points(n + m)
            took: list[float] = []
            for kind in ("bag", "fixed"):
                clf = FullConformalClassifier(make_pipeline(StandardScaler(), model), transformers=kind)
                clf.fit(X[:n], y[:n]).predict_p(X[n:])
                took.append(1e3 * seconds(partial(clf.predict_p, X[n:]), 3, time.process_time) / m)
            rows.append((f"{type(model).__name__}, n = {n:,}", *(f"{t:.2f}" for t in took)))
    return rows


def table(n: int, gaps: float, levels: tuple[int, ...]) -> pd.DataFrame:
    """Six columns of numbers, four of words, three classes."""
    rng = np.random.default_rng(0)
    y, columns = rng.integers(0, 3, n), dict[str, Any]()
    for j in range(6):
        columns[f"number{j}"] = (rng.normal(size=n) + (y == j % 3)) * 10.0**j
        columns[f"number{j}"][rng.random(n) < gaps] = np.nan
    for j, size in enumerate(levels):
        share = rng.dirichlet(np.full(size, 5.0), 3)
        words = np.array([f"word {rng.choice(size, p=share[c])}" for c in y], dtype=object)
        words[rng.random(n) < gaps] = None
        columns[f"words{j}"] = words
    return pd.DataFrame({**columns, "label": np.array(["red", "green", "blue"])[y]})


def by_commands(n: int, m: int, gaps: float, levels: tuple[int, ...]) -> tuple[str, ...]:
    """`fullconformal fit` and `predict`: seconds of one core each, from start to end, and the guarantee."""
    frame, took, said = table(n + m, gaps, levels), [], ""
    with tempfile.TemporaryDirectory() as folder:
        train, new, model, out = (str(Path(folder) / name) for name in ("train.csv", "new.csv", "model", "sets.csv"))
        frame[:n].to_csv(train, index=False)
        frame[n:].to_csv(new, index=False)
        for command in (("fit", train, "--target", "label", "-o", model), ("predict", model, new, "-o", out)):
            start = used()
            call = [sys.executable, "-m", "fullconformal", *command]
            said += subprocess.run(call, env=ALONE, check=True, capture_output=True, text=True).stdout
            took.append(used() - start)
    guarantee = next(line for line in said.splitlines() if line.startswith("guarantee")).split(":")[0]
    return f"{n:,} rows, {gaps:.0%} gaps, {levels} words", f"{took[0]:.1f}", f"{took[1]:.1f}", guarantee.split()[1]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    show("milliseconds an object behind a StandardScaler", scalers(), ("model", "in the bag", "fixed"))
    rows = [
        by_commands(5000, 1000, *of) for of in ((0.0, (3, 5, 8, 20)), (0.05, (3, 5, 8, 20)), (0.1, (4, 30, 12, 150)))
    ]
    show("seconds of a table with ten columns, 1,000 rows predicted", rows, ("table", "fit", "predict", "guarantee"))


if __name__ == "__main__":
    main()
