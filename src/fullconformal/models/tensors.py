"""Objects as tensors and arrays of numbers, and errors that name the place of a number that cannot be computed with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.float64]

REMEDY = "Look for a wrong unit or a placeholder, scale that feature, or leave the object out."


def to_tensor(X: Any, device: torch.device | str, dtype: torch.dtype, *, training: bool = False) -> Tensor:
    """A fresh tensor of the given device and dtype, in which finite values stay finite."""
    given = torch.as_tensor(np.array(X, copy=True))
    out = given.to(device=device, dtype=dtype)
    if given.is_floating_point() and given.element_size() > out.element_size() and bool((lost := out.isinf()).any()):
        at = lost.nonzero()[0].tolist()
        row = "" if training else f"object {at[0]}, "  # parts of a split are in an order of their own
        where = f"{row}{place(at)}"
        raise ValueError(f"X holds {float(given[tuple(at)]):.3g} in {where}, too large for {name_of(dtype)}. {REMEDY}")
    return out


def name_of(dtype: torch.dtype) -> str:
    """A dtype as NumPy calls it."""
    return str(dtype).removeprefix("torch.")


def place(at: list[int]) -> str:
    """Where in an object of X a value is, in words."""
    return f"{'column' if len(at) == 2 else 'place'} {', '.join(map(str, at[1:]))} (counted from 0)"


def check_squares(X: Any, dtype: str) -> None:
    """Raise where the squares of X (n, ...), of which curvatures are made, overflow; one product tells that none do.

    Not BLAS's, whose threads would be in the way of torch's for tens of milliseconds.
    """
    if X.dtype.kind != "f":
        return
    numbers = X.ravel(order="K")
    with np.errstate(over="ignore", invalid="ignore"):
        if np.einsum("i,i->", numbers, numbers) <= np.finfo(dtype).max:
            return
    at = [int(i) for i in np.unravel_index(int(np.abs(X).argmax()), X.shape)]
    value, most = float(X[tuple(at)]), float(np.finfo(dtype).max / X.size) ** 0.5
    if abs(value) > most:
        raise ValueError(
            f"X holds {value:.3g} in {place(at)}, too large for a fit in {dtype}: squares overflow beyond {most:.2g}. {REMEDY}"
        )


def check_distances(X: Any, order: float, training: bool) -> None:
    """Raise where Minkowski distances from values of X (n, d) overflow: they would count as no neighbour."""
    most = float(np.finfo(np.float64).max / X.shape[1]) ** (1 / order) / 2
    if (far := np.abs(X) > most).any():
        at = [int(i) for i in np.argwhere(far)[0]]
        row = "" if training else f"object {at[0]}, "
        raise ValueError(
            f"X holds {X[tuple(at)]:.3g} in {row}{place(at)}: distances overflow beyond {most:.2g}. {REMEDY}"
        )


def finite_rows(log_proba: FloatArray, what: str = "to be predicted") -> FloatArray:
    """Log-probabilities (m, C) as they are; an error where a row of them is no number."""
    if np.isnan(log_proba.sum()):
        row = int(np.isnan(log_proba).any(1).argmax())
        raise ValueError(
            f"the model's probabilities of object {row} of those {what} (counted from 0) are no numbers; leave it out, or clip it."
        )
    return log_proba
