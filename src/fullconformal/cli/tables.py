"""What the commands on tables share: options, messages, reading and writing tables, loading predictors."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import pandas as pd

    from fullconformal.table import Schema

Decorator = Callable[[Any], Any]
LEVEL = click.FloatRange(0, 1, min_open=True, max_open=True)

drop_option: Decorator = click.option(
    "--drop", multiple=True, metavar="COLUMN", help="A column to leave out; can be repeated."
)
missing_option: Decorator = click.option("--drop-missing", is_flag=True, help="Leave out rows whose target is missing.")
seed_option: Decorator = click.option("--seed", type=int, default=0, show_default=True, help="The random seed.")
quiet_option: Decorator = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
model_option: Decorator = click.option(
    "--model", default="lr", show_default=True, metavar="lr|mlp|MODULE:FACTORY",
    help="Logistic regression, a network with one hidden layer, or your own function that returns a torch module.",
)  # fmt: skip
factory_option: Decorator = click.option(
    "--model", default=None, metavar="MODULE:FACTORY",
    help="The function that returns the network, if the predictor was fitted with one.",
)  # fmt: skip


class Printer:
    """Prints text or JSON to standard output, or text to standard error if `out` is "-"; notes go to standard error."""

    def __init__(self, quiet: bool, as_json: bool = False, out: Path | None = None):
        from rich.console import Console

        self.quiet, self.as_json, self.to_stderr = quiet, as_json, str(out) == "-"
        self.console = Console(stderr=self.to_stderr, highlight=False, soft_wrap=True)
        self.noted: set[str] = set()

    @property
    def verbose(self) -> int:
        """1 if progress bars may be drawn."""
        return int(not (self.quiet or self.as_json or self.to_stderr))

    def say(self, what: Any = "") -> None:
        """Print text, or anything that rich can draw: its columns are not wrapped."""
        if not self.quiet and not self.as_json:
            self.console.print(what, markup=False, soft_wrap=isinstance(what, str))

    def json(self, value: Any) -> None:
        """Print a value, if JSON was asked for."""
        if self.as_json and not self.to_stderr:
            click.echo(json.dumps(value, indent=2, ensure_ascii=False))

    def note(self, text: str) -> None:
        """Print a note to standard error, each only once."""
        if not self.quiet and text not in self.noted:
            self.noted.add(text)
            click.echo(f"note: {' '.join(text.split())}", err=True)

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Print warnings as notes."""
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_, **__: self.note(str(message))
            yield


def check_output(path: Path, *inputs: Path) -> None:
    """Raise, before any work, if a file cannot be written or is one of the inputs."""
    if str(path) == "-":
        return
    folder = path.resolve().parent
    if any(path.resolve() == other.resolve() for other in inputs):
        raise ValueError(f"-o {path} would overwrite an input file; give another name.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist; create it first.")


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table, completely or not at all: CSV, Parquet if its name ends so, or CSV to standard output for "-"."""
    from fullconformal.runtime.files import finished_or_nothing
    from fullconformal.table import is_parquet

    if str(path) == "-":
        frame.to_csv(sys.stdout, index=False, float_format="%.6g")
        return
    with finished_or_nothing(path) as part:
        if is_parquet(path):
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, index=False, float_format="%.6g")


def with_target(frame: pd.DataFrame, target: str, drop_missing: bool, printer: Printer) -> pd.DataFrame:
    """The table with spaces around the target removed and, if asked for, without the rows where it is missing."""
    from fullconformal.table import TableError, stripped

    frame = frame.assign(**{target: stripped(frame[target])})
    missing = int(frame[target].isna().sum())
    if drop_missing and missing:
        frame = frame[frame[target].notna()].reset_index(drop=True)
        printer.note(f"{missing:,} rows without {target!r} were left out.")
    if frame.empty:
        raise TableError(f"the target {target!r} is missing in all rows.")
    return frame


def read_training(
    path: Path, target: str, drop: tuple[str, ...], drop_missing: bool, printer: Printer
) -> tuple[Schema, Any, Any]:
    """Schema, objects and labels of a training table, with notes on how its columns were read."""
    from fullconformal.table import Schema, TableError, check_name, listed, read_table, stray_words

    frame = read_table(path)
    check_name(frame, target, "--target")
    frame = with_target(frame, target, drop_missing, printer)
    schema = Schema.of(frame, target, drop)
    y = schema.labels(frame)
    if len(set(y.tolist())) < 2:
        raise TableError(f"the target {target!r} has only one class, {y.tolist()[0]!r}; there is nothing to predict.")
    for name in schema.categories:
        if words := stray_words(frame[name]):
            printer.note(
                f"{name!r} is treated as a category because it holds {listed(words)} besides numbers; correct or clear "
                "these cells if it is a quantity."
            )
    if unused := [name for name in schema.left_out if name not in drop]:
        printer.note(f"left out because they are empty or number the rows: {listed(unused)}.")
    return schema, schema.objects(frame), y


def load_predictor(path: Path, factory: str | None) -> tuple[Any, Any]:
    """A saved predictor and its notes."""
    from fullconformal.estimators.saving import load_with_notes

    find_local_modules()
    return load_with_notes(path, factory=factory)


def load_with_schema(path: Path, factory: str | None) -> tuple[Any, Schema]:
    """A saved predictor and the columns it was fitted on, or an error if it was not fitted on a table."""
    from fullconformal.storage import StorageError
    from fullconformal.table import Schema, TableError

    clf, notes = load_predictor(path, factory)
    try:
        return clf, Schema.of_json(notes["table"] if isinstance(notes, dict) else None)
    except (TableError, KeyError) as error:
        raise StorageError(
            f"{path} was not made by `fullconformal fit`, so the columns of its table are unknown; load it in Python: "
            "fullconformal.load(path)."
        ) from error


def find_local_modules() -> None:
    """Let a factory be imported from the working folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def read_new(path: Path, clf: Any, schema: Schema, text: Sequence[str] = ()) -> pd.DataFrame:
    """A table for a predictor; categories, the target if classes are text, and the columns in `text` are read as text."""
    from fullconformal.table import read_table

    target = [] if clf.classes_.dtype.kind in "biuf" else [schema.target]
    return read_table(path, text=[*schema.categories, *target, *text])


def objects_of(frame: pd.DataFrame, clf: Any, schema: Schema, printer: Printer) -> pd.DataFrame:
    """The objects that a predictor takes, with notes on categories unseen in training."""
    from fullconformal.table import listed, unseen_categories

    X = schema.objects(frame)
    for name, (rows, few) in unseen_categories(clf.transformer_[0], schema, X).items():
        printer.note(
            f"{name!r} holds categories unseen in training in {rows:,} rows ({listed(few)}); they count as rare ones."
        )
    return X


def file_size(path: Path) -> str:
    """The size of a file in a suitable unit."""
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
