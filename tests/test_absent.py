"""Classes that the training points lack: declared to `fit` they have columns; metrics count their objects as missed."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
    compare,
    load,
    metrics,
)
from fullconformal.models import mlp

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["a", "c", "d"])
TRAIN, TEST = np.arange(0, 150, 3), np.arange(1, 150, 3)
# Four of a flower's kinds; nobody brought the second, and the last is only to come.
EVERY = ["a", "b", "c", "d", "e"]

ESTIMATORS = {
    "symmetric": lambda **o: FullConformalClassifier(LogisticRegression(), **o),
    "pipeline": lambda **o: FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression()), **o),
    "exact": lambda **o: FullConformalClassifier(method="exact", l2=0.01, **o),
    "influence": lambda **o: FullConformalClassifier(method="influence", l2=0.01, **o),
    "neighbours": lambda **o: FullConformalClassifier(KNeighborsClassifier(3), **o),
    "split": lambda **o: SplitConformalClassifier(RandomForestClassifier(5, random_state=0), random_state=0, **o),
    "split, built in": lambda **o: SplitConformalClassifier(random_state=0, **o),
    "aggregated": lambda **o: AggregatedConformalClassifier(GaussianNB(), n_estimators=3, random_state=0, **o),
    "cross": lambda **o: CrossConformalClassifier(GaussianNB(), random_state=0, **o),
    "CV+": lambda **o: CVPlusClassifier(GaussianNB(), random_state=0, **o),
    "jackknife+": lambda **o: JackknifePlusClassifier(LogisticRegression(), random_state=0, **o),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_declared_classes_have_columns(name, conditional, tmp_path):
    y = NAMES[Y[TRAIN]]
    clf = ESTIMATORS[name](class_conditional=conditional).fit(X[TRAIN], y, classes=EVERY[::-1])
    plain = ESTIMATORS[name](class_conditional=conditional).fit(X[TRAIN], y)
    assert clf.classes_.tolist() == EVERY
    p, q = clf.predict_epsilon(X[TEST]), plain.predict_epsilon(X[TEST])
    np.testing.assert_array_equal(p[:, [0, 2, 3]], q)
    # Compared with nothing a label is as good as any; compared with n points it is the strangest of n + 1.
    sizes = {"split": 10, "split, built in": 10, "aggregated": 10}.get(name, 50)
    np.testing.assert_array_equal(p[:, [1, 4]], 1.0 if conditional else 1 / (sizes + 1))
    proba = clf.predict_proba(X[TEST])
    assert proba.shape == (50, 5) and (proba[:, [1, 4]] == 0).all()
    assert set(clf.predict(X[TEST])) <= set(NAMES)
    assert clf.guarantee_.word == (plain.guarantee_.word if conditional else "approximate")
    if isinstance(clf.estimator, (GaussianNB, RandomForestClassifier)):
        return
    clf.save(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "a.safetensors").predict_epsilon(X[TEST]), p)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_class_conditional_set_holds_a_rare_class_that_the_bag_lacks():
    """A class of 5 %, 40 points: about an eighth of the bags lack it, and no object of it is missed at ε = 0.05 for that."""
    rng, lacking = np.random.default_rng(0), 0
    for _ in range(60):
        y = np.append(rng.choice(3, 40, p=[0.45, 0.5, 0.05]), 2)
        x = rng.normal(size=(41, 2)) + y[:, None]
        lacking += 2 not in y[:-1]
        clf = FullConformalClassifier(KNeighborsClassifier(3), class_conditional=True)
        # With so few points of the class, 1/(k + 1) exceeds ε.
        assert clf.fit(x[:-1], y[:-1], classes=[0, 1, 2]).predict_p(x[-1:])[0, 2] > 0.05
    assert lacking > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_smoothed_weighted_and_bounded_p_values_of_absent_classes():
    clf = FullConformalClassifier(random_state=0).fit(X[TRAIN], Y[TRAIN], classes=range(4))
    u = clf.predict_p(X[TEST], smoothing=True)[:, 3] * 51
    assert ((u > 0) & (u < 1)).all() and len(np.unique(u)) == 50
    low, high = clf.predict_p(X[TEST][:3], bounds=True)
    assert low.shape == high.shape == (3, 4) and (high[:, 3] == 1 / 51).all()
    p = clf.predict_p(X[TEST], weights=(np.full(50, 2.0), np.full(50, 3.0)))
    np.testing.assert_allclose(p[:, 3], 3 / 103)
    with pytest.raises(ValueError, match="unseen in training"):
        clf.recalibrate(X[TEST], np.full(50, 3))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_networks_with_outputs_for_absent_classes_score_them_themselves():
    net = mlp(4, (5,), 4)
    clf = FullConformalClassifier(net, max_epochs=3, random_state=0).fit(X[TRAIN], Y[TRAIN], classes=range(4))
    assert clf.predict_proba(X[TEST])[:, 3].min() > 0
    split = SplitConformalClassifier(net, max_epochs=3, random_state=0).fit(X[TRAIN], Y[TRAIN], classes=range(4))
    assert split.predict_p(X[TEST]).shape == (50, 4)
    refits = FullConformalClassifier(GaussianNB(), method="exact").fit(X[TRAIN][::5], Y[TRAIN][::5], classes=range(4))
    assert (refits.predict_p(X[TEST][:2])[:, 3] == 1 / 11).all()


@pytest.mark.parametrize(
    "classes, told",
    [(["a", "c"], "declare every class"), (["a", "a", "c", "d"], "every class once"), ([1, 2, 3], "declare every")],
)
def test_classes_that_do_not_go_with_y(classes, told):
    for clf in (FullConformalClassifier(), SplitConformalClassifier()):
        with pytest.raises(ValueError, match=told):
            clf.fit(X[TRAIN], NAMES[Y[TRAIN]], classes=classes)


def test_metrics_count_objects_of_absent_classes_as_missed():
    sets, y = np.array([[True, False], [True, True], [True, True]]), ["a", "b", "z"]
    with pytest.warns(UserWarning, match=r"not among the classes: \['z'\].*count as missed"):
        assert metrics.coverage(sets, y, ["a", "b"]).value == 2 / 3
    with pytest.warns(UserWarning):
        assert metrics.error_rate(sets, y, ["a", "b"]).value == 1 / 3
    with pytest.warns(UserWarning):
        assert {k: v.value for k, v in metrics.class_coverage(sets, y, ["a", "b"]).items()} == {"a": 1, "b": 1, "z": 0}
    p = np.array([[0.5, 0.1], [0.2, 0.4], [0.3, 0.3]])
    with pytest.warns(UserWarning):
        # All labels of the last are false ones.
        assert metrics.observed_fuzziness(p, y, ["a", "b"]).value == pytest.approx((0.1 + 0.2 + 0.6) / 3)
    # Without classes the columns are numbers, and other labels a mistake; so are labels of which none is known.
    for given, classes in (([0, 1, 7], None), (["x", "y", "z"], ["a", "b"])):
        with pytest.raises(ValueError, match=r"classes=clf.classes_"):
            metrics.coverage(sets, given, classes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reports_and_comparisons_count_them_too(tmp_path):
    known = Y[TRAIN] < 2
    clf = FullConformalClassifier().fit(X[TRAIN][known], Y[TRAIN][known])
    page = clf.report(X[TEST], Y[TEST], tmp_path / "page.html").read_text()
    assert '"classes": ["0", "1", "2"]' in page or '"classes":["0","1","2"]' in page
    methods = {"split": SplitConformalClassifier(random_state=0), "full": FullConformalClassifier()}
    out = compare(methods, X[TRAIN][known], Y[TRAIN][known], X[TEST], Y[TEST], levels=[0.9])
    frame = out.to_frame()
    covered = frame.loc[frame["metric"] == "coverage", "value"]
    assert len(covered) == 2 and (covered <= (Y[TEST] < 2).mean()).all()
