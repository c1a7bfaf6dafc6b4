"""Mondrian categories: an object is compared with the training points of its own category only, and the guarantee holds in each.

Which category an object is of is told by a rule: a column of X, or a function of X. So predictions need no more than X. The guarantee asks
that the rule looks at each object by itself and was there before the data.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.utils.validation import _num_samples
from torch import Tensor

from fullconformal import pvalues, sets
from fullconformal.methods.base import ConformalWarning, IntArray
from fullconformal.models.objects import take
from fullconformal.storage import require, savable

Array = npt.NDArray[Any]


def as_groups(groups: Any, n: int, name: str = "groups") -> Array:
    """Groups (n,), one for each object, none missing."""
    out = np.asarray(groups)
    if out.shape != (n,) or out.dtype.kind not in "biufUO":
        raise ValueError(f"{name} must hold one word or number for each of the {n} objects, got shape {out.shape}.")
    missing = out != out if out.dtype.kind == "f" else np.array([v is None or v != v for v in out.tolist()], dtype=bool)
    if missing.any():
        raise ValueError(f"{name} holds NaN or None for {int(missing.sum())} objects; give each a group.")
    return out.astype(str) if out.dtype.kind == "O" else out


def check_categories(rule: Any) -> None:
    """Raise unless it may be a rule: None, a column's name or number, or a function."""
    number = isinstance(rule, (int, np.integer)) and not isinstance(rule, bool)
    if not (rule is None or isinstance(rule, str) or number or callable(rule)):
        remedy = (
            "a column of X, by its name or number, or a function of X that returns one word or number for each object"
        )
        raise ValueError(
            f"categories={rule!r} is not allowed; give {remedy} (fit's groups are points that share a fold)."
        )


def category_values(rule: Any, X: Any, names: Any = None) -> Array:
    """The category (m,), a word or a number, of each object of X (m, ...) by a rule; names of columns where X has lost its own."""
    m = _num_samples(X)
    if not callable(rule):
        return as_groups(_column(rule, X, names), m, f"categories={rule!r}")
    found = as_groups(rule(X), m, "what categories returns")
    if m > 1 and as_groups(rule(take(X, [0])), 1, "what categories returns")[0] != found[0]:
        remedy = (
            "it must look at each object by itself (limits that were fixed before, not quantiles of the X it is given)"
        )
        raise ValueError(f"categories returns another category for an object by itself than beside others; {remedy}.")
    return found


def _column(rule: Any, X: Any, names: Any) -> Any:
    """A column (m,) of X by its name or number."""
    names = X.columns if hasattr(X, "columns") else names
    if isinstance(rule, str):
        if names is None or rule not in list(names):
            has = "X has no names of columns" if names is None else f"X has the columns {list(names)}"
            raise ValueError(f"categories={rule!r} names a column, but {has}; give one of X's, or its number.")
        rule = list(names).index(rule)
    if hasattr(X, "iloc") and X.ndim == 2:
        width = X.shape[1]
    else:
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else X.tocsr() if issparse(X) else np.asarray(X)
        width = X.shape[1] if X.ndim == 2 else 0
    if not -width <= rule < width:
        raise ValueError(f"categories={rule} is no column of X, which has {width}; give a number below that.")
    if issparse(X):
        return X[:, [rule]].toarray()[:, 0]
    return X.iloc[:, rule] if hasattr(X, "iloc") else X[:, rule]


