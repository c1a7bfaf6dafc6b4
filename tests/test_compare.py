"""compare: the same data for every method, its numbers, its table, its figure and its tests."""

import io
import math
import warnings

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.preprocessing import scale

from fullconformal import (
    ConformalWarning,
    CVPlusClassifier,
    FullConformalClassifier,
    SplitConformalClassifier,
    compare,
    metrics,
)
from fullconformal.comparison import default_methods
from fullconformal.report.comparison import Comparison, Record
from fullconformal.sets import prediction_sets

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
LEVELS = [0.8, 0.9]


def halves(load):
    X, y = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = scale(X)[order], load().target_names[y][order]
    half = len(y) // 2
    return X[:half], y[:half], X[half:], y[half:]


def small_methods():
    return {
        "influence": FullConformalClassifier(method="influence", random_state=0),
        "Bayes, split": SplitConformalClassifier(GaussianNB(), random_state=0),
        "CV+": CVPlusClassifier(GaussianNB(), n_folds=3, random_state=0),  # has no p-values
    }


class Leaving(SplitConformalClassifier):
    """A method whose sets are not nested: at levels above 0.85 the first label is out."""

    def predict_set(self, X, confidence_level=None, **options):
        levels = np.atleast_1d(confidence_level)
        sets = np.ones((len(X), len(self.classes_), len(levels)), dtype=bool)
        sets[:, 0, levels > 0.85] = False
        return sets


class Broken(SplitConformalClassifier):
    def predict_epsilon(self, X, **options):
        raise RuntimeError("it [bold]broke[/]")


@pytest.fixture(scope="module")
def compared():
    return compare(small_methods(), *halves(load_iris), levels=LEVELS)


def test_numbers_are_those_of_each_method_fitted_alone(compared):
    X, y, objects, truth = halves(load_iris)
    assert compared.methods == list(small_methods()) and compared.errors == {}
    for name, method in small_methods().items():
        clf = method.fit(X, y)
        p = clf.predict_epsilon(objects)
        np.testing.assert_array_equal(compared.p[name], p)
        for k, level in enumerate(LEVELS):
            sets = clf.predict_set(objects, level)
            np.testing.assert_array_equal(compared.sets[name][:, :, k], sets)
            assert compared.estimate(name, "coverage", level) == metrics.coverage(sets, truth, clf.classes_)
            assert compared.estimate(name, "mean_size", level) == metrics.mean_size(sets)
            gap = metrics.class_coverage_gap(sets, truth, level, clf.classes_)
            assert compared.estimate(name, "class_coverage_gap", level) == gap.mean
            assert compared.estimate(name, "worst_class_coverage_gap", level) == gap.worst
            for label, found in metrics.class_coverage(sets, truth, clf.classes_).items():
                assert compared.estimate(name, f"class_coverage[{label}]", level) == found
        assert compared.estimate(name, "size_auc") == metrics.size_auc(p)
        assert compared.estimate(name, "fuzziness") == metrics.fuzziness(p)
        expected = metrics.observed_fuzziness(p, truth, clf.classes_)
        assert compared.estimate(name, "observed_fuzziness") == expected
        assert compared.estimate(name, "nestedness_violations").value == 0
        assert compared.estimate(name, "fit_seconds").value > 0 < compared.estimate(name, "predict_seconds").value


def test_what_is_given_is_not_changed():
    methods = small_methods()
    before = {name: repr(method.get_params()) for name, method in methods.items()}
    compare(methods, *halves(load_iris), levels=[0.9])
    for name, method in methods.items():
        assert repr(method.get_params()) == before[name] and not hasattr(method, "classes_")


def test_levels_are_sorted_and_their_order_does_not_matter():
    method = {"split": SplitConformalClassifier(GaussianNB(), random_state=0)}
    one, other = (compare(method, *halves(load_iris), levels=levels) for levels in ([0.9, 0.6, 0.9], [0.6, 0.9]))
    assert one.levels.tolist() == other.levels.tolist() == [0.6, 0.9]
    np.testing.assert_array_equal(one.sets["split"], other.sets["split"])


def test_a_classifier_fitted_before_is_taken_as_it_is():
    X, y, objects, truth = halves(load_iris)
    bayes = GaussianNB().fit(X[:40], y[:40])
    method = {"prefit": SplitConformalClassifier(bayes, prefit=True)}
    compared = compare(method, X[40:], y[40:], objects, truth, levels=[0.9])
    expected = SplitConformalClassifier(bayes, prefit=True).fit(X[40:], y[40:]).predict_p(objects)
    np.testing.assert_array_equal(compared.p["prefit"], expected)


