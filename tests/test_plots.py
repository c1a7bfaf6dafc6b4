"""Figures: each function draws on the axes it is given, and what it draws is what the metrics say."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest

from fullconformal import metrics
from fullconformal.report import page, plots
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


# What red-green blind eyes see of linear RGB (Machado, Oliveira and Fernandes 2009, full severity).
EYES = {
    "all cones": np.eye(3),
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


def lab(colours, eyes):
    """CIE Lab of colours '#rrggbb' as those eyes see them."""
    values = np.array([[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in colours]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (np.cbrt(np.clip(linear @ np.transpose(eyes), 1e-3, 1) @ to_xyz.T) / np.cbrt([0.9505, 1, 1.089])).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_colours_of_lines_differ_enough(eyes, theme):
    style = (page.TEMPLATES / "report.css").read_text()
    dark = re.findall(r"--line-\d: light-dark\(var\(--light-\d\), (#\w{6})\)", style)
    colours = plots.COLOURS if theme == "light" else dark
    seen = lab(colours, EYES[eyes])
    apart = np.linalg.norm(seen[:, None] - seen, axis=2)[np.triu_indices(len(plots.COLOURS), 1)]
    assert len(dark) == len(plots.COLOURS) and apart.min() > 15  # 2 is just noticeable side by side
