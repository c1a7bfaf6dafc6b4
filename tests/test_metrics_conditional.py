"""Coverage within labels, sizes and slabs against loops over the points."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import literal_mean

from fullconformal import metrics
from fullconformal.metrics.classification import worst_slab

EPS = np.finfo(float).eps


def assert_close(estimate, expected, m):
    """Means of m numbers in [0, 1], and their standard errors compared by squares: each of the m operations rounds by EPS."""
    bound = 8 * EPS * m
    value, se = expected
    assert abs(estimate.value - value) <= bound
    assert (math.isnan(estimate.se) and math.isnan(se)) or abs(estimate.se**2 - se**2) <= 2 * bound


@st.composite
def sets_and_truth(draw, min_points=1):
    """Sets (m, C) as lists of booleans, true columns (m,)."""
    m, n_classes = draw(st.integers(min_points, 14)), draw(st.integers(1, 5))
    row = st.lists(st.booleans(), min_size=n_classes, max_size=n_classes)
    y = draw(st.lists(st.integers(0, n_classes - 1), min_size=m, max_size=m))
    return draw(st.lists(row, min_size=m, max_size=m)), y


@settings(deadline=None)
@given(sets_and_truth(), st.integers(1, 99))
def test_class_coverage_gap_equals_the_loop(problem, percent):
    sets, y = problem
    names = [f"label {c}" for c in range(len(sets[0]))]
    gap = metrics.class_coverage_gap(sets, [names[c] for c in y], percent / 100, names)
    gaps, squares = {}, []
    for c in set(y):
        hits = [row[c] for row, truth in zip(sets, y, strict=True) if truth == c]
        gaps[names[c]] = abs(Fraction(sum(hits), len(hits)) - Fraction(percent, 100))
        squares.append(literal_mean(hits)[1] ** 2)
    expected = float(sum(gaps.values()) / len(gaps)), math.sqrt(sum(squares)) / len(gaps)
    assert_close(gap.mean, expected, len(y))
    assert abs(gap.worst.value - max(gaps.values())) <= 8 * EPS * len(y)
    assert abs(gaps[gap.label] - max(gaps.values())) <= 8 * EPS * len(y)  # rounding may part a tie


@settings(deadline=None)
@given(sets_and_truth(), st.sets(st.integers(1, 5)))
def test_size_stratified_coverage_equals_the_loop(problem, edges):
    sets, y = problem
    n_classes = len(sets[0])
    hits_by_size = {}
    for row, truth in zip(sets, y, strict=True):
        hits_by_size.setdefault(sum(row), []).append(row[truth])
    check_strata(metrics.size_stratified_coverage(sets, y), hits_by_size)

    edges = [0, *sorted(e for e in edges if e <= n_classes)]
    ends = [*(e - 1 for e in edges[1:]), n_classes]
    by_bin = {}
    for size, hits in hits_by_size.items():
        (name,) = [pair for pair in zip(edges, ends, strict=True) if pair[0] <= size <= pair[1]]
        by_bin.setdefault(name, []).extend(hits)
    check_strata(metrics.size_stratified_coverage(sets, y, bins=edges), by_bin)


def check_strata(strata, hits):
    assert set(strata.coverage) == set(strata.points) == set(hits)
    for name, expected in hits.items():
        assert_close(strata.coverage[name], literal_mean(expected), len(expected))
        assert strata.points[name] == len(expected)
    assert strata.coverage[strata.worst].value == min(found.value for found in strata.coverage.values())


def literal_worst_share(directions, X, hit, least):
    """The smallest mean of hit over all slabs between two projections that hold `least` points, as a fraction."""
    shares = []
    for v in directions:
        z = [sum(a * b for a, b in zip(v, x, strict=True)) for x in X]
        for lo in z:
            for hi in z:
                inside = [h for h, value in zip(hit, z, strict=True) if lo <= value <= hi]
                if len(inside) >= least:
                    shares.append(Fraction(sum(inside), len(inside)))
    return min(shares)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.booleans()), min_size=1, max_size=14),
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=4),
    st.floats(0.01, 1),
)
def test_the_slab_found_is_the_worst(points, directions, delta):
    """Whole numbers, so that projections are exact and ties plenty."""
    X, hit = [(a, b) for a, b, _ in points], [h for _, _, h in points]
    least = max(1, math.ceil(delta * len(points)))
    V = np.array(directions, dtype=float)
    k, lo, hi = worst_slab(V, np.array(X, dtype=float), np.array(hit), least)
    z = np.array(X) @ V[k]
    inside = [h for h, value in zip(hit, z, strict=True) if lo <= value <= hi]
    assert len(inside) >= least
    assert Fraction(sum(inside), len(inside)) == literal_worst_share(directions, X, hit, least)


def test_the_worst_slab_does_not_depend_on_the_blocks():
    rng = np.random.default_rng(0)
    V, X, hit = rng.normal(size=(30, 3)), rng.normal(size=(80, 3)), rng.random(80) < 0.7
    whole = worst_slab(V, X, hit, 8)
    parts = worst_slab(V, X, hit, 8, block=160)

    def share(k, lo, hi):
        z = X @ V[k]
        inside = hit[(z >= lo) & (z <= hi)]
        return Fraction(int(inside.sum()), len(inside))

    assert share(*parts) == share(*whole)


def uncovered_beyond(X, threshold, label=0):
    """Sets over two labels that hold label 0 where the first feature is at most the threshold."""
    low = X[:, 0] <= threshold
    return np.stack([low, ~low], axis=1), np.full(len(X), label)


def test_worst_slice_finds_a_strip_that_is_not_covered():
    X = np.random.default_rng(1).normal(size=(1500, 3))
    slab = metrics.worst_slice_coverage(X, *uncovered_beyond(X, 1.0), delta=0.1, random_state=3)
    assert slab.coverage.value < 0.3 and slab.direction[0] > 0.8  # the strip holds 16 % of the points
    inside = (X @ slab.direction >= slab.lo) & (X @ slab.direction <= slab.hi)
    assert 0.08 < inside.mean() < 0.25 and slab.points < inside.sum()
    assert np.linalg.norm(slab.direction) == pytest.approx(1)


def test_worst_slice_is_not_fooled_by_its_own_choice():
    """Misses that have nothing to do with X: the slab's coverage, measured elsewhere, is that of all points."""
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(4000, 5)), np.zeros(4000, dtype=int)
    sets = np.stack([rng.random(4000) < 0.9, np.ones(4000, dtype=bool)], axis=1)
    slab = metrics.worst_slice_coverage(X, sets, y)
    assert abs(slab.coverage.value - 0.9) < 4 * math.sqrt(0.09 / slab.points)
    one = np.array_split(np.random.default_rng(0).permutation(4000), 2)[0]
    z = X[one] @ slab.direction
    chosen = sets[one, 0][(z >= slab.lo) & (z <= slab.hi)]
    assert chosen.mean() < 0.9 - 4 * math.sqrt(0.09 / len(chosen))  # where it was chosen it looks bad


