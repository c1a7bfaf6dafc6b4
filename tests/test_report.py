"""The report as a file: what it holds, how large it is, what it refuses. tests/browser looks at it in a browser."""

import base64
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest
from sklearn.datasets import load_digits, load_iris
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier, metrics
from fullconformal.report import objects
from fullconformal.report.page import entry_positions, render_report, slider_levels, write_report
from fullconformal.sets import prediction_sets

RNG = np.random.default_rng(0)


def some_p(m=60, C=4, n=99):
    """p-values as full CP gives them: multiples of 1/(n + 1)."""
    return RNG.integers(1, n + 2, size=(m, C)) / (n + 1)


def embedded(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


# The sets


@given(
    level=st.one_of(st.floats(0.001, 0.9999), st.integers(1, 999).map(lambda k: k / 1000)),
    n=st.sampled_from([9, 99, 199, 999]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_every_position_of_the_slider_gives_the_sets_of_predict_set(level, n, seed):
    rng = np.random.default_rng(seed)
    levels = slider_levels(level)
    p = np.concatenate([rng.integers(1, n + 2, size=(5, 3)) / (n + 1), rng.uniform(size=(5, 3)), [[0, 1, 1 - level]]])
    entry = entry_positions(p, levels)
    for position, at in enumerate(levels):
        np.testing.assert_array_equal(entry <= position, prediction_sets(p, at))


@pytest.mark.parametrize("level", [0.003, 0.3, 0.5, 0.9, 1 - 0.1, 0.95, 0.9995, 0.123456])
def test_the_slider_knows_the_level_and_fits_a_byte(level):
    levels = slider_levels(level)
    assert level in levels and len(levels) < 255
    assert (np.diff(levels) > 1e-9).all() and levels[0] > 0 and levels[-1] < 1
    assert {0.9, 0.95, 0.99} <= set(levels.round(12))


def test_the_page_carries_those_positions_and_the_truth():
    p, y = {"ours": some_p(), "theirs": some_p()}, RNG.choice(list("abc"), size=60)
    data = embedded(render_report(p, y, classes=list("abcd"), confidence_level=0.95))
    assert data["levels"][data["start"]] == 0.95 and data["methods"] == ["ours", "theirs"]
    assert [data["classes"][k] for k in data["truth"]] == y.tolist()
    for name, text in zip(p, data["entry"], strict=True):
        entry = np.frombuffer(base64.b64decode(text), np.uint8).reshape(60, 4)
        np.testing.assert_array_equal(entry <= data["start"], prediction_sets(p[name], 0.95))
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(data["p"]), "<f4").reshape(60, 4), p["ours"].astype("f4")
    )


# What can be read without JavaScript


def test_the_numbers_stand_in_the_html():
    p, y = {"ours": some_p(), "theirs": some_p()}, RNG.integers(3, size=60)
    html = render_report(p, y, confidence_level=0.8, n_train=1234, title="Three & more")
    found = metrics.summary(p["ours"], y, 0.8)
    tiles = dict(re.findall(r'data-number="(\w+)" value="([^"]+)"', html))
    for name, key in [
        ("coverage", "coverage"),
        ("size", "mean_size"),
        ("singleton", "singleton_rate"),
        ("empty", "empty_rate"),
    ]:
        assert float(tiles[name]) == found[key].value
        if name == "size":
            assert float(tiles["size_se"]) == found[key].se
        else:
            known = binomtest(round(60 * found[key].value), 60).proportion_ci(method="wilson")
            np.testing.assert_allclose([float(tiles[f"{name}_low"]), float(tiles[f"{name}_high"])], known, atol=1e-12)
    assert f"{100 * found['coverage'].value:.1f}\u00a0%" in html and f"{found['mean_size'].value:.3f}" in html
    rows = re.findall(r'data-cell="coverage" value="([^"]+)"', html)
    assert [float(v) for v in rows] == [metrics.summary(values, y, 0.8)["coverage"].value for values in p.values()]
    assert "1,234 points" in html and "60 objects" in html and "Three &amp; more" in html
    sets = prediction_sets(p["ours"], 0.8)
    for k in range(3):
        assert f"{sets[y == k, k].sum()} of {(y == k).sum()}" in html


def test_one_object_has_no_standard_error():
    html = render_report({"ours": [[0.5, 0.2]]}, [1])
    assert "± <data" in html and "–</data>" in html
    embedded(html)


def test_diagnostics_are_shown_and_warnings_come_first():
    html = render_report({"a": some_p()}, RNG.integers(4, size=60), diagnostics=["all fine", "! mind <this>"])
    assert "mind &lt;this&gt;" in html and "all fine" in html and "give one warning" in html
    assert "give one warning" not in render_report({"a": some_p()}, RNG.integers(4, size=60), diagnostics=["all fine"])


def test_parts_are_fifths_words_and_what_is_missing():
    p, y = some_p(60), RNG.integers(4, size=60)
    rows = pd.DataFrame({
        "age": np.where(np.arange(60) % 6, np.arange(60.0), np.nan), "town": ["Ulm", "Köln", None] * 20, "flag": [0, 1] * 30,
        "name": [f"n{k}" for k in range(60)], "one": 1,
    })  # fmt: skip
    data = embedded(render_report({"ours": p}, y, rows=rows, by="town"))
    found = {part["name"]: part for part in data["parts"]}
    assert list(found) == ["town", "age", "flag"] and data["part"] == 1
    assert found["town"]["labels"] == ["Köln", "Ulm", "missing"] and found["flag"]["labels"] == ["0", "1"]
    assert np.frombuffer(base64.b64decode(found["town"]["of"]), np.uint8).tolist() == [1, 0, 2] * 20
    ages = np.frombuffer(base64.b64decode(found["age"]["of"]), np.uint8)
    assert found["age"]["labels"][-1] == "missing" and len(found["age"]["labels"]) == 6
    assert (np.bincount(ages) == 10).all() and (ages[::6] == 5).all()
    assert embedded(render_report({"ours": p}, y, rows=rows))["part"] == 0


@pytest.mark.parametrize("title", ["income_model on people-of-2024.csv", "_", "", "a<b"])
def test_a_title_is_broken_between_words_only(title):
    html = render_report({"a": some_p()}, RNG.integers(4, size=60), title=title)
    shown = re.search(r"<h1>(.*?)</h1>", html, re.S)[1]
    assert shown.replace("<wbr>", "").replace("&lt;", "<") == title
    assert "people-<wbr>of-<wbr>2024.<wbr>csv" in shown or "people" not in title


# Hostile text


HOSTILE = "</script><script>alert(1)</script>"


def test_nothing_given_can_leave_its_place():
    classes = [HOSTILE, "<img src=x onerror=alert(2)>", "{{ 7 * 7 }}", "\u2028</style>\"'"]
    y = RNG.choice(classes, size=60)
    rows = pd.DataFrame({HOSTILE: [HOSTILE] * 60, "<b>": range(60)})
    html = render_report(
        {HOSTILE: some_p(), "<i>": some_p()},
        y,
        classes=classes,
        title=HOSTILE,
        rows=rows,
        diagnostics=[HOSTILE, f"!{HOSTILE}"],
        identifiers=[HOSTILE] * 60,
        by={HOSTILE: y, "<b>": y},
    )
    assert html.count("<script") == 2 and html.count("</script") == 2 and html.count("</style") == 1
    assert (
        "<img" not in html
        and "<i>" not in html.replace('<i class="', "")
        and "49" not in re.findall(r"<th[^>]*>(.*?)</th>", html)
    )
    data = embedded(html)
    assert data["classes"] == classes and data["rows"]["names"][0] == HOSTILE and data["methods"][0] == HOSTILE


def test_the_page_asks_nothing_of_a_network():
    images = RNG.integers(0, 256, size=(60, 8, 8))
    html = render_report({"ours": some_p()}, RNG.integers(4, size=60), images=images)
    assert set(re.findall(r"https?://[^\s\"')]+", html)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == ["data:,", "#objects"]
    assert "default-src 'none'" in html


# Size


@pytest.mark.parametrize("side", [8, 28])
def test_a_thousand_objects_stay_below_two_megabytes(side):
    images = RNG.integers(0, 256, size=(1000, side, side)).astype(np.uint8)  # noise: nothing compresses worse
    p = {name: some_p(1000, 10, 999) for name in "abcd"}
    html = render_report(p, RNG.integers(10, size=1000), images=images, proba=some_p(1000, 10))
    assert len(html.encode()) < 2e6


def test_a_thousand_rows_stay_below_two_megabytes():
    html = render_report({"ours": some_p(1000, 10)}, RNG.integers(10, size=1000), rows=RNG.normal(size=(1000, 300)))
    assert len(html.encode()) < 2e6
    rows = embedded(html)["rows"]
    assert rows["total"] == 300 and len(rows["names"]) == len(rows["values"][0]) == 60


def test_of_many_objects_some_are_shown_and_all_are_counted():
    p, y = some_p(2500, 3), RNG.integers(3, size=2500)
    html = render_report({"ours": p}, y, rows=np.arange(2500)[:, None], proba=p)
    data = embedded(html)
    shown = data["shown"]
    assert len(set(shown)) == 1000 and shown == sorted(shown)
    # Those that are missed at the level of the page are among them, as far as they are not more than half.
    missed = np.flatnonzero(~prediction_sets(p, 0.9)[np.arange(2500), y])
    assert len(missed) < 500 and set(missed) <= set(shown)
    assert (np.diff(shown) < 5).all()
    assert [row[0] for row in data["rows"]["values"]] == shown
    assert data["predicted"]["label"] == p[shown].argmax(axis=1).tolist()
    assert len(base64.b64decode(data["entry"][0])) == 2500 * 3 and "1,000 of 2,500" in html


# Pictures and rows


def tiles(sheet):
    """The pictures of a sheet, (tiles, H, W, channels)."""
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet.uri.split(",")[1]))))
    picture = np.atleast_3d(picture)
    rows = picture.reshape(sheet.rows, sheet.height, sheet.columns, sheet.width, picture.shape[2])
    return rows.swapaxes(1, 2).reshape(-1, sheet.height, sheet.width, picture.shape[2])


