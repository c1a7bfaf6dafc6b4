"""K-fold full conformal prediction: against a literal loop over folds, in any batch, with every option, saved and audited."""

import copy
import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from oracles import Oracle, folds_scores
from scipy.sparse import csr_matrix
from sklearn.datasets import load_iris
from sklearn.ensemble import BaggingClassifier, HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from torch import nn

import fullconformal
from fullconformal import FullConformalClassifier, SplitConformalClassifier
from fullconformal.conformity import LAC, RAPS, LogLoss
from fullconformal.methods import parts
from fullconformal.methods.audit import label_chances
from fullconformal.methods.folds import Folds
from fullconformal.models import cnn, mlp, train, training
from fullconformal.runtime.hashing import contents, hashes
from fullconformal.storage import StorageError

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")


def points(n=60, m=8, d=4, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + m, d))
    y = (X[:, :n_classes] + rng.gumbel(size=(n + m, n_classes)) * 0.5).argmax(1)
    return X[:n], y[:n], X[n:], y[n:]


def folds_of(clf, Xt):
    """Folds of the training points (n,) and of candidates (m,), of the first repeat."""
    return clf._fitted.fold[0], clf._fitted.trained.candidate_folds(Xt)[0]


def by_classes(make, classes):
    """A way to train: log-probabilities of a fresh classifier in the order of classes, −inf for what it has not seen."""

    def train(X, y):
        model = make().fit(X, y)

        def log_proba(X):
            out = np.full((len(X), classes), -np.inf)
            out[:, model.classes_] = np.log(np.maximum(model.predict_proba(X), np.finfo(float).tiny))
            return out

        return log_proba

    return train


# p-values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "n"), [(GaussianNB, 60), (lambda: DecisionTreeClassifier(max_depth=3, random_state=0), 25)]
)
@pytest.mark.parametrize("K", [2, 5, 10])
def test_p_values_are_those_of_the_literal_loop(make, n, K):
    X, y, Xt, _ = points(n)
    clf = FullConformalClassifier(make(), method="folds", folds=K, random_state=3).fit(X, y)
    fold, own = folds_of(clf, Xt)
    p = clf.predict_p(Xt)
    for j, x in enumerate(Xt):
        for label in range(3):
            alpha, tau = folds_scores(by_classes(make, 3), X, y, fold, x, label, own[j], 3, honest=False)
            assert p[j, label] == pytest.approx((1 + (alpha >= tau - 1e-9).sum()) / (n + 1), abs=1e-12)


def test_an_audit_trains_honestly():
    """Of every pair the p-value that a literal loop gives in which the K − 1 models have seen the candidate."""
    X, y, Xt, _ = points(30)
    make = GaussianNB
    clf = FullConformalClassifier(make(), method="folds", folds=4, random_state=0).fit(X, y)
    fold, own = folds_of(clf, Xt)
    report = clf.audit(Xt, n_pairs=6, random_state=1)
    rng = np.random.RandomState(1)
    for k in range(6):
        at = rng.randint(len(Xt))
        chances = label_chances(clf.predict_p(Xt)[at], clf.predict_proba(Xt)[at], 0.9)
        label = int(rng.choice(3, p=chances))
        rng.choice(30, 30, replace=False)
        alpha, tau = folds_scores(by_classes(make, 3), X, y, fold, Xt[at], label, own[at], 3, honest=True)
        assert report.p_exact[k] == pytest.approx((1 + (alpha >= tau - 1e-9).sum()) / 31, abs=1e-12)
        assert report.p_method[k] == pytest.approx(clf.predict_p(Xt)[at, label], abs=1e-12)
    assert report.n_refits == 18 and "p-value distance, mean / largest" in str(report)
    assert clf.audit(Xt, n_pairs=20, max_refits=20).n_pairs == 6


def test_an_object_has_the_same_p_values_in_any_batch():
    X, y, Xt, _ = points(m=40)
    for model in (GaussianNB(), mlp(4, (5,), 3)):
        clf = FullConformalClassifier(model, method="folds", folds=4, max_epochs=3, random_state=0).fit(X, y)
        p = clf.predict_p(Xt)
        assert np.array_equal(p, np.vstack([clf.predict_p(x[None]) for x in Xt]))
        assert np.array_equal(p[::-1], clf.predict_p(Xt[::-1]))
        assert len(np.unique(clf._fitted.trained.candidate_folds(Xt))) == 4


