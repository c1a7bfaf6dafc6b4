"""Every metric against a loop over points and labels in exact fractions."""

import math
from fractions import Fraction
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullconformal import metrics
from fullconformal.metrics import Curve, Estimate
from fullconformal.sets import prediction_sets

EPS = np.finfo(float).eps


def literal_sets(p, epsilon):
    """For each point the set of columns with p > ε."""
    return [{c for c, value in enumerate(row) if value > epsilon} for row in p]


def literal_points(name, p, y, epsilon):
    """The metric of each point alone, in exact fractions; p (m, C) fractions, y (m,) columns."""
    points = []
    for row, labels, truth in zip(p, literal_sets(p, epsilon), y, strict=True):
        if name == "coverage":
            points.append(Fraction(truth in labels))
        elif name == "error_rate":
            points.append(Fraction(truth not in labels))
        elif name == "mean_size":
            points.append(Fraction(len(labels)))
        elif name == "empty_rate":
            points.append(Fraction(len(labels) == 0))
        elif name == "singleton_rate":
            points.append(Fraction(len(labels) == 1))
        elif name == "size_auc":
            points.append(literal_area(row, Fraction(0), Fraction(1, 5)))
        elif name == "fuzziness":
            points.append(sum(sorted(row)[:-1], Fraction(0)))
        elif name == "observed_fuzziness":
            points.append(sum((value for c, value in enumerate(row) if c != truth), Fraction(0)))
    return points


def literal_area(row, lo, hi):
    """∫ #{y : p_y > ε} dε over [lo, hi]: the size is constant between the p-values, so add up rectangles."""
    corners = sorted({lo, hi, *(value for value in row if lo < value < hi)})
    area = Fraction(0)
    for left, right in pairwise(corners):
        size = sum(1 for value in row if value > left)
        area += size * (right - left)
    return area


def literal_mean(points):
    """Mean and standard error of the mean."""
    values = [float(v) for v in points]
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def assert_close(estimate, expected, n_classes, m):
    """Sums over C labels and m points of numbers at most C: each operation rounds by at most EPS relative to C.

    The standard error is a root, so it is compared by squares: (a - b)(a + b) with a, b at most C.
    """
    bound = 4 * EPS * (m + n_classes) * n_classes
    value, se = expected
    assert abs(estimate.value - value) <= bound
    assert (math.isnan(estimate.se) and math.isnan(se)) or abs(estimate.se**2 - se**2) <= 2 * n_classes * bound


@st.composite
def problems(draw):
    """p-values (m, C) as exact fractions of n + 1, true columns (m,), and ε a whole percentage."""
    n, m, n_classes = draw(st.integers(1, 60)), draw(st.integers(1, 12)), draw(st.integers(1, 5))
    row = st.lists(st.integers(1, n + 1), min_size=n_classes, max_size=n_classes)
    k = draw(st.lists(row, min_size=m, max_size=m))
    y = draw(st.lists(st.integers(0, n_classes - 1), min_size=m, max_size=m))
    return [[Fraction(c, n + 1) for c in r] for r in k], y, draw(st.integers(1, 99))


def floats(p):
    return np.array([[float(value) for value in row] for row in p])


@settings(deadline=None)
@given(problems())
def test_summary_equals_the_loops(problem):
    p, y, percent = problem
    result = metrics.summary(floats(p), y, confidence_level=1 - percent / 100)
    for name, estimate in result.items():
        expected = literal_mean(literal_points(name, p, y, Fraction(percent, 100)))
        assert_close(estimate, expected, len(p[0]), len(p))


@settings(deadline=None)
@given(problems())
def test_summary_and_metrics_and_sets_agree(problem):
    """One rule decides membership: the sets of `prediction_sets` give the numbers of `summary`."""
    p, y, percent = problem
    p, level = floats(p), 1 - percent / 100
    sets, result = prediction_sets(p, level), metrics.summary(p, y, level)
    on_sets = {"coverage": (y,), "error_rate": (y,), "mean_size": (), "empty_rate": (), "singleton_rate": ()}
    on_p = {"size_auc": (), "fuzziness": (), "observed_fuzziness": (y,)}
    assert set(result) == {*on_sets, *on_p}
    for names, array in ((on_sets, sets), (on_p, p)):
        for name, rest in names.items():
            np.testing.assert_array_equal(result[name], getattr(metrics, name)(array, *rest))  # NaN equals NaN


@pytest.mark.parametrize("n", [99, 99_999])
def test_a_p_value_equal_to_epsilon_is_out_here_too(n):
    for percent in range(1, 100):
        k = percent * (n + 1) // 100
        p = np.array([[k / (n + 1), (k + 1) / (n + 1)]])
        level = (100 - percent) / 100
        assert metrics.summary(p, [1], level)["mean_size"].value == prediction_sets(p, level).sum() == 1
        assert metrics.size_curve(p, [1 - level]).value == 1


