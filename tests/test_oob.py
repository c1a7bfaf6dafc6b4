"""Forests by their out-of-bag points: a literal loop over trees and points as the oracle, and what users can ask of the method."""

import warnings
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_iris, make_classification
from sklearn.ensemble import BaggingClassifier, ExtraTreesClassifier, RandomForestClassifier, RandomForestRegressor
from sklearn.feature_selection import SelectKBest, f_regression
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from fullconformal import (
    ConformalWarning,
    FullConformalClassifier,
    FullConformalRegressor,
    SplitConformalClassifier,
    compare,
    pvalues,
)
from fullconformal.methods.oob import OutOfBag, kept_members, out_of_bag, share_missed

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

FORESTS = {
    "random forest": RandomForestClassifier(6),
    "random forest of stumps, half the points": RandomForestClassifier(9, max_depth=1, max_samples=0.5),
    "balanced": RandomForestClassifier(6, class_weight="balanced_subsample"),
    "extra trees, ten points": ExtraTreesClassifier(12, bootstrap=True, max_samples=10),
    "bagged trees, few columns": BaggingClassifier(n_estimators=6, max_features=0.5),
    "bagged regressions": BaggingClassifier(LogisticRegression(), n_estimators=6),
    "bagged votes": BaggingClassifier(RidgeClassifier(), n_estimators=6),
    "three trees": RandomForestClassifier(1),
}


def data(n=40, m=6, n_classes=3, seed=0):
    X, y = make_classification(n + m, 5, n_informative=4, n_redundant=0, n_classes=n_classes, random_state=seed)
    return X[:n], np.array(["a", "b", "c"])[y[:n]], X[n:], y[n:]


def member_says(forest, b, x):
    """Probabilities (C,) of one object (d,) under one member."""
    member, columns = forest.estimators_[b], getattr(forest, "estimators_features_", None)
    x = x[None] if columns is None else x[None][:, columns[b]]
    out = np.zeros(len(forest.classes_))
    if hasattr(member, "predict_proba"):
        out[member.classes_.astype(int)] = member.predict_proba(x)[0]
    else:
        out[int(member.predict(x)[0])] = 1.0
    return out


def literal_score(forest, members, x, label):
    said = [member_says(forest, b, x)[label] for b in members]
    return 1 - (sum(said) / len(said) if said else 1 / len(forest.classes_))


def literal_p(fitted, X, y, objects, weights=None, own=None, conditional=False):
    """p-values (m, C), one point and one tree after the other."""
    forest, n, n_classes = fitted.forest.model, len(y), len(fitted.forest.model.classes_)
    drawn = forest.estimators_samples_
    index = np.searchsorted(forest.classes_, y)
    every = range(len(forest.estimators_))
    alpha = [literal_score(forest, [b for b in every if i not in drawn[b]], X[i], index[i]) for i in range(n)]
    weights, own = np.ones(n) if weights is None else weights, np.ones(len(objects)) if own is None else own
    p = np.empty((len(objects), n_classes))
    for k, x in enumerate(objects):
        kept = np.flatnonzero(kept_members(x[None], len(every), fitted.forest.share, fitted.forest.seed)[0])
        for label in range(n_classes):
            tau = literal_score(forest, kept, x, label)
            who = [i for i in range(n) if not conditional or index[i] == label]
            above = sum(weights[i] for i in who if alpha[i] >= tau - 1e-9)
            p[k, label] = (above + own[k]) / (sum(weights[i] for i in who) + own[k])
    return p


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", FORESTS)
def test_p_values_are_those_of_the_literal_loop(name, conditional):
    X, y, objects, _ = data()
    clf = FullConformalClassifier(FORESTS[name], class_conditional=conditional, random_state=1).fit(X, y)
    assert clf.method_ == "oob"
    expected = literal_p(clf._fitted, X, y, objects, conditional=conditional)
    np.testing.assert_allclose(clf.predict_p(objects), expected, rtol=1e-12)


