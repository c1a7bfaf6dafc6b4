"""What the commands on a saved predictor write and print: tables of sets, figures of them, facts about the predictor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich import box
from rich.table import Table

from fullconformal.cli.schema import as_words, listed
from fullconformal.cli.tables import Printer, warnings_of
from fullconformal.sets import as_labels


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


def facts_of(clf: Any, notes: dict[str, Any]) -> dict[str, Any]:
    """What is known about a predictor, as JSON."""
    from fullconformal.models.requirements import split_pipeline

    final = split_pipeline(clf.estimator)[1]
    facts: dict[str, Any] = {
        "predictor": type(clf).__name__,
        "guarantee": clf.guarantee_.word,
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
    facts["warnings"] = list(dict.fromkeys([*facts.get("warnings", []), *warnings_of(notes)]))
    # Notes are the file's own words.
    kinds = {"table": dict, "source": str}
    return facts | {key: notes[key] for key, kind in kinds.items() if isinstance(notes.get(key), kind)}
