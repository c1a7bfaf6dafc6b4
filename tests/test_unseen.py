"""Intervals of any regressor by folds and by out-of-bag points: literal loops as oracles, and what users can ask."""

from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    BaggingRegressor,
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.feature_selection import SelectKBest, f_regression
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, LogisticRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

import fullconformal
from fullconformal import ConformalWarning, FullConformalRegressor
from fullconformal.methods import parts
from fullconformal.methods.oob import kept_members
from fullconformal.methods.refit import Refits
from fullconformal.methods.refit_regression import RefitRegression
from fullconformal.models import mlp

# Which ends at the same numbers whatever the order of its points.
PRECISE = SVR(C=10.0, tol=1e-10)


def table(n=40, m=5, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, new = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    return X, X.sum(axis=1) + np.sin(3 * X[:, 0]) + 0.3 * rng.normal(size=n), new


def check_p(reg, residual, centres, new, rng, weights=None, categories=None):
    """p(y), intervals and distributions are counts of |residual| ≥ |y − centre|, object by object."""
    options, n = {}, len(residual)
    w, own = np.ones(n), np.ones(len(new))
    if weights is not None:
        (w, own), options["weights"] = weights, weights
    same = np.ones((len(new), n), dtype=bool)
    if categories is not None:
        same = categories[1][:, None] == categories[0]
    values = centres[:, None] + 2 * rng.normal(size=(len(new), 7))
    p = reg.predict_p(new, values, **options)
    for k, row in enumerate(values):
        for y, found in zip(row, p[k], strict=True):
            count = w[same[k] & (np.abs(residual) >= abs(y - centres[k]))].sum()
            assert found == pytest.approx((count + own[k]) / (w[same[k]].sum() + own[k])), (k, y)
    if not options and categories is None:
        reach = np.sort(np.abs(residual))[::-1][int(np.floor(0.2 * (n + 1) + 1e-9)) - 1]
        expected = np.stack([centres - reach, centres + reach], axis=1)
        np.testing.assert_allclose(reg.predict_interval(new, 0.8), expected, rtol=1e-9, atol=1e-9 * reach)
        below = (centres[:, None, None] + residual <= values[:, :, None]).sum(axis=2)
        np.testing.assert_allclose(reg.predict_cdf(new, values, tau=0.0), below / (n + 1))


# Folds ------------------------------------------------------------------------------------------------------------------


def literal_folds(reg, model, X, y, new):
    """Residuals (n,) and predictions (m,) by models fitted one after the other to the points of the other folds."""
    trained, m = reg._fitted.trained, len(new)
    own, f, g = trained.candidate_folds(new), np.zeros(len(y)), np.zeros(m)
    R = len(trained.fold)
    for fold, drawn in zip(trained.fold, own, strict=True):
        for k in range(trained.folds):
            fit = clone(model).fit(X[fold != k], y[fold != k])
            f[fold == k] += fit.predict(X[fold == k]) / R if (fold == k).any() else 0.0
            g[drawn == k] += fit.predict(new[drawn == k]) / R if (drawn == k).any() else 0.0
    return y - f, g


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    "model", [make_pipeline(StandardScaler(), PRECISE), Ridge(0.5), KNeighborsRegressor(2)], ids=str
)
def test_folds_are_those_of_the_literal_loop(model, repeats):
    X, y, new = table()
    reg = FullConformalRegressor(model, method="folds", folds=4, repeats=repeats, random_state=0).fit(X, y)
    residual, centres = literal_folds(reg, model, X, y, new)
    np.testing.assert_allclose(reg._fitted.residual, residual, atol=1e-9)
    rng = np.random.default_rng(1)
    check_p(reg, residual, centres, new, rng)
    check_p(reg, residual, centres, new, rng, weights=(rng.uniform(0.1, 3, 40), rng.uniform(0.1, 3, 5)))
    assert reg.guarantee_.word == "approximate" and "3 of 4 models" in reg.guarantee_.reason
    assert reg.display_name == "full CP (folds)"


