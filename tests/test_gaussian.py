"""Full CP of LDA and Gaussian naive Bayes by updates is full CP by scikit-learn's refits."""

import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn import __version__
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fullconformal import FullConformalClassifier, load
from fullconformal.methods.base import Bag, Config, ConformalWarning
from fullconformal.methods.gaussian import Gaussian, is_gaussian
from fullconformal.methods.refit import Refit
from fullconformal.models.gaussian import each_without, moments

PRIORS = [0.5, 0.2, 0.3]
MODELS = {
    "naive Bayes": GaussianNB(),
    "naive Bayes, priors, much smoothing": GaussianNB(priors=PRIORS, var_smoothing=0.1),
    "svd": LinearDiscriminantAnalysis(),
    "svd, priors": LinearDiscriminantAnalysis(priors=PRIORS),
    "lsqr": LinearDiscriminantAnalysis(solver="lsqr"),
    "lsqr, shrinkage": LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3),
    "eigen, shrinkage": LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.05),
}
# Before, "svd" divided the scatter within classes by n − C.
NEW = tuple(map(int, __version__.split(".")[:2])) >= (1, 9)


def points(seed, single):
    """Columns of other units, far from zero; and, where asked for, a class with a single point."""
    rng = np.random.default_rng(seed)
    y = np.append([0, 1, 2], rng.integers(0, 2 if single else 3, 19))
    X = rng.normal(size=(22, 3)) * [1, 5, 0.1] + y[:, None] * [1, 0, 0.1] + [100, 0, 5]
    return X, y, rng.normal(size=3) * [1, 5, 0.1] + [100, 0, 5]


def log_densities(model, X):
    """What scikit-learn normalises to probabilities; the logarithms of those would round to zero."""
    if isinstance(model, GaussianNB):
        return model._joint_log_likelihood(X)
    out = model.decision_function(X)
    return np.stack([0 * out, out], axis=1) if out.ndim == 1 else out


def refitted(model, X, y, at, labels):
    """Log losses of labelled points by a fit to a bag; inf of a label that the bag lacks."""
    fitted = clone(model).fit(X, y)
    density = log_densities(fitted, at)
    columns = [list(fitted.classes_).index(label) if label in fitted.classes_ else -1 for label in labels]
    own = np.where(np.array(columns) < 0, -np.inf, density[np.arange(len(at)), columns])
    return logsumexp(density, axis=1) - own


def literal(model, X, y, x, deleted):
    """Scores (C, n) and (C,) of full CP, literally."""
    alpha, tau = np.empty((3, len(y))), np.empty(3)
    for c in range(3):
        bag, labels = np.vstack([X, x]), np.append(y, c)
        if not deleted:
            scores = refitted(model, bag, labels, bag, labels)
            alpha[c], tau[c] = scores[:-1], scores[-1]
            continue
        tau[c] = refitted(model, X, y, x[None], [c])[0]
        for i in range(len(y)):
            rest = np.arange(len(bag)) != i
            alpha[c, i] = refitted(model, bag[rest], labels[rest], X[[i]], [y[i]])[0]
    return alpha, tau


@pytest.mark.filterwarnings("ignore:Only one sample available")
@pytest.mark.parametrize("deleted", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_refits(name, deleted):
    model = MODELS[name]
    if name.startswith("svd") and not NEW:
        pytest.skip("scikit-learn's factor was another")
    # With given priors scikit-learn cannot be fitted to a bag that lacks a class.
    for seed, single in ((0, False), (1, deleted and model.priors is None)):
        X, y, x = points(seed, single)
        bag = Gaussian(model).fit(Bag(X, y, np.arange(3)), Config()).bag
        alpha, tau = literal(model, X, y, x, deleted)
        found, own = bag.candidates(x, deleted)
        own = bag.losses(x[None])[0] if deleted else own
        finite = np.isfinite(alpha)
        assert np.array_equal(finite, np.isfinite(found)) and finite.sum() == 66 - 2 * single
        # Rounding in sums of a bag, of numbers 100 away from zero, and in the solvers of scikit-learn.
        assert np.allclose(found[finite], alpha[finite], rtol=1e-9, atol=1e-9)
        assert np.allclose(own, tau, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"scheme": "ordinary"}, {"class_conditional": True}])
