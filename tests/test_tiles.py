"""Counts tile by tile, in single precision where that decides, against those of double precision."""

import copy
import dataclasses
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, draw
from fullconformal.influence.tiles import Points, is_worth_it, tiled_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import make_classification

from fullconformal import FullConformalClassifier, load
from fullconformal.curvature import linear
from fullconformal.curvature.dense import factorise
from fullconformal.curvature.linear import influence_error, linear_influences
from fullconformal.influence import candidates as candidates_module
from fullconformal.influence import prepared as training_module
from fullconformal.influence import pruned, shards, tiles
from fullconformal.influence.candidates import Candidates, candidates_of, roots_of
from fullconformal.influence.direct import direct
from fullconformal.influence.prepared import Training, prepare
from fullconformal.influence.scores import all_scores, candidate_gradients, count_scores, half_solved
from fullconformal.losses import SOFTMAX
from fullconformal.methods import engines, keeping
from fullconformal.methods.engines import APPROXIMATIONS, Query, influence_counts
from fullconformal.problem import Problem, Rows, flat, in_contrasts, squared_norms
from fullconformal.storage import StorageError

U = 2.0**-24  # of float32
INVERSE = "logistic by 𝓗⁻¹", "logistic in contrasts by 𝓗⁻¹"  # gradients are kept, and 𝓗⁻¹ in place of half-solves
CHAINS = [*(name for name in MODELS if name in ("logistic", "mlp", "frozen", "odd")), *INVERSE]
SEEDS = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def whatever_is_wasted(monkeypatch):
    """Candidates far apart are met all the same, and however many pairs are near."""
    monkeypatch.setattr(tiles, "WASTE", (1e9, 0, 0))
    monkeypatch.setattr(tiles, "MOST", 1)


def kept(name, problem, memory=2**28):
    """What is kept of a problem: L⁻¹g_i, or the gradients and 𝓗⁻¹, whatever it is worth and however badly conditioned that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_module, "SMALL", 0 if name in INVERSE else 2**40)
        patch.setattr(training_module, "ILL", 2.0**100)
        problem = in_contrasts(problem) if "contrasts" in name else problem
        training = prepare(problem, CURVATURES["ggn"]().factor(problem), memory, keep_solved=False)
    assert (training.inverse is not None) == (name in INVERSE)
    return training


def prepared(name, seed, *, n=300, m=60, penalty=0.7, close=0):
    """A bag, of which `close` points are next to others, and objects."""
    model, X, y, Xt = draw(name.split()[0], seed, n=n, m=m, close=close)
    return kept(name, Problem(model, X, y, penalty)), Xt


def of_class(training):
    """Weights (n, C) with which a label is compared with the points that have it."""
    return (training.problem.y[:, None] == torch.arange(training.problem.n_classes)).double()


def same(training, X):
    """All schemes, of all points and class by class, as they are and with weights, which are eighths: sums of them are exact."""
    found = []
    weights = (torch.randint(80, (training.problem.n,), generator=torch.Generator().manual_seed(0)) / 8.0).double()
    deleted = itertools.product((1.0,), (False, True), (None, weights))
    for q, by_class, points in (*deleted, (0.5, False, None), (0.0, True, weights), (0.0, False, None)):
        weight = of_class(training) if by_class else None if points is None else torch.ones_like(of_class(training))
        weight = weight if points is None else weight * points[:, None]
        ours = tiled_counts(training, X, q, by_class=by_class, weight=points)
        double = count_scores(direct, training, X, q, weight)
        found.append(np.array_equal(ours.greater, double.greater) and np.array_equal(ours.equal, double.equal))
    return all(found)


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
        monkeypatch.setattr(candidates_module if constant == "OBJECTS" else tiles, constant, value)
    assert same(training, X)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_what_the_classes_share_does_not_matter(name):
    """Logits that are large together: losses of candidates are formed as `count_scores` forms them."""
    model, X, y, Xt = draw(name, 0, n=300, m=20)
    with torch.no_grad():
        list(model.parameters())[-1].add_(1e5)
    training = kept(name, Problem(model, X, y, 0.7))
    assert same(training, torch.cat([X[:60], Xt]))


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_products_that_are_nothing_beside_ties(name):
    """Where all of a point's influence is far below the tolerance, windows hold what is tied all the same."""
    training, _ = prepared(name, 0, penalty=1e25, close=20)
    assert same(training, training.problem.X)


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
        patch.setattr(tiles, "_again", lambda *a: pairs.append(a[5].shape[1]) or again(*a))
        assert same(training, torch.cat([X, X * (1 + 1e-9)]))
    assert sum(pairs) >= 40  # each with itself, at least


