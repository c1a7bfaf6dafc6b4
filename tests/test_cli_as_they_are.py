"""Tables as people have them: money, percent, placeholders, dates, codes, tabs, semicolons, workbooks; and what is said of them."""

import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
from test_cli_tables import ok, people, refused  # noqa: F401

from fullconformal import FullConformalClassifier, SplitConformalClassifier, load
from fullconformal.cli.schema import Schema
from fullconformal.cli.training import method_options
from fullconformal.models import mlp

N = 120


def table(**columns):
    """A table of a number that tells, two classes, and the columns given."""
    rng = np.random.default_rng(0)
    y = rng.choice(["no", "yes"], N)
    return pd.DataFrame({"x": rng.normal(size=N) + (y == "yes"), **columns, "y": y})


def cycle(values):
    """The values over and over, N of them."""
    return (list(values) * N)[:N]


# A column of a table, and the note or (with "!") the refusal that it gets.
COLUMNS = {
    "money": (cycle(f"${1000 + 7 * k:,}" for k in range(40)), "holds, besides numbers, '$1,000', '$1,007'"),
    "percent": (cycle(f"{k}%" for k in range(37)), "holds, besides numbers, '0%', '1%'"),
    "money among numbers": (cycle([*map(str, range(30)), "$1,234"]), "'$1,234': write plain numbers there"),
    "a dash for missing": (cycle([*map(str, range(30)), "-", "-", "-"]), "'-': --missing - reads it as missing"),
    "unknown in a third": (
        cycle([*map(str, range(30)), *["unknown"] * 15]),
        "'unknown': --missing unknown reads it as missing",
    ),
    "a word in one cell": (["<5", *cycle(map(str, range(60)))[1:]], "'<5': write plain numbers there"),
    "money, all different": ([f"${1000 + 7 * k:,}" for k in range(N)], "!numbers except for '$1,000'"),
    "days that repeat": (cycle(["2024-03-01", "2024-03-02", "2024-03-03"]), "read as days since 1970"),
    "days, all different": (
        [f"{1 + k % 28}.{1 + k // 28}.2024" for k in range(N)],
        "!holds dates; write them as 2024-03-01",
    ),
    "times, all different": (
        [f"2024-0{1 + k // 28}-{1 + k % 28:02} 12:30:00" for k in range(N)],
        "read as days since 1970",
    ),
    "times": (cycle(["3/1/24 12:30", "3/2/24 07:15"]), "!holds dates"),
    "months in words": (cycle(["1 Mar 2024", "2 Apr 2024", "15 May 2023"]), "!holds dates"),
    "decimal commas": (
        cycle(f"{k},{k % 10}" for k in range(40)),
        "--decimal , reads decimal commas if it is a quantity",
    ),
    "thousands": (cycle(f"{k},000" for k in range(40)), "write plain numbers there"),
    "words": (cycle(["red", "green", "blue"]), None),
    "grades": (cycle(["1", "2", "3", "K"]), None),
    "versions": (cycle(["1.2.30", "1.2.31", "2.0.1"]), None),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_as_they_are(name, tmp_path):
    values, message = COLUMNS[name]
    values = [value if k % 30 else (None if name == "words" else value) for k, value in enumerate(values)]
    if name == "money, all different":
        # More different texts than half of the rows, and than a hundred.
        assert len(set(values)) > 100
    table(column=values).to_csv(tmp_path / "it.csv", index=False)
    words = ("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model")
    if message is not None and message.startswith("!"):
        assert message[1:] in (line := refused(*words)) and "--drop column" in line
        return
    notes = ok(*words).stderr
    told = "'column' holds dates" if "days" in (message or "") else "'column' is treated as a category"
    assert (message in notes and told in notes) if message else notes == ""


def test_words_that_differ_in_capitals_alone_get_a_note(tmp_path):
    frame = table(town=cycle(["Ulm", "ULM", "Köln", "Köln "])).assign(y=cycle(["yes", "no", "Yes "]))
    frame.to_csv(tmp_path / "it.csv", index=False)
    notes = ok("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model").stderr
    for name, words in {"town": "'Köln', 'Köln ', 'ULM', 'Ulm'", "y": "'Yes', 'yes'"}.items():
        assert f"{name!r} holds words that differ in capitals or spaces alone, told apart: {words}." in notes


def test_columns_that_are_said_to_be_categories_are(tmp_path):
    columns = {"code": cycle(["007", "7", "12"]), "day": cycle(["2024-03-01", "2024-03-02"]), "no": range(N)}
    table(**columns).to_csv(tmp_path / "it.csv", index=False)
    options = ("--categorical", "code", "--categorical", "day", "--categorical", "no")
    fitted = ok("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model", *options)
    assert (
        "1 numeric and 3 categorical" in fitted.stdout
        and "'no' has 120 categories; the 99 most frequent" in fitted.stderr
    )
    encode = load(tmp_path / "model").transformer_[0].named_transformers_["categories"]
    assert encode.categories_[0].tolist() == ["007", "12", "7"]
    # The same is read again from a new table.
    assert "unseen" not in ok("predict", tmp_path / "model", tmp_path / "it.csv").stderr
    line = refused("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "m", "--categorical", "Code")
    assert "--categorical 'Code' is not a column of the table; did you mean 'code'?" in line
    ok("compare", tmp_path / "it.csv", "--target", "y", *options, "--confidence", 0.8, "-q")


@pytest.mark.parametrize(
    ("name", "mark", "options"),
    [("it.tsv", "\t", ()), ("it.csv", ";", ("--sep", ";")), ("it.txt", "|", ("--sep", "|")), ("it.tsv.gz", "\t", ()),
     ("it.csv", "\t", ("--sep", "\\t"))],
)  # fmt: skip
def test_columns_separated_by_something_else(name, mark, options, tmp_path):
    table().to_csv(tmp_path / name, index=False, sep=mark)
    ok("fit", tmp_path / name, "--target", "y", "-o", tmp_path / "model", *options)
    ok("predict", tmp_path / "model", tmp_path / name, "-o", tmp_path / "sets.tsv", *options)
    assert len(pd.read_csv(tmp_path / "sets.tsv", sep="\t")) == N
    ok("report", tmp_path / "model", tmp_path / name, "-o", tmp_path / "it.html", *options)
    if options:
        assert f"--sep {mark!r}" in refused("fit", tmp_path / name, "--target", "y", "-o", tmp_path / "m")


def test_decimal_commas_and_spaces_around_names(tmp_path):
    """A table as spreadsheets write it where commas are decimal: predictors read the next one in the same way."""
    plain = table(size=[1.5 * k for k in range(N)], code=cycle(["007", "7", "010"]))
    european = plain.rename(columns={"size": " size ", "code": "code "})
    european.to_csv(tmp_path / "it.csv", index=False, sep=";", decimal=",")
    plain.to_csv(tmp_path / "plain.csv", index=False)
    named = ("--target", "y", "--categorical", "code")
    words = ("--sep", ";", "--decimal", ",")
    ok("fit", tmp_path / "it.csv", *named, "-o", tmp_path / "model", *words)
    ok("fit", tmp_path / "plain.csv", *named, "-o", tmp_path / "other")
    ok("predict", tmp_path / "model", tmp_path / "it.csv", "-o", tmp_path / "sets.csv", "--sep", ";", "--keep", "size")
    ok("predict", tmp_path / "other", tmp_path / "plain.csv", "-o", tmp_path / "same.csv", "--keep", "size")
    found, expected = (pd.read_csv(tmp_path / name) for name in ("sets.csv", "same.csv"))
    pd.testing.assert_frame_equal(found, expected)
    shown = ok("inspect", tmp_path / "model").stdout
    assert "size" in shown and "code" in shown
    assert "--decimal ',' does not go with --sep ','" in refused(
        "fit", tmp_path / "plain.csv", *named, "-o", "m", "--decimal", ","
    )
    european.assign(size=1.0).to_csv(tmp_path / "twice.csv", index=False)
    assert "more than one column named 'size'" in refused("fit", tmp_path / "twice.csv", *named, "-o", tmp_path / "m")


def test_a_text_among_decimal_commas_is_the_one_that_is_named(tmp_path):
    """It makes texts of all numbers of its column, which are as they should be."""
    size = [f"{k},5" for k in range(N)]
    words = ("--target", "y", "-o", tmp_path / "model", "--sep", ";", "--decimal", ",")
    table(size=["<1,5", *size[1:]]).to_csv(tmp_path / "it.csv", index=False, sep=";", decimal=",")
    assert "numbers except for '<1,5': write plain numbers there if" in refused("fit", tmp_path / "it.csv", *words)
    ok("fit", tmp_path / "it.csv", *words, "--missing", "<1,5")
    table(size=[*size[1:], "k.A."]).to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    assert f"texts in {N} rows, such as 'k.A.'; write" in refused("predict", tmp_path / "model", tmp_path / "new.csv")


def test_separators_that_are_none(tmp_path):
    table().to_csv(tmp_path / "it.csv", index=False)
    words = ("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model", "--sep")
    assert "--sep ';;' is not one character" in refused(*words, ";;")
    assert "separates its columns by ','" in refused(*words, ";")
    table().to_parquet(tmp_path / "it.parquet")
    line = refused("fit", tmp_path / "it.parquet", "--target", "y", "-o", tmp_path / "model", "--sep", ";")
    assert "--sep ';' goes with text files" in line


def test_workbooks_are_read_where_openpyxl_is(tmp_path, monkeypatch):
    pytest.importorskip("openpyxl")
    table(code=cycle(["007", "12"])).to_excel(tmp_path / "it.xlsx", index=False)
    fit = ("--target", "y", "-o", tmp_path / "model")
    assert "'code' holds codes, numbers with leading zeros" in ok("fit", tmp_path / "it.xlsx", *fit).stderr
    ok("predict", tmp_path / "model", tmp_path / "it.xlsx", "-q")
    table(code=1).to_excel(tmp_path / "titled.xlsx", index=False, startrow=2)
    assert "leave out lines above the names" in refused("fit", tmp_path / "titled.xlsx", *fit)


def test_workbooks_say_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "it.xlsx").write_bytes(b"PK")
    line = refused("fit", tmp_path / "it.xlsx", "--target", "y", "-o", tmp_path / "model")
    assert "an Excel file needs openpyxl; pip install openpyxl, or save the table as CSV" in line


@pytest.mark.parametrize(
    ("command", "out"), [("predict", "s.xlsx"), ("predict", "s.csv.gz"), ("compare", "s.json"), ("report", "it.pdf"), ("report", "it")]
)  # fmt: skip
def test_formats_that_are_not_written_are_refused(command, out, people, tmp_path):  # noqa: F811
    words = (
        (people / "old.csv", "--target", "income") if command == "compare" else (people / "model", people / "new.csv")
    )
    assert "is no format that can be written; give ." in refused(command, *words, "-o", tmp_path / out)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_were_trained_on_are_told(people, tmp_path):  # noqa: F811
    known = "300 of 300 rows are equal to rows that the predictor was fitted on"
    assert known in ok("predict", people / "model", people / "old.csv", "-o", tmp_path / "s.csv").stderr
    assert known in ok("report", people / "model", people / "old.csv", "-o", tmp_path / "it.html").stderr
    assert "fitted on" not in ok("predict", people / "model", people / "new.csv", "-o", tmp_path / "s.csv").stderr


def test_sets_are_never_empty_and_hold_for_each_class_if_asked(people, tmp_path):  # noqa: F811
    def sets(*options):
        ok(
            "predict",
            people / "model",
            people / "new.csv",
            "-o",
            tmp_path / "s.csv",
            "--confidence",
            0.3,
            "-q",
            *options,
        )
        return pd.read_csv(tmp_path / "s.csv", keep_default_na=False)

    plain, full, by_class = sets(), sets("--never-empty"), sets("--class-conditional")
    empty = plain["set_0.3"] == ""
    assert empty.any() and (full["set_0.3"][empty] == full["prediction"][empty]).all()
    assert (full["set_0.3"][~empty] == plain["set_0.3"][~empty]).all()
    clf = load(people / "model").set_params(class_conditional=True)
    new = pd.read_csv(people / "new.csv")
    X = Schema("income", ["age", "hours"], ["education", "town", "owns home"], []).objects(new)
    np.testing.assert_allclose(by_class[["p_high", "p_low", "p_middle"]], clf.predict_p(X), rtol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("dates", "it.xlsx"), ("dates", "it.parquet"), ("dates", "it.csv")])
