"""Full CP of any classifier by refits equals three literal loops, and a killed run goes on where it stopped."""

import json
import re
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import joblib
import numpy as np
import pytest
from joblib.parallel import ThreadingBackend
from scipy.special import log_softmax
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.tree import DecisionTreeClassifier

from fullconformal import FullConformalClassifier
from fullconformal.methods import refit as refits
from fullconformal.methods.refit import duration, estimate, refit_counts, tasks
from fullconformal.pvalues import comparison_weight, p_values

ESTIMATORS = [
    LogisticRegression(solver="newton-cholesky", tol=1e-10),
    GaussianNB(),
    DecisionTreeClassifier(max_depth=2, random_state=0),
]


def problem(n=12, m=3, C=3, seed=0):
    """Training points (n, 2) of C classes, all present, and test points (m, 2)."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % C)
    return rng.normal(size=(n, 2)) + y[:, None], y, C, rng.normal(size=(m, 2)) + 1


def fitter(estimator, C):
    """fit_score of a scikit-learn classifier; a local function, so that it travels to other processes by value."""

    def fit_score(X, y):
        model = clone(estimator).fit(X, y)

        def log_probability(X):
            out = np.full((len(X), C), -np.inf)
            with np.errstate(divide="ignore"):
                out[:, model.classes_] = np.log(model.predict_proba(X))
            return out

        return log_probability

    return fit_score


def literal_counts(fit_score, X, y, C, X_test, q, weight=None):
    """The definition, loop by loop: greater and equal (m, C)."""
    weight = np.ones((len(y), C)) if weight is None else weight
    greater, equal = np.zeros((2, len(X_test), C))
    for j, x in enumerate(X_test):
        for label in range(C):
            X_bag, y_bag = np.vstack([X, x]), np.append(y, label)
            everyone = fit_score(X_bag, y_bag)
            tau = -(fit_score(X, y) if q else everyone)(x[None])[0, label]
            for i in range(len(y)):
                model = fit_score(np.delete(X_bag, i, 0), np.delete(y_bag, i)) if q else everyone
                alpha = -model(X[i : i + 1])[0, y[i]]
                tied = alpha == tau or abs(alpha - tau) <= 1e-12 * tau < np.inf
                greater[j, label] += weight[i, label] * (alpha > tau and not tied)
                equal[j, label] += weight[i, label] * tied
    return greater, equal


def counter(log, pause):
    """fit_score that takes its time and leaves a byte in the file for each fit."""

    def fit_score(X, y):
        with open(log, "ab") as file:
            file.write(b".")
        time.sleep(pause)
        centres = [X[y == label].mean(0) for label in range(2)]

        def log_probability(X):
            logits = -np.stack([((X - centre) ** 2).sum(1) for centre in centres], axis=1)
            return logits - np.logaddexp(logits[:, 0], logits[:, 1])[:, None]

        return log_probability

    return fit_score


def counted_run(log, folder, pause=0.005, **options):
    """Counts of a problem of 61 fits, kept in the folder."""
    X, y, C, X_test = problem(n=15, m=2, C=2)
    return refit_counts(counter(log, pause), X, y, C, X_test, 1, checkpoint=folder, key="centres", **options)


def fits(log):
    return Path(log).stat().st_size if Path(log).exists() else 0


def kept(folder):
    """Number of fits whose scores are in the folder."""
    ranges = [path.name.split(".")[0].split("-") for path in Path(folder).glob("*-*.npy")]
    return sum(int(stop) - int(start) for start, stop in ranges)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("q", [0, 1])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_refits_equal_the_definition(estimator, q, conditional):
    X, y, C, X_test = problem()
    weight = comparison_weight(y, C, class_conditional=True, weights=np.linspace(1, 2, len(y))) if conditional else None
    counts = refit_counts(fitter(estimator, C), X, y, C, X_test, q, weight)
    expected = literal_counts(fitter(estimator, C), X, y, C, X_test, q, weight)
    assert counts[0].shape == counts[1].shape == (3, C)
    assert counts[0].dtype == counts[1].dtype == np.float64
    np.testing.assert_allclose(counts, expected, rtol=1e-14)


class ListsOnly(ThreadingBackend):
    """As joblib's multiprocessing backend, which cannot hand over results before all are there."""

    supports_return_generator = False


