"""The command line as a person types it."""

import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn import datasets

from fullconformal.cli import main
from fullconformal.cli.demo import interesting, sentence


def test_demo_prints_the_schemes_and_writes_the_figure_and_the_report(tmp_path, monkeypatch):
    X, y = datasets.load_digits(return_X_y=True)
    monkeypatch.setattr(datasets, "load_digits", lambda **_: (X[:800], y[:800]))  # 300 to learn from instead of 1,297
    out = tmp_path / "figure.png"
    result = CliRunner().invoke(main, ["demo", "--out", str(out), "--confidence", "0.95"], catch_exceptions=False)
    assert result.exit_code == 0
    for word in ("deleted", "studentized", "ordinary", "split CP", "coverage", "Diagnostics", "95% confidence"):
        assert word in result.output
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
    report = tmp_path / "figure.html"
    assert f"Report: {report}" in result.output
    html = report.read_text(encoding="utf-8")
    assert len(html) < 1e6
    for word in ("Handwritten digits", "500 objects", "studentized", "split CP", "data:image/png"):
        assert word in html


def test_demo_refuses_a_missing_folder_before_it_works(tmp_path):
    start = time.perf_counter()
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "nowhere" / "x.png")])
    assert result.exit_code == 2 and "does not exist" in result.output
    assert CliRunner().invoke(main, ["demo", "--confidence", "1.5"]).exit_code == 2
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "x.html")])
    assert result.exit_code == 2 and "not the name of a figure" in result.output
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    "words", [["--help"], ["fit", "--help"], ["predict", "-h"], ["report", "-h"], ["compare", "-h"]]
)
def test_help_imports_nothing_slow(words):
    slow = "{'torch', 'sklearn', 'pandas', 'numpy', 'scipy', 'rich'} & set(sys.modules)"
    code = f"import sys, fullconformal.cli as c\ntry: c.main({words})\nexcept SystemExit: pass\nsys.exit(str({slow} or '') or 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert run.returncode == 0, run.stderr


def test_the_version_is_known_without_an_installation(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)  # a checkout on PYTHONPATH
    result = CliRunner().invoke(main, ["--version"], catch_exceptions=False)
    found = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
    assert result.exit_code == 0 and result.output.endswith(f", version {found}\n")


def test_sets_sentence():
    assert sentence(np.array([3]), 3, 0.9) == "it is 3, with 90% confidence; it was 3 (right)"
    assert sentence(np.array(["cat", "dog", "fox"]), "cow", 0.95).startswith("it is cat, dog or fox, with 95%")
    assert sentence(np.array([]), 1, 0.9) == "no label fits, with 90% confidence; it was 1 (wrong)"


def test_interesting_objects_are_the_hardest_then_the_emptiest_and_the_surest():
    p = np.array([[0.9, 0.01], [0.5, 0.4], [0.02, 0.01], [0.3, 0.2]])
    assert interesting(p, 4, 0.9).tolist() == [1, 3, 2, 0]