@pytest.mark.parametrize("conditional", [False, True])
def test_weights_count_as_in_the_literal_loop(conditional):
    X, y, objects, _ = data()
    rng = np.random.default_rng(0)
    weights, own = rng.uniform(0.1, 3, len(y)), rng.uniform(0.1, 3, len(objects))
    clf = FullConformalClassifier(RandomForestClassifier(6), class_conditional=conditional, random_state=1).fit(X, y)
    expected = literal_p(clf._fitted, X, y, objects, weights, own, conditional)
    np.testing.assert_allclose(clf.predict_p(objects, weights=(weights, own)), expected, rtol=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rank_weights_are_counts(seed, n, n_classes, tied):
    rng = np.random.default_rng(seed)
    alpha, tau = rng.normal(size=n), rng.normal(size=(5, n_classes))
    alpha, tau = (alpha.round(), tau.round()) if tied else (alpha, tau)
    weight = rng.integers(0, 4, (n, n_classes)).astype(float)
    for given_weight in (None, weight):
        found = pvalues.rank_weights(alpha, tau, 1e-9, given_weight)
        right = pvalues.count(alpha[:, None, None], tau, 1e-9, None if given_weight is None else weight[:, None, :])
        np.testing.assert_array_equal(found, right)


def test_the_share_is_that_of_bootstraps_that_miss_a_point():
    """Counted: of all 4³ bootstraps of three draws from four points, those without the last."""
    assert share_missed(RandomForestClassifier(max_samples=3), 4) == pytest.approx((3 / 4) ** 3)
    assert share_missed(RandomForestClassifier(), 4) == pytest.approx((3 / 4) ** 4)
    assert share_missed(RandomForestClassifier(max_samples=0.5), 4) == pytest.approx((3 / 4) ** 2)
    for model in (RandomForestClassifier(2, max_samples=0.5), BaggingClassifier(n_estimators=2, max_samples=0.5)):
        model.fit(np.eye(7), [0, 1, 0, 1, 0, 1, 0])
        assert share_missed(model, 7) == pytest.approx((6 / 7) ** len(model.estimators_samples_[0]))
    forest = RandomForestClassifier(2000, max_depth=1, max_samples=0.3, random_state=0).fit(*load_iris(return_X_y=True))
    missed = np.mean([0 not in drawn for drawn in forest.estimators_samples_])
    share = share_missed(forest, 150)
    # Of 2000 independent draws, within four standard errors.
    assert abs(missed - share) < 4 * np.sqrt(share * (1 - share) / 2000)


def test_members_are_kept_by_the_object_and_the_seed_alone():
    X = np.random.default_rng(0).normal(size=(500, 3))
    kept = kept_members(X, 40, 0.3, seed=5)
    assert abs(kept.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / kept.size)
    order = np.random.default_rng(1).permutation(len(X))
    np.testing.assert_array_equal(kept_members(X[order], 40, 0.3, seed=5), kept[order])
    np.testing.assert_array_equal(
        kept_members(np.zeros((1, 3)), 40, 0.3, 5), kept_members(-np.zeros((1, 3)), 40, 0.3, 5)
    )
    assert (kept_members(X, 40, 0.3, seed=6) != kept).any(axis=1).all()
    # Neither trees nor objects share their draws: of 780 pairs of columns, none correlates beyond five standard errors.
    assert np.abs(np.corrcoef(kept.T.astype(float)) - np.eye(40)).max() < 5 / np.sqrt(len(X))


@pytest.mark.parametrize("smoothing", [False, True])
def test_an_object_has_the_same_p_values_in_any_batch(smoothing):
    X, y, objects, _ = data()
    clf = FullConformalClassifier(RandomForestClassifier(6), random_state=1).fit(X, y)
    p = clf.predict_p(objects, smoothing=smoothing)
    alone = np.concatenate([clf.predict_p(x[None], smoothing=smoothing) for x in objects])
    np.testing.assert_array_equal(p, alone)
    again = FullConformalClassifier(RandomForestClassifier(6), random_state=1).fit(X, y)
    np.testing.assert_array_equal(again.predict_p(objects[::-1], smoothing=smoothing)[::-1], p)


def test_probabilities_are_those_of_the_whole_forest():
    X, y, objects, _ = data()
    clf = FullConformalClassifier(RandomForestClassifier(6, random_state=3), random_state=1).fit(X, y)
    forest = RandomForestClassifier(17, random_state=3).fit(X, y)
    np.testing.assert_allclose(clf.predict_proba(objects), forest.predict_proba(objects), rtol=0, atol=16 * 2**-52)


def test_as_many_trees_score_a_point_as_were_asked_for():
    """Or a hundred; counted over the points, each of which a tree misses with probability 0.36, within four standard errors."""
    X, y, *_ = data()
    for asked, scoring in ((10, 10), (100, 100), (150, 100), (300, 300 * (40 / 41) ** 41)):
        model = RandomForestClassifier(asked, max_depth=1)
        forest = FullConformalClassifier(model, random_state=1).fit(X, y)._fitted.forest
        found = out_of_bag(forest.model, len(y)).sum(axis=1).mean()
        assert abs(found - scoring) < 1 + 4 * np.sqrt(0.24 * len(forest) / len(y)) and len(forest) >= asked
        assert model.n_estimators == asked


def test_points_that_every_tree_drew_know_nothing():
    """Three trees: a point that all drew, and a candidate that none is kept for, have a score of 1 − 1/C."""
    X, y, objects, _ = data(m=40)
    clf = FullConformalClassifier(RandomForestClassifier(1), random_state=1).fit(X, y)
    first, second, third = clf._fitted.forest.model.estimators_samples_
    drawn = np.intersect1d(np.intersect1d(first, second), third)
    assert len(drawn)
    np.testing.assert_array_equal(clf._fitted.alpha[drawn], 1 - 1 / 3)
    kept = kept_members(objects, 3, clf._fitted.forest.share, clf._fitted.forest.seed).any(axis=1)
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_array_equal(clf._fitted.candidate_scores(objects)[~kept], 1 - 1 / 3)


def test_what_is_promised_is_not_more_than_is_known():
    X, y, objects, _ = data()
    clf = FullConformalClassifier(RandomForestClassifier(100), random_state=1).fit(X, y)
    assert clf.guarantee_.word == "approximate" and "measured, not proved" in clf.guarantee_.reason
    assert clf.guarantee_.coverage(0.9) == 0
    assert not any("exactly valid:" in note for note in clf.notes()) and "grown without it" in clf.notes()[-1]
    assert "approximate" in str(clf.diagnose()) and "oob" in str(clf.diagnose())
    with pytest.raises(ValueError, match=r"out-of-bag scores have no rule for.* check the coverage on held-out points"):
        clf.audit(objects)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "numbers"])
