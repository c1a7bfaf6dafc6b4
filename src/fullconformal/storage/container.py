"""The file: one safetensors file whose header carries a format version, a JSON text and a checksum over both.

Nothing in it can run: safetensors holds numbers, JSON holds names that the reader looks up in its own lists. The checksum finds
accidents. It is no signature: whoever can write the file can write its checksum, so readers check all they take from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fullconformal.runtime.files import finished_or_nothing

FORMAT, VERSION = "fullconformal", 2
LARGEST_TEXT = 2**24  # bytes of JSON; what it unpacks to is bounded by it
REMEDY = "Copy the file again, or save the predictor again."


class StorageError(ValueError):
    """A predictor cannot be saved, or a file does not hold one."""


def write(path: Path | str, content: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write JSON content and contiguous tensors, whole or not at all."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if len(text) > LARGEST_TEXT:
        raise StorageError(
            f"the names and labels to be saved take {len(text):,} characters of JSON, {LARGEST_TEXT:,} are allowed; use "
            "encoders with fewer categories."
        )
    header = {"format": FORMAT, "version": str(VERSION), "content": text, "checksum": checksum(text, tensors)}
    with finished_or_nothing(path) as part:
        save_file(dict(tensors), part, metadata=header)


def read(path: Path | str) -> tuple[Any, dict[str, Tensor]]:
    """JSON content and tensors of a file, both intact, or a `StorageError`."""
    with open(path, "rb"):  # what is missing or forbidden is the system's error, not the file's
        pass
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            check_header(path, header)
            # Fresh memory: products may depend, in the last bit, on how their operands are aligned.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except StorageError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise StorageError(
            f"{path} is no safetensors file, or only a part of one: {one_line(error)}. {REMEDY}"
        ) from error
    if checksum(header["content"], tensors) != header.get("checksum"):
        raise StorageError(f"{path} is damaged: its content is not what its checksum says. {REMEDY}")
    return parse(path, header["content"]), tensors


def check_header(path: Path | str, header: Mapping[str, str]) -> None:
    """Raise unless the header is ours and of a version we read."""
    if header.get("format") != FORMAT or "content" not in header:
        raise StorageError(f"{path} holds tensors, but no predictor saved by fullconformal.")
    version = header.get("version", "")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise StorageError(f"{path} says format version {version[:20]!r}, which is none. {REMEDY}")
    if int(version) < VERSION:
        raise StorageError(
            f"{path} has format version {version}, of an earlier fullconformal, which this one no longer reads: fit and save again."
        )
    if int(version) > VERSION:
        raise StorageError(
            f"{path} has format version {version}, this fullconformal reads up to {VERSION}: upgrade fullconformal."
        )
    if len(header["content"]) > LARGEST_TEXT:
        raise StorageError(f"{path} has {len(header['content']):,} characters of JSON, {LARGEST_TEXT:,} are allowed.")


def parse(path: Path | str, text: str) -> Any:
    """JSON with finite numbers only."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    def finite(word: str) -> float:
        value = float(word)
        return value if abs(value) < float("inf") else refuse(word)

    try:
        return json.loads(text, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} has a header that cannot be read: {one_line(error)}. {REMEDY}") from error


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Digest of the text and of every tensor: name, dtype, shape and bytes."""
    digest = blake2b(text.encode(), digest_size=32)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(raw_bytes(value))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def one_line(error: BaseException) -> str:
    """What an error says, short."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else text[:297] + "…").rstrip(".")