def test_categories_and_groups():
    X, y, new = table(60)
    X[:, 2], new[:, 2] = np.arange(60) % 2, np.arange(5) % 2
    reg = FullConformalRegressor(PRECISE, method="folds", folds=4, categories=2, random_state=0).fit(X, y)
    of = X[:, 2], new[:, 2]
    check_p(reg, *literal_folds(reg, PRECISE, X, y, new), new, np.random.default_rng(0), categories=of)
    rows = np.repeat(np.arange(20), 3)
    reg = FullConformalRegressor(SVR(), method="folds", folds=4, random_state=0).fit(X, y, groups=rows)
    fold = reg._fitted.trained.fold[0].reshape(20, 3)
    assert (fold == fold[:, :1]).all() and "groups have one fold each" in reg.guarantee_.reason
    with pytest.raises(ValueError, match="groups go with method='folds'"):
        FullConformalRegressor(Ridge()).fit(X, y, groups=rows)


def test_values_that_are_transformed_are_scored_as_the_model_sees_them():
    X, y, new = table()
    y = np.exp(y)
    for model in (
        TransformedTargetRegressor(make_pipeline(StandardScaler(), SVR()), func=np.log, inverse_func=np.exp),
        make_pipeline(StandardScaler(), TransformedTargetRegressor(SVR(), func=np.log, inverse_func=np.exp)),
    ):
        reg = FullConformalRegressor(model, folds=4, random_state=0).fit(X, y)
        logs = FullConformalRegressor(make_pipeline(StandardScaler(), SVR()), folds=4, random_state=0).fit(X, np.log(y))
        assert reg.method_ == "folds"
        np.testing.assert_allclose(reg.predict_interval(new), np.exp(logs.predict_interval(new)))


def test_an_object_has_the_same_interval_in_any_batch_and_order():
    X, y, new = table()
    order = np.random.default_rng(0).permutation(40)
    for model in (PRECISE, RandomForestRegressor(8)):
        reg = FullConformalRegressor(model, random_state=0).fit(X, y)
        together = reg.predict_interval(new)
        np.testing.assert_array_equal(together, np.concatenate([reg.predict_interval(x[None]) for x in new]))
        if isinstance(model, SVR):
            again = FullConformalRegressor(model, random_state=0).fit(X[order], y[order])
            np.testing.assert_allclose(again.predict_interval(new), together)


def test_networks_are_trained_in_units_of_their_fold(monkeypatch):
    """Trained together and one by one; y times 1e12 changes nothing but the unit."""
    X, y, new = table()
    torch.manual_seed(0)
    net = make_pipeline(StandardScaler(), mlp(3, (4,), 1, "tanh").double())
    options = {"folds": 3, "max_epochs": 5, "random_state": 0}
    together = FullConformalRegressor(net, **options).fit(X, y)
    assert together.method_ == "folds"
    large = FullConformalRegressor(net, **options).fit(X, 1e12 * y + 5e12)
    np.testing.assert_allclose(large.predict_interval(new) / 1e12 - 5, together.predict_interval(new), rtol=1e-6)
    monkeypatch.setattr(parts, "is_stackable", lambda *_: False)
    alone = FullConformalRegressor(net, **options).fit(X, y)
    # Both end where the mean gradient is below 1e-5, of a penalty of 1e-2.
    np.testing.assert_allclose(alone._fitted.residual, together._fitted.residual, atol=1e-2)
    np.testing.assert_allclose(alone.predict(new), together.predict(new), atol=1e-2)


def test_a_killed_fit_goes_on(tmp_path, monkeypatch):
    X, y, new = table()
    torch.manual_seed(0)
    monkeypatch.setattr(parts, "is_stackable", lambda *_: False)
    options = {"folds": 3, "max_epochs": 5, "random_state": 0}
    reg = FullConformalRegressor(mlp(3, (4,), 1), checkpoint=tmp_path, **options).fit(X, y)
    # What is kept is not trained again.
    monkeypatch.setattr("fullconformal.methods.fitting.train", None)
    again = FullConformalRegressor(reg.estimator, checkpoint=tmp_path, **options).fit(X, y)
    np.testing.assert_allclose(again.predict_interval(new), reg.predict_interval(new), rtol=1e-6)


