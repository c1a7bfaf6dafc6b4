"""Mondrian categories: p-values by category are those of the definition, for every classifier, and coverage holds in each."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom
from sklearn.ensemble import RandomForestClassifier
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
    load,
)
from fullconformal.storage import StorageError

rng = np.random.default_rng(0)
GROUP = rng.integers(0, 3, 70).astype(float)
# Group 2 is noisier, and its labels are others.
X = np.column_stack([rng.normal(size=(70, 2)), GROUP])
Y = (X[:, 0] + (GROUP == 2) * rng.normal(0, 3, 70) > 0).astype(int) + (X[:, 1] > 1)
TRAIN, TEST = slice(0, 55), slice(55, 70)
KNN, SCALED = KNeighborsClassifier(3), make_pipeline(StandardScaler(), KNeighborsClassifier(3))
FULL = {
    "symmetric": {},
    "exact": {"method": "exact"},
    "influence": {"method": "influence"},
    "newton": {"method": "influence", "approximation": "newton"},
    "neighbours": {"estimator": KNN},
    "naive Bayes": {"estimator": GaussianNB()},
    "in the bag": {"estimator": SCALED},
    "refits": {
        "estimator": DecisionTreeClassifier(max_depth=1, random_state=0),
        "method": "exact",
        "scheme": "ordinary",
    },
    "oob": {"estimator": RandomForestClassifier(8)},
    "folds": {"estimator": BernoulliNB(), "folds": 4},
    "folds, moved": {"estimator": nn.Linear(3, 3), "folds": 3, "update": "influence", "max_epochs": 2},
    "last layer": {"estimator": nn.Sequential(nn.Linear(3, 3)), "curvature": "last_layer_kron", "max_epochs": 2},
}


def within(clf, group, **options):
    """p-values (m, C) where the points outside a group weigh nothing: the definition, by weights that have oracles of their own."""
    inside = (GROUP[TRAIN] == group).astype(float)
    return clf.predict_p(X[TEST], weights=(inside, np.ones(15)), **options)


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_full_p_values_compare_within_the_category(name, conditional, tmp_path):
    options = {"class_conditional": conditional, "random_state": 0, "confidence_level": 0.7, **FULL[name]}
    clf = FullConformalClassifier(categories=2, **options).fit(X[TRAIN], Y[TRAIN])
    plain = FullConformalClassifier(**options).fit(X[TRAIN], Y[TRAIN])
    expected = np.empty((15, 3))
    for group in range(3):
        rows = GROUP[TEST] == group
        expected[rows] = within(plain, group)[rows]
    p = clf.predict_p(X[TEST])
    assert np.allclose(p, expected, rtol=0, atol=1e-12)
    assert np.array_equal(clf.predict_set(X[TEST]), p > 0.3)
    assert clf.guarantee_ == plain.guarantee_
    if name not in ("refits", "folds"):
        clf.save(tmp_path / "p.safetensors")
        assert np.array_equal(load(tmp_path / "p.safetensors").predict_p(X[TEST]), p)


HELD_OUT = {
    "split": SplitConformalClassifier(DecisionTreeClassifier(max_depth=3), random_state=0),
    "aggregated": AggregatedConformalClassifier(DecisionTreeClassifier(max_depth=3), n_estimators=3, random_state=0),
    "cross": CrossConformalClassifier(n_folds=4, random_state=0),
    "cv+": CVPlusClassifier(n_folds=4, conformity_score="aps", random_state=0),
    "jackknife+": JackknifePlusClassifier(random_state=0),
    "jackknife+ by fits": JackknifePlusClassifier(DecisionTreeClassifier(max_depth=2, random_state=0)),
}


def part_p(part, held, tau, groups, conditional):
    """p-values (m, C) of one calibrated model, from its scores by category and label, literally."""
    width = 3 if conditional else 1
    out = np.empty(tau.shape)
    for i, k in np.ndindex(out.shape):
        scores = part.ordered[int(groups[i]) * width + (k if conditional else 0)]
        out[i, k] = (1 + sum(s >= tau[i, k] - 1e-9 for s in scores)) / (len(scores) + 1)
    return out


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_p_values_compare_within_the_category(name, conditional, tmp_path):
    """The same models and scores as without categories; a category's sets are those of a predictor that calibrates with it alone."""
    base = HELD_OUT[name].set_params(class_conditional=conditional)
    clf = type(base)(**base.get_params(deep=False) | {"categories": 2}).fit(X[TRAIN], Y[TRAIN])
    plain = type(base)(**base.get_params(deep=False)).fit(X[TRAIN], Y[TRAIN])
    p = clf.predict_epsilon(X[TEST])
    assert np.allclose(clf.predict_proba(X[TEST]), plain.predict_proba(X[TEST]), rtol=0, atol=1e-15)
    held, none = clf._held_out, plain._held_out
    cells = (
        [np.concatenate([part.ordered[k] for part in held.parts]) for k in range(len(held.sizes))] if held.parts else []
    )
    if cells and name != "aggregated":
        # No point is lost, and each is in the cell of its group.
        assert np.array_equal(
            np.sort(np.concatenate(cells)), np.sort(np.concatenate([s for q in none.parts for s in q.ordered]))
        )
        assert held.sizes.tolist() == [len(cell) for cell in cells]
    if name in ("split", "aggregated"):
        tau = [held.score.scores(part.model(X[TEST])) for part in held.parts]
        each = [part_p(part, held, t, GROUP[TEST], conditional) for part, t in zip(held.parts, tau, strict=True)]
        assert np.allclose(p, np.mean(each, axis=0), rtol=0, atol=1e-12)
    elif name == "jackknife+ by fits":
        above, total = np.zeros((15, 3)), np.zeros((15, 3))
        for part, i in zip(held.parts, range(55), strict=True):
            tau = held.score.scores(part.model(X[TEST]))
            own = held.score.scores(part.model(X[[i]]))[0, Y[i]]
            same = (GROUP[TEST] == GROUP[i])[:, None] & ((np.arange(3) == Y[i]) | (not conditional))
            above, total = above + same * (own >= tau - 1e-9), total + same
        assert np.allclose(p, (1 + above) / (1 + total), rtol=0, atol=1e-12)
    elif name == "jackknife+":
        assert clf.n_fits_ == 1
        one = JackknifePlusClassifier(class_conditional=conditional).fit(X[TRAIN], Y[TRAIN])._held_out
        for group in range(3):
            rows = GROUP[TEST] == group
            inside = np.where(GROUP[TRAIN] == group, one.alpha, -np.inf)
            greater, equal = next(type(one)(**vars(one) | {"alpha": inside}).counts(X[TEST][rows], None, None))
            size = held.sizes.reshape(3, -1)[group]
            assert np.allclose(p[rows], (1 + greater + equal) / (1 + size), rtol=0, atol=1e-12)
    clf.save(tmp_path / "p.safetensors")
    assert np.array_equal(load(tmp_path / "p.safetensors").predict_epsilon(X[TEST]), p)


