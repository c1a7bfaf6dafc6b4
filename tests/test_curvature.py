"""Hessian and GGN against torch.func and curvlinops; factors, damping and the gauge, of every curvature."""

import copy

import pytest
import torch
from cases import CURVATURES, DENSE, MODELS, draw
from curvlinops import GGNLinearOperator, HessianLinearOperator
from oracles import Oracle
from torch import nn

from fullconformal.curvature import GGN, Hessian
from fullconformal.curvature.base import CurvatureError, smallest_eigenvalue
from fullconformal.curvature.dense import DenseFactor, factorise, inverse_triangular
from fullconformal.curvature.structured import add_gram, linear_curvature
from fullconformal.models import linear
from fullconformal.problem import Problem, flat


def order(problem, oracle):
    """Positions of the flat vector's entries in the order of named parameters."""
    return problem.pack(oracle.unpack(torch.arange(problem.p, dtype=torch.float64))).long()


@pytest.mark.parametrize("curvature", DENSE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_matrices_equal_torch_func(name, curvature, seed):
    model, X, y, _ = draw(name, seed)
    problem, oracle = Problem(model, X, y, 0.7, chunk=5), Oracle(model, X, y, 0.7)
    at = order(problem, oracle)
    expected = len(y) * getattr(oracle, curvature)()
    assert (CURVATURES[curvature]().matrix(problem) - expected[at][:, at]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "residual"])
def test_matrices_equal_curvlinops(name):
    model, X, y, _ = draw(name, 3)
    params = [q for q in model.parameters() if q.requires_grad]
    problem = Problem(model, X, y, 0.0)
    at = order(problem, Oracle(model, X, y, 0.0))
    eye = torch.eye(problem.p, dtype=torch.float64)
    for ours, theirs in ((Hessian, HessianLinearOperator), (GGN, GGNLinearOperator)):
        operator = theirs(model, nn.CrossEntropyLoss(reduction="sum"), params, [(X, y)])
        expected = (operator @ eye).detach()
        assert (ours().matrix(problem) - expected[at][:, at]).abs().max() < 1e-10


def test_hessian_and_ggn_agree_for_linear_models():
    model, X, y, _ = draw("logistic", 0)
    problem = Problem(model, X, y, 0.1)
    assert (Hessian().matrix(problem) - GGN().matrix(problem)).abs().max() < 1e-12


@pytest.mark.parametrize("curvature", DENSE)
@pytest.mark.parametrize("name", MODELS)
def test_factor_solves_the_damped_system(name, curvature):
    model, X, y, _ = draw(name, 4)
    problem = Problem(model, X, y, 0.2)
    for damping in (None, 0.0, 0.5):
        factor = CURVATURES[curvature](damping).factor(problem)
        H = CURVATURES[curvature]().matrix(problem) + problem.n * factor.damping * torch.eye(
            problem.p, dtype=torch.float64
        )
        V = flat(problem.gradients(X, y))
        condition = torch.linalg.cond(H)
        assert (factor.solve(V) @ H - V).abs().max() < 1e-13 * condition * problem.p
        smallest = torch.linalg.eigvalsh(H)[0]
        assert factor.positive_definite == bool(smallest > 0)
        if factor.positive_definite:
            assert factor.floor <= smallest + 1e-9
            assert (factor.back(factor.half(V)) - factor.solve(V)).abs().max() == 0
            assert smallest * (1 - 1e-9) <= smallest_eigenvalue(factor.solve, problem.theta) <= 3 * smallest
        else:
            assert abs(factor.smallest_eigenvalue - smallest) < 1e-9


