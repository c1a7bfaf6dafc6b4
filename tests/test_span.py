"""Objects in coordinates of the training objects' span: scores are those of the columns as they are."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import fullconformal
from fullconformal import CVPlusClassifier, FullConformalClassifier, JackknifePlusClassifier, SplitConformalClassifier
from fullconformal.linear import from_problem
from fullconformal.linear.from_problem import Regression, fit_linear
from fullconformal.linear.span import Span, lengths, span_of
from fullconformal.methods import influence
from fullconformal.models import linear
from fullconformal.problem import Problem

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

EPS = np.finfo(np.float64).eps
IDLE = [0, 3, 4, 8]


def data(n_classes=3, n=40, m=7, d=9, seed=0):
    """Objects of training without IDLE columns, their labels, and objects most of which have them; the second is one of training."""
    rng = np.random.default_rng(seed)
    X, objects = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    y = (X[:, 1] + rng.normal(size=n)).argsort().argsort() * n_classes // n
    X[:, IDLE] = objects[0, IDLE] = 0.0
    objects[1] = X[5]
    return X, y, objects


def wide(n_classes=3, **sizes):
    """The same with more columns than objects, so that there is a basis."""
    return data(n_classes, **{"n": 24, "d": 80, **sizes})


SHAPES = {"columns": data, "basis": wide}


def both(monkeypatch, make, X, y):
    """A fitted classifier in coordinates of the span, and one that knows the columns as they are."""
    out = make().fit(X, y)
    for where in (influence, from_problem):
        monkeypatch.setattr(where, "span_of", lambda X, penalty=None: None)
    return out, make().fit(X, y)


def width(clf):
    """Columns that the engine's solver knows, that of the intercept included."""
    engine = clf._fitted
    return engine.problem.blocks[0].i if clf.method_ == "influence" else engine.bag.X.shape[1]


# Coordinates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_training_objects_and_lengths_stay(shape):
    X, _, objects = SHAPES[shape]()
    span = span_of(X)
    assert np.flatnonzero(~span.used).tolist() == IDLE
    assert (span.basis is None) == (shape == "columns")
    A, B = span.coordinates(X), span.coordinates(objects)
    assert A.shape == (len(X), 6 if shape == "columns" else 25)
    assert not A[:, -1].any() and B[1, -1] == 0 and (B[2:, -1] > 0.1).all()
    # Householder's basis is orthonormal to d·r roundings at worst; each product is a sum of d.
    tol = 4 * EPS * len(span.used) * 25
    size = np.outer(lengths(X), lengths(objects))
    assert (np.abs(A @ B.T - X @ objects.T) <= tol * size).all()
    np.testing.assert_allclose(lengths(B), lengths(objects), rtol=tol)


def test_weights_of_columns_give_the_same_logits():
    X, _, objects = wide()
    span = span_of(X)
    W = np.random.default_rng(1).normal(size=(3, 25))
    W[:, -1] = 0
    np.testing.assert_allclose(objects @ span.weights(W).T, span.coordinates(objects) @ W.T, rtol=1e-12, atol=1e-12)
    assert not span.weights(W)[:, IDLE].any()
    np.testing.assert_allclose(span.start(span.weights(W)), W, rtol=1e-12, atol=1e-13)
    assert span.coordinates(objects)[2:, -1].all() and not span.start(objects)[:, -1].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_columns_without_a_penalty_stay(shape):
    X, _, objects = SHAPES[shape]()
    with_one = [np.insert(part, 2, 1.0, axis=1) for part in (X, objects)]
    penalty = np.insert(np.full(X.shape[1], 0.3), 2, 0.0)
    span, other = span_of(with_one[0], penalty), span_of(X)
    np.testing.assert_array_equal(
        span.coordinates(with_one[1]), np.c_[other.coordinates(objects), np.ones(len(objects))]
    )
    np.testing.assert_array_equal(span.penalty(penalty), [0.3] * (other.r + 1) + [0.0])
    W = np.random.default_rng(1).normal(size=(3, other.r + 2))
    np.testing.assert_array_equal(span.weights(W), np.insert(other.weights(W[:, :-1]), 2, W[:, -1], axis=1))
    penalty[0] = 0.4  # weights are no sums of objects then
    assert span_of(with_one[0], penalty) is None
    assert span_of(with_one[0], np.zeros(len(penalty))) is None


