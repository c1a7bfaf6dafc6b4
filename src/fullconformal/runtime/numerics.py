"""How torch and BLAS are told to compute: the number of threads, and the precision of products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch.backends import cudnn, mkldnn
from torch.backends.cuda import matmul

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


def each_alone(work: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[Any]:
    """What is found in each of the parts, in order, by as many threads of Python as torch has, each with one of torch's.

    Threads that share every small product wait for one another after each, and on a busy machine they wait long.
    """
    with threads(count := torch.get_num_threads()):
        pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield from map(work, parts) if count == 1 else pool.map(work, parts)
        finally:
            pool.shutdown(cancel_futures=True)


def keep_freed() -> None:
    """Have glibc keep 64 MiB of what is freed for what comes next.

    It hands arrays of megabytes back to the system as soon as they are freed, until one of nearly 32 MiB, its limit, has been freed once.
    Steps that free and take the same arrays again and again spent up to a third of their time on new pages. Nothing is touched here, and
    another allocator takes no notice.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


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


class _Switch:
    """Settings of torch, which are the whole process's: `off` while any thread wants it so, given back by the last to go."""

    def __init__(self, *settings: tuple[Any, str, dict[Any, Any]]):
        """Of each its place, its name, and what it is off and on, where that is not what it was before."""
        self.settings, self.lock, self.wanted = settings, Lock(), list[bool]()
        self.now: bool | None = None

    @contextmanager
    def set(self, value: bool) -> Iterator[None]:
        with self.lock:
            if not self.wanted:
                self.before = [getattr(place, name) for place, name, _ in self.settings]
            self.wanted.append(value)
            self._put()
        try:
            yield
        finally:
            with self.lock:
                self.wanted.remove(value)
                self._put()

    def _put(self) -> None:
        now = all(self.wanted) if self.wanted else None
        # Calls within calls, of which there are many, find what they want.
        if now == self.now:
            return
        self.now = now
        for (place, name, values), before in zip(self.settings, self.before, strict=True):
            setattr(place, name, values.get(now, before))


# The older name where modules ask for it (`cudnn.flags`), elsewhere the newer: after the older was set torch may refuse to say how precise
# its products are.
FLOAT32 = _Switch(
    (matmul, "fp32_precision", {False: "ieee", True: "tf32"}),
    (cudnn, "allow_tf32", {False: False}),
    *((getattr(mkldnn, name), "fp32_precision", {False: "ieee"}) for name in ("matmul", "conv", "rnn")),
)
HALF_SUMS = _Switch((matmul, "allow_fp16_reduced_precision_reduction", {False: False}))


def full_precision() -> _GeneratorContextManager[None]:
    """Products of float32 with all their digits, whatever torch was asked for: of TF32 and bfloat16 three are left, which decide no score.

    A GPU has TF32 in convolutions by default, in products on request; some CPUs have units for TF32 or bfloat16.
    """
    return FLOAT32.set(False)


def tensor_cores() -> AbstractContextManager[None]:
    """TF32 in float32 products on a GPU, for sums of squares only: BᵀB, and second moments.

    Entries of B are rounded by ε ≤ 2⁻¹¹ of themselves and summed in float32: the sum is B̃ᵀB̃, still positive semi-definite, and
    xᵀB̃ᵀB̃x = |Bx + e|² with |e|² ≈ ε² Σ_j x_j² (BᵀB)_jj / 3. The change is small against |Bx|², or else like a damping of 8e-8 times the
    diagonal: what float32 itself costs. It would not be so for products that are no squares.
    """
    return FLOAT32.set(True)


def whole_sums() -> AbstractContextManager[None]:
    """Products in half precision are added up in float32 throughout, which torch does not insist on by default."""
    return HALF_SUMS.set(False)
