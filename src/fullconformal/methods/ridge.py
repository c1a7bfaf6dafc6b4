"""Exact full CP for ridge regressions, in columns or in kernels: residuals are linear in the candidate's value, so nothing is refitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.kernel_ridge import KernelRidge as KernelRidgeModel
from sklearn.linear_model import LinearRegression, RidgeCV
from sklearn.metrics.pairwise import pairwise_kernels

from fullconformal.diagnostics import Figures
from fullconformal.guarantees import APPROXIMATE, EXACT
from fullconformal.intervals import Steps
from fullconformal.linear.ridge import KernelRidge, Lines, Ranking, Ridge
from fullconformal.methods.base import Config, FloatArray, Values
from fullconformal.methods.fitting import L2_LINEAR
from fullconformal.methods.regression import (
    FittedLines,
    FittedRegression,
    RegressionMethod,
    RegressionQuery,
    blocks,
    check_points,
    just_below,
    rows_in_cache,
    steps_of,
)
from fullconformal.storage import require, savable

CHOSEN = "the penalty was chosen on the training points alone, without the candidate"


@savable
class FittedRidge(FittedLines):
    """A ridge regression of the training points."""

    method = "exact"

    def __init__(self, bag: Values, fit: Ridge, chosen: bool = False):
        """A penalty that was chosen on the training points is no function of the bag with a candidate."""
        super().__init__(bag)
        self.fit, self.chosen = fit, chosen
        self.guarantee = APPROXIMATE.because(CHOSEN) if chosen else EXACT
        self.weighs_candidates = bag.weights is not None
        if self.weighs_candidates:
            self.guarantee = EXACT.because("if weights come with their points, as a function of them does")
        self._rankings: dict[float, Ranking | None] = {}
        # Singular values are read from the root less the penalty, and their vectors divided by them.
        size = fit.root**2 - fit.penalty
        self.takes_scales = bool(fit.mass is None and fit.constant > 0 and (size > 1e-6 * fit.root**2).all())  # type: ignore[misc]

    def rescaled(self, scales: FloatArray) -> FittedRidge:
        return FittedRidge(Values(self.bag.X / scales, self.bag.y), self.fit.rescaled(self.bag.y, scales))

    def predict(self, X: Any) -> FloatArray:
        return self.fit.predict(np.asarray(X, dtype=np.float64))

    def _lines(self, X: Any, query: RegressionQuery) -> Iterator[tuple[slice, Lines]]:
        X = np.asarray(X, dtype=np.float64)
        step = rows_in_cache(self.n)
        for at in blocks(X, self.n, query.progress, many=True):
            own = None if query.mass is None else query.mass[at]
            for k, lines in enumerate(self.fit.lines(X[at], query.q, step, own=own)):
                start = at.start + k * step
                yield slice(start, start + len(lines.centre)), lines

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        if query.several and (ranks := query.ranks(self.n)) is not None:
            if query.q not in self._rankings:
                self._rankings[query.q] = self.fit.ranking(query.q)
            if (ranking := self._rankings[query.q]) is not None:
                return self._near(np.asarray(X, dtype=np.float64), query, ranking, ranks)
        return super().steps(X, query)

    def _near(self, X: FloatArray, query: RegressionQuery, ranking: Ranking, ranks: tuple[int, int]) -> Iterator[Steps]:
        """The pieces that may end where intervals do."""
        for at in blocks(X, self.n, query.progress, many=True):
            points, wider = self.fit.near(X[at], query.q, ranking, *ranks)
            for lines in self.fit.lines(X[at], query.q, rows_in_cache(len(points)), points):
                steps = steps_of(lines, query, at)
                yield replace(steps, total=np.full(len(steps), float(self.n)), wider=wider)

    @property
    def figures(self) -> Figures:
        leverage = self.fit.leverage()
        facts = {"rank of the table": f"{len(self.fit.root)}", "penalty (sum form)": f"{self.fit.penalty:.4g}"}
        return Figures(self.n, float(leverage.sum()), float(leverage.max()), facts)

    @property
    def warnings(self) -> list[str]:
        alone = int((self.fit.free_share == 0).sum())
        if not alone:
            return []
        return [
            f"{alone} of {self.n} training points decide a parameter by themselves, whatever their value: their residuals say nothing, and "
            "intervals may be infinite. Take a penalty (Ridge), fewer columns or more points"
        ]

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        check_fit(state["fit"], state["bag"])


def check_fit(fit: Ridge, bag: Values) -> None:
    """Raise unless a loaded fit is one of these points."""
    check_points(bag)
    n, d = bag.X.shape
    r = len(fit.root)
    shapes = (
        fit.rows.shape == (n, r) and fit.axes.shape == (d, r) and fit.weight.shape == (r,) and fit.mean.shape == (d,)
    )
    require(shapes and fit.residual.shape == fit.free_share.shape == (n,) and bool((fit.root > 0).all()), "fit")
    require((fit.mass is None) == (bag.weights is None), "weights")
    require(fit.mass is None or (fit.mass.shape == (n,) and bool((fit.mass > 0).all())), "weights")


@savable
class FittedKernel(FittedLines):
    """A ridge regression in a kernel."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, bag: Values, fit: KernelRidge, model: KernelRidgeModel | GaussianProcessRegressor):
        super().__init__(bag)
        self.fit, self.model = fit, model

    def predict(self, X: Any) -> FloatArray:
        X = np.asarray(X, dtype=np.float64)
        return np.concatenate([kernel(self.model, X[at], self.bag.X) @ self.fit.dual for at in blocks(X, self.n)])

    def _lines(self, X: Any, query: RegressionQuery) -> Iterator[tuple[slice, Lines]]:
        X = np.asarray(X, dtype=np.float64)
        for at in blocks(X, self.n, query.progress, many=True):
            own = own_kernel(self.model, X[at])
            yield at, self.fit.lines(kernel(self.model, X[at], self.bag.X), own, query.q)

    @property
    def figures(self) -> Figures:
        # The noise, by which a kernel with itself exceeds that with an equal object.
        noise = own_kernel(self.model, self.bag.X[:1])[0] - kernel(self.model, self.bag.X[:1], self.bag.X[:1])[0, 0]
        leverage = 1 - noise * self.fit.diagonal
        return Figures(self.n, float(leverage.sum()), float(leverage.max()), {"noise": f"{noise:.4g}"})

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        fit, n = state["fit"], len(state["bag"].y)
        check_points(state["bag"])
        require(fit.factor.shape == (n, n) and fit.diagonal.shape == fit.dual.shape == (n,), "fit")
        require(np.ndim(state["model"].alpha) == 0, "alpha")