def test_columns_chosen_by_the_labels_are_chosen_without_each_fold(labels):
    """Of 1,000 columns of noise, those that fit the labels best: trees that did not draw a point know its label through the choice."""
    forest, choice = (
        (RandomForestClassifier(30), SelectKBest(k=10))
        if labels
        else (RandomForestRegressor(30), SelectKBest(f_regression, k=10))
    )
    covered = {"auto": 0, "oob": 0}
    for seed, method in product(range(3), covered):
        rng = np.random.default_rng(seed)
        X, y = rng.normal(size=(260, 1000)), rng.integers(2, size=260) if labels else rng.normal(size=260)
        kind = FullConformalClassifier if labels else FullConformalRegressor
        predictor = kind(make_pipeline(choice, forest), method=method, random_state=seed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            predictor.fit(X[:60], y[:60])
        assert predictor.method_ == ("folds" if method == "auto" else "oob")
        assert [("SelectKBest learned" in str(one.message), "'folds'" in str(one.message)) for one in told] == (
            [] if method == "auto" else [(True, True)]
        )
        assert ("SelectKBest" in predictor.guarantee_.reason) == (method == "oob")
        if labels:
            covered[method] += predictor.predict_set(X[60:])[np.arange(200), y[60:]].sum()
        else:
            low, high = predictor.predict_interval(X[60:]).T
            covered[method] += ((low <= y[60:]) & (y[60:] <= high)).sum()
    # Given its training points, a predictor covers with a probability of about Beta(55, 6): the 0.1 % quantile of three of them.
    draws = np.random.default_rng(0)
    least = np.quantile(draws.binomial(200, draws.beta(55, 6, size=(10**5, 3))).sum(axis=1), 0.001)
    assert covered["oob"] < least <= covered["auto"]


def test_scaled_columns_are_nothing_to_warn_of():
    X, y, *_ = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        clf = FullConformalClassifier(make_pipeline(StandardScaler(), RandomForestClassifier(20))).fit(X, y)
    assert clf.method_ == "oob" and "transformers" not in clf.guarantee_.reason


def test_few_trees_are_told_of():
    X, y, *_ = data(n=100)
    with pytest.warns(ConformalWarning, match=r"share the largest score.* Give .*more trees"):
        FullConformalClassifier(RandomForestClassifier(1), random_state=1).fit(X, y)


def test_behind_transformers_in_a_report_and_beside_others(tmp_path):
    X, y = load_iris(return_X_y=True)
    clf = FullConformalClassifier(make_pipeline(StandardScaler(), RandomForestClassifier(20)), random_state=0)
    clf.fit(X[::2], y[::2])
    assert clf.method_ == "oob" and clf.transformer_ is not None
    page = clf.report(X[1::2], y[1::2], tmp_path / "it.html").read_text(encoding="utf-8")
    assert "grown without it" in page
    compared = compare(
        {"forest": clf, "split": SplitConformalClassifier(GaussianNB())}, X[::2], y[::2], X[1::2], y[1::2]
    )
    assert not compared.errors and compared.estimate("forest", "coverage", 0.9).value > 0.8


def test_missing_values_are_the_trees_affair(tmp_path):
    X, y, objects, _ = data()
    X[::7, 0] = objects[0, 1] = np.nan
    clf = FullConformalClassifier(RandomForestClassifier(10), random_state=0).fit(X, y)
    assert np.isfinite(clf.predict_p(objects)).all()
    clf.save(tmp_path / "it")


def test_the_method_as_an_object_and_by_name():
    X, y, objects, _ = data()
    named, given_object = (
        FullConformalClassifier(RandomForestClassifier(6), method=method, random_state=1).fit(X, y).predict_p(objects)
        for method in ("oob", OutOfBag())
    )
    np.testing.assert_array_equal(named, given_object)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ExtraTreesClassifier(), {"method": "oob"}, r"ExtraTreesClassifier\(bootstrap=False\).*set bootstrap=True"),
        (
            DecisionTreeClassifier(),
            {"method": "oob"},
            r"estimator=DecisionTreeClassifier is none; give a random forest",
        ),
        (None, {"method": "oob"}, r"estimator=None is none"),
        (RandomForestClassifier(), {"prefit": True}, r"prefit=True cannot be combined"),
        (RandomForestClassifier(), {"l2": 0.1}, r"l2=0.1 was given"),
        (RandomForestClassifier("many"), {}, r"The 'n_estimators' parameter"),
        (RandomForestClassifier(0), {}, r"The 'n_estimators' parameter"),
        (RandomForestClassifier(5), {"scheme": "ordinary"}, r"use scheme='deleted'"),
        (RandomForestClassifier(5), {"method": "influence"}, r"cannot be wrapped"),
    ],
)
def test_what_does_not_go_together_is_said(model, options, message):
    X, y, objects, _ = data()
    with pytest.raises((ValueError, TypeError), match=message):
        FullConformalClassifier(model, **options).fit(X, y).predict_p(objects)
