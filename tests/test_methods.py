"""The methods beyond influence as people use them: symmetric, exact, heads, certificates, recalibration, audits."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from oracles_convex import exact_scores, p_value
from scipy.sparse import csr_matrix
from scipy.stats import binom
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, StandardScaler
from torch import nn

from fullconformal import (
    AggregatedConformalClassifier,
    ConformalWarning,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
    load,
)
from fullconformal.curvature import GGN
from fullconformal.methods import influence, refit
from fullconformal.methods.audit import label_chances
from fullconformal.methods.neighbors import KernelDensity, NearestNeighbors
from fullconformal.models import KernelDensityClassifier, mlp

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


class Bayes(GaussianNB):
    """A classifier that nothing is known of."""


def data(n_classes, n=60, m=5, seed=0, d=4):
    X, y = make_classification(n + m, d, n_informative=4, n_redundant=0, n_classes=n_classes, random_state=seed)
    return X[:n], y[:n], X[n:], y[n:]


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("scheme", ["deleted", "ordinary"])
def test_exact_is_full_cp_of_scikit_learns_model(n_classes, scheme):
    X, y, Xt, _ = data(n_classes)
    clf = FullConformalClassifier(LogisticRegression(C=2.0), method="exact", scheme=scheme).fit(X, y)
    ones = np.ones((len(X), 1))
    design, objects = np.hstack([X, ones]), np.hstack([Xt, np.ones((len(Xt), 1))])
    penalty = np.array([0.5] * 4 + [0.0])
    q = 1 if scheme == "deleted" else 0
    expected = [
        [p_value(*exact_scores(design, y, n_classes, penalty, x, k, q)) for k in range(n_classes)] for x in objects
    ]
    assert np.abs(clf.predict_p(Xt) - expected).max() < 1e-12


def test_auto_takes_symmetric_where_the_fit_is_convex():
    X, y, *_ = data(3)
    assert FullConformalClassifier().fit(X, y).method_ == "symmetric"
    assert FullConformalClassifier(LogisticRegression()).fit(X, y).method_ == "symmetric"
    assert (
        FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y).method_ == "symmetric"
    )
    assert FullConformalClassifier(approximation="newton").fit(X, y).method_ == "influence"
    assert FullConformalClassifier(mlp(4, (3,), 3), max_epochs=2).fit(X, y).method_ == "folds"
    assert FullConformalClassifier(Bayes()).fit(X, y).method_ == "folds"
    assert FullConformalClassifier(mlp(4, (3,), 3), prefit=True).fit(X, y).method_ == "influence"
    assert FullConformalClassifier(mlp(4, (3,), 3), max_epochs=2, curvature="ggn").fit(X, y).method_ == "influence"
    assert FullConformalClassifier(mlp(4, (3,), 3), max_epochs=2, scheme="ordinary").fit(X, y).method_ == "influence"
    assert FullConformalClassifier(mlp(4, (3,), 3), max_epochs=2, head="auto").fit(X, y).method_ == "symmetric"


@pytest.mark.parametrize(
    ("estimator", "options", "method", "reason"),
    [
        (KNeighborsClassifier(3), {}, "exact", "KNeighborsClassifier has exact scores without refits"),
        (KernelDensityClassifier(), {"method": "exact"}, "exact", "KernelDensityClassifier has exact scores without refits"),
        (None, {"method": "exact"}, "exact", "the fit of the built-in regression is convex"),
        (Bayes(), {"method": "exact"}, "exact", "Bayes has no faster way to exact scores than refits"),
        (None, {}, "symmetric", "the fit of the built-in regression is convex, so symmetric scores are exactly valid"),
        (LogisticRegression(), {"damping": 0.1}, "influence", "an option of influence was given"),
        (LogisticRegression(), {"method": "influence"}, "influence", "LogisticRegression has a loss and gradients"),
        (mlp(4, (3,), 3), {"max_epochs": 2, "prefit": True}, "influence", "Sequential has a loss and gradients"),
        (mlp(4, (3,), 3), {"max_epochs": 2}, "folds", "Sequential is trained without each of 10 folds"),
        (mlp(4, (3,), 3), {"max_epochs": 2, "head": "auto"}, "symmetric", "the fit of Sequential is convex"),
        (
            mlp(4, (3,), 3), {"max_epochs": 2, "curvature": "last_layer_kron"}, "influence",
            "curvature='last_layer_kron' is of the last layer alone",
        ),
    ],
)  # fmt: skip
def test_the_method_and_its_reason_are_told(estimator, options, method, reason, capsys):
    X, y, *_ = data(3)
    clf = FullConformalClassifier(estimator, verbose=1, **options).fit(X, y)
    assert clf.method_ == method and clf.method_reason_.startswith(reason)
    said = f"method {method}: {clf.method_reason_}" in capsys.readouterr().out
    assert said == (clf.method == "auto")  # what was asked for needs no reason


def test_nobody_waits_for_exact_sets_of_a_hundred_classes_without_having_asked_for_them():
    X, y = make_classification(
        300, 20, n_informative=20, n_redundant=0, n_classes=100, n_clusters_per_class=1, random_state=0
    )
    model = make_pipeline(StandardScaler(), LogisticRegression(tol=0.1))
    clf = FullConformalClassifier(model, folds=2, random_state=0).fit(X, y)
    assert clf.method_ == "folds" and clf.method_reason_.startswith(
        "with 100 classes exactly valid sets would take about"
    )
    assert not clf.guarantee_.is_exact and clf.predict_p(X[:2]).shape == (2, 100)
    # With fewer classes, other scores, or where they are asked for, they are what they were.
    for options, few in (({}, 5), ({"scheme": "ordinary"}, 100), ({"method": "symmetric"}, 100)):
        fitted = FullConformalClassifier(model, **options).fit(X, y % few)
        assert fitted.method_ == "symmetric" and fitted.guarantee_.is_exact


def test_what_is_not_convex_is_refused_with_the_ways_on():
    X, y, *_ = data(3)
    for estimator in (mlp(4, (3,), 3), MLPClassifier((3,))):
        with pytest.raises(ValueError, match=r"head=.*method='influence'"):
            FullConformalClassifier(estimator, method="symmetric").fit(X, y)


def test_no_penalty_on_separable_data_names_l2():
    X = np.arange(20.0)[:, None]
    for method in ("symmetric", "exact"):
        with pytest.raises(ValueError, match="l2"):
            FullConformalClassifier(l2=0.0, method=method).fit(X, X[:, 0] > 9)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_bounds_enclose_the_symmetric_p_values(n_classes):
    X, y, Xt, _ = data(n_classes, n=300, m=20)
    clf = FullConformalClassifier(method="symmetric", scheme="ordinary", l2=0.01).fit(X, y)
    p = clf.predict_p(Xt)
    low, high = clf.predict_p(Xt, bounds=True)
    assert (low <= p + 1e-12).all() and (p <= high + 1e-12).all()
    assert (high - low).mean() < 0.1
    for bad in (clf.set_params(method="symmetric"), FullConformalClassifier(method="influence").fit(X, y)):
        with pytest.raises(ValueError, match="bounds=True needs method='symmetric'"):
            bad.predict_p(Xt, bounds=True, smoothing=True)


def test_head_is_a_logistic_regression_on_frozen_features():
    X, y, Xt, _ = data(3, n=80)
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 7)  # seven classes before, three now

        def forward(self, x):
            return self.fc(torch.tanh(self.body(x)))

    net = Net()
    body = copy.deepcopy(net.body).double()
    with torch.no_grad():
        features, objects = (torch.tanh(body(torch.as_tensor(part))).numpy() for part in (X, Xt))
    plain = FullConformalClassifier(l2=0.02).fit(features, y)
    for head in ("fc", "auto"):
        clf = FullConformalClassifier(net, head=head, prefit=True, l2=0.02, device="cpu").fit(X, y)
        assert clf.method_ == "symmetric"
        assert np.array_equal(clf.predict_p(Xt), plain.predict_p(objects))
        # Equals of training points are tied with them.
        assert np.array_equal(clf.predict_p(X[:10]), plain.predict_p(features[:10]))
        assert np.abs(clf.predict_proba(Xt) - plain.predict_proba(objects)).max() < 1e-9
    with pytest.raises(
        ValueError, match=r"head='tail' is no torch.nn.Linear of the estimator; its linear layers: \['body', 'fc'\]"
    ):
        FullConformalClassifier(net, head="tail", prefit=True).fit(X, y)
    with pytest.raises(ValueError, match=r"head='fc' names a layer of a torch.nn.Module"):
        FullConformalClassifier(head="fc").fit(X, y)


@pytest.mark.parametrize("class_conditional", [False, True])
def test_recalibrated_p_values_are_the_definition(class_conditional):
    X, y, Xt, yt = data(3, n=60, m=80)
    clf = FullConformalClassifier(method="influence", class_conditional=class_conditional).fit(X, y)
    raw, proba = clf.predict_p(Xt), clf.predict_proba(Xt)
    fresh = [(raw[j, yt[j]], proba[j, yt[j]]) for j in range(50)]
    p = clf.recalibrate(Xt[:50], yt[:50]).predict_p(Xt[50:])
    for j in range(30):
        for k in range(3):
            compared = [f for f, label in zip(fresh, yt[:50], strict=True) if label == k or not class_conditional]
            expected = (1 + sum(f <= (raw[50 + j, k], proba[50 + j, k]) for f in compared)) / (len(compared) + 1)
            assert abs(p[j, k] - expected) < 1e-12
    with pytest.raises(ValueError, match="recalibrate again"):
        clf.set_params(scheme="ordinary").predict_p(Xt)
    with pytest.raises(ValueError, match=r"y holds labels unseen in training: \[9\]"):
        clf.recalibrate(Xt[:2], [0, 9])
    with pytest.raises(ValueError, match="features"):
        clf.recalibrate(Xt[:2, :3], yt[:2])
    assert np.array_equal(clf.set_params(scheme="deleted").predict_p(Xt[50:]), p)  # what fails leaves what was
    assert np.array_equal(clf.fit(X, y).predict_p(Xt), raw)  # fit forgets


def test_recalibration_mends_an_overfitted_network():
    """n = 1,000 and hardly any penalty: the raw error leaves the 99.9 % band of ε, the recalibrated stays inside."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(10, 3))

    def sample(size):
        X = rng.normal(size=(size, 10))
        return X, (np.tanh(X) @ W + rng.gumbel(size=(size, 3))).argmax(1)

    (X, y), (Xn, yn), (Xt, yt) = sample(1000), sample(500), sample(2000)
    clf = FullConformalClassifier(mlp(10, (50,), 3), method="influence", l2=1e-5, random_state=0, max_epochs=60).fit(
        X, y
    )
    raw = (clf.predict_p(Xt)[np.arange(2000), yt] <= 0.1).sum()
    mended = (clf.recalibrate(Xn, yn).predict_p(Xt)[np.arange(2000), yt] <= 0.1).sum()
    assert raw > binom.interval(0.999, 2000, 0.1)[1]
    # The 500 fresh points are drawn once: their rank statistic adds a Beta spread to the binomial one.
    spread = 3.29 * np.sqrt(0.1 * 0.9 * (1 / 2000 + 1 / 500))
    assert abs(mended / 2000 - 0.1) < spread


