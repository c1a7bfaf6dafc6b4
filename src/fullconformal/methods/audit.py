"""An audit: pairs (x, y) on which a set may depend, scored by honest refits, beside what the method said of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import beta
from sklearn.base import clone
from sklearn.utils.validation import _num_samples
from torch import Tensor

from fullconformal import pvalues
from fullconformal.diagnostics import aligned
from fullconformal.linear.from_problem import Regression
from fullconformal.methods.base import Fitted, FloatArray, IntArray, Query, Values
from fullconformal.methods.fitting import FittedProblem
from fullconformal.methods.regression import FittedRegression, RegressionQuery
from fullconformal.models.objects import take
from fullconformal.models.training import polish
from fullconformal.problem import Problem
from fullconformal.runtime.tasks import Progress
from fullconformal.sets import members

NO_REFITS = (
    "an audit refits the model, which out-of-bag scores have no rule for, and for which a loaded predictor has no training points: "
    "fit again, or check the coverage on held-out points instead."
)


@dataclass(frozen=True)
class Audit:
    """Distances between a method and exact refits on pairs of an object and a label; prints as a table.

    Objects are drawn alike, their labels by `label_chances`: mostly likely ones, and ones with a p-value near the level.

    Attributes
    ----------
    n_pairs, n_refits : int
    n_points : int
        Training points refitted without, a pair; all where it is the size of the bag, else drawn at random.
    p_method, p_exact : ndarray (n_pairs,)
        p-values; the exact ones estimated from `n_points` training points where these are not all.
    score_distance : ndarray
        |α − exact α| of all refitted points.
    weights : ndarray (n_pairs,)
        One over the probability with which the label was drawn for its object; empty where values were drawn, not labels.
    changed : int
        Pairs whose label would enter or leave the set at `confidence_level`.
    """

    n_pairs: int
    n_points: int
    n_training: int
    n_refits: int
    p_method: npt.NDArray[np.float64]
    p_exact: npt.NDArray[np.float64]
    score_distance: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    confidence_level: float

    @property
    def p_distance(self) -> npt.NDArray[np.float64]:
        """|p − exact p| (n_pairs,)."""
        return np.abs(self.p_method - self.p_exact)

    @property
    def changed(self) -> int:
        """Pairs whose label would enter or leave the set at `confidence_level`."""
        method, exact = self._sides
        return int((method != exact).sum())

    @property
    def lost(self) -> tuple[float, float, float]:
        """Labels per object that are in the exact set and not in the method's: an estimate, and its 95 % interval.

        The mean of the weights of such pairs is an unbiased estimate, whatever labels are drawn. The interval is Clopper and Pearson's for
        the number of such pairs, times what one weighs.
        """
        method, exact = self._sides
        events = exact & ~method
        k, n, weighed = int(events.sum()), self.n_pairs, self.weights[events] if events.any() else self.weights
        low = beta.ppf(0.025, k, n - k + 1) if k else 0.0
        high = beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
        return tuple(float(share * weighed.mean()) for share in (k / n, low, high))  # type: ignore[return-value]

    @property
    def error_rate(self) -> tuple[float, float, float]:
        """The largest error rate that the audit implies at `confidence_level`, and its 95 % interval.

        Exact sets miss the true label with probability ε at most; the method's also where it is among the labels that they lost.
        """
        return tuple(min(1 - self.confidence_level + lost, 1.0) for lost in self.lost)  # type: ignore[return-value]

    @property
    def _sides(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Whether the label of each pair is in the method's set, and in the exact one."""
        method, exact = (members(p, 1 - self.confidence_level) for p in (self.p_method, self.p_exact))
        return method, exact

    def __str__(self) -> str:
        part = "" if self.n_points == self.n_training else f" ({self.n_points} of {self.n_training} points a pair)"
        part = part if self.n_refits else ": the method is full CP itself"
        # Of intervals values are drawn, and points of which only some are refitted without estimate p.
        kind, far = "label" if len(self.weights) else "value", self.score_distance
        score = f"{far.mean():.2e} / {far.max():.2e}" if len(far) else "none: the method orders, it does not score"
        drawn = 0 < self.n_points < self.n_training and self.n_refits
        # The share of n_points that are above has this error, whatever the method.
        spread = np.sqrt((self.p_exact * (1 - self.p_exact)).mean() / max(self.n_points, 1))
        chance = f" (drawn points alone: about {spread:.0e})" if drawn else ""
        rows = [
            (f"pairs (object, {kind})", f"{self.n_pairs}"),
            ("refits", f"{self.n_refits}{part}"),
            ("score distance, mean / largest", score),
            ("p-value distance, mean / largest", f"{self.p_distance.mean():.2e} / {self.p_distance.max():.2e}{chance}"),
            (f"{kind}s that change sides at {self.confidence_level:.0%}", f"{self.changed} of {self.n_pairs}"),
        ]
        # Of intervals values were drawn, which stand for no share of anything.
        if len(self.weights):
            rows += [
                ("labels lost per object", "{:.2f} ({:.2f} to {:.2f})".format(*self.lost)),
                ("error rate implied, at most", "{:.2f} ({:.2f} to {:.2f})".format(*self.error_rate)),
            ]
        return aligned(rows)


