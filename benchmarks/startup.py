"""What the commands take to start: seconds of CPU time, the least of a few runs, each in a process of its own.

    python benchmarks/startup.py                       of the version that is installed, or on PYTHONPATH
    python benchmarks/startup.py --before OTHER/src    beside that of another checkout

`predict` reads a table of 100 rows and a linear predictor. Below the commands stand the libraries that it imports, alone: a
command cannot take less than what it imports.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

PREDICT = "-m fullconformal predict model new.csv -o sets.csv -q"
COMMANDS = {
    "fullconformal --help": "-m fullconformal --help",
    "fullconformal fit --help": "-m fullconformal fit --help",
    "fullconformal predict": PREDICT,
    "import torch": "-c import\ttorch",
    "import sklearn.compose": "-c import\tsklearn.compose",
    "import pandas": "-c import\tpandas",
    "import torch, sklearn.compose, pandas": "-c import\ttorch,sklearn.compose,pandas",
}


def cpu_seconds(words: str, folder: str, source: str | None) -> float:
    """CPU time of Python with these arguments, in a folder, with another source of the package first on the path where given."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if source is not None:
        environment["PYTHONPATH"] = source
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [word.replace("\t", " ") for word in words.split(" ")]
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_tables(folder: Path) -> None:
    """A table of 300 rows to learn from and one of 100 to predict: four numbers and a word."""
    rng = np.random.default_rng(0)
    for name, n in (("old.csv", 300), ("new.csv", 100)):
        X = rng.normal(size=(n, 4))
        words = rng.choice(["red", "green", "blue"], n)
        labels = np.where(X[:, 0] + rng.normal(size=n) > 0, "yes", "no")
        rows = [",".join([*map(str, x), word, label]) for x, word, label in zip(X, words, labels, strict=True)]
        (folder / name).write_text("\n".join(["a,b,c,d,colour,y", *rows]) + "\n", encoding="utf-8")


@click.command()
@click.option("--before", default=None, metavar="SRC", help="The folder src of another checkout.")
@click.option("--runs", default=5, show_default=True)
def main(before: str | None, runs: int) -> None:
    sources = {"now": None} if before is None else {"before": str(Path(before).resolve()), "now": None}
    print("| CPU seconds | " + " | ".join(sources) + " |\n|---|" + "---|" * len(sources))
    with TemporaryDirectory() as folder:
        write_tables(Path(folder))
        cpu_seconds("-m fullconformal fit old.csv --target y -o model -q", folder, None)
        for name, words in COMMANDS.items():
            least = [min(cpu_seconds(words, folder, source) for _ in range(runs)) for source in sources.values()]
            print(f"| `{name}` | " + " | ".join(f"{seconds:.2f}" for seconds in least) + " |", flush=True)


if __name__ == "__main__":
    main()