@savable
@dataclass(frozen=True)
class Categories:
    """A rule, the categories it found in training, in order (G,), and the place among them of each training point (n,)."""

    rule: Any
    known: Array
    points: IntArray

    @classmethod
    def of(cls, rule: Any, X: Any, names: Any = None) -> Self | None:
        """Those of training objects X (n, ...) by a rule; None where there is none."""
        check_categories(rule)
        if rule is None:
            return None
        rule = int(rule) if isinstance(rule, np.integer) else rule
        known, points = np.unique(category_values(rule, X, names), return_inverse=True)
        return cls(rule, known, points.astype(np.int64))

    def places(self, X: Any, names: Any = None) -> IntArray:
        """Places (m,) among the known ones of the categories of objects X (m, ...); −1 of those that training did not see."""
        values = category_values(self.rule, X, names)
        if (values.dtype.kind == "U") != (self.known.dtype.kind == "U"):
            now, then = (part.tolist()[0] for part in (values, self.known))
            raise ValueError(
                f"categories={self.rule!r} gives {now!r}, but gave {then!r} in training; give words or numbers both times."
            )
        if values.dtype.kind == self.known.dtype.kind == "f":
            # 0.1 is the same category in either precision.
            values = values.astype(self.known.dtype)
        at = np.minimum(np.searchsorted(self.known, values), len(self.known) - 1)
        return np.where(self.known[at] == values, at, -1).astype(np.int64)

    def verified(self, n: int) -> int:
        """How many there are; an error where a loaded one is not whole."""
        known, points = self.known, self.points
        require(isinstance(self.rule, (str, int)), "categories")
        require(known.ndim == 1 and 0 < len(known) <= n and bool((known[:-1] < known[1:]).all()), "categories")
        require(points.shape == (n,) and points.dtype == np.int64, "categories")
        require(bool(((points >= 0) & (points < len(known))).all()), "categories")
        return len(known)


def cell_sizes(labels: IntArray, width: int, categories: Categories | None, weights: Any = None) -> Array:
    """Number, or weight, of points with labels (n,) in each of `pvalues.cells`, (G, width)."""
    own, known = (None, 1) if categories is None else (categories.points, len(categories.known))
    return np.bincount(pvalues.cells(labels, width, own), weights, width * known).reshape(known, width)


def tied_at_the_top(scores: Any, level: Any) -> str:
    """What to say where so many scores (n,) share the largest that sets at a level hold every label; empty where they are fewer."""
    tied = int(np.sum(scores == np.max(scores, initial=-np.inf)))
    if tied < 2 or not sets.members(np.array((tied + 1) / (len(scores) + 1)), 1 - np.max(level)):
        return ""
    return (
        f"{tied} of {len(scores)} points share the largest score, as a rule because the model gave their label the probability 0: above "
        f"{1 - tied / len(scores):.0%} confidence every set holds all labels. Give a model of finer probabilities: more trees, trees with "
        "larger leaves (min_samples_leaf), or CalibratedClassifierCV"
    )


def warn_unreachable(
    sizes: Array, classes: Array, categories: Categories | None, levels: Array, kind: str, stacklevel: int,
    what: str = "every set{} holds all labels",
) -> None:  # fmt: skip
    """Warn where a level needs more points of a kind than there are: sizes (G, 1), or (G, C) of each class, in each of G categories.

    Then `what` is so, in a category too.
    """
    smallest, highest = int(sizes.min()), float(levels.max())
    if not sets.members(np.array(1 / (smallest + 1)), 1 - highest):
        return
    who, there, (group, label) = "", "", divmod(int(sizes.argmin()), sizes.shape[1])
    if sizes.shape[1] > 1:
        name = classes.tolist()[label]
        who, what = f" of class {name!r}", f"every set{{}} holds {name!r}"
    if categories is not None:
        who, there = f"{who} in category {categories.known.tolist()[group]!r}", " there"
    few = int(sets.members(1 / (sizes + 1.0), 1 - highest).sum()) - 1
    also = f" So it is with {few} more." if few else ""
    above = what.replace("{}", there, 1)
    warnings.warn(
        f"confidence_level={highest:g} needs more than the {smallest} {kind} point{'s' * (smallest != 1)}{who} there "
        f"{'are' if smallest != 1 else 'is'}: the smallest significance level possible is 1/{smallest + 1}, the highest "
        f"confidence level {smallest / (smallest + 1):.4g}; above it {above}.{also} Give more points, or lower the level.",
        ConformalWarning,
        stacklevel=stacklevel + 1,
    )
