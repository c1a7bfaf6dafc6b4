"""p-values of all labels at ImageNet's size: the last layer's Kronecker curvature, against the floor of the machine.

    python benchmarks/imagenet.py                 CUDA: n = 1,281,167, d = 2,048, C = 1,000; else n = 50,000, d = 2,048, C = 100
    python benchmarks/imagenet.py --profile       also the kernels that take longest of a batch of 128
    python benchmarks/imagenet.py --sizes         how the time grows in n, d and C
    python benchmarks/imagenet.py --growth        CPU: n from 10⁴ to 10⁶ at d = 64, C = 10; writes benchmarks/results/growth.{json,png}
    python benchmarks/imagenet.py --n 100000 --d 512 --classes 100 --m 512     other sizes

Features are drawn, not loaded: a class mean plus standard normal noise, the means random, of the length at which the best classifier is
right for 78 % of the points (ResNet-50 on ImageNet: 76–80 %). The head is that classifier in closed form (linear discriminant analysis:
weights μ_c, biases −|μ_c|²/2), so nothing is trained. Self-influences are those of a real head of this size; as this one did not see
the points, its deleted sets are too large, which does not matter here. Training points stream from a loader that draws them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from measure import console, seconds, show
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fullconformal import ConformalWarning, FullConformalClassifier

RESULTS = Path(__file__).parent / "results"
BATCH = 8192


def mean_length(n_classes: int, accuracy: float = 0.78) -> float:
    """Length ρ of orthogonal class means at which the best classifier is right so often: P(ρ + z > max of C − 1 normals)."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        right = float((density * torch.special.ndtr(z + middle) ** (n_classes - 1)).sum())
        low, high = (middle, high) if right < accuracy else (low, middle)
    return low


class Points(IterableDataset):  # type: ignore[type-arg]
    """n labelled points, drawn batch by batch on the device, the same at every pass."""

    def __init__(self, n: int, d: int, n_classes: int, device: str, seed: int = 0):
        self.n, self.device, self.seed = n, device, seed
        g = torch.Generator(device).manual_seed(1234)
        self.means = torch.randn(n_classes, d, generator=g, device=device) * mean_length(n_classes) / math.sqrt(d)

    def __len__(self) -> int:
        return self.n

    def __iter__(self):
        g = torch.Generator(self.device).manual_seed(self.seed)
        for at in range(0, self.n, BATCH):
            k = min(BATCH, self.n - at)
            y = torch.randint(len(self.means), (k,), generator=g, device=self.device)
            x = torch.randn(k, self.means.shape[1], generator=g, device=self.device)
            yield x.add_(self.means[y]), y

    def head(self) -> nn.Sequential:
        layer = nn.Linear(self.means.shape[1], len(self.means), device=self.device)
        with torch.no_grad():
            layer.weight.copy_(self.means)
            layer.bias.copy_(-(self.means**2).sum(1) / 2)
        return nn.Sequential(layer)

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = zip(*self, strict=True)
        return torch.cat(x).cpu().numpy(), torch.cat(y).cpu().numpy()


def fitted(n: int, d: int, n_classes: int, device: str, **options) -> tuple[FullConformalClassifier, float]:
    """A classifier that has seen n points, and the seconds it took."""
    points = Points(n, d, n_classes, device)
    clf = FullConformalClassifier(
        points.head(), prefit=True, curvature="last_layer_kron", l2=1e-4, device=device,
        memory_budget=38.0 if device == "cuda" else 8.0, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)  # p > n/10 at these sizes
        return clf, seconds(lambda: (clf.fit(DataLoader(points, batch_size=None)), sync(device)))


def test_points(m: int, d: int, n_classes: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    return Points(m, d, n_classes, device, seed=99).drawn()


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work, device: str, repeats: int = 5) -> float:
    """Seconds of the fastest run, the device's work included."""
    work()
    return seconds(lambda: (work(), sync(device)), repeats)


