"""Influence in parts: sums over training points, shared out among joblib's workers, which may be a cluster's.

    𝓗 = Λ + Σ over shards of their curvature        ℓ_i, s_i of each shard given the factor of 𝓗        counts = Σ over shards

Shards of training points, and for the counts blocks of objects too, are tasks. Finished parts are kept in the checkpoint's folder: those
of a fit in the folder itself, those of a prediction in one of its own inside. How the points were cut is kept too, so that a
run started again with other workers finds the same parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullconformal.curvature import Curvature, DenseCurvature, Factor
from fullconformal.influence.prepared import Known, Prepared, prepare
from fullconformal.problem import Problem
from fullconformal.pvalues import FloatArray
from fullconformal.runtime.files import Parts, fingerprint
from fullconformal.runtime.tasks import Call, Progress, Work, finished, workers

TASKS = 4  # a worker: who is done early takes another
LIGHT = 2**20  # bytes
#: counts (2, m, C) of a sub-bag with its factor, memory and what is known, for objects X (m, ...) and weights (n,)
Rule = Callable[[Problem, Factor, int, Known, Tensor, Tensor | None], FloatArray]


# What travels ---------------------------------------------------------------------------------------------------------


class Cargo:
    """Goes to workers: of its tensors only what is seen of them.

    Its size is told where it is large, so that Dask sends it to the workers once. What is light goes along with every task: data that
    were sent apart are lost with the worker that has them, and their tasks must be started again.
    """

    def __sizeof__(self) -> int:
        size = sum(nbytes(value) for value in vars(self).values())
        return size if size > LIGHT else 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(self).items()}


def nbytes(value: Any) -> int:
    """Size of what is large."""
    if isinstance(value, nn.Module):
        return sum(q.nbytes for q in value.parameters())
    return value.nbytes if isinstance(value, (Factor, Tensor)) else 0


@dataclass(frozen=True, eq=False)
class Common(Cargo):
    """What all tasks need."""

    model: nn.Module
    penalty: Tensor
    chunk: int
    memory: int
    factor: Factor | None = None

    def problem(self, shard: Shard) -> Problem:
        """The problem of a shard. Threads may share what came in, and torch.func puts parameters into the model: hence the copy."""
        out = Problem(copy.deepcopy(self.model), shard.X, shard.y, 0.0, self.chunk)
        out.penalty = self.penalty
        return out


@dataclass(frozen=True, eq=False)
class Shard(Cargo):
    """Some training points; what is known of them, ℓ and s (2, k), and their weights (k,)."""

    X: Tensor
    y: Tensor
    known: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Block(Cargo):
    """Some objects."""

    X: Tensor


def curvature_part(curvature: DenseCurvature, common: Common, shard: Shard) -> FloatArray:
    """Σ over a shard of the curvature, (p, p), without penalty."""
    return np.asarray(curvature.matrix(common.problem(shard)).cpu().numpy())


def influence_part(common: Common, shard: Shard) -> FloatArray:
    """ℓ and s of a shard, (2, k)."""
    assert common.factor is not None
    prepared = prepare(common.problem(shard), common.factor, common.memory)
    return np.asarray(torch.stack(prepared.known).cpu().numpy())


def count_part(rule: Rule, common: Common, shard: Shard, block: Block) -> FloatArray:
    """Counts (2, m, C) of a shard for a block of m objects."""
    assert common.factor is not None and shard.known is not None
    loss, s = shard.known
    return rule(common.problem(shard), common.factor, common.memory, (loss, s), block.X, shard.weight)


# The work -------------------------------------------------------------------------------------------------------------


def cut(total: int, pieces: int) -> list[slice]:
    """Consecutive slices of about the same length."""
    ends = np.linspace(0, total, pieces + 1).astype(int).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Fit:
    """The parts of a fit: parameters, 𝓗 of shards, losses and self-influences of shards."""

    work: Work
    parts: Parts

    @classmethod
    def open(cls, work: Work, X: Any, y: Any, key: str) -> Fit:
        """The folder for the fit to X (n, ...), y (n,) with the settings in key; an error where it holds another's."""
        parts = work.parts()
        if parts.folder is not None:
            digest = fingerprint(key, np.asarray(X), np.asarray(y))
            parts, _ = parts.open({"fingerprint": digest, "what": "influence", "key": key})
        return cls(work, parts)

    def kept(self, name: str, make: Callable[[], int]) -> int:
        """A whole number ≥ 1 that is made here, if it is not in the folder."""
        for _, content in self.parts.read(name, lambda _: (1,)):
            if 1 <= content[0] < np.inf and content[0] == int(content[0]):
                return int(content[0])
        made = make()
        self.parts.write(name, np.array([made], dtype=np.float64))
        return made

    def problem(self, fit: Callable[[bool], Problem]) -> Problem:
        """The fitted problem that `fit` gives; told True it need not train a network, whose parameters were kept."""
        if self.parts.files("theta"):
            problem = fit(True)
            for _, theta in self.parts.read("theta", lambda _: (problem.p,)):
                if np.isfinite(theta).all():
                    problem.assign(torch.as_tensor(theta).to(problem.theta))
                    return problem
        problem = fit(False)
        self.parts.write("theta", array(problem.theta))
        return problem

    def shards(self, problem: Problem, what: str, memory: int | None = None) -> dict[str, Shard]:
        """Shards by the name of their part, cut as in the folder; fewer where the matrices they send back must fit the memory.

        The name tells the number of parameters: an earlier version may have stated the same model with others.
        """

        def pieces() -> int:
            out = min(TASKS * workers(self.work.n_jobs, self.parts), problem.n // 32)
            if memory is not None:
                out = min(out, memory // (problem.p**2 * problem.X.element_size()))
            return max(1, out)

        slices = cut(problem.n, min(self.kept(f"{what}_shards", pieces), problem.n))
        return {f"{what}-{problem.p}-{at.start}-{at.stop}": Shard(problem.X[at], problem.y[at]) for at in slices}

    def factor(self, curvature: Curvature, problem: Problem, memory: int) -> Factor:
        """The factor of 𝓗; where it is a sum over points its parts are added in their order, whatever the order in which they come."""
        if not isinstance(curvature, DenseCurvature):
            return curvature.factor(problem, memory // 4)
        common = Common(problem.model, torch.zeros_like(problem.penalty), problem.chunk, memory)
        shards = self.shards(problem, "curvature", memory)
        calls = {name: (curvature_part, curvature, common, shard) for name, shard in shards.items()}
        order, waiting, at = list(shards), dict[str, FloatArray](), 0
        H = torch.diag(problem.penalty.double())
        for name, matrix in computed(calls, self.parts, self.work, lambda _: (problem.p, problem.p)):
            waiting[name] = matrix
            while at < len(order) and order[at] in waiting:
                H += torch.as_tensor(waiting.pop(order[at])).to(H)
                at += 1
        return curvature.factor_of(H, problem)

    def influences(self, problem: Problem, factor: Factor, memory: int) -> Known:
        """ℓ and s, (n,) each."""
        common = Common(problem.model, problem.penalty, problem.chunk, memory, factor)
        shards = self.shards(problem, "influence")
        calls = {name: (influence_part, common, shard) for name, shard in shards.items()}
        found = dict(computed(calls, self.parts, self.work, lambda name: (2, len(shards[name].y))))
        loss, s = torch.as_tensor(np.concatenate([found[name] for name in shards], axis=1)).to(problem.X)
        return loss, s


def counts(
    prepared: Prepared, X: Tensor, weight: Tensor | None, rule: Rule, key: str, work: Work, progress: Progress | None
) -> FloatArray:
    """Counts (2, m, C) of the training points above and tied with each candidate of the objects X (m, ...)."""
    problem, m = prepared.problem, len(X)
    known, digest = torch.stack(prepared.known), ""
    if work.checkpoint is not None:
        seen = [problem.X, problem.y, problem.theta, known, X, *([] if weight is None else [weight])]
        digest = fingerprint(key, *map(array, seen))
    parts = work.parts(f"p-{digest[:16]}")
    made = {"fingerprint": digest, "what": "counts", **grid(prepared, X, workers(work.n_jobs, parts))}
    parts, header = parts.open(made)
    pieces = [header.get(name) for name in ("shards", "blocks")]
    if not all(type(at) is int and 1 <= at <= most for at, most in zip(pieces, (problem.n, max(m, 1)), strict=True)):
        raise ValueError(f"checkpoint={str(parts.folder)!r} has a header that cannot be right; delete this folder.")
    common = Common(problem.model, problem.penalty, problem.chunk, prepared.memory, prepared.factor)
    shards = [
        Shard(problem.X[at], problem.y[at], known[:, at], None if weight is None else weight[at])
        for at in cut(problem.n, header["shards"])
    ]
    places = cut(m, header["blocks"])
    blocks = [Block(X[at]) for at in places]
    # A part names the points and the objects it counts, so that it is never taken for one of another cut.
    cuts = product(zip(places, blocks, strict=True), zip(cut(problem.n, header["shards"]), shards, strict=True))
    calls: dict[str, Call] = {
        f"counts-{of.start}-{of.stop}-{at.start}-{at.stop}": (count_part, rule, common, shard, block)
        for (at, block), (of, shard) in cuts
    }
    total = np.zeros((2, m, problem.n_classes))

    def rows(name: str) -> slice:
        return slice(*map(int, name.split("-")[3:]))

    def shape(name: str) -> tuple[int, ...]:
        return 2, rows(name).stop - rows(name).start, problem.n_classes

    for done, (name, part) in enumerate(computed(calls, parts, work, shape), 1):
        total[:, rows(name)] += part
        if progress is not None:
            progress(done, len(calls))
    return total


def grid(prepared: Prepared, X: Tensor, staff: int) -> dict[str, int]:
    """Into how many blocks of objects and shards of points to cut: objects first, as every shard meets the factor with each of them."""
    n, m, size = prepared.problem.n, len(X), prepared.problem.X.nbytes
    # At least 32 points in a shard and 16 objects in a block, and at most 2,048 objects.
    blocks = max(1, min(TASKS * staff, m // 16), -(-m // 2048))
    shards = max(-(-TASKS * staff // blocks), -(-4 * size // prepared.memory))
    return {"blocks": blocks, "shards": max(1, min(shards, n // 32))}


def computed(
    calls: Mapping[str, Call], parts: Parts, work: Work, shape: Callable[[str], tuple[int, ...]]
) -> Iterator[tuple[str, FloatArray]]:
    """Name and content of every part, of these shapes: those found in the folder, then the others as they finish."""
    left, what = dict(calls), next(iter(calls)).split("-")[0]
    for name, content in parts.read(rf"{what}-[\d-]+", lambda name: shape(name) if name in calls else None):
        if left.pop(name, None) is not None:
            yield name, content
    found = f", {len(calls) - len(left)} of them found in {str(parts.folder)!r}" if parts.folder is not None else ""
    work.say(f"{what}: {len(calls)} parts{found}")
    yield from finished(left, parts, work.n_jobs)


def array(tensor: Tensor) -> Any:
    """A tensor as an array."""
    return tensor.detach().cpu().numpy()
