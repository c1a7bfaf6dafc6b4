"""What the loaders share: the data set they return, where files lie, and what is wrong with a file that cannot be read."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VARIABLE = "FULLCONFORMAL_DATA"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Training and test points with the names of what they hold.

    Attributes
    ----------
    name : str
    X, y : arrays (n, ...), (n,)
        Training objects and the positions of their labels in ``classes``.
    X_test, y_test : arrays (m, ...), (m,)
    classes : tuple of str
    features : tuple of str
        Names of the columns of X; empty for images.
    note : str
        What to say beside any number that rests on these data; empty where nothing.
    """

    name: str
    X: Array
    y: npt.NDArray[np.int64]
    X_test: Array
    y_test: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        shape = "×".join(map(str, self.X.shape[1:]))
        return (
            f"{self.name}: {len(self.X):,} training and {len(self.X_test):,} test points of {shape} {self.X.dtype}, "
            f"{len(self.classes)} classes{'. ' + self.note if self.note else ''}"
        )


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder given, else that of the environment variable; an error where there is neither."""
    chosen = folder if folder is not None else os.environ.get(VARIABLE)
    if not chosen:
        raise FileNotFoundError(
            f"no folder with data: give folder=, or set the environment variable {VARIABLE} to the folder."
        )
    return Path(chosen).expanduser()


def locate(folder: Path, subfolder: str, names: tuple[str, ...], help_text: str) -> Path:
    """The first file of these names in folder/subfolder or in the folder itself; an error with `help_text` where there is none."""
    for place in (folder / subfolder, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise FileNotFoundError(f"{folder / subfolder / names[0]} does not exist. {help_text}")


def check_size(path: Path, expected: int, found: int, what: str = "bytes") -> None:
    """Raise where a file is shorter or longer than it should be."""
    if found != expected:
        kind = "truncated" if found < expected else "too long"
        raise ValueError(f"{path} is {kind}: expected {expected:,} {what}, found {found:,}; get the file again.")


def check_md5(path: Path, expected: str) -> None:
    """Raise where a file's MD5 is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is corrupted: expected MD5 {expected}, found {found}; get the file again.")


def read_bytes(path: Path) -> bytes:
    """Contents of a file, unpacked where its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is no complete gzip file ({error}); get the file again.") from error
