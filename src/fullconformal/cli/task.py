"""Classes or a quantity: which of the two a target is, and a predictor is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullconformal.cli.schema import MAX_CODES, is_number, is_quantity
from fullconformal.cli.tables import Printer, read_table


def is_quantity_wanted(table: Path, target: str | None, task: str, sep: str | None, printer: Printer) -> bool:
    """Whether the target of a table is to be predicted as a quantity; says why if that was not asked for."""
    # A pipe can be read only once.
    if task != "auto" or target is None or not table.is_file():
        return task == "regression"
    frame = read_table(table, (), sep)
    if target not in frame.columns or not is_number(frame[target]):
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


def is_regressor(predictor: Any) -> bool:
    """Whether a loaded predictor gives intervals."""
    return hasattr(predictor, "predict_interval")