@pytest.mark.parametrize("shape", [(7, 5, 6), (7, 5, 6, 1), (7, 5, 6, 3), (7, 3, 5, 6), (1, 8, 8)])
def test_a_sheet_holds_every_picture(shape):
    images = RNG.integers(0, 256, size=shape).astype(np.uint8)
    sheet = objects.sheet(images)
    known = np.moveaxis(images, 1, 3) if shape[1:2] == (3,) else images.reshape(*shape[:3], -1)
    assert sheet.uri.startswith("data:image/png;base64,")
    np.testing.assert_array_equal(tiles(sheet)[: len(images)], known)


def test_numbers_are_stretched_to_black_and_white():
    assert objects.as_bytes([[[-1.0, 0.0], [3.0, 1.0]]]).ravel().tolist() == [0, 64, 255, 128]
    assert objects.as_bytes(np.ones((1, 2, 2))).ravel().tolist() == [0, 0, 0, 0]


def test_large_pictures_are_made_smaller_until_they_fit():
    images = np.repeat(RNG.integers(0, 256, size=(9, 8, 8, 3)), 16, axis=1).repeat(16, axis=2).astype(np.uint8)
    images ^= RNG.integers(0, 32, size=images.shape).astype(np.uint8)
    jpeg, small = objects.sheet(images, 150_000), objects.sheet(images, 30_000)
    assert jpeg.uri.startswith("data:image/jpeg") and (jpeg.width, jpeg.height) == (128, 128)
    assert small.width < 128 and len(small.uri) < 30_000 * 4 / 3 + 50
    # Blocks of 16 × 16 pixels are one colour up to the noise, so halving keeps it.
    scale = 128 // small.width
    known = images[:, ::scale, ::scale].astype(int).mean(axis=(1, 2))
    assert np.abs(tiles(small)[:9].mean(axis=(1, 2)) - known).max() < 12


