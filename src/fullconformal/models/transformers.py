"""Transformers in the bag: what a Pipeline makes of the training objects and of an object once it was fitted to both.

Validity asks that whatever is fitted is a symmetric function of the n + 1 points. A transformer that looks at objects only is fitted
anew with each object, one that looks at labels with each candidate. Objects with which the training objects come out the same, up to
the scale and place of columns, form a `Group`: most transformers have few of them, and a scaler has one.

Bags are handed over in an order that depends on their objects alone, so that a transformer that draws some of them by its random_state
is a symmetric function too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.feature_selection import SelectorMixin, VarianceThreshold
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples

from fullconformal.models.objects import dense, equal, joined, take
from fullconformal.models.updates import FloatArray, is_keyed, is_scaler, keys, relative_scaling

IntArray = npt.NDArray[np.intp]
Hashes = npt.NDArray[np.uint64]

INSIDE = {Pipeline: "steps", ColumnTransformer: "transformers", FeatureUnion: "transformer_list"}


# What a transformer looks at ----------------------------------------------------------------------------------------------


def parts(step: Any) -> Iterator[Any]:
    """A transformer, or those inside it, to the last; nothing of what is frozen, dropped or passed through."""
    if step is None or isinstance(step, (str, FrozenEstimator)):
        return
    for kind, attribute in INSIDE.items():
        if isinstance(step, kind):
            for part in getattr(step, attribute):
                yield from parts(part[1])
            yield from parts(getattr(step, "remainder", None))
            return
    yield step


def needs_labels(step: Any) -> bool:
    """Whether a transformer, or one inside it, may learn from y.

    Its tags say so, or its `fit` cannot do without, or it selects features by anything but their variance. What looks at labels when it is
    given some, and says so nowhere, is given none.
    """
    return any(_looks_at_labels(part) for part in parts(step))


def learn_from_labels(transformers: Any) -> str:
    """Which transformers need labels, in words; empty for none."""
    steps = [] if transformers is None else [type(part).__name__ for part in parts(transformers) if needs_labels(part)]
    return ", ".join(dict.fromkeys(steps))


def _looks_at_labels(step: Any) -> bool:
    tags = getattr(step, "__sklearn_tags__", None)
    selects = isinstance(step, SelectorMixin) and not isinstance(step, VarianceThreshold)
    wanted = signature(step.fit).parameters.get("y") if hasattr(step, "fit") else None
    asks = wanted is not None and wanted.default is wanted.empty and not type(step).__module__.startswith("sklearn.")
    return selects or asks or (tags is not None and bool(tags().target_tags.required))


def is_fixed(step: Any) -> bool:
    """Whether a transformer learns nothing: each object by itself, by a rule that was there before."""
    return all(
        isinstance(part, PolynomialFeatures) or ("__sklearn_tags__" in dir(part) and not part.__sklearn_tags__().requires_fit)
        for part in parts(step)
    )  # fmt: skip


def seeded(estimator: Any, seed: int) -> Any:
    """A clone whose random states that were left open, those of parts included, are seeded."""
    estimator = clone(estimator)
    unset = [k for k, v in estimator.get_params().items() if k.split("__")[-1] == "random_state" and v is None]
    return estimator.set_params(**dict.fromkeys(unset, seed)) if unset else estimator


# Groups of objects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Objects, numbered `rows` (k,), that leave the same points (n, ...) of the training objects, up to scale and place of columns.

    Fitted with object r, the transformers make (points − shifts[r])/scales[r] of the training objects, and the same of objects[r]; scales
    and shifts are (k, d), or None where nothing is scaled.
    """

    rows: IntArray
    points: Any
    objects: Any
    scales: FloatArray | None = None
    shifts: FloatArray | None = None

    def apart(self) -> Iterator[Group]:
        """The same with each object that scales columns by itself, and those that do not together."""
        if self.scales is None or self.shifts is None:
            yield self
            return
        same = (self.scales == 1).all(1) & (self.shifts == 0).all(1)
        points, objects = dense(self.points), dense(self.objects)
        if same.any():
            yield Group(self.rows[same], points, objects[same])
        for r in np.flatnonzero(~same):
            scale, shift = self.scales[r], self.shifts[r]
            yield Group(self.rows[r : r + 1], (points - shift) / scale, (objects[r : r + 1] - shift) / scale)


