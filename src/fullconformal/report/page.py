"""The report: one HTML file that contains everything it shows and needs no network.

The page is a template, a style sheet and a script (``templates/``), filled in with the numbers they show. Membership in a set is
decided here, by the rule of `fullconformal.sets`, for every position of the page's slider; the script only counts and draws.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import metrics
from fullconformal.metrics.estimates import FloatArray, encode, wilson
from fullconformal.report.objects import (
    chosen_columns,
    columns_of,
    identified,
    parts,
    rows_at,
    sheet,
    shown_of,
)
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
    check_writable(path)
    return write_page(path, render_report(p, y, **options))


def write_page(path: str | Path, page: str) -> Path:
    """Write a page to a file, completely or not at all, and return its path."""
    with finished_or_nothing(path) as partial:
        partial.write_text(page, encoding="utf-8")
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
    identifiers: Sequence[Any] | None = None,
    by: Any = None,
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
        The objects as rows of a table, shown if there are no images; coverage is shown by their columns.
    feature_names : sequence of d names, optional
        Names of the columns of ``rows``; a DataFrame has its own.
    proba : array (m, C), optional
        Probabilities of the model, for its point prediction.
    identifiers : sequence of m names, optional
        What the objects are called; by default they are numbered.
    by : name, sequence of names, or mapping of names to arrays (m,), optional
        Columns to show the coverage by first: those of ``rows``, or others.
    diagnostics : sequence of str, optional
        Sentences to show; a warning begins with ``!``.

    Returns
    -------
    str
        It shows up to 1,000 objects one by one: missed ones, and others evenly spaced; the numbers are computed from all.

    Examples
    --------
    >>> page = render_report({"ours": [[0.7, 0.05], [0.3, 0.2]]}, ["no", "yes"], classes=["no", "yes"])
    >>> page[:15]
    '<!doctype html>'
    """
    values, labels, codes = checked(p, y, classes)
    level, m = float(check_levels(confidence_level)), len(codes)
    check_lengths(m, images=images, rows=rows)
    probabilities = checked_proba(proba, np.shape(next(iter(p.values()))))
    sets = prediction_sets(next(iter(values.values())), level)
    covered = sets[np.arange(m), codes]
    shown = shown_of(~covered, 1000)
    picture = None if images is None else sheet(np.asarray(images)[shown])
    columns = [] if picture else columns_of(rows, feature_names)
    divided = parts(chosen_columns(by, m, columns))
    names = identified(identifiers, m)
    data = {
        **data_of_sets(values, codes, labels, level, shown, probabilities),
        "identifiers": names and [names[i] for i in shown],
        "parts": [part._asdict() | {"of": base64(part.of)} for part in divided],
        # The true label is the first one.
        "part": int(bool(by is not None and divided)),
        "sheet": picture and picture._asdict() | {"uri": None},
        "rows": None if rows is None or picture else rows_at(rows, shown, feature_names)._asdict(),
    }
    numbers = {name: numbers_at(value, codes, level) for name, value in values.items()}
    facts = {
        **facts_of(title, n_train, m, len(shown), level, numbers, diagnostics),
        "classes": labels,
        "named": names is not None,
        "by_class": counted(covered, codes, labels),
        "by_size": counted(covered, sets.sum(axis=1), ["none", *map(str, range(1, len(labels) + 1))]),
        "accuracy": None if probabilities is None else float((probabilities.argmax(axis=1) == codes).mean()),
    }
    return fill_template("report", data, facts, picture.style if picture else "", number)


def data_of_sets(
    values: dict[str, FloatArray], codes: Codes, labels: list[str], level: float, shown: Codes, proba: FloatArray | None
) -> dict[str, Any]:
    """What the page's script counts and draws."""
    levels, main = slider_levels(level), next(iter(values.values()))
    guess = None if proba is None else proba[shown]
    return {
        "levels": levels.tolist(),
        "start": int(np.searchsorted(levels, level)),
        "classes": labels,
        "truth": codes.tolist(),
        "methods": list(values),
        "entry": [base64(entry_positions(value, levels)) for value in values.values()],
        "shown": None if len(shown) == len(codes) else shown.tolist(),
        "p": base64(main[shown].astype("<f4")),
        "predicted": None if guess is None else {
            "label": guess.argmax(axis=1).tolist(), "probability": guess.max(axis=1).round(3).tolist()
        },
    }  # fmt: skip


