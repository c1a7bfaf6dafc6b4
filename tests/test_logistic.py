"""Logistic regression by one Newton solver against a literal one; which problems it fits, which of scikit-learn's are read."""

import itertools

import numpy as np
import oracles_convex as oracle
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils._param_validation import InvalidParameterError
from torch import nn

from fullconformal import FullConformalClassifier
from fullconformal.linear import newton, steps
from fullconformal.linear.bag import LinearBag, NoMinimiser
from fullconformal.linear.from_problem import Regression, Units, fit_linear
from fullconformal.linear.hessian import factor
from fullconformal.linear.steps import Steps
from fullconformal.losses.relative import range_of, residual, second
from fullconformal.models import linear
from fullconformal.models.adapters import read
from fullconformal.problem import Problem

EPS = np.finfo(np.float64).eps


def draw(seed, n=60, d=6, C=4, scale=1.0):
    rng = np.random.default_rng(seed)
    X = np.hstack([scale * rng.standard_normal((n, d)), np.ones((n, 1))])
    y = np.append(np.arange(C), (X[:, :C] + rng.standard_normal((n, C))).argmax(1)[C:])
    return X, y


def left_at(W, X, y, C, penalty):
    """|∇F|∞ at weights W (C or 1, d), and what of it may be rounding: units of sums of n terms, of logits and of residuals."""
    g = oracle.gradient(W.T, X, y, C, penalty)
    logits = np.abs(X) @ np.abs(W.T)
    return np.abs(g).max(), 4 * EPS * (np.abs(X).sum(0).max() * (1 + logits.max()) + np.abs(penalty * W).max())


def rows(theta):
    """Weights (C, d) whose rows sum to zero, or (1, d), from those of a bag (d, K)."""
    W = theta.T.numpy()
    W = W if len(W) == 1 else np.vstack([np.zeros(W.shape[1]), W])
    return W if len(W) == 1 else W - W.mean(0)


@pytest.mark.parametrize("C", [2, 4])
@pytest.mark.parametrize("weight", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("intercept", [0.0, 1.0])
@pytest.mark.parametrize("scale", [0.1, 100.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_minimum_is_that_of_a_literal_newton(C, weight, intercept, scale, seed):
    """From zero and from elsewhere; the certified fit has no gradient left but rounding, and its error holds."""
    X, y = draw(seed, C=C, scale=scale)
    penalty = np.append(np.full(6, weight), intercept)
    start = torch.tensor(np.random.default_rng(9).standard_normal((7, C - 1)) / scale) if seed else None
    bag = LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty), start)
    found = bag.fit
    theta = oracle.fit(X, y, C, penalty)
    literal = X @ theta if C == 2 else X @ (theta[:, 1:] - theta[:, :1])
    assert found.found
    # A last step of at most 5e-5, quadratic convergence with a constant of about 1, and what the oracle's own tolerance leaves.
    assert np.abs(X @ found.theta[:, :, 0].numpy() - literal).max() < 1e-7
    size, rounding = left_at(rows(bag.base.theta), X, y, C, penalty)
    assert size <= rounding
    # The oracle's residuals are off by units of one each, which in logits are up to κ² times as much.
    literally = 1e-9 + len(X) * EPS * bag.base.kappa**2
    assert np.ptp(X @ bag.base.theta.numpy() - literal, axis=0).max() < bag.base.error + literally


@pytest.mark.parametrize(("n", "d", "C"), [(1000, 12, 12), (20_000, 20, 2), (20_000, 15, 3)])
@pytest.mark.parametrize("weight", [1e-3, 10.0])
def test_steps_without_the_hessian_find_the_same_minimum(n, d, C, weight):
    """Bags so large that conjugate gradients solve for the steps."""
    X, y = draw(0, n, d, C)
    penalty = np.append(np.full(d, weight), 0.0)
    bag = LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))
    assert Steps(bag, None).iterative and bag.fit.found
    size, rounding = left_at(rows(bag.base.theta), X, y, C, penalty)
    assert size <= rounding
    gap = X @ (bag.fit.theta[:, :, 0] - bag.base.theta).numpy()
    assert np.abs(gap).max() < 1e-7