def test_folds_are_drawn_independently_and_by_the_seed():
    X, y, Xt, _ = points(2000, 2000)
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(X, y)
    fold, own = folds_of(clf, np.vstack([Xt, X]))
    # Multinomial counts: 3.9 standard errors of 2,000 draws in four folds.
    for found in (fold, own[:2000], own[2000:]):
        assert np.abs(np.bincount(found, minlength=4) - 500).max() < 3.9 * np.sqrt(2000 * 3 / 16)
    # An object that was trained on draws anew as a candidate: equal in a quarter of all cases.
    assert abs((own[2000:] == fold).mean() - 0.25) < 3.9 * np.sqrt(3 / 16 / 2000)
    other = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=1).fit(X, y)
    assert abs((folds_of(other, Xt)[1] == own[:2000]).mean() - 0.25) < 3.9 * np.sqrt(3 / 16 / 2000)
    equal = np.zeros((400, 4))
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(
        np.vstack([equal, X[:9]]), np.arange(409) % 2
    )
    assert np.bincount(clf._fitted.fold[0][:400], minlength=4).min() > 60


def test_rows_in_another_order_give_the_same_sets():
    X, y, Xt, _ = points(40)
    order = np.random.default_rng(0).permutation(40)
    # Its bootstraps are drawn by row.
    one, other = (
        FullConformalClassifier(
            BaggingClassifier(n_estimators=3, random_state=0), method="folds", folds=4, random_state=0
        )
        .fit(X[at], y[at])
        .predict_p(Xt)
        for at in (np.arange(40), order)
    )
    assert np.array_equal(one, other)


def test_repeats_average_the_probabilities_of_a_point():
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=3, repeats=4, random_state=0).fit(X, y)
    fitted = clf._fitted
    assert fitted.fold.shape == (4, 40) and len(fitted.models) == 12
    proba = np.zeros((40, 3))
    for r in range(4):
        for k in range(3):
            at = fitted.fold[r] == k
            proba[at] += np.exp(by_classes(GaussianNB, 3)(X[~at], y[~at])(X[at])) / 4
    alpha = -np.log(proba[np.arange(40), y])
    # Sums of four exponentials and a logarithm, a few units of rounding each.
    assert np.abs(fitted.alpha - alpha).max() < 1e-12 * (1 + alpha.max())
    assert np.allclose(clf.predict_proba(Xt).sum(1), 1)
    assert clf.audit(Xt, n_pairs=1).n_refits == 8


@pytest.mark.parametrize("update", ["none", "influence"])
def test_weights_classes_and_smoothing_are_those_of_the_scores(update):
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(mlp(4, (5,), 3), method="folds", folds=4, update=update, max_epochs=3, random_state=0)
    clf.fit(X, y)
    alpha, tau = clf._fitted.scores(Xt, clf._query())
    own, of = np.exp(Xt[:, 0]), np.exp(X[:, 0])
    p = clf.predict_p(Xt, weights=(of, own))
    above = ((alpha >= tau[:, :, None]) * of).sum(-1) + own[:, None]
    assert np.abs(p - above / (of.sum() + own[:, None])).max() < 1e-12
    clf.set_params(class_conditional=True)
    same = y[None, None] == np.arange(3)[None, :, None]
    expected = (1 + ((alpha >= tau[:, :, None]) & same).sum(-1)) / (1 + same.sum(-1))
    assert np.abs(clf.predict_p(Xt) - expected).max() < 1e-12
    smooth = clf.predict_p(Xt, smoothing=True)
    assert (smooth < expected).all() and (smooth > expected - 1 / (1 + same.sum(-1))).all()


def test_labels_that_a_fold_lacks_are_as_strange_as_can_be():
    X, y, Xt, _ = points(40, n_classes=2)
    y[0] = 2
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=5, random_state=0).fit(X, y)
    assert np.isposinf(clf._fitted.alpha[0]) and np.isfinite(clf._fitted.alpha[1:]).all()
    few = FullConformalClassifier(GaussianNB(), method="folds", folds=2, random_state=0).fit(X[:3], np.array([0, 0, 1]))
    p = few.predict_p(Xt)
    assert np.isfinite(p).all() and p.min() >= 0.25
    assert np.allclose(few.predict_proba(Xt).sum(1), 1)


def test_scores_of_other_kinds_fit_in():
    X, y, *_ = points(40)
    loss, lac = (
        FullConformalClassifier(GaussianNB(), method=method, random_state=0).fit(X, y)
        for method in ("folds", Folds(score=LAC()))
    )
    assert np.allclose(lac._fitted.alpha, 1 - np.exp(-loss._fitted.alpha))
    assert lac.method_ == "folds"