def test_objects_that_are_alike_or_nothing():
    """The basis of a span of lower rank than there are objects has directions to spare."""
    X = np.zeros((30, 100))
    X[:15] = np.random.default_rng(0).normal(size=100)
    span = span_of(X)
    np.testing.assert_allclose(span.basis.T @ span.basis, np.eye(30), atol=100 * EPS)
    A = span.coordinates(X)
    assert not A[:, -1].any() and not A[15:].any()
    np.testing.assert_allclose(A @ A.T, X @ X.T, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32"])
@pytest.mark.parametrize("n", [1, 40], ids=["basis", "columns"])
def test_other_numbers(dtype, n):
    X, objects = np.zeros((n, 70)), np.zeros((2, 70))
    X[:, 1:66] = objects[:, 1:66] = 1
    objects[0, [0, 69]] = 1
    out = span_of(X.astype(dtype)).coordinates(objects.astype(dtype))
    assert out.dtype == np.float64 and out.shape == (2, 2 if n == 1 else 66)
    np.testing.assert_allclose(lengths(out), [67**0.5, 65**0.5], rtol=1e-14)
    np.testing.assert_allclose(out[:, -1], [2**0.5, 0], rtol=1e-14)


def test_lengths_that_squares_do_not_reach():
    for size in (1e-300, 1e300):
        np.testing.assert_allclose(lengths(np.array([[3 * size, -4 * size], [0, 0]])), [5 * size, 0], rtol=1e-15)
    span = Span(np.array([True, False, False]), np.zeros(3, dtype=bool))
    np.testing.assert_allclose(span.coordinates(np.array([[5.0, 3e300, -4e300]])), [[5.0, 5e300]], rtol=1e-15)


@pytest.mark.parametrize(
    ("n", "d", "idle"), [(4, 3, 0), (4, 3, 1), (40, 70, 0), (20, 60, 1)], ids=["tall", "one idle", "hardly wide", "few"]
)
def test_where_nothing_is_gained_columns_stay_as_they_are(n, d, idle):
    X = np.random.default_rng(0).normal(size=(n, d))
    X[:, :idle] = 0
    assert span_of(X) is None


# Full CP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
@pytest.mark.parametrize("method", ["influence", "symmetric", "exact"])
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("built_in", [True, False])
def test_p_values_are_those_of_the_columns_as_they_are(monkeypatch, built_in, shape, n_classes, method, scheme):
    if (method, scheme) == ("exact", "studentized"):
        scheme = "deleted"  # no refit gives a studentized score
    X, y, objects = SHAPES[shape](n_classes)
    options = {"method": method, "scheme": scheme}
    if built_in:  # of two classes with an engine of its own
        options["l2"] = 0.1
    else:
        options["estimator"] = LogisticRegression(C=2.0 if shape == "columns" else 0.1)
    one, columns = both(monkeypatch, lambda: FullConformalClassifier(**options), X, y)
    np.testing.assert_allclose(one.predict_proba(objects), columns.predict_proba(objects), rtol=1e-8)
    np.testing.assert_array_equal(one.predict_p(objects), columns.predict_p(objects))
    assert width(columns) == X.shape[1] + 1 and width(one) == (7 if shape == "columns" else 26)


@pytest.mark.parametrize("approximation", ["direct", "indirect", "newton"])
@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian", "dual"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_columns_as_they_are(monkeypatch, shape, curvature, scheme, approximation):
    X, y, objects = SHAPES[shape]()
    chosen = {"curvature": curvature, "scheme": scheme, "approximation": approximation, "l2": 0.1}
    chosen["damping"] = 0.01 if curvature == "dual" else None  # which needs a penalty on the intercept too
    made = both(monkeypatch, lambda: FullConformalClassifier(method="influence", **chosen), X, y)
    scores = (clf._fitted.scores(clf._prepare_inputs(objects), clf._query()) for clf in made)
    for mine, other in zip(*scores, strict=True):  # fits differ by their tolerance of 1e-10, iterative solves by 1e-8
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_lies_beyond_the_span_is_seen(shape):
    """A candidate learns from its own part beyond the span: the longer it is, the smaller is its ordinary score."""
    X, y, objects = SHAPES[shape]()
    clf = FullConformalClassifier(method="influence", scheme="ordinary", l2=0.1).fit(X, y)
    longer = objects.copy()
    longer[:, IDLE] *= 2
    tau = [clf._fitted.scores(clf._prepare_inputs(part), clf._query())[1] for part in (objects, longer)]
    assert (tau[1][2:] < tau[0][2:]).all() and (tau[1][:2] == tau[0][:2]).all()


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "last_layer_kron"])
def test_approximations_that_count_columns_keep_them(curvature):
    X, y, _ = data()
    clf = FullConformalClassifier(method="influence", curvature=curvature, damping=0.1).fit(X, y)
    assert getattr(clf._fitted, "span", None) is None