def test_a_classifier_that_knows_other_classes_is_an_error_of_its_own():
    X, y, objects, truth = halves(load_iris)
    bayes = GaussianNB().fit(X, y)
    two = y != "virginica"
    methods = {"three": SplitConformalClassifier(bayes, prefit=True), "two": SplitConformalClassifier(random_state=0)}
    compared = compare(methods, X[two], y[two], objects[truth != "virginica"], truth[truth != "virginica"])
    assert "knows the classes ['setosa', 'versicolor', 'virginica'], but y holds" in str(compared.errors["three"])


def test_frames_and_tensors_give_the_numbers_of_arrays():
    X, y, objects, truth = halves(load_iris)
    y, truth = (np.unique(labels, return_inverse=True)[1] for labels in (y, truth))
    frames = pandas.DataFrame(X), pandas.Series(y), pandas.DataFrame(objects), pandas.Series(truth)
    tensors = tuple(torch.as_tensor(part) for part in (X, y, objects, truth))
    plain, *others = (compare(None, *data, levels=[0.8]) for data in ((X, y, objects, truth), frames, tensors))
    for other in others:
        assert other.errors == {}
        for name in plain.methods:
            np.testing.assert_array_equal(other.p[name], plain.p[name])


def test_labels_that_leave_are_counted_by_the_methods_own_sets():
    data = halves(load_iris)
    methods = {"leaving": Leaving(GaussianNB(), random_state=0), "split": SplitConformalClassifier(random_state=0)}
    compared = compare(methods, *data, levels=LEVELS)
    assert compared.estimate("leaving", "nestedness_violations") == (1.0, 0.0)  # one label an object, always
    assert compared.estimate("leaving", "mean_size", 0.8).value == 3
    assert compared.estimate("leaving", "mean_size", 0.9).value == 2
    assert compared.estimate("split", "nestedness_violations").value == 0
    shown = str(compared)
    assert "1.000" in next(line for line in shown.split("nested")[1].splitlines() if "leaving" in line)
    # Sets of all labels hold the true one; how sure that is depends on the number of objects, by Wilson's interval.
    m, z = len(data[3]), 1.959963984540054**2
    assert f"1.000 (≥ {m / (m + z):.3f})" in shown and "± 0.000" not in shown


# Failing methods --------------------------------------------------------------------------------------------------------


def test_a_method_that_fails_does_not_stop_the_others():
    methods = {
        "broken [x]": Broken(GaussianNB()),
        "forest": FullConformalClassifier(HistGradientBoostingClassifier(), method="influence"),
    }
    methods |= {"split": SplitConformalClassifier(GaussianNB(), random_state=0)}
    compared = compare(methods, *halves(load_iris), levels=[0.9])
    assert {name: type(error) for name, error in compared.errors.items()} == {
        "broken [x]": RuntimeError,
        "forest": TypeError,
    }
    assert {record.method for record in compared.records} == set(compared.p) == set(compared.sets) == {"split"}
    text = str(compared)
    assert "broken [x] failed: RuntimeError: it [bold]broke[/]" in text and "forest failed: TypeError" in text
    rows = [line.split()[-1] for line in text.splitlines() if line.startswith("forest ") and "Type" not in line]
    assert set(rows) == {"failed"}  # one a group of columns; how many there are depends on how wide the times are
    with pytest.raises(
        ValueError, match=r"method='forest' failed: estimator=HistGradientBoostingClassifier.* results for: 'split'"
    ):
        compared.estimate("forest", "coverage", 0.9)
    with pytest.raises(ValueError, match=r"method='forest' failed"):
        compared.welch("split", "forest")


def test_where_every_method_fails_it_is_an_error():
    with pytest.raises(ValueError, match=r"every method failed. a: RuntimeError: it .*; b: RuntimeError") as caught:
        compare({"a": Broken(GaussianNB()), "b": Broken(GaussianNB())}, *halves(load_iris))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_warnings_say_which_method_they_are_about():
    X, y, objects, truth = halves(load_iris)
    method = {"few": SplitConformalClassifier(GaussianNB(), calibration_size=0.2, random_state=0)}
    with pytest.warns(ConformalWarning, match=r"^few: confidence_level=0.95 needs more than the 15 calibration points"):
        compare(method, X, y, objects, truth, levels=[0.9, 0.95])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformalWarning)
        compare(method, X, y, objects, truth, levels=[0.5, 0.9])