@pytest.mark.parametrize("curvature", [name for name in CURVATURES if name != "hessian"])  # which may be indefinite
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("damping", [None, 0.3])
def test_every_factor_is_a_symmetric_inverse(name, curvature, damping):
    """Its own matrix, from the identity: symmetric, positive, at least the floor; halves, influences and solves agree."""
    model, X, y, _ = draw(name, 4)
    problem = Problem(model, X, y, 2.0)
    factor = CURVATURES[curvature](damping).factor(problem)
    inverse = factor.solve(torch.eye(problem.p, dtype=torch.float64))
    values = 1 / torch.linalg.eigvalsh((inverse + inverse.T) / 2).flip(0)
    tol = 1e-13 * problem.p * values[-1] / values[0]
    assert (inverse - inverse.T).abs().max() < tol * inverse.abs().max()
    assert factor.positive_definite and values[0] >= factor.floor * (1 - tol)
    assert factor.floor == pytest.approx(2.0 + problem.n * (damping or 0.0))
    assert factor.damping == (damping or 0.0)
    assert factor.nbytes > 0
    G = flat(problem.gradients(X, y))
    solved = factor.solve(G)
    assert (solved - G @ inverse).abs().max() < tol * solved.abs().max()
    influence, kept = factor.influence(G)
    assert (influence - (solved * G).sum(1)).abs().max() < tol * influence.max()
    assert (factor.back(kept) - solved).abs().max() < tol * solved.abs().max()
    assert (factor.half(G) @ factor.half(G).T - solved @ G.T).abs().max() < tol * influence.max()


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_large_damping_makes_the_inverse_a_multiple_of_the_identity(name, curvature):
    model, X, y, _ = draw(name, 0)
    problem = Problem(model, X, y, 0.2)
    V = torch.randn(3, problem.p, dtype=torch.float64)
    factor, small = CURVATURES[curvature](1e8).factor(problem), CURVATURES[curvature](1.0).factor(problem)
    eye = torch.eye(problem.p, dtype=torch.float64)
    H = torch.linalg.inv(small.solve(eye)) - problem.n * eye
    shift = problem.n * 1e8
    # (H + sI)⁻¹ = I/s − H/s² + …
    bound = 1.01 * torch.linalg.matrix_norm(H, 2) / shift + 1e-13
    assert (shift * factor.solve(V) - V).abs().max() <= bound * V.norm(dim=1).max()


def test_automatic_damping_is_the_smallest_that_works():
    """An indefinite matrix with known smallest eigenvalue is damped by it, to within a third."""
    Q, _ = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    values = torch.linspace(-3, 50, 40, dtype=torch.float64)
    factor = factorise((Q * values) @ Q.T, 10, None, -1.0, torch.float64)
    assert factor.positive_definite
    assert 0.3 < factor.damping < 0.3 * 10**0.125 * (1 + 1e-9)
    kept = factorise((Q * values) @ Q.T, 10, 0.1, -1.0, torch.float64)
    assert not kept.positive_definite and kept.damping == 0.1 and abs(kept.smallest_eigenvalue + 2) < 1e-9


@pytest.mark.parametrize("value", [0.0, -2.0])
def test_an_entry_of_the_diagonal_tells_the_smallest_damping(value, monkeypatch):
    """A parameter that the loss does not know, a dead unit's bias: one factorisation finds the damping, and with less there is none."""
    B = torch.randn(40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H = torch.block_diag(B.T @ B, torch.tensor([[value]], dtype=torch.float64))
    calls, cholesky = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda A, **how: calls.append(1) or cholesky(A, **how))
    factor = factorise(H.clone(), 10, None, -1.0, torch.float64)
    assert len(calls) == 1 and factor.positive_definite and factor.damping >= -value / 10
    # A pivot counts where it exceeds p·ε times the mean diagonal.
    least = len(H) * torch.finfo(torch.float64).eps * float(H.diagonal().abs().mean())
    assert 10 * factor.damping == pytest.approx(1.1 * (least - value))
    assert not factorise(H, 10, factor.damping / 1.2, -1.0, torch.float64).positive_definite