def test_worst_slice_is_the_same_for_the_same_seed():
    X = np.random.default_rng(4).normal(size=(200, 2))
    sets, y = uncovered_beyond(X, 0.5)
    first, again, other = (metrics.worst_slice_coverage(X, sets, y, random_state=s) for s in (1, 1, 2))
    assert first.coverage == again.coverage and (first.direction == again.direction).all()
    assert (first.direction != other.direction).any()


SETS = np.ones((50, 3), dtype=bool)


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        (np.zeros((50, 2, 2)), {}, r"X must hold 50 finite objects, shape \(50, d\)"),
        (np.zeros((49, 2)), {}, r"X must hold 50 finite objects"),
        (np.full((50, 2), np.nan), {}, r"X must hold 50 finite objects"),
        (np.zeros((50, 2)), {"delta": 0}, r"delta=0 is not allowed"),
        (np.zeros((50, 2)), {"delta": 1.5}, r"delta=1.5 is not allowed"),
        (np.zeros((50, 2)), {"delta": 0.05}, r"at least 4 of the 50 points"),
        (np.zeros((50, 2)), {"n_directions": 0}, r"n_directions=0 is not allowed"),
    ],
)
def test_bad_slices(X, options, message):
    with pytest.raises(ValueError, match=message):
        metrics.worst_slice_coverage(X, SETS, np.zeros(50, dtype=int), **options)


@pytest.mark.parametrize("bins", [(), (1, 2), (0, 0), (0, 2, 1), (0, 4), (0, 1.5), 3])
def test_bad_bins(bins):
    with pytest.raises(ValueError, match=r"bins must be whole numbers that increase from 0 to at most 3"):
        metrics.size_stratified_coverage(SETS, np.zeros(50, dtype=int), bins=bins)


@pytest.mark.parametrize("seed", range(20))
def test_worst_slice_holds_all_equal_objects_or_none(seed):
    """Objects of few kinds lie on the ends of a slab, which products summed in another order would miss."""
    rng = np.random.default_rng(seed)
    X = rng.integers(2, size=(200, 7)) * rng.normal(size=7)
    y = rng.integers(2, size=200)
    slab = metrics.worst_slice_coverage(
        X, np.eye(2, dtype=bool)[rng.integers(2, size=200)], y, delta=0.2, random_state=0
    )
    other = np.array_split(np.random.default_rng(0).permutation(200), 2)[1]
    z = np.array([sum(a * b for a, b in zip(x, slab.direction, strict=True)) for x in X[other]])
    assert slab.points == ((slab.lo - 1e-12 <= z) & (z <= slab.hi + 1e-12)).sum()
