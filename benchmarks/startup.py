"""What the commands take from start to end: seconds of CPU time, seconds on the clock, MB of memory; each in a process of its own.

    python benchmarks/startup.py                       of the version that is installed, or on PYTHONPATH
    python benchmarks/startup.py --before OTHER/src    beside that of another checkout

Each figure is the least of a few runs; on a machine that is busy with other work the clock says little. `predict` reads a table of one
row, or of 100, and a linear predictor. Below the commands stand the libraries that it imports, alone: first as `python -c` has them, which
at its end takes apart all that it has imported, then without that. A command hardly does that (`fullconformal/__main__.py`), so that it can
take less than importing the libraries does: the last line is how many times as long one row takes. Modules are compiled before, as they are
after a first run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

import fullconformal

ONE, LIBRARIES = "fullconformal predict, one row", "import torch, sklearn, pandas"
IMPORTS = {
    "import torch": "torch",
    "import sklearn": "sklearn.linear_model,sklearn.compose,sklearn.impute",
    "import pandas": "pandas",
    LIBRARIES: "torch,pandas,sklearn.linear_model,sklearn.compose,sklearn.impute",
}
COMMANDS = {
    "fullconformal --help": "-m fullconformal --help",
    "fullconformal fit --help": "-m fullconformal fit --help",
    "fullconformal fit, 300 rows": "-m fullconformal fit old.csv --target y -o fitted -q",
    ONE: "-m fullconformal predict model one.csv -o sets.csv -q",
    "fullconformal predict, 100 rows": "-m fullconformal predict model new.csv -o sets.csv -q",
    "fullconformal report, 100 rows": "-m fullconformal report model new.csv -o report.html -q",
    **{title: f"-c import\t{names}" for title, names in IMPORTS.items()},
    **{f"{title}; os._exit(0)": f"-c import\t{names},os;os._exit(0)" for title, names in IMPORTS.items()},
}


def cost(words: str, folder: str, source: str) -> tuple[float, float, float]:
    """CPU seconds, seconds and peak MB of Python with these arguments, in a folder, with this source of the package."""
    compiled = str(Path(folder) / "compiled")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPYCACHEPREFIX=compiled, PYTHONPATH=source)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = [word.replace("\t", " ") for word in words.split(" ")]
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"python {' '.join(arguments)} failed")
    return used.ru_utime + used.ru_stime, time.perf_counter() - start, used.ru_maxrss / 1024


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
    # As a whole path, since the commands run in other folders.
    sources = {"now": str(Path(fullconformal.__file__).resolve().parents[1])}
    if before is not None:
        sources = {"before": str(Path(before).resolve()), **sources}
    print("| CPU seconds, seconds, MB | " + " | ".join(sources) + " |\n|---|" + "---|" * len(sources))
    with TemporaryDirectory() as folder:
        # Each reads what it has written itself.
        places = {name: Path(folder) / name for name in sources}
        for name, place in places.items():
            place.mkdir()
            write_tables(place)
            cost("-m fullconformal fit old.csv --target y -o model -q", str(place), sources[name])
        found: dict[str, list[tuple[float, ...]]] = {}
        for title, words in COMMANDS.items():
            # The first run compiles. One after the other, so that a busy minute is everybody's.
            tries = [[cost(words, str(places[name]), sources[name]) for name in sources] for _ in range(runs + 1)]
            found[title] = [tuple(map(min, zip(*costs, strict=True))) for costs in zip(*tries, strict=True)]
            shown = (f"{cpu:.2f}, {seconds:.2f}, {mb:.0f}" for cpu, seconds, mb in found[title])
            print(f"| `{title}` | " + " | ".join(shown) + " |", flush=True)
        ratios = [f"{one[0] / imports[0]:.2f}" for one, imports in zip(found[ONE], found[LIBRARIES], strict=True)]
        print(f"| CPU seconds: one row / {LIBRARIES} | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    main()