@pytest.mark.parametrize("method", ["influence", "symmetric", "exact"])
@pytest.mark.parametrize("scheme", ["deleted", "ordinary"])
def test_audit_finds_the_distance_to_exact_refits(method, scheme):
    X, y, Xt, _ = data(2, n=60, m=8)
    clf = FullConformalClassifier(method=method, scheme=scheme, l2=0.02).fit(X, y)
    exact = FullConformalClassifier(method="exact", scheme=scheme, l2=0.02).fit(X, y).predict_p(Xt)
    report = clf.audit(Xt, n_pairs=6, max_refits=1000, random_state=1)
    # Of every pair both p-values are those of one object and label.
    told, exact = clf.predict_p(Xt).ravel(), exact.ravel()
    for p_method, p_exact in zip(report.p_method, report.p_exact, strict=True):
        assert ((np.abs(told - p_method) < 1e-12) & (np.abs(exact - p_exact) < 1e-12)).any()
    assert report.n_refits == (360 if scheme == "deleted" else 6)
    if method == "exact" or (method, scheme) == ("symmetric", "ordinary"):
        assert report.p_distance.max() < 1e-12 and report.changed == 0
    text = str(report)
    assert "p-value distance" in text and "change sides at 90%" in text


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_a_regression_that_was_trained_elsewhere_is_fitted_again_with_a_warning(method):
    X, y, Xt, _ = data(2, n=60)
    elsewhere = LogisticRegression().fit(X[:20] + 1, y[:20])
    with pytest.warns(ConformalWarning, match=r"not fitted to these data.*fitted again.*SplitConformalClassifier"):
        clf = FullConformalClassifier(elsewhere, prefit=True, method=method).fit(X, y)
    plain = FullConformalClassifier(LogisticRegression(), method=method).fit(X, y)
    np.testing.assert_array_equal(clf.predict(Xt), plain.predict(Xt))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullConformalClassifier(LogisticRegression().fit(X, y), prefit=True, method=method).fit(X, y)


