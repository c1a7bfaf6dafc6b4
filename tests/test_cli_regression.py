"""The commands on tables whose target is a quantity."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import fullconformal
from fullconformal.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of flats with words and missing cells, and one of new flats; a predictor fitted to the first."""
    folder, rng = tmp_path_factory.mktemp("flats"), np.random.default_rng(0)
    n = 500
    frame = pd.DataFrame({
        "area": rng.uniform(20, 120, n).round(1), "floor": rng.integers(0, 9, n), "town": rng.choice(["A", "B", "C"], n),
    })  # fmt: skip
    frame["rent"] = (
        8 * frame["area"] + 30 * frame["floor"] + 100 * (frame["town"] == "A") + rng.normal(0, 60, n)
    ).round(2)
    frame.loc[3, "area"] = np.nan
    frame[:400].to_csv(folder / "flats.csv", index=False)
    frame[400:].to_csv(folder / "new.csv", index=False)
    result = run("fit", folder / "flats.csv", "--target", "rent", "-o", folder / "rent.safetensors")
    assert result.exit_code == 0, result.output
    (folder / "fit.txt").write_text(result.output)
    return folder


def test_fit_says_that_it_makes_a_regressor(folder):
    text = (folder / "fit.txt").read_text()
    for words in (
        "a quantity: a regression",
        "--task classification",
        "method full CP (exact, studentized); exact: ",
        "400 rows",
        "next: fullconformal predict",
    ):
        assert words in text


