"""Scores and p-values against the paper's Algorithm 2, point by point; pruned against unpruned."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CURVATURES, DENSE, MODELS, draw
from fullconformal.influence.halved import Halved, counts_by_halves
from fullconformal.influence.pruned import pruned_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live
from oracles import Oracle, algorithm_2, newton_digits, newton_scores
from torch import nn

from fullconformal import pvalues
from fullconformal.influence import pruned as pruning
from fullconformal.influence import windows
from fullconformal.influence.direct import direct
from fullconformal.influence.indirect import indirect
from fullconformal.influence.newton import newton, removal
from fullconformal.influence.prepared import prepare
from fullconformal.influence.scores import all_scores, candidate_gradients, count_excess, count_scores
from fullconformal.linear.from_problem import fit_linear
from fullconformal.losses import SOFTMAX
from fullconformal.models import linear, mlp
from fullconformal.problem import Problem, flat

SCORERS = {"direct": direct, "indirect": indirect}
Q = st.sampled_from([0.0, 0.5, 1.0])
SEEDS = st.integers(0, 10**6)


def prepared(name, seed, curvature, *, keep, n=12, m=2, penalty=0.7, memory=2**28):
    model, X, y, Xt = draw(name, seed, n=n, m=m)
    problem = Problem(model, X, y, penalty, chunk=1024 if curvature == "cg" else 5)
    training = prepare(problem, CURVATURES[curvature]().factor(problem), memory, keep)
    return training, Oracle(model, X, y, penalty), Xt


def matrix(training, oracle, curvature):
    """𝓗/n in the oracle's order, damping left out: formed from the definition, or from what the factor does to the identity."""
    if curvature in DENSE:
        return getattr(oracle, curvature)()
    problem = training.problem
    place = problem.pack(oracle.unpack(torch.arange(problem.p, dtype=torch.float64))).long()
    eye = torch.eye(problem.p, dtype=torch.float64)
    H = torch.empty_like(eye)
    H[place[:, None], place] = torch.linalg.inv(training.factor.solve(eye)) / problem.n - training.factor.damping * eye
    return H


@pytest.mark.parametrize("approximation", SCORERS)
@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, curvature) for name in MODELS for curvature in DENSE]
    + [(name, curvature) for name in ("mlp", "cnn") for curvature in CURVATURES if curvature not in DENSE]
    + [("resnet", "kfac")],
)
@given(seed=SEEDS, q=Q, keep=st.booleans())
@settings(max_examples=4, deadline=None)
def test_scores_and_p_values_equal_algorithm_2(name, curvature, approximation, seed, q, keep):
    training, oracle, X = prepared(name, seed, curvature, keep=keep)
    damping = training.factor.damping
    p, alpha, tau = algorithm_2(oracle, matrix(training, oracle, curvature), damping, X, q, approximation)
    ours, own = all_scores(SCORERS[approximation], training, X, q)
    # An inverse of condition κ turns rounding into κ·eps; 1e-9 stands for κ up to about 1e5 here.
    scale = 1 + np.abs(alpha).max() + np.abs(tau).max()
    assert np.abs(ours.mT.numpy() - alpha).max() < 1e-9 * scale
    assert np.abs(own.numpy() - tau).max() < 1e-9 * scale
    counts = count_scores(SCORERS[approximation], training, X, q)
    found, gap = pvalues.p_values(counts.greater, counts.equal, training.problem.n), alpha - tau[:, None, :]
    # Scores closer than that may tie: both of some 1e-15, where a step lands far from the data.
    low, high = (p + side * (np.abs(gap) <= 1e-9 * scale).sum(1) / (len(gap[0]) + 1) for side in (-1, 1))
    assert ((low - 1e-9 < found) & (found < high + 1e-9)).all()


@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, "ggn") for name in ("binary", "logistic", "mlp", "cnn")]
    + [("mlp", curvature) for curvature in ("block", "kfac", "ekfac", "dual", "cg")],
)
@given(seed=SEEDS, q=Q)
@settings(max_examples=3, deadline=None)
def test_newton_scores_equal_the_literal_formula(name, curvature, seed, q):
    # A penalty that keeps every leverage below 1 at the shifted logits too, where the literal powers are real.
    training, oracle, X = prepared(name, seed, curvature, keep=False, penalty=20.0)
    alpha, tau = newton_scores(oracle, matrix(training, oracle, curvature), training.factor.damping, X, q)
    ours, own = all_scores(newton, training, X, q)
    scale = 1 + np.abs(alpha).max() + np.abs(tau).max()
    assert np.abs(ours.mT.numpy() - alpha).max() < 1e-9 * scale
    assert np.abs(own.numpy() - tau).max() < 1e-9 * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("q", [0, 1])
