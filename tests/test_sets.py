"""Prediction sets against exact fractions, and the facts users rely on: nesting, non-emptiness, readable errors."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullconformal.sets import as_labels, prediction_sets


def literal_sets(k, n, percents):
    """sets[i][y][l]: whether k[i][y] / (n + 1) > 1 - percents[l] / 100, in exact arithmetic."""
    return [
        [[Fraction(count, n + 1) > 1 - Fraction(percent, 100) for percent in percents] for count in row] for row in k
    ]


@st.composite
def ranks(draw):
    """n, and p-values (m, C) as their numerators k: p = k / (n + 1)."""
    n, m, n_classes = draw(st.integers(1, 200)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    row = st.lists(st.integers(1, n + 1), min_size=n_classes, max_size=n_classes)
    return n, np.array(draw(st.lists(row, min_size=m, max_size=m)))


percents = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@settings(deadline=None)
@given(ranks(), percents)
def test_equal_to_exact_arithmetic(case, percents):
    n, k = case
    sets = prediction_sets(k / (n + 1), [q / 100 for q in percents])
    assert sets.dtype == np.bool_ and sets.shape == (*k.shape, len(percents))
    assert sets.tolist() == literal_sets(k.tolist(), n, percents)


@pytest.mark.parametrize("n", [9, 99, 999, 999_999])
def test_a_p_value_equal_to_epsilon_is_out(n):
    """Every level a whole percentage, where 1 - level is often not the float nearest to ε."""
    for percent in range(10, 100, 10):
        k = (100 - percent) * (n + 1) // 100
        assert not prediction_sets([[k / (n + 1)]], percent / 100)
        assert prediction_sets([[(k + 1) / (n + 1)]], percent / 100)


@settings(deadline=None)
@given(ranks(), percents, st.booleans(), st.integers(0, 2**32 - 1))
def test_nested_in_the_level(case, percents, allow_empty, seed):
    n, k = case
    proba = np.random.default_rng(seed).integers(0, 3, k.shape)
    sets = prediction_sets(k / (n + 1), [q / 100 for q in sorted(percents)], allow_empty=allow_empty, proba=proba)
    assert (sets[:, :, :-1] <= sets[:, :, 1:]).all()


@settings(deadline=None)
@given(ranks(), percents)
def test_several_levels_are_the_single_ones_stacked(case, percents):
    n, k = case
    levels = [q / 100 for q in percents]
    together = prediction_sets(k / (n + 1), levels)
    for index, level in enumerate(levels):
        alone = prediction_sets(k / (n + 1), level)
        assert alone.shape == k.shape and np.array_equal(alone, together[:, :, index])


@settings(deadline=None)
@given(ranks(), st.integers(1, 99))
def test_not_empty_adds_one_label_of_largest_p_to_empty_sets_only(case, percent):
    n, k = case
    p = k / (n + 1)
    plain, filled = prediction_sets(p, percent / 100), prediction_sets(p, percent / 100, allow_empty=False)
    for row, before, after in zip(p, plain, filled, strict=True):
        if before.any():
            assert np.array_equal(before, after)
        else:
            assert after.sum() == 1 and row[after] == row.max()


def test_proba_decides_between_equal_p_values_and_nothing_else():
    p, proba = [[0.3, 0.3, 0.1]], [[0.1, 0.2, 0.7]]
    assert prediction_sets(p, 0.5, allow_empty=False).tolist() == [[True, False, False]]
    assert prediction_sets(p, 0.5, allow_empty=False, proba=proba).tolist() == [[False, True, False]]


def test_labels_in_words():
    sets = prediction_sets([[0.5, 0.3, 0.05], [0.01, 0.02, 0.03]], 0.9)
    assert [labels.tolist() for labels in as_labels(sets, ["cat", "dog", "fox"])] == [["cat", "dog"], []]


@pytest.mark.parametrize(
    "level", [0, 1, 0.0, 1.0, -0.1, 90, float("nan"), [], [0.9, 1.0], [[0.9]], "high", "0.9", ["0.9"], None]
)
def test_bad_confidence_level(level):
    with pytest.raises(ValueError, match=r"confidence_level .* strictly between 0 and 1.* got"):
        prediction_sets([[0.5, 0.1]], level)


@pytest.mark.parametrize("p", [[0.5, 0.1], [[]], np.empty((0, 3)), [[np.nan, 0.1]], [[1.5, 0.1]], [[-0.1, 0.1]]])
def test_bad_p(p):
    with pytest.raises(ValueError, match=r"^p must"):
        prediction_sets(p, 0.9)


@pytest.mark.parametrize("proba", [[[0.5, 0.5, 0.0]], [[np.nan, 0.5]]])
def test_bad_proba(proba):
    with pytest.raises(ValueError, match=r"^proba must"):
        prediction_sets([[0.5, 0.1]], 0.1, allow_empty=False, proba=proba)


def test_bad_labels():
    with pytest.raises(ValueError, match=r"^sets must be a boolean"):
        as_labels([[0.5, 0.1]], [0, 1])
    with pytest.raises(ValueError, match=r"^sets must be a boolean"):
        as_labels(prediction_sets([[0.5, 0.1]], [0.8, 0.9]), [0, 1])
    with pytest.raises(ValueError, match=r"^classes must"):
        as_labels([[True, False]], [0, 1, 2])
