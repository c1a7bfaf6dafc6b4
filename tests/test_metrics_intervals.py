"""Metrics of intervals and predictive distributions against loops over the points."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import literal_mean
from scipy import stats

from fullconformal import metrics

EPS = np.finfo(float).eps
NAN, INF = float("nan"), float("inf")
EMPTY = [NAN, NAN]


@st.composite
def intervals_and_truth(draw, finite=False):
    """Intervals (m, 2) with ends on a grid of quarters, so that ends are hit; some empty or infinite unless `finite`."""
    m = draw(st.integers(1, 15))
    quarter = st.integers(-20, 20).map(lambda k: k / 4)
    found = []
    for _ in range(m):
        pair = sorted([draw(quarter), draw(quarter)])
        kind = "finite" if finite else draw(st.sampled_from(["finite", "finite", "empty", "left", "right", "all"]))
        ends = {"finite": pair, "empty": EMPTY, "left": [-INF, pair[1]], "right": [pair[0], INF], "all": [-INF, INF]}
        found.append(ends[kind])
    return found, draw(st.lists(quarter, min_size=m, max_size=m))


def holds(interval, value):
    lower, upper = interval
    return not math.isnan(lower) and lower <= value <= upper


def width(interval):
    return 0.0 if math.isnan(interval[0]) else interval[1] - interval[0]


def winkler(interval, value, epsilon):
    lower, upper = interval
    if math.isnan(lower):
        return INF
    penalty = lower - value if value < lower else value - upper if value > upper else 0.0
    return width(interval) + 2 / epsilon * penalty


def assert_mean(estimate, points):
    """Means of m numbers; numbers on a grid of quarters below 2**10 add up exactly, but for the penalties' division by ε."""
    if not all(map(math.isfinite, points)):
        assert estimate.value == INF and math.isnan(estimate.se)
        return
    value, se = literal_mean(points)
    scale = max(1.0, *map(abs, points))
    assert abs(estimate.value - value) <= 8 * EPS * len(points) * scale
    assert (math.isnan(se) and math.isnan(estimate.se)) or abs(estimate.se**2 - se**2) <= 16 * EPS * len(
        points
    ) * scale**2


@settings(deadline=None)
@given(intervals_and_truth(), st.sampled_from([0.5, 0.9, 0.95]))
def test_means_equal_the_loop(problem, level):
    intervals, y = problem
    pairs = list(zip(intervals, y, strict=True))
    assert_mean(metrics.interval_coverage(intervals, y), [float(holds(*pair)) for pair in pairs])
    assert_mean(metrics.mean_width(intervals), [width(interval) for interval in intervals])
    epsilon = 1 - level
    assert_mean(metrics.interval_score(intervals, y, level), [winkler(*pair, epsilon) for pair in pairs])
    summary = metrics.interval_summary(intervals, y, level)
    assert list(summary) == ["interval_coverage", "mean_width", "median_width", "interval_score"]
    assert str(summary["interval_score"]) == str(metrics.interval_score(intervals, y, level))


def test_the_interval_score_is_smallest_for_the_central_quantiles():
    """Expected score over a grid of intervals for a skew distribution; the sample is its quantiles, so the mean is an integral."""
    y = stats.gamma(2).ppf((np.arange(20_000) + 0.5) / 20_000)
    best = stats.gamma(2).ppf([0.1, 0.9])

    def score(lower, upper):
        return metrics.interval_score(np.tile([lower, upper], (len(y), 1)), y, 0.8).value

    for moved in ([0.05, 0], [-0.05, 0], [0, 0.2], [0, -0.2], [0.05, 0.2]):
        assert score(*best) < score(*(best + moved))


