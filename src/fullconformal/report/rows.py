"""Objects as rows of a table, as the report shows them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_FEATURES = 60


class Rows(NamedTuple):
    """Objects as tables: feature names (d,), a list of values for each object, and how many features there were."""

    names: list[str]
    values: list[list[Any]]
    total: int


def rows_at(rows: Any, shown: npt.NDArray[np.intp], names: Sequence[Any] | None) -> Rows:
    """Rows of a DataFrame or array (m, d), at the objects shown."""
    own = getattr(rows, "columns", None)
    values = np.asarray(rows, dtype=object)
    if values.ndim == 1:  # texts
        values = values[:, None]
    if values.ndim != 2:
        raise ValueError(f"rows must have shape (m, d), got {values.shape}; pass pictures as images.")
    d = values.shape[1]
    given = own if names is None else names
    names = [f"x{j}" for j in range(d)] if given is None else list(given)
    if len(names) != d:
        raise ValueError(f"feature_names must hold one name for each of the {d} columns of the rows, got {len(names)}.")
    table = [[cell(v) for v in row[:MAX_FEATURES]] for row in values[shown]]
    return Rows([str(name) for name in names[:MAX_FEATURES]], table, d)


def cell(value: Any) -> Any:
    """A value as the page shows it: numbers to four digits, nothing for what is missing, text cut at 80 characters."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (int, np.integer)):
        return int(value) if abs(int(value)) < 2**53 else str(value)
    if isinstance(value, (float, np.floating)):
        if not isfinite(value):
            return None if value != value else str(float(value))
        short = float(f"{value:.4g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    text = str(value)
    return None if value is None or text in ("<NA>", "NaT", "nan") else text if len(text) <= 80 else text[:79] + "…"
