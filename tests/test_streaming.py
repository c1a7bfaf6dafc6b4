"""Training points from datasets, loaders and memory-mapped files: the same p-values as from arrays, in bounded memory."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from fullconformal import FullConformalClassifier
from fullconformal.losses.base import NotFinite
from fullconformal.models import linear, mlp

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
CURVATURES = ["last_layer_kron", "last_layer"]


def data(n=300, m=12, d=6, n_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + m, d))
    y = (X[:, :n_classes] + 0.7 * rng.normal(size=(n + m, n_classes))).argmax(1)
    return X[:n], y[:n], X[n:], y[n:]


def network(d=6, n_classes=3, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp(d, (10,), n_classes).double()


def classifier(curvature="last_layer_kron", **options):
    return FullConformalClassifier(network(), prefit=True, curvature=curvature, l2=0.01, device="cpu", **options)


def dataset(X, y):
    return TensorDataset(torch.as_tensor(X), torch.as_tensor(y))


class Lines(IterableDataset):
    """A dataset that cannot be indexed, and knows its length only where told."""

    def __init__(self, X, y):
        self.X, self.y = X, y

    def __iter__(self):
        return iter(zip(self.X, self.y, strict=True))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_source_gives_the_p_values_of_arrays(curvature, tmp_path):
    X, y, Xt, _ = data()
    expected = classifier(curvature).fit(X, y).predict_p(Xt)
    shuffled = torch.Generator().manual_seed(1)
    sources = {
        "dataset": dataset(X, y),
        "loader": DataLoader(dataset(X, y), batch_size=37),
        "shuffling loader": DataLoader(dataset(X, y), batch_size=64, shuffle=True, generator=shuffled),
        "iterable": Lines(X, y),
        "batched iterable": DataLoader(
            Lines(torch.as_tensor(X).split(41), torch.as_tensor(y).split(41)), batch_size=None
        ),
    }
    for name, source in sources.items():
        clf = classifier(curvature).fit(source)
        assert np.abs(clf.predict_p(Xt) - expected).max() < 1e-12, name
        assert clf.classes_.tolist() == [0, 1, 2]
        assert np.allclose(clf.predict_proba(Xt).sum(1), 1)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    assert np.abs(classifier(curvature).fit(mapped, y).predict_p(Xt) - expected).max() < 1e-12


def test_the_exact_last_layer_streams_to_what_it_is_without():
    """Streaming keeps features where arrays keep objects; the p-values are the same."""
    X, y, Xt, _ = data()
    for scheme in ("deleted", "studentized", "ordinary"):
        a, b = (
            classifier("last_layer", scheme=scheme).fit(X, y),
            classifier("last_layer", scheme=scheme).fit(dataset(X, y)),
        )
        assert np.abs(a.predict_p(Xt) - b.predict_p(Xt)).max() < 1e-12
        assert b.diagnose().newton_decrement == pytest.approx(a.diagnose().newton_decrement)


@pytest.mark.parametrize("scheme", ["deleted", "studentized", "ordinary"])
def test_the_kronecker_layer_is_near_the_exact_one(scheme):
    """It approximates the same matrix: p-values differ on average by a few per cent at most."""
    X, y, Xt, _ = data(n=600, m=60)
    p = [classifier(c, scheme=scheme).fit(X, y).predict_p(Xt) for c in CURVATURES]
    assert np.abs(p[0] - p[1]).mean() < 0.03


def test_a_model_fitted_here_covers():
    X, y, Xt, yt = data(n=500, m=400)
    for estimator in (None, mlp(6, (8,), 3)):
        clf = FullConformalClassifier(
            estimator, method="influence", curvature="last_layer_kron", max_epochs=20, random_state=0, device="cpu"
        ).fit(X, y)
        covered = clf.predict_set(Xt)[np.arange(400), yt].mean()
        assert covered > 0.9 - 4 * (0.09 / 400) ** 0.5  # four standard errors


def test_options_of_p_values():
    X, y, Xt, _ = data()
    w = np.random.default_rng(0).uniform(0.5, 2, 300), np.ones(12)
    clf = classifier().fit(X, y)
    plain = clf.predict_p(Xt)
    assert np.allclose(clf.predict_p(Xt, weights=(np.ones(300), np.ones(12))), plain)
    assert not np.allclose(clf.predict_p(Xt, weights=w), plain)
    assert (clf.predict_p(Xt, smoothing=True) <= plain).all()
    assert np.array_equal(clf.set_params(prune=False).predict_p(Xt), plain)
    by_class = clf.set_params(class_conditional=True, prune="auto").predict_p(Xt)
    ranks = by_class * (np.bincount(y) + 1)
    assert np.allclose(ranks, np.round(ranks), atol=1e-9)
    assert clf.recalibrate(*data(seed=3)[2:]).predict_p(Xt).shape == (12, 3)


def test_class_conditional_and_weights_are_those_of_the_matrix_of_weights():
    """The engine takes their parts; the p-values are those of the (n, C) matrix, by the scores of a plain run."""
    X, y, Xt, _ = data(n=200)
    w = np.random.default_rng(0).uniform(0.5, 2, 200)
    clf = classifier(class_conditional=True).fit(X, y)
    got = clf.predict_p(Xt, weights=(w, np.ones(12)))
    for label in range(3):
        # Of one label alone: the others' weights are zero.
        alone = clf.set_params(class_conditional=False).predict_p(Xt, weights=(w * (y == label), np.ones(12)))
        assert np.allclose(got[:, label], alone[:, label], atol=1e-12)


def test_a_fitted_predictor_needs_no_training_objects():
    X, y, Xt, _ = data()
    source = torch.as_tensor(X).clone()
    clf = classifier().fit(TensorDataset(source, torch.as_tensor(y)))
    expected = clf.predict_p(Xt)
    source.zero_()
    assert np.array_equal(clf.predict_p(Xt), expected)
    with pytest.raises(ValueError, match="training points were not kept"):
        clf.audit(Xt)


def test_a_stream_after_arrays_of_another_size():
    X, y, Xt, _ = data()
    wide = mlp(9, (10,), 3).double()
    clf = classifier().fit(X, y).set_params(estimator=wide).fit(dataset(np.c_[X, X[:, :3]], y))
    assert clf.predict_p(np.c_[Xt, Xt[:, :3]]).shape == (12, 3)


def test_images_and_layers_without_bias():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5, bias=False)).eval()
    X, y = torch.randn(80, 1, 6, 6), torch.randint(5, (80,))
    clf = FullConformalClassifier(net, prefit=True, curvature="last_layer_kron", device="cpu").fit(TensorDataset(X, y))
    assert clf.predict_p(X[:7]).shape == (7, 5)
    with pytest.raises(ValueError, match="objects of shape"):
        clf.predict_p(X[:7, :, :5])


class Pairs(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


def bad_sources():
    X, y, _, _ = data(n=40)
    tensor, labels = torch.as_tensor(X), torch.as_tensor(y)
    good = dataset(X, y)
    no_outputs = labels.clone()
    no_outputs[17] = 3
    infinite = tensor.clone()
    infinite[35, 2] = torch.nan
    uneven = [(x, label) for x, label in zip(tensor, labels, strict=True)]
    ragged = [(tensor[:20], labels[:20]), (tensor[20:, :5], labels[20:])]
    return {
        "no labels": (TensorDataset(tensor), "pairs .objects, labels., got 1 parts"),
        "bare tensors": (Pairs(list(tensor)), "pairs .objects, labels., got Tensor"),
        "empty": (TensorDataset(tensor[:0], labels[:0]), "yields no points"),
        "empty iterable": (Lines([], []), "yields no points"),
        "a label without an output": (
            TensorDataset(tensor, no_outputs),
            "label 3, which the estimator has no output for",
        ),
        "a negative label": (TensorDataset(tensor, labels - 1), "label -1"),
        "labels that are no indices": (TensorDataset(tensor, labels + 0.5), "whole-number labels"),
        "single points": (DataLoader(good, batch_size=None), "makes batches"),
        "other shapes": (DataLoader(Lines(*zip(*ragged, strict=True)), batch_size=None), "of shape .5,. after others"),
        "objects of another size": (TensorDataset(tensor[:, :4], labels), "does not take objects of shape"),
        "left out": (DataLoader(good, batch_size=33, drop_last=True), "yielded 33 of its 40 points"),
        "drawn": (DataLoader(good, sampler=WeightedRandomSampler(torch.ones(40), 40)), "with replacement"),
        "not finite": (DataLoader(TensorDataset(infinite, labels), batch_size=10), "not finite on points 30 to 39"),
        "uneven": (
            DataLoader(Pairs(uneven), batch_size=7, collate_fn=lambda b: (torch.stack([x for x, _ in b]), labels[:2])),
            "k,",
        ),
    }


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("name", bad_sources())
def test_bad_sources_are_named(name, curvature):
    source, message = bad_sources()[name]
    with pytest.raises((ValueError, NotFinite), match=message):
        classifier(curvature).fit(source)


@pytest.mark.parametrize(
    ("options", "y", "message"),
    [
        ({"prefit": False}, None, "prefit=True"),
        ({"curvature": "ggn"}, None, "curvature='last_layer_kron' or 'last_layer'"),
        ({"curvature": "auto"}, None, "curvature='last_layer_kron' or 'last_layer'"),
        ({"method": "exact", "prefit": True}, None, "method='influence'"),
        ({}, [0, 1], "leave y out"),
        ({"approximation": "newton"}, None, "approximation='newton'"),
    ],
)
def test_options_that_do_not_go_with_a_stream(options, y, message):
    X, labels, _, _ = data(n=40)
    with pytest.raises(ValueError, match=message):
        classifier().set_params(**options).fit(dataset(X, labels), y)


def test_other_refusals():
    X, y, Xt, _ = data()
    with pytest.raises(ValueError, match="one output per class"):
        FullConformalClassifier(linear(6, 2).double(), prefit=True, curvature="last_layer_kron", device="cpu").fit(
            X, y % 2
        )
    clf = classifier().fit(DataLoader(dataset(X, y), batch_size=50, shuffle=True))
    with pytest.raises(ValueError, match="shuffled"):
        clf.predict_p(Xt, weights=(np.ones(300), np.ones(12)))
    with pytest.raises(ValueError, match="approximation='indirect'"):
        clf.set_params(approximation="indirect").predict_p(Xt)
    with pytest.raises(MemoryError, match=r"11 \+ 3 numbers each"):
        classifier(memory_budget=1e-4).fit(dataset(X, y))
    with pytest.raises(ValueError, match="target y is None"):
        classifier().fit(X)


LIMITED = """
import resource, sys
import numpy as np
import torch
from torch import nn
from fullconformal import FullConformalClassifier

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1000, 16), nn.Tanh(), nn.Linear(16, 10))
X = np.load(sys.argv[1], mmap_mode="r")
y = np.random.default_rng(0).integers(0, 10, len(X))
clf = FullConformalClassifier(net, prefit=True, curvature=sys.argv[3], device="cpu", memory_budget=0.05)
clf.fit(X[:2000], y[:2000]).predict_p(X[:3])  # what the libraries need once is needed now
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
now = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + int(sys.argv[2]),) * 2)
if len(sys.argv) > 4:
    np.array(X)
clf.fit(X, y)
print(clf.predict_p(X[:50]).shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are tested on Linux")
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_file_larger_than_the_memory_allowed(tmp_path, curvature):
    """200 MB of objects, 70 MB of memory for everything; a copy of the objects in memory is shown not to fit."""
    path = tmp_path / "X.npy"
    X = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(50_000, 1000))
    rng = np.random.default_rng(0)
    for at in range(0, len(X), 5000):
        X[at : at + 5000] = rng.normal(size=(5000, 1000))
    X.flush()
    del X
    run = [sys.executable, "-c", textwrap.dedent(LIMITED), str(path), str(70 * 2**20), curvature]
    out = subprocess.run(run, capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "(50, 10)", out.stderr
    if curvature == CURVATURES[0]:
        assert "MemoryError" in subprocess.run([*run, "copy"], capture_output=True, text=True, check=False).stderr