@dataclass(frozen=True)
class Transformers:
    """Transformers fitted to the training objects, which can be fitted again with one more object.

    ``known`` says that they are followed part by part, by rules of `models.updates` where there are any; else they are fitted as a whole.
    """

    fitted: Any
    known: bool = True

    @property
    def slow(self) -> bool:
        """Whether some of them are fitted anew for every object, by their own libraries."""
        steps = list(parts(self.fitted))
        return not self.known or not all(is_fixed(step) or is_scaler(step) or is_keyed(step) for step in steps)

    def groups(self, X: Any, new: Any, hashes: Hashes) -> list[Group]:
        """Groups of objects new (m, ...) with training objects X (n, ...); hashes (n + m,) of all."""
        rows, n = np.arange(_num_samples(new)), _num_samples(X)
        walk = _Walk(hashes[:n], hashes[n:])
        follow = walk.groups if self.known else walk.refitted
        return list(follow(self.fitted, Group(rows, X, new)))

    @classmethod
    def of(cls, fitted: Any, X: Any) -> Self:
        """Of transformers fitted to objects X (n, ...); followed part by part where that gives what a fit as a whole does."""
        o, hashes = take(X, [0]), np.zeros(_num_samples(X) + 1, dtype=np.uint64)
        (group,) = cls(fitted).groups(X, o, hashes)
        (alone,) = group.apart()
        for got, whole in zip((alone.points, alone.objects), cls(fitted).refitted(X, o, hashes), strict=True):
            got, whole = dense(got), dense(whole)
            # Rounding of sums in another order, with room to spare; a wrong rule would be off by 1/n.
            slack = 1e-6 * np.abs(whole).max(initial=0.0)
            if got.shape != whole.shape or not np.allclose(got, whole, rtol=1e-6, atol=slack):
                return cls(fitted, known=False)
        return cls(fitted)

    def refitted(self, X: Any, o: Any, hashes: Hashes, y: Any = None) -> tuple[Any, Any]:
        """Objects X (n, ...) and o (1, ...) by transformers fitted to both, with labels (n + 1,) where they look at them."""
        fitted = _fit(self.fitted, X, o, np.argsort(hashes, kind="stable"), y)
        return fitted.transform(X), fitted.transform(o)


def _fit(step: Any, X: Any, o: Any, order: IntArray, y: Any = None) -> Any:
    """A transformer fitted to X (n, ...) and o (1, ...), in an order (n + 1,), with their labels."""
    bag = take(joined(X, o), order)
    return clone(step).fit(bag) if y is None else clone(step).fit(bag, take(y, order))


