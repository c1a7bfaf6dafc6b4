"""FullConformalClassifier as people use it: every kind of estimator, its own objective, the options, scikit-learn's rules."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from cases import expected_failures
from oracles import Oracle, algorithm_2
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from skorch import NeuralNetClassifier
from torch import nn

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.curvature import GGN, Hessian
from fullconformal.losses import SOFTMAX
from fullconformal.models import mlp
from fullconformal.problem import flat

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


@pytest.fixture
def three():
    """A three-class problem: 80 points to learn from, 6 objects."""
    X, y = make_classification(
        86, 5, n_informative=4, n_redundant=0, n_classes=3, n_clusters_per_class=1, random_state=0
    )
    return X[:80], y[:80], X[80:]


@pytest.fixture
def two():
    X, y = make_classification(86, 5, random_state=1)
    return X[:80], y[:80], X[80:]


@parametrize_with_checks([FullConformalClassifier()], expected_failed_checks=expected_failures)
def test_scikit_learn_compliance(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        check(estimator)


def literal_p(clf, X, q=1.0, approximation="direct"):
    """p-values by Algorithm 2 at the classifier's own parameters and penalty."""
    problem = clf._fitted.problem
    penalty = {name: float(part.mean()) for name, part in problem.unpack(problem.penalty).items()}
    oracle = Oracle(problem.model, problem.X, problem.y, penalty)
    objects = torch.as_tensor(X).to(problem.X)
    return algorithm_2(oracle, oracle.ggn(), clf._fitted.prepared.factor.damping, objects, q, approximation)[0]


@pytest.mark.parametrize("data", ["two", "three"])
def test_default_equals_scikit_learns_fit_and_algorithm_2(data, request):
    X, y, Xt = request.getfixturevalue(data)
    clf = FullConformalClassifier(l2=0.02, method="influence").fit(X, y)
    # λ of the mean risk is C = 1/(nλ), with a free intercept.
    reference = LogisticRegression(C=1 / (len(y) * 0.02), tol=1e-10, max_iter=10_000).fit(X, y)
    assert np.abs(clf.predict_proba(Xt) - reference.predict_proba(Xt)).max() < 1e-6
    assert clf.diagnose().gradient < 1e-9
    assert np.array_equal(clf.predict_p(Xt), literal_p(clf, Xt))


@pytest.mark.parametrize("data", ["two", "three"])
@pytest.mark.parametrize("intercept", [True, False])
def test_logistic_regression_is_carried_over_with_its_objective(data, intercept, request):
    X, y, Xt = request.getfixturevalue(data)
    model = LogisticRegression(C=0.3, fit_intercept=intercept, tol=1e-12, max_iter=10_000)
    ours = FullConformalClassifier(model, method="influence").fit(X, y)
    fitted = model.fit(X, y)
    assert np.abs(ours.predict_proba(Xt) - fitted.predict_proba(Xt)).max() < 1e-6
    assert ours.diagnose().newton_decrement < 1e-6  # a minimum of F with Λ = 1/C and a free intercept
    prefit = FullConformalClassifier(fitted, prefit=True, method="influence").fit(X, y)
    assert np.abs(prefit.predict_proba(Xt) - fitted.predict_proba(Xt)).max() < 1e-12
    assert np.abs(prefit.predict_p(Xt) - ours.predict_p(Xt)).max() <= 1 / 81
    if intercept:
        same = FullConformalClassifier(l2=1 / (0.3 * len(y)), method="influence").fit(X, y)
        assert np.array_equal(same.predict_p(Xt), ours.predict_p(Xt))


@pytest.mark.parametrize("data", ["two", "three"])
@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
@pytest.mark.parametrize("activation", ["tanh", "logistic", "relu", "identity"])
def test_perceptron_is_carried_over_with_its_objective(data, solver, activation, request):
    X, y, Xt = request.getfixturevalue(data)
    model = MLPClassifier((6, 4), activation=activation, solver=solver, alpha=2.0, batch_size=20,
                          max_iter=20_000 if solver == "lbfgs" else 5,
                          tol=1e-13, random_state=0)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf = FullConformalClassifier(model, method="influence").fit(X, y)
        fitted = clone(model).fit(X, y)
    assert np.abs(clf.predict_proba(Xt) - fitted.predict_proba(Xt)).max() < 1e-10
    # The sum form's Λ: alpha on weights for full batches, alpha·n/batch for batches, nothing on biases.
    penalty = clf._fitted.problem.unpack(clf._fitted.problem.penalty)
    expected = 2.0 * (1 if solver == "lbfgs" else 80 / 20)
    assert all((part == (expected if name.endswith("weight") else 0)).all() for name, part in penalty.items())
    if solver == "lbfgs" and activation != "relu":
        assert clf.diagnose().gradient < 1e-4