def test_predict_writes_prediction_and_ends(folder):
    out = folder / "intervals.csv"
    result = run(
        "predict", folder / "rent.safetensors", folder / "new.csv", "-o", out, "--keep", "town", "--confidence", 0.8,
        "--confidence", 0.9,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found, new = pd.read_csv(out), pd.read_csv(folder / "new.csv")
    assert list(found) == ["town", "prediction", "lower_0.8", "upper_0.8", "lower_0.9", "upper_0.9"]
    reg = fullconformal.load(folder / "rent.safetensors")
    ends = reg.predict_interval(new[["area", "floor", "town"]], [0.8, 0.9])
    # The file has six digits.
    np.testing.assert_allclose(found[["lower_0.8", "upper_0.8"]], ends[:, :, 0], rtol=1e-5)
    np.testing.assert_allclose(found[["lower_0.9", "upper_0.9"]], ends[:, :, 1], rtol=1e-5)
    covered = ((ends[:, 0, 1] <= new["rent"]) & (new["rent"] <= ends[:, 1, 1])).mean()
    assert f"{covered:.1%}" in result.output and "mean width" in result.output


def test_predict_needs_no_target_and_prints_json(folder):
    pd.read_csv(folder / "new.csv").drop(columns="rent").to_csv(folder / "unlabelled.csv", index=False)
    result = run(
        "predict", folder / "rent.safetensors", folder / "unlabelled.csv", "-o", folder / "out.csv", "--json", "--confidence", 0.999
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert facts["rows"] == 100 and facts["levels"][0]["infinite"] == 1.0 and facts["levels"][0]["mean_width"] is None
    assert "coverage" not in facts["levels"][0] and "infinite" in result.stderr


def test_inspect_describes_the_regressor(folder):
    result = run("inspect", folder / "rent.safetensors")
    assert result.exit_code == 0, result.output
    for words in ("FullConformalRegressor", "Ridge", "exact", "area, floor", "rent"):
        assert words in result.output
    assert json.loads(run("inspect", folder / "rent.safetensors", "--json").stdout)["table"]["target"] == "rent"


def test_report_writes_the_page(folder):
    result = run("report", folder / "rent.safetensors", folder / "new.csv", "-o", folder / "page.html")
    assert result.exit_code == 0, result.output
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "rent on new.csv" in page and "Intervals against the truth" in page and "town" in page


def test_compare_measures_regressors(folder):
    result = run("compare", folder / "flats.csv", "--target", "rent", "-o", folder / "figures.csv", "--confidence", 0.9)
    assert result.exit_code == 0, result.output
    assert "interval score" in result.output and "300 rows to learn from, 100 to predict" in result.output
    frame = pd.read_csv(folder / "figures.csv")
    assert {"split", "CV+"} <= set(frame.method) and "mean_width" in set(frame.metric)
    rows = json.loads(run("compare", folder / "flats.csv", "--target", "rent", "--json", "--confidence", 0.999).stdout)
    assert any(row["metric"] == "mean_width" and row["value"] is None for row in rows)


def test_the_task_decides(folder):
    """Floors are nine whole numbers: classes, unless told otherwise; rents are a quantity, unless told otherwise."""
    table = folder / "flats.csv"
    assert "classes" in run("fit", table, "--target", "floor", "-o", folder / "floor.safetensors").output
    result = run("fit", table, "--target", "floor", "-o", folder / "floor.safetensors", "--task", "regression")
    assert result.exit_code == 0 and "goes from 0 to 8" in result.output
    result = run("fit", table, "--target", "rent", "-o", folder / "x.safetensors", "--task", "classification")
    assert result.exit_code == 2 and "--task regression" in result.output
    result = run("fit", table, "--target", "town", "-o", folder / "x.safetensors", "--task", "regression")
    assert result.exit_code == 2 and "must hold numbers" in result.output


def test_whole_numbers_that_could_be_either_are_noted(folder, tmp_path):
    frame = pd.read_csv(folder / "flats.csv").assign(rooms=np.arange(400) % 15)
    frame.to_csv(tmp_path / "rooms.csv", index=False)
    result = run("fit", tmp_path / "rooms.csv", "--target", "rooms", "-o", tmp_path / "x.safetensors")
    assert "note: 'rooms' holds 15 whole numbers, taken for classes; --task regression" in result.output


def test_a_network_and_bad_options(folder, tmp_path):
    table, out = folder / "flats.csv", tmp_path / "net.safetensors"
    result = run("fit", table, "--target", "rent", "-o", out, "--model", "network", "--quiet")
    assert result.exit_code == 0 and fullconformal.load(out).predict_interval(
        pd.read_csv(folder / "new.csv")[["area", "floor", "town"]]
    ).shape == (100, 2)
    result = run("fit", table, "--target", "rent", "-o", out, "--model", "my.module:net")
    assert result.exit_code == 2 and "lr (ridge regression), forest, boosting, network" in result.output
    result = run("fit", table, "--target", "rent", "-o", out, "--method", "symmetric")
    assert result.exit_code == 2 and "auto, split, exact, oob, folds or influence" in result.output
    for options, method in (
        (("--method", "split"), "split CP; exact"),
        (("--model", "forest"), "full CP (oob); approximate"),
        (("--model", "boosting"), "full CP (folds); approximate"),
    ):
        result = run("fit", table, "--target", "rent", "-o", out, *options)
        assert result.exit_code == 0 and f"method {method}" in result.output
        result = run("predict", out, folder / "new.csv", "-o", tmp_path / "ends.csv")
        assert result.exit_code == 0 and "coverage" in result.output
    result = run("fit", table, "--target", "rnet", "-o", out)
    assert result.exit_code == 2 and "did you mean 'rent'?" in result.output
    pd.read_csv(table).assign(rent=1.5).to_csv(tmp_path / "flat.csv", index=False)
    result = run("fit", tmp_path / "flat.csv", "--target", "rent", "-o", out)
    assert result.exit_code == 2 and "only one value" in result.output


def test_the_network_of_a_quantity_is_narrower_than_no_model(folder, tmp_path):
    """Of rents in hundreds or millions alike: the target is scaled for it."""
    widths = []
    for unit in (1.0, 1e5):
        frame, new = (
            pd.read_csv(folder / name).assign(rent=lambda f, u=unit: f.rent * u) for name in ("flats.csv", "new.csv")
        )
        frame.to_csv(tmp_path / "t.csv", index=False)
        new.to_csv(tmp_path / "n.csv", index=False)
        assert (
            run("fit", tmp_path / "t.csv", "--target", "rent", "-o", tmp_path / "m", "--model", "network").exit_code
            == 0
        )
        assert run("predict", tmp_path / "m", tmp_path / "n.csv", "-o", tmp_path / "o.csv").exit_code == 0
        ends = pd.read_csv(tmp_path / "o.csv")
        widths.append((ends["upper_0.9"] - ends["lower_0.9"]).mean() / unit)
        low, high = frame.rent.quantile([0.05, 0.95])
        assert widths[-1] * unit < high - low
    np.testing.assert_allclose(widths[0], widths[1], rtol=0.05)