def test_cells_are_short_and_missing_values_are_null():
    frame = pd.DataFrame(
        {
            "float": [1.23456789, np.nan], "int": [3, 4], "text": ["a" * 100, None], "flag": [True, False],
            "kind": pd.Categorical(["x", None]), "day": pd.to_datetime(["2020-01-01", None]), "round": [2.0, np.inf],
        }
    )  # fmt: skip
    data = embedded(render_report({"ours": [[0.5, 0.2]] * 2}, [1, 0], rows=frame))["rows"]
    assert data["names"] == list(frame.columns)
    assert data["values"][0] == [1.235, 3, "a" * 79 + "…", "True", "x", "2020-01-01 00:00:00", 2]
    assert data["values"][1] == [None, 4, None, "False", None, None, "inf"]


# Bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"p": {}}, "p must map 1 to 18 names"),
        ({"p": [[0.5, 0.2]]}, "got list"),
        ({"p": {"a": [[0.5, 0.2]], "b": [[0.5, 0.2, 0.1]]}}, r"p\['b'\] has shape \(1, 3\)"),
        ({"p": {"a": [[0.5, 2]]}}, "p-values in"),
        ({"y": [0, 1]}, "y must hold one label"),
        ({"y": [7]}, "not among the classes"),
        ({"confidence_level": 90}, "for 90 % write 0.9"),
        ({"images": np.zeros((2, 3, 3))}, "images must have one entry for each of the 1 labels"),
        ({"images": np.zeros((1, 3))}, "images must have shape"),
        ({"images": np.full((1, 2, 2), np.nan)}, "images contain NaN"),
        ({"rows": np.zeros((2, 3))}, "rows must have one entry for each"),
        ({"rows": np.zeros((1, 3)), "feature_names": ["a"]}, "feature_names must hold one name for each of the 3"),
        ({"proba": [[0.5]]}, "proba must be finite"),
        ({"identifiers": ["a", "b"]}, "identifiers must hold one name for each of the 1 objects, got 2"),
        (
            {"by": "town", "rows": pd.DataFrame({"age": [3]})},
            "by names 'town', which is no column of the rows; they are 'age'",
        ),
        ({"by": {"town": ["a", "b"]}}, r"by\['town'\] must hold one value for each of the 1 objects"),
    ],
)
def test_invalid_input_raises_an_error_that_names_the_argument(given, words):
    arguments = {"p": {"a": [[0.5, 0.2]]}, "y": [0]} | given
    with pytest.raises(ValueError, match=words):
        render_report(arguments.pop("p"), arguments.pop("y"), **arguments)


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_report(target, {"a": [[0.5, 0.2]]}, [0])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"] and target.read_text() == "old"
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_report(tmp_path / "nowhere" / "report.html", {"a": [[0.5, 0.2]]}, [0])


