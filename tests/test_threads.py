"""Prediction from many threads at once: the p-values of one thread, to the bit, for every method."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from cases import Residual, resnet
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from fullconformal import CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier
from fullconformal.influence.sorted_points import SortedPoints
from fullconformal.models import KernelDensityClassifier, mlp
from fullconformal.runtime.numerics import _Switch, each_alone, full_precision, tensor_cores
from fullconformal.runtime.replicas import replica
from fullconformal.runtime.tasks import stage

THREADS, CALLS = 8, 2


def tables(n=60, shape=(6,), n_classes=3):
    rng = np.random.default_rng(0)
    y = rng.integers(n_classes, size=n)
    X = rng.normal(size=(n, *shape)) + y.reshape(-1, *[1] * len(shape))
    return X.astype(np.float32), y


def full(model, shape=(6,), m=12, **options):
    """A fitted classifier and m objects to predict."""
    X, y = tables(shape=shape)
    if isinstance(model, nn.Module):
        options = {"max_epochs": 5, "l2": 0.05, "device": "cpu", "random_state": 0} | options
    return FullConformalClassifier(model, **options).fit(X[:40], y[:40]), X[40 : 40 + m]


def trained(shape=(6,), **options):
    return full(Residual() if shape == (6,) else resnet().eval(), shape, **options)


CASES = {
    "residual": trained,
    "residual, hessian": lambda: trained(curvature="hessian"),
    "residual, dual": lambda: trained(curvature="dual"),
    "residual, newton": lambda: trained(approximation="newton"),
    "indirect": lambda: trained(approximation="indirect"),
    "indirect, dense": lambda: full(mlp(6, (5,), 3), approximation="indirect"),
    "ekfac": lambda: trained(curvature="ekfac"),
    "kfac of convolutions": lambda: trained((1, 6, 6), curvature="kfac"),
    "last layer": lambda: trained(curvature="last_layer"),
    "last layer, kronecker": lambda: full(mlp(6, (5,), 3), curvature="last_layer_kron"),
    "head": lambda: full(mlp(6, (5,), 3), head="auto"),
    "dense": lambda: full(mlp(6, (5,), 3)),
    "symmetric": lambda: full(make_pipeline(StandardScaler(), LogisticRegression())),
    "exact": lambda: full(None, m=4, method="exact", l2=0.1),
    "neighbours": lambda: full(KNeighborsClassifier(3)),
    "density": lambda: full(KernelDensityClassifier()),
    "refits": lambda: full(LogisticRegression(l1_ratio=0.0), method="exact"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_eight_threads_give_the_p_values_of_one(name):
    clf, X = CASES[name]()
    parts = [X[k::4] for k in range(4)]
    alone, ready = [clf.predict_p(part) for part in parts], Barrier(THREADS)

    def predict(worker):
        # All at once, each with other objects than its neighbours.
        ready.wait()
        return [(k, clf.predict_p(parts[k])) for k in ((worker + call) % 4 for call in range(CALLS))]

    with ThreadPoolExecutor(THREADS) as pool:
        found = [pair for pairs in pool.map(predict, range(THREADS)) for pair in pairs]
    for k, p in found:
        np.testing.assert_array_equal(p, alone[k])
    # And nothing is left of it.
    np.testing.assert_array_equal(clf.predict_p(parts[0]), alone[0])


@pytest.mark.parametrize("kind", [SplitConformalClassifier, CVPlusClassifier])
def test_threads_of_the_alternatives(kind):
    X, y = load_iris(return_X_y=True)
    clf = kind(mlp(4, (5,), 3), max_epochs=5, random_state=0).fit(X[::2], y[::2])
    parts = [X[1 + k :: 8] for k in range(4)]
    alone = [clf.predict_epsilon(part) for part in parts]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(clf.predict_epsilon, parts * 4))
    for k, p in enumerate(found):
        np.testing.assert_array_equal(p, alone[k % 4])


def test_a_replica_has_the_module_s_tensors_and_hooks_of_its_own():
    model = resnet()
    model.table = torch.ones(3)
    own = replica(model)
    assert own is replica(model) is not model
    ours, theirs = dict(model.named_parameters()), dict(own.named_parameters())
    assert all(ours[name] is theirs[name] for name in ours) and own.table is model.table
    assert own.norm.running_mean is model.norm.running_mean
    own.stem.register_forward_hook(lambda *call: None)
    assert not model.stem._forward_hooks
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(replica, model).result() is not own


def test_switches_are_given_back_by_the_last_thread():
    places = torch.backends.cudnn.conv, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [place.fp32_precision for place in places]
    inside, outside = Barrier(2), Barrier(2)

    def first():
        with full_precision():
            inside.wait(), outside.wait()

    def second():
        inside.wait()
        # While the first thread needs whole products nobody gets less.
        with full_precision(), tensor_cores():
            outside.wait()
            return {place.fp32_precision for place in places}

    with ThreadPoolExecutor(2) as pool:
        other, own = pool.submit(first), pool.submit(second)
        assert own.result() <= {"ieee", "none"}
        other.result()
    assert [place.fp32_precision for place in places] == before


def test_settings_that_are_as_wanted_are_not_set_again():
    class Place:
        def __setattr__(self, name, value):
            seen.append(value)
            super().__setattr__(name, value)

    seen, place = [], Place()
    place.precise, switch = "not asked for", _Switch((place, "precise", {False: "off", True: "on"}))
    with switch.set(True), switch.set(False), switch.set(False), switch.set(True):
        assert place.precise == "off"
    assert seen == ["not asked for", "on", "off", "on", "not asked for"]


def test_stages_are_marked_for_a_profiler():
    with torch.profiler.profile() as seen, stage("counts"):
        torch.ones(1)
    assert "fullconformal.counts" in {event.key for event in seen.key_averages()}
    with stage("counts"):
        pass


def test_points_solved_for_by_another_thread_meanwhile(monkeypatch):
    """A prediction may find more points with their solves than it asked for."""
    clf, X = full(mlp(6, (20,), 3), method="influence", dtype="float32")
    p = clf.predict_p(X)
    clf._fitted.prepared.sorted.clear()
    asked = SortedPoints.solved

    def meanwhile(self, count):
        asked(self, len(self))
        return asked(self, count)

    monkeypatch.setattr(SortedPoints, "solved", meanwhile)
    assert np.array_equal(clf.predict_p(X), p)


def test_parts_are_worked_on_by_threads_with_one_thread_each():
    """In their order; what fails is raised and the rest left undone; torch has as many threads afterwards as before."""
    before, done = torch.get_num_threads(), []

    def work(part):
        done.append(part)
        if part == 5:
            raise ZeroDivisionError
        return part, torch.get_num_threads()

    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert list(each_alone(work, range(5))) == [(part, 1) for part in range(5)]
            done.clear()
            with pytest.raises(ZeroDivisionError):
                list(each_alone(work, range(1000)))
            assert 5 in done and len(done) < 1000
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["symmetric", "exact"])
def test_objects_shared_out_among_threads_have_the_same_p_values(method):
    clf, X = full(LogisticRegression(), method=method)
    before = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found += [clf.predict_p(X), np.concatenate([clf.predict_p(X[i : i + 1]) for i in range(len(X))])]
    finally:
        torch.set_num_threads(before)
    for p in found:
        np.testing.assert_array_equal(p, found[0])
