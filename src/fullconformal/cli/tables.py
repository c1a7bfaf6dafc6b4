"""What the commands share: options, messages, reading and writing tables, loading predictors."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pandas as pd
from rich.console import Console

from fullconformal.cli.schema import Schema, TableError, check_name, listed, stray_words, stripped, unseen_categories
from fullconformal.runtime.files import finished_or_nothing

MISSING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "?"]
PATH = click.Path(path_type=Path)
LEVEL = click.FloatRange(0, 1, min_open=True, max_open=True)

drop_option = click.option("--drop", multiple=True, metavar="COLUMN", help="A column to leave out; can be repeated.")
missing_option = click.option("--drop-missing", is_flag=True, help="Leave out rows whose target is missing.")
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="The random seed.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
model_option = click.option(
    "--model", default="lr", show_default=True, metavar="lr|mlp|MODULE:FACTORY",
    help="Logistic regression, a network with one hidden layer, or your own function that returns a torch module.",
)  # fmt: skip
factory_option = click.option(
    "--model", default=None, metavar="MODULE:FACTORY",
    help="The function that returns the network, if the predictor was fitted with one.",
)  # fmt: skip


class Printer:
    """Prints text or JSON to standard output, or text to standard error if `out` is "-"; notes go to standard error."""

    def __init__(self, quiet: bool, as_json: bool = False, out: Path | None = None):
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


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def read_table(path: Path | str, text: Sequence[str] = ()) -> pd.DataFrame:
    """The rows of a Parquet or CSV file (which may be compressed: .gz, .zip, ...); columns in `text` are read as text."""
    path = Path(path)
    if path.is_dir():
        raise TableError(f"{path} is a folder; give a CSV or Parquet file.")
    try:
        if is_parquet(path):
            frame = pd.read_parquet(path)
        else:
            check_first_line(path)
            dtypes = dict.fromkeys(text, "str")
            frame = pd.read_csv(path, dtype=dtypes, na_values=MISSING, keep_default_na=False, low_memory=False)
    except FileNotFoundError as error:
        raise TableError(f"{path}: there is no such file.") from error
    except ImportError as error:
        raise TableError(f"{path}: Parquet needs pyarrow; pip install pyarrow, or give a CSV file.") from error
    except TableError:
        raise
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{path} is empty; the first line must name the columns.") from error
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} cannot be read as a table: it is not in UTF-8. Save it as 'CSV UTF-8', or convert it (iconv -f latin1 -t utf-8)."
        ) from error
    except Exception as error:
        # Of many types: not text, an open quote, not a Parquet file, not a gzip file.
        raise TableError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}") from error
    frame.columns = [str(name) for name in frame.columns]
    if any("\0" in name for name in frame.columns):
        raise TableError(f"{path} cannot be read as a table: it is not text.")
    if frame.empty:
        raise TableError(f"{path} has no rows.")
    # pandas takes the first fields of longer rows for an index, which shifts the names.
    if not is_parquet(path) and not frame.index.equals(pd.RangeIndex(len(frame))):
        raise TableError(
            f"{path}: its rows have more fields than its first line has names; name every column, and do not end lines with a comma."
        )
    return frame


def check_first_line(path: Path) -> None:
    """Raise if the first line of a CSV file has another separator than commas, or names a column twice."""
    # A pipe can be read only once.
    if not path.is_file():
        return
    line = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
    if any("\0" in name for name in line):
        raise TableError(f"{path} cannot be read as a table: it is not text.")
    other = next((mark for mark in (";", "\t", "|") if mark in line[0]), None)
    if other and len(line) == 1:
        raise TableError(f"{path} separates its columns by {other!r}; use commas, and decimal points in numbers.")
    twice = line[line.duplicated() & (line != "")].unique().tolist()
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; give each its own name.")


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table, completely or not at all: CSV, Parquet if its name ends so, or CSV to standard output for "-"."""
    if str(path) == "-":
        frame.to_csv(sys.stdout, index=False, float_format="%.6g")
        return
    with finished_or_nothing(path) as part:
        if is_parquet(path):
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, index=False, float_format="%.6g")


def with_target(frame: pd.DataFrame, target: str, option: str, drop_missing: bool, printer: Printer) -> pd.DataFrame:
    """The table with spaces around the target removed and, if asked for, without the rows where it is missing."""
    check_name(frame, target, option)

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
    frame = with_target(read_table(path), target, "--target", drop_missing, printer)
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


def load_predictor(path: Path, factory: str | None) -> tuple[Any, dict[str, Any]]:
    """A saved predictor and its notes, empty if it was not made by `fullconformal fit`."""
    from fullconformal.estimators.saving import load_with_notes

    find_local_modules()
    clf, notes = load_with_notes(path, factory=factory)
    return clf, notes if isinstance(notes, dict) else {}


def load_with_schema(path: Path, factory: str | None) -> tuple[Any, Schema]:
    """A saved predictor and the columns it was fitted on, or an error if it was not fitted on a table."""
    from fullconformal.storage import StorageError

    clf, notes = load_predictor(path, factory)
    try:
        return clf, Schema.of_json(notes.get("table"))
    except TableError as error:
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
    target = [] if clf.classes_.dtype.kind in "biuf" else [schema.target]
    return read_table(path, text=[*schema.categories, *target, *text])


def objects_of(frame: pd.DataFrame, clf: Any, schema: Schema, printer: Printer) -> pd.DataFrame:
    """The objects that a predictor takes, with notes on categories unseen in training."""
    X = schema.objects(frame)
    # Of folds every model has an encoder of its own.
    unseen = {} if clf.transformer_ is None else unseen_categories(clf.transformer_[0], schema, X)
    for name, (rows, few) in unseen.items():
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