def test_audit_of_a_network_draws_points():
    X, y, Xt, _ = data(3, n=60)
    clf = FullConformalClassifier(mlp(4, (4,), 3, "tanh"), method="influence", max_epochs=20, random_state=0).fit(X, y)
    # Each from two starts.
    report = clf.audit(Xt, n_pairs=2, max_refits=20)
    assert report.n_points == 5 and report.n_refits == 20 and "5 of 60 points a pair" in str(report)
    assert np.isfinite(report.score_distance).all() and report.score_distance.shape == (10,)
    with pytest.raises(ValueError, match="max_refits"):
        clf.audit(Xt, n_pairs=20, max_refits=3)


def test_an_audit_draws_labels_that_may_change_sides():
    """Of ten labels nine are hopeless; the implied error rate is one that labelled objects confirm, where it is far from ε."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order] / 16, y[order]
    clf = FullConformalClassifier(l2=1e-3, method="influence").fit(X[:60], y[:60])
    p = clf.predict_p(X[60:660])
    error = (p[np.arange(600), y[60:660]] <= 0.1).mean()
    report = clf.audit(X[60:660], n_pairs=20, max_refits=20 * 12, random_state=0)
    # Uniformly drawn, one pair in twenty would be above the smallest p-values.
    above = 2 / 61
    assert (report.p_method > above).mean() > 0.25 > 3 * (p > above).mean()
    estimate, low, high = report.error_rate
    assert low <= estimate <= high and high >= error - 1.96 * np.sqrt(error * (1 - error) / 600)
    assert error > 0.15 and low > 0.1 and "error rate implied" in str(report)
    # Labels that the exact method agrees on are not lost.
    exact = FullConformalClassifier(l2=1e-2, method="exact").fit(X[:40, :5], y[:40] % 2).audit(X[40:, :5], n_pairs=5)
    assert exact.lost[:2] == (0, 0) and exact.error_rate[0] == pytest.approx(0.1)


def test_labels_are_drawn_with_the_chances_that_their_weights_are_one_over():
    p, proba = np.array([1 / 61, 0.09, 0.5, 1.0, 1 / 61]), np.array([0.05, 0.1, 0.3, 0.55, 0.0])
    chances = label_chances(p, proba, 0.9)
    assert chances.sum() == pytest.approx(1) and (chances >= 0.1 / 5).all()
    # Near the level or likely, before hopeless.
    assert chances[1] > chances[2] > chances[0] > chances[4] and chances[3] > chances[0]


def test_neighbours_and_densities_are_exact_without_refits():
    X, y, Xt, _ = data(3, n=40)
    names = np.array(["a", "b", "c"])
    for estimator, oracle in (
        (KNeighborsClassifier(3, p=1), NearestNeighbors.fit(X, y, 3, 3, 1.0)),
        (KernelDensityClassifier(0.7), KernelDensity.fit(X, y, 3, 0.7)),
    ):
        clf = FullConformalClassifier(estimator).fit(X, names[y])
        assert clf.method_ == "exact"
        greater, equal = oracle.counts(Xt)
        assert np.array_equal(clf.predict_p(Xt), (greater + equal + 1) / 41)
        assert np.array_equal(clf.predict(Xt), estimator.fit(X, names[y]).predict(Xt))
        with pytest.raises(ValueError, match="scheme='deleted'"):
            clf.set_params(scheme="ordinary").predict_p(Xt)
        assert "guarantee        exact: sets hold" in str(clf.diagnose())
        report = clf.set_params(scheme="deleted").audit(Xt, n_pairs=3)
        assert report.p_distance.max() == 0 and "the method is full CP itself" in str(report)
    with pytest.raises(ValueError, match="method='exact', without refits"):
        FullConformalClassifier(KNeighborsClassifier(), method="influence").fit(X, y)


@pytest.mark.parametrize("scheme", ["deleted", "ordinary"])
def test_any_classifier_by_refits(tmp_path, scheme):
    X, y, Xt, _ = data(2, n=12, m=2)
    names = np.array(["no", "yes"])[y]
    clf = FullConformalClassifier(Bayes(), method="exact", scheme=scheme, checkpoint=tmp_path / "run").fit(X, names)
    p = clf.predict_p(Xt)
    for j, x in enumerate(Xt):
        for k in range(2):
            bag, labels = np.vstack([X, x]), np.append(y, k)
            alpha = []
            for i in range(13):
                keep = np.arange(13) != i if scheme == "deleted" else slice(None)
                alpha.append(-Bayes().fit(bag[keep], labels[keep]).predict_log_proba(bag[i : i + 1])[0, labels[i]])
            assert abs(p[j, k] - np.mean(np.array(alpha) >= alpha[-1] * (1 - 1e-9))) < 1e-12
    assert any((tmp_path / "run").iterdir())
    assert np.array_equal(p, clf.predict_p(Xt))
    assert np.array_equal(clf.predict(Xt), Bayes().fit(X, names).predict(Xt))


def test_a_network_by_refits():
    X, y, Xt, _ = data(2, n=8, m=1)
    clf = FullConformalClassifier(mlp(4, (2,), 2), method="exact", scheme="ordinary", max_epochs=2, random_state=0).fit(
        X, y
    )
    assert ((clf.predict_p(Xt) >= 1 / 9) & (clf.predict_p(Xt) <= 1)).all()


@pytest.mark.parametrize(("repeated", "l2"), [(False, 1e-7), (True, 1e-7), (True, 1e-13)])
def test_features_that_nothing_holds_leave_exact_p_values_as_they_are(repeated, l2):
    X, y, Xt, _ = data(2, n=60)
    if repeated:
        X, Xt = (np.hstack([part, part[:, :2] + part[:, 2:]]) for part in (X, Xt))
    clf = FullConformalClassifier(method="exact", l2=l2).fit(X, y)
    design, objects = (np.hstack([part, np.ones((len(part), 1))]) for part in (X, Xt))
    penalty = np.array([60 * l2] * X.shape[1] + [0.0])
    expected = [[p_value(*exact_scores(design, y, 2, penalty, x, k, 1)) for k in range(2)] for x in objects]
    assert np.abs(clf.predict_p(Xt) - expected).max() < 1e-12


# What a review found, kept found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_classes", [2, 3])
def test_features_far_from_zero_are_fitted_all_the_same(n_classes):
    X, y, Xt, _ = data(n_classes, n=200)
    far = np.array([2000.0, 0, 0, -500])
    for method in ("influence", "symmetric"):
        near, moved = (FullConformalClassifier(method=method).fit(X + s, y) for s in (0, far))
        assert np.abs(near.predict_proba(Xt) - moved.predict_proba(Xt + far)).max() < 1e-5
        assert np.abs(near.predict_p(Xt) - moved.predict_p(Xt + far)).max() <= 1 / 201


def test_guarantees_are_not_claimed_where_they_are_lost():
    X, y, *_ = data(2, n=60)
    with pytest.warns(ConformalWarning, match="SelectKBest learned from the labels"):
        pipe = make_pipeline(SelectKBest(k=2), LogisticRegression())
        clf = FullConformalClassifier(pipe, transformers="fixed").fit(X, y)
    assert "exactly valid, whatever" not in str(clf.diagnose())
    with pytest.warns(ConformalWarning, match="only approximately valid"):
        FullConformalClassifier(mlp(4, (3,), 2), head="auto", max_epochs=2).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        clf = FullConformalClassifier(mlp(4, (3,), 2), head="auto", prefit=True).fit(X, y)
        FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y)
    assert "exactly valid, whatever" in str(clf.diagnose())
    assert "provided that all before the head was trained on other data" in str(clf.guarantee_)
    # They may have been fitted to the same points, to which the model was.
    for step, told in (
        (StandardScaler(), "leave prefit out"),
        (SelectKBest(k=2), "SelectKBest learned .* leave prefit out"),
    ):
        with pytest.warns(ConformalWarning, match=told):
            trained = FullConformalClassifier(make_pipeline(step, LogisticRegression()).fit(X, y), prefit=True).fit(
                X, y
            )
        assert trained.guarantee_.word == "approximate" and any(note.startswith("!") for note in trained.notes())
    with pytest.warns(ConformalWarning, match="SelectKBest learned .* method='folds'"):
        FullConformalClassifier(pipe, method="influence").fit(X, y)
    with pytest.raises(ValueError, match="prefit=True cannot be combined"):
        FullConformalClassifier(mlp(4, (3,), 2), method="exact", prefit=True).fit(X, y)
    for estimator in (LogisticRegression(class_weight="balanced"), LogisticRegression(solver="liblinear")):
        with pytest.raises(ValueError, match=r"class_weight|liblinear"):
            FullConformalClassifier(estimator, method="influence").fit(X, y)


def test_heads_are_the_last_step():
    X, y, *_ = data(2, n=60)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.first = nn.Linear(6, 2), nn.Linear(4, 6)  # registered in the other order

        def forward(self, x):
            return self.fc(torch.relu(self.first(x)))

    net = Odd().requires_grad_(False)  # a wholly frozen backbone
    clf = FullConformalClassifier(net, head="auto", prefit=True).fit(X, y)
    assert clf._fitted.bag.X.shape == (60, 7)
    with pytest.raises(ValueError, match="not the network's last step"):
        FullConformalClassifier(net, head="first", prefit=True).fit(X, y)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))], ids=["bare", "in a sequence"])
def test_the_head_of_a_single_layer_is_the_model(layer, tmp_path):
    """What is before it is the object itself, so that the predictor is the built-in logistic regression."""
    X, y, Xt, _ = data(3, n=60)
    X, Xt = (part.astype(np.float32).astype(np.float64) for part in (X, Xt))  # the layer is given float32
    expected = FullConformalClassifier(l2=0.02).fit(X, y).predict_p(Xt)
    clf = FullConformalClassifier(layer, head="auto", l2=0.02, max_epochs=1).fit(X, y)
    assert np.array_equal(clf.predict_p(Xt), expected)
    clf.save(tmp_path / "layer.safetensors")
    assert np.array_equal(load(tmp_path / "layer.safetensors").predict_p(Xt), expected)


@pytest.mark.parametrize("head", ["auto", None])
def test_the_last_layer_of_a_single_layer_is_the_model(head):
    """Bare or in a sequence, the layer and its penalty are the same."""
    X, y, Xt, _ = data(3, n=60)
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    for curvature in ("last_layer", "last_layer_kron"):
        options = {"method": "influence", "curvature": curvature, "head": head, "prefit": True, "l2": 0.5}
        bare, inside = (FullConformalClassifier(m, **options).fit(X, y) for m in (layer, nn.Sequential(layer)))
        assert np.array_equal(bare.predict_p(Xt), inside.predict_p(Xt))
        assert bare.diagnose() == inside.diagnose()


@pytest.mark.parametrize("curvature", ["ggn", "hessian", "dual", "kfac", "ekfac", "last_layer"])
def test_the_built_in_regression_is_scikit_learns_whatever_the_curvature(curvature):
    """With C = 1/(n · l2); neither library's fit is taken as it is."""
    X, y, Xt, _ = data(3, n=60, m=40)
    options = {"method": "influence", "curvature": curvature, "damping": 1e-3, "l2": None}
    own, theirs = (FullConformalClassifier(m, **options).fit(X, y) for m in (None, LogisticRegression(C=1 / 0.06)))
    assert own._fitted.problem.n_classes == 3 and own._fitted.problem.p == 3 * 5
    assert np.array_equal(own.predict_p(Xt), theirs.predict_p(Xt))


