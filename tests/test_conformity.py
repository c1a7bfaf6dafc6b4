"""Scores of labels against their literal definitions, and what is known of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import label_score

from fullconformal.conformity import APS, LAMBDAS, RAPS, SCORES, ranks, threshold

# Small whole numbers make ties and zeros common; 2 to 6 labels, a few objects.
weights = st.integers(2, 6).flatmap(
    lambda c: st.lists(st.lists(st.integers(0, 4), min_size=c, max_size=c).filter(any), min_size=1, max_size=5)
)


def distributions(rows):
    rows = np.array(rows, dtype=float)
    return rows / rows.sum(1, keepdims=True)


@settings(deadline=None)
@given(weights, st.sampled_from(sorted(SCORES)), st.floats(0, 1), st.integers(0, 4), st.floats(0, 2))
def test_scores_equal_their_definitions(rows, score, u, k_reg, lambda_reg):
    pi = distributions(rows)
    with np.errstate(divide="ignore"):  # a probability of zero has an infinite loss
        log_pi = np.log(pi)
        made = RAPS(False, k_reg, lambda_reg) if score == "raps" else SCORES[score]()
        got = made.scores(log_pi, np.full(len(pi), u))
        # exp(log π) is π to about an ulp; sums of at most six such numbers.
        pi = np.exp(log_pi)
        wanted = [[label_score(row, y, score, u, k_reg, lambda_reg) for y in range(pi.shape[1])] for row in pi]
    finite = np.isfinite(wanted)
    assert np.array_equal(finite, np.isfinite(got))
    assert np.abs(got[finite] - np.array(wanted)[finite]).max(initial=0) < 1e-14


@settings(deadline=None)
@given(weights, st.floats(0, 1))
def test_adaptive_scores_grow_with_the_rank(rows, u):
    """So sets of APS and RAPS are the likeliest labels up to some rank, at every level."""
    pi = distributions(rows)
    order, _ = ranks(pi)
    with np.errstate(divide="ignore"):
        log_pi = np.log(pi)
    for score in (APS(), RAPS(k_reg=1, lambda_reg=0.1)):
        scores = score.scores(log_pi, np.full(len(pi), u))
        assert (np.diff(np.take_along_axis(scores, order, 1), axis=1) >= -1e-15).all()


@settings(deadline=None)
@given(weights)
def test_the_last_labels_tie_at_one(rows):
    """Unrandomised, the last label of every object has the same score, not one that differs by rounding."""
    pi = distributions(rows)
    _, rank = ranks(pi)
    with np.errstate(divide="ignore"):
        scores = APS().scores(np.log(pi))
    assert (scores[rank == pi.shape[1] - 1] == 1.0).all()
    assert (scores[pi == 0] == 1.0).all()


def test_never_empty_leaves_the_first_label_unrandomised():
    pi = np.array([[0.2, 0.5, 0.3]])
    assert APS(never_empty=True).scores(np.log(pi), np.array([0.5]))[0].tolist() == pytest.approx([0.9, 0.5, 0.65])
    assert APS().scores(np.log(pi), np.array([0.5]))[0].tolist() == pytest.approx([0.9, 0.25, 0.65])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.5]))
def test_the_threshold_is_the_order_statistic(scores, epsilon):
    k = next(k for k in range(1, len(scores) + 2) if k >= (1 - epsilon) * (len(scores) + 1) - 1e-9)
    wanted = sorted(scores)[k - 1] if k <= len(scores) else np.inf
    assert threshold(np.array(scores, dtype=float), epsilon) == wanted


def test_raps_is_tuned_for_size():
    rng = np.random.default_rng(0)
    pi = rng.dirichlet(np.full(8, 0.3), size=300)
    y = np.array([rng.choice(8, p=row) for row in pi])
    u = rng.uniform(size=300)
    tuned = RAPS().tuned(np.log(pi), y, 0.1, u)
    k_reg, lambda_reg = tuned.k_reg, tuned.lambda_reg
    rank = [sorted(-row).index(-row[label]) + 1 for row, label in zip(pi, y, strict=True)]
    assert k_reg == sorted(rank)[int(np.ceil(0.9 * 301)) - 1]

    def size(value):
        scores = np.array(
            [[label_score(row, k, "raps", v, k_reg, value) for k in range(8)] for row, v in zip(pi, u, strict=True)]
        )
        return (scores <= np.sort(scores[np.arange(300), y])[int(np.ceil(0.9 * 301)) - 1]).sum()

    assert lambda_reg == min(LAMBDAS, key=size)
    assert RAPS(False, 3, 0.7).tuned(np.log(pi), y, 0.1, u) == RAPS(False, 3, 0.7)


@pytest.mark.parametrize("score", SCORES)
def test_the_sensitivity_bounds_the_derivatives(score):
    """½ Σ_j |∂s/∂f_j| by central differences: their error is h² and units over h, both below 1e-6 for h = 1e-5."""
    made, h = RAPS(False, 1, 0.1) if score == "raps" else SCORES[score](), 1e-5
    f = np.random.default_rng(0).normal(size=(50, 4))

    def scores(f):
        return made.scores(f - np.logaddexp.reduce(f, axis=1, keepdims=True), np.full(len(f), 0.3))

    steps = h * np.eye(4)
    slopes = np.stack([(scores(f + step) - scores(f - step)) / (2 * h) for step in steps])
    log_pi = f - np.logaddexp.reduce(f, axis=1, keepdims=True)
    assert (np.abs(slopes).sum(0) / 2 <= made.sensitivity(scores(f), log_pi) + 1e-6).all()


@pytest.mark.parametrize("made", [APS(), RAPS(k_reg=1, lambda_reg=0.5)])
def test_probabilities_that_differ_by_rounding_are_ranked_alike(made):
    pi = np.array([[0.4, 0.4, 0.2], [0.4, 0.4 + 8e-16, 0.2 - 8e-16], [0.4 + 8e-16, 0.4, 0.2 - 8e-16]])
    scores = made.scores(np.log(pi), np.full(3, 0.3))
    # A few units of numbers up to 2.
    assert np.ptp(scores, axis=0).max() < 1e-14
