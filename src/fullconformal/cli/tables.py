"""What the commands share: messages, reading and writing tables, loading predictors."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fullconformal.cli.printing import Printer, visible
from fullconformal.cli.schema import (
    CODE,
    MAX_CATEGORIES,
    MAX_CODES,
    Schema,
    TableError,
    check_name,
    is_number,
    is_quantity,
    listed,
    remedy,
    stray_words,
    stripped,
    variants,
)
from fullconformal.runtime.files import check_writable, finished_or_nothing

MISSING = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "?"]
# What spreadsheets take for a formula; and numbers, one or several joined by |, which they do not.
FORMULA, NUMBERS = (
    re.compile(r"(?s)\s*[=+\-@\t\r＝＋－＠]."),
    re.compile(r"[+-]?[\d.]+([eE][+-]?\d+)?(\|[+-]?[\d.]+([eE][+-]?\d+)?)*"),
)


def for_spreadsheets(frame: pd.DataFrame, note: Callable[[str], None]) -> pd.DataFrame:
    """The table with an apostrophe before every text, names of columns included, that a spreadsheet would take for a formula.

    >>> for_spreadsheets(pd.DataFrame({"a": ["=1+1", "-2", "b"]}), print)["a"].tolist()
    text that begins with = + - or @ was given an apostrophe, so that no spreadsheet takes it for a formula; Parquet has it as it is.
    ["'=1+1", '-2', 'b']
    """

    def guarded(value: Any) -> Any:
        return (
            f"'{value}" if isinstance(value, str) and FORMULA.match(value) and not NUMBERS.fullmatch(value) else value
        )

    out = frame.rename(columns=guarded)
    changed = list(out.columns) != list(frame.columns)
    for at, name in enumerate(frame.columns):
        column = frame.iloc[:, at].tolist()
        cells = [guarded(value) for value in column]
        # As objects, numbers among them are written with all their digits.
        if any(cell is not value for cell, value in zip(cells, column, strict=True)):
            out.isetitem(at, pd.Series(cells, index=frame.index, name=name, dtype=object))
            changed = True
    if changed:
        note(
            "text that begins with = + - or @ was given an apostrophe, so that no spreadsheet takes it for a formula; Parquet has it as "
            "it is."
        )
    return out


def check_output(path: Path, *inputs: Path) -> None:
    """Raise, before any work, if a file cannot be written or is one of the inputs."""
    if str(path) == "-":
        return
    if any(path.resolve() == other.resolve() for other in inputs):
        raise ValueError(f"-o {path} would overwrite an input file; give another name.")
    check_writable(path)


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def is_sheet(path: Path) -> bool:
    """Whether a file is an Excel workbook by its name."""
    return path.suffix.lower() in (".xlsx", ".xlsm")


def is_tabbed(path: Path) -> bool:
    """Whether the columns of a file are separated by tabs, by its name."""
    return any(suffix.lower() in (".tsv", ".tab") for suffix in path.suffixes[-2:])


def mark_of(path: Path, sep: str | None) -> str:
    """What separates the columns of a text file: what was asked for, or what its name says."""
    return "\t" if sep == "\\t" or (sep is None and is_tabbed(path)) else sep or ","


def read_table(
    path: Path | str, text: Sequence[str] = (), sep: str | None = None, missing: Sequence[str] = (), decimal: str = "."
) -> pd.DataFrame:
    """The rows of a Parquet, Excel or text file (which may be compressed: .gz, .zip, ...).

    Columns in `text` are read as text; the words of `missing` are missing values. Spaces around names of columns are left out.
    """
    path = Path(path)
    if path.is_dir():
        raise TableError(f"{path} is a folder; give a CSV, TSV, Excel or Parquet file.")
    if sep is not None and (is_parquet(path) or is_sheet(path)):
        raise TableError(f"--sep {sep!r} goes with text files, and {path.name} is none; leave it out.")
    mark = mark_of(path, sep)
    if len(mark) != 1:
        raise TableError(f"--sep {sep!r} is not one character; give one, such as ';'.")
    if decimal not in (".", ",") or (decimal == mark and not (is_parquet(path) or is_sheet(path))):
        raise TableError(
            f"--decimal {decimal!r} does not go with --sep {mark!r}; it is '.' or ',', another mark than separates columns."
        )
    dtypes, absent = dict.fromkeys(text, "str"), [*MISSING, *missing]
    try:
        if is_parquet(path):
            frame = pd.read_parquet(path).replace(dict.fromkeys(missing, None))
        elif is_sheet(path):
            frame = pd.read_excel(path, engine="openpyxl", dtype=dtypes, na_values=absent, keep_default_na=False)
        else:
            dtypes |= {name: "str" for name in check_first_line(path, mark) if name.strip() in dtypes}
            frame = pd.read_csv(
                path, sep=mark, dtype=dtypes, na_values=absent, keep_default_na=False, low_memory=False, decimal=decimal
            )
    except FileNotFoundError as error:
        raise TableError(f"{path}: there is no such file.") from error
    except ImportError as error:
        kind, needed = ("an Excel file", "openpyxl") if is_sheet(path) else ("Parquet", "pyarrow")
        raise TableError(f"{path}: {kind} needs {needed}; pip install {needed}, or save the table as CSV.") from error
    except TableError:
        raise
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{path} is empty; the first line must name the columns.") from error
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} cannot be read as a table: it is not in UTF-8. Save it as 'CSV UTF-8', or convert it (iconv -f {encoding(path)} -t "
            "utf-8)."
        ) from error
    except Exception as error:
        # Of many types: not text, an open quote, not a Parquet file, not a gzip file.
        raise TableError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}") from error
    frame.columns = [str(name).strip() for name in frame.columns]
    if any("\0" in name for name in frame.columns):
        raise TableError(f"{path} cannot be read as a table: it is not text.")
    if frame.empty:
        raise TableError(f"{path} has no rows.")
    # pandas takes the first fields of longer rows for an index, which shifts the names; of workbooks it makes up names.
    unnamed = sum(name.startswith("Unnamed: ") for name in frame.columns)
    if not is_parquet(path) and (2 * unnamed > frame.shape[1] or not frame.index.equals(pd.RangeIndex(len(frame)))):
        raise TableError(
            f"{path}: its rows have more fields than its first line has names; name every column, leave out lines above the names, and do "
            "not end lines with a comma."
        )
    return frame


def encoding(path: Path) -> str:
    """The likeliest encoding of a text file that is not in UTF-8."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "windows-1252"


