"""Step functions p(y) against a literal count at every jump and between."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullconformal.intervals import Steps
from fullconformal.sets import members

LEVELS = [0.1, 0.5, 0.75, 0.8, 0.9, 0.95]


def literal(lower, upper, weight, total, own, y):
    """p(y) by the definition."""
    held = sum(w for low, high, w in zip(lower, upper, weight, strict=True) if low <= y <= high and low < np.inf)
    return (own + held) / (own + total)


def places(lower, upper):
    """Every jump, a number between any two, and one beyond each end."""
    jumps = sorted({float(end) for end in [*lower, *upper] if np.isfinite(end)})
    between = [(a + b) / 2 for a, b in pairwise(jumps)]
    return sorted([*jumps, *between, *([jumps[0] - 1, jumps[-1] + 1] if jumps else [0.0])])


# Small whole numbers, so that ends coincide, and both kinds of infinite ones.
ENDS = st.one_of(st.integers(-4, 4).map(float), st.sampled_from([-np.inf, np.inf]))


@st.composite
def pieces(draw, around_zero=False):
    found = []
    for _ in range(draw(st.integers(1, 7))):
        a, b = sorted((draw(ENDS), draw(ENDS)))
        if around_zero:
            a, b = -abs(a), abs(b)
        found.append((np.inf, np.inf) if a == b and np.isinf(a) else (a, b))
    return np.array(found).T


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.one_of(pieces(), pieces(around_zero=True)),
    extra=st.integers(0, 3),
    weighted=st.booleans(),
    data=st.data(),
)
def test_everything_is_read_off_the_step_function(pieces, extra, weighted, data):
    lower, upper = pieces
    K = len(lower)
    weight = np.array(data.draw(st.lists(st.integers(0, 5), min_size=K, max_size=K)), float) if weighted else np.ones(K)
    own = float(data.draw(st.integers(1, 4))) if weighted else 1.0
    total = weight.sum() + extra
    steps = Steps(lower[None], upper[None], np.array([total]), *((weight, np.array([own])) if weighted else ()))
    where = places(lower, upper)
    wanted = np.array([literal(lower, upper, weight, total, own, y) for y in where])
    np.testing.assert_allclose(steps.p([where])[0], wanted, rtol=1e-14)
    at, values, between = steps.jumps(0)
    np.testing.assert_allclose(values, [literal(lower, upper, weight, total, own, y) for y in at], rtol=1e-14)
    middles = [*(at[:1] - 1), *((at[1:] + at[:-1]) / 2), *(at[-1:] + 1)] or [0.0]
    np.testing.assert_allclose(between, [literal(lower, upper, weight, total, own, y) for y in middles], rtol=1e-14)
    hulls = steps.interval(LEVELS)[0]
    for hull, level in zip(hulls.T, LEVELS, strict=True):
        inside = members(wanted, 1 - level)
        union = steps.unions(level)[0]
        assert [bool(((union[:, 0] <= y) & (y <= union[:, 1])).any()) for y in where] == inside.tolist()
        assert (union[1:, 0] > union[:-1, 1]).all()
        if len(union):
            assert hull.tolist() == [union[0, 0], union[-1, 1]]
        else:
            assert np.isnan(hull).all()
        # A set that holds the places beyond all jumps goes on for ever.
        beyond = np.isinf([union[0, 0], union[-1, 1]]) if len(union) else np.zeros(2, dtype=bool)
        assert (inside[0], inside[-1]) == tuple(beyond)


def test_objects_are_read_one_by_one():
    rng = np.random.default_rng(0)
    lower = rng.normal(size=(5, 30)) - 3
    upper = lower + rng.exponential(size=(5, 30)) * np.array([[1.0], [20.0], [3.0], [50.0], [0.1]])
    steps = Steps(lower, upper, np.full(5, 30.0))
    for row in range(5):
        alone = Steps(lower[[row]], upper[[row]], np.array([30.0]))
        assert np.array_equal(steps.interval([0.5, 0.9])[row], alone.interval([0.5, 0.9])[0], equal_nan=True)
        assert np.array_equal(steps.unions(0.9)[row], alone.unions(0.9)[0])


def test_pieces_that_hold_all_the_others_need_not_be_listed():
    lower = -np.random.default_rng(1).exponential(size=(3, 400))
    total = np.full(3, 400.0)
    order = np.argsort(lower, axis=1)
    lower, upper = np.take_along_axis(lower, order, 1), -np.take_along_axis(lower, order, 1)
    levels = [0.8, 0.9, 0.93]
    expected = Steps(lower, upper, total).interval(levels)
    assert np.array_equal(Steps(lower[:, 20:90], upper[:, 20:90], total, wider=20).interval(levels), expected)
    # p > ε means that count + 1 > ε·401.
    assert expected[:, 0, 1].tolist() == lower[:, 40 - 1].tolist()


@pytest.mark.parametrize("n", [1, 2, 8, 9, 18, 19, 20, 99])
def test_too_few_points_leave_an_infinite_interval(n):
    steps = Steps(np.zeros((1, n)), np.ones((1, n)), np.array([float(n)]))
    for level in (0.5, 0.8, 0.9, 0.95, 0.99):
        wanted = [-np.inf, np.inf] if members(np.array(1 / (n + 1)), 1 - level) else [0.0, 1.0]
        assert steps.interval(level)[0].tolist() == wanted


def test_a_candidate_that_is_compared_with_nothing_is_as_good_as_any():
    steps = Steps(np.full((1, 2), np.inf), np.full((1, 2), np.inf), np.zeros(1))
    assert steps.p([[0.0]]).tolist() == [[1.0]]
    assert steps.interval(0.9).tolist() == [[-np.inf, np.inf]]


def test_many_levels_at_once_are_those_one_by_one():
    """Ends by their rank: from one sort of all pieces, or from a partition for each level; with pieces that hold no number."""
    rng = np.random.default_rng(0)
    middle, half = rng.normal(size=(6, 1)), rng.exponential(size=(6, 40))
    lower, upper = middle - half, middle + rng.exponential(size=(6, 40))
    lower[2:4, ::7], upper[2:4, ::7] = np.inf, -np.inf
    steps = Steps(lower, upper, np.full(6, 40.0))
    levels = np.linspace(0.05, 0.99, 60)
    one_by_one = np.stack([steps.interval(level) for level in levels], axis=2)
    np.testing.assert_array_equal(steps.interval(levels), one_by_one)
