"""The counter against the literal loop: the same counts whatever is kept, however points tie, and however large or small numbers are."""

import copy
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Live
from oracles import Oracle, algorithm_2
from sklearn.datasets import make_classification
from torch import nn

from fullconformal import FullConformalClassifier, load, pvalues
from fullconformal.curvature import EKFAC
from fullconformal.curvature.base import Halves
from fullconformal.influence.approximations import direct
from fullconformal.influence.candidates import Candidates, every_candidate, root_pays, written_rows
from fullconformal.influence.counter import _Counter, direct_counts
from fullconformal.influence.near import Met, Near
from fullconformal.influence.prepared import prepare
from fullconformal.influence.scores import all_scores, count_scores
from fullconformal.influence.sorted_points import sorted_points
from fullconformal.influence.sources import FromLayers, Kept, Top
from fullconformal.linear.from_problem import fit_linear
from fullconformal.models import linear, mlp
from fullconformal.problem import Problem, flat
from fullconformal.storage import StorageError

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
SEEDS, Q = st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0])
# Of memory: rows of 300 points are kept, and those of FEW are not where p is some hundred.
PLENTY, LITTLE, FEW = 2**28, 2**17, 100


def prepared(name, seed, curvature="ggn", *, n=300, m=20, penalty=0.7, close=0, memory=PLENTY, dtype=torch.float64):
    """What is prepared of a bag, of which `close` points are next to others, and objects."""
    model, X, y, Xt = draw(name, seed, n=n, m=m, close=close)
    problem = Problem(model.to(dtype), X.to(dtype), y, penalty)
    return prepare(problem, CURVATURES[curvature]().factor(problem), memory), Xt.to(dtype)


def without_floor(name, seed, **options):
    """The same of fewer points than parameters, of whose curvature no smallest eigenvalue is known."""
    bag, X = prepared(name, seed, n=30, **options)
    return replace(bag, factor=replace(bag.factor, floor=0.0)), X


def both(bag, X, q, points=None, conditional=False, **options):
    """Counts of the counter and of the literal loop."""
    y, n_classes = bag.problem.y.numpy(), bag.problem.n_classes
    weights = None if points is None else points.numpy()
    weight = pvalues.comparison_weight(y, n_classes, class_conditional=conditional, weights=weights)
    ours = direct_counts(bag, X, q, points, conditional, **options)
    return ours, count_scores(direct, bag, X, q, None if weight is None else torch.as_tensor(weight))


def same(bag, X, q=1.0, points=None, conditional=False, allowed=0):
    """Whether no candidate's counts differ by more than allowed."""
    ours, literal = both(bag, X, q, points, conditional)
    assert 0 <= ours.touched <= 1 and 0 <= ours.solved <= 1
    pairs = (ours.greater, literal.greater), (ours.equal, literal.equal)
    return all(np.abs(a - b).max() <= allowed for a, b in pairs)


def eighths(n, seed=0):
    """Weights of points, of which sums are exact; some are zero."""
    return (torch.randint(80, (n,), generator=torch.Generator().manual_seed(seed)) / 8.0).double()


def same_in_every_way(bag, X):
    """All schemes, of all points and class by class, as they are and with weights."""
    w = eighths(bag.problem.n)
    asked = [(q, points, by) for q in (1.0, 0.5, 0.0) for points in (None, w) for by in (False, True)]
    return all(same(bag, X, *each) for each in asked)


# Every model, curvature, scheme and weight ------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [PLENTY, LITTLE])
@pytest.mark.parametrize(
    ("name", "curvature"),
    [(name, curvature) for name in MODELS for curvature in ("ggn", "kfac")]
    + [(name, "hessian") for name in MODELS if name != "resnet"]  # whose Hessian alone takes as long as all others
    + [(name, curvature) for name in ("mlp", "cnn") for curvature in ("ekfac", "dual")]
    + [("resnet", "ekfac")],
)
@given(
    seed=SEEDS, q=Q, weighted=st.booleans(), conditional=st.booleans(), on_itself=st.booleans(),
    far=st.sampled_from([0.1, 1, 10]),
)  # fmt: skip
@settings(max_examples=4, deadline=None)
def test_counts_are_those_of_the_literal_loop(name, curvature, memory, seed, q, weighted, conditional, on_itself, far):
    """Far objects have influence enough to lift a training point above all losses; training points as objects tie with themselves."""
    n = 300 if memory == PLENTY else FEW
    bag, X = prepared(name, seed, curvature, n=n, m=5, memory=memory)
    assert bag.factor.positive_definite
    X = bag.problem.X[:5] if on_itself else far * X
    ours, literal = both(bag, X, q, eighths(n, seed) if weighted else None, conditional)
    assert np.array_equal(ours.greater, literal.greater) and np.array_equal(ours.equal, literal.equal)
    assert weighted or not on_itself or (literal.equal[np.arange(5), bag.problem.y[:5]] >= 1).all()


