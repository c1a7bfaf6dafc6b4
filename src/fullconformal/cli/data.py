"""`fullconformal data`: what is in a data set's files, or fetch them."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("name", type=click.Choice(["digits", "synthetic", "mnist", "cifar10", "acsincome"]))
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Where the files are, or shall be; by default that of FULLCONFORMAL_DATA.")  # fmt: skip
@click.option("--download", is_flag=True, help="Fetch the files from their publisher first.")
def data(name: str, folder: Path | None, download: bool) -> None:
    """Check a data set's files and say what they hold."""
    from fullconformal import data as sets

    if name in ("digits", "synthetic"):
        if download:
            raise click.UsageError(f"{name} needs no files; leave --download out.")
        loaded = sets.load_digits() if name == "digits" else sets.make_synthetic()
    else:
        if download:
            click.echo(f"files in {sets.download(name, folder)}")
        loaded = getattr(sets, f"load_{name}")(folder)
    click.echo(str(loaded))
