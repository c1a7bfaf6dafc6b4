"""`fullconformal predict`, `inspect` and `report`: commands on a saved predictor."""

from __future__ import annotations

from pathlib import Path

import click

from fullconformal.cli import options
from fullconformal.cli.options import LEVEL, PATH


@click.command()
@options.predictor_argument
@click.argument("table", type=PATH)
@click.option("-o", "--out", type=PATH, default=Path("-"), show_default=True,
              help="The file to write the sets to: .csv, .tsv or .parquet, or - for standard output.")  # fmt: skip
@click.option("--confidence", type=LEVEL, multiple=True, help="A confidence level; can be repeated.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="A column of the table to copy; can be repeated.")
@click.option("--class-conditional", is_flag=True, help="Make the guarantee hold for each class.")
@click.option("--never-empty", is_flag=True, help="Put the likeliest label into sets that would be empty.")
@options.sep_option
@options.new_decimal_option
@options.factory_option
@options.quiet_option
@options.json_option
def predict(
    predictor: Path, table: Path, out: Path, confidence: tuple[float, ...], keep: tuple[str, ...], class_conditional: bool,
    never_empty: bool, sep: str | None, decimal: str | None, model: str | None, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compute the prediction sets of the saved PREDICTOR for the rows of TABLE (CSV, TSV, Excel or Parquet).

    The output has these columns: the likeliest label, the set at each confidence level (labels joined by |), and the p-value of every
    label. Of a regressor: the prediction, and the lower and upper end of the interval at each level. If TABLE has the column to predict,
    the coverage is printed.
    """
    from fullconformal.cli import saved, tables
    from fullconformal.cli.printing import Printer
    from fullconformal.cli.schema import check_name

    tables.check_output(out, predictor, table)
    tables.check_format(out, *tables.TABLES)
    printer, lists = Printer(quiet, as_json, out), tables.is_parquet(out)
    clf, schema, notes = saved.load_with_schema(predictor, model)
    # In CSV files, columns that are copied are kept as they are written.
    frame = saved.read_new(
        table, clf, schema, [] if lists else [name for name in keep if name not in schema.numbers], sep, decimal
    )
    for name in keep:
        check_name(frame, name, "--keep")
    X = saved.objects_of(frame, clf, schema, notes, printer)
    levels = sorted(set(confidence)) or [clf.confidence_level]
    with printer.warnings_as_notes():
        if saved.is_regressor(clf):
            from fullconformal.cli import regression

            columns, facts = regression.predicted(clf, X, levels, frame, schema.target)
        else:
            if class_conditional:
                clf.set_params(class_conditional=True)
            columns, facts = saved.predicted(clf, X, levels, frame, schema.target, never_empty, lists, printer)
    kept = saved.as_written(frame, keep, table, clf, schema, sep)
    # As objects, numbers are written with all their digits.
    kept = (kept if lists else kept.astype(object)).rename(columns={name: f"{name}_kept" for name in columns})
    tables.write_table(kept.assign(**columns), out, printer)
    told = {"guarantee": clf.guarantee_.word, "warnings": saved.warnings_of(notes)}
    printer.json({"rows": len(frame), "levels": facts, **told, "out": str(out)})
    saved.show(printer, facts, schema.target)
    if not printer.to_stderr:
        printer.say(f"{len(frame):,} rows in {out}")


@click.command()
@options.predictor_argument
@options.factory_option
@options.json_option
def inspect(predictor: Path, model: str | None, as_json: bool) -> None:
    """Describe the saved PREDICTOR: its method, classes, columns and diagnostics."""
    from fullconformal.cli import saved, tables
    from fullconformal.cli.printing import Printer
    from fullconformal.cli.schema import listed

    clf, notes = saved.load_predictor(predictor, model)
    facts = saved.facts_of(clf, notes)
    facts["file"] = {"path": str(predictor), "bytes": predictor.stat().st_size}
    printer = Printer(False, as_json)
    printer.json(facts)
    printer.say(f"{facts['predictor']}, {tables.file_size(predictor)}")
    rows = {
        "method": facts.get("method"),
        "guarantee": str(clf.guarantee_),
        "model": facts["model"],
        "confidence level": f"{facts['confidence_level']:g}",
        "class-conditional": "yes" if facts["class_conditional"] else None,
        "training points": f"{facts['points']:,}" if "points" in facts else None,
        "classes": facts["classes"],
        **{name.replace("_", " "): value for name, value in facts.get("table", {}).items() if name != "words"},
        "from": facts.get("source"),
    }
    for name, value in rows.items():
        # A decimal point goes without saying.
        if value and (name, value) != ("decimal", "."):
            printer.say(f"  {name:<18}{listed(value, most=12, show=str) if isinstance(value, list) else value}")
    if "diagnostics" in facts:
        printer.say("\n" + facts["diagnostics"])
    saved.repeat_warnings(notes, printer)


@click.command()
@options.predictor_argument
@click.argument("table", type=PATH)
@click.option("-o", "--out", type=PATH, default=Path("report.html"), show_default=True,
              help="The HTML file to write.")  # fmt: skip
@click.option("--title", default=None, help="The title of the page; by default it names the two files.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="A column that names the objects; can be repeated.")
@click.option("--by", multiple=True, metavar="COLUMN", help="A column to show the coverage by; can be repeated.")
@click.option("--sets", type=PATH, default=None, metavar="FILE",
              help="What `predict` wrote for TABLE: its p-values are not computed again.")  # fmt: skip
@click.option("--trained-on", type=PATH, default=None, metavar="TABLE",
              help="The table the predictor was fitted on: shows split CP, fitted to it, beside.")  # fmt: skip
@options.factory_option
@options.missing_option
@options.sep_option
@options.new_decimal_option
@options.quiet_option
def report(
    predictor: Path, table: Path, out: Path, title: str | None, keep: tuple[str, ...], by: tuple[str, ...], sets: Path | None,
    trained_on: Path | None, model: str | None, drop_missing: bool, sep: str | None, decimal: str | None, quiet: bool,
) -> None:  # fmt: skip
    """Write an HTML page about the sets of the saved PREDICTOR for the labelled rows of TABLE (CSV, TSV, Excel or Parquet).

    Use rows that it was not fitted on.
    """
    from fullconformal.cli import saved, tables
    from fullconformal.cli.printing import Printer
    from fullconformal.cli.schema import check_name

    tables.check_output(out, *(path for path in (predictor, table, sets, trained_on) if path is not None))
    tables.check_format(out, ".html", ".htm")
    printer = Printer(quiet)
    clf, schema, notes = saved.load_with_schema(predictor, model)
    frame = saved.read_new(table, clf, schema, [name for name in keep if name not in schema.numbers], sep, decimal)
    for option, names in (("--keep", keep), ("--by", by)):
        for name in names:
            check_name(frame, name, option)
    given = {} if sets is None else {"p": saved.written_p(sets, clf, schema, frame)}
    frame = tables.with_target(frame, schema.target, "the target", drop_missing, printer)
    given = {name: p[frame.index] for name, p in given.items()}
    y = schema.quantities(frame) if saved.is_regressor(clf) else saved.known_labels(frame, clf, schema, table)
    X = saved.objects_of(frame, clf, schema, notes, printer)
    shown = {
        "title": title or f"{predictor.stem} on {table.name}",
        "identifiers": saved.identifiers(saved.as_written(frame, keep, table, clf, schema, sep)),
        "by": {name: frame[name].to_numpy() for name in by} or None,
        "diagnostics": [f"! {text}" for text in saved.warnings_of(notes)],
    }
    with printer.warnings_as_notes():
        others = {} if trained_on is None else saved.split_beside(clf, schema, trained_on, sep, drop_missing, printer)
        clf.report(X, y, out, others=others, **shown, **given)
    printer.say(f"{len(y):,} rows in {out.resolve()} ({tables.file_size(out)}): open it in a browser")
