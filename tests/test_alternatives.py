"""What split, cross, CV+, jackknife+ and aggregated conformal prediction share: scikit-learn's rules, estimators, bad input."""

import warnings
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from cases import bad_data, expected_failures
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import KFold, ShuffleSplit
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks
from skorch import NeuralNetClassifier

from fullconformal import (
    AggregatedConformalClassifier,
    ConformalWarning,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
)
from fullconformal.models import mlp
from fullconformal.runtime.hashing import uniforms

METHODS = [
    SplitConformalClassifier,
    CVPlusClassifier,
    CrossConformalClassifier,
    JackknifePlusClassifier,
    AggregatedConformalClassifier,
]


@parametrize_with_checks([method() for method in METHODS], expected_failed_checks=expected_failures)
def test_scikit_learn_compliance(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        check(estimator)


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)) + np.arange(60)[:, None] % 3, np.arange(60) % 3
FOLDS = [CVPlusClassifier, CrossConformalClassifier]
TUNED_BY_HAND = METHODS[1:]  # RAPS has no points to be tuned on


class Explodes(LogisticRegression):
    """A classifier that must not be trained: bad input is found first."""

    def fit(self, X, y):
        raise AssertionError("training began")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"conformity_score": "apps"},
            "conformity_score='apps' is unknown; allowed: 'loss', 'lac', 'margin', 'aps', 'raps'",
        ),
        ({"k_reg": -1}, "k_reg=-1 is not allowed; give None or a whole number ≥ 0"),
        ({"k_reg": 1.5}, "k_reg=1.5 is not allowed"),
        ({"lambda_reg": -0.1}, "lambda_reg=-0.1 is not allowed; give None or a number ≥ 0"),
        ({"lambda_reg": np.nan}, "lambda_reg=nan"),
        ({"confidence_level": 95}, "confidence_level"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"l2": 0.1}, "l2=0.1 was given, but Explodes brings its own penalty"),
    ],
)
def test_bad_options(method, options, message):
    with pytest.raises(ValueError, match=message):
        method(Explodes(), **options).fit(X, Y)


@pytest.mark.parametrize("method", FOLDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_folds": 1}, "n_folds=1 is not allowed; give a whole number ≥ 2"),
        ({"n_folds": 2.5}, "n_folds=2.5 is not allowed"),
        ({"n_folds": True}, "n_folds=True is not allowed"),
        ({"n_folds": 61}, "n_folds=61 exceeds the 60 points given"),
        ({"cv": 5}, "cv=5 is not allowed; give a scikit-learn splitter"),
        (
            {"cv": ShuffleSplit(3, random_state=0)},
            "cv must put each of the 60 points into one fold, but point .* is in",
        ),
        ({"cv": [(np.arange(60), np.arange(60))]}, "cv trains on points of fold 0 that it also scores"),
    ],
)
def test_bad_folds(method, options, message):
    with pytest.raises(ValueError, match=message):
        method(Explodes(), **options).fit(X, Y)


@pytest.mark.parametrize("method", [SplitConformalClassifier, AggregatedConformalClassifier])
@pytest.mark.parametrize("size", [0.0, 1.0, -0.5, 10, "half"])
def test_bad_shares(method, size):
    with pytest.raises(ValueError, match="calibration_size"):
        method(Explodes(), calibration_size=size).fit(X, Y)


@pytest.mark.parametrize("options", [{"n_estimators": 0}, {"n_estimators": 2.5}, {"aggregation": "mode"}])
def test_bad_aggregates(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AggregatedConformalClassifier(Explodes(), **options).fit(X, Y)


@pytest.mark.parametrize("method", TUNED_BY_HAND)
def test_raps_is_tuned_by_split_only(method):
    with pytest.raises(ValueError, match=r"'raps' needs k_reg and lambda_reg, got None and 0.1; only SplitConformal"):
        method(Explodes(), conformity_score="raps", lambda_reg=0.1).fit(X, Y)


def test_raps_says_when_there_is_nothing_to_tune_on():
    with pytest.raises(ValueError, match="3 calibration points are too few to tune RAPS"):
        SplitConformalClassifier(conformity_score="raps", calibration_size=0.05, random_state=0).fit(X, Y)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("data", "labels", "message"), bad_data(X, Y))