@dataclass(frozen=True)
class _Walk:
    """A way through transformers, with hashes of the training objects (n,) and of all objects (m,)."""

    training: Hashes
    objects: Hashes

    def groups(self, step: Any, group: Group) -> Iterator[Group]:
        """The groups into which a transformer divides one that nothing has scaled."""
        if step is None or isinstance(step, str):
            yield group
        elif type(step) is Pipeline:
            found = [group]
            for _, part in step.steps:
                alone = [each for one in found for each in one.apart()] if not isinstance(part, str) else found
                found = [new for one in alone for new in self.groups(part, one)]
            yield from found
        elif _is_union(step, group.points):
            yield from self.union(step, group)
        elif is_fixed(step):
            fitted = step if isinstance(step, FrozenEstimator) else clone(step).fit(group.points)
            yield Group(group.rows, fitted.transform(group.points), fitted.transform(group.objects))
        elif is_scaler(step):
            fitted = clone(step).fit(group.points)
            points, objects = fitted.transform(group.points), fitted.transform(group.objects)
            yield Group(group.rows, points, objects, *relative_scaling(step, group.points, group.objects))
        else:
            yield from self.refitted(step, group)

    def refitted(self, step: Any, group: Group) -> Iterator[Group]:
        """A transformer fitted once for all objects with the same key; what leaves the training objects as they were is one group."""
        X, new = group.points, group.objects
        fitted = clone(step).fit(X)
        points, same, objects = fitted.transform(X), [], []
        by_key: dict[Any, list[int]] = {}
        for r, key in enumerate(keys(step, X, new)):
            by_key.setdefault(key, []).append(r)
        for key, members in by_key.items():
            some, seen, of_some = take(new, members), points, fitted
            if key != ():
                order = np.argsort(np.append(self.training, self.objects[group.rows[members[0]]]), kind="stable")
                of_some = _fit(step, X, take(new, members[:1]), order)
                seen = of_some.transform(X)
            out = of_some.transform(some)
            if seen is points or equal(seen, points):
                same += members
                objects.append(out)
            else:
                yield Group(group.rows[members], seen, out)
        if same:
            whole = objects[0]
            for more in objects[1:]:
                whole = joined(whole, more)
            yield Group(group.rows[same], points, whole)

    def union(self, step: Any, group: Group) -> Iterator[Group]:
        """Transformers side by side: objects are in one group where they are in one group of each."""
        X, new = group.points, group.objects
        place = {row: r for r, row in enumerate(group.rows.tolist())}
        branches = []
        for part, columns in _branches(step):
            t, o = (X, new) if columns is None else (_safe_indexing(part_of, columns, axis=1) for part_of in (X, new))
            branches.append(list(self.groups(part, Group(group.rows, t, o))))
        # For each object, its group of each branch and its place there.
        label = np.zeros((len(group.rows), len(branches)), dtype=np.intp)
        at = np.zeros_like(label)
        for b, found in enumerate(branches):
            for g, one in enumerate(found):
                rows = [place[row] for row in one.rows.tolist()]
                label[rows, b], at[rows, b] = g, np.arange(len(rows))
        distinct, which = np.unique(label, axis=0, return_inverse=True)
        for k, combined in enumerate(distinct):
            members = np.flatnonzero(which.reshape(-1) == k)
            chosen = [branches[b][g] for b, g in enumerate(combined)]
            inside = [at[members, b] for b in range(len(branches))]
            yield _side_by_side(group.rows[members], chosen, inside)


def _is_union(step: Any, X: Any) -> bool:
    """Whether a transformer is others side by side, which can be followed one by one."""
    if type(step) not in (ColumnTransformer, FeatureUnion) or step.transformer_weights is not None:
        return False
    # A table with names goes on to steps that may choose columns by them.
    plain = getattr(step, "_sklearn_output_config", {}).get("transform", "default") == "default"
    return plain and (type(step) is FeatureUnion or hasattr(X, "columns") or isinstance(X, np.ndarray))


def _branches(step: Any) -> Iterator[tuple[Any, Any]]:
    """The fitted transformers of a union, and the columns they are given; None for all."""
    if isinstance(step, FeatureUnion):
        yield from ((part, None) for _, part in step.transformer_list if part != "drop")
        return
    for _, part, columns in step.transformers_:
        names = None if isinstance(columns, (str, int, slice)) else np.asarray(columns)
        empty = names is not None and (not names.size or (names.dtype == bool and not names.any()))
        if part != "drop" and not empty:
            yield part, columns


def _side_by_side(rows: IntArray, chosen: list[Group], inside: list[IntArray]) -> Group:
    """Columns of several groups beside each other, of the objects at some places of each."""
    points, objects = [_matrix(one.points) for one in chosen], [_matrix(one.objects) for one in chosen]
    objects = [part[at] for part, at in zip(objects, inside, strict=True)]
    scales = shifts = None
    if any(one.scales is not None for one in chosen):
        each = list(zip(chosen, objects, inside, strict=True))
        scales = np.hstack([np.ones(part.shape) if g.scales is None else g.scales[at] for g, part, at in each])
        shifts = np.hstack([np.zeros(part.shape) if g.shifts is None else g.shifts[at] for g, part, at in each])
    return Group(rows, np.hstack(points), np.hstack(objects), scales, shifts)


def _matrix(X: Any) -> npt.NDArray[Any]:
    """Objects as a matrix."""
    matrix = dense(X)
    return matrix[:, None] if matrix.ndim == 1 else matrix