def test_what_is_kept_depends_on_the_memory():
    """So that the cases above are of rows kept, made anew, and made from the layers."""
    for name, curvature, from_layers in (("cnn", "ggn", False), ("cnn", "ekfac", True), ("resnet", "kfac", True)):
        plenty, little = (prepared(name, 0, curvature, n=FEW, memory=memory)[0] for memory in (PLENTY, LITTLE))
        assert plenty.half is not None and little.half is None and (little.halves is not None) == from_layers


@pytest.mark.parametrize("name", ["binary", "logistic", "mlp", "cnn"])
@given(seed=SEEDS, q=Q, weighted=st.booleans(), conditional=st.booleans(), n=st.sampled_from([1, 2, 12]))
@settings(max_examples=10, deadline=None)
def test_few_points_and_one_object(name, seed, q, weighted, conditional, n):
    """Classes may have one point or none."""
    for memory in (PLENTY, 2**10):
        bag, X = prepared(name, seed, n=n, m=1, memory=memory)
        points = eighths(n, seed) if weighted else None
        assert same(bag, X, q, points, conditional) and same(bag, bag.problem.X[:1], q, points, conditional)


@pytest.mark.parametrize("memory", [PLENTY, LITTLE])
@pytest.mark.parametrize("name", ["binary", "logistic", "mlp", "cnn"])
@given(seed=SEEDS, q=Q, conditional=st.booleans())
@settings(max_examples=5, deadline=None)
def test_float32(name, memory, seed, q, conditional):
    """A distance may be within rounding of the largest at which scores are tied: of 300 points one, say."""
    n = 300 if memory == PLENTY else FEW
    bag, X = prepared(name, seed, n=n, m=10, memory=memory, dtype=torch.float32, penalty=5.0)
    assert same(bag, torch.cat([X, bag.problem.X[:5]]), q, None, conditional, allowed=1)


def test_float32_is_close_to_float64():
    model, X, y, Xt = draw("mlp", 3, n=300, m=20)
    p = []
    for dtype in (torch.float64, torch.float32):
        problem = Problem(model.to(dtype), X.to(dtype), y, 30.0)
        counts = direct_counts(prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY), Xt.to(dtype), 1.0)
        p.append(pvalues.p_values(counts.greater, counts.equal, 300))
    # A score moves by about 1e-5 of its size, so at most a few of 300 neighbours change sides.
    assert np.abs(p[0] - p[1]).max() <= 3 / 301


def test_the_default_dtype_does_not_matter(float64_by_default):
    bag, X = prepared("mlp", 0)
    assert bag.problem.X.dtype == torch.float64 and same(bag, X)


def test_products_of_less_than_single_precision_decide_nothing(less_than_single):
    bag, X = prepared("mlp", 0, close=20)
    assert same(bag, torch.cat([X, bag.problem.X[:20]]))


# Ties, and numbers of any size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["binary", "logistic", "mlp", "frozen", "odd", "cnn"])
@given(seed=SEEDS, penalty=st.sampled_from([1e-4, 0.7, 50.0]))
@settings(max_examples=3, deadline=None)
def test_points_that_float32_cannot_tell_apart(name, seed, penalty):
    """Candidates that are training points, or next to them, tie with them or miss them by less than float32 knows."""
    bag, X = prepared(name, seed, close=20, penalty=penalty)
    objects = bag.problem.X[:20]
    assert same_in_every_way(bag, torch.cat([X, objects, objects * (1 + 1e-9)]))


