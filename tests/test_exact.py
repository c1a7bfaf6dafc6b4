"""Exact full CP by batched refits equals brute force, one fit at a time, and its fits and bounds hold what they say."""

import pickle
from dataclasses import replace

import numpy as np
import oracles_convex as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_convex import bag_of, one_thread, problems  # noqa: F401
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import LogisticRegression

from fullconformal import FullConformalClassifier
from fullconformal.linear import exact
from fullconformal.linear.added import fit_added, fit_without, turn
from fullconformal.linear.bag import (
    Change,
    NoMinimiser,
    as_objects,
    at_points,
    gradient,
    logits,
    residuals,
    with_labels,
)
from fullconformal.linear.bounded import COARSE
from fullconformal.linear.exact import LeftOut, exact_counts, own_steps
from fullconformal.linear.hessian import hessian, radius
from fullconformal.linear.newton import refit
from fullconformal.losses.relative import range_of, residual, second
from fullconformal.pvalues import comparison_weight, p_values


def p_exact(X, y, C, penalty, X_test, q, weight=None, **options):
    counts = exact_counts(bag_of(X, y, C, penalty), torch.tensor(X_test), q, weight, **options)
    return p_values(*counts, len(y) if weight is None else weight.sum(0))


def p_brute(X, y, C, penalty, X_test, q, weight=None, factors=None):
    weights = [None] * C if weight is None else weight.T
    return np.array(
        [
            [oracle.p_value(*oracle.exact_scores(X, y, C, penalty * own, x, c, q), weights[c]) for c in range(C)]
            for x, own in zip(X_test, np.ones_like(X_test) if factors is None else factors.numpy(), strict=True)
        ]
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_ordinary_equals_brute_force(problem):
    np.testing.assert_allclose(p_exact(*problem, q=0), p_brute(*problem, q=0), rtol=1e-12)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems())
def test_deleted_equals_brute_force(problem):
    np.testing.assert_allclose(p_exact(*problem, q=1), p_brute(*problem, q=1), rtol=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(max_size=40, max_features=8), st.sampled_from([None, 0.05, 0.5]))
def test_deleted_equals_brute_force_on_few_points(problem, width):
    """With penalties of the object's own, too, a few of them far from those of the training points."""
    rng, shape = np.random.default_rng(len(problem[1])), problem[4].shape
    factors = None if width is None else torch.tensor(np.exp(width * rng.standard_t(3, size=shape)))
    got, literal = p_exact(*problem, q=1, factors=factors), p_brute(*problem, q=1, factors=factors)
    np.testing.assert_allclose(got, literal, rtol=1e-12)


def test_weak_penalties_leave_bounds_infinite_and_counts_right():
    """Iris with 40 points: one point moves the fit so far that no bound is finite, and what is left open is refitted."""
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(150)
    X = np.hstack([X[order] - X.mean(0), np.ones((150, 1))])
    problem = X[:40], y[order[:40]], 3, np.array([*[1e-4] * 4, 0.0]), X[40:41]
    np.testing.assert_allclose(p_exact(*problem, q=1), p_brute(*problem, q=1), rtol=1e-12)


@pytest.mark.parametrize("class_conditional", [False, True])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(problem=problems(max_size=40, max_features=4))
def test_class_conditional_and_weighted_counts(class_conditional, problem):
    y, C = problem[1], problem[2]
    weight = comparison_weight(y, C, class_conditional=class_conditional, weights=np.exp(problem[0][:, 0]))
    for q in (0, 1):
        expected = p_brute(*problem, q, weight)
        np.testing.assert_allclose(p_exact(*problem, q, weight), expected, rtol=1e-12)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problems(max_size=60))
