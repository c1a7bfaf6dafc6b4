"""Full conformal regression against honest refits, at every jump of p(y) and between, and what a user meets."""

import re
import warnings

import numpy as np
import pandas as pd
import pytest
from cases import expected_failures
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest, f_regression
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, OneHotEncoder, PolynomialFeatures, RobustScaler, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fullconformal
from fullconformal import ConformalWarning, FullConformalRegressor

Q = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}


@parametrize_with_checks(
    [FullConformalRegressor(), FullConformalRegressor(KNeighborsRegressor(n_neighbors=2))],
    expected_failed_checks=expected_failures,
)
def test_it_is_a_regressor_of_scikit_learns(estimator, check):
    check(estimator)


# Oracles ----------------------------------------------------------------------------------------------------------------


def honest(model, X, y, q):
    """Scores |r|^(1−q)·|r without the point|^q of all points of a bag, by one refit and n + 1 more."""
    scores = np.ones(len(y))
    if q < 1:
        scores *= np.abs(y - clone(model).fit(X, y).predict(X)) ** (1 - q)
    if q > 0:
        for i in range(len(y)):
            rest = np.arange(len(y)) != i
            scores[i] *= abs(y[i] - clone(model).fit(X[rest], y[rest]).predict(X[[i]])[0]) ** q
    return scores


def leveraged(model, X, y, q):
    """Scores |r|/(1 − h)^q of a lasso, h of the columns that have a weight."""
    fit = clone(model).fit(X, y)
    A = X[:, fit.coef_ != 0]
    l2 = len(y) * model.alpha * (1 - model.l1_ratio)
    if model.fit_intercept:
        A = A - A.mean(axis=0)
    H = A @ np.linalg.pinv(A.T @ A + l2 * np.eye(A.shape[1]), rcond=1e-9) @ A.T + model.fit_intercept / len(y)
    share = 1 - np.diag(H)
    # With as many columns as points scores are infinite.
    infinite = (share <= 1e-9) & (q > 0)
    return np.where(infinite, np.inf, np.abs(y - fit.predict(X)) / np.where(share <= 1e-9, 1.0, share) ** q)