@pytest.mark.parametrize(("scale", "penalty"), [(15, 5.0), (30, 20.0)])
def test_newton_scores_keep_their_digits_where_the_model_is_sure(dtype, q, scale, penalty):
    """Losses down to 4e-21 and influences near nothing, against 60 digits, within what counting grants to a loss."""
    torch.manual_seed(1)
    X, Xt, layer = torch.randn(30, 2).to(dtype), torch.randn(2, 2).to(dtype), nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        layer.weight *= scale
        y = torch.where(torch.rand(30) < 0.8, layer(X).argmax(1), torch.randint(3, (30,)))
    problem = Problem(nn.Sequential(layer), X, y, {"0.weight": penalty, "0.bias": penalty})
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=False)
    ours, own = all_scores(newton, training, Xt, float(q))
    W = torch.cat([layer.weight, layer.bias[:, None]], 1).tolist()
    points, objects = (torch.cat([part, torch.ones(len(part), 1)], 1).tolist() for part in (X, Xt))
    for x, alpha, tau in zip(objects, ours.double().numpy(), own.double().numpy(), strict=True):
        true_alpha, true_tau, largest = newton_digits(W, points, y.tolist(), penalty, x, q)
        assert true_alpha.min() < 1e-10
        assert largest < 0.5  # no point decides its own prediction, of which the formula says nothing
        assert np.abs(alpha.T / true_alpha - 1).max() < training.loss_rounding
        assert np.abs(tau / true_tau - 1).max() < training.loss_rounding


def test_a_removal_beyond_leverage_one_makes_a_point_nonconforming():
    """Where S̄Ā has an eigenvalue above 1 the linear removal would flip its sign; the loss must grow instead."""
    A, f, r = torch.eye(3).double()[None] * 8, torch.zeros(1, 3).double(), torch.tensor([[-2.0, 1, 1]]).double() / 3
    for q in (0.5, 1.0):
        moved = f + removal(A, f, r, q)
        assert torch.logsumexp(moved, -1) - moved[:, 0] > 10
        gentle = removal(A / 4, f, r, q)  # 2/3: below one
        expected = (
            2 * r if q == 0 else torch.linalg.pinv(SOFTMAX.curvature(f)) @ (((1 - 2 / 3) ** -q - 1) * r[..., None])
        )
        assert (gentle - expected[..., 0]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, curvature) for name in MODELS for curvature in ("ggn", "kfac")]
    + [(name, "hessian") for name in MODELS if name != "resnet"]  # whose Hessian alone takes as long as all others
    + [(name, curvature) for name in ("mlp", "cnn") for curvature in ("block", "ekfac", "dual")]
    + [("resnet", "ekfac"), ("mlp", "cg")],
)
@given(
    seed=SEEDS,
    q=Q,
    weighted=st.booleans(),
    conditional=st.booleans(),
    on_itself=st.booleans(),
    far=st.sampled_from([1, 10]),
)
@settings(max_examples=6, deadline=None)
def test_pruned_equals_unpruned(name, curvature, seed, q, weighted, conditional, on_itself, far):
    training, _, X = prepared(name, seed, curvature, keep=False, n=200, m=5)
    assert training.factor.positive_definite
    if on_itself:  # training points as test points tie with themselves
        X = training.problem.X[:5]
    X = far * X  # far objects have influence enough to lift a training point above all losses
    y = training.problem.y.numpy()
    weights = np.random.default_rng(seed).integers(0, 4, len(y)) if weighted else None
    weight = pvalues.comparison_weight(y, MODELS[name][2], class_conditional=conditional, weights=weights)
    weight = None if weight is None else torch.as_tensor(weight)
    dense, pruned = count_scores(direct, training, X, q, weight), pruned_counts(training, X, q, weight)
    assert np.array_equal(dense.greater, pruned.greater)
    assert np.array_equal(dense.equal, pruned.equal)
    assert pruned.touched <= 1


