"""Exact full CP by batched refits equals brute force, one fit at a time, and its fits and bounds hold what they say."""

import pickle

import numpy as np
import oracles_convex as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_convex import bag_of, one_thread, problems  # noqa: F401
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from fullconformal import FullConformalClassifier
from fullconformal.linear.added import fit_without
from fullconformal.linear.bag import Change, NoMinimiser, at_points, logits
from fullconformal.linear.exact import _own_steps, exact_counts
from fullconformal.linear.hessian import certify, curvature, hessian
from fullconformal.linear.leave_one_out import bounds, deletion
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


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problems(max_size=60))
def test_one_step_deletion_is_within_its_bound(problem):
    """The logits of a point left out by one Newton step are within the bound of those of the refit without it."""
    *data, X_test = problem
    bag, n = bag_of(*data), len(data[1])
    change = Change(torch.tensor(X_test[:1]).T, torch.zeros(1, dtype=torch.long))
    fits = refit(bag, change)
    z = logits(bag, fits.theta)
    S, r = second(z), residual(z, bag.y[:, None])
    C = curvature(bag, change, fits.theta, S)
    mu, kappa, _ = certify(bag, change, fits.theta, fits.gradient, C)
    out = deletion(C.A, S, r, 1)
    e, nu = out.remaining, (r * out.shift).sum(1).clamp(min=0.0).sqrt()
    claimed = bounds(C.spread / e, nu, kappa / e.sqrt(), mu / e.sqrt())[:, 0]
    without = refit(bag, Change(change.x.repeat(1, n), change.y.repeat(n), torch.arange(n)))
    exact = at_points(bag.X.T, without.theta)
    assert (range_of(exact - (z + out.shift)[:, :, 0].T) <= claimed + without.error).all()


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


@pytest.mark.parametrize("C", [2, 3])
def test_steps_by_each_column_s_own_inverse_are_those_of_a_solve(C):
    """H̄⁻¹Jᵀu, within the error that the inverse claims, in the norm of H̄."""
    rng = np.random.default_rng(C)
    n, d = 80, 5
    X = rng.normal(size=(n, d)) * [1.0, 30.0, 0.1, 1.0, 1.0]
    bag = bag_of(X, np.arange(n) % C, C, np.full(d, 0.3))
    change = Change(torch.tensor(rng.normal(size=(d, 2))), torch.tensor([0, 1]))
    theta = refit(bag, change).theta
    S = second(logits(bag, theta))
    column, point = torch.tensor([0, 0, 1]), torch.tensor([3, 7, 3])
    dual = torch.tensor(rng.normal(size=(3, C - 1)))
    H = hessian(bag, change, theta, S.clone())
    right = (bag.X[point][:, :, None] * dual[:, None, :]).flatten(1)
    literal = torch.linalg.solve(H[column], right)
    found = curvature(bag, change, theta, S.clone())
    steps = _own_steps(bag, found.inverse, column, point, dual).permute(2, 0, 1).flatten(1)
    off, size = (torch.einsum("bp,bpq,bq->b", v, H[column], v).sqrt() for v in (steps - literal, literal))
    assert (off <= 2 * found.rounding[column] * size).all()


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