def check_against(reg, model, X, y, objects, scores, most=10, atol=1e-9, knots=False):
    """p(y) equals the count of honest scores between the jumps, and at a jump two honest scores are equal."""
    q = Q[reg.scheme]
    blocks = list(reg.predict_steps(objects))
    rows = [(block, row) for block in blocks for row in range(len(block))]
    rng = np.random.default_rng(0)
    for x, (block, row) in zip(objects, rows, strict=True):
        at, _, between = block.jumps(row)
        # A piece of one number has two ends, apart by rounding.
        scale = np.abs(at).max(initial=1.0)
        wide = np.flatnonzero(np.diff(at) > 1e-6 * scale)
        middles = [at[0] - 1 - abs(at[0]), *((at[wide] + at[wide + 1]) / 2), at[-1] + 1 + abs(at[-1])]
        values = [between[0], *between[wide + 1], between[-1]]
        chosen = rng.permutation(len(middles))[:most]
        for k in chosen:
            alpha = scores(model, np.vstack([X, x]), np.append(y, middles[k]), q)
            # Some points tie with a candidate at every y: those that share with it what no other has.
            wanted = (alpha >= alpha[-1] - 1e-9 * alpha[np.isfinite(alpha)].max(initial=0.0)).sum() / len(alpha)
            assert values[k] == pytest.approx(wanted, abs=1e-12), (
                middles[k],
                np.sort(np.abs(alpha[:-1] - alpha[-1]))[:3],
            )
        # Leverages of a lasso jump where its columns change, and p with them.
        for k in () if knots else rng.permutation(len(at))[: most // 2]:
            alpha = scores(model, np.vstack([X, x]), np.append(y, at[k]), q)
            assert np.abs(alpha[:-1] - alpha[-1]).min() <= atol * max(1.0, np.abs(y).max()) * (1 + alpha.max())


def table(n, d, seed, ties=False, scale=1.0):
    """Objects, values and objects to predict; with ties, small whole numbers with duplicates."""
    rng = np.random.default_rng(seed)
    X, new = rng.normal(size=(n, d)), rng.normal(size=(3, d))
    if ties:
        X, new = np.round(X), np.round(new)
        X[1], X[3], new[0] = X[0], X[2], X[4]
    y = X[:, : min(d, 3)].sum(axis=1) + rng.normal(size=n)
    y = np.round(y) if ties else y
    return X, scale * y, new


KERNEL = ConstantKernel(2.0) * RBF(1.5) + WhiteKernel(0.3)
LINEAR = {
    "ridge": Ridge(alpha=0.7),
    "ridge without intercept": Ridge(alpha=0.7, fit_intercept=False),
    "least squares": LinearRegression(),
    "kernel ridge": KernelRidge(alpha=0.5, kernel="rbf", gamma=0.3),
    "polynomial kernel": KernelRidge(alpha=2.0, kernel="poly", degree=2, coef0=1.0),
    "Gaussian process": GaussianProcessRegressor(KERNEL, optimizer=None, alpha=1e-3),
    "noise-free Gaussian process": GaussianProcessRegressor(RBF(0.7), optimizer=None, alpha=1e-6),
    "k-NN": KNeighborsRegressor(3),
    "k-NN of one": KNeighborsRegressor(1),
}


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize("name", LINEAR)
def test_p_values_are_those_of_refits(name, scheme):
    if name.startswith("k-NN") and scheme != "deleted":
        pytest.skip("neighbours are always without the point")
    model = LINEAR[name]
    X, y, new = table(11, 3, seed=1)
    reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
    np.testing.assert_allclose(reg.predict(new), clone(model).fit(X, y).predict(new), atol=1e-9)
    check_against(reg, model, X, y, new, honest, atol=1e-5 if "noise-free" in name else 1e-9)


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize(("n", "d"), [(8, 20), (12, 9), (6, 5)])
def test_wide_tables(n, d, scheme):
    X, y, new = table(n, d, seed=2)
    for model in (Ridge(alpha=0.3), Ridge(alpha=5.0, fit_intercept=False)):
        reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
        check_against(reg, model, X, y, new, honest, most=8)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scheme", Q)
def test_duplicates_and_equal_columns(scheme, seed):
    X, y, new = table(11, 3, seed, ties=True)
    X, new = np.hstack([X, X[:, :1]]), np.hstack([new, new[:, :1]])
    # Of a residual that is rounding, 1e-15, the geometric mean with one that is not is 1e-7 or so.
    # Where a point alone decides a parameter its score is 0, and that of a refit without it is not.
    for model in (Ridge(alpha=1.0), *([LinearRegression()] if scheme != "deleted" else [])):
        reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
        check_against(reg, model, X, y, new, honest, most=8, atol=1e-6)


@pytest.mark.parametrize("scheme", Q)
def test_a_candidate_equal_to_a_training_point_is_tied_with_it(scheme):
    X, y, _ = table(15, 3, seed=3)
    for model in (Ridge(alpha=0.5), KernelRidge(alpha=0.5, kernel="rbf"), Lasso(alpha=0.05)):
        reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
        p = reg.predict_p(X, y)
        for i in range(len(y)):
            alpha = (leveraged if isinstance(model, Lasso) else honest)(
                model, np.vstack([X, X[i]]), np.append(y, y[i]), Q[scheme]
            )
            # Its own double ties with it, and refits of a lasso stop at 1e-4.
            wanted = (alpha >= alpha[-1] - 1e-3 * isinstance(model, Lasso) - 1e-9).sum() / len(alpha)
            assert p[i] <= wanted + 1e-12 if isinstance(model, Lasso) else p[i] == pytest.approx(wanted)
            assert p[i] >= 2 / (len(y) + 1) - 1e-12


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize(("n", "d"), [(15, 4), (10, 25), (30, 8)])
@pytest.mark.parametrize(
    "model", [Lasso(alpha=0.1), Lasso(alpha=0.3, fit_intercept=False), ElasticNet(alpha=0.2, l1_ratio=0.6)], ids=str
)
def test_lasso_and_elastic_net(model, n, d, scheme):
    X, y, new = table(n, d, seed=4)
    precise = clone(model).set_params(tol=1e-13, max_iter=100_000)
    reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
    check_against(reg, precise, X, y, new, leveraged, most=16, knots=True)


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5])
def test_columns_of_a_lasso_that_are_sums_of_others(alpha, scheme):
    """As those of a one-hot encoding are: the fit is one, its weights are not, and no product of the columns has an inverse."""
    rng = np.random.default_rng(8)
    for _ in range(5):
        two, three, rest = rng.integers(0, 2, 28), rng.integers(0, 3, 28), rng.normal(size=(28, 2))
        # An object may have none of the words, and decide by itself what that means: it has p = 1 by its leverage.
        if scheme == "ordinary":
            two[-1] = three[-2] = 9
        X = np.column_stack([rest, *(two == k for k in range(2)), *(three == k for k in range(3)), rest.sum(axis=1)])
        y = (rest[:, 0] + 2 * two + three + rng.normal(size=28))[:25]
        reg = FullConformalRegressor(Lasso(alpha), scheme=scheme, confidence_level=0.5).fit(X[:25], y)
        precise = Lasso(alpha, tol=1e-13, max_iter=10**6)
        check_against(reg, precise, X[:25], y, X[25:], leveraged, most=6, knots=True)


