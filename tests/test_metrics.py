"""Every metric against a loop over points and labels in exact fractions."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import literal_mean

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


def literal_criterion(letters, row, truth, epsilon):
    """One of the ten criteria of Vovk et al. (2016) for one point, from their definitions; row holds fractions."""
    labels = {c for c, value in enumerate(row) if value > epsilon}
    wrong = labels - {truth}
    false_values = [value for c, value in enumerate(row) if c != truth]
    if letters == "S":
        return sum(row)
    if letters == "N":
        return len(labels)
    if letters == "U":  # the smallest ε at which the set holds one label at most: some p-value, or 0
        return min(e for e in [Fraction(0), *row] if sum(value > e for value in row) <= 1)
    if letters == "F":
        return sum(row) - max(row)
    if letters == "M":
        return int(len(labels) > 1)
    if letters == "E":
        return len(labels) - 1 if labels else 0
    if letters == "OU":
        return max(false_values, default=Fraction(0))
    if letters == "OF":
        return sum(false_values, Fraction(0))
    if letters == "OM":
        return int(len(wrong) > 0)
    assert letters == "OE"
    return len(wrong)


def literal_area(row, lo, hi):
    """∫ #{y : p_y > ε} dε over [lo, hi]: the size is constant between the p-values, so add up rectangles."""
    corners = sorted({lo, hi, *(value for value in row if lo < value < hi)})
    area = Fraction(0)
    for left, right in pairwise(corners):
        size = sum(1 for value in row if value > left)
        area += size * (right - left)
    return area


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
def test_the_ten_criteria_equal_their_definitions(problem):
    p, y, percent = problem
    classes = [f"label {c}" for c in range(len(p[0]))]
    result = metrics.vovk_criteria(floats(p), [classes[c] for c in y], 1 - percent / 100, classes)
    assert list(result) == ["S", "N", "U", "F", "M", "E", "OU", "OF", "OM", "OE"]
    for letters, estimate in result.items():
        points = [
            literal_criterion(letters, row, truth, Fraction(percent, 100)) for row, truth in zip(p, y, strict=True)
        ]
        assert_close(estimate, literal_mean(points), len(p[0]), len(p))


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


@settings(deadline=None)
@given(problems())
def test_the_mean_over_single_objects_is_the_metric(problem):
    p, y, percent = problem
    sets = prediction_sets(floats(p), 1 - percent / 100)
    calls = [
        (metrics.size_auc, floats(p), None),
        (metrics.observed_fuzziness, floats(p), y),
        (metrics.coverage, sets, y),
    ]
    for metric, values, truth in calls:
        points = metrics.per_object(metric, values, truth)
        assert points.shape == (len(p),)
        assert_close(metric(values, *([] if truth is None else [truth])), literal_mean(points), len(p[0]), len(p))


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_labels_that_leave_are_counted(m, n_classes, n_levels, random):
    sets = [[[random.random() < 0.6 for _ in range(n_levels)] for _ in range(n_classes)] for _ in range(m)]
    points = []
    for labels in sets:
        points.append(sum(any(a and not b for a, b in pairwise(path)) for path in labels))
    assert_close(metrics.nestedness_violations(sets), literal_mean(points), n_classes, m)


@settings(deadline=None)
@given(problems(), st.lists(st.integers(1, 99), min_size=1, max_size=5))
def test_sets_of_p_values_are_nested(problem, percents):
    levels = np.sort(percents) / 100
    assert metrics.nestedness_violations(prediction_sets(floats(problem[0]), levels)).value == 0


samples = st.lists(st.integers(-50, 50), min_size=2, max_size=12)