# The step of influence -----------------------------------------------------------------------------------------------


def test_influence_adds_the_candidate_by_one_step():
    """Against gradients and the Gauss–Newton matrix of the oracle, formed point by point, in float64."""
    X, y, Xt, _ = points(30, m=3)
    torch.manual_seed(0)
    net = mlp(4, (3,), 3, "tanh").double()
    clf = FullConformalClassifier(net, method="folds", folds=3, update="influence", max_epochs=5, random_state=0).fit(
        X, y
    )
    fold, own = folds_of(clf, Xt)
    alpha, tau = clf._fitted.scores(Xt, clf._query())
    expected = np.tile(clf._fitted.alpha, (3, 3, 1))
    for k in range(3):
        at = torch.as_tensor(fold != k)
        oracle = Oracle(
            clf._fitted.models[k].model.model, torch.as_tensor(X)[at], torch.as_tensor(y)[at], 0.01 * int(at.sum())
        )
        inverse = torch.linalg.inv(oracle.ggn() * int(at.sum()))
        for j, label in np.ndindex(3, 3):
            if own[j] == k:
                continue
            step = inverse @ oracle.gradient(oracle.theta, torch.as_tensor(Xt[j]), label)
            for i in np.flatnonzero(fold == k):
                g = oracle.gradient(oracle.theta, torch.as_tensor(X[i]), int(y[i]))
                expected[j, label, i] -= float(g @ step)
    # Penalties of 0.2 and more keep the condition below 1e4: 1e-16 · 1e4 · 30 products.
    assert np.abs(alpha - expected).max() < 1e-9
    p = (1 + (expected >= tau[:, :, None] - 1e-9).sum(-1)) / 31
    assert np.abs(clf.predict_p(Xt) - p).max() < 1e-12


def test_influence_is_nearer_to_honest_training():
    """Of a convex model, whose trainings end at one minimum, so that nothing but the candidate makes a difference."""
    X, y, Xt, _ = points(40)
    far = {}
    for update in ("none", "influence"):
        model = mlp(4, (), 3).double()
        nn.init.zeros_(model[0].weight)
        clf = FullConformalClassifier(model, method="folds", folds=4, update=update, max_epochs=0, random_state=0)
        far[update] = clf.fit(X, y).audit(Xt, n_pairs=10).score_distance.mean()
    assert far["influence"] < far["none"] / 2


# What is taken -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        HistGradientBoostingClassifier(max_iter=5, min_samples_leaf=2),
        SVC(probability=True),
        MLPClassifier((4,), max_iter=20, early_stopping=False),
        make_pipeline(StandardScaler(), DecisionTreeClassifier(max_depth=2)),
        make_pipeline(StandardScaler(), mlp(4, (3,), 3)),
    ],
    ids=lambda model: type(model).__name__,
)
@pytest.mark.filterwarnings("ignore")
def test_auto_takes_folds_of_whatever_has_no_exact_method(model):
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(model, folds=3, max_epochs=3, random_state=0).fit(X, y)
    assert clf.method_ == "folds" and clf.predict_p(Xt).shape == (8, 3)
    assert (
        clf.guarantee_.word == "approximate"
        and "exact up to the candidate's own effect on 2 of 3" in clf.guarantee_.reason
    )
    assert clf.guarantee_.coverage(0.9) == 0
    assert "approximate" in clf.notes()[-1]
    assert "folds" in str(clf.diagnose()) and clf.guarantee_.reason in str(clf.diagnose())


def test_transformers_are_fitted_without_the_fold():
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(
        make_pipeline(StandardScaler(), GaussianNB()), method="folds", folds=4, random_state=0
    ).fit(X, y)
    fold = clf._fitted.fold[0]
    assert clf.transformer_ is None
    for k, model in enumerate(clf._fitted.models):
        assert np.allclose(model.model[0].mean_, X[fold != k].mean(0))
    network = FullConformalClassifier(
        make_pipeline(StandardScaler(), mlp(4, (3,), 3)), folds=4, max_epochs=2, random_state=0
    ).fit(X, y)
    for k, model in enumerate(network._fitted.models):
        assert np.allclose(model.transformers[0].mean_, X[fold != k].mean(0))
    honest = network.audit(Xt, n_pairs=1)
    assert honest.n_refits == 3


