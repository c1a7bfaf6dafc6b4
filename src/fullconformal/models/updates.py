"""What well-known transformers learn from one more object, for many objects at once, without a fit for each.

A scaler with an object added differs from that of the training objects by a scale and a place of each column. An imputer or an encoder
mostly does not differ at all: its key says what of it does, and objects with the same key leave the same transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from numbers import Integral
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

from fullconformal.models.objects import dense

FloatArray = npt.NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


# Scalers: x becomes (x − centre)/scale ------------------------------------------------------------------------------------


def is_scaler(step: Any) -> bool:
    """Whether a transformer scales and shifts columns, by rules that are known here."""
    return type(step) in SCALERS and not getattr(step, "clip", False)


def relative_scaling(step: Any, X: Any, new: Any) -> tuple[FloatArray, FloatArray]:
    """Scales and shifts (m, d) that take the scaler of objects X (n, d) to that of X and each of new (m, d).

    What the former makes of x, less the shift and divided by the scale, is what the latter makes of it.
    """
    X, new = (dense(part).astype(np.float64) for part in (X, new))
    # One that is missing changes nothing.
    objects = np.vstack([np.full((1, X.shape[1]), np.nan), new])
    centre, scale = SCALERS[type(step)](step, X, objects)
    return scale[1:] / scale[:1], (centre[1:] - centre[:1]) / scale[:1]


def _standard(step: Any, X: FloatArray, new: FloatArray) -> tuple[FloatArray, FloatArray]:
    there, missing = (~np.isnan(X)).sum(0), np.isnan(new)
    mean, var = np.nanmean(X, axis=0), np.nanvar(X, axis=0)
    apart = np.where(missing, 0.0, new - mean)
    n = there + ~missing
    means, variances = mean + apart / n, (there * var + apart**2 * there / n) / n
    # scikit-learn's rule for columns whose variance is rounding.
    constant = variances <= n * EPS * variances + (n * means * EPS) ** 2
    scale = np.where(constant, 1.0, np.sqrt(variances)) if step.with_std else np.ones_like(means)
    return means if step.with_mean else np.zeros_like(means), scale


def _min_max(step: Any, X: FloatArray, new: FloatArray) -> tuple[FloatArray, FloatArray]:
    low, high = np.fmin(np.nanmin(X, axis=0), new), np.fmax(np.nanmax(X, axis=0), new)
    least, most = step.feature_range
    scale = _no_zeros(high - low) / (most - least)
    return low - least * scale, scale


def _max_abs(step: Any, X: FloatArray, new: FloatArray) -> tuple[FloatArray, FloatArray]:
    scale = _no_zeros(np.fmax(np.nanmax(np.abs(X), axis=0), np.abs(new)))
    return np.zeros_like(scale), scale


def _robust(step: Any, X: FloatArray, new: FloatArray) -> tuple[FloatArray, FloatArray]:
    low, middle, high = (quantile(X, new, q / 100) for q in (step.quantile_range[0], 50.0, step.quantile_range[1]))
    scale = _no_zeros(high - low) if step.with_scaling else np.ones_like(middle)
    if step.with_scaling and step.unit_variance:
        scale = scale / float(np.diff(norm.ppf(np.asarray(step.quantile_range) / 100.0))[0])
    return middle if step.with_centering else np.zeros_like(middle), scale


def _no_zeros(scale: FloatArray) -> FloatArray:
    """scikit-learn's rule for columns that do not vary."""
    return np.where(scale < 10 * EPS, 1.0, scale)


SCALERS: dict[type, Callable[[Any, FloatArray, FloatArray], tuple[FloatArray, FloatArray]]] = {
    StandardScaler: _standard,
    MinMaxScaler: _min_max,
    MaxAbsScaler: _max_abs,
    RobustScaler: _robust,
}


def quantile(X: FloatArray, new: FloatArray, q: float) -> FloatArray:
    """The q-quantiles (m, d), interpolated linearly, of columns X (n, d) with each of new (m, d) added; missing values are left out."""
    order, there = np.sort(X, axis=0), (~np.isnan(X)).sum(0)
    ends = np.full((1, X.shape[1]), np.inf)
    padded, columns = np.vstack([-ends, np.nan_to_num(order, nan=np.inf), ends]), np.arange(X.shape[1])
    missing = np.isnan(new)
    last = there - missing
    place = last * q

    def at(k: npt.NDArray[np.intp]) -> FloatArray:
        # The k-th of the values with x put in is x, kept between the two neighbours of that place.
        return np.where(missing, padded[k + 1, columns], np.clip(new, padded[k, columns], padded[k + 1, columns]))

    k = np.floor(place).astype(np.intp)
    low, high = at(k), at(np.minimum(k + 1, np.maximum(last, 0)))
    # Both are infinite where a column holds nothing.
    with np.errstate(invalid="ignore"):
        return np.where(high > low, low + (place - k) * (high - low), low)


# Imputers and encoders: keys ----------------------------------------------------------------------------------------------


def keys(step: Any, X: Any, new: Any) -> list[Hashable]:
    """What one more object changes of a transformer, for each of new (m, d): equal keys, equal transformers; () where nothing changes."""
    found = None
    if is_keyed(step):
        found = (_imputer_keys if isinstance(step, SimpleImputer) else _encoder_keys)(step, X, new)
    # Of others nothing is known: each object has its own.
    return [(r,) for r in range(new.shape[0] if hasattr(new, "shape") else len(new))] if found is None else found


