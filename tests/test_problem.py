"""Gradients, Jacobians, flat parameters: against autograd, for every kind of model."""

import pytest
import torch
from cases import MODELS, draw
from torch import nn
from torch.backends.cuda import matmul
from torch.func import grad, jacrev

from fullconformal.losses import SOFTMAX
from fullconformal.problem import Problem, flat, squared_norms
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
    assert (torch.einsum("kcp,kc->kp", flat(rows), SOFTMAX.residual(f, y)) - G).abs().max() < tol
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
    "plain": nn.Conv2d(2, 4, 3),
    "padded, strided": nn.Conv2d(2, 4, 3, padding=1, stride=2),
    "dilated, no bias": nn.Conv2d(2, 4, (2, 3), dilation=(1, 2), padding=(0, 1), bias=False),
    "grouped": nn.Conv2d(2, 4, 3, groups=2),
    "padded by name": nn.Conv2d(2, 4, 3, padding="same"),
    "reflected": nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_has_the_rows_of_autograd(name):
    """With an activation in place and a frozen layer between."""
    torch.manual_seed(0)
    frozen = nn.Conv2d(4, 3, 1).requires_grad_(False)
    model = nn.Sequential(
        CONVOLUTIONS[name], nn.ReLU(inplace=True), frozen, nn.Conv2d(3, 3, 2), nn.Flatten(), nn.LazyLinear(3)
    ).double()
    X, y = torch.randn(7, 2, 6, 6).double(), torch.randint(3, (7,))
    model(X)
    problem = Problem(model.eval(), X, y, chunk=4)
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


@pytest.mark.parametrize("asked", ["nothing", "highest", "high", "medium", "older names"])
def test_products_have_all_their_digits_where_scores_are_made(asked):
    """Whatever the user asked for, which stands again afterwards and which torch still tells."""
    cudnn, mkldnn, matmul = torch.backends.cudnn, torch.backends.mkldnn, torch.backends.cuda.matmul
    places = [matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    untouched = [place.fp32_precision for place in places]
    try:
        if asked == "older names":
            matmul.allow_tf32 = cudnn.allow_tf32 = True
        elif asked != "nothing":
            torch.set_float32_matmul_precision(asked)

        def told():
            return torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32

        before = told(), [place.fp32_precision for place in places]
        with full_precision():
            assert not {place.fp32_precision for place in places} & {"tf32", "bf16"}
            with cudnn.flags(enabled=False):  # as a module may ask for
                pass
        assert (told(), [place.fp32_precision for place in places]) == before
    finally:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
        for place, value in zip(places, untouched, strict=True):
            place.fp32_precision = value


def test_all_layers_of_a_pass_have_full_precision():
    """Losses of the training points come of traces, those of candidates of logits: less precise products in one of them would part ties."""
    seen, net = [], nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].register_forward_hook(lambda *_: seen.append(matmul.fp32_precision))
    problem = Problem(net, torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    for run in (problem.trace, problem.logits):
        seen.clear()
        run(problem.X)
        assert set(seen) == {"ieee"}
