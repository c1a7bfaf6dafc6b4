"""The file: one safetensors file whose header carries a format version, a JSON text and a checksum over both.

Nothing in it can run: safetensors holds numbers, JSON holds names that the reader looks up in its own lists. The checksum finds
accidents. It is no signature: whoever can write the file can write its checksum, so readers check all they take from it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fullconformal.runtime.files import finished_or_nothing, one_line
from fullconformal.storage.limits import LIMITS

FORMAT, VERSION = "fullconformal", 2
REMEDY = "Copy the file again, or save the predictor again."
TYPES = {
    "BOOL": torch.bool, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class StorageError(ValueError):
    """A predictor cannot be saved, or a file does not hold one."""


def write(path: Path | str, content: Any, tensors: Mapping[str, Tensor], copies: int = 0, widest: int = 0) -> None:
    """Write JSON content and contiguous tensors, whole or not at all: what unpacks to so many bytes, and makes so many columns."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if len(text) > LIMITS.text:
        raise StorageError(
            f"the names and labels to be saved take {len(text):,} characters of JSON, {LIMITS.text:,} are allowed; use "
            "encoders with fewer categories."
        )
    size = len(text) + sum(value.nbytes for value in tensors.values())
    if copies > LIMITS.memory(size):
        raise StorageError(
            f"it takes {copies:,} bytes of memory and would be a file of {size:,}, which may take {LIMITS.memory(size):,} when it is "
            "loaded: use fewer folds of the same frozen network, or shorter labels."
        )
    if widest > LIMITS.columns(size):
        raise StorageError(
            f"its transformers make {widest:,} columns, more than a file of {size:,} bytes can bear out; apply them to the data outside "
            "the predictor."
        )
    header = {"format": FORMAT, "version": str(VERSION), "content": text, "checksum": checksum(text, tensors)}
    with finished_or_nothing(path) as part:
        try:
            save_file(dict(tensors), part, metadata=header)
        except SafetensorError as error:
            raise OSError(f"{path} could not be written, and nothing of it was kept: {one_line(error)}.") from error


def read(path: Path | str) -> tuple[str, dict[str, Tensor]]:
    """JSON text and tensors of a file, both intact, or a `StorageError`; an OSError where there is no file to be read."""
    with opened(path) as file:
        try:
            header, tensors = read_tensors(path, file)
        except StorageError:
            raise
        except (OSError, ValueError, RuntimeError, TypeError, KeyError, RecursionError) as error:
            raise StorageError(f"{path} is no safetensors file, or part of one: {one_line(error)}. {REMEDY}") from error
    if checksum(header["content"], tensors) != header.get("checksum"):
        raise StorageError(f"{path} is damaged: its content is not what its checksum says. {REMEDY}")
    return header["content"], tensors


def opened(path: Path | str) -> BufferedReader:
    """A regular file, opened once: a file that is replaced meanwhile is read as it was."""
    try:
        # Without waiting: nobody may ever write to the other end of a pipe.
        handle = os.open(Path(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise StorageError(f"{str(path)!r} names no file: {one_line(error)}.") from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    raise StorageError(f"{path} is a pipe or a device; copy what it gives to a file, and load that.")


def read_tensors(path: Path | str, file: BufferedReader) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of an open file. Each tensor is read into memory of its own: products may depend, in the last bit, on how
    operands are aligned; and a file that somebody cuts short while it is mapped would end this process."""
    total, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(total - 8, LIMITS.header):
        raise ValueError(f"its header is said to have {length:,} bytes, and the file has {total:,}")
    places = json.loads(file.read(length))
    header = places.pop("__metadata__", {}) if isinstance(places, dict) else None
    if not isinstance(header, dict) or not all(type(part) is str for part in header.values()):
        raise ValueError("its header does not say what it holds")
    check_header(path, header)
    tensors, end = {}, 0
    for name, place in sorted(places.items(), key=lambda item: item[1]["data_offsets"]):
        shape, dtype, (start, stop) = place["shape"], TYPES[place["dtype"]], place["data_offsets"]
        if len(shape) > LIMITS.axes:
            raise ValueError(f"tensor {name[:40]!r} has too many axes")
        # A tensor without a number could otherwise claim any number of rows.
        if any(type(value) is not int or not 0 <= value <= total for value in (*shape, start, stop)):
            raise ValueError(f"tensor {name[:40]!r} has an impossible place")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or 8 + length + stop > total:
            raise ValueError(f"tensor {name[:40]!r} is not where it should be")
        tensors[name] = torch.empty(shape, dtype=dtype)
        if stop > start and file.readinto(raw_bytes(tensors[name])) != stop - start:
            raise ValueError("the file ends too early")
        end = stop
    if 8 + length + end != total:
        raise ValueError(f"{total - 8 - length - end:,} bytes belong to no tensor")
    return header, tensors


def check_header(path: Path | str, header: Mapping[str, str]) -> None:
    """Raise unless the header is ours and of a version we read."""
    if header.get("format") != FORMAT or "content" not in header:
        raise StorageError(f"{path} holds tensors, but no predictor saved by fullconformal.")
    version = header.get("version", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise StorageError(f"{path} says format version {version[:20]!r}, which is none. {REMEDY}")
    if int(version) != VERSION:
        remedy = "fit and save again" if int(version) < VERSION else "upgrade fullconformal"
        raise StorageError(f"{path} has format version {version}, this fullconformal reads {VERSION}: {remedy}.")
    if len(header["content"]) > LIMITS.text:
        raise StorageError(f"{path} has {len(header['content']):,} characters of JSON, {LIMITS.text:,} are allowed.")


def parse(path: Path | str, text: str) -> Any:
    """JSON with finite numbers only."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    def within(kind: type[Any], most: float, word: str) -> Any:
        value = kind(word)
        return value if abs(value) < most else refuse(word[:40])

    # Python's hash of a larger integer can be chosen: keys of one hash would take for ever to tell apart.
    numbers: Any = {"parse_float": partial(within, float, math.inf), "parse_int": partial(within, int, 2**64)}
    try:
        return json.loads(text, parse_constant=refuse, **numbers)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} has a header that cannot be read: {one_line(error)}. {REMEDY}") from error


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Digest of the text and of every tensor: name, dtype, shape and bytes."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=32)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