@pytest.mark.parametrize("C", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_step_takes_no_hessian_of_its_own(C, seed, monkeypatch):
    """After one that moves every logit by a hundredth at most; and the minimum is as near as when each step has its own."""
    X, y = draw(seed, C=C)
    penalty = np.append(np.full(6, 1.0), 0.0)
    made, taken, call = [], [], Steps.__call__
    monkeypatch.setattr(steps, "factor", lambda H: made.append(H) or factor(H))
    monkeypatch.setattr(Steps, "__call__", lambda self, *given: taken.append(step := call(self, *given)) or step)
    bag = LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))
    theta = oracle.fit(X, y, C, penalty)
    literal = X @ theta if C == 2 else X @ (theta[:, 1:] - theta[:, :1])
    assert np.abs(X @ bag.fit.theta[:, :, 0].numpy() - literal).max() < 1e-8
    moves = [float(range_of((torch.tensor(X) @ step[:, :, 0])[:, :, None]).max()) for step in taken]
    assert len(made) == 1 + sum(move > 1e-2 for move in moves[:-1]) < len(taken)


@pytest.mark.parametrize("C", [2, 5])
@pytest.mark.parametrize("weight", [1e-4, 1e-8])
def test_separable_classes_with_a_tiny_penalty_have_a_minimum(C, weight):
    """Logits of tens, most points sure."""
    rng = np.random.default_rng(C)
    y = np.arange(200) % C
    X = np.hstack([rng.standard_normal((200, C)) / 5 + 3 * np.eye(C)[y], np.ones((200, 1))])
    penalty = np.append(np.full(C, weight), 0.0)
    bag = LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))
    size, rounding = left_at(rows(bag.base.theta), X, y, C, penalty)
    assert size <= rounding
    assert oracle.losses(rows(bag.base.theta).T, X, y, C).max() < 0.01


def test_a_start_too_sure_to_have_curvature_is_left():
    """At logits of hundreds no point has curvature for a free intercept; the minimum is unique all the same."""
    for C in (2, 4):
        X, y = draw(0, C=C)
        penalty, far = torch.tensor([1.0] * 6 + [0.0]), torch.full((7, C - 1), 2000.0, dtype=torch.float64)
        bags = [LinearBag(torch.tensor(X), torch.tensor(y), C, penalty.double(), start) for start in (None, far)]
        torch.testing.assert_close(bags[1].base.theta, bags[0].base.theta, rtol=0, atol=1e-11)


def test_a_bag_without_a_single_minimum_is_fitted_as_far_as_it_goes_and_never_certified():
    X, y = draw(0)
    X[:, 2] = 0.0
    bag = LinearBag(torch.tensor(X), torch.tensor(y), 4, torch.zeros(7, dtype=torch.float64))
    assert bool(bag.fit.theta.isfinite().all())
    with pytest.raises(NoMinimiser):
        _ = bag.base


@pytest.mark.parametrize("sizes", [[1e6, 1, 1, 1, 1, 1e-6], [1, 1e-7, 1, 1e7, 1, 1]])
@pytest.mark.parametrize("C", [2, 4])
def test_columns_of_different_sizes_have_the_fit_of_columns_of_one_size(C, sizes):
    """The same objective in other units, Λ_j s_j² beside s_j x_j, has the same logits."""
    X, y = draw(0, C=C)
    sizes = np.append(sizes, 1.0)
    penalty = np.append(np.full(6, 0.5), 0.0)
    one, other = (
        LinearBag(torch.tensor(X * s), torch.tensor(y), C, torch.tensor(penalty * s**2)) for s in (np.ones(7), sizes)
    )
    gap = (one.X @ one.base.theta - other.X @ other.base.theta).abs().max()
    assert float(gap) <= one.base.error + other.base.error + 1e-12


@pytest.mark.parametrize("C", [2, 4])
def test_one_penalty_on_columns_of_different_sizes(C):
    X, y = draw(0, C=C)
    X[:, :6] *= [1e6, 1, 1, 1e-6, 1, 1]
    penalty = np.append(np.full(6, 0.06), 0.0)
    bag = LinearBag(torch.tensor(X), torch.tensor(y), C, torch.tensor(penalty))
    assert bag.base.error < 1e-6
    assert FullConformalClassifier(method="symmetric").fit(X[:, :6], y).predict_p(X[:2, :6]).shape == (2, C)


# Problems that are regressions ------------------------------------------------------------------------------------------


