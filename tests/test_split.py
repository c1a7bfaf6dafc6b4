"""Split and aggregated conformal prediction against their definitions."""

import warnings

import numpy as np
import pytest
import torch
from oracles import label_score
from sklearn.datasets import load_iris, make_classification
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    SplitConformalClassifier,
    SplitConformalRegressor,
)
from fullconformal.conformity import LAMBDAS, SCORES, threshold
from fullconformal.conformity import RAPS as Regularised
from fullconformal.models import mlp

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
RAPS = {"k_reg": 1, "lambda_reg": 0.1}


@pytest.fixture(scope="module")
def data():
    """Four classes that overlap: 400 points to learn from, 60 objects, and a model that has seen none of them."""
    X, y = make_classification(
        560, 6, n_informative=5, n_redundant=0, n_classes=4, n_clusters_per_class=1, class_sep=0.7, random_state=3
    )
    return X[:400], y[:400], X[400:460], LinearDiscriminantAnalysis().fit(X[460:], y[460:])


@pytest.mark.parametrize("class_conditional", [False, True])
def test_p_values_equal_the_definition(class_conditional):
    X, y = load_iris(return_X_y=True)
    forest = RandomForestClassifier(30, random_state=0)
    clf = SplitConformalClassifier(forest, class_conditional=class_conditional, random_state=5).fit(X[::2], y[::2])
    seed = int(np.random.RandomState(5).randint(2**31))
    train, rest = train_test_split(np.arange(75), test_size=0.2, random_state=seed)
    model = forest.fit(X[::2][train], y[::2][train])
    tiny = np.finfo(float).tiny
    scores = [
        -np.log(max(row[label], tiny))
        for row, label in zip(model.predict_proba(X[::2][rest]), y[::2][rest], strict=True)
    ]
    p = clf.predict_p(X[1::2])
    for j, row in enumerate(model.predict_proba(X[1::2])):
        for k in range(3):
            own = -np.log(max(row[k], tiny))
            compared = [s for s, label in zip(scores, y[::2][rest], strict=True) if label == k or not class_conditional]
            assert abs(p[j, k] - (1 + sum(s >= own for s in compared)) / (1 + len(compared))) < 1e-12


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("class_conditional", [False, True])
def test_every_score_ranks_by_its_definition(score, class_conditional, data):
    X, y, objects, model = data
    clf = SplitConformalClassifier(
        model, prefit=True, conformity_score=score, randomized=False, class_conditional=class_conditional, **RAPS
    ).fit(X, y)
    options = RAPS if score == "raps" else {}
    own = [label_score(row, label, score, **options) for row, label in zip(model.predict_proba(X), y, strict=True)]
    p = clf.predict_p(objects)
    for j, row in enumerate(model.predict_proba(objects)):
        for k in range(4):
            tau = label_score(row, k, score, **options)
            compared = [s for s, label in zip(own, y, strict=True) if label == k or not class_conditional]
            # Scores of other points are never this close; those of last labels under APS tie up to rounding.
            assert abs(p[j, k] - (1 + sum(s >= tau - 1e-12 for s in compared)) / (1 + len(compared))) < 1e-12


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("randomized", [False, True])
def test_sets_are_those_of_the_quantile_rule(score, randomized, data):
    """p > ε exactly where the score is at most the ⌈(1 − ε)(n + 1)⌉-th smallest calibration score."""
    X, y, objects, model = data
    clf = SplitConformalClassifier(
        model, prefit=True, conformity_score=score, randomized=randomized, random_state=0, **RAPS
    ).fit(X, y)
    (ordered,) = clf._held_out.parts[0].ordered
    held = clf._held_out
    scores = held.score.scores(held.parts[0].model(objects), held.uniform(objects))
    for epsilon in (0.01, 0.05, 0.1, 0.25, 0.5, 0.9):
        k = int(np.ceil((1 - epsilon) * 401 - 1e-9))
        assert np.array_equal(clf.predict_set(objects, 1 - epsilon), scores <= ordered[k - 1])


def test_randomised_scores_are_a_function_of_the_seed_and_the_object(data):
    X, y, objects, model = data

    def make(seed):
        clf = SplitConformalClassifier(model, prefit=True, conformity_score="aps", random_state=seed)
        return clf.fit(X, y)

    clf = make(0)
    p = clf.predict_p(objects)
    assert np.array_equal(p, make(0).predict_p(objects))
    assert np.array_equal(p[::-1], clf.predict_p(objects[::-1]))
    assert not np.array_equal(p, make(1).predict_p(objects))
    unseeded = make(None)
    assert np.array_equal(unseeded.predict_p(objects), unseeded.predict_p(objects))
    # The uniform that breaks ties is not the one that randomises the score.
    assert abs(np.corrcoef(clf._held_out.uniform(objects), clf._held_out.smoothing(objects, True)[:, 0])[0, 1]) < 0.5


