"""Gradients, Jacobians, flat parameters: against autograd, for every kind of model."""

import pytest
import torch
from cases import MODELS, draw
from torch.func import grad, jacrev

from fullconformal.problem import Problem, contract, flat, losses, residuals, squared_norms

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_jacobians_equal_autograd(name):
    model, X, y, _ = draw(name, 0)
    problem = Problem(model, X, y, 0.3, chunk=5)
    theta = problem.theta
    f, rows = problem.jacobian(X)
    J = jacrev(lambda t: problem.logits_at(t, X))(theta)
    G = torch.stack(
        [grad(lambda t, i=i: losses(problem.logits_at(t, X[i : i + 1]), y[i : i + 1])[0])(theta) for i in range(len(y))]
    )
    tol = 1e3 * EPS * (1 + J.abs().max())
    assert torch.equal(f, model(X).detach()) or (f - model(X)).abs().max() < tol
    assert (flat(rows) - J).abs().max() < tol
    assert (flat(problem.gradients(X, y)) - G).abs().max() < tol
    assert (flat(contract(rows, residuals(f, y))) - G).abs().max() < tol
    assert (squared_norms(problem.gradients(X, y)) - (G**2).sum(1)).abs().max() < tol * (1 + (G**2).sum(1).max())
    assert (problem.gradient() - grad(problem.value)(theta)).abs().max() < 10 * tol * len(y)


@pytest.mark.parametrize("name", MODELS)
def test_pack_and_unpack_are_inverse(name):
    model, X, y, _ = draw(name, 1)
    problem = Problem(model, X, y)
    theta = torch.randn(problem.p, dtype=torch.float64)
    assert torch.equal(problem.pack(problem.unpack(theta)), theta)
    problem.assign(theta)
    assert torch.equal(problem.theta, theta)
    assert torch.equal(model(X), problem.logits_at(theta, X))


def test_what_is_read_as_dense_layers():
    dense = {name: len(Problem(*draw(name, 0)[:3]).tail) for name in MODELS}
    assert dense == {"binary": 2, "logistic": 1, "mlp": 3, "cnn": 2, "frozen": 3, "odd": 3, "residual": 0}
    linear = {name for name in MODELS if Problem(*draw(name, 0)[:3]).is_linear}
    assert linear == {"binary", "logistic"}


def test_gauge_directions_are_those_without_penalty():
    model, X, y, _ = draw("logistic", 0)
    assert Problem(model, X, y, 1.0).gauge().numel() == 0
    assert Problem(model, X, y, {"0.weight": 1.0}).gauge().shape == (1, 5)  # the intercepts
    assert Problem(model, X, y, 0.0).gauge().shape == (7, 5)  # every column
    model, X, y, _ = draw("binary", 0)
    assert Problem(model, X, y, 0.0).gauge().numel() == 0
