"""Full conformal prediction of forests from one fit: the bootstrap of each tree leaves points out, and those trees score them.

Take the bag of n + 1 points, candidate included, and grow B trees, each on a bootstrap of the bag. Score every point by the mean of the
trees that did not draw it:

    α_j = 1 − mean {p_b(y_j | x_j) : tree b did not draw z_j},   of numbers   |y_j − mean {f_b(x_j) : tree b did not draw z_j}|

The draws are random and a tree does not care about the order of its points, so these scores are exchangeable and P(p ≤ ε) ≤ ε exactly.
What is done here differs in one thing: the trees are grown on the n training points only. The candidate is scored by a random share of
them, each kept with the probability with which its bootstrap of the n + 1 points would have missed the candidate,

    (1 − 1/(n+1))^s,        s draws from n + 1 points; s = n + 1 unless max_samples says otherwise

and the trees that would have drawn it are left as they are: that is the approximation. All the trees together would be a better
ensemble than the one that scores a training point, and the candidate would conform too well.

A mean over a third of the trees is noisier than one over all, and sets are larger for it. No rule that treats a training point and a
candidate alike can use more of them than have not seen the training point, so more are grown: as many as it takes for a point to be
scored by `n_estimators` trees, or by a hundred where these are more.

A point that every tree drew, or a candidate that no tree is kept for, is scored as if each of the C labels had probability 1/C, a number as
if the mean of all values were predicted: the same rule for all points, so it costs no validity. With a hundred trees it does not happen
(0.632^100 ≈ 1e-20); with ten, to one point in a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_256
from math import ceil
from numbers import Integral
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import sklearn
from sklearn.base import clone
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.ensemble._forest import BaseForest
from sklearn.utils.fixes import parse_version

from fullconformal import pvalues
from fullconformal.guarantees import APPROXIMATE
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, IntArray, Method, Query, starts_with
from fullconformal.methods.fitting import fit_foreign
from fullconformal.methods.outputs import log_of
from fullconformal.storage import LIMITS, require, savable

CLASSIFIERS = (RandomForestClassifier, ExtraTreesClassifier, BaggingClassifier)
REGRESSORS = (RandomForestRegressor, ExtraTreesRegressor, BaggingRegressor)
ENSEMBLES = (*CLASSIFIERS, *REGRESSORS)
PROMISE = APPROXIMATE.because(
    "the trees that would have drawn the candidate were grown without it; with it, out-of-bag scores are exactly valid. "
    "The difference is measured, not proved"
)
# Members whose mean more of them hardly change.
MANY = 100


def is_forest(model: Any) -> bool:
    """Whether a model is an ensemble whose members are fitted to bootstraps of the points."""
    return isinstance(model, ENSEMBLES) and bool(model.bootstrap)


def check_forest(model: Any, prefit: bool = False) -> None:
    """Raise where there are no out-of-bag points."""
    if prefit:
        raise ValueError(
            "method='oob' needs to know which points each tree drew, so prefit=True cannot be combined with it; it is one fit."
        )
    if isinstance(model, ENSEMBLES) and not model.bootstrap:
        raise ValueError(
            f"method='oob' scores a point by the trees that did not draw it, and estimator={type(model).__name__}(bootstrap=False) "
            "grows every tree on every point; set bootstrap=True."
        )
    if not is_forest(model):
        kind = "None" if model is None else type(model).__name__
        raise ValueError(
            f"method='oob' needs an ensemble fitted to bootstraps, and estimator={kind} is none; give a random forest, extra "
            "trees with bootstrap=True or a bagging ensemble, or take method='auto'."
        )


def n_draws(model: Any, n: int) -> int:
    """How many of n points the bootstrap of each member draws."""
    share = model.max_samples
    if share is None:
        return n
    if isinstance(share, Integral):
        return int(share)
    # Forests rounded until scikit-learn 1.9, and cut off since, as bagging always did.
    rounds = isinstance(model, BaseForest) and parse_version(sklearn.__version__) < parse_version("1.9")
    return max(round(share * n) if rounds else int(share * n), 1)


def share_missed(model: Any, n: int) -> float:
    """The probability that a member's bootstrap of n points misses one of them."""
    return float((1 - 1 / n) ** n_draws(model, n))


def out_of_bag(model: Any, n: int) -> npt.NDArray[np.bool_]:
    """Whether each of n training points was left out of the bootstrap of each member, (n, B)."""
    missed = np.ones((n, len(model.estimators_)), dtype=bool)
    for member, drawn in enumerate(model.estimators_samples_):
        missed[drawn, member] = False
    return missed