def models(C):
    """Models of 6 features and C classes whose logits are linear in their parameters, by name."""
    torch.manual_seed(0)
    frozen = nn.Linear(C + 1, C, bias=False).requires_grad_(False)
    return {
        "built in": linear(6, C),
        "without a bias": linear(6, C, bias=False),
        "C outputs": nn.Linear(6, C),
        "on features": nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, C)),
        "more outputs than classes": nn.Sequential(nn.Linear(6, C + 1), frozen),
    }


@pytest.mark.parametrize("everything", [False, True], ids=["weights", "bias too"])
@pytest.mark.parametrize("C", [2, 4])
@pytest.mark.parametrize("name", models(2))
def test_a_linear_problem_is_fitted_by_its_bag(name, C, everything):
    """Whatever makes its logits and whichever parameters are penalised: its own gradient vanishes."""
    X, y = draw(1, C=C)
    model = models(C)[name].double().eval()
    penalised = 0.3 if everything else {key: 0.3 for key, _ in model.named_parameters() if "weight" in key}
    problem = Problem(model, torch.tensor(X[:, :6]), torch.tensor(y), penalised)
    fit_linear(problem)
    # Logits within 1e-9 of the minimiser's put residuals off by as much, and sums of 60 inputs of size up to 4.
    assert float(problem.gradient().abs().max()) < 1e-6


def test_float32_is_fitted_in_float64_and_rounded():
    X, y = draw(1)
    X = torch.tensor(X[:, :6], dtype=torch.float32)
    problems = [Problem(linear(6, 4, dtype=t), X.to(t), torch.tensor(y), 0.3) for t in (torch.float32, torch.float64)]
    for problem in problems:
        fit_linear(problem)
    torch.testing.assert_close(problems[0].theta, problems[1].theta.float(), rtol=1e-6, atol=1e-7)


def test_what_is_no_regression_keeps_the_fit_it_has():
    """Fewer outputs than the classes need, constants added behind them, penalties that differ between the classes."""
    X, y = draw(1)
    X, y = torch.tensor(X[:, :6]), torch.tensor(y)
    few = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 4).requires_grad_(False)).double()
    shifted = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4).requires_grad_(False)).double()
    uneven = Problem(nn.Linear(6, 4).double(), X, y, 0.3)
    uneven.penalty[:7] = 0.5
    for problem in (Problem(few, X, y, 0.3), Problem(shifted, X, y, 0.3), uneven):
        before = problem.theta.clone()
        fit_linear(problem)
        assert Regression.of(problem) is None and torch.equal(problem.theta, before)