@pytest.mark.parametrize("by_root", [True, False])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", range(3))
def test_errors_stay_within_their_bound(name, seed, by_root):
    """L⁻¹ĝ and α − τ in float32 against float64; the bounds are not more than some thousand times too large."""
    training, X = prepared(name, seed)
    found = candidates_of(training, roots_of(training, 10**4) if by_root else [], X, 0.0)
    logits, J = training.problem.jacobian(X)
    half = half_solved(training.factor, candidate_gradients(SOFTMAX, J, logits)).flatten(0, 1)
    exact = half if training.inverse is None else training.factor.back(half)
    off = torch.linalg.vector_norm(found.rows.double() - exact, dim=1)
    assert (off <= found.error).all() and (off > 1e-4 * found.error).any()
    assert (torch.linalg.vector_norm(exact, dim=1) <= found.length).all()
    assert (torch.linalg.vector_norm(half, dim=1) <= found.rho).all()
    missed = (found.tau - all_scores(direct, training, X, 0.0)[1].flatten()).abs()
    assert (missed <= found.off).all() and (missed > 1e-4 * found.off).any()
    found = candidates_of(training, roots_of(training, 10**4) if by_root else [], X, 1.0)
    assert not found.off.any()
    bag, (alpha, tau) = Points.of(training, 1.0), all_scores(direct, training, X, 1.0)
    points, b = bag.single
    excess = (b - tau.float().flatten()[:, None]) - found.rows @ points.T
    true = (alpha - tau[..., None]).flatten(0, 1)[:, bag.order]
    own, p = (2 * tiles.UNIT) * tau.abs().flatten(), training.problem.p
    bound = own[:, None] + 2 * tiles.UNIT * bag.b.abs()
    bound = bound + bag.length * (tiles.UNIT * (p + 6) * found.length + found.error)[:, None]
    bound = bound + bag.sigma * (tiles.UNIT * (p + 2) * found.rho)[:, None]
    worst = float(((excess - true).abs() / bound).max())
    assert 1e-3 < worst <= 1


@given(seed=SEEDS, n=st.integers(1, 40), rows=st.integers(1, 4), tiles_=st.integers(2, 7))
@settings(deadline=None)
def test_ranges_hold_what_is_needed_and_end_with_the_points(seed, n, rows, tiles_):
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.randint(n + 1, (2, rows, tiles_), generator=generator).sort(0).values
    low, high = (ends.sort(1).values if seed % 2 else ends for ends in (low, high))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILES", tiles_)
        first, step, width = tiles._ranges(low, high, n)
    start = first[:, None] + step[:, None] * torch.arange(tiles_)
    stop = start + width[:, None]
    assert (start >= 0).all() and (start <= low).all() and (high <= stop).all() and (stop <= n).all()
    # None that begins as early has a larger step or a smaller width.
    assert (first == low.amin(1)).all() and ((stop == high).any(1)).all()
    later = start + torch.arange(tiles_)
    assert ((later > low) | (later + (high - later).amax(1)[:, None] > n)).any(1).all()


def bag_of(b, v, s=None):
    """Points with scores b (n,) and rows v (n, p), as they are sorted: L⁻¹g_i, or gradients where they have self-influences s (n,)."""
    kept_half, inverse = (v, None) if s is None else (None, torch.eye(v.shape[1], dtype=v.dtype))
    s = (v**2).sum(1) if s is None else s
    problem, factor = SimpleNamespace(n=len(v), p=v.shape[1], X=v), SimpleNamespace(accuracy=0.0)
    rows = [Rows(v, torch.ones_like(v[:, :1]))]
    known = b - s, s, torch.zeros_like(s)
    return Points(Training(problem, factor, *known, rows, None, 2**28, kept_half, inverse), 1.0)


def near_pairs(bag, tau, exact, rows, error, rho=None, moved=0.0):
    """How many pairs float32 leaves, of points and candidates whose rows `exact` (k, p) are known as `rows` to within `error`.

    What it decides is right. The candidates' ρ are the lengths of their rows where they are not given, and their τ is known as moved.
    """
    length = torch.linalg.vector_norm(exact, dim=1) + error
    off = torch.zeros_like(tau) + abs(moved)
    candidates = Candidates(tau, tau + moved, off, rows, error, length, length if rho is None else rho)
    above, near, _ = tiles._count(bag, candidates, 1e-14, 2**28)
    left = torch.ones(len(tau), len(bag.b), dtype=torch.bool)
    left[near[0], near[1]] = False
    # In double precision b − τ − v·w errs by a few parts in 1e16 of its terms, and here it is larger, or left.
    true = bag.b - tau[:, None] - exact @ flat(bag.training.gradients)[bag.order].T
    counted = above.long().index_add(0, near[0], -near[2])
    assert ((true > 0) & left).sum(1).equal(counted)
    assert near.shape[1] == (~left).sum()
    return near.shape[1]