@pytest.mark.parametrize("weighted", [False, True])
def test_windows_keep_to_the_memory_where_later_objects_need_every_point(monkeypatch, weighted):
    """The first objects have little influence; those that follow lie on the border between the labels, and far out."""
    torch.manual_seed(0)
    n, model = 20000, torch.nn.Sequential(torch.nn.Linear(3, 2)).double().eval()
    X, Xt, u = torch.randn(n, 3).double(), torch.randn(128, 3).double(), model[0].weight.diff(dim=0)[0].detach()
    y = model(X).argmax(1)
    y[: n // 10] = 1 - y[: n // 10]
    Xt[64:] = 1e5 * (Xt[64:] - (Xt[64:] @ u)[:, None] * u / (u @ u))
    problem, weight = Problem(model, X, y, 1.0), torch.ones(n, 2).double() if weighted else None
    memory = 8 * 4 * n * problem.p
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), memory, keep_solved=False)
    monkeypatch.setattr(windows, "OBJECTS", 64)
    with Live() as live:
        ours = windows.windowed_counts(training, Xt, 1.0, weight)
    dense = count_scores(direct, training, Xt, 1.0, weight)
    assert ours.touched > 0.4 and live.peak < 0.75 * memory  # a quarter is what is kept
    assert np.array_equal(dense.greater, ours.greater) and np.array_equal(dense.equal, ours.equal)


