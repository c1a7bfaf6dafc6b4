"""What the commands do with a predictor: save it, load it, read tables for it, and write and print what it says of them."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich import box
from rich.table import Table

from fullconformal.cli.printing import Printer
from fullconformal.cli.schema import CODE, Schema, TableError, as_words, is_number, listed, stripped
from fullconformal.cli.tables import file_size, is_parquet, is_sheet, is_tabbed, read_table, with_target
from fullconformal.metrics.estimates import wilson
from fullconformal.sets import as_labels, prediction_sets

# Of the table that `predict` prints: by heading, the fact and how it is written.
SETS = {"mean set size": ("mean_size", "{:.2f}"), "one label": ("one_label", "{:.1%}"), "empty": ("empty", "{:.1%}")}
WIDTHS = {
    "mean width": ("mean_width", "{:.4g}"),
    "median width": ("median_width", "{:.4g}"),
    "infinite": ("infinite", "{:.1%}"),
}


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


def save_predictor(
    clf: Any, out: Path, schema: Schema, X: pd.DataFrame, notes: dict[str, Any], facts: dict[str, Any], printer: Printer,
    factory: str | None = None,
) -> None:  # fmt: skip
    """Save what was fitted to objects X (n, d) of a table, with notes for later commands, and print facts about the fit."""
    from fullconformal.estimators.saving import save

    notes = {"table": asdict(schema), "rows": marks_as_text(X)} | notes
    save(clf.set_params(verbose=0), out, factory=factory, notes=notes)
    same = {"model": notes["model"], "warnings": notes["warnings"], "confidence_level": clf.confidence_level}
    printer.json(facts | same | {"guarantee": clf.guarantee_.word} | asdict(schema) | {"out": str(out)})
    printer.say(f"fitted in {facts['seconds']:.1f} s, saved in {out} ({file_size(out)})")


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


# What it says of a table -----------------------------------------------------------------------------------------------


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
    """The columns to write, point predictions, sets as lists or joined by |, and p-values; and the facts to print."""
    joined = [str(label) for label in clf.classes_ if "|" in str(label)]
    if joined and not lists:
        printer.note(
            f"sets are labels joined by |, and {listed(joined)} contains it; -o sets.parquet keeps them apart."
        )
    # Warns if there are too few training points for a level, which the p-values of all rows do not.
    clf.warn_unreachable(np.asarray(levels))
    p = clf.predict_epsilon(X)
    proba = clf.predict_proba(X) if never_empty else None
    sets = prediction_sets(p, levels, allow_empty=not never_empty, proba=proba)
    columns = {"prediction": clf.predict(X)}
    for k, level in enumerate(levels):
        labels = as_labels(sets[:, :, k], clf.classes_)
        columns[f"set_{level:g}"] = [row.tolist() if lists else "|".join(map(str, row)) for row in labels]
    columns |= {f"p_{label}": p[:, c] for c, label in enumerate(clf.classes_)}
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
