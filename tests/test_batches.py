"""An object has the same p-values by itself and in any batch, its equals among the training points are tied with it."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from torch import nn

from fullconformal import (
    AggregatedConformalClassifier,
    CrossConformalClassifier,
    CVPlusClassifier,
    FullConformalClassifier,
    SplitConformalClassifier,
)
from fullconformal.runtime.hashing import uniforms

N, D = 48, 40


def data(dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D)).astype(dtype)
    return X, (X[:, 0] + X[:, 1] + rng.normal(size=N) > 0).astype(int)


def backbone():
    """Wide enough that float32 products of one row and of many differ."""
    return nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


def pca(model):
    return make_pipeline(PCA(8, random_state=0), model)


CASES = {
    "PCA, symmetric": lambda: FullConformalClassifier(pca(LogisticRegression()), random_state=0),
    "PCA, exact": lambda: FullConformalClassifier(pca(LogisticRegression()), method="exact", random_state=0),
    "PCA, influence": lambda: FullConformalClassifier(pca(LogisticRegression()), method="influence", random_state=0),
    "PCA, neighbours": lambda: FullConformalClassifier(pca(KNeighborsClassifier(3)), random_state=0),
    "head": lambda: FullConformalClassifier(backbone(), head="auto", prefit=True, random_state=0),
    "network": lambda: FullConformalClassifier(backbone(), max_epochs=3, random_state=0),
    "last layer": lambda: FullConformalClassifier(
        backbone(), max_epochs=3, curvature="last_layer_kron", random_state=0
    ),
    "split": lambda: SplitConformalClassifier(pca(LogisticRegression()), random_state=0),
    "split, randomised": lambda: SplitConformalClassifier(
        pca(LogisticRegression()), conformity_score="aps", randomized=True, random_state=0
    ),
    "cross": lambda: CrossConformalClassifier(pca(KNeighborsClassifier(3)), n_folds=3, random_state=0),
    "aggregated": lambda: AggregatedConformalClassifier(pca(LogisticRegression()), random_state=0),
    "CV+": lambda: CVPlusClassifier(pca(LogisticRegression()), n_folds=3, random_state=0),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_an_object_has_the_same_p_values_in_any_batch(name, dtype):
    X, y = data(dtype)
    # Twins of training points are where ties are lost.
    clf, asked = CASES[name]().fit(X, y), X[:11]
    options = [{}] if name == "CV+" else [{}, {"smoothing": True}]
    for option in options:
        whole = clf.predict_epsilon(asked, **option)
        for size in (1, 5):
            parts = [clf.predict_epsilon(asked[k : k + size], **option) for k in range(0, len(asked), size)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_network_that_computes_in_float32_only_keeps_its_precision():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(D, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.fc(torch.tanh(self.body(x)) @ torch.eye(8))

    X, y = data(np.float32)
    clf = FullConformalClassifier(Single(), head="auto", prefit=True).fit(X, y)
    assert clf.predict_p(X[:3]).shape == (3, 2)


def test_what_is_hashed_does_not_depend_on_how_the_batch_is_held():
    X = np.array([[1.0, 0.0, 3.0], [0.5, 2.0, -1.0]])
    expected = uniforms(X, 7)
    ways = [
        X.astype(np.float32),
        np.asfortranarray(X),
        np.where(X == 0, -0.0, X),
        pd.DataFrame(X).astype({0: np.float32, 1: np.int8}),
    ]
    for way in ways:
        np.testing.assert_array_equal(uniforms(way, 7), expected)
    assert uniforms(X[:1].astype(int), 7) == expected[0]
    np.testing.assert_array_equal(uniforms(csr_matrix(X), 7), uniforms(csr_matrix(X.astype(np.float32)), 7))
    # Of tables with words, in which a column of numbers may be whole in one batch and not in another.
    table = pd.DataFrame({"a": [1.0, 0.5], "b": ["x", "y"]})
    assert uniforms(table, 7)[0] == uniforms(table.head(1).astype({"a": int}), 7)[0]


def test_long_objects_hashed_by_threads_have_the_numbers_of_each_alone():
    """70 objects of 32,768 numbers, two of them equal: as many as are hashed side by side."""
    X = np.random.default_rng(0).integers(0, 256, (70, 2**15)).astype(np.float64)
    X[69] = X[3]
    assert X.nbytes >= 2**24
    alone = np.concatenate([uniforms(x[None], 7) for x in X])
    np.testing.assert_array_equal(uniforms(X, 7)[:69], alone[:69])
    assert uniforms(X, 7)[69] == uniforms(X[[3, 3]], 7)[1] != alone[69]
