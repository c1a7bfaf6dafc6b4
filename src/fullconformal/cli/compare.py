"""`fullconformal compare`: full CP beside its alternatives, on a table or on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullconformal.cli.common import (
    LEVEL,
    Talk,
    check_output,
    drop_option,
    json_option,
    missing_option,
    model_option,
    print_json,
    quiet_option,
    read_training,
    seed_option,
    write_table,
)

LEVELS = (0.8, 0.9, 0.95)


@click.command()
@click.argument("table", type=click.Path(path_type=Path), metavar="TABLE|digits")
@click.option("--target", default=None, help="The column to predict.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=None,
              help="Where all figures go, one a row: CSV, Parquet by its name, or - for standard output.")  # fmt: skip
@model_option
@click.option("--confidence", type=LEVEL, multiple=True, default=LEVELS, show_default=True,
              help="A confidence level; may be given several times.")  # fmt: skip
@click.option("--test-size", type=LEVEL, default=0.25, show_default=True, help="Share of the rows that are predicted.")
@drop_option
@missing_option
@seed_option
@quiet_option
@json_option
def compare(
    table: Path, target: str | None, out: Path | None, model: str, confidence: tuple[float, ...], test_size: float,
    drop: tuple[str, ...], drop_missing: bool, seed: int, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit full CP and its alternatives to one part of TABLE (CSV or Parquet), and measure their sets on the rest.

    `fullconformal compare digits` does so for the images of digits that come with scikit-learn.
    """
    from fullconformal.cli.choices import check_model

    check_model(model)
    if out is not None:
        check_output(out, table)
    beside = out is not None and str(out) == "-"
    talk = Talk(quiet or as_json, beside)
    if str(table) == "digits" and not table.exists():
        X, X_test, y, y_test, estimator = digits(model, test_size, seed)
    elif target is None:
        raise ValueError("say which column is to be predicted: --target COLUMN")
    else:
        X, X_test, y, y_test, estimator = split_table(table, target, drop, drop_missing, test_size, model, seed, quiet)
    talk.say(
        f"{table.name}: {len(y):,} rows to learn from, {len(y_test):,} to predict, {len(set(y.tolist()))} classes\n"
    )

    from fullconformal import compare as compare_methods

    with talk.warnings_as_notes():
        comparison = compare_methods(
            None, X, y, X_test, y_test, sorted(set(confidence)), estimator=estimator, random_state=seed,
            verbose=int(not talk.quiet and not beside),
        )  # fmt: skip
    if out is not None:
        write_table(comparison.to_frame(), out)
    if as_json and not beside:
        print_json(json_rows(comparison.to_frame()))
    talk.show(comparison)
    for name, error in comparison.errors.items() if talk.quiet else ():  # the table tells of them
        click.echo(f"{name} failed: {type(error).__name__}: {error}", err=True)
    if out is not None and not beside:
        talk.say(f"\nall figures: {out}")


def digits(model: str, test_size: float, seed: int) -> tuple[Any, ...]:
    """Digits as they are compared: objects, labels, and the classifier."""
    from fullconformal.cli.choices import classifier
    from fullconformal.data import load_digits

    data = load_digits(test_size, seed)
    return data.X, data.X_test, data.y, data.y_test, classifier(model, 64, 10, seed)[0]


def split_table(
    table: Path, target: str, drop: tuple[str, ...], drop_missing: bool, test_size: float, model: str, seed: int, quiet: bool
) -> tuple[Any, ...]:  # fmt: skip
    """A table's objects and labels, a part kept for testing, and the classifier behind an encoder."""
    from sklearn.model_selection import train_test_split

    from fullconformal.cli.choices import wrapped
    from fullconformal.table import TableError

    schema, objects, labels = read_training(table, target, drop, drop_missing, quiet)
    X, X_test, y, y_test = train_test_split(objects, labels, test_size=test_size, random_state=seed)
    if set(y.tolist()) != set(labels.tolist()):
        raise TableError(
            f"a class of {target!r} has too few rows to be in both parts; leave it out, or lower --test-size."
        )
    return X, X_test, y, y_test, wrapped(model, schema, X, y, seed)[0]


def json_rows(frame: Any) -> list[dict[str, Any]]:
    """Rows of a frame as JSON, where a missing number is null."""
    return [
        {key: None if value != value else value for key, value in row.items()}
        for row in frame.to_dict(orient="records")
    ]
