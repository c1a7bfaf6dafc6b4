"""What the commands take to start: seconds of CPU time, the least of a few runs, each in a process of its own.

    python benchmarks/startup.py                       of the version that is installed, or on PYTHONPATH
    python benchmarks/startup.py --before OTHER/src    beside that of another checkout

`predict` reads a table of one row, or of 100, and a linear predictor. Below the commands stand the libraries that it imports, alone: a
command cannot take less than what it imports, and the last line is how many times as long one row takes. Modules are compiled
before, as they are after a first run.
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

ONE, FLOOR = "fullconformal predict, one row", "import torch, sklearn, pandas"
COMMANDS = {
    "fullconformal --help": "-m fullconformal --help",
    "fullconformal fit --help": "-m fullconformal fit --help",
    ONE: "-m fullconformal predict model one.csv -o sets.csv -q",
    "fullconformal predict, 100 rows": "-m fullconformal predict model new.csv -o sets.csv -q",
    "import torch": "-c import\ttorch",
    "import sklearn": "-c import\tsklearn.linear_model,sklearn.compose,sklearn.impute",
    "import pandas": "-c import\tpandas",
    FLOOR: "-c import\ttorch,pandas,sklearn.linear_model,sklearn.compose,sklearn.impute",
}


def cpu_seconds(words: str, folder: str, source: str | None) -> float:
    """CPU time of Python with these arguments, in a folder, with another source of the package first on the path where given."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPYCACHEPREFIX=str(Path(folder) / "compiled"))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if source is not None:
        environment["PYTHONPATH"] = source
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [word.replace("\t", " ") for word in words.split(" ")]
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_tables(folder: Path) -> None:
    """A table of 300 rows to learn from, and two of 100 and of one to predict: four numbers and a word."""
    rng = np.random.default_rng(0)
    for name, n in (("old.csv", 300), ("new.csv", 100), ("one.csv", 1)):
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
        # Each reads what it has written itself.
        places = {name: Path(folder) / name for name in sources}
        for name, place in places.items():
            place.mkdir()
            write_tables(place)
            cpu_seconds("-m fullconformal fit old.csv --target y -o model -q", str(place), sources[name])
        found: dict[str, list[float]] = {}
        for title, words in COMMANDS.items():
            # The first run compiles.
            tries = {
                name: [cpu_seconds(words, str(places[name]), sources[name]) for _ in range(runs + 1)]
                for name in sources
            }
            found[title] = [min(seconds) for seconds in tries.values()]
            print(f"| `{title}` | " + " | ".join(f"{seconds:.2f}" for seconds in found[title]) + " |", flush=True)
        ratios = [f"{one / floor:.2f}" for one, floor in zip(found[ONE], found[FLOOR], strict=True)]
        print("| one row / its imports | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    main()
