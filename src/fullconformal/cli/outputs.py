"""What the commands on a saved predictor write and print: tables of sets, figures of them, facts about the predictor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich import box
from rich.table import Table

from fullconformal.cli.printing import Printer
from fullconformal.cli.saved import is_regressor, read_new, warnings_of
from fullconformal.cli.schema import Schema, as_words, listed, stripped
from fullconformal.cli.tables import read_table, with_target
from fullconformal.metrics.estimates import wilson
from fullconformal.sets import as_labels, prediction_sets

# Of the table that `predict` prints: by heading, the fact and how it is written.
SETS = {"mean set size": ("mean_size", "{:.2f}"), "one label": ("one_label", "{:.1%}"), "empty": ("empty", "{:.1%}")}
WIDTHS = {
    "mean width": ("mean_width", "{:.4g}"),
    "median width": ("median_width", "{:.4g}"),
    "infinite": ("infinite", "{:.1%}"),
}


def as_columns(
    classes: Any, point: Any, p: np.ndarray, sets: np.ndarray, levels: list[float], lists: bool
) -> dict[str, Any]:
    """The columns to write: point predictions, sets (m, C, L) as lists or joined by |, p-values (m, C)."""
    columns = {"prediction": point}
    for k, level in enumerate(levels):
        labels = as_labels(sets[:, :, k], classes)
        columns[f"set_{level:g}"] = [row.tolist() if lists else "|".join(map(str, row)) for row in labels]
    return columns | {f"p_{label}": p[:, c] for c, label in enumerate(classes)}


def predicted(
    clf: Any,
    X: Any,
    levels: list[float],
    frame: pd.DataFrame,
    target: str,
    never_empty: bool,
    lists: bool,
    printer: Printer,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The columns to write, sets and p-values, and the facts to print."""
    joined = [str(label) for label in clf.classes_ if "|" in str(label)]
    if joined and not lists:
        printer.note(
            f"sets are labels joined by |, and {listed(joined)} contains it; -o sets.parquet keeps them apart."
        )
    # Warns if there are too few training points for a level, which the p-values of all rows do not.
    clf.warn_unreachable(np.asarray(levels))
    p, point = clf.predict_epsilon(X), clf.predict(X)
    proba = clf.predict_proba(X) if never_empty else None
    sets = prediction_sets(p, levels, allow_empty=not never_empty, proba=proba)
    columns = as_columns(clf.classes_, point, p, sets, levels, lists)
    return columns, measure(sets, levels, *true_labels(frame, target, clf.classes_, printer))


