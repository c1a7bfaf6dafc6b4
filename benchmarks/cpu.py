"""MNIST, MLP 32-100-50-20-10 (n = 60,000, p = 9,580), all 10,000 test points and labels on the CPU: time by stage, peak memory.

    OMP_NUM_THREADS=2 python benchmarks/cpu.py            4 GiB; about four minutes on two quiet cores, half for the stages
    python benchmarks/cpu.py --budget 3 --mnist features.npz

Features come from FULLCONFORMAL_DATA or from a file that `gpu.py --prepare` made; without either the data are synthetic.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch
from problems import fitted, mnist, run, sets, stages

LIMIT, AIM = 300, 180


def peak() -> float:
    """Largest resident size of the process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rate() -> float:
    """GFLOP/s of a float32 product, the best of five."""
    A, best = torch.randn(4096, 4096), 0.0
    for _ in range(5):
        start = time.perf_counter()
        A @ A
        best = max(best, 2 * 4096**3 / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=4.0, help="memory_budget in GiB")
    parser.add_argument("--mnist", help="features made by gpu.py --prepare")
    parser.add_argument("--points", type=int, default=10_000, help="test points")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    data = mnist(options.mnist)
    net = fitted(data, "MLP_C", 10)
    before, gflops = peak(), rate()
    busy = time.process_time()
    out = run(data, net, options.budget, options.points, device="cpu")
    busy = time.process_time() - busy
    highest, allowed = peak(), options.budget * 1024 + 300
    # A run of their own: the profiler takes time and memory.
    staged = stages(data, net, options.budget, options.points, device="cpu").seconds
    lines = [
        f"{data}",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, float32 products at {gflops:.0f} GFLOP/s before the run, "
        f"load {os.getloadavg()[0]:.1f} after it, torch {torch.__version__}",
        "",
        *(f"{stage:<16}{seconds:8.1f} s   in a second run" for stage, seconds in staged.items()),
        f"{'fit':<16}{out.fit:8.1f} s",
        f"{'predict':<16}{out.predict:8.1f} s",
        f"{'fit + predict':<16}{out.total:8.1f} s   {'within' if out.total <= LIMIT else 'ABOVE'} {LIMIT} s, aim {AIM} s",
        f"{'processor time':<16}{busy:8.1f} s   of all threads: {busy / torch.get_num_threads():.0f} s a thread, were it alone",
        "",
        sets(out.p, data.y_test),
        f"peak memory {highest:.0f} MB ({before:.0f} MB before the run), {'within' if highest <= allowed else 'ABOVE'} {allowed:.0f} MB "
        f"(memory_budget {options.budget:g} GiB + 300 MB)",
    ]
    print("\n".join(lines))
    record = {"stages": staged, "fit": out.fit, "predict": out.predict, "total": out.total}
    record |= {"processor": busy, "peak_mb": highest, "gflops": gflops}
    options.results.mkdir(exist_ok=True)
    (options.results / "cpu.md").write_text("# The MNIST problem on the CPU\n\n    " + "\n    ".join(lines) + "\n")
    (options.results / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
