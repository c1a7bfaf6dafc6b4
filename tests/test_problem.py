"""Gradients, Jacobians, flat parameters: against autograd, for every kind of model."""

import pytest
import torch
from cases import MODELS, draw
from torch import nn
from torch.func import grad, jacrev

from fullconformal.losses import SOFTMAX
from fullconformal.models import linear, mlp
from fullconformal.problem import Problem, contract, flat, in_contrasts, squared_norms
from fullconformal.problem.contrasts import contrasts
from fullconformal.runtime.numerics import full_precision

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_jacobians_equal_autograd(name):
    model, X, y, _ = draw(name, 0)
    problem = Problem(model, X, y, 0.3, chunk=5)
    theta = problem.theta
    f, rows = problem.jacobian(X)
    J = jacrev(lambda t: problem.logits_at(t, X))(theta)
    G = torch.stack(
        [
            grad(lambda t, i=i: SOFTMAX.value(problem.logits_at(t, X[i : i + 1]), y[i : i + 1])[0])(theta)
            for i in range(len(y))
        ]
    )
    tol = 1e3 * EPS * (1 + J.abs().max())
    assert torch.equal(f, model(X).detach()) or (f - model(X)).abs().max() < tol
    assert (flat(rows) - J).abs().max() < tol
    assert (flat(problem.gradients(X, y)) - G).abs().max() < tol
    assert (flat(contract(rows, SOFTMAX.residual(f, y))) - G).abs().max() < tol
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
    assert dense == {"binary": 2, "logistic": 1, "mlp": 3, "cnn": 2, "frozen": 3, "odd": 3, "residual": 0, "resnet": 0}
    linear = {name for name in MODELS if Problem(*draw(name, 0)[:3]).is_linear}
    assert linear == {"binary", "logistic"}


def test_gauge_directions_are_those_without_penalty():
    model, X, y, _ = draw("logistic", 0)
    assert Problem(model, X, y, 1.0).gauge().numel() == 0
    assert Problem(model, X, y, {"0.weight": 1.0}).gauge().shape == (1, 5)  # the intercepts
    assert Problem(model, X, y, 0.0).gauge().shape == (7, 5)  # every column
    model, X, y, _ = draw("binary", 0)
    assert Problem(model, X, y, 0.0).gauge().numel() == 0


