"""A module once more for each thread, on the same tensors: hooks and other parameters, which a call sets for its duration, stay its own."""

from __future__ import annotations

import copy
import threading
from weakref import WeakKeyDictionary

from torch import Tensor, nn


class _Own(threading.local):
    """The replicas of one thread, by the module they are of."""

    def __init__(self) -> None:
        self.replicas: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


_OWN = _Own()


def replica(module: nn.Module) -> nn.Module:
    """This thread's copy of a module's structure, whose parameters, buffers and other tensors are the module's own."""
    found = _OWN.replicas.get(module)
    if found is None:
        held = [*module.parameters(), *module.buffers()]
        held += [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        found = _OWN.replicas[module] = copy.deepcopy(module, {id(tensor): tensor for tensor in held})
    return found
