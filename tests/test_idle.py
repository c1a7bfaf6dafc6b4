"""Columns that are zero in every training object, taken as one: scores are those of the columns as they are."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import fullconformal
from fullconformal import FullConformalClassifier
from fullconformal.estimators import full
from fullconformal.estimators.idle import folded, used_columns

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

IDLE = [0, 3, 4, 8]


def data(n_classes=3, n=40, m=7, d=9, seed=0):
    """Objects of training without IDLE columns, their labels, and objects most of which have them."""
    rng = np.random.default_rng(seed)
    X, objects = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    y = (X[:, 1] + rng.normal(size=n)).argsort().argsort() * n_classes // n
    X[:, IDLE] = objects[0, IDLE] = 0.0
    return X, y, objects


def both(monkeypatch, X, y, estimator=None, **options):
    """A classifier that takes the columns as one, and one that does not."""
    out = FullConformalClassifier(estimator, **options).fit(X, y)
    monkeypatch.setattr(full, "used_columns", lambda X: None)
    return out, FullConformalClassifier(estimator, **options).fit(X, y)


def test_inner_products_with_training_objects_and_lengths_stay():
    X, _, objects = data()
    used = used_columns(X)
    assert np.flatnonzero(~used).tolist() == IDLE
    A, B = folded(X, used), folded(objects, used)
    assert A.shape == (40, 6) and not A[:, -1].any()
    np.testing.assert_array_equal(A[:, :-1], X[:, used])
    # Sums of 9 products, of 9 squares, and the root of one: below 32 roundings.
    np.testing.assert_allclose(A @ B.T, X @ objects.T, rtol=0, atol=32 * np.finfo(float).eps * np.abs(X).max() * 9)
    np.testing.assert_allclose((B**2).sum(1), (objects**2).sum(1), rtol=32 * np.finfo(float).eps)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32"])
def test_other_numbers(dtype):
    X = np.array([[0, 1, 0, 0], [0, 0, 0, 0]]).astype(dtype)
    objects = np.array([[1, 1, 0, 1], [0, 1, 0, 0]]).astype(dtype)
    out = folded(objects, used_columns(X))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, [[1, 2**0.5], [1, 0]], rtol=1e-15)


def test_lengths_that_squares_do_not_reach():
    used = np.array([True, False, False])
    for size in (1e-300, 1e300):
        np.testing.assert_allclose(folded(np.array([[5.0, 3 * size, -4 * size]]), used), [[5.0, 5 * size]], rtol=1e-15)


@pytest.mark.parametrize("width", [0, 1])
def test_one_idle_column_stays_as_it_is(width):
    X = np.ones((4, 3))
    X[:, :width] = 0
    assert used_columns(X) is None


@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
@pytest.mark.parametrize("method", ["influence", "symmetric", "exact"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_p_values_are_those_of_the_columns_as_they_are(monkeypatch, n_classes, method, scheme):
    if (method, scheme) == ("exact", "studentized"):
        scheme = "deleted"  # a studentized score is no refit
    X, y, objects = data(n_classes)
    one, all_columns = both(monkeypatch, X, y, LogisticRegression(C=2.0), method=method, scheme=scheme)
    np.testing.assert_array_equal(one.predict_p(objects), all_columns.predict_p(objects))
    np.testing.assert_allclose(one.predict_proba(objects), all_columns.predict_proba(objects), rtol=1e-8)


@pytest.mark.parametrize("approximation", ["direct", "indirect", "newton"])
@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian", "dual", "cg", "block"])
def test_scores_are_those_of_the_columns_as_they_are(monkeypatch, curvature, scheme, approximation):
    X, y, objects = data()
    options = {"curvature": curvature, "scheme": scheme, "approximation": approximation, "l2": 0.1}
    options["damping"] = 0.01 if curvature in ("dual", "cg") else None  # which need a penalty on the intercept too
    one, all_columns = both(monkeypatch, X, y, method="influence", **options)
    assert one._engine.problem.p < all_columns._engine.problem.p
    scores = (clf._engine.scores(clf._prepare_inputs(objects), clf._query()) for clf in (one, all_columns))
    for mine, other in zip(*scores, strict=True):  # fits differ by their tolerance of 1e-10, iterative solves by 1e-8
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)


def test_what_the_columns_bring_is_seen():
    """The candidate's own score without itself knows how long the idle part is: it is not left out."""
    X, y, objects = data()
    clf = FullConformalClassifier(method="influence", scheme="ordinary", l2=0.1).fit(X, y)
    longer = objects.copy()
    longer[:, IDLE] *= 2
    tau = [clf._engine.scores(clf._prepare_inputs(part), clf._query())[1] for part in (objects, longer)]
    assert (tau[1][1:] < tau[0][1:]).all() and (tau[1][0] == tau[0][0]).all()


@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "last_layer_kron"])
def test_approximations_that_count_columns_keep_them(curvature):
    X, y, _ = data()
    assert FullConformalClassifier(method="influence", curvature=curvature, damping=0.1).fit(X, y)._used is None


def test_models_whose_weights_may_not_be_zero_keep_them():
    X, y, _ = data()
    network = MLPClassifier((4,), max_iter=20, solver="lbfgs", random_state=0)
    fitted = LogisticRegression().fit(X, y)
    free = LogisticRegression(C=np.inf, max_iter=5)
    for options in (
        {"estimator": network}, {"estimator": fitted, "prefit": True}, {"estimator": free}, {"l2": 0.0},
    ):  # fmt: skip
        with pytest.warns():  # far from a minimum, or of none
            clf = FullConformalClassifier(method="influence", **options).fit(X, y)
        assert clf._used is None, options


def test_saved_and_loaded(tmp_path):
    X, y, objects = data()
    clf = FullConformalClassifier(scheme="ordinary").fit(X, y)
    clf.save(tmp_path / "idle.safetensors")
    again = fullconformal.load(tmp_path / "idle.safetensors")
    np.testing.assert_array_equal(again.predict_p(objects), clf.predict_p(objects))
    assert again._used.tolist() == clf._used.tolist()


def test_errors_name_the_column_that_was_given():
    X, y, objects = data()
    clf = FullConformalClassifier(method="influence", dtype="float32").fit(X, y)
    objects[2, 5] = 1e39
    with pytest.raises(ValueError, match=r"1e\+39 in object 2, column 5"):
        clf.predict_p(objects)
    X[3, 5] = 1e200
    with pytest.raises(ValueError, match="column 5"):
        FullConformalClassifier().fit(X, y)
