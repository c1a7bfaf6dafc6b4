"""What a run leaves: one JSON line a result, arrays beside it, fitted models in a cache. A killed run goes on from there."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
import torch

import fullconformal


class Records:
    """A folder with results.jsonl, arrays/ and cache/."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "results.jsonl"
        for name in ("arrays", "cache"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # What failed is tried again.
        self.lines = [line for line in read_lines(self.path) if "failed" not in line]
        # A line that a kill cut short is dropped; the next one must not be glued to it.
        if self.path.exists():
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())
        self.done = {line["key"] for line in self.lines}

    def add(self, line: dict[str, Any], **arrays: np.ndarray) -> None:
        """Write the arrays, then the line that refers to them."""
        if arrays:
            line["arrays"] = f"arrays/{line['key']}.npz"
            save_arrays(self.folder / line["arrays"], arrays)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)
        if "failed" not in line:
            self.done.add(line["key"])

    def cached(self, name: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Arrays from the cache, made and kept where they are not there."""
        path = self.folder / "cache" / f"{name}.npz"
        if not path.exists():
            save_arrays(path, make())
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole[:-1] if line]  # what follows the last newline is incomplete


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A compressed file, complete or absent."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_atomically(path: Path, content: bytes) -> None:
    """A file, complete or as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware of this run."""
    return {
        "versions": {
            "fullconformal": fullconformal.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "hardware": {
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
            "cpu": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    if sys.platform == "linux" and path.exists():
        names = [
            line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")
        ]
        return names[0] if names else platform.machine()
    return platform.processor() or platform.machine()
