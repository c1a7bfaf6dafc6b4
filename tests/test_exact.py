"""Exact full CP by batched refits equals brute force, one fit at a time."""

import numpy as np
import oracles_convex as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullconformal.convex import Change, LinearBag, NoMinimiser, refit
from fullconformal.pvalues import comparison_weight, p_values
from fullconformal.scores.exact import exact_counts


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products wait for their threads longer than they take where others use the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@st.composite
def problems(draw, max_size=200, max_features=30):
    """A random classification problem with its penalty, and one test point."""
    C = draw(st.sampled_from([2, 3]))
    n = draw(st.integers(20, max_size if C == 2 else max_size // 2))
    d = draw(st.integers(1, max_features if C == 2 else max_features // 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    separable = draw(st.booleans())
    X = rng.normal(size=(n + 1, d)) * np.exp(draw(st.floats(-1, 1)))
    scores = X @ rng.normal(size=(d, C)) + rng.normal(size=C) / 2
    y = (scores if separable else scores + 2 * rng.gumbel(size=scores.shape)).argmax(1)[:n]
    y[: 2 * C] = np.arange(2 * C) % C  # every class at least twice
    intercept = draw(st.booleans())
    penalty = np.full(d, 10 ** draw(st.floats(-2, 1)))
    if intercept:
        X, penalty = np.hstack([X, np.ones((n + 1, 1))]), np.append(penalty, 0.0)
    if draw(st.booleans()):
        X[-1] = X[0]  # the test point is a training point: a tie
    return X[:n], y, C, penalty, X[n:]


def bag_of(X, y, C, penalty):
    return LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))


def p_exact(X, y, C, penalty, X_test, q, weight=None):
    weights = None if weight is None else torch.tensor(weight)
    counts = exact_counts(bag_of(X, y, C, penalty), torch.tensor(X_test), q, weights)
    return p_values(counts.greater, counts.equal, len(y) if weight is None else weight.sum(0))


def p_brute(X, y, C, penalty, X_test, q, weight=None):
    return np.array([
        [
            oracle.p_value(*oracle.exact_scores(X, y, C, penalty, x, c, q), None if weight is None else weight[:, c])
            for c in range(C)
        ]
        for x in X_test
    ])  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems())
def test_ordinary_equals_brute_force(problem):
    np.testing.assert_allclose(p_exact(*problem, q=0), p_brute(*problem, q=0), rtol=1e-12)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problems())
def test_deleted_equals_brute_force(problem):
    np.testing.assert_allclose(p_exact(*problem, q=1), p_brute(*problem, q=1), rtol=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(problems(max_size=40, max_features=6))
def test_deleted_equals_brute_force_on_few_points(problem):
    np.testing.assert_allclose(p_exact(*problem, q=1), p_brute(*problem, q=1), rtol=1e-12)