def test_every_fit_is_within_the_bound_on_its_error(problem):
    """Stopped after any number of steps, the logits of all points are within the error claimed of the minimiser's."""
    *data, X_test = problem
    bag, C = bag_of(*data), data[2]
    change = Change(torch.tensor(X_test[:1]).T.repeat(1, C), torch.arange(C), torch.arange(C))
    exact = refit(bag, change)
    for steps in range(4):
        state = {"left": steps}

        def stop(columns, theta, error, state=state):
            state["left"] -= 1
            return torch.full((len(columns),), state["left"] < 0)

        fits = refit(bag, change, bag.base.theta[:, :, None].expand(-1, -1, C), stop)
        moved = fits.theta - exact.theta
        off = torch.maximum(range_of(logits(bag, moved)).amax(0), range_of(at_points(change.x, moved)))
        assert (off <= fits.error + exact.error).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problems(max_size=40, max_features=8), st.sampled_from([None, 0.05, 0.5]))
def test_scores_of_points_left_out_are_within_their_errors_of_literal_ones(problem, width):
    """By what the points had of the gradient, and by a walk along their steps on Z; with penalties of the object's own, too."""
    X, y, C, penalty, x = problem
    own = np.ones_like(x) if width is None else np.exp(width * np.random.default_rng(len(y)).normal(size=x.shape))
    bag = bag_of(X, y, C, penalty)
    change = with_labels(bag, as_objects(torch.tensor(x), None if width is None else torch.tensor(own)))
    out = LeftOut(bag, change, fit_added(bag, change, torch.arange(C), COARSE, dtype=bag.reference.rough))
    with np.errstate(divide="ignore"):
        literal = [np.log(np.expm1(oracle.exact_scores(X, y, C, penalty * own[0], x, c, 1)[0])) for c in range(C)]
    for margin, error in (out.scores(), out.scores(torch.arange(len(y)))):
        off = (margin - torch.tensor(np.stack(literal))).abs()
        assert not (off > error + 1e-9).any()


@pytest.mark.parametrize("share", [1e-3, 0.5, 1.5])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(problem=problems(max_size=40, max_features=8), width=st.sampled_from([None, 0.5]))
def test_what_a_walk_leaves_of_the_gradient_is_no_longer_than_claimed(share, problem, width):
    """By gradients and the Hessian of the bag without the point, in its norm, of logits and residuals taken at both ends."""
    *data, x = problem
    bag, (n, d), K = bag_of(*data), data[0].shape, data[2] - 1
    factors = None if width is None else torch.tensor(np.exp(width * np.random.default_rng(n).normal(size=x.shape)))
    change = with_labels(bag, as_objects(torch.tensor(x), factors))
    fits, i = fit_added(bag, change, torch.arange(K + 1), COARSE), torch.arange(n)
    own = (bag.reference.pi - bag.reference.own)[1:]
    w, _ = own_steps(bag, i, own)
    beyond, R = LeftOut(bag, change, fits).beyond(i, w, torch.full((K + 1, n), share, dtype=torch.float64))
    for c in range(K + 1):
        column, start = change[torch.full((n,), c)], fits.theta[:, :, [c]].expand(d, K, n)
        end = start + share * w.permute(2, 1, 0)
        at_start, at_end = (gradient(bag, replace(column, removed=i), v, residuals(bag, v)) for v in (start, end))
        left = at_end - at_start - share * bag.X.T[:, None] * own
        H = hessian(bag, replace(column, removed=i), start, second(logits(bag, start)))
        solved = torch.linalg.solve(H, left.permute(2, 0, 1).flatten(1))
        length = (left.permute(2, 0, 1).flatten(1) * solved).sum(1).sqrt()
        assert (length <= beyond[c] * (1 + 1e-9) + 1e-9).all()
        moved = range_of(logits(bag, end - start))
        moved[i, i] = 0.0
        assert (torch.maximum(moved.amax(0), range_of(at_points(column.x, end - start))) <= R[c] + 1e-12).all()


