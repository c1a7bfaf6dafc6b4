"""Saved predictors: what is kept of a problem and its parts, as safetensors and JSON."""

from __future__ import annotations

from typing import Any

from fullconformal.curvature import EKFAC, FACTORS, GGN, KFAC, Dual, Hessian
from fullconformal.methods.neighbors import KernelDensity, Lists, NearestNeighbors
from fullconformal.problem import Problem
from fullconformal.runtime.files import finished_or_nothing
from fullconformal.storage.container import StorageError, one_line, read, write
from fullconformal.storage.modules import MODULE, Factory
from fullconformal.storage.transformers import ESTIMATOR
from fullconformal.storage.values import Kind, Packer, Unpacker, exactly, expect, of_dataclass

__all__ = [
    "KINDS",
    "Factory",
    "Kind",
    "Packer",
    "StorageError",
    "Unpacker",
    "exactly",
    "expect",
    "finished_or_nothing",
    "of_dataclass",
    "one_line",
    "read",
    "write",
]


def pack_problem(problem: Problem, _: Packer) -> dict[str, Any]:
    """Model, bag and penalty; the penalty is one number a parameter tensor."""
    penalty = {name: float(part.reshape(-1)[0]) for name, part in problem.unpack(problem.penalty).items()}
    problem = exactly(Problem, problem)
    return {"model": problem.model, "X": problem.X, "y": problem.y, "penalty": penalty, "chunk": problem.chunk}


def unpack_problem(values: dict[str, Any], _: Unpacker) -> Problem:
    """The problem again, at the parameters it was kept at."""
    X, y, chunk = values["X"], values["y"], expect(values["chunk"], int)
    penalty = {expect(name, str): float(expect(value, int, float)) for name, value in values["penalty"].items()}
    if len(X) != len(y) or y.ndim != 1 or len(y) == 0 or y.is_floating_point() or not X.isfinite().all():
        raise StorageError("its training points are not an array of numbers with one label each")
    if not 1 <= chunk <= 2**20 or any(not 0 <= value < float("inf") for value in penalty.values()):
        raise StorageError("its penalty or chunk size is not what it should be")
    problem = Problem(values["model"], X, y, penalty, chunk)
    if set(problem.params) - set(penalty):
        raise StorageError("its penalty does not name the model's parameters")
    return problem


KINDS = {
    "module": MODULE,
    "scikit-learn": ESTIMATOR,
    "Problem": Kind(Problem, pack_problem, unpack_problem),
    **{
        cls.__name__: of_dataclass(cls)
        for cls in (*FACTORS, GGN, Hessian, KFAC, EKFAC, Dual, NearestNeighbors, KernelDensity, Lists)
    },
}
