"""Tables: what their columns are taken for, which are refused and with which message, and how they are encoded."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from fullconformal.cli.schema import Schema, TableError, encoder
from fullconformal.cli.tables import read_table


def table(n=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame({
        "size": rng.normal(size=n),
        "count": rng.integers(9, size=n),
        "colour": rng.choice(["red", "blue"], n),
        "ok": rng.random(n) < 0.5,
        "kind": ["a", "b"] * (n // 2),
    })  # fmt: skip


def schema(frame=None, **options):
    return Schema.of(table() if frame is None else frame, "kind", **options)


def test_columns_are_numbers_categories_or_left_out():
    frame = table().assign(nothing=np.nan, patient=np.arange(1001, 1041), **{"Unnamed: 0": np.arange(40)})
    found = schema(frame, drop=["count"])
    assert (found.numbers, found.categories) == (["size"], ["colour", "ok"])
    assert found.left_out == ["count", "nothing", "patient", "Unnamed: 0"]
    assert Schema.of_json(asdict(found)) == found


@pytest.mark.parametrize("values", [None, {}, [], {"target": 1, "numbers": [], "categories": [], "left_out": []},
                                    {"target": "a", "numbers": [1], "categories": [], "left_out": []}])  # fmt: skip
def test_a_schema_from_strange_json_is_refused(values):
    with pytest.raises(TableError, match="missing or invalid"):
        Schema.of_json(values)


def test_dates_and_words_of_columns_that_are_not_used_are_ignored():
    values = asdict(schema()) | {"dates": ["none"], "words": {"none": ["red"]}}
    found = Schema.of_json(values)
    assert found.objects(table()).equals(schema().objects(table())) and found.unseen(table()) == {}


@pytest.mark.parametrize(("change", "message"), [
    ({"text": [f"t{k}" for k in range(240)]}, r"'text' holds 240 different texts .* --drop text"),
    ({"my text": [f"t{k}" for k in range(240)]}, "--drop 'my text'"),
    ({"when": pd.date_range("2020-01-01", periods=240).strftime("%d %b %Y")}, "'when' holds dates.* --drop when"),
    ({"stay": pd.to_timedelta(np.arange(240), unit="h")}, "'stay' holds durations; write them as numbers.* --drop stay$"),
])  # fmt: skip
def test_columns_that_are_neither_are_refused_by_name(change, message):
    frame = table(240).assign(**change)
    with pytest.raises(TableError, match=message):
        schema(frame)
    schema(frame, drop=list(change))


def test_all_columns_that_are_neither_are_named_at_once():
    texts = [f"t{k}" for k in range(240)]
    frame = table(240).assign(when=pd.date_range("2020-01-01", periods=240).strftime("%d %b %Y"), **{"my text": texts})
    with pytest.raises(TableError, match=r"'when' holds dates; .*'my text' holds 240 .* --drop when --drop 'my text'"):
        schema(frame)


def test_decimal_commas_are_named():
    commas = table(240)["size"].map(lambda size: f"{size:.6f}".replace(".", ","))
    with pytest.raises(TableError, match="'size' holds numbers with decimal commas"):
        schema(table(240).assign(size=commas))
    places = ["1,2", "1,3", "1,4", "1,5"] * 10  # of substituents: categories
    assert "places" in schema(table().assign(places=places)).categories


def test_other_encodings_are_named(tmp_path):
    table().replace("red", "rosé").to_csv(tmp_path / "a.csv", index=False, encoding="latin1")
    with pytest.raises(TableError, match=r"a.csv cannot be read as a table: it is not in UTF-8\. Save"):
        read_table(tmp_path / "a.csv")


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_separators_are_named(tmp_path, mark):
    table().to_csv(tmp_path / "a.csv", sep=mark, index=False)
    with pytest.raises(TableError, match=r"separates its columns by .*say so with --sep"):
        read_table(tmp_path / "a.csv")
    table()[["size"]].to_csv(tmp_path / "b.csv", index=False)
    assert read_table(tmp_path / "b.csv").shape == (40, 1)


def test_a_hundred_words_are_categories_however_few_rows():
    assert "code" in schema(table(100).assign(code=[f"c{k}" for k in range(100)])).categories


def test_names_that_are_not_there_get_the_closest():
    for wrong, meant in (("Kind", "kind"), ("knd", "kind"), ("colour ", "colour")):
        with pytest.raises(
            TableError, match=f"--target {wrong!r} is not a column of the table; did you mean {meant!r}"
        ):
            Schema.of(table(), wrong)
    with pytest.raises(TableError, match="--drop 'zzz' is not a column of the table; the columns are 'size', 'count'"):
        schema(drop=["zzz"])
    with pytest.raises(TableError, match="no column to predict from"):
        schema(drop=["size", "count", "colour", "ok"])


def test_targets_are_classes_and_complete():
    frame = table()
    frame.loc[:2, "kind"] = None
    with pytest.raises(TableError, match=r"missing in 3 of 40 rows.*--drop-missing"):
        schema(frame).labels(frame)
    for values in (np.linspace(0, 1, 40), np.arange(4000)):
        numbers = pd.DataFrame({"x": np.ones(len(values)), "y": values})
        with pytest.raises(TableError, match="it is a quantity"):
            Schema.of(numbers, "y").labels(numbers)
    names = pd.DataFrame({"x": np.ones(40), "y": [f"name {k}" for k in range(40)]})
    with pytest.raises(TableError, match="identifier"):
        Schema.of(names, "y").labels(names)


@pytest.mark.parametrize(("values", "expected"), [
    ([1.0, 0.0, 1.0, 0.0], [1, 0, 1, 0]),
    ([True, False, True, False], ["True", "False", "True", "False"]),
    (["a", "b", "a", "b"], ["a", "b", "a", "b"]),
])  # fmt: skip
def test_labels_are_whole_numbers_or_words(values, expected):
    frame = pd.DataFrame({"x": np.ones(4), "y": values})
    assert Schema.of(frame, "y").labels(frame).tolist() == expected


def test_objects_take_columns_in_any_order_and_more_but_not_fewer():
    found, frame = schema(), table()
    shuffled = frame[["ok", "count", "kind", "size", "colour"]].assign(extra=1)
    pd.testing.assert_frame_equal(found.objects(frame), found.objects(shuffled))
    with pytest.raises(TableError, match="lacks the columns 'size', 'ok'"):
        found.objects(frame.drop(columns=["size", "ok"]))
    with pytest.raises(TableError, match="'size' must hold numbers, but holds texts in 1 rows, such as 'tall'"):
        found.objects(frame.astype({"size": object}).assign(size=["tall", *frame["size"][1:]]))
    with pytest.raises(
        TableError, match=r"the column 'size' holds -1e\+200, which is too large to compute with; look for"
    ):
        found.objects(frame.assign(size=-1e200))
    with pytest.raises(TableError, match="'size' holds infinite"):
        found.objects(frame.assign(size=np.inf))


def test_encoding_standardises_marks_what_is_missing_and_gives_each_category_a_column():
    frame = table().assign(constant=3.0)
    frame.loc[0, "size"] = np.nan
    frame.loc[1, "colour"] = None
    found = schema(frame)
    encode = encoder(found).fit(found.objects(frame))
    Z = encode.transform(found.objects(frame))
    # size, count, constant, whether size is missing; red, blue, missing; True, False
    assert Z.shape == (40, 9) and np.isfinite(Z).all()
    np.testing.assert_allclose(Z[:, :2].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(Z[:, :2].std(0), 1)
    np.testing.assert_array_equal(Z[:, 4:7].sum(1), 1)
    assert Z[1, 6] == 1 and Z[:, 6].sum() == 1
    new = found.objects(frame[:3].assign(colour=["green", "red", "mauve"]))
    assert found.unseen(new) == {"colour": (2, ["green", "mauve"])}
    np.testing.assert_array_equal(encode.transform(new)[[0, 2], 4:7], 0)


def test_rare_categories_share_a_column():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"place": rng.choice([f"p{k}" for k in range(300)], 2000), "kind": ["a", "b"] * 1000})
    found = schema(frame)
    assert encoder(found).fit_transform(found.objects(frame)).shape == (2000, 100)


def test_truth_values_are_the_same_words_whether_some_are_missing_or_not(tmp_path):
    (tmp_path / "a.csv").write_text("ok,kind\nTRUE,a\nfalse,b\nTrue,a\n")
    (tmp_path / "b.csv").write_text("ok,kind\nTRUE,a\n,b\n")
    a, b = read_table(tmp_path / "a.csv"), read_table(tmp_path / "b.csv", text=["ok"])
    found = Schema.of(a, "kind")
    assert found.objects(a)["ok"].tolist() == ["True", "False", "True"]
    assert found.objects(b)["ok"].tolist()[0] == "True" and found.objects(b)["ok"].isna().tolist() == [False, True]


def test_parquet_and_compressed_files_are_read(tmp_path):
    frame = table().astype({"colour": "category"})
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    a, b = (
        schema(read_table(tmp_path / name)).objects(read_table(tmp_path / name)) for name in ("t.parquet", "t.csv.gz")
    )
    pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"", "is empty"),
    ("a.csv", b"a,b\n", "has no rows"),
    ("a.csv", bytes(range(256)) * 20, "cannot be read as a table"),
    ("a.csv", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "cannot be read as a table"),
    ("a.csv", b'a,b\n"1,2\n', "cannot be read as a table|has no rows"),
    ("a.parquet", b"a,b\n1,2\n", "cannot be read as a table"),
    ("a.csv.gz", b"a,b\n1,2\n", "cannot be read as a table"),
])  # fmt: skip
def test_files_that_are_no_tables(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match=message):
        read_table(tmp_path / name)
    with pytest.raises(TableError, match="no such file"):
        read_table(tmp_path / "nothing.csv")
    with pytest.raises(TableError, match="is a folder"):
        read_table(tmp_path)


@pytest.mark.parametrize(("content", "message"), [
    ("a,b,y\n1,2,u,\n3,4,v,\n", "more fields than its first line has names"),
    ("a,y,y\n1,u,u\n2,v,v\n", "more than one column named 'y'"),
    ("name;x;y\n'a';1,5;u\n'b, c, d';2;v\n", "separates its columns by ';'"),
])  # fmt: skip
def test_files_whose_columns_would_be_taken_for_others(content, message, tmp_path):
    """Read by pandas alone: names shifted by a column, the target copied into what predicts it, an error about fields."""
    (tmp_path / "table.csv").write_text(content)
    with pytest.raises(TableError, match=message):
        read_table(tmp_path / "table.csv")


def test_a_target_with_infinite_values_is_refused():
    frame = table().assign(kind=[1.0, np.inf] * 20)
    with pytest.raises(TableError, match="it is a quantity"):
        schema(frame).labels(frame)
