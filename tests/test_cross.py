"""CV+, cross-conformal prediction and jackknife+ against their rules, applied literally to honest refits."""

import numpy as np
import pytest
from oracles import label_score, plus_rule
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, LeaveOneOut, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import (
    CrossConformalClassifier,
    CVPlusClassifier,
    JackknifePlusClassifier,
    SplitConformalClassifier,
)
from fullconformal.conformity import SCORES
from fullconformal.linear.bag import LinearBag
from fullconformal.linear.leave_one_out import leave_one_out
from fullconformal.linear.newton import CONVERGED

RAPS = {"k_reg": 1, "lambda_reg": 0.1}
LEVELS = (0.5, 0.8, 0.9, 0.95)
TIGHT = {"solver": "newton-cholesky", "tol": 1e-10}


def problem(n_classes, n=60, m=20):
    X, y = make_classification(
        n + m,
        5,
        n_informative=4,
        n_redundant=0,
        n_classes=n_classes,
        n_clusters_per_class=1,
        class_sep=0.6,
        random_state=1,
    )
    return X[:n], y[:n], X[n:]


def literal(estimator, X, y, objects, cv, score, u=None, u_objects=None):
    """Scores (n,) of points, and (m, C, n) of candidates by the model without each point's fold."""
    options = RAPS if score == "raps" else {}
    n, m, C = len(y), len(objects), len(np.unique(y))
    u, u_objects = (np.zeros(k) if v is None else v for k, v in ((n, u), (m, u_objects)))
    own, other = np.empty(n), np.empty((m, C, n))
    for train, rest in cv.split(X, y):
        model = clone(estimator).fit(X[train], y[train])
        for i, row in zip(rest, model.predict_proba(X[rest]), strict=True):
            own[i] = label_score(row, y[i], score, u[i], **options)
        for j, row in enumerate(model.predict_proba(objects)):
            for k in range(C):
                other[j, k, rest] = label_score(row, k, score, u_objects[j], **options)
    return own, other


def literal_sets(own, other, y, level, class_conditional=False):
    m, C, _ = other.shape
    out = np.empty((m, C), dtype=bool)
    for j in range(m):
        for k in range(C):
            on = y == k if class_conditional else slice(None)
            out[j, k] = plus_rule(own[on], other[j, k, on], 1 - level)
    return out


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.parametrize("cv", [KFold(4, shuffle=True, random_state=0), StratifiedKFold(3)])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_cv_plus_is_its_rule(score, class_conditional, cv):
    X, y, objects = problem(3)
    lda = LinearDiscriminantAnalysis()
    options = {"cv": cv, "conformity_score": score, "class_conditional": class_conditional, "random_state": 4, **RAPS}
    clf = CVPlusClassifier(lda, **options).fit(X, y)
    rng = np.random.RandomState(4)
    rng.randint(2**31)
    u = rng.uniform(size=60) if score in ("aps", "raps") else None
    u_objects = clf._held_out.uniform(objects)
    own, other = literal(lda, X, y, objects, cv, score, u, u_objects)
    sets = clf.predict_set(objects, LEVELS)
    for i, level in enumerate(LEVELS):
        assert np.array_equal(sets[:, :, i], literal_sets(own, other, y, level, class_conditional))
    # The same sets from p-values: Vovk's pooled ranks.
    cross = CrossConformalClassifier(lda, **options).fit(X, y)
    assert np.array_equal(cross.predict_p(objects), clf.predict_epsilon(objects))
    pooled = np.array([[1 + (own >= s).sum() for s in row] for row in other]) / 61
    if not class_conditional:
        assert np.abs(cross.predict_p(objects) - pooled).max() < 1e-12
    smooth = cross.predict_p(objects, smoothing=True)
    assert (smooth <= cross.predict_p(objects)).all() and (smooth >= cross.predict_p(objects) - 1 / 2).all()


@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_p_values_of_folds_are_combined_in_a_random_order(class_conditional):
    X, y, objects = problem(3)
    cv, lda, options = KFold(4), LinearDiscriminantAnalysis(), {"class_conditional": class_conditional}
    clf = CrossConformalClassifier(lda, cv=cv, aggregation="sequential", random_state=4, **options).fit(X, y)
    each = []
    for train, rest in cv.split(X):
        model = LinearDiscriminantAnalysis().fit(X[train], y[train])
        each.append(SplitConformalClassifier(model, prefit=True, **options).fit(X[rest], y[rest]).predict_p(objects))
    seed = int(np.random.RandomState(4).randint(2**31))
    each = [each[k] for k in np.random.default_rng(seed).permutation(4)]
    running = [sum(each[: k + 1]) / (k + 1) for k in range(4)]
    p = clf.predict_p(objects)
    assert np.abs(p - np.minimum.reduce(running)).max() < 1e-12
    mean = clf.set_params(aggregation="mean").predict_p(objects)
    assert np.abs(mean - running[-1]).max() < 1e-12 and (p <= mean + 1e-12).all() and (p < mean - 1e-6).any()
    assert clf.guarantee_.times == 2
    with pytest.raises(ValueError, match="aggregation='most'"):
        clf.set_params(aggregation="most").check_params()


