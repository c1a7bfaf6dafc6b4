"""Exactly valid p-values of many classes: the time of an object with all its labels, beside its floor and the bar it is held to.

Of objects that are predicted together, a hundred as a rule, and of one that is predicted by itself.

python benchmarks/classes.py            the table, and time against C and n in benchmarks/results/classes.png
python benchmarks/classes.py --large    the problem of 100 classes too, whose fit takes minutes
python benchmarks/classes.py --cuda     the same on a GPU

The floor of a problem: every candidate has a fit of its own, which takes eight products of the n points with K columns at the least, at
the rate at which this machine multiplies matrices now: logits and gradient where the fit starts and where it ends, two for a product with
the Hessian for a step, and two for one with the candidate's own residual. Solves for points close to a candidate come on top; where a
candidate moves the fit far (features with outliers behind a StandardScaler) so does its own Hessian, of n·p²/2 + p³ multiplications.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from measure import console, seconds, show
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import FullConformalClassifier

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Setting:
    """A problem: n points with d features and C classes (digits where d is 64), the method, and its bar in milliseconds an object."""

    n: int
    d: int
    C: int
    method: str = "symmetric"
    bar: float = np.inf
    objects: int = 100
    scaled: bool = False

    @property
    def name(self) -> str:
        data = ("digits" if self.d == 64 else "made") + ", StandardScaler" * self.scaled
        return f"{self.method}, {data}, {self.n:,} × {self.d}, C = {self.C}"

    def data(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Training objects with labels, and objects to predict."""
        if self.d == 64:
            X, y = load_digits(return_X_y=True)
            order = np.random.default_rng(0).permutation(len(X))[: self.n + self.objects]
            X, y = X[order] / 16, y[order]
        else:
            informative = min(self.d, max(12, int(np.log2(self.C)) + 1))
            X, y = make_classification(
                self.n + self.objects,
                self.d,
                n_informative=informative,
                n_redundant=0,
                n_classes=self.C,
                n_clusters_per_class=1,
                random_state=0,
            )
        return X[: self.n], y[: self.n], X[self.n :]

    def floor(self, rate: float) -> float:
        """Milliseconds an object at a rate of multiplications and additions a second."""
        return 1e3 * 8 * self.C * 2 * self.n * (self.d + 1) * (self.C - 1) / rate


SETTINGS = [
    Setting(200, 64, 10, bar=10),
    Setting(1297, 64, 10, bar=15),
    Setting(10_000, 30, 2, bar=2),
    Setting(10_000, 30, 5, bar=5),
    Setting(10_000, 30, 10, bar=10),
    Setting(40_000, 60, 2, bar=3),
    Setting(200, 64, 10, bar=15, scaled=True),
    Setting(1297, 64, 10, bar=22.5, scaled=True),
    Setting(10_000, 30, 5, bar=7.5, scaled=True),
    Setting(200, 64, 10, "exact", bar=50, objects=20),
    Setting(1297, 64, 10, "exact", bar=200, objects=20),
]


def rate(device: str) -> float:
    """Multiplications and additions a second of this machine in float64."""
    A = torch.randn(2048, 2048, dtype=torch.float64, device=device)

    def work() -> None:
        A @ A
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * 2048**3 / seconds(work, 5)


def measured(setting: Setting, device: str, repeats: int = 3) -> tuple[float, float, float]:
    """Milliseconds an object of predict_p, of predict_set at 90 %, and of predict_p for one object alone."""
    X, y, objects = setting.data()
    options: dict[str, Any] = {"device": "cuda"} if device == "cuda" else {}
    if setting.C == 100:  # 12,771 parameters
        options["memory_budget"] = 16.0
    model = LogisticRegression(max_iter=1000)
    model = make_pipeline(StandardScaler(), model) if setting.scaled else model
    clf = FullConformalClassifier(model, method=setting.method, **options).fit(X, y)
    # What is made once for all objects is no object's time.
    p = clf.predict_p(objects)
    both = [
        1e3 * seconds(work, repeats) / len(objects)
        for work in (lambda: clf.predict_p(objects), lambda: clf.predict_set(objects, 0.9))
    ]
    sets = clf.predict_set(objects, 0.9)
    if not np.array_equal(sets, p > 0.1 + 1e-12):
        raise AssertionError(f"{setting.name}: sets differ from those of the p-values")
    few = objects[:5]
    alone = 1e3 * seconds(lambda: [clf.predict_p(x[None]) for x in few], repeats) / len(few)
    return both[0], both[1], alone


def table(device: str, large: bool) -> None:
    fast, rows = rate(device), []
    extra = [Setting(5000, 128, 100, bar=20 if device == "cuda" else 300, objects=2)] if large else []
    for setting in [*SETTINGS, *extra]:
        p, sets, alone = measured(setting, device)
        bar = f"{setting.bar:g}" if device == "cpu" or setting.C == 100 else ""
        floor = f"{setting.floor(fast):.3f}"
        rows.append((setting.name, f"{p:.1f}", bar, floor, f"{sets:.1f}", f"{p / sets:.1f}×", f"{alone:.1f}"))
        console.print(f"{rows[-1][0]}: {p:.1f} ms", style="dim", highlight=False)
    heads = ("milliseconds an object, all its labels", "predict_p", "bar", "floor", "predict_set", "faster", "alone")
    show(f"{device}, {fast / 1e9:.0f} GFLOP/s in float64, {torch.get_num_threads()} threads", rows, heads)


def plots(device: str) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    classes, sizes = (2, 3, 5, 10, 20), (250, 500, 1000, 2000, 4000)
    fast = rate(device)
    for axis, label, settings, along in (
        (axes[0], "classes C (n = 1,000, d = 20)", [Setting(1000, 20, C, objects=20) for C in classes], classes),
        (axes[1], "points n (d = 20, C = 10)", [Setting(n, 20, 10, objects=20) for n in sizes], sizes),
    ):
        times = [measured(setting, device, 2) for setting in settings]
        axis.loglog(along, [p for p, _, _ in times], "o-", label="predict_p")
        axis.loglog(along, [sets for _, sets, _ in times], "s-", label="predict_set, 90 %")
        axis.loglog(along, [setting.floor(fast) for setting in settings], ":", label="floor")
        axis.set_xlabel(label)
        axis.set_xticks(along, [f"{value:,}" for value in along])
        axis.minorticks_off()
        axis.set_ylabel("ms an object")
        axis.legend()
    figure.tight_layout()
    name = "classes.png" if device == "cpu" else "classes_cuda.png"
    figure.savefig(RESULTS / name, dpi=120)
    console.print(f"{RESULTS.name}/{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    device = "cuda" if given.cuda else "cpu"
    table(device, given.large)
    plots(device)


if __name__ == "__main__":
    main()
