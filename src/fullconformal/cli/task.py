"""Classes or a quantity: which of the two a target is, and a predictor is of."""

from __future__ import annotations

from typing import Any

from fullconformal.cli.printing import Printer
from fullconformal.cli.schema import MAX_CODES, TableError, is_number, is_quantity, remedy, stray_words
from fullconformal.cli.tables import Asked, read_table


def is_quantity_wanted(asked: Asked, task: str, printer: Printer) -> bool:
    """Whether the target of a table is to be predicted as a quantity; says why if that was not asked for."""
    # A pipe can be read only once.
    if task != "auto" or not asked.table.is_file():
        return task == "regression"
    target, frame = asked.target, read_table(asked.table, (), asked.sep, asked.missing, asked.decimal)
    if target not in frame.columns:
        return False
    if words := [] if is_number(frame[target]) else stray_words(frame[target]):
        raise TableError(
            f"the target {target!r} holds, besides numbers, {remedy(words)} (--drop-missing leaves rows without it out); --task "
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


def is_regressor(predictor: Any) -> bool:
    """Whether a loaded predictor gives intervals."""
    return hasattr(predictor, "predict_interval")