# From a classifier


def test_a_classifier_writes_its_report(tmp_path):
    X, y = load_iris(return_X_y=True, as_frame=True)
    y = np.array(["setosa", "versicolor", "virginica"])[y]
    clf = FullConformalClassifier(l2=0.01, confidence_level=0.8).fit(X[::2], y[::2])
    split = SplitConformalClassifier(random_state=0).fit(X[::2], y[::2])
    Xt, yt = X[1::2], y[1::2]
    path = clf.report(Xt, yt, tmp_path / "iris.html", others={"split": split, "split again": split.predict_p(Xt)})
    assert path == tmp_path / "iris.html"
    html = path.read_text(encoding="utf-8")
    data = embedded(html)
    assert (
        data["methods"] == ["full CP (symmetric, deleted)", "split", "split again"]
        and data["entry"][1] == data["entry"][2]
    )
    assert data["rows"]["names"] == list(X.columns) and "75 points" in html and "exactly valid" in html
    entry = np.frombuffer(base64.b64decode(data["entry"][0]), np.uint8).reshape(75, 3)
    np.testing.assert_array_equal(entry <= data["start"], clf.predict_set(Xt))
    assert [data["classes"][k] for k in data["predicted"]["label"]] == clf.predict(Xt).tolist()


def test_a_method_without_p_values_is_reported_by_its_own_rule(tmp_path):
    X, y = load_iris(return_X_y=True)
    clf = CVPlusClassifier(random_state=0, confidence_level=0.8).fit(X[::2], y[::2])
    data = embedded(
        clf.report(X[1::2], y[1::2], tmp_path / "iris.html", others={"again": clf}).read_text(encoding="utf-8")
    )
    entry = np.frombuffer(base64.b64decode(data["entry"][0]), np.uint8).reshape(75, 3)
    for position, level in enumerate(data["levels"]):
        np.testing.assert_array_equal(entry <= position, clf.predict_set(X[1::2], level))
    assert data["methods"] == ["CV+", "again"] and data["entry"][0] == data["entry"][1]


