"""The examples run, on data small enough for a test."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_resnet_on_a_few_images(tmp_path):
    rng = np.random.RandomState(0)
    y = rng.randint(0, 10, 120)
    X = np.clip(rng.randint(0, 60, (120, 3, 32, 32)) + 20 * y[:, None, None, None], 0, 255).astype(np.uint8)
    np.savez(tmp_path / "train_1.npz", X=X[:50], y=y[:50])
    np.savez(tmp_path / "train_2.npz", X=X[50:100], y=y[50:100])
    np.savez(tmp_path / "test.npz", X=X[100:], y=y[100:])
    example = load("resnet_cifar")
    out, networks = tmp_path / "rows.json", tmp_path / "networks"
    arguments = ["--data", str(tmp_path), "--out", str(out), "--networks", str(networks), "--part", "12"]
    arguments += ["--epochs", "2", "--batch", "20", "--width", "4", "--device", "cpu"]
    assert [row["method"] for row in example.main([*arguments, "--methods", "split", "last_layer"])] == [
        "split",
        "last_layer",
    ]
    files = {path: path.stat().st_mtime_ns for path in networks.iterdir()}
    assert len(files) == 2
    (row,) = [row for row in example.main([*arguments, "--methods", "folds2"]) if row["method"] == "folds2"]
    assert row["trainings"] == 2 and row["test_points"] == 20 and row["fit_seconds"] > 0.9 * row["training_seconds"]
    for path in set(networks.iterdir()) - set(files):
        path.unlink()
    rows = example.main([*arguments, "--methods", "ekfac"])  # another call, which trains nothing
    assert {path: path.stat().st_mtime_ns for path in networks.iterdir()} == files
    assert [row["method"] for row in rows] == ["split", "last_layer", "folds2", "ekfac"]
    assert all(row["test_points"] == 20 and row["training_seconds"] > 0 for row in rows)
    assert all(row["fit_seconds"] > 0 and row["predict_p_seconds"] > 0 for row in rows[1:])
    assert [part["test_points"] for part in rows[3]["parts"]] == [12, 8]
    assert json.loads(out.read_text())["rows"] == rows
    with np.load(out.with_suffix(".npz")) as arrays:
        p = dict(arrays)
    assert p["split"].shape == p["ekfac"].shape == (20, 10)
    # Stopped after the first part, a run goes on with the second.
    stopped = {**p, "ekfac": np.where(np.arange(20)[:, None] < 12, p["ekfac"], np.nan)}
    np.savez(out.with_suffix(".npz"), **stopped)
    again = example.main(arguments)
    assert [part["test_points"] for part in again[3]["parts"]] == [12, 8, 8]
    with np.load(out.with_suffix(".npz")) as arrays:
        assert all(np.array_equal(arrays[name], p[name]) for name in p)
    with pytest.raises(SystemExit, match="another --out"):
        example.main([*arguments, "--seed", "1"])


def test_resnet18_has_eleven_million_parameters():
    model = load("resnet_cifar").resnet18()
    assert sum(q.numel() for q in model.parameters()) == 11_173_962
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_images_are_moved_by_at_most_four_pixels_and_mirrored():
    moved = load("resnet_cifar").moved
    image = torch.arange(32 * 32.0).view(1, 1, 32, 32).repeat(50, 3, 1, 1)
    out = moved(image, torch.Generator().manual_seed(0))
    slopes = (out[:, 0, 16, 17] - out[:, 0, 16, 16]).tolist()
    assert set(slopes) == {1.0, -1.0}  # neighbours stay neighbours, in either order
    kept = out[:, 0, 16, 16] // 32 - 16
    assert kept.abs().max() <= 4 and len(kept.unique()) == 9