@pytest.mark.parametrize("off", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("size", [1.0, 1e-12, 1e9])
@given(seed=SEEDS, k=st.integers(1, 60), n=st.integers(3, 60))
@settings(max_examples=20, deadline=None)
def test_what_is_decided_is_right_however_close_it_is(size, off, seed, k, n):
    """Points whose scores miss a candidate's by about what L⁻¹ĝ is off by, in the worst direction, or by what float32 loses.

    Of points with larger scores h is longer, and of candidates some L⁻¹ĝ are a thousand times shorter, and known so much better.
    """
    generator = torch.Generator().manual_seed(seed)
    h, exact = (torch.randn(rows, 35, dtype=torch.float64, generator=generator) for rows in (n, k))
    b = torch.rand(n, dtype=torch.float64, generator=generator) * 9 + 60
    h *= 10 ** ((b - 69)[:, None] / 3)
    short = 0.03 * 1e-3 ** torch.randint(2, (k,), generator=generator).double()
    exact *= short[:, None]
    ties = min(n, k) // 2
    sign = torch.randint(2, (ties,), generator=generator) * 2 - 1
    wrong, error = exact.clone(), off * short
    wrong[:ties] += (error[:ties] * sign / h[:ties].norm(dim=1))[:, None] * h[:ties]
    miss = (0.5 * error[:ties] * h[:ties].norm(dim=1) + 60 * U) * sign
    tau = torch.rand(k, dtype=torch.float64, generator=generator) * 12 + 58
    tau[:ties] = b[:ties] - (h[:ties] * exact[:ties]).sum(1) - miss
    error = error + 2 * U * exact.norm(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("TILE", 3), ("TILES", 4)):
            patch.setattr(tiles, constant, value)
        bag = bag_of(b * size**2, h * size)
        near = near_pairs(bag, tau * size**2, exact * size, (wrong * size).float(), error * size)
    assert near <= ties + 0.1 * n * k


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_gradients_that_are_long_where_the_curvature_is_large_lose_more_than_their_influences_tell(seed):
    """|g||𝓗⁻¹ĝ| is hundreds of times σρ, and so is what float32 loses of their product; gradients are of many lengths."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    Q = torch.linalg.qr(normal(35, 35))[0]
    M = (Q * torch.tensor([1.0, *[1e-6] * 34], dtype=torch.float64)) @ Q.T
    g = normal(40, 35) * 10 ** normal(40, 1)
    g -= (g @ Q[:, :1]) @ Q[:, :1].T * (1 - 1e-3)
    ghat = normal(40, 1) * Q[:, 0]
    W = (ghat @ M).float()  # as they are known: exactly
    s, rho = ((g @ M) * g).sum(1), ((ghat @ M) * ghat).sum(1).sqrt() * (1 + 1e-6)
    b, length = torch.rand(40, dtype=torch.float64, generator=generator), g.norm(dim=1) * W.norm(dim=1)
    assert (length > 100 * s.sqrt() * rho).all()
    tau = b - (g * W.double()).sum(1) + 0.1 * U * length * normal(40)
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("TILE", 4), ("TILES", 2)):
            patch.setattr(tiles, constant, value)
        near = near_pairs(bag_of(b, g, s), tau, W.double(), W, torch.full((40,), 1e-12, dtype=torch.float64), rho)
    assert 20 < near < 1500  # of 1,600


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
@given(seed=SEEDS, across=st.booleans())
@settings(max_examples=20, deadline=None)
def test_whatever_float32_may_lose_what_is_decided_is_right(size, seed, across):
    """Each point's rows and score are moved, to the other side, by what p additions may lose of its candidate's product, counted by hand.

    Across: gradients are long where the curvature is large, products are small, and b − τ is hardly larger.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    n, p = 12, 35
    w = torch.nn.functional.normalize(normal(n, p)).float().double()
    if across:  # along one direction, in which all are short
        w = w[:1] * (1 + torch.rand(n, 1, dtype=torch.float64, generator=generator)).float().double()
        w = w.float().double()
    v = w.clone()
    if across:
        v = normal(n, p)
        v = torch.nn.functional.normalize(v - (v * w).sum(1, keepdim=True) * w / (w**2).sum(1, keepdim=True)) + 1e-3 * w
    b = size * (1 + torch.rand(n, dtype=torch.float64, generator=generator))
    side = (torch.randint(2, (n,), generator=generator) * 2 - 1).double()
    k = (v * w).sum(1)
    terms = (p + 2) * v.norm(dim=1) * w.norm(dim=1), (p + 1) * k.abs(), 2 * b + k.abs()
    tau = b - k - 0.01 * U * side * sum(terms)
    bag = bag_of(b, v, 2 * k.abs() if across else None)
    rows, score = bag.single
    moved = side[:, None] * terms[0][:, None] * w / (w**2).sum(1, keepdim=True)
    rows += (0.97 * U * moved[bag.order]).float()
    score.copy_((b - 0.97 * U * side * (terms[1] + 0.5 * terms[2]))[bag.order])
    rho = (w.norm(dim=1) * (1 + 1e-6)) if not across else 2 * k.abs().sqrt()
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("TILE", 1), ("TILES", 2)):
            patch.setattr(tiles, constant, value)
        error = torch.full((n,), 1e-12, dtype=torch.float64)
        assert near_pairs(bag, tau, w, w.float(), error, rho) > 0


