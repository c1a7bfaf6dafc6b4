"""A method behind the transformers of a Pipeline, which are fitted to the bag: the training objects and the object to predict.

The transformers are fitted anew with each object (with each candidate where they look at labels), then the method is fitted to the
training points as they come out, and asked about that object. So scores are a symmetric function of the bag again, and the method's
guarantee holds behind the transformers. Objects for which nothing changes share one fit; where only the scale of columns changes, the
method may be told of the scales instead (`Query.scales`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import _num_samples

from fullconformal.diagnostics import Diagnostics, Figures
from fullconformal.intervals import Distribution, Steps
from fullconformal.methods.base import (
    AllTied,
    Bag,
    Config,
    ConformalWarning,
    Fitted,
    FloatArray,
    Method,
    Query,
    Unsuitable,
    Values,
)
from fullconformal.methods.regression import FittedRegression, RegressionMethod, RegressionQuery
from fullconformal.methods.select import check_model
from fullconformal.models.objects import equal, joined, take
from fullconformal.models.requirements import transform, transformed
from fullconformal.models.transformers import Group, Transformers, needs_labels
from fullconformal.runtime.files import fingerprint
from fullconformal.runtime.hashing import hashes
from fullconformal.runtime.tasks import nobody, onwards
from fullconformal.storage import LIMITS, budget, expect, require, savable
from fullconformal.storage.columns import width


@dataclass(frozen=True)
class Asked:
    """Objects with the numbers `rows` (k,) as a fitted method is asked about them, their scales (k, d), and the one label asked for.

    ``share`` is about what part of the work of all objects they are.
    """

    rows: list[int]
    fitted: Fitted
    objects: Any
    share: float
    scales: FloatArray | None = None
    label: int | None = None

    def put(self, found: tuple[FloatArray, FloatArray], out: FloatArray) -> None:
        """What was found (k, C) of them to where it belongs in (2, m, C)."""
        labels = slice(None) if self.label is None else slice(self.label, self.label + 1)
        out[:, self.rows, labels] = np.stack(found)[:, :, labels]


def groups_of(transformers: Transformers, training: Any, X: Any, size: int) -> Iterator[tuple[Group, float]]:
    """Groups of objects X (m, ...) beside the training objects, which take `size` bytes once they are transformed; large ones first.

    And about what part of the work of all objects each is.
    """
    n, m = _num_samples(training), _num_samples(X)
    slow = transformers.slow
    names = hashes(joined(training, X)) if slow else np.zeros(n + m, dtype=np.uint64)
    # So many objects' transformers are fitted before the method is asked about them: 32, and no more than 128 MiB of them.
    step = max(1, min(32, 2**27 // max(size, 1))) if slow else max(m, 1)
    for start in range(0, m, step):
        rows = np.arange(start, min(start + step, m))
        groups = transformers.groups(training, take(X, rows), np.append(names[:n], names[n + rows]))
        # The fit of a group takes about as long as ten objects.
        whole = (len(rows) + 10 * len(groups)) * m / len(rows)
        for group in sorted(groups, key=lambda group: -len(group.rows)):
            yield replace(group, rows=rows[group.rows]), (len(group.rows) + 10) / whole


def loaded_config(state: Any, device: torch.device) -> Config:
    """The same again, where it computes now."""
    given = dict(state)
    dtype, l2 = given.pop("dtype"), given.pop("l2")
    whole = dtype in (None, "float32", "float64") and (l2 is None or 0 <= expect(l2, int, float) < math.inf)
    # Who does the work and where it is kept is not the file's to say.
    numbers = {name: expect(given[name], int) for name in ("max_epochs", "memory", "seed")}
    require(whole and numbers == given, "options")
    numbers["memory"] = budget(numbers["memory"])
    return Config(**numbers, l2=l2, dtype=None if dtype is None else getattr(torch, dtype), device=device)


class BehindTransformers:
    """What methods behind transformers share: the method fitted once and unfitted, and the points as the transformers are given them."""

    base: Any
    #: objects are tried when it is loaded, at the cost of as many fits
    quick = False

    def _keep(self, base: Any, method: Any, config: Config, transformers: Transformers, bag: Any) -> None:
        self.base, self.behind, self.config, self.transformers, self.bag = base, method, config, transformers, bag
        self.inputs = transform(transformers.fitted, bag.X)
        # As much is promised as without transformers.
        self.method, self.guarantee = base.method, base.guarantee
        self.takes_scheme = getattr(base, "takes_scheme", True)
        self.weighs_candidates = getattr(base, "weighs_candidates", False)

    @classmethod
    def of(cls, base: Any, method: Any, config: Config, fitted: Any, bag: Any) -> Self:
        """Of a method, and of transformers fitted to a bag of objects as these are given."""
        known = Transformers(fitted, False) if needs_labels(fitted) else Transformers.of(fitted, bag.X)
        return cls(base, method, replace(config, progress=nobody), known, bag)  # type: ignore[call-arg]

    def _seen(self, X: Any) -> Any:
        """Objects (m, ...) by the transformers as they were fitted to the training objects."""
        return transform(self.transformers.fitted, X)

    def _fit(self, points: Any) -> Any:
        """The method fitted to the training objects as transformers gave them, (n, ...)."""
        if equal(points, self.inputs):
            return self.base
        return self.behind.fit(replace(self.bag, X=points), self.config)

    def holds(self, X: Any) -> bool:
        """Whether objects X are the first training points."""
        return bool(self.base.holds(self._seen(X)))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.base.device  # type: ignore[no-any-return]

    @property
    def warnings(self) -> list[str]:
        """What must be known before the sets are trusted."""
        return self.base.warnings  # type: ignore[no-any-return]

    def _state(self) -> dict[str, Any]:
        """The method as it is and as it was before its fit, the transformers, the training objects as these are given them."""
        config = {name: getattr(self.config, name) for name in ("l2", "max_epochs", "memory", "seed")}
        config["dtype"] = None if self.config.dtype is None else str(self.config.dtype).removeprefix("torch.")
        return {
            "base": self.base, "behind": self.behind, "config": config, "transformers": self.transformers.fitted,
            "known": self.transformers.known, "X": self.bag.X,
        }  # fmt: skip

    @classmethod
    def _again(cls, state: dict[str, Any], bag: Any, kinds: tuple[type, type]) -> Self:
        """The same from what was saved, with the bag and of a method and a fit of these kinds."""
        base, method = expect(state["base"], kinds[0]), expect(state["behind"], kinds[1])
        require(_num_samples(bag.X) == base.n == len(bag.y), "training points")
        # It will be fitted for objects: what was fitted is what it fits, and nothing that is trained.
        made = get_type_hints(type(method).fit).get("return", object)
        require(isinstance(base, made) and base.guarantee.is_exact and not method.takes_pipeline, "method")
        check_model(method, base, bag)
        config = loaded_config(state["config"], base.device)
        known, X = Transformers(state["transformers"], bool(state["known"])), bag.X
        # More numbers of all training objects than these can bear out are not made.
        made = _num_samples(X) * max(width(known.fitted), transform(known.fitted, take(X, [0])).size)
        require(made <= LIMITS.activations(getattr(X, "nnz", math.prod(X.shape))), "transformers")
        return cls(base, method, config, known, bag)  # type: ignore[call-arg]


@savable
class FittedInBag(BehindTransformers, Fitted):
    """A method fitted behind transformers, and the training points as the transformers are given them."""

    base: Fitted

    def __init__(self, base: Fitted, method: Method, config: Config, transformers: Transformers, bag: Bag):
        super().__init__(bag.y, bag.n_classes)
        self._keep(base, method, config, transformers, bag)

    def log_proba(self, X: Any) -> FloatArray:
        return self.base.log_proba(self._seen(X))

    def precision(self, X: Any) -> float:
        return self.base.precision(self._seen(X))

    @property
    def diagnostics(self) -> Diagnostics | None:
        return self.base.diagnostics

    def _fit(self, points: Any) -> Fitted:
        try:
            return super()._fit(points)  # type: ignore[no-any-return]
        except Unsuitable as error:
            # Columns that only the object uses, say.
            told = f"with one of the objects in the transformers' bag no fit can be had, so all its labels get p = 1: {error}"
            warnings.warn(told, ConformalWarning, stacklevel=2)
            return AllTied(self.labels, self.n_classes)

    # What is asked, of which fit --------------------------------------------------------------------------------------------

    def at(self, X: Any, label: int) -> tuple[Fitted, Any]:
        """The method fitted with one candidate, of object X (1, ...), in the bag of the transformers, and the object as it sees it."""
        asked = [one for one in self._asked(X, scaled=False) if one.label in (None, label)]
        return asked[0].fitted, asked[0].objects

    def _asked(self, X: Any, scaled: bool) -> Iterator[Asked]:
        """Every object (of transformers that look at labels: every candidate) with the fit that is asked about it."""
        if not needs_labels(self.transformers.fitted):
            for group, share in groups_of(self.transformers, self.bag.X, X, self.inputs.nbytes):
                yield from self._of_group(group, share, scaled)
            return
        names, m = hashes(joined(self.bag.X, X)), _num_samples(X)
        for row in range(m):
            yield from self._candidates(row, take(X, [row]), np.append(names[: self.n], names[self.n + row]), 1 / m)

    def _candidates(self, row: int, x: Any, names: Any, share: float) -> Iterator[Asked]:
        """The candidates of one object, each behind transformers fitted with it and its label."""
        for label in range(self.n_classes):
            y = np.append(self.labels, label)
            # Points with equal objects are told apart by their labels.
            place = np.argsort(np.lexsort((y, names))).astype(np.uint64)
            points, objects = self.transformers.refitted(self.bag.X, x, place, self.bag.classes[y])
            yield Asked(
                [row], self._fit(transformed(points)), transformed(objects), share / self.n_classes, label=label
            )

    def _of_group(self, group: Group, share: float, scaled: bool) -> Iterator[Asked]:
        """The objects of a group, together where the method can be told of scales or there are none."""
        if scaled and group.scales is not None:
            fitted, objects = self._fit(transformed(group.points)), transformed(group.objects)
            if fitted.takes_scales:
                yield Asked(group.rows.tolist(), fitted, objects, share, group.scales)
                return
        for one in group.apart():
            part = share * len(one.rows) / len(group.rows)
            yield Asked(one.rows.tolist(), self._fit(transformed(one.points)), transformed(one.objects), part)

    # Answers --------------------------------------------------------------------------------------------------------------

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        return self._answers(X, query, lambda asked, one: asked.fitted.counts(asked.objects, one))

    def decide(self, X: Any, query: Query, levels: FloatArray) -> FloatArray:
        return self._answers(X, query, lambda asked, one: 2 * (asked.fitted.decide(asked.objects, one, levels),))[0]

    def bounds(self, X: Any, query: Query, own: Any = 1.0) -> tuple[FloatArray, FloatArray]:
        weights = np.broadcast_to(own, (_num_samples(X), 1))
        return self._answers(X, query, lambda asked, one: asked.fitted.bounds(asked.objects, one, weights[asked.rows]))

    def _answers(
        self, X: Any, query: Query, ask: Callable[[Asked, Query], tuple[FloatArray, FloatArray]]
    ) -> tuple[FloatArray, FloatArray]:
        """Two arrays (m, C), of what each fit answers about its objects."""
        out = np.empty((2, _num_samples(X), self.n_classes))
        for asked, one in self._queries(X, query):
            asked.put(ask(asked, one), out)
        return out[0], out[1]

    def _queries(self, X: Any, query: Query) -> Iterator[tuple[Asked, Query]]:
        """What is asked of which fit, and how; progress counts parts of the work."""
        done, before, whole = 0.0, 0, 10**6
        for asked in self._asked(X, scaled=True):
            done += asked.share
            after = round(whole * done)
            told = onwards(query.progress, before, after - before, whole)
            yield asked, replace(query, scales=asked.scales, work=self._work(query, asked.fitted), progress=told)
            query.progress(1000 * after, 1000 * whole)
            before = after

    def _work(self, query: Query, fitted: Fitted) -> Any:
        """Who does the work; the parts of a fit of its own are kept in a folder of its own."""
        if query.work.checkpoint is None or fitted is self.base:
            return query.work
        name = fingerprint("", np.asarray(getattr(fitted, "X", np.empty(0))))[:16]
        return replace(query.work, checkpoint=Path(query.work.checkpoint) / name)

    # Saved ----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self._state() | {"classes": self.bag.classes}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        bag = Bag(state["X"], expect(state["base"], Fitted).labels, state["classes"])
        return cls._again(state, bag, (Fitted, Method))


# Intervals ------------------------------------------------------------------------------------------------------------


@savable
class FittedRegressionInBag(BehindTransformers, FittedRegression):
    """The same of a regressor: transformers that look at objects only are fitted once for all values of an object."""

    base: FittedRegression

    def __init__(
        self, base: FittedRegression, method: RegressionMethod, config: Config, transformers: Transformers, bag: Values
    ):
        super().__init__(bag)
        self._keep(base, method, config, transformers, bag)

    def predict(self, X: Any) -> FloatArray:
        return self.base.predict(self._seen(X))

    def residuals(self) -> FloatArray:
        return self.base.residuals()

    def at(self, X: Any) -> tuple[FittedRegression, Any]:
        (_, fitted, objects), *_ = self._asked(X)
        return fitted, objects

    def _asked(self, X: Any) -> Iterator[tuple[npt.NDArray[np.intp], FittedRegression, Any]]:
        """Numbers of some objects of X, the fit that is asked about them, and the objects as it sees them."""
        for group, _ in groups_of(self.transformers, self.bag.X, X, self.inputs.nbytes):
            if group.scales is None or not (fitted := self._fit(transformed(group.points))).takes_scales:
                for one in group.apart():
                    yield one.rows, self._fit(transformed(one.points)), transformed(one.objects)
                continue
            objects, same = transformed(group.objects), (group.scales == 1).all(1)
            if same.any():
                yield group.rows[same], fitted, objects[same]
            for r in np.flatnonzero(~same):
                yield group.rows[r : r + 1], fitted.rescaled(group.scales[r]), objects[r : r + 1] / group.scales[r]

    def _in_order(self, X: Any, query: RegressionQuery, ask: Any) -> Iterator[Any]:
        """What the fit of each object says of it, one by one in their order."""
        m, width, done = _num_samples(X), max(32, 2**22 // self.n), 0
        for start in range(0, m, width):
            some, found = np.arange(start, min(start + width, m)), dict[int, Any]()
            for rows, fitted, objects in self._asked(take(X, some)):
                # What prepares many objects pays for the one fit that has many.
                one = query.of(some[rows], several=fitted is self.base)
                parts = (part for block in ask(fitted, objects, one) for part in block.apart())
                found |= zip(rows.tolist(), parts, strict=True)
                done += len(rows)
                query.progress(done, m)
            yield from (found[row] for row in range(len(some)))

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        return self._in_order(X, query, lambda fitted, objects, one: fitted.steps(objects, one))

    def distributions(self, X: Any, query: RegressionQuery) -> Iterator[Distribution]:
        return self._in_order(X, query, lambda fitted, objects, one: fitted.distributions(objects, one))

    @property
    def figures(self) -> Figures:
        return self.base.figures

    def state(self) -> dict[str, Any]:
        return self._state() | {"y": self.bag.y, "weights": self.bag.weights}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        bag = Values(state["X"], expect(state["y"], np.ndarray), None, expect(state["weights"], np.ndarray, type(None)))
        return cls._again(state, bag, (FittedRegression, RegressionMethod))