def test_dates_are_days_in_every_format(kind, name, tmp_path):
    if name.endswith("xlsx"):
        pytest.importorskip("openpyxl")
    days = pd.to_datetime("2024-02-28") + pd.to_timedelta(np.arange(N) % 50, unit="D")
    days = days.where(np.arange(N) % 7 > 0)
    frame = table(day=days)
    writer = {"xlsx": frame.to_excel, "parquet": frame.to_parquet, "csv": frame.to_csv}[name.split(".")[1]]
    writer(tmp_path / name, index=False)
    notes = ok("fit", tmp_path / name, "--target", "y", "-o", tmp_path / "model").stderr
    assert "'day' holds dates, read as days since 1970" in notes
    # 2024-02-28 is day 19,781, and the first one is missing.
    X = Schema("y", ["x", "day"], [], [], ["day"]).objects(frame)
    np.testing.assert_array_equal(X["day"][1:3], [19782.0, 19783.0])
    assert np.isnan(X["day"][0])
    ok("predict", tmp_path / "model", tmp_path / name, "-o", tmp_path / "s.csv", "-q")
    frame["day"] = "soon"
    frame.to_csv(tmp_path / "new.csv", index=False)
    line = refused("predict", tmp_path / "model", tmp_path / "new.csv", "-q")
    assert "the column 'day' must hold dates such as 2024-03-01, but holds 'soon' in 120 rows" in line


