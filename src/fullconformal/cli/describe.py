"""`fullconformal inspect` and `fullconformal report`: describe a saved predictor, and its sets for labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullconformal.cli.tables import (
    Printer,
    check_output,
    factory_option,
    file_size,
    json_option,
    load_predictor,
    load_with_schema,
    missing_option,
    objects_of,
    quiet_option,
    read_new,
    with_target,
)


@click.command()
@click.argument("predictor", type=click.Path(path_type=Path))
@factory_option
@json_option
def inspect(predictor: Path, model: str | None, as_json: bool) -> None:
    """Describe the saved PREDICTOR: its method, classes, columns and diagnostics."""
    from fullconformal.table import listed

    clf, notes = load_predictor(predictor, model)
    facts = facts_of(clf, notes if isinstance(notes, dict) else {})
    facts["file"] = {"path": str(predictor), "bytes": predictor.stat().st_size}
    printer = Printer(False, as_json)
    printer.json(facts)
    printer.say(f"{facts['predictor']}, {file_size(predictor)}")
    table = facts.get("table", {})
    rows = {
        "method": facts.get("method"),
        "model": facts["model"],
        "confidence level": f"{facts['confidence_level']:g}",
        "class-conditional": "yes" if facts["class_conditional"] else None,
        "training points": f"{facts['points']:,}" if "points" in facts else None,
        "classes": facts["classes"],
        "target": table.get("target"),
        "numbers": table.get("numbers"),
        "categories": table.get("categories"),
        "left out": table.get("left_out"),
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
    return facts | {key: notes[key] for key in ("table", "source") if key in notes}


@click.command()
@click.argument("predictor", type=click.Path(path_type=Path))
@click.argument("table", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True,
              help="The HTML file to write.")  # fmt: skip
@click.option("--title", default=None, help="The title of the page; by default it names the two files.")
@factory_option
@missing_option
@quiet_option
def report(
    predictor: Path, table: Path, out: Path, title: str | None, model: str | None, drop_missing: bool, quiet: bool
) -> None:
    """Write an HTML page about the sets of the saved PREDICTOR for the labelled rows of TABLE (CSV or Parquet).

    Use rows that it was not fitted on.
    """
    from fullconformal.table import check_name

    check_output(out, predictor, table)
    printer = Printer(quiet)
    clf, schema = load_with_schema(predictor, model)
    frame = read_new(table, clf, schema)
    check_name(frame, schema.target, "the target")
    frame = with_target(frame, schema.target, drop_missing, printer)
    y = schema.labels(frame)
    unknown = sorted(set(y.tolist()) - set(clf.classes_.tolist()))
    if unknown:
        raise ValueError(f"{table} has labels that {predictor} does not know: {unknown[:5]}; leave these rows out.")
    X = objects_of(frame, clf, schema, printer)
    clf.set_params(verbose=printer.verbose)
    with printer.warnings_as_notes():
        clf.report(X, y, out, title=title or f"{predictor.stem} on {table.name}")
    printer.say(f"{len(y):,} rows in {out.resolve()} ({file_size(out)}): open it in a browser")
