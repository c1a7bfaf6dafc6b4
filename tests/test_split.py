"""Split conformal prediction against its definition."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

from fullconformal import SplitConformalClassifier
from fullconformal.models import mlp


@pytest.mark.parametrize("class_conditional", [False, True])
def test_p_values_equal_the_definition(class_conditional):
    X, y = load_iris(return_X_y=True)
    forest = RandomForestClassifier(30, random_state=0)
    clf = SplitConformalClassifier(forest, class_conditional=class_conditional, random_state=5).fit(X[::2], y[::2])
    seed = int(np.random.RandomState(5).randint(2**31))
    train, rest = train_test_split(np.arange(75), test_size=0.2, random_state=seed)
    model = forest.fit(X[::2][train], y[::2][train])
    tiny = np.finfo(float).tiny
    scores = [
        -np.log(max(row[label], tiny))
        for row, label in zip(model.predict_proba(X[::2][rest]), y[::2][rest], strict=True)
    ]
    p = clf.predict_p(X[1::2])
    for j, row in enumerate(model.predict_proba(X[1::2])):
        for k in range(3):
            own = -np.log(max(row[k], tiny))
            compared = [s for s, label in zip(scores, y[::2][rest], strict=True) if label == k or not class_conditional]
            assert abs(p[j, k] - (1 + sum(s >= own for s in compared)) / (1 + len(compared))) < 1e-12


@pytest.mark.parametrize("own", ["logistic regression", "network"])
def test_own_models(own):
    X, y = load_iris(return_X_y=True)
    estimator = None if own == "logistic regression" else mlp(4, (5,), 3, "tanh")
    clf = SplitConformalClassifier(estimator, max_epochs=20, random_state=0).fit(X, y)
    assert clf.predict_set(X, 0.9).shape == (150, 3)
    assert np.allclose(clf.predict_proba(X).sum(1), 1)
    assert (clf.predict(X) == y).mean() > 0.6
    assert (clf.predict_p(X, smoothing=True) <= clf.predict_p(X)).all()