def test_names_functions_and_unseen_categories(tmp_path):
    """A column by its name or number or a function of X say the same; a category without points has p-values of 1."""
    table = pd.DataFrame(X, columns=["a", "b", "ward"])
    options = {"estimator": KNN, "confidence_level": 0.7}
    expected = FullConformalClassifier(categories=2, **options).fit(X[TRAIN], Y[TRAIN]).predict_p(X[TEST])
    named = FullConformalClassifier(categories="ward", **options).fit(table[TRAIN], Y[TRAIN])
    asked = FullConformalClassifier(categories=lambda X: np.char.add("w", X[:, 2].astype(str)), **options)
    assert np.array_equal(named.predict_p(table[TEST]), expected)
    assert np.array_equal(asked.fit(X[TRAIN], Y[TRAIN]).predict_p(X[TEST]), expected)
    named.save(tmp_path / "p.safetensors")
    assert np.array_equal(load(tmp_path / "p.safetensors").predict_p(table[TEST]), expected)
    with pytest.raises(StorageError, match="no file holds code"):
        asked.save(tmp_path / "q.safetensors")
    new = X[TEST] + [0, 0, 7]
    for clf in (
        named,
        SplitConformalClassifier(DecisionTreeClassifier(), categories=-1, confidence_level=0.5, random_state=0),
    ):
        clf.fit(X[TRAIN] if clf is not named else table[TRAIN], Y[TRAIN])
        objects = new if clf is not named else pd.DataFrame(new, columns=table.columns)
        assert np.array_equal(clf.predict_p(objects), np.ones((15, 3)))


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ("ward", "names a column, but X has no names"),
        (9, "no column of X, which has 3"),
        (1.5, "is not allowed"),
        (True, "is not allowed"),
        (lambda X: np.zeros(2), "one word or number for each of the"),
        (lambda X: X[:, 0] > X[:, 0].mean(), "by itself than beside others"),
    ],
)
def test_rules_that_cannot_be_taken(categories, message):
    with pytest.raises(ValueError, match=message):
        FullConformalClassifier(KNN, categories=categories).fit(X[TRAIN][X[TRAIN][:, 0].argsort()[::-1]], Y[TRAIN])


