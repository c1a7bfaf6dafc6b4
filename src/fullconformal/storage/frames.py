"""Objects as users hand them over, of which a predictor keeps a few rows: data frames and sparse matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import csr_array, csr_matrix

from fullconformal.storage.container import StorageError
from fullconformal.storage.values import KINDS, Kind, Packer, Unpacker, expect

MOST_COLUMNS = 2**22  # of a sparse matrix: no number bears out the empty ones, and transformers may make it dense


def pack_frame(frame: pd.DataFrame, _: Packer) -> dict[str, Any]:
    """The columns of a DataFrame: numbers as they are, all else as objects."""
    columns = []
    for _, column in frame.items():
        values = column.to_numpy() if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf" else None
        columns.append(column.to_numpy(dtype=object, na_value=np.nan) if values is None else values)
    return {"names": list(frame.columns), "columns": columns}


def unpack_frame(values: dict[str, Any], _: Unpacker) -> pd.DataFrame:
    """The DataFrame again."""
    return pd.DataFrame(dict(zip(values["names"], values["columns"], strict=True)))


def pack_sparse(X: Any, _: Packer) -> dict[str, Any]:
    """The numbers of a matrix in rows, and where they are."""
    if X.shape[1] > MOST_COLUMNS:
        raise StorageError(f"a sparse matrix of {X.shape[1]:,} columns cannot be saved; {MOST_COLUMNS:,} are allowed.")
    return {"data": X.data, "indices": X.indices, "indptr": X.indptr, "n_columns": X.shape[1]}


def unpack_sparse(cls: type[Any]) -> Any:
    """How a sparse matrix is made again: compiled code will trust its indices, so that all of them are checked here."""

    def unpack(values: dict[str, Any], _: Unpacker) -> Any:
        parts = tuple(expect(values[name], np.ndarray) for name in ("data", "indices", "indptr"))
        n_columns = expect(values["n_columns"], int)
        numbers = all(
            part.ndim == 1 and part.dtype.kind in kinds for part, kinds in zip(parts, ("biuf", "i", "i"), strict=True)
        )
        if not numbers or not len(parts[2]) or not 0 <= n_columns <= MOST_COLUMNS:
            raise StorageError("a sparse matrix is not what it should be")
        X = cls(parts, shape=(len(parts[2]) - 1, n_columns))
        X.check_format(full_check=True)
        return X

    return unpack


KINDS["frame"] = Kind(pd.DataFrame, pack_frame, unpack_frame)
for sparse in (csr_matrix, csr_array):
    KINDS[sparse.__name__] = Kind(sparse, pack_sparse, unpack_sparse(sparse))