CONVOLUTIONS = {
    "plain": (nn.Conv2d(2, 4, 3), True),
    "padded, strided": (nn.Conv2d(2, 4, 3, padding=1, stride=2), True),
    "dilated, no bias": (nn.Conv2d(2, 4, (2, 3), dilation=(1, 2), padding=(0, 1), bias=False), True),
    "grouped": (nn.Conv2d(2, 4, 3, groups=2), False),
    "padded by name": (nn.Conv2d(2, 4, 3, padding="same"), False),
    "reflected": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_has_the_rows_of_autograd(name):
    """Plain ones as patches times derivatives, the others by torch.func; an activation in place and a frozen layer between."""
    conv, plain = CONVOLUTIONS[name]
    torch.manual_seed(0)
    frozen = nn.Conv2d(4, 3, 1).requires_grad_(False)
    model = nn.Sequential(
        conv, nn.ReLU(inplace=True), frozen, nn.Conv2d(3, 3, 2), nn.Flatten(), nn.LazyLinear(3)
    ).double()
    X, y = torch.randn(7, 2, 6, 6).double(), torch.randint(3, (7,))
    model(X)
    problem = Problem(model.eval(), X, y, chunk=4)
    assert (len(problem.convolutions) == 2) is plain
    J = jacrev(lambda t: problem.logits_at(t, X))(problem.theta)
    tol = 1e3 * EPS * (1 + J.abs().max())
    logits, rows = problem.jacobian(X)
    assert (flat(rows) - J).abs().max() < tol
    G = torch.einsum("kc,kcp->kp", SOFTMAX.residual(logits, y), J)
    assert (flat(problem.gradients(X, y)) - G).abs().max() < tol


def test_losses_and_residuals_keep_their_digits_where_the_model_is_sure():
    """With gaps up to 80 the loss is e^−gap: float32 must give it to a few units of its precision times the logits' size."""
    gap = torch.linspace(0.5, 80, 200).double()
    logits = torch.stack([gap, -gap / 7, torch.zeros_like(gap)], 1)
    exact = torch.log1p(torch.exp(-gap * 8 / 7) + torch.exp(-gap))
    y = torch.zeros(200, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        # e^−gap of a gap rounded to eps·gap: a relative error of eps·gap, and a few roundings more.
        tol = (gap + 10) * 2 * torch.finfo(dtype).eps
        got = SOFTMAX.value(logits.to(dtype), y).double()
        assert ((got - exact).abs() / exact < tol + EPS * (gap + 10)).all()
        r = SOFTMAX.residual(logits.to(dtype), y).double()
        assert ((r[:, 0] + torch.expm1(-exact).neg()).abs() / exact < tol + EPS * (gap + 10)).all()
        assert torch.equal(SOFTMAX.candidates(logits.to(dtype))[:, 0].double(), got)
        for label in (1, 2):  # losses up to 91
            every, own = (
                SOFTMAX.candidates(logits.to(dtype))[:, label],
                SOFTMAX.value(logits.to(dtype), torch.full_like(y, label)),
            )
            assert ((own - every).abs() < 4 * torch.finfo(dtype).eps * (gap + 10)).all()


@pytest.mark.parametrize("allowed", [False, True])
def test_no_tf32_where_scores_are_made(allowed):
    """Whatever the user allows, which stands again afterwards."""
    flags = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = allowed
        with full_precision():
            assert not any(flag.allow_tf32 for flag in flags)
        assert all(flag.allow_tf32 == allowed for flag in flags)
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


# Contrasts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_classes", [3, 4, 10])
def test_contrasts_are_orthonormal_and_blind_to_what_all_classes_share(n_classes):
    B = contrasts(n_classes)
    assert B.shape == (n_classes, n_classes - 1)
    eps = n_classes * torch.finfo(torch.float64).eps
    torch.testing.assert_close(B.T @ B, torch.eye(n_classes - 1, dtype=torch.float64), rtol=0, atol=eps)
    torch.testing.assert_close(B.sum(0), torch.zeros(n_classes - 1, dtype=torch.float64), rtol=0, atol=eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("penalties", [{"0.weight": 0.7}, {"0.weight": 0.7, "0.bias": 2.0}])
def test_a_softmax_regression_in_contrasts_has_the_same_logits_and_influences(bias, penalties):
    """At any weights, centred or not: what the classes share is in no gradient."""
    torch.manual_seed(0)
    X, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 4
    problem = Problem(linear(3, 4, bias, torch.float64), X, y, penalties)
    other = in_contrasts(problem)
    assert other.p == 3 * (3 + bias) and problem.p == 4 * (3 + bias)
    shift = problem.logits(X) - other.logits(X)
    torch.testing.assert_close(shift, shift[:, :1].expand(-1, 4), rtol=0, atol=1e-13)  # softmax does not see it
    kernels = []
    for one in (problem, other):
        G = flat(one.gradients(X, y))
        H = torch.diag(one.penalty)
        for x in X:
            logits, J = one.jacobian(x[None])
            pi = torch.softmax(logits[0], 0)
            H = H + flat(J)[0].T @ (torch.diag(pi) - torch.outer(pi, pi)) @ flat(J)[0]
        kernels.append(G @ torch.linalg.pinv(H, hermitian=True) @ G.T)
    torch.testing.assert_close(*kernels, rtol=0, atol=1e-12 * float(kernels[0].abs().max()))


@pytest.mark.parametrize("model", [mlp(3, (5,), 4), linear(3, 2), nn.Sequential(nn.Flatten(), nn.Linear(3, 4))])
def test_other_models_are_left_as_they_are(model):
    problem = Problem(model.eval(), torch.randn(5, 3), torch.arange(5) % 2, 1.0)
    assert in_contrasts(problem) is problem


def test_what_all_classes_share_does_not_cost_the_contrasts_digits():
    """Weights of 1e4 that cancel, float32: the contrasts are those of the weights as they are."""
    torch.manual_seed(0)
    model = linear(3, 4)
    with torch.no_grad():
        model[0].weight += 1e4
    problem = in_contrasts(Problem(model, torch.randn(5, 3), torch.arange(5) % 4, 1.0))
    expected = contrasts(4).T @ model[0].weight.detach().double()
    found = problem.tail[0].linear.weight.detach().double()
    assert (found - expected).abs().max() <= torch.finfo(torch.float32).eps * expected.abs().max()


def test_classes_that_are_penalised_differently_are_left_as_they_are():
    problem = Problem(linear(3, 4), torch.randn(5, 3), torch.arange(5) % 4, 1.0)
    problem.penalty[0] = 2.0
    assert in_contrasts(problem) is problem
