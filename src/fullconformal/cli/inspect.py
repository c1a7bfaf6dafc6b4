"""`fullconformal inspect`: what a saved predictor is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullconformal.cli.common import Talk, bytes_in_words, json_option, print_json
from fullconformal.cli.predictors import factory_option, load_predictor


@click.command()
@click.argument("predictor", type=click.Path(path_type=Path))
@factory_option
@json_option
def inspect(predictor: Path, model: str | None, as_json: bool) -> None:
    """Say what the saved PREDICTOR is: method, classes, columns, and how far to trust it."""
    clf, notes = load_predictor(predictor, model)
    notes = notes if isinstance(notes, dict) else {}
    facts = facts_of(clf, notes)
    facts["file"] = {"path": str(predictor), "bytes": predictor.stat().st_size}
    if as_json:
        print_json(facts)
        return
    talk = Talk(quiet=False)
    talk.say(f"{facts['predictor']}, {bytes_in_words(facts['file']['bytes'])}")
    rows = [
        ("method", facts.get("method")),
        ("model", facts["model"]),
        ("confidence level", f"{facts['confidence_level']:g}"),
        ("class-conditional", "yes" if facts["class_conditional"] else None),
        ("training points", f"{facts['points']:,}" if "points" in facts else None),
        ("classes", in_words(facts["classes"])),
    ]
    table = facts.get("table")
    if table:
        rows += [
            ("target", table["target"]),
            ("numbers", in_words(table["numbers"])),
            ("categories", in_words(table["categories"])),
        ]
        rows += [("left out", in_words(table["left_out"])), ("from", facts.get("source"))]
    for name, value in rows:
        if value:
            talk.say(f"  {name:<18}{value}")
    if "diagnostics" in facts:
        talk.say("\n" + facts["diagnostics"])


def facts_of(clf: Any, notes: dict[str, Any]) -> dict[str, Any]:
    """What there is to know about a predictor, as JSON."""
    from fullconformal.models.pipelines import split_pipeline

    final = split_pipeline(clf.estimator)[1]
    facts: dict[str, Any] = {
        "predictor": type(clf).__name__,
        "model": "logistic regression (built-in)" if final is None else " ".join(repr(final).split()),
        "confidence_level": clf.confidence_level,
        "class_conditional": bool(clf.class_conditional),
        "classes": [str(label) for label in clf.classes_],
    }
    if hasattr(clf, "method_"):
        facts["method"] = f"{clf.method_}, {clf.scheme}"
        facts["points"] = clf.n_samples_fit_
        try:
            diagnostics = clf.diagnose()
            facts["diagnostics"], facts["warnings"] = str(diagnostics), diagnostics.warnings
        except ValueError as error:  # exact methods have nothing to diagnose
            facts["diagnostics"], facts["warnings"] = str(error), []
    return facts | {key: notes[key] for key in ("table", "source") if key in notes}


def in_words(names: list[str], most: int = 12) -> str:
    """Names, the first few of many."""
    few = ", ".join(names[:most])
    return few if len(names) <= most else f"{few} and {len(names) - most} more"
