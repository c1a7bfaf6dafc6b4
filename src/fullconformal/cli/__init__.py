"""The command `fullconformal`. Commands are imported when they are called; scikit-learn and torch inside them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from fullconformal import __version__

# Threads that spin while they wait for each other made the demonstration ten times slower on a busy machine. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# By command: the module that holds it, and its line in the help.
COMMANDS = {
    "fit": ("training", "Fit a predictor to a table and save it."),
    "predict": ("predictor", "Compute prediction sets and p-values for the rows of a table."),
    "inspect": ("predictor", "Describe a saved predictor."),
    "report": ("predictor", "Write an HTML report on a predictor's sets for labelled rows."),
    "compare": ("training", "Compare full CP with other methods, on a table or on digits."),
    "demo": ("demo", "Run full CP and split CP on images of digits."),
    "data": ("demo", "Check or download the files of a data set."),
}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"fullconformal.cli.{COMMANDS[cmd_name][0]}"), cmd_name)  # type: ignore[no-any-return]

    def invoke(self, ctx: click.Context) -> Any:
        """Invalid input prints one line and exits with 2, an interrupt exits with 130; other errors keep their traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\ninterrupted: nothing was written", err=True)
            ctx.exit(130)
        except (OSError, ValueError, MemoryError) as error:
            if ctx.params["traceback"] or isinstance(error, BrokenPipeError):
                raise
            from fullconformal.cli.printing import visible

            click.echo(visible(f"error: {' '.join(str(error).split())}"), err=True)
            ctx.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
def main(traceback: bool) -> None:
    """Prediction sets by full conformal prediction."""
