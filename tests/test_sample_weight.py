"""Weights of points in training: models are fitted with them, exact scores of a weighted ridge regression are those of literal refits."""

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    CVPlusRegressor,
    FullConformalClassifier,
    FullConformalRegressor,
    JackknifePlusClassifier,
    JackknifePlusRegressor,
    SplitConformalClassifier,
    SplitConformalRegressor,
    load,
)

Q = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}
rng = np.random.default_rng(0)
N, M = 24, 3
X, NEW = rng.normal(size=(N, 2)) + 1, rng.normal(size=(M, 2)) + 1
VALUES = X @ [1.0, -2.0] + 3 + rng.normal(size=N)
LABELS = (VALUES + rng.normal(size=N) > 2).astype(int)
W, OWN = rng.uniform(0.2, 5, N), np.array([1.0, 0.3, 4.0])


def literal(model, x, y, w, q):
    """Scores (n+1,) of a bag of weights w: |r|/(1 − h)^q, h_i the derivative of point i's fit by its value; deleted by refits."""
    if q == 1:
        every = np.arange(len(y))
        fits = (clone(model).fit(x[every != i], y[every != i], sample_weight=w[every != i]) for i in every)
        return np.array([abs(y[i] - fit.predict(x[i : i + 1])[0]) for i, fit in zip(every, fits, strict=True)])
    fitted = clone(model).fit(x, y, sample_weight=w).predict(x)
    moved = [clone(model).fit(x, y + e, sample_weight=w).predict(x)[i] for i, e in enumerate(np.eye(len(y)))]
    return np.abs(y - fitted) / (1 - (np.array(moved) - fitted)) ** q


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize("model", [Ridge(2.0), Ridge(0.5, fit_intercept=False), LinearRegression()], ids=repr)
def test_exact_scores_of_weighted_ridge_are_those_of_refits(model, scheme, tmp_path):
    reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.8).fit(X, VALUES, sample_weight=W)
    assert (
        reg.method_ == "exact" and reg.guarantee_.word == "exact" and "come with their points" in reg.guarantee_.reason
    )
    ends = reg.predict_interval(NEW, sample_weight=OWN)
    # Just inside and just outside of each end, where a little off in a score is seen; and at two values.
    off = np.array([1e-6, -1e-6])
    y = np.column_stack([ends + off, ends - off, np.tile([1.0, 4.0], (M, 1))])
    p = reg.predict_p(NEW, y, sample_weight=OWN)
    for k, i in np.ndindex(p.shape):
        bag = np.vstack([X, NEW[k]]), np.append(VALUES, y[k, i]), np.append(W, OWN[k])
        alpha = literal(model, *bag, Q[scheme])
        assert p[k, i] == pytest.approx((alpha >= alpha[-1] - 1e-9).mean())
    assert (p[:, :2] > 0.2).all() and (p[:, 2:4] <= 0.2).all()
    np.testing.assert_allclose(reg.predict(NEW), clone(model).fit(X, VALUES, sample_weight=W).predict(NEW))
    reg.save(tmp_path / "it")
    assert np.array_equal(load(tmp_path / "it").predict_interval(NEW, sample_weight=OWN), ends)


def test_equal_weights_are_none():
    plain = FullConformalRegressor(Ridge(1.0)).fit(X, VALUES)
    twice = FullConformalRegressor(Ridge(2.0)).fit(X, VALUES, sample_weight=np.full(N, 2.0))
    found = twice.predict_interval(NEW, [0.5, 0.9], sample_weight=np.full(M, 2.0))
    np.testing.assert_allclose(found, plain.predict_interval(NEW, [0.5, 0.9]), rtol=1e-12)


def test_weighted_ridge_behind_a_scaler_in_the_bag(tmp_path):
    model = make_pipeline(StandardScaler(), Ridge(2.0))
    reg = FullConformalRegressor(model, scheme="deleted").fit(X, VALUES, sample_weight=W)
    y = np.array([-1.0, 2.0, 5.0])
    p = reg.predict_p(NEW, y, sample_weight=OWN)
    for k in range(M):
        x = StandardScaler().fit_transform(np.vstack([X, NEW[k]]))
        alpha = literal(Ridge(2.0), x, np.append(VALUES, y[k]), np.append(W, OWN[k]), 1.0)
        assert p[k] == pytest.approx((alpha >= alpha[-1] - 1e-9).mean())
    reg.save(tmp_path / "it")
    assert np.array_equal(load(tmp_path / "it").predict_p(NEW, y, sample_weight=OWN), p)


# Models that are trained with weights ------------------------------------------------------------------------------------


class Weighted(BaseEstimator):
    """A model whose weights are the last column of X: the same, told otherwise."""

    def fit(self, X, y):
        kind = Ridge(1.0) if isinstance(self, RegressorMixin) else LogisticRegression()
        self.model_ = kind.fit(X[:, :-1], y, sample_weight=X[:, -1])
        self.classes_ = getattr(self.model_, "classes_", None)
        return self

    def predict(self, X):
        return self.model_.predict(X[:, :-1])

    def predict_proba(self, X):
        return self.model_.predict_proba(X[:, :-1])


class WeightedClassifier(ClassifierMixin, Weighted):
    pass


