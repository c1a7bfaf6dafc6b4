"""What the commands take to start: seconds of CPU time and MB of memory, the least of a few runs, each in a process of its own.

    python benchmarks/startup.py                       of the version that is installed, or on PYTHONPATH
    python benchmarks/startup.py --before OTHER/src    beside that of another checkout

`predict` reads a table of one row, or of 100, and a linear predictor. Below the commands stand the libraries that it imports, alone: a
command cannot take less than what it imports, and the last line is how many times as long one row takes. Modules are compiled
before, as they are after a first run.
"""

from __future__ import annotations

import os
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


def cost(words: str, folder: str, source: str | None) -> tuple[float, float]:
    """CPU seconds and peak MB of Python with these arguments, in a folder, with another source of the package first where given."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPYCACHEPREFIX=str(Path(folder) / "compiled"))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if source is not None:
        environment["PYTHONPATH"] = source
    arguments = [word.replace("\t", " ") for word in words.split(" ")]
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"python {' '.join(arguments)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


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
    print("| CPU seconds, MB | " + " | ".join(sources) + " |\n|---|" + "---|" * len(sources))
    with TemporaryDirectory() as folder:
        # Each reads what it has written itself.
        places = {name: Path(folder) / name for name in sources}
        for name, place in places.items():
            place.mkdir()
            write_tables(place)
            cost("-m fullconformal fit old.csv --target y -o model -q", str(place), sources[name])
        found: dict[str, list[tuple[float, float]]] = {}
        for title, words in COMMANDS.items():
            # The first run compiles.
            tries = {name: [cost(words, str(places[name]), sources[name]) for _ in range(runs + 1)] for name in sources}
            found[title] = [min(costs) for costs in tries.values()]
            print(
                f"| `{title}` | " + " | ".join(f"{seconds:.2f}, {mb:.0f}" for seconds, mb in found[title]) + " |",
                flush=True,
            )
        ratios = [f"{one[0] / floor[0]:.2f}" for one, floor in zip(found[ONE], found[FLOOR], strict=True)]
        print("| one row / its imports | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    main()
