"""What the benchmarks share: the fastest of a few runs, and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

console = Console(width=120)


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """The fastest of a few runs: the machine's noise only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def show(title: str, rows: Sequence[Sequence[str]], heads: Sequence[str]) -> None:
    """A table under its title."""
    console.print(f"[bold]{title}[/]", highlight=False)
    table = Table(box=None, padding=(0, 2))
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table, "")