@pytest.mark.parametrize("curvature", ["ggn", "dual", "ekfac", "last_layer", "last_layer_kron"])
def test_diagnostics_find_the_smallest_eigenvalue(curvature):
    """Of a single layer, and of a Kronecker product of one."""
    X, y, *_ = data(3, n=60)
    layer = nn.Sequential(nn.Linear(4, 3)).double()
    clf = FullConformalClassifier(layer, method="influence", curvature=curvature, prefit=True, l2=0.5).fit(X, y)
    found = clf.diagnose().smallest_eigenvalue
    assert found > 0
    if curvature != "last_layer_kron":
        smallest = float(torch.linalg.eigvalsh(GGN().matrix(clf._fitted.problem))[0]) / 60
        assert smallest * (1 - 1e-9) <= found <= 1.2 * smallest


def test_ordinary_inputs_that_used_to_break(tmp_path):
    X, y, Xt, _ = data(2, n=30)
    inplace = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    assert FullConformalClassifier(inplace, max_epochs=2).fit(X, y).predict_p(Xt).shape == (5, 2)
    pipe = make_pipeline(StandardScaler(), LogisticRegression())
    assert FullConformalClassifier(pipe).fit(X, y[:, None]).predict_p(Xt).shape == (5, 2)
    sparse = make_pipeline(MaxAbsScaler(), LogisticRegression())
    assert FullConformalClassifier(sparse).fit(csr_matrix(X), y).predict_p(csr_matrix(Xt)).shape == (5, 2)
    own = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2, bias=False).requires_grad_(False))
    clf = FullConformalClassifier(own, method="influence", max_epochs=0).fit(X, y)
    assert clf.diagnose().gradient < 1e-4
    bayes = FullConformalClassifier(Bayes(), method="exact", scheme="ordinary", checkpoint=tmp_path).fit(X, y)
    p = bayes.predict_p(Xt)
    assert np.array_equal(pickle.loads(pickle.dumps(bayes)).predict_p(Xt), p)
    assert np.array_equal(clone(bayes).fit(X, y).predict_p(Xt), p)  # a restart goes on in the same folder
    with pytest.raises(TypeError, match="LogisticRegressionCV cannot be wrapped"):
        FullConformalClassifier(LogisticRegressionCV(), method="influence").fit(X, y)
    clf = FullConformalClassifier(scheme="ordinary").fit(X, y)
    assert np.array_equal(clf.predict_set(Xt, bounds=True), clf.predict_p(Xt, bounds=True)[1] > 0.1)
    nothing = clf.set_params(class_conditional=True).predict_p(Xt, weights=(y.astype(float), np.r_[0, 1, 1, 1, 1.0]))
    assert nothing[0, 0] == 1  # compared with nothing


