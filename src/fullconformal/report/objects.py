"""Objects as the report shows them: pictures, joined to one sheet of tiles, or rows of a table."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fullconformal.metrics.intervals import strata


class Sheet(NamedTuple):
    """A picture of ``columns`` × ``rows`` tiles in reading order, each ``width`` × ``height``, as a data URI."""

    uri: str
    columns: int
    rows: int
    width: int
    height: int

    @property
    def style(self) -> str:
        """The sheet as a background; small pictures are enlarged to a whole multiple of their pixels."""
        zoom = max(1, 112 // max(self.width, self.height))
        width, height = self.width * zoom, self.height * zoom
        shrink = min(1.0, 112 / max(width, height))
        return (
            f".picture{{width:{width * shrink:.0f}px;height:{height * shrink:.0f}px;background-image:url({self.uri});"
            f"background-size:{100 * self.columns}% {100 * self.rows}%;"
            f"image-rendering:{'pixelated' if zoom > 1 else 'auto'}}}\n"
        )


def sheet(images: npt.ArrayLike, max_bytes: int = 1_200_000) -> Sheet:
    """One sheet of the images (k, H, W), (k, H, W, channels) or (k, channels, H, W): PNG if it fits, else JPEG, else smaller.

    As base64 it takes a third more, so a page of 1,000 objects stays below 2 MB.
    """
    from PIL import Image

    pixels = as_bytes(images)
    while True:
        k, height, width, channels = pixels.shape
        columns = int(np.ceil(np.sqrt(k)))
        rows = -(-k // columns)
        tiles = np.zeros((rows * columns, height, width, channels), dtype=np.uint8)
        tiles[:k] = pixels
        whole = tiles.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
        whole = whole.reshape(rows * height, columns * width, channels)
        picture = Image.fromarray(whole[:, :, 0] if channels == 1 else whole)
        for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85, "subsampling": 0})):
            file = BytesIO()
            picture.save(file, format=kind, **options)
            if file.tell() <= max_bytes or (kind == "jpeg" and max(height, width) <= 8):
                uri = f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"
                return Sheet(uri, columns, rows, width, height)
        pixels = half_size(pixels)


def as_bytes(images: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Images as bytes (k, H, W, 1 or 3), dark where numbers are low; other types than bytes are scaled to 0…255."""
    pixels = np.asarray(images)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim == 4 and pixels.shape[3] not in (1, 3, 4) and pixels.shape[1] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 1, 3)
    if pixels.ndim != 4 or pixels.shape[3] not in (1, 3, 4) or pixels.size == 0:
        raise ValueError(
            f"images must have shape (m, H, W), (m, H, W, channels) or (m, channels, H, W) with 1, 3 or 4 channels, "
            f"got shape {pixels.shape}; reshape them, for example images.reshape(-1, 28, 28)."
        )
    # Without transparency.
    pixels = pixels[..., :3]
    if pixels.dtype == np.uint8:
        return pixels
    pixels = pixels.astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("images contain NaN or infinite values; replace them, for example by np.nan_to_num(images).")
    low, high = float(pixels.min()), float(pixels.max())
    scaled: npt.NDArray[Any] = np.rint((pixels - low) * (255 / (high - low) if high > low else 0))
    return scaled.astype(np.uint8)


