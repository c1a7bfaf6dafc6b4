"""Speed on one GPU, against the floor: MNIST with the paper's MLP_C (p = 9,580) and CIFAR-10 with its CNN (p = 16,938).

    python benchmarks/gpu.py --prepare DEST                    where the data are: DEST/mnist.npz, DEST/cifar/part_*.npz
    python benchmarks/gpu.py --mnist FILE --cifar FOLDER       where the GPU is; writes results/gpu.json and gpu.md
    python benchmarks/gpu.py --only mnist --profile            one problem, and the kernels that took longest

All test points and labels, deleted scheme, float32. The floor of a stage is its operations over the rate of products measured here, or its
bytes over the bandwidth measured here, whichever takes longer; counts have none, for bounds decide most pairs before they are formed.
Stages are timed in a second run, under torch's profiler. Without files and without FULLCONFORMAL_DATA the data are synthetic.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from problems import cifar, device, fitted, mnist, run, sets, stages, wait
from torch import nn

from fullconformal.data import Dataset, load_cifar10
from fullconformal.problem import Problem

PROBLEMS = {"mnist": ("MLP_C", 20, 3.0), "cifar": ("CNN", 10, 20.0)}  # network, epochs, seconds allowed
PART = 15_000  # images a file: 46 MB


def prepare(folder: Path) -> None:
    """Write what the GPU needs in small files: MNIST's features, CIFAR-10 as bytes, the test images last."""
    (folder / "cifar").mkdir(parents=True, exist_ok=True)
    data = mnist()
    np.savez(folder / "mnist.npz", X=data.X, y=data.y, X_test=data.X_test, y_test=data.y_test)
    data = load_cifar10()
    X, y = np.concatenate([data.X, data.X_test]), np.concatenate([data.y, data.y_test])
    for k, start in enumerate(range(0, len(X), PART)):
        np.savez(folder / "cifar" / f"part_{k}.npz", X=X[start : start + PART], y=y[start : start + PART])


# Floors ---------------------------------------------------------------------------------------------------------------------------


