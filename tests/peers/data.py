"""Data the peers are compared on: three sets of scikit-learn's and random ones, as (X, y) to learn from, to calibrate, objects."""

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_classification
from sklearn.preprocessing import scale

LOADERS = {"iris": load_iris, "wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits}
NAMES = [*LOADERS, "random 2", "random 5"]


def load(name, seed=0):
    """Shuffled thirds: training, calibration and test."""
    if name in LOADERS:
        X, y = LOADERS[name](return_X_y=True)
        X = scale(X)
    else:
        X, y = make_classification(
            450, 8, n_informative=6, n_classes=int(name[-1]), n_clusters_per_class=1, flip_y=0.1, random_state=seed
        )
    order = np.random.default_rng(seed).permutation(len(y))[:600]
    return [(X[part], y[part]) for part in np.array_split(order, 3)]
