"""Transformers in the bag: the oracle fits the whole Pipeline to n + 1 points for every candidate, as anyone would write it."""

import os
import threading
import time
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import make_column_transformer
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.feature_selection import SelectKBest, VarianceThreshold
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)

from fullconformal import ConformalWarning, FullConformalClassifier, compare, load
from fullconformal.models import KernelDensityClassifier, RoundedImputer
from fullconformal.models.objects import dense, joined, take
from fullconformal.models.transformers import Transformers, is_fixed, needs_labels
from fullconformal.models.updates import keys, quantile
from fullconformal.runtime.tasks import nobody, progress_bar

N, M = 40, 6
LR, KNN, KDE = LogisticRegression(), KNeighborsClassifier(3), KernelDensityClassifier(1.0)


def numbers(seed=0):
    """Objects far apart, some of those to predict outside the training objects."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, 4)) * [1, 2, 3, 10] + 5
    y = (X[:, 0] + rng.normal(size=N) > 5).astype(int) + (X[:, 1] > 7)
    return X, y, rng.normal(size=(M, 4)) * [1, 2, 3, 20] + 5


def tables(seed=0):
    """Numbers with gaps and words with rare levels; objects with new gaps and new words."""
    rng = np.random.default_rng(seed)
    X, y, new = numbers(seed)
    table, more = (pd.DataFrame(part, columns=list("abcd")) for part in (X, new))
    table.loc[::5, "a"], table.loc[1::9, "b"] = np.nan, np.nan
    more.loc[1, "a"], more.loc[2, "c"] = np.nan, np.nan
    table["word"], table["kind"] = (
        rng.choice(list("uvwxyz"), N, p=[0.5, 0.3, 0.1, 0.05, 0.03, 0.02]),
        rng.choice(["k", "l"], N),
    )
    more["word"], more["kind"] = list("uvqxyq"), list("kkkklm")
    return table, y, more


def encoder(strategy="median", imputer=RoundedImputer, **options):
    """What the command line makes of a table."""
    gaps = make_pipeline(imputer(strategy=strategy, add_indicator=True), StandardScaler())
    words = OneHotEncoder(handle_unknown="infrequent_if_exist", sparse_output=False, **options)
    return make_column_transformer((gaps, list("abcd")), (words, ["word", "kind"]))


def oracle(pipe, X, y, new, **options):
    """p-values (m, C): for every candidate the transformers fitted to the n + 1 points, then the method without a Pipeline."""
    classes = np.unique(y)
    p = np.empty((M, len(classes)))
    for r in range(M):
        x, before = take(new, [r]), np.empty(0)
        for c, label in enumerate(classes):
            fitted = clone(pipe[:-1]).fit(joined(X, x), np.append(y, label))
            inputs, own = (dense(fitted.transform(part)).astype(float) for part in (X, x))
            # Half the time of these tests: transformers that gave the same give the same p-values.
            if not np.array_equal(inputs, before):
                row, before = FullConformalClassifier(pipe[-1], **options).fit(inputs, y).predict_p(own)[0], inputs
            p[r, c] = row[c]
    return p


SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    MinMaxScaler((-1, 3)),
    MaxAbsScaler(),
    RobustScaler(),
    RobustScaler(unit_variance=True, quantile_range=(10, 80)),
]
OTHERS = [
    PCA(2, whiten=True),
    PCA(0.95),
    PowerTransformer(),
    make_pipeline(StandardScaler(), PCA(3)),
    make_pipeline(PolynomialFeatures(2), StandardScaler(), VarianceThreshold(1e-3)),
    make_union(StandardScaler(), KBinsDiscretizer(3, quantile_method="averaged_inverted_cdf")),
    SelectKBest(k=2),
    make_union(SelectKBest(k=1), MinMaxScaler()),
]


@pytest.mark.parametrize("step", SCALERS + OTHERS, ids=lambda step: type(step).__name__)
@pytest.mark.parametrize("model", [LR, KNN, KDE], ids=lambda model: type(model).__name__)
def test_p_values_are_those_of_a_pipeline_fitted_to_all_points(step, model):
    X, y, new = numbers()
    pipe = make_pipeline(step, model)
    clf = FullConformalClassifier(pipe).fit(X, y)
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new)).max() < 1e-12
    assert clf.guarantee_.is_exact


@pytest.mark.parametrize(
    "strategy, imputer, options",
    [
        *(
            ("median", RoundedImputer, o)
            for o in ({}, {"min_frequency": 4}, {"max_categories": 3}, {"min_frequency": 0.1})
        ),
        ("median", SimpleImputer, {"max_categories": 3}),
        ("mean", SimpleImputer, {}),
        ("mean", RoundedImputer, {"min_frequency": 0.1}),
    ],
)
def test_tables_with_gaps_and_words(strategy, imputer, options):
    X, y, new = tables()
    pipe = make_pipeline(encoder(strategy, imputer, **options), LR)
    clf = FullConformalClassifier(pipe).fit(X, y)
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new)).max() < 1e-12
    assert clf._fitted.transformers.known and not clf._fitted.transformers.slow


@pytest.mark.parametrize(
    "model, options",
    [
        (LR, {"scheme": "ordinary"}),
        (LR, {"scheme": "studentized"}),
        (LR, {"method": "exact"}),
        (LR, {"class_conditional": True}),
        (LogisticRegression(fit_intercept=False), {}),
        (GaussianNB(), {"method": "exact", "scheme": "ordinary"}),
        (KNeighborsClassifier(3, p=1), {}),
    ],
    ids=str,
)
def test_other_options_in_the_bag(model, options):
    X, y, new = numbers(1)
    pipe = make_pipeline(StandardScaler(), model)
    clf = FullConformalClassifier(pipe, **options).fit(X, y)
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new, **options)).max() < 1e-12


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_columns_that_training_objects_do_not_use(method):
    """They are left out of the regression until an object uses them, with a scale of its own."""
    X, y, new = numbers(2)
    X[:, 2:], new[1, 2], new[2, 3], new[3:, 2:] = 0.0, 0.0, 0.0, 0.0
    pipe = make_pipeline(StandardScaler(), LR)
    clf = FullConformalClassifier(pipe, method=method).fit(X, y)
    assert clf._fitted.base.takes_scales and clf._fitted.base.regression.span is not None
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new, method=method)).max() < 1e-12
    np.testing.assert_array_equal(clf.predict_set(new), clf.predict_p(new) > 0.1)


@pytest.mark.parametrize("model", [KNeighborsClassifier(2), KNeighborsClassifier(1, p=1), KDE], ids=str)
def test_neighbours_behind_scales_that_change_who_is_near(model):
    """Objects so far away that columns all but vanish: points come near that were not among those kept."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3))
    y, new = (X[:, 0] > 0) + (X[:, 1] > 1), np.vstack([np.eye(3) * [30, 300, 3000], rng.normal(size=(3, 3))])
    pipe = make_pipeline(StandardScaler(), model)
    clf = FullConformalClassifier(pipe).fit(X, y)
    assert clf._fitted.base.takes_scales
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new)).max() < 1e-12


