"""What makes small problems fast changes nothing: checks, threads, Newton's method, what is kept of a pass."""

import numpy as np
import pytest
import torch
from cases import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.datasets import make_classification
from sklearn.utils.validation import validate_data

from fullconformal import FullConformalClassifier, SplitConformalClassifier
from fullconformal.curvature import GGN, Hessian
from fullconformal.estimators.inputs import encode_labels
from fullconformal.linear.bag import LinearBag
from fullconformal.losses import SOFTMAX
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import BLAS, FEW, LITTLE, alone, blas_alone, threads

# Newton's method --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), n=st.integers(2, 200), d=st.integers(1, 8), spread=st.sampled_from([0.0, 1.0, 4.0]))
@settings(max_examples=40, deadline=None)
def test_binary_fits_leave_no_gradient(seed, n, d, spread):
    """Whatever the scales of the features."""
    rng = np.random.default_rng(seed)
    a = np.hstack([rng.normal(size=(n, d)) * 10 ** rng.uniform(-spread, spread, d), np.ones((n, 1))])
    target, penalty = rng.integers(0, 2, n), np.full(d + 1, 0.01 * n)
    found = LinearBag(torch.tensor(a), torch.tensor(target), 2, torch.tensor(penalty)).fit
    w = found.theta[:, 0, 0].numpy()
    g = (expit(a @ w) - target) @ a + penalty * w
    # Logits are within about 1e-8 of the minimiser's (a last step of 5e-5, converging quadratically), and residuals within a quarter.
    assert found.found and (np.abs(g) <= 1e-8 * (np.abs(a).sum(0) + penalty * np.abs(w))).all()


def test_features_whose_squares_are_beyond_float32_are_fitted():
    rng = np.random.default_rng(0)
    a, target = torch.tensor(rng.normal(size=(100, 2))), torch.tensor(rng.integers(0, 2, 100))
    w = LinearBag(a, target, 2, torch.ones(2).double()).base.theta
    large = LinearBag(1e25 * a, target, 2, 1e50 * torch.ones(2).double()).base.theta  # the same in other units
    torch.testing.assert_close(1e25 * large, w, rtol=1e-12, atol=0)


# Threads ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def blas_threads():
    """Tells how many threads NumPy's products have, which are two at first."""
    pools = BLAS.pools
    assert pools.info()
    with pools.limit(limits=2):
        yield lambda: {library["num_threads"] for library in pools.info()}


def test_numpy_has_one_thread_for_little_and_gets_the_others_back(blas_threads):
    with pytest.raises(KeyError), blas_alone((LITTLE, 1)):
        assert blas_threads() == {1}
        raise KeyError
    assert blas_threads() == {2}
    for shape in ((LITTLE + 1, 1), (3, 1500)):  # of many points, and with a large Hessian
        with blas_alone(shape):
            assert blas_threads() == {2}


def test_numpy_gets_its_threads_back_when_the_last_of_several_callers_is_done(blas_threads):
    """Whoever came second, in another thread of Python, found one thread; it must not put that back."""
    first, second = blas_alone((1, 1)), blas_alone((1, 1))
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
    assert blas_threads() == {2}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_restored_whatever_happens(two_threads):
    with pytest.raises(ZeroDivisionError), threads(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    for work, inside in ((FEW, 1), (FEW + 1, 2), (float("inf"), 2)):
        with alone(work):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2


def test_fits_and_predictions_leave_the_number_of_threads(two_threads):
    X, y = make_classification(60, 4, random_state=0)
    clf = FullConformalClassifier(method="influence", l2=0.1).fit(X, y)
    assert torch.get_num_threads() == 2
    clf.predict_p(X)
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="not finite"):
        FullConformalClassifier(torch.nn.Linear(4, 2), max_epochs=1).fit(X * 1e37, y)
    assert torch.get_num_threads() == 2


# Checks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FullConformalClassifier, SplitConformalClassifier])
def test_a_plain_matrix_is_checked_as_scikit_learn_does(kind):
    X, y = make_classification(80, 4, random_state=0)
    for given_X in (X, X.astype(np.float32), np.asfortranarray(X)):
        ours, theirs = kind(), kind()
        checked = ours._checked(given_X, y, reset=True)
        expected = validate_data(theirs, given_X, y, dtype="numeric")
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(checked, expected, strict=True))
        assert ours.n_features_in_ == theirs.n_features_in_ == 4


@given(st.lists(st.integers(-3, 40), min_size=2, max_size=30), st.sampled_from(["int8", "int64", "uint8"]))
def test_labels_are_encoded_as_numpy_does(labels, dtype):
    y = np.abs(labels).astype(dtype) if dtype == "uint8" else np.array(labels, dtype)
    expected, index = np.unique(y, return_inverse=True)
    if len(expected) < 2:
        with pytest.raises(ValueError, match="one class"):
            encode_labels(y)
        return
    classes, ours = encode_labels(y)
    assert np.array_equal(classes, expected) and classes.dtype == y.dtype
    assert np.array_equal(ours, index) and ours.dtype == np.int64


# Problems ---------------------------------------------------------------------------------------------------------------


def test_a_pass_follows_the_parameters():
    """Whoever changes them, logits are those of the parameters there are."""
    model, X, y, _ = draw("binary", 0, n=30, m=1)
    problem = Problem(model, X, y, 1.0)
    for change in (lambda: None, lambda: problem.assign(problem.theta + 1), lambda: model[0].weight.data.add_(1)):
        change()
        with torch.no_grad():
            model[0].bias += 0.5
            expected = model(X)
        assert torch.equal(problem.logits(X), expected)
        assert torch.equal(problem.trace(problem.X).logits, problem.trace(X.clone()).logits)
        assert torch.equal(problem.logits(problem.X), problem.trace(problem.X).logits)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1.0, 30.0, 300.0]))
@settings(max_examples=30, deadline=None)
def test_two_labels_have_the_losses_and_residuals_of_any_number(seed, scale):
    """A third label that is out of the question changes nothing but the way they are computed."""
    rng = torch.Generator().manual_seed(seed)
    f, y = scale * torch.randn(20, 2, dtype=torch.float64, generator=rng), torch.randint(2, (20,), generator=rng)
    three = torch.cat([f, torch.full((20, 1), -torch.inf, dtype=torch.float64)], 1)
    # One exponential and one logarithm, each to a few units in the last place, of an argument with an error of its own size.
    close = {"rtol": 8 * torch.finfo(torch.float64).eps * (1 + 4 * scale), "atol": torch.finfo(torch.float64).tiny}
    torch.testing.assert_close(SOFTMAX.value(f, y), SOFTMAX.value(three, y), **close)
    torch.testing.assert_close(SOFTMAX.candidates(f), SOFTMAX.candidates(three)[:, :2], **close)
    torch.testing.assert_close(SOFTMAX.residual(f, y), SOFTMAX.residual(three, y)[:, :2], **close)


def test_the_curvature_of_one_output_is_the_hessian():
    """Of a linear model followed by frozen linear layers, one with three logits."""
    torch.manual_seed(0)
    after = torch.nn.Linear(1, 3).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), after).double().eval()
    X, y = torch.randn(40, 3).double(), torch.randint(0, 3, (40,))
    problem = Problem(model, X, y, 0.5)
    expected = torch.func.hessian(problem.value)(problem.theta)
    for curvature in (GGN(), Hessian()):
        torch.testing.assert_close(curvature.matrix(problem), expected, rtol=1e-12, atol=1e-12)