@pytest.mark.parametrize("scheme", ["deleted", "studentized"])
def test_each_point_of_a_bag_has_its_rank_where_columns_of_a_lasso_are_sums_of_others(scheme):
    """Scores that treat all points alike: of n points, each against the others, at most k have a p-value of k/n or less."""
    n = 12
    for seed in range(15):
        rng = np.random.default_rng(seed)
        four, two, rest = rng.integers(0, 4, n), rng.integers(0, 2, n), rng.normal(size=n)
        X = np.column_stack([np.eye(4)[four], np.eye(2)[two], rest])
        y = rng.normal(size=4)[four] + rest + 0.3 * rng.normal(size=n)
        model, p = Lasso(10 ** rng.uniform(-2.5, -0.3), tol=1e-10, max_iter=10**5), []
        for own in np.arange(n):
            others = np.arange(n) != own
            reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X[others], y[others])
            p.append(reg.predict_p(X[[own]], y[[own]])[0])
        assert (np.sort(p) >= np.arange(1, n + 1) / n - 1e-9).all()


@pytest.mark.parametrize("scheme", Q)
def test_a_penalty_that_is_chosen_in_the_bag(scheme):
    X, y, new = table(10, 4, seed=5)
    model = RidgeCV(alphas=(0.01, 0.3, 3.0, 30.0))
    reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X, y)
    assert reg.guarantee_.word == "exact"
    np.testing.assert_allclose(reg.predict(new), clone(model).fit(X, y).predict(new), atol=1e-9)

    def chosen(model, X, y, q):
        return honest(Ridge(alpha=clone(model).fit(X, y).alpha_), X, y, q)

    at = np.linspace(y.min() - 4, y.max() + 4, 15)
    p = reg.predict_p(new, np.tile(at, (3, 1)))
    for row, x in enumerate(new):
        for value, found in zip(at, p[row], strict=True):
            alpha = chosen(model, np.vstack([X, x]), np.append(y, value), Q[scheme])
            assert found == pytest.approx((alpha >= alpha[-1]).sum() / len(alpha)), (row, value)


def test_k_neighbours_that_are_equally_far_share_the_places():
    """The definition, by all orders of the tied: the mean over them is the same."""
    X, y, new = table(12, 1, seed=6, ties=True)
    reg = FullConformalRegressor(KNeighborsRegressor(3), scheme="deleted", confidence_level=0.5).fit(X, y)

    def scores(_, X, y, q):
        out = np.empty(len(y))
        for i in range(len(y)):
            rest = np.arange(len(y)) != i
            far, values = np.abs(X[rest, 0] - X[i, 0]), y[rest]
            last = np.sort(far)[2]
            places = 3 - (far < last).sum()
            out[i] = abs(y[i] - (values[far < last].sum() + places * values[far == last].mean()) / 3)
        return out

    check_against(reg, None, X, y, new, scores)


@pytest.mark.parametrize("k", [12, 11])
def test_as_many_neighbours_as_points(k):
    X, y, new = table(12, 2, seed=7)
    reg = FullConformalRegressor(KNeighborsRegressor(k), scheme="deleted", confidence_level=0.5).fit(X, y)
    check_against(reg, KNeighborsRegressor(k), X, y, new, honest)


def test_large_values_keep_their_digits():
    X, y, new = table(20, 3, seed=8)
    small = FullConformalRegressor(Ridge(1.0)).fit(X, y).predict_interval(new)
    large = FullConformalRegressor(Ridge(1.0)).fit(X, 1e12 * y).predict_interval(new)
    np.testing.assert_allclose(large / 1e12, small, rtol=1e-10)
    for model, scaled in [(LINEAR[name], LINEAR[name]) for name in ("kernel ridge", "Gaussian process", "k-NN")] + [
        (RidgeCV(), RidgeCV()), (Lasso(0.1), Lasso(1e11)),
    ]:  # fmt: skip
        found = FullConformalRegressor(model).fit(X, y).predict_interval(new)
        other = FullConformalRegressor(scaled).fit(X, 1e12 * y).predict_interval(new)
        np.testing.assert_allclose(other / 1e12, found, atol=1e-10, err_msg=str(model))
    moved = FullConformalRegressor(Ridge(1.0)).fit(X, y + 1e6).predict_interval(new)
    np.testing.assert_allclose(moved - 1e6, small, atol=1e-8)


def test_constant_values_give_a_point():
    X, _, new = table(20, 3, seed=9)
    for model in (Ridge(1.0), LinearRegression(), Lasso(0.1), KNeighborsRegressor(2)):
        found = FullConformalRegressor(model, scheme="deleted").fit(X, np.full(20, 7.0)).predict_interval(new)
        np.testing.assert_allclose(found, 7.0, atol=1e-10)


# Leverage one -----------------------------------------------------------------------------------------------------------


