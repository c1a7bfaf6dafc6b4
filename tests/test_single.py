"""Counts by single precision where that decides, against those of double precision."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, draw
from fullconformal.influence.single import is_worth_it, single_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live

from fullconformal.curvature import CG
from fullconformal.influence import single
from fullconformal.influence.direct import direct
from fullconformal.influence.prepared import Training, prepare
from fullconformal.influence.scores import all_scores, count_scores
from fullconformal.models import linear
from fullconformal.problem import Problem, Rows, squared_norms

CHAINS = [name for name in MODELS if name in ("binary", "logistic", "mlp", "frozen", "odd")]
SEEDS = st.integers(0, 10**6)


def prepared(name, seed, *, n=300, m=9, penalty=0.7, close=0):
    """A bag, of which `close` points are next to others, and objects."""
    model, X, y, Xt = draw(name, seed, n=n, m=m, close=close)
    problem = Problem(model, X, y, penalty)
    return prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=True), Xt


def same(training, X):
    ours, double = single_counts(direct, training, X), count_scores(direct, training, X, 1.0)
    return np.array_equal(ours.greater, double.greater) and np.array_equal(ours.equal, double.equal)


@pytest.mark.parametrize("name", CHAINS)
@given(seed=SEEDS, far=st.sampled_from([1.0, 1e-3, 30.0]), penalty=st.sampled_from([1e-4, 0.7, 50.0]))
@settings(max_examples=8, deadline=None)
def test_counts_are_those_of_double_precision(name, seed, far, penalty):
    training, X = prepared(name, seed, penalty=penalty)
    assert same(training, far * X)


def test_the_default_dtype_does_not_matter(float64_by_default):
    training, X = prepared("mlp", 0)
    assert training.problem.X.dtype == torch.float64 and same(training, X)


def test_products_of_less_than_single_precision_are_left_alone(less_than_single):
    assert not is_worth_it(prepared("mlp", 0)[0], 10**4)


@pytest.mark.parametrize("name", CHAINS)
def test_counts_do_not_depend_on_how_the_work_is_cut(name, monkeypatch):
    training, X = prepared(name, 5, n=100, m=23, close=10)
    X = torch.cat([X, training.problem.X[:10]])
    for constant, value in (
        ("FEW", 0),
        ("FEW", 100),
        ("OBJECTS", 7),
        ("ROWS", 3),
        ("POINTS", 9),
        ("WHOLE", 1),
        ("NUMBERS", 4 * training.problem.p),
    ):
        monkeypatch.setattr(single, constant, value)
        assert same(training, X)
    lean = prepare(training.problem, training.factor, 2 * 8 * 100 * training.problem.p, keep_solved=True)
    assert lean.solved is not None and same(lean, X)
    for part, whole in zip(
        lean.solved, training.solved, strict=True
    ):  # solved for a few points at a time, or all at once
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-10 * float(whole.abs().max()))


@pytest.mark.parametrize("name", CHAINS)
@given(seed=SEEDS)
@settings(max_examples=5, deadline=None)
def test_what_single_precision_cannot_tell_apart_is_formed_again(name, seed):
    """Candidates that are training points, or next to them, tie with them or miss them by less than float32 knows."""
    training, _ = prepared(name, seed, close=20)
    X, pairs, again = training.problem.X[:20], [], single._again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "_again", lambda *a: pairs.append(a[-1].shape[1]) or again(*a))
        assert same(training, torch.cat([X, X * (1 + 1e-9)]))
    assert sum(pairs) >= 40  # each with itself, at least


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", range(3))
def test_errors_stay_within_their_bound(name, seed):
    """α − τ in float32, from parts rounded one by one, against float64; the bound is not more than a thousand times too large."""
    training, X = prepared(name, seed, n=299)
    alpha, tau = all_scores(direct, training, X, 1.0)
    points = single._Points(training)
    logits, J = training.problem.jacobian(X)
    ghat = single.candidate_gradients(SOFTMAX, J, logits)
    own, norm = [(rows.left.float(), rows.right.float()) for rows in ghat], squared_norms(ghat).sqrt()
    room = [torch.empty(10**6, dtype=torch.float32) for _ in range(2)]
    each = torch.arange(tau.numel())
    x, y = each // tau.shape[1], each % tau.shape[1]
    worst = [0.0, 0.0]
    for block, at in enumerate(points.order.split(points.step)):
        exact, u, v = (
            part[..., : len(at)] for part in (alpha[..., at] - tau[..., None], points.u[block], points.v[block])
        )
        together = single._by_object(points, torch.tensor(block), own, tau.float(), room)
        alone = [(left[x, y], right[x]) for left, right in own]
        apart = single._by_candidate(points, torch.full_like(x, block), alone, tau.float()[x, y]).view_as(together)
        for k, (excess, longer) in enumerate(((together, 1.0), (apart, points.longer))):
            bound = u + longer * v * norm[..., None] + points.w(tau)[..., None]
            worst[k] = max(worst[k], float(((excess[..., : len(at)] - exact).abs() / bound).max()))
            assert (excess[..., len(at) :] == -torch.inf).all()
    assert all(1e-4 < part <= 1 for part in worst)


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("shapes", [[(1, 1)], [(1, 30), (6, 2)], [(20, 3), (2, 2)]])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_whatever_float32_may_lose_what_is_decided_is_right(few, shapes, scale, seed):
    """Every α − τ is as wrong as the roundings counted in the module's first lines allow, towards the other side."""
    g = torch.Generator().manual_seed(seed)
    n, m, C, u = 40, 12, 3, 2.0**-24

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    ghat = [Rows(normal(m, C, o), normal(m, i)) for o, i in shapes]
    solved = [
        10 ** (3 * torch.rand(n, 1, 1, dtype=torch.float64, generator=g) - 3) * normal(n, o, i) for o, i in shapes
    ]
    b = scale * torch.rand(n, dtype=torch.float64, generator=g)
    blocks = [SimpleNamespace(o=o, i=i) for o, i in shapes]
    p, outs, widest = sum(o * i for o, i in shapes), sum(o for o, _ in shapes), max(i for _, i in shapes)
    problem = SimpleNamespace(n=n, p=p, X=b, blocks=blocks, n_classes=C)
    zero = torch.zeros_like(b)
    k = sum(torch.einsum("mco,mi,noi->mcn", D, a, U) for (D, a), U in zip(ghat, solved, strict=True))
    at = torch.randint(n, (m, C), generator=g)[..., None]
    length = sum((U**2).sum((1, 2)) for U in solved).sqrt() * squared_norms(ghat).sqrt()[..., None]
    near = (p + 9) * u * (length + b + (b - k).abs()).gather(2, at)[..., 0]
    tau = (b - k).gather(2, at)[..., 0] + near * (2 * torch.rand(m, C, dtype=torch.float64, generator=g) - 1)
    cells, found = single._cells, []

    def worst(points, *args):
        true = (b - tau[..., None] - k)[..., points.order].flatten(0, 1)
        sizes = length[..., points.order].flatten(0, 1), points.b + tau.abs().view(-1, 1)
        for excess, c, block, longer in cells(points, *args):
            i = block.view(-1, 1) * points.step + torch.arange(points.step)
            here = (i < n) & excess.isfinite()
            t, products, scores = (v[c[:, None], i.clamp_max(n - 1)] for v in (true, *sizes))
            terms = (p + 5, len(shapes) + 2) if block.ndim else (widest + outs + 4, outs + 2)
            lost = 0.999 * u * (terms[0] * products + terms[1] * scores)
            yield torch.where(here, t - t.sign() * lost, excess.double()).float(), c, block, longer

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FEW": few, "POINTS": 7, "WHOLE": 1, "MOST": 0, "_cells": worst}.items():
            patch.setattr(single, name, value)
        patch.setattr(single, "_again", lambda *args: found.extend(args[3:]))
        points = single._Points(Training(problem, SimpleNamespace(accuracy=0.0), b, zero, zero, None, solved, 2**28))
        single._count(points, ghat, tau)
    above, (c, i, counted) = found
    left = torch.ones(m * C, n, dtype=torch.bool)
    left[c, i] = False
    true = (b - tau[..., None] - k)[..., points.order].flatten(0, 1)
    assert ((true > 0) & left).sum(1).equal(above.view(-1).long().index_add(0, c, -counted)) and len(c) > 0


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("points", [1, 9])
def test_solves_that_are_not_exact_leave_ties(few, points, monkeypatch):
    """Many more than float32 would see, and between points and candidates that bounds of k alone would tell apart."""
    for name, value in {"FEW": few, "POINTS": points, "WHOLE": 1, "MOST": 0}.items():
        monkeypatch.setattr(single, name, value)
    model, X, y, Xt = draw("mlp", 1, n=300, m=20)
    for penalty in (0.7, 1e9):
        problem = Problem(model, X, y, penalty)
        training = prepare(problem, CG(tolerance=1e-3).factor(problem), 2**28, keep_solved=True)
        ours, double = single.single_counts(direct, training, Xt), count_scores(direct, training, Xt, 1.0)
        assert double.equal.sum() > 100
        assert np.array_equal(ours.greater, double.greater) and np.array_equal(ours.equal, double.equal)


