"""The command `fullconformal`: one file a command, imported when it is called. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from fullconformal import __version__

# Threads that spin while they wait for each other made the demonstration ten times slower on a busy machine. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COMMANDS = {
    "fit": "Fit a predictor to a table and save it.",
    "predict": "Prediction sets and p-values for the rows of a table.",
    "inspect": "Say what a saved predictor is.",
    "report": "A page about a predictor's sets for labelled rows.",
    "compare": "Full CP beside its alternatives, on a table or on digits.",
    "demo": "Digits, a small network, and the schemes of full CP beside split CP.",
    "data": "Check a data set's files and say what they hold, or fetch them.",
}


class Lazy(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"fullconformal.cli.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Bad input is one line and exit code 2, an interrupt exit code 130; what is unexpected shows where it happened."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\ninterrupted: nothing was written", err=True)
            ctx.exit(130)
        except (OSError, ValueError, MemoryError) as error:
            if ctx.params["traceback"] or isinstance(error, BrokenPipeError):
                raise
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--traceback", is_flag=True, help="Show where an error happened.")
def main(traceback: bool) -> None:
    """Prediction sets by full conformal prediction."""