class ProblemRefits:
    """Minimisers of F over changed bags: Newton's for logistic regressions, L-BFGS's for others.

    L-BFGS starts from θ_Z, and again from a second fit to Z, found from θ_Z moved by half of itself at random: the better end counts. From
    θ_Z alone it would stay beside the fit that the method approximates from.
    """

    def __init__(self, fitted: FittedProblem, rng: np.random.RandomState):
        self.inputs, self.problem = fitted.inputs, fitted.problem
        problem = self.problem
        self.work = Problem(
            copy.deepcopy(problem.model), problem.X, problem.y, chunk=problem.chunk, loss=problem.loss
        )  # fmt: skip
        self.start = problem.theta
        self.penalty = {name: float(part.mean()) for name, part in problem.unpack(problem.penalty).items()}
        self.starts, self.base = [self.start], self.start
        if not problem.is_linear:
            noise = torch.as_tensor(rng.normal(size=len(self.start))).to(self.start)
            self.starts = [self.start, self.start * (1 + noise / 2)]
            self.starts = [end for _, end in self.ends(problem.X, problem.y, max_iter=500)]
            # Under it the candidate of the deleted scheme is scored.
            self.base = self.fit(problem.X, problem.y).theta

    def loss(self, X: Tensor, y: Tensor, at: Tensor, label: Tensor) -> float:
        """Loss of the point (at, label) under the fit on (X, y)."""
        bag = self.fit(X, y)
        return float(bag.loss.value(bag.logits(at[None]), label[None])[0])

    def fit(self, X: Tensor, y: Tensor) -> Problem:
        """The problem (X, y) at its minimiser; its model is that of the next one, too."""
        self.work.assign(self.start)
        bag = Problem(self.work.model, X, y, self.penalty, self.problem.chunk, self.problem.loss)
        regression = Regression.of(bag) if bag.is_linear else None
        if regression is not None:
            regression.assign(regression.bag.fit.theta[:, :, 0])
            return bag
        bag.assign(min(self.ends(X, y), key=lambda end: end[0])[1])
        return bag

    def ends(self, X: Tensor, y: Tensor, max_iter: int = 100) -> list[tuple[float, Tensor]]:
        """F and θ where L-BFGS ends from each start; a fit to nearly the same bag is near, and 100 steps lead there."""
        bag, found = Problem(self.work.model, X, y, self.penalty, self.problem.chunk, self.problem.loss), []
        for start in self.starts:
            bag.assign(start)
            polish(bag.model, X, y, self.penalty, max_iter=max_iter, loss=bag.loss)
            with torch.no_grad():
                found.append((float(bag.value(bag.theta)), bag.theta.clone()))
        return found

    def scores(
        self, X: Any, label: int, points: npt.NDArray[np.int64], q: float, tick: Callable[[], None]
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Exact scores of some training points (k,) and of the candidate of object X (1, ...); a tick after each refit."""
        problem, x = self.problem, self.inputs(X)[0]
        own = torch.tensor(label, device=problem.y.device)
        X, y = torch.cat([problem.X, x[None]]), torch.cat([problem.y, own[None]])
        if q == 0:
            self.loss(X, y, x, own)
            scored = torch.as_tensor(np.append(points, len(y) - 1), device=y.device)
            tick()
            out = problem.loss.value(self.work.logits(X[scored]), y[scored]).double().cpu().numpy()
            return out[:-1], float(out[-1])
        alpha = np.zeros(len(points))
        for k, i in enumerate(points.tolist()):
            keep = torch.arange(len(y), device=y.device) != i
            alpha[k] = self.loss(X[keep], y[keep], problem.X[i], problem.y[i])
            tick()
        self.work.assign(self.base)
        return alpha, float(problem.loss.value(self.work.logits(x[None]), own[None])[0])


def label_chances(p: npt.NDArray[np.float64], proba: npt.NDArray[np.float64], level: float) -> npt.NDArray[np.float64]:
    """Probabilities (C,) with which an object's labels are drawn, from p-values (C,) and the model's probabilities (C,).

    Nine parts in ten go to labels that are likely, or whose odds p/(1 − p) are near those of the level; of many labels most are
    hopeless, and would be found so by any method. One part goes to all alike, so that every label may be drawn.
    """
    odds = np.log(p / (1 - p + 1e-9)) - np.log((1 - level) / level)
    weight = proba + np.exp(-2 * np.abs(odds))
    return np.asarray(0.9 * weight / weight.sum() + 0.1 / len(p))


def audit_fitted(
    fitted: Fitted, X: Any, query: Query, n_pairs: int, max_refits: int, level: float, rng: np.random.RandomState, progress: Progress,
) -> Audit:  # fmt: skip
    """Audit of a fitted method on pairs of objects X (m, ...) and labels.

    A method that is full CP itself, and kept no problem, has nothing to be repeated: its p-values are those of refits.
    """
    n, first = fitted.n, fitted.at(take(X, [0]), 0)[0]
    refits = ProblemRefits(first, rng) if isinstance(first, FittedProblem) else first.refits()
    if refits is None and not fitted.guarantee.is_exact:
        unkept = "an audit refits the model, and this one's training points were not kept; audit on arrays instead."
        raise ValueError(NO_REFITS if fitted.guarantee.reason else unkept)
    starts = len(refits.starts) if isinstance(refits, ProblemRefits) else 1
    n_points, total = n, 0
    if isinstance(refits, ProblemRefits):
        n_points = n if query.q == 0 else min(n, max(max_refits // (n_pairs * starts), 1))
        total = n_pairs * starts * (1 if query.q == 0 else n_points)
    elif refits is not None:
        # Which score all points at once.
        n_pairs = max(1, min(n_pairs, max_refits // refits.a_pair))
        total = n_pairs * refits.a_pair
    ticks = count(1)

    def tick() -> None:
        progress(starts * next(ticks), total)

    p_method, p_exact, distances, weights = [], [], [], []
    for _ in range(n_pairs):
        x = take(X, [rng.randint(_num_samples(X))])
        every = fitted.p_values(x, query)[0]
        chances = label_chances(every, np.exp(fitted.log_proba(x)[0]), level)
        label = int(rng.choice(fitted.n_classes, p=chances))
        p = float(every[label])
        p_method.append(p)
        weights.append(1 / chances[label])
        # With transformers in the bag, another fit for each object.
        one, x = fitted.at(x, label)
        if refits is None:
            p_exact.append(p)
            continue
        points = np.sort(rng.choice(n, n_points, replace=False))
        own_refits = ProblemRefits(one, rng) if isinstance(one, FittedProblem) and one is not first else refits
        exact, own = own_refits.scores(x, label, points, query.q, tick)
        told = one.scores(x, query)
        if told is None:
            p_exact.append((1 + n * not_below(exact, own)) / (n + 1))
            continue
        alpha, tau = told[0][0, label][points], told[1][0, label]
        distances.append(np.abs(alpha - exact))
        # What the drawn points say of the difference is carried over to all.
        shift = not_below(exact, own) - not_below(alpha, tau)
        p_exact.append(min(max(p + shift * n / (n + 1), 1 / (n + 1)), 1.0))
    far = np.concatenate(distances) if distances else np.empty(0)
    pairs = np.array(p_method), np.array(p_exact), far, np.array(weights)
    return Audit(n_pairs, n_points, n, total, *pairs, level)


def not_below(alpha: npt.NDArray[np.float64], tau: float) -> float:
    """The share of scores (k,) above or tied with τ: refits end within about 1e-9 of their minimum, so equal points differ by as much."""
    return float((pvalues.order(alpha, tau, 1e-7 * (1 + abs(tau))) >= 0).mean())


# Of intervals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueRefits:
    """Honest scores of a regressor of scikit-learn's kind: |r|^(1 − q)·|r₋|^q, for the residual r of the fit to the bag and r₋ without it.

    As r₋ = r/(1 − leverage) where residuals are linear in y, this is |r|/(1 − leverage)^q.
    """

    model: Any
    bag: Values

    def scores(
        self, X: Any, value: float, points: IntArray, q: float, tick: Callable[[], None]
    ) -> tuple[FloatArray, float]:
        """Scores of some training points (k,) and of the candidate of object X (1, d); a tick after each refit."""
        bag = self.bag.with_candidate(X, value)
        asked, every = [*points, len(bag.y) - 1], np.arange(len(bag.y))
        with_it, without = np.ones((2, len(asked)))
        if q < 1:
            with_it = self._residuals(bag, every, every)[asked]
            tick()
        for k, i in enumerate(asked if q > 0 else []):
            without[k] = self._residuals(bag, every[every != i], every[[i]])[0]
            tick()
        scores = with_it ** (1 - q) * without**q
        return scores[:-1], float(scores[-1])

    def _residuals(self, bag: Values, train: IntArray, at: IntArray) -> FloatArray:
        """|y − f| of some points under the fit to others."""
        part, scored = bag.part(train), bag.part(at)
        return np.asarray(np.abs(scored.y - clone(self.model).fit(part.X, part.y).predict(scored.X)))


def audit_regression(
    fitted: FittedRegression, model: Any, X: Any, n_pairs: int, max_refits: int, q: float, level: float, rng: Any,
    progress: Progress,
) -> Audit:  # fmt: skip
    """Of pairs of an object of X (m, ...) and the residual of a training point, halved or doubled, beside the object's prediction.

    A method has refits of its own kind, or those of the model, one of scikit-learn's, stand for it.
    """
    n, own = fitted.n, fitted.refits()
    if own is None and not fitted.keeps_points:
        raise ValueError(NO_REFITS)
    if own is not None:
        # Which score all points at once.
        n_pairs = max(1, min(n_pairs, max_refits // own.a_pair))
    n_points = n if q == 0 or own is not None else min(n, max(1, max_refits // n_pairs))
    a_pair = own.a_pair if own is not None else (q < 1) + (q > 0) * (n_points + 1)
    ticks = count(1)

    def tick() -> None:
        progress(next(ticks), n_pairs * a_pair)

    rows = rng.randint(_num_samples(X), size=n_pairs)
    drawn = rng.choice(fitted.residuals(), n_pairs) * rng.choice([0.5, 1.0, 2.0], n_pairs)
    p_method, p_exact = np.empty((2, n_pairs))
    for k, row in enumerate(rows.tolist()):
        x = take(X, [row])
        value = float(fitted.predict(x)[0] + drawn[k])
        p_method[k] = next(iter(fitted.steps(x, RegressionQuery(q)))).p([[value]])[0, 0]
        points = rng.choice(n, n_points, replace=False)
        # With transformers in the bag, another fit for each object.
        one, x = fitted.at(x)
        refits = ValueRefits(model, one.bag) if own is None else own
        alpha, tau = refits.scores(x, value, points, q, tick)
        # Iterative solvers stop at a tolerance of their own.
        greater, equal = pvalues.count(alpha, tau, 1e-9 * (1 + abs(tau)))
        p_exact[k] = pvalues.p_values(greater * n / n_points, equal * n / n_points, n)
    return Audit(n_pairs, n_points, n, n_pairs * a_pair, p_method, p_exact, np.empty(0), np.empty(0), level)
