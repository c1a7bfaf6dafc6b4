"""A module once more for each thread, on the same tensors: hooks and other parameters, which a call sets for its duration, stay its own."""

from __future__ import annotations

import copy
import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn


class _Own(threading.local):
    """The replicas of one thread, by the module they are of, each with the tensors and modes it was made with."""

    def __init__(self) -> None:
        self.replicas: WeakKeyDictionary[nn.Module, tuple[nn.Module, list[Any]]] = WeakKeyDictionary()


_OWN = _Own()


def replica(module: nn.Module) -> nn.Module:
    """This thread's copy of a module's structure, whose parameters, buffers and other tensors are the module's own."""
    held: list[Any] = [*module.parameters(), *module.buffers(), *(part.training for part in module.modules())]
    found = _OWN.replicas.get(module)
    # A module that was moved, or made another precision or mode, has other buffers.
    if found is None or len(held) != len(found[1]) or any(a is not b for a, b in zip(held, found[1], strict=True)):
        more = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        own = {id(tensor): tensor for tensor in [*held, *more] if isinstance(tensor, Tensor)}
        found = _OWN.replicas[module] = copy.deepcopy(module, own), held
    return found[0]