def numbers_at(p: FloatArray, codes: Codes, level: float) -> dict[str, float]:
    """What the page says of p-values (m, C) at a level, by the names that its script has."""
    found, m = metrics.summary(p, codes, level), len(codes)
    out: dict[str, float] = {}
    for name, metric in (("coverage", "coverage"), ("singleton", "singleton_rate"), ("empty", "empty_rate")):
        low, high = wilson(round(found[metric].value * m), m)
        out |= {name: found[metric].value, f"{name}_low": low, f"{name}_high": high}
    for name, metric in (("size", "mean_size"), ("size_auc", "size_auc"), ("fuzziness", "observed_fuzziness")):
        out |= {name: found[metric].value, f"{name}_se": found[metric].se}
    return out


def facts_of(
    title: str, n_train: int | None, m: int, n_shown: int, level: float, numbers: Mapping[str, Mapping[str, float]],
    diagnostics: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What every page shows before its script runs."""
    main = next(iter(numbers))
    return {
        "title": title, "n_train": n_train, "m": m, "n_shown": n_shown, "level": level,
        "methods": numbers, "main": main, "found": numbers[main],
        "warnings": [line[1:].strip() for line in diagnostics if line.startswith("!")],
        "notes": [line for line in diagnostics if not line.startswith("!")],
    }  # fmt: skip


def fill_template(name: str, data: Any, facts: dict[str, Any], style: str, show: Callable[[float], str]) -> str:
    """The page: the template of a name with the style sheet, its script and what they show; `show` writes its numbers."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    colours = ":root{" + "".join(f"--light-{k}:{colour};" for k, colour in enumerate(COLOURS)) + "}\n"
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8") + colours + style
    scripts = [(TEMPLATES / f"{part}.js").read_text(encoding="utf-8") for part in ("base", name)]
    script = "\n".join(['"use strict";', "(() => {", *scripts, "})();"])
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": show, "count": "{:,}".format, "breakable": breakable}
    environment.filters["level"] = lambda level: f"{100 * level:.6g}\u00a0%"
    return (
        environment.get_template(f"{name}.html")
        .render(
            **facts,
            style=Markup(style),
            script=Markup(script),
            style_hash=csp_hash(style),
            script_hash=csp_hash(script),
            # Without "<", so that no label can end the element that holds it.
            data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
        )
        .lstrip()
    )


def breakable(title: str) -> Any:
    """A title that may be broken behind the marks that join the words of a file's name, and not within a word."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.findall(r"[^_./-]*[_./-]+|[^_./-]+", title))


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


def number(value: float) -> str:
    """A number, or a dash if it is not a number."""
    return f"{value:.3f}" if isfinite(value) else "–"


def check_lengths(m: int, **given: Any) -> None:
    """Raise unless each of what is given has one entry for each of the m labels."""
    for name, value in given.items():
        if value is not None and len(value) != m:
            raise ValueError(f"{name} must have one entry for each of the {m} labels of y, got {len(value)}.")


def checked_proba(proba: npt.ArrayLike | None, shape: tuple[int, ...]) -> FloatArray | None:
    """Probabilities (m, C), which must be finite and of this shape."""
    if proba is None:
        return None
    values = np.asarray(proba, dtype=np.float64)
    if values.shape != shape or not np.isfinite(values).all():
        raise ValueError(f"proba must be finite and have the shape of the p-values, {shape}, got shape {values.shape}.")
    return values


def checked(
    p: Mapping[str, npt.ArrayLike], y: npt.ArrayLike, classes: npt.ArrayLike | None
) -> tuple[dict[str, FloatArray], list[str], Codes]:
    """p-values (m, C) by name, labels (C,) as text, and the column of each true label (m,)."""
    check_methods("p", p, "p-values (m, C)")
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


def check_methods(name: str, given: Any, what: str) -> None:
    """Raise unless it maps names of methods to something: each has a colour and style of line of its own."""
    most = len(COLOURS) * len(STYLES)
    if not isinstance(given, Mapping) or not 1 <= len(given) <= most:
        found = f"{len(given)} methods" if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"{name} must map 1 to {most} names of methods to {what}, got {found}.")


def widened(columns: FloatArray, width: int) -> FloatArray:
    """Columns (m, C) with zeros behind them, as wide as asked for."""
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def counted(covered: npt.NDArray[np.bool_], codes: Codes, labels: list[str]) -> list[tuple[str, int, int]]:
    """For each code that objects (m,) have: its label, the number of its objects covered, the number of its objects."""
    return [(labels[k], int(covered[codes == k].sum()), int((codes == k).sum())) for k in np.unique(codes)]


def base64(values: npt.NDArray[Any]) -> str:
    """The bytes of an array as text."""
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()


def csp_hash(text: str) -> str:
    """The hash by which the page's content security policy admits an inline style or script; no other one runs."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
