"""How many threads small work is given: two that wait for each other on a busy machine took ten times as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from threading import Lock

import torch
from threadpoolctl import ThreadpoolController

FEW = 2**20  # multiplications that one thread is done with before a second has begun
LITTLE = 2**21  # numbers of a matrix, of whose products threads make nothing


def alone(work: float) -> AbstractContextManager[None]:
    """One thread for passes of so many multiplications, if they are few."""
    return threads(1 if work <= FEW else torch.get_num_threads())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Small matrices want one thread: two that wait for each other on a busy machine took ten times as long.

    The number is restored whatever happens. Torch keeps it for each thread of Python, so that others, at work already, are left as they
    are; one that starts torch meanwhile begins with the same number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Blas:
    """OpenBLAS's threads. They are the whole process's: the first to come takes them, the last to go gives them back."""

    def __init__(self) -> None:
        self.lock, self.inside = Lock(), 0

    @cached_property
    def pools(self) -> ThreadpoolController:
        return ThreadpoolController().select(internal_api="openblas")

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self.limiter = self.pools.limit(limits=1)
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.limiter.restore_original_limits()


BLAS = _Blas()


def blas_alone(shape: tuple[int, ...]) -> AbstractContextManager[None]:
    """One thread for logistic regressions on inputs (n, i), where they and their Hessian are small: threads of NumPy and torch collide."""
    return nullcontext() if shape[1] * max(shape) > LITTLE else BLAS.alone()
