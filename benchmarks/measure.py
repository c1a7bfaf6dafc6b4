"""What the benchmarks share: the fastest of a few runs, a table, and set sizes at one error rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

console = Console(width=120)


def seconds(work: Callable[[], object], repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of a few runs: the machine's noise only ever adds."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def worth_of_threads(size: int = 512) -> float:
    """How much faster torch multiplies with its threads than with one: cores that are shared may be worth less than they are many."""
    A, many = torch.randn(size, size, dtype=torch.float64), torch.get_num_threads()
    together = seconds(lambda: A @ A, 5)
    torch.set_num_threads(1)
    alone = seconds(lambda: A @ A, 5)
    torch.set_num_threads(many)
    return alone / together


def size_at_error(epsilon: np.ndarray, truth: np.ndarray, error: float) -> float:
    """Mean set size where just that share of objects err, of the largest ε (m, C) at which each label is in the set and true labels (m,).

    Few calibration points leave few levels; between two of them error and size are those of choosing one at random.
    """
    own = epsilon[np.arange(len(truth)), truth]
    levels = np.concatenate([[0.0], np.unique(own)])
    errors = np.searchsorted(np.sort(own), levels, side="right") / len(own)
    sizes = (epsilon.size - np.searchsorted(np.sort(epsilon, axis=None), levels, side="right")) / len(own)
    return float(np.interp(error, errors, sizes))


def show(title: str, rows: Sequence[Sequence[str]], heads: Sequence[str]) -> None:
    """A table under its title."""
    console.print(f"[bold]{title}[/]", highlight=False)
    table = Table(box=None, padding=(0, 2))
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table, "")