def test_a_rule_that_was_changed_is_noticed():
    clf = FullConformalClassifier(KNN, confidence_level=0.7).fit(X[TRAIN], Y[TRAIN])
    with pytest.raises(ValueError, match="changed to 2 after fit"):
        clf.set_params(categories=2).predict_p(X[TEST])
    kind = [float]
    clf = SplitConformalClassifier(
        KNN, categories=lambda X: X[:, 2].astype(kind[0]), confidence_level=0.5, random_state=0
    )
    clf.fit(X, Y)
    kind[0] = str
    with pytest.raises(ValueError, match="words or numbers both times"):
        clf.predict_p(X)


def test_recalibrated_within_categories():
    """p′ counts fresh points of the object's own category."""
    half = slice(0, 28)
    clf = FullConformalClassifier(KNN, categories=2, confidence_level=0.5).fit(X[half], Y[half])
    p_fresh = clf.predict_p(X[28:55])[np.arange(27), Y[28:55]]
    before = clf.predict_p(X[TEST])
    after = clf.recalibrate(X[28:55], Y[28:55]).predict_p(X[TEST])
    for i, k in np.ndindex(after.shape):
        same = p_fresh[GROUP[28:55] == GROUP[TEST][i]]
        # Equal p-values are ordered by the loss: between all of them counted and none.
        low, high = 1 + (same < before[i, k] - 1e-12).sum(), 1 + (same <= before[i, k] + 1e-12).sum()
        assert low - 1e-9 <= after[i, k] * (len(same) + 1) <= high + 1e-9


def test_coverage_holds_in_each_category():
    """A group of a tenth of the points with labels of its own: without categories it is missed, with them it is covered."""
    hits = {None: [], 1: []}
    for seed in range(60):
        draw = np.random.default_rng(seed)
        group = (draw.uniform(size=110) < 0.1).astype(float)
        objects = np.column_stack([draw.normal(size=110) + 0.0, group])
        y = np.where(group == 1, draw.integers(0, 2, 110), objects[:, 0] > 0).astype(int)
        small = np.flatnonzero(group[60:] == 1) + 60
        for categories, found in hits.items() if len(small) else ():
            clf = FullConformalClassifier(KNN, categories=categories, confidence_level=0.75).fit(objects[:60], y[:60])
            found += clf.predict_set(objects[small])[np.arange(len(small)), y[small]].tolist()
    # A binomial band of 1 in 10,000 on either side, of points that a bag shares counted as if they were independent.
    assert np.sum(hits[1]) >= binom.ppf(1e-4, len(hits[1]), 0.75)
    assert np.sum(hits[None]) < binom.ppf(1e-4, len(hits[None]), 0.75)


def test_columns_of_any_number_kind(tmp_path):
    """A NumPy integer names a column, in a file too; a number is the same category in either precision; none may be missing."""
    values = np.where(GROUP == 2, 0.1, 0.3)
    given = np.column_stack([X[:, :2], values])
    clf = FullConformalClassifier(KNN, categories=np.int64(2)).fit(given[TRAIN].astype(np.float32), Y[TRAIN])
    clf.save(tmp_path / "clf.safetensors")
    p = load(tmp_path / "clf.safetensors").predict_p(given[TEST].astype(np.float32))
    assert np.array_equal(p, clf.predict_p(given[TEST].astype(np.float32).astype(float))) and p.min() < 1
    with pytest.raises(ValueError, match="NaN or None for 1 objects"):
        FullConformalClassifier(KNN, categories=lambda X: np.array([None, *"ab" * 20][: len(X)], dtype=object)).fit(
            X[TRAIN][:41], Y[TRAIN][:41]
        )
