"""The same numbers on a GPU as on the CPU, where there is one."""

import numpy as np
import pytest
import torch
from cases import CURVATURES, MODELS, ResNet, draw, resnet18
from torch import nn

from fullconformal import FullConformalClassifier, FullConformalRegressor, load
from fullconformal.influence.approximations import direct, indirect, newton
from fullconformal.influence.counter import direct_counts
from fullconformal.influence.prepared import prepare
from fullconformal.influence.scores import count_scores
from fullconformal.models import Autoencoder, cnn, mlp
from fullconformal.problem import Problem
from paper.recipe import Job, Recipe, hold_out, squared_errors
from paper.stacked import train_stacked

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_counts_are_those_of_the_cpu(name, curvature):
    counts = {}
    for device in ("cpu", "cuda"):
        model, X, y, Xt = draw(name, 0, n=120, m=6)
        problem = Problem(model.to(device), X.to(device), y.to(device), 2.0, chunk=50)
        factor = CURVATURES[curvature]().factor(problem)
        kept, lean = (prepare(problem, factor, memory) for memory in (2**28, 2**15))
        objects, points = Xt.to(device), torch.rand(120, generator=torch.Generator().manual_seed(0)).double().to(device)
        weight = points[:, None].expand(-1, MODELS[name][2])
        counts[device] = [
            part
            for q in (0.0, 0.5, 1.0)
            for out in (
                count_scores(direct, kept, objects, q),
                count_scores(direct, lean, objects, q, weight),
                direct_counts(kept, objects, q),
                direct_counts(kept, objects, q, points, class_conditional=True),
                direct_counts(lean, objects, q, points),
                count_scores(indirect, lean, objects, q),
                count_scores(newton, lean, objects, q),
            )
            for part in (out.greater, out.equal)
        ]
    for ours, theirs in zip(counts["cpu"], counts["cuda"], strict=True):
        assert np.abs(ours - theirs).max() < 1e-9


@pytest.mark.parametrize("method", ["influence", "symmetric", "exact"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_methods_give_the_same_p_values(method, n_classes):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 5)), rng.integers(0, n_classes, 200)
    p = [FullConformalClassifier(method=method, device=d).fit(X, y).predict_p(X[:20]) for d in ("cpu", "cuda")]
    assert np.abs(p[0] - p[1]).max() < 1e-9


def test_a_network_trains_on_the_gpu_by_default():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 5)), rng.integers(0, 3, 300)
    clf = FullConformalClassifier(mlp(5, (8,), 3), method="influence", max_epochs=5, random_state=0).fit(X, y)
    assert clf._fitted.problem.X.is_cuda
    assert clf.predict_p(X[:7]).shape == (7, 3)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_networks_trained_together_are_those_of_the_cpu(kind):
    shape = (6,) if kind == "mlp" else (1, 8, 8)
    factory = (lambda: mlp(6, (8,), 3)) if kind == "mlp" else (lambda: cnn((1, 8, 8), 3, (2,), 3, 2, 2))
    X = torch.randn(1, 90, *shape, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(90) % 3
    jobs = [Job(seed, *hold_out(torch.arange(90), 0.2, seed)) for seed in range(5)]
    found = {
        device: train_stacked(factory, X.to(device), y.to(device), jobs, {}, Recipe(0.02, 16, 15, patience=3))
        for device in ("cpu", "cuda")
    }
    for a, b in zip(found["cpu"], found["cuda"], strict=True):
        assert a.epochs == b.epochs
        for one, other in zip(a.model.parameters(), b.model.parameters(), strict=True):
            torch.testing.assert_close(one, other.cpu(), rtol=1e-7, atol=1e-8)


def test_dropout_differs_from_step_to_step_in_a_recorded_graph():
    X = torch.rand(200, 12, device="cuda")
    jobs = [Job(seed, *hold_out(torch.arange(200), 0.2, seed)) for seed in range(2)]
    found = train_stacked(lambda: Autoencoder(12, 2, (16,)), X[None], X, jobs, {}, Recipe(1e-2, 20, 30), squared_errors)
    assert all(t.loss < float(X.var()) for t in found)


def larger(name):
    """Networks whose matrices span several stripes, blocks and chunks."""
    if name == "mlp":
        return mlp(32, (60, 30), 10), (32,)
    conv = [nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(4, 2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(200, 10)), (3, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_larger_networks_give_the_counts_of_the_cpu(name, dtype):
    """float64: the same counts. float32: a score moves by about 1e-5 of its size, so a few of 3,000 neighbours change sides."""
    torch.manual_seed(0)
    model, shape = larger(name)
    X, y, Xt = torch.randn(3000, *shape, dtype=dtype), torch.randint(10, (3000,)), torch.randn(120, *shape, dtype=dtype)
    model = model.to(dtype).eval()
    counts = {}
    for device in ("cpu", "cuda"):
        problem = Problem(model.to(device), X.to(device), y.to(device), 3.0)
        factor = CURVATURES["ggn"](0.01).factor(problem)
        assert factor.inverted == (device == "cuda")
        prepared = prepare(problem, factor, 2**32)
        out = [direct_counts(prepared, Xt.to(device), q) for q in (1.0, 0.5)]
        out.append(count_scores(direct, prepared, Xt[:10].to(device), 1.0))
        # In float32 a pair whose scores differ by just what is granted to rounding may fall on either side of that.
        assert np.abs(out[0].greater[:10] - out[2].greater).max() <= (dtype == torch.float32)
        counts[device] = np.concatenate([part for c in out for part in (c.greater, c.greater + c.equal)])
    difference = np.abs(counts["cpu"] - counts["cuda"])
    assert difference.max() <= (1e-9 if dtype == torch.float64 else 30)
    assert difference.mean() <= 1


def test_settings_of_tf32_are_given_back():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    model, shape = larger("cnn")
    X, y = torch.randn(50, *shape, device="cuda"), torch.randint(10, (50,), device="cuda")
    CURVATURES["ggn"](0.1).factor(Problem(model.cuda().eval(), X, y, 1.0))
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


@pytest.mark.parametrize("curvature", ["ggn", "last_layer", "last_layer_kron"])
def test_a_saved_predictor_moves_between_devices(curvature, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 5)).astype(np.float32)
    y = np.array(["a", "b", "c"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0)]
    clf = FullConformalClassifier(mlp(5, (8,), 3), max_epochs=5, curvature=curvature, device="cuda").fit(
        X[:120], y[:120]
    )
    clf.save(tmp_path / "it")
    p = clf.predict_p(X[120:])
    here = load(tmp_path / "it")
    assert here._fitted.device.type == "cuda" and np.array_equal(here.predict_p(X[120:]), p)
    there = load(tmp_path / "it", device="cpu")
    # float32 (float16 features with the Kronecker curvature on CUDA) may order near ties otherwise: few points, of 121.
    assert there._fitted.device.type == "cpu" and np.abs(there.predict_p(X[120:]) - p).max() <= 3 / 121
    there.save(tmp_path / "back")
    assert np.abs(load(tmp_path / "back", device="cuda").predict_p(X[120:]) - p).max() <= 3 / 121


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_residual_network_gives_the_same_p_values(curvature):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 1, 6, 6)), rng.integers(0, 3, 60)
    torch.manual_seed(0)
    net = ResNet().double().eval()
    options = {"prefit": True, "l2": 0.1, "curvature": curvature}
    p = [FullConformalClassifier(net, device=d, **options).fit(X, y).predict_p(X[:20]) for d in ("cpu", "cuda")]
    assert np.abs(p[0] - p[1]).max() < 1e-9