def test_an_object_that_decides_a_parameter_by_itself_has_an_infinite_interval():
    X, y, _ = table(20, 3, seed=10)
    X[:, 2] = 0.0
    for scheme in Q:
        reg = FullConformalRegressor(LinearRegression(), scheme=scheme).fit(X, y)
        found = reg.predict_interval(np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
        assert found[0].tolist() == [-np.inf, np.inf] and np.isfinite(found[1]).all()


def test_training_points_that_decide_a_parameter_by_themselves_are_told_of():
    X, y, new = table(20, 3, seed=11)
    X[:, 2] = 0.0
    X[5, 2] = 1.0
    new[:, 2] = 0.0
    for scheme in Q:
        with pytest.warns(ConformalWarning, match="1 of 20 training points decide a parameter"):
            reg = FullConformalRegressor(LinearRegression(), scheme=scheme).fit(X, y)
        # Its score is 0, so it counts for no other value than the prediction.
        rest = np.arange(20) != 5
        less = FullConformalRegressor(LinearRegression(), scheme=scheme).fit(X[rest][:, :2], y[rest])
        for value in (-3.0, 0.0, 2.0):
            count = less.predict_p(new[:, :2], np.full(3, value)) * 20
            np.testing.assert_allclose(reg.predict_p(new, np.full(3, value)) * 21, count, atol=1e-9)


def test_a_wide_table_without_a_penalty_says_nothing():
    X, y, new = table(10, 30, seed=12)
    with pytest.warns(ConformalWarning, match="10 of 10"):
        reg = FullConformalRegressor(LinearRegression(), confidence_level=0.5).fit(X, y)
    assert np.isinf(reg.predict_interval(new)).all()


# What is asked ----------------------------------------------------------------------------------------------------------


def test_intervals_sets_and_p_values_agree():
    X, y, new = table(40, 3, seed=13)
    reg = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    hull = reg.predict_interval(new, [0.5, 0.9])
    assert hull.shape == (3, 2, 2)
    np.testing.assert_array_equal(reg.predict_interval(new), hull[:, :, 1])
    union = reg.predict_set(new, 0.5)
    assert [u[0, 0] for u in union] == hull[:, 0, 0].tolist()
    inside, outside = hull[:, :, 1] + [[1e-9, -1e-9]], hull[:, :, 1] + [[-1e-9, 1e-9]]
    assert (reg.predict_p(new, inside) > 0.1 + 1e-12).all() and (reg.predict_p(new, outside) <= 0.1 + 1e-12).all()
    assert reg.predict_p(new, reg.predict(new)).tolist() == [1.0] * 3


def test_too_few_points_give_infinite_intervals_and_a_warning():
    X, y, new = table(8, 2, seed=14)
    with pytest.warns(ConformalWarning, match="needs more than the 8 training points.*every interval is infinite"):
        reg = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    assert np.isinf(reg.predict_interval(new)).all()
    with pytest.warns(ConformalWarning, match="needs more than"):
        reg.predict_interval(new, 0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(reg.predict_interval(new, 0.8)).all()


def test_weights_are_those_of_the_definition():
    X, y, new = table(15, 3, seed=15)
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=15), rng.exponential(size=3)
    model = Ridge(1.0)
    for scheme in Q:
        reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.7).fit(X, y)
        values = np.array([-1.0, 0.5, 3.0])
        p = reg.predict_p(new, values, weights=weights)
        for k in range(3):
            alpha = honest(model, np.vstack([X, new[k]]), np.append(y, values[k]), Q[scheme])
            w = np.append(weights[0], weights[1][k])
            assert p[k] == pytest.approx(w[alpha >= alpha[-1]].sum() / w.sum())
        equal = np.ones(15), np.ones(3)
        np.testing.assert_allclose(reg.predict_interval(new, weights=equal), reg.predict_interval(new))


def test_objects_are_compared_with_their_own_category(tmp_path):
    X, y, new = table(30, 3, seed=16)
    X[:, 0], new[:, 0] = np.arange(30) % 3, [1, 0, 7]
    model = Ridge(1.0)
    reg = FullConformalRegressor(model, scheme="deleted", confidence_level=0.8, categories=0).fit(X, y)
    values = np.array([-1.0, 0.5, 3.0])
    p = reg.predict_p(new, values)
    for k in range(2):
        alpha = honest(model, np.vstack([X, new[k]]), np.append(y, values[k]), 1.0)
        same = np.append(X[:, 0] == new[k, 0], True)
        assert p[k] == pytest.approx((alpha[same] >= alpha[-1]).sum() / same.sum())
    assert p[2] == 1.0 and np.isinf(reg.predict_interval(new)[2]).all()
    with pytest.warns(ConformalWarning, match=r"category 0\.0"):
        reg.predict_interval(new, 0.95)
    with pytest.raises(ValueError, match="all points together; fit without categories="):
        reg.predict_quantile(new, 0.5)
    with pytest.raises(ValueError, match="no categories"):
        reg.audit(new)
    reg.save(tmp_path / "it")
    assert np.array_equal(fullconformal.load(tmp_path / "it").predict_p(new, values), p)


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize(("n", "d", "ties"), [(300, 3, False), (60, 20, False), (200, 4, True), (34, 40, False)])
def test_intervals_need_few_pieces(n, d, ties, scheme):
    """Ridge regressions leave out points that cannot decide an end, a lasso values too far out: intervals of all pieces are the same."""
    rng = np.random.default_rng(d)
    X, y, new = rng.standard_t(2, size=(n, d)), rng.normal(size=n), 3 * rng.standard_t(2, size=(8, d))
    if ties:
        X, y, new = X.round(), y.round(), new.round()
    levels = [0.2, 0.7, 0.9, 0.97]
    # In wide tables a lasso has many knots and no bound.
    lassos = (ElasticNet(0.05, l1_ratio=0.9), Lasso(0.1)) if d < n // 10 else ()
    for model in (Ridge(1.0), Ridge(1e-3, fit_intercept=False), *lassos):
        reg = FullConformalRegressor(model, scheme=scheme).fit(X, y)
        found = np.stack([reg.predict_interval(new, level) for level in levels], axis=2)
        expected = np.concatenate([steps.interval(levels) for steps in reg.predict_steps(new)])
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(reg.predict_interval(new, levels), expected, rtol=1e-11, atol=1e-11)