@pytest.mark.parametrize("name", ["binary", "logistic", "mlp", "frozen", "odd", "cnn"])
@pytest.mark.parametrize("penalty", [1e-6, 0.7])
def test_float32_errs_by_less_than_what_is_granted(name, penalty):
    """b − k − τ from rounded rows against float64; the bound is not more than some thousand times too large."""
    bag, X = prepared(name, 0, penalty=penalty)
    points = sorted_points(bag, 0.5, False)
    source = Kept(bag, points, X, 0.5)
    made, exact = (source.make(every_candidate(bag, X, 0.5), single) for single in (True, False))
    assert made.single and not exact.single
    near = Near(source, made, _Counter(source, None).points, 2**20)
    rows, b = points.single, points.b.float()
    excess = b[:, None] - made.tau.float() - rows @ made.rows.T
    true = points.b[:, None] - exact.tau - bag.half[points.order] @ exact.rows.T
    granted = near.of_point[:, None] + near.of_score + near.sigma[:, None] * near.of_product
    assert 1e-4 < float(((excess - true).abs() / granted).max()) <= 1


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e6])
@pytest.mark.parametrize("name", ["mlp", "frozen", "odd", "cnn"])
@pytest.mark.parametrize("floor", [True, False])  # without one labels share products, unless there is a prefix
def test_solved_points_in_float32_err_by_less_than_what_is_granted(name, size, floor):
    """The same of 𝓗⁻¹g_i and gradients, which are products of rounded factors, written out or not; objects may be tiny or large."""
    bag, X = prepared(name, 0) if floor else without_floor(name, 0)
    points, X = sorted_points(bag, 1.0, False), size * X
    top = Top(bag, points, X, 1.0, torch.zeros(1000, dtype=torch.long))
    top.hold(None)
    made, exact = (top.make(every_candidate(bag, X, 1.0), single) for single in (True, False))
    assert top.first == 0 and made.single and not exact.single
    assert top.shares == (not floor and name != "cnn")
    met = _Counter(top, None).points._replace(sigma=top.solved.lengths)
    near = Near(top, made, met, 2**20)
    excess = points.b.float() - made.tau.float()[:, None]
    top.subtract(excess, slice(None), met.sigma, made, slice(None))
    true = points.b - exact.tau[:, None] - written_rows(exact) @ top.solved.rows.T
    granted = near.of_point + near.of_score[:, None] + near.sigma * near.of_product[:, None]
    assert float(((excess - true).abs() / granted).max()) <= 1


def test_no_warning_of_torch_reaches_users():
    """As of functions in beta; it gives them once in a process, unless asked to."""
    bag, X = without_floor("mlp", 1, m=300, close=10)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(bag, X, allowed=1)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("name", ["mlp", "frozen", "odd"])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_that_share_their_products_are_counted_as_the_literal_loop_counts_them(name, weighted):
    bag, X = without_floor(name, 1, m=300, close=10)
    points = torch.rand(30, dtype=torch.float64) if weighted else None
    ours, literal = both(bag, torch.cat([X, bag.problem.X]), 1.0, points)
    assert sorted_points(bag, 1.0, False).top is not None
    np.testing.assert_allclose(ours.greater, literal.greater, rtol=0, atol=1e-12 if weighted else 0)
    np.testing.assert_allclose(ours.equal, literal.equal, rtol=0, atol=1e-12 if weighted else 0)


@pytest.mark.parametrize("patience", [0, 100, 10**6])
def test_near_pairs_are_found_now_or_among_many_tiles_at_once(patience):
    """A GPU is asked about many tiles at once; pairs that are no numbers are near, too."""
    bag, X = prepared("logistic", 0)
    source = Kept(bag, sorted_points(bag, 0.5, False), X, 0.5)
    near = Near(source, source.make(every_candidate(bag, X, 0.5), False), _Counter(source, None).points, 2**20)
    near.patience, seeded = patience, torch.Generator().manual_seed(0)
    granted = near.of_point + near.of_score[:, None] + near.sigma * near.of_product[:, None]
    excess = 2 * granted * torch.randn(granted.shape, generator=seeded, dtype=granted.dtype)
    excess[4, 3], excess[7] = torch.nan, torch.inf
    half, places = excess.shape[1] // 2, torch.arange(len(excess))
    for i, c in ((slice(0, half), slice(0, 6)), (slice(half, None), slice(0, 6)), (slice(0, None), slice(6, None))):
        near.look(Met(places[c], i.start, excess[c, i].contiguous(), granted[c, i].amax(1)))
    near.look_again()
    c, i, value = (torch.cat(part) for part in zip(*near.pairs, strict=True))
    found = torch.zeros_like(excess, dtype=torch.bool)
    found[c, i] = True
    assert near.count == len(c) == int(found.sum()) and torch.equal(found, ~(excess.abs() > granted))
    assert torch.equal(value.nan_to_num(), excess[c, i].nan_to_num())


