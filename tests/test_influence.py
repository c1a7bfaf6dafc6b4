"""Scores and p-values against the paper's Algorithm 2, point by point; the literal loop."""

import numpy as np
import pytest
import torch
from cases import CURVATURES, DENSE, MODELS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Oracle, algorithm_2, newton_digits, newton_scores
from torch import nn

from fullconformal import pvalues
from fullconformal.influence.approximations import direct, indirect, newton, removal
from fullconformal.influence.counter import direct_counts
from fullconformal.influence.prepared import prepare
from fullconformal.influence.scores import all_scores, count_scores
from fullconformal.losses import SOFTMAX
from fullconformal.problem import Problem

SCORERS = {"direct": direct, "indirect": indirect}
Q = st.sampled_from([0.0, 0.5, 1.0])
SEEDS = st.integers(0, 10**6)


def prepared(name, seed, curvature, *, n=12, m=2, penalty=0.7, memory=2**28):
    model, X, y, Xt = draw(name, seed, n=n, m=m)
    problem = Problem(model, X, y, penalty, chunk=5)
    return prepare(problem, CURVATURES[curvature]().factor(problem), memory), Oracle(model, X, y, penalty), Xt


def matrix(bag, oracle, curvature):
    """𝓗/n in the oracle's order, damping left out: formed from the definition, or from what the factor does to the identity."""
    if curvature in DENSE:
        return getattr(oracle, curvature)()
    problem = bag.problem
    place = problem.pack(oracle.unpack(torch.arange(problem.p, dtype=torch.float64))).long()
    eye = torch.eye(problem.p, dtype=torch.float64)
    H = torch.empty_like(eye)
    H[place[:, None], place] = torch.linalg.inv(bag.factor.solve(eye)) / problem.n - bag.factor.damping * eye
    return H


@pytest.mark.parametrize("approximation", SCORERS)
@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, curvature) for name in MODELS for curvature in DENSE]
    + [(name, curvature) for name in ("mlp", "cnn") for curvature in CURVATURES if curvature not in DENSE]
    + [("resnet", "kfac")],
)
@given(seed=SEEDS, q=Q, memory=st.sampled_from([2**28, 2**10]))
@settings(max_examples=4, deadline=None)
def test_scores_and_p_values_equal_algorithm_2(name, curvature, approximation, seed, q, memory):
    bag, oracle, X = prepared(name, seed, curvature, memory=memory)
    damping = bag.factor.damping
    p, alpha, tau = algorithm_2(oracle, matrix(bag, oracle, curvature), damping, X, q, approximation)
    ours, own = all_scores(SCORERS[approximation], bag, X, q)
    # An inverse of condition κ turns rounding into κ·eps; 1e-9 stands for κ up to about 1e5 here.
    scale = 1 + np.abs(alpha).max() + np.abs(tau).max()
    assert np.abs(ours.mT.numpy() - alpha).max() < 1e-9 * scale
    assert np.abs(own.numpy() - tau).max() < 1e-9 * scale
    counts = count_scores(SCORERS[approximation], bag, X, q)
    found, gap = pvalues.p_values(counts.greater, counts.equal, bag.problem.n), alpha - tau[:, None, :]
    # Scores closer than that may tie: both of some 1e-15, where a step lands far from the data.
    low, high = (p + side * (np.abs(gap) <= 1e-9 * scale).sum(1) / (len(gap[0]) + 1) for side in (-1, 1))
    assert ((low - 1e-9 < found) & (found < high + 1e-9)).all()


@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, "ggn") for name in ("binary", "logistic", "mlp", "cnn")]
    + [("mlp", curvature) for curvature in ("kfac", "ekfac", "dual")],
)
@given(seed=SEEDS, q=Q)
@settings(max_examples=3, deadline=None)
def test_newton_scores_equal_the_literal_formula(name, curvature, seed, q):
    # A penalty that keeps every leverage below 1 at the shifted logits too, where the literal powers are real.
    bag, oracle, X = prepared(name, seed, curvature, penalty=20.0)
    alpha, tau = newton_scores(oracle, matrix(bag, oracle, curvature), bag.factor.damping, X, q)
    ours, own = all_scores(newton, bag, X, q)
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
    bag = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28)
    ours, own = all_scores(newton, bag, Xt, float(q))
    W = torch.cat([layer.weight, layer.bias[:, None]], 1).tolist()
    points, objects = (torch.cat([part, torch.ones(len(part), 1)], 1).tolist() for part in (X, Xt))
    for x, alpha, tau in zip(objects, ours.double().numpy(), own.double().numpy(), strict=True):
        true_alpha, true_tau, largest = newton_digits(W, points, y.tolist(), penalty, x, q)
        assert true_alpha.min() < 1e-10
        assert largest < 0.5  # no point decides its own prediction, of which the formula says nothing
        assert np.abs(alpha.T / true_alpha - 1).max() < bag.loss_rounding
        assert np.abs(tau / true_tau - 1).max() < bag.loss_rounding


def test_a_removal_beyond_leverage_one_makes_a_point_nonconforming():
    """Where S̄Ā has an eigenvalue above 1 the linear removal would flip its sign; the loss must grow instead."""
    A, f, r = torch.eye(3).double()[None] * 8, torch.zeros(1, 3).double(), torch.tensor([[-2.0, 1, 1]]).double() / 3
    for q in (0.5, 1.0):
        moved = f + removal(SOFTMAX, A, f, r, q)
        assert torch.logsumexp(moved, -1) - moved[:, 0] > 10
        gentle = removal(SOFTMAX, A / 4, f, r, q)  # 2/3: below one
        expected = (
            2 * r if q == 0 else torch.linalg.pinv(SOFTMAX.curvature(f)) @ (((1 - 2 / 3) ** -q - 1) * r[..., None])
        )
        assert (gentle - expected[..., 0]).abs().max() < 1e-12


def test_a_training_point_as_candidate_ties_with_itself():
    bag, _, _ = prepared("logistic", 5, "ggn", n=50)
    X, y = bag.problem.X[:10], bag.problem.y[:10]
    for q in (0.0, 0.5, 1.0):
        equal = count_scores(direct, bag, X, q).equal
        assert (equal[np.arange(10), y] == 1).all()


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_blocks_and_storage_change_nothing(name):
    """A budget so small that every block holds a few points gives the counts of one large block."""
    for q in (0.0, 1.0):
        results = []
        for memory in (2**28, 2**16, 2**12):
            bag, _, X = prepared(name, 7, "ggn", n=40, m=3, memory=memory)
            results += [count_scores(direct, bag, X, q).greater, direct_counts(bag, X, q).greater]
        assert all(np.array_equal(results[0], other) for other in results[1:])
    assert bag.gradients is None and bag.half is None
