"""Values as JSON and tensors, and back. What JSON cannot say is a dict with the key "is"; classes are looked up in a list of kinds.

A class joins the list by the decorator `savable`; nothing else in a file can name code.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from functools import cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fullconformal.storage.container import StorageError, raw_bytes
from fullconformal.storage.limits import LIMITS

NUMERIC = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
DTYPES = {*NUMERIC, "object"}


class Kind(NamedTuple):
    """How objects of one class are kept: as a dict of values, and made again from it."""

    cls: type
    pack: Callable[[Any, Packer], dict[str, Any]]
    unpack: Callable[[dict[str, Any], Unpacker], Any]


#: all that a saved predictor may hold, by the name in the file
KINDS: dict[str, Kind] = {}

Class = TypeVar("Class", bound=type)


def savable(cls: Class) -> Class:
    """Class decorator: predictors that hold such objects can be saved and loaded.

    A dataclass is kept by its fields, whose types are checked when it is made again. Others have ``state()``, a dict of what is kept, and
    the class method ``from_state(state)``; a class that has only one of the two is kept or made again by its fields.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @savable
    ... @dataclass(frozen=True)
    ... class Scale:
    ...     factor: float
    >>> packer = Packer()
    >>> Unpacker(packer.tensors).unpack(packer.pack(Scale(2.0)))
    Scale(factor=2.0)
    """
    known = KINDS.get(cls.__name__)
    if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"{cls.__module__} and {known.cls.__module__} both save a {cls.__name__}; rename one.")
    kept: Any = cls
    state = kept.state if hasattr(cls, "state") else lambda value: {f.name: getattr(value, f.name) for f in fields(value)}  # fmt: skip
    make = kept.from_state if hasattr(cls, "from_state") else partial(from_fields, cls)
    KINDS[cls.__name__] = Kind(cls, lambda value, _: dict(state(exactly(cls, value))), lambda values, _: make(values))
    return cls


class Packer:
    """Turns values into JSON, putting their numbers aside in `tensors`; equal tensors are kept once."""

    def __init__(self, factory: Any = None):
        self.by_class = {kind.cls: (name, kind) for name, kind in KINDS.items()}
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[bytes, str] = {}
        self.factory = factory  # how modules are made that cannot be described
        self.inside: list[str] = []  # the classes being packed, for errors
        self.copies = 0  # bytes that all values will take together, those that are kept once and named often included
        self.widest = 0  # columns that a transformer makes

    def pack(self, value: Any) -> Any:
        """JSON of a value, or a `StorageError` that names its class."""
        if value is None or type(value) in (bool, str, int):
            return value
        if type(value) is float:
            return value if np.isfinite(value) else {"is": "float", "value": str(value)}
        if type(value) is list:
            self.copies += LIMITS.list + 8 * len(value)
            return [self.pack(item) for item in value]
        if type(value) in (tuple, dict, slice):
            return self._collection(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.str_):
            return str(value)
        if isinstance(value, np.generic) and value.dtype.name in NUMERIC:
            return {"is": "scalar", "dtype": value.dtype.name, "value": self.pack(value.item())}
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return self._dtype(value)
        if type(value) is Tensor:
            return {"is": "tensor", **self._tensor(value)}
        for cls in type(value).__mro__:  # a kind of a base class decides itself what it takes
            if cls in self.by_class:
                name, kind = self.by_class[cls]
                self.inside.append(type(value).__name__)
                self.copies += LIMITS.value
                packed = {"is": name, **{key: self.pack(part) for key, part in kind.pack(value, self).items()}}
                self.inside.pop()
                return packed
        raise StorageError(
            f"{' > '.join(self.inside)} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; a class "
            "of your own can once it has the decorator fullconformal.storage.savable."
        )

    def _collection(self, value: Any) -> dict[str, Any]:
        items = value
        if isinstance(value, slice):
            items = (value.start, value.stop, value.step)
        if isinstance(value, dict):
            items = [[key, item] for key, item in value.items()]
        return {"is": type(value).__name__, "items": [self.pack(item) for item in items]}

    def _dtype(self, value: Any) -> dict[str, Any]:
        is_dtype = isinstance(value, np.dtype)
        name = value.name if is_dtype else np.dtype(value).name
        if name not in DTYPES and not (is_dtype and value.kind == "U"):
            raise StorageError(f"the dtype {name} cannot be saved.")
        if is_dtype and value.kind == "U":
            strings(value.str)
        return {"is": "dtype" if is_dtype else "type", "name": value.str if is_dtype and value.kind == "U" else name}

    def _array(self, value: Any) -> dict[str, Any]:
        if value.dtype.name in NUMERIC:
            native = value.dtype.newbyteorder("=")
            return {"is": "array", **self._tensor(torch.from_numpy(np.array(value, dtype=native, copy=True)))}
        if value.dtype.kind not in "UO":
            raise StorageError(f"an array of dtype {value.dtype} cannot be saved.")
        dtype = value.dtype.str if value.dtype.kind == "U" else "object"
        if dtype != "object":
            strings(dtype)
        self.copies += value.nbytes
        return {"is": "objects", "dtype": dtype, "shape": list(value.shape), "items": self.pack(value.ravel().tolist())}

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        """Where a tensor is kept, and the order of its axes in memory: products may depend on it in the last bit."""
        self.copies += value.nbytes
        strides = value.stride()
        order = sorted(range(value.ndim), key=lambda axis: (-strides[axis], axis))
        kept = value.detach().cpu().permute(order)
        kept = kept.clone(memory_format=torch.contiguous_format)
        digest = blake2b(f"{kept.dtype} {tuple(kept.shape)} ".encode())
        digest.update(raw_bytes(kept))
        name = self.names.setdefault(digest.digest(), str(len(self.names)))
        self.tensors.setdefault(name, kept)
        return {"tensor": name, "order": order}


class Unpacker:
    """Turns JSON back into values; anything unexpected is an error, and so is more memory than a file of this size may take."""

    def __init__(self, tensors: Mapping[str, Tensor], device: Any = "cpu", factory: Any = None, text: int = 0):
        """Tensors of the file, and the length of its text."""
        self.tensors, self.device, self.factory = tensors, torch.device(device), factory
        self.size = text + sum(value.nbytes for value in tensors.values())
        self.left, self.seen = LIMITS.memory(self.size), set[str]()

    def take(self, size: int) -> None:
        """Raise where so many bytes are more than what is left to this file."""
        self.left -= size
        if self.left < 0:
            raise StorageError(f"it asks for more memory than the {LIMITS.memory(self.size):,} bytes its size allows")

    def unpack(self, node: Any) -> Any:
        """The value of a JSON node."""
        if node is None or isinstance(node, (bool, str, int, float)):
            return node
        if isinstance(node, list):
            self.take(LIMITS.list + 8 * len(node))
            return [self.unpack(item) for item in node]
        tag = node["is"]
        if tag in KINDS:
            self.take(LIMITS.value)
            require(not getattr(KINDS[tag].cls, "once", False) or tag not in self.seen, f"number of {tag}")
            self.seen.add(tag)
            return KINDS[tag].unpack({key: self.unpack(part) for key, part in node.items() if key != "is"}, self)
        reader = {
            "float": lambda node: float(among(node["value"], ("nan", "inf", "-inf"))), "scalar": self._scalar, "objects": self._objects,
            "tuple": self._items, "dict": self._items, "slice": self._items, "dtype": self._dtype, "type": self._dtype,
            "array": self._array, "tensor": self._array,
        }.get(tag)  # fmt: skip
        if reader is None:
            raise StorageError(
                f"it holds a {str(tag)[:60]!r}, which is not among what may be loaded; if that is a class of your own, import it first"
            )
        return reader(node)

    def _items(self, node: dict[str, Any]) -> Any:
        items = self.unpack(expect(node["items"], list))
        if node["is"] == "dict":
            # Python's hash of a tuple, or of an object, can be chosen, too.
            require(all(key is None or isinstance(key, (str, int, float, np.generic)) for key, _ in items), "names")
            return dict(items)
        return tuple(items) if node["is"] == "tuple" else slice(*items)

    def _scalar(self, node: dict[str, Any]) -> Any:
        # Of an array NumPy would make one, in memory that was not counted.
        value = expect(self.unpack(node["value"]), bool, int, float)
        return np.dtype(among(node["dtype"], NUMERIC)).type(value)

    def _dtype(self, node: dict[str, Any]) -> Any:
        name = expect(node["name"], str)
        dtype = strings(name) if name[:1] in "<>" else np.dtype(among(name, DTYPES))
        return dtype if node["is"] == "dtype" else dtype.type

    def _array(self, node: dict[str, Any]) -> Any:
        kept, order = self.tensors[expect(node["tensor"], str)], expect(node["order"], list)
        require(all(type(axis) is int for axis in order) and sorted(order) == list(range(kept.ndim)), "array's axes")
        value = kept.permute([order.index(axis) for axis in range(kept.ndim)])
        # Each value has memory of its own, as before it was saved: who changes one in place changes no other.
        self.take(kept.nbytes)
        return value.to(self.device, copy=True) if node["is"] == "tensor" else np.array(value.numpy(), order="K")

    def _objects(self, node: dict[str, Any]) -> Any:
        items = self.unpack(expect(node["items"], list))
        shape = tuple(expect(node["shape"], list))
        sizes = len(shape) <= LIMITS.axes and all(type(size) is int and size >= 0 for size in shape)
        require(sizes and len(items) == math.prod(shape), "size of an array of objects")
        if any(not (item is None or isinstance(item, (str, bool, int, float, np.generic))) for item in items):
            raise StorageError("an array of objects holds something else than labels")
        dtype = np.dtype(object) if node["dtype"] == "object" else strings(expect(node["dtype"], str))
        if dtype.kind == "U":
            # No wider than its longest word: what is compared with it becomes as wide.
            dtype = strings(f"<U{max((len(item) for item in items if isinstance(item, str)), default=1) or 1}")
        self.take(dtype.itemsize * len(items))
        out = np.empty(len(items), dtype=dtype)
        out[:] = items
        return out.reshape(shape)


def strings(name: str) -> Any:
    """The dtype of fixed-width strings, such as "<U5"."""
    digits = name[2:]
    known = name[:2] in ("<U", ">U") and digits.isascii() and digits.isdigit() and len(name) < 11
    if not known or int(digits) > LIMITS.word:
        raise StorageError(f"{name[:20]!r} is no dtype of strings")
    return np.dtype(name)


def expect(value: Any, *allowed: type) -> Any:
    """The value, or an error where it is of none of the classes; a bool is no number."""
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise StorageError(f"it holds {type(value).__name__} where {' or '.join(c.__name__ for c in allowed)} belongs")
    return value


def require(condition: bool, what: str) -> None:
    """Raise where a part of a loaded predictor is not what it should be."""
    if not condition:
        raise StorageError(f"its {what} cannot be right")


def printable(text: Any) -> str:
    """A text that will be shown to people: without what terminals take for commands."""
    require(expect(text, str).isprintable(), "words")
    return str(text)


def budget(memory: Any) -> int:
    """Bytes that predictions may take at a time: what a file says, but no more than by default.

    It may come from a larger machine, or from someone who wants this one to run out of memory.
    """
    require(expect(memory, int) > 0, "memory")
    return int(min(memory, LIMITS.budget))


def among(value: Any, allowed: Any) -> Any:
    """The value, or an error where it is not one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise StorageError(f"it holds {str(value)[:60]!r}, which is not among what may be loaded")
    return value