def true_labels(
    frame: pd.DataFrame, target: str, classes: Any, printer: Printer
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which rows (m,) have a label, and whether (m, C) it is that of the column; with a note on labels of no column."""
    if target not in frame.columns:
        return np.zeros(len(frame), dtype=bool), np.zeros((len(frame), len(classes)), dtype=bool)
    numeric, given = classes.dtype.kind in "biuf", stripped(frame[target])
    values = (pd.to_numeric(given, errors="coerce") if numeric else as_words(given)).to_numpy()
    labelled = given.notna().to_numpy()
    truth = values[:, None] == (classes if numeric else classes.astype(object))
    unseen = given[labelled & ~truth.any(axis=1)]
    if len(unseen):
        few = listed([str(value) for value in unseen.unique()[:3]])
        printer.note(f"{target!r} holds labels unseen in training in {len(unseen):,} rows ({few}); no set holds them.")
    return labelled, truth


def measure(
    sets: npt.NDArray[np.bool_], levels: list[float], labelled: npt.NDArray[np.bool_], truth: npt.NDArray[np.bool_]
) -> list[dict[str, Any]]:
    """For each level the mean size of the sets (m, C, L), the shares with one label and with none, and the coverage."""
    facts = []
    for k, level in enumerate(levels):
        sizes = sets[:, :, k].sum(axis=1)
        fact: dict[str, Any] = {"confidence_level": level, "mean_size": float(sizes.mean())}
        fact |= {"one_label": float((sizes == 1).mean()), "empty": float((sizes == 0).mean())}
        if labelled.any():
            fact |= coverage_of(np.any(sets[labelled, :, k] & truth[labelled], axis=1))
        facts.append(fact)
    return facts


def coverage_of(covered: Any) -> dict[str, Any]:
    """The share of rows (m,) that are covered, its interval, and their number."""
    m = len(covered)
    low, high = wilson(int(covered.sum()), m)
    return {"coverage": float(covered.mean()), "coverage_low": low, "coverage_high": high, "labelled_rows": m}


def show(printer: Printer, facts: list[dict[str, Any]], target: str) -> None:
    """Print the facts about sets, or about intervals, as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    heads, kind = (SETS, "sets") if "mean_size" in facts[0] else (WIDTHS, "intervals")
    covered = "coverage" in facts[0]
    for head in ("confidence", *heads, *["coverage"] * covered):
        table.add_column(head, justify="right", no_wrap=True)
    for fact in facts:
        known = ((fact[key], form) for key, form in heads.values())
        cells = ["–" if value is None else form.format(value) for value, form in known]
        told = "{coverage:.1%} ({coverage_low:.1%} to {coverage_high:.1%})".format(**fact) if covered else ""
        table.add_row(f"{fact['confidence_level']:.4g}", *cells, *[told] * covered)
    printer.say(table)
    if covered:
        rows = f"{facts[0]['labelled_rows']:,} labelled rows"
        printer.say(f"\ncoverage: share of the {kind} that hold {target!r}, of {rows}, and its 95% interval")


def facts_of(clf: Any, notes: dict[str, Any]) -> dict[str, Any]:
    """What is known about a predictor, as JSON."""
    from fullconformal.models.requirements import split_pipeline

    final = split_pipeline(clf.estimator)[1]
    facts: dict[str, Any] = {
        "predictor": type(clf).__name__,
        "guarantee": clf.guarantee_.word,
        "model": "built-in regression" if final is None else " ".join(repr(final).split()),
        "confidence_level": clf.confidence_level,
        "class_conditional": bool(getattr(clf, "class_conditional", False)),
        "classes": [str(label) for label in getattr(clf, "classes_", [])],
    }
    if not facts["classes"]:
        facts |= {"method": f"{clf.display_name}; guarantee {clf.guarantee_.word}", "points": clf.n_samples_fit_}
    elif hasattr(clf, "method_"):
        facts |= {"method": f"{clf.method_}, {clf.scheme}", "points": clf.n_samples_fit_}
        diagnostics = clf.diagnose()
        facts |= {"diagnostics": str(diagnostics), "warnings": diagnostics.warnings}
    facts["warnings"] = list(dict.fromkeys([*facts.get("warnings", []), *warnings_of(notes)]))
    # Notes are the file's own words.
    kinds = {"table": dict, "source": str}
    return facts | {key: notes[key] for key, kind in kinds.items() if isinstance(notes.get(key), kind)}


def known_labels(frame: pd.DataFrame, clf: Any, schema: Schema, table: Path) -> Any:
    """The target (m,), all of whose labels the predictor must know."""
    y = schema.labels(frame)
    unknown = sorted(set(y.tolist()) - set(clf.classes_.tolist()))
    if unknown:
        raise ValueError(f"{table} has labels that the predictor does not know: {unknown[:5]}; leave these rows out.")
    return y


def identifiers(kept: pd.DataFrame) -> list[str] | None:
    """What the objects are called: the columns that are kept, joined."""
    words = [as_words(column).fillna("missing") for _, column in kept.items()]
    return [" · ".join(cells) for cells in zip(*words, strict=True)] if words else None


def written_p(path: Path, clf: Any, schema: Schema, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
    """The p-values (m, C) that `predict` wrote for a table; three rows are computed again, to see that they are this predictor's."""

    if is_regressor(clf):
        raise ValueError(
            "--sets goes with classes: a page on intervals needs more levels than `predict` writes; leave it out."
        )
    found, names = read_table(path), [f"p_{label}" for label in clf.classes_]
    if absent := [name for name in names if name not in found.columns]:
        raise ValueError(f"--sets {path} lacks the columns {listed(absent)}; give what `fullconformal predict` wrote.")
    m = len(frame)
    if len(found) != m:
        raise ValueError(
            f"--sets {path} has {len(found):,} rows and the table {m:,}; give what `predict` wrote for it."
        )
    p: npt.NDArray[np.float64] = found[names].to_numpy(np.float64)
    few = np.unique([0, m // 2, m - 1])
    # Six digits are written.
    if not np.allclose(p[few], clf.predict_epsilon(schema.objects(frame).iloc[few]), rtol=1e-5, atol=1e-9):
        raise ValueError(
            f"--sets {path} has other p-values than the predictor gives for these rows; leave it out, or predict them again."
        )
    return p


def split_beside(
    clf: Any, schema: Schema, table: Path, sep: str | None, drop_missing: bool, printer: Printer
) -> dict[str, Any]:
    """Split CP with the same model, fitted to the table that the predictor was fitted on; nothing where that cannot be."""
    from fullconformal import SplitConformalClassifier, SplitConformalRegressor

    frame = with_target(read_new(table, clf, schema, sep=sep), schema.target, "the target", drop_missing, printer)
    X = schema.objects(frame)
    known = {"confidence_level": clf.confidence_level, "random_state": 0}
    split: Any
    if is_regressor(clf):
        split, y = SplitConformalRegressor(clf.estimator, **known), schema.quantities(frame)
    else:
        split = SplitConformalClassifier(clf.estimator, class_conditional=clf.class_conditional, **known)
        y = schema.labels(frame)
    if isinstance(clf, type(split)):
        printer.note("the predictor is split CP itself: nothing is shown beside it.")
        return {}
    try:
        return {"split CP": split.fit(X, y)}
    except ValueError as error:
        printer.note(f"split CP is not shown beside it: {error}")
        return {}