def fastest(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of a call, the device waited for; the best of a few after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def rates() -> dict[str, float]:
    """Operations a second of products in float32, TF32 and float64, and bytes a second of a copy, measured here."""
    size, out = (8192 if device() == "cuda" else 1024), {}
    for name, dtype in (("float32", torch.float32), ("tf32", torch.float32), ("float64", torch.float64)):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        A, B = (torch.randn(size, size, dtype=dtype, device=device()) for _ in range(2))
        out[name] = 2 * size**3 / fastest(lambda A=A, B=B: A @ B)
    torch.backends.cuda.matmul.allow_tf32 = False
    A = torch.randn(8 * size**2, device=device())
    out["copy"] = 2 * A.nbytes / fastest(A.clone)
    return out


def floors(problem: Problem, speed: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Seconds that each stage of the fit cannot be faster than: by its operations, by its bytes."""
    n, p, C = problem.n, problem.p, 10
    tail = [b for b in problem.blocks if b.layer >= 0]
    pairs = [(a, b) for k, a in enumerate(tail) for b in tail[: k + 1]]
    shapes = [
        (a.i * (a.i + 1) // 2, a.o * (a.o + 1) // 2) if a is b else (a.i * b.i, a.o * b.o) for a, b in pairs
    ]  # of the two factors of each pair of layers
    w = problem.blocks[0].o if problem.prefix_names else 0
    plain = 2 * n * (sum(i * o for i, o in shapes) + sum(w * b.o * b.i for b in tail))
    factors = n * (sum(i + o for i, o in shapes) + C * w + sum(w * b.o for b in tail))
    # A triangular product or solve of one row is p² operations, its half of a full product.
    operations = {
        "curvature": plain / speed["float32"] + n * C * w**2 / speed["tf32"],
        "factor": (p**3 / 3 + p**3 / 3) / speed["float64"],
        "self-influences": n * p**2 / speed["float32"],
    }
    moved = {
        "curvature": 8 * factors + 4 * p**2,
        "factor": 8 * 4 * p**2,
        "self-influences": 8 * n * p,
    }
    return {stage: (operations[stage], moved[stage] / speed["copy"]) for stage in operations}


# A problem --------------------------------------------------------------------------------------------------------------------------


def measure(
    name: str, data: Dataset, budget: float, repeats: int, speed: dict[str, float], profile: bool
) -> dict[str, object]:
    """Train, warm up on a small part, run a few times, and report the fastest."""
    network, epochs, allowed = PROBLEMS[name]
    start = time.perf_counter()
    net = fitted(data, network, epochs)
    accuracy = float((predict(net, data.X_test) == data.y_test).mean())
    print(
        f"\n{data}\n{network} trained in {time.perf_counter() - start:.0f} s, test accuracy {accuracy:.3f}", flush=True
    )
    small = replace(data, X=data.X[:4000], y=data.y[:4000], X_test=data.X_test[:500])
    run(small, net, budget, prune=True)
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runs = [run(data, net, budget, prune=True) for _ in range(repeats)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device() == "cuda" else 0.0
    out = min(runs, key=lambda one: one.total)
    staged = stages(data, net, budget, prune=True)
    same = np.abs(run(data, net, budget, 50, prune=False).p - out.p[:50]).max()
    X, y = torch.as_tensor(data.X[:1], device=device()), torch.as_tensor(data.y, device=device())
    problem = Problem(net, X.expand(len(y), *X.shape[1:]), y)
    least = floors(problem, speed)
    lines = [f"{'':<18}{'seconds':>9}{'floor: operations':>20}{'bytes':>9}{'over the floor':>17}"]
    for stage, took in staged.seconds.items():
        line = f"{stage:<18}{took:>9.3f}"
        if stage in least:
            operations, moved = least[stage]
            line += f"{operations:>20.3f}{moved:>9.3f}{took / max(operations, moved):>16.1f}×"
        lines.append(line)
    lines += [
        f"{'fit':<18}{out.fit:>9.3f}   not profiled, with checks and copies",
        f"{'predict_p':<18}{out.predict:>9.3f}",
        f"{'both':<18}{out.total:>9.3f}   {'within' if out.total <= allowed else 'ABOVE'} {allowed:g} s",
        "",
        f"runs: {', '.join(f'{one.total:.2f}' for one in runs)} s; peak {memory:.1f} GiB",
        f"{sets(out.p, data.y_test)}; largest difference from unpruned p-values of 50 points: {same:.1e}",
    ]
    print("\n".join(lines), flush=True)
    if profile:
        # The kernels, and the calls on the host, that took longest.
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            print(staged.kernels.table(sort_by=key, row_limit=12, max_name_column_width=60))
    return {"data": str(data), "network": network, "accuracy": accuracy, "text": lines, "stages": staged.seconds, "floors": least,
            "fit": out.fit, "predict": out.predict, "runs": [one.total for one in runs], "peak_gib": memory}  # fmt: skip


@torch.no_grad()
def predict(net: nn.Module, X: np.ndarray) -> np.ndarray:
    """Likeliest labels (m,)."""
    parts = torch.as_tensor(X).split(2048)
    return torch.cat([net(part.to(device())).argmax(1) for part in parts]).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DEST")
    parser.add_argument("--mnist", metavar="FILE")
    parser.add_argument("--cifar", metavar="FOLDER")
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--budget", type=float, default=64.0, help="memory_budget in GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.prepare:
        return prepare(options.prepare)
    hardware = torch.cuda.get_device_name() if device() == "cuda" else f"no GPU: {platform.processor() or 'CPU'}"
    speed = rates()
    head = (
        f"{hardware}, torch {torch.__version__}: products at {speed['float32'] / 1e12:.1f} (float32), {speed['tf32'] / 1e12:.1f} (TF32), "
        f"{speed['float64'] / 1e12:.1f} (float64) TFLOP/s, copies at {speed['copy'] / 1e12:.2f} TB/s"
    )
    print(head, flush=True)
    record: dict[str, object] = {"hardware": hardware, "torch": torch.__version__, "rates": speed}
    page = ["# One GPU against the floor", "", f"`python benchmarks/gpu.py`. {head}."]
    for name, load in (("mnist", lambda: mnist(options.mnist)), ("cifar", lambda: cifar(options.cifar))):
        if options.only in (None, name):
            found = measure(name, load(), options.budget, options.repeats, speed, options.profile)
            record[name] = found
            page += ["", f"## {found['data']}", "", f"{found['network']}, test accuracy {found['accuracy']:.3f}.", ""]
            page += [f"    {line}" for line in found["text"]]
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.results / "gpu.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