@pytest.mark.parametrize("words", [["-"], ["unknown"], ["$1,234"]])
def test_a_target_of_numbers_and_words_is_refused(words, tmp_path):
    table(rent=[*words * 3, *np.round(np.linspace(300, 900, N - 3), 1)]).to_csv(tmp_path / "it.csv", index=False)
    line = refused("fit", tmp_path / "it.csv", "--target", "rent", "-o", tmp_path / "model")
    assert f"the target 'rent' holds texts, {words[0]!r}: " in line


@pytest.mark.parametrize("name", ["it.csv", "it.parquet", "it.xlsx"])
def test_words_that_stand_for_missing_values(name, tmp_path):
    if name.endswith("xlsx"):
        pytest.importorskip("openpyxl")
    frame = table(size=cycle([*map(str, range(30)), "-", "unknown"]), town=cycle(["Ulm", "unknown", "Köln"]))
    writer = {"xlsx": frame.to_excel, "parquet": frame.to_parquet, "csv": frame.to_csv}[name.split(".")[1]]
    writer(tmp_path / name, index=False)
    options = ("--missing", "-", "--missing", "unknown")
    fitted = ok("fit", tmp_path / name, "--target", "y", "-o", tmp_path / "model", *options)
    # Parquet has said that they are texts.
    numeric = 1 if name.endswith("parquet") else 2
    assert f"{numeric} numeric and {3 - numeric} categorical" in fitted.stdout
    encode = load(tmp_path / "model").transformer_[0].named_transformers_["categories"]
    assert "unknown" not in encode.categories_[-1].tolist()
    # New tables are read in the same way.
    assert "unseen" not in ok("predict", tmp_path / "model", tmp_path / name, "-o", tmp_path / "s.csv").stderr