def test_text_and_sparse_objects():
    rng = np.random.default_rng(2)
    words = np.array(["sun", "rain", "snow", "wind", "fog", "hail", "sleet", "storm"])
    text = [" ".join(rng.choice(words, 4)) for _ in range(N)]
    more = [" ".join(rng.choice(np.append(words, "new"), 4)) for _ in range(M)]
    y = np.array(["sun" in line for line in text]).astype(int)
    pipe = make_pipeline(TfidfVectorizer(), LR)
    clf = FullConformalClassifier(pipe).fit(text, y)
    assert np.abs(clf.predict_p(more) - oracle(pipe, text, y, more)).max() < 1e-12
    X, y, new = numbers()
    X, new = (np.where(part > 5, part, 0) for part in (X, new))
    pipe = make_pipeline(MaxAbsScaler(), LR)
    sparse = FullConformalClassifier(pipe).fit(csr_array(X), y).predict_p(csr_array(new))
    assert np.abs(sparse - oracle(pipe, X, y, new)).max() < 1e-12


def test_an_object_has_the_same_p_values_in_every_batch_and_order():
    """Training points in another order are the same bag, for a transformer that draws some of them too."""
    X, y, new = tables()
    for step in (encoder(), make_pipeline(encoder(), QuantileTransformer(n_quantiles=8, subsample=20))):
        clf = FullConformalClassifier(make_pipeline(step, LR), random_state=3).fit(X, y)
        p = clf.predict_p(new)
        assert all(np.array_equal(clf.predict_p(new.iloc[[r]])[0], p[r]) for r in range(M))
        order = np.random.default_rng(0).permutation(N)
        again = clone(clf).fit(X.iloc[order], y[order])
        assert np.abs(again.predict_p(new) - p).max() < 1e-12


