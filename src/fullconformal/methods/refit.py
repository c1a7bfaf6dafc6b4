"""Full conformal prediction of any classifier or regressor, by honest refits.

    ordinary (q = 0)    α_i = ℓ(z_i; Z ∪ ẑ)              α_{n+1} = ℓ(ẑ; Z ∪ ẑ)        m·C fits
    deleted  (q = 1)    α_i = ℓ(z_i; Z ∪ ẑ ∖ z_i)        α_{n+1} = ℓ(ẑ; Z)            m·C·n + 1 fits

ℓ(z; bag) is the log loss at z of a model trained on the bag, of a regressor the absolute residual. Every bag is handed over in an order
that depends on its points alone (that of their hashes), so training that is reproducible is a symmetric function of the bag, as the
guarantee asks, even where it depends on the order of its rows; and a candidate equal to a training point is tied with it.

Fits are numbered, candidate by candidate; a task is a range of them. Finished tasks are kept in the checkpoint's folder, one file each,
so a run that was killed goes on from there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal import pvalues
from fullconformal.guarantees import EXACT
from fullconformal.methods.base import TIED, Bag, Config, Fitted, FloatArray, Method, NeverSaved, Query
from fullconformal.methods.fitting import FitScore, settings_of
from fullconformal.runtime.files import Parts, fingerprint
from fullconformal.runtime.tasks import Progress, Work, duration, finished, nobody, say_nothing, workers
from fullconformal.storage import savable

Array = npt.NDArray[Any]
LogProbability = Callable[[Array], Array]
Train = Callable[[Array, Array], LogProbability]

TASK_SECONDS = 1.0


def refit_counts(
    fit_score: Train, X: Array, y: Array, n_classes: int, X_test: Array, q: float, weight: FloatArray | None = None, n_jobs: int |
    None = None, checkpoint: str | os.PathLike[str] | None = None, progress: Progress = nobody, report: Callable[[str], None]
    = say_nothing, *, key: str = "", eps: float | None = None,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Weight (m, C) of the training points whose score is above, and tied with, each candidate's.

    Parameters
    ----------
    fit_score : callable (X_bag, y_bag) -> callable (X) -> array (k, C)
        Trains a fresh model on a bag and returns the function that gives its log-probabilities. Both must be picklable where joblib's
        backend uses processes. A bag may lack a class, or hold a single one: the log-probability of a class that the model does
        not know must be −inf, and the score of its points is then +inf, as nonconforming as can be.
    X, y : array (n, ...), array (n,)
        Training points and their label indices 0, ..., C − 1.
    n_classes : int
        C.
    X_test : array (m, ...)
        Test points; every label of each is a candidate.
    q : {0, 1}
        Ordinary or deleted scores.
    weight : array (n, C), optional
        As in `pvalues`; it may differ between a run and its continuation.
    n_jobs : int, optional
        Workers, as joblib counts them.
    checkpoint : path, optional
        Folder that keeps the finished scores; it is made where there is none.
    progress : callable (done, total), optional
        Told the number of finished fits.
    report : callable (str), optional
        Told how long the work will take before it starts, and what could not be read from the checkpoint.
    key : str
        Names the model and its settings; a checkpoint is used only with the data, scheme and key that it was made with.
    eps : float, optional
        The unit of rounding in which models give log-probabilities; by default that of X.

    Examples
    --------
    >>> def fit_score(X, y):  # the share of each label in the bag, whatever x is
    ...     share = (np.bincount(y, minlength=2) + 1) / (len(y) + 2)
    ...     return lambda X: np.log(np.tile(share, (len(X), 1)))
    >>> greater, equal = refit_counts(fit_score, np.zeros((3, 1)), np.array([0, 0, 1]), 2, np.zeros((1, 1)), q=0)
    >>> pvalues.p_values(greater, equal, 3)
    array([[1., 1.]])
    """
    X, y, X_test = np.asarray(X), np.asarray(y), np.asarray(X_test)
    check(X, X_test, q, checkpoint is not None and not key)
    n, m = len(X), len(X_test)
    labels = np.tile(np.arange(n_classes), (m, 1))
    refits = Refits.of(fit_score, X, y, X_test, labels, q == 1, LabelLosses(n_classes))
    parts = Work(n_jobs, checkpoint, report).parts()
    digest = fingerprint(repr((n_classes, int(q), key)), X, y, X_test)
    parts, _ = parts.open({"fingerprint": digest, "key": key, "q": int(q), "n": n, "m": m})
    eps = float(np.finfo(X.dtype if X.dtype.kind == "f" else np.float64).eps) if eps is None else eps
    blocks = orders(refits, parts, eps, n_jobs, progress).reshape(m, n_classes, n)
    comparison = None if weight is None else np.asarray(weight).T
    counts = [pvalues.count(block, 0, 0.0, comparison, axis=-1) for block in blocks]
    greater, equal = np.array(counts, dtype=np.float64).reshape(m, 2, n_classes).swapaxes(0, 1)
    return greater, equal