def test_an_audit_trains_the_other_models_with_the_candidate():
    X, y, new = table()
    reg = FullConformalRegressor(PRECISE, folds=4, random_state=0).fit(X, y)
    audit = reg.audit(new, 3)
    assert audit.n_refits == 9 and audit.p_distance.max() < 0.2
    # Literally, with one candidate in the bag.
    x, value, fold = new[:1], 1.3, reg._fitted.trained.fold[0]
    own = np.append(fold, reg._fitted.trained.candidate_folds(x)[0])
    Z, values, scores = np.vstack([X, x]), np.append(y, value), np.empty(41)
    for k in range(4):
        fit = clone(PRECISE).fit(Z[own != k], values[own != k])
        scores[own == k] = np.abs(values[own == k] - fit.predict(Z[own == k]))
    alpha, tau = reg._fitted.refits().scores(x, value, np.arange(40), 1.0, lambda: None)
    np.testing.assert_allclose(np.append(alpha, tau), scores, atol=1e-9)


# Out-of-bag points ------------------------------------------------------------------------------------------------------

FORESTS = {
    "random forest": RandomForestRegressor(5),
    "half the points": RandomForestRegressor(7, max_samples=0.5, max_depth=2),
    "extra trees": ExtraTreesRegressor(5, bootstrap=True),
    "bagged lines": BaggingRegressor(LinearRegression(), n_estimators=5, max_features=0.7),
    "three trees": RandomForestRegressor(1),
}


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("name", FORESTS)
def test_out_of_bag_residuals_are_those_of_the_literal_loop(name):
    X, y, new = table()
    reg = FullConformalRegressor(FORESTS[name], random_state=1).fit(X, y)
    assert reg.method_ == "oob" and "measured, not proved" in reg.guarantee_.reason
    fitted = reg._fitted
    forest, members = fitted.forest.model, len(fitted.forest)

    def mean(x, kept):
        said = []
        for b in kept:
            columns = getattr(forest, "estimators_features_", None)
            seen = x[None] if columns is None else x[None][:, columns[b]]
            said.append(forest.estimators_[b].predict(seen)[0])
        return np.mean(said) if said else y.mean()

    drawn = forest.estimators_samples_
    residual = [y[i] - mean(X[i], [b for b in range(members) if i not in drawn[b]]) for i in range(40)]
    kept = kept_members(new, members, fitted.forest.share, fitted.forest.seed)
    centres = np.array([mean(x, np.flatnonzero(row)) for x, row in zip(new, kept, strict=True)])
    np.testing.assert_allclose(fitted.residual, residual, atol=1e-12)
    check_p(reg, np.array(residual), centres, new, np.random.default_rng(1))
    np.testing.assert_allclose(reg.predict(new), forest.predict(new))
    with pytest.raises(ValueError, match="check the coverage on held-out points"):
        reg.audit(new)


def test_few_trees_are_told_of():
    X, y, _ = table()
    with pytest.warns(ConformalWarning, match=r"3 trees leave about 1 .* none to score 26%"):
        FullConformalRegressor(RandomForestRegressor(1), random_state=0).fit(X, y)


