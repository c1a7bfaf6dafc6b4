"""Options that commands share. Nothing here is slow to import: `--help` needs no more than this."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)


def existing(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """A file that is there; nobody should wait for torch to learn that it is not."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file.")
    return path


predictor_argument = click.argument("predictor", type=PATH, callback=existing)
LEVEL = click.FloatRange(0, 1, min_open=True, max_open=True)
# Models that need no code of the user's, by name.
MODELS = ("lr", "forest", "boosting", "network")

drop_option = click.option("--drop", multiple=True, metavar="COLUMN", help="A column to leave out; can be repeated.")
categorical_option = click.option(
    "--categorical", multiple=True, metavar="COLUMN",
    help="A column of numbers or dates that are codes, to be read as a category; can be repeated.",
)  # fmt: skip
sep_option = click.option(
    "--sep", default=None, metavar="MARK",
    help="What separates the columns of a text file, such as ';'; by default a comma, a tab for .tsv.",
)  # fmt: skip
decimal_option = click.option(
    "--decimal", default=".", metavar="MARK", help="The decimal mark of numbers in a text file, '.' or ','; predictors remember it.",
)  # fmt: skip
new_decimal_option = click.option(
    "--decimal", default=None, metavar="MARK", help="The decimal mark of numbers in TABLE; by default that of the training table.",
)  # fmt: skip
absent_option = click.option(
    "--missing", multiple=True, metavar="TEXT",
    help="A text that stands for a missing value, such as '-' or unknown; can be repeated.",
)  # fmt: skip
missing_option = click.option("--drop-missing", is_flag=True, help="Leave out rows whose target is missing.")
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="The random seed.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
model_option = click.option(
    "--model", default="lr", show_default=True, metavar="lr|forest|boosting|network|MODULE:FACTORY",
    help="Logistic regression, random forest, boosted trees, a network with one hidden layer, or your own function that returns a "
    "torch module.",
)  # fmt: skip
factory_option = click.option(
    "--model", default=None, metavar="MODULE:FACTORY",
    help="The function that returns the network, if the predictor was fitted with one.",
)  # fmt: skip
task_option = click.option(
    "--task", type=click.Choice(["auto", "classification", "regression"]), default="auto", show_default=True,
    help="Predict classes or a quantity; auto takes numbers that are not whole, or many different ones, for a quantity.",
)  # fmt: skip


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Those of commands that learn from a table."""
    table = (drop_option, categorical_option, sep_option, decimal_option, absent_option, missing_option)
    for option in reversed((task_option, model_option, *table, seed_option, quiet_option, json_option)):
        command = option(command)
    return command