def test_quantiles_with_one_more_value():
    rng = np.random.default_rng(0)
    X, new = rng.integers(0, 6, (9, 5)).astype(float), rng.normal(3, 4, (20, 5))
    X[rng.random(X.shape) < 0.2], new[rng.random(new.shape) < 0.2] = np.nan, np.nan
    for q in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        expected = [np.nanquantile(np.vstack([X, x]), q, axis=0) for x in new]
        # Two roundings of an interpolation between numbers below 16.
        assert np.abs(quantile(X, new, q) - expected).max() < 16 * 4 * np.finfo(float).eps


@pytest.mark.parametrize("strategy", ["median", "mean"])
def test_rounded_imputers_seldom_change(strategy):
    """What is filled in lies within a sixteenth of the quartiles' distance, and no object changes it; without rounding each does."""
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(2000, 4)) * [1, 2, 3, 0] + [0, 50, -3, 7], rng.normal(size=(100, 4))
    X[rng.random(X.shape) < 0.1] = np.nan
    X[:1900, 2] = -3.0
    plain, rounded = (kind(strategy=strategy).fit(X) for kind in (SimpleImputer, RoundedImputer))
    apart = np.diff(np.nanquantile(X, [0.25, 0.75], axis=0), axis=0)[0]
    assert (np.abs(rounded.statistics_ - plain.statistics_) <= apart / 16).all()
    assert set(keys(rounded, X[:, :2], new[:, :2])) == {()} and () not in keys(plain, X[:, :2], new[:, :2])
    for x, key in zip(new[:10], keys(rounded, X, new[:10]), strict=True):
        with_it = clone(rounded).fit(np.vstack([X, x])).statistics_
        # Where half the values are one nothing is rounded but sums.
        same = np.abs(with_it - rounded.statistics_) < 1e-12
        assert same.all() == (key == ())


@pytest.mark.parametrize(
    "options", [{"max_categories": 4}, {"max_categories": 4, "min_frequency": 3}, {"max_categories": 1}]
)
def test_an_encoder_changes_with_an_object_where_its_rare_levels_do(options):
    """Levels as frequent as each other, missing ones among them: scikit-learn's own list decides."""
    rng = np.random.default_rng(0)
    levels = np.array([None, np.nan, *"abcdef"], dtype=object)
    X, new = levels[rng.integers(0, 8, (30, 1))], levels[:, None]
    encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", **options)
    before, found = encoder.fit(X).infrequent_categories_[0], []
    for x in new:
        after = clone(encoder).fit(np.vstack([X, x])).infrequent_categories_[0]
        found.append(repr(list(after)) == repr(list(before)))
    assert [key == () for key in keys(encoder, X, new)] == found
    assert len(set(found)) == 2 or options["max_categories"] == 1


@pytest.mark.parametrize("step", SCALERS, ids=lambda step: type(step).__name__)
def test_scalers_know_constant_and_missing_columns(step):
    X, _, new = numbers()
    X[:, 1], X[:, 2], new[:2, 1] = 0.1, 0.0, 0.1
    new[:3, 2] = 0.0
    if not isinstance(step, MaxAbsScaler):
        X[3, 0] = new[4, 0] = np.nan
    (group,) = Transformers(clone(step).fit(X)).groups(X, new, np.zeros(N + M, np.uint64))
    found = {row: each for each in group.apart() for row in each.rows}
    for r in range(M):
        fitted = clone(step).fit(np.vstack([X, new[r]]))
        own = found[r].objects[found[r].rows == r]
        for got, expected in ((found[r].points, fitted.transform(X)), (own, fitted.transform(new[r : r + 1]))):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


