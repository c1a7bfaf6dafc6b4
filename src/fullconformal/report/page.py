"""The report: one HTML file that holds everything it shows and asks nothing of a network.

The page is a template, a style sheet and a script (``templates/``), joined here with the numbers they show. Membership in a set is
decided here, by the rule of `fullconformal.sets`, for every position of the page's slider; the script only counts and draws.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import mean
from fullconformal.report.pictures import Sheet, sheet
from fullconformal.report.plots import COLOURS, STYLES, wilson
from fullconformal.report.rows import rows_at
from fullconformal.sets import check_levels, check_p, members, prediction_sets

FloatArray = npt.NDArray[np.float64]
Codes = npt.NDArray[np.intp]  # places of labels or objects

MAX_OBJECTS = 1_000  # shown one by one; the numbers are of all
MAX_METHODS = len(COLOURS) * len(STYLES)
TEMPLATES = Path(__file__).parent / "templates"


def write_report(path: str | Path, p: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, **options: Any) -> Path:
    """Write the page of `render_report` to a file and return its path; nothing half-written is ever left under that name.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_report(f"{folder}/report.html", {"ours": [[0.7, 0.05], [0.3, 0.2]]}, [0, 1]).name
    'report.html'
    """
    path = check_folder(path)
    page = render_report(p, y, **options)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def check_folder(path: str | Path) -> Path:
    """The path, or an error where its folder does not exist."""
    path = Path(path)
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(
            f"path={str(path)!r}: the folder {path.resolve().parent} does not exist; create it first."
        )
    return path


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
        p-values by the name of the method. The first method is the one whose sets are shown; the others stand beside it.
    y : array (m,)
        True labels.
    classes : array (C,), optional
        Label of each column of the p-values; 0, ..., C - 1 unless given.
    confidence_level : float, default=0.9
        Where the page's slider starts.
    title : str, default="Prediction sets"
    n_train : int, optional
        Number of points the classifier learnt from.
    images : array (m, H, W), (m, H, W, channels) or (m, channels, H, W), optional
        Pictures of the objects, dark where the numbers are low.
    rows : array or DataFrame (m, d), optional
        The objects as rows of a table, shown where there are no images.
    feature_names : sequence of d names, optional
        Names of the columns of ``rows``; a DataFrame brings its own.
    proba : array (m, C), optional
        Probabilities of the model, for its point prediction.
    diagnostics : sequence of str, optional
        What to know, a sentence each; a warning begins with ``!``.

    Returns
    -------
    str
        Up to 1,000 objects are shown one by one (evenly spaced, where there are more); the numbers are of all.

    Examples
    --------
    >>> page = render_report({"ours": [[0.7, 0.05], [0.3, 0.2]]}, ["no", "yes"], classes=["no", "yes"])
    >>> page[:15]
    '<!doctype html>'
    """
    values, labels, codes = _checked(p, y, classes)
    level, m = float(check_levels(confidence_level)), len(codes)
    shown = np.arange(m) if m <= MAX_OBJECTS else np.linspace(0, m - 1, MAX_OBJECTS).astype(np.intp)
    picture = None if images is None else sheet(_one_each("images", np.asarray(images), m)[shown])
    table = None if rows is None or picture else rows_at(_one_each("rows", rows, m), shown, feature_names)
    probabilities = None if proba is None else _probabilities(proba, next(iter(values.values())).shape)
    data = _data(values, labels, codes, level, shown, probabilities)
    data |= {"sheet": picture and picture._asdict() | {"uri": None}, "rows": table and table._asdict()}
    facts = _facts(values, labels, codes, level, probabilities, diagnostics)
    return _joined(data, {"title": title, "n_train": n_train, "n_shown": len(shown), **facts}, picture)


def _data(
    values: dict[str, FloatArray], labels: list[str], codes: Codes, level: float, shown: Codes, proba: FloatArray | None
) -> dict[str, Any]:
    """What the page's script counts and draws."""
    levels, main = slider_levels(level), next(iter(values.values()))
    return {
        "levels": levels.tolist(),
        "start": int(np.searchsorted(levels, level)),
        "classes": labels,
        "truth": codes.tolist(),
        "methods": list(values),
        "entry": [_base64(entry_positions(value, levels)) for value in values.values()],
        "shown": None if len(shown) == len(codes) else shown.tolist(),
        "p": _base64(main[shown].astype("<f4")),
        "predicted": None if proba is None else {
            "label": proba[shown].argmax(axis=1).tolist(), "probability": proba[shown].max(axis=1).round(3).tolist()
        },
    }  # fmt: skip


