"""Objects as users hand them over: arrays, tables, sparse matrices and lists, by rows."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse, vstack
from sklearn.utils import _safe_indexing


def contents(X: Any) -> Iterator[bytes]:
    """What each object holds, as bytes that do not depend on the other objects."""
    if issparse(X):
        X = X.tocsr().sorted_indices()
        for first, last in pairwise(X.indptr):
            yield X.indices[first:last].astype(np.int64).tobytes() + X.data[first:last].astype(np.float64).tobytes()
        return
    X = np.asarray(X)
    if X.dtype.kind in "biuf":
        # In one precision and with one zero: how numbers are held may depend on the other objects.
        yield from ((x.astype(np.float64) + 0.0).tobytes() for x in X)
        return
    # Bytes would be addresses, or text as wide as the longest in the array.
    for x in X:
        values = x.tolist() if hasattr(x, "tolist") else x
        yield repr([_as_float(v) for v in values] if isinstance(values, list) else values).encode()


def _as_float(value: Any) -> Any:
    """A number as float64 has it, where it has it; anything else as it is."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 2**53 else value


def hashes(X: Any) -> npt.NDArray[np.uint64]:
    """A number (n,) for each object that depends on the object alone."""
    digests = (blake2b(content, digest_size=8).digest() for content in contents(X))
    return np.array([int.from_bytes(digest, "big") for digest in digests], dtype=np.uint64)


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
