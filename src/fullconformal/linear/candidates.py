"""Candidates (x, y) in batches that fit a memory budget, and what is counted for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fullconformal.linear.bag import Change, LinearBag

FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]


Counts = tuple[FloatArray, FloatArray]  # weight of the training points above and tied with each candidate, (m, C) each
Counted = tuple[Tensor, Tensor]  # the same of some candidates, (B,) each


def candidates(bag: LinearBag, X: Tensor, columns: Tensor) -> Change:
    """The candidates of test points X (m, d) at some of the m·C columns, label fastest, as additions to the bag."""
    C = bag.n_classes
    row = columns // C
    return Change(X[row].T.contiguous(), columns % C, row=row)


def chunks(bag: LinearBag, columns: Tensor, memory: int) -> Iterator[Tensor]:
    """Columns in chunks that fit the memory.

    A candidate is granted twelve arrays the size of the packed K × K matrices of all training points, and four Hessians.
    """
    (n, d), K = bag.X.shape, bag.K
    width = max(1, memory // (8 * (12 * n * (K * (K + 1) // 2) + 4 * (d * K) ** 2)))
    for start in range(0, len(columns), width):
        yield columns[start : start + width]


def comparison(weight: Tensor | FloatArray | None, change: Change) -> Tensor | None:
    """Weight (n, B) of each training point against each candidate, from that against each label (n, C)."""
    return None if weight is None else torch.as_tensor(weight, device=change.y.device)[:, change.y]


def count_all(
    bag: LinearBag, X: Tensor, count: Callable[[Change], Counted], memory: int, progress: Progress | None
) -> Counts:
    """Counts for all candidates of X (m, d), chunk by chunk."""
    m, C = len(X), bag.n_classes
    out = X.new_zeros(2, m * C)
    for columns in chunks(bag, torch.arange(m * C, device=X.device), memory):
        out[:, columns] = torch.stack([part.to(out.dtype) for part in count(candidates(bag, X, columns))])
        if progress is not None:
            progress((int(columns[-1]) + 1) // C, m)
    greater, equal = out.view(2, m, C).cpu().numpy()
    return greater, equal