@pytest.mark.parametrize("q", [0, 1])
def test_workers_and_backends_agree(q):
    X, y, C, X_test = problem()
    weight = comparison_weight(y, C, weights=np.linspace(1, 2, len(y)))
    fit_score = fitter(GaussianNB(), C)
    one = refit_counts(fit_score, X, y, C, X_test, q, weight, n_jobs=1)
    np.testing.assert_array_equal(one, refit_counts(fit_score, X, y, C, X_test, q, weight, n_jobs=2))
    for backend in (ThreadingBackend(), ListsOnly()):
        with joblib.parallel_config(backend, n_jobs=2):
            np.testing.assert_array_equal(one, refit_counts(fit_score, X, y, C, X_test, q, weight))


def test_the_last_point_of_a_class_is_infinitely_strange_without_it():
    X, y, C, X_test = problem(n=10)
    y = np.where(y == 2, 0, y)
    y[3] = 2
    greater, _ = refit_counts(fitter(GaussianNB(var_smoothing=1e-3), C), X, y, C, X_test, 1, np.eye(10)[:, [3, 3, 3]])
    np.testing.assert_array_equal(greater[:, :2], 1)  # with a candidate of its own class it is not alone


def first_point(X, y):
    """fit_score that knows only the first point of its bag: as dependent on the order of rows as can be."""
    return lambda points: np.log1p([[abs(x[0] - X[0, 0]), y[0] + 1.0] for x in points])


@pytest.mark.parametrize("q", [0, 1])
def test_the_order_of_the_training_points_does_not_matter(q):
    X, y, C, X_test = problem(C=2)
    shuffled = np.random.default_rng(1).permutation(len(y))
    counts = refit_counts(first_point, X, y, C, X_test, q)
    np.testing.assert_array_equal(counts, refit_counts(first_point, X[shuffled], y[shuffled], C, X_test, q))


@pytest.mark.parametrize("q", [0, 1])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_a_candidate_equal_to_a_training_point_is_tied_with_it(estimator, q):
    X, y, C, _ = problem()
    for i in range(2):
        own = np.repeat(np.eye(len(y))[:, [i]], C, axis=1)
        _, equal = refit_counts(fitter(estimator, C), X, y, C, X[i : i + 1], q, own)
        assert equal[0, y[i]] == 1


@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, None), (np.float64, np.finfo(np.float32).eps)])
def test_equal_points_are_tied_in_the_precision_of_the_model(dtype, eps):
    """As compiled products do, every other row is summed in another order: equal points have scores that differ by rounding."""
    rng = np.random.default_rng(0)
    X, y, C = rng.normal(size=(30, 64)).astype(np.float32), rng.integers(3, size=30), 3
    W = (X.T @ np.eye(C, dtype=np.float32)[y]) / 8

    def fit_score(_, __):
        def log_probability(X):
            rows = zip(X.astype(np.float32), cycle([slice(None), slice(None, None, -1)]), strict=False)
            z = np.array([np.add.reduce(x[way, None] * W[way]) for x, way in rows])
            return log_softmax(z.astype(np.float64), axis=1)

        return log_probability

    exact = 0
    for i in range(len(y)):
        own = np.repeat(np.eye(len(y))[:, [i]], C, axis=1)
        bag = X.astype(dtype), y, C, X[i : i + 1].astype(dtype)
        assert refit_counts(fit_score, *bag, 0, own, eps=eps)[1][0, y[i]] == 1
        exact += refit_counts(fit_score, *bag, 0, own, eps=0.0)[1][0, y[i]]
    assert exact < len(y)  # rounding is there


