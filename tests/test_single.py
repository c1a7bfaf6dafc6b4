"""Counts by single precision where that decides, against those of double precision."""

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live

from fullconformal.problem import Problem
from fullconformal.scores import single
from fullconformal.scores.base import all_scores, count_scores
from fullconformal.scores.direct import direct
from fullconformal.scores.single import is_worth_it, single_counts
from fullconformal.scores.training import prepare

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
        ("NUMBERS", 4 * training.problem.p),
    ):
        monkeypatch.setattr(single, constant, value)
        assert same(training, X)
    lean = prepare(training.problem, training.factor, 2 * 8 * 100 * training.problem.p, keep_solved=True)
    assert lean.solved is not None and same(lean, X)


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
    training, X = prepared(name, seed)
    alpha, tau = all_scores(direct, training, X, 1.0)
    points = single._Points(training)
    logits, J = training.problem.jacobian(X)
    ghat = single.candidate_gradients(J, logits)
    own, norm = [(rows.left.float(), rows.right.float()) for rows in ghat], single.squared_norms(ghat).sqrt()
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


def test_copies_and_blocks_fit_what_kept_solves_leave_of_the_memory():
    """Kept solves take half of it; gradients, copies in single precision and blocks must fit the other half."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30)).double().eval()
    X = torch.randn(4000, 40).double()
    problem = Problem(model, X, model(X).argmax(1), 1.0)
    memory = 2 * 8 * problem.n * problem.p
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), memory, keep_solved=True)
    assert training.solved is not None
    gradients = sum(part.nbytes for rows in training.gradients for part in rows)
    with Live() as live:
        single_counts(direct, training, torch.randn(600, 40).double())
    assert live.peak + gradients < memory / 2
