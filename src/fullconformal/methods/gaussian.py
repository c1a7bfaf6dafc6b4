"""Exact full CP for linear discriminant analysis and Gaussian naive Bayes, by the updates of `models.gaussian`; no refits."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB

from fullconformal.guarantees import EXACT
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, Method, Query, Unsuitable, counted, starts_with
from fullconformal.models.gaussian import Densities, Discriminant, NaiveBayes
from fullconformal.models.requirements import check_squares, finite_rows
from fullconformal.storage import LIMITS, require, savable


def is_gaussian(model: Any) -> bool:
    """Whether a model is one of these, with settings whose formulas are known here."""
    if type(model) is GaussianNB:
        return bool(model.var_smoothing > 0)
    if type(model) is not LinearDiscriminantAnalysis or model.covariance_estimator is not None:
        return False
    shrinkage = model.shrinkage
    if model.solver == "svd":
        return shrinkage is None
    number = isinstance(shrinkage, (int, float)) and 0 <= shrinkage < 1
    return model.solver in ("lsqr", "eigen") and model.priors is None and (shrinkage is None or number)


@savable
class FittedGaussian(Fitted):
    """Densities of the classes, whose scores are updated for each candidate."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, bag: Densities):
        super().__init__(bag.y, bag.n_classes)
        self.bag = bag

    def holds(self, X: Any) -> bool:
        return starts_with(self.bag.X, X)

    def log_proba(self, X: Any) -> FloatArray:
        return finite_rows(-self.bag.losses(np.asarray(X, dtype=np.float64)))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        if query.q not in (0.0, 1.0):
            raise ValueError(
                "method='exact' supports scheme='deleted' and 'ordinary' only: no refit gives a studentized score."
            )
        X, bag, deleted = np.asarray(X, dtype=np.float64), self.bag, query.q == 1

        def ask(at: slice) -> tuple[FloatArray, FloatArray, FloatArray]:
            """Scores α (b, C, n) and τ (b, C), and what τ is off by."""
            found = [bag.candidates(x, deleted) for x in X[at]]
            tau = bag.losses(X[at]) if deleted else np.stack([own for _, own in found if own is not None])
            return np.stack([alpha for alpha, _ in found]), tau, bag.rounding(X[at])

        row = 64 * self.n_classes * self.n
        return counted(ask, len(X), self.n_classes, row, self.weight(query), query.progress)

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        bag = state["bag"]
        require(bag.X.ndim == 2 and bag.y.shape == bag.X.shape[:1] and bool(np.isfinite(bag.X).all()), "points")
        require(bag.priors is None or bag.priors.shape == (bag.n_classes,), "priors")
        # Arrays (n, C, d), and of a discriminant analysis (n, C, C) and (d, d), which few points do not bear out.
        (n, d), C = bag.X.shape, bag.n_classes
        widest, most = (max(C, d), d) if isinstance(bag, Discriminant) else (d, 1), LIMITS.activations(bag.X.size)
        require(n * C * widest[0] <= max(LIMITS.budget // 16, most), "number of classes")
        require(widest[1] ** 2 <= most, "number of columns")
        # Labels are looked at before NumPy counts them: it makes room up to the largest, and writes outside of it at the largest there is.
        require(n >= C and bool(((bag.y >= 0) & (bag.y < C)).all()) and bool((bag.sizes > 0).all()), "labels")


@savable
class Gaussian(Method):
    """Full CP itself for LDA and Gaussian naive Bayes, by updates of counts, means and scatter; no refits."""

    name = "exact"

    def fit(self, bag: Bag, config: Config) -> FittedGaussian:
        X, model = np.asarray(bag.X, dtype=np.float64), self.model
        check_squares(X, "float64")
        # Which checks its own parameters.
        clone(model).fit(X, bag.y)
        priors = None if model.priors is None else np.asarray(model.priors, dtype=np.float64)
        shared = X, bag.y, bag.n_classes, None if priors is None else priors / priors.sum()
        if isinstance(model, GaussianNB):
            return FittedGaussian(NaiveBayes(*shared, float(model.var_smoothing)))
        densities = Discriminant(*shared, float(model.shrinkage or 0))
        if densities.is_singular:
            raise Unsuitable(
                "the covariance within classes is singular, or nearly so without one of the points: columns depend on each other (all "
                "dummies of a OneHotEncoder: give it drop='first') or are too many for so few points. Take "
                "LinearDiscriminantAnalysis(solver='lsqr', shrinkage=0.1), or method='folds'."
            )
        return FittedGaussian(densities)
