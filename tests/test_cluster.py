"""Influence on a real cluster of two processes: the same p-values, whoever is killed on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import joblib
import numpy as np
import pytest
from dask.distributed import Client, LocalCluster
from driver import N, X, fitted, run
from sklearn.datasets import make_classification
from sklearn.naive_bayes import GaussianNB

from fullconformal import ClusterError, FullConformalClassifier
from fullconformal.influence import shards
from fullconformal.methods import fitting
from fullconformal.runtime import tasks
from fullconformal.runtime.files import Parts
from fullconformal.runtime.tasks import Patience, finished

PAUSE = 0.05  # a pass through the model; a part has several


def local(workers):
    return LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0", silence_logs=50)


@pytest.fixture(scope="module")
def cluster():
    with local(2) as cluster:
        yield cluster


@pytest.fixture
def dask(cluster):
    """Inside it joblib's work goes to the cluster."""
    with Client(cluster) as client, joblib.parallel_config(backend="dask"):
        client.wait_for_workers(2)
        yield client


@pytest.fixture(scope="module")
def expected():
    return run()


def parts(folder, stage=""):
    """Finished parts and the time at which each was written."""
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob(f"{stage}*.npy")}


def when_started(folder, stage, action):
    """Do something once a part of the stage is there, in a thread."""

    def watch():
        while not parts(folder, stage):
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


