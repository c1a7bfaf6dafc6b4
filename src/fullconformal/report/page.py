"""The report: one HTML file that contains everything it shows and needs no network.

The page is a template, a style sheet and a script (``templates/``), filled in with the numbers they show. Membership in a set is
decided here, by the rule of `fullconformal.sets`, for every position of the page's slider; the script only counts and draws.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import FloatArray, encode, mean
from fullconformal.report.objects import Sheet, rows_at, sheet
from fullconformal.report.plots import COLOURS, STYLES
from fullconformal.runtime.files import check_writable, finished_or_nothing
from fullconformal.sets import check_levels, check_p, members, prediction_sets

# Positions of labels or objects.
Codes = npt.NDArray[np.intp]

TEMPLATES = Path(__file__).parent / "templates"


def write_report(path: str | Path, p: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, **options: Any) -> Path:
    """Write the page of `render_report` to a file, completely or not at all, and return its path.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_report(f"{folder}/report.html", {"ours": [[0.7, 0.05], [0.3, 0.2]]}, [0, 1]).name
    'report.html'
    """
    check_folder(path)
    return write_page(path, render_report(p, y, **options))


def write_page(path: str | Path, page: str) -> Path:
    """Write a page to a file, completely or not at all, and return its path."""
    path = check_folder(path)
    with finished_or_nothing(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def check_folder(path: str | Path) -> Path:
    """The path, or an error if no file can be written there."""
    check_writable(path)
    return Path(path)


def render_report(
    p: Mapping[str, npt.ArrayLike],
    y: npt.ArrayLike,
    *,
    classes: npt.ArrayLike | None = None,
    confidence_level: float = 0.9,
    title: str = "Prediction sets",
    n_train: int | None = None,
    images: npt.ArrayLike | None = None,
    rows: Any = None,
    feature_names: Sequence[Any] | None = None,
    proba: npt.ArrayLike | None = None,
    diagnostics: Sequence[str] = (),
) -> str:
    """The report as HTML.

    Parameters
    ----------
    p : mapping of str to array (m, C)
        p-values by the name of the method. The sets of the first method are shown; the others are compared with it.
    y : array (m,)
        True labels.
    classes : array (C,), optional
        Label of each column of the p-values; 0, ..., C - 1 by default.
    confidence_level : float, default=0.9
        Where the page's slider starts.
    title : str, default="Prediction sets"
    n_train : int, optional
        Number of training points.
    images : array (m, H, W), (m, H, W, channels) or (m, channels, H, W), optional
        Pictures of the objects, dark where the numbers are low.
    rows : array or DataFrame (m, d), optional
        The objects as rows of a table, shown if there are no images.
    feature_names : sequence of d names, optional
        Names of the columns of ``rows``; a DataFrame has its own.
    proba : array (m, C), optional
        Probabilities of the model, for its point prediction.
    diagnostics : sequence of str, optional
        Sentences to show; a warning begins with ``!``.

    Returns
    -------
    str
        It shows up to 1,000 objects one by one, evenly spaced if there are more; the numbers are computed from all.

    Examples
    --------
    >>> page = render_report({"ours": [[0.7, 0.05], [0.3, 0.2]]}, ["no", "yes"], classes=["no", "yes"])
    >>> page[:15]
    '<!doctype html>'
    """
    values, labels, codes = checked(p, y, classes)
    level, m = float(check_levels(confidence_level)), len(codes)
    shown = np.arange(m) if m <= 1000 else np.linspace(0, m - 1, 1000).astype(np.intp)
    main = next(iter(values.values()))
    for name, given in (("images", images), ("rows", rows)):
        if given is not None and len(given) != m:  # type: ignore[arg-type]
            raise ValueError(f"{name} must have one entry for each of the {m} labels of y, got {len(given)}.")  # type: ignore[arg-type]
    picture = None if images is None else sheet(np.asarray(images)[shown])
    table = None if rows is None or picture else rows_at(rows, shown, feature_names)
    probabilities = None if proba is None else np.asarray(proba, dtype=np.float64)
    shape = np.shape(next(iter(p.values())))
    if probabilities is not None and (probabilities.shape != shape or not np.isfinite(probabilities).all()):
        raise ValueError(
            f"proba must be finite and have the shape of the p-values, {shape}, got shape {probabilities.shape}."
        )
    levels = slider_levels(level)
    # What the page's script counts and draws.
    data = {
        "levels": levels.tolist(),
        "start": int(np.searchsorted(levels, level)),
        "classes": labels,
        "truth": codes.tolist(),
        "methods": list(values),
        "entry": [base64(entry_positions(value, levels)) for value in values.values()],
        "shown": None if len(shown) == m else shown.tolist(),
        "p": base64(main[shown].astype("<f4")),
        "predicted": None if probabilities is None else {
            "label": probabilities[shown].argmax(axis=1).tolist(),
            "probability": probabilities[shown].max(axis=1).round(3).tolist(),
        },
        "sheet": picture and picture._asdict() | {"uri": None},
        "rows": table and table._asdict(),
    }  # fmt: skip
    # What the page shows before its script runs.
    facts = {
        "title": title,
        "n_train": n_train,
        "n_shown": len(shown),
        "m": m,
        "classes": labels,
        "level": level,
        "methods": {name: metrics.summary(value, codes, level) for name, value in values.items()},
        "by_class": covered_by_class(main, codes, labels, level),
        "accuracy": None if probabilities is None else mean(probabilities.argmax(axis=1) == codes),
        "warnings": [line[1:].strip() for line in diagnostics if line.startswith("!")],
        "notes": [line for line in diagnostics if not line.startswith("!")],
    }
    return fill_template(data, facts, picture)


def fill_template(data: dict[str, Any], facts: dict[str, Any], picture: Sheet | None, name: str = "report") -> str:
    """The page: the template of a name with the style sheet, its script and what they show."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    colours = ":root{" + "".join(f"--light-{k}:{colour};" for k, colour in enumerate(COLOURS)) + "}\n"
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8") + colours + (picture.style if picture else "")
    script = (TEMPLATES / f"{name}.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    numbers = {"percent": percent, "number": number, "plain": plain}
    environment.filters |= numbers | {"level": level_text, "count": "{:,}".format}
    return environment.get_template(f"{name}.html").render(
        **facts,
        style=Markup(style),
        script=Markup(script),
        style_hash=csp_hash(style),
        script_hash=csp_hash(script),
        # Without "<", so that no label can end the element that holds it.
        data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
    )


def slider_levels(level: float) -> FloatArray:
    """Positions (L,) of the slider, at most 254: whole percentages, tenths above 90 %, and the level itself."""
    first = 50 if level >= 0.5 else 1
    grid = np.concatenate([np.arange(first, 90) / 100, np.arange(900, 1000) / 1000])
    return np.sort(np.append(grid[np.abs(grid - level) > 1e-9], level))


def entry_positions(p: FloatArray, levels: FloatArray) -> npt.NDArray[np.uint8]:
    """The first position at which each label (m, C) is in the set, len(levels) if at none: sets grow with the level."""
    outside = np.zeros(p.shape, dtype=np.uint8)
    for level in levels:
        outside += ~members(p, 1.0 - level)
    return outside


def percent(value: float) -> str:
    """A share in per cent, or a dash if it is not a number."""
    return f"{100 * value:.1f}\u00a0%" if isfinite(value) else "–"


def level_text(level: float) -> str:
    """A confidence level in per cent, with as many digits as it needs."""
    return f"{100 * level:.6g}\u00a0%"


def number(value: float) -> str:
    """A number, or a dash if it is not a number."""
    return f"{value:.3f}" if isfinite(value) else "–"


def plain(value: float) -> str:
    """A number of any size in four digits, or a dash if it is not finite."""
    return f"{value:.4g}" if isfinite(value) else "–"


def checked(
    p: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, classes: npt.ArrayLike | None
) -> tuple[dict[str, FloatArray], list[str], Codes]:
    """p-values (m, C) by name, labels (C,) as text, and the column of each true label (m,)."""
    # Each method has its own colour and style of line.
    most = len(COLOURS) * len(STYLES)
    if not isinstance(p, Mapping) or not 1 <= len(p) <= most:
        given = f"{len(p)} methods" if isinstance(p, Mapping) else type(p).__name__
        raise ValueError(f"p must map 1 to {most} names of methods to p-values (m, C), got {given}.")
    values = {str(name): check_p(value) for name, value in p.items()}
    shape = next(iter(values.values())).shape
    for name, value in values.items():
        if value.shape != shape:
            raise ValueError(
                f"p[{name!r}] has shape {value.shape}, the first method's {shape}; give all for the same objects."
            )
    codes, labels = encode(y, classes, shape)
    # Labels that no method knows: they are in no set.
    values = {name: widened(value, len(labels)) for name, value in values.items()}
    return values, [str(label) for label in labels], codes


def widened(columns: FloatArray, width: int) -> FloatArray:
    """Columns (m, C) with zeros behind them, as wide as asked for."""
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def covered_by_class(p: FloatArray, codes: Codes, labels: list[str], level: float) -> list[tuple[str, int, int]]:
    """For each label that has objects: the label, the number of its objects covered, the number of its objects."""
    covered = prediction_sets(p, level)[np.arange(len(p)), codes]
    return [(labels[k], int(covered[codes == k].sum()), int((codes == k).sum())) for k in np.unique(codes)]


def base64(values: npt.NDArray[Any]) -> str:
    """The bytes of an array as text."""
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()


def csp_hash(text: str) -> str:
    """The hash by which the page's content security policy admits an inline style or script; no other one runs."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