def kernel(model: Any, X: FloatArray, Y: FloatArray) -> FloatArray:
    """k (m, n) of objects X (m, d) and Y (n, d), without noise."""
    if isinstance(model, GaussianProcessRegressor):
        return np.asarray(model.kernel(X, Y))
    named = {"gamma": model.gamma, "degree": model.degree, "coef0": model.coef0}
    options = (model.kernel_params or {}) if callable(model.kernel) else named
    return np.asarray(pairwise_kernels(X, Y, metric=model.kernel, filter_params=not callable(model.kernel), **options))


def own_kernel(model: Any, X: FloatArray) -> FloatArray:
    """k(x, x) (m,) of objects X (m, d), with noise."""
    if isinstance(model, GaussianProcessRegressor):
        return np.asarray(model.kernel.diag(X) + model.alpha)
    parts = [X[start : start + 64] for start in range(0, len(X), 64)]
    return np.concatenate([np.diag(kernel(model, part, part)) for part in parts]) + float(model.alpha)


@savable
class FittedRidgeCV(FittedRegression):
    """Ridge regressions of several penalties; of each bag the one with the smallest sum of squared leave-one-out residuals counts."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, bag: Values, fits: list[Ridge]):
        super().__init__(bag)
        self.fits = fits
        errors = [float(((fit.residual / fit.free_share) ** 2).sum()) for fit in fits]
        self.chosen = fits[int(np.argmin(errors))]

    def predict(self, X: Any) -> FloatArray:
        return self.chosen.predict(np.asarray(X, dtype=np.float64))

    def steps(self, X: Any, query: RegressionQuery) -> Iterator[Steps]:
        X = np.asarray(X, dtype=np.float64)
        for row in range(len(X)):
            at = slice(row, row + 1)
            left_out = [next(fit.lines(X[at], 1.0)) for fit in self.fits]
            parts = []
            for (start, end), best in zip(*lowest([squares(lines) for lines in left_out]), strict=True):
                steps = steps_of(next(self.fits[best].lines(X[at], query.q)), query, at)
                # Of neighbouring ranges one holds the end they share.
                lower, upper = np.maximum(steps.lower, start), np.minimum(steps.upper, just_below(end))
                empty = (lower > upper) | (steps.lower == np.inf)
                lower[empty], upper[empty] = np.inf, np.inf
                parts.append((lower, upper, steps))
            steps = parts[0][2]
            weight = None if steps.weight is None else np.concatenate([part[2].weight for part in parts])
            yield Steps(
                np.concatenate([part[0] for part in parts], axis=1), np.concatenate([part[1] for part in parts], axis=1),
                steps.total, weight, steps.own,
            )  # fmt: skip
            query.progress(row + 1, len(X))

    @property
    def figures(self) -> Figures:
        return FittedRidge(self.bag, self.chosen).figures

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        require(0 < len(state["fits"]) <= 2**10, "number of penalties")
        for fit in state["fits"]:
            check_fit(fit, state["bag"])


def squares(lines: Lines) -> tuple[float, float, float]:
    """Coefficients of 1, y and y² in the sum of squared leave-one-out residuals of a bag with a candidate of value y."""
    size, slope, f = lines.size / lines.edge[0], lines.slope[0] / lines.edge[0], float(lines.centre[0])
    a, b, c = float(size @ size), -2 * float(size @ slope), 1 + float(slope @ slope)
    return a - b * f + c * f**2, b - 2 * c * f, c


def lowest(parabolas: list[tuple[float, float, float]]) -> tuple[list[tuple[float, float]], list[int]]:
    """Ranges of y, ascending, and which of the parabolas is the lowest in each; the first where several are."""
    i, j = np.tril_indices(len(parabolas), -1)
    a, b, c = (np.array(parabolas)[i] - np.array(parabolas)[j]).T
    with np.errstate(all="ignore"):
        # Where two are equal; of both roots the one without cancellation first.
        far = -0.5 * (b + np.copysign(np.sqrt(b * b - 4 * a * c), b))
        roots = np.concatenate([far / c, a / far])
    ends = [-np.inf, *np.unique(roots[np.isfinite(roots)]).tolist(), np.inf]
    ranges: list[tuple[float, float]] = []
    best: list[int] = []
    for start, end in pairwise(ends):
        middle = 0.0 if len(ends) == 2 else end - 1 - abs(end) if start == -np.inf else start + 1 + abs(start)
        if np.isfinite(start) and np.isfinite(end):
            middle = (start + end) / 2
        lowest_here = int(np.argmin(np.array(parabolas) @ [1.0, middle, middle**2]))
        if best and best[-1] == lowest_here:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
            best.append(lowest_here)
    return ranges, best


@savable
class RidgeRegression(RegressionMethod):
    """Full CP itself for linear and kernel ridge regressions, from one factorisation."""

    name = "exact"
    takes_weights = True

    def fit(self, bag: Values, config: Config) -> FittedRegression:
        X, y, model = np.asarray(bag.X, dtype=np.float64), bag.y, self.model
        if isinstance(model, (KernelRidgeModel, GaussianProcessRegressor)):
            return self._fit_kernel(Values(X, y), config)
        if bag.weights is not None and not (bag.weights > 0).all():
            raise ValueError(
                "sample_weight holds 0, which tells exact full CP nothing: leave these points out, or take method='folds'."
            )
        if model is None:
            l2 = L2_LINEAR if config.l2 is None else config.l2
            return FittedRidge(bag, Ridge.fit(X, y, len(y) * l2, True, bag.weights))
        if isinstance(model, LinearRegression):
            return FittedRidge(bag, Ridge.fit(X, y, 0.0, model.fit_intercept, bag.weights))
        if isinstance(model, RidgeCV):
            if model.cv is not None or model.scoring is not None:
                penalty = float(clone(model).fit(X, y).alpha_)
                return FittedRidge(bag, Ridge.fit(X, y, penalty, model.fit_intercept), chosen=True)
            penalties = np.atleast_1d(np.asarray(model.alphas, dtype=np.float64))
            return FittedRidgeCV(bag, [Ridge.fit(X, y, float(penalty), model.fit_intercept) for penalty in penalties])
        return FittedRidge(bag, Ridge.fit(X, y, float(model.alpha), model.fit_intercept, bag.weights))

    def _fit_kernel(self, bag: Values, config: Config) -> FittedKernel:
        X, y, n, model = bag.X, bag.y, len(bag.y), clone(self.model)
        # M, which its factor overwrites, the inverse of the factor, and a quarter of one while they are formed.
        if (needed := 18 * n**2) > config.memory:
            raise ValueError(
                f"the kernel matrix of {n:,} points needs {needed / 2**30:.3g} GiB, more than memory_budget={config.memory / 2**30:.3g}; "
                "raise it, give fewer points, or take Ridge on features (Nystroem)."
            )
        if isinstance(model, GaussianProcessRegressor) and model.kernel is None:
            # What scikit-learn takes.
            model.set_params(kernel=type(self.model)().fit(X[:1], y[:1]).kernel_)
        M = kernel(model, X, X)
        M[np.diag_indices(n)] = own_kernel(model, X)
        try:
            return FittedKernel(bag, KernelRidge.fit(M, y), model)
        except np.linalg.LinAlgError as error:
            raise ValueError(
                f"the kernel matrix of {type(model).__name__} is not positive definite: two objects are equal or nearly so and there is "
                "no noise. Raise alpha, or add a WhiteKernel."
            ) from error
