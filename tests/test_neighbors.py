"""Full CP of nearest neighbours and kernel densities by updates equals brute force: every score anew in every bag."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KernelDensity as ScikitKernelDensity
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from fullconformal import FullConformalClassifier
from fullconformal.methods.neighbors import KernelDensity, NearestNeighbors
from fullconformal.models import KernelDensityClassifier
from fullconformal.pvalues import comparison_weight

EPS = np.finfo(float).eps

# The definitions, literally. Here the kernel score has no logarithm, and a mean is taken over a list. ----------------------


def knn_score(bag, i, k, p):
    """Mean distance to the k nearest of the own label over that to the k nearest of the others, z_i itself left out."""
    x, y = bag[i]
    own, others = [], []
    for j, (x_j, y_j) in enumerate(bag):
        if j != i:
            distance = sum(abs(a - b) ** p for a, b in zip(x, x_j, strict=True)) ** (1 / p)
            (own if y_j == y else others).append(distance)
    if not own:
        return math.inf
    if not others:
        return 0.0
    own, others = sorted(own)[:k], sorted(others)[:k]
    above, below = sum(own) / len(own), sum(others) / len(others)
    if below == 0:
        return math.inf if above > 0 else 1.0
    return above / below


def kde_score(bag, i, h):
    """Minus the mean kernel of z_i with the others of its label; a density of zero without any."""
    x, y = bag[i]
    kernels = [
        math.exp(-sum((a - b) ** 2 for a, b in zip(x, x_j, strict=True)) / (2 * h**2))
        for j, (x_j, y_j) in enumerate(bag)
        if j != i and y_j == y
    ]
    return -sum(kernels) / len(kernels) if kernels else 0.0


def brute_scores(score, X, y, C, X_test, *options):
    """Scores (m, C, n + 1) of all points of the bag of every candidate, the candidate last."""
    out = np.empty((len(X_test), C, len(y) + 1))
    for j, x in enumerate(X_test):
        for c in range(C):
            bag = [*zip(X.tolist(), y.tolist(), strict=True), (x.tolist(), c)]
            out[j, c] = [score(bag, i, *options) for i in range(len(bag))]
    return out


def knn_tie(tau, n, d, k, p):
    """Relative distance at which scores are tied: that of rounding, as documented."""
    return 8 * EPS * (d + k + 1)


def kde_tie(tau, n, d, h):
    """The same for the kernel score; two nearest to each other share their largest term, so near ties do occur."""
    return 8 * EPS * (d + math.log(n + 1)) * (1 - math.log(-tau)) if tau < 0 else 0.0


def brute_counts(scores, tie, d, *options, weight=None):
    """Weight of the points above the candidate and tied with it, (m, C) each."""
    greater, equal = np.zeros((2, *scores.shape[:2]))
    for j, c in np.ndindex(greater.shape):
        *alpha, tau = scores[j, c]
        for i, a in enumerate(alpha):
            w = 1.0 if weight is None else weight[i, c]
            near = tie(tau, len(alpha), d, *options)
            # At the tolerance itself rounding decides, here as there.
            assume(math.isclose(a, tau, rel_tol=near / 2) == math.isclose(a, tau, rel_tol=2 * near))
            if math.isclose(a, tau, rel_tol=near):
                equal[j, c] += w
            elif a > tau:
                greater[j, c] += w
    return greater, equal


@st.composite
def problems(draw):
    """X (n, d), y (n,), C and X_test (2, d): points on a grid or not, duplicates of training points, perhaps a class of one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d, C = draw(st.integers(5, 60)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    y = rng.integers(C, size=n)
    if draw(st.booleans()):
        y[y == C - 1] = 0
        y[rng.integers(n)] = C - 1
    X, X_test = rng.normal(size=(n, d)) + y[:, None], rng.normal(size=(2, d)) + 1
    if draw(st.booleans()):
        X, X_test = X.round(), X_test.round()
    copies = rng.integers(n, size=draw(st.integers(0, n // 2)))
    X[rng.integers(n, size=len(copies))] = X[copies]
    if draw(st.booleans()):
        X_test[0] = X[rng.integers(n)]
    return X, y, C, X_test


neighbours = {"k": st.integers(1, 7), "p": st.sampled_from([1, 2, 3])}
bandwidths = st.sampled_from([0.5, 1.0, 2.5])


def assert_counts(counts, expected):
    np.testing.assert_array_equal(counts[0], expected[0])
    np.testing.assert_array_equal(counts[1], expected[1])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems(), **neighbours)
def test_nearest_neighbours_equal_brute_force(problem, k, p):
    X, y, C, X_test = problem
    bag = NearestNeighbors.fit(X, y, C, k, p)
    expected = brute_scores(knn_score, X, y, C, X_test, k, p)
    alpha, tau = bag.scores(X_test)
    np.testing.assert_allclose(alpha, expected[:, :, :-1], rtol=1e-13)
    np.testing.assert_allclose(tau, expected[:, :, -1], rtol=1e-13)
    assert_counts(bag.counts(X_test), brute_counts(expected, knn_tie, X.shape[1], k, p))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems(), h=bandwidths)
def test_kernel_densities_equal_brute_force(problem, h):
    X, y, C, X_test = problem
    bag = KernelDensity.fit(X, y, C, h)
    expected = brute_scores(kde_score, X, y, C, X_test, h)
    alpha, tau = bag.scores(X_test)
    np.testing.assert_allclose(-np.exp(-alpha), expected[:, :, :-1], rtol=1e-12)
    np.testing.assert_allclose(-np.exp(-tau), expected[:, :, -1], rtol=1e-12)
    assert_counts(bag.counts(X_test), brute_counts(expected, kde_tie, X.shape[1], h))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("class_conditional", [False, True])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=problems(), h=bandwidths, **neighbours)
def test_class_conditional_and_weighted_counts(class_conditional, weighted, problem, k, p, h):
    X, y, C, X_test = problem
    weights = np.arange(len(y)) % 7 + 0.5 if weighted else None  # their sums are exact
    weight = comparison_weight(y, C, class_conditional=class_conditional, weights=weights)
    for kind, score, tie, options in (
        (NearestNeighbors, knn_score, knn_tie, (k, p)),
        (KernelDensity, kde_score, kde_tie, (h,)),
    ):
        scores = brute_scores(score, X, y, C, X_test, *options)
        expected = brute_counts(scores, tie, X.shape[1], *options, weight=weight)
        assert_counts(kind.fit(X, y, C, *options).counts(X_test, weight), expected)


@pytest.mark.parametrize("kind", [NearestNeighbors, KernelDensity])
def test_memory_and_progress_change_nothing(kind):
    rng = np.random.default_rng(0)
    X, y, X_test = rng.normal(size=(300, 2)), rng.integers(3, size=300), rng.normal(size=(9, 2))
    whole = kind.fit(X, y, 3).counts(X_test)
    seen = []
    parts = kind.fit(X, y, 3, block=1).counts(X_test, None, lambda *done: seen.append(done), block=1)
    assert_counts(parts, whole)
    assert seen == [(j + 1, 9) for j in range(9)]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(problem=problems(), h=bandwidths, **neighbours)
def test_a_training_point_and_a_candidate_may_change_places(problem, k, p, h):
    """The score of a point in the bag does not know which point is the candidate: what validity rests on."""
    X, y, C, X_test = problem
    swapped, labels = np.vstack([X_test[:1], X[1:]]), np.append(0, y[1:])
    for fit in (lambda *data: NearestNeighbors.fit(*data, k, p), lambda *data: KernelDensity.fit(*data, h)):
        alpha, tau = fit(X, y, C).scores(X_test[:1])
        alpha_swapped, tau_swapped = fit(swapped, labels, C).scores(X[:1])
        np.testing.assert_allclose(tau_swapped[0, y[0]], alpha[0, 0, 0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(alpha_swapped[0, y[0], 0], tau[0, 0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(alpha_swapped[0, y[0], 1:], alpha[0, 0, 1:], rtol=1e-12, atol=1e-14)


def scaled_problem(spread):
    """Points of four classes, one of which has a single point, objects, and scales that spread about one; far objects have their own."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 4)) * [1, 1, 3, 0.2] + [0, 50, 0, 0], np.arange(300) % 3
    y[0] = 3
    objects, scales = X[:12] + rng.normal(size=(12, 4)), np.exp(spread * rng.normal(size=(12, 4)))
    objects[-1, 2], scales[-1, 2] = 1e4, 40.0
    return X, y, objects, scales


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.03, 0.5])
def test_log_sums_of_scaled_columns_lie_within_their_bounds(spread):
    X, y, _, scales = scaled_problem(spread)
    for h in (0.3, 2.0):
        log_sums, off = KernelDensity.fit(X, y, 4, h)._bounded(scales)
        for r, scale in enumerate(scales):
            literal = KernelDensity.fit(X / scale, y, 4, h).log_sums
            # Rounding of squares of 50, over 2h², beside what is granted.
            assert (np.abs(literal[1:] - log_sums[r, 1:]) <= off[r, 1:] + 1e-9).all()
            assert literal[0] == log_sums[r, 0] == -np.inf
        # A tangent is off by a square of what changes.
        assert spread > 1e-3 or np.median(off) < 1e-3


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.03, 0.5])
def test_scaled_columns_count_as_those_that_are_fitted_so(spread):
    X, y, objects, scales = scaled_problem(spread)
    for fit in (
        lambda X: KernelDensity.fit(X, y, 4, 0.5),
        lambda X: NearestNeighbors.fit(X, y, 4, 3, 2.0),
        lambda X: NearestNeighbors.fit(X, y, 4, 2, 1.0),
    ):
        found = fit(X).counts(objects, scales=scales)
        for r, scale in enumerate(scales):
            literal = fit(X / scale).counts(objects[r : r + 1] / scale)
            np.testing.assert_array_equal([part[r] for part in found], [part[0] for part in literal])


def test_conventions():
    X, y = np.array([[0.0], [0.0], [1.0]]), np.array([0, 1, 1])
    alpha, tau = NearestNeighbors.fit(X, y, 3, k=1).scores([[0.0]])
    np.testing.assert_array_equal(tau, [[1, 1, np.inf]])  # 0/0, 0/0, and a label nobody has
    np.testing.assert_array_equal(alpha[0], [[1, np.inf, 1], [np.inf, 1, 1], [np.inf, np.inf, 1]])
    alone, _ = NearestNeighbors.fit(X, np.zeros(3, int), 2, k=5).scores([[2.0]])
    np.testing.assert_array_equal(alone[0, 0], [0, 0, 0])  # nobody has another label
    alpha, tau = KernelDensity.fit(X, y, 3).scores([[0.0]])
    assert tau[0, 2] == alpha[0, 1, 0] == np.inf and alpha[0, 0, 0] == 0


def test_far_points_keep_their_order():
    """Their kernels are all zero in floating point, their logarithms are not."""
    X = np.array([[0.0], [100.0], [210.0], [330.0]])
    greater, equal = KernelDensity.fit(X, np.zeros(4, int), 1).counts([[105.0]])
    np.testing.assert_array_equal([greater, equal], [[[3]], [[1]]])


@pytest.mark.parametrize(
    ("clf", "message"),
    [
        (FullConformalClassifier(KNeighborsClassifier(0)), "The 'n_neighbors' parameter"),
        (FullConformalClassifier(KernelDensityClassifier(bandwidth=0)), "bandwidth is 0"),
        (KernelDensityClassifier(bandwidth=-1), "bandwidth is -1"),
    ],
)
def test_bad_parameters_are_named(clf, message):
    with pytest.raises(ValueError, match=message):
        clf.fit(np.arange(4.0)[:, None], np.array([0, 0, 1, 1]))


@parametrize_with_checks([KernelDensityClassifier()])
def test_the_classifier_is_one_of_scikit_learn(estimator, check):
    check(estimator)


def test_the_classifier_is_bayes_rule():
    rng = np.random.default_rng(0)
    X, y, X_test = rng.normal(size=(90, 3)), rng.integers(3, size=90), 2 * rng.normal(size=(600, 3))
    densities = [np.exp(ScikitKernelDensity(bandwidth=0.7).fit(X[y == c]).score_samples(X_test)) for c in range(3)]
    joint = np.transpose(densities) * np.bincount(y) / len(y)
    model = KernelDensityClassifier(bandwidth=0.7).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X_test), joint / joint.sum(1, keepdims=True), rtol=1e-9)
    np.testing.assert_array_equal(model.predict(X_test), joint.argmax(1))