@pytest.mark.parametrize(("n", "batch"), [(80, 80), (250, 200)])
def test_a_perceptrons_batch_is_at_most_200_by_default(n, batch):
    X, y = make_classification(n, 5, random_state=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf = FullConformalClassifier(
            MLPClassifier((3,), alpha=2.0, max_iter=2, random_state=0), method="influence"
        ).fit(X, y)
    assert abs(float(clf._fitted.problem.penalty.max()) - 2.0 * n / batch) < 1e-12


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_skorch_net_is_carried_over(three, criterion):
    X, y, Xt = three
    torch.manual_seed(0)
    tail = () if criterion is nn.CrossEntropyLoss else (nn.Softmax(-1),)
    net = NeuralNetClassifier(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), *tail), criterion=criterion,
                              optimizer__weight_decay=0.05, lr=0.5, max_epochs=20, verbose=0)  # fmt: skip
    clf = FullConformalClassifier(net, dtype="float64", method="influence").fit(X, y)
    penalty = clf._fitted.problem.unpack(clf._fitted.problem.penalty)
    assert all(abs(float(part.mean()) - 80 * 0.05) < 1e-12 for part in penalty.values())
    fitted = net.set_params(train_split=None).fit(X.astype(np.float32), y)
    prefit = FullConformalClassifier(fitted, prefit=True, dtype="float64", method="influence").fit(X, y)
    assert np.abs(prefit.predict_proba(Xt) - fitted.predict_proba(Xt.astype(np.float32))).max() < 1e-5
    assert np.array_equal(prefit.predict_p(Xt), literal_p(prefit, Xt))


def test_a_module_is_trained_to_a_small_gradient_and_left_untouched(three):
    X, y, Xt = three
    torch.manual_seed(0)
    net = mlp(5, (8,), 3, "tanh").double()
    before = [q.clone() for q in net.parameters()]
    clf = FullConformalClassifier(net, method="influence", random_state=0, max_epochs=30).fit(X, y)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert clf.diagnose().gradient < 2e-5
    assert np.array_equal(clf.predict_p(Xt), literal_p(clf, Xt))
    again = clone(clf).fit(X, y)
    assert np.array_equal(again.predict_p(Xt), clf.predict_p(Xt))


def test_prefit_module_is_taken_as_it_is(three):
    X, y, Xt = three
    torch.manual_seed(0)
    net = mlp(5, (8,), 3)
    clf = FullConformalClassifier(net, prefit=True, method="influence").fit(X, y)
    with torch.no_grad():
        expected = torch.softmax(net(torch.as_tensor(Xt, dtype=torch.float32)), 1).numpy()
    assert np.abs(clf.predict_proba(Xt) - expected).max() < 1e-6


def test_images_and_tensors():
    torch.manual_seed(0)
    X, y = torch.randn(40, 1, 6, 6), torch.arange(40) % 3
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    clf = FullConformalClassifier(net, max_epochs=2, method="influence").fit(X, y)
    assert clf.predict_p(X[:4]).shape == (4, 3)
    with pytest.raises(ValueError, match="X has"):
        clf.predict_p(X[:, :, :5])


def test_pipeline_transforms_before_it_predicts(three):
    X, y, Xt = three
    pipe = make_pipeline(StandardScaler(), LogisticRegression(C=0.5))
    clf = FullConformalClassifier(pipe, method="influence").fit(X * 100 + 7, y)
    scaler = StandardScaler().fit(X)
    plain = FullConformalClassifier(LogisticRegression(C=0.5), method="influence").fit(scaler.transform(X), y)
    assert np.array_equal(clf.predict_p(Xt * 100 + 7), plain.predict_p(scaler.transform(Xt)))
    assert np.array_equal(clf.predict(Xt * 100 + 7), plain.predict(scaler.transform(Xt)))