def test_bad_data(method, data, labels, message):
    with pytest.raises(ValueError, match=message):
        method(Explodes()).fit(data, labels)


class Interrupted(GaussianNB):
    """Knows four columns; in a fit to others somebody presses Ctrl-C."""

    def fit(self, X, y, sample_weight=None):
        if np.shape(X)[1] != 4:
            raise KeyboardInterrupt
        return super().fit(X, y)


@pytest.mark.parametrize(
    "clf",
    [FullConformalClassifier(Interrupted(), method="exact"), *(method(Interrupted()) for method in METHODS)],
    ids=lambda clf: type(clf).__name__,
)
def test_a_fit_that_fails_leaves_the_earlier_one(clf):
    clf = clone(clf).set_params(random_state=0)
    table, other = (pd.DataFrame(values).add_prefix("f") for values in (X, np.hstack([X, X])))
    names = np.array(["one", "two", "three", "four"])[np.arange(60) % 4]
    new = clone(clf)
    with pytest.raises(KeyboardInterrupt):
        new.fit(other, names)
    with pytest.raises(NotFittedError):
        new.predict_epsilon(table)
    p, before = clf.fit(table, Y).predict_epsilon(table[:2]), dict(vars(clf))
    with pytest.raises(KeyboardInterrupt):
        clf.fit(other, names)
    assert vars(clf).keys() == before.keys() and all(vars(clf)[name] is value for name, value in before.items())
    assert np.array_equal(clf.predict_epsilon(table[:2]), p)


def test_nothing_of_an_earlier_fit_is_left():
    clf = SplitConformalClassifier(conformity_score="raps", random_state=0).fit(pd.DataFrame(X).add_prefix("f"), Y)
    assert hasattr(clf, "k_reg_") and hasattr(clf, "feature_names_in_")
    clf.set_params(conformity_score="lac").fit(X, Y)
    assert not hasattr(clf, "k_reg_") and not hasattr(clf, "feature_names_in_")


@pytest.mark.parametrize("method", METHODS)
def test_estimators_without_probabilities_are_refused(method):
    with pytest.raises(TypeError, match=r"RidgeClassifier has no predict_proba.*CalibratedClassifierCV"):
        method(RidgeClassifier()).fit(X, Y)
    with pytest.raises(NotFittedError):
        method().predict_epsilon(X)


