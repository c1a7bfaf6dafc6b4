"""EK-FAC and dense factors keep to their memory: bytes of live tensors, at full size without numbers, and at a small one with them."""

import numpy as np
import pytest
import torch
from cases import resnet18
from live import Live
from torch._subclasses.fake_tensor import FakeTensorMode

from fullconformal import FullConformalClassifier
from fullconformal.curvature import EKFAC, GGN, kronecker
from fullconformal.curvature.dense import factorise
from fullconformal.curvature.kronecker import Basis, LayerHalves, Part, kronecker_factors
from fullconformal.curvature.layers import positions, read_layers
from fullconformal.curvature.structured import linear_curvature
from fullconformal.influence.counter import direct_counts
from fullconformal.models import linear
from fullconformal.problem import Problem

GIB = 2**30


def peak(function, *args):
    """Bytes that tensors take at most during a call, above what was there before."""
    with Live() as live:
        function(*args)
    return live.peak


def test_live_bytes_are_those_of_the_tensors_that_are_left():
    with Live() as live:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a[:10] + 1  # 40, and a view
        del b
        c = (a * 2).sum()  # 4,000 for a moment, 4
        assert live.now == 4004 and live.peak == 8004
    del a, c
    assert live.now == 0


def test_each_step_for_a_resnet18_keeps_to_what_it_was_given(monkeypatch):
    """11 million parameters, images of 32×32, ten labels, chunks of hundreds: shapes only."""
    monkeypatch.setattr(kronecker, "check_finite", lambda matrix: None)  # there are no numbers to look at
    with FakeTensorMode():
        X, y = torch.randn(500, 3, 32, 32), torch.zeros(500, dtype=torch.long)
        problem = Problem(resnet18(64), X, y, 0.1, chunk=4096)
        assert problem.p == 11_164_362 and problem.n_classes == 10
        layers = read_layers(problem)
        squares = sum(layer.o**2 + layer.i**2 for layer in layers)
        # The matrices themselves are beside what is given for chunks.
        assert 4 * GIB < peak(kronecker_factors, problem, layers, 8 * GIB) <= 8 * GIB + 8 * squares
        bases = [
            Basis(x, *(torch.zeros(*size).double() for size in ((x.o, x.o), (x.o,), (x.i, x.i), (x.i,))))
            for x in layers
        ]
        assert 4 * GIB < peak(EKFAC().eigenvalues, problem, bases, 8 * GIB) <= 8 * GIB + 4 * squares + 8 * problem.p
        parts = [Part(x.place, *(torch.zeros(*size) for size in ((x.o, x.o), (x.i, x.i), (x.o, x.i)))) for x in layers]
        halves = LayerHalves(problem, layers, parts, positions(problem, layers), 4 * GIB)
        labels = torch.zeros(500, 10, dtype=torch.long)
        for many in (labels[:, :1], labels[:80]):
            assert 2 * GIB < peak(halves.influences, X[: len(many)], many) <= 4 * GIB
        for many in (labels[:300, :1], labels[:50]):
            out = torch.zeros(*many.shape, problem.p, dtype=torch.float16)
            assert 2 * GIB < peak(halves.half, X[: len(many)], many, torch.ones(many.shape), out) <= 4 * GIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dense_factor_takes_what_was_estimated(dtype):
    """𝓗 in float64 and a factor of it."""
    p = 1224  # below it is little in any case
    n = 8 * p
    B = torch.randn(p, p, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H = B.T @ B + torch.eye(p)
    problem = Problem(linear(p // 4, 4, False).to(dtype), torch.zeros(n, p // 4, dtype=dtype), torch.arange(n) % 4, 1.0)
    with Live() as live:
        factor = factorise(H, n, None, 0.0, dtype)
    assert problem.p == p and len(factor.matrix) == p
    assert H.nbytes + live.peak <= GGN().memory(problem)


def test_pairs_of_many_classes_are_not_met_by_one_another():
    """100 classes have 4,950 pairs, whose square is 24 million numbers; 𝓗 has a third of a million, and 60 points three million weights."""
    X = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = Problem(linear(5, 100, dtype=torch.float64), X, torch.arange(60), 1.0)
    assert peak(linear_curvature, problem) < 8 * 4950**2 / 8


def test_products_of_inputs_keep_to_what_is_meant_for_them():
    """Besides 𝓗, its sums, and copies of both while they are laid out."""
    X = torch.randn(3000, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = Problem(linear(30, 6, dtype=torch.float64), X, torch.arange(3000) % 6, 1.0)
    assert peak(linear_curvature, problem, 2**19) <= 2**19 + 5 * 8 * problem.p**2 < 8 * 1024 * 31 * 32 / 2


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("low", [False, True])
def test_fit_and_prediction_keep_to_the_memory_budget(low):
    """More rows than fit, in several portions, in float32 and as a GPU keeps them."""
    rng, budget = np.random.default_rng(0), 0.1
    X, y = rng.normal(size=(220, 3, 8, 8)).astype(np.float32), rng.integers(0, 10, 200)
    with Live() as live:
        clf = FullConformalClassifier(
            resnet18(8),
            prefit=True,
            curvature="ekfac",
            damping=1.0,
            memory_budget=budget,
            dtype="float32",
            device="cpu",
        ).fit(X[:200], y)
        prepared = clf._fitted.prepared
        assert prepared.problem.n * prepared.problem.p * 4 > budget * GIB
        out = direct_counts(prepared, torch.as_tensor(X[200:]), 1.0, half_precision=low)
    assert 0.05 < out.touched <= 1
    assert budget * GIB / 2 < live.peak <= budget * GIB