def kept_members(X: FloatArray, n_members: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which members (m, B) score each object of X (m, d): drawn with this probability, by the seed and the object alone."""
    key, size = seed.to_bytes(8, "big"), 4 * n_members
    # Adding zero makes −0.0 the same number as 0.0.
    digests = b"".join(shake_256(key + x.tobytes()).digest(size) for x in np.ascontiguousarray(X) + 0.0)
    u = np.frombuffer(digests, dtype=">u4").reshape(len(X), n_members)
    return np.asarray(u < share * 2.0**32)


def member_outputs(model: Any, X: npt.NDArray[Any], n_classes: int) -> Iterator[FloatArray]:
    """Probabilities (m, C) of each member in turn; votes where it has none, and zero for a class that its bootstrap lacked.

    Of regressors the values (m, 1).
    """
    columns = getattr(model, "estimators_features_", None)
    # Forests compute in float32; converted once.
    X = X if columns is not None else np.asarray(X, dtype=np.float32)
    for b, member in enumerate(model.estimators_):
        seen = X if columns is None else X[:, columns[b]]
        if isinstance(model, REGRESSORS):
            yield np.asarray(member.predict(seen), dtype=np.float64).reshape(len(X), 1)
            continue
        # The labels that members know are indices of the ensemble's classes.
        known = np.asarray(member.classes_).astype(np.int64)
        if hasattr(member, "predict_proba"):
            proba = member.predict_proba(seen)
        else:
            proba = (member.predict(seen).astype(np.int64)[:, None] == known).astype(np.float64)
        if len(known) == n_classes:
            yield proba
            continue
        out = np.zeros((len(X), n_classes))
        out[:, known] = proba
        yield out


def mean_outputs(
    model: Any, X: npt.NDArray[Any], members: npt.NDArray[np.bool_], n_classes: int, other: float | None = None
) -> FloatArray:
    """Mean outputs (m, C) of the members (m, B) that are to score each object; `other`, by default 1/C, where none is."""
    total = np.zeros((len(X), n_classes))
    for b, outputs in enumerate(member_outputs(model, X, n_classes)):
        total += members[:, b, None] * outputs
    n_members = members.sum(axis=1)[:, None]
    return np.where(n_members > 0, total / np.maximum(n_members, 1), 1 / n_classes if other is None else other)


@savable
@dataclass(frozen=True)
class Forest:
    """A fitted ensemble, the share of its members that scores a candidate, the seed these are drawn by, and the first training objects."""

    model: Any
    share: float
    seed: int
    first: FloatArray

    @classmethod
    def fit(cls, model: Any, X: Any, y: Any, seed: int) -> Self:
        """Of an ensemble as it was given, fitted to objects X (n, d) and labels or values y (n,).

        Not of weights: some bootstraps draw points by them, and a candidate would be missed as often as its own weight says.
        """
        check_forest(model)
        first, share = np.array(np.asarray(X)[: LIMITS.rows], dtype=np.float64), share_missed(model, len(y) + 1)
        # Anything but a whole number scikit-learn refuses in its own words.
        if isinstance(asked := model.n_estimators, Integral):
            model = clone(model).set_params(n_estimators=max(int(asked), ceil(min(int(asked), MANY) / share)))
        return cls(fit_foreign(model, np.asarray(X), y, seed), share, seed, first)

    def __len__(self) -> int:
        return len(self.model.estimators_)

    @property
    def few(self) -> str:
        """How many members score a point, in words."""
        return f"{len(self)} trees leave about {self.share * len(self):.0f} to score a point"

    def left_out(self, X: Any, n_classes: int, other: float | None = None) -> FloatArray:
        """Mean outputs (n, C) for the training objects by the members that did not draw them."""
        return mean_outputs(self.model, np.asarray(X), out_of_bag(self.model, len(X)), n_classes, other)

    def candidates(self, X: Any, n_classes: int, other: float | None = None) -> FloatArray:
        """Mean outputs (m, C) for objects X by the members that score their candidates."""
        members = kept_members(np.asarray(X, dtype=np.float64), len(self), self.share, self.seed)
        return mean_outputs(self.model, np.asarray(X), members, n_classes, other)

    def holds(self, X: Any) -> bool:
        """Whether objects X are the first training points."""
        return starts_with(self.first, X[: LIMITS.rows])

    def verify(self, kinds: Any) -> None:
        """Raise where a loaded one is not whole."""
        require(isinstance(self.model, kinds) and isinstance(self.model.estimators_, list), "forest")
        require(0 < self.share <= 1 and 0 <= self.seed < 2**63, "share of the trees")


@savable
class FittedOutOfBag(Fitted):
    """A forest, and the out-of-bag scores (n,) of its training points."""

    method = "oob"
    guarantee = PROMISE

    def __init__(self, forest: Forest, alpha: FloatArray, labels: IntArray, n_classes: int):
        super().__init__(labels, n_classes)
        self.forest, self.alpha = forest, alpha

    def holds(self, X: Any) -> bool:
        return self.forest.holds(X)

    def log_proba(self, X: Any) -> FloatArray:
        everyone = np.ones((len(X), len(self.forest)), dtype=bool)
        return log_of(mean_outputs(self.forest.model, X, everyone, self.n_classes))

    def candidate_scores(self, X: Any) -> FloatArray:
        """Scores τ (m, C) of the candidates of objects X."""
        return 1 - self.forest.candidates(X, self.n_classes)

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        tau = self.candidate_scores(X)
        return np.broadcast_to(self.alpha, (*tau.shape, self.n)), tau

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q != 1:
            raise ValueError("out-of-bag scores are of trees that have not seen the point: use scheme='deleted'.")
        # A mean of B numbers in [0, 1] is off by at most B units of rounding, eps/2, one minus it by one more; two scores by twice that.
        tie = (len(self.forest) + 1) * float(np.finfo(np.float64).eps)
        return pvalues.rank_weights(self.alpha, self.candidate_scores(X), tie, self.weight(query))

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        state["forest"].verify(CLASSIFIERS)
        alpha, labels = state["alpha"], state["labels"]
        require(alpha.ndim == 1 and alpha.shape == labels.shape and bool(np.isfinite(alpha).all()), "scores")


@savable
class OutOfBag(Method):
    """Full CP of a forest from one fit: training points and candidates are scored by the trees that have not seen them."""

    name = "oob"

    def fit(self, bag: Bag, config: Config) -> FittedOutOfBag:
        forest = Forest.fit(self.model, bag.X, bag.classes[bag.y], config.seed)
        alpha = 1 - forest.left_out(bag.X, bag.n_classes)[np.arange(len(bag.y)), bag.y]
        return FittedOutOfBag(forest, alpha, bag.y, bag.n_classes)