def test_labels_may_be_strings_and_frames_may_be_given():
    pandas = pytest.importorskip("pandas")
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    frame = pandas.DataFrame(X, columns=list("abcd"))
    clf = FullConformalClassifier(method="influence").fit(frame, names)
    assert list(clf.classes_) == ["setosa", "versicolor", "virginica"]
    assert set(np.concatenate(clf.predict_set(frame, as_labels=True))) <= set(clf.classes_)
    assert np.array_equal(clf.predict_p(frame), FullConformalClassifier(method="influence").fit(X, y).predict_p(X))


@pytest.mark.parametrize("approximation", ["direct", "indirect", "newton"])
@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
def test_schemes_and_approximations_may_change_after_fit(three, scheme, approximation):
    X, y, Xt = three
    options = {"scheme": scheme, "approximation": approximation}
    fresh = FullConformalClassifier(l2=0.1, method="influence", **options).fit(X, y)
    changed = FullConformalClassifier(l2=0.1, method="influence").fit(X, y).set_params(**options)
    assert np.array_equal(fresh.predict_p(Xt), changed.predict_p(Xt))
    if approximation != "newton":
        q = {"deleted": 1.0, "studentized": 0.5, "ordinary": 0.0}[scheme]
        assert np.array_equal(fresh.predict_p(Xt), literal_p(fresh, Xt, q, approximation))


def test_curvatures(three):
    X, y, Xt = three
    torch.manual_seed(0)
    net = mlp(5, (8,), 3, "tanh").double()
    fits = {
        name: FullConformalClassifier(net, curvature=name, random_state=0, max_epochs=20, method="influence").fit(X, y)
        for name in ("auto", "ggn", "hessian", "last_layer")
    }
    given = FullConformalClassifier(net, curvature=GGN(), random_state=0, max_epochs=20, method="influence").fit(X, y)
    assert np.array_equal(fits["auto"].predict_p(Xt), fits["ggn"].predict_p(Xt))
    assert np.array_equal(fits["auto"].predict_p(Xt), given.predict_p(Xt))
    assert fits["last_layer"]._fitted.problem.p == 27
    assert np.array_equal(fits["last_layer"].predict_proba(Xt), fits["ggn"].predict_proba(Xt))
    assert np.array_equal(fits["last_layer"].predict_p(Xt), literal_p(fits["last_layer"], Xt))


def test_class_conditional_smoothed_and_weighted(three):
    X, y, Xt = three
    clf = FullConformalClassifier(method="influence", random_state=3).fit(X, y)
    plain = clf.predict_p(Xt)
    smooth = clf.predict_p(Xt, smoothing=True)
    assert np.array_equal(smooth, clf.predict_p(Xt, smoothing=True))
    assert (smooth <= plain).all() and (smooth >= plain - 1 / 81 - 1e-12).all()
    assert np.allclose(clf.predict_p(Xt, weights=(np.full(80, 2.0), np.full(6, 2.0))), plain, atol=1e-12)
    heavy = clf.predict_p(Xt, weights=(np.ones(80), np.full(6, 1e9)))
    assert (heavy > 0.999).all()  # the candidate's own weight swamps the rest
    # Zero weight is absence, for scores that stay as they are.
    conditional = clf.set_params(class_conditional=True).predict_p(Xt)
    clf.set_params(class_conditional=False)
    for k in range(3):
        part = clf.predict_p(Xt, weights=((y == k).astype(float), np.ones(6)))
        assert np.allclose(part[:, k], conditional[:, k], atol=1e-12)


def test_sets_are_nested_and_levels_may_be_many(three):
    X, y, Xt = three
    clf = FullConformalClassifier(method="influence").fit(X, y)
    levels = [0.5, 0.8, 0.9, 0.99]
    many = clf.predict_set(Xt, levels)
    assert many.shape == (6, 3, 4)
    assert (many[:, :, :-1] <= many[:, :, 1:]).all()
    assert np.array_equal(many[:, :, 2], clf.predict_set(Xt))
    assert np.array_equal(clf.predict_set(Xt, 0.5), clf.predict_p(Xt) > 0.5)
    assert clf.predict_set(Xt, 0.05, allow_empty=False).any(axis=1).all()