# Distributions ----------------------------------------------------------------------------------------------------------


def signed(model, X, y):
    """Signed scores (n,): studentized residuals of a fit, and of k-NN those by the others."""
    if isinstance(model, KNeighborsRegressor):
        kept = [np.arange(len(y)) != i for i in range(len(y))]
        return np.array([y[i] - clone(model).fit(X[k], y[k]).predict(X[[i]])[0] for i, k in enumerate(kept)])
    return np.sign(y - clone(model).fit(X, y).predict(X)) * honest(model, X, y, 0.5)


@pytest.mark.parametrize(
    "model", [Ridge(0.5), KernelRidge(alpha=0.5, kernel="rbf"), LinearRegression(), KNeighborsRegressor(3)], ids=str
)
def test_distributions_are_counts_of_signed_scores(model):
    X, y, new = table(20, 3, seed=17)
    reg = FullConformalRegressor(model).fit(X, y)
    values = np.linspace(-4, 4, 9)
    found = [reg.predict_cdf(new, np.tile(values, (3, 1)), tau=tau) for tau in (0.0, 1.0)]
    for row, x in enumerate(new):
        for k, value in enumerate(values):
            alpha = signed(model, np.vstack([X, x]), np.append(y, value))
            below = (alpha[:-1] < alpha[-1]).sum()
            assert found[0][row, k] == pytest.approx(below / 21) and found[1][row, k] == pytest.approx((below + 1) / 21)
    quantiles = reg.predict_quantile(new, [0.01, 0.5, 0.9, 0.99])
    assert (np.diff(quantiles, axis=1) > 0).all() and np.isinf(quantiles[:, 3]).all()
    # At a quantile as many points are below as it says.
    np.testing.assert_allclose(reg.predict_cdf(new, quantiles[:, 1:3]), np.ceil(np.array([[0.5, 0.9]] * 3) * 21) / 21)
    np.testing.assert_array_equal(reg.predict_quantile(new, 0.5), quantiles[:, 1])


def test_a_distribution_that_is_none_is_refused():
    X, y, _ = table(12, 8, seed=18)
    reg = FullConformalRegressor(Ridge(1e-6), scheme="ordinary").fit(X, y)
    with pytest.raises(ValueError, match="scheme='studentized'"):
        reg.predict_cdf(20 * X[:1], [0.0])
    with pytest.raises(ValueError, match="linear in y"):
        FullConformalRegressor(Lasso(0.1)).fit(X, y).predict_quantile(X, 0.5)


# Pipelines and transformed values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_transformed_values_are_mapped_back(inside):
    X, y, new = table(30, 3, seed=19)
    y = np.exp(y / 3)
    wrap = lambda model: TransformedTargetRegressor(model, func=np.log, inverse_func=np.exp)  # noqa: E731
    model = (
        make_pipeline(StandardScaler(), wrap(Ridge(1.0)))
        if inside
        else wrap(make_pipeline(StandardScaler(), Ridge(1.0)))
    )
    reg = FullConformalRegressor(model).fit(X, y)
    plain = FullConformalRegressor(make_pipeline(StandardScaler(), Ridge(1.0))).fit(X, np.log(y))
    np.testing.assert_allclose(reg.predict_interval(new), np.exp(plain.predict_interval(new)))
    np.testing.assert_allclose(reg.predict(new), clone(model).fit(X, y).predict(new))
    np.testing.assert_allclose(reg.predict_p(new, [0.3, 1.0, 2.0]), plain.predict_p(new, np.log([0.3, 1.0, 2.0])))
    np.testing.assert_allclose(reg.predict_quantile(new, 0.7), np.exp(plain.predict_quantile(new, 0.7)))
    with pytest.warns(ConformalWarning):
        assert np.isinf(reg.predict_interval(new, 0.99)).all()


