"""`fullconformal predict`, `inspect` and `report`: commands on a saved predictor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pandas as pd
from rich import box
from rich.table import Table

from fullconformal.cli import tables
from fullconformal.cli.schema import as_words, check_name, listed
from fullconformal.cli.tables import LEVEL, PATH, Printer
from fullconformal.sets import as_labels, prediction_sets


@click.command()
@click.argument("predictor", type=PATH)
@click.argument("table", type=PATH)
@click.option("-o", "--out", type=PATH, default=Path("-"), show_default=True,
              help="The file to write the sets to: .csv or .parquet, or - for standard output.")  # fmt: skip
@click.option("--confidence", type=LEVEL, multiple=True, help="A confidence level; can be repeated.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="A column of the table to copy; can be repeated.")
@tables.factory_option
@tables.quiet_option
@tables.json_option
def predict(
    predictor: Path, table: Path, out: Path, confidence: tuple[float, ...], keep: tuple[str, ...], model: str | None,
    quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compute the prediction sets of the saved PREDICTOR for the rows of TABLE (CSV or Parquet).

    The output has these columns: the likeliest label, the set at each confidence level (labels joined by |), and the p-value of every
    label. If TABLE has the column to predict, the coverage is printed.
    """
    tables.check_output(out, predictor, table)
    printer = Printer(quiet, as_json, out)
    clf, schema = tables.load_with_schema(predictor, model)
    # In CSV files, columns that are copied are kept as they are written.
    copied = [] if tables.is_parquet(out) else [name for name in keep if name not in schema.numbers]
    frame = tables.read_new(table, clf, schema, copied)
    for name in keep:
        check_name(frame, name, "--keep")
    X = tables.objects_of(frame, clf, schema, printer)
    joined = [str(label) for label in clf.classes_ if "|" in str(label)]
    if joined and not tables.is_parquet(out):
        printer.note(
            f"sets are labels joined by |, and {listed(joined)} contains it; -o sets.parquet keeps them apart."
        )
    levels = sorted(set(confidence)) or [clf.confidence_level]
    with printer.warnings_as_notes():
        # Warns if there are too few training points for a level, which the p-values of all rows do not.
        clf.warn_unreachable(np.asarray(levels))
        clf.set_params(verbose=printer.verbose)
        p = clf.predict_epsilon(X)
        point = clf.predict(X)
    sets = prediction_sets(p, levels)
    facts = measure(sets, levels, *true_labels(frame, schema.target, clf.classes_, printer))
    tables.write_table(
        as_frame(frame[list(keep)], clf.classes_, point, p, sets, levels, tables.is_parquet(out)), out, printer
    )
    printer.json({"rows": len(frame), "levels": facts, "out": str(out)})
    show(printer, facts, schema.target)
    if not printer.to_stderr:
        printer.say(f"{len(frame):,} rows in {out}")


def as_frame(
    kept: pd.DataFrame, classes: Any, point: Any, p: np.ndarray, sets: np.ndarray, levels: list[float], lists: bool
) -> pd.DataFrame:
    """The table to write: kept columns, point predictions, sets (m, C, L) as lists or joined by |, p-values (m, C)."""
    # As objects, numbers are written with all their digits.
    columns: dict[str, Any] = dict((kept if lists else kept.astype(object)).items())
    columns["prediction"] = point
    for k, level in enumerate(levels):
        labels = as_labels(sets[:, :, k], classes)
        columns[f"set_{level:g}"] = [row.tolist() if lists else "|".join(map(str, row)) for row in labels]
    columns |= {f"p_{label}": p[:, c] for c, label in enumerate(classes)}
    return pd.DataFrame(columns)