def test_lanczos_finds_the_smallest_eigenvalue_of_a_larger_matrix():
    Q, _ = torch.linalg.qr(torch.randn(600, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    values = torch.cat([torch.tensor([-4.0]), torch.linspace(0, 5, 599)]).double()
    factor = factorise((Q * values) @ Q.T, 1, 0.0, -1.0, torch.float64)
    assert abs(factor.smallest_eigenvalue + 4) < 1e-6


def test_the_gauge_is_fixed_without_changing_any_product():
    """Unpenalised intercepts: products of gradients equal those with the pseudo-inverse, and nothing is damped."""
    model, X, y, _ = draw("logistic", 2, n=60)
    problem = Problem(model, X, y, {"0.weight": 0.5})
    factor = GGN().factor(problem)
    G = flat(problem.gradients(X, y))
    expected = G @ torch.linalg.pinv(GGN().matrix(problem), hermitian=True) @ G.T
    assert factor.damping == 0
    assert (G @ factor.solve(G).T - expected).abs().max() < 1e-10


@pytest.mark.parametrize("damping", [None, 0.3, 0.0])
@pytest.mark.parametrize("unpenalised", [False, True])
def test_parameters_that_meet_no_other(damping, unpenalised):
    """Inputs that are always zero and a dead unit, which nothing may penalise, against the inverse written out."""
    generator = torch.Generator().manual_seed(3)
    p, idle = 200, torch.randperm(200, generator=generator)[:30]
    B = torch.randn(300, p, dtype=torch.float64, generator=generator)
    B[:, idle] = 0
    H = B.T @ B + torch.diag(torch.rand(p, dtype=torch.float64, generator=generator))
    if unpenalised:
        H[idle[0], idle[0]] = 0.0
    V = torch.randn(9, p, dtype=torch.float64, generator=generator)
    if unpenalised and damping == 0:
        with pytest.raises(CurvatureError, match="singular"):
            factorise(H, 300, damping, 0.0, torch.float64)
        return
    factor = factorise(H.clone(), 300, damping, 0.0, torch.float64)
    assert factor.positive_definite and (factor.damping == 0) == (not damping and not unpenalised)
    H.diagonal().add_(300 * factor.damping)
    tol = 1e-14 * p * torch.linalg.cond(H) * torch.linalg.inv(H).abs().max()
    assert (factor.solve(V) - V @ torch.linalg.inv(H)).abs().max() < tol
    s, kept = factor.influence(V)
    assert (s - (V @ torch.linalg.inv(H) * V).sum(1)).abs().max() < tol * p
    assert (factor.back(kept) - factor.solve(V)).abs().max() == 0
    smallest, rounding = torch.linalg.eigvalsh(H)[0], 1e-15 * p * torch.linalg.matrix_norm(H, 2)
    assert smallest - rounding <= smallest_eigenvalue(factor.solve, V[0]) <= 1.1 * smallest + rounding
    assert factor.floor <= smallest + rounding
    single = factorise(H.clone(), 300, 0.0, 0.0, torch.float32)  # which looks for it
    assert smallest - rounding <= single.smallest_eigenvalue <= 1.1 * smallest + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_floor_allows_for_the_rounding_of_the_matrix(dtype):
    """A penalty of which sums keep little: the floor is below the smallest eigenvalue, which may be below the penalty."""
    generator, p, n, below = torch.Generator().manual_seed(1), 150, 4000, 0
    for scale in 10.0 ** torch.arange(0, 8):
        B = scale * torch.randn(n, p - 1, dtype=dtype, generator=generator)
        B = torch.cat([B, B[:, :1]], 1)  # an eigenvalue that is the penalty's alone
        H = (B.T @ B + 2.0 * torch.eye(p, dtype=dtype)).double()
        smallest = float(torch.linalg.eigvalsh(H)[0])
        below += smallest < 2.0
        factor = factorise(H, n, None, 2.0, dtype)
        smallest += n * factor.damping
        assert 0 <= factor.floor <= smallest + 1e-15 * p * float(H.abs().max())
        if scale == 1 and dtype == torch.float64:
            assert factor.floor == pytest.approx(2.0)
    assert below


@pytest.mark.parametrize(("n_classes", "d"), [(3, 8), (10, 20), (3, 20), (5, 60)])
@pytest.mark.parametrize("margin", [4, 12, 20])
def test_the_curvature_of_sure_models_has_the_digits_of_its_dtype(n_classes, d, margin):
    """π(1 − π) of points that are sure is as small as e^−margin; wide and narrow layers, float32 beside float64."""
    torch.manual_seed(0)
    X = torch.randn(300 * n_classes, d, dtype=torch.float64)
    model = linear(d, n_classes, dtype=torch.float64)
    y = (X @ model[0].weight.T).argmax(1)
    with torch.no_grad():
        top = (X @ model[0].weight.T).topk(2).values
        X *= (torch.rand(len(X), 1, dtype=torch.float64) + margin) / (
            top[:, :1] - top[:, 1:]
        )  # the margins of all points
        keep = X.norm(dim=1) < 4 * X.norm(dim=1).median()
        model[0].bias.zero_()
    X, y = X[keep].float().double(), y[keep]
    model = model.float().double()
    double = Problem(model, X, y, {"0.weight": 1e-30, "0.bias": 1e-30})
    single = Problem(copy.deepcopy(model).float(), X.float(), y, {"0.weight": 1e-30, "0.bias": 1e-30})
    exact, found = (GGN().matrix(problem).double() for problem in (double, single))
    # Rounding of logits, which e^−margin multiplies by their size, and of sums that do not cancel.
    assert (found - exact).abs().max() <= 64 * margin * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize(("o", "n_classes"), [(1, 2), (1, 4), (2, 6), (4, 5), (5, 5), (7, 3), (40, 36)])
@pytest.mark.parametrize("chunk", [None, 7, 1100])
def test_the_curvature_of_outputs_that_a_fixed_layer_turns_into_logits(o, n_classes, chunk):
    """Fewer outputs than contrasts, as many, as many as classes, more; few classes and many; portions that are not full."""
    generator = torch.Generator().manual_seed(o)
    model = nn.Sequential(nn.Linear(3, o), nn.Linear(o, n_classes).requires_grad_(False)).double()
    n = 40 if chunk == 7 else 1124
    X = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    problem = Problem(model, X, torch.randint(n_classes, (n,), generator=generator), 0.3, chunk=chunk)
    found, exact = linear_curvature(problem), torch.func.hessian(problem.value)(problem.theta)
    # Sums of n terms, and T and the probabilities.
    assert (found - exact).abs().max() <= 8 * (n + 8) * torch.finfo(torch.float64).eps * exact.abs().max()


@pytest.mark.parametrize("n_classes", [2, 4, 40])
def test_one_output_of_which_the_classes_hardly_differ(n_classes):
    """A variance below the rounding of its squares: of few classes it has all its digits, of many it is not negative."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, n_classes).requires_grad_(False)).double()
    model[1].weight[:, 0] = 5 + 1e-9 * torch.arange(n_classes)
    model[1].bias.normal_(generator=generator)
    X = torch.randn(400, 2, dtype=torch.float64, generator=generator)
    found = linear_curvature(Problem(model, X, torch.arange(400) % n_classes, 0.0))
    T, a = model[1].weight[:, 0], torch.cat([X, torch.ones(400, 1)], dim=1)
    pi = torch.softmax(model(X).detach(), 1)
    variance = (pi[:, :, None] * pi[:, None, :] * (T[:, None] - T) ** 2).sum((1, 2)) / 2
    exact, eps = (a * variance[:, None]).T @ a, torch.finfo(torch.float64).eps
    # Sums of 400 terms and of the pairs; or each off by some of 25, the squares that cancel.
    off = 8 * 400 * exact.abs().max() if n_classes < 40 else 400 * 16 * 4 * 25
    assert (found - exact).abs().max() <= off * eps


@pytest.mark.parametrize("p", [3, 8, 61])
def test_a_factor_kept_inverted_acts_as_the_factor(p):
    """What a GPU keeps, L⁻¹, against solves with L."""
    generator = torch.Generator().manual_seed(p)
    A = torch.randn(p, p, dtype=torch.float64, generator=generator)
    V = torch.randn(9, p, dtype=torch.float64, generator=generator)
    L = torch.linalg.cholesky(A @ A.T + torch.eye(p))
    plain, inverted = (
        DenseFactor(L, None, 0.0, 0.0, 0.0),
        DenseFactor(inverse_triangular(L.clone()), None, 0.0, 0.0, 0.0, inverted=True),
    )
    tol = 10 * p * torch.finfo(torch.float64).eps * torch.linalg.cond(L) ** 2
    for action in ("half", "back", "solve"):
        expected = getattr(plain, action)(V)
        assert (getattr(inverted, action)(V) - expected).abs().max() < tol * expected.abs().max()


@pytest.mark.parametrize("p", [1, 7, 8, 50])
def test_a_gram_matrix_is_summed_by_stripes(p):
    B = torch.randn(20, p, dtype=torch.float64, generator=torch.Generator().manual_seed(p))
    total = torch.ones(p, p, dtype=torch.float64)
    add_gram(total, B)
    assert (total - 1 - B.T @ B).tril().abs().max() < 1e-13


@pytest.mark.parametrize("l2", [1e-2, 1e-6])
def test_the_dual_of_a_float32_model_is_as_good_as_its_gradients(l2):
    """At a small penalty nearly all of a gradient cancels; what is left must have the digits of the gradient."""
    torch.manual_seed(0)
    X, y = torch.randn(60, 10), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3))
    single = Problem(model, X, y, 60 * l2)
    double = Problem(copy.deepcopy(model).double(), X.double(), y, 60 * l2)
    found, exact = (
        CURVATURES["dual"]().factor(problem).influence(flat(problem.gradients(problem.X, y)))[0]
        for problem in (single, double)
    )
    # Sums of p products of numbers that are rounded themselves.
    assert ((found - exact).abs() <= 32 * single.p**0.5 * torch.finfo(torch.float32).eps * exact).all()
