"""A few operations of Triton's language in plain PyTorch, to run the kernels' own source on a CPU, program by program."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch


class Pointer:
    """An address, or a block of them, in a tensor's memory."""

    def __init__(self, tensor, offset=0):
        assert tensor.is_contiguous()
        self.tensor, self.offset = tensor, torch.as_tensor(offset)

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)

    def addresses(self, mask):
        at = self.offset if mask is None else torch.where(mask, self.offset, 0)
        assert at.min() >= 0 and at.max() < self.tensor.numel(), "an address outside the tensor"
        return at


def load(pointer, mask=None, other=0.0):
    value = pointer.tensor.view(-1)[pointer.addresses(mask)]
    return value if mask is None else torch.where(mask, value, torch.tensor(other, dtype=value.dtype))


def store(pointer, value, mask):
    pointer.tensor.view(-1)[pointer.addresses(mask)[mask]] = value[mask]


def atomic_add(pointer, value, mask, sem):
    mask = mask.expand(value.shape)
    pointer.tensor.view(-1).index_add_(0, pointer.addresses(mask)[mask], value[mask])


class Interpreted:
    """A kernel that runs as Python; `language` is the module object that its source knows as tl."""

    def __init__(self, kernel, language):
        self.function, self.language = getattr(kernel, "fn", kernel), language

    def __getitem__(self, grid):
        def launch(*args, num_warps, **constants):
            args = [Pointer(part) if isinstance(part, torch.Tensor) else part for part in args]
            for place in itertools.product(*map(range, grid)):
                self.language.program_id = lambda axis, place=place: torch.tensor(place[axis], dtype=torch.int32)
                self.language.num_programs = lambda axis: grid[axis]
                self.function(*args, **constants)

        return launch


def interpret(monkeypatch, kernels):
    """Make a module of kernels run on the CPU."""
    language = SimpleNamespace(
        load=load, store=store, atomic_add=atomic_add, abs=torch.abs, max=torch.amax, min=torch.amin,
        arange=lambda low, high: torch.arange(low, high, dtype=torch.int32),
        sum=lambda value, axis: value.sum(axis, dtype=value.dtype),
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
        int32=torch.int32, int64=torch.int64,
    )  # fmt: skip
    monkeypatch.setattr(kernels, "tl", language)
    for name in ("_bounds", "_count"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name), language))
