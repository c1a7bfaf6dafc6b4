"""Saved predictors as commands take them: the factory of the network, and the table it was fitted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullconformal.cli.common import Decorator, note

factory_option: Decorator = click.option(
    "--model", default=None, metavar="MODULE:FACTORY",
    help="The function that makes the network, where the predictor was fitted with one.",
)  # fmt: skip


def load_predictor(path: Path, model: str | None) -> tuple[Any, Any]:
    """A saved predictor and its notes; the factory that the user named may be in a module of the working folder."""
    from fullconformal.cli.choices import make_factory
    from fullconformal.estimators.saving import load_with_notes

    return load_with_notes(path, factory=None if model is None else make_factory(model).given)


def schema_of(path: Path, notes: Any) -> Any:
    """The columns a predictor was fitted on, or an error where it was fitted on no table."""
    from fullconformal.storage import StorageError
    from fullconformal.table import Schema, TableError

    try:
        return Schema.of_json(notes["table"] if isinstance(notes, dict) else None)
    except (TableError, KeyError) as error:
        raise StorageError(
            f"{path} was not made by `fullconformal fit`, so it does not know the columns of a table; load it in Python: "
            "fullconformal.load(path)."
        ) from error


def words_of(schema: Any, classes: Any) -> list[str]:
    """The columns of a table that are read as text: categories, and the target where classes are text."""
    return [*schema.categories, *([] if classes.dtype.kind in "biuf" else [schema.target])]


def tell_unseen(clf: Any, schema: Any, X: Any, quiet: bool) -> None:
    """Notes on categories that were not there in training."""
    from fullconformal.table import listed, unseen_categories

    for name, (rows, few) in unseen_categories(clf._transformer[0], schema, X).items():
        note(
            f"{name!r} holds categories unseen in training in {rows:,} rows ({listed(few)}); they count as rare ones.",
            quiet,
        )