def check_first_line(path: Path, sep: str) -> list[str]:
    """The first line of a text file; an error if it has another separator than it should, or names a column twice."""
    # A pipe can be read only once.
    if not path.is_file():
        return []
    line = pd.read_csv(path, sep=sep, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
    if any("\0" in name for name in line):
        raise TableError(f"{path} cannot be read as a table: it is not text.")
    other = next((mark for mark in (";", "\t", "|", ",") if mark in line[0] and mark != sep), None)
    if other and len(line) == 1:
        option = "'\\t'" if other == "\t" else shlex.quote(other)
        raise TableError(
            f"{path} separates its columns by {other!r}; say so with --sep {option}, and with --decimal , where numbers are written so."
        )
    names = line.str.strip()
    twice = names[names.duplicated() & (names != "")].unique().tolist()
    if twice:
        raise TableError(f"{path} has more than one column named {listed(twice)}; give each its own name.")
    return [str(name) for name in line]


def check_format(path: Path, *endings: str) -> None:
    """Raise if a file to write has an ending that names another format."""
    if str(path) != "-" and path.suffix.lower() not in endings:
        known = ", ".join(ending for ending in endings if ending)
        raise ValueError(
            f"-o {path.name}: {path.suffix or 'no ending'} is no format that can be written; give {known}."
        )


# A name without an ending is that of a CSV file.
TABLES = (".csv", ".tsv", ".parquet", ".pq", "")


def write_table(frame: pd.DataFrame, path: Path, printer: Printer) -> None:
    """Write a table, completely or not at all: CSV, Parquet or TSV if its name ends so, or CSV to standard output for "-"."""
    if not is_parquet(path):
        frame = for_spreadsheets(frame, printer.note)
    if str(path) == "-":
        text = frame.to_csv(index=False, float_format="%.6g")
        # Programs get what is there, people what can be seen.
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
        return
    with finished_or_nothing(path) as part:
        if is_parquet(path):
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, sep="\t" if is_tabbed(path) else ",", index=False, float_format="%.6g")


def with_target(frame: pd.DataFrame, target: str, option: str, drop_missing: bool, printer: Printer) -> pd.DataFrame:
    """The table with spaces around the target removed and, if asked for, without the rows where it is missing."""
    check_name(frame, target, option)

    frame = frame.assign(**{target: stripped(frame[target])})
    missing = int(frame[target].isna().sum())
    if drop_missing and missing:
        frame = frame[frame[target].notna()]
        printer.note(f"{missing:,} rows without {target!r} were left out.")
    if frame.empty:
        raise TableError(f"the target {target!r} is missing in all rows.")
    return frame


