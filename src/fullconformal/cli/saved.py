"""What the commands do with a saved predictor: load it, repeat what its `fit` warned of, and read tables for it."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fullconformal.cli.printing import Printer
from fullconformal.cli.schema import CODE, Schema, TableError, is_number, listed
from fullconformal.cli.tables import is_parquet, is_sheet, is_tabbed, read_table


def is_regressor(predictor: Any) -> bool:
    """Whether a loaded predictor gives intervals."""
    return hasattr(predictor, "predict_interval")


def load_predictor(path: Path, factory: str | None) -> tuple[Any, dict[str, Any]]:
    """A saved predictor and its notes, empty if it was not made by `fullconformal fit`."""
    from fullconformal.estimators.saving import load_with_notes

    # Only for a factory: the folder a file lies in may hold modules of any name.
    if factory is not None:
        find_local_modules()
    clf, notes = load_with_notes(path, factory=factory)
    return clf, notes if isinstance(notes, dict) else {}


def load_with_schema(path: Path, factory: str | None) -> tuple[Any, Schema, dict[str, Any]]:
    """A saved predictor, the columns it was fitted on, and its notes; or an error if it was not fitted on a table."""
    from fullconformal.storage import StorageError

    clf, notes = load_predictor(path, factory)
    try:
        return clf, Schema.of_json(notes.get("table")), notes
    except TableError as error:
        raise StorageError(
            f"{path} was not made by `fullconformal fit`, so the columns of its table are unknown; load it in Python: "
            "fullconformal.load(path)."
        ) from error


def warnings_of(notes: dict[str, Any]) -> list[str]:
    """What `fit` warned of, as far as the file says so in texts."""
    saved = notes.get("warnings")
    return [text for text in saved if isinstance(text, str)] if isinstance(saved, list) else []


def repeat_warnings(notes: dict[str, Any], printer: Printer) -> None:
    """Say again what `fit` warned of."""
    for text in warnings_of(notes):
        printer.note(text)


def find_local_modules() -> None:
    """Let a factory be imported from the working folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def read_new(
    path: Path, clf: Any, schema: Schema, text: Sequence[str] = (), sep: str | None = None, decimal: str | None = None
) -> pd.DataFrame:
    """A table for a predictor, separated and with decimal marks as that which it was fitted on where nothing else is asked for.

    Categories, the target if classes are text, and the columns in `text` are read as text.
    """
    if sep is None and not (is_parquet(path) or is_sheet(path) or is_tabbed(path)):
        sep = schema.sep
    if decimal is None:
        decimal = "." if schema.decimal == sep else schema.decimal
    # A regressor has none.
    classes = getattr(clf, "classes_", None)
    target = [] if classes is None or classes.dtype.kind in "biuf" else [schema.target]
    return read_table(path, [*schema.categories, *target, *text], sep, schema.missing, decimal)


def as_written(
    frame: pd.DataFrame, keep: Sequence[str], path: Path, clf: Any, schema: Schema, sep: str | None
) -> pd.DataFrame:
    """Columns of a table to be copied, codes as they are written in its file: numbers with leading zeros, and whole ones with gaps."""
    kept = frame[list(keep)]
    numbers = [name for name in keep if is_number(kept[name])]
    # A pipe can be read only once.
    if is_parquet(path) or not path.is_file() or not numbers:
        return kept
    text = read_new(path, clf, schema, numbers, sep)
    # Whole numbers with gaps would be written as 31741.0, and long ones in other digits.
    whole = {
        name: kept[name].dtype.kind == "f" and text[name].dropna().str.strip().str.isdecimal().all() for name in numbers
    }
    codes = [name for name in numbers if whole[name] or text[name].astype(str).str.fullmatch(CODE).any()]
    # Rows may have been left out.
    return kept.assign(**text.loc[frame.index, codes])


def marks(X: pd.DataFrame) -> npt.NDArray[np.uint32]:
    """A number (n,) for each object that depends on what it holds alone."""
    return np.asarray(pd.util.hash_pandas_object(X, index=False), dtype=np.uint64).astype("<u4")


def marks_as_text(X: pd.DataFrame) -> str:
    """The numbers of the training objects as they are saved: four bytes each."""
    return base64.b64encode(np.unique(marks(X)).tobytes()).decode()


def note_known_rows(X: pd.DataFrame, notes: dict[str, Any], printer: Printer) -> None:
    """Say so where most objects are equal to those that the predictor was fitted on, as far as it remembers them."""
    saved = notes.get("rows")
    raw = base64.b64decode(saved) if isinstance(saved, str) else b""
    seen = np.isin(marks(X), np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<u4"))
    if seen.mean() > 0.5:
        printer.note(
            f"{int(seen.sum()):,} of {len(X):,} rows are equal to rows that the predictor was fitted on; their sets and their coverage say "
            "nothing about new rows."
        )


def objects_of(frame: pd.DataFrame, clf: Any, schema: Schema, notes: dict[str, Any], printer: Printer) -> pd.DataFrame:
    """The objects that a predictor takes, with notes: its warnings, known rows, unseen categories. It draws bars as asked for."""
    repeat_warnings(notes, printer)
    if "verbose" in clf.get_params(deep=False):
        clf.set_params(verbose=printer.verbose)
    X = schema.objects(frame)
    note_known_rows(X, notes, printer)
    for name, (rows, few) in schema.unseen(X).items():
        printer.note(
            f"{name!r} holds categories unseen in training in {rows:,} rows ({listed(few)}); they count as rare ones."
        )
    return X