class WeightedRegressor(RegressorMixin, Weighted):
    pass


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize(
    "kind",
    [
        SplitConformalClassifier,
        AggregatedConformalClassifier,
        CrossConformalClassifier,
        CVPlusClassifier,
        JackknifePlusClassifier,
        SplitConformalRegressor,
        CVPlusRegressor,
        JackknifePlusRegressor,
    ],
)
def test_models_of_parts_are_trained_with_the_weights_of_the_parts(kind):
    values = kind.__name__.endswith("Regressor")
    model, told = (Ridge(1.0), WeightedRegressor()) if values else (LogisticRegression(), WeightedClassifier())
    y = VALUES if values else LABELS
    options = {"random_state": 0, "confidence_level": 0.6}
    ours = kind(make_pipeline(model), **options).fit(X, y, sample_weight=W)
    expected = kind(told, **options).fit(np.column_stack([X, W]), y)
    ask = "predict_interval" if values else "predict_epsilon"
    found = getattr(ours, ask)(NEW)
    np.testing.assert_allclose(found, getattr(expected, ask)(np.column_stack([NEW, OWN])), rtol=1e-9)
    assert not np.allclose(found, getattr(kind(model, **options).fit(X, y), ask)(NEW), rtol=1e-6) or not values


@pytest.mark.parametrize("model", [None, LogisticRegression(C=1 / 24e-3, tol=1e-10, max_iter=1000)])
def test_folds_are_trained_with_weights(model):
    """The built-in regression too, whose λ = 1e-3 of n points trained on is C = 1/(n·λ)."""
    clf = FullConformalClassifier(model, folds=3, random_state=0).fit(X, LABELS, sample_weight=W)
    assert clf.method_ == "folds"
    fold, alpha = clf._fitted.trained.fold[0], np.empty(N)
    for k in range(3):
        one = LogisticRegression(C=1 / (1e-3 * (fold != k).sum()), tol=1e-10, max_iter=1000) if model is None else model
        fit = clone(one).fit(X[fold != k], LABELS[fold != k], sample_weight=W[fold != k])
        rest = fold == k
        alpha[rest] = -fit.predict_log_proba(X[rest])[np.arange(rest.sum()), LABELS[rest]]
    np.testing.assert_allclose(clf._fitted.alpha, alpha, rtol=1e-5)
    assert clf.audit(NEW, 2).p_distance.max() < 0.5


@pytest.mark.parametrize("values", [False, True])
def test_forests_with_weights_go_by_folds(values):
    """A bootstrap may draw points by their weights, so that a candidate's share of the trees would depend on its own."""
    kind, forest, y = (
        (FullConformalRegressor, RandomForestRegressor, VALUES)
        if values
        else (FullConformalClassifier, RandomForestClassifier, LABELS)
    )
    model = forest(10, random_state=0)
    assert kind(model, folds=3, random_state=0).fit(X, y, sample_weight=W).method_ == "folds"
    with pytest.raises(ValueError, match=r"sample_weight goes with method=.folds.*this is .oob."):
        kind(model, method="oob").fit(X, y, sample_weight=W)


def test_other_regressors_go_by_folds():
    reg = FullConformalRegressor(RidgeCV(), folds=3, random_state=0).fit(X, VALUES, sample_weight=W)
    assert reg.method_ == "folds" and "sample_weight" in reg.method_reason_
    fold = reg._fitted.trained.fold[0]
    for k in range(3):
        fit = RidgeCV().fit(X[fold != k], VALUES[fold != k], sample_weight=W[fold != k])
        np.testing.assert_allclose(reg._fitted.residual[fold == k], (VALUES - fit.predict(X))[fold == k])


def test_balanced_classes_are_balanced_with_the_candidate():
    """class_weight="balanced" weighs by counts of the bag: exact scores are of fits that count the candidate."""
    model = LogisticRegression(class_weight="balanced", tol=1e-10, max_iter=1000)
    clf = FullConformalClassifier(model, method="exact", scheme="ordinary").fit(X, LABELS)
    p = clf.predict_p(NEW[:1])
    for label in (0, 1):
        bag, y = np.vstack([X, NEW[:1]]), np.append(LABELS, label)
        alpha = -clone(model).fit(bag, y).predict_log_proba(bag)[np.arange(N + 1), y]
        assert p[0, label] == pytest.approx((alpha >= alpha[-1] - 1e-9).mean())


# What cannot be meant ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (
            lambda: FullConformalClassifier(KNeighborsClassifier()).fit(X, LABELS, sample_weight=W),
            "KNeighbors.* takes none",
        ),
        (
            lambda: FullConformalClassifier(method="symmetric").fit(X, LABELS, sample_weight=W),
            r"goes with method=.folds., and",
        ),
        (
            lambda: FullConformalClassifier(torch.nn.Linear(2, 2)).fit(X, LABELS, sample_weight=W),
            "torch module takes none",
        ),
        (lambda: FullConformalRegressor(RidgeCV(), method="exact").fit(X, VALUES, sample_weight=W), "this is 'exact'"),
        (lambda: FullConformalRegressor().fit(X, VALUES, sample_weight=-W), "[Nn]egative"),
        (lambda: FullConformalRegressor().fit(X, VALUES, sample_weight=W[:3]), r"shape"),
        (lambda: FullConformalRegressor().fit(X, VALUES, sample_weight=W * (W > 1)), "holds 0"),
        (
            lambda: SplitConformalRegressor(Ridge().fit(X, VALUES), prefit=True).fit(X, VALUES, sample_weight=W),
            "prefit=True, where nothing is trained",
        ),
        (lambda: FullConformalRegressor().fit(X, VALUES).predict_interval(NEW, sample_weight=OWN), "has no use for it"),
        (
            lambda: FullConformalRegressor().fit(X, VALUES, sample_weight=W).predict_interval(NEW),
            "sample_weight of their objects, too",
        ),
        (lambda: FullConformalRegressor().fit(X, VALUES, sample_weight=W).audit(NEW), "no sample_weight"),
    ],
)
def test_weights_that_cannot_be_taken(fit, message):
    with pytest.raises(ValueError, match=message):
        fit()