@settings(deadline=None)
@given(samples, samples)
def test_welch_equals_its_formula(a, b):
    """t and the degrees of freedom from exact fractions; the p-value by integrating Student's density."""
    n, m = len(a), len(b)
    ma, mb = Fraction(sum(a), n), Fraction(sum(b), m)
    va, vb = sum((x - ma) ** 2 for x in a) / (n - 1) / n, sum((x - mb) ** 2 for x in b) / (m - 1) / m
    if va + vb == 0:
        with pytest.raises(ValueError, match="do not vary"):
            metrics.welch(a, b)
        return
    t = float(ma - mb) / math.sqrt(va + vb)
    df = float((va + vb) ** 2 / (va**2 / (n - 1) + vb**2 / (m - 1)))
    result = metrics.welch(a, b)
    # Means are off by 12 · 50 · EPS at most, and the standard error of 12 whole numbers that vary is at least 1/12.
    assert result.statistic == pytest.approx(t, rel=1e-11, abs=1e-11)
    assert result.df == pytest.approx(df, rel=1e-11)
    assert result.pvalue == pytest.approx(student_below(t, df), abs=1e-6)


def test_welch_is_not_fooled_by_rounding():
    with pytest.raises(ValueError, match="do not vary"):
        metrics.welch([0.1 + 0.2, 0.3, 0.3], [0.4, 0.4, 0.1 + 0.3])


def student_below(t, df):
    """P(T < t) of Student's distribution by Simpson's rule in the angle, where the integral is finite: x = √df · tan φ."""
    steps = 2000
    top = math.atan(t / math.sqrt(df))
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    h = top / steps
    inner = sum((4 if k % 2 else 2) * math.cos(k * h) ** (df - 1) for k in range(1, steps))
    return 0.5 + constant * h / 3 * (1 + inner + math.cos(top) ** (df - 1))


def test_welch_rejects_as_often_as_it_says_and_sees_a_difference():
    """2,000 pairs of samples of unequal variance: with equal means the p-values are uniform, with a smaller mean they are small."""
    rng = np.random.default_rng(0)
    equal = np.array([metrics.welch(rng.normal(0, 1, 30), rng.normal(0, 3, 60)).pvalue for _ in range(2000)])
    for alpha in (0.05, 0.1, 0.5):
        # four standard errors of a share of 2,000, and 0.005 because Welch's degrees of freedom are an approximation
        assert abs((equal < alpha).mean() - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / 2000) + 0.005
    smaller = [metrics.welch(rng.normal(-2, 1, 30), rng.normal(0, 3, 60)).pvalue for _ in range(200)]
    larger = [metrics.welch(rng.normal(2, 1, 30), rng.normal(0, 3, 60)).pvalue for _ in range(200)]
    assert np.median(smaller) < 0.001 and np.median(larger) > 0.999


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
TRUTH_METRICS = [metrics.coverage, metrics.error_rate, metrics.class_coverage, metrics.size_stratified_coverage]
P_METRICS = [metrics.size_auc, metrics.fuzziness, lambda p: metrics.size_curve(p, [0.1])]
CALLS_ON_SETS = [*SET_METRICS, *((lambda s, f=f: f(s, [0, 1])) for f in TRUTH_METRICS)]
TRUTH_P_METRICS = [metrics.observed_fuzziness, metrics.summary, metrics.vovk_criteria]
CALLS_ON_P = [*P_METRICS, *((lambda p, f=f: f(p, [0, 1])) for f in TRUTH_P_METRICS)]


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
        metric(SETS, ["fox", "fox"], classes=["cat", "dog"])
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
        for metric, values in ((metrics.summary, P), (metrics.vovk_criteria, P), (metrics.class_coverage_gap, SETS)):
            with pytest.raises(ValueError, match=r"confidence_level must be one number"):
                metric(values, [0, 1], confidence_level=level)
    with pytest.raises(ValueError, match=r"sets must have shape \(m, C, L\)"):
        metrics.nestedness_violations(SETS)
    with pytest.raises(ValueError, match=r"y must hold one label for each of the 2 points"):
        metrics.per_object(metrics.coverage, SETS, [0])
    for sample in ([1.0], [[1.0, 2.0]], [1.0, float("nan")]):
        with pytest.raises(ValueError, match=r"values_b must hold at least two finite numbers"):
            metrics.welch([1.0, 2.0], sample)