def test_tables_texts_and_sparse_objects():
    X, y, Xt, _ = points(40)
    frame = pd.DataFrame(X, columns=list("abcd")).assign(kind=np.array(["u", "v"])[y % 2])
    from sklearn.compose import make_column_transformer
    from sklearn.feature_extraction.text import CountVectorizer

    encode = make_column_transformer((OneHotEncoder(), ["kind"]), remainder="passthrough")
    clf = FullConformalClassifier(make_pipeline(encode, DecisionTreeClassifier(max_depth=2)), folds=3, random_state=0)
    p = clf.fit(frame, y).predict_p(frame[:5])
    assert p.shape == (5, 3) and clf.audit(frame[:5], n_pairs=1).n_refits == 2
    scaled = make_pipeline(StandardScaler(with_mean=False), DecisionTreeClassifier(max_depth=2, random_state=0))
    sparse = FullConformalClassifier(scaled, folds=3, random_state=0).fit(csr_matrix(X), y)
    assert sparse.predict_p(csr_matrix(Xt)).shape == (8, 3) and sparse.audit(csr_matrix(Xt), n_pairs=1).n_refits == 2
    texts = ["a b", "b c", "c a", "a a b", "c c"] * 8
    words = FullConformalClassifier(
        make_pipeline(CountVectorizer(token_pattern=r"\w"), DecisionTreeClassifier()), folds=3
    )
    words.fit(texts, np.arange(40) % 5)
    assert words.predict_p(["a b", "c"]).shape == (2, 5) and words.audit(["a b", "c"], n_pairs=1).n_refits == 2


def test_transformers_whose_width_depends_on_the_fold_are_named():
    X, y, *_ = points(40)
    X = np.zeros((40, 1))
    X[0] = 1
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\).*OneHotEncoder its categories"):
        encode = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
        FullConformalClassifier(make_pipeline(encode, mlp(2, (), 3)), max_epochs=1, folds=3).fit(X, y)


def test_groups_share_a_fold():
    X, y, *_ = points(60)
    groups = np.repeat([f"patient {k}" for k in range(20)], 3)
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(X, y, groups=groups)
    fold = clf._fitted.fold[0].reshape(20, 3)
    assert (fold == fold[:, :1]).all() and len(np.unique(fold)) == 4
    assert "groups" in clf.guarantee_.reason
    with pytest.raises(ValueError, match="groups must hold one word or number for each of the 60 objects"):
        clf.fit(X, y, groups=[1, 2, 3])
    with pytest.raises(ValueError, match="groups go with method='folds'"):
        FullConformalClassifier(LogisticRegression()).fit(X, y, groups=groups)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"folds": 1}, ValueError, "folds=1 is not allowed"),
        ({"folds": 50}, ValueError, "folds=50 exceeds the 40 points"),
        ({"repeats": 0}, ValueError, "repeats=0 is not allowed"),
        ({"update": "newton"}, ValueError, "update='newton' is unknown"),
        ({"update": "influence"}, ValueError, "update='influence' needs a torch.nn.Module"),
        ({"scheme": "ordinary"}, ValueError, "scheme='ordinary' does not go with method='folds'"),
        ({"prefit": True}, ValueError, "leave prefit and head out"),
        ({"l2": 1.0}, ValueError, "brings its own penalty"),
        ({"estimator": mlp(4, (3,), 3), "update": "influence", "repeats": 2}, ValueError, "repeats=1"),
        ({"estimator": mlp(4, (3,), 3), "update": "influence", "memory_budget": 1e-6}, MemoryError, "update='none'"),
        ({"estimator": SVC(probability=False)}, TypeError, "has no predict_proba"),
    ],
)
def test_bad_options_are_refused_before_any_training(options, error, message):
    X, y, *_ = points(40)
    estimator = options.pop("estimator", GaussianNB())
    with pytest.raises(error, match=message):
        FullConformalClassifier(estimator, method="folds", **options).fit(X, y)


def test_a_scheme_changed_after_fit_is_refused():
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=3).fit(X, y)
    with pytest.raises(ValueError, match="scheme must be 'deleted'"):
        clf.set_params(scheme="ordinary").predict_p(Xt)


def test_an_object_that_overflows_is_named_by_its_place_among_all():
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(mlp(4, (3,), 3), folds=3, max_epochs=1, random_state=0).fit(X, y)
    Xt[5, 2] = 1e300
    with pytest.raises(ValueError, match="object 5, column 2"):
        clf.predict_p(Xt)


# Workers, checkpoints, files -----------------------------------------------------------------------------------------


def picture_network():
    torch.manual_seed(0)
    return cnn((1, 8, 8), 3, channels=(2,), kernel=3, pool=2, stride=2)