def rates(device: str, D: int) -> dict[str, float]:
    """What the machine reaches: FLOP/s of the products at these shapes, bytes/s of a copy."""
    rows = 2**17 if device == "cuda" else 2**12
    T, X = torch.randn(rows, D, device=device), torch.randn(128, D, device=device)
    flops = 2.0 * rows * D * 128
    out = {"float32": flops / timed(lambda: X @ T.T, device)}
    if device == "cuda":
        half, x = T.half(), X.half()
        out["float16"] = flops / timed(lambda: torch.mm(x, half.T, out_dtype=torch.float32), device)
    A = torch.empty(2**28 if device == "cuda" else 2**24, device=device)
    B = torch.empty_like(A)
    out["bytes"] = 2 * A.nbytes / timed(lambda: B.copy_(A), device)
    return out


def floor(n: int, D: int, n_classes: int, rate: dict[str, float], batch: int) -> float:
    """Seconds a test point that nothing which multiplies all points can beat: T·T_x and Q·π at the measured rates, and reading T and Q."""
    kind = "float16" if "float16" in rate else "float32"
    size = 2 if kind == "float16" else 4
    products = 2.0 * n * D / rate[kind] + 2.0 * n * n_classes / rate["float32"]
    return products + n * (D * size + 4 * n_classes) / batch / rate["bytes"]


def main_table(n: int, d: int, n_classes: int, m: int, device: str) -> FullConformalClassifier:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clf, took = fitted(n, d, n_classes, device)
    X, y = test_points(m, d, n_classes, device)
    memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
    right = (clf.predict(X) == y).mean()
    console.print(
        f"n = {n:,}, d = {d:,}, C = {n_classes:,}; head right on {right:.1%}; fit {took:.1f} s{memory}", highlight=False
    )
    rate = rates(device, d + 16)
    console.print("measured " + ", ".join(f"{k} {v / 1e12:.3g} T/s" for k, v in rate.items()), highlight=False)
    least = floor(n, d + 16, n_classes, rate, min(m, 128))
    rows = []
    for scheme in ("deleted", "ordinary"):
        for prune in ("auto", False) if device == "cuda" else ("auto",):
            clf.set_params(scheme=scheme, prune=prune)
            clf.predict_p(X[:200])
            spent = seconds(lambda: clf.predict_p(X), 3) / m
            p = clf.predict_p(X)
            rows.append([
                scheme, str(prune), f"{spent * 1e3:.3f}", f"{least * 1e3:.3f}", f"{spent / least:.1f}",
                f"{(p[np.arange(m), y] <= 0.1).mean():.3f}", f"{(p > 0.1).sum(1).mean():.1f}",
            ])  # fmt: skip
    heads = ["scheme", "prune", "ms a test point", "floor", "ratio", "error at 0.1", "set size"]
    show(f"All {n_classes:,} p-values of a test point, {m} in a call", rows, heads)
    if device == "cuda":
        console.print(f"peak memory in all: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", highlight=False)
    return clf.set_params(scheme="deleted", prune="auto")