@pytest.mark.parametrize("name", ["binary", "logistic", "mlp"])
@given(
    seed=SEEDS, q=Q, weighted=st.booleans(), conditional=st.booleans(), on_itself=st.booleans(),
    far=st.sampled_from([0.1, 1, 10]), n=st.sampled_from([1, 12, 60]), memory=st.sampled_from([2**28, 2**12]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_windows_equal_unpruned(name, seed, q, weighted, conditional, on_itself, far, n, memory):
    training, _, X = prepared(name, seed, "ggn", keep=False, n=n, m=9)
    assert training.halved is not None
    training = replace(training, memory=memory)  # objects one by one, and all together
    X = training.problem.X[:9] if on_itself else far * X
    weights = np.random.default_rng(seed).integers(1, 9, n) / 4 if weighted else None  # whose sums are exact
    y, n_classes = training.problem.y.numpy(), training.problem.n_classes
    weight = pvalues.comparison_weight(y, n_classes, class_conditional=conditional, weights=weights)
    weight = None if weight is None else torch.as_tensor(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "DENSE", 0)  # however many pairs there are
        patch.setattr(windows, "BUFFER", (100, 100))
        ours, dense = windows.windowed_counts(training, X, q, weight), count_scores(direct, training, X, q, weight)
    assert ours is not None and 0 <= ours.touched <= 1
    assert np.array_equal(dense.greater, ours.greater)
    assert np.array_equal(dense.equal, ours.equal)
    assert not on_itself or weighted or conditional or dense.equal.sum() >= min(9, n)


def test_windows_hold_little_more_than_the_points_that_need_their_product():
    """Of a fitted logistic regression; where nothing can be left out one product is cheaper, and the answer is None."""
    torch.manual_seed(0)
    X, Xt = torch.randn(2000, 5).double(), torch.randn(100, 5).double()
    y = (X @ torch.tensor([2.0, 1, 0, -1, 0]).double() + torch.randn(2000) > 0).long()
    problem = Problem(linear(5, 2, dtype=torch.float64).eval(), X, y, {"0.weight": 2.0})
    fit_linear(problem)
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=False)
    alpha, tau = all_scores(direct, training, Xt, 1.0)
    b, sigma = training.loss + training.self_influence, training.self_influence.sqrt()
    logits, J = problem.jacobian(Xt)
    rho = training.factor.influence(flat(candidate_gradients(SOFTMAX, J, logits)).flatten(0, 1))[0].sqrt()
    needed = ((b - tau.reshape(-1, 1)).abs() <= sigma * rho[:, None]).double().mean()
    found = windows.windowed_counts(training, Xt, 1.0)
    assert needed <= found.touched < 2 * needed < 0.02
    assert np.array_equal(found.greater, (alpha > tau[..., None]).sum(-1))
    few = prepared("binary", 0, "ggn", keep=False)
    assert windows.windowed_counts(few[0], few[2], 1.0) is None


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("memory", [2**28, 2**20])
def test_pruned_equals_unpruned_with_points_kept_and_many_groups(conditional, memory):
    """Enough candidates that the points of largest score keep their solves, and a good share of candidates not solved for."""
    model, X, y, Xt = draw("mlp", 11, n=2000, m=150)
    with torch.no_grad():  # surer than random weights are, and labels that mostly agree
        model[-1].weight *= 20
        y = torch.where(torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.99, model(X).argmax(1), y)
    problem = Problem(model, X, y, 5.0)
    training = prepare(problem, CURVATURES["ggn"](1.0).factor(problem), memory, keep_solved=False)
    weight = pvalues.comparison_weight(y.numpy(), 3, class_conditional=conditional)
    weight = None if weight is None else torch.as_tensor(weight)
    order = torch.argsort(training.loss + training.self_influence)
    assert pruning._worth_keeping(training, Xt, order, 2000) > 0
    for q in (1.0, 0.0):
        dense, pruned = count_scores(direct, training, Xt, q, weight), pruned_counts(training, Xt, q, weight)
        assert np.array_equal(dense.greater, pruned.greater)
        assert np.array_equal(dense.equal, pruned.equal)
        assert pruned.touched < 0.5
        assert q < 1 or pruned.solved < 0.7


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("conditional", [False, True])
def test_pruned_equals_unpruned_with_the_root_written_out(conditional, kept):
    """So many candidates that L⁻ᵀ is formed and all labels of an object are solved for together; with L⁻¹g_i kept and not."""
    torch.manual_seed(0)
    model = mlp(12, (11,), 4).double().eval()
    X, Xt, y = torch.randn(600, 12).double(), torch.randn(120, 12).double(), torch.randint(0, 4, (600,))
    Xt[:20] = X[:20]  # which tie with themselves
    problem = Problem(model, X, y, 5.0)
    assert 128 < problem.p <= 120 * 4 // 2
    training = prepare(problem, CURVATURES["ggn"](0.1).factor(problem), 2**28, keep_solved=False)
    assert training.halved is not None
    training = training if kept else replace(training, kept_half=None)
    weight = pvalues.comparison_weight(y.numpy(), 4, class_conditional=conditional)
    weight = None if weight is None else torch.as_tensor(weight)
    for q in (1.0, 0.5):
        dense, pruned = count_scores(direct, training, Xt, q, weight), pruned_counts(training, Xt, q, weight)
        assert np.array_equal(dense.greater, pruned.greater)
        assert np.array_equal(dense.equal, pruned.equal) and dense.equal.sum() >= 20


GROUPINGS = {
    "one by one": {"GROUP": {"cpu": (1, 0.0)}},
    "in pairs": {"GROUP": {"cpu": (2, 1e9)}, "FEW": 0},
    "as large as can be": {"GROUP": {"cpu": (256, 1e15)}},
    "large, left as factors": {"GROUP": {"cpu": (256, 1e15)}, "FEW": 256},
    "few rows at a time": {"CACHE": 2**12, "PAIRS": (1, 1)},
}


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("kept", ["halved", "gradients", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_how_candidates_are_grouped_changes_nothing(monkeypatch, grouping, conditional, kept, dtype):
    torch.manual_seed(1)
    model, X, y = mlp(6, (9,), 3).to(dtype).eval(), torch.randn(1500, 6).to(dtype), torch.randint(0, 3, (1500,))
    Xt = torch.cat([2 * torch.randn(30, 6).to(dtype), X[:10]])  # of which the last tie with themselves
    problem = Problem(model, X, y, 5.0)
    training = prepare(problem, CURVATURES["ggn"](0.1).factor(problem), 2**28, keep_solved=False)
    assert training.halved is not None and training.gradients is not None
    training = training if kept == "halved" else replace(training, kept_half=None)
    training = training if kept != "nothing" else replace(training, gradients=None)
    weight = pvalues.comparison_weight(y.numpy(), 3, class_conditional=conditional)
    weight = None if weight is None else torch.as_tensor(weight)
    for name, value in GROUPINGS[grouping].items():
        monkeypatch.setattr(pruning, name, value)
    # In float32 a distance may be within rounding of the largest at which scores are tied: of 1,500 points one, say.
    allowed = 0 if dtype == torch.float64 else 1
    for q in (1.0, 0.5):
        dense, pruned = count_scores(direct, training, Xt, q, weight), pruned_counts(training, Xt, q, weight)
        assert np.abs(dense.greater - pruned.greater).max() <= allowed
        assert np.abs(dense.equal - pruned.equal).max() <= allowed
        assert dense.equal.sum() >= 10


def cheapest(open_, start, fetch):
    """The least cost of products for rows of open_ (k, blocks), all of them at once or either half by itself, and so on."""
    whole = start + open_.any(0).sum() * (fetch + len(open_))
    half = len(open_) // 2
    return min(whole, cheapest(open_[:half], start, fetch) + cheapest(open_[half:], start, fetch)) if half else whole


@given(seed=SEEDS, start=st.sampled_from([0.0, 1.0, 30.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_groups_of_candidates_are_the_cheapest_that_halving_finds(seed, start):
    rng = np.random.default_rng(seed)
    first = np.sort(rng.integers(0, 30, 32))
    last = first + rng.geometric(0.3, 32)
    open_ = (np.arange(40) >= first[:, None]) & (np.arange(40) < last[:, None])
    training, _, _ = prepared("logistic", 0, "ggn", keep=False)
    own, block = map(torch.as_tensor, open_.nonzero())
    near = torch.ones(len(own), 64, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "GROUP", {"cpu": (16, start * 2 * training.problem.p * 64)})
        group = pruning._groups(training, 32, own, block, near, 40).numpy()
    assert (np.diff(group) >= 0).all() and set(group) == set(range(group[-1] + 1))
    members = [open_[group == g] for g in range(group[-1] + 1)]
    cost = sum(start + part.any(0).sum() * (pruning.FETCH + len(part)) for part in members)
    least = cheapest(open_[:16], start, pruning.FETCH) + cheapest(open_[16:], start, pruning.FETCH)
    assert cost == pytest.approx(least, rel=1e-5)


def test_a_few_candidates_far_apart_need_few_products():
    """Not the products of all of them with all points near any of them."""
    torch.manual_seed(0)
    model, X, Xt = mlp(20, (40, 20), 5).eval(), torch.randn(6000, 20), torch.randn(20, 20)
    with torch.no_grad():
        model[-1].weight *= 10
        y = torch.multinomial(torch.softmax(model(X), 1), 1)[:, 0]
    problem = Problem(model, X, y, 60.0)
    training = prepare(problem, CURVATURES["ggn"](0.01).factor(problem), 2**28, keep_solved=False)
    b, s, q = training.loss + 0.5 * training.self_influence, training.self_influence, 0.5
    with torch.no_grad():
        logits = model(Xt)
        ghat = [problem.gradients(Xt, torch.full((20,), label)) for label in range(5)]
    s_hat = torch.stack([training.factor.influence(flat(rows))[0] for rows in ghat], 1).flatten()
    tau = (torch.logsumexp(logits, 1, keepdim=True) - logits).flatten() - (1 - q) * s_hat
    near = (b - tau[:, None]).abs() <= (s * s_hat[:, None]).sqrt()
    touched, least, most = pruned_counts(training, Xt, q).touched, near.double().mean(), near.any(0).double().mean()
    assert (1 - 1e-3) * least <= touched <= most / 3  # float32 may tell a pair more apart here than there


@given(seed=SEEDS, ties=st.integers(0, 3), dtype=st.sampled_from([torch.float64, torch.float32]))
@settings(max_examples=30, deadline=None)
def test_signs_summed_as_bits_count_as_comparisons_do(seed, ties, dtype):
    rng = torch.Generator().manual_seed(seed)
    excess = torch.randn(3, 2, 40, generator=rng).to(dtype)
    excess[..., 7] = -torch.inf
    slack, own = torch.rand(40, generator=rng).to(dtype) * 1e-6, torch.full((3, 2, 1), 1e-6, dtype=dtype)
    for k in range(ties):
        excess[k, 0, k] = (-1) ** k * 0.9e-6
    for weight in (None, torch.rand(2, 40, generator=rng, dtype=torch.float64)):
        got, expected = (
            count_excess(excess, slack, own, weight),
            pvalues.count(excess, 0.0, (slack, own), weight, axis=-1),
        )
        assert torch.equal(got[0], expected[0])
        assert torch.equal(torch.zeros(3, 2) + got[1], torch.zeros(3, 2) + expected[1])


def test_a_training_point_as_candidate_ties_with_itself():
    training, _, _ = prepared("logistic", 5, "ggn", keep=True, n=50)
    X, y = training.problem.X[:10], training.problem.y[:10]
    for q in (0.0, 0.5, 1.0):
        equal = count_scores(direct, training, X, q).equal
        assert (equal[np.arange(10), y] == 1).all()


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_ties_do_not_depend_on_what_is_kept(q):
    """With hardly a penalty, weights that move all logits alike meet an inverse of thousands: they must not enter products."""
    training, _, _ = prepared("logistic", 5, "ggn", keep=False, n=60, penalty=1e-4)
    lean, X, y = replace(training, kept_half=None), training.problem.X, training.problem.y
    kept, made = count_scores(direct, training, X, q), count_scores(direct, lean, X, q)
    assert (made.equal[np.arange(60), y] == 1).all()
    assert np.array_equal(made.greater, kept.greater) and np.array_equal(made.equal, kept.equal)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_blocks_and_storage_change_nothing(name):
    """A budget so small that every block holds a few points gives the counts of one large block."""
    for q in (0.0, 1.0):
        results = []
        for keep, memory in ((True, 2**28), (False, 2**28), (False, 2**16)):
            training, _, X = prepared(name, 7, "ggn", keep=keep, n=100, m=7, memory=memory)
            results += [count_scores(direct, training, X, q).greater, pruned_counts(training, X, q).greater]
        assert all(np.array_equal(results[0], other) for other in results[1:])
    assert training.gradients is None or name != "cnn"


def test_float32_is_close_to_float64():
    model, X, y, Xt = draw("mlp", 3, n=300, m=20)
    p = []
    for dtype in (torch.float64, torch.float32):
        problem = Problem(model.to(dtype), X.to(dtype), y, 30.0)
        training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=False)
        counts = pruned_counts(training, Xt.to(dtype), 1.0)
        p.append(pvalues.p_values(counts.greater, counts.equal, 300))
    # A score moves by about 1e-5 of its size, so at most a few of 300 neighbours change sides.
    assert np.abs(p[0] - p[1]).max() <= 3 / 301


@pytest.mark.parametrize(
    ("name", "curvature"), [("cnn", "ggn"), ("cnn", "ekfac"), ("resnet", "ekfac"), ("resnet", "kfac")]
)
@given(seed=SEEDS, q=Q, conditional=st.booleans(), far=st.sampled_from([1, 10]))
@settings(max_examples=6, deadline=None)
def test_gradients_that_are_not_kept_change_nothing(name, curvature, seed, q, conditional, far):
    """They are made for the points that a candidate cannot be told from: the same counts."""
    kept, _, X = prepared(name, seed, curvature, keep=False, n=300, m=5)
    lean, _, _ = prepared(name, seed, curvature, keep=False, n=300, m=5, memory=2**17)
    assert kept.gradients is not None and lean.gradients is None
    assert (lean.halves is None) == (curvature == "ggn")
    y = lean.problem.y.numpy()
    weight = pvalues.comparison_weight(y, 3, class_conditional=conditional)
    weight = None if weight is None else torch.as_tensor(weight)
    ours, other = pruned_counts(lean, far * X, q, weight), count_scores(direct, kept, far * X, q, weight)
    assert np.array_equal(ours.greater, other.greater) and np.array_equal(ours.equal, other.equal)


@given(seed=SEEDS, q=Q, far=st.sampled_from([1, 10]))
@settings(max_examples=3, deadline=None)
def test_half_precision_errs_upwards(seed, q, far):
    """As a GPU has it: what is above is above, what is not below is not below, and few pairs are tied for it."""
    exact, _, X = prepared("resnet", seed, "ekfac", keep=False, n=300, m=5)
    expected = count_scores(direct, exact, far * X, q)
    problem = Problem(exact.problem.model.float(), exact.problem.X.float(), exact.problem.y, 0.7)
    training = prepare(problem, CURVATURES["ekfac"]().factor(problem), 2**17, keep_solved=False)
    X = far * X.float()
    ours = counts_by_halves(training, Halved(training.halves, problem.p, X, low=True), X, q, None, None)
    assert (ours.greater <= expected.greater).all()
    assert (ours.greater + ours.equal >= expected.greater + expected.equal).all()
    assert ours.equal.mean() < 10