def pictures(n=30):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
    return X, np.arange(n) % 3


def test_workers_give_the_same_p_values():
    X, y = pictures()
    p = []
    for jobs in (None, 2):
        clf = FullConformalClassifier(picture_network(), folds=3, max_epochs=2, n_jobs=jobs, random_state=0)
        p.append(clf.fit(X, y).predict_p(X[:5]))
    assert np.array_equal(*p)
    X, y, Xt, _ = points(40)
    with joblib.parallel_config(backend="threading", n_jobs=2):
        one = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(X, y).predict_p(Xt)
    assert np.array_equal(
        one, FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(X, y).predict_p(Xt)
    )


def test_a_killed_fit_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    X, y = pictures()
    options = {"folds": 4, "max_epochs": 2, "random_state": 0}
    expected = FullConformalClassifier(picture_network(), **options).fit(X, y).predict_p(X[:5])
    trained, whole = [], parts._parameters

    def dies(*args):
        trained.append(args)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(parts, "_parameters", dies)
    clf = FullConformalClassifier(picture_network(), checkpoint=tmp_path, **options)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert np.array_equal(clf.fit(X, y).predict_p(X[:5]), expected)
    # Two were kept, one was begun again with the last.
    assert len(trained) == 5
    # An audit trains other models, which the folder is not asked for.
    assert clf.audit(X[:2], n_pairs=1).n_refits == 3
    with pytest.raises(ValueError, match="another model"):
        FullConformalClassifier(picture_network(), checkpoint=tmp_path, folds=4, max_epochs=3, random_state=0).fit(X, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FullConformalClassifier(mlp(4, (3,), 3), folds=3, max_epochs=3, random_state=0),
        lambda: FullConformalClassifier(
            mlp(4, (3,), 3), method="folds", folds=3, update="influence", max_epochs=3, random_state=0
        ),
        lambda: FullConformalClassifier(
            make_pipeline(StandardScaler(), mlp(4, (3,), 3)), folds=3, repeats=2, max_epochs=3, random_state=0
        ),
        lambda: FullConformalClassifier(MLPClassifier((3,), max_iter=30, random_state=0), folds=3, random_state=0),
        lambda: FullConformalClassifier(
            make_pipeline(StandardScaler(), HistGradientBoostingClassifier(max_iter=5)), folds=3, random_state=0
        ),
    ],
    ids=["network", "influence", "pipeline", "perceptron", "boosting"],
)
@pytest.mark.filterwarnings("ignore")
def test_saved_and_loaded(make, tmp_path):
    X, y, Xt, _ = points(40)
    clf = make().fit(X, y)
    clf.save(tmp_path / "one.safetensors")
    again = fullconformal.load(tmp_path / "one.safetensors")
    assert np.array_equal(again.predict_p(Xt), clf.predict_p(Xt))
    assert again.guarantee_ == clf.guarantee_
    with pytest.raises(ValueError, match="fit again"):
        again.audit(Xt)
    assert np.array_equal(pickle.loads(pickle.dumps(clf)).predict_p(Xt), clf.predict_p(Xt))


def test_what_cannot_be_saved_says_so(tmp_path):
    X, y, *_ = points(40)

    class Mine(GaussianNB):
        """A classifier that no list knows."""

    clf = FullConformalClassifier(Mine(), folds=3, random_state=0).fit(X, y)
    with pytest.raises(StorageError, match="Mine cannot be saved"):
        clf.save(tmp_path / "bayes.safetensors")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": Folds(), "folds": 5}, "You passed an object, Folds"),
        ({"method": Folds(score=RAPS(), folds=3)}, "leaves parameters open"),
    ],
)
def test_options_that_folds_given_as_an_object_would_not_heed_are_refused(options, words):
    X, y, *_ = points(40)
    with pytest.raises(ValueError, match=words):
        FullConformalClassifier(GaussianNB(), random_state=0, **options).fit(X, y)


def test_a_method_given_as_an_object_is_saved_with_its_score(tmp_path):
    X, y, Xt, _ = points(40)
    clf = FullConformalClassifier(method=Folds(score=LAC(), folds=3), random_state=0).fit(X, y)
    clf.save(tmp_path / "lac.safetensors")
    assert np.array_equal(fullconformal.load(tmp_path / "lac.safetensors").predict_p(Xt), clf.predict_p(Xt))


