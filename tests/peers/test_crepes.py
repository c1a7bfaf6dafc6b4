"""Split p-values against crepes."""

import numpy as np
import pytest
from peers.data import NAMES, load
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from fullconformal import SplitConformalClassifier

crepes = pytest.importorskip("crepes")
pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")

# Forests and neighbours give few distinct probabilities, hence many ties.
MODELS = [LogisticRegression(max_iter=2000), RandomForestClassifier(20, random_state=0), KNeighborsClassifier(7)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("class_conditional", [False, True])
def test_p_values_are_those_of_crepes(name, model, class_conditional):
    (X, y), (X_cal, y_cal), (objects, _) = load(name)
    model.fit(X, y)
    theirs = crepes.WrapClassifier(model)
    theirs.calibrate(X_cal, y_cal, class_cond=class_conditional)
    ours = SplitConformalClassifier(
        model, prefit=True, conformity_score="lac", class_conditional=class_conditional
    ).fit(X_cal, y_cal)
    # Quotients of the same whole numbers.
    assert np.array_equal(ours.predict_p(objects), theirs.predict_p(objects, smoothing=False))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("class_conditional", [False, True])
def test_smoothed_p_values_are_those_of_crepes_given_the_uniforms(name, class_conditional, monkeypatch):
    """crepes draws a uniform for every label, we one an object; given the same numbers the p-values are the same."""
    (X, y), (X_cal, y_cal), (objects, _) = load(name)
    model = RandomForestClassifier(20, random_state=0).fit(X, y)
    theirs = crepes.WrapClassifier(model)
    theirs.calibrate(X_cal, y_cal, class_cond=class_conditional)
    ours = SplitConformalClassifier(
        model, prefit=True, conformity_score="lac", class_conditional=class_conditional, random_state=0
    ).fit(X_cal, y_cal)
    u = ours._held_out.smoothing(objects, True)[:, 0]

    def uniforms(m, n_classes):
        assert m in (0, len(u))  # class by class, it also asks for none of the other classes
        return np.repeat(u[:m, None], n_classes, axis=1)

    monkeypatch.setattr(np.random, "rand", uniforms)
    p = theirs.predict_p(objects, smoothing=True)
    assert np.abs(ours.predict_p(objects, smoothing=True) - p).max() < 1e-14