def test_equal_objects_of_a_batch_have_uniforms_of_their_own(data):
    """Their errors would else be the same, and the coverage of a hundred equal objects that of one."""
    X, y, objects, model = data
    clf = SplitConformalClassifier(model, prefit=True, conformity_score="aps", random_state=0).fit(X, y)
    batch = np.repeat(objects[:1], 2000, axis=0)
    u = clf._held_out.uniform(batch)
    assert len(set(u)) == 2000 and abs(u.mean() - 0.5) < 5 * (1 / 12 / 2000) ** 0.5
    assert u[0] == clf._held_out.uniform(objects)[0]  # the first is as it is alone
    assert np.array_equal(u[:7], clf._held_out.uniform(np.concatenate([objects[1:3], batch[:7]]))[2:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("randomized", [True, False])
@pytest.mark.parametrize("allow_empty", [True, False])
def test_raps_of_a_sure_model_ties_what_is_tied_only(dtype, randomized, allow_empty):
    """Without a penalty it is APS; with one its sets are those of the quantile rule. Scores of a sure model crowd at whole numbers."""
    X, y = make_classification(
        1500, 8, n_informative=8, n_redundant=0, n_classes=6, n_clusters_per_class=1, random_state=0
    )
    X, objects = X.astype(dtype), X[1000:].astype(dtype)
    sure = mlp(8, (), 6).to(torch.float32 if dtype == np.float32 else torch.float64)
    centres = torch.as_tensor(np.stack([X[:500][y[:500] == k].mean(0) for k in range(6)])).to(sure[0].weight)
    with torch.no_grad():
        sure[0].weight.copy_(12 * centres)
        sure[0].bias.copy_(-6 * (centres**2).sum(1))
    options = {"prefit": True, "randomized": randomized, "allow_empty": allow_empty, "random_state": 0}

    def made(score, **of_raps):
        clf = SplitConformalClassifier(sure, conformity_score=score, **options, **of_raps).fit(X[500:1000], y[500:1000])
        return clf, clf.predict_epsilon(objects)

    assert np.array_equal(made("raps", k_reg=1, lambda_reg=0.0)[1], made("aps")[1])
    clf, found = made("raps", k_reg=2, lambda_reg=0.01)
    proba = clf.predict_proba(objects)
    score = Regularised(not allow_empty, 2, 0.01)
    scores = score.scores(np.log(proba), clf._held_out.uniform(objects))
    for level in (0.8, 0.95):
        literal = scores <= threshold(clf._held_out.parts[0].ordered[0], 1 - level) + 1e-15
        literal |= ~literal.any(1, keepdims=True) & (scores == scores.min(1, keepdims=True)) & (not allow_empty)
        assert abs((found > 1 - level).sum() - literal.sum()) <= 0.01 * literal.sum()


@pytest.mark.parametrize("score", SCORES)
def test_sets_that_are_never_empty(score, data):
    X, y, objects, model = data
    options = {"prefit": True, "conformity_score": score, "random_state": 0, **RAPS}
    clf = SplitConformalClassifier(model, allow_empty=False, **options).fit(X, y)
    levels = (0.05, 0.3, 0.6, 0.9)
    sets = clf.predict_set(objects, levels)
    first = model.predict_proba(objects).argmax(1)
    assert sets[np.arange(60), first].all() and (np.diff(sets.astype(int), axis=2) >= 0).all()
    with pytest.raises(ValueError, match=r"never empty .*predict_epsilon"):
        clf.predict_p(objects)
    epsilon = clf.predict_epsilon(objects)
    assert (epsilon[np.arange(60), first] == 1).all()
    assert all(np.array_equal(epsilon > 1 - level + 1e-12, sets[:, :, i]) for i, level in enumerate(levels))
    free = SplitConformalClassifier(model, **options).fit(X, y)
    assert not free.predict_set(objects, 0.05).any(1).all()
    if not SCORES[score].takes_uniform:  # not randomised: the same sets, and the likeliest label
        assert np.array_equal(sets, free.predict_set(objects, levels, allow_empty=False))


def test_raps_is_tuned_on_points_that_do_not_calibrate(data):
    X, y, _, model = data
    clf = SplitConformalClassifier(model, prefit=True, conformity_score="raps", random_state=0).fit(X, y)
    assert len(clf._held_out.parts[0].ordered[0]) == 400 - 120
    assert 1 <= clf.k_reg_ <= 4 and clf.lambda_reg_ in LAMBDAS
    given = SplitConformalClassifier(model, prefit=True, conformity_score="raps", random_state=0, **RAPS).fit(X, y)
    assert (given.k_reg_, given.lambda_reg_, len(given._held_out.parts[0].ordered[0])) == (1, 0.1, 400)


def test_a_trained_model_is_given_the_columns_that_it_knows_by_name():
    """As an array they would make scikit-learn warn at every call, and pass in any order."""
    X, y = load_iris(return_X_y=True, as_frame=True)
    model = RandomForestClassifier(5, random_state=0).fit(X[::2], y[::2])
    clf = SplitConformalClassifier(model, prefit=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        p = clf.fit(X[1::2], y[1::2]).predict_p(X)
        line = Ridge().fit(X[::2], y[::2])
        SplitConformalRegressor(line, prefit=True).fit(X[1::2], y[1::2].astype(float)).predict_interval(X)
    bare = RandomForestClassifier(5, random_state=0).fit(X[::2].to_numpy(), y[::2])
    np.testing.assert_array_equal(p, clf.set_params(estimator=bare).fit(X[1::2], y[1::2]).predict_p(X))
    with pytest.raises(ValueError, match="feature names should match"):
        clf.set_params(estimator=model).fit(X[X.columns[::-1]], y)


def test_prefit_takes_the_model_as_it_is(data):
    X, y, objects, model = data
    clf = SplitConformalClassifier(model, prefit=True).fit(X, y)
    assert np.allclose(clf.predict_proba(objects), model.predict_proba(objects), rtol=1e-14)
    few = SplitConformalClassifier(model, prefit=True).fit(X[y < 2], y[y < 2])  # calibration without two of the classes
    assert few.predict_p(objects).shape == (60, 4) and list(few.classes_) == [0, 1, 2, 3]
    net = mlp(6, (5,), 4, "tanh").eval()
    before = [q.clone() for q in net.parameters()]
    SplitConformalClassifier(net, prefit=True).fit(X.astype("float32"), y)
    assert all((a == b).all() for a, b in zip(before, net.parameters(), strict=True))


def least_running_mean(p, axis):
    """Of p-values (K, m, C), the least of p₁, (p₁ + p₂)/2, …"""
    return np.min([np.mean(p[: k + 1], axis) for k in range(len(p))], axis)


@pytest.mark.parametrize("aggregation", ["mean", "median", "sequential"])
@pytest.mark.parametrize("class_conditional", [False, True])
def test_aggregated_p_values_are_those_of_the_splits_combined(aggregation, class_conditional, data):
    X, y, objects, _ = data
    options = {"calibration_size": 0.3, "class_conditional": class_conditional}
    clf = AggregatedConformalClassifier(
        LinearDiscriminantAnalysis(), n_estimators=4, aggregation=aggregation, random_state=2, **options
    ).fit(X, y)
    rng = np.random.RandomState(2)
    rng.randint(2**31)
    single = []
    for seed in rng.randint(2**31, size=4):
        train, rest = train_test_split(np.arange(400), test_size=0.3, random_state=seed)
        model = LinearDiscriminantAnalysis().fit(X[train], y[train])
        split = SplitConformalClassifier(model, prefit=True, **options).fit(X[rest], y[rest])
        single.append(split.predict_p(objects))
    combine = {"mean": np.mean, "median": np.median, "sequential": least_running_mean}[aggregation]
    single = [single[k] for k in np.random.default_rng(clf._held_out.seed).permutation(4)]
    combined = combine(single, 0)
    assert np.abs(clf.predict_p(objects) - combined).max() < 1e-12
    assert (clf.predict_p(objects, smoothing=True) <= clf.predict_p(objects)).all()
    two = AggregatedConformalClassifier(n_estimators=3, random_state=0, n_jobs=2).fit(X, y).predict_p(objects)
    assert np.array_equal(
        two, AggregatedConformalClassifier(n_estimators=3, random_state=0).fit(X, y).predict_p(objects)
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), MLPClassifier((8,), max_iter=20, random_state=0), mlp(5, (8,), 3)],
    ids=["linear", "sklearn", "torch"],
)
@pytest.mark.parametrize("method", [SplitConformalClassifier, CrossConformalClassifier])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_equal_objects_are_tied_in_a_batch_of_any_size(method, estimator, score):
    """Batches of other sizes are multiplied in another order, and that must not decide between equal objects."""
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(12, 5)).astype(np.float32)  # there are twelve objects, each many times over
    which, y = rng.integers(12, size=240), rng.integers(3, size=240)
    options = {"k_reg": 1, "lambda_reg": 0.1, "randomized": False, "max_epochs": 5, "random_state": 0}
    clf = method(estimator, conformity_score=score, **options).fit(kinds[which].astype(float), y)
    p = clf.predict_p(np.repeat(kinds, 40, axis=0).astype(float))
    assert (p == p[::40].repeat(40, axis=0)).all()
    assert (p[::40] == np.concatenate([clf.predict_p(kind[None].astype(float)) for kind in kinds])).all()
