"""Counts tile by tile, in single precision where that decides, against those of double precision."""

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import make_classification

from fullconformal import FullConformalClassifier
from fullconformal.problem import Problem
from fullconformal.scores import tiles
from fullconformal.scores.base import all_scores, count_scores, prepare
from fullconformal.scores.direct import direct
from fullconformal.scores.tiles import is_worth_it, tiled_counts
from fullconformal.scores.windows import Sorted

CHAINS = [name for name in MODELS if name in ("logistic", "mlp", "frozen", "odd")]
SEEDS = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def whatever_is_wasted(monkeypatch):
    """Candidates far apart are met all the same."""
    monkeypatch.setattr(tiles, "WASTE", (1e9, 0))


def prepared(name, seed, *, n=300, m=60, penalty=0.7, close=0, memory=2**28):
    """A bag with half-solved gradients kept, of which `close` points are others moved by about 1e-9, and objects."""
    model, X, y, Xt = draw(name, seed, n=n, m=m)
    for k in range(close):
        X[n - 1 - k], y[n - 1 - k] = X[k] * (1 + 1e-9 * k), y[k]
    problem = Problem(model, X, y, penalty)
    return prepare(problem, CURVATURES["ggn"]().factor(problem), memory, keep_solved=False), Xt


def same(training, X):
    ours, double = tiled_counts(training, X), count_scores(direct, training, X, 1.0)
    return np.array_equal(ours.greater, double.greater) and np.array_equal(ours.equal, double.equal)


@pytest.mark.parametrize("name", CHAINS)
@given(seed=SEEDS, far=st.sampled_from([1.0, 1e-3, 30.0]), penalty=st.sampled_from([1e-4, 0.7, 50.0]))
@settings(max_examples=8, deadline=None)
def test_counts_are_those_of_double_precision(name, seed, far, penalty):
    training, X = prepared(name, seed, penalty=penalty)
    assert same(training, far * X)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("cut", [{"TILE": 3}, {"TILE": 1, "TILES": 2}, {"TILES": 7, "TILE": 5}, {"OBJECTS": 4}])
def test_counts_do_not_depend_on_how_the_work_is_cut(name, cut, monkeypatch):
    training, X = prepared(name, 5, n=100, m=23, close=10)
    X = torch.cat([X, training.problem.X[:10]])
    for constant, value in cut.items():
        monkeypatch.setattr(tiles, constant, value)
    assert same(training, X)


def test_with_little_memory_objects_pass_in_portions():
    training, X = prepared("mlp", 3, n=400, m=200)
    p, n_classes = training.problem.p, training.problem.n_classes
    lean = prepare(training.problem, training.factor, 16 * 8 * 400 * p, keep_solved=False)
    assert lean.memory // 16 // (8 * n_classes * p) < len(X)
    assert lean.halved is not None and same(lean, X)


@pytest.mark.parametrize("name", CHAINS)
@given(seed=SEEDS)
@settings(max_examples=5, deadline=None)
def test_what_single_precision_cannot_tell_apart_is_formed_again(name, seed):
    """Candidates that are training points, or next to them, tie with them or miss them by less than float32 knows."""
    training, _ = prepared(name, seed, close=20)
    X, pairs, again = training.problem.X[:20], [], tiles._again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_again", lambda *a: pairs.append(a[-1].shape[1]) or again(*a))
        assert same(training, torch.cat([X, X * (1 + 1e-9)]))
    assert sum(pairs) >= 40  # each with itself, at least


@pytest.mark.parametrize("by_root", [True, False])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", range(3))
def test_errors_stay_within_their_bound(name, seed, by_root):
    """L⁻¹ĝ and α − τ in float32 against float64; the bounds are not more than some thousand times too large."""
    training, X = prepared(name, seed)
    found = tiles._candidates(training, tiles._roots(training, 10**4) if by_root else [], X)
    logits, J = training.problem.jacobian(X)
    exact = tiles.half_solved(training.factor, tiles.candidate_gradients(J, logits)).flatten(0, 1)
    off = torch.linalg.vector_norm(found.half.double() - exact, dim=1)
    assert (off <= found.error).all() and (off > 1e-4 * found.error).any()
    assert (torch.linalg.vector_norm(exact, dim=1) <= found.rho).all()
    bag, (alpha, tau) = Sorted.of(training, 1.0), all_scores(direct, training, X, 1.0)
    points, b = bag.single
    excess = (b - tau.float().flatten()[:, None]) - found.half @ points.T
    true = (alpha - tau[..., None]).flatten(0, 1)[:, bag.order]
    own, reach, p = (2 * tiles.UNIT) * tau.abs().flatten(), found.rho, training.problem.p
    bound = own[:, None] + 2 * tiles.UNIT * bag.b.abs()
    bound = bound + bag.sigma * (tiles.UNIT * (2 * p + 8) * reach + found.error)[:, None]
    worst = float(((excess - true).abs() / bound).max())
    assert 1e-3 < worst <= 1


def test_where_too_much_is_left_or_too_large_double_precision_must_do_it(monkeypatch):
    training, X = prepared("mlp", 4, close=20)
    X = torch.cat([X, training.problem.X[:20]])
    assert tiled_counts(training, X) is not None
    monkeypatch.setattr(tiles, "_again", lambda *a: pytest.fail("there were too many"))
    for constant, value in (("MOST", 2**40), ("HUGE", 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(tiles, constant, value)
            assert tiled_counts(training, X) is None


def test_candidates_too_far_apart_are_not_met_together(monkeypatch):
    training, X = prepared("logistic", 2, n=2000, m=20, penalty=5.0)
    monkeypatch.setattr(tiles, "WASTE", (1, 0))
    assert tiled_counts(training, X) is None


def test_it_is_for_kept_halves_in_double_precision_and_for_enough_candidates():
    training, _ = prepared("mlp", 0)
    assert is_worth_it(training, 10**4) and not is_worth_it(training, 1)
    solved = prepare(training.problem, training.factor, 2**28, keep_solved=True)
    assert not is_worth_it(solved, 10**4)
    two, _ = prepared("binary", 0)
    assert not is_worth_it(two, 10**4)


def test_many_objects_are_predicted_tile_by_tile(monkeypatch):
    """And have the p-values that they have one by one, and without pruning."""
    monkeypatch.undo()
    X, y = make_classification(
        2600, 30, n_informative=15, n_classes=8, n_clusters_per_class=1, class_sep=0.7, random_state=0
    )
    X, y, objects = X[:2000], y[:2000], np.concatenate([X[2000:], X[:20]])
    used, count = [], tiles.tiled_counts
    monkeypatch.setattr(tiles, "tiled_counts", lambda *a: used.append(count(*a)) or used[-1])
    clf = FullConformalClassifier(method="influence", prune=True).fit(X, y)
    p = clf.predict_p(objects)
    assert len(used) == 1 and used[0] is not None and used[0].touched < 0.5
    assert np.array_equal(p, FullConformalClassifier(method="influence", prune=False).fit(X, y).predict_p(objects))
    assert np.array_equal(p[-30:], clf.predict_p(objects[-30:])) and len(used) == 1
