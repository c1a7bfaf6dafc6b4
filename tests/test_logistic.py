"""Logistic regression by Newton's method without its matrix, against a literal Newton; and which of scikit-learn's is read, not fitted."""

import numpy as np
import oracles_convex as oracle
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils._param_validation import InvalidParameterError

from fullconformal import FullConformalClassifier
from fullconformal.losses.base import NotFinite
from fullconformal.methods import fitting
from fullconformal.models import linear
from fullconformal.models.adapters import read
from fullconformal.models.logistic import fit_softmax
from fullconformal.problem import Problem, in_contrasts


def draw(seed, n=60, d=6, C=4, scale=1.0):
    rng = np.random.default_rng(seed)
    X = np.hstack([scale * rng.standard_normal((n, d)), np.ones((n, 1))])
    y = np.append(np.arange(C), (X[:, :C] + rng.standard_normal((n, C))).argmax(1)[C:])
    return X, y


@pytest.mark.parametrize("weight", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("intercept", [0.0, 1.0])
@pytest.mark.parametrize("scale", [0.1, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_minimum_is_that_of_a_literal_newton(weight, intercept, scale, seed):
    X, y = draw(seed, scale=scale)
    penalty = np.append(np.full(6, weight), intercept)
    start = np.zeros((4, 7)) if seed else np.random.default_rng(9).standard_normal((4, 7)) / scale
    tol = 1e-9 * scale
    W, size = fit_softmax(X, y, penalty, start, tol)
    g = oracle.gradient(W.T, X, y, 4, penalty)
    rounding = 1e-15 * (np.abs(X).sum() + np.abs(penalty * W).sum())
    assert size <= tol and np.abs(g).max() <= tol + rounding
    theta = oracle.fit(X, y, 4, penalty)
    H = oracle.hessian(theta, X, y, 4, penalty)
    # |θ − θ*| ≤ |𝓗⁻¹∇|, to first order; logits relative to their mean are free of the gauge.
    far = np.linalg.norm(g) / np.linalg.eigvalsh(H)[0]
    gap = X @ (W.T - theta)
    assert np.abs(gap - gap.mean(1, keepdims=True)).max() <= 2 * far * np.linalg.norm(X, axis=1).max() + 1e-9


def test_it_stops_and_says_so_where_a_block_is_singular():
    X, y = draw(0)
    X[:, 2] = 0.0
    W, size = fit_softmax(X, y, np.zeros(7), np.zeros((4, 7)), 1e-9)
    assert size == np.abs(oracle.gradient(W.T, X, y, 4, np.zeros(7))).max() > 1e-9


@pytest.mark.parametrize("bias", [True, False])
def test_a_problem_in_contrasts_is_fitted_without_its_matrix_too(bias, monkeypatch):
    """As the refits of an audit are."""
    monkeypatch.setattr(fitting, "GGN", None)
    X, y = (torch.as_tensor(part) for part in draw(0))
    plain = Problem(linear(7, 4, bias, torch.float64), X, y, {"0.weight": 0.3})
    other = in_contrasts(plain)
    for problem in (plain, other):
        fitting.minimise(problem)
        assert float(problem.gradient().abs().max()) <= 1e-8
    gap = plain.logits(X) - other.logits(X)
    assert float((gap - gap.mean(1, keepdim=True)).abs().max()) < 1e-7


def test_what_overflows_is_refused():
    X, y = draw(0)
    X[3, 1] = np.inf
    with pytest.raises(NotFinite), np.errstate(all="ignore"):
        fit_softmax(X, y, np.ones(7), np.ones((4, 7)), 1e-9)


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