def test_values_that_fall_are_mapped_back():
    X, y, new = table(30, 3, seed=20)
    falling = TransformedTargetRegressor(Ridge(1.0), func=np.negative, inverse_func=np.negative)
    plain = FullConformalRegressor(Ridge(1.0)).fit(X, y)
    np.testing.assert_allclose(
        FullConformalRegressor(falling).fit(X, y).predict_interval(new), plain.predict_interval(new)
    )


def behind(pipe, X, y, q):
    """Honest scores behind transformers fitted to all objects of the bag."""
    return honest(pipe[-1], clone(pipe[:-1]).fit(X).transform(X), y, q)


PIPELINES = {
    "ridge": make_pipeline(StandardScaler(), Ridge(alpha=2.0)),
    "ridge, scaled by what is largest": make_pipeline(MaxAbsScaler(), Ridge(alpha=0.1)),
    "ridge without intercept": make_pipeline(StandardScaler(), Ridge(alpha=2.0, fit_intercept=False)),
    "least squares on whitened columns": make_pipeline(PCA(2, whiten=True), LinearRegression()),
    "kernel ridge": make_pipeline(RobustScaler(), KernelRidge(alpha=0.5, kernel="rbf", gamma=0.3)),
    "k-NN": make_pipeline(StandardScaler(), KNeighborsRegressor(3)),
    "two scalers": make_pipeline(StandardScaler(), PolynomialFeatures(2), StandardScaler(), Ridge(alpha=2.0)),
}


@pytest.mark.parametrize("scheme", ["studentized", "deleted"])
@pytest.mark.parametrize("name", PIPELINES)
def test_transformers_are_fitted_with_the_object(name, scheme):
    pipe = PIPELINES[name]
    X, y, new = table(12, 3, seed=22)
    X, new = X * [1.0, 30.0, 0.1], new * [3.0, 10.0, 0.1]
    if name == "k-NN" and scheme != "deleted":
        pytest.skip("neighbours are always without the point")
    reg = FullConformalRegressor(pipe, scheme=scheme, confidence_level=0.5).fit(X, y)
    assert reg.guarantee_.word == "exact" and reg.method_ == "exact"
    check_against(reg, pipe, X, y, new, behind, most=8)
    np.testing.assert_allclose(reg.predict(new), clone(pipe).fit(X, y).predict(new), atol=1e-9)
    fixed = FullConformalRegressor(pipe, scheme=scheme, transformers="fixed", confidence_level=0.5).fit(X, y)
    assert fixed.guarantee_.word == "approximate" and "transformers='bag'" in fixed.guarantee_.reason
    plain = FullConformalRegressor(pipe[-1], scheme=scheme, confidence_level=0.5)
    seen = clone(pipe[:-1]).fit(X)
    np.testing.assert_allclose(
        fixed.predict_interval(new), plain.fit(seen.transform(X), y).predict_interval(seen.transform(new))
    )


def test_rescaled_columns_of_a_wide_table_and_of_a_constant_one():
    for n, d in ((8, 20), (30, 4)):
        X, y, new = table(n, d, seed=23)
        X[:, 1], new[1:, 1] = 3.0, 3.0
        pipe = make_pipeline(StandardScaler(), Ridge(alpha=1.0))
        reg = FullConformalRegressor(pipe, confidence_level=0.5).fit(X, y)
        check_against(reg, pipe, X, y, new, behind, most=8)


def test_everything_may_be_asked_with_transformers_in_the_bag(tmp_path):
    X, y, new = table(30, 3, seed=24)
    frame, objects = (pd.DataFrame(part, columns=["a", "b", "c"]) for part in (X, new))
    frame["kind"], objects["kind"] = np.array(["u", "v", "w"])[np.arange(30) % 3], ["u", "other", "w"]
    encode = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), ["kind"]), (StandardScaler(), ["a", "b", "c"])
    )
    reg = FullConformalRegressor(make_pipeline(encode, Ridge(1.0)), random_state=0).fit(frame, y)
    together = reg.predict_interval(objects, [0.5, 0.9])
    alone = np.concatenate([reg.predict_interval(objects.iloc[[k]], [0.5, 0.9]) for k in range(3)])
    np.testing.assert_allclose(together, alone, atol=1e-12)
    weights = np.ones(30), np.ones(3)
    np.testing.assert_allclose(reg.predict_interval(objects, [0.5, 0.9], weights=weights), together, atol=1e-9)
    assert (np.diff(reg.predict_quantile(objects, [0.2, 0.5, 0.8])) >= 0).all()
    assert reg.audit(objects, 3).p_distance.max() == 0 and reg.diagnose().n_points == 30
    reg.save(tmp_path / "it")
    np.testing.assert_array_equal(fullconformal.load(tmp_path / "it").predict_interval(objects, [0.5, 0.9]), together)
    apart = FullConformalRegressor(make_pipeline(encode, Ridge(1.0)), confidence_level=0.5, categories="kind")
    found = apart.fit(frame, y).predict_interval(objects)
    assert np.isinf(found[1]).all() and np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (make_pipeline(SelectKBest(f_regression, k=2), Ridge()), "SelectKBest"),
        (TransformedTargetRegressor(Ridge(), transformer=StandardScaler()), "StandardScaler"),
    ],
    ids=["columns are selected", "values are scaled"],
)
def test_what_learns_from_values_is_trained_as_a_whole(model, part):
    X, y, new = table(30, 3, seed=25)
    reg = FullConformalRegressor(model, folds=5, random_state=0).fit(X, y)
    assert reg.method_ == "folds" and part in reg.method_reason_ and reg.guarantee_.word == "approximate"
    fold, residual = reg._fitted.trained.fold[0], np.empty(30)
    for k in range(5):
        fit = clone(model).fit(X[fold != k], y[fold != k])
        residual[fold == k] = y[fold == k] - fit.predict(X[fold == k])
    np.testing.assert_allclose(reg._fitted.residual, residual, atol=1e-9)
    assert np.isfinite(reg.predict_interval(new)).all()