# The same p-values ----------------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"class_conditional": True},
    {"scheme": "studentized"},
    {"scheme": "ordinary", "curvature": "hessian", "damping": 0.1},
    {"approximation": "newton", "class_conditional": True},
    {"curvature": "last_layer", "prune": True},
    {"curvature": "ekfac"},
    {"curvature": "dual"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cluster_gives_the_p_values_of_one_process(dask, options):
    shared = run(**options)
    with joblib.parallel_config(backend="sequential"):
        alone = run(**options)
    assert np.abs(shared - alone).max() < 1e-9  # counts are whole numbers: equal, or a whole point apart
    assert len(np.unique(alone)) > 20


def test_the_cluster_does_the_work(dask, monkeypatch):
    """Shards and blocks are tasks, and none of them runs here."""
    for name in ("curvature_part", "influence_part", "count_part"):
        monkeypatch.setattr(shards, name, remember(getattr(shards, name), os.getpid()))
    said = []
    clf = fitted(PAUSE)
    monkeypatch.setattr(type(clf), "_work", lambda self: tasks.Work(say=said.append))
    clf.predict_p(X[N:])
    assert said == ["counts: 8 parts"]  # 2 blocks of objects, 4 shards of points: four tasks a worker


def remember(function, driver):
    """The function, in another process."""

    def elsewhere(*args):
        assert os.getpid() != driver
        return function(*args)

    return elsewhere


def test_covariate_shift_on_a_cluster(dask):
    weights = np.linspace(1, 2, N), np.ones(len(X) - N)
    shared = fitted().predict_p(X[N:], weights=weights)
    with joblib.parallel_config(backend="sequential"):
        alone = fitted().predict_p(X[N:], weights=weights)
    assert np.abs(shared - alone).max() < 1e-9


def test_folds_are_trained_on_a_cluster(dask):
    objects, y = make_classification(60, random_state=0)

    def p_values(model):
        clf = FullConformalClassifier(model, method="folds", folds=3, random_state=0)
        return clf.fit(objects[:40], y[:40]).predict_p(objects[40:])

    shared = p_values(Elsewhere(os.getpid()))
    with joblib.parallel_config(backend="sequential"):
        assert np.array_equal(shared, p_values(Elsewhere(0)))


class Elsewhere(GaussianNB):
    """A classifier that is not fitted in this process."""

    def __init__(self, driver=0):
        super().__init__()
        self.driver = driver

    def fit(self, X, y):
        assert os.getpid() != self.driver
        return super().fit(X, y)


def test_joblib_workers_on_this_machine(expected):
    assert np.abs(run(n_jobs=2) - expected).max() < 1e-9
    with joblib.parallel_config("threading", n_jobs=2):
        assert np.abs(run(approximation="indirect", n=64) - run(approximation="indirect", n=64, n_jobs=1)).max() < 1e-9


def test_one_process_shares_nothing_out(monkeypatch, expected):
    monkeypatch.setattr(shards, "computed", None)
    assert (run() == expected).all()


def test_a_few_objects_are_shared_out_by_training_points():
    prepared = fitted().set_params()._fitted.prepared
    assert shards.grid(prepared, prepared.problem.X[:1], 2) == {"blocks": 1, "shards": 8}
    assert shards.grid(prepared, prepared.problem.X, 2) == {"blocks": 8, "shards": 1}
    assert shards.grid(prepared, prepared.problem.X[:1].expand(10_000, -1), 1) == {"blocks": 5, "shards": 1}
    small = replace(prepared, memory=4 * prepared.problem.X.nbytes // 3)
    assert shards.grid(small, prepared.problem.X, 2) == {"blocks": 8, "shards": 3}


@pytest.mark.parametrize("total", [1, 7, 64])
def test_cuts_cover_everything(total):
    slices = shards.cut(total, min(total, 5))
    assert [i for at in slices for i in range(at.start, at.stop)] == list(range(total))
    lengths = [at.stop - at.start for at in slices]
    assert max(lengths) - min(lengths) <= 1


# Killed workers and drivers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "light"), [("curvature", 2**20), ("counts", 2**20), ("influence", -1)])
def test_a_killed_worker_costs_its_parts_only(dask, tmp_path, expected, stage, light, monkeypatch):
    """Whether data go along with their tasks, or apart: these are lost with the worker, and a task whose data are under way hangs."""
    monkeypatch.setattr(shards, "LIGHT", light)
    monkeypatch.setattr(tasks, "IDLE", 4.0)
    victim = next(iter(dask.run(os.getpid).values()))
    thread = when_started(tmp_path, f"{stage}-", lambda: os.kill(victim, signal.SIGKILL))
    p = run(PAUSE, checkpoint=tmp_path)
    thread.join(60)
    assert not thread.is_alive()
    assert np.abs(p - expected).max() < 1e-9
    dask.wait_for_workers(2)
    assert victim not in dask.run(os.getpid).values()


@pytest.mark.parametrize("stage", ["curvature", "counts"])
def test_a_killed_driver_costs_nothing_finished(cluster, dask, tmp_path, expected, stage, capsys):
    command = [
        sys.executable,
        str(Path(__file__).with_name("driver.py")),
        cluster.scheduler_address,
        tmp_path,
        str(PAUSE),
    ]
    child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        while not parts(tmp_path, f"{stage}-"):
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    found = parts(tmp_path)
    finished_ = len(parts(tmp_path, f"{stage}-"))
    assert 1 <= finished_ < 8
    p = run(checkpoint=tmp_path, verbose=1)
    assert np.abs(p - expected).max() < 1e-9
    after = parts(tmp_path)
    assert found.items() <= after.items()  # none of them was written again
    assert [len(parts(tmp_path, f"{name}-")) for name in ("curvature", "influence", "counts")] == [8, 8, 8]
    assert f"{stage}: 8 parts, {finished_} of them found in" in capsys.readouterr().out
    assert (run(checkpoint=tmp_path) == p).all()
    assert parts(tmp_path) == after  # nothing was left to do


def test_other_workers_find_the_parts(dask, tmp_path, expected):
    """The cut of the first run holds, however many workers the second has."""
    run(checkpoint=tmp_path)
    before = parts(tmp_path)
    with joblib.parallel_config(backend="sequential"):
        assert np.abs(run(checkpoint=tmp_path, n_jobs=1) - expected).max() < 1e-9
    assert parts(tmp_path) == before


def test_parts_of_other_parameters_are_not_mixed_in(tmp_path):
    """A folder of earlier versions: the same data and options, but matrices and rows of 14 parameters where there are 21 now."""
    X, Y = make_classification(200, 6, n_informative=4, n_classes=3, random_state=0)
    options = {"method": "influence", "l2": 0.1}
    expected = FullConformalClassifier(**options).fit(X, Y).predict_p(X[:9])
    FullConformalClassifier(checkpoint=tmp_path, **options).fit(X, Y)
    before = parts(tmp_path, "curvature-")
    for path in parts(tmp_path):
        path.unlink()
    for start, stop in pairwise(np.linspace(0, 200, len(before) + 1).astype(int)):
        Parts(tmp_path, print).write(f"curvature-14-{start}-{stop}", np.zeros((14, 14)))
        Parts(tmp_path, print).write(f"influence-14-{start}-{stop}", np.zeros((2, stop - start)))
    for _ in range(2):
        p = FullConformalClassifier(checkpoint=tmp_path, **options).fit(X, Y).predict_p(X[:9])
        assert np.abs(p - expected).max() < 1e-9
        assert len(parts(tmp_path, "curvature-")) == 2 * len(before) > 0


def test_a_network_whose_parameters_are_kept_is_not_trained_again(tmp_path, monkeypatch):
    options = {"prefit": False, "max_epochs": 2, "checkpoint": tmp_path, "n": 64}
    p = run(**options)
    monkeypatch.setattr(fitting, "train", None)
    assert (run(**options) == p).all()
    with pytest.raises(TypeError):
        run(**options | {"checkpoint": tmp_path / "another"})


def test_a_folder_of_other_data_is_refused(tmp_path):
    fitted(n=64, checkpoint=tmp_path)
    for other in ({"n": 65}, {"l2": 0.2}, {"curvature": "hessian"}, {"prefit": False, "max_epochs": 1}):
        with pytest.raises(ValueError, match="other data or another model; choose another, or delete"):
            fitted(**{"n": 64, "checkpoint": tmp_path} | other)
    (tmp_path / "header.json").unlink()
    with pytest.raises(ValueError, match="without a readable header"):
        fitted(n=64, checkpoint=tmp_path)


def test_predictions_share_a_folder(tmp_path):
    clf, alone = fitted(n=64, checkpoint=tmp_path), fitted(n=64)
    for scheme, objects in (("deleted", X[:40]), ("ordinary", X[:40]), ("deleted", X[1:41])):
        clf.set_params(scheme=scheme), alone.set_params(scheme=scheme)
        assert np.abs(clf.predict_p(objects) - alone.predict_p(objects)).max() < 1e-9
    assert len(list(tmp_path.glob("p-*"))) == 3


# Lost clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["scheduler", "workers"])
def test_a_lost_cluster_names_the_folder(tmp_path, what):
    with local(1) as cluster, Client(cluster), joblib.parallel_config(backend="dask", wait_for_workers_timeout=1):
        lose = cluster.close if what == "scheduler" else lambda: cluster.scale(0)
        thread = when_started(tmp_path, "curvature-", lose)
        with pytest.raises(ClusterError, match=f"the cluster is lost.*kept in '{tmp_path}'"):
            run(0.3, checkpoint=tmp_path)
        thread.join()
    assert parts(tmp_path, "curvature-")
    assert not parts(tmp_path, "counts-")


def test_a_cluster_without_workers_says_how_to_keep_parts():
    match = r"no worker.*no checkpoint was given: with checkpoint='a folder'"
    backend = {"backend": "dask", "wait_for_workers_timeout": 0.5}
    with (
        local(0) as cluster,
        Client(cluster),
        joblib.parallel_config(**backend),
        pytest.raises(ClusterError, match=match),
    ):
        run()


class Fake:
    """A client whose scheduler answers as told."""

    status = "running"

    def __init__(self, cores, tasks):
        self.cores, self.tasks = cores, tasks

    def ncores(self):
        return self.cores

    def processing(self):
        return {"worker": self.tasks}

    def has_what(self):
        return {"worker": ["Shard-1"]}


@pytest.mark.parametrize(
    ("client", "seconds", "over"),
    [
        (Fake({"worker": 1}, ["batch_of_one"]), 9000, False),
        (Fake({"worker": 1}, []), 25, False),
        (Fake({"worker": 1}, []), 35, True),  # a task that Dask has given up, and joblib waits for
        (Fake({}, []), 5, False),
        (Fake({}, []), 15, True),
    ],
)
def test_patience_ends_when_nothing_goes_on(monkeypatch, client, seconds, over):
    now = [0.0]
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now[0])
    patience, ended = Patience(client, grace=10, idle=30), False
    while not ended and now[0] < seconds:
        now[0] += 2
        ended = now[0] > patience
    assert ended == over


def test_a_broken_pool_of_processes_is_replaced(tmp_path):
    flag, said = tmp_path / "flag", []

    def dies_once():  # a local function travels by value, so that its process need not import this file
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.ones(1)

    calls = {f"part-{i}": (dies_once,) for i in range(4)}
    assert {name for name, _ in finished(calls, Parts(tmp_path, said.append), n_jobs=2)} == set(calls)
    assert any("started again" in sentence for sentence in said)


def test_a_task_that_ends_every_worker_is_an_error(tmp_path):
    with pytest.raises(ClusterError, match=f"1 of 1 parts are unfinished.*kept in '{tmp_path}'"):
        list(finished({"part-0": (os._exit, 1)}, Parts(tmp_path, print), n_jobs=2, attempts=2))


def test_an_error_of_a_task_is_raised_as_it_is(dask, tmp_path):
    with pytest.raises(ZeroDivisionError):
        list(finished({"part-0": (divmod, 1, 0)}, Parts(tmp_path, print), n_jobs=None))