def check(X: Array, X_test: Array, q: float, unnamed: bool) -> None:
    """Raise where the scores are no refits, where points have no bytes of their own, or where a checkpoint has no name."""
    if q not in (0, 1):
        raise ValueError(
            f"q={q}: refits give full CP for q = 0 (ordinary) and q = 1 (deleted); no fit leaves a point out by a fraction."
        )
    if X.dtype.hasobject or X_test.dtype.hasobject:
        raise TypeError(
            "X holds Python objects; give numbers: the bags are ordered, and checkpoints named, by its bytes."
        )
    if unnamed:
        raise ValueError("checkpoint was given without key: give a string that names the model and its settings.")


def orders(refits: Refits, parts: Parts, eps: float, n_jobs: int | None, progress: Progress) -> npt.NDArray[np.int8]:
    """Order (m·C, n) of the scores α_i against those of the candidates."""
    n = len(refits.y)
    order = np.zeros((refits.candidate_hashes.size, n), dtype=np.int8)
    if not refits.total:
        return order
    tau, seconds = candidate_scores(refits, parts) if refits.deleted else (None, [])
    for start, scores in run(refits, parts, seconds, n_jobs, progress):
        at = np.arange(start, start + len(scores))
        alpha, own = (scores[:, :-1], scores[:, -1:]) if tau is None else (scores, tau.reshape(-1, 1)[at // n])
        tie = refits.score.tie(own, eps)
        order.reshape(-1, alpha.shape[1])[at] = pvalues.order(alpha, own, tie)
    return order


def run(
    refits: Refits, parts: Parts, seconds: list[float], n_jobs: int | None, progress: Progress
) -> Iterator[tuple[int, FloatArray]]:
    """First number and scores of every range of fits: those kept, one or two that are timed, then the others as they finish."""
    done = np.zeros(refits.total, dtype=bool)

    def counted(name: str, scores: FloatArray) -> tuple[int, FloatArray]:
        start = int(name.split("-")[0])
        done[start : start + len(scores)] = True
        progress(int(done.sum()), refits.total)
        return start, scores

    n = len(refits.y)

    def shape(name: str) -> tuple[int, ...] | None:
        start, stop = map(int, name.split("-"))
        # A fit scores a point, or all of its bag.
        return (stop - start, 1 if refits.deleted else n + 1) if start < stop <= refits.total else None

    for name, scores in parts.read(r"\d{1,12}-\d{1,12}", shape):
        yield counted(name, scores)
    before = int(done.sum())
    for fit in np.flatnonzero(~done)[:2].tolist():
        if len(seconds) < 2 and min(seconds, default=0.0) < TASK_SECONDS:
            began = time.perf_counter()
            scores = refits.scores(fit, fit + 1)
            seconds = [*seconds, time.perf_counter() - began]
            parts.write(f"{fit}-{fit + 1}", scores)
            yield counted(f"{fit}-{fit + 1}", scores)
    left = np.flatnonzero(~done)
    if len(left):
        staff = workers(n_jobs, parts)
        parts.say(estimate(len(left), before, seconds[-1], staff))
        ranges = tasks(left, refits.stride, seconds[-1], staff)
        calls = {f"{start}-{stop}": (refits.scores, start, stop) for start, stop in ranges}
        for name, scores in finished(calls, parts, n_jobs):
            yield counted(name, scores)


def candidate_scores(refits: Refits, parts: Parts) -> tuple[FloatArray, list[float]]:
    """Scores (m, C) of the candidates under the fit on Z, kept or new, and the time of a new fit."""
    for _, tau in parts.read("tau", lambda _: refits.candidate_hashes.shape):
        return tau, []
    began = time.perf_counter()
    tau = refits.candidate_scores()
    seconds = time.perf_counter() - began
    parts.write("tau", tau)
    return tau, [seconds]


@dataclass(frozen=True)
class LabelLosses:
    """Losses of labels, from log-probabilities."""

    n_classes: int

    def __call__(self, outputs: Array, y: Array) -> FloatArray:
        """−log p (k,) of labels y (k,), from log-probabilities (k, C)."""
        losses: FloatArray = -np.asarray(outputs, dtype=np.float64)
        expected = (len(y), self.n_classes)
        if losses.shape != expected:
            raise ValueError(f"fit_score's function gave log-probabilities of shape {losses.shape}, not {expected}.")
        if np.isnan(losses).any():
            raise ValueError("fit_score's function gave NaN as a log-probability; give −inf for what is impossible.")
        return np.asarray(losses[np.arange(len(y)), y])

    def tie(self, own: FloatArray, eps: float) -> FloatArray:
        """How far apart losses are tied with those of candidates."""
        return np.minimum(TIED * eps * np.abs(own), 1.0)


@dataclass(frozen=True)
class Residuals:
    """Absolute residuals of values, the largest of which is given."""

    largest: float

    def __call__(self, outputs: Array, y: Array) -> FloatArray:
        """|y − f| (k,) of values y (k,), from predictions (k, 1)."""
        return np.asarray(np.abs(y - np.asarray(outputs)[:, 0]))

    def tie(self, own: FloatArray, eps: float) -> FloatArray:
        """How far apart residuals are tied with those of candidates."""
        return TIED * eps * (own + self.largest)


@dataclass(frozen=True)
class Refits:
    """The fits that a problem asks for, numbered: points (n+m, ...), labels or values (n,), hashes (n,); those of the candidates (m, C)."""

    fit_score: Train
    points: Array
    y: Array
    hashes: npt.NDArray[np.uint64]
    candidates: Array
    candidate_hashes: npt.NDArray[np.uint64]
    deleted: bool
    score: LabelLosses | Residuals

    @classmethod
    def of(
        cls, fit_score: Train, X: Array, y: Array, X_test: Array, candidates: Array, deleted: bool, score: LabelLosses | Residuals
    ) -> Refits:  # fmt: skip
        """The fits of a bag (n, ...), (n,) and test points (m, ...) with labels or values (m, C) each."""
        points = np.concatenate([X, X_test])
        test = np.repeat(points[len(X) :], candidates.shape[1], axis=0)
        candidate_hashes = hashes(test, candidates.ravel()).reshape(candidates.shape)
        return cls(fit_score, points, y, hashes(points[: len(X)], y), candidates, candidate_hashes, deleted, score)

    @property
    def stride(self) -> int:
        """Fits of one candidate."""
        return len(self.y) if self.deleted else 1

    @property
    def total(self) -> int:
        """Fits of all candidates, that on Z alone left out."""
        return self.candidate_hashes.size * self.stride

    def scores(self, start: int, stop: int) -> FloatArray:
        """Scores of fits start to stop: α_i (k, 1) where deleted, α_1, ..., α_{n+1} (k, n+1) where ordinary."""
        n, rows = len(self.y), []
        for fit in range(start, stop):
            candidate, i = divmod(fit, self.stride)
            j, c = divmod(candidate, self.candidates.shape[1])
            index, y = np.append(np.arange(n), n + j), np.append(self.y, self.candidates[j, c])
            bag = np.argsort(np.append(self.hashes, self.candidate_hashes[j, c]))
            bag = bag[bag != i] if self.deleted else bag
            scored = slice(i, i + 1) if self.deleted else slice(None)
            predict = self.fit_score(self.points[index[bag]], y[bag])
            rows.append(self.score(predict(self.points[index[scored]]), y[scored]))
        return np.stack(rows)

    def candidate_scores(self) -> FloatArray:
        """Scores (m, C) of the candidates under the fit on Z; one point at a time, as a training point is scored."""
        n, bag, rows = len(self.y), np.argsort(self.hashes), []
        predict = self.fit_score(self.points[bag], self.y[bag])
        for j, labels in enumerate(self.candidates):
            outputs = predict(self.points[n + j : n + j + 1])
            rows.append(self.score(np.repeat(outputs, len(labels), axis=0), labels))
        return np.stack(rows)


def hashes(X: Array, y: Array) -> npt.NDArray[np.uint64]:
    """A number (k,) for each labelled point (k, ...), (k,) that depends on the point alone."""
    digests = (
        blake2b(x.tobytes() + str(label).encode(), digest_size=8) for x, label in zip(X, y.tolist(), strict=True)
    )
    return np.array([int.from_bytes(digest.digest(), "big") for digest in digests], dtype=np.uint64)


def tasks(left: npt.NDArray[np.intp], stride: int, seconds: float, workers: int) -> list[tuple[int, int]]:
    """Ranges that cover the fits left: about a second each or more, of one candidate unless its fits take less, some for each worker."""
    second = TASK_SECONDS / seconds
    # No more than 4096 of a run, where candidates can be shared out so.
    size = max(1, math.ceil(min(max(second, len(left) / 4096), len(left) / (4 * workers))))
    # Whole candidates.
    block = stride * max(1, int(min(size, second) // stride))
    number = left // block * block + left % block // size
    cuts = np.flatnonzero((np.diff(left) > 1) | (np.diff(number) > 0)) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(left, cuts)]


def estimate(left: int, before: int, seconds: float, workers: int) -> str:
    """The sentence that says how long the fits left will take.

    >>> estimate(200_200, 0, 0.012, 2)
    '200,200 refits of about 12 ms on 2 workers: about 20 minutes'
    """
    staff = f"{workers} worker{'s' if workers > 1 else ''}"
    found = f" ({before:,} more were found in the checkpoint)" if before else ""
    return f"{left:,} refits of about {duration(seconds)} on {staff}: about {duration(left * seconds / workers)}{found}"


# The method -----------------------------------------------------------------------------------------------------------


@savable
class FittedRefit(NeverSaved, Fitted):
    """The training points, and how a model is trained on any bag of them."""

    method = "exact"
    guarantee = EXACT

    def __init__(self, fit_score: FitScore, bag: Bag):
        super().__init__(bag.y, bag.n_classes)
        self.fit_score, self.X = fit_score, np.asarray(bag.X)
        self.model = fit_score(self.X, self.labels)

    def log_proba(self, X: Any) -> FloatArray:
        return self.model(X)

    def precision(self, X: Any) -> float:
        return self.model.precision(X)

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        config, classes, work = self.fit_score.config, np.asarray(self.fit_score.classes).tolist(), query.work
        # Names an object that cannot be computed with, which in a bag would be one of the points.
        self.model(X)
        # By which a classifier may have been told of classes.
        named = () if classes == list(range(self.n_classes)) else (classes,)
        key = repr((settings_of(self.fit_score.estimator), config.seed, config.l2, config.max_epochs, *named))
        return refit_counts(
            self.fit_score, self.X, self.labels, self.n_classes, np.asarray(X), query.q, self.weight(query),
            work.n_jobs, work.checkpoint, query.progress, work.say, key=key, eps=self.precision(self.X),
        )  # fmt: skip


@savable
class Refit(Method):
    """Full CP itself for any classifier, by honest refits."""

    name = "exact"

    def fit(self, bag: Bag, config: Config) -> FittedRefit:
        return FittedRefit(FitScore(self.model, replace(config, progress=nobody), bag.classes), bag)