def test_models_whose_weights_may_lie_beyond_keep_the_columns():
    X, y, _ = data()
    network = MLPClassifier((4,), max_iter=20, solver="lbfgs", random_state=0)
    fitted = LogisticRegression().fit(X, y)
    free = LogisticRegression(C=np.inf, max_iter=5)
    for chosen in (
        {"estimator": network}, {"estimator": fitted, "prefit": True}, {"estimator": free}, {"l2": 0.0},
    ):  # fmt: skip
        with pytest.warns():  # far from a minimum, or of none
            clf = FullConformalClassifier(method="influence", **chosen).fit(X, y)
        assert clf._fitted.span is None, chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_smoothing_knows_objects_as_they_were_given(monkeypatch, shape):
    """So that an object has the same p-values in any batch."""
    X, y, objects = SHAPES[shape]()
    one, columns = both(monkeypatch, lambda: FullConformalClassifier(method="influence", l2=0.1, random_state=0), X, y)
    p = one.predict_p(objects, smoothing=True)
    np.testing.assert_array_equal(p, columns.predict_p(objects, smoothing=True))
    np.testing.assert_array_equal(p, np.vstack([one.predict_p(part[None], smoothing=True) for part in objects]))


def test_a_fit_that_fails_leaves_what_was_fitted():
    X, y, objects = wide()
    clf = FullConformalClassifier(method="influence", l2=0.1).fit(X, y)
    p = clf.predict_p(objects)
    other = np.random.default_rng(1).normal(size=X.shape)
    other[:, 0] = 1e160
    with pytest.raises(ValueError, match="column 0"):
        clf.fit(other, y)
    np.testing.assert_array_equal(clf.predict_p(objects), p)


@pytest.mark.parametrize("size", [1e-8, 1e4, 1e8, 1e13, 1.7e15, 1.7e18])
@pytest.mark.parametrize("method", ["influence", "symmetric", "split", "jackknife+"])
def test_columns_of_another_size(monkeypatch, method, size):
    """A large column must not drown the others: basis and length are as good in each column as it is large."""
    X, y, objects = wide(n=40, d=120, m=20)
    for part in (X, objects):
        part[:, [119, 60]] *= size
    make = {
        "influence": lambda: FullConformalClassifier(method="influence", l2=0.1),
        "symmetric": lambda: FullConformalClassifier(l2=0.1),
        "split": lambda: SplitConformalClassifier(l2=0.1, random_state=0),
        "jackknife+": lambda: JackknifePlusClassifier(l2=0.1, random_state=0),
    }[method]
    one, columns = both(monkeypatch, make, X, y)
    np.testing.assert_allclose(one.predict_proba(objects), columns.predict_proba(objects), rtol=1e-6)
    np.testing.assert_array_equal(one.predict_epsilon(objects), columns.predict_epsilon(objects))


