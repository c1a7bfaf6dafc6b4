"""Recalibration of an overfitted network: error and set size at ε = 0.1, raw and recalibrated. About two minutes on two cores.

    python benchmarks/recalibration.py

Twenty bags of n = 1,000 points, each with 500 fresh points and 100 test points of its own. The band holds 99.9 % of the error rates of a
valid method: binomial over the 2,000 test points, and over the ranks that 500 fresh points give.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from measure import show

from fullconformal import FullConformalClassifier, SplitConformalClassifier
from fullconformal.models import mlp

BAGS, FRESH, TEST = 20, 500, 100


def sample(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    W = np.random.default_rng(0).normal(size=(10, 3))
    X = rng.normal(size=(size, 10))
    return X, (np.tanh(X) @ W + rng.gumbel(size=(size, 3))).argmax(1)


def main() -> None:
    warnings.simplefilter("ignore")
    wrong: dict[str, list[np.ndarray]] = {
        "raw": [],
        "recalibrated": [],
        "split, the 500 in training and calibration": [],
    }
    size: dict[str, list[np.ndarray]] = {name: [] for name in wrong}
    for bag in range(BAGS):
        rng = np.random.default_rng(bag)
        (X, y), (Xn, yn), (Xt, yt) = sample(rng, 1000), sample(rng, FRESH), sample(rng, TEST)
        torch.manual_seed(bag)
        net = mlp(10, (50,), 3)
        clf = FullConformalClassifier(net, l2=1e-5, random_state=bag, max_epochs=60).fit(X, y)
        raw = clf.predict_p(Xt)
        mended = clf.recalibrate(Xn, yn).predict_p(Xt)
        split = SplitConformalClassifier(net, l2=1e-5, random_state=bag, max_epochs=60, calibration_size=1 / 3)
        both = split.fit(np.vstack([X, Xn]), np.r_[y, yn]).predict_p(Xt)
        for name, p in zip(wrong, (raw, mended, both), strict=True):
            wrong[name].append(p[np.arange(TEST), yt] <= 0.1)
            size[name].append((p > 0.1).sum(1))
    half = 3.29 * np.sqrt(0.09 * (1 / (BAGS * TEST) + 1 / (BAGS * FRESH)))
    rows = [
        (
            name,
            f"{np.mean(wrong[name]):.3f}",
            f"{np.mean(size[name]):.2f}",
            "yes" if np.mean(wrong[name]) <= 0.1 + half else "NO",
        )
        for name in wrong
    ]
    band = f"{0.1 - half:.3f}–{0.1 + half:.3f}"
    title = f"Network 10-50-3, n = 1,000, l2 = 1e-5, {BAGS} bags × {TEST} test points; 99.9 % band of 0.1: {band}"
    show(title, rows, ("", "error", "set size", "not above the band"))


if __name__ == "__main__":
    main()
