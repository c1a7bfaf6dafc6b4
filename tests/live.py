"""How much memory tensors hold: every storage that an operation returns, until it is freed."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of the tensors made inside and still alive, now and at most. What an operation needs within itself is not seen."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._meet(storage, given)
        return out

    def _meet(self, storage, given):
        key = storage._cdata
        if key not in self.known and key not in given:  # else it is what was there before, seen in another way
            size = storage.nbytes()
            self.known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key, size):
        del self.known[key]
        self.now -= size


def _storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