def test_smoothing_is_a_function_of_the_object():
    X, y, Xt, _ = data(2, n=60)
    clf = FullConformalClassifier(random_state=0).fit(X, y)
    together = clf.predict_p(Xt, smoothing=True)
    assert np.array_equal(together, np.vstack([clf.predict_p(x[None], smoothing=True) for x in Xt]))
    gaps = (clf.predict_p(Xt) - together)[:, 0] * 61
    assert len(np.unique(gaps.round(9))) == 5  # five objects, five uniforms


def test_recalibration_puts_p_values_before_losses():
    """A label with the larger p-value keeps the larger recalibrated one, whatever the model's loss says."""
    X, y, Xt, yt = data(3, n=60, m=80)
    clf = FullConformalClassifier(method="influence", scheme="studentized").fit(X, y)
    raw = clf.predict_p(Xt)
    new = clf.recalibrate(Xt[:50], yt[:50]).predict_p(Xt)
    larger = raw[:, :, None] > raw[:, None, :] + 1e-9
    assert (new[:, :, None] >= new[:, None, :])[larger].all()
    flat, moved = raw.ravel(), new.ravel()
    larger = flat[:, None] > flat[None, :] + 1e-9
    assert (moved[:, None] >= moved[None, :])[larger].all()


@pytest.mark.parametrize("curvature", ["ggn", "last_layer_kron"])
def test_recalibrated_p_values_are_the_same_in_any_batch(curvature):
    """A float32 network gives an object other last bits in another batch; a fresh point stays tied with itself."""
    X, y, Xt, yt = data(3, n=100, m=100, d=64)
    torch.manual_seed(0)
    clf = FullConformalClassifier(mlp(64, (16,), 3), method="influence", curvature=curvature, max_epochs=20).fit(X, y)
    together, alone = (np.concatenate([clf.predict_p(part) for part in parts]) for parts in ([Xt], np.split(Xt, 100)))
    assert np.array_equal(together, alone)
    clf.recalibrate(Xt, yt)
    together, alone = (np.concatenate([clf.predict_p(part) for part in parts]) for parts in ([Xt], np.split(Xt, 100)))
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_refits_know_the_precision_of_a_network(dtype, monkeypatch):
    X, y, Xt, _ = data(2, n=8, m=1)
    asked = {}
    monkeypatch.setattr(refit, "refit_counts", lambda *_, **options: asked.update(options) or (np.ones((1, 2)),) * 2)
    FullConformalClassifier(mlp(4, (2,), 2), method="exact", max_epochs=1, dtype=dtype).fit(X, y).predict_p(Xt)
    assert asked["eps"] == np.finfo(dtype).eps


