"""Small logistic regressions of two classes by closed forms: the oracle's counts, and everything else as the general engine has it."""

import copy
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from fullconformal.influence.two_classes import two_class_bag
from fullconformal.methods.two_classes import NUMBERS, TwoClasses
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Oracle, algorithm_2
from torch.func import hessian, jacrev

from fullconformal import ConformalWarning, FullConformalClassifier, load
from fullconformal.methods import making
from fullconformal.methods.engines import Influence
from fullconformal.models import linear

SCHEMES = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


def draw(seed, n, d, m):
    """Points of two overlapping classes with labels that are words, and objects."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + m, d))
    y = np.where(X[:, 0] + rng.normal(size=n + m) > 0, "yes", "no")
    y[:2] = ["no", "yes"]
    return X[:n], y[:n], X[n:]


def fitted(seed=0, n=100, d=3, m=20, **options):
    X, y, objects = draw(seed, n, d, m)
    clf = FullConformalClassifier(method="influence", **options).fit(X, y)
    assert type(clf._engine) is TwoClasses
    return clf, X, y, objects


@pytest.fixture
def general(monkeypatch):
    """Fits that do not take the closed forms."""

    def fit(X, y, **options):
        with monkeypatch.context() as patch:
            patch.setattr(making, "is_small", lambda *_: False)
            clf = FullConformalClassifier(method="influence", **options).fit(X, y)
        assert type(clf._engine) is Influence
        return clf

    return fit


@given(
    seed=st.integers(0, 10**6), n=st.integers(3, 40), d=st.integers(1, 5),
    scheme=st.sampled_from(list(SCHEMES)), l2=st.sampled_from([1e-2, 0.1, 1.0]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_the_literal_algorithm(seed, n, d, scheme, l2):
    clf, X, y, objects = fitted(seed, n, d, 3, scheme=scheme, l2=l2)
    p, model = clf.predict_p(objects), linear(d, 2, dtype=torch.float64)
    w = torch.as_tensor(clf._engine.bag.w)
    with torch.no_grad():
        model[0].weight.copy_(w[None, :-1])
        model[0].bias.copy_(w[-1:])
    oracle = Oracle(model, torch.as_tensor(X), torch.as_tensor((y == "yes").astype(int)), {"0.weight": n * l2})
    H = oracle.hessian()
    _, alpha, tau = algorithm_2(oracle, H, 0.0, torch.as_tensor(objects), SCHEMES[scheme], "direct")
    gap = alpha - tau[:, None]
    # Rounding of an explicit inverse in the oracle: the condition of H, times some hundred units of what is added up.
    unit = 1e-14 * float(torch.linalg.cond(H)) * (1 + np.abs(alpha) + np.abs(tau[:, None]))
    low, high = (1 + (gap > unit).sum(1)) / (n + 1), (1 + (gap >= -unit).sum(1)) / (n + 1)
    assert (low - 1e-12 <= p).all() and (p <= high + 1e-12).all()
    assert (high - low).mean() < 0.05  # so that the bounds say something


@given(seed=st.integers(0, 10**6), n=st.integers(2, 30), p=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_bag_at_any_weights_is_what_autograd_says(seed, n, p):
    """Not at the minimum, where a gradient is zero whatever its terms: the warning of a fit that stopped early rests on it."""
    rng = np.random.default_rng(seed)
    a, y, penalty, w = rng.normal(size=(n, p)), rng.integers(0, 2, n), rng.uniform(0.5, 2, p), rng.normal(size=p)
    bag = two_class_bag(a, y.astype(float), penalty, w)
    A, labels, Lambda = torch.as_tensor(a), torch.as_tensor(y), torch.as_tensor(penalty)

    def losses(w):
        z = A @ w
        return torch.nn.functional.cross_entropy(torch.stack([torch.zeros_like(z), z], 1), labels, reduction="none")

    def objective(w):
        return losses(w).sum() + (Lambda * w**2).sum() / 2

    at = torch.as_tensor(w)
    G, H = jacrev(losses)(at), hessian(objective)(at)
    tol = 100 * n * np.finfo(float).eps  # sums of n terms of size one; the penalty keeps 1/𝓗 below 2
    np.testing.assert_allclose(bag.loss, losses(at), rtol=tol, atol=tol)  # torch's lose the digits of sure points
    np.testing.assert_allclose(bag.gradient, jacrev(objective)(at), rtol=0, atol=tol * (1 + np.abs(w).max()))
    np.testing.assert_allclose(bag.self_influence, (G @ torch.linalg.inv(H) * G).sum(1), rtol=tol, atol=tol)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_p_values_are_those_of_the_general_engine(general, scheme, seed):
    clf, X, y, objects = fitted(seed, 300, 6, 50, scheme=scheme)
    X[1::3], y[1::3] = X[::3], y[::3]  # ties
    objects = np.concatenate([objects, X[:30]])
    p = clf.fit(X, y).predict_p(objects)
    assert type(clf._engine) is TwoClasses
    np.testing.assert_array_equal(p, general(X, y, scheme=scheme).predict_p(objects))
    assert len(np.unique(p)) > 50


def test_ties_count_half_where_p_values_are_smoothed(general):
    X, y, _ = draw(0, 60, 2, 1)
    X, y = np.concatenate([X, X]), np.concatenate([y, y])
    small, other = (fit(X, y, random_state=0).predict_p(X[:60], smoothing=True) for fit in (
        lambda X, y, **options: FullConformalClassifier(method="influence", **options).fit(X, y), general,
    ))  # fmt: skip
    np.testing.assert_array_equal(small, other)


@pytest.mark.parametrize("case", ["weights", "class_conditional", "newton", "unpruned", "many", "far"])
def test_what_the_closed_forms_do_not_have_is_asked_of_the_general_engine(general, case):
    clf, X, y, objects = fitted()
    asked, options = {}, {}
    if case == "weights":
        asked = {"weights": (np.linspace(1, 2, len(X)), np.ones(len(objects)))}
    elif case == "many":
        objects = np.resize(objects, (NUMBERS // len(X) + 1, 3))
    elif case == "far":
        objects = np.concatenate([objects, [[1e120, 0.0, 0.0]]])
    else:
        options = {
            "class_conditional": {"class_conditional": True},
            "newton": {"approximation": "newton"},
            "unpruned": {"prune": False},
        }[case]
    p = clf.set_params(**options).predict_p(objects, **asked)
    assert type(clf._engine) is Influence
    np.testing.assert_array_equal(p, general(X, y, **options).predict_p(objects, **asked))


def test_what_is_saved_copied_and_pickled_predicts_the_same(tmp_path):
    clf, _, _, objects = fitted()
    p = clf.predict_p(objects)
    for other in (copy.deepcopy(clf), pickle.loads(pickle.dumps(clf))):
        assert type(other._engine) is TwoClasses
        np.testing.assert_array_equal(other.predict_p(objects), p)
    clf.save(tmp_path / "p.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "p.safetensors").predict_p(objects), p)
    np.testing.assert_array_equal(clf.predict_p(objects), p)


def test_another_thread_may_make_the_general_engine_meanwhile():
    clf, _, _, objects = fitted()
    engine, query = clf._engine, replace(clf._query(), prune=False)

    class Meanwhile(np.ndarray):
        def __len__(self):
            assert engine.training.problem is engine.problem
            return super().__len__()

    found = engine.counts(objects.view(Meanwhile), query)
    np.testing.assert_array_equal(found, engine.counts(objects, query))


def test_the_choice_of_the_curvature_is_told_where_that_was_asked_for(capsys, general):
    X, y, _ = draw(0, 100, 3, 1)
    FullConformalClassifier(method="influence", verbose=1).fit(X, y)
    told = capsys.readouterr().out
    general(X, y, verbose=1)
    assert told == capsys.readouterr().out != ""


def test_the_training_points_may_be_overwritten_after_the_fit(general):
    clf, X, y, objects = fitted(class_conditional=True)
    expected = general(X.copy(), y, class_conditional=True).predict_p(objects)
    X[:] = 0
    np.testing.assert_array_equal(clf.predict_p(objects), expected)


def test_probabilities_and_diagnostics_are_those_of_the_general_engine(general):
    clf, X, y, objects = fitted()
    other = general(X, y)
    np.testing.assert_allclose(clf.predict_proba(objects), other.predict_proba(objects), rtol=1e-12)
    far = [c._engine.log_proba(1e3 * objects) for c in (clf, other)]
    np.testing.assert_allclose(*far, rtol=1e-12, atol=1e-15)  # where one is 0, the other is more precise
    assert type(clf._engine) is TwoClasses and clf._engine.precision(X) == other._engine.precision(X)
    assert str(clf.diagnose()) == str(other.diagnose())
    assert type(clf._engine) is Influence


@pytest.mark.parametrize(("n", "d", "l2"), [(100, 3, 1e-3), (30, 10, 1e-3), (40, 1, 1e-9)])
def test_warnings_are_those_of_the_general_engine(general, n, d, l2):
    """None, too many parameters, and points that decide their own prediction."""
    X, y, _ = draw(1, n, d, 1)
    if l2 < 1e-6:  # separated but for one point
        X, y = np.linspace(-1, 1, n)[:, None], np.where(np.arange(n) < n // 2, "no", "yes")
        y[0] = "yes"
    told = []
    for fit in (lambda: FullConformalClassifier(method="influence", l2=l2).fit(X, y), lambda: general(X, y, l2=l2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConformalWarning)
            fit()
        told.append([str(w.message) for w in caught])
    assert told[0] == told[1] and len(told[0]) == (d == 10)


@pytest.mark.parametrize(("small", "safe"), [(1e-7, True), (1e-9, False)])
def test_a_pivot_at_rounding_level_is_no_curvature(small, safe):
    """𝓗 = diag(½, ¼·small²), which Cholesky's method takes in any case."""
    a, y = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, small]]), np.array([0.0, 1.0, 1.0])
    assert (two_class_bag(a, y, np.zeros(2), np.zeros(2)) is not None) == safe