@pytest.mark.parametrize("name", ["naive Bayes", "lsqr, shrinkage"])
def test_p_values_are_those_of_refits_and_are_saved(name, options, tmp_path):
    """By the method that refits, with an object that is also a training point, whose own label is tied."""
    X, y, x = points(2, False)
    objects = np.vstack([x, X[4]])
    clf = FullConformalClassifier(MODELS[name], confidence_level=0.7, **options).fit(X, y)
    slow = FullConformalClassifier(MODELS[name], method=Refit(), confidence_level=0.7, **options).fit(X, y)
    assert clf.method_ == "exact" and clf.guarantee_.word == "exact" and "means" in clf.method_reason_
    p = clf.predict_p(objects)
    assert np.allclose(p, slow.predict_p(objects), rtol=0, atol=1e-12)
    assert np.allclose(clf.predict_proba(X), clone(MODELS[name]).fit(X, y).predict_proba(X), rtol=0, atol=1e-9)
    clf.save(tmp_path / "p.safetensors")
    assert np.array_equal(load(tmp_path / "p.safetensors").predict_p(objects), p)


def test_variances_without_a_point_that_makes_nearly_all_of_them():
    X = np.append(np.random.default_rng(0).normal(size=30), 1e6)[:, None]
    found = each_without(X)
    for i in range(31):
        assert np.allclose(found.var[i], moments(np.delete(X, i, 0)).var, rtol=1e-12)


def test_a_singular_covariance_is_left_to_folds():
    """All dummies of an encoder depend on each other: auto takes folds and says why, and whoever asks for exact is told what to do."""
    X, y, _ = points(3, False)
    words = np.where(X[:, :1] > 100, "a", "b")
    model = make_pipeline(OneHotEncoder(sparse_output=False), StandardScaler(), LinearDiscriminantAnalysis())
    clf = FullConformalClassifier(model, folds=3, random_state=0, confidence_level=0.7).fit(words, y)
    assert clf.method_ == "folds" and "singular" in clf.method_reason_ and clf.guarantee_.word == "approximate"
    with pytest.raises(ValueError, match=r"drop='first'.*method='folds'"):
        clf.set_params(method="exact").fit(words, y)


@pytest.mark.parametrize(
    "model",
    [
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        LinearDiscriminantAnalysis(solver="lsqr", priors=PRIORS),
        GaussianNB(var_smoothing=0),
    ],
)
def test_other_settings_are_left_to_folds(model):
    assert not is_gaussian(model)
    X, y, _ = points(0, False)
    # Folds of another draw may leave a class with a single point, whose variance is zero.
    clf = FullConformalClassifier(model, folds=3, confidence_level=0.7, random_state=1).fit(X, y)
    assert clf.method_ == "folds"


def test_objects_that_do_not_vary_are_all_tied():
    X, y = np.zeros((30, 2)), np.arange(30) % 2
    assert np.array_equal(FullConformalClassifier(GaussianNB()).fit(X, y).predict_p(X[:1]), [[1, 1]])


def test_a_class_far_from_all_ties_no_others():
    """A class of one point has densities of −1e9, whose rounding is not that of the other classes' losses."""
    rng = np.random.default_rng(3)
    y = np.append([2], rng.integers(0, 2, 17))
    X = rng.normal(size=(18, 2)) + y[:, None]
    clf = FullConformalClassifier(GaussianNB()).fit(X, y)
    tie = clf._fitted.bag.rounding(X[1:2])
    assert tie[0, :2].max() < 1e-6 < tie[0, 2]


def test_an_object_that_makes_the_covariance_singular_has_every_label():
    """Its column is zero for all the others: no fit can be had, and p = 1 errs upwards; the other objects get theirs."""
    rng = np.random.default_rng(0)
    X, y = np.column_stack([rng.normal(size=(40, 2)), rng.integers(0, 2, 40)]), np.arange(40) % 2
    words = ColumnTransformer(
        [("o", OneHotEncoder(drop="first", handle_unknown="ignore"), [2])], remainder="passthrough"
    )
    clf = FullConformalClassifier(make_pipeline(words, LinearDiscriminantAnalysis())).fit(X, y)
    new = np.array([[0.0, 0, 5], [0, 0, 1]])
    with pytest.warns(ConformalWarning, match="labels get p = 1"):
        p = clf.predict_p(new)
    assert np.array_equal(p[0], [1, 1]) and np.array_equal(p[1], clf.predict_p(new[1:])[0]) and p[1].min() < 1