@pytest.mark.parametrize("size", [1.0, 1e-9])
@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_candidates_whose_own_score_is_known_roughly(size, seed):
    """As much as to change sides with points, whether these are within the reach of their products or not."""
    generator = torch.Generator().manual_seed(seed)
    h, exact = (size * torch.randn(30, 35, dtype=torch.float64, generator=generator) for _ in range(2))
    b = torch.rand(30, dtype=torch.float64, generator=generator)
    moved = 1e-3 * torch.randn(30, dtype=torch.float64, generator=generator)
    tau = b - (h * exact).sum(1) - 0.5 * moved
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("TILE", 2), ("TILES", 3)):
            patch.setattr(tiles, constant, value)
        near = near_pairs(bag_of(b, h), tau, exact, exact.float(), 2 * U * exact.norm(dim=1) + 1e-30, moved=moved)
    assert 30 <= near < 300


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_products_that_cancel_are_decided_by_what_their_terms_lose(seed):
    """h ⊥ ĥ nearly, and both long: b and τ are small against the terms of h·ĥ."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(20, 35, dtype=torch.float64, generator=generator).float()
    h = torch.randn(20, 35, dtype=torch.float64, generator=generator)
    exact = half.double()
    h -= (h * exact).sum(1, keepdim=True) / (exact**2).sum(1, keepdim=True) * exact
    b = 1e-4 * torch.rand(20, dtype=torch.float64, generator=generator)
    tau = b - (h * exact).sum(1) + 5 * U * torch.randn(20, dtype=torch.float64, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("TILE", 4), ("TILES", 2)):
            patch.setattr(tiles, constant, value)
        near = near_pairs(bag_of(b, h), tau.clamp_min(0), exact, half, torch.full((20,), 1e-12, dtype=torch.float64))
    assert 10 < near < 200


@pytest.mark.parametrize(("point", "candidate"), [(1e-40, 1e10), (1e-20, 1e-22), (1e-44, 1e-2)])
def test_numbers_that_vanish_in_single_precision_decide_nothing(point, candidate):
    """Entries, or their products, below the smallest float32; b and τ are smaller still, or differ by less."""
    h = torch.full((30, 35), point, dtype=torch.float64) * torch.linspace(0.3, 1, 30, dtype=torch.float64)[:, None]
    exact = torch.full((9, 35), candidate, dtype=torch.float64)
    exact[::2] *= -1
    product = 35 * point * candidate
    b, tau = (product * torch.linspace(0, 1, size, dtype=torch.float64) for size in (30, 9))
    error = 2 * U * exact.norm(dim=1) + 35 * tiles.TINY
    assert near_pairs(bag_of(b, h), tau, exact, exact.float(), error) > 0


@pytest.mark.parametrize("by_root", [True, False])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("sure", [1, 30, 300, 3000])
@pytest.mark.parametrize("penalty", [1e-9, 1e-6, 1e50])
def test_bounds_hold_for_sure_models_and_any_penalty(name, sure, penalty, by_root):
    """Gradients that vanish, L⁻ᵀ of which nearly all cancels, and L⁻ᵀ whose squares vanish."""
    model, X, y, Xt = draw(name.split()[0], 1, n=300, m=60)
    with torch.no_grad():
        for q in list(model.parameters())[-2:]:
            q *= sure
    training = kept(name, Problem(model, X, y, penalty))
    problem = training.problem
    found = candidates_of(training, roots_of(training, 10**4) if by_root else [], Xt, 0.0)
    logits, J = problem.jacobian(Xt)
    half = half_solved(training.factor, candidate_gradients(SOFTMAX, J, logits)).flatten(0, 1)
    exact = half if training.inverse is None else training.factor.back(half)
    assert (torch.linalg.vector_norm(half, dim=1) <= found.rho).all()
    assert (torch.linalg.vector_norm(exact, dim=1) <= found.length).all()
    assert (torch.linalg.vector_norm(found.rows.double() - exact, dim=1) <= found.error).all()
    tau = SOFTMAX.candidates(logits).flatten() - (half**2).sum(1)
    assert ((found.tau - tau).abs() <= found.off + 2.0**-50 * tau.abs()).all()


def test_no_pair_is_formed_again_twice(monkeypatch):
    """Whoever fills up the last tiles."""
    for constant, value in (("TILE", 5), ("TILES", 4)):
        monkeypatch.setattr(tiles, constant, value)
    training, X = prepared("logistic", 3, close=20)
    candidates = candidates_of(training, [], torch.cat([training.problem.X[:4], X[:1]]), 1.0)
    last = int(candidates.tau.argmax())
    bag = Points.of(training, 1.0)
    # All points tie with the last candidate, whose copies fill half of the tiles.
    bag.b, bag.single[1][:] = candidates.tau[last].repeat(300), candidates.tau[last]
    bag.single[0][:] = 0.0
    _, near, _ = tiles._count(bag, candidates, training.rounding, 2**28)
    assert near.shape[1] == len({(int(c), int(i)) for c, i, _ in near.T}) and int((near[0] == last).sum()) == 300


@pytest.mark.parametrize("name", ["cnn", "residual", "resnet"])
@pytest.mark.parametrize("m", [1, 40])
def test_networks_with_a_prefix(name, m):
    """Of which no pair may be left to be formed again."""
    training, X = prepared(name, 0, n=60, m=m)
    assert training.halved is not None and same(training, X)
    assert same(training, torch.cat([X, training.problem.X[:5]]))


@pytest.mark.parametrize("name", ["mlp", "logistic"])
def test_the_default_dtype_does_not_matter(name, float64_by_default):
    training, X = prepared(name, 0)
    assert training.problem.X.dtype == torch.float64 and same(training, X)


def test_products_of_less_than_single_precision_are_left_alone(less_than_single):
    assert not is_worth_it(prepared("mlp", 0)[0], 10**4)


def test_little_room_is_kept_to(monkeypatch):
    """Neither buffers nor near pairs, of points that are all the same, go beyond it."""
    model, X, y, objects = draw("logistic", 0, n=3000, m=100)
    problem = Problem(model, X[:1].expand(3000, -1).clone(), torch.zeros_like(y), 1.0)
    training = prepare(problem, CURVATURES["ggn"]().factor(problem), 2**28, keep_solved=False)
    bag, candidates = Points.of(training, 1.0), candidates_of(training, [], problem.X[:100], 1.0)
    pairs = 3000 * 100
    for room, done in ((tiles.PAIR * pairs, True), (tiles.PAIR * pairs - 1, False)):
        assert (tiles._count(bag, candidates, training.rounding, room) is not None) == done
    candidates = candidates_of(training, [], objects, 1.0)
    widest = 8 * tiles.TILE * tiles.TILES * 3000
    assert tiles._count(bag, candidates, training.rounding, widest // 2) is None


def test_the_copy_in_single_precision_stays_behind():
    """Neither files nor copies hold it, and they count the same."""
    training, X = prepared("mlp", 0)
    before = len(pickle.dumps(training))
    expected = tiled_counts(training, X, 1.0)
    assert "single" in vars(training.sorted[Points, 1.0, None])
    held = training.halved.numel() * 4
    assert len(pickle.dumps(training)) < before + held / 2
    for other in (pickle.loads(pickle.dumps(training)), copy.deepcopy(training)):
        again = tiled_counts(other, X, 1.0)
        assert np.array_equal(again.greater, expected.greater) and np.array_equal(again.equal, expected.equal)
    tiled_counts(training, X, 0.5)
    assert list(training.sorted) == [(Points, 0.5, None)]  # one scheme's at a time


def test_where_too_much_is_left_or_too_large_double_precision_must_do_it(monkeypatch):
    training, X = prepared("mlp", 4, close=20)
    X = torch.cat([X, training.problem.X[:20]])
    assert tiled_counts(training, X, 1.0) is not None
    monkeypatch.setattr(tiles, "_again", lambda *a: pytest.fail("there were too many"))
    for constant, value in (("MOST", 2**40), ("HUGE", 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(tiles, constant, value)
            assert tiled_counts(training, X, 1.0) is None


def test_candidates_too_far_apart_are_not_met_together(monkeypatch):
    training, X = prepared("logistic", 2, n=2000, m=20, penalty=5.0)
    monkeypatch.setattr(tiles, "WASTE", (1, 0, 0))
    assert tiled_counts(training, X, 1.0) is None


def test_it_is_for_kept_halves_in_double_precision_and_for_enough_candidates(monkeypatch):
    training, _ = prepared("mlp", 0)
    assert is_worth_it(training, 10**4) and not is_worth_it(training, 1)
    solved = prepare(training.problem, training.factor, 2**28, keep_solved=True)
    assert not is_worth_it(solved, 10**4)
    two, _ = prepared("binary", 0)
    assert not is_worth_it(two, 10**4)
    assert is_worth_it(training, 512, by_class=True) and not is_worth_it(training, 511, by_class=True)
    missing = dataclasses.replace(
        training, problem=Problem(training.problem.model, training.problem.X, two.problem.y, 1.0)
    )
    assert is_worth_it(missing, 512) and not is_worth_it(missing, 512, by_class=True)
    monkeypatch.setattr(tiles, "LARGE", training.problem.p - 1)
    assert not is_worth_it(training, 10**4)


@pytest.mark.parametrize(
    ("query", "weighted", "tiled"),
    [
        (Query(1.0, prune=True), False, True),
        (Query(1.0, prune=True, class_conditional=True), of_class, True),
        (Query(1.0, prune=True, class_conditional=True, points=np.full(300, 2.0)), lambda t: 2 * of_class(t), True),
        (Query(1.0, prune=True, points=np.full(300, 3.0)), lambda t: 3 + 0 * of_class(t), True),
        (Query(1.0, prune="auto"), False, True),
        (Query(1.0, prune=False), False, False),
        (Query(1.0, prune=True), lambda training: 1 + of_class(training), False),
        (Query(0.5, prune=True), False, True),
        (Query(0.0, prune=True, class_conditional=True), of_class, True),
        (Query(1.0, "indirect", prune=True), False, False),
    ],
)
def test_it_is_for_the_direct_approximation_and_weights_of_points_and_classes(query, weighted, tiled, monkeypatch):
    monkeypatch.setattr(tiles, "FEW", 3)
    training, X = prepared("mlp", 0, m=200)
    weight = weighted(training) if weighted else None
    expected = count_scores(APPROXIMATIONS[query.approximation], training, X, query.q, weight)
    used, count = [], tiles.tiled_counts
    monkeypatch.setattr(tiles, "tiled_counts", lambda *a: used.append(1) or count(*a))
    found = influence_counts(training, X, weight, query)
    assert np.array_equal(found.greater, expected.greater) and np.array_equal(found.equal, expected.equal)
    assert bool(used) == tiled


@pytest.mark.parametrize("by_class", [False, True])
def test_many_objects_are_predicted_tile_by_tile(by_class, monkeypatch):
    """And have the p-values that they have one by one, and without pruning."""
    monkeypatch.undo()
    X, y = make_classification(
        2600, 30, n_informative=15, n_classes=8, n_clusters_per_class=1, class_sep=0.7, random_state=0
    )
    X, y, objects = X[:2000], y[:2000], np.concatenate([X[2000:], X[:20]])
    used, count = [], tiles.tiled_counts
    monkeypatch.setattr(tiles, "tiled_counts", lambda *a: used.append(count(*a)) or used[-1])
    options = {"method": "influence", "class_conditional": by_class}
    clf = FullConformalClassifier(**options, prune=True).fit(X, y)
    p = clf.predict_p(objects)
    assert len(used) == 1 and used[0] is not None and used[0].touched < 0.5
    assert np.array_equal(p, FullConformalClassifier(**options, prune=False).fit(X, y).predict_p(objects))
    assert np.array_equal(p[-30:], clf.predict_p(objects[-30:])) and len(used) == 1


# Self-influences by 𝓗⁻¹ ---------------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, n=st.integers(1, 40), o=st.integers(1, 5), i=st.integers(1, 7), spread=st.sampled_from([0, 3, 6]))
@settings(max_examples=60, deadline=None)
def test_influences_by_the_inverse_are_those_of_gradients_written_out(seed, n, o, i, spread):
    """gᵀMg literally, and within the rounding granted where M has eigenvalues many powers of ten apart."""
    generator = torch.Generator().manual_seed(seed)
    rows = Rows(*(torch.randn(n, size, dtype=torch.float64, generator=generator) for size in (o, i)))
    Q = torch.linalg.qr(torch.randn(o * i, o * i, dtype=torch.float64, generator=generator))[0]
    M = Q * 10 ** (-spread * torch.rand(o * i, dtype=torch.float64, generator=generator)) @ Q.T
    exact = torch.stack(
        [g @ (M + M.T) @ g / 2 for g in (torch.outer(*row).flatten() for row in zip(*rows, strict=True))]
    )
    off = (linear_influences(rows, (M + M.T) / 2) - exact).abs()
    assert (off <= influence_error(rows, M)).all() and (off <= 1e-13 * squared_norms([rows])).all()


def test_portions_of_points_do_not_matter(monkeypatch):
    training, _ = prepared("logistic by 𝓗⁻¹", 0)
    (rows,) = training.gradients
    for constant, value in (("PORTION", 7), ("TEMPORARY", {"cpu": 1})):
        with monkeypatch.context() as patch:
            patch.setattr(linear, constant, value)
            some = linear_influences(Rows(rows.left[:50], rows.right[:50]), training.inverse)
        torch.testing.assert_close(some, training.self_influence[:50], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", INVERSE)
def test_half_solved_gradients_are_made_where_something_asks_for_them(name, monkeypatch):
    """Not for tiles; for other schemes and weights they are, and counts are those of a problem that keeps them."""
    monkeypatch.setattr(training_module, "PORTION", 70)
    monkeypatch.setattr(engines, "FEW", 0)
    training, X = prepared(name, 1, m=200)
    other = kept(name.split()[0], training.problem)
    assert influence_counts(training, X, None, Query(1.0)).touched < 1 and "halved" not in vars(training)
    weight = 1 + of_class(training)
    for query, given_ in ((Query(0.3, prune=True), None), (Query(1.0, prune=True), weight)):
        ours, theirs = (influence_counts(t, X, given_, query) for t in (training, other))
        assert np.array_equal(ours.greater, theirs.greater) and np.array_equal(ours.equal, theirs.equal)
    torch.testing.assert_close(training.halved, other.halved, rtol=0, atol=1e-12)
    torch.testing.assert_close(training.self_influence, other.self_influence, rtol=1e-11, atol=0)


def features(n=2000):
    """Points of which some features are sums of others: nothing but the penalty tells those apart."""
    return make_classification(n, 45, n_informative=20, n_classes=4, class_sep=0.7, random_state=0)


def test_a_regression_keeps_gradients_and_the_inverse_unless_it_is_badly_conditioned():
    """Then self-influences would lose more digits to cancellation than half-solves do."""
    for l2, whether in ((1e-3, True), (1e-6, False)):
        training = FullConformalClassifier(method="influence", l2=l2).fit(*features())._engine.training
        assert (training.inverse is not None) == whether == (training.kept_half is None)


def cancelling():
    """A bag by 𝓗⁻¹ whose self-influences err by more than scores are granted otherwise: what the classes share is hardly penalised."""
    training, _ = prepared("logistic by 𝓗⁻¹", 0, penalty=1e-6)
    half_solved = (training.factor.half(flat(training.gradients)) ** 2).sum(1)
    granted = training.slack - training.influence_slack
    assert ((training.self_influence - half_solved).abs() > 2 * granted).sum() > 100
    return training


def own_ties(training):
    """Whether each training point, as an object with its label, ties with itself."""
    X, y = training.problem.X, training.problem.y
    return count_scores(direct, training, X, 1.0).equal[np.arange(len(y)), y] >= 1


@pytest.mark.parametrize("keep_solved", [True, False])
def test_points_tie_with_themselves_wherever_their_self_influences_went(keep_solved, monkeypatch):
    """To a shard, or into a file, and to a problem that keeps something else there: what they err by went along."""
    training = cancelling()
    again = prepare(training.problem, training.factor, 2**28, keep_solved, training.known)
    assert again.inverse is None and own_ties(training).all() and own_ties(again).all()
    lost = dataclasses.replace(again, influence_slack=torch.zeros_like(again.loss))
    assert not own_ties(lost).all()
    monkeypatch.setattr(training_module, "SMALL", 0)
    monkeypatch.setattr(training_module, "ILL", 2.0**100)
    problem = training.problem
    common = shards.Common(problem.model, problem.penalty, problem.chunk, 2**28, training.factor)
    part = shards.influence_part(common, shards.Shard(problem.X[:50], problem.y[:50]))
    torch.testing.assert_close(torch.from_numpy(part), torch.stack(training.known)[:, :50], rtol=1e-6, atol=0)


def test_bounds_are_of_self_influences_and_what_they_err_by():
    training = cancelling()
    bag = Points.of(training, 1.0)
    assert (bag.sigma**2 >= (training.self_influence + training.influence_slack)[bag.order] * (1 - 1e-14)).all()
    assert (training.slack > training.influence_slack).all()
    blocks = pruned._Sorted(training, bag.order, 1.0, None)
    assert (blocks.roots**2 >= (training.self_influence + training.influence_slack)[blocks.order] * (1 - 1e-14)).all()
    assert same(training, training.problem.X[:60])


def test_what_is_known_is_not_computed_again(monkeypatch):
    training, _ = prepared("logistic by 𝓗⁻¹", 0)
    monkeypatch.setattr(training_module, "SMALL", 0)
    known = tuple(1 + part for part in training.known)
    again = prepare(training.problem, training.factor, 2**28, False, known)
    assert again.inverse is not None and all(map(torch.equal, again.known, known))


def test_the_inverse_is_for_double_precision_and_enough_memory(monkeypatch):
    training, _ = prepared("logistic by 𝓗⁻¹", 0)
    monkeypatch.setattr(training_module, "SMALL", 0)
    problem, p = training.problem, training.problem.p
    for memory, whether in ((64 * p**2, True), (64 * p**2 - 1, False)):
        lean = Problem(problem.model, problem.X[:3], problem.y[:3], 0.7)
        assert (prepare(lean, training.factor, memory, False).inverse is not None) == whether
    monkeypatch.setattr(training_module, "ILL", 2.0**100)
    single = Problem(copy.deepcopy(problem.model).float(), problem.X.float(), problem.y, 0.7)
    assert prepare(single, CURVATURES["ggn"]().factor(single), 2**28, False).inverse is None


def test_the_inverse_is_for_whole_products(less_than_single, monkeypatch):
    training, _ = prepared("logistic", 0)
    monkeypatch.setattr(training_module, "SMALL", 0)
    assert prepare(training.problem, training.factor, 2**28, False).inverse is None


def test_there_is_no_inverse_of_some_parameters_only():
    """Where idle ones are left out of the factor."""
    H = torch.eye(200, dtype=torch.float64)
    H[:150, :150] += 0.5
    for matrix, whether in ((H, False), (H + 0.01, True)):
        factor = factorise(matrix.clone(), 10**4, 0.0, 0.0, torch.float64)
        assert (factor.inverse() is not None) == whether == (factor.order is None)
    torch.testing.assert_close(factor.inverse(), torch.linalg.inv(H + 0.01), rtol=1e-12, atol=1e-14)


def test_candidates_whose_influence_on_themselves_is_no_number_are_left_to_double_precision():
    """A model that hardly learnt, and an object whose values are infinite in float32: nothing else of it is large."""
    model, X, y, objects = draw("logistic", 0, n=300, m=60)
    for q in model.parameters():
        q.data *= 1e-40
    training = kept("logistic by 𝓗⁻¹", Problem(model, X, y, 1e30))
    objects[3] *= 1e39
    candidates = candidates_of(training, roots_of(training, 10**4), objects, 1.0)
    assert candidates.length.max() < 1e12 and candidates.tau.max() < 2 and not candidates.rho.isfinite().all()
    assert tiled_counts(training, objects, 1.0) is None


def test_a_predictor_read_again_keeps_the_inverse_too(tmp_path):
    X, y = features(2200)
    clf = FullConformalClassifier(method="influence").fit(X[:2000], y[:2000])
    clf.save(tmp_path / "a.fcp")
    again = load(tmp_path / "a.fcp")
    assert np.array_equal(again.predict_p(X[2000:]), clf.predict_p(X[2000:]))
    before, after = clf._engine.training, again._engine.training
    assert before.inverse is not None and after.inverse is not None
    assert torch.equal(before.influence_slack, after.influence_slack) and (after.influence_slack > 0).all()


def test_files_of_an_earlier_version_have_self_influences_without_slack():
    engine = FullConformalClassifier(method="influence").fit(*features())._engine
    values = keeping.pack_influence(engine, None)
    del values["influence_slack"]
    assert not keeping.unpack_influence(values, None).training.influence_slack.any()
    with pytest.raises(StorageError, match="losses"):
        keeping.unpack_influence({**values, "influence_slack": -values["loss"]}, None)