# Refits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["deleted", "ordinary"])
def test_refits_find_what_is_known_without_them(scheme, tmp_path):
    """Of a ridge regression p-values are equal, and ends of intervals outwards by a thousandth of the range of y at most."""
    X, y, new = table(15, 2)
    known = FullConformalRegressor(Ridge(1.0), scheme=scheme).fit(X, y)
    method = RefitRegression(grid=9)
    reg = FullConformalRegressor(Ridge(1.0), method=method, scheme=scheme, checkpoint=tmp_path).fit(X, y)
    values = np.random.default_rng(0).normal(size=(2, 6))
    np.testing.assert_array_equal(reg.predict_p(new, values), known.predict_p(new, values))
    # Beyond all numbers p-values are limits.
    ends = np.array([[-np.inf, np.inf, 0.3]] * 2)
    np.testing.assert_array_equal(reg.predict_p(new, ends), known.predict_p(new, ends))
    found, expected = (r.predict_interval(new, [0.3, 0.7, 0.9]) for r in (reg, known))
    outwards = (expected - found) * np.array([1.0, -1.0])[:, None]
    assert (outwards >= 0).all() and (outwards <= 1e-3 * np.ptp(y)).all()
    with pytest.warns(ConformalWarning, match="needs more than the 15"):
        assert reg.predict_interval(new, 0.95).tolist() == [[-np.inf, np.inf]] * 2
    weights = np.arange(15.0), np.ones(2)
    np.testing.assert_allclose(
        reg.predict_p(new, values, weights=weights), known.predict_p(new, values, weights=weights)
    )
    # A second run finds everything in the checkpoint.
    again = FullConformalRegressor(Ridge(1.0), method=method, scheme=scheme, checkpoint=tmp_path).fit(X, y)
    with mock.patch.object(Refits, "scores", side_effect=AssertionError):
        np.testing.assert_array_equal(again.predict_interval(new, [0.3, 0.7, 0.9]), found)


def test_values_that_nothing_contradicts_are_in_the_set_however_large():
    """A learner that follows the point with the largest |y|: a candidate far out has a residual of 0, and others have not."""

    class Follows(RegressorMixin, BaseEstimator):
        def fit(self, X, y):
            self.at_, self.value_ = X[np.abs(y).argmax()], y[np.abs(y).argmax()]
            return self

        def predict(self, X):
            return np.where((self.at_ == X).all(axis=1), self.value_, 0.0)

    X, y, new = table(12, 1)
    reg = FullConformalRegressor(Follows(), method=RefitRegression(grid=3), scheme="ordinary").fit(X, y)
    for ends in ([[-np.inf, np.inf]], [[-np.inf, -1e9, 1e9, np.inf]]):
        assert (reg.predict_p(new, ends) == 1).all()
    assert reg.predict_p(new, [2.0]) < 0.5 and reg.predict_interval(new, 0.8).tolist() == [[-np.inf, np.inf]]


def test_exact_scores_of_a_learner_that_selects_columns():
    """A transformer that looks at y is fitted with every candidate: the literal loop over values."""
    X, y, new = table(12, 1)
    model = make_pipeline(SelectKBest(f_regression, k=1), DecisionTreeRegressor(max_depth=1, random_state=0))
    reg = FullConformalRegressor(model, method="exact", confidence_level=0.5).fit(X, y)
    assert reg.method_ == "exact" and "SelectKBest" in reg.method_reason_ and "refits" in reg.guarantee_.reason
    with pytest.raises(fullconformal.StorageError, match="nothing to save but the data"):
        reg._fitted.state()
    for value in (-2.0, 0.1, 3.0):
        Z, values, scores = np.vstack([X, new]), np.append(y, value), np.empty(13)
        for i in range(13):
            rest = np.arange(13) != i
            scores[i] = abs(values[i] - clone(model).fit(Z[rest], values[rest]).predict(Z[[i]])[0])
        assert reg.predict_p(new, [value])[0] == pytest.approx((scores >= scores[-1] - 1e-12).sum() / 13)


# What is taken, and what is said ------------------------------------------------------------------------------------------


def net():
    return mlp(3, (4,), 1)