@settings(deadline=None)
@given(problems(), st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_size_curve_equals_the_loop(problem, percents):
    p, y, _ = problem
    curve = metrics.size_curve(floats(p), np.array(percents) / 100)
    assert isinstance(curve, Curve) and curve.value.shape == curve.se.shape == (len(percents),)
    for k, percent in enumerate(percents):
        expected = literal_mean(literal_points("mean_size", p, y, Fraction(percent, 100)))
        assert_close(Estimate(curve.value[k], curve.se[k]), expected, len(p[0]), len(p))


@settings(deadline=None)
@given(problems(), st.integers(0, 99), st.integers(1, 100))
def test_size_auc_on_any_interval(problem, lo, width):
    p, _, _ = problem
    lo, hi = Fraction(lo, 100), Fraction(min(lo + width, 100), 100)
    expected = literal_mean([literal_area(row, lo, hi) for row in p])
    assert_close(metrics.size_auc(floats(p), float(lo), float(hi)), expected, len(p[0]), len(p))


@settings(deadline=None)
@given(problems())
def test_class_coverage_is_coverage_within_each_class(problem):
    p, y, percent = problem
    classes = [f"label {c}" for c in range(len(p[0]))][::-1]  # not in sorted order
    sets = prediction_sets(floats(p), 1 - percent / 100)
    result = metrics.class_coverage(sets, [classes[c] for c in y], classes)
    assert set(result) == {classes[c] for c in y}
    for label, estimate in result.items():
        rows = [i for i, c in enumerate(y) if classes[c] == label]
        points = literal_points("coverage", [p[i] for i in rows], [y[i] for i in rows], Fraction(percent, 100))
        assert_close(estimate, literal_mean(points), len(p[0]), len(rows))


@settings(deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_names_and_order_of_the_columns_do_not_matter(problem, random):
    p, y, percent = problem
    order = list(range(len(p[0])))
    random.shuffle(order)
    level = 1 - percent / 100
    plain = metrics.summary(floats(p), y, level)
    moved = metrics.summary(floats(p)[:, order], [f"c{c}" for c in y], level, classes=[f"c{c}" for c in order])
    for name in plain:
        assert_close(moved[name], plain[name], len(p[0]), len(p))


def test_standard_error_of_one_point_is_nan_without_a_warning():
    assert math.isnan(metrics.mean_size([[True, False]]).se)


def test_estimate_prints_and_converts():
    estimate = Estimate(0.9031, 0.0117)
    assert (str(estimate), f"{float(estimate):.2f}") == ("0.903 ± 0.012", "0.90")
    value, se = estimate
    assert (value, se) == (0.9031, 0.0117)
    with pytest.raises(AttributeError):
        estimate.value = 1.0


P, SETS = np.array([[0.5, 0.1], [0.2, 0.9]]), np.array([[True, False], [True, True]])
SET_METRICS = [metrics.mean_size, metrics.empty_rate, metrics.singleton_rate]
TRUTH_METRICS = [metrics.coverage, metrics.error_rate, metrics.class_coverage]
P_METRICS = [metrics.size_auc, metrics.fuzziness, lambda p: metrics.size_curve(p, [0.1])]
CALLS_ON_SETS = [*SET_METRICS, *((lambda s, f=f: f(s, [0, 1])) for f in TRUTH_METRICS)]
CALLS_ON_P = [*P_METRICS, *((lambda p, f=f: f(p, [0, 1])) for f in (metrics.observed_fuzziness, metrics.summary))]


@pytest.mark.parametrize("call", CALLS_ON_SETS)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (P, r"sets must be boolean.*prediction_sets"),
        (SETS[0], r"sets must have shape \(m, C\)"),
        (np.stack([SETS, SETS], axis=2), r"sets must have shape.*sets\[:, :, k\]"),
        (SETS[:0], r"sets is empty"),
    ],
)
def test_bad_sets(call, sets, message):
    with pytest.raises(ValueError, match=message):
        call(sets)


@pytest.mark.parametrize("call", CALLS_ON_P)
@pytest.mark.parametrize(
    ("p", "message"),
    [
        (SETS, r"p must hold p-values, got booleans"),
        (P[0], r"p must be a non-empty array of shape \(m, C\)"),
        (P[:0], r"p must be a non-empty array"),
        (P * np.nan, r"p must hold p-values in \[0, 1\]"),
        (P + 1, r"p must hold p-values in \[0, 1\]"),
        (P - 1, r"p must hold p-values in \[0, 1\]"),
        (P * np.inf, r"p must hold p-values in \[0, 1\]"),
    ],
)
def test_bad_p(call, p, message):
    with pytest.raises(ValueError, match=message):
        call(p)


@pytest.mark.parametrize("metric", TRUTH_METRICS)
def test_bad_truth(metric):
    with pytest.raises(ValueError, match=r"y holds labels .* \['fox'\]; the classes are \['cat', 'dog'\]"):
        metric(SETS, ["cat", "fox"], classes=["cat", "dog"])
    with pytest.raises(ValueError, match=r"y holds labels .* \[2\]; the classes are \[0, 1\]"):
        metric(SETS, [0, 2])
    with pytest.raises(ValueError, match=r"y must hold one label for each of the 2 points"):
        metric(SETS, [0, 1, 1])
    with pytest.raises(ValueError, match=r"classes must hold 2 distinct labels"):
        metric(SETS, [0, 1], classes=[0, 1, 2])
    with pytest.raises(ValueError, match=r"classes must hold 2 distinct labels"):
        metric(SETS, [0, 0], classes=[0, 0])


def test_many_unseen_labels_are_counted_not_listed():
    with pytest.raises(ValueError, match=r"\[10, 11, 12, 13, 14\] and 3 more"):
        metrics.coverage(np.ones((8, 2), dtype=bool), np.arange(10, 18))


def test_bad_options():
    with pytest.raises(ValueError, match=r"epsilons must"):
        metrics.size_curve(P, [0.1, 1.1])
    with pytest.raises(ValueError, match=r"epsilons must"):
        metrics.size_curve(P, [])
    with pytest.raises(ValueError, match=r"lo and hi must"):
        metrics.size_auc(P, 0.2, 0.1)
    for level in (0, 1, 90, float("nan"), [0.8, 0.9], "high"):
        with pytest.raises(ValueError, match=r"confidence_level must be one number"):
            metrics.summary(P, [0, 1], confidence_level=level)
