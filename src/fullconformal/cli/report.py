"""`fullconformal report`: a page about a predictor's sets for labelled rows."""

from __future__ import annotations

from pathlib import Path

import click

from fullconformal.cli.common import Talk, bytes_in_words, check_output, missing_option, quiet_option, without_missing
from fullconformal.cli.predictors import factory_option, load_predictor, schema_of, tell_unseen, words_of


@click.command()
@click.argument("predictor", type=click.Path(path_type=Path))
@click.argument("table", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True,
              help="Where the page goes.")  # fmt: skip
@click.option("--title", default=None, help="The page's title; by default it names the two files.")
@factory_option
@missing_option
@quiet_option
def report(
    predictor: Path, table: Path, out: Path, title: str | None, model: str | None, drop_missing: bool, quiet: bool
) -> None:
    """Write one HTML page about the sets of the saved PREDICTOR for the labelled rows of TABLE (CSV or Parquet).

    The rows should be others than those it was fitted on.
    """
    from fullconformal.table import check_name, read_table

    check_output(out, predictor, table)
    talk = Talk(quiet)
    clf, notes = load_predictor(predictor, model)
    schema = schema_of(predictor, notes)
    frame = read_table(table, words=words_of(schema, clf.classes_))
    check_name(frame, schema.target, "the target")
    frame = without_missing(frame, schema.target, drop_missing, quiet)
    X, y = schema.objects(frame), schema.labels(frame)
    unknown = sorted(set(y.tolist()) - set(clf.classes_.tolist()))
    if unknown:
        raise ValueError(f"{table} has labels that {predictor} does not know: {unknown[:5]}; leave these rows out.")
    tell_unseen(clf, schema, X, quiet)
    clf.set_params(verbose=int(not quiet))
    with talk.warnings_as_notes():
        clf.report(X, y, out, title=title or f"{predictor.stem} on {table.name}")
    talk.say(f"{len(y):,} rows in {out.resolve()} ({bytes_in_words(out.stat().st_size)}): open it in a browser")
