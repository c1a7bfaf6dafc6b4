"""The report on intervals as text: what it holds, and what it refuses; tests/browser looks at it."""

import json
import re

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from fullconformal import JackknifePlusRegressor, SplitConformalRegressor, metrics
from fullconformal.report.interval_page import render_interval_report

X, Y = load_diabetes(return_X_y=True)
LEVELS = [0.8, 0.9]


def ends(m=20, seed=0):
    rng = np.random.default_rng(seed)
    middle, reach = rng.normal(size=(m, 1)), np.array([1.0, 2.0])
    return np.stack([middle - reach, middle + reach], axis=1), rng.normal(size=m)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_every_number_it_shows():
    intervals, y = ends()
    found = data_of(render_interval_report({"ours": intervals}, y, LEVELS))
    for k, level in enumerate(LEVELS):
        told = metrics.interval_summary(intervals[:, :, k], y, level)
        numbers = dict(zip(found["names"], found["numbers"][0][k], strict=True))
        assert (
            numbers["coverage"] == told["interval_coverage"].value and numbers["score"] == told["interval_score"].value
        )
        for group in found["groupings"]:
            assert sum(group["points"]) == 20
            covered = ((intervals[:, 0, k] <= y) & (y <= intervals[:, 1, k])).sum()
            assert sum(group["covered"][k]) == covered
    assert [group["name"] for group in found["groupings"]] == ["width of the interval", "true value"]


def test_many_objects_are_drawn_in_part_and_counted_in_whole():
    intervals, y = ends(1000)
    page = render_interval_report({"ours": intervals}, y, LEVELS)
    assert data_of(page)["drawn"] == 400 and "400 of 1,000" in page
    assert sum(data_of(page)["groupings"][0]["points"]) == 1000


def test_features_of_words_are_parts_and_columns_that_cannot_be_are_left_out():
    intervals, y = ends()
    rows = np.array([["a" if i % 2 else "b", f"name {i}", 1.0] for i in range(20)], dtype=object)
    groups = data_of(
        render_interval_report({"ours": intervals}, y, LEVELS, rows=rows, feature_names=["word", "id", "one"])
    )["groupings"]
    assert [group["name"] for group in groups[2:]] == ["word", "id"] and groups[2]["labels"] == ["a", "b"]
    values = np.where(np.arange(20) == 3, np.nan, 1.0)[:, None]
    groups = data_of(render_interval_report({"ours": intervals}, y, LEVELS, rows=values, feature_names=["gaps"]))[
        "groupings"
    ]
    assert groups[2]["labels"] == ["1", "missing"] and groups[2]["points"] == [19, 1]


def test_missed_objects_are_on_the_page_by_their_names():
    intervals, y = ends(1000)
    y[777] = 99.0
    names = [f"flat {i}" for i in range(1000)]
    found = data_of(
        render_interval_report({"ours": intervals}, y, LEVELS, identifiers=names, by={"half": np.arange(1000) < 500})
    )
    assert found["drawn"] == 400 and 777 in found["shown"]
    assert found["identifiers"] == [names[i] for i in found["shown"]]
    assert found["groupings"][found["part"]]["name"] == "half"


def test_a_regressor_writes_its_page(tmp_path):
    reg = JackknifePlusRegressor().fit(X[:100], Y[:100])
    split = SplitConformalRegressor(random_state=0).fit(X[:100], Y[:100])
    path = reg.report(X[100:150], Y[100:150], tmp_path / "page.html", others={"split": split}, title="Patients")
    page = path.read_text(encoding="utf-8")
    assert "Patients" in page and "1 − 2ε" in page and "100 points" in page
    found = data_of(page)
    assert found["methods"] == ["Jackknife+", "split"] and found["levels"][found["start"]] == 0.9
    np.testing.assert_allclose(found["prediction"], reg.predict(X[100:150]))


def test_bad_input_is_named(tmp_path):
    intervals, y = ends()
    reg = JackknifePlusRegressor().fit(X[:100], Y[:100])
    cases = [
        (lambda: render_interval_report({}, y, LEVELS), "1 to 18 names"),
        (lambda: render_interval_report({"a": intervals[:, :, :1]}, y, LEVELS), "is meant: (m, 2, levels)"),
        (lambda: render_interval_report({"a": intervals}, y, [0.9, 0.8]), "levels must be increasing"),
        (lambda: render_interval_report({"a": intervals}, y[:3], LEVELS), "y must hold one finite number"),
        (
            lambda: render_interval_report({"a": intervals}, y, LEVELS, rows=np.zeros((20, 2)), feature_names=["b"]),
            "feature_names",
        ),
        (lambda: reg.report(X, Y[:5], tmp_path / "a.html"), "y must have shape"),
        (lambda: reg.report(X, Y, tmp_path / "a.html", others={"Jackknife+": reg}), "give it another name"),
        (lambda: reg.report(X, Y, tmp_path / "a.html", others={"b": 3}), "fitted conformal regressor"),
        (lambda: reg.report(X, Y, tmp_path / "none" / "a.html"), "does not exist"),
    ]
    for call, words in cases:
        with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
            call()
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []
