"""The symmetric scores: literal formula, equivariance, honest tolerances, counts, and the certificate."""

import itertools
import pickle
import sys
from dataclasses import replace

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
from fullconformal.linear.added import conjugate, fit_added, fit_below
from fullconformal.linear.bag import Change, NoMinimiser, as_objects, at_points, logits, with_labels
from fullconformal.linear.bounded import (
    ACCURATE,
    COARSE,
    FINE,
    _Ahead,
    bounded_order,
    order_without_fits,
    parted,
    turned,
)
from fullconformal.linear.exact import exact_counts
from fullconformal.linear.hessian import hessian
from fullconformal.linear.leave_one_out import deletion
from fullconformal.linear.newton import ROUGH, refit
from fullconformal.linear.products import Products
from fullconformal.linear.reference import below, hessian_factors
from fullconformal.linear.symmetric import _scores, symmetric_bounds, symmetric_counts, symmetric_scores
from fullconformal.losses.relative import (
    against,
    all_probabilities,
    apart,
    margin,
    pairs,
    probabilities,
    range_of,
    residual,
    second,
    spread,
    unpacked,
)
from fullconformal.pvalues import comparison_weight, p_values

schemes = st.sampled_from([0, 0.5, 1])


def scores_of(X, y, C, penalty, x, label, q):
    """Scores (n + 1,) of the augmented bag and the errors claimed of their margins."""
    bag = bag_of(X, y, C, penalty)
    s = symmetric_scores(bag, Change(torch.tensor(x[:, None]), torch.tensor([label])), q)
    alpha, error = torch.cat([s.alpha[:, 0], s.tau]), torch.cat([s.alpha_error[:, 0], s.tau_error])
    return np.logaddexp(0, alpha.numpy()), error.numpy()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(), schemes)
def test_scores_are_the_literal_formula(problem, q):
    """Each margin log(e^α − 1) is as close to the literal one as its error claims, but for the oracle's own rounding."""
    X, y, C, penalty, X_test = problem
    for label in range(C):
        alpha, error = scores_of(*problem[:4], X_test[0], label, q)
        literal = oracle.symmetric_scores(np.vstack([X, X_test]), np.append(y, label), C, penalty, q)
        np.testing.assert_array_less(np.abs(np.log(np.expm1(alpha)) - np.log(np.expm1(literal))), error + 1e-9)


@pytest.mark.parametrize("q", [0.5, 1])
def test_scores_of_many_classes_are_the_literal_formula(q):
    rng, C = np.random.default_rng(0), 14
    X, y, penalty = np.c_[rng.normal(size=(3 * C, 2)), np.ones(3 * C)], np.arange(3 * C) % C, np.array([0.3, 0.3, 0.0])
    for label in (0, C - 1):
        alpha, error = scores_of(X, y, C, penalty, X[5] / 2, label, q)
        literal = oracle.symmetric_scores(np.vstack([X, X[5] / 2]), np.append(y, label), C, penalty, q)
        np.testing.assert_array_less(np.abs(np.log(np.expm1(alpha)) - np.log(np.expm1(literal))), error + 1e-9)