def defaults(cls: Any, names: Set[str]) -> dict[str, Any]:
    """The defaults of those of the named parameters that a constructor has."""
    known = parameters(cls)
    return {name: known[name] for name in names if name in known}


@cache
def parameters(cls: Any) -> dict[str, Any]:
    """The parameters of a constructor, with their defaults."""
    return {name: one.default for name, one in inspect.signature(cls).parameters.items()}


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """The types that a class and its bases annotate, by name."""
    return typing.get_type_hints(cls)


def from_fields(cls: Any, values: dict[str, Any]) -> Any:
    """A dataclass from its fields, whose types are checked."""
    check_fields(cls, values, hints_of(cls))
    return cls(**values)


def check_fields(cls: Any, values: dict[str, Any], hints: dict[str, Any]) -> None:
    """Raise unless these are arguments of a constructor, of the annotated types.

    Those with a default may be missing: a file that was written before they were added does not know them.
    """
    known = parameters(cls)
    whole = {name for name, default in known.items() if default is inspect.Parameter.empty} <= set(values) <= set(known)
    if not whole or not all(conforms(part, hints.get(name, Any)) for name, part in values.items()):
        raise StorageError(f"the fields of {cls.__name__} are not what they should be")


def exactly(cls: type, value: Any) -> Any:
    """The value, or an error where it is of a subclass, which may keep more than its base says."""
    if type(value) is not cls:
        raise StorageError(f"{type(value).__module__}.{type(value).__qualname__} cannot be saved.")
    return value


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: classes, unions of them, lists, tuples of any length, and arrays."""
    origin = typing.get_origin(hint)
    if hasattr(origin, "__value__"):  # a named alias with arguments, which NDArray is in some versions of NumPy
        return conforms(value, origin.__value__[typing.get_args(hint)])
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, part) for part in typing.get_args(hint))
    if origin is list or (origin is tuple and typing.get_args(hint)[-1] is Ellipsis):
        return isinstance(value, origin) and all(conforms(item, typing.get_args(hint)[0]) for item in value)
    if origin is np.ndarray:
        scalar = typing.get_args(typing.get_args(hint)[1])[0]
        return isinstance(value, np.ndarray) and (scalar is Any or np.issubdtype(value.dtype, scalar))
    if hint is Any or origin is Callable:
        return hint is Any or callable(value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, (bool, np.bool_))
    return isinstance(value, hint) and not isinstance(value, bool)
