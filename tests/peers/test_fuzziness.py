"""Fuzziness and observed fuzziness against a second implementation, written from the definitions of Vovk et al. (2016) with lists."""

import math

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import FullConformalClassifier, SplitConformalClassifier, metrics


def mean_and_error(values):
    m = len(values)
    centre = math.fsum(values) / m
    return centre, math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (m - 1) / m)


def second_fuzziness(p):
    """For each object: drop one label of largest p-value, add up the others."""
    sums = []
    for row in p:
        likeliest = max(range(len(row)), key=lambda label: row[label])
        sums.append(math.fsum(value for label, value in enumerate(row) if label != likeliest))
    return mean_and_error(sums)


def second_observed_fuzziness(p, y, classes):
    """For each object: add up the p-values of the labels that are not its own."""
    sums = []
    for row, truth in zip(p, y, strict=True):
        sums.append(math.fsum(value for value, label in zip(row, classes, strict=True) if label != truth))
    return mean_and_error(sums)


def check(p, y, classes):
    rows = [[float(value) for value in row] for row in p]
    # Sums of C numbers in [0, 1] and of m such sums: each addition rounds by EPS of at most C.
    bound = 4 * np.finfo(float).eps * (len(p) + len(rows[0])) * len(rows[0])
    assert metrics.fuzziness(p) == pytest.approx(second_fuzziness(rows), abs=bound)
    expected = second_observed_fuzziness(rows, list(y), list(classes))
    assert metrics.observed_fuzziness(p, y, classes) == pytest.approx(expected, abs=bound)


@pytest.mark.parametrize("load", [load_iris, load_wine, load_breast_cancer])
@pytest.mark.parametrize("conformal", [FullConformalClassifier, SplitConformalClassifier])
def test_on_data(load, conformal):
    data = load()
    y = data.target_names[data.target]
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:100], order[100:200]
    clf = conformal(make_pipeline(StandardScaler(), LogisticRegression()), random_state=0)
    p = clf.fit(data.data[train], y[train]).predict_p(data.data[test])
    check(p, y[test], clf.classes_)


@pytest.mark.parametrize("seed", range(20))
def test_on_random_p_values(seed):
    rng = np.random.default_rng(seed)
    m, n_classes, n = rng.integers(2, 200), rng.integers(1, 12), rng.integers(1, 50)
    p = rng.integers(1, n + 2, size=(m, n_classes)) / (n + 1)  # few values, so that the largest is often tied
    classes = rng.permutation([f"label {c}" for c in range(n_classes)])
    check(p, rng.choice(classes, size=m), classes)