@pytest.mark.parametrize("few", [0, 100])
def test_points_that_fill_up_the_last_block_are_above_nobody(few, monkeypatch):
    """Of candidates far away k is large, and as often as not negative."""
    monkeypatch.setattr(single, "FEW", few)
    monkeypatch.setattr(single, "MOST", 0)
    model, X, y, Xt = draw("logistic", 0, n=101, m=40)
    problem = Problem(model, X, y, 1e-4)
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=True)
    ours, double = single.single_counts(direct, training, 30 * Xt), count_scores(direct, training, 30 * Xt, 1.0)
    assert single._Points(training).filled.shape[0] > 101 and np.array_equal(ours.greater, double.greater)
    assert ours.greater.max() == 101


@pytest.mark.parametrize("n", [101, 102])
@pytest.mark.parametrize("where", ["points", "objects"])
def test_nothing_infinite_decides_or_is_counted_twice(n, where, monkeypatch):
    monkeypatch.setattr(single, "MOST", 0)
    monkeypatch.setattr(single, "POINTS", 51 if n == 102 else 52)
    monkeypatch.setattr(single, "WHOLE", 1)
    model, X, y, Xt = draw("frozen", 0, n=n, m=150)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    problem = Problem(model, X, y, 0.7)
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=True)
    if where == "points":
        training.solved[-1][(training.loss + training.self_influence).argmax()] *= 1e40
    else:
        Xt[:50] *= 1e39  # beyond float32, and the first layer is saturated: their gradients there are zero
    ours, double = single.single_counts(direct, training, Xt), count_scores(direct, training, Xt, 1.0)
    assert np.array_equal(ours.greater, double.greater) and np.array_equal(ours.equal, double.equal)


