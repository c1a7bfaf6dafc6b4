"""Files that are written whole or not at all, and folders of finished parts."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.pvalues import FloatArray

# Not on Windows, where what a killed process left stays.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None


@contextmanager
def finished_or_nothing(path: Path | str) -> Iterator[Path]:
    """A temporary path that becomes `path` at the end, or is removed where anything went wrong.

    A regular file is replaced; of a symbolic link it is the file that it points to, and the link stays. What is no regular file, a pipe or
    a device, is written to and never replaced. What a killed process left of the same file is removed.
    """
    path = check_writable(path)
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / path.name
            yield part
            with open(part, "rb") as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        return
    remove_abandoned(path.parent, re.escape(path.name[:100]))
    with renamed(path, os.replace) as part:
        yield part


@contextmanager
def renamed(path: Path, rename: Callable[[str, Path], None]) -> Iterator[Path]:
    """A temporary path in the folder of a path that is given its name at the end, or removed where anything went wrong."""
    handle, name = held_file(path)
    try:
        yield Path(name)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's are private
        rename(name, path)
    finally:
        if handle is not None:
            os.close(handle)
        Path(name).unlink(missing_ok=True)


def held_file(path: Path) -> tuple[int | None, str]:
    """A new file beside a path, and a handle that holds it as long as this process lives: what nobody holds was left by a killed one."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        if fcntl is None:
            os.close(handle)
            return None, name
        # Another process may have taken it for abandoned before it was held.
        lock(handle)
        if os.path.exists(name):
            return handle, name
        os.close(handle)


def link(name: str, path: Path) -> None:
    """Give a file a second name if nothing has that name yet, else raise FileExistsError."""
    try:
        os.link(name, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without links
        with open(path, "xb") as target, open(name, "rb") as source:
            shutil.copyfileobj(source, target)


def check_writable(path: Path | str) -> Path:
    """The path with links followed, or an error that says why no file can be written there; for use before long work."""
    given = Path(path)
    try:
        if given.exists() and not given.is_file() and not given.is_dir():
            if stat.S_ISSOCK(given.stat().st_mode) or not os.access(given, os.W_OK):
                raise PermissionError(f"{path} cannot be written to; give the name of a file.")
            return given
        real = given.resolve()
    except (ValueError, RuntimeError) as error:  # a NUL byte, a circle of links
        raise OSError(f"{str(path)!r} names no file: {error}.") from error
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"the folder {real.parent} does not exist; create it first.")
    try:
        # The system alone knows: rights, read-only disks, disks without room for one more name.
        handle, name = tempfile.mkstemp(prefix=f".{real.name[:100]}.", suffix=".part", dir=real.parent)
    except OSError as error:
        why = error.strerror or error
        raise type(error)(f"no file can be written in {real.parent}: {why}; choose another folder.") from error
    os.close(handle)
    Path(name).unlink(missing_ok=True)
    return real


def lock(handle: int) -> bool:
    """Hold an open file until it is closed; False where another holds it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def remove_abandoned(folder: Path, name: str) -> None:
    """Remove what killed processes left of files whose name matches."""
    for part in folder.glob(".*.part") if fcntl is not None else ():
        if re.fullmatch(rf"\.({name})\.\w{{8}}\.part", part.name):
            with suppress(OSError):
                handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                if stat.S_ISREG(os.fstat(handle).st_mode) and lock(handle):
                    part.unlink()
                os.close(handle)


def one_line(error: BaseException) -> str:
    """What an error says, short, and without characters that move a terminal: it may quote the file."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:1000])
    return (text if len(text) <= 300 else text[:297] + "…").rstrip(".")


def content_of(path: Path, most: int) -> bytes:
    """The bytes of a regular file, or an OSError where it is none or has more: a pipe would be waited for, a large one fill the memory."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(f"{path} is no file of {most:,} bytes or fewer")
        return file.read(most)


def header_of(content: bytes) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order and dtype that the first bytes of an array's file name, before anything is allocated for it."""
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file)


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
    """Finished parts in a folder, each with a digest of its problem, its name and its content in its file's name; nothing is kept
    where there is no folder."""

    folder: Path | None
    say: Report
    #: what the parts depend on; set by `open`
    fingerprint: str = ""

    def open(self, header: dict[str, Any]) -> tuple[Parts, dict[str, Any]]:
        """The parts of the problem with the header's fingerprint, in a folder that is made or holds no others; and the header that it was
        made with, by this process or by another that came first."""
        opened = replace(self, fingerprint=header["fingerprint"])
        if self.folder is None:
            return opened, header
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder, r"header\.json|.+\.[0-9a-f]{16}\.npy")
        path = self.folder / "header.json"
        if not path.exists() and not self.files(r".*"):
            with suppress(FileExistsError), renamed(path, link) as part:
                part.write_text(json.dumps(header, indent=1))
        try:
            found: dict[str, Any] = json.loads(content_of(path, 2**20))
            known = found["fingerprint"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            known = None
        if known != header["fingerprint"]:
            what = "scores without a readable header" if known is None else "scores of other data or another model"
            raise ValueError(f"checkpoint={str(self.folder)!r} holds {what}; choose another, or delete it.")
        return opened, found

    def files(self, name: str) -> list[tuple[Path, re.Match[str]]]:
        """The parts whose name matches a pattern, with name and digest."""
        paths = [] if self.folder is None else sorted(self.folder.iterdir())
        matches = [(path, re.fullmatch(rf"({name})\.([0-9a-f]{{16}})\.npy", path.name)) for path in paths]
        return [(path, match) for path, match in matches if match]

    def digest(self, name: str, content: bytes) -> str:
        """A digest of the problem, the name and the content of a part: one of another fit, or of another name, has another."""
        return blake2b(f"{self.fingerprint} {name} ".encode() + content, digest_size=8).hexdigest()

    def read(self, name: str, shape: Callable[[str], tuple[int, ...] | None]) -> Iterator[tuple[str, FloatArray]]:
        """Name and content of the parts whose name matches; `shape` gives that of a part by its name, None where it is of no use.

        What is not whole, of another problem, of another shape, or holds NaN is deleted, and said to be.
        """
        for path, match in self.files(name):
            expected = shape(match[1])
            if expected is None:
                continue
            part = None
            # Whatever is wrong with it: NumPy's reader of headers raises errors of many kinds.
            with suppress(Exception):
                # Eight bytes a number at most, and what says that they are numbers.
                content = content_of(path, 8 * math.prod(expected) + 2**12)
                found, _, dtype = header_of(content)
                if (found, self.digest(match[1], content)) == (expected, match[2]) and dtype in (
                    np.float32,
                    np.float64,
                ):
                    part = np.load(io.BytesIO(content), allow_pickle=False)
            if part is not None and not np.isnan(part).any():
                yield match[1], part
            else:
                path.unlink(missing_ok=True)
                self.say(f"{path} is damaged, or of another problem; what it held is computed again")

    def write(self, name: str, content: FloatArray) -> None:
        """Add a part."""
        if self.folder is not None:
            buffer = io.BytesIO()
            np.save(buffer, content, allow_pickle=False)
            with renamed(self.folder / f"{name}.{self.digest(name, buffer.getvalue())}.npy", os.replace) as part:
                part.write_bytes(buffer.getvalue())