def true_labels(
    frame: pd.DataFrame, target: str, classes: Any, printer: Printer
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which rows (m,) have a label, and whether (m, C) it is that of the column; with a note on labels of no column."""
    if target not in frame.columns:
        return np.zeros(len(frame), dtype=bool), np.zeros((len(frame), len(classes)), dtype=bool)
    numeric = classes.dtype.kind in "biuf"
    values = (pd.to_numeric(frame[target], errors="coerce") if numeric else as_words(frame[target])).to_numpy()
    labelled = frame[target].notna().to_numpy()
    truth = values[:, None] == (classes if numeric else classes.astype(object))
    unseen = frame[target][labelled & ~truth.any(axis=1)]
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
            covered = (sets[labelled, :, k] & truth[labelled]).any(axis=1)
            fact |= {"coverage": float(covered.mean()), "labelled_rows": int(labelled.sum())}
        facts.append(fact)
    return facts


def show(printer: Printer, facts: list[dict[str, Any]], target: str) -> None:
    """Print the facts as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    covered = "coverage" in facts[0]
    for head in ("confidence", "mean set size", "one label", "empty", *["coverage"] * covered):
        table.add_column(head, justify="right", no_wrap=True)
    for fact in facts:
        cells = [f"{fact['confidence_level']:.4g}", f"{fact['mean_size']:.2f}"]
        cells += [f"{fact[share]:.1%}" for share in ("one_label", "empty")]
        if covered:
            rate, n = fact["coverage"], fact["labelled_rows"]
            cells.append(f"{rate:.1%} ± {(rate * (1 - rate) / n) ** 0.5:.1%}")
        table.add_row(*cells)
    printer.say(table)
    if covered:
        printer.say(
            f"\ncoverage: share of the sets that hold {target!r}, of {facts[0]['labelled_rows']:,} labelled rows"
        )


@click.command()
@click.argument("predictor", type=PATH)
@tables.factory_option
@tables.json_option
def inspect(predictor: Path, model: str | None, as_json: bool) -> None:
    """Describe the saved PREDICTOR: its method, classes, columns and diagnostics."""
    clf, notes = tables.load_predictor(predictor, model)
    facts = facts_of(clf, notes)
    facts["file"] = {"path": str(predictor), "bytes": predictor.stat().st_size}
    printer = Printer(False, as_json)
    printer.json(facts)
    printer.say(f"{facts['predictor']}, {tables.file_size(predictor)}")
    rows = {
        "method": facts.get("method"),
        "model": facts["model"],
        "confidence level": f"{facts['confidence_level']:g}",
        "class-conditional": "yes" if facts["class_conditional"] else None,
        "training points": f"{facts['points']:,}" if "points" in facts else None,
        "classes": facts["classes"],
        **{name.replace("_", " "): value for name, value in facts.get("table", {}).items()},
        "from": facts.get("source"),
    }
    for name, value in rows.items():
        if value:
            printer.say(f"  {name:<18}{listed(value, most=12, show=str) if isinstance(value, list) else value}")
    if "diagnostics" in facts:
        printer.say("\n" + facts["diagnostics"])


def facts_of(clf: Any, notes: dict[str, Any]) -> dict[str, Any]:
    """What is known about a predictor, as JSON."""
    from fullconformal.models.requirements import split_pipeline

    final = split_pipeline(clf.estimator)[1]
    facts: dict[str, Any] = {
        "predictor": type(clf).__name__,
        "model": "logistic regression (built-in)" if final is None else " ".join(repr(final).split()),
        "confidence_level": clf.confidence_level,
        "class_conditional": bool(clf.class_conditional),
        "classes": [str(label) for label in clf.classes_],
    }
    if hasattr(clf, "method_"):
        facts |= {"method": f"{clf.method_}, {clf.scheme}", "points": clf.n_samples_fit_}
        try:
            diagnostics = clf.diagnose()
            facts |= {"diagnostics": str(diagnostics), "warnings": diagnostics.warnings}
        except ValueError as error:
            # Exact methods have nothing to diagnose.
            facts |= {"diagnostics": str(error), "warnings": []}
    # Notes are the file's own words.
    kinds = {"table": dict, "source": str}
    return facts | {key: notes[key] for key, kind in kinds.items() if isinstance(notes.get(key), kind)}


@click.command()
@click.argument("predictor", type=PATH)
@click.argument("table", type=PATH)
@click.option("-o", "--out", type=PATH, default=Path("report.html"), show_default=True,
              help="The HTML file to write.")  # fmt: skip
@click.option("--title", default=None, help="The title of the page; by default it names the two files.")
@tables.factory_option
@tables.missing_option
@tables.quiet_option
def report(
    predictor: Path, table: Path, out: Path, title: str | None, model: str | None, drop_missing: bool, quiet: bool
) -> None:
    """Write an HTML page about the sets of the saved PREDICTOR for the labelled rows of TABLE (CSV or Parquet).

    Use rows that it was not fitted on.
    """
    tables.check_output(out, predictor, table)
    printer = Printer(quiet)
    clf, schema = tables.load_with_schema(predictor, model)
    frame = tables.read_new(table, clf, schema)
    frame = tables.with_target(frame, schema.target, "the target", drop_missing, printer)
    y = schema.labels(frame)
    unknown = sorted(set(y.tolist()) - set(clf.classes_.tolist()))
    if unknown:
        raise ValueError(f"{table} has labels that {predictor} does not know: {unknown[:5]}; leave these rows out.")
    X = tables.objects_of(frame, clf, schema, printer)
    clf.set_params(verbose=printer.verbose)
    with printer.warnings_as_notes():
        clf.report(X, y, out, title=title or f"{predictor.stem} on {table.name}")
    printer.say(f"{len(y):,} rows in {out.resolve()} ({tables.file_size(out)}): open it in a browser")