def test_points_that_are_all_the_same():
    """More ties than a portion of the memory holds."""
    model, X, y, Xt = draw("logistic", 0, n=3000, m=10)
    problem = Problem(model, X[:1].expand(3000, -1).clone(), torch.zeros_like(y), 1.0)
    for memory in (PLENTY, 2**19):
        bag = prepare(problem, CURVATURES["ggn"]().factor(problem), memory)
        assert same(bag, torch.cat([problem.X[:40], Xt]))


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_what_the_classes_share_does_not_matter(name):
    """Logits that are large together: losses of candidates are formed as the literal loop forms them."""
    model, X, y, Xt = draw(name, 0, n=300, m=20)
    with torch.no_grad():
        list(model.parameters())[-1].add_(1e5)
    problem = Problem(model, X, y, 0.7)
    assert same_in_every_way(prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY), torch.cat([X[:60], Xt]))


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_products_that_are_nothing_beside_ties(name):
    """Where all of a point's influence is far below the tolerance, ranges hold what is tied all the same."""
    bag, _ = prepared(name, 0, penalty=1e25, close=20)
    assert same_in_every_way(bag, bag.problem.X)


@pytest.mark.parametrize("name", ["binary", "logistic", "mlp"])
@pytest.mark.parametrize("sure", [30, 3000])
@pytest.mark.parametrize("penalty", [1e-6, 1.0, 1e50])
def test_sure_models_and_any_penalty(name, sure, penalty):
    """Gradients that vanish, L⁻ᵀ of which nearly all cancels, and L⁻ᵀ whose squares vanish in float32."""
    model, X, y, Xt = draw(name, 1, n=300, m=60)
    with torch.no_grad():
        for q in list(model.parameters())[-2:]:
            q *= sure
    problem = Problem(model, X, y, penalty)
    bag = prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY)
    assert all(same(bag, torch.cat([Xt, X[:10]]), q) for q in (1.0, 0.5, 0.0))


def test_what_vanishes_may_meet_what_is_long():
    """Gradients of candidates that the model is sure of vanish in float32, and meet inputs and points that are anything but small."""
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
    assert same(prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY), Xt)


@pytest.mark.parametrize("hidden", [[], [nn.Linear(6, 6), nn.Tanh()]])
def test_objects_beyond_float32_decide_nothing_there(hidden):
    """A model that hardly learnt, or whose first layer is saturated: nothing else of such objects is large."""
    _, X, y, Xt = draw("mlp", 0, n=101, m=150)
    model = nn.Sequential(*hidden, nn.Linear(6, 3)).double().eval()
    if not hidden:
        for q in model.parameters():
            q.data *= 1e-40
    problem = Problem(model, X, y, 0.7 if hidden else 1e30)
    Xt[:50] *= 1e39
    assert same(prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY), Xt)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_ties_do_not_depend_on_what_is_kept(q):
    """With hardly a penalty, weights that move all logits alike meet an inverse of thousands: they must not enter products."""
    kept, _ = prepared("logistic", 5, n=60, penalty=1e-4)
    made, _ = prepared("logistic", 5, n=60, penalty=1e-4, memory=2**15)
    assert kept.half is not None and made.half is None
    X, y = kept.problem.X, kept.problem.y
    a, b = (direct_counts(bag, X, q) for bag in (kept, made))
    assert (a.equal[np.arange(60), y] == 1).all()
    assert np.array_equal(a.greater, b.greater) and np.array_equal(a.equal, b.equal)


# Many candidates --------------------------------------------------------------------------------------------------------


def sure_network(seed=11, n=2000, m=150):
    """Surer than random weights are, with labels that mostly agree."""
    model, X, y, Xt = draw("mlp", seed, n=n, m=m)
    with torch.no_grad():
        model[-1].weight *= 20
        y = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(0)) < 0.99, model(X).argmax(1), y)
    return Problem(model, X, y, 5.0), Xt


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("memory", [PLENTY, 2**20])
def test_candidates_far_from_all_points_are_not_solved_for(conditional, memory):
    problem, Xt = sure_network(m=150 if memory == PLENTY else 30)
    bag = prepare(problem, CURVATURES["ggn"](1.0).factor(problem), memory)
    for q in (1.0, 0.5, 0.0):
        ours, literal = both(bag, Xt, q, conditional=conditional)
        assert np.array_equal(ours.greater, literal.greater) and np.array_equal(ours.equal, literal.equal)
        assert ours.touched < 0.5
        assert q < 1 or ours.solved < (1.0 if conditional or bag.half is None else 0.7)