@pytest.mark.parametrize(
    ("model", "options", "method", "reason"),
    [
        (Ridge(), {}, "exact", "linear in the candidate's value"),
        (Ridge(), {"method": "folds"}, "folds", "without each of 10 folds"),
        (None, {"method": "folds"}, "folds", "built-in"),
        (RandomForestRegressor(8), {}, "oob", "have not drawn"),
        (RandomForestRegressor(8), {"method": "folds"}, "folds", ""),
        (ExtraTreesRegressor(5), {}, "folds", ""),
        (GradientBoostingRegressor(n_estimators=3), {}, "folds", ""),
        (net(), {}, "folds", "no point is scored by a model that has seen it"),
        (net(), {"method": "influence"}, "influence", "tangent"),
        (net(), {"prefit": True}, "influence", "tangent"),
        (net(), {"curvature": "last_layer"}, "influence", "tangent"),
        (net(), {"scheme": "ordinary"}, "influence", "tangent"),
        (MLPRegressor(hidden_layer_sizes=(3,), max_iter=5), {}, "folds", ""),
        (Ridge(positive=True), {}, "folds", "positive=False has"),
        (RidgeCV(alphas=(0.1, 1.0), cv=3), {}, "exact", ""),
        (Lasso(alpha=0.1, positive=True), {}, "folds", "positive=False has"),
        (ElasticNet(l1_ratio=0.0), {}, "folds", "take Ridge"),
        (GaussianProcessRegressor(), {}, "folds", "optimizer=None"),
        (KNeighborsRegressor(weights="distance"), {}, "folds", "weights='uniform'"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_which_method_a_regressor_gets_and_why(model, options, method, reason):
    X, y, new = table()
    reg = FullConformalRegressor(model, **{"max_epochs": 2, "random_state": 0, **options}).fit(X, y)
    assert reg.method_ == method and reason in reg.method_reason_
    assert reg.predict_interval(new).shape == (5, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"estimator": SVR(), "scheme": "ordinary"}, ValueError, "scheme='ordinary' does not go with method='folds'"),
        ({"estimator": SVR(), "folds": 1}, ValueError, "folds=1"),
        ({"estimator": SVR(), "folds": 50}, ValueError, "folds=50 exceeds the 40 points"),
        ({"estimator": SVR(), "repeats": 0}, ValueError, "repeats=0"),
        ({"estimator": SVR(), "n_jobs": 0}, ValueError, "n_jobs=0"),
        ({"estimator": SVR(), "method": "influence"}, ValueError, "for torch modules, skorch nets and MLPRegressor"),
        ({"estimator": SVR(), "method": "oob"}, ValueError, "estimator=SVR is none; give a random forest"),
        ({"estimator": ExtraTreesRegressor(), "method": "oob"}, ValueError, "set bootstrap=True"),
        ({"estimator": RandomForestRegressor(), "prefit": True}, ValueError, "needs a trained network"),
        ({"estimator": LogisticRegression()}, TypeError, "is a classifier; give a regressor"),
        ({"estimator": KernelRidge(kernel="precomputed")}, ValueError, "precomputed"),
        ({"estimator": mlp(3, (4,), 2), "max_epochs": 1}, ValueError, r"one number an object, of shape \(batch, 1\)"),
        ({"estimator": StandardScaler()}, TypeError, "has no fit and predict"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_together_is_said(options, error, message):
    X, y, new = table()
    with pytest.raises(error, match=message):
        FullConformalRegressor(**options).fit(X, y).predict_interval(new)


@pytest.mark.parametrize(
    "model",
    [
        make_pipeline(StandardScaler(), Ridge(positive=True)),
        RandomForestRegressor(8),
        make_pipeline(StandardScaler(), ExtraTreesRegressor(8, bootstrap=True)),
        BaggingRegressor(DecisionTreeRegressor(max_depth=3), n_estimators=8),
        HistGradientBoostingRegressor(max_iter=5, min_samples_leaf=3),
        HistGradientBoostingRegressor(loss="quantile", quantile=0.5, max_iter=5, min_samples_leaf=3),
        mlp(3, (4,), 1),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_loaded_regressor_gives_the_same_intervals(model, tmp_path):
    X, y, new = table()
    method = "folds" if isinstance(model, torch.nn.Module) else "auto"
    reg = FullConformalRegressor(model, method=method, folds=3, max_epochs=3, random_state=0).fit(X, y)
    reg.save(tmp_path / "it")
    loaded = fullconformal.load(tmp_path / "it")
    np.testing.assert_array_equal(loaded.predict_interval(new), reg.predict_interval(new))
    np.testing.assert_array_equal(loaded.predict(new), reg.predict(new))
    assert loaded.guarantee_ == reg.guarantee_
