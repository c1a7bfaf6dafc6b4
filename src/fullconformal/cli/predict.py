"""`fullconformal predict`: sets, p-values and point predictions for the rows of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fullconformal.cli.common import LEVEL, Talk, check_output, json_option, note, print_json, quiet_option, write_table
from fullconformal.cli.predictors import factory_option, load_predictor, schema_of, tell_unseen, words_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@click.command()
@click.argument("predictor", type=click.Path(path_type=Path))
@click.argument("table", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("-"), show_default=True,
              help="Where the sets go: CSV, Parquet by its name, or - for standard output.")  # fmt: skip
@click.option("--confidence", type=LEVEL, multiple=True, help="A confidence level; may be given several times.")
@click.option(
    "--keep", multiple=True, metavar="COLUMN", help="A column of the table to copy; may be given several times."
)
@factory_option
@quiet_option
@json_option
def predict(
    predictor: Path, table: Path, out: Path, confidence: tuple[float, ...], keep: tuple[str, ...], model: str | None,
    quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Prediction sets of the saved PREDICTOR for the rows of TABLE (CSV or Parquet).

    The columns of the output: the likeliest label, the set at each confidence level (labels joined by |), and the p-value of every
    label. Where TABLE has the column that is predicted, the coverage is told.
    """
    import numpy as np

    from fullconformal.sets import prediction_sets
    from fullconformal.table import PARQUET, check_name, listed, read_table

    check_output(out, predictor, table)
    beside = str(out) == "-"
    talk = Talk(quiet or as_json, beside)
    clf, notes = load_predictor(predictor, model)
    schema = schema_of(predictor, notes)
    copied = [] if out.suffix.lower() in PARQUET else [name for name in keep if name not in schema.numbers]
    frame = read_table(table, words=[*words_of(schema, clf.classes_), *copied])
    for name in keep:
        check_name(frame, name, "--keep")
    X = schema.objects(frame)
    tell_unseen(clf, schema, X, quiet)
    joined = [str(label) for label in clf.classes_ if "|" in str(label)]
    if joined and out.suffix.lower() not in PARQUET:
        note(
            f"sets are labels joined by |, which {listed(joined)} holds itself; -o sets.parquet keeps them apart.",
            quiet,
        )
    levels = sorted(set(confidence)) or [clf.confidence_level]
    clf.set_params(verbose=int(not talk.quiet and not beside))
    with talk.warnings_as_notes():
        clf.warn_unreachable(np.asarray(levels))
        p = clf.predict_epsilon(X)
        point = clf.predict(X)
    sets = prediction_sets(p, np.asarray(levels))
    facts = measured(frame, schema.target, clf.classes_, sets, levels, quiet)
    write_table(as_frame(frame, keep, clf.classes_, point, p, sets, levels, out), out)
    if as_json and not beside:
        print_json({"rows": len(frame), "levels": facts, "out": str(out)})
    show(talk, facts, len(frame), schema.target, out)


def as_frame(
    frame: pd.DataFrame, keep: tuple[str, ...], classes: Any, point: Any, p: np.ndarray, sets: np.ndarray, levels: list[float],
    out: Path,
) -> pd.DataFrame:  # fmt: skip
    """The table that is written: kept columns, point predictions, sets (m, C, L), p-values (m, C)."""
    import pandas as pd

    from fullconformal.sets import as_labels
    from fullconformal.table import PARQUET

    lists = out.suffix.lower() in PARQUET
    # As objects numbers are written with all their digits; those that are computed need not be.
    columns: dict[str, Any] = {name: frame[name] if lists else frame[name].astype(object) for name in keep}
    columns["prediction"] = point
    for k, level in enumerate(levels):
        labels = as_labels(sets[:, :, k], classes)
        columns[f"set_{level:g}"] = [row.tolist() if lists else "|".join(map(str, row)) for row in labels]
    columns |= {f"p_{label}": p[:, c] for c, label in enumerate(classes)}
    return pd.DataFrame(columns)


def measured(
    frame: pd.DataFrame, target: str, classes: Any, sets: np.ndarray, levels: list[float], quiet: bool
) -> list[dict[str, Any]]:
    """For each level the mean size of the sets, the share with one label and with none, and the coverage where it can be told."""
    import pandas as pd

    from fullconformal.table import as_words, listed

    hits, known = None, None
    if target in frame.columns:
        known = frame[target].notna().to_numpy()
        values = frame[target][known]
        numbers = classes.dtype.kind in "biuf"
        truth = (pd.to_numeric(values, errors="coerce") if numbers else as_words(values)).to_numpy()
        hits = truth[:, None] == (classes if numbers else classes.astype(object))
        unseen = values[~hits.any(axis=1)]
        if len(unseen):
            few = [str(value) for value in unseen.unique()[:3]]
            note(
                f"{target!r} holds labels unseen in training in {len(unseen):,} rows ({listed(few)}); no set holds them.",
                quiet,
            )
    out = []
    for k, level in enumerate(levels):
        sizes = sets[:, :, k].sum(axis=1)
        fact: dict[str, Any] = {"confidence_level": level, "mean_size": float(sizes.mean())}
        fact |= {"one_label": float((sizes == 1).mean()), "empty": float((sizes == 0).mean())}
        if hits is not None and len(hits):
            inside = sets[known, :, k] & hits
            fact |= {"coverage": float(inside.any(axis=1).mean()), "labelled_rows": len(hits)}
        out.append(fact)
    return out


def show(talk: Talk, facts: list[dict[str, Any]], rows: int, target: str, out: Path) -> None:
    """The facts as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    covered = "coverage" in facts[0]
    for head in ("confidence", "mean set size", "one label", "empty", *(["coverage"] if covered else [])):
        table.add_column(head, justify="right", no_wrap=True)
    for fact in facts:
        shares = [f"{fact[name]:.1%}" for name in ("one_label", "empty")]
        extra = []
        if covered:
            rate, n = fact["coverage"], fact["labelled_rows"]
            extra = [f"{rate:.1%} ± {(rate * (1 - rate) / n) ** 0.5:.1%}"]
        table.add_row(f"{fact['confidence_level']:.4g}", f"{fact['mean_size']:.2f}", *shares, *extra)
    talk.show(table)
    if covered:
        talk.say(f"\ncoverage: share of the sets that hold {target!r}, of {facts[0]['labelled_rows']:,} labelled rows")
    if str(out) != "-":
        talk.say(f"{rows:,} rows in {out}")