def test_points_of_largest_score_are_solved_for_in_place_of_candidates():
    """In the deleted scheme. A hundred wrong labels that only those could be above leave few to be solved for."""
    problem, Xt = sure_network()
    bag = prepare(problem, CURVATURES["ggn"](1.0).factor(problem), PLENTY)
    first, second = (direct_counts(bag, Xt, 1.0) for _ in range(2))
    assert sorted_points(bag, 1.0, False).top is not None
    one_by_one = [direct_counts(bag, x[None], 1.0) for x in Xt]
    for name in ("greater", "equal"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
        assert np.array_equal(getattr(first, name), np.concatenate([getattr(part, name) for part in one_by_one]))


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_so_many_candidates_that_the_root_is_written_out(conditional, dtype):
    """All labels of an object are solved for together; some tie with themselves."""
    torch.manual_seed(0)
    model = mlp(12, (11,), 4).to(dtype).eval()
    X, Xt, y = torch.randn(600, 12).to(dtype), torch.randn(120, 12).to(dtype), torch.randint(0, 4, (600,))
    Xt[:20] = X[:20]
    problem = Problem(model, X, y, 5.0)
    bag = prepare(problem, CURVATURES["ggn"](0.1).factor(problem), PLENTY)
    assert root_pays(bag, every_candidate(bag, Xt, 1.0))
    for q in (1.0, 0.5):
        ours, literal = both(bag, Xt, q, conditional=conditional)
        allowed = 0 if dtype == torch.float64 else 1
        assert np.abs(ours.greater - literal.greater).max() <= allowed
        assert np.abs(ours.equal - literal.equal).max() <= allowed and literal.equal.sum() >= 20


def test_rows_that_cancel_are_made_in_float64_and_rounded():
    """A unit's weights before and after it scale one another: a tiny penalty leaves hardly any curvature there, and float32 no digits."""
    torch.manual_seed(0)
    X, Xt, y = torch.randn(600, 12).double(), torch.randn(120, 12).double(), torch.randint(0, 4, (600,))
    problem = Problem(mlp(12, (11,), 4).double().eval(), X, y, 1e-7)
    bag = prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY)
    source, found = Kept(bag, sorted_points(bag, 0.5, False), Xt, 0.5), every_candidate(bag, Xt, 0.5)
    source.begin(found)
    made = source.make(found, single=True)
    assert source.root is not None and made.single and made.whole is not None
    exact, half = source.make(made[5:9], single=False), bag.factor.half(flat(problem.gradients(Xt[found.x], found.y)))
    off = (made.rows - half).norm(dim=1) / half.norm(dim=1)
    assert float(off.max()) < 1e-5 and torch.equal(exact.rows.float(), made.rows[5:9])
    assert same(bag, Xt, 0.5) and same(bag, Xt, 1.0)


def regression(n=2000, m=100):
    """A fitted logistic regression of two classes, and objects."""
    torch.manual_seed(0)
    X, Xt = torch.randn(n, 5).double(), torch.randn(m, 5).double()
    y = (X @ torch.tensor([2.0, 1, 0, -1, 0]).double() + torch.randn(n) > 0).long()
    problem = Problem(linear(5, 2, dtype=torch.float64).eval(), X, y, {"0.weight": 2.0})
    fit_linear(problem)
    return prepare(problem, CURVATURES["ggn"]().factor(problem), PLENTY), Xt


def test_ranges_hold_what_is_needed_and_little_more():
    bag, Xt = regression()
    points = sorted_points(bag, 1.0, False)
    alpha, tau = all_scores(direct, bag, Xt, 1.0)
    rho = Kept(bag, points, Xt, 1.0).make(every_candidate(bag, Xt, 1.0), single=False).rho
    b, sigma, t = points.b, points.sigma, tau.flatten()
    low, high = points.within.find(t, t, rho, 0 * t, torch.zeros(200, dtype=torch.long))
    at = torch.arange(len(b))
    held = (at >= low[:, None]) & (at < high[:, None])
    needed = (b - t[:, None]).abs() <= sigma * rho[:, None]
    assert not (needed & ~held).any() and held.sum() < 2 * needed.sum()
    found = direct_counts(bag, Xt, 1.0)
    assert np.array_equal(found.greater, (alpha > tau[..., None]).sum(-1))