@pytest.mark.parametrize("walk", [False, True])
def test_the_gradient_left_at_the_end_of_a_step_is_no_longer_than_the_radius_is_told(walk, monkeypatch):
    """By the literal gradient and Hessian, where penalties change, too, so that residuals turn and what is left of a point's own counts."""
    rng, (n, d, C) = np.random.default_rng(0), (30, 12, 5)
    X, i, width = rng.normal(size=(n, d)), torch.arange(n), np.exp(0.6 * rng.normal(size=(3, d)))
    bag = bag_of(X, np.arange(n) % C, C, np.full(d, 0.3))
    change, told = with_labels(bag, as_objects(torch.tensor(3 * X[:3]), torch.tensor(width))), []
    fits = fit_added(bag, change, torch.arange(3 * C), 1e-6)
    monkeypatch.setattr(exact, "radius", lambda *parts: told.append(parts) or radius(*parts))
    LeftOut(bag, change, fits).scores(i if walk else None)
    own, r = (bag.reference.pi - bag.reference.own)[1:], residual(fits.z, bag.y)
    mu = told[0][0]
    for c in range(3 * C):
        column, start = replace(change[torch.full((n,), c)], removed=i), fits.theta[:, :, [c]].expand(d, C - 1, n)
        part = own if walk else r[c]
        w, s = own_steps(bag, i, part)
        t = (r[c] * s).sum(0) / (part * s).sum(0)
        # Where no step leaves less, none is taken.
        ends = [start + t * turn(w), start] if not walk else [start + t * turn(w)]
        H = hessian(bag, column, start, second(logits(bag, start)))
        lengths = []
        for end in ends:
            G = gradient(bag, column, end, residuals(bag, end)).permute(2, 0, 1).flatten(1)
            lengths.append((G * torch.linalg.solve(H, G)).sum(1).sqrt())
        assert (torch.stack(lengths).amin(0) <= mu[c] * (1 + 1e-9)).all()


def test_a_walk_decides_most_points_of_digits_that_are_open_without():
    """Their steps on Z are about those of a candidate's bag, and move few others."""
    X, y = load_digits(return_X_y=True)
    X = np.hstack([X[:201] / 16, np.ones((201, 1))])
    bag = bag_of(X[:200], y[:200], 10, np.array([*[1.0] * 64, 0.0]))
    change = with_labels(bag, as_objects(torch.tensor(X[200:])))
    out = LeftOut(bag, change, fit_added(bag, change, torch.arange(10), COARSE, dtype=bag.reference.rough))
    standing, walked = ((error > 2.0).sum() for _, error in (out.scores(), out.scores(torch.arange(200))))
    assert walked < standing / 3


@pytest.mark.parametrize(("accuracy", "dtype"), [(1e-2, torch.float32), (1e-5, torch.float64)])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(problem=problems(max_size=60))
def test_fits_without_a_point_are_within_the_error_claimed(accuracy, dtype, problem):
    """From the fit on all points, stopped early, the logits of the point left out are as near the converged ones as claimed."""
    *data, X_test = problem
    bag, C = bag_of(*data), data[2]
    change = Change(torch.tensor(X_test[:1]).T.repeat(1, C), torch.arange(C), torch.arange(C))
    kappa = bag.base.spread_at(change.x).sqrt().clamp(min=bag.base.kappa)
    theta, error = fit_without(bag, change, bag.base.theta[:, :, None].expand(-1, -1, C), kappa, accuracy, dtype)
    exact = refit(bag, change)
    off = range_of(at_points(bag.X[change.removed].T, theta - exact.theta))
    assert (off <= error + exact.error).all()