def near_pairs(b, solved, D, a, tau):
    """How many pairs float32 leaves, of points b (n,), (n, o, i) and candidates (m, C, o) ⊗ (m, i), τ (m, C); what it decides is right."""
    (n, o, i), found = solved.shape, []
    problem = SimpleNamespace(n=n, p=o * i, X=b, blocks=[SimpleNamespace(o=o, i=i)], n_classes=tau.shape[1])
    zero = torch.zeros_like(b)
    training = Training(problem, SimpleNamespace(accuracy=0.0), b, zero, zero, None, [solved], 2**28)
    points = single._Points(training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "MOST", 0)
        patch.setattr(single, "_again", lambda *args: found.extend(args[3:]))
        single._count(points, [Rows(D, a)], tau)
    (above, (c, at, counted)) = found
    left = torch.ones(tau.numel(), n, dtype=torch.bool)
    left[c, at] = False
    assert len(c) == (~left).sum()
    k = torch.einsum("mco,mno->mcn", D, torch.einsum("mi,noi->mno", a, solved[points.order]))
    true = (points.b - tau[..., None] - k).flatten(0, 1)
    assert ((true > 0) & left).sum(1).equal(above.view(-1).long().index_add(0, c, -counted))
    return len(c)


def test_numbers_that_vanish_decide_nothing():
    """Scores below the smallest float32, with nothing to tell them apart."""
    b = 1e-42 * torch.linspace(1, 2, 30, dtype=torch.float64)
    solved, D, a = (
        torch.full(s, v, dtype=torch.float64) for s, v in (((30, 2, 3), 1e-30), ((4, 3, 2), 1e-14), ((4, 3), 1.0))
    )
    tau = 1e-42 * torch.linspace(1, 2, 12, dtype=torch.float64).view(4, 3)
    assert near_pairs(b, solved, D, a, tau) == 360