def test_a_few_candidates_far_apart_need_few_products():
    """Not the products of all of them with all points near any of them."""
    torch.manual_seed(0)
    model, X, Xt = mlp(20, (40, 20), 5).eval(), torch.randn(6000, 20), torch.randn(20, 20)
    with torch.no_grad():
        model[-1].weight *= 10
        y = torch.multinomial(torch.softmax(model(X), 1), 1)[:, 0]
    problem = Problem(model, X, y, 60.0)
    bag = prepare(problem, CURVATURES["ggn"](0.01).factor(problem), PLENTY)
    tau = all_scores(direct, bag, Xt, 0.5)[1]
    b, s = bag.loss + 0.5 * bag.self_influence, bag.self_influence
    s_hat = torch.stack(
        [bag.factor.influence(flat(problem.gradients(Xt, torch.full((20,), label))))[0] for label in range(5)], 1
    )
    near = ((b - tau[..., None]).abs() <= (s * s_hat[..., None]).sqrt()).flatten(0, 1)
    assert direct_counts(bag, Xt, 0.5).touched <= near.any(0).double().mean() / 2


@pytest.mark.parametrize("weighted", [False, True])
def test_the_memory_is_kept_to_where_later_objects_need_every_point(weighted):
    """The first objects have little influence; those that follow lie on the border between the labels, and far out."""
    torch.manual_seed(0)
    n, model = 20000, nn.Sequential(nn.Linear(3, 2)).double().eval()
    X, Xt, u = torch.randn(n, 3).double(), torch.randn(128, 3).double(), model[0].weight.diff(dim=0)[0].detach()
    y = model(X).argmax(1)
    y[: n // 10] = 1 - y[: n // 10]
    Xt[64:] = 1e5 * (Xt[64:] - (Xt[64:] @ u)[:, None] * u / (u @ u))
    problem, points = Problem(model, X, y, 1.0), eighths(n) if weighted else None
    memory = 8 * 4 * n * problem.p
    bag = prepare(problem, CURVATURES["ggn"]().factor(problem), memory)
    assert bag.half is not None
    with Live() as live:
        ours = direct_counts(bag, Xt, 1.0, points)
    # A quarter is what is kept; a few numbers a point, in their order, are not counted to the memory of so small a problem.
    assert ours.touched > 0.4 and live.peak < 0.75 * memory + 20 * 8 * n
    assert same(bag, Xt, 1.0, points)


@pytest.mark.parametrize(("inputs", "classes", "n"), [(12, 30, 4000), (60, 3, 20000)])
def test_copies_and_tiles_fit_what_kept_rows_leave_of_the_memory(inputs, classes, n):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, classes)).double().eval()
    X = torch.randn(n, inputs).double()
    problem = Problem(model, X, model(X).argmax(1), 1.0)
    memory = 4 * 8 * problem.n * problem.p
    bag = prepare(problem, CURVATURES["ggn"]().factor(problem), memory)
    assert bag.half is not None
    gradients = sum(part.nbytes for rows in bag.gradients or () for part in rows)
    with Live() as live:
        direct_counts(bag, torch.randn(600, inputs).double(), 1.0)
    assert live.peak + gradients + bag.half.nbytes < memory


def test_progress_ends_with_all_objects():
    bag, X = prepared("mlp", 0, m=7)
    for conditional in (False, True):
        told: list[tuple[int, int]] = []
        direct_counts(bag, X, 1.0, class_conditional=conditional, progress=lambda *done, told=told: told.append(done))
        assert told[-1] == (7, 7) and told == sorted(told)


def test_copies_of_a_predictor_hold_no_second_copy_of_the_points():
    """Neither pickles nor copies hold it, and they count the same."""
    bag, X = prepared("mlp", 0)
    before = len(pickle.dumps(bag))
    expected = direct_counts(bag, X, 1.0)
    assert len(pickle.dumps(bag)) < before + bag.half.numel() * 2
    for other in (pickle.loads(pickle.dumps(bag)), copy.deepcopy(bag)):
        again = direct_counts(other, X, 1.0)
        assert np.array_equal(again.greater, expected.greater) and np.array_equal(again.equal, expected.equal)
    direct_counts(bag, X, 0.5)
    assert len(bag.sorted) == 1  # one scheme's at a time


# Rows in half precision -------------------------------------------------------------------------------------------------