@pytest.mark.parametrize("few", [(1, 1), (99, 99)], ids=["products", "one by one"])
@pytest.mark.parametrize("memory", [2**28, 2**8], ids=["kept", "made anew"])
@pytest.mark.parametrize("J", [1, 5])
def test_sums_and_leverages_of_many_weights_are_the_literal_ones(memory, few, J):
    rng, (n, d) = np.random.default_rng(0), (11, 4)
    X, W, M = rng.normal(size=(n, d)), rng.uniform(size=(n, J)), rng.normal(size=(J, d, d))
    products, (i, j) = Products(torch.tensor(X).T, few, memory), np.triu_indices(d)
    gram, quadratic = products.gram(torch.tensor(W)), products.quadratic(torch.tensor(M[:, i, j].T))
    for k in range(J):  # sums of n and of d² products
        np.testing.assert_allclose(gram[:, k], ((X.T * W[:, k]) @ X)[i, j], rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(quadratic[:, k], [x @ np.triu(M[k]) @ x for x in X], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("K", [1, 2, 5])
def test_the_spread_is_the_largest_between_two_classes(K):
    """(e_k − e_l)ᵀA(e_k − e_l) over all pairs of classes, of which the first has no logit."""
    rng, (n, B) = np.random.default_rng(K), (4, 3)
    half = rng.normal(size=(n, B, K, K + 1))
    full = half @ half.swapaxes(-1, -2)
    i, j = pairs(K, torch.device("cpu"))[0].numpy()
    e = np.vstack([np.zeros(K), np.eye(K)])
    ways = [e[k] - e[m] for k, m in itertools.combinations(range(K + 1), 2)]
    literal = np.max([np.einsum("k,nbkl,l->nb", way, full, way) for way in ways], axis=0)
    A = torch.tensor(full[:, :, i, j]).movedim(1, -1).contiguous()
    np.testing.assert_allclose(spread(A), literal, rtol=1e-13)
    np.testing.assert_allclose(spread(A[0]), literal[0], rtol=1e-13)
    y = rng.integers(0, K + 1, size=(n, B))
    own = [
        [max((e[k] - e[y[a, b]]) @ full[a, b] @ (e[k] - e[y[a, b]]) for k in range(K + 1)) for b in range(B)]
        for a in range(n)
    ]
    np.testing.assert_allclose(apart(A, torch.tensor(y)), own, rtol=1e-13)


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rank", [1, 3, 12])
def test_points_are_left_out_by_the_literal_formula(rank, q, monkeypatch):
    """However they are cut; where A is singular, and where a point has leverage one, too."""
    rng, (n, K, B) = np.random.default_rng(rank), (5, 12, 2)
    half = rng.normal(size=(n, B, K, rank)) / 12
    full = half @ half.swapaxes(-1, -2)
    full[0] *= 1e5  # no factor of I − T
    (i, j), _ = pairs(K, torch.device("cpu"))
    z = torch.tensor(rng.normal(size=(n, K, B)))
    pi = all_probabilities(z)[:, 1:]
    A, r = torch.tensor(full[:, :, i, j]).movedim(1, -1).contiguous(), residual(z, torch.zeros(n, 1, dtype=torch.long))
    out = deletion(A, second(z), r, q)
    assert bool((out.remaining[0] == 0).all())
    for at, b in itertools.product(range(1, n), range(B)):
        p, own = pi[at, :, b].numpy(), r[at, :, b].numpy()
        value, vector = np.linalg.eigh(full[at, b])
        root = vector * np.sqrt(value.clip(0)) @ vector.T
        t, U = np.linalg.eigh(root @ (np.diag(p) - np.outer(p, p)) @ root)
        factor = [((1 - each) ** -q - 1) / each if each > 1e-12 else q for each in t]
        # Products of length 12, twice, of numbers of size one, and conditions up to 1e4.
        np.testing.assert_allclose(out.shift[at, :, b], root @ (U * factor) @ U.T @ root @ own, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(out.norm[at, b] ** 2, own @ full[at, b] @ own, rtol=1e-10)
        np.testing.assert_allclose(out.remaining[at, b], np.prod(1 - t), rtol=1e-10)
    monkeypatch.setattr(sys.modules[deletion.__module__], "TOGETHER", 1)
    for name, parts in vars(deletion(A, second(z), r, q)).items():
        assert torch.equal(parts, getattr(out, name))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems(), schemes, st.integers(0, 2**32 - 1))
def test_permuting_the_bag_permutes_the_scores(problem, q, seed):
    """Which point of the augmented bag is the candidate makes no difference to anyone's score."""
    X, y, C, penalty, X_test = problem
    X1, y1 = np.vstack([X, X_test]), np.append(y, C - 1)
    order = np.random.default_rng(seed).permutation(len(y1))
    order = np.append(order[order != 2 * C], 2 * C)  # the new candidate: one whose class the others have too
    before, _ = scores_of(X, y, C, penalty, X_test[0], C - 1, q)
    after, _ = scores_of(X1[order[:-1]], y1[order[:-1]], C, penalty, X1[order[-1]], y1[order[-1]], q)
    np.testing.assert_allclose(after, before[order], rtol=1e-9, atol=1e-9)


def p_symmetric(problem, q, weight=None, **options):
    X, y, C, penalty, X_test = problem
    counts = symmetric_counts(bag_of(X, y, C, penalty), torch.tensor(X_test), q, weight, **options)
    return p_values(*counts, len(y) if weight is None else weight.sum(0))


def p_literal(problem, q, weight=None, factors=None):
    X, y, C, penalty, X_test = problem
    p = np.empty((len(X_test), C))
    for (i, label), _ in np.ndenumerate(p):
        own = penalty if factors is None else penalty * factors[i].numpy()
        alpha = oracle.symmetric_scores(np.vstack([X, X_test[i]]), np.append(y, label), C, own, q)
        p[i, label] = oracle.p_value(alpha[:-1], alpha[-1], None if weight is None else weight[:, label])
    return p


def other_penalties(X_test, width):
    """Factors (m, d) of the penalties of objects, a few of them far from one."""
    rng = np.random.default_rng(len(X_test[0]))
    return torch.tensor(np.exp(width * rng.standard_t(3, size=X_test.shape)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems(), schemes, st.sampled_from([None, 0.05, 0.5]))
def test_p_values_are_those_of_the_literal_scores(problem, q, width):
    factors = None if width is None else other_penalties(problem[4], width)
    np.testing.assert_allclose(
        p_symmetric(problem, q, factors=factors), p_literal(problem, q, None, factors), rtol=1e-12
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(problems(max_size=60), schemes, st.booleans())
def test_class_conditional_and_weighted_counts(problem, q, class_conditional):
    X, y, C, *_ = problem
    weight = comparison_weight(y, C, class_conditional=class_conditional, weights=np.exp(X[:, 0]))
    expected = p_literal(problem, q, weight)
    np.testing.assert_allclose(p_symmetric(problem, q, weight), expected, rtol=1e-12)
    np.testing.assert_allclose(p_symmetric(problem, q, torch.tensor(weight)), expected, rtol=1e-12)


def test_ordinary_symmetric_is_ordinary_full_cp():
    rng = np.random.default_rng(0)
    X, y, X_test = rng.normal(size=(80, 4)), rng.integers(3, size=80), rng.normal(size=(20, 4))
    bag = bag_of(X, y, 3, np.full(4, 0.3))
    symmetric, exact = (f(bag, torch.tensor(X_test), 0) for f in (symmetric_counts, exact_counts))
    np.testing.assert_array_equal(symmetric, exact)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(), st.booleans())
def test_the_certificate_encloses_the_exact_p_value(problem, one_step):
    X, y, C, penalty, X_test = problem
    bag = bag_of(X, y, C, penalty)
    lower, upper = symmetric_bounds(bag, torch.tensor(X_test), one_step=one_step)
    exact = sum(exact_counts(bag, torch.tensor(X_test), 0))
    assert (lower <= exact).all() and (upper >= exact).all()
    if not one_step:
        np.testing.assert_array_equal(upper, exact)


def test_the_certificate_is_narrow_where_there_are_many_points():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 5))
    y = (X[:, 0] + rng.logistic(size=2000) > 0).astype(int)
    lower, upper = symmetric_bounds(bag_of(X, y, 2, np.ones(5)), torch.tensor(rng.normal(size=(20, 5))))
    assert (upper - lower).mean() < 0.01 * len(y)


@pytest.mark.parametrize("q", [0, 0.5, 1])
def test_separable_data_without_penalty(q):
    X = np.hstack([np.linspace(-1, 1, 20)[:, None], np.ones((20, 1))])
    bag = bag_of(X, (X[:, 0] > 0).astype(int), 2, np.zeros(2))
    with pytest.raises(NoMinimiser, match="l2"):
        symmetric_counts(bag, torch.tensor(X[:1]), q)


@pytest.mark.parametrize("C", [2, 3])
def test_a_single_candidate_at_a_time_changes_nothing(C):
    rng = np.random.default_rng(C)
    problem = rng.normal(size=(60, 4)), rng.integers(C, size=60), C, np.full(4, 0.5), rng.normal(size=(6, 4))
    seen = []
    parts = p_symmetric(problem, 1, memory_budget=1, progress=lambda *state: seen.append(state))
    np.testing.assert_array_equal(parts, p_symmetric(problem, 1))
    assert seen[-1] == (6, 6) and seen == sorted(seen)


def awkward(kind, C):
    """Problems that rounding or geometry makes hard."""
    rng = np.random.default_rng(C)
    X, y = rng.normal(size=(41, 3)), np.arange(40) % C
    if kind == "zero row":
        X[5] = X[-1] = 0
    elif kind == "collinear":
        X = np.hstack([X, X[:, :1] + 1e-7 * X[:, 1:2]])
    elif kind == "scales":
        X = X * [1e4, 1, 1e-4]
    elif kind == "outlier":
        X[-1] *= 30
    return X[:40], y, C, np.full(X.shape[1], 0.01), X[40:]


@pytest.mark.parametrize("C", [2, 3])
@pytest.mark.parametrize("kind", ["zero row", "collinear", "scales", "outlier"])
def test_awkward_data(kind, C):
    problem = awkward(kind, C)
    for q in (0, 0.5, 1):
        np.testing.assert_allclose(p_symmetric(problem, q), p_literal(problem, q), rtol=1e-12)
    X, y, C, penalty, X_test = problem
    counts = exact_counts(bag_of(X, y, C, penalty), torch.tensor(X_test), 1)
    for label in range(C):
        expected = oracle.p_value(*oracle.exact_scores(X, y, C, penalty, X_test[0], label, 1))
        assert p_values(*counts, len(y))[0, label] == pytest.approx(expected)


@pytest.mark.parametrize("C", [2, 3])
def test_what_rounding_cannot_decide_counts_as_a_tie(C):
    """A point a thousand times as far out as the others has a leverage of one to many digits."""
    X, y, C, penalty, X_test = awkward("outlier", C)
    problem = X, y, C, penalty, 100 * X_test
    for q in (0, 0.5, 1):
        assert (p_symmetric(problem, q) >= p_literal(problem, q) - 1e-12).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("q", [0.5, 1.0])
def test_the_errors_claimed_for_rough_scores_hold(seed, q):
    """Rough fits of dependent features: the scores lie within what they claim of the converged ones."""
    rng = np.random.default_rng(seed)
    n, C = 120, 2 + seed % 2
    X = rng.normal(size=(n + 4, 6))
    X[:, 3:] = X[:, :3] + 0.03 * X[:, 3:]  # condition about 1e3
    y = np.r_[np.arange(C), rng.integers(0, C, n - C)]
    bag = bag_of(X[:n], y, C, np.full(6, 1e-3))
    change = Change(torch.as_tensor(X[n:].T.copy()), torch.arange(4) % C)
    rough = _scores(bag, change, refit(bag, change, tolerance=ROUGH), q)
    exact = symmetric_scores(bag, change, q)
    for name in ("alpha", "tau"):
        gap = (getattr(rough, name) - getattr(exact, name)).abs()
        allowed = getattr(rough, f"{name}_error") + getattr(exact, f"{name}_error")
        assert (gap <= allowed).all()
        assert gap.max() > 1e-9  # there is something to be honest about


@pytest.mark.parametrize(("C", "n"), [(2, 300), (3, 150), (6, 150)])
@pytest.mark.parametrize("penalty", [0.1, 3.0])
def test_bounds_decide_nothing_against_the_scores_and_no_tie(C, n, penalty):
    """At every accuracy, of objects that are twins of training points with few distinct values, and of others."""
    rng, d = np.random.default_rng(C), 5
    X = np.c_[rng.integers(0, 2, size=(n, d)), np.ones(n)].astype(float)
    bag = bag_of(X, np.r_[np.arange(C), rng.integers(0, C, n - C)], C, np.full(d + 1, penalty))
    objects = np.r_[X[:20], X[:6] + 0.1 * rng.normal(size=(6, d + 1))]
    change = with_labels(bag, as_objects(torch.tensor(objects)))
    exact = symmetric_scores(bag, change, 1.0)
    gap, tied = (exact.alpha - exact.tau).T, (exact.alpha_error + exact.tau_error).T
    every, fits, decided = torch.arange(len(change.y)), None, []
    for accuracy in (10 * COARSE, COARSE, ACCURATE, FINE):
        fits = fit_added(
            bag, change, every, accuracy, fits, torch.float64 if accuracy <= ACCURATE else bag.reference.rough
        )
        order = bounded_order(bag, change, fits, 1.0, accuracy, lambda order: (order == 0).any(1))
        assert (order[gap.abs() <= tied] == 0).all()
        assert (order * gap >= 0).all()
        decided.append(float((order != 0).double().mean()))
    # Only ties are left, and there are some.
    assert decided[0] <= decided[-1] == float((gap.abs() > tied).double().mean()) < 1


@pytest.mark.parametrize(("penalty", "width"), [(3.0, None), (3.0, 0.02), (1000.0, 0.4)])
@pytest.mark.parametrize(("q", "C", "n"), [(0, 2, 400), (1, 2, 400), (1, 3, 900), (1, 5, 1500)])
def test_the_fit_without_candidates_decides_most_and_nothing_against_the_scores(q, C, n, penalty, width):
    """With other penalties, too; of objects that are twins of training points, of which it decides no tie, and of others."""
    rng, d = np.random.default_rng(C), 3
    X = np.c_[rng.normal(size=(n, d)), np.ones(n)]
    y = (X[:, :C] @ rng.normal(size=(min(C, d + 1), C)) + 2 * rng.gumbel(size=(n, C))).argmax(1)
    bag = bag_of(X, y, C, np.full(d + 1, penalty))
    objects = torch.tensor(np.r_[X[:10], rng.normal(size=(10, d + 1))])
    factors = None if width is None else torch.tensor(np.exp(rng.uniform(-width, width, objects.shape)))
    change = with_labels(bag, as_objects(objects, factors))
    exact = symmetric_scores(bag, change, q)
    gap, tied = (exact.alpha - exact.tau).T, (exact.alpha_error + exact.tau_error).T
    order = order_without_fits(bag, change, q)
    assert (order * gap >= 0).all() and (order[gap.abs() <= tied] == 0).all()
    assert float((order != 0).double().mean()) > (0.01 if penalty > 100 else 0.5)
    assert not order_without_fits(bag, change, 0.5).any()


@pytest.mark.parametrize("q", [0, 1])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.6, 1.0), (1.0, 1.1), (0.9, 0.9)])
def test_the_fit_without_candidates_is_as_far_from_the_others_as_it_says(factors, q):
    """Three points alone in a column, which the penalty holds: bounds on their scores are sharp, and candidates of any score meet them."""
    wrong = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        X = np.zeros((600, 2))
        X[:3, 0], X[3:, 1] = rng.uniform(0.3, 1.5, 3) * [1, 1, rng.choice([-1, 1])], rng.normal(size=597)
        y = np.where(np.arange(600) < 3, [1, 1, 0] * 200, X[:, 1] + rng.logistic(size=600) > 0).astype(int)
        bag = bag_of(X, y, 2, np.array([rng.uniform(0.5, 4), 40.0]))
        margins = np.linspace(-2.5, 2.5, 401)
        objects = torch.tensor(np.c_[0 * margins, margins / float(bag.base.theta[1, 0])])
        change = with_labels(bag, as_objects(objects, torch.tensor([factors], dtype=torch.float64).expand(401, 2)))
        exact = symmetric_scores(bag, change, q)
        order = order_without_fits(bag, change, q)
        wrong += int((order * (exact.alpha - exact.tau).T < 0).sum())
        assert float((order != 0).double().mean()) > 0.3
    assert not wrong


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_lengths_in_single_precision_are_no_less_than_they_are_and_close(scale):
    """Of random rows, and of those that float32 rounds off most, which a Hessian of nearly equal columns makes tiny."""
    rng, C, d = np.random.default_rng(5), 4, 6
    X = np.c_[rng.normal(size=(90, d)), np.ones(90)]
    X[:, 1] = X[:, 0] + rng.normal(size=90) / scale
    bag = bag_of(X, rng.integers(0, C, 90), C, np.full(d + 1, 1e-3))
    hard = np.linalg.eigh(bag.base.inverse.numpy())[1][:, :5].T.reshape(5, d + 1, C - 1)
    rows = torch.tensor(np.concatenate([rng.normal(size=(20, C - 1, d + 1)), hard.transpose(0, 2, 1)]))
    flat = rows.transpose(1, 2).flatten(1).numpy().astype(np.longdouble)
    literal = np.sqrt((flat @ bag.base.inverse.numpy().astype(np.longdouble) * flat).sum(1)).astype(float)
    for dtype, close in ((torch.float32, 1e-3), (torch.float64, 1e-9)):
        found = bag.base.length(rows, dtype).numpy()
        assert (found >= literal * (1 - 1e-15)).all()
        np.testing.assert_allclose(found[:20], literal[:20], rtol=close)


