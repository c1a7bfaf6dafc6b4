"""Long work: tasks that joblib runs on this machine or on a cluster, their results kept as they come, and how far they have come.

A worker that is lost costs the tasks it had: Dask gives them to another, and where that cannot be (data that only it held or was about
to get, a pool of processes that is broken) what is unfinished is started again here. A cluster that is lost is an error of its
own, which says where the finished parts are.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import joblib
from joblib.parallel import get_active_backend
from torch.autograd import profiler
from torch.profiler import record_function

from fullconformal.pvalues import FloatArray
from fullconformal.runtime.files import Parts

#: told how much is done, of how much
Progress = Callable[[int, int], None]


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark a stage, as a context or a decorator: `torch.profiler` shows it as ``fullconformal.<name>``."""
    with record_function(f"fullconformal.{name}") if profiler._is_profiler_enabled else nullcontext():
        yield


# Seconds beyond which nobody is left to wait in silence.
LONG = 10.0


@contextmanager
def progress_bar(label: str, shown: int | None) -> Iterator[Progress]:
    """A callback (done, total) that draws a progress bar with the time left; `nobody` where it is not shown.

    Where ``shown`` is None it is shown once the work is seen to take more than about ten seconds, with the time it will take: as a bar
    on a terminal and in a notebook, as one line on standard error elsewhere. Ten seconds without a first part done are told of as well.
    """
    if shown is not None and not shown:
        yield nobody
        return
    watch = Watch(label, automatic=shown is None)
    try:
        yield watch
    finally:
        watch.close()


def nobody(done: int, total: int) -> None:
    """Who is told of progress where none is shown."""


def onwards(progress: Progress, before: int, size: int, whole: int) -> Progress:
    """Progress with some objects, as many as `size`, of the whole, of which others were done before."""
    # In thousandths: one object may take many refits.
    return lambda done, total: progress(1000 * before + 1000 * size * done // max(total, 1), 1000 * whole)


class Watch:
    """Progress as it is told: when to show it, and where."""

    def __init__(self, label: str, automatic: bool):
        self.label, self.began, self.told = label, time.monotonic(), False
        self.bar: Any = None
        self.task: Any = None
        self.first: tuple[int, float] | None = None
        self.drawing = Lock()
        # A first part may take long itself.
        self.timer = Timer(LONG, self.overdue)
        self.timer.name, self.timer.daemon = f"fullconformal: {label}", True
        if not automatic:
            self.draw(label, stderr=False)
            return
        with suppress(RuntimeError):  # no more threads, or the interpreter is about to end: nothing is said
            self.timer.start()

    def __reduce__(self) -> tuple[Any, ...]:
        """A fitted predictor keeps what it was fitted with: a copy of that, or a pickle, tells nobody."""
        return partial, (nobody,)

    def __call__(self, done: int, total: int) -> None:
        """So much is done, of so much."""
        if not self.told and 0 < done < total:
            seconds = self.estimate(done, total)
            if seconds > LONG:
                with self.drawing:
                    self.told = True
                    self.draw(f"{self.label}: about {duration(seconds)}")
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)

    def overdue(self) -> None:
        """Say that it takes long, where how long is not known yet."""
        with self.drawing, suppress(OSError, ValueError):  # nobody listens any more
            if not self.told:
                self.draw(f"{self.label}: more than {duration(LONG)}")

    def estimate(self, done: int, total: int) -> float:
        """How long all of it takes, by the pace since the first word; 0 where it is too early to tell."""
        spent = time.monotonic() - self.began
        if self.first is None:
            # What was made ready once is in the first word: it counts where that took a minute itself, or a third of all is done.
            self.first = done, spent
            return spent * total / done if spent > 6 * LONG or 3 * done >= total else 0.0
        at, then = self.first
        return spent + (spent - then) * (total - done) / (done - at) if spent > 1 and done > at else 0.0

    def draw(self, sentence: str, stderr: bool = True) -> None:
        """A bar where there is a screen; elsewhere the sentence, which says more than the label."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=stderr)
        if not console.is_terminal and not console.is_jupyter:
            if sentence != self.label:
                console.print(sentence, highlight=False, soft_wrap=True)
        elif self.bar is not None:
            self.bar.update(self.task, description=sentence)
        else:
            columns = "{task.description}", BarColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn()
            bar = Progress(*columns, transient=True, console=console)
            self.task = bar.add_task(sentence, total=None)
            self.bar = bar
            bar.start()

    def close(self) -> None:
        """Take the bar away."""
        self.timer.cancel()
        with self.drawing:
            self.told = True
            if self.bar is not None:
                self.bar.stop()


def duration(seconds: float) -> str:
    """A time in its unit, to two digits.

    >>> duration(0.012), duration(1201), duration(432_000)
    ('12 ms', '20 minutes', '5 days')
    """
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1), ("ms", 0.001))
    unit, size = next(((unit, size) for unit, size in units if seconds >= 2 * size), units[-1])
    return f"{float(f'{seconds / size:.2g}'):,g} {unit}"


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a call returns, and the seconds it took."""
    start = time.perf_counter()
    return call(*arguments), time.perf_counter() - start


Call = tuple[Any, ...]  # a function and its arguments

ATTEMPTS = 5  # at the same tasks, without one more of them finished
IDLE = 30.0  # seconds for which workers may have no task of ours, as large data are on their way; twice as many at each attempt
# Dask's loss of data, a pool's loss of a process, joblib's end of patience (its own type), joblib's wait for a first worker.
TROUBLE = (CancelledError, BrokenExecutor, multiprocessing.TimeoutError, TimeoutError)