@given(seed=SEEDS, q=Q, far=st.sampled_from([1, 10]))
@settings(max_examples=3, deadline=None)
def test_half_precision_errs_upwards(seed, q, far):
    """As a GPU has it: what is above is above, what is not below is not below, and few pairs are tied for it."""
    exact, X = prepared("resnet", seed, "ekfac", m=5)
    expected = count_scores(direct, exact, far * X, q)
    problem = Problem(exact.problem.model.float(), exact.problem.X.float(), exact.problem.y, 0.7)
    bag = prepare(problem, CURVATURES["ekfac"]().factor(problem), LITTLE)
    ours = direct_counts(bag, far * X.float(), q, half_precision=True)
    assert (ours.greater <= expected.greater).all()
    assert (ours.greater + ours.equal >= expected.greater + expected.equal).all()
    assert ours.equal.mean() < 10


@pytest.mark.parametrize("name", ["mlp", "resnet"])
@pytest.mark.parametrize("size", [1.0, 1e-12])  # of the residuals: sure points have gradients near nothing
@pytest.mark.parametrize("part", [50, 2**15])  # many parts, the last filled up with zeros, and one
def test_products_in_half_precision_keep_to_their_bound(name, size, part):
    model, X, y, _ = draw(name, 6, n=30)
    problem = Problem(model.float(), X.float(), y, 0.7)
    factor = EKFAC().factor(problem)
    whole = factor.half(flat(problem.gradients(problem.X, y))).float() * size
    exact = whole.double() @ whole.double().T
    s = exact.diagonal().float()

    class Given(Halves):
        def half(self, X, labels, scale, out):
            out[..., : problem.p] = whole[labels] * scale[..., None]

        def influences(self, X, labels):
            raise AssertionError

    bag = prepare(problem, factor, PLENTY)
    source = FromLayers(bag, sorted_points(bag, 1.0, False), problem.X, 1.0, Given(), low=True, part=part)
    rows = source._rows(problem.X, torch.arange(30)[:, None], s[:, None])
    assert rows.dtype == torch.float16 and source.parts == -(-problem.p // part)
    source.held, excess = rows, torch.zeros(20, 30)
    source.subtract(excess, slice(None), s.sqrt(), Candidates(*[s[:20]] * 5, rows), slice(0, 20))
    k = -excess
    assert ((k.double() - exact[:20]).abs() <= source.error * s[:20, None].sqrt() * s.sqrt()).all()


# In the classifier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [False, True])
def test_objects_have_the_same_p_values_together_one_by_one_and_without_pruning(conditional):
    X, y = make_classification(
        2600, 30, n_informative=15, n_classes=8, n_clusters_per_class=1, class_sep=0.7, random_state=0
    )
    X, y, objects = X[:2000], y[:2000], np.concatenate([X[2000:], X[:20]])
    options = {"method": "influence", "class_conditional": conditional}
    clf = FullConformalClassifier(**options).fit(X, y)
    p = clf.predict_p(objects)
    assert np.array_equal(p, FullConformalClassifier(**options, prune=True).fit(X, y).predict_p(objects))
    assert np.array_equal(p, FullConformalClassifier(**options, prune=False).fit(X, y).predict_p(objects))
    assert np.array_equal(p[-30:], np.concatenate([clf.predict_p(x[None]) for x in objects[-30:]]))


def features(n=2200):
    """Points of which some features are sums of others: nothing but the penalty tells those apart."""
    return make_classification(n, 45, n_informative=20, n_classes=4, class_sep=0.7, random_state=0)


def test_a_predictor_read_again_gives_the_same_p_values(tmp_path):
    X, y = features()
    clf = FullConformalClassifier(method="influence").fit(X[:2000], y[:2000])
    clf.save(tmp_path / "a.fcp")
    assert np.array_equal(load(tmp_path / "a.fcp").predict_p(X[2000:]), clf.predict_p(X[2000:]))


def test_self_influences_that_are_no_numbers_are_refused():
    fitted = FullConformalClassifier(method="influence").fit(*features())._fitted
    state = fitted.state()
    with pytest.raises(StorageError, match="losses"):
        type(fitted).from_state({**state, "self_influence": state["self_influence"] * torch.nan})


# Two classes ------------------------------------------------------------------------------------------------------------

SCHEMES = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}