def test_recalibration_and_report(tmp_path):
    X, y, Xt, yt = points(60, m=60)
    clf = FullConformalClassifier(GaussianNB(), method="folds", folds=4, random_state=0).fit(X, y)
    assert "exact up to" in clf.report(Xt, yt, tmp_path / "folds.html").read_text(encoding="utf-8")
    assert clf.recalibrate(Xt, yt).guarantee_.is_exact and clf.predict_p(Xt).shape == (60, 3)


# Many networks at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", [1, 4])
@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: mlp(5, (6, 4), 3, "tanh"), 25),
        (lambda: mlp(5, (4,), 2, "tanh", binary_as_one=True), 25),
        # Near a kink rounding decides on which side a step ends, and steps that follow differ.
        (lambda: mlp(5, (6,), 3, "relu", bias=False), 2),
    ],
)
def test_networks_trained_together_end_where_they_would_alone(make, steps, sources):
    torch.manual_seed(0)
    net, generator = make(), torch.Generator().manual_seed(0)
    X = torch.randn(sources, 130, 5, generator=generator).double()
    y = (X[0, :, 0] > 0).long() + (2 if net[-1].out_features > 2 else 1) * (torch.rand(130, generator=generator) > 2)
    # One batch or two in an epoch, one point in the last.
    own = [torch.arange(130), torch.arange(99), torch.arange(29, 130), torch.randperm(130, generator=generator)[:60]]
    nets = [copy.deepcopy(net).double() for _ in own]
    ridge = {name: 0.05 for name, q in nets[0].named_parameters() if q.requires_grad and "weight" in name}
    training.train_together(nets, X, y[None], own, ridge, max_epochs=7, max_iter=steps, seed=5)
    for k, (found, at) in enumerate(zip(nets, own, strict=True)):
        alone = copy.deepcopy(net).double()
        penalty = {name: len(at) * value for name, value in ridge.items()}
        train(alone, X[k % sources][at], y[at], penalty, max_epochs=7, max_iter=steps, seed=5)
        for a, b in zip(found.parameters(), alone.parameters(), strict=True):
            # Rounding of 1e-16 in some ten steps of Adam, which divide it by gradients of 1e-3, then grows tenfold in five steps of L-BFGS.
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_networks_that_cannot_be_stacked_are_known():
    cpu = torch.device("cpu")
    assert training.is_stackable(mlp(5, (6,), 3), 10, 100, cpu)
    hooked = mlp(5, (6,), 3)
    hooked[0].register_forward_hook(lambda *_: None)
    layer = nn.Linear(4, 4)
    for odd in (
        hooked,
        picture_network(),
        nn.Sequential(layer, layer),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        mlp(900, (900,), 3),
    ):
        assert not training.is_stackable(odd, 10, 100, cpu)
    assert not training.is_stackable(mlp(5, (6,), 3), 10, 2**22, cpu)


def test_networks_of_folds_are_those_trained_one_by_one(monkeypatch):
    X, y, Xt, _ = points(40)
    torch.manual_seed(0)
    net = make_pipeline(StandardScaler(), mlp(4, (3,), 3, "tanh").double())
    together = FullConformalClassifier(net, folds=3, max_epochs=5, random_state=0).fit(X, y)
    monkeypatch.setattr(parts, "is_stackable", lambda *_: False)
    alone = FullConformalClassifier(net, folds=3, max_epochs=5, random_state=0).fit(X, y)
    # Both end where the mean gradient is below 1e-5, of a penalty of 1e-2.
    assert np.abs(together._fitted.alpha - alone._fitted.alpha).max() < 1e-2
    assert np.abs(together.predict_proba(Xt) - alone.predict_proba(Xt)).max() < 1e-2


def test_hashes_are_of_the_object_alone():
    X = np.arange(12.0).reshape(4, 3)
    assert np.array_equal(hashes(X)[2:], hashes(X[2:])) and len(set(hashes(X).tolist())) == 4
    assert not np.array_equal(hashes(X, 1), hashes(X, 2))
    assert list(contents(csr_matrix(X)))[2] == next(contents(csr_matrix(X[2:])))


def test_a_score_given_the_wrong_way_is_refused_in_words():
    X, y = load_iris(return_X_y=True)
    for method, said in ((Folds("lac"), "names a model"), (Folds(score="lac"), "is not a ConformityScore")):
        with pytest.raises(ValueError, match=said):
            FullConformalClassifier(method=method).fit(X, y)
    with pytest.raises(ValueError, match="or a ConformityScore object"):
        SplitConformalClassifier(conformity_score=LogLoss).fit(X, y)