def is_keyed(step: Any) -> bool:
    """Whether equal keys are known of a transformer."""
    if type(step) in (SimpleImputer, RoundedImputer):
        return isinstance(step.missing_values, float) and bool(np.isnan(step.missing_values))
    return type(step) in (OneHotEncoder, OrdinalEncoder)


class RoundedImputer(SimpleImputer):  # type: ignore[misc]
    """scikit-learn's imputer of means and medians, which are rounded: one more object seldom changes what is filled in.

    They are multiples of a power of two, of 1/16 to 1/8 of the distance of the column's quartiles. Objects that change nothing share
    one fit, so that methods with transformers in the bag are faster behind it. With ``add_indicator=True`` the value matters little.

    >>> RoundedImputer(strategy="median").fit([[0.0], [1.0], [1.3], [3.0], [np.nan]]).statistics_
    array([1.125])
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn what to fill in from objects X (n, d)."""
        super().fit(X)
        if self.strategy in ("mean", "median"):
            X = dense(X).astype(np.float64)
            found = _filled(self, X, np.full((1, X.shape[1]), np.nan))[0]
            # A column that holds nothing has NaN.
            self.statistics_: FloatArray = np.where(np.isfinite(found), found, np.nan)
        return self


def _filled(step: Any, X: FloatArray, new: FloatArray) -> FloatArray:
    """What is filled in (m, d) by the imputer of objects X (n, d) and each of new (m, d)."""
    filled = _mean(X, new) if step.strategy == "mean" else quantile(X, new, 0.5)
    if not isinstance(step, RoundedImputer):
        return filled
    with np.errstate(invalid="ignore"):
        apart = quantile(X, new, 0.75) - quantile(X, new, 0.25)
    unit = np.ldexp(1.0, np.frexp(apart)[1] - 4)
    # Half the values of a column may be one.
    return np.where(apart > 0, np.round(filled / unit) * unit, filled)


def _imputer_keys(step: Any, X: Any, new: Any) -> list[Hashable] | None:
    """Values that are filled in where training objects lack them, and which columns are marked as lacking some."""
    try:
        X, new = (dense(part).astype(np.float64) for part in (X, new))
    except (TypeError, ValueError):
        return None
    lacking, missing = np.isnan(X).any(0), np.isnan(new)
    if step.strategy == "constant" or not lacking.any():
        filled = np.zeros((len(new), 0))
    elif step.strategy in ("mean", "median"):
        filled = _filled(step, X[:, lacking], np.vstack([np.full((1, int(lacking.sum())), np.nan), new[:, lacking]]))
        # Of a column that holds nothing there is nothing to be filled in.
        filled = np.where(np.isfinite(filled), filled, np.inf)
    else:
        return None
    marked, changed = (
        missing[:, ~lacking],
        (filled != filled[0]).any(1) if filled.size else np.zeros(len(new) + 1, bool),
    )
    parts = zip(filled[1:] if filled.size else marked, marked, changed[1:], strict=True)
    return [(f.tobytes(), s.tobytes()) if c or s.any() else () for f, s, c in parts]


def _mean(X: FloatArray, new: FloatArray) -> FloatArray:
    there, total = (~np.isnan(X)).sum(0) + ~np.isnan(new), np.nansum(X, axis=0) + np.nan_to_num(new)
    mean: FloatArray = np.divide(total, there, out=np.full(new.shape, np.inf), where=there > 0)
    return mean


def _encoder_keys(step: Any, X: Any, new: Any) -> list[Hashable] | None:
    """By column, the level of an object that is new, or that makes other levels rare."""
    X, new = (np.asarray(part, dtype=object) for part in (X, new))
    try:
        columns = [_level_keys(step, X[:, j].tolist(), new[:, j].tolist()) for j in range(X.shape[1])]
    # Levels that cannot be compared.
    except TypeError:
        return None
    return [() if not any(key) else key for key in zip(*columns, strict=True)]


def _level_keys(step: Any, training: list[Any], levels: list[Any]) -> list[Hashable]:
    """Keys (m,) of one column with these levels."""
    counts: dict[Any, int] = {}
    for level in map(_name, training):
        counts[level] = counts.get(level, 0) + 1
    before = _rare(step, counts, len(training))
    known: dict[Any, Hashable] = {}
    for level in map(_name, levels):
        if level not in known:
            new = level not in counts
            after = _rare(step, {**counts, level: counts.get(level, 0) + 1}, len(training) + 1)
            known[level] = level if new or after != before else ()
    return [known[_name(level)] for level in levels]


def _name(level: Any) -> Hashable:
    """A level as it is told from others; missing values are one level each."""
    return (type(level).__name__,) if level is None or level != level else ("", level)


def _rare(step: Any, counts: dict[Any, int], n: int) -> frozenset[Any]:
    """The levels that are rare among n objects; where that depends on an order of levels that was given, all and their numbers."""
    least, most = step.min_frequency, step.max_categories
    bound = 0.0 if least is None else float(least) if isinstance(least, Integral) else least * n
    rare = frozenset(level for level, count in counts.items() if count < bound)
    if most is None or most >= len(counts) - len(rare) + 1:
        return rare
    if not isinstance(step.categories, str):
        return frozenset(counts.items())
    # Of levels as frequent as each other the last in their order are kept; missing ones come last, None before NaN.
    order = sorted(counts, key=lambda level: (len(level) == 1, level))
    order.sort(key=counts.__getitem__)
    return frozenset(order[: len(order) - most + 1])
