"""Fitted regressors that give bands, and the scores of points they have not seen: p(y) of each object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import Ridge
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples

from fullconformal.bands import Band, FloatArray
from fullconformal.intervals import Steps
from fullconformal.methods.base import Config
from fullconformal.methods.fitting import fit_foreign
from fullconformal.methods.outputs import predictions
from fullconformal.methods.parts import Part, fit_each
from fullconformal.runtime.tasks import progress_bar
from fullconformal.storage import require, savable

IntArray = npt.NDArray[np.int64]


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
    """A fit on parts of the data: the regressor, objects X (n, ...), numbers y (n,), how models are trained, random numbers."""

    estimator: Any
    X: Any
    y: FloatArray
    config: Config
    rng: np.random.RandomState
    verbose: int | None

    def fit_to(self, train: IntArray, estimator: Any = None, y: FloatArray | None = None) -> Any:
        """The regressor, or another one, fitted to the points `train` and their values, or other values (n,)."""
        y = self.y if y is None else y
        estimator = self.estimator if estimator is None else estimator
        return fit_foreign(Ridge() if estimator is None else estimator, self.at(train), y[train], self.config.seed)

    def at(self, points: IntArray) -> Any:
        """Some of the objects."""
        return _safe_indexing(self.X, points)

    def folds(self, parts: Sequence[Part]) -> tuple[PointBands, FloatArray, IntArray]:
        """A model for each part, the score (n,) of each point by the model that has not seen it, and which model that is (n,)."""
        score, which = np.empty(len(self.y)), np.empty(len(self.y), dtype=np.int64)
        with progress_bar("training", self.verbose) as progress:
            models = list(fit_each(self._fit_part, parts, self.config, progress))
        for k, (model, (_, rest)) in enumerate(zip(models, parts, strict=True)):
            score[rest] = PointBands([model])(self.at(rest)).scores(self.y[rest])[:, 0]
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
    every point; "plus" takes the lower and the upper ends for themselves, each side in order. Groups (n,), numbers into `names`, keep
    points apart that are not compared.
    """

    bands: Any
    score: FloatArray
    model: IntArray
    rule: str = "own"
    group: IntArray | None = None
    names: npt.NDArray[Any] | None = None

    def blocks(self, X: Any) -> Iterator[tuple[slice, Band]]:
        """Bands of objects X (m, ...), as many objects at a time as make about four million pieces."""
        m, most = _num_samples(X), max(1, 2**22 // len(self.score))
        for start in range(0, m, most):
            rows = slice(start, min(start + most, m))
            yield rows, self.bands(X if m <= most else _safe_indexing(X, np.arange(rows.start, rows.stop)))

    def steps(self, X: Any, group: IntArray | None) -> Iterator[Steps]:
        """p(y) of objects X (m, ...) of groups (m,), −1 for one without points, a block of objects at a time."""
        for rows, band in self.blocks(X):
            if self.rule == "minmax":
                lower, upper = band.hull().pieces(self.score, np.zeros_like(self.model))
            else:
                lower, upper = band.pieces(self.score, self.model)
            total = np.full(len(lower), float(len(self.score)))
            if self.group is not None and group is not None:
                apart = group[rows, None] != self.group
                lower[apart] = upper[apart] = np.inf
                total -= apart.sum(axis=1)
            if self.rule == "plus":
                lower, upper = one_inside_the_other(lower, upper)
            yield Steps(lower, upper, total)

    def intervals(self, X: Any, group: IntArray | None, levels: FloatArray) -> FloatArray:
        """Intervals (m, 2, L) of objects X (m, ...), not by the rule "plus": a score decides the pieces of all objects at once.

        It takes milliseconds where thousands of points calibrate and thousands of objects are asked for, and `steps` seconds.
        """
        out = []
        for rows, band in self.blocks(X):
            band = band.hull() if self.rule == "minmax" else band
            of = np.zeros(len(band.lower), dtype=np.int64) if group is None else group[rows]
            t = np.full((len(of), len(levels)), np.inf)
            for k in np.unique(of[of >= 0]):
                scores = self.score if self.group is None else self.score[self.group == k]
                rays = Steps(np.full((1, len(scores)), -np.inf), scores[None], np.array([float(len(scores))]))
                t[of == k] = rays.interval(levels)[0, 1]
            out.append(np.stack(band.pieces(t, np.zeros(len(levels), dtype=np.int64)), axis=1))
        ends = np.concatenate(out)
        ends[np.broadcast_to(ends[:, :1] == np.inf, ends.shape)] = np.nan
        return ends

    def smallest(self) -> tuple[int, str]:
        """How many points calibrate, of the smallest group if there are groups; and what they are called."""
        if self.group is None or self.names is None:
            return len(self.score), "calibration"
        sizes = np.bincount(self.group, minlength=len(self.names))
        return int(sizes.min()), f"calibration (group {self.names.tolist()[int(sizes.argmin())]!r})"

    def verify(self) -> None:
        """Raise where a loaded one is not whole."""
        n = len(self.score)
        require(
            self.score.dtype == np.float64 and self.score.shape == (n,) and not np.isnan(self.score).any(), "scores"
        )
        require(self.model.shape == (n,) and self.model.dtype == np.int64 and self.rule in RULES, "scores")
        require((self.group is None) == (self.names is None), "groups")
        if self.group is not None and self.names is not None:
            require(self.group.shape == (n,) and self.group.dtype == np.int64 and self.names.ndim == 1, "groups")
            require(bool(((self.group >= 0) & (self.group < len(self.names))).all()), "groups")


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
