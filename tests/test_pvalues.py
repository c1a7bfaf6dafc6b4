"""p-values against literal loops over the training points, and the facts that make them p-values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullconformal.pvalues import comparison_weight, count, p_values

# Few distinct scores, so that ties are common; sums and quotients of small integers, exact in float64.
scores = st.lists(st.integers(0, 5), min_size=1, max_size=30)


def plain(alpha, star):
    """(1 + #{α_i ≥ α*}) / (n + 1)."""
    k = 1
    for a in alpha:
        if a >= star:
            k += 1
    return k / (len(alpha) + 1)


def smoothed(alpha, star, u):
    """(#{α_i > α*} + u (1 + #{α_i = α*})) / (n + 1)."""
    above = ties = 0
    for a in alpha:
        if a > star:
            above += 1
        elif a == star:
            ties += 1
    return (above + u * (1 + ties)) / (len(alpha) + 1)


def mondrian(alpha, y, star, label):
    """(1 + #{i : y_i = label, α_i ≥ α*}) / (1 + n_label)."""
    return plain([a for a, other in zip(alpha, y, strict=True) if other == label], star)


def weighted(alpha, w, star, w_star):
    """Σ_j w_j 1{α_j ≥ α*} / Σ_j w_j over the n + 1 points."""
    top, bottom = w_star, w_star
    for a, wi in zip(alpha, w, strict=True):
        bottom += wi
        if a >= star:
            top += wi
    return top / bottom


@settings(deadline=None)
@given(scores, st.integers(0, 5), st.floats(0, 1))
def test_plain_and_smoothed(alpha, star, u):
    above, ties = count(np.array(alpha), star)
    assert p_values(above, ties, len(alpha)) == plain(alpha, star)
    assert p_values(above, ties, len(alpha), uniform=u) == smoothed(alpha, star, u)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=30), st.integers(0, 5))
def test_class_conditional(pairs, star):
    alpha, y = np.array(pairs).T
    weight = comparison_weight(y, 3, class_conditional=True)
    above, ties = count(np.repeat(alpha[:, None], 3, axis=1), np.full(3, star), weight=weight)
    p = p_values(above, ties, weight.sum(0))
    assert p.tolist() == [mondrian(alpha, y, star, label) for label in range(3)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=30),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_weighted(pairs, star, w_star):
    alpha, w = np.array(pairs).T
    weight = comparison_weight(np.zeros(len(w), dtype=int), 1, weights=w)
    above, ties = count(alpha[:, None], np.array([star]), weight=weight)
    assert p_values(above, ties, weight.sum(0), own=w_star) == weighted(alpha, w, star, w_star)


def test_weighted_and_class_conditional_multiply():
    y, w = np.array([0, 1, 1]), np.array([2.0, 3.0, 5.0])
    assert comparison_weight(y, 2, class_conditional=True, weights=w).tolist() == [[2, 0], [0, 3], [0, 5]]
    assert comparison_weight(y, 2) is None


@settings(deadline=None)
@given(scores, st.integers(0, 5))
def test_unit_weights_change_nothing(alpha, star):
    alpha = np.array(alpha)
    assert count(alpha, star, weight=np.ones(len(alpha))) == count(alpha, star)


@settings(deadline=None)
@given(scores, st.integers(0, 4), st.floats(0, 1))
def test_a_larger_score_has_no_larger_p(alpha, star, u):
    p = [p_values(*count(np.array(alpha), s), len(alpha), uniform=v) for s in (star, star + 1) for v in (None, u)]
    assert p[0] >= p[2] and p[1] >= p[3]
    assert 0 < p[0] <= 1 and 0 <= p[1] <= p[0]


@settings(deadline=None)
@given(scores)
def test_p_values_of_exchangeable_points_are_valid(bag):
    """Each point of a bag in turn against the others: #{p ≤ ε} ≤ ε·size for every ε, whatever the ties."""
    p = np.array([p_values(*count(np.delete(np.array(bag), i), a), len(bag) - 1) for i, a in enumerate(bag)])
    for k in range(1, len(bag) + 1):
        assert (p <= k / len(bag) + 1e-12).sum() <= k


def test_scores_within_the_tolerance_are_tied():
    above, ties = count(np.array([0.9, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 1.1]), 1.0, tolerance=1e-6)
    assert (above, ties) == (1, 3)


def test_torch_tensors_count_as_arrays_do():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    alpha, star, weight = rng.integers(0, 4, (20, 6)), rng.integers(0, 4, 6), rng.integers(0, 3, (20, 6))
    for w in (None, weight):
        expected = count(alpha, star, 0, w)
        got = count(torch.tensor(alpha), torch.tensor(star), 0, None if w is None else torch.tensor(w))
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(expected, got, strict=True))


def test_rounding_never_lifts_a_p_value_above_one():
    w = np.full(10, 0.1)  # left to right these add up to 0.9999999999999999
    assert p_values(np.sum(w), 0.0, sum(w.tolist()), own=0.1) <= 1.0