def sizes(n: int, d: int, n_classes: int, m: int, device: str) -> None:
    """One size at a time, the others at their full value."""
    rows = []
    grid = [(n // 64, d, n_classes), (n // 16, d, n_classes), (n // 4, d, n_classes), (n, d // 8, n_classes),
            (n, d // 2, n_classes), (n, d, n_classes // 10), (n, d, n_classes // 3), (n, d, n_classes)]  # fmt: skip
    for size in grid:
        clf, took = fitted(*size, device)
        X, _ = test_points(m, *size[1:], device)
        clf.predict_p(X[:200])
        spent = seconds(lambda clf=clf, X=X: clf.predict_p(X), 3) / m
        least = floor(size[0], size[1] + 16, size[2], rates(device, size[1] + 16), min(m, 128))
        cells = [f"{spent * 1e3:.3f}", f"{least * 1e3:.3f}", f"{spent / least:.1f}", f"{took:.1f}"]
        rows.append([f"{size[0]:,}", f"{size[1]:,}", f"{size[2]:,}", *cells])
        del clf
    show("Growth", rows, ["n", "d", "C", "ms a test point", "floor", "ratio", "fit s"])


def profile(clf: FullConformalClassifier, X: np.ndarray) -> None:
    """The kernels, and the calls on the host, that take longest of a batch."""
    clf.predict_p(X)
    with torch.profiler.profile() as profiler:
        clf.predict_p(X)
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        print(profiler.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=60))


def agreement(device: str) -> None:
    """Half precision beside float32 and the CPU's float64, n = 40,000, d = 512, C = 100."""
    n, d, n_classes, m = 40_000, 512, 100, 256
    X, _ = test_points(m, d, n_classes, device)
    results = {}
    data = Points(n, d, n_classes, device)
    train = data.drawn()
    for name, where, dtype in (
        ("as it is", device, "auto"),
        ("float32", device, "float32"),
        ("float64, CPU", "cpu", "float64"),
    ):
        clf = FullConformalClassifier(
            data.head().cpu(), prefit=True, curvature="last_layer_kron", l2=1e-4, device=where, dtype=dtype, memory_budget=8
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConformalWarning)
            results[name] = clf.fit(*train).predict_p(X)
    exact = results.pop("float64, CPU")
    rows = [[k, f"{np.abs(p - exact).max():.1e}", f"{np.abs(p - exact).mean():.1e}"] for k, p in results.items()]
    show("p-values against float64", rows, ["", "largest distance", "mean"])


def growth() -> None:
    """Time a test point from n = 10⁴ to 10⁶ at fixed d and C; a plot beside proportional growth. One thread's CPU time: others may work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    torch.set_num_threads(1)
    d, n_classes, m, found = 64, 10, 512, []
    X, _ = test_points(m, d, n_classes, "cpu")
    for n in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        clf, took = fitted(n, d, n_classes, "cpu")
        clf.predict_p(X[:100])
        times = []
        for _ in range(5):
            start = time.process_time()
            clf.predict_p(X)
            times.append(time.process_time() - start)
        spent = min(times) / m * 1e3
        found.append({"n": n, "ms": spent, "fit_s": took})
        console.print(found[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "growth.json").write_text(json.dumps({"d": d, "C": n_classes, "m": m, "points": found}, indent=1) + "\n")
    n, ms = [f["n"] for f in found], [f["ms"] for f in found]
    figure, axes = plt.subplots(figsize=(5, 3.5))
    axes.loglog(n, ms, "o-", label="measured")
    axes.loglog(n, [ms[0] * k / n[0] for k in n], "--", color="grey", label="proportional to n")
    axes.set(
        xlabel="training points",
        ylabel="CPU ms a test point, all labels",
        title=f"Last layer, d = {d}, C = {n_classes}, pruned",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "growth.png", dpi=110)
    tens = [ms[2] / ms[0], ms[4] / ms[2]]
    verdict = "below" if max(tens) < 10 else "NOT below"
    console.print(
        f"ten times the points cost {tens[0]:.1f} and {tens[1]:.1f} times as much: {verdict} ten", highlight=False
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--profile", "--sizes", "--growth", "--agreement"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--n", "--d", "--classes", "--m"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    full = args.device == "cuda"
    size = args.n or (1_281_167 if full else 50_000), args.d or 2048, args.classes or (1000 if full else 100)
    start = time.perf_counter()
    console.print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if full else f'{torch.get_num_threads()} CPU threads'}"
    )
    if args.growth:
        growth()
        raise SystemExit
    predictor = main_table(*size, args.m or 1024 if full else args.m or 256, args.device)
    if args.profile:
        profile(predictor, test_points(128, *size[1:], args.device)[0])
    del predictor
    if args.agreement:
        agreement(args.device)
    if args.sizes:
        sizes(*size, args.m or 512, args.device)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