class Labelled(TransformerMixin, BaseEstimator):
    """A transformer of another library, whose fit asks for labels and has no tags that say so."""

    def fit(self, X, y):
        self.mean_ = X[y == y[0]].mean(0)
        return self

    def transform(self, X):
        return X - self.mean_


def test_who_looks_at_labels_and_who_learns_nothing():
    target = make_column_transformer((TargetEncoder(), [0]), remainder="passthrough")
    for step in (
        target,
        make_union(StandardScaler(), SelectKBest(k=1)),
        make_pipeline(make_pipeline(target)),
        Labelled(),
    ):
        assert needs_labels(step) and not is_fixed(step)
    for step in (StandardScaler(), VarianceThreshold(), encoder(), make_union(PCA(2), StandardScaler())):
        assert not needs_labels(step) and not is_fixed(step)
    frozen = FrozenEstimator(make_pipeline(target))
    for step in (
        Normalizer(),
        FunctionTransformer(np.log1p),
        PolynomialFeatures(),
        frozen,
        make_union("passthrough", Normalizer()),
    ):
        assert is_fixed(step) and not needs_labels(step)


@pytest.mark.filterwarnings("ignore:`TargetEncoder", "ignore:The least populated")
def test_transformers_that_look_at_labels_inside_others():
    """`TargetEncoder` inside a ColumnTransformer; fixed, the guarantee is not claimed anywhere."""
    X, y, new = tables()
    target = make_column_transformer((TargetEncoder(), ["word"]), (StandardScaler(), ["c", "d"]))
    X, new = (part.fillna(5.0) for part in (X, new))
    pipe = make_pipeline(target, LR)
    clf = FullConformalClassifier(pipe).fit(X, y)
    assert np.abs(clf.predict_p(new) - oracle(pipe, X, y, new)).max() < 1e-12
    with pytest.warns(ConformalWarning, match="TargetEncoder learned from the labels"):
        fixed = FullConformalClassifier(pipe, transformers="fixed").fit(X, y)
    assert fixed.guarantee_.word == "approximate" and "exactly valid, whatever" not in str(fixed.diagnose())
    assert any("TargetEncoder" in note for note in fixed.notes())


def test_what_learns_nothing_stays_as_it_is():
    X, y, new = numbers()
    frozen = FrozenEstimator(StandardScaler().fit(X))
    for step in (Normalizer(), frozen):
        clf = FullConformalClassifier(make_pipeline(step, LR)).fit(X, y)
        plain = FullConformalClassifier(LR).fit(step.fit(X, y).transform(X), y)
        assert np.array_equal(clf.predict_p(new), plain.predict_p(step.transform(new)))
        assert clf.guarantee_.is_exact
    with pytest.warns(ConformalWarning, match="leave prefit out"):
        prefit = FullConformalClassifier(make_pipeline(StandardScaler(), LR).fit(X, y), prefit=True).fit(X, y)
    assert np.array_equal(
        prefit.predict_p(new), FullConformalClassifier(make_pipeline(frozen, LR)).fit(X, y).predict_p(new)
    )


