"""Fitted regressors that give bands, and the scores of points they have not seen: p(y) of each object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.utils import gen_batches
from sklearn.utils.validation import _num_samples

from fullconformal.conformity import Band, FloatArray
from fullconformal.intervals import Steps, needed
from fullconformal.methods.base import Config, IntArray, Values
from fullconformal.methods.fitting import fit_foreign
from fullconformal.methods.outputs import predictions
from fullconformal.methods.parts import Part, fit_each
from fullconformal.models.objects import take
from fullconformal.runtime.tasks import progress_bar
from fullconformal.storage import require, savable

# Models ---------------------------------------------------------------------------------------------------------------


#: fitted models that give a band of each object, by K models
Bands = Callable[[Any], Band]


@savable
@dataclass(frozen=True)
class PointBands:
    """Regressors of the value: bands of no width."""

    models: list[Any]

    def __call__(self, X: Any) -> Band:
        found = [predictions(model, X) for model in self.models]
        value = np.stack([value for value, _ in found], axis=1)
        return Band(value, value, np.ones_like(value), max(eps for _, eps in found))


@dataclass(frozen=True)
class RegressionFit:
    """A fit on parts of the data: the regressor, the bag, how models are trained, random numbers."""

    estimator: Any
    bag: Values
    config: Config
    rng: np.random.RandomState
    verbose: int | None

    def fit_to(self, train: IntArray, estimator: Any = None, y: FloatArray | None = None) -> Any:
        """The regressor, or another one, fitted to the points `train` and their values, or other values (n,)."""
        estimator = self.estimator if estimator is None else estimator
        # Other values, as errors, have no weights.
        some = (self.bag if y is None else Values(self.bag.X, y)).part(train)
        return fit_foreign(Ridge() if estimator is None else estimator, some.X, some.y, self.config.seed, some.weights)

    def folds(self, parts: Sequence[Part]) -> tuple[PointBands, FloatArray, IntArray]:
        """A model for each part, the score (n,) of each point by the model that has not seen it, and which model that is (n,)."""
        score, which = np.empty(len(self.bag.y)), np.empty(len(self.bag.y), dtype=np.int64)
        with progress_bar("training", self.verbose) as progress:
            models = list(fit_each(self._fit_part, parts, self.config, progress))
        for k, (model, (_, rest)) in enumerate(zip(models, parts, strict=True)):
            some = self.bag.part(rest)
            score[rest] = PointBands([model])(some.X).scores(some.y)[:, 0]
            which[rest] = k
        return PointBands(models), score, which

    def _fit_part(self, part: Part, _: Config) -> Any:
        return self.fit_to(part[0])


# What is calibrated -----------------------------------------------------------------------------------------------------


@savable
@dataclass(frozen=True)
class CalibratedBands:
    """Bands by K models, and the scores (n,) of points, each by the model (n,) that has not seen it.

    The rule says what of a point's scores counts: "own" takes {y : score by its model ≤ its score}; "minmax" takes the models' hull for
    every point; "plus" takes the lower and the upper ends for themselves, each side in order. Points of other categories (n,) are not
    compared.
    """

    bands: Any
    score: FloatArray
    model: IntArray
    rule: str = "own"
    category: IntArray | None = None

    def blocks(self, X: Any) -> Iterator[tuple[slice, Band]]:
        """Bands of objects X (m, ...), as many objects at a time as make about four million pieces."""
        for rows in gen_batches(_num_samples(X), max(1, 2**22 // len(self.score))):
            yield rows, self.bands(take(X, np.arange(rows.start, rows.stop)))

    def steps(self, X: Any, category: IntArray | None) -> Iterator[Steps]:
        """p(y) of objects X (m, ...) of categories (m,), −1 for one without points, a block of objects at a time."""
        for rows, band in self.blocks(X):
            if self.rule == "minmax":
                lower, upper = band.hull().pieces(self.score, np.zeros_like(self.model))
            else:
                lower, upper = band.pieces(self.score, self.model)
            total = np.full(len(lower), float(len(self.score)))
            if self.category is not None and category is not None:
                apart = category[rows, None] != self.category
                lower[apart] = upper[apart] = np.inf
                total -= apart.sum(axis=1)
            if self.rule == "plus":
                lower, upper = one_inside_the_other(lower, upper)
            yield Steps(lower, upper, total)

    def intervals(self, X: Any, category: IntArray | None, levels: FloatArray) -> FloatArray:
        """Intervals (m, 2, L) of objects X (m, ...), without the pieces of p(y) in order, for which `steps` takes many times as long."""
        out = []
        for rows, band in self.blocks(X):
            of = np.zeros(len(band.lower), dtype=np.int64) if category is None else category[rows]
            if self.rule == "plus":
                out.append(self._by_ends(band, of, levels))
                continue
            band = band.hull() if self.rule == "minmax" else band
            # One score decides the ends of all objects.
            t = np.full((len(of), len(levels)), np.inf)
            for k in np.unique(of[of >= 0]):
                scores = self.score if self.category is None else self.score[self.category == k]
                rays = Steps(np.full((1, len(scores)), -np.inf), scores[None], np.array([float(len(scores))]))
                t[of == k] = rays.interval(levels)[0, 1]
            out.append(np.stack(band.pieces(t, np.zeros(len(levels), dtype=np.int64)), axis=1))
        ends = np.concatenate(out)
        ends[np.broadcast_to(ends[:, :1] == np.inf, ends.shape)] = np.nan
        return ends

    def _by_ends(self, band: Band, of: IntArray, levels: FloatArray) -> FloatArray:
        """Ends (m, 2, L) by the rule "plus", of objects of categories (m,): the c-th smallest lower one and the c-th largest upper one.

        The c-th lies where the c-th largest score puts it, up to the spread of the models: points whose score is larger by more than that
        are surely before it, and those whose score is smaller by more are surely behind.
        """
        out = np.empty((len(of), 2, len(levels)))
        out[:, 0], out[:, 1] = -np.inf, np.inf
        for k in np.unique(of[of >= 0]):
            at, points = of == k, slice(None) if self.category is None else self.category == k
            order = np.argsort(-self.score[points])
            score, model = self.score[points][order], self.model[points][order]
            counts = [int(needed(np.array([float(len(score))]), 1 - level)[0]) for level in levels.tolist()]
            if not (places := sorted({count for count in counts if count})):
                continue
            lower, upper = band.lower[at], band.upper[at]
            spread = float((upper.max(axis=1) - lower.min(axis=1)).max())
            # And the rounding of ends.
            spread += 128 * band.eps * float(np.abs(lower).max() + np.abs(upper).max() + score[0])
            first = int(np.searchsorted(-score, -score[places[0] - 1] - spread, "left"))
            last = int(np.searchsorted(-score, spread - score[places[-1] - 1], "right"))
            near = Band(lower, upper, band.scale[at], band.eps)
            lower, upper = near.pieces(score[first:last], model[first:last])
            lower.partition([count - 1 - first for count in places], axis=1)
            upper.partition([last - count for count in places], axis=1)
            for j, count in enumerate(counts):
                if count:
                    low, high = lower[:, count - 1 - first], upper[:, last - count]
                    out[at, :, j] = np.where((low <= high)[:, None], np.stack([low, high], axis=1), np.inf)
        return out

    def verify(self, n_categories: int, apart: bool) -> None:
        """Raise where a loaded one is not whole; `apart` says whether its points are of categories."""
        n = len(self.score)
        require(
            self.score.dtype == np.float64 and self.score.shape == (n,) and not np.isnan(self.score).any(), "scores"
        )
        require(self.model.shape == (n,) and self.model.dtype == np.int64 and self.rule in RULES, "scores")
        # Each has points of its own: bands are held by every model, of as many objects as there are few points.
        models = len(getattr(self.bands, "models", ()))
        require(models <= n and (self.category is not None) == apart, "models or categories")
        if self.category is not None:
            require(self.category.shape == (n,) and self.category.dtype == np.int64, "categories")
            require(bool(((self.category >= 0) & (self.category < n_categories)).all()), "categories")


RULES = ("own", "minmax", "plus")


def one_inside_the_other(lower: FloatArray, upper: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Pieces (m, n) that hold y exactly min(#{i : lower_i ≤ y}, #{i : y ≤ upper_i}) times: the rule of CV+ and jackknife+.

    The k-th takes the k-th smallest lower end and the k-th largest upper one; those of points that do not count are infinite.
    """
    gone = lower == np.inf
    if gone.any():
        upper = np.where(gone, -np.inf, upper)
    lower, upper = np.sort(lower, axis=1), -np.sort(-upper, axis=1)
    crossed = lower > upper
    lower[crossed] = upper[crossed] = np.inf
    return lower, upper