def half_size(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Images of half the height and width: means of blocks of four; an odd edge is cut off."""
    k, height, width, channels = pixels.shape
    even = pixels[:, : max(height // 2 * 2, 1), : max(width // 2 * 2, 1)]
    down, across = max(height // 2, 1), max(width // 2, 1)
    blocks = even.reshape(k, down, min(height, 2), across, min(width, 2), channels)
    halved: npt.NDArray[np.uint8] = np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)
    return halved


class Rows(NamedTuple):
    """Names of the features that are shown, their values for each object, and the ``total`` number of features."""

    names: list[str]
    values: list[list[Any]]
    total: int


def rows_at(rows: Any, shown: npt.NDArray[np.intp], names: Sequence[Any] | None, max_features: int = 60) -> Rows:
    """The rows `shown` of a DataFrame or array (m, d), and at most `max_features` of their columns."""
    values = np.asarray(rows, dtype=object)
    # Texts are rows of one column.
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2:
        raise ValueError(f"rows must have shape (m, d), got {values.shape}; give pictures as images.")
    table = [[cell(v) for v in row[:max_features]] for row in values[shown]]
    return Rows(names_of(rows, values.shape[1], names)[:max_features], table, values.shape[1])


def names_of(rows: Any, d: int, names: Sequence[Any] | None) -> list[str]:
    """Names of the d columns of rows: those given, those that a DataFrame has, or numbers."""
    given = getattr(rows, "columns", None) if names is None else names
    found = [f"x{j}" for j in range(d)] if given is None else [str(name) for name in given]
    if len(found) != d:
        raise ValueError(f"feature_names must hold one name for each of the {d} columns of the rows, got {len(found)}.")
    return found


def cell(value: Any) -> Any:
    """A value as the page shows it: numbers with four digits, None if missing, text of at most 80 characters."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (int, np.integer)):
        return int(value) if abs(int(value)) < 2**53 else str(value)
    if isinstance(value, (float, np.floating)):
        if not isfinite(value):
            return None if value != value else str(float(value))
        number = float(value)
        # Whole numbers as they are: they may be codes, or amounts that people know.
        short = number if number.is_integer() and abs(number) < 1e9 else float(f"{number:.4g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    text = str(value)
    return None if value is None or text in ("<NA>", "NaT", "nan") else text if len(text) <= 80 else text[:79] + "…"


def shown_of(missed: npt.NDArray[np.bool_], most: int) -> npt.NDArray[np.intp]:
    """At most so many objects in order: those that are missed (m,), up to half of them, and others evenly spaced."""
    m = len(missed)
    if m <= most:
        return np.arange(m)
    first = evenly(np.flatnonzero(missed), most // 2)
    rest = np.setdiff1d(np.arange(m), first)
    return np.union1d(first, evenly(rest, most - len(first)))


def evenly(places: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """At most so many of the places, evenly spaced."""
    return places if len(places) <= most else places[np.linspace(0, len(places) - 1, most).astype(np.intp)]


def identified(identifiers: Any, m: int) -> list[str] | None:
    """Names of the objects (m,) as text."""
    if identifiers is None:
        return None
    names = ["missing" if cell(value) is None else str(cell(value)) for value in list(identifiers)]
    if len(names) != m:
        raise ValueError(f"identifiers must hold one name for each of the {m} objects, got {len(names)}.")
    return names


class Part(NamedTuple):
    """A way to divide the objects: its name, the names of the groups, and the group (m,) of each object."""

    name: str
    labels: list[str]
    of: npt.NDArray[np.uint8]


def parts(named: Iterable[tuple[str, npt.NDArray[Any]]]) -> list[Part]:
    """Columns (m,) by name as groups: fifths of numbers, words as they are, missing values apart; not one alone, nor more than 30."""
    found = ((name, *groups(column)) for name, column in named)
    return [Part(name, labels, of) for name, labels, of in found if 1 < len(labels) <= 30]


def groups(column: npt.NDArray[Any]) -> tuple[list[str], npt.NDArray[np.uint8]]:
    """Names of the groups of a column, and the group (m,) of each object."""
    cells = [cell(value) for value in column.tolist()]
    missing = np.array([value is None for value in cells])
    numbers = all(isinstance(value, (int, float)) for value in cells if value is not None)
    known = np.array([value for value in column.tolist() if cell(value) is not None], float if numbers else str)
    labels, of = strata(known, 5) if len(known) else ([], known)
    names = [label if isinstance(label, str) else span(*label) for label in labels]
    out = np.full(len(column), min(len(names), 255), dtype=np.uint8)
    # Of more groups than there are numbers in a byte nothing is shown.
    out[~missing] = np.minimum(of, 255)
    return [*names, *["missing"] * bool(missing.any())], out


def span(low: float, high: float) -> str:
    """The numbers from low to high in words."""
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def columns_of(rows: Any, names: Sequence[Any] | None) -> list[tuple[str, npt.NDArray[Any]]]:
    """The first 30 columns of an array or DataFrame (m, d) by name."""
    if rows is None or np.ndim(rows) != 2:
        return []
    frame = hasattr(rows, "iloc")
    values: Any = rows if frame else np.asarray(rows)
    named = enumerate(names_of(rows, values.shape[1], names)[:30])
    return [(name, values.iloc[:, j].to_numpy() if frame else values[:, j]) for j, name in named]


def chosen_columns(by: Any, m: int, columns: list[tuple[str, npt.NDArray[Any]]]) -> list[tuple[str, npt.NDArray[Any]]]:
    """What the user asks to see coverage by, first: a mapping of names to columns (m,), or names of columns; then all columns."""
    known = dict(columns)
    wanted = by if isinstance(by, Mapping) else dict.fromkeys([by] if isinstance(by, str) else by or ())
    for name, column in wanted.items():
        if column is None and name not in known:
            raise ValueError(
                f"by names {name!r}, which is no column of the rows; they are {', '.join(map(repr, known))}."
            )
        values = known[name] if column is None else np.asarray(column)
        if values.shape != (m,):
            raise ValueError(f"by[{name!r}] must hold one value for each of the {m} objects, got shape {values.shape}.")
        known[name] = values
    return [(str(name), known[name]) for name in [*wanted, *(name for name, _ in columns if name not in wanted)]]