@pytest.mark.parametrize("few", [0, 100])
def test_what_vanishes_may_meet_what_is_long(few, monkeypatch):
    """Gradients of candidates that the model is sure of vanish in float32, and meet inputs and points that are anything but small."""
    monkeypatch.setattr(single, "FEW", few)
    model = linear(4, 3).double().eval()
    with torch.no_grad():
        for q in model.parameters():
            q.zero_()
        model[0].weight[0, 0] = 1.0  # the logit of the first class is the first input
    generator = torch.Generator().manual_seed(0)
    X, Xt = (torch.randn(k, 4, dtype=torch.float64, generator=generator) for k in (60, 200))
    Xt *= 1e15
    X[:, 0] = 70 + torch.rand(60, dtype=torch.float64, generator=generator)
    Xt[:, 0] = 101 + 3 * torch.rand(200, dtype=torch.float64, generator=generator)
    problem = Problem(model, X, torch.zeros(60, dtype=torch.long), 1e-33)
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=True)
    assert same(training, Xt)


def test_blocks_that_bounds_decide_are_not_met():
    """A sure model with labels that mostly agree: objects of which it is sure are far from the points it is not sure of."""
    model, X, y, Xt = draw("mlp", 11, n=2000, m=600)
    with torch.no_grad():
        model[-1].weight *= 20
        y = torch.where(torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.99, model(X).argmax(1), y)
    problem = Problem(model, X, y, 5.0)
    training = prepare(problem, CURVATURES["ggn"](1.0).factor(problem), 2**28, keep_solved=True)
    assert same(training, Xt) and 0 < single_counts(direct, training, Xt).touched < 1


def test_where_too_much_is_left_double_precision_does_it(monkeypatch):
    training, X = prepared("mlp", 4, close=20)
    X = torch.cat([X, training.problem.X[:20]])
    monkeypatch.setattr(single, "_again", lambda *a: pytest.fail("there were too many"))
    monkeypatch.setattr(single, "MOST", 2**40)
    assert same(training, X)
    monkeypatch.setattr(single, "HUGE", 0.0)
    assert same(training, X)


def test_it_is_for_kept_solves_in_double_precision_and_for_enough_work():
    training, _ = prepared("mlp", 0)
    assert is_worth_it(training, 10**4) and not is_worth_it(training, 1)
    written, _ = prepared("cnn", 0)  # rows of its convolution are written out
    assert not is_worth_it(written, 10**4)
    lean = prepare(training.problem, training.factor, 2**28, keep_solved=False)
    assert not is_worth_it(lean, 10**4)


@pytest.mark.parametrize(("inputs", "classes", "n"), [(40, 30, 4000), (60, 3, 20000), (11, 3, 40000)])
def test_copies_and_blocks_fit_what_kept_solves_leave_of_the_memory(inputs, classes, n):
    """Kept solves may take half of it; gradients, copies in single precision and blocks must fit the other where this is worth it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(inputs, classes)).double().eval()
    X = torch.randn(n, inputs).double()
    problem = Problem(model, X, model(X).argmax(1), 1.0)
    memory = 4 * 8 * problem.n * problem.p
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), memory, keep_solved=True)
    assert training.solved is not None and is_worth_it(training, 10**4)
    assert not is_worth_it(dataclasses.replace(training, memory=memory - 1), 10**4)
    gradients = sum(part.nbytes for rows in training.gradients or () for part in rows)
    with Live() as live:
        single_counts(direct, training, torch.randn(600, inputs).double())
    assert live.peak + gradients < memory / 2