def test_a_penalty_by_cross_validation_is_approximate():
    X, y, _ = table(30, 3, seed=22)
    reg = FullConformalRegressor(RidgeCV(cv=3)).fit(X, y)
    assert reg.guarantee_.word == "approximate" and "penalty" in reg.guarantee_.reason


# Trust and storage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", Q)
@pytest.mark.parametrize(
    "model", [None, Ridge(0.5), RidgeCV(), KernelRidge(alpha=0.5), KNeighborsRegressor(2)], ids=str
)
def test_an_audit_finds_nothing(model, scheme):
    if isinstance(model, KNeighborsRegressor) and scheme != "deleted":
        pytest.skip("neighbours are always without the point")
    if isinstance(model, RidgeCV) and scheme != "ordinary":
        pytest.skip("a refit without a point chooses its own penalty")
    X, y, new = table(20, 3, seed=23)
    found = FullConformalRegressor(model, scheme=scheme).fit(X, y).audit(new, n_pairs=5)
    assert found.p_distance.max() <= 1e-12 and found.n_refits == 5 * (
        (scheme != "deleted") + 21 * (scheme != "ordinary")
    )


def test_diagnose_says_what_the_fit_is():
    X, y, _ = table(30, 3, seed=24)
    told = FullConformalRegressor(LinearRegression()).fit(X, y).diagnose()
    assert told.n_points == 30 and told.n_parameters == pytest.approx(4)
    H = np.hstack([np.ones((30, 1)), X])
    assert told.largest_leverage == pytest.approx(np.diag(H @ np.linalg.pinv(H)).max())
    assert "effective parameters" in str(told) and "exact" in str(told)
    kernel = FullConformalRegressor(KernelRidge(alpha=0.5, kernel="rbf")).fit(X, y).diagnose()
    K = KernelRidge(alpha=0.5, kernel="rbf")._get_kernel(X)
    assert kernel.n_parameters == pytest.approx(np.trace(K @ np.linalg.inv(K + 0.5 * np.eye(30))))


SAVED = [
    None, Ridge(0.5), RidgeCV(), LinearRegression(), Lasso(0.1), ElasticNet(0.1), KernelRidge(alpha=0.5, kernel="rbf"),
    KNeighborsRegressor(3), make_pipeline(StandardScaler(), Ridge()), GaussianProcessRegressor(KERNEL, optimizer=None),
    GaussianProcessRegressor(DotProduct(0.5) ** 2 + Matern(nu=1.5), optimizer=None, alpha=0.5),
    GaussianProcessRegressor(optimizer=None, alpha=0.1),
]  # fmt: skip


@pytest.mark.parametrize("model", SAVED, ids=str)
def test_a_loaded_regressor_gives_the_same_intervals(model, tmp_path):
    X, y, new = table(30, 3, seed=25)
    reg = FullConformalRegressor(model).fit(X, y)
    reg.save(tmp_path / "reg.safetensors")
    again = fullconformal.load(tmp_path / "reg.safetensors")
    np.testing.assert_array_equal(again.predict_interval(new), reg.predict_interval(new))
    np.testing.assert_array_equal(again.predict(new), reg.predict(new))
    assert again.guarantee_ == reg.guarantee_


def test_kernels_of_others_are_not_saved(tmp_path):
    X, y, _ = table(30, 3, seed=26)

    class Own(RBF):
        """One that a file could not bring along."""

    reg = FullConformalRegressor(GaussianProcessRegressor(Own(1.0), optimizer=None, alpha=0.1)).fit(X, y)
    with pytest.raises(fullconformal.StorageError, match="a Own cannot be saved; use kernels among ConstantKernel"):
        reg.save(tmp_path / "reg.safetensors")