@pytest.mark.parametrize("method", ["influence", "symmetric", "exact"])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_wide_tables_give_the_same_p_values(method, n_classes, tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 90)), np.arange(30) % n_classes
    p = []
    for device in ("cpu", "cuda"):
        clf = FullConformalClassifier(method=method, l2=0.1, device=device).fit(X[:30], y)
        p.append(clf.predict_p(X[30:]))
        span = clf._fitted.span if method == "influence" else clf._fitted.regression.span
        assert span.r == 30
    assert np.array_equal(*p)
    clf.save(tmp_path / "it")
    assert np.array_equal(load(tmp_path / "it").predict_p(X[30:]), p[1])


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_heads_on_many_features_give_the_same_p_values(method):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 5)), np.arange(30) % 3
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 90), nn.Tanh(), nn.Linear(90, 3)).double()
    options = {"prefit": True, "l2": 0.1, "method": method, "head": "auto"}
    p = [FullConformalClassifier(net, device=d, **options).fit(X[:30], y).predict_p(X[30:]) for d in ("cpu", "cuda")]
    assert np.array_equal(*p)


def test_ekfac_keeps_to_its_memory_budget():
    """700,000 parameters and 4,000 points: rows of 5.6 GB in half precision, 2 GiB for all."""
    rng, budget = np.random.default_rng(0), 2.0
    X, y = rng.normal(size=(4100, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, 4000)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    clf = FullConformalClassifier(
        resnet18(16), prefit=True, curvature="ekfac", damping=1.0, memory_budget=budget, device="cuda"
    ).fit(X[:4000], y)
    p = clf.predict_p(X[4000:])
    assert ((p > 0) & (p <= 1)).all()
    assert budget / 2 < (torch.cuda.max_memory_allocated() - before) / 2**30 <= budget


@pytest.mark.parametrize("curvature", ["ggn", "dual", "ekfac", "kfac", "last_layer"])
def test_intervals_of_networks_are_those_of_the_cpu(curvature, tmp_path):
    """Prefit, so that training does not differ; in float64, with Jacobians kept and formed again, and after a move."""
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(150, 4)), rng.normal(size=(12, 4))
    y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=150)
    network = mlp(4, (8,), 1).double()
    found = {}
    for device in ("cpu", "cuda"):
        # The dual itself needs more.
        for memory in (1.0,) if curvature == "dual" else (1.0, 1e-4):
            reg = FullConformalRegressor(
                network,
                method="influence",
                prefit=True,
                curvature=curvature,
                l2=0.05,
                device=device,
                memory_budget=memory,
            )
            reg.fit(X, y)
            for scheme in ("ordinary", "studentized", "deleted"):
                found[device, memory, scheme] = reg.set_params(scheme=scheme).predict_interval(new, [0.8, 0.9])
        reg.save(tmp_path / device)
        np.testing.assert_allclose(
            load(tmp_path / device).predict_interval(new, [0.8, 0.9]), found[device, memory, scheme], rtol=1e-7
        )
    for (_, memory, scheme), ends in found.items():
        np.testing.assert_allclose(ends, found["cpu", 1.0, scheme], rtol=1e-7, atol=1e-9, err_msg=f"{memory} {scheme}")


def test_a_network_for_intervals_trains_on_the_gpu():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(400, 3)).astype(np.float32)
    y = X[:, 0] ** 2 + 0.2 * rng.normal(size=400)
    reg = FullConformalRegressor(mlp(3, (20,), 1), method="influence", random_state=0).fit(X[:300], y[:300])
    low, high = reg.predict_interval(X[300:]).T
    # A binomial band of four standard deviations, for 100 objects and 300 points.
    assert abs(((low <= y[300:]) & (y[300:] <= high)).mean() - 0.9) < 4 * (0.09 * (1 / 100 + 1 / 300)) ** 0.5