def test_checkpoints_know_objects_by_their_columns(tmp_path):
    X, y, objects = wide()
    clf = FullConformalClassifier(method="influence", checkpoint=tmp_path).fit(X, y)
    assert clf._fitted.span is None
    np.testing.assert_array_equal(
        clf.predict_p(objects), FullConformalClassifier(method="influence").fit(X, y).predict_p(objects)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize(
    "make",
    [FullConformalClassifier, partial(FullConformalClassifier, method="influence"), JackknifePlusClassifier],
    ids=["symmetric", "influence", "jackknife+"],
)
def test_saved_and_loaded(tmp_path, make, n_classes, shape):
    X, y, objects = SHAPES[shape](n_classes)
    X *= 1e8  # beside which what rounding leaves beyond the span is not small
    clf = make(l2=1e17).fit(X, y)
    clf.save(tmp_path / "span.safetensors")
    again = fullconformal.load(tmp_path / "span.safetensors")
    np.testing.assert_array_equal(again.predict_epsilon(objects), clf.predict_epsilon(objects))


def test_errors_name_the_column_that_was_given():
    X, y, objects = data()
    clf = FullConformalClassifier(method="influence", dtype="float32").fit(X, y)
    objects[2, 5] = 1e39
    with pytest.raises(ValueError, match=r"1e\+39 in object 2, column 5"):
        clf.predict_p(objects)
    narrow = X.astype("f4")
    narrow[3, 5] = 1e25
    with pytest.raises(ValueError, match=r"1e\+25 in column 5 .* fit in float32"):
        FullConformalClassifier(method="influence", dtype="float32").fit(narrow, y)
    with pytest.raises(ValueError, match=r"1e\+25 in column 5 .* fit in float32"):
        FullConformalClassifier(dtype="float32").fit(narrow.astype("f8"), y)
    X[3, 5] = 1e200
    for method in ("influence", "symmetric"):
        with pytest.raises(ValueError, match=r"column 5 \(counted"):
            FullConformalClassifier(method=method).fit(X, y)


@pytest.mark.parametrize(
    ("column", "name"), [(5, r"feature 5 \("), (3, "length in features that no training point has")]
)
def test_objects_far_away_are_told_by_the_columns_given(column, name):
    X, y, objects = data()
    objects[3] = X[0]
    objects[3, column] = 1e200
    with pytest.warns(UserWarning, match=rf"object 3 .* too far .* its {name}.* is 1e\+200"):
        assert (FullConformalClassifier().fit(X, y).predict_p(objects)[3] == 1).all()
    wide_X, y, objects = wide()
    objects[3] = 1e200 * wide_X[0]
    with pytest.warns(
        UserWarning, match=r"object 3 .* its coordinate \d+ in the training points' span, .* feature \d+ "
    ):
        FullConformalClassifier().fit(wide_X, y).predict_p(objects)
    wide_X[3, 33] = 1e25
    with pytest.raises(ValueError, match=r"cannot be fitted .* coordinate \d+ .* feature 33 \(.* at training point 3"):
        FullConformalClassifier().fit(wide_X, y)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce")  # scikit-learn's, when it looks for NaN
@pytest.mark.parametrize("shape", SHAPES)
def test_objects_beyond_numbers_are_told(shape):
    X, y, objects = SHAPES[shape]()
    objects[3] = 1.7e308 * np.sign(objects[3])
    for method in ("influence", "symmetric"):
        with pytest.raises(ValueError, match=r"object 3 of those to be predicted"):
            FullConformalClassifier(method=method).fit(X, y).predict_p(objects)
    with pytest.raises(ValueError, match=r"object 3 of those to be predicted"):
        JackknifePlusClassifier().fit(X, y).predict_set(objects)


# The others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("make", [SplitConformalClassifier, CVPlusClassifier])
def test_fits_are_those_of_the_columns_as_they_are(monkeypatch, make, n_classes):
    X, y, objects = wide(n_classes, n=40)
    one, columns = both(monkeypatch, lambda: make(l2=0.1, random_state=0), X, y)
    np.testing.assert_array_equal(one.predict_epsilon(objects), columns.predict_epsilon(objects))
    np.testing.assert_allclose(one.predict_proba(objects), columns.predict_proba(objects), rtol=1e-7)


def test_a_fit_from_somewhere_else_and_penalties_that_differ():
    """Weights that start beyond the span end in it; where penalties differ they do not lie in it, and the columns stay."""
    rng = np.random.default_rng(0)
    X, y = torch.tensor(rng.normal(size=(20, 70))), torch.arange(20) % 2
    problem = Problem(linear(70, 2, dtype=torch.float64), X, y, {"0.weight": 0.5})
    regression = Regression.of(problem)
    assert regression.bag.X.shape == (20, 22) and regression.bag.penalty.tolist() == [0.5] * 21 + [0.0]
    fit_linear(problem)
    W, Q = problem.theta[:70], torch.linalg.qr(X.T)[0]
    # A gradient of the mean below 1e-9, as all fits have, and eigenvalues of the Hessian above the penalty.
    assert float(problem.gradient().abs().max()) < 20 * 1e-9
    torch.testing.assert_close(W, Q @ (Q.T @ W), rtol=0, atol=1e-13)
    problem.penalty[0] = 0.6
    assert Regression.of(problem).bag.X.shape == (20, 71)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_jackknife(monkeypatch, n_classes):
    X, y, objects = wide(n_classes)
    one, columns = both(monkeypatch, lambda: JackknifePlusClassifier(l2=0.1, random_state=0), X, y)
    assert one._held_out.theta.shape[0] == 26 and columns._held_out.theta.shape[0] == 81
    np.testing.assert_array_equal(one.predict_epsilon(objects), columns.predict_epsilon(objects))
    np.testing.assert_allclose(one.predict_proba(objects), columns.predict_proba(objects), rtol=1e-8)


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_heads_on_many_features(monkeypatch, method):
    X, y, objects = data(n=24)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(9, 90), torch.nn.Tanh(), torch.nn.Linear(90, 3)).double()
    options = {"method": method, "head": "auto", "prefit": True, "l2": 0.1}
    one, columns = both(monkeypatch, lambda: FullConformalClassifier(network, **options), X, y)
    assert width(one) == 26 and width(columns) == 91
    np.testing.assert_array_equal(one.predict_p(objects), columns.predict_p(objects))
    np.testing.assert_allclose(one.predict_proba(objects), columns.predict_proba(objects), rtol=1e-8)