def test_no_test_points():
    X, y, C, _ = problem()
    assert [part.shape for part in refit_counts(fitter(GaussianNB(), C), X, y, C, X[:0], 1)] == [(0, C), (0, C)]


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, n_jobs):
    log, folder = tmp_path / "log", tmp_path / "scores"
    child = subprocess.Popen([sys.executable, __file__, str(log), str(folder), str(n_jobs)])
    try:
        until = time.monotonic() + 100
        while kept(folder) < 15 and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    before = -1
    while before < fits(log):  # the killed run's workers finish the tasks they have
        before = fits(log)
        time.sleep(0.3)
    found, sentences, steps = kept(folder), [], []
    assert 15 <= found < 60
    resumed = counted_run(log, folder, report=sentences.append, progress=lambda *state: steps.append(state))
    assert fits(log) - before == 60 - found
    assert "found in the checkpoint" in sentences[0]
    assert steps[-1] == (60, 60)
    again = fits(log)
    np.testing.assert_array_equal(resumed, counted_run(log, folder))
    assert fits(log) == again  # nothing was left to do
    np.testing.assert_array_equal(resumed, counted_run(log, None))


def damaged_middle(content):
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("damage", [damaged_middle, lambda content: content[:-5], lambda content: b""])
def test_a_damaged_part_is_computed_again(tmp_path, damage):
    log = tmp_path / "log"
    expected = counted_run(log, tmp_path / "scores")
    parts = sorted((tmp_path / "scores").glob("*.npy"), key=lambda path: path.stat().st_size)
    size, before, sentences = len(np.load(parts[-1])), fits(log), []
    for path in (parts[-1], next((tmp_path / "scores").glob("tau.*"))):
        path.write_bytes(damage(path.read_bytes()))
    np.testing.assert_array_equal(expected, counted_run(log, tmp_path / "scores", report=sentences.append))
    assert fits(log) - before == size + 1
    assert [("damaged" in sentence) for sentence in sentences[:2]] == [True, True]
    assert kept(tmp_path / "scores") == 60


def test_a_checkpoint_serves_its_own_problem_only(tmp_path):
    X, y, C, X_test = problem()
    folder = tmp_path / "scores"
    options = {"checkpoint": folder, "key": "naive Bayes"}
    fit_score = fitter(GaussianNB(), C)
    refit_counts(fit_score, X, y, C, X_test, 0, **options)
    weight = comparison_weight(y, C, class_conditional=True)  # the scores do not depend on it
    counts = refit_counts(None, X, y, C, X_test, 0, weight, **options)
    np.testing.assert_array_equal(counts, refit_counts(fit_score, X, y, C, X_test, 0, weight))
    others = [
        (X + 1e-9, y, C, X_test, 0),
        (X, np.roll(y, 1), C, X_test, 0),
        (X, y, C + 1, X_test, 0),
        (X, y, C, X_test[:2], 0),
        (X, y, C, X_test, 1),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"scores' holds scores of other data .* choose another, or delete"):
            refit_counts(fit_score, *other, **options)
    with pytest.raises(ValueError, match="another model"):
        refit_counts(fit_score, X, y, C, X_test, 0, checkpoint=folder, key="naive Bayes, smoothed")
    with pytest.raises(ValueError, match="without key"):
        refit_counts(fit_score, X, y, C, X_test, 0, checkpoint=folder)
    assert json.loads((folder / "header.json").read_text())["key"] == "naive Bayes"
    (folder / "header.json").write_text("{")
    with pytest.raises(ValueError, match="without a readable header"):
        refit_counts(fit_score, X, y, C, X_test, 0, **options)
    (folder / "header.json").unlink()
    with pytest.raises(ValueError, match="without a readable header"):
        refit_counts(fit_score, X, y, C, X_test, 0, **options)


