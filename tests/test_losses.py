"""Losses against derivatives by autograd; and a second loss through problem, curvatures and prepared points, none of which names one."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from fullconformal.curvature import EKFAC, GGN, KFAC, Dual, Hessian
from fullconformal.influence.prepared import prepare
from fullconformal.losses import LOSSES, Squared
from fullconformal.models import linear, mlp
from fullconformal.problem import Problem, flat

ALL = {**LOSSES, "squared": Squared()}


def outputs(name, k=7, C=4, seed=0, scale=3.0):
    """Outputs (k, C) and targets, float64."""
    generator = torch.Generator().manual_seed(seed)
    f = scale * torch.randn(k, C, dtype=torch.float64, generator=generator)
    if name == "squared":
        return f, torch.randn(k, C, dtype=torch.float64, generator=generator)
    return f, torch.randint(C, (k,), generator=generator)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("C", [2, 4])
def test_derivatives_are_those_of_the_value(name, C):
    loss, (f, y) = ALL[name], outputs(name, C=C)
    r, S, B = loss.residual(f, y), loss.curvature(f), loss.root(f)
    for k in range(len(f)):

        def value(row, at=k):
            return loss.value(row[None], y[at : at + 1])[0]

        # Derivatives of order one, by autograd: a few dozen roundings.
        np.testing.assert_allclose(r[k], jacobian(value, f[k]), atol=1e-13)
        np.testing.assert_allclose(S[k], hessian(value, f[k]), atol=1e-13)
        np.testing.assert_allclose(B[k] @ B[k].T, S[k], atol=1e-13)
    np.testing.assert_allclose(loss.summed_curvature(f), S.sum(0), atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("C", "o"), [(2, 1), (4, 3), (4, 4), (40, 3)])
def test_the_packed_curvature_is_the_upper_triangle(name, C, o):
    """Of few classes by pairs, of 40 (780 pairs) by the covariance, also where the model is sure."""
    for scale in (1.0, 30.0):
        loss, (f, _) = ALL[name], outputs(name, C=C, scale=scale)
        T = torch.randn(C, o, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        i, j = torch.triu_indices(o, o)
        wanted = (T.T @ loss.curvature(f) @ T)[:, i, j].T
        np.testing.assert_allclose(loss.packed_curvature(f, T), wanted, atol=1e-12 * float(T.abs().max()) ** 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("C", [2, 4, 70])
def test_candidates_are_the_values_at_every_label(name, C):
    loss, (f, _) = LOSSES[name], outputs(name, C=C)
    J = torch.randn(len(f), C, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses, gradients = loss.candidates(f), loss.candidate_gradients(J, f)
    for label in range(C):
        y = torch.full((len(f),), label)
        np.testing.assert_allclose(losses[:, label], loss.value(f, y), rtol=1e-13)
        r = loss.residual(f, y)
        np.testing.assert_allclose(loss.mean(f) - torch.nn.functional.one_hot(y, C), r, atol=1e-15 * 8)
        np.testing.assert_allclose(gradients[:, label], (J.mT @ r[:, :, None])[..., 0], atol=1e-13)
    np.testing.assert_allclose(loss.log_proba(f).exp().sum(1), 1.0, rtol=1e-13)


def test_one_jacobian_for_all_points_gives_the_same_gradients():
    loss, (f, _) = LOSSES["softmax"], outputs("softmax")
    one = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shared, written = one.expand(len(f), -1, -1), one.repeat(len(f), 1, 1)
    np.testing.assert_allclose(loss.candidate_gradients(shared, f), loss.candidate_gradients(written, f), atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_leverages_are_the_ratio_of_two_quadratic_forms(name):
    """rᵀAr/rᵀS⁺r, for A the identity: s = |r|²."""
    loss, (f, y) = ALL[name], outputs(name, scale=1.0)
    r, S = loss.residual(f, y), loss.curvature(f)
    wanted = (r**2).sum(1) / (r[:, None] @ torch.linalg.pinv(S) @ r[:, :, None])[:, 0, 0]
    np.testing.assert_allclose(loss.leverage(loss.value(f, y), (r**2).sum(1)), wanted, rtol=1e-9)


def test_a_loss_of_numbers_has_no_labels():
    for ask in (Squared().mean, Squared().candidates, Squared().log_proba):
        with pytest.raises(TypeError, match="Squared is no loss of labels"):
            ask(torch.zeros(2, 3))


# A second loss through the rooms -----------------------------------------------------------------------------------------


def regression(model):
    torch.manual_seed(0)
    model = model.double().eval()
    X, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    return Problem(model, X, y, 0.7, loss=Squared())


@pytest.mark.parametrize("model", [lambda: linear(5, 3), lambda: mlp(5, (4,), 3, "tanh")], ids=["linear", "network"])
def test_the_squared_loss_needs_no_other_room_to_change(model):
    problem = regression(model())
    F = problem.value
    np.testing.assert_allclose(problem.gradient(), jacobian(F, problem.theta), atol=1e-12)
    np.testing.assert_allclose(Hessian().matrix(problem), hessian(F, problem.theta), atol=1e-11)
    J = flat(problem.jacobian(problem.X)[1]).flatten(0, 1)
    ggn = J.T @ J + torch.diag(problem.penalty)
    np.testing.assert_allclose(GGN().matrix(problem), ggn, atol=1e-12)
    g = flat(problem.gradients(problem.X, problem.y))
    wanted = (g * torch.linalg.solve(ggn, g.T).T).sum(1)
    for curvature in (GGN(), Dual()):
        prepared = prepare(problem, curvature.factor(problem), 2**28)
        np.testing.assert_allclose(prepared.self_influence, wanted, rtol=1e-9)
        np.testing.assert_allclose(prepared.loss, problem.loss.value(problem.logits(problem.X), problem.y))
    for curvature in (KFAC(), EKFAC()):
        assert bool((prepare(problem, curvature.factor(problem), 2**28).self_influence > 0).all())
