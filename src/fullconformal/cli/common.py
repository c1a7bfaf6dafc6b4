"""What commands on tables share: options, how they talk, and where their output goes."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import pandas as pd

    from fullconformal.table import Schema

Decorator = Callable[[Any], Any]
LEVEL = click.FloatRange(0, 1, min_open=True, max_open=True)

target_option: Decorator = click.option("--target", required=True, help="The column to predict.")
drop_option: Decorator = click.option(
    "--drop", multiple=True, metavar="COLUMN", help="A column to leave out; may be given several times."
)
missing_option: Decorator = click.option(
    "--drop-missing", is_flag=True, help="Leave out the rows whose target is missing."
)
seed_option: Decorator = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of all that is random."
)
quiet_option: Decorator = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
model_option: Decorator = click.option(
    "--model", default="lr", show_default=True, metavar="lr|mlp|MODULE:FACTORY",
    help="Logistic regression, a network with one hidden layer, or a function of yours that returns a torch module.",
)  # fmt: skip


class Talk:
    """Says things to people: on standard output, or beside it where that holds the result; nothing where quiet."""

    def __init__(self, quiet: bool, beside: bool = False):
        from rich.console import Console

        self.quiet = quiet
        self.console = Console(stderr=beside, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def show(self, table: Any) -> None:
        """Print what rich can draw; columns are not wrapped."""
        if not self.quiet:
            self.console.print(table, soft_wrap=False)

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Warnings, as they come, as notes on standard error; each once."""
        seen: set[str] = set()

        def note(message: Warning | str, *_: Any) -> None:
            if str(message) not in seen and not self.quiet:
                seen.add(str(message))
                click.echo(f"note: {' '.join(str(message).split())}", err=True)

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = note  # type: ignore[assignment]
            yield


def note(text: str, quiet: bool) -> None:
    """Something to know, on standard error."""
    if not quiet:
        click.echo(f"note: {text}", err=True)


def print_json(value: Any) -> None:
    """A value as JSON on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def check_output(path: Path, *read: Path) -> None:
    """Raise, before any work, where a file cannot be written, or is one of those to be read."""
    if str(path) == "-":
        return
    folder = path.resolve().parent
    if any(path.resolve() == other.resolve() for other in read):
        raise ValueError(f"-o {path} would replace the file that is read; give another name.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist; make it first.")


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table, whole or not at all: CSV, Parquet by its name, or CSV to standard output for "-"."""
    from fullconformal.runtime.files import finished_or_nothing
    from fullconformal.table import PARQUET

    if str(path) == "-":
        frame.to_csv(sys.stdout, index=False, float_format="%.6g")
        return
    with finished_or_nothing(path) as part:
        if path.suffix.lower() in PARQUET:
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, index=False, float_format="%.6g")


def without_missing(frame: pd.DataFrame, target: str, drop_missing: bool, quiet: bool) -> pd.DataFrame:
    """The rows that have a target, spaces around it left out; where those that have none are to be left out it is told."""
    from fullconformal.table import TableError, stripped

    frame = frame.assign(**{target: stripped(frame[target])})
    missing = int(frame[target].isna().sum())
    if drop_missing and missing:
        frame = frame[frame[target].notna()].reset_index(drop=True)
        note(f"{missing:,} rows without {target!r} were left out.", quiet)
    if frame.empty:
        raise TableError(f"the target {target!r} is missing in all rows.")
    return frame


def read_training(
    path: Path, target: str, drop: tuple[str, ...], drop_missing: bool, quiet: bool
) -> tuple[Schema, Any, Any]:
    """Schema, objects and labels of a training table; what was done to it is told."""
    from fullconformal.table import Schema, TableError, check_name, listed, read_table, strays

    frame = read_table(path)
    check_name(frame, target, "--target")
    frame = without_missing(frame, target, drop_missing, quiet)
    schema = Schema.of(frame, target, drop)
    y = schema.labels(frame)
    if len(set(y.tolist())) < 2:
        raise TableError(f"the target {target!r} has one class only, {y.tolist()[0]!r}; there is nothing to predict.")
    for name in schema.categories:
        if words := strays(frame[name]):
            told = f"{name!r} is taken for a category, since it holds {listed(words)} beside numbers"
            note(f"{told}; mend or empty these cells if it is a quantity.", quiet)
    silent = [name for name in schema.left_out if name not in drop]
    if silent:
        note(f"left out, being empty or row numbers: {listed(silent)}.", quiet)
    return schema, schema.objects(frame), y


def bytes_in_words(size: int) -> str:
    """A size in the unit that suits it."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size} bytes"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"


def class_sizes(y: Any) -> dict[str, int]:
    """How many rows each class has, largest first."""
    from collections import Counter

    return {str(label): count for label, count in Counter(y.tolist()).most_common()}
