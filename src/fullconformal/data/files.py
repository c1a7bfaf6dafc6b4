"""The files of data sets: finding, checking and reading them."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from pathlib import Path


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The given folder, else that of the environment variable FULLCONFORMAL_DATA, else an error."""
    chosen = folder if folder is not None else os.environ.get("FULLCONFORMAL_DATA")
    if not chosen:
        raise FileNotFoundError(
            "no data folder: give folder=, or set the environment variable FULLCONFORMAL_DATA to the folder."
        )
    return Path(chosen).expanduser()


def locate(folder: Path, subfolder: str, names: tuple[str, ...], help_text: str) -> Path:
    """The first file of these names in folder/subfolder or in the folder itself, else an error with `help_text`."""
    for place in (folder / subfolder, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise FileNotFoundError(f"{folder / subfolder / names[0]} does not exist. {help_text}")


def check_size(path: Path, expected: int, found: int, what: str = "bytes") -> None:
    """Raise if a file is shorter or longer than expected."""
    if found != expected:
        kind = "truncated" if found < expected else "too long"
        raise ValueError(f"{path} is {kind}: expected {expected:,} {what}, found {found:,}; download the file again.")


def check_md5(path: Path, expected: str) -> None:
    """Raise if a file does not have the published MD5."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is corrupted: expected MD5 {expected}, found {found}; download the file again.")


def read_bytes(path: Path) -> bytes:
    """The contents of a file, decompressed if its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}); download the file again.") from error
