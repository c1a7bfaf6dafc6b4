"""An audit: random pairs (x, y), scored by honest refits, beside what the method said of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.from_problem import Regression
from fullconformal.methods.base import Fitted, Query
from fullconformal.methods.fitting import FittedProblem
from fullconformal.models.training import polish
from fullconformal.problem import Problem
from fullconformal.runtime.tasks import Progress
from fullconformal.sets import members


@dataclass(frozen=True)
class Audit:
    """Distances between a method and exact refits on random pairs; prints as a table.

    Attributes
    ----------
    n_pairs, n_refits : int
    n_points : int
        Training points refitted without, a pair; all where it is the size of the bag, else drawn at random.
    p_method, p_exact : ndarray (n_pairs,)
        p-values; the exact ones estimated from `n_points` training points where these are not all.
    score_distance : ndarray
        |α − exact α| of all refitted points.
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
    confidence_level: float

    @property
    def p_distance(self) -> npt.NDArray[np.float64]:
        """|p − exact p| (n_pairs,)."""
        return np.abs(self.p_method - self.p_exact)

    @property
    def changed(self) -> int:
        """Pairs whose label would enter or leave the set at `confidence_level`."""
        method, exact = (members(p, 1 - self.confidence_level) for p in (self.p_method, self.p_exact))
        return int((method != exact).sum())

    def __str__(self) -> str:
        part = "" if self.n_points == self.n_training else f" ({self.n_points} of {self.n_training} points a pair)"
        part = part if self.n_refits else ": the method is full CP itself"
        far = self.score_distance
        score = f"{far.mean():.2e} / {far.max():.2e}" if len(far) else "none: the method orders, it does not score"
        rows = [
            ("pairs (object, label)", f"{self.n_pairs}"),
            ("refits", f"{self.n_refits}{part}"),
            ("score distance, mean / largest", score),
            ("p-value distance, mean / largest", f"{self.p_distance.mean():.2e} / {self.p_distance.max():.2e}"),
            (f"labels that change sides at {self.confidence_level:.0%}", f"{self.changed} of {self.n_pairs}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class Refits:
    """Minimisers of F over changed bags, each started from θ_Z: Newton for logistic regressions, L-BFGS for others."""

    #: refits for an object and a label that score all points
    a_pair = 1

    def __init__(self, fitted: FittedProblem):
        self.inputs, self.problem = fitted.inputs, fitted.problem
        problem = self.problem
        self.work = Problem(
            copy.deepcopy(problem.model), problem.X, problem.y, chunk=problem.chunk, loss=problem.loss
        )  # fmt: skip
        self.start = problem.theta
        self.penalty = {name: float(part.mean()) for name, part in problem.unpack(problem.penalty).items()}

    def loss(self, X: Tensor, y: Tensor, at: Tensor, label: Tensor) -> float:
        """Loss of the point (at, label) under the fit on (X, y)."""
        self.work.assign(self.start)
        bag = Problem(self.work.model, X, y, self.penalty, self.problem.chunk, self.problem.loss)
        regression = Regression.of(bag) if bag.is_linear else None
        if regression is None:
            polish(bag.model, X, y, self.penalty, tol=1e-5, max_iter=60, loss=bag.loss)
        else:
            regression.assign(regression.bag.fit.theta[:, :, 0])
        return float(bag.loss.value(bag.logits(at[None]), label[None])[0])

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
        self.work.assign(self.start)
        return alpha, float(problem.loss.value(self.work.logits(x[None]), own[None])[0])


def audit_fitted(
    fitted: Fitted,
    X: Any,
    query: Query,
    n_pairs: int,
    max_refits: int,
    level: float,
    rng: np.random.RandomState,
    progress: Progress | None,
) -> Audit:
    """Audit of a fitted method on random pairs of X (m, ...) and labels.

    A method that is full CP itself, and kept no problem, has nothing to be repeated: its p-values are those of refits.
    """
    n, refits = fitted.n, Refits(fitted) if isinstance(fitted, FittedProblem) else fitted.refits()
    if refits is None and not fitted.guarantee.is_exact:
        raise ValueError(
            "an audit refits the model, and this one's training points were not kept; audit on arrays instead."
        )
    whole = query.q == 0 or not isinstance(refits, Refits)
    n_points = n if whole else min(n, max_refits // n_pairs)
    if refits is not None and whole:
        n_pairs = max(1, min(n_pairs, max_refits // refits.a_pair))
    total = 0 if refits is None else n_pairs * (refits.a_pair if whole else n_points)
    ticks = count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(ticks), total)

    p_method, p_exact, distances = [], [], []
    for _ in range(n_pairs):
        at, label = rng.randint(_num_samples(X)), rng.randint(fitted.n_classes)
        x = _safe_indexing(X, [at])
        p = float(fitted.p_values(x, query)[0, label])
        p_method.append(p)
        if refits is None:
            p_exact.append(p)
            continue
        points = np.sort(rng.choice(n, n_points, replace=False))
        exact, own = refits.scores(x, label, points, query.q, tick)
        told = fitted.scores(x, query)
        if told is None:
            p_exact.append((1 + n * not_below(exact, own)) / (n + 1))
            continue
        alpha, tau = told[0][0, label][points], told[1][0, label]
        distances.append(np.abs(alpha - exact))
        # What the drawn points say of the difference is carried over to all.
        shift = not_below(exact, own) - not_below(alpha, tau)
        p_exact.append(min(max(p + shift * n / (n + 1), 1 / (n + 1)), 1.0))
    far = np.concatenate(distances) if distances else np.empty(0)
    return Audit(n_pairs, n_points, n, total, np.array(p_method), np.array(p_exact), far, level)


def not_below(alpha: npt.NDArray[np.float64], tau: float) -> float:
    """The share of scores (k,) above or tied with τ: refits end within about 1e-9 of their minimum, so equal points differ by as much."""
    return float((pvalues.order(alpha, tau, 1e-7 * (1 + abs(tau))) >= 0).mean())