def test_audits_refuse_what_refits_cannot_answer():
    X, y, Xt, _ = data(2, n=30)
    clf = FullConformalClassifier().fit(X, y)
    for options in ({"scheme": "studentized"}, {"scheme": "deleted", "class_conditional": True}):
        with pytest.raises(ValueError, match="an audit compares with refits"):
            clf.set_params(**options).audit(Xt)


@pytest.mark.parametrize("method", ["exact", "influence"])
def test_an_audit_ties_equal_points_as_the_method_does(method):
    """Of 40 points 8 are different: refits give equal points equal losses up to where they stopped."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(8, 2)), np.arange(8) % 2
    rows = np.r_[np.arange(8), rng.integers(0, 8, 32)]
    clf = FullConformalClassifier(method=method, l2=0.5).fit(X[rows], y[rows])
    audit = clf.audit(X, n_pairs=8)
    if method == "exact":
        assert audit.p_distance.max() < 1e-12
    assert audit.n_refits == 8 * 40


SCALED = make_pipeline(StandardScaler(), KNeighborsClassifier())


@pytest.mark.parametrize(
    "clf, word, covered",
    [
        (FullConformalClassifier(), "exact", 0.9),
        (FullConformalClassifier(method="influence"), "approximate", 0.0),
        (FullConformalClassifier(KNeighborsClassifier()), "exact", 0.9),
        (FullConformalClassifier(SCALED), "exact", 0.9),
        (FullConformalClassifier(SCALED, transformers="fixed"), "approximate", 0.0),
        (
            FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression()), method="influence"),
            "approximate",
            0.0,
        ),
        (SplitConformalClassifier(), "exact", 0.9),
        (AggregatedConformalClassifier(), "1 − 2ε", 0.8),
        (CVPlusClassifier(), "1 − 2ε", 0.8),
        (CrossConformalClassifier(), "1 − 2ε", 0.8),
        (JackknifePlusClassifier(), "1 − 2ε", 0.8),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "fit") else "",
)
def test_every_classifier_says_what_it_promises(clf, word, covered):
    X, y = load_iris(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        promise = clf.fit(X[::3], y[::3]).guarantee_
    assert promise.word == word and str(promise).startswith(word)
    assert promise.coverage(0.9) == pytest.approx(covered)


@pytest.mark.parametrize("trains", [False, True], ids=["regression", "network"])
def test_a_curvature_is_chosen_once_and_before_any_training(trains, monkeypatch):
    chosen, choose = [], influence.choose
    monkeypatch.setattr(
        influence, "choose", lambda problem, *given: chosen.append(problem.theta) or choose(problem, *given)
    )
    X, y = load_iris(return_X_y=True)
    model = mlp(4, (3,), 3) if trains else None
    clf = FullConformalClassifier(model, method="influence", max_epochs=1, l2=0.1).fit(X, y)
    (theta,) = chosen
    assert not torch.allclose(theta, clf._fitted.problem.theta)