def test_the_estimate_comes_before_the_work(tmp_path):
    log, sentences = tmp_path / "log", []
    counted_run(log, None, report=lambda sentence: sentences.append((sentence, fits(log))))
    [(sentence, at)] = sentences
    assert at <= 3
    assert re.fullmatch(rf"{61 - at} refits of about [\d.]+ ms on 1 worker: about [\d.,]+ (ms|seconds)", sentence)
    assert estimate(150_000, 50_200, 0.012, 2).endswith("about 15 minutes (50,200 more were found in the checkpoint)")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.00035, "0.35 ms"), (1.31, "1,300 ms"), (45, "45 seconds"), (7300, "2 hours"), (5e6, "58 days"), (0, "0 ms")],
)
def test_durations_are_said_in_their_unit(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("seconds", [1e-4, 0.012, 0.3, 60])
@pytest.mark.parametrize("stride", [1, 7, 1000])
def test_tasks_cover_the_fits_left(stride, seconds, workers):
    done = np.random.default_rng(0).random(10 * stride) < 0.01
    left = np.flatnonzero(~done)
    ranges = tasks(left, stride, seconds, workers)
    np.testing.assert_array_equal(np.concatenate([np.arange(*ends) for ends in ranges]), left)
    assert len(ranges) >= min(len(left), 2 * workers)
    for start, stop in ranges:
        alone = start // stride == (stop - 1) // stride
        assert alone or (stop - start) * seconds <= refits.TASK_SECONDS


def test_bad_input_is_refused():
    X, y, C, X_test = problem()
    fit_score = fitter(GaussianNB(), C)
    with pytest.raises(ValueError, match=r"q=0\.5: .* q = 0 \(ordinary\) and q = 1 \(deleted\)"):
        refit_counts(fit_score, X, y, C, X_test, 0.5)
    with pytest.raises(TypeError, match="Python objects"):
        refit_counts(fit_score, X.astype(object), y, C, X_test, 0)
    with pytest.raises(ValueError, match=r"shape \(13, 2\), not \(13, 3\)"):
        refit_counts(lambda X, y: lambda X: np.zeros((len(X), 2)), X, y, C, X_test, 0)
    with pytest.raises(ValueError, match="NaN"):
        refit_counts(lambda X, y: lambda X: np.full((len(X), C), np.nan), X, y, C, X_test, 1)


def test_p_values_are_valid_where_the_order_of_rows_decides_everything():
    """P(p ≤ 1/10) = 1/10 over 400 bags, within three standard errors: the learner finds only the last row of its bag strange."""

    def fit_score(X, y):
        return lambda points: -1.0 * np.tile((points == X[-1]).all(1)[:, None], (1, 2))

    rng, n, errors = np.random.default_rng(0), 9, 0
    for _ in range(400):
        X, y = rng.normal(size=(n + 1, 2)), rng.integers(0, 2, n + 1)
        counts = refit_counts(fit_score, X[:n], y[:n], 2, X[n:], 0)
        errors += p_values(*counts, n)[0, y[n]] <= 0.1
    assert abs(errors - 40) <= 3 * 6


if __name__ == "__main__":  # the run that is killed
    counted_run(sys.argv[1], sys.argv[2], pause=0.03, n_jobs=int(sys.argv[3]))


def test_a_checkpoint_serves_its_own_labels_only(tmp_path):
    """By their names a classifier may have been told of classes."""
    X, y, _, X_test = problem()
    bayes = FullConformalClassifier(BernoulliNB(), method="exact", scheme="ordinary", checkpoint=tmp_path / "run")
    p = bayes.fit(X, y).predict_p(X_test[:1])
    assert np.array_equal(bayes.fit(X, y).predict_p(X_test[:1]), p)
    with pytest.raises(ValueError, match="scores of other data or another model"):
        bayes.fit(X, y + 1).predict_p(X_test[:1])
