"""`fullconformal fit`: a table, a target, a saved predictor."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import click

from fullconformal.cli.common import (
    LEVEL,
    Talk,
    bytes_in_words,
    check_output,
    class_sizes,
    drop_option,
    json_option,
    missing_option,
    model_option,
    note,
    print_json,
    quiet_option,
    read_training,
    seed_option,
    target_option,
)


@click.command()
@click.argument("table", type=click.Path(path_type=Path))
@target_option
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Where the predictor goes.")
@model_option
@click.option("--method", type=click.Choice(["auto", "influence", "symmetric", "exact"]), default="auto", show_default=True,
              help="How full CP is done; auto takes the exactly valid one where it is fast enough.")  # fmt: skip
@click.option("--confidence", type=LEVEL, default=0.9, show_default=True, help="Confidence level of the sets.")
@click.option("--class-conditional", is_flag=True, help="Let the guarantee hold for each class.")
@drop_option
@missing_option
@seed_option
@quiet_option
@json_option
def fit(
    table: Path, target: str, out: Path, model: str, method: str, confidence: float, class_conditional: bool,
    drop: tuple[str, ...], drop_missing: bool, seed: int, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit a predictor to all rows of TABLE (CSV or Parquet) and save it."""
    from fullconformal.cli.choices import check_model, choose

    check_output(out, table)
    check_model(model)
    talk = Talk(quiet or as_json)
    schema, X, y = read_training(table, target, drop, drop_missing, quiet)
    sizes = class_sizes(y)
    talk.say(
        f"{table.name}: {len(y):,} rows, {len(schema.numbers)} numeric and {len(schema.categories)} categorical columns; "
        f"{target!r} has {len(sizes)} classes ({in_few(sizes)})"
    )
    choice = choose(model, method, schema, X, y, seed)

    from fullconformal import ConformalWarning, FullConformalClassifier
    from fullconformal.estimators.saving import save
    from fullconformal.table import quoted

    start = time.perf_counter()
    clf = FullConformalClassifier(
        choice.estimator, confidence_level=confidence, class_conditional=class_conditional, random_state=seed,
        verbose=int(not talk.quiet), **choice.options,
    )  # fmt: skip
    with talk.warnings_as_notes(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)  # told below, one a line
        clf.fit(X, y)
    seconds = time.perf_counter() - start
    talk.say(f"method {clf.method_}: {'; '.join(choice.told)}" if choice.told else f"method {clf.method_}")
    notes = {"table": schema.as_json(), "source": table.name, "class_sizes": sizes, "model": model}
    save(clf.set_params(verbose=0), out, factory=choice.factory, notes=notes)
    if as_json:
        print_json(summary(clf, notes, len(y), seconds, out))
    talk.say(f"fitted in {seconds:.1f} s, saved in {out} ({bytes_in_words(out.stat().st_size)})")
    told = clf.diagnose().warnings if clf.method_ == "influence" else []
    for text in told:
        note(f"{text}.", talk.quiet)
    if told:
        note(
            f"`fullconformal compare {table} --target {quoted(target)}` tells the coverage on rows held out.",
            talk.quiet,
        )
    own = f" --model {model}" if choice.factory else ""
    talk.say(f"\nnext: fullconformal predict {out} NEW.csv -o sets.csv{own}")


def in_few(sizes: dict[str, int], most: int = 6) -> str:
    """Classes and how many rows they have, the first few of many."""
    few = ", ".join(f"{label}: {count:,}" for label, count in list(sizes.items())[:most])
    return few if len(sizes) <= most else f"{few}, …"


def summary(clf: Any, notes: dict[str, Any], rows: int, seconds: float, out: Path) -> dict[str, Any]:
    """What was done, as JSON."""
    return {
        "rows": rows, "method": clf.method_, "model": notes["model"], "confidence_level": clf.confidence_level,
        "classes": notes["class_sizes"], **notes["table"], "seconds": round(seconds, 3), "out": str(out),
    }  # fmt: skip
