"""The span of the training objects: all that a linear model with an L2 penalty knows of its inputs.

Its weights are a sum of training objects and have no part beyond their span: in columns that none of them uses (pixels that are always
black, words and substructures that no object has), and where there are fewer objects than columns. Only a candidate brings a part beyond
it, along one direction; turned so that this is the first one there, no logit, loss or penalty changes. So coordinates in the span and
the length of what lies beyond it are all that scores depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

WIDE = 64  # columns from which fewer coordinates pay
FEWER = 3 / 4  # objects a column up to which they do
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Span:
    """Which columns (d,) are ever used, and an orthonormal basis (used, r) of the objects in them; None where these do as they are."""

    used: npt.NDArray[np.bool_]
    basis: FloatArray | None = None

    def inside(self, X: Any) -> FloatArray:
        """Coordinates (m, r) in the span of objects X (m, d)."""
        out: FloatArray = X.take(self.used.nonzero()[0], axis=1).astype(np.float64, copy=False)
        return out if self.basis is None else out @ self.basis

    def coordinates(self, X: Any) -> FloatArray:
        """The same, and as the last one the length of what lies beyond it, (m, r + 1)."""
        inside, rest = self.inside(X), X[:, ~self.used]
        out = np.zeros((len(inside), inside.shape[1] + 1))
        out[:, :-1] = inside
        if self.basis is not None:
            own = X[:, self.used]
            rest = np.hstack([rest, own - inside @ self.basis.T])
        if rest.any():
            out[:, -1] = lengths(rest)
        if self.basis is not None:  # what rounding leaves of objects in the span is no length
            out[out[:, -1] < 64 * EPS * math.sqrt(len(self.used)) * lengths(own), -1] = 0.0
        return out

    def weights(self, W: FloatArray) -> FloatArray:
        """Weights (C, d) of the columns from those of coordinates in the span, (C, r)."""
        out = np.zeros((len(W), len(self.used)))
        out[:, self.used] = W if self.basis is None else W @ self.basis.T
        return out


def span_of(X: Any, turn: bool = True) -> Span | None:
    """The span of training objects X (n, d); None where it is no smaller than d. `turn` allows other coordinates than columns."""
    used = np.any(X, axis=0)
    width = int(used.sum())
    if turn and width >= WIDE and len(X) <= FEWER * width:
        return Span(used, np.linalg.qr(X[:, used].T.astype(np.float64))[0])
    return Span(used) if width < len(used) - 1 else None


def in_span(
    fit: Callable[[FloatArray, FloatArray, FloatArray], tuple[FloatArray, bool]],
    a: FloatArray,
    W: FloatArray,
    penalty: FloatArray,
) -> tuple[FloatArray, bool]:
    """Weights (o, i) that `fit` finds from W for inputs a (n, i) and Λ (i,), in coordinates of a's span where it has many more columns."""
    wide = penalty > 0
    span = span_of(a[:, wide]) if len(a) < wide.sum() and not np.ptp(penalty[wide]) else None
    if span is None:
        return fit(a, W, penalty)
    inside, out = span.inside(a[:, wide]), np.empty_like(W)
    r = inside.shape[1]
    start = np.hstack([span.inside(W[:, wide]), W[:, ~wide]])
    found, done = fit(np.hstack([inside, a[:, ~wide]]), start, np.append(penalty[wide][:r], penalty[~wide]))
    out[:, wide], out[:, ~wide] = span.weights(found[:, :r]), found[:, r:]
    return out, done


def lengths(X: Any) -> FloatArray:
    """Euclidean lengths (m,) of rows whose squares may overflow."""
    X = X.astype(np.float64, copy=False)
    scale = np.maximum(np.abs(X).max(axis=1), np.finfo(np.float64).tiny)
    out: FloatArray = scale * np.linalg.norm(X / scale[:, None], axis=1)
    return out
