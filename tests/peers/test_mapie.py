"""Sets and scores against MAPIE.

MAPIE compares with a slack of 1e-8 in the scores, we with that of rounding. So sets are compared where no score of a label is within
MAPIE's slack of the threshold without being equal to it, which is everywhere here (and asserted).
"""

import numpy as np
import pytest
from peers.data import NAMES, load
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, LeaveOneOut
from sklearn.neighbors import KNeighborsClassifier

from fullconformal import CVPlusClassifier, JackknifePlusClassifier, SplitConformalClassifier
from fullconformal.conformity import APS
from fullconformal.pvalues import p_values, rank_counts
from fullconformal.sets import prediction_sets

mapie = pytest.importorskip("mapie.classification")

LEVELS = [0.5, 0.8, 0.9, 0.95]
SLACK = 1e-8
MODELS = [LogisticRegression(max_iter=2000), KNeighborsClassifier(7)]


def thresholds(scores):
    """The ⌈(1 − ε)(n + 1)⌉-th smallest score at each level."""
    ranks = [int(np.ceil(level * (len(scores) + 1) - 1e-9)) for level in LEVELS]
    return np.sort(scores)[np.array(ranks) - 1]


def clear(scores, at):
    """Whether every score is equal to every threshold up to rounding, or farther from it than MAPIE's slack."""
    distance = np.abs(np.asarray(scores)[..., None] - at)
    return ((distance < 1e-13) | (distance > 2 * SLACK)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_lac_sets_are_those_of_mapie(name, model):
    (X, y), (X_cal, y_cal), (objects, _) = load(name)
    model.fit(X, y)
    theirs = mapie.SplitConformalClassifier(model, confidence_level=LEVELS, conformity_score="lac", prefit=True)
    theirs.conformalize(X_cal, y_cal)
    ours = SplitConformalClassifier(model, prefit=True, conformity_score="lac").fit(X_cal, y_cal)
    own = 1 - model.predict_proba(X_cal)[np.arange(len(y_cal)), y_cal]
    assert clear(1 - model.predict_proba(objects), thresholds(own))
    assert np.array_equal(ours.predict_set(objects, LEVELS), theirs.predict_set(objects)[1])


@pytest.mark.parametrize("name", ["iris", "wine", "digits", "random 5"])
def test_randomised_aps_scores_and_sets_are_those_of_mapie(name):
    """Given the same uniforms, which MAPIE draws from its random_state, afresh for the calibration points and for the objects.

    MAPIE ranks equal probabilities from the last label to the first, we from the first to the last; and where a label's probability is
    lost in the sum of the larger ones it may take that label for the one to be randomised. So the model here is a smooth one, without
    ties, and objects with a probability below MAPIE's slack are left out of the comparison of sets. MAPIE has no APS for two classes.
    """
    (X, y), (X_cal, y_cal), (objects, _) = load(name)
    model = LogisticRegression(C=0.02).fit(X, y)
    theirs = mapie.SplitConformalClassifier(
        model, confidence_level=LEVELS, conformity_score="aps", prefit=True, random_state=7
    )
    theirs.conformalize(X_cal, y_cal)
    n, m = len(y_cal), len(objects)
    u, u_objects = (np.random.RandomState(7).uniform(size=k) for k in (n, m))
    own = APS().scores(np.log(model.predict_proba(X_cal)), u)[np.arange(n), y_cal]
    # The same sums in the same order; we divide them by their total, which is one up to C roundings.
    assert np.abs(own - theirs.conformity_scores.ravel()).max() < 1e-14
    scores = APS().scores(np.log(model.predict_proba(objects)), u_objects)
    p = p_values(*rank_counts([np.sort(own)], scores), n)
    sets = theirs.predict_set(objects, conformity_score_params={"include_last_label": "randomized"})[1]
    kept = (model.predict_proba(objects) > 10 * SLACK).all(1)
    assert kept.mean() > 0.8 and clear(scores[kept], thresholds(own))
    assert np.array_equal(prediction_sets(p, LEVELS)[kept], sets[kept])


@pytest.mark.parametrize("name", ["iris", "wine", "breast cancer", "random 2", "random 5"])
@pytest.mark.parametrize("kind", ["CV+", "jackknife+"])
def test_lac_sets_of_cv_plus_and_jackknife_plus_are_those_of_mapie(name, kind):
    """On the same folds, with K = #{i : s_i ≥ s^(−k(i))(x, y)}.

    The papers' rule is K > ε(n + 1) − 1; MAPIE takes K ≥ ε(n − 1). No whole number lies between the two where the fractional part of
    ε(n + 1) is at most 2ε (zero included), so sets are compared at such levels; at others MAPIE's own rule is applied to our K.
    """
    (X, y), _, (objects, _) = load(name)
    if kind == "jackknife+":
        X, y = X[:60], y[:60]
    n = len(y)
    # Fractional parts at, well below and well above 2ε: ε(n + 1) = t, for whole and other t.
    risks = np.array([t / (n + 1) for t in (2.0, 5.0, 8.0, 8.6, 3.5)])
    cv = KFold(5, shuffle=True, random_state=0) if kind == "CV+" else LeaveOneOut()
    model = LogisticRegression(solver="newton-cholesky", tol=1e-8)
    theirs = mapie.CrossConformalClassifier(
        clone(model), confidence_level=list(1 - risks), conformity_score="lac", cv=cv, random_state=0
    )
    sets = theirs.fit_conformalize(X, y).predict_set(objects, agg_scores="crossval")[1]
    if kind == "CV+":
        ours = CVPlusClassifier(model, cv=cv, conformity_score="lac").fit(X, y)
    else:
        ours = JackknifePlusClassifier(model, conformity_score="lac").fit(X, y)
        assert ours.n_fits_ == 1  # the leave-one-out solver against MAPIE's n fits
    fraction = np.modf(risks * (n + 1) + 1e-9)[0]
    agree = fraction <= 2 * risks + 1e-8
    assert agree[:3].all() and not agree[4]
    K = ours.predict_epsilon(objects) * (n + 1) - 1
    for i, risk in enumerate(risks):
        if agree[i]:
            assert np.array_equal(ours.predict_set(objects, 1 - risk), sets[:, :, i])
        assert np.array_equal(risk * (n - 1) - SLACK <= K, sets[:, :, i])
        assert (ours.predict_set(objects, 1 - risk) >= sets[:, :, i]).all()  # MAPIE's are never larger
