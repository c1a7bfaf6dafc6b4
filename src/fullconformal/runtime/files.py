"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