def test_influence_keeps_its_transformers():
    X, y, new = numbers()
    pipe = make_pipeline(StandardScaler(), LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        bag, fixed = (
            FullConformalClassifier(pipe, method="influence", transformers=kind).fit(X, y) for kind in ("bag", "fixed")
        )
    assert np.array_equal(bag.predict_p(new), fixed.predict_p(new)) and bag.guarantee_.word == "approximate"


@pytest.mark.parametrize("model", [LR, KNN, KDE], ids=lambda model: type(model).__name__)
def test_saved_and_loaded(model, tmp_path):
    X, y, new = tables()
    for step in (encoder(), make_pipeline(encoder(), PCA(3))):
        clf = FullConformalClassifier(make_pipeline(step, model)).fit(X, y)
        clf.save(tmp_path / "bag.safetensors")
        again = load(tmp_path / "bag.safetensors")
        assert np.array_equal(again.predict_p(new), clf.predict_p(new))
        assert np.array_equal(again.predict_proba(new), clf.predict_proba(new))
        assert again.guarantee_ == clf.guarantee_


def test_frozen_transformers_are_saved(tmp_path):
    X, y, new = numbers()
    frozen = FrozenEstimator(StandardScaler().fit(X))
    clf = FullConformalClassifier(make_pipeline(frozen, PCA(2), LR)).fit(X, y)
    clf.save(tmp_path / "frozen.safetensors")
    assert np.array_equal(load(tmp_path / "frozen.safetensors").predict_p(new), clf.predict_p(new))


def test_refits_behind_a_transformer_go_on_where_they_were(tmp_path):
    X, y, new = numbers()
    pipe = make_pipeline(StandardScaler(), BernoulliNB())
    options = {"method": "exact", "scheme": "ordinary", "checkpoint": tmp_path}
    p = FullConformalClassifier(pipe, **options).fit(X, y).predict_p(new)
    kept = sorted(tmp_path.rglob("*.npy"))
    assert kept and np.array_equal(FullConformalClassifier(pipe, **options).fit(X, y).predict_p(new), p)
    assert sorted(tmp_path.rglob("*.npy")) == kept


def test_transformers_that_compute_with_the_batch_are_refused():
    X, y, _ = numbers()
    with pytest.raises(ValueError, match="by itself than beside others"):
        FullConformalClassifier(make_pipeline(FunctionTransformer(lambda X: X - X.mean(0)), LR)).fit(X, y)


def test_the_rest_of_the_interface_behind_transformers():
    X, y, new = tables()
    clf = FullConformalClassifier(make_pipeline(encoder(), LR), random_state=0).fit(X, y)
    assert clf.predict(new).shape == (M,) and clf.predict_set(new).shape == (M, 3)
    assert clf.predict_p(new, smoothing=True).shape == (M, 3)
    assert clf.audit(new, n_pairs=2, max_refits=80).n_refits == 80
    told = []
    clf._fitted.counts(new, clf._query(progress=lambda done, total: told.append(done / total)))
    assert told[-1] == 1 and told == sorted(told)
    clf.set_params(scheme="ordinary")
    least, most = clf.predict_p(new, bounds=True)
    p = clf.predict_p(new)
    assert (least <= p + 1e-12).all() and (p <= most + 1e-12).all()
    assert clf.recalibrate(X, y).guarantee_.is_exact
    with pytest.raises(ValueError, match="transformers='no' is unknown"):
        FullConformalClassifier(transformers="no").fit(*numbers()[:2])


def test_nobody_waits_in_silence(capsys):
    """Without a terminal one line, once, with the time that all will take; of short work nothing, unless more is seen to be left."""
    with progress_bar("p-values", None) as progress:
        progress.began -= 2
        progress(1, 4)
        assert capsys.readouterr().err == ""
        progress.began -= 60
        progress(2, 4)
        progress(3, 4)
    # Sixty seconds a step after the first, of which two are left after 62 seconds: 182.
    assert capsys.readouterr().err == "p-values: about 3 minutes\n"
    with progress_bar("p-values", None) as progress:
        # Made ready in a second, and then done in no time.
        progress.began -= 1
        for done in range(1, 1001):
            progress(done, 1000)
    assert capsys.readouterr().err == ""
    with progress_bar("p-values", None) as progress:
        # Made ready in six seconds, and then a second each: not six.
        progress.began -= 6
        progress(1, 175)
        assert capsys.readouterr().err == ""
        progress.began -= 1
        progress(2, 175)
    assert capsys.readouterr().err == "p-values: about 3 minutes\n"
    with progress_bar("p-values", None) as progress:
        progress.began -= 90
        progress(1, 4)
    assert capsys.readouterr().err == "p-values: about 6 minutes\n"
    with progress_bar("p-values", None) as progress:
        # Half of it in the first word: between 12 seconds and 24.
        progress.began -= 12
        progress(1, 2)
    assert capsys.readouterr().err == "p-values: about 24 seconds\n"
    with progress_bar("p-values", 0) as progress:
        assert progress is nobody


def clocks():
    """Threads that wait for work to take long."""
    return sum(thread.name.startswith("fullconformal: ") for thread in threading.enumerate())


def test_a_first_part_that_takes_long_is_told_of(capsys, monkeypatch):
    """No part is done, so no pace is known: after ten seconds that is said, and the time once it can be told."""
    monkeypatch.setattr("fullconformal.runtime.tasks.LONG", 0.05)
    with progress_bar("p-values", None):
        assert capsys.readouterr().err == ""
    time.sleep(0.3)
    assert capsys.readouterr().err == ""
    with progress_bar("p-values", None) as progress:
        time.sleep(0.3)
        assert capsys.readouterr().err == "p-values: more than 50 ms\n"
        progress.began -= 100
        progress(1, 4)
        assert capsys.readouterr().err == "p-values: about 6.7 minutes\n"


def test_no_thread_outlives_the_work_it_waits_for(capsys, monkeypatch):
    """However it ends; and each is told of once."""
    with pytest.raises(ZeroDivisionError), progress_bar("a", None), progress_bar("b", None):
        assert clocks() == 2
        raise ZeroDivisionError
    time.sleep(0.5)
    assert clocks() == 0
    monkeypatch.setattr("fullconformal.runtime.tasks.LONG", 0.1)
    with progress_bar("a", None):
        with progress_bar("b", None):
            time.sleep(0.5)
            assert clocks() == 0  # all is said
        with progress_bar("c", None):
            assert clocks() == 1
    time.sleep(0.5)
    assert clocks() == 0
    assert sorted(capsys.readouterr().err.splitlines()) == ["a: more than 100 ms", "b: more than 100 ms"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_tells_of_its_own_work_only(capfd, monkeypatch):
    monkeypatch.setattr("fullconformal.runtime.tasks.LONG", 0.1)
    with progress_bar("its parent's", None) as progress:
        progress.told = True
        child = os.fork()
        if not child:
            progress.told = False
            with progress_bar("its own", None):
                time.sleep(0.5)
            os._exit(0)
        os.waitpid(child, 0)
    assert capfd.readouterr().err == "its own: more than 100 ms\n"


def test_objects_that_share_a_fit_come_first_and_count_for_less():
    """Two in three rows leave the imputer as it is; each of the others has a fit of its own, which counts as ten objects."""
    X, y, new = tables()
    new = pd.concat([new.iloc[[0]]] * 6 + [new.iloc[[1, 2, 5]]], ignore_index=True)
    clf = FullConformalClassifier(make_pipeline(encoder(), LR)).fit(X, y)
    asked = list(clf._fitted._asked(new, scaled=True))
    sizes, shares = [len(one.rows) for one in asked], np.array([one.share for one in asked])
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 6 and sum(sizes) == 9
    np.testing.assert_allclose(shares, (np.array(sizes) + 10) / (9 + 10 * len(sizes)))


def test_the_guarantee_is_shown():
    X, y, _ = numbers()
    pipe = make_pipeline(StandardScaler(), KNN)
    bag, fixed = (FullConformalClassifier(pipe, transformers=kind) for kind in ("bag", "fixed"))
    assert "guarantee" not in repr(bag)
    found = compare({"bag": bag, "fixed": fixed}, X[:30], y[:30], X[30:], y[30:], levels=[0.8])
    assert found.guarantees == {"bag": "exact", "fixed": "approximate"} and "approximate" in str(found)
    assert repr(bag.fit(X, y)).endswith("# guarantee: exact")
    assert repr(fixed.fit(X, y)).endswith("# guarantee: approximate")
    assert fixed.notes()[0].startswith("! The transformers were fitted to the training objects only")