def test_functions_are_not_saved(tmp_path):
    X, y, _ = table(30, 3, seed=26)
    model = TransformedTargetRegressor(Ridge(), func=np.cbrt, inverse_func=lambda v: v**3)
    with pytest.raises(fullconformal.StorageError):
        FullConformalRegressor(model).fit(X, y).save(tmp_path / "reg.safetensors")


# Bad input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.array([1.0, np.nan] * 10), "y is NaN or infinite at 10 of its 20 places, the first at 1"),
        (np.array([np.inf] + [0.0] * 19), "y is NaN or infinite at 1 of its 20"),
        (np.array(["a", "b"] * 10), "regression predicts numbers.*FullConformalClassifier"),
        (np.array(["1", "2"] * 10, dtype=object), "regression predicts numbers"),
        (np.arange(20) + 1j, "Complex data"),
        ("price", "is one word"),
    ],
)
def test_values_that_cannot_be_learnt_from(y, message):
    with pytest.raises(ValueError, match=message):
        FullConformalRegressor().fit(np.random.default_rng(0).normal(size=(20, 2)), y)


def test_few_whole_numbers_are_asked_about():
    X, _, _ = table(60, 2, seed=27)
    y = np.arange(60) % 3
    with pytest.warns(UserWarning, match=re.escape("y has 3 distinct whole numbers only")):
        FullConformalRegressor().fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullConformalRegressor().fit(X, y.astype(float))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "magic"}, ValueError, "method='magic' is unknown"),
        ({"scheme": "x"}, ValueError, "scheme='x' is unknown"),
        ({"confidence_level": 90}, ValueError, "write 0.9"),
        ({"confidence_level": [0.8, 0.9]}, ValueError, "must be one number"),
        ({"l2": -1}, ValueError, "l2=-1"),
        ({"estimator": Ridge(), "l2": 1.0}, ValueError, "Ridge brings its own penalty"),
        ({"estimator": Ridge}, TypeError, "is a class"),
        ({"estimator": KNeighborsRegressor(50)}, ValueError, "n_neighbors=50 is more than n_samples=20"),
        ({"estimator": TransformedTargetRegressor(Ridge(), func=np.cbrt)}, ValueError, "func and inverse_func"),
        ({"estimator": TransformedTargetRegressor(Ridge(), func=np.square, inverse_func=np.sqrt)}, ValueError, "rise or fall"),
        ({"estimator": TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp)}, ValueError, "no finite number"),
        ({"estimator": KernelRidge(), "memory_budget": 1e-6}, ValueError, "memory_budget"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_meant(options, error, message):
    X, y, _ = table(20, 2, seed=28)
    with pytest.raises(error, match=message):
        FullConformalRegressor(**options).fit(X, y)


def test_questions_that_cannot_be_meant():
    X, y, new = table(30, 3, seed=29)
    reg = FullConformalRegressor().fit(X, y)
    days = pd.DataFrame({"word": ["a", "b"] * 15, "day": pd.date_range("2024-01-01", periods=30), "n": y})
    dated = make_pipeline(make_column_transformer((OneHotEncoder(), ["word"]), remainder="passthrough"), Ridge())
    for ask, message in (
        (lambda: reg.predict_interval(new[:, :2]), "features"),
        (lambda: reg.predict_p(new, [1.0]), r"y must have shape \(3,\)"),
        (lambda: reg.predict_p(new, [1.0, np.nan, 2.0]), "holds NaN"),
        (lambda: reg.predict_set(new, [0.8, 0.9]), "one confidence_level"),
        (lambda: reg.predict_interval(new, 1.5), "strictly between 0 and 1"),
        (lambda: reg.predict_quantile(new, 1.0), "strictly between 0 and 1"),
        (lambda: reg.predict_cdf(new, 0.0, tau=2), r"tau=2 is not allowed; give a number in \[0, 1\]"),
        (lambda: FullConformalRegressor(categories="kind").fit(X, y), "X has no names of columns"),
        (
            lambda: FullConformalRegressor().fit(X, np.column_stack([y, y])),
            "has 2 columns: a regressor predicts one number",
        ),
        (lambda: FullConformalRegressor(dated).fit(days, y), "something else than numbers .*Timestamp"),
        (lambda: reg.predict_interval(new, weights=(np.ones(3), np.ones(3))), "weights of the training points"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


def test_equal_objects_of_a_process_without_noise_are_told_of():
    X, y, _ = table(20, 2, seed=30)
    X[1] = X[0]
    with pytest.raises(ValueError, match="not positive definite"):
        FullConformalRegressor(GaussianProcessRegressor(RBF(), optimizer=None, alpha=0.0)).fit(X, y)


def test_a_fit_that_fails_leaves_the_earlier_one():
    X, y, new = table(30, 3, seed=31)
    reg = FullConformalRegressor().fit(X, y)
    before = reg.predict_interval(new)
    with pytest.raises(ValueError, match="NaN"):
        reg.fit(X, np.full(30, np.nan))
    np.testing.assert_array_equal(reg.predict_interval(new), before)