def test_notes_on_columns_are_the_same_for_a_quantity(tmp_path):
    columns = {"size": cycle([*map(str, range(30)), "-"]), "day": cycle(["2024-03-01", "2024-03-02"])}
    table(**columns, rent=np.linspace(300.5, 900, N)).to_csv(tmp_path / "it.csv", index=False)
    notes = ok("fit", tmp_path / "it.csv", "--target", "rent", "-o", tmp_path / "model").stderr
    assert (
        "'size' is treated as a category because it holds, besides numbers, '-'" in notes
        and "'day' holds dates" in notes
    )


def test_automatic_choices_keep_their_promise(tmp_path, monkeypatch):
    table().to_csv(tmp_path / "it.csv", index=False)
    monkeypatch.setattr("fullconformal.methods.convex.symmetric_seconds", lambda *_: 6000.0)
    said = ok("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model").stdout
    assert "method split: its sets are exactly valid; full CP (--method symmetric) would take many minutes" in said
    assert isinstance(load(tmp_path / "model"), SplitConformalClassifier)
    # A network too large for the curvature of all its layers: folds, not influence.
    network = [None, mlp(2000, (32,), 2)]
    assert "curvature" not in method_options("network", "auto", network, None, np.zeros(300))[0]
    assert method_options("network", "influence", network, None, np.zeros(300))[0]["curvature"] == "last_layer"