def test_pictures_are_shown_as_pictures(tmp_path):
    digits = load_digits(n_class=3)
    clf = SplitConformalClassifier(random_state=0).fit(digits.data[:200] / 16, digits.target[:200])
    path = clf.report(digits.data[200:] / 16, digits.target[200:], tmp_path / "digits.html", images=digits.images[200:])
    data = embedded(path.read_text(encoding="utf-8"))
    assert data["rows"] is None and (data["sheet"]["width"], data["sheet"]["height"]) == (8, 8)
    assert data["methods"] == ["split CP"]


def test_the_page_shows_the_diagnostics_of_an_approximation(tmp_path):
    X, y = load_iris(return_X_y=True)
    clf = FullConformalClassifier(method="influence", l2=0.001).fit(X[::10], y[::10])
    html = clf.report(X[1::2], y[1::2], tmp_path / "iris.html").read_text(encoding="utf-8")
    assert "The p-values are approximate" in html
    listed = re.search(r'<ul class="warnings">(.*?)</ul>', html, re.S)[1]
    assert listed.count("<li>") == len(clf.diagnose().warnings) > 0


def test_a_report_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    X, y = load_iris(return_X_y=True)
    clf = SplitConformalClassifier(random_state=0).fit(X[::2], y[::2])
    monkeypatch.setattr(type(clf), "predict_epsilon", lambda *_: pytest.fail("it worked first"))
    with pytest.raises(FileNotFoundError, match="create it first"):
        clf.report(X, y, tmp_path / "nowhere" / "report.html")
    with pytest.raises(ValueError, match="X has 150 objects and y 149 labels"):
        clf.report(X, y[1:], tmp_path / "report.html")
    with pytest.raises(ValueError, match="give it another name"):
        clf.report(X, y, tmp_path / "report.html", others={"split CP": None})


@pytest.mark.parametrize("kind", [list, pd.Series, "sparse"])
def test_texts_and_sparse_rows_are_shown(kind, tmp_path):
    texts, y = ["good day", "bad night", "good morning"] * 20, np.array([1, 0, 1] * 20)
    encode = TfidfVectorizer()
    X = encode.fit_transform(texts) if kind == "sparse" else kind(texts)
    first = StandardScaler(with_mean=False) if kind == "sparse" else encode
    clf = SplitConformalClassifier(
        make_pipeline(first, LogisticRegression()), conformity_score="aps", random_state=0
    ).fit(X, y)
    page = clf.report(X, y, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "x4" in page if kind == "sparse" else "good morning" in page
