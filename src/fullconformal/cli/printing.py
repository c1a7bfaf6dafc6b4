"""What the commands print: text or JSON, notes, warnings as notes; nothing that would move the cursor."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

# Characters that act and are not seen: controls, half characters, separators of lines, directions of writing.
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Printer:
    """Prints text or JSON to standard output, or text to standard error if `out` is "-"; notes go to standard error."""

    def __init__(self, quiet: bool, as_json: bool = False, out: Path | None = None):
        self.quiet, self.as_json, self.to_stderr = quiet, as_json, str(out) == "-"
        self.console = Console(stderr=self.to_stderr, highlight=False, soft_wrap=True)
        self.noted: set[str] = set()

    @property
    def verbose(self) -> int:
        """1 if progress bars may be drawn."""
        return int(not (self.quiet or self.as_json or self.to_stderr))

    def say(self, what: Any = "") -> None:
        """Print text, or anything that rich can draw: its columns are not wrapped."""
        if not self.quiet and not self.as_json:
            text = isinstance(what, str)
            self.console.print(visible(what) if text else what, markup=False, soft_wrap=text)

    def json(self, value: Any) -> None:
        """Print a value, if JSON was asked for."""
        if self.as_json and not self.to_stderr:
            # JSON escapes the same way, inside strings, which is where such characters are.
            click.echo(visible(json.dumps(value, indent=2, ensure_ascii=False)))

    def note(self, text: str) -> None:
        """Print a note to standard error, each only once."""
        if not self.quiet and text not in self.noted:
            self.noted.add(text)
            click.echo(visible(f"note: {' '.join(text.split())}"), err=True)

    @contextmanager
    def warnings_as_notes(self) -> Iterator[list[str]]:
        """Print warnings as notes; the list fills with them."""
        warned: list[str] = []

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            warned.append(" ".join(str(message).split()))
            self.note(str(message))

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield warned


def visible(text: str) -> str:
    r"""Text for a terminal: characters that move the cursor, change colours or turn the direction of writing are spelled out.

    >>> visible("a\x1b[31m\u202eb")
    'a\\u001b[31m\\u202eb'
    """
    return HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