def test_warnings_of_fit_are_repeated(tmp_path):
    """Three parameters a point: influence functions warn, and so does everything that is made with the predictor."""
    rng = np.random.default_rng(0)
    wide = table(**{f"c{k}": rng.normal(size=N).round(3) for k in range(60)})[:40]
    wide.to_csv(tmp_path / "it.csv", index=False)
    model = tmp_path / "model"
    warning = "approximate p-values may be too small here"
    assert warning in ok("fit", tmp_path / "it.csv", "--target", "y", "-o", model, "--method", "influence").stderr
    assert warning in ok("predict", model, tmp_path / "it.csv", "-o", tmp_path / "s.csv").stderr
    assert warning in ok("report", model, tmp_path / "it.csv", "-o", tmp_path / "it.html").stderr
    assert warning in (tmp_path / "it.html").read_text()
    for command in (["inspect", model], ["predict", model, tmp_path / "it.csv", "-o", tmp_path / "s.csv"]):
        found = json.loads(ok(*command, "--json").stdout)
        assert any(warning in text for text in found["warnings"])


@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_a_quantity_as_target_is_noticed_in_python_too():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2))
    prices = 1000 + 5 * rng.integers(0, 150, 400)
    from sklearn.neighbors import KNeighborsClassifier

    with pytest.warns(UserWarning, match="classes for 400 points; is it a quantity or an identifier"):
        FullConformalClassifier(KNeighborsClassifier()).fit(X, prices)
    with pytest.raises(ValueError, match=r"such as .*a quantity, not classes. Predict it with FullConformalRegressor"):
        FullConformalClassifier().fit(X, X[:, 0])


def page_data(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1])


def test_a_page_with_names_a_column_written_p_values_and_split_beside(people, tmp_path, monkeypatch):  # noqa: F811
    new = pd.read_csv(people / "new.csv")
    new["who"] = [f"person {k}" for k in range(len(new))]
    new["team"] = np.where(np.arange(len(new)) % 3, "A", None)
    new.loc[4, "income"] = None
    new.to_csv(tmp_path / "new.csv", index=False)
    model, sets, page = people / "model", tmp_path / "sets.csv", tmp_path / "it.html"
    words = ("report", model, tmp_path / "new.csv", "-o", page, "--drop-missing", "--keep", "who", "--by", "team")
    ok(*words)
    plain = page_data(page)
    assert plain["identifiers"][:5] == ["person 0", "person 1", "person 2", "person 3", "person 5"]
    assert (
        plain["parts"][0]["name"] == "team" and plain["parts"][0]["labels"] == ["A", "missing"] and plain["part"] == 1
    )
    ok("predict", model, tmp_path / "new.csv", "-o", sets, "-q")
    # Only three rows are computed again.
    asked = []
    known = FullConformalClassifier.predict_epsilon
    monkeypatch.setattr(
        FullConformalClassifier, "predict_epsilon", lambda *a, **k: asked.append(len(a[1])) or known(*a, **k)
    )
    ok(*words, "--sets", sets, "--trained-on", people / "old.csv")
    found = page_data(page)
    assert asked == [3] and found["entry"][0] == plain["entry"][0]
    assert found["methods"] == ["full CP (symmetric, deleted)", "split CP"]
    # Of other rows, or not from predict.
    ok("predict", model, people / "new.csv", "-o", sets, "-q")
    pd.read_csv(sets)[::-1].to_csv(sets, index=False)
    assert "has other p-values than the predictor gives" in refused(*words, "--sets", sets)
    pd.read_csv(sets)[1:].to_csv(sets, index=False)
    assert "rows and the table" in refused(*words, "--sets", sets)
    assert "lacks the columns 'p_high'" in refused(*words, "--sets", tmp_path / "new.csv")
    assert "--by 'tema' is not a column of the table; did you mean 'team'?" in refused(*words, "--by", "tema")


