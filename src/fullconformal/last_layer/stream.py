"""Training points a batch at a time: from arrays, memory-mapped files, and PyTorch's datasets and loaders.

One pass suffices, and labels come with their objects, so a loader may shuffle. Nothing larger than a batch is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

BATCH = 1024


def is_stream(X: Any) -> bool:
    """Whether X is a dataset or a loader, which yield objects with their labels."""
    return isinstance(X, (Dataset, DataLoader))


def is_mapped(X: Any) -> bool:
    """Whether an array, or what it is a view of, is a memory-mapped file."""
    while isinstance(X, np.ndarray):
        if isinstance(X, np.memmap):
            return True
        X = X.base
    return False


@dataclass(frozen=True)
class Stream:
    """Batches (x, label) of a dataset, a loader, or arrays X (n, ...) and label indices y (n,)."""

    source: Any
    y: Any = None

    @property
    def loader(self) -> Any:
        if isinstance(self.source, DataLoader):
            return self.source
        return DataLoader(self.source, batch_size=BATCH)

    @property
    def expected(self) -> int | None:
        """Number of points, where it can be known before the pass."""
        if self.y is not None:
            return len(self.y)
        for counted in (self.loader.sampler, self.loader.dataset):
            try:
                return len(counted)
            except TypeError:
                continue
        return None

    @property
    def ordered(self) -> bool:
        """Whether the points come in an order the user knows."""
        if self.y is not None or not isinstance(self.source, DataLoader):
            return True
        plain = isinstance(self.source.sampler, SequentialSampler) or isinstance(self.source.dataset, IterableDataset)
        return plain and (self.source.batch_sampler is None or type(self.source.batch_sampler) is BatchSampler)

    def check(self) -> None:
        """Raise where the source would not yield every training point once."""
        if self.y is not None:
            return
        if getattr(self.loader.sampler, "replacement", False):
            raise ValueError(
                f"X draws with replacement ({type(self.loader.sampler).__name__}); full conformal prediction needs every training "
                "point once. Give a DataLoader without that sampler."
            )
        if self.expected == 0:
            raise ValueError("X yields no points: the dataset is empty.")

    def raw(self) -> Iterator[tuple[Any, Any]]:
        """Batches as the source gives them."""
        if self.y is not None:
            for at in range(0, len(self.y), BATCH):
                part = self.source[at : at + BATCH]
                # A copy of the batch alone: torch takes no read-only memory.
                yield part if isinstance(part, Tensor) else np.array(part), self.y[at : at + BATCH]
            return
        for item in self.loader:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                got = f"{len(item)} parts" if isinstance(item, (tuple, list)) else type(item).__name__
                raise ValueError(f"X must yield pairs (objects, labels), got {got}; y cannot be given beside it.")
            yield item[0], item[1]

    def batches(self, device: torch.device | str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked batches on a device: objects (k, ...) and whole labels (k,)."""
        shape, n = None, 0
        for objects, labels in self.raw():
            x, y = torch.as_tensor(objects), torch.as_tensor(labels)
            if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or y.is_floating_point() or y.is_complex():
                raise ValueError(
                    "X must yield batches of objects (k, ...) with whole-number labels (k,), got shapes "
                    f"{tuple(x.shape)} and {tuple(y.shape)} of {y.dtype}; give a DataLoader that makes batches."
                )
            shape = tuple(x.shape[1:]) if shape is None else shape
            if tuple(x.shape[1:]) != shape:
                raise ValueError(f"X yields objects of shape {tuple(x.shape[1:])} after others of shape {shape}.")
            x = x.to(device=device, dtype=dtype)
            n += len(y)
            yield x, y.to(device=device, dtype=torch.long)
        if not n:
            raise ValueError("X yields no points: the loader is empty.")
        if self.expected is not None and n != self.expected:
            raise ValueError(
                f"X yielded {n} of its {self.expected} points; full conformal prediction needs every training point once: leave "
                "out drop_last, and samplers that repeat or skip."
            )