def say_nothing(sentence: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Work:
    """Who does the work and where finished parts are kept: an estimator's n_jobs, checkpoint and verbose."""

    n_jobs: int | None = None
    checkpoint: Any = None
    say: Callable[[str], None] = say_nothing

    def parts(self, folder: str = "") -> Parts:
        """The folder of finished parts, or one inside."""
        return Parts(None if self.checkpoint is None else Path(self.checkpoint) / folder, self.say)

    @property
    def shared(self) -> bool:
        """Whether there is more than this process to do it, or a folder to keep it in."""
        return self.checkpoint is not None or cluster() is not None or joblib.effective_n_jobs(self.n_jobs) > 1


class ClusterError(RuntimeError):
    """The workers are lost, or lose every task they are given. Finished parts are in the checkpoint's folder, where there is one."""


def workers(n_jobs: int | None, parts: Parts) -> int:
    """Number of tasks that run at once; waits a moment for a cluster that has no worker yet."""
    client = cluster()
    if client is not None and client.status != "running":
        raise lost(parts, f"its client is {client.status}")
    try:
        return int(joblib.effective_n_jobs(n_jobs))
    except TimeoutError as error:
        raise lost(parts, "it has no worker") from error


def cluster() -> Any:
    """Dask's client where joblib's active backend is a cluster, else None."""
    return getattr(get_active_backend()[0], "client", None)


def finished(
    calls: Mapping[str, Call], parts: Parts, n_jobs: int | None, attempts: int = ATTEMPTS
) -> Iterator[tuple[str, FloatArray]]:
    """Name and result of every call, as they finish and after they are kept; so many attempts without one more of them finished."""
    left, failed = dict(calls), 0
    while left:
        before, client = len(left), cluster()
        try:
            for name, result in as_finished(left, n_jobs, IDLE * 2**failed):
                parts.write(name, result)
                del left[name]
                yield name, result
        except Exception as error:
            gone = client is not None and not staffed(client)
            if not gone and not isinstance(error, TROUBLE):
                raise
            failed = failed + 1 if len(left) == before else 1
            if gone or failed == attempts:
                reason = str(error) or ("no worker is left" if gone else "its workers do not finish their tasks")
                raise lost(parts, f"{reason}; {len(left)} of {len(calls)} parts are unfinished") from error
            parts.say(f"workers were lost: {len(left)} parts are started again")


def as_finished(calls: Mapping[str, Call], n_jobs: int | None, idle: float) -> Iterator[tuple[str, FloatArray]]:
    """Name and result of joblib's calls as they come; wave by wave from a backend that gives back lists only."""
    jobs = [joblib.delayed(_named)(name, *call) for name, call in calls.items()]
    backend = get_active_backend()[0]
    patience = Patience(backend.client, backend.wait_for_workers_timeout, idle) if cluster() is not None else None
    try:
        pool = joblib.Parallel(n_jobs=n_jobs, batch_size=1, return_as="generator_unordered", timeout=patience)
    except ValueError:
        pool = joblib.Parallel(n_jobs=n_jobs, batch_size=1)
        wave = 4 * joblib.effective_n_jobs(n_jobs)
        for at in range(0, len(jobs), wave):
            yield from pool(jobs[at : at + wave])
    else:
        yield from pool(jobs)


def _named(name: str, function: Callable[..., FloatArray], *args: Any) -> tuple[str, FloatArray]:
    return name, function(*args)


def lost(parts: Parts, reason: str) -> ClusterError:
    """The error that says what is left of the work."""
    kept = f"What was finished is kept in {str(parts.folder)!r}: the same call with the same data goes on from there."
    if parts.folder is None:
        kept = "Nothing was kept, as no checkpoint was given: with checkpoint='a folder' a run that is started again goes on."
    return ClusterError(f"the cluster is lost ({reason}). {kept}")


def staffed(client: Any) -> bool:
    """Whether a cluster can be reached and has workers."""
    try:
        return client.status == "running" and bool(client.ncores())
    except (OSError, TimeoutError):
        return False


class Patience(float):
    """A timeout for joblib, which asks whether it is below the time waited while no result comes: once nothing goes on, not before.

    Dask waits for workers for ever, and joblib for tasks that Dask has given up or never got, because a worker died while data went
    to it: all look like a long task from here.
    """

    client: Any
    grace: float
    idle: float
    asked: float
    well: float

    def __new__(cls, client: Any, grace: float, idle: float) -> Patience:
        self = super().__new__(cls, math.inf)
        self.client, self.grace, self.idle = client, grace, idle
        self.asked = self.well = time.monotonic()
        return self

    def __lt__(self, waited: float) -> bool:
        now = time.monotonic()
        if now - self.asked < 1:
            return False
        silent = now - self.asked > 10  # results came meanwhile, so nobody asked
        manned = staffed(self.client)
        if silent or (manned and self.busy()):
            self.well = time.monotonic()
        self.asked = time.monotonic()
        return self.asked - self.well > (self.idle if manned else self.grace)

    def busy(self) -> bool:
        """Whether the workers have tasks or results of joblib's."""
        try:
            held = [*self.client.processing().values(), *self.client.has_what().values()]
        except (OSError, TimeoutError):
            return False
        return any(str(key).startswith("batch_of_") for keys in held for key in keys)