def test_softmax_loss_is_self_concordant_in_the_range_of_logits():
    """|D³ℓ[u, u, δ]| ≤ range(δ) D²ℓ[u, u], and no constant below one would do."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(2000):
        C = rng.integers(2, 6)
        pi = rng.dirichlet(np.full(C, rng.choice([0.1, 1.0]))) + 1e-9
        pi /= pi.sum()
        u, delta = rng.normal(size=(2, C))
        u, centred = u - pi @ u, delta - pi @ delta
        ratios.append(abs(pi @ (u**2 * centred)) / (np.ptp(delta) * (pi @ u**2)))
    assert 0.95 < max(ratios) <= 1


@pytest.mark.parametrize("C", [2, 3])
def test_the_fit_is_that_of_scikit_learn(C):
    rng = np.random.default_rng(C)
    X = rng.normal(size=(100, 4))
    y = rng.integers(C, size=100)
    model = LogisticRegression(C=0.5, tol=1e-12, solver="newton-cholesky").fit(X, y)
    bag = bag_of(np.hstack([X, np.ones((100, 1))]), y, C, np.array([2.0, 2, 2, 2, 0]))
    expected = np.hstack([model.coef_, model.intercept_[:, None]])
    W = bag.base.theta.T.numpy()
    if C > 2:  # relative to the first class, here to the mean
        W = np.vstack([np.zeros_like(W[:1]), W])
        W = W - W.mean(0)
    np.testing.assert_allclose(W, expected, atol=1e-8)


def test_without_the_last_point_of_a_class_its_score_is_infinite():
    """A free intercept runs away then, so the point counts for every candidate of another class."""
    rng = np.random.default_rng(0)
    X = np.hstack([rng.normal(size=(30, 2)), np.ones((30, 1))])
    y = np.zeros(30, dtype=int)
    y[0] = 1
    y[1] = 2
    y[2:16] = 1
    greater, _ = exact_counts(bag_of(X, y, 3, np.array([1.0, 1, 0])), torch.tensor(X[20:22] * [3, 3, 1]), 1)
    assert (greater[:, :2] >= 1).all()


@pytest.mark.parametrize("q", [0, 1])
def test_separable_data_without_penalty(q):
    X = np.hstack([np.linspace(-1, 1, 20)[:, None], np.ones((20, 1))])
    bag = bag_of(X, (X[:, 0] > 0).astype(int), 2, np.zeros(2))
    with pytest.raises(NoMinimiser, match="l2"):
        exact_counts(bag, torch.tensor(X[:1]), q)


@pytest.mark.parametrize(
    ("penalty", "y", "message"),
    [
        ([0.0, 0.0], [0, 1], "without an l2 penalty"),
        (
            [1e-300, 0.0],
            [0, 1],
            r"n·l2 = 1e-300 is too small .* larger l2",
        ),  # there is a minimiser, with logits of hundreds
        ([1.0, 0.0], [0, 0], "a class is missing"),
    ],
)
def test_what_keeps_a_fit_from_being_found_is_named(penalty, y, message):
    """Separable data: the message that asks for a penalty is for those who gave none, and survives a worker process."""
    X = np.hstack([np.repeat([[-1.0], [1.0]], 10, 0) * np.tile(np.linspace(1, 2, 10), 2)[:, None], np.ones((20, 1))])
    with pytest.raises(NoMinimiser, match=message) as caught:
        _ = bag_of(X, np.repeat(y, 10), 2, np.array(penalty)).base
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_scheme_that_has_no_exact_version():
    clf = FullConformalClassifier(method="exact", scheme="studentized", confidence_level=0.5).fit(
        np.eye(4), [0, 1, 0, 1]
    )
    with pytest.raises(ValueError, match="scheme='deleted' and 'ordinary' only"):
        clf.predict_p(np.eye(4))


def test_memory_and_progress_change_nothing():
    rng = np.random.default_rng(1)
    X, y, X_test = rng.normal(size=(50, 3)), rng.integers(3, size=50), rng.normal(size=(7, 3))
    seen = []
    whole = p_exact(X, y, 3, np.full(3, 0.1), X_test, 1)
    parts = p_exact(
        X, y, 3, np.full(3, 0.1), X_test, 1, memory_budget=1, progress=lambda done, total: seen.append((done, total))
    )
    np.testing.assert_array_equal(whole, parts)
    assert seen[-1] == (7, 7) and len(seen) == 7
