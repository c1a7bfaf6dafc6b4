"""Figures: each function draws on the axes it is given, and what it draws is what the metrics say."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest

from fullconformal import metrics
from fullconformal.report import plots
from fullconformal.sets import prediction_sets

RNG = np.random.default_rng(0)
Y = RNG.choice(["ant", "bee", "cat"], size=80)
CLASSES = ["ant", "bee", "cat", "never"]
P = {name: RNG.integers(1, 41, size=(80, 4)) / 40 for name in ("ours", "theirs")}


@pytest.mark.parametrize("trials", [1, 7, 200])
def test_wilson_is_scipys(trials):
    for successes in {0, 1, trials // 2, trials}:
        known = binomtest(successes, trials).proportion_ci(method="wilson")
        # A handful of operations on numbers below one.
        assert plots.wilson(successes, trials) == pytest.approx((known.low, known.high), abs=1e-14)


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plots.plot_size_curve(P, ax=ax),
        lambda ax: plots.plot_calibration(P, Y, classes=CLASSES, ax=ax),
        lambda ax: plots.plot_class_coverage(P["ours"], Y, classes=CLASSES, ax=ax),
        lambda ax: plots.plot_comparison(P, Y, classes=CLASSES, ax=ax),
        lambda ax: plots.plot_p_values(P["ours"][0], CLASSES, truth="bee", ax=ax),
    ],
)
def test_draws_on_the_axes_given_and_returns_it(draw, tmp_path):
    figure = Figure()
    ax = figure.subplots()
    assert draw(ax) is ax and ax.has_data()
    assert ax.get_xlabel()
    own = draw(None)
    assert own is not ax and own.has_data()
    figure.savefig(tmp_path / "figure.png")


def test_calibration_curves_are_the_coverage():
    levels = [0.5, 0.75, 0.9]
    ax = plots.plot_calibration(P, Y, classes=CLASSES, levels=levels)
    by_name = {line.get_label(): line.get_ydata() for line in ax.lines}
    for name, p in P.items():
        known = [metrics.coverage(prediction_sets(p, level), Y, CLASSES).value for level in levels]
        np.testing.assert_array_equal(by_name[name], known)


def test_class_bars_are_the_coverage_of_the_labels_that_occur():
    ax = plots.plot_class_coverage(P["ours"], Y, classes=CLASSES, level=0.8)
    sets = prediction_sets(P["ours"], 0.8)
    known = [sets[label == Y, k].mean() for k, label in enumerate(CLASSES[:3])]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(known, abs=1e-15)
    assert [text.get_text() for text in ax.get_yticklabels()] == CLASSES[:3]


def test_comparison_points_are_size_and_coverage():
    ax = plots.plot_comparison(P, Y, classes=CLASSES, level=0.8)
    points = [tuple(np.ravel(line.get_xydata())) for line in ax.lines if line.get_marker() == "o"]
    known = [
        (metrics.mean_size(sets).value, metrics.coverage(sets, Y, CLASSES).value)
        for sets in (prediction_sets(p, 0.8) for p in P.values())
    ]
    assert points == known
    assert {text.get_text() for text in ax.texts} >= set(P)