@pytest.mark.parametrize("penalty", [1.0, 1e-4, 1e-7])
def test_rough_solves_are_near_and_fits_with_them_take_few_steps(penalty, monkeypatch):
    """Of equal columns, too, where a product with H⁻¹ in float32 is no solve."""
    rng, C, d = np.random.default_rng(1), 3, 3
    X = rng.normal(size=(300, d))
    y, X = (X + rng.gumbel(size=X.shape)).argmax(1), np.c_[X, X, np.ones(300)]
    bag, objects = bag_of(X, y, C, np.append(np.full(2 * d, penalty), 0.0)), torch.tensor(X[:10])
    assert bag.reference.rough == torch.float32
    rows = torch.tensor(rng.normal(size=(20, C - 1, 2 * d + 1)))
    off = (bag.base.solve(rows, torch.float32) - bag.base.solve(rows)).transpose(1, 2).flatten(1)
    # A product of p terms in float32, of a condition of at most 0.01 of its units.
    p = len(bag.base.inverse)
    assert ((off @ bag.base.hessian * off).sum(1).sqrt() <= 0.01 * p * bag.base.length(rows)).all()
    steps = []
    monkeypatch.setattr(sys.modules[conjugate.__module__], "conjugate", lambda *a: steps.append(1) or conjugate(*a))
    for counts in (symmetric_counts, exact_counts):
        counts(bag, objects, 1)
    assert len(steps) < 20


