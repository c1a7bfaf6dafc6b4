"""The span of the training objects: all that a linear model with an L2 penalty knows of its inputs.

Its weights are a sum of training objects and have no part beyond their span: in columns that none of them uses (pixels that are always
black, words and substructures that no object has), and where there are fewer objects than columns. Only a candidate brings a part beyond
it, along one direction; turned so that this is the first one there, no logit, loss or penalty changes. So coordinates in the span and
the length of what lies beyond it are all that scores depend on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.runtime.numerics import blas_alone
from fullconformal.storage import savable

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WIDE = 64  # columns from which fewer coordinates than FEWER of them pay
FEWER = 1 / 2
EPS = float(np.finfo(np.float64).eps)


@savable
@dataclass(frozen=True)
class Span:
    """Which columns (d,) are ever used and which bear no penalty, and an orthonormal basis (used, r) of the objects in the used ones.

    Without a basis the used columns are coordinates as they are. Columns without a penalty, such as that of an intercept, always are.
    """

    used: Mask
    free: Mask
    basis: FloatArray | None = None

    @property
    def r(self) -> int:
        """Dimensions of the span."""
        return int(self.used.sum()) if self.basis is None else self.basis.shape[1]

    def coordinates(self, X: Any) -> FloatArray:
        """Objects X (m, d) by r coordinates, the length of what lies beyond the span, and the free columns, (m, r + 1 + free)."""
        own, beyond = (X.take(part.nonzero()[0], axis=1) for part in (self.used, ~(self.used | self.free)))
        out = np.zeros((len(X), self.r + 1 + int(self.free.sum())))
        with np.errstate(over="ignore", invalid="ignore"):
            if self.basis is None:
                out[:, : self.r] = own
            else:
                out[:, : self.r], rest = self._turned(own.astype(np.float64, copy=False), self.basis)
                beyond = np.hstack([beyond, rest])
            if self.free.any():
                out[:, self.r + 1 :] = X[:, self.free]
            if beyond.any():
                out[:, self.r] = lengths(beyond)
            if not np.isfinite(out.sum()):
                check_objects(X, out)
        return out

    @staticmethod
    def _turned(own: FloatArray, basis: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Coordinates (m, r) of objects (m, used), and what lies beyond the span (m, used), without what is but rounding."""
        with blas_alone(own.T.shape):
            inside = own @ basis
            rest, size = own - inside @ basis.T, np.abs(own) + np.abs(inside) @ np.abs(basis).T
        rest[np.abs(rest) < 64 * EPS * math.sqrt(len(basis)) * size] = 0.0
        return inside, rest

    def start(self, W: FloatArray) -> FloatArray:
        """Weights (C, r + 1 + free) of the coordinates near weights W (C, d) of the columns."""
        own, beyond = W[:, self.used], np.zeros((len(W), 1))
        return np.hstack([own if self.basis is None else own @ self.basis, beyond, W[:, self.free]])

    def penalty(self, penalty: FloatArray) -> FloatArray:
        """Λ (r + 1 + free,) of the coordinates from that of the columns (d,)."""
        return np.append(np.full(self.r + 1, penalty.max()), penalty[self.free])

    def names(self) -> list[str]:
        """What the coordinates are, in words."""
        own, free = (
            [f"feature {j} (counted from 0, as the model sees it)" for j in part.nonzero()[0]]
            for part in (self.used, self.free)
        )
        if self.basis is not None:
            largest = np.abs(self.basis).argmax(axis=0)
            own = [
                f"coordinate {k} in the training points' span, for the most part {own[j]},"
                for k, j in enumerate(largest)
            ]
        return [
            *own,
            "length in features that no training point has, or beyond the span of the training points,",
            *free,
        ]

    def weights(self, W: FloatArray) -> FloatArray:
        """Weights (C, d) of the columns from those of the coordinates (C, r + 1 + free)."""
        out, own = np.zeros((len(W), len(self.used))), W[:, : self.r]
        out[:, self.used] = own if self.basis is None else own @ self.basis.T
        out[:, self.free] = W[:, self.r + 1 :]
        return out


def span_of(X: Any, penalty: FloatArray | None = None) -> Span | None:
    """The span of training objects X (n, d) whose weights have penalties Λ (d,), by default all the same; None where nothing is gained.

    That is where it has about as many dimensions as there are columns, and where penalties differ.
    """
    penalty = np.ones(X.shape[1]) if penalty is None else penalty
    free = penalty == 0
    if free.all() or np.ptp(penalty[~free]):
        return None
    # Of most tables a few objects tell that all columns are used.
    used = np.any(X[:8], axis=0)
    used = (used if used.all() else np.any(X, axis=0)) & ~free
    width = int(used.sum())
    if width >= WIDE and len(X) <= FEWER * width:
        own, basis = X[:, used].astype(np.float64, copy=False), np.empty((width, len(X)))
        order = np.abs(own).max(axis=0).argsort()[::-1]  # small columns survive large ones only behind them
        with blas_alone(own.T.shape):
            basis[order] = np.linalg.qr(own[:, order].T)[0]
        return Span(used, free, basis)
    return Span(used, free) if width < (~free).sum() - 1 else None


def check_objects(X: Any, coordinates: FloatArray) -> None:
    """Raise where coordinates (m, ...) of objects X (m, d) contain NaN."""
    odd = ~np.isfinite(coordinates).all(axis=1)
    if odd.any():
        row = int(odd.argmax())
        raise ValueError(
            f"object {row} of those to be predicted (counted from 0) holds values up to {np.abs(X[row]).max():.3g} in size, which overflow "
            "float64. Look for a wrong unit or a placeholder, and leave such objects out or clip them."
        )


def lengths(X: Any) -> FloatArray:
    """Euclidean lengths (m,) of rows whose squares may overflow."""
    X = X.astype(np.float64, copy=False)
    scale = np.maximum(np.abs(X).max(axis=1), np.finfo(np.float64).tiny)
    out: FloatArray = scale * np.linalg.norm(X / scale[:, None], axis=1)
    return out