@dataclass(frozen=True)
class Asked:
    """A training table, and what is to be made of its columns."""

    table: Path
    target: str
    drop: tuple[str, ...]
    categorical: tuple[str, ...]
    sep: str | None
    decimal: str
    missing: tuple[str, ...]
    drop_missing: bool
    seed: int

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows of the table, read once: a pipe can be read no second time."""
        return read_table(self.table, self.categorical, self.sep, self.missing, self.decimal)


def read_training(asked: Asked, printer: Printer, quantity: bool = False) -> tuple[Schema, pd.DataFrame, Any]:
    """Schema, objects, and labels or numbers of a training table, with notes on how its columns were read."""
    target = asked.target
    frame = with_target(asked.frame, target, "--target", asked.drop_missing, printer)
    schema = Schema.of(frame, target, asked.drop, asked.categorical, asked.missing, asked.decimal, asked.sep)
    y = schema.quantities(frame) if quantity else schema.labels(frame)
    if len(set(y.tolist())) < 2:
        one = f"one {'value' if quantity else 'class'}, {y.tolist()[0]!r}"
        raise TableError(f"the target {target!r} has only {one}; there is nothing to predict.")
    for name in schema.categories:
        if name not in asked.categorical and (words := stray_words(frame[name], asked.decimal)):
            printer.note(f"{name!r} is treated as a category because it holds, besides numbers, {remedy(words)}.")
        if (many := frame[name].nunique()) > MAX_CATEGORIES:
            printer.note(
                f"{name!r} has {many:,} categories; the {MAX_CATEGORIES - 1} most frequent are told apart, the others are one."
            )
    for name in schema.categories + [target] * (not quantity):
        if alike := variants(frame[name]):
            printer.note(f"{name!r} holds words that differ in capitals or spaces alone, told apart: {listed(alike)}.")
    for name in schema.dates:
        printer.note(
            f"{name!r} holds dates, read as days since 1970; --categorical {shlex.quote(name)} takes them for groups, "
            f"--drop {shlex.quote(name)} leaves them out."
        )
    for name in coded(asked, [*schema.numbers, *[target] * is_number(frame[target])]):
        printer.note(
            f"{name!r} holds codes, numbers with leading zeros, read as numbers; --categorical {shlex.quote(name)} takes them for "
            "groups, as they are written."
        )
    if unused := [name for name in schema.left_out if name not in asked.drop]:
        printer.note(f"left out because they are empty or number the rows: {listed(unused)}.")
    return schema, schema.objects(frame), y


def is_quantity_wanted(asked: Asked, task: str, printer: Printer) -> bool:
    """Whether the target of a table is to be predicted as a quantity; says why if that was not asked for."""
    target, frame = asked.target, asked.frame
    if task != "auto" or target not in frame.columns:
        return task == "regression"
    if words := [] if is_number(frame[target]) else stray_words(frame[target], asked.decimal):
        raise TableError(
            f"the target {target!r} holds texts, {remedy(words)} (--drop-missing leaves rows without it out); --task "
            "classification takes it for classes."
        )
    if not is_number(frame[target]):
        return False
    values = frame[target].dropna()
    distinct = values.nunique()
    if is_quantity(values):
        printer.say(
            f"{target!r} holds {distinct:,} different numbers, a quantity: a regression (--task classification: classes)"
        )
        return True
    if distinct > MAX_CODES:
        printer.note(
            f"{target!r} holds {distinct} whole numbers, taken for classes; --task regression takes them for a quantity."
        )
    return False


def coded(asked: Asked, names: list[str], most: int = 1000) -> list[str]:
    """The columns of numbers that have leading zeros in the first rows of a text file or workbook."""
    path, raw = asked.table, {"nrows": most, "dtype": str, "keep_default_na": False}
    # A pipe can be read only once.
    if is_parquet(path) or not path.is_file() or not names:
        return []
    first = pd.read_excel(path, **raw) if is_sheet(path) else pd.read_csv(path, sep=mark_of(path, asked.sep), **raw)
    first.columns = [str(name).strip() for name in first.columns]
    return [name for name in names if first[name].str.fullmatch(CODE).any()]


def file_size(path: Path) -> str:
    """The size of a file in a suitable unit."""
    size = float(path.stat().st_size)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
