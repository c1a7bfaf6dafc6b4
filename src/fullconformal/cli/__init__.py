"""The command `fullconformal`: one file a command, imported when it is called. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
from importlib import import_module

import click

# Threads that spin while they wait for each other made the demonstration ten times slower on a busy machine. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COMMANDS = {
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fullconformal")
def main() -> None:
    """Prediction sets by full conformal prediction."""