def two_classes(seed, n, d, m):
    """Points of two overlapping classes with labels that are words, and objects."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + m, d))
    y = np.where(X[:, 0] + rng.normal(size=n + m) > 0, "yes", "no")
    y[:2] = ["no", "yes"]
    return X[:n], y[:n], X[n:]


@given(
    seed=SEEDS, n=st.integers(3, 40), d=st.integers(1, 5), scheme=st.sampled_from(list(SCHEMES)),
    l2=st.sampled_from([1e-2, 0.1, 1.0]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_two_classes_have_the_p_values_of_the_literal_algorithm(seed, n, d, scheme, l2):
    X, y, objects = two_classes(seed, n, d, 3)
    clf = FullConformalClassifier(method="influence", scheme=scheme, l2=l2).fit(X, y)
    p, problem = clf.predict_p(objects), clf._fitted.problem
    oracle = Oracle(problem.model, problem.X, problem.y, {"0.weight": n * l2})
    H = oracle.hessian()
    _, alpha, tau = algorithm_2(oracle, H, 0.0, torch.as_tensor(objects), SCHEMES[scheme], "direct")
    gap = alpha - tau[:, None]
    # Rounding of an explicit inverse in the oracle: the condition of H, times some hundred units of what is added up.
    unit = 1e-14 * float(torch.linalg.cond(H)) * (1 + np.abs(alpha) + np.abs(tau[:, None]))
    low, high = (1 + (gap > unit).sum(1)) / (n + 1), (1 + (gap >= -unit).sum(1)) / (n + 1)
    assert (low - 1e-12 <= p).all() and (p <= high + 1e-12).all()
    assert (high - low).mean() < 0.05  # so that the bounds say something


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_two_classes_with_ties_have_the_p_values_of_the_literal_loop(scheme, seed):
    X, y, objects = two_classes(seed, 300, 6, 50)
    X[1::3], y[1::3] = X[::3], y[::3]
    objects = np.concatenate([objects, X[:30]])
    p, literal = (
        FullConformalClassifier(method="influence", scheme=scheme, prune=prune).fit(X, y).predict_p(objects)
        for prune in ("auto", False)
    )
    np.testing.assert_array_equal(p, literal)
    assert len(np.unique(p)) > 50


def test_ties_count_by_a_fraction_where_p_values_are_smoothed():
    X, y, _ = two_classes(0, 60, 2, 1)
    X, y = np.concatenate([X, X]), np.concatenate([y, y])
    ours, literal = (
        FullConformalClassifier(method="influence", random_state=0, prune=prune).fit(X, y) for prune in ("auto", False)
    )
    p, smooth = ours.predict_p(X[:60]), ours.predict_p(X[:60], smoothing=True)
    np.testing.assert_array_equal(smooth, literal.predict_p(X[:60], smoothing=True))
    own = np.arange(60), (y[:60] == "yes").astype(int)
    assert (smooth[own] < p[own]).all()


@pytest.mark.parametrize("case", ["weights", "class_conditional", "far"])
def test_two_classes_with_weights_by_class_and_far_out(case):
    X, y, objects = two_classes(0, 100, 3, 20)
    asked, options = {}, {"class_conditional": case == "class_conditional"}
    if case == "weights":
        asked = {"weights": (np.linspace(1, 2, len(X)), np.ones(len(objects)))}
    if case == "far":
        objects = np.concatenate([objects, [[1e120, 0.0, 0.0]]])
    p, literal = (
        FullConformalClassifier(method="influence", prune=prune, **options).fit(X, y).predict_p(objects, **asked)
        for prune in ("auto", False)
    )
    np.testing.assert_allclose(p, literal, rtol=0, atol=1e-12 if case == "weights" else 0)


def test_two_classes_saved_copied_and_pickled_predict_the_same(tmp_path):
    X, y, objects = two_classes(0, 100, 3, 20)
    clf = FullConformalClassifier(method="influence").fit(X, y)
    p = clf.predict_p(objects)
    for other in (copy.deepcopy(clf), pickle.loads(pickle.dumps(clf))):
        np.testing.assert_array_equal(other.predict_p(objects), p)
    clf.save(tmp_path / "p.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "p.safetensors").predict_p(objects), p)
    np.testing.assert_array_equal(clf.predict_p(objects), p)


def test_the_training_points_may_be_overwritten_after_the_fit():
    X, y, objects = two_classes(0, 100, 3, 20)
    clf = FullConformalClassifier(method="influence", class_conditional=True).fit(X, y)
    expected = copy.deepcopy(clf).predict_p(objects)
    X[:] = 0
    np.testing.assert_array_equal(clf.predict_p(objects), expected)