@pytest.mark.parametrize(
    ("clf", "where"),
    [
        (
            SplitConformalClassifier(random_state=8),
            "the training part has no point of class 'rare'; lower calibration_size",
        ),
        (
            AggregatedConformalClassifier(n_estimators=20, random_state=0),
            "the training part of split .* no point of class 'rare'",
        ),
        (CVPlusClassifier(cv=KFold(5)), "what trains for fold 0 of 5 has no point of class 'rare'; take other folds"),
        (CrossConformalClassifier(random_state=0), "what trains for fold .* of 5 has no point of class 'rare'"),
        (JackknifePlusClassifier(), "what trains without point 3 has no point of class 'rare'; leave that class out"),
        (JackknifePlusClassifier(GaussianNB()), "fold 3 of 60 has no point of class 'rare'"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_class_missing_from_training_is_named(clf, where):
    labels = np.array(["a", "b", "c"])[Y].astype(object)
    labels[3] = "rare"
    with pytest.raises(ValueError, match=where):
        clf.fit(X, labels)


def test_a_prefit_model_must_be_fitted_and_know_the_labels():
    with pytest.raises(ValueError, match="prefit=True needs a fitted estimator"):
        SplitConformalClassifier(prefit=True).fit(X, Y)
    with pytest.raises(NotFittedError):
        SplitConformalClassifier(LogisticRegression(), prefit=True).fit(X, Y)
    with pytest.raises(ValueError, match=r"does not know: \[2\]; the classes are \[0, 1\]"):
        SplitConformalClassifier(LogisticRegression().fit(X[Y < 2], Y[Y < 2]), prefit=True).fit(X, Y)


@pytest.mark.parametrize("method", METHODS)
def test_levels_that_need_more_points_are_named(method):
    """With k calibration points no p-value is below 1/(k + 1): above k/(k + 1) every set holds everything."""
    points = {"SplitConformalClassifier": 12, "AggregatedConformalClassifier": 12}.get(method.__name__, 60)
    message = rf"{points} calibration points there are: the smallest significance level possible is 1/{points + 1}"
    with pytest.warns(ConformalWarning, match=message):
        method(confidence_level=0.99, random_state=0).fit(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf = method(random_state=0).fit(X, Y)
        clf.predict_set(X)
        highest = points / (points + 1)
        clf.predict_set(X, highest)
    with pytest.warns(ConformalWarning, match=f"the highest confidence level {highest:.4g}"):
        assert clf.predict_set(X, [0.8, highest + 1e-6])[:, :, 1].all()


def test_levels_are_judged_class_by_class():
    y = np.r_[np.zeros(50), np.ones(10)].astype(int)
    objects = X + 10 * y[:, None]
    with pytest.warns(ConformalWarning, match=r"the 10 calibration points of class 1 .*is 1/11.*every set holds 1"):
        clf = CVPlusClassifier(class_conditional=True, confidence_level=0.95, random_state=0).fit(objects, y)
    with pytest.warns(ConformalWarning):
        sets = clf.predict_set(objects, 0.95)
    assert sets[:, 1].all() and not sets[:, 0].all()


def skorch_net():
    return NeuralNetClassifier(mlp(4, (5,), 3, "tanh"), criterion=torch.nn.CrossEntropyLoss, max_epochs=5, verbose=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "estimator",
    [
        None,
        GaussianNB(),
        RandomForestClassifier(5),
        mlp(4, (5,), 3, "tanh"),
        make_pipeline(StandardScaler(), LogisticRegression()),
        make_pipeline(StandardScaler(), mlp(4, (5,), 3, "tanh")),
        make_pipeline(StandardScaler(), RandomForestClassifier(5)),
        skorch_net,
    ],
    ids=["none", "bayes", "forest", "module", "pipeline", "piped module", "piped forest", "skorch"],
)
def test_every_kind_of_estimator(method, estimator):
    """Strings for labels, the same result for the same seed, sets that mostly hold the truth."""
    n = 24 if method is JackknifePlusClassifier else 60
    estimator = estimator() if estimator is skorch_net else estimator
    labels = np.array(["a", "b", "c"])[Y]
    options = {"max_epochs": 3, "random_state": 1, "conformity_score": "aps"}
    if method is AggregatedConformalClassifier:
        options["n_estimators"] = 2
    clf = method(estimator, **options).fit(X[:n], labels[:n])
    epsilon = clf.predict_epsilon(X)
    assert epsilon.shape == (60, 3) and ((epsilon > 0) & (epsilon <= 1)).all()
    assert np.allclose(clf.predict_proba(X).sum(1), 1, atol=1e-6)
    assert set(clf.predict(X)) <= {"a", "b", "c"}
    assert (epsilon[np.arange(60), Y] > 0.2).mean() > 0.5
    if not isinstance(estimator, NeuralNetClassifier):  # which draws its batches from torch's own generator
        assert np.array_equal(epsilon, clone(clf).fit(X[:n], labels[:n]).predict_epsilon(X))


@pytest.mark.parametrize("method", METHODS)
def test_frames_with_words_in_a_pipeline(method):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"word": np.array(["x", "y", "z"])[Y], "number": X[:, 0]})
    encode = make_column_transformer((OneHotEncoder(), ["word"]), remainder="passthrough")
    pipe = make_pipeline(encode, GaussianNB())
    clf = method(pipe, conformity_score="aps", random_state=0)
    epsilon = clf.fit(frame, Y).predict_epsilon(frame)
    # Uniforms are made from what the rows hold, not from where they are kept.
    assert np.array_equal(epsilon, clf.predict_epsilon(frame.copy().iloc[::-1])[::-1])
    assert (method(pipe, random_state=0).fit(frame, Y).predict_set(frame)[np.arange(60), Y]).mean() > 0.8


def test_tensors_are_arrays():
    clf = CVPlusClassifier(random_state=0).fit(torch.tensor(X), torch.tensor(Y))
    assert np.array_equal(clf.predict_epsilon(torch.tensor(X)), clf.predict_epsilon(X))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_fitting_leaves_the_arguments_as_they_were(method):
    net = mlp(4, (5,), 3, "tanh")
    before = [q.clone() for q in net.parameters()]
    clf = method(net, max_epochs=1, verbose=1).fit(X[:20], Y[:20])
    assert clf.get_params()["estimator"] is net
    assert all((a == b).all() for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(("method", "steps"), [(CVPlusClassifier, 5), (JackknifePlusClassifier, 60)])
def test_progress_is_told_model_by_model(method, steps, monkeypatch):
    told = []

    @contextmanager
    def bar(label, shown):
        assert shown
        yield lambda *state: told.append(state)

    monkeypatch.setattr("fullconformal.estimators.held_out.progress_bar", bar)
    method(GaussianNB(), verbose=1, random_state=0).fit(X, Y)
    assert told == [(k + 1, steps) for k in range(steps)]


@pytest.mark.parametrize("method", METHODS)
def test_scores_changed_after_fitting_are_refused(method):
    clf = method(random_state=0).fit(X, Y)
    for change in ({"conformity_score": "margin"}, {"class_conditional": True}):
        with pytest.raises(ValueError, match="changed after fit; call fit again"):
            clone(clf).fit(X, Y).set_params(**change).predict_set(X)
    assert clf.set_params(confidence_level=0.5).predict_set(X).sum() <= clf.predict_set(X, 0.9).sum()


@pytest.mark.parametrize("method", METHODS)
def test_sparse_objects_in_a_pipeline(method):
    rng = np.random.default_rng(0)
    X, y = sparse.csr_matrix(rng.random((60, 5)) * (rng.random((60, 5)) < 0.5)), np.arange(60) % 2
    pipeline = make_pipeline(StandardScaler(with_mean=False), LogisticRegression())
    clf = method(pipeline, conformity_score="aps", random_state=0).fit(X, y)
    alone = np.vstack([clf.predict_epsilon(X[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(clf.predict_epsilon(X[:5]), alone)
    assert clf.predict_set(X).shape == (60, 2)


@pytest.mark.parametrize("width", [1, 2])
def test_uniforms_of_texts_are_those_of_the_text_in_any_container(width):
    """A NumPy array pads its texts to the longest, which must not count."""
    texts = np.array([["a"], ["bb"], ["much longer"]]).repeat(width, 1).squeeze()
    u = uniforms(texts, 3)
    np.testing.assert_array_equal(u[:2], uniforms(np.array(texts[:2].tolist()), 3))
    for other in (texts.astype(object), texts.tolist(), pd.DataFrame(texts) if width == 2 else pd.Series(texts)):
        np.testing.assert_array_equal(u, uniforms(other, 3))
    assert len(np.unique(u)) == 3


@pytest.mark.parametrize("method", METHODS)
def test_labels_of_several_kinds_are_refused_in_words(method):
    y = np.array(["a", 3, "b"] * 20, dtype=object)
    with pytest.raises(ValueError, match="y mixes labels of several kinds, int, str"):
        method().fit(RNG.normal(size=(60, 2)), y)


@pytest.mark.parametrize("names", [np.array([1, 2, 3]), np.array(["a", "b", "c"])])
@pytest.mark.parametrize("method", [*METHODS, FullConformalClassifier])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_classifiers_see_the_labels_that_users_gave(method, names):
    """What they are told of a class, by its name, goes to that class."""
    options = {"method": "exact"} if method is FullConformalClassifier else {"random_state": 0}
    weight = {names.tolist()[0]: 1.0, names.tolist()[1]: 1e6, names.tolist()[2]: 1.0}
    clf = method(DecisionTreeClassifier(max_depth=1, class_weight=weight, random_state=0), **options).fit(X, names[Y])
    assert clf.predict_proba(X)[:, 1].mean() > 0.6 and clf.predict_set(X[:2]).shape == (2, 3)


class InTheirOrder(GaussianNB):
    """A classifier whose classes are in an order of its own."""

    def fit(self, X, y):
        super().fit(X, y)
        self.known_, self.classes_ = self.classes_, self.classes_[[2, 0, 1]]
        return self

    def predict_proba(self, X):
        inner = GaussianNB()
        inner.__dict__.update({**vars(self), "classes_": self.known_})
        return inner.predict_proba(X)[:, [2, 0, 1]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prefit", [False, True])
def test_classes_may_be_in_an_order_of_the_classifiers_own(method, prefit):
    if prefit and method is not SplitConformalClassifier:
        return
    labels = np.array(["high", "low", "mid"])[Y]
    options = {"random_state": 0, "confidence_level": 0.8} | ({"prefit": True} if prefit else {})
    found, usual = (
        method(model.fit(X[::2], labels[::2]) if prefit else model, **options).fit(X, labels)
        for model in (InTheirOrder(), GaussianNB())
    )
    order = [found.classes_.tolist().index(label) for label in usual.classes_.tolist()]
    assert np.allclose(found.predict_epsilon(X)[:, order], usual.predict_epsilon(X))
    assert np.array_equal(found.predict(X), usual.predict(X))


@pytest.mark.parametrize("method", METHODS)
def test_frozen_classifiers_are_left_as_they_are(method):
    fitted = GaussianNB().fit(X, Y)
    clf = method(FrozenEstimator(fitted), random_state=0, confidence_level=0.8).fit(X, Y)
    np.testing.assert_allclose(clf.predict_proba(X), fitted.predict_proba(X))


class Odd(GaussianNB):
    """A classifier whose probabilities are as odd as it is told."""

    def __init__(self, odd=None):
        super().__init__()
        self.odd = odd

    def predict_proba(self, X):
        return self.odd(super().predict_proba(X))


@pytest.mark.parametrize(("odd", "message"), [
    (lambda p: np.where(np.arange(len(p))[:, None] == 2, np.nan, p), "object 2 of those to be calibrated with .* contain NaN"),
    (lambda p: p[:, :2], r"estimator=Odd: predict_proba gave \(\d+, 2\) numbers, .* \(\d+, 3\)"),
    (lambda p: np.log(p), r"estimator=Odd: predict_proba gave \(\d+, 3\) numbers, from -.*; .* probability .*CrossEntropyLoss"),
    (lambda p: 2 * p, r"estimator=Odd: predict_proba gave \(\d+, 3\) numbers, from .* to 2; "),
    (lambda p: [p, p], r"estimator=Odd: predict_proba gave \(2, \d+, 3\) numbers"),
])  # fmt: skip
def test_odd_probabilities_are_told(odd, message):
    with pytest.raises(ValueError, match=message):
        SplitConformalClassifier(Odd(odd), random_state=0).fit(X, Y)


@pytest.mark.parametrize("method", [*METHODS, FullConformalClassifier])
def test_models_of_coarse_probabilities_are_told_of(method):
    """A tree gives its own label probability 0 where it errs: with a quarter such errors every set at 90 % confidence holds all labels."""
    noisy = np.where(np.random.default_rng(0).uniform(size=len(Y)) < 0.3, np.roll(Y, 7), Y)
    told = r"share the largest score.* above \d\d% confidence every set holds all labels\. Give .*min_samples_leaf"
    with pytest.warns(ConformalWarning, match=told) as record:
        coarse = method(DecisionTreeClassifier(random_state=0), random_state=0).fit(X, noisy)
    assert record[0].filename == __file__ and coarse.predict_set(X).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        method(DecisionTreeClassifier(min_samples_leaf=20), random_state=0).fit(X, Y)
