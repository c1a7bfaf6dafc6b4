"""fit, predict and inspect as a person types them."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import fullconformal
from fullconformal import __main__
from fullconformal.cli import main, tables
from fullconformal.cli.schema import Schema
from fullconformal.estimators.saving import load_with_notes

PEOPLE = Path(__file__).parent / "data" / "people.csv"
N = 300  # rows that train


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def ok(*words):
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    """The one line of a command that is refused with exit code 2."""
    result = run(*words)
    assert result.exit_code == 2, (result.exit_code, result.output)
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A folder with the people to learn from, those to predict, and a predictor."""
    folder = tmp_path_factory.mktemp("people")
    rows = PEOPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "old.csv").write_text("".join(rows[: N + 1]), encoding="utf-8")
    (folder / "new.csv").write_text("".join([rows[0], *rows[N + 1 :]]), encoding="utf-8")
    ok("fit", folder / "old.csv", "--target", "income", "-o", folder / "model")
    return folder


def test_fit_prints_what_it_found_and_what_it_did(people, tmp_path):
    result = ok("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "model")
    for words in ("300 rows, 2 numeric and 3 categorical", "'income' has 3 classes (middle: 111, high: 96, low: 93)",
                  "method symmetric: its sets are exactly valid", "saved in", "next: fullconformal predict"):  # fmt: skip
        assert words in result.stdout, words
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    found = json.loads(ok("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "model", "--json").stdout)
    assert (
        found["rows"] == 300
        and found["method"] == "symmetric"
        and found["categories"] == ["education", "town", "owns home"]
    )
    assert run("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "model", "-q").output == ""


def test_a_training_table_is_read_once(people, tmp_path, monkeypatch):
    """A workbook takes seconds, and a pipe can be read no second time: --task auto looks at the target of the same rows."""
    read, paths = tables.read_table, []
    monkeypatch.setattr(tables, "read_table", lambda path, *options: paths.append(path) or read(path, *options))
    ok("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "model", "-q")
    assert paths == [people / "old.csv"]


def test_a_process_of_its_own_fits_and_predicts(people, tmp_path):
    """As a user starts it: nothing was imported before."""
    for words in (("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "model", "-q"),
                  ("predict", tmp_path / "model", people / "new.csv", "-o", tmp_path / "sets.csv", "-q")):  # fmt: skip
        in_a_process(*words).check_returncode()
    assert len(pd.read_csv(tmp_path / "sets.csv")) == 100


def in_a_process(*words):
    return subprocess.run(
        [sys.executable, "-m", "fullconformal", *map(str, words)], capture_output=True, check=False, text=True
    )


def test_a_process_ends_when_everything_is_said(people, tmp_path):
    """It ends without taking apart what it has imported: what it printed is complete, more than a pipe holds, its exit code is kept, and
    threads and functions that wait for the end have it."""
    pd.read_csv(people / "new.csv").assign(word="x" * 2000).to_csv(tmp_path / "new.csv", index=False)
    words = ("predict", people / "model", tmp_path / "new.csv", "--keep", "word")
    done, expected = in_a_process(*words), ok(*words)
    assert done.returncode == 0 and len(done.stdout) > 200_000
    assert (done.stdout, done.stderr) == (expected.stdout, expected.stderr)
    done = in_a_process("predict", tmp_path / "none", tmp_path / "new.csv")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith("none: there is no such file.\n")
    code = (
        "import atexit, sys, threading, time\n"
        "from fullconformal.__main__ import run\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('thread'))).start()\n"
        "sys.argv = ['fullconformal', '--version']\n"
        "run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[1:] == ["thread", "last"]


def test_a_process_whose_reader_went_away_says_so(people):
    """As Python does: with 120, and what it could not write is not called written."""
    words = [sys.executable, "-m", "fullconformal", "inspect", str(people / "model")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stderr.read()
    assert process.wait() != 0


def test_predict_starts_without_what_it_does_not_need(people, tmp_path):
    """Facts of a process at its very end: modules nobody asked for, and how often Python looked for garbage."""
    code = (
        "import atexit, gc, json, sys\n"
        "from fullconformal.__main__ import run\n"
        "looks = lambda: sum(one['collections'] for one in gc.get_stats())\n"
        "facts = lambda: print(json.dumps([sorted(sys.modules), looks() - before]))\n"
        "atexit.register(facts)\n"
        "before = looks()\n"
        "run()"
    )
    words = ("predict", people / "model", people / "new.csv", "-o", tmp_path / "sets.csv", "-q")
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, check=True, text=True)
    imported, looked = json.loads(done.stdout)
    assert {"torch", "sklearn", "pandas"} <= set(imported)
    assert not {"matplotlib", "jinja2", "distributed", "fullconformal.report", "fullconformal.comparison"} & set(
        imported
    )
    assert looked == 0


def test_only_the_command_of_a_process_changes_what_python_looks_at(people, tmp_path):
    before = gc.get_threshold(), len(gc.callbacks)
    ok("predict", people / "model", people / "new.csv", "-o", tmp_path / "sets.csv")
    assert (gc.get_threshold(), len(gc.callbacks)) == before


def test_long_commands_look_for_garbage_as_usual(monkeypatch):
    usual = gc.get_threshold()
    monkeypatch.setattr("fullconformal.__main__.main", lambda: None)
    try:
        __main__.run()
        put_off = gc.get_threshold()
        gc.collect(0)
        assert put_off[0] > usual[0] and gc.get_threshold() == usual
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*usual)


def test_predict_writes_what_python_says(people, tmp_path):
    result = ok("predict", people / "model", people / "new.csv", "-o", tmp_path / "sets.csv", "--confidence", 0.8,
                "--confidence", 0.95, "--keep", "age")  # fmt: skip
    written = pd.read_csv(tmp_path / "sets.csv", keep_default_na=False)
    assert list(written) == ["age", "prediction", "set_0.8", "set_0.95", "p_high", "p_low", "p_middle"]
    new = pd.read_csv(people / "new.csv")
    clf, notes = load_with_notes(people / "model")
    X = Schema.of_json(notes["table"]).objects(new)
    p = clf.predict_p(X)
    np.testing.assert_allclose(written[["p_high", "p_low", "p_middle"]], p, rtol=1e-5)
    assert written["prediction"].tolist() == clf.predict(X).tolist()
    expected = ["|".join(labels) for labels in clf.predict_set(X, 0.8, as_labels=True)]
    assert written["set_0.8"].tolist() == expected
    coverage = np.mean([truth in labels.split("|") for truth, labels in zip(new["income"], expected, strict=True)])
    assert f"{coverage:.1%} (" in result.stdout and "100 labelled rows" in result.stdout
    found = json.loads(ok("predict", people / "model", people / "new.csv", "-o", tmp_path / "s.csv", "--json").stdout)
    assert found["levels"][0]["confidence_level"] == 0.9 and 0.75 < found["levels"][0]["coverage"] <= 1


def test_predict_to_standard_output_is_the_table_and_nothing_else(people):
    result = ok("predict", people / "model", people / "new.csv")
    lines = result.stdout.splitlines()
    assert lines[0] == "prediction,set_0.9,p_high,p_low,p_middle" and len(lines) == 101
    assert "mean set size" in result.stderr
    assert ok("predict", people / "model", people / "new.csv", "-q").stderr == ""


def test_new_tables_may_lack_the_target_and_hold_what_was_never_seen(people, tmp_path):
    new = pd.read_csv(people / "new.csv")[["town", "owns home", "hours", "age", "education"]].assign(extra="x")
    new.loc[:4, "town"] = "Paris"
    new["owns home"] = new["owns home"].astype(object)
    new.loc[5:9, "owns home"] = None
    new.to_csv(tmp_path / "new.csv", index=False)
    result = ok("predict", people / "model", tmp_path / "new.csv", "-o", tmp_path / "sets.csv")
    assert "'town' holds categories unseen in training in 5 rows ('Paris')" in result.stderr
    assert "'owns home' holds categories unseen in training in 5 rows" in result.stderr
    assert "coverage" not in result.stdout
    assert not pd.read_csv(tmp_path / "sets.csv")["prediction"].isna().any()
    new.to_parquet(tmp_path / "new.parquet")
    ok("predict", people / "model", tmp_path / "new.parquet", "-o", tmp_path / "sets.parquet")
    sets = pd.read_parquet(tmp_path / "sets.parquet")
    flat = pd.read_csv(tmp_path / "sets.csv", keep_default_na=False)
    assert ["|".join(labels) for labels in sets["set_0.9"]] == flat["set_0.9"].tolist()


def test_inspect_says_what_it_is(people):
    result = ok("inspect", people / "model")
    for words in ("symmetric, deleted", "training points   300", "age, hours", "education, town, owns home", "old.csv",
                  "exactly valid, whatever these figures are"):  # fmt: skip
        assert words in result.stdout, words
    found = json.loads(ok("inspect", people / "model", "--json").stdout)
    assert (
        found["points"] == 300
        and found["classes"] == ["high", "low", "middle"]
        and found["table"]["target"] == "income"
    )


def test_a_network_and_other_options(people, tmp_path):
    ok("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "mlp", "--model", "network", "--method", "influence",
       "--class-conditional", "--confidence", "0.8", "--drop", "town")  # fmt: skip
    found = json.loads(ok("inspect", tmp_path / "mlp", "--json").stdout)
    assert found["class_conditional"] and found["confidence_level"] == 0.8 and found["table"]["left_out"] == ["town"]
    ok("predict", tmp_path / "mlp", people / "new.csv", "-o", tmp_path / "sets.csv")
    assert list(pd.read_csv(tmp_path / "sets.csv"))[:2] == ["prediction", "set_0.8"]


def test_a_forest_end_to_end(people, tmp_path):
    fitted = ok("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "forest", "--model", "forest")
    assert fitted.stdout.count("method oob") == 1 and "its coverage is measured" not in fitted.stderr
    found = json.loads(
        ok("predict", tmp_path / "forest", people / "new.csv", "-o", tmp_path / "s.csv", "--json").stdout
    )
    assert 0.75 < found["levels"][0]["coverage"] <= 1
    assert "oob, deleted" in ok("inspect", tmp_path / "forest").stdout
    ok("report", tmp_path / "forest", people / "new.csv", "-o", tmp_path / "it.html")
    assert "grown without it" in (tmp_path / "it.html").read_text(encoding="utf-8")
    table = ok("compare", people / "old.csv", "--target", "income", "--model", "forest", "--confidence", 0.9).stdout
    assert "failed" not in table and "full CP" in table


def test_boosting_goes_by_folds(people, tmp_path):
    words = ("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "boosted", "--model", "boosting")
    assert "method folds" in ok(*words).stdout
    ok("predict", tmp_path / "boosted", people / "new.csv", "-q")
    ok("report", tmp_path / "boosted", people / "new.csv", "-o", tmp_path / "it.html")
    assert "are trained without it" in (tmp_path / "it.html").read_text(encoding="utf-8")


def test_a_network_of_ones_own_is_named_again_to_predict(people, tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner, self.last = nn.Linear(14, 4), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        return self.last(torch.tanh(self.inner(x)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ok("fit", people / "old.csv", "--target", "income", "-o", "net", "--model", "my_nets:Net")
    assert "my_nets:Net" in refused("predict", "net", people / "new.csv") and "my_nets:Net" in refused("inspect", "net")
    ok("predict", "net", people / "new.csv", "-o", "sets.csv", "--model", "my_nets:Net")
    ok("inspect", "net", "--model", "my_nets:Net")
    assert "failed" in refused("fit", people / "old.csv", "--target", "income", "-o", "net", "--model", "no_such:Net")
    assert "give lr, forest, boosting, network, or" in refused(
        "fit", people / "old.csv", "--target", "income", "-o", "net", "--model", "svm"
    )


def test_report_writes_a_page_about_labelled_rows(people, tmp_path):
    result = ok(
        "report", people / "model", people / "new.csv", "-o", tmp_path / "page.html", "--title", "Who earns what"
    )
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Who earns what" in page and "owns home" in page
    assert "100 rows in" in result.stdout and len(list(tmp_path.iterdir())) == 1
    new = pd.read_csv(people / "new.csv")
    new.drop(columns="income").to_csv(tmp_path / "no target.csv", index=False)
    assert "the target 'income' is not a column" in refused("report", people / "model", tmp_path / "no target.csv")
    new.assign(income=["none", "low"] * 50).to_csv(tmp_path / "odd.csv", index=False)
    assert "does not know: ['none']" in refused("report", people / "model", tmp_path / "odd.csv")
    new.assign(income=new["income"].where(new.index > 2)).to_csv(tmp_path / "holes.csv", index=False)
    holes = people / "model", tmp_path / "holes.csv", "-o", tmp_path / "page.html"
    assert "missing in 3 of 100 rows; leave these rows out (--drop-missing)" in refused("report", *holes)
    result = ok("report", *holes, "--drop-missing")
    assert "97 rows in" in result.stdout and "3 rows without 'income' were left out" in result.stderr
    assert "does not exist" in refused(
        "report", people / "model", people / "new.csv", "-o", tmp_path / "no" / "page.html"
    )


def test_compare_a_table_and_digits(people, tmp_path):
    result = ok(
        "compare", people / "old.csv", "--target", "income", "--confidence", 0.9, "-o", tmp_path / "figures.csv"
    )
    assert "225 rows to learn from, 75 to predict, 3 classes" in result.stdout
    figures = pd.read_csv(tmp_path / "figures.csv")
    assert list(figures) == ["method", "level", "metric", "value", "se"]
    for method in figures["method"].unique():
        assert method in result.stdout
    coverage = figures[(figures["metric"] == "coverage")]
    # Of 75 rows, and for the aggregating methods somewhat above the level.
    assert len(coverage) > 2 and (coverage["value"] > 0.9 - 4 * (0.09 / 75) ** 0.5).all()
    found = json.loads(ok("compare", "digits", "--json", "--confidence", 0.9, "--test-size", 0.02).stdout)
    assert {row["method"] for row in found} >= {"split"} and {row["level"] for row in found} >= {None, 0.9}
    assert "--target COLUMN" in refused("compare", people / "old.csv")
    assert "no such file" in refused("compare", tmp_path / "nothing.csv", "--target", "y")


# What is refused ---------------------------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text)
    return path


def test_bad_tables_are_one_line_and_exit_code_two(people, tmp_path):
    out = tmp_path / "model"
    good = people / "old.csv"
    one = write(tmp_path / "one.csv", "x,y\n1,a\n2,a\n3,a\n")
    holes = write(tmp_path / "holes.csv", "x,y\n1,a\n2,\n3,b\n4,a\n5,b\n")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(bytes(range(256)) * 50)
    cases = [
        ((good, "--target", "incom"), "did you mean 'income'?"),
        ((good, "--target", "income", "--drop", "Age"), "did you mean 'age'?"),
        ((write(tmp_path / "empty.csv", ""), "--target", "y"), "is empty"),
        ((write(tmp_path / "head.csv", "x,y\n"), "--target", "y"), "has no rows"),
        ((one, "--target", "y"), "only one class, 'a'"),
        ((holes, "--target", "y"), "missing in 1 of 5 rows"),
        ((binary, "--target", "y"), "cannot be read as a table"),
        ((tmp_path, "--target", "y"), "is a folder"),
        ((tmp_path / "nothing.csv", "--target", "y"), "no such file"),
    ]
    for words, message in cases:
        line = refused("fit", *words, "-o", out)
        assert line.startswith("error: ") and message in line
    assert not out.exists()
    assert "1 rows without 'y' were left out" in ok("fit", holes, "--target", "y", "-o", out, "--drop-missing").stderr


def test_numbers_with_a_few_words_among_them_get_a_note(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"lab": rng.integers(60, size=200).astype(str), "code": rng.integers(5, size=200).astype(str)})
    table["y"] = rng.choice(["a", "b"], 200)
    table.loc[3, ["lab", "code"]] = "<5"
    for bad, found in ((["<5"], "'<5'"), (["<5", "high"], "'<5', 'high'")):
        table.loc[[3, 7][: len(bad)], "lab"] = bad
        table.to_csv(tmp_path / "it.csv", index=False)
        notes = ok("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model").stderr
        assert (
            f"'lab' is treated as a category because it holds, besides numbers, {found}: " in notes
            and "'code'" not in notes
        )
    table["lab"] = rng.normal(size=200).astype(str)
    table.loc[3, "lab"] = "<5"
    table.to_csv(tmp_path / "it.csv", index=False)
    refusal = refused("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model")
    assert "holds 200 different texts in 200 rows, numbers except for '<5': write plain numbers there" in refusal


def test_spaces_around_labels_are_no_part_of_them(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=60), "y": ["home", "home ", " ward"] * 20})
    table.loc[5, "y"] = "  "
    table.to_csv(tmp_path / "it.csv", index=False)
    assert "missing in 1 of 60 rows" in refused("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model")
    ok("fit", tmp_path / "it.csv", "--target", "y", "-o", tmp_path / "model", "--drop-missing")
    assert fullconformal.load(tmp_path / "model").classes_.tolist() == ["home", "ward"]


def test_a_table_separated_by_bars_is_named(tmp_path):
    (tmp_path / "it.csv").write_text("a|b\n1|2\n")
    assert "separates its columns by '|'" in refused("fit", tmp_path / "it.csv", "--target", "b", "-o", tmp_path / "m")


def test_outputs_that_cannot_be_written_are_refused_before_any_work(people, tmp_path):
    start = time.perf_counter()
    assert "does not exist" in refused("fit", people / "old.csv", "--target", "income", "-o", tmp_path / "no" / "m")
    assert "is a folder" in refused("predict", people / "model", people / "new.csv", "-o", tmp_path)
    assert time.perf_counter() - start < 30


def test_predictors_that_are_none_and_tables_that_do_not_fit(people, tmp_path):
    assert "no safetensors file" in refused("predict", people / "old.csv", people / "new.csv")
    assert "nothing: there is no such file" in refused("inspect", tmp_path / "nothing")
    damaged = bytearray((people / "model").read_bytes())
    damaged[-100] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    assert "damaged" in refused("inspect", tmp_path / "damaged")
    new = pd.read_csv(people / "new.csv")
    new.drop(columns=["age", "town"]).to_csv(tmp_path / "few.csv", index=False)
    assert "lacks the columns 'age', 'town'" in refused("predict", people / "model", tmp_path / "few.csv")
    new.assign(age="old").to_csv(tmp_path / "odd.csv", index=False)
    odd = refused("predict", people / "model", tmp_path / "odd.csv")
    assert f"'age' must hold numbers, but holds texts in {len(new)} rows, such as 'old'" in odd
    X = np.random.default_rng(0).normal(size=(50, 2))
    fullconformal.FullConformalClassifier().fit(X, X[:, 0] > 0).save(tmp_path / "no table")
    assert "was not made by `fullconformal fit`" in refused("predict", tmp_path / "no table", people / "new.csv")
    ok("inspect", tmp_path / "no table")


def test_unexpected_errors_are_exit_code_one_and_a_traceback_can_be_shown(people, monkeypatch):
    assert isinstance(run("--traceback", "inspect", people / "nothing").exception, FileNotFoundError)

    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("fullconformal.estimators.saving.load_with_notes", broken)
    assert run("inspect", people / "model").exit_code == 1


# Large tables, and interrupts ------------------------------------------------------------------------------------------


def test_a_level_out_of_reach_is_noted(people, tmp_path):
    words = ("predict", people / "model", people / "new.csv", "-o", tmp_path / "sets.csv", "--confidence")
    assert "needs more than the 300 training points" in ok(*words, 0.999).stderr
    assert "needs more" not in ok(*words, 0.95).stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A hundred thousand rows, and a thousand to predict."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    n = 101_000
    table = pd.DataFrame(rng.normal(size=(n, 3)), columns=["a", "b", "c"]).round(3)
    table["region"] = rng.choice([f"r{k}" for k in range(10)], n)
    table.loc[rng.random(n) < 0.1, "b"] = np.nan
    table["y"] = np.where(table["a"] + rng.logistic(size=n) > 0, "yes", "no")
    table[:-1000].to_csv(folder / "old.csv", index=False)
    table[-1000:].to_csv(folder / "new.csv", index=False)
    return folder


def test_a_hundred_thousand_rows(large):
    result = ok("fit", large / "old.csv", "--target", "y", "-o", large / "model")
    assert "100,000 rows" in result.stdout and "method split: its sets are exactly valid" in result.stdout
    assert "--method symmetric" in result.stdout
    found = json.loads(ok("predict", large / "model", large / "new.csv", "-o", large / "sets.csv", "--json").stdout)
    # Ninety per cent within four standard errors of a thousand trials.
    assert abs(found["levels"][0]["coverage"] - 0.9) < 4 * (0.9 * 0.1 / 1000) ** 0.5


def interrupted(folder, *words):
    """Exit code, and what a command interrupted in the middle leaves in its folder."""
    before = set(folder.iterdir())
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fullconformal", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
        # Where the tests run in the background of a shell, interrupts are ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert "rows" in process.stdout.readline()  # it has read the table, and will be at work for a quarter of a minute
    time.sleep(4)  # until imports are done: an interrupt inside torch's may abort the process before Python hears of it
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    # Where the interrupt came through an exec (imports have some), Python ends itself by the signal; shells show that as 130 too.
    code = 128 - process.returncode if process.returncode == -signal.SIGINT else process.returncode
    return code, errors, set(folder.iterdir()) - before


def test_an_interrupt_leaves_nothing_behind(large):
    code, errors, left = interrupted(
        large, "fit", large / "old.csv", "--target", "y", "-o", large / "half", "--model", "network"
    )
    assert code == 130 and "nothing was written" in errors and "Traceback" not in errors and left == set()


def test_an_interrupted_table_leaves_nothing_behind(people, tmp_path, monkeypatch):
    def stop(self, path, **_):
        Path(path).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_csv", stop)
    result = run("predict", people / "model", people / "new.csv", "-o", tmp_path / "sets.csv")
    assert result.exit_code == 130 and list(tmp_path.iterdir()) == []


def test_acs_income(tmp_path):
    folder = os.environ.get("FULLCONFORMAL_DATA")
    source = Path(folder or "") / "acsincome" / "ny_2018.csv.gz"
    if not folder or not source.exists():
        pytest.skip("FULLCONFORMAL_DATA names no folder with acsincome/ny_2018.csv.gz")
    rows = pd.read_csv(source)
    target = [name for name in rows if name.startswith("PINCP")][0]  # noqa: RUF015
    # Codes are categories, as people give them.
    rows = rows.astype(dict.fromkeys(("COW", "MAR", "SEX", "RAC1P", "RELP"), str)).sample(8000, random_state=0)
    rows[:6000].to_csv(tmp_path / "old.csv", index=False)
    rows[6000:].to_parquet(tmp_path / "new.parquet")
    ok("fit", tmp_path / "old.csv", "--target", target, "-o", tmp_path / "model")
    found = json.loads(
        ok("predict", tmp_path / "model", tmp_path / "new.parquet", "-o", tmp_path / "s.csv", "--json").stdout
    )
    assert abs(found["levels"][0]["coverage"] - 0.9) < 4 * (0.9 * 0.1 / 2000) ** 0.5


def labelled(path, labels, **columns):
    pd.DataFrame({"x": np.linspace(-1, 1, len(labels)), "y": labels, **columns}).to_csv(path, index=False)


@pytest.mark.parametrize(("old", "new"), [
    (["true", "false", "unknown"], ["true", "false", "unknown"]),  # truth values are written one way
    (["1", "2", "x"], ["1", "2", None]),  # numbers to pandas, and text in training
    (["1", "-1"], ["1", "-1", None]),
    (["home", "ward "], [" home", "ward", None]),
])  # fmt: skip
def test_the_printed_coverage_is_that_of_the_sets(old, new, tmp_path):
    labelled(tmp_path / "old.csv", old * 20)
    labelled(tmp_path / "new.csv", new * 10)
    ok("fit", tmp_path / "old.csv", "--target", "y", "-o", tmp_path / "model", "-q")
    found = json.loads(
        ok("predict", tmp_path / "model", tmp_path / "new.csv", "-o", tmp_path / "sets.csv", "--json").stdout
    )
    sets = pd.read_csv(tmp_path / "sets.csv", dtype=str, keep_default_na=False)["set_0.9"]
    inside = [
        label.strip().lower() in row.lower().split("|") for label, row in zip(new * 10, sets, strict=True) if label
    ]
    (level,) = found["levels"]
    assert level["labelled_rows"] == len(inside) and level["coverage"] == pytest.approx(np.mean(inside))
    assert np.mean(inside) > 0.5


def test_labels_unseen_in_training_get_a_note_and_no_set_holds_them(tmp_path):
    labelled(tmp_path / "old.csv", [1, -1] * 20)
    labelled(tmp_path / "new.csv", [7, "lost"] * 5)
    ok("fit", tmp_path / "old.csv", "--target", "y", "-o", tmp_path / "model", "-q")
    result = ok("predict", tmp_path / "model", tmp_path / "new.csv", "-o", tmp_path / "sets.csv")
    assert (
        "labels unseen in training in 10 rows ('7', 'lost')" in result.stderr
        and "0.0% (0.0% to 27.8%)" in result.stdout
    )


def test_a_column_that_is_kept_is_not_taken_for_one_that_is_written(tmp_path):
    labelled(tmp_path / "old.csv", ["a", "b"] * 20, prediction=["sun", "rain"] * 20)
    ok("fit", tmp_path / "old.csv", "--target", "y", "-o", tmp_path / "model", "-q")
    ok("predict", tmp_path / "model", tmp_path / "old.csv", "--keep", "prediction", "-o", tmp_path / "sets.csv", "-q")
    found = pd.read_csv(tmp_path / "sets.csv")
    assert set(found["prediction_kept"]) == {"sun", "rain"} and set(found["prediction"]) <= {"a", "b"}


def test_columns_that_are_kept_are_copied_as_they_are(tmp_path):
    columns = {"code": ["007", "12", None, "0815"] * 10, "id": [1234567890.25, 1234567891.5] * 20}
    labelled(tmp_path / "old.csv", ["a", "b"] * 20, **columns)
    ok("fit", tmp_path / "old.csv", "--target", "y", "--drop", "code", "-o", tmp_path / "model", "-q")
    written = ok("predict", tmp_path / "model", tmp_path / "old.csv", "--keep", "code", "--keep", "id", "-q").stdout
    for line, code, number in zip(written.splitlines()[1:], columns["code"], columns["id"], strict=True):
        assert line.startswith(f"{code or ''},{number},")


@pytest.mark.parametrize("sep", [",", ";"])
def test_leading_zeros_of_numbers_that_are_kept_are_copied(sep, tmp_path):
    """An order number names the row for whoever gets the sets, though the model was given it as a number."""
    rows = [f"{k * 7919 % 1000:03}" for k in range(40)]
    labelled(
        tmp_path / "old.csv", ["a", "b"] * 20, order=rows, size=[k / 2 for k in range(40)], plain=range(5, 405, 10)
    )
    pd.read_csv(tmp_path / "old.csv", dtype=str).to_csv(tmp_path / "old.csv", sep=sep, index=False)
    assert (
        "'order' holds codes"
        in ok("fit", tmp_path / "old.csv", "--target", "y", "--sep", sep, "-o", tmp_path / "model").stderr
    )
    kept = [word for name in ("order", "size", "plain") for word in ("--keep", name)]
    ok("predict", tmp_path / "model", tmp_path / "old.csv", *kept, "-o", tmp_path / "sets.csv", "-q")
    found = pd.read_csv(tmp_path / "sets.csv", dtype=str)
    assert found["order"].tolist() == rows and found["size"][1] == "0.5" and found["plain"][1] == "15"
    ok("report", tmp_path / "model", tmp_path / "old.csv", "--keep", "order", "-o", tmp_path / "it.html", "-q")
    assert f'"{rows[0]}"' in (tmp_path / "it.html").read_text(encoding="utf-8")


def test_inputs_are_not_overwritten(people, tmp_path):
    for name in ("old.csv", "model"):
        (tmp_path / name).write_bytes((people / name).read_bytes())
    old, model = tmp_path / "old.csv", tmp_path / "model"
    before = old.read_bytes(), model.read_bytes()
    for words in (("fit", old, "--target", "income", "-o", old), ("predict", model, old, "-o", old), ("predict", model, old, "-o", model),
                  ("report", model, old, "-o", model), ("compare", old, "--target", "income", "-o", old)):  # fmt: skip
        assert "would overwrite an input file" in refused(*words)
    assert (old.read_bytes(), model.read_bytes()) == before


@pytest.mark.parametrize("how", [["--json"], ["-q", "-o", "out.csv"]])
def test_a_method_that_failed_is_reported_without_a_table_too(how, tmp_path, monkeypatch):
    """Twelve rows are too few to tune RAPS on."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pd.DataFrame({"x": rng.normal(size=16), "y": ["a", "b"] * 8}).to_csv("few.csv", index=False)
    result = ok("compare", "few.csv", "--target", "y", "--confidence", 0.7, *how)
    assert "RAPS failed: ValueError: " in result.stderr and "too few to tune RAPS" in result.stderr


def test_labels_that_contain_the_separator_get_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pd.DataFrame({"x": rng.normal(size=40), "y": ["a|b", "c"] * 20}).to_csv("few.csv", index=False)
    ok("fit", "few.csv", "--target", "y", "-o", "model")
    assert (
        "joined by |, and 'a|b' contains it; -o sets.parquet" in ok("predict", "model", "few.csv", "-o", "s.csv").stderr
    )
    assert "joined by" not in ok("predict", "model", "few.csv", "-o", "s.parquet").stderr


@pytest.mark.parametrize("out", ["sets.csv", "sets.parquet"])
def test_identifiers_with_gaps_or_leading_zeros_are_kept_as_written(out, tmp_path):
    """Missing cells make floats of a column: 31741.0, and of eighteen digits other ones."""
    order = [f"{k:03}" for k in range(100, 140)] + [""]
    long = [str(10**17 + 3**k) for k in range(40)] + [""]
    labelled(tmp_path / "old.csv", [*["a", "b"] * 20, "a"], order=order, long=long, code=[f"0{k}" for k in range(41)])
    for drop in ([], ["--drop", "order", "--drop", "long", "--drop", "code"]):
        ok("fit", tmp_path / "old.csv", "--target", "y", "-o", tmp_path / "model", *drop)
        keep = [word for name in ("order", "long", "code") for word in ("--keep", name)]
        ok("predict", tmp_path / "model", tmp_path / "old.csv", *keep, "-o", tmp_path / out, "-q")
        found = pd.read_csv(tmp_path / out, dtype=str) if out == "sets.csv" else pd.read_parquet(tmp_path / out)
        assert found["order"].fillna("").tolist() == order and found["long"].fillna("").tolist() == long
        assert found["code"].tolist() == [f"0{k}" for k in range(41)]


def test_labels_with_leading_zeros_are_noted(tmp_path):
    """A class 01 that came out as 1 is found in no other table."""
    labelled(tmp_path / "old.csv", ["01", "02"] * 20)
    fit = ("fit", tmp_path / "old.csv", "--target", "y", "-o", tmp_path / "model")
    assert "'y' holds codes, numbers with leading zeros, read as numbers; --categorical y" in ok(*fit).stderr
    done = ok(*fit, "--categorical", "y")
    assert "holds codes" not in done.stderr and "(01: 20, 02: 20)" in done.stdout
    assert "p_01,p_02" in ok("predict", tmp_path / "model", tmp_path / "old.csv", "-q").stdout
