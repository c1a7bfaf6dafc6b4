"""The paper's runner and page: configs, resuming after a kill, tables that say what the lines say."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind_from_stats
from sklearn.linear_model import LogisticRegression

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.models import linear
from fullconformal.sets import members
from paper import claims, config, figures, logistic, page, run, synthetic, tables
from paper.inputs import Inputs
from paper.methods import Lookup, Setting, by_folds
from paper.records import Records, read_lines
from paper.training import Network, parts, stacks

ROOT = Path(__file__).parents[1]
TINY = """
kind = "real"
data = "digits"
models = ["MLP_A"]
autoencoder = false
seeds = [0, 1]
n_train = 300
n_test = 110
max_epochs = 6
ours_epochs = 5
n_symmetric = 3
symmetric_l2 = 0.05
"""


@contextmanager
def quiet():
    """A network trained on 300 points warns of itself in every way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A run of a tiny config, its folder and its config file."""
    folder = tmp_path_factory.mktemp("paper")
    path = folder / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    with quiet():
        run.main([str(path), "--out", str(folder / "whole"), "--device", "cpu"])
    return folder, path


# Configs ---------------------------------------------------------------------------------------------------------------


def test_every_config_loads_in_both_sizes():
    for path in config.CONFIGS.glob("*.toml"):
        whole, small = config.load(path), config.load(path, small=True)
        assert whole.name == path.stem and config.key(whole) != config.key(small)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "real"\ndata = "digits"\nepochs = 3', "x.toml: the key 'epochs' is unknown; allowed: .*max_epochs"),
        ('kind = "real"\ndata = "digits"\n[small]\nn_trian = 3', "the key 'n_trian' is unknown"),
        ('kind = "imaginary"', "kind='imaginary' is unknown; allowed: 'real', 'synthetic'"),
        ('kind = "synthetic"', "missing 1 required positional argument: 'measure'"),
    ],
)
@pytest.mark.parametrize("small", [True, False])
def test_unknown_keys_raise(tmp_path, text, message, small):
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        config.load(path, small)


def test_a_bad_config_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('kind = "real"\ndata = "digits"\nepochs = 3', encoding="utf-8")
    with pytest.raises(ValueError, match="'epochs' is unknown"):
        run.main(["features", str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


# The run ---------------------------------------------------------------------------------------------------------------


def test_a_run_writes_a_line_for_every_model_method_and_seed(tiny):
    folder, path = tiny
    settings = config.load(path)
    lines = read_lines(folder / "whole" / "results.jsonl")
    assert {(line["model"], line["method"], line["seed"]) for line in lines} == {
        (model, method, seed) for model in settings.models for method in settings.methods for seed in settings.seeds
    }
    for line in lines:
        assert "failed" not in line
        assert line["n"] == 300 and line["all"]["m"] == (3 if line["method"] == "symmetric" else 110)
        assert {"torch", "numpy"} <= set(line["versions"]) and line["hardware"]["device"] == "CPU"
        with np.load(folder / "whole" / line["arrays"]) as arrays:
            epsilon = arrays["epsilon"]
        assert line["curve"]["size"][10] == pytest.approx((epsilon > 0.1 + 1e-7).sum(1).mean(), abs=1e-4)


def test_a_killed_run_goes_on_to_the_same_results(tiny):
    folder, path = tiny
    out = folder / "killed"
    command = [sys.executable, "-m", "paper.run", str(path), "--out", str(out), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    results, deadline = out / "results.jsonl", time.monotonic() + 120
    while len(read_lines(results)) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(read_lines(results))
    whole = {line["key"]: line for line in read_lines(folder / "whole" / "results.jsonl")}
    assert 4 <= kept < len(whole)
    with results.open("a", encoding="utf-8") as file:
        file.write('{"key": "tiny-MLP_A-cut sho')  # as a kill in the middle of a line leaves it
    with quiet():
        run.main([str(path), "--out", str(out), "--device", "cpu"])
    lines = read_lines(results)
    assert len(lines) == len(whole)
    for line in lines:
        for part in ("first", "all", "curve", "p", "epochs", "accuracy"):
            assert line[part] == whole[line["key"]][part], (line["key"], part)


def test_what_failed_is_told_and_tried_again(tiny, monkeypatch):
    folder, path = tiny
    monkeypatch.setitem(run.METHODS, "scp", lambda setting: 1 / 0)
    with quiet(), pytest.raises(SystemExit):
        run.main([str(path), "--out", str(folder / "failing"), "--device", "cpu"])
    lines = read_lines(folder / "failing" / "results.jsonl")
    failed = [line for line in lines if "failed" in line]
    assert {line["method"] for line in failed} == {"scp"} and "division by zero" in failed[0]["failed"]
    text = page.build(folder / "failing").read_text(encoding="utf-8")
    assert "What failed" in text and "division by zero" in text
    monkeypatch.undo()
    with quiet():
        run.main([str(path), "--out", str(folder / "failing"), "--device", "cpu"])
    assert not [line for line in read_lines(folder / "failing" / "results.jsonl") if "failed" in line]


def test_roles_share_nothing_with_what_they_leave_out():
    settings = config.Real("x", "digits")
    found = parts(settings, 103, 4) | parts(settings, 103, 4, 5)
    every = set(range(103))
    for role, (train, rest) in found.items():
        assert set(train) | set(rest) == every and not set(train) & set(rest), role
    assert len(found["whole"][0]) == 103 and len(found["split"][1]) == 21
    assert sorted(np.concatenate([found[f"fold {k} of 5"][1] for k in range(1, 6)])) == sorted(every)


def test_folds_score_points_and_candidates_by_a_network_that_has_not_seen_them():
    settings, rng = config.Real("x", "digits", seeds=(3,), full_folds=3), np.random.default_rng(0)
    X, y, objects = rng.normal(size=(14, 4)), rng.integers(0, 3, 14), rng.normal(size=(5, 4))
    inputs = Inputs(torch.tensor(X)[None], torch.tensor(objects)[None], y, rng.integers(0, 3, 5), 3)
    left_out = parts(settings, 14, 3, 3)
    networks = {(3, role): Network(linear(4, 3).double(), *part, 1, 0.0) for role, part in left_out.items()}
    p = by_folds(Setting(settings, "MLP_A", inputs, networks, 3, "cpu", 1.0)).epsilon
    proba = [torch.softmax(net.model(torch.tensor(np.vstack([X, objects]))), -1).detach() for net in networks.values()]
    fold = [k for j in range(14) for k, (_, rest) in enumerate(left_out.values()) if j in rest]
    drawn = np.random.default_rng(3).integers(3, size=5)
    for i, label in product(range(5), range(3)):
        candidate = proba[drawn[i]][14 + i, label]
        less = sum(proba[fold[j]][j, y[j]] <= candidate for j in range(14))
        assert p[i, label] == pytest.approx((1 + int(less)) / 15)


def test_networks_that_no_method_needs_are_not_trained():
    settings = config.Real("x", "digits")
    assert stacks(settings, "LR", ["folds"]) == [10] and stacks(settings, "CNN", ["folds", "cv_plus"]) == [5]
    assert stacks(settings, "LR", ["ours"]) == [] and stacks(settings, "LR", ["scp", "cv_plus"]) == [None, 5]


def test_the_lookup_answers_with_the_network_that_has_not_seen_the_fold():
    tables_ = [np.full((6, 2), k / 10) for k in range(3)]
    folds = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    rows = np.array([[0.0], [1.0], [4.0], [5.0]])
    assert Lookup(tables_, folds).fit(rows, np.array([0, 1, 0, 1])).predict_proba(rows)[0, 0] == 0.1


# Synthetic data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "l2"), [(40, 0.02), (12, 1e-4)])  # the second is all but separable: refits one by one
def test_exact_scores_are_those_of_refits(n, l2):
    settings = config.Synthetic("x", "scores", n=(n,), features=(4,), n_test=2)
    X, y, X_test, _ = synthetic.bag_of(settings, n, 4, 0)
    bag = logistic.fit(synthetic.with_intercept(X), y, n * l2)
    found = logistic.exact_scores(bag, np.append(X_test[0], 1.0), 1, width=7)
    for i in (0, n // 3, n - 1):
        keep = np.arange(n) != i
        model = LogisticRegression(C=1 / (n * l2), tol=1e-10, max_iter=10_000)
        model.fit(np.vstack([X[keep], X_test[:1]]), np.append(y[keep], 1))
        assert found[i] == pytest.approx(-model.predict_log_proba(X[i : i + 1])[0, y[i]], abs=1e-6)


@pytest.mark.parametrize("approximation", ["direct", "indirect", "exact"])
def test_scores_of_the_figures_give_the_p_values_of_the_library(approximation):
    settings = config.Synthetic("x", "scores", n=(50,), features=(4,), n_test=4)
    X, y, X_test, _ = synthetic.bag_of(settings, 50, 4, 0)
    exact = approximation == "exact"
    options = {"method": "exact"} if exact else {"method": "influence", "approximation": approximation}
    p = FullConformalClassifier(l2=0.02, **options).fit(X, y).predict_p(X_test)
    bag, objects = logistic.fit(synthetic.with_intercept(X), y, 50 * 0.02), synthetic.with_intercept(X_test)
    for label in (0, 1):
        if exact:
            scores = np.stack([logistic.exact_scores(bag, x, label) for x in objects])
        else:
            scores = logistic.influence_scores(bag, objects, label)[approximation]
        own = logistic.losses(objects @ bag.theta, np.full(len(objects), label))
        np.testing.assert_allclose(p[:, label], (1 + (scores >= own[:, None]).sum(1)) / 51)


def test_small_synthetic_runs_compare_with_exact(tmp_path):
    settings = config.Synthetic("features", "scores", n=(60, 200), features=(5,), n_test=3, seeds=(0,))
    records = Records(tmp_path)
    run.run(settings, records, run.Machine(tell=lambda text: None))
    near = [line["found"]["direct"][0] for line in records.lines]
    assert near[1] < near[0] / 3  # the error falls like 1/n and faster
    assert all(line["found"]["cone_as_printed"] < 0.05 for line in records.lines)
    before = len(records.lines)
    run.run(settings, Records(tmp_path), run.Machine(tell=pytest.fail))
    assert before == len(read_lines(tmp_path / "results.jsonl"))


# The page --------------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_lines_say(tiny):
    folder, _ = tiny
    text = page.build(folder / "whole").read_text(encoding="utf-8")
    lines = read_lines(folder / "whole" / "results.jsonl")
    values = [line["all"]["size_auc"][0] for line in lines if (line["model"], line["method"]) == ("MLP_A", "scp")]
    assert f"{np.mean(values):.3f} ±" in text
    assert "Efficiency AUC, ε in [0, 0.2]: digits" in text and "300 training points, 110 test points" in text
    assert (folder / "whole" / "figures" / "sizes-digits.png").read_bytes().startswith(b"\x89PNG")


def fake(data, model, method, seed, auc, se=0.01, error=0.2, m=100, **more):
    """A line with the numbers that tables read."""
    part = {"m": m, "size_auc": [auc, se], "fuzziness": [auc, se]}
    part |= {f"error@{level}": [error, 0.04] for level in (0.05, 0.1, 0.2)}
    return {
        "key": f"{data}-{model}-{method}-{seed}", "experiment": data, "data": data, "model": model, "method": method, "seed": seed,
        "n": 500, "p": 10, "first": part, "all": part, "curve": {"size": [1.0] * 101}, "note": "47 of the 103 rows",
        "seconds": {"train": 1.0, "fit": 0.5, "predict": 0.1}, "hardware": {"device": "CPU", "cpu": "x", "cores": 2, "threads": 1},
        "versions": {"torch": "2"}, **more,
    }  # fmt: skip


def test_cells_hold_means_the_papers_value_and_the_note(tmp_path):
    lines = [fake("MNIST", "LR", "acp_d", seed, auc) for seed, auc in enumerate((0.30, 0.32, 0.34))]
    lines += [fake("MNIST", "LR", "scp", seed, 0.40) for seed in range(3)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = page.build(tmp_path).read_text(encoding="utf-8")
    # √(0.01² + (0.02²)/3) = 0.0153
    assert "0.320 ± 0.015" in text and "paper: .385" in text and "47 of the 103 rows" in text
    said = "ACP (D) has the smaller area in 1 of 1 settings (the paper: 0 of these), significantly by Welch"
    assert "0.400 ± 0.010*" in text and said in text


def test_small_sets_that_err_too_often_are_marked_and_not_bold(tmp_path):
    lines = [fake("MNIST", "LR", "ours", seed, 0.1, error=0.3) for seed in range(3)]
    lines += [fake("MNIST", "LR", "scp", seed, 0.4, error=0.12) for seed in range(3)]
    (table,) = [tables.comparison(lines, "MNIST", "size_auc", "x", ["scp", "ours"])]
    scp, ours = table.rows[0][1]
    assert ours.all.endswith("‡") and not ours.best and scp.best and "‡" not in scp.all


def test_the_exactly_valid_head_is_judged_beside_split_on_its_own_points():
    same = {"m": 50, "error@0.2": [0.33, 0.02]}
    lines = [fake("MNIST", "LR", "scp", seed, 0.4, error=0.2, same=same) for seed in range(3)]
    lines += [fake("MNIST", "LR", "symmetric", seed, 0.4, error=0.3, m=50) for seed in range(3)]
    found = " ".join(claims.valid(lines).found)
    assert "MNIST LR 0.300, SCP on the same 50 points 0.330" in found
    lines = [line | {"same": same | {"m": 40}} for line in lines]
    assert "on the same" not in " ".join(claims.valid(lines).found)


def test_times_are_a_claim_of_their_own():
    line = {
        "experiment": "times",
        "measure": "p_values",
        "n": 1000,
        "features": 50,
        "data": "synthetic",
        "hardware": {"cpu": "x", "threads": 1},
    }
    line["found"] = {"m": 100, "seconds": {"exact": 0.5, "acp": 0.04}, "distance": [1.0, 0.1]}
    assert "exact full CP 0.50 s, ACP 0.040 s" in claims.faster([line]).found[0]
    assert not claims.p_values_close([line]).found and not figures.synthetic([line], Path("nowhere"))


def test_later_lines_replace_earlier_ones():
    lines = [fake("MNIST", "LR", "scp", 0, 0.5), fake("MNIST", "LR", "scp", 0, 0.4)]
    assert [line["all"]["size_auc"][0] for line in tables.latest(lines)] == [0.4]


def test_welch_is_scipys():
    a, b = tables.Mean(1.0, 0.05, 100, 3), tables.Mean(0.9, 0.03, 80, 3)
    expected = ttest_ind_from_stats(
        1.0, 0.05 * 10, 100, 0.9, 0.03 * 80**0.5, 80, equal_var=False, alternative="greater"
    )
    assert tables.welch(a, b) == pytest.approx(expected.pvalue)


def test_the_papers_numbers_are_complete():
    said = tables.printed()
    counts = {data: (len(rows), {len(row) for row in rows.values()}) for data, rows in said["size_auc"].items()}
    assert counts == {"ACSIncome": (4, {5}), "MNIST": (5, {5}), "CIFAR-10": (5, {5})}
    assert {data: len(rows) for data, rows in said["fuzziness"].items()} == {"MNIST": 5, "CIFAR-10": 5, "ACSIncome": 4}
    assert len(said["validity"]["CIFAR-10"]) == 5


def test_curves_are_those_of_the_sets():
    epsilon = np.array([[0.5, 0.105], [0.3, 0.02]])
    found = run.curves(epsilon, np.array([1, 0]))
    assert found["size"][10] == members(epsilon, 0.1).sum(1).mean() == 1.5
    assert found["error"][20] == 0.5