def test_folds_are_drawn_by_the_seed_and_workers_change_nothing():
    X, y, objects = problem(3)
    make = lambda **options: CVPlusClassifier(n_folds=4, **options).fit(X, y).predict_epsilon(objects)  # noqa: E731
    seed = int(np.random.RandomState(3).randint(2**31))
    folds = list(KFold(4, shuffle=True, random_state=seed).split(X))
    assert np.array_equal(make(random_state=3), make(random_state=3, n_jobs=2))
    assert np.array_equal(make(random_state=3), make(random_state=3, cv=folds))
    assert not np.array_equal(make(random_state=3), make(random_state=4))


def test_probabilities_are_the_mean_of_the_folds():
    X, y, objects = problem(3)
    cv = KFold(3)
    clf = CVPlusClassifier(LinearDiscriminantAnalysis(), cv=cv).fit(X, y)
    each = [LinearDiscriminantAnalysis().fit(X[t], y[t]).predict_proba(objects) for t, _ in cv.split(X)]
    assert np.abs(clf.predict_proba(objects) - np.mean(each, 0)).max() < 1e-12
    assert np.array_equal(clf.predict(objects), np.mean(each, 0).argmax(1))


@pytest.mark.parametrize("method", [CVPlusClassifier, JackknifePlusClassifier])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_the_rule_has_no_p_values(method):
    X, y, objects = problem(2)
    clf = method().fit(X, y)
    with pytest.raises(ValueError, match=r"no p-values.*predict_epsilon\(X\)"):
        clf.predict_p(objects)
    with pytest.raises(TypeError, match="smoothing"):
        clf.predict_set(objects, smoothing=True)
    epsilon = clf.predict_epsilon(objects)
    just_in, just_out = (np.nextafter(epsilon, side) for side in (0, 1))
    assert ((epsilon > just_in) & ~(epsilon > just_out)).all()
    for j, k in np.ndindex(*epsilon.shape):  # still in just below it, and out at it
        if epsilon[j, k] < 1:
            assert clf.predict_set(objects[j : j + 1], 1 - epsilon[j, k] + 1e-9)[0, k]
            assert not clf.predict_set(objects[j : j + 1], 1 - epsilon[j, k])[0, k]


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("score", SCORES)
def test_jackknife_plus_of_logistic_regressions_is_its_rule(n_classes, score):
    """One fit and the leave-one-out solver, against n honest fits by scikit-learn."""
    X, y, objects = problem(n_classes, n=40, m=10)
    C = 0.5
    reference = LogisticRegression(C=C, **TIGHT)
    own, other = literal(reference, X, y, objects, LeaveOneOut(), score)
    # No score of a candidate is so close to a point's that refits to 1e-10 decide it; last labels of APS tie exactly.
    distance = np.abs(own - other)
    tied = distance < 1e-12
    assert distance[~tied].min() > 1e-6
    other = np.where(tied, own, other)
    options = {"conformity_score": score, "randomized": False, **RAPS}
    for clf in (JackknifePlusClassifier(reference, **options), JackknifePlusClassifier(l2=1 / (C * 40), **options)):
        sets = clf.fit(X, y).predict_set(objects, LEVELS)
        assert clf.n_fits_ == 1
        assert all(np.array_equal(sets[:, :, i], literal_sets(own, other, y, level)) for i, level in enumerate(LEVELS))
    fitted = LogisticRegression(C=C, **TIGHT).fit(X, y)
    assert np.abs(clf.predict_proba(objects) - fitted.predict_proba(objects)).max() < 1e-6


@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
def test_jackknife_plus_by_refits_and_by_the_solver_agree(class_conditional):
    """An estimator the solver does not know is refitted: the same regression, in a Pipeline that does nothing."""
    X, y, objects = problem(3, n=40, m=10)
    model = LogisticRegression(**TIGHT)
    options = {"conformity_score": "aps", "class_conditional": class_conditional, "random_state": 0}
    fast = JackknifePlusClassifier(model, **options).fit(X, y)
    slow = JackknifePlusClassifier(make_pipeline("passthrough", model), **options).fit(X, y)
    assert (fast.n_fits_, slow.n_fits_) == (1, 40)
    assert np.array_equal(fast.predict_epsilon(objects), slow.predict_epsilon(objects))
    scaled = JackknifePlusClassifier(make_pipeline(StandardScaler(), model), n_jobs=2, **options).fit(X, y)
    assert scaled.n_fits_ == 40  # scalers learn from the point left out, so they are fitted again
    assert JackknifePlusClassifier(LogisticRegression(class_weight="balanced")).fit(X, y).n_fits_ == 40


@pytest.mark.parametrize("n_classes", [2, 4])
def test_leave_one_out_fits_have_no_gradient_left(n_classes):
    import torch

    X, y, _ = problem(n_classes, n=50)
    design = torch.tensor(np.c_[X, np.ones(50)])
    penalty = torch.tensor([0.3] * 5 + [0.0], dtype=torch.float64)
    bag = LinearBag(design, torch.tensor(y), n_classes, penalty)
    fits = leave_one_out(bag, memory=50 * 32 * n_classes * 7)  # in chunks of a few points
    assert fits.theta.shape == (6, n_classes - 1, 50)
    for i in range(50):
        rest = np.delete(np.arange(50), i)
        single = LinearBag(design[rest], torch.tensor(y[rest]), n_classes, penalty)
        # Both are within their certified error, in logits, of the same minimiser.
        difference = (design @ (fits.theta[:, :, i] - single.base.theta)).abs().max()
        assert difference <= 2 * (float(fits.error[i]) + single.base.error_at(design.T).max())
    assert float(fits.error.max()) < 1000 * CONVERGED  # what rounding leaves, 15 on one machine and 120 on another