def test_a_curvature_that_needs_damping_is_left_to_the_general_engine():
    X = np.concatenate([np.linspace(-2, -1, 20), np.linspace(1, 2, 20)])[:, None]
    with pytest.warns(ConformalWarning, match="damped"):
        clf = FullConformalClassifier(method="influence", l2=0.0).fit(np.hstack([X, X]), np.arange(40) // 20)
    assert type(clf._engine) is Influence


def test_a_hessian_that_takes_longer_than_starting_functions_is_left_to_the_general_engine():
    X, y, _ = draw(0, 513, 513, 1)
    assert type(FullConformalClassifier(method="influence").fit(X, y)._engine) is Influence
    assert type(FullConformalClassifier(method="influence").fit(X[:512, :512], y[:512])._engine) is TwoClasses


@pytest.mark.parametrize(
    "options",
    [{"curvature": "hessian"}, {"damping": 0.1}, {"dtype": "float32"}, {"n_jobs": 2}, {"memory_budget": 1e-5}],
)
def test_options_that_ask_for_more_are_left_to_the_general_engine(options):
    X, y, _ = draw(0, 100, 3, 1)
    clf = FullConformalClassifier(method="influence", **options)
    if "memory_budget" in options:
        with pytest.raises(MemoryError, match="memory_budget"):
            clf.set_params(memory_budget=1e-9).fit(X, y)
        return
    assert type(clf.fit(X, y)._engine) is Influence
