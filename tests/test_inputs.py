"""Objects as they come: in any order of memory, precision and kind, from disk, in other threads and processes, the answers are the same."""

import multiprocessing

import numpy as np
import pytest
import torch
from scipy.sparse import csc_matrix, csr_array
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    CVPlusRegressor,
    FullConformalClassifier,
    FullConformalRegressor,
    JackknifePlusClassifier,
    JackknifePlusRegressor,
    SplitConformalClassifier,
    SplitConformalRegressor,
)
from fullconformal.models import KernelDensityClassifier, mlp

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

Y = np.arange(24) % 2
# Eighths, which half precision has exactly.
X = np.round(8 * (np.random.default_rng(0).normal(size=(24, 3)) + Y[:, None])) / 8

PREDICTORS = {
    "symmetric": lambda: FullConformalClassifier(),
    "exact": lambda: FullConformalClassifier(method="exact"),
    "influence": lambda: FullConformalClassifier(method="influence"),
    "pipeline": lambda: FullConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression())),
    "neighbours": lambda: FullConformalClassifier(KNeighborsClassifier(2)),
    "density": lambda: FullConformalClassifier(KernelDensityClassifier()),
    "network": lambda: FullConformalClassifier(mlp(3, (2,), 2).double(), method="influence", max_epochs=1),
    "folds": lambda: FullConformalClassifier(mlp(3, (2,), 2).double(), folds=2, max_epochs=1, random_state=0),
    "forest": lambda: FullConformalClassifier(RandomForestClassifier(5, random_state=0), random_state=0),
    "split": lambda: SplitConformalClassifier(random_state=0),
    "aggregated": lambda: AggregatedConformalClassifier(n_estimators=2, random_state=0),
    "cross": lambda: CrossConformalClassifier(n_folds=2, random_state=0),
    "CV+": lambda: CVPlusClassifier(n_folds=2, random_state=0),
    "jackknife+": lambda: JackknifePlusClassifier(random_state=0),
    "ridge": lambda: FullConformalRegressor(Ridge()),
    "kernel": lambda: FullConformalRegressor(KernelRidge(kernel="rbf")),
    "lasso": lambda: FullConformalRegressor(Lasso(0.1)),
    "nearest numbers": lambda: FullConformalRegressor(KNeighborsRegressor(2)),
    "forest of numbers": lambda: FullConformalRegressor(RandomForestRegressor(5, random_state=0), random_state=0),
    "split numbers": lambda: SplitConformalRegressor(random_state=0),
    "CV+ numbers": lambda: CVPlusRegressor(n_folds=2, random_state=0),
    "jackknife+ numbers": lambda: JackknifePlusRegressor(random_state=0),
}


def answers(name, given, objects):
    """p-values, or the ends of intervals, of a predictor that was fitted to objects as they are given."""
    torch.manual_seed(0)
    predictor = PREDICTORS[name]()
    if type(predictor).__name__.endswith("Classifier"):
        return predictor.fit(given, Y).predict_epsilon(objects)
    return predictor.fit(given, X @ [1.0, 2.0, 3.0] + np.cos(np.arange(24))).predict_interval(
        objects, confidence_level=0.8
    )


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("name", PREDICTORS)
def test_the_answers_do_not_depend_on_how_objects_are_held(name, tmp_path):
    expected = answers(name, X, X)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    strided = np.repeat(X, 2, axis=1)[:, ::2]
    forms = (
        np.asfortranarray(X),
        read_only(X),
        mapped,
        strided,
        X.astype(np.float16),
        X.astype(">f8"),
        torch.tensor(X),
    )
    for held in forms:
        before = np.asarray(held).copy()
        # Products of arrays in another order may be rounded otherwise.
        assert np.allclose(answers(name, held, held), expected, rtol=1e-9, atol=1e-9), type(held)
        assert np.array_equal(np.asarray(held), before)
    for sparse in (csr_array(X), csc_matrix(X)):
        try:
            found = answers(name, sparse, sparse)
        except (TypeError, ValueError) as error:
            assert "sparse" in str(error).lower(), error
        else:
            assert np.allclose(found, expected, rtol=1e-9, atol=1e-9)


def of_a_child(name, into):
    torch.set_num_threads(1)
    into.send(answers(name, X, X))


@pytest.mark.parametrize("name", ["symmetric", "influence", "folds", "forest", "ridge"])
def test_a_forked_process_gives_the_same_answers(name):
    expected = answers(name, X, X)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=of_a_child, args=(name, theirs))
    child.start()
    assert ours.poll(120)
    assert np.array_equal(ours.recv(), expected)
    child.join(10)