@pytest.mark.parametrize("q", [0, 1])
def test_bounds_in_single_precision_are_made_of_whole_products(q, less_than_single):
    """Their rounding is bounded as that of float32, whatever torch was asked for; the last ones are followed by the progress."""
    rng, asked = np.random.default_rng(0), set()
    bag = bag_of(rng.normal(size=(40, 3)), np.arange(40) % 3, 3, np.ones(3))
    X = torch.tensor(rng.normal(size=(5, 3)))
    for counts in symmetric_counts, exact_counts:
        counts(bag, X, q, progress=lambda *done: asked.add(torch.backends.mkldnn.matmul.fp32_precision))
    assert asked == {"ieee"}


@pytest.mark.parametrize("q", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_error_of_the_fit_on_Z_is_granted_to_candidates_that_are_as_sure_as_can_be(q, sign):
    """An added point becomes more likely than at the minimiser, from which the fit on Z is off: candidates within that of points."""
    rng, n = np.random.default_rng(0), 200
    X = np.zeros((n, 2))
    X[:150, 0], X[150:, 1] = 3 * rng.normal(size=150), 3 * rng.normal(size=50)
    X[:6, 0] = [18, -19, 20, -21, 22, -23]
    y = np.where(np.arange(n) < 6, X.sum(1) > 0, X.sum(1) + rng.logistic(size=n) > 0).astype(int)
    bag, off = bag_of(X, y, 2, np.ones(2)), torch.tensor([[0.0], [1e-4 * sign]], dtype=torch.float64)
    good = bag.base
    error = 1.1 * good.kappa * float((off.T @ good.hessian @ off).sqrt())
    near = (X[:6, 0] * float(good.theta[0, 0]))[:, None] + np.linspace(-4, 4, 41) * error
    change = with_labels(bag, as_objects(torch.tensor(np.c_[0 * near.ravel(), near.ravel() / float(good.theta[1, 0])])))
    exact = symmetric_scores(bag, change, q)
    bag = bag_of(X, y, 2, np.ones(2))
    bag.__dict__["base"] = replace(good, theta=good.theta + off, error=error)
    order = order_without_fits(bag, change, q)
    assert (order * (exact.alpha - exact.tau).T >= 0).all() and float((order != 0).double().mean()) > 0.4


@pytest.mark.parametrize("seed", [1, 16, 46])
def test_sets_are_those_of_the_p_values_where_rounding_hides_scores_that_bounds_order(seed):
    """Few points, one far out, and objects far out that the fit follows: scores have errors of which nothing is known."""
    rng, C = np.random.default_rng(seed), 4
    n, d = (int(rng.integers(*ends)) for ends in ((4, 9), (2, 6)))
    X = np.c_[rng.normal(size=(n, d)), np.ones(n)]
    X[0] *= np.exp(rng.uniform(2, 7))
    bag, objects = bag_of(X, np.arange(n) % C, C, np.full(d + 1, 0.01)), torch.tensor(30 * rng.normal(size=(3, d + 1)))
    p = p_values(*symmetric_counts(bag, objects, 1), n)
    for level in (np.arange(n + 1) + 0.5) / (n + 1):

        def enough(_, *counts, level=level):
            return torch.eq(*(1 + count > level * (n + 1) for count in counts))

        assert np.array_equal(p_values(*symmetric_counts(bag, objects, 1, enough=enough), n) > level, p > level)


@pytest.mark.parametrize("columns", [1, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weighted_sums_and_quadratic_forms_are_those_of_every_point(columns, dtype):
    """Few columns and many, in either precision."""
    rng = np.random.default_rng(columns)
    n, d = 50, 4
    X = rng.normal(size=(n, d))
    W, N = (torch.tensor(rng.uniform(size=(k, columns)), dtype=dtype) for k in (n, d * (d + 1) // 2))
    x = torch.tensor(X, dtype=dtype)
    products = Products(x.T)
    i, j = torch.triu_indices(d, d)
    sums = torch.stack(
        [sum(w * torch.outer(one, one)[i, j] for w, one in zip(W[:, c], x, strict=True)) for c in range(columns)], 1
    )
    forms = torch.stack([sum(N[k, c] * x[:, i[k]] * x[:, j[k]] for k in range(len(i))) for c in range(columns)], 1)
    for ours, literal, size in ((products.gram(W), sums, n), (products.quadratic(N), forms, len(i))):
        assert ours.dtype == dtype
        assert (ours - literal).abs().max() <= size * torch.finfo(dtype).eps * literal.abs().max()


def test_many_objects_go_through_in_blocks_far_below_the_memory():
    rng = np.random.default_rng(0)
    n, m, C = 200, 4000, 2
    bag = bag_of(rng.normal(size=(n, 3)), np.arange(n) % C, C, np.ones(3))
    steps = []
    symmetric_counts(
        bag,
        torch.tensor(rng.normal(size=(m, 3))),
        1.0,
        progress=lambda done, _: steps.append(done),
        memory_budget=2**32,
    )
    assert steps[-1] == m
    # Twelve arrays of n float64 and four Hessians of 3 × 3 a candidate (`chunks`) are to stay within 2²⁷ bytes.
    assert max(np.diff([0, *steps])) * C * 8 * (12 * n + 4 * 9) <= 2**27


@pytest.mark.parametrize("far", [0.2, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_hessian_without_a_point_moves_no_farther_than_its_bounds(seed, far):
    """Factors of H without z_i, from the fit on Z to any other weights and with a point added, are within those claimed."""
    rng, (n, d, C) = np.random.default_rng(seed), (40, 3, 4)
    bag = bag_of(rng.normal(size=(n, d)), np.arange(n) % C, C, np.full(d, 0.3 if far else 30.0))
    theta = bag.base.theta[:, :, None] + far * torch.tensor(rng.normal(size=(d, C - 1, 1)))
    x = torch.tensor(rng.normal(size=(d, 1)))
    base = bag.base.theta[:, :, None]
    H0 = hessian(bag, None, base, curvature_of(bag, base))[0]
    at_x = unpacked(second(at_points(x, theta)))[:, :, 0]
    added = torch.kron(x @ x.T, at_x)
    t = torch.linalg.eigvals(torch.linalg.solve(H0, added)).real.sum()[None]
    factors = torch.tensor(rng.uniform(0.5, 2.0, size=(d, 1)))
    other = torch.kron(torch.diag((factors[:, 0] - 1) * bag.penalty), bag.coupling)
    found = hessian_factors(bag.reference, all_probabilities(logits(bag, theta)).permute(2, 1, 0), t, factors)
    for i in range(n):
        one = Change(bag.X.new_zeros(d, 1), torch.zeros(1, dtype=torch.long), torch.tensor([i]))
        before = hessian(bag, one, base, curvature_of(bag, base))[0]
        after = hessian(bag, one, theta, curvature_of(bag, theta))[0]
        for H in (after, after + added, after + other, after + added + other):
            factors = torch.linalg.eigvals(torch.linalg.solve(before, H)).real
            assert factors.min() >= found.least(bag.reference.rest[i]) * (1 - 1e-9)
            assert factors.max() <= found.most(bag.reference.rest[i]) * (1 + 1e-9)


def far_moved(C, seed, width, n=50, d=6, m=3):
    """A weakly penalised bag, and candidates with other penalties that move its Hessian far."""
    rng = np.random.default_rng(seed)
    X = np.c_[rng.normal(size=(n + m, d)), np.ones(n + m)]
    y = (X[:n] @ rng.normal(size=(d + 1, C)) + 0.3 * rng.normal(size=(n, C))).argmax(1)
    y[:C] = np.arange(C)
    factors = None if width is None else np.exp(width * rng.normal(size=(m, d + 1)))
    return (X[:n], y, C, np.full(d + 1, 0.1), X[n:]), None if factors is None else torch.tensor(factors)


@pytest.mark.parametrize("width", [None, 0.3])
@pytest.mark.parametrize("C", [2, 3, 5])
def test_energies_enclose_the_leverage_of_a_point_that_is_left_out(C, width):
    """A' by the inverse of the Hessian without the point; they are off by the square of what has moved, `hessian_factors` by it."""
    (X, y, C, penalty, objects), factors = far_moved(C, 1, width)
    bag, n, K = bag_of(X, y, C, penalty), len(X), C - 1
    change = with_labels(bag, as_objects(torch.tensor(objects), factors))
    fits = fit_added(bag, change, torch.arange(3 * C), 1e-10)
    column, point = (part.flatten() for part in torch.meshgrid(torch.arange(3 * C), torch.arange(n), indexing="ij"))
    low, high = bag.energies.enclose(change, fits.pi, all_probabilities(fits.z_added), column, point)
    assert float(fits.factors.whole.min()) < (0.8 if C == 2 else 0.5)
    gaps, uniform = [], []
    for b in range(3 * C):
        for i in range(n):
            theta, one = fits.theta[:, :, b : b + 1], replace(change[b : b + 1], removed=torch.tensor([i]))
            J = torch.kron(bag.X[i], torch.eye(K, dtype=torch.float64))
            A = J @ torch.linalg.solve(hessian(bag, one, theta, curvature_of(bag, theta))[0], J.T)
            L, U = low[b * n + i], high[b * n + i]
            # b are kept in float32.
            off = 1e-6 * float(A.trace())
            assert torch.linalg.eigvalsh(U - A).min() > -off
            assert torch.linalg.eigvalsh(A - L).min() > -off
            gaps.append(float((U - L).trace() / A.trace()))
            factor = fits.factors[torch.tensor([b])]
            uniform.append(float(1 / factor.least(bag.reference.rest[i]) - 1 / factor.most(bag.reference.rest[i])))
    assert np.median(gaps) < 0.2 * np.median(uniform)


@pytest.mark.parametrize("width", [None, 0.3])
@pytest.mark.parametrize("C", [2, 3, 5])
def test_a_hessian_is_below_those_of_all_bags_it_is_made_of(C, width):
    """With other penalties, too: so are leverages above theirs, of points that are left out. That of one bag alone is its own."""
    (X, y, C, penalty, objects), factors = far_moved(C, 1, width)
    bag, n, eye = bag_of(X, y, C, penalty), len(X), torch.eye(C - 1, dtype=torch.float64)
    change = with_labels(bag, as_objects(torch.tensor(objects), factors))
    fits = fit_added(bag, change, torch.arange(3 * C), 1e-10)
    seen, gaps = below(bag, fits.pi, change.factors), []
    for b in range(3 * C):
        theta, one = fits.theta[:, :, b : b + 1], replace(change[b : b + 1], x=bag.X.new_zeros(bag.X.shape[1], 1))
        H = hessian(bag, one, theta, curvature_of(bag, theta))[0]
        assert torch.linalg.eigvalsh(H - seen.base.hessian).min() > -1e-12 * float(H.trace())
        alone = below(bag, fits.pi[b : b + 1], one.factors).base.hessian
        np.testing.assert_allclose(alone, H, rtol=1e-9, atol=1e-12)
        for i in range(0, n, 5):
            J = torch.kron(bag.X[i], eye)
            A = J @ torch.linalg.solve(
                hessian(bag, replace(one, removed=torch.tensor([i])), theta, curvature_of(bag, theta))[0], J.T
            )
            gap = seen.reference.left_out[i] - A
            assert torch.linalg.eigvalsh(gap).min() > -1e-9 * float(A.trace())
            factor = fits.factors[torch.tensor([b])].least(bag.reference.rest[i])
            gaps.append(float(gap.trace() / (bag.reference.left_out[i] / factor - A).trace()))
    # Closer than by how far each bag's Hessian is known to have moved.
    assert np.median(gaps) < (0.7 if C == 5 else 1)


@pytest.mark.parametrize("width", [None, 0.3])
@pytest.mark.parametrize(("C", "penalty"), [(2, 0.02), (3, 0.1), (5, 0.1)])
def test_bounds_from_a_hessian_below_decide_nothing_against_the_scores(C, penalty, width):
    """At every accuracy, however far candidates move. It is formed for many that move far, but not for none."""
    (X, y, C, _, objects), factors = far_moved(C, 2, width, m=12)
    bag = bag_of(X, y, C, np.full(X.shape[1], penalty))
    change, every = with_labels(bag, as_objects(torch.tensor(objects), factors)), torch.arange(12 * C)
    exact, decided = symmetric_scores(bag, change, 1.0), []
    for accuracy in (10 * COARSE, COARSE, ACCURATE, FINE):
        first = fit_added(bag, change, every, accuracy)
        far, parts = int((first.factors.whole < 0.3).sum()), parted(bag, change, every, first, accuracy)
        formed = parts[0][0] is not bag
        assert (far > 0 or not formed) and (far <= 12 or formed) and sum(len(part[1]) for part in parts) == len(every)
        assert formed or C < 5
        seen, fits = fit_below(bag, change, every, accuracy, first)
        off = range_of(logits(bag, fits.theta) - logits(bag, refit(bag, change).theta)).amax(0)
        assert (off <= fits.error + 1e-9).all()
        order = bounded_order(seen, change, fits, 1.0, accuracy)
        gap, tied = (exact.alpha - exact.tau).T, (exact.alpha_error + exact.tau_error).T
        assert (order * gap >= 0).all() and (order[gap.abs() <= tied] == 0).all()
        decided.append(float((order != 0).double().mean()))
    assert decided[-1] > 0.99


def test_solves_that_are_stopped_bound_the_margins_they_are_for_to_second_order():
    """After any number of steps; Hessians are within factors of that which preconditions them."""
    rng, (n, d, C) = np.random.default_rng(3), (60, 5, 4)
    bag = bag_of(rng.normal(size=(n, d)), np.arange(n) % C, C, np.full(d, 0.5))
    b, eye = 12, torch.eye(C - 1, dtype=torch.float64)
    pi, point = torch.softmax(torch.tensor(rng.normal(size=(b, C, n))), 1), torch.arange(b)
    change = Change(bag.X.new_zeros(d, b), bag.y[point], torch.arange(20, 20 + b))
    z, x, y = torch.tensor(rng.normal(size=(C - 1, b))), bag.X[point][:, None], bag.y[point]
    r, base = residual(z, y), bag.base.hessian
    J = torch.stack([torch.kron(bag.X[i], eye) for i in point])
    S = torch.diag_embed(pi[:, 1:].mT) - pi[:, 1:].mT[..., None] * pi[:, 1:].mT[..., None, :]
    S[point, change.removed] = 0.0
    H = bag.penalty_matrix + torch.einsum("ni,bnkl,nj->bikjl", bag.X, S, bag.X).reshape(b, len(base), -1)
    factors = torch.linalg.eigvals(torch.linalg.solve(H, base.expand_as(H))).real
    A, exact = J @ bag.base.inverse @ J.mT, (J @ torch.linalg.solve(H, (J.mT @ r.T[:, :, None])))[:, :, 0].T
    root = against(A, y).amax(1).sqrt()
    ahead, literal = _Ahead(x, y, r, A, root, factors.amin(1), factors.amax(1)), margin(z + exact, y)
    first = []

    def stop(at, w, s, v, norm, lost):
        found, off = ahead.margin(z, at, w, s, v, norm, lost)
        assert ((found - literal[at]).abs() <= off + 1e-12).all()
        if len(first) < 3:
            first.append(float((off / (root * norm * (ahead.half + ahead.high * lost / norm))[at]).median()))
        return norm < 1e-10

    conjugate(bag, change, pi[:, 1:], None, (x * r.T[:, :, None]), stop)
    # A bound of first order would have the same share of the norm that is left.
    assert first[2] < 0.5 * first[0]


def test_a_bag_is_pickled_without_the_flows_it_keeps():
    (X, y, C, penalty, objects), _ = far_moved(4, 0, None, n=18)
    bag = bag_of(X, y, C, penalty)
    counts = symmetric_counts(bag, torch.tensor(objects), 1.0)
    assert bag.energies.kept
    again = pickle.loads(pickle.dumps(bag))
    assert not again.energies.kept
    np.testing.assert_array_equal(symmetric_counts(again, torch.tensor(objects), 1.0), counts)


@pytest.mark.parametrize("width", [None, 0.3])
@pytest.mark.parametrize(("C", "seed"), [(2, 0), (3, 1), (4, 2), (6, 3)])
def test_p_values_are_those_of_the_literal_scores_where_hessians_move_far(C, seed, width):
    problem, factors = far_moved(C, seed, width, n=40 + 10 * C, d=8, m=8)
    np.testing.assert_allclose(
        p_symmetric(problem, 1, factors=factors), p_literal(problem, 1, None, factors), rtol=1e-12
    )


def test_bounds_of_a_rougher_fit_hold_at_the_finer_one():
    """Factors of the Hessian without each point, from the fit on Z to that with a candidate, by a fit that started from a rougher one."""
    rng, (n, d, C) = np.random.default_rng(1), (40, 3, 3)
    bag = bag_of(rng.normal(size=(n, d)), np.arange(n) % C, C, np.full(d, 1.0))
    change = with_labels(bag, as_objects(torch.tensor(rng.normal(size=(2, d)))))
    every = torch.arange(2 * C)
    rough = fit_added(bag, change, every, 1e-2)
    fine = fit_added(bag, change, every, 1e-9, rough)
    assert float(fine.error.max()) < 1e-6 < float((fine.theta - rough.theta).abs().max())
    base = bag.base.theta[:, :, None]
    for b in range(2 * C):
        one, far = change[b : b + 1], fine.factors[torch.tensor([b])]
        for i in range(0, n, 7):
            removed = replace(one, removed=torch.tensor([i]))
            nothing = Change(bag.X.new_zeros(d, 1), torch.zeros(1, dtype=torch.long), torch.tensor([i]))
            before = hessian(bag, nothing, base, curvature_of(bag, base))[0]
            theta = fine.theta[:, :, b : b + 1]
            after = hessian(bag, removed, theta, curvature_of(bag, theta))[0]
            factors = torch.linalg.eigvals(torch.linalg.solve(before, after)).real
            assert factors.min() >= far.least(bag.reference.rest[i]) * (1 - 1e-9)
            assert factors.max() <= far.most(bag.reference.rest[i]) * (1 + 1e-9)


def curvature_of(bag, theta):
    return second(logits(bag, theta))


def test_leverages_of_points_left_out_are_those_of_the_bag_without_them():
    rng, (n, d, C) = np.random.default_rng(0), (30, 3, 4)
    bag = bag_of(rng.normal(size=(n, d)), np.arange(n) % C, C, np.full(d, 0.3))
    theta = bag.base.theta[:, :, None]
    for i in range(n):
        one = Change(bag.X.new_zeros(d, 1), torch.zeros(1, dtype=torch.long), torch.tensor([i]))
        J = torch.kron(bag.X[i : i + 1], torch.eye(C - 1, dtype=torch.float64))
        whole, rest = (hessian(bag, change, theta, curvature_of(bag, theta))[0] for change in (None, one))
        literal = J @ torch.linalg.solve(rest, J.T)
        # Solves of size 9 with conditions below 1e4.
        np.testing.assert_allclose(bag.reference.left_out[i], literal, rtol=1e-9, atol=1e-12)
        odds = torch.linalg.eigvals(torch.linalg.solve(rest, whole)).real.max() - 1
        assert odds <= bag.reference.odds[i] * (1 + 1e-9) + 1e-12


@settings(max_examples=15, deadline=None, derandomize=True)
@given(problems(max_size=60), schemes, st.sampled_from([0.02, 0.1, 0.35]))
def test_counts_that_need_only_decide_a_level_decide_it(problem, q, epsilon):
    """p > ε is the same from counts that stop there; where they stop is told the least and the largest count."""
    n = len(problem[1])

    def enough(labels, surely, possibly):
        assert len(labels) == len(surely) == len(possibly) and bool((surely <= possibly).all())
        return ((1 + surely) / (n + 1) > epsilon) == ((1 + possibly) / (n + 1) > epsilon)

    p = p_symmetric(problem, q, enough=enough)
    np.testing.assert_array_equal(p > epsilon, p_symmetric(problem, q) > epsilon)


def test_weak_penalties_enlarge_sets_by_crude_scores_not_by_ties_and_diagnose_says_so():
    """Iris, 40 points, C = 1e4: sets hold more labels than exact ones, although no pair of scores is tied by its error bounds."""
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(150)
    X, y, Xt = X[order[:40]], y[order[:40]], X[order[40:60]]
    clf, exact = (
        FullConformalClassifier(LogisticRegression(C=1e4), method=m).fit(X, y) for m in ("symmetric", "exact")
    )
    alpha, tau = clf._fitted.scores(Xt, clf._query())
    p = clf.predict_p(Xt)
    np.testing.assert_allclose(p, (1 + (alpha >= tau[:, :, None]).sum(2)) / 41, atol=1e-12)
    assert (p > 0.1).sum() > (exact.predict_p(Xt) > 0.1).sum()
    assert (
        "sets may be larger than those of method='exact'" in str(clf.diagnose())
        and clf.diagnose().largest_leverage > 0.9
    )
    assert "larger" not in str(exact.diagnose())
    assert "larger" not in str(FullConformalClassifier(LogisticRegression(C=0.01)).fit(X, y).diagnose())


@pytest.mark.parametrize("R", [0.01, 0.5, 3.0])
def test_probabilities_turn_no_farther_than_the_range_of_their_logits_allows(R):
    rng = np.random.default_rng(0)
    f = torch.tensor(rng.normal(size=(2000, 5)) * rng.choice([0.3, 3.0], size=(2000, 1)))
    step = torch.tensor(rng.uniform(0, 1, size=f.shape))
    step = R * (step > 0.5) if R > 1 else R * step
    before, after = torch.softmax(f, 1), torch.softmax(f + step, 1)
    apart = (after - before).abs().sum(1) / 2
    assert (apart <= turned(torch.full_like(apart, R), 1 - before[:, 0]) * (1 + 1e-9)).all()
    assert (apart > 0.5 * turned(torch.full_like(apart, R), 1 - before[:, 0])).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_conjugate_gradients_leave_is_as_small_as_they_say(dtype):
    """In the norm of H⁻¹ at the fit on Z, rounding of products included, whatever the units of the features."""
    rng, (n, d, C, B) = np.random.default_rng(0), (60, 4, 4, 5)
    scale = np.array([1.0, 30.0, 1.0, 0.1])
    bag = bag_of(rng.normal(size=(n, d)) * scale, np.arange(n) % C, C, np.full(d, 0.3))
    change = Change(torch.tensor(rng.normal(size=(d, B)) * scale[:, None]), torch.arange(B) % C, torch.arange(B))
    theta = bag.base.theta[:, :, None] + 0.02 * torch.tensor(rng.normal(size=(d, C - 1, B)))
    H = hessian(bag, change, theta, curvature_of(bag, theta))
    right = torch.tensor(rng.normal(size=(B, C - 1, d)))
    said = []

    def stop(columns, w, step, rest, norm, lost):
        for c, one, claimed in zip(columns.tolist(), w, norm + lost, strict=True):
            rest = right[c].T.flatten() - H[c] @ one.T.flatten()
            said.append((float((rest @ bag.base.inverse @ rest).sqrt()), float(claimed)))
        return norm < 0

    pi = probabilities(logits(bag, theta)).permute(2, 1, 0).to(dtype)
    conjugate(bag, change, pi, theta, right, stop)
    assert len(said) > 3 * B
    assert all(true <= claimed * (1 + 1e-9) + 1e-14 for true, claimed in said)
    # Until rounding is all that is left the claim is close.
    assert all(claimed < 1.01 * true for true, claimed in said if true > 1e-2 * said[0][0])