def test_a_page_on_intervals_with_names_and_a_column(tmp_path):
    frame = table(rent=np.linspace(300.5, 900, N), who=[f"flat {k}" for k in range(N)])
    frame.to_csv(tmp_path / "it.csv", index=False)
    model, page = tmp_path / "model", tmp_path / "it.html"
    ok("fit", tmp_path / "it.csv", "--target", "rent", "-o", model, "--drop", "who", "--method", "exact")
    words = ("report", model, tmp_path / "it.csv", "-o", page, "--keep", "who", "--by", "y")
    ok(*words, "--trained-on", tmp_path / "it.csv")
    found = page_data(page)
    assert found["identifiers"][0] == "flat 0" and found["groupings"][found["part"]]["name"] == "y"
    assert len(found["methods"]) == 2 and found["methods"][1] == "split CP"
    assert "--sets goes with classes" in refused(*words, "--sets", tmp_path / "it.csv")


def written(path, **options):
    """A table of numbers, codes and words beside labels, and what was written."""
    frame = table(
        size=[k + 0.5 for k in range(N)], code=cycle(["01067", "20095", "80331"]), word=cycle(["a", "b", "c"])
    )
    frame.to_csv(path, index=False, **options)
    return frame


def test_separator_and_decimal_mark_are_remembered_and_can_be_told_anew(tmp_path):
    written(tmp_path / "old.csv", sep=";", decimal=",")
    written(tmp_path / "new.csv")
    model = tmp_path / "model"
    ok("fit", tmp_path / "old.csv", "--target", "y", "-o", model, "--sep", ";", "--decimal", ",")
    ok("predict", model, tmp_path / "old.csv", "-o", tmp_path / "a.csv")
    assert "say so with --sep ," in refused("predict", model, tmp_path / "new.csv")
    ok("predict", model, tmp_path / "new.csv", "--sep", ",", "-o", tmp_path / "b.csv")
    ok("report", model, tmp_path / "new.csv", "--sep", ",", "--decimal", ".", "-o", tmp_path / "r.html")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


@pytest.mark.parametrize("model", ["lr", "boosting", "network"])
def test_unseen_words_are_named_whatever_the_model(model, tmp_path):
    frame = written(tmp_path / "t.csv")
    ok("fit", tmp_path / "t.csv", "--target", "y", "-o", tmp_path / "m", "--model", model)
    frame.assign(word=frame.word.str.upper()).to_csv(tmp_path / "new.csv", index=False)
    notes = ok("predict", tmp_path / "m", tmp_path / "new.csv", "-o", tmp_path / "o.csv").stderr
    assert f"'word' holds categories unseen in training in {N} rows ('A', 'B', 'C')" in notes


def test_leading_zeros_are_codes_and_encodings_are_named(tmp_path):
    frame = written(tmp_path / "t.csv")
    assert (
        "'code' holds codes, numbers with leading zeros"
        in ok("fit", tmp_path / "t.csv", "--target", "y", "-o", tmp_path / "m").stderr
    )
    for encoding, name in (("cp1252", "windows-1252"), ("utf-16", "utf-16")):
        frame.assign(word="ä €").to_csv(tmp_path / "e.csv", index=False, encoding=encoding)
        assert f"iconv -f {name} -t utf-8" in refused("fit", tmp_path / "e.csv", "--target", "y", "-o", tmp_path / "m")


def test_the_smallest_classes_are_among_those_shown(tmp_path):
    labels = [f"c{k}" for k in range(10) for _ in range(20 - 2 * k + 2)]
    pd.DataFrame({"x": range(0, 2 * len(labels), 2), "y": labels}).to_csv(tmp_path / "t.csv", index=False)
    told = ok(
        "fit", tmp_path / "t.csv", "--target", "y", "-o", tmp_path / "m", "--method", "split", "--model", "boosting"
    ).stdout
    options = ("--method", "split", "--model", "boosting", "--class-conditional")
    notes = ok("fit", tmp_path / "t.csv", "--target", "y", "-o", tmp_path / "m", *options).stderr
    assert notes.count("confidence_level=0.9 needs more than the") == 1 and "more. Give more points" in notes
    assert "10 classes (c0: 22, c1: 20, c2: 18, c3: 16, c4: 14, 2 more, c7: 8, c8: 6, c9: 4)" in told