# Tests of significance ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Precision loss")  # one method's sets are all of one size
def test_welch_is_scipys_on_the_objects(compared):
    a, b = compared.p["influence"], compared.p["CV+"]
    by_hand = {
        "size_auc": [np.minimum(p, 0.2).sum(1) for p in (a, b)],
        "fuzziness": [np.sort(p, axis=1)[:, :-1].sum(1) for p in (a, b)],
        "observed_fuzziness": [(p * (compared.classes != compared.y[:, None])).sum(1) for p in (a, b)],
    }
    for metric, samples in by_hand.items():
        expected = stats.ttest_ind(*samples, equal_var=False, alternative="less")
        found = compared.welch("influence", "CV+", metric)
        assert found == pytest.approx((expected.statistic, expected.pvalue, expected.df), rel=1e-9)
    sizes = [compared.sets[name][:, :, 1].sum(1) for name in ("influence", "CV+")]
    expected = stats.ttest_ind(*sizes, equal_var=False, alternative="less")
    found = compared.welch("influence", "CV+", "mean_size", 0.9)
    assert found == pytest.approx((expected.statistic, expected.pvalue, expected.df), rel=1e-9)


def test_welch_has_a_side(compared):
    one, other = compared.welch("influence", "Bayes, split"), compared.welch("Bayes, split", "influence")
    assert one.pvalue + other.pvalue == pytest.approx(1) and one.statistic == -other.statistic
    smaller = compared.estimate("influence", "size_auc").value < compared.estimate("Bayes, split", "size_auc").value
    assert (one.pvalue < 0.5) == smaller


def test_unknown_names_get_an_error_that_lists_the_known(compared):
    with pytest.raises(
        ValueError, match=r"method='sp' is unknown; there are results for: 'influence', 'Bayes, split', 'CV\+'"
    ):
        compared.welch("influence", "sp")
    with pytest.raises(ValueError, match=r"metric='coverage' is unknown; allowed: 'size_auc'"):
        compared.welch("influence", "CV+", "coverage")
    with pytest.raises(ValueError, match=r"metric='mean_size' with level=None is unknown; levels: \[0.8, 0.9\]"):
        compared.welch("influence", "CV+", "mean_size")
    with pytest.raises(
        ValueError, match=r"with level=0.99 is unknown; levels: \[0.8, 0.9\]; metrics with a level: class_cov"
    ):
        compared.estimate("CV+", "coverage", 0.99)


# What is shown ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_holds_all_numbers_at_any_width(compared, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(compared)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width and "…" not in text
    for name in compared.methods:
        for level in LEVELS:
            assert str(compared.estimate(name, "coverage", level)) in text
            assert str(compared.estimate(name, "mean_size", level)) in text
        for metric in ("size_auc", "fuzziness", "observed_fuzziness"):
            assert str(compared.estimate(name, metric)) in text
        assert str(compared.estimate(name, "class_coverage_gap", 0.9)) in text
    assert "80 %" in text and "90 %" in text and f"{len(compared.y)} objects, 3 labels" in " ".join(text.split())


def made_up(m, sizes):
    """A comparison of m objects at one level, 0.9, of methods with the given (objects covered, size)."""
    records = []
    for name, (covered, size) in sizes.items():
        found = {"coverage": (covered / m, math.nan), "mean_size": (size, 0.1), "class_coverage_gap": (0.0, 0.0)}
        records += [Record(name, 0.9, metric, *estimate) for metric, estimate in found.items()]
        for metric in (
            "size_auc",
            "fuzziness",
            "observed_fuzziness",
            "nestedness_violations",
            "fit_seconds",
            "predict_seconds",
        ):
            records.append(Record(name, math.nan, metric, 0.0, math.nan))
    return Comparison(methods=list(sizes), levels=np.array([0.9]), y=np.zeros(m), classes=np.arange(2), records=records)


@pytest.mark.parametrize(
    ("m", "sizes", "marked"),
    [
        (1000, {"a": (900, 1.2), "b": (950, 1.1), "c": (800, 0.9)}, {"b"}),  # c misses too often
        (1000, {"a": (885, 1.0), "b": (950, 1.1)}, {"a"}),  # its interval reaches 0.9
        (1000, {"a": (875, 1.0), "b": (950, 1.1)}, {"b"}),
        (1000, {"a": (950, 1.1), "b": (950, 1.1)}, {"a", "b"}),
        (1000, {"a": (500, 1.1), "b": (500, 1.1)}, set()),
        (3, {"a": (1, 0.4)}, set()),  # two standard errors would reach 0.9
        (1, {"a": (1, 1.1), "b": (0, 1.0)}, {"a"}),
    ],
)
def test_the_smallest_valid_sets_are_marked(m, sizes, marked):
    lines = str(made_up(m, sizes)).split("size AUC")[0].splitlines()
    assert {line.split()[0] for line in lines if line.endswith("*")} == marked
    # The methods whose interval lies below the level, by another implementation of it.
    low = {
        k for k, (covered, _) in sizes.items() if stats.binomtest(covered, m).proportion_ci(method="wilson").high < 0.9
    }
    assert not low & marked