def _facts(
    values: dict[str, FloatArray], labels: list[str], codes: Codes, level: float, proba: FloatArray | None,
    diagnostics: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What the page says before its script runs."""
    return {
        "m": len(codes),
        "classes": labels,
        "level": level,
        "methods": {name: _numbers(value, codes, level) for name, value in values.items()},
        "by_class": _by_class(next(iter(values.values())), codes, labels, level),
        "accuracy": None if proba is None else mean(proba.argmax(axis=1) == codes),
        "warnings": [line[1:].strip() for line in diagnostics if line.startswith("!")],
        "notes": [line for line in diagnostics if not line.startswith("!")],
    }


def _joined(data: dict[str, Any], facts: dict[str, Any], picture: Sheet | None) -> str:
    """The template with the style sheet, the script and what they show."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    style = (TEMPLATES / "report.css").read_text(encoding="utf-8") + _colours() + (picture.style if picture else "")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "level": level_text, "count": "{:,}".format}
    return environment.get_template("report.html").render(
        **facts,
        style=Markup(style),
        script=Markup(script),
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
        # No "<" in it, so no label can end the element that holds it.
        data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
    )


def slider_levels(level: float) -> FloatArray:
    """Positions (L,) of the slider, at most 254: whole per cents, tenths above 90, and the level itself."""
    first = 50 if level >= 0.5 else 1
    grid = np.concatenate([np.arange(first, 90) / 100, np.arange(900, 1000) / 1000])
    return np.sort(np.append(grid[np.abs(grid - level) > 1e-9], level))


def entry_positions(p: FloatArray, levels: FloatArray) -> npt.NDArray[np.uint8]:
    """The first position at which each label (m, C) is in the set, len(levels) where at none: sets are nested in the level."""
    outside = np.zeros(p.shape, dtype=np.uint8)
    for level in levels:
        outside += ~members(p, 1.0 - level)
    return outside


def percent(value: float) -> str:
    """A share in per cent, or a dash where there is none."""
    return f"{100 * value:.1f}\u00a0%" if isfinite(value) else "–"


def level_text(level: float) -> str:
    """A confidence level in per cent, with the digits it needs."""
    return f"{100 * level:.6g}\u00a0%"


def number(value: float) -> str:
    """A number, or a dash where there is none."""
    return f"{value:.3f}" if isfinite(value) else "–"


def _checked(
    p: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, classes: npt.ArrayLike | None
) -> tuple[dict[str, FloatArray], list[str], Codes]:
    """p-values by name, labels (C,) as text, and the column of each true label (m,)."""
    if not isinstance(p, Mapping) or not 1 <= len(p) <= MAX_METHODS:
        given = f"{len(p)} methods" if isinstance(p, Mapping) else type(p).__name__
        raise ValueError(f"p must map 1 to {MAX_METHODS} names of methods to p-values (m, C), got {given}.")
    values = {str(name): check_p(value) for name, value in p.items()}
    shape = next(iter(values.values())).shape
    for name, value in values.items():
        if value.shape != shape:
            raise ValueError(
                f"p[{name!r}] has shape {value.shape}, the first method's {shape}; give all for the same objects."
            )
    columns = np.arange(shape[1]) if classes is None else np.asarray(classes)
    # The metrics check y against the classes, in words.
    metrics.coverage(np.ones(shape, dtype=bool), y, columns)
    place = {label: k for k, label in enumerate(columns.tolist())}
    return values, [str(c) for c in columns.tolist()], np.array([place[label] for label in np.asarray(y).tolist()])


def _one_each(name: str, values: Any, m: int) -> Any:
    if len(values) != m:
        raise ValueError(f"{name} must hold one for each of the {m} objects of y, got {len(values)}.")
    return values


def _probabilities(proba: npt.ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """Checked probabilities (m, C)."""
    values = np.asarray(proba, dtype=np.float64)
    if values.shape != shape or not np.isfinite(values).all():
        raise ValueError(f"proba must be finite and of the shape of the p-values, {shape}, got shape {values.shape}.")
    return values


def _numbers(p: FloatArray, codes: Codes, level: float) -> dict[str, Any]:
    """The metrics of one method, and the 95 % interval of its coverage."""
    covered = prediction_sets(p, level)[np.arange(len(p)), codes]
    return {**metrics.summary(p, codes, level), "interval": wilson(int(covered.sum()), len(covered))}


def _by_class(p: FloatArray, codes: Codes, labels: list[str], level: float) -> list[tuple[str, int, int]]:
    """Label, number of its objects covered, number of its objects; labels without objects are left out."""
    covered = prediction_sets(p, level)[np.arange(len(p)), codes]
    return [
        (label, int(covered[codes == k].sum()), int((codes == k).sum()))
        for k, label in enumerate(labels)
        if (codes == k).any()
    ]


def _base64(values: npt.NDArray[Any]) -> str:
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _csp_hash(text: str) -> str:
    """What the page's content security policy knows an inline style or script by; no other one runs."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _colours() -> str:
    """The palette of the figures, as variables of the style sheet."""
    return ":root{" + "".join(f"--light-{k}:{colour};" for k, colour in enumerate(COLOURS)) + "}\n"
