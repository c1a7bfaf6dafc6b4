"""Files that are written whole or not at all, and folders of finished parts."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.pvalues import FloatArray


@contextmanager
def finished_or_nothing(path: Path | str) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` at the end, or is removed where anything went wrong."""
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


Array = npt.NDArray[Any]
Report = Callable[[str], None]


def fingerprint(key: str, *arrays: Array) -> str:
    """A digest of everything that parts depend on: settings, as text, and arrays."""
    digest = sha256(key.encode())
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Parts:
    """Finished parts in a folder, each file with its checksum in its name; nothing is kept where there is no folder."""

    folder: Path | None
    say: Report

    def open(self, header: dict[str, Any]) -> dict[str, Any]:
        """Make the folder, or make sure that it holds parts of the same problem; returns the header that it was made with."""
        if self.folder is None:
            return header
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "header.json"
        if not path.exists() and not self.files(r".*"):
            with finished_or_nothing(path) as part:
                part.write_text(json.dumps(header, indent=1))
            return header
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
            known = found["fingerprint"]
        except (OSError, ValueError, TypeError, KeyError):
            known = None
        if known != header["fingerprint"]:
            what = "scores without a readable header" if known is None else "scores of other data or another model"
            raise ValueError(
                f"checkpoint={str(self.folder)!r} holds {what}; choose another folder, or delete this one."
            )
        return found

    def files(self, name: str) -> list[tuple[Path, re.Match[str]]]:
        """The parts whose name matches a pattern, with name and checksum."""
        paths = [] if self.folder is None else sorted(self.folder.iterdir())
        matches = [(path, re.fullmatch(rf"({name})\.([0-9a-f]{{8}})\.npy", path.name)) for path in paths]
        return [(path, match) for path, match in matches if match]

    def read(self, name: str) -> Iterator[tuple[str, FloatArray]]:
        """Name and content of the parts whose name matches; those that are not whole are deleted, and said to be."""
        for path, match in self.files(name):
            content = path.read_bytes()
            if f"{zlib.crc32(content):08x}" == match[2]:
                yield match[1], np.load(io.BytesIO(content), allow_pickle=False)
            else:
                path.unlink()
                self.say(f"{path} is damaged; what it held is computed again")

    def write(self, name: str, content: FloatArray) -> None:
        """Add a part."""
        if self.folder is not None:
            buffer = io.BytesIO()
            np.save(buffer, content, allow_pickle=False)
            with finished_or_nothing(self.folder / f"{name}.{zlib.crc32(buffer.getvalue()):08x}.npy") as part:
                part.write_bytes(buffer.getvalue())
