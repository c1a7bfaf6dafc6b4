"""`fullconformal compare`: full CP and other methods, on a table or on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullconformal.cli.fit import check_model, make_classifier, make_pipeline
from fullconformal.cli.tables import (
    LEVEL,
    Printer,
    check_output,
    drop_option,
    json_option,
    missing_option,
    model_option,
    quiet_option,
    read_training,
    seed_option,
    write_table,
)


@click.command()
@click.argument("table", type=click.Path(path_type=Path), metavar="TABLE|digits")
@click.option("--target", default=None, help="The column to predict.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=None,
              help="A file for all figures, one per row: .csv or .parquet, or - for standard output.")  # fmt: skip
@model_option
@click.option("--confidence", type=LEVEL, multiple=True, default=(0.8, 0.9, 0.95), show_default=True,
              help="A confidence level; can be repeated.")  # fmt: skip
@click.option("--test-size", type=LEVEL, default=0.25, show_default=True, help="Share of the rows to predict.")
@drop_option
@missing_option
@seed_option
@quiet_option
@json_option
def compare(
    table: Path, target: str | None, out: Path | None, model: str, confidence: tuple[float, ...], test_size: float,
    drop: tuple[str, ...], drop_missing: bool, seed: int, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit full CP and other methods to one part of TABLE (CSV or Parquet), and measure their sets on the rest.

    `fullconformal compare digits` uses the images of digits that come with scikit-learn.
    """
    check_model(model)
    if out is not None:
        check_output(out, table)
    printer = Printer(quiet, as_json, out)
    if str(table) == "digits" and not table.exists():
        from fullconformal.data import load_digits

        digits = load_digits(test_size, seed)
        X, X_test, y, y_test = digits.X, digits.X_test, digits.y, digits.y_test
        estimator = make_classifier(model, 64, 10, seed)
    elif target is None:
        raise ValueError("name the column to predict: --target COLUMN")
    else:
        schema, objects, labels = read_training(table, target, drop, drop_missing, printer)
        X, X_test, y, y_test = split(objects, labels, test_size, seed, target)
        estimator = make_pipeline(model, schema, X, y, seed)
    printer.say(
        f"{table.name}: {len(y):,} rows to learn from, {len(y_test):,} to predict, {len(set(y.tolist()))} classes\n"
    )

    from fullconformal import compare as compare_methods

    with printer.warnings_as_notes():
        comparison = compare_methods(
            None, X, y, X_test, y_test, sorted(set(confidence)), estimator=estimator, random_state=seed,
            verbose=printer.verbose,
        )  # fmt: skip
    frame = comparison.to_frame()
    if out is not None:
        write_table(frame, out)
    # A missing number, which is not equal to itself, is null in JSON.
    printer.json([{k: None if v != v else v for k, v in row.items()} for row in frame.to_dict(orient="records")])
    printer.say(comparison)
    if quiet or as_json:
        # Otherwise the table shows them.
        for name, error in comparison.errors.items():
            click.echo(f"{name} failed: {type(error).__name__}: {error}", err=True)
    if out is not None and not printer.to_stderr:
        printer.say(f"\nall figures: {out}")


def split(X: Any, y: Any, test_size: float, seed: int, target: str) -> Any:
    """Training and test objects, training and test labels, drawn at random."""
    from sklearn.model_selection import train_test_split

    from fullconformal.table import TableError

    parts = train_test_split(X, y, test_size=test_size, random_state=seed)
    if set(parts[2].tolist()) != set(y.tolist()):
        raise TableError(
            f"a class of {target!r} has too few rows to be in both parts; leave it out, or lower --test-size."
        )
    return parts
