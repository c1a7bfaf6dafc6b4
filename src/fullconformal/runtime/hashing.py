"""Numbers that depend on an object and a seed alone: whatever is drawn for an object is the same in any batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse


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


def digests(X: Any, key: bytes) -> Iterator[bytes]:
    """Eight bytes for each object."""
    return (blake2b(content, digest_size=8, key=key).digest() for content in contents(X))


def hashes(X: Any, seed: int | None = None) -> npt.NDArray[np.uint64]:
    """A number (n,) below 2⁶⁴ for each object: a function of the object and the seed, if there is one."""
    key = b"" if seed is None else seed.to_bytes(8, "big")
    return np.array([int.from_bytes(digest, "big") for digest in digests(X, key)], dtype=np.uint64)


def uniforms(X: Any, seed: int) -> npt.NDArray[np.float64]:
    """Uniforms (m,), one per object: a function of the seed, the object, and how many equal ones came before.

    So an object has the same p-values in any batch, objects that come one at a time do not share a uniform, and neither do equal
    objects in a batch: their errors would be the same, and coverage would depend on the seed as if there were few objects.
    """
    key, seen, u = seed.to_bytes(8, "big"), Counter[bytes](), list[float]()
    for own in digests(X, key):
        digest = own
        if before := seen[own]:
            digest = blake2b(own + before.to_bytes(8, "big"), digest_size=8, key=key).digest()
        seen[own] += 1
        u.append(int.from_bytes(digest, "big") / 2**64)
    return np.array(u)