@settings(deadline=None)
@given(intervals_and_truth())
def test_the_median_width_is_the_middle_one(problem):
    intervals, _ = problem
    found = metrics.median_width(intervals)
    ordered = sorted(width(interval) for interval in intervals)
    m = len(ordered)
    assert found.value == (ordered[m // 2] if m % 2 else (ordered[m // 2 - 1] + ordered[m // 2]) / 2)
    assert m > 1 or math.isnan(found.se)
    assert math.isnan(found.se) or found.se >= 0


def test_the_error_of_the_median_is_that_of_repeated_samples():
    """Within 15 % of the spread of 2,000 medians: that is known to 1.6 %, and ranks are whole numbers beside √200/2 = 7."""
    rng = np.random.default_rng(0)
    widths = rng.exponential(size=(2000, 200))
    found = [metrics.median_width(np.stack([np.zeros(200), row], axis=1)) for row in widths]
    spread = np.std([estimate.value for estimate in found])
    assert abs(np.mean([estimate.se for estimate in found]) / spread - 1) < 0.15


def literal_crps(points, tops, y):
    """∫(F(z) − 1{y ≤ z})² dz: F is constant between the jumps and y, so add up rectangles."""
    corners = sorted({*points, y})

    def F(z):
        return max((top for x, top in zip(points, tops, strict=True) if x <= z), default=0.0)

    total = 0.0
    for left, right in pairwise(corners):
        total += (F(left) - (y <= left)) ** 2 * (right - left)
    return total


@settings(deadline=None)
@given(st.data())
def test_crps_equals_the_integral(data):
    m, K = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    quarter = st.integers(-20, 20).map(lambda k: k / 4)
    points = [sorted(data.draw(st.lists(quarter, min_size=K, max_size=K))) for _ in range(m)]
    y = data.draw(st.lists(quarter, min_size=m, max_size=m))
    counts = data.draw(st.lists(st.integers(0, 5), min_size=K, max_size=K).filter(any))
    cdf = np.cumsum(counts) / sum(counts)
    for given_cdf, tops in ((None, np.arange(1, K + 1) / K), (cdf, cdf), (np.tile(cdf, (m, 1)), cdf)):
        found = metrics.crps(points, y, cdf=given_cdf)
        expected = literal_mean([literal_crps(row, tops, value) for row, value in zip(points, y, strict=True)])
        # Sums of at most 9 terms of size 10.
        assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_crps_of_quantiles_comes_near_that_of_the_normal_distribution():
    """The closed form of a normal distribution; with K quantiles the error of the step function is of order 1/K."""
    y, K = np.array([-1.0, 0.0, 2.5]), 4000
    levels = (np.arange(K) + 0.5) / K
    quantiles = np.tile(stats.norm.ppf(levels), (3, 1))
    closed = [z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi) for z in y]
    assert metrics.crps(quantiles, y, levels=levels).value == pytest.approx(np.mean(closed), abs=2 / K)
    assert metrics.crps(quantiles, y, levels=levels).value == pytest.approx(metrics.crps(quantiles, y).value, rel=1e-12)


def test_mass_at_infinity_costs_infinity():
    assert metrics.crps([[-INF, 0.0, 1.0]], [0.0]).value == INF
    # No mass is there.
    assert metrics.crps([[-INF, 0.0, 1.0]], [0.0], cdf=[0.0, 0.5, 1.0]).value == 0.25


@settings(deadline=None)
@given(intervals_and_truth(), st.sampled_from(["y", "width", "feature"]), st.sampled_from([1, 2, 3, [-1.0, 0.25, 2.0]]))
def test_coverage_by_bins_equals_the_loop(problem, by, bins):
    intervals, y = problem
    feature = [3 * value % 2 - 1 for value in y]
    values = {"y": y, "width": [width(interval) for interval in intervals], "feature": feature}[by]
    strata = metrics.coverage_by(intervals, y, feature if by == "feature" else by, bins)
    groups = {}
    for interval, truth, value in zip(intervals, y, values, strict=True):
        name = next(name for name in strata.coverage if name[0] <= value <= name[1])
        groups.setdefault(name, []).append((value, holds(interval, truth)))
    assert sum(strata.points.values()) == len(y)
    for name, group in groups.items():
        assert strata.points[name] == len(group) and name == (min(group)[0], max(group)[0])
        assert_mean(strata.coverage[name], [float(hit) for _, hit in group])
    assert list(strata.coverage) == sorted(strata.coverage)
    assert strata.coverage[strata.worst].value == min(estimate.value for estimate in strata.coverage.values())
    if isinstance(bins, list):
        places = [{sum(edge <= value for edge in bins) for value, _ in group} for group in groups.values()]
        assert all(len(place) == 1 for place in places)
    else:
        assert len(groups) <= bins


def test_bins_hold_about_as_many_points_each_and_words_are_bins():
    y = np.random.default_rng(0).normal(size=1000)
    intervals = np.stack([y - 1, y + 1], axis=1)
    assert set(metrics.coverage_by(intervals, y, bins=8).points.values()) == {125}
    words = np.where(y > 0, "up", "down")
    assert metrics.coverage_by(intervals, y, words).points == {"down": int((y <= 0).sum()), "up": int((y > 0).sum())}


def test_the_worst_slab_is_that_of_sets_that_miss_the_same_points():
    rng = np.random.default_rng(0)
    X, hit = rng.normal(size=(200, 3)), rng.uniform(size=200) < 0.8
    intervals = np.where(hit[:, None], [-1.0, 1.0], [1.0, 2.0])
    sets = np.stack([hit, ~hit], axis=1)
    ours = metrics.interval_worst_slice_coverage(X, intervals, np.zeros(200), delta=0.2)
    theirs = metrics.worst_slice_coverage(X, sets, np.zeros(200, dtype=int), delta=0.2)
    assert ours.coverage == theirs.coverage and ours.lo == theirs.lo and ours.hi == theirs.hi


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.mean_width(np.zeros((3, 2, 4))), "intervals[:, :, k]"),
        (lambda: metrics.mean_width([[1.0, 0.0]]), "intervals[0]"),
        (lambda: metrics.mean_width([[NAN, 0.0]]), "NaN at both"),
        (lambda: metrics.mean_width(np.zeros((0, 2))), "(m, 2)"),
        (lambda: metrics.interval_coverage([[0.0, 1.0]], [NAN]), "y must hold one finite number"),
        (lambda: metrics.interval_coverage([[0.0, 1.0]], [1.0, 2.0]), "y must hold one finite number"),
        (lambda: metrics.interval_coverage([[0.0, 1.0]], np.ma.masked_array([1.0], [True])), "masked"),
        (lambda: metrics.interval_score([[0.0, 1.0]], [1.0], 90), "confidence_level"),
        (lambda: metrics.crps([[1.0, 0.0]], [0.0]), "ascending"),
        (lambda: metrics.crps([[0.0, 1.0]], [0.0], cdf=[0.5, 0.9]), "cdf must ascend"),
        (lambda: metrics.crps([[0.0, 1.0]], [0.0], cdf=[0.5, 1.0, 1.0]), "cdf must have shape"),
        (lambda: metrics.crps([[0.0, 1.0]], [0.0], levels=[0.5, 0.4]), "levels must be 2 increasing"),
        (lambda: metrics.crps([[0.0, 1.0]], [0.0], levels=[0.2, 0.4], cdf=[0.5, 1.0]), "both given"),
        (lambda: metrics.coverage_by([[0.0, 1.0]], [0.0], "x"), "by='x'"),
        (lambda: metrics.coverage_by([[0.0, 1.0]], [0.0], [1.0, 2.0]), "by must hold one value"),
        (lambda: metrics.coverage_by([[0.0, 1.0]], [0.0], [NAN]), "by holds NaN"),
        (lambda: metrics.coverage_by([[0.0, 1.0]], [0.0], bins=0), "bins must be"),
        (lambda: metrics.coverage_by([[0.0, 1.0]], [0.0], bins=[1.0, 1.0]), "bins must be"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
