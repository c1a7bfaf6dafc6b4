"""Objects as users hand them over: arrays, tables, sparse matrices and lists, by rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse, vstack
from sklearn.utils import _safe_indexing


def take(X: Any, rows: Any) -> Any:
    """The objects in some rows, given by their numbers."""
    return _safe_indexing(X, np.asarray(rows, dtype=np.intp))


def joined(X: Any, more: Any) -> Any:
    """Objects X followed by more of them, of the same kind as X."""
    if hasattr(X, "iloc"):
        import pandas as pd

        # By name, as scikit-learn takes columns of a table; a table of other columns has none to be mixed up.
        if X.ndim == 2:
            more = more[X.columns] if hasattr(more, "columns") else pd.DataFrame(dense(more), columns=X.columns)
            # Numbers of pandas' own types are floats beside plain ones, as in a table that was saved.
            kinds = zip(X.columns, X.dtypes, more.dtypes, strict=True)
            own = {name: old for name, old, new in kinds if old == np.float64 != new and new.kind in "iufb"}
            more = more.astype(own) if own else more
        return pd.concat([X, more], ignore_index=True)
    if issparse(X) or issparse(more):
        return vstack([X, more], format="csr")
    if isinstance(X, list) and isinstance(more, list):
        return X + more
    return np.concatenate([np.asarray(X), np.asarray(more)])


def dense(X: Any) -> npt.NDArray[Any]:
    """Objects as an array."""
    return X.toarray() if issparse(X) else np.asarray(X)


def equal(X: Any, Y: Any) -> bool:
    """Whether two sets of objects hold the same numbers."""
    if X.shape != Y.shape:
        return False
    if issparse(X) and issparse(Y):
        return int((X != Y).nnz) == 0
    X, Y = dense(X), dense(Y)
    return np.array_equal(X, Y, equal_nan=X.dtype.kind == "f" and Y.dtype.kind == "f")


def shape_of(X: Any) -> tuple[int, ...]:
    """The shape of an object; of texts in a list, none."""
    return tuple(getattr(X, "shape", (0,))[1:])
