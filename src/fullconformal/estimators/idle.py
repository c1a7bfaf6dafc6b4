"""Columns that are zero in every training object: pixels that are always black, words and substructures that no object has.

The weights of a regression with an L2 penalty stay at zero there, however the others are fitted. Only a candidate may bring such columns
another value, and it does so along one direction of them: turned so that this is the first of them, no loss and no penalty changes.
So their length is all that scores know of them, and one column does for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


def used_columns(X: Any) -> Mask | None:
    """Which columns (d,) of training objects X (n, d) are ever used; None where there is nothing to gain."""
    used: Mask = np.any(X, axis=0)
    return used if used.sum() < len(used) - 1 else None


def folded(X: Any, used: Mask) -> npt.NDArray[np.float64]:
    """The used columns of objects X (m, d), and as the last one the length of the others."""
    first, rest = int(used.argmin()), X[:, ~used]
    out: npt.NDArray[np.float64] = X.take(np.append(used.nonzero()[0], first), axis=1).astype(np.float64, copy=False)
    if rest.any():
        rest = rest.astype(np.float64, copy=False)
        scale = np.maximum(np.abs(rest).max(axis=1), np.finfo(np.float64).tiny)  # squares of large numbers overflow
        out[:, -1] = scale * np.linalg.norm(rest / scale[:, None], axis=1)
    return out