def test_a_symmetric_predictor_is_fitted_once(monkeypatch):
    """What its bag finds is what its model predicts by."""
    calls, once = [], newton.minimise
    monkeypatch.setattr(newton, "minimise", lambda *given: calls.append(given) or once(*given))
    X, y = draw(1)
    for estimator in (None, LogisticRegression()):
        clf = FullConformalClassifier(estimator, method="symmetric").fit(X[:, :6], y)
        assert len(calls) == 1
        calls.clear()
        engine = clf._fitted
        theta = engine.regression.units.weights(engine.bag.base.theta)
        W = engine.problem.theta.view(4, 7)
        torch.testing.assert_close((W[1:] - W[0]).T, theta, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("C", [2, 4])
def test_scikit_learns_tolerance_and_solver_do_not_matter(C):
    X, y = draw(1, n=80, C=C)
    X, objects, names = X[:60, :-1], X[60:, :-1], np.array(list("dbca"))[y[:60]]
    p = [
        FullConformalClassifier(LogisticRegression(C=0.7, **options), method="influence")
        .fit(X, names)
        .predict_p(objects)
        for options in ({"max_iter": 1}, {"tol": 1e-12, "max_iter": 10_000}, {"solver": "newton-cholesky"})
    ]
    assert np.array_equal(p[0], p[1]) and np.array_equal(p[0], p[2])


class Counted(LogisticRegression):
    """A subclass, which may fit anything, and counts how often."""

    fits = 0

    def fit(self, X, y, sample_weight=None):
        type(self).fits += 1
        return super().fit(X, y, sample_weight)


def test_what_need_not_have_one_minimum_is_fitted_by_scikit_learn():
    assert read(LogisticRegression(), (3,), 4) is not None
    assert read(LogisticRegression(C=np.inf), (3,), 4) is None
    assert read(LogisticRegression(solver="liblinear", fit_intercept=False), (3,), 2) is None
    assert read(LogisticRegression(), (3, 8), 4) is None and read(Counted(), (3,), 4) is None
    X, y = draw(2)
    Counted.fits = 0
    own = FullConformalClassifier(Counted(), method="influence").fit(X[:, :-1], y)
    assert Counted.fits == 1
    plain = FullConformalClassifier(LogisticRegression(), method="influence").fit(X[:, :-1], y)
    assert np.array_equal(own.predict_p(X[:, :-1]), plain.predict_p(X[:, :-1]))


def test_bad_parameters_are_scikit_learns_to_refuse():
    X, y = draw(2)
    with pytest.raises(InvalidParameterError, match="'C' parameter"):
        FullConformalClassifier(LogisticRegression(C=-1.0), method="influence").fit(X, y)
    with pytest.raises(ValueError, match="dual"):
        FullConformalClassifier(LogisticRegression(dual=True), method="influence").fit(X, y)


@pytest.mark.parametrize("method", ["symmetric", "exact"])
@pytest.mark.parametrize(
    "unit, offset, strength", [(2.0**20, 0.0, 1.0), (1.0, 2.0**20, 100.0), (2.0**10, 2.0**20, 1.0)]
)
def test_the_units_of_features_do_not_matter(method, unit, offset, strength):
    """Columns of size 1e6, or that far from zero: the same p-values as in units of one, with the same penalty in those units.

    The classes are separable: a penalty of 1e-12 of the features' squares alone holds the weights, and the minimum is far out. A
    column far from zero is nearly the intercept's.
    """
    rng = np.random.default_rng(0)
    # Of few binary digits, so that moving and scaling them is exact.
    X = np.round(rng.normal(size=(44, 5)) * 2**8) / 2**8
    y = (X.sum(1) > 0).astype(int)
    plain = FullConformalClassifier(LogisticRegression(C=strength * unit**2), method=method).fit(X[:40], y[:40])
    moved = FullConformalClassifier(LogisticRegression(C=strength), method=method).fit(X[:40] * unit + offset, y[:40])
    np.testing.assert_array_equal(moved.predict_p(X[40:] * unit + offset), plain.predict_p(X[40:]))
    np.testing.assert_allclose(moved.predict_proba(X[40:] * unit + offset), plain.predict_proba(X[40:]), atol=1e-4)


def test_weights_pass_through_units_and_back():
    rng = np.random.default_rng(0)
    a = torch.tensor(np.c_[rng.normal(size=(9, 3)) * [1, 1e3, 1e-5] + [0, 1e6, 3], np.ones(9)])
    theta = torch.tensor(rng.normal(size=(4, 2)))
    for penalty in (torch.tensor([1.0, 1, 1, 0]), torch.ones(4)):
        units = Units.of(a, penalty)
        torch.testing.assert_close(units.weights(units.start(theta)), theta, rtol=1e-9, atol=1e-9)
        # The logits are those of the points as given, to what is left of 1e6 times a weight.
        torch.testing.assert_close(units.points(a) @ units.start(theta), a @ theta, rtol=1e-12, atol=1e-8)
        assert bool((units.centre[-1] == 0).all()) and (bool(penalty[-1]) == (not units.centre.any()))


@pytest.mark.parametrize("C", [2, 4])
@pytest.mark.parametrize("far", [1.0, 40.0, 300.0])
def test_derivatives_keep_their_digits_where_classes_are_sure(C, far):
    """π − 1 of a sure point, and π(1 − π): as exact as sums of positive numbers are, however small."""
    rng = np.random.default_rng(C)
    z, y = far * rng.normal(size=(50, C - 1)), rng.integers(C, size=50)
    f = np.c_[np.zeros(50), z]
    r, S = (
        part[..., 0].numpy()
        for part in (
            residual(torch.tensor(z)[:, :, None], torch.tensor(y)[:, None]),
            second(torch.tensor(z)[:, :, None]),
        )
    )
    i, j = np.triu_indices(C - 1)
    for at in range(50):
        # exp of numbers up to 1,000 has an error of as many units.
        pi = [1 / sum(np.exp(f[at] - own)) if (f[at] - own).max() < 700 else 0.0 for own in f[at]]
        rest = [sum(pi[:k] + pi[k + 1 :]) for k in range(C)]
        np.testing.assert_allclose(
            r[at], [-rest[k] if k == y[at] else pi[k] for k in range(1, C)], rtol=1e-12, atol=1e-290
        )
        literal = [pi[a] * rest[a] if a == b else -pi[a] * pi[b] for a, b in zip(i + 1, j + 1, strict=True)]
        np.testing.assert_allclose(S[at], literal, rtol=1e-12, atol=1e-290)


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no precision beyond float64 here")
@pytest.mark.parametrize("strength", [1.0, 100.0])
@pytest.mark.parametrize("method, scheme", [("symmetric", "ordinary"), ("exact", "deleted")])
def test_weights_that_only_a_tiny_penalty_holds(method, scheme, strength):
    """Columns of 1e6 that separate the classes: penalties of 1e-12 and 1e-14 of their squares, and p-values of 80-bit refits."""
    rng = np.random.default_rng(1)
    X = np.round(rng.normal(size=(18, 3)) * 2**8) / 2**8
    y = (X.sum(1) > 0).astype(int)
    clf = FullConformalClassifier(LogisticRegression(C=strength), method=method, scheme=scheme)
    p = clf.fit(X[:16] * 2.0**20, y[:16]).predict_p(X[16:] * 2.0**20)
    wide = np.c_[X, np.ones(18)].astype(np.longdouble)
    penalty = np.array([1, 1, 1, 0], dtype=np.longdouble) / strength / 2**40
    for at, label in itertools.product((0, 1), (0, 1)):
        points, sign = wide[[*range(16), 16 + at]], 2 * np.append(y[:16], label) - 1
        whole = long_fit(points, sign, penalty)
        fits = [whole] * 17
        if scheme == "deleted":
            fits = [long_fit(np.delete(points, i, 0), np.delete(sign, i), penalty, whole) for i in range(17)]
        alpha = np.array([-sign[i] * (points[i] @ theta) for i, theta in enumerate(fits)])
        assert np.abs(alpha[:-1] - alpha[-1]).min() > 1e-4  # no ties, which bounds may widen
        assert p[at, label] == (alpha >= alpha[-1]).mean()


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_twins_stay_tied_along_a_direction_that_only_a_tiny_penalty_holds(method):
    """An object that is a training point has its twin's score: it is never less conforming than all points."""
    rng = np.random.default_rng(2)
    X = np.round(rng.normal(size=(16, 3)) * 2**8) * 2.0**12
    y = (X.sum(1) > 0).astype(int)
    X[:, 2] = X[:, 1]  # their difference is held by the penalty alone
    p = FullConformalClassifier(LogisticRegression(C=100.0), method=method).fit(X, y).predict_p(X)
    assert (p[np.arange(16), y] >= 2 / 17).all()


def long_fit(X, sign, penalty, theta=0.0):
    """Minimiser (d,) of Σ log(1 + exp(−sign Xθ)) + ½ Σ penalty θ², by Newton's method in 80 bits."""
    theta = theta + np.zeros(X.shape[1], dtype=np.longdouble)

    def value(theta):
        return np.logaddexp(0, -sign * (X @ theta)).sum() + (penalty * theta**2).sum() / 2

    for _ in range(200):
        e = np.exp(-np.abs(margin := sign * (X @ theta)))
        slope = penalty * theta - X.T @ (sign * np.where(margin > 0, e, 1) / (1 + e))
        step = long_solve((X.T * (e / (1 + e) ** 2)) @ X + np.diag(penalty), slope)
        length = 1.0
        while value(theta - length * step) > value(theta) and length > 1e-3:
            length /= 2
        theta = theta - length * step
        if np.abs(X @ step).max() < 1e-9:
            return theta
    raise AssertionError("no convergence")


def long_solve(H, g):
    """H⁻¹g by elimination, which NumPy has for float64 only."""
    scale = np.sqrt(np.diag(H))
    A = np.c_[H / scale / scale[:, None], g / scale]
    for k in range(len(g)):
        A[k] /= A[k, k]
        rest = np.arange(len(g)) != k
        A[rest] -= A[rest, k, None] * A[k]
    return A[:, -1] / scale