def test_the_frame_is_tidy(compared):
    frame = compared.to_frame()
    assert list(frame.columns) == ["method", "level", "metric", "value", "se"]
    assert len(frame) == len(compared.records) and not frame.duplicated(["method", "level", "metric"]).any()
    row = frame[(frame.method == "CV+") & (frame.level == 0.9) & (frame.metric == "coverage")]
    assert (row.value.item(), row.se.item()) == compared.estimate("CV+", "coverage", 0.9)
    assert frame.level.isna().sum() == 3 * 6


def test_the_plot_has_a_curve_a_method_and_a_line_a_level(compared):
    ax = compared.plot()
    curves = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert list(curves) == compared.methods
    for name, line in curves.items():
        epsilon, size = line.get_data()
        k = int(np.abs(epsilon - 0.1).argmin())
        assert size[k] == prediction_sets(compared.p[name], 1 - epsilon[k]).sum(1).mean()
    marks = [line.get_xdata()[0] for line in ax.get_lines() if len(set(line.get_xdata())) == 1]
    assert marks == pytest.approx([0.2, 0.1])
    assert compared.plot(ax) is ax


# What is given ---------------------------------------------------------------------------------------------------------------


def test_methods_in_a_list_are_named_by_their_class():
    methods = [SplitConformalClassifier(GaussianNB(), random_state=seed) for seed in (0, 1)]
    compared = compare([*methods, CVPlusClassifier(GaussianNB(), random_state=0)], *halves(load_iris), levels=[0.9])
    assert compared.methods == ["Split", "Split 2", "CVPlus"]


def test_the_usual_methods_wrap_what_is_given():
    compared = compare(None, *halves(load_wine), levels=[0.9], estimator=LogisticRegression())
    assert compared.methods == ["full CP", "full CP, influence", "split", "RAPS", "CV+"] and compared.errors == {}
    for method in default_methods(LogisticRegression(C=3.0), 7).values():
        assert method.estimator.C == 3.0 and method.random_state == 7
        clone(method)
    assert list(default_methods(GaussianNB())) == ["full CP", "split", "RAPS", "CV+"]
    assert list(default_methods(None, seconds=600)) == ["full CP, influence", "split", "RAPS", "CV+"]


def test_progress_is_shown_where_it_was_asked_for_and_bars_are_not_nested(monkeypatch, capsys):
    shown = []

    class Bar:
        def __init__(self, label, asked):
            self.label, self.asked = label, asked

        def __enter__(self):
            shown.append((self.label, self.asked))
            return lambda done, total: shown.append((done, total))

        def __exit__(self, *what):
            return None

    monkeypatch.setattr("fullconformal.comparison.progress_bar", Bar)
    methods = {"one": SplitConformalClassifier(GaussianNB(), random_state=0)}
    methods["two"] = CVPlusClassifier(GaussianNB(), random_state=0, verbose=1)
    monkeypatch.setattr("fullconformal.estimators.held_out.progress_bar", Bar)
    compare(methods, *halves(load_iris), levels=[0.9], verbose=1)
    assert shown[0] == ("one (1 of 2)", True) and ("two (2 of 2)", True) in shown and (1, 2) in shown
    assert all(not asked for label, asked in shown if label == "training")  # the methods' own bars


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"methods": {}}, ValueError, r"methods is empty"),
        ({"methods": "split"}, TypeError, r"methods must be a mapping .* got str"),
        (
            {"methods": SplitConformalClassifier()},
            TypeError,
            r"methods must be a mapping .* got SplitConformalClassifier",
        ),
        ({"methods": {"a": SplitConformalClassifier}}, TypeError, r"methods\['a'\] is <class"),
        ({"methods": {"a": GaussianNB()}}, TypeError, r"methods\['a'\] is GaussianNB\(\); give a name"),
        ({"methods": {1: SplitConformalClassifier()}}, TypeError, r"methods\[1\] is"),
        ({"estimator": GaussianNB()}, ValueError, r"estimator is only used with methods=None"),
        ({"levels": [0.9, 1.0]}, ValueError, r"confidence_level must be a number strictly between 0 and 1"),
        ({"y": ["a"] * 3}, ValueError, r"X has 75 objects and y has 3 labels"),
        ({"y_test": ["a"] * 3}, ValueError, r"X_test has 75 objects and y_test has 3 labels"),
        ({"y_test": ["fox"] * 75}, ValueError, r"y_test holds labels unseen in y: \['fox'\]"),
    ],
)
def test_invalid_input_raises_before_anything_is_fitted(change, error, message):
    X, y, objects, truth = halves(load_iris)
    given = {"methods": {"broken": Broken(GaussianNB())}, "X": X, "y": y, "X_test": objects, "y_test": truth} | change
    with pytest.raises(error, match=message):
        compare(**given)