def test_leverages_are_those_of_the_matrices(two, three):
    """Two classes: the largest eigenvalue of SA. More: below it."""
    for data, exact in ((two, True), (three, False)):
        prepared = FullConformalClassifier(method="influence").fit(*data[:2])._fitted.prepared
        f, J = prepared.problem.jacobian(prepared.problem.X)
        A = flat(J) @ prepared.factor.solve(flat(J).flatten(0, 1)).view_as(flat(J)).mT
        top = torch.linalg.eigvals(SOFTMAX.curvature(f) @ A).real.amax(1)
        ours = SOFTMAX.leverage(prepared.loss, prepared.self_influence)
        assert (ours <= top + 1e-12).all()
        assert not exact or (ours - top).abs().max() < 1e-9


def test_diagnostics_print_and_warn_once():
    X, y = make_classification(60, 30, n_informative=10, random_state=0)
    with pytest.warns(ConformalWarning, match="31 parameters for 60 points") as caught:
        clf = FullConformalClassifier(l2=1e-4, method="influence").fit(X, y)
    assert len([w for w in caught if issubclass(w.category, ConformalWarning)]) == 1
    told = str(clf.diagnose())
    assert "largest leverage" in told and "! 31 parameters for 60 points" in told
    X, y = make_classification(2000, 5, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        FullConformalClassifier(method="influence").fit(X, y)


def test_the_warning_follows_the_mean_leverage_not_the_number_of_parameters():
    """100 points, nine features: errors are above ε. 1,000 digits, 650 parameters that the penalty holds: they are not."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 9))
    y = (X[:, :5].sum(1) + rng.logistic(size=100) > 0).astype(int)
    with pytest.warns(ConformalWarning, match="10 parameters for 100 points, of which a point has a share of"):
        clf = FullConformalClassifier(LogisticRegression(C=100.0), method="influence").fit(X, y)
    # For two classes the mean leverage is tr(H⁻¹ Σ S xxᵀ)/n.
    a, p = np.c_[X, np.ones(100)], clf.predict_proba(X)[:, 1]
    gram = (a * (p * (1 - p))[:, None]).T @ a
    expected = np.trace(np.linalg.solve(gram + np.diag([0.01] * 9 + [0.0]), gram)) / 100
    assert clf.diagnose().mean_leverage == pytest.approx(expected, rel=1e-6)
    digits, labels = load_digits(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        FullConformalClassifier(method="influence", l2=1e-2).fit(digits[:1000] / 16, labels[:1000])


def test_an_indefinite_hessian_is_told_of(three):
    X, y, _ = three
    torch.manual_seed(1)
    net = mlp(5, (8,), 3, "tanh").double()
    with pytest.warns(ConformalWarning, match="hessian is indefinite"):
        clf = FullConformalClassifier(
            net, prefit=True, curvature="hessian", damping=0.0, l2=0.0, method="influence"
        ).fit(X, y)
    assert not clf.diagnose().positive_definite
    assert clf.predict_p(X[:3]).shape == (3, 3)
    with pytest.warns(ConformalWarning, match="was damped by"):
        clf = FullConformalClassifier(net, prefit=True, curvature=Hessian(), l2=0.0, method="influence").fit(X, y)
    assert clf.diagnose().positive_definite and clf.diagnose().damping > 0


def test_a_model_away_from_its_minimum_is_told_of(three):
    X, y, _ = three
    torch.manual_seed(1)
    with pytest.warns(ConformalWarning, match="not at a minimum"):
        FullConformalClassifier(mlp(5, (8,), 3), prefit=True, method="influence").fit(X, y)


@pytest.mark.parametrize("curvature", ["ggn", "ekfac", "dual", "last_layer_kron"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda clf: pickle.loads(pickle.dumps(clf))])
def test_copies_of_a_fitted_classifier_predict_as_it_does(curvature, copied):
    X, y = load_iris(return_X_y=True)
    clf = FullConformalClassifier(mlp(4, (5,), 3), max_epochs=2, curvature=curvature, random_state=0).fit(
        X[::2], y[::2]
    )
    assert np.array_equal(copied(clf).predict_p(X[1:9:2]), clf.predict_p(X[1:9:2]))
