"""Which curvature to take: what each would need, the choice of "auto", and problems with some parameters held fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fullconformal.curvature import CURVATURES, Curvature, CurvatureError, Dual
from fullconformal.curvature.layers import is_layer
from fullconformal.problem import Problem

# Operations a second that large products reach, with a good margin.
RATES = {"cpu": 2e10, "cuda": 1e13}
# Curvatures that know Linear and Conv2d layers only.
LAYERS = ("kfac", "ekfac")


@dataclass(frozen=True)
class Estimate:
    """What a curvature would take: bytes and seconds, or why it is not possible."""

    name: str
    memory: int
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: {_size(self.memory)}, {_time(self.seconds)}"


@dataclass(frozen=True)
class Choice:
    """A curvature, and the estimates of all that were considered."""

    name: str
    curvature: Curvature
    estimates: tuple[Estimate, ...]


def trainable(problem: Problem, name: str) -> set[str]:
    """Names of the parameters that a curvature of that name is over; the others are to be held fixed."""
    if name == "last_layer":
        linear = [part for part in problem.model.modules() if isinstance(part, nn.Linear)]
        kept: Sequence[nn.Module] = [part for part in linear if part.weight.requires_grad][-1:]
        needed = "a torch.nn.Linear with trainable weights"
    elif name in LAYERS:
        kept = [part for part in problem.model.modules() if is_layer(part)]
        needed = "trainable Linear or ungrouped Conv2d layers"
    else:
        return set(problem.params)
    names = {id(q): known for known, q in problem.model.named_parameters()}
    out = {names[id(q)] for part in kept for q in part.parameters(recurse=False)}
    out = out if name == "last_layer" else out & set(problem.params)
    if not out:
        raise CurvatureError(f"curvature={name!r} needs {needed}; the model has none.")
    return out


def hold_fixed(problem: Problem, keep: set[str]) -> Problem:
    """The same problem with every parameter held fixed but those named; the model's flags are changed."""
    if keep == set(problem.params):
        return problem
    penalty = {name: float(part.mean()) for name, part in problem.unpack(problem.penalty).items()}
    for name, q in problem.model.named_parameters():
        q.requires_grad_(name in keep)
    return Problem(problem.model, problem.X, problem.y, penalty, problem.chunk, problem.loss)


@contextmanager
def _held(problem: Problem, name: str) -> Iterator[Problem]:
    """`hold_fixed` for a moment."""
    keep = trainable(problem, name)
    try:
        yield hold_fixed(problem, keep)
    finally:
        for known, q in problem.model.named_parameters() if keep != set(problem.params) else ():
            q.requires_grad_(known in problem.params)


def estimate(name: str, curvature: Curvature, problem: Problem, device: torch.device | str) -> Estimate:
    """What a curvature would take on a device."""
    try:
        with _held(problem, name) as part:
            seconds = curvature.flops(part) / RATES["cpu" if torch.device(device).type == "cpu" else "cuda"]
            if isinstance(curvature, Dual) and float(problem.penalty.min()) + (curvature.damping or 0) <= 0:
                return Estimate(name, 0, 0.0, "needs a penalty on every parameter")
            return Estimate(name, curvature.memory(part), seconds)
    except CurvatureError as error:
        return Estimate(name, 0, 0.0, str(error).rstrip("."))


def choose(problem: Problem, damping: float | None, memory: int, device: torch.device | str) -> Choice:
    """The curvature of "auto": the GGN, whole or by its dual, where it fits, else EK-FAC, else the GGN of the last layer."""
    seen: list[Estimate] = []
    for name in ("ggn", "dual", "ekfac", "last_layer"):
        if name == "dual" and problem.n * problem.n_classes >= problem.p:
            continue
        curvature = CURVATURES[name](damping)
        seen.append(estimate(name, curvature, problem, device))
        # An exact one is not worth more than ten minutes.
        quick = seen[-1].seconds <= 600 or name not in ("ggn", "dual")
        if not seen[-1].reason and seen[-1].memory <= memory and quick:
            return Choice(name, curvature, tuple(seen))
    raise MemoryError(too_large("auto", seen, memory, problem.p))


def check(
    name: str,
    curvature: Curvature,
    others: Mapping[str, Curvature],
    problem: Problem,
    memory: int,
    device: torch.device | str,
) -> Choice:
    """The curvature that was asked for; a MemoryError with what the others would need where it does not fit."""
    own = estimate(name, curvature, problem, device)
    if own.memory > memory:
        rest = [estimate(other, c, problem, device) for other, c in others.items() if other != name]
        raise MemoryError(too_large(name, [own, *rest], memory, problem.p))
    return Choice(name, curvature, (own,))


def too_large(asked: str, seen: list[Estimate], memory: int, p: int) -> str:
    """The message: what was asked for needs so much, the others so much, and what can be done."""
    fitting = [e for e in seen if not e.reason and e.memory <= memory]
    rest = [e for e in seen if e not in fitting]
    head = f"curvature={asked!r}: no curvature of {p:,} parameters fits" if not fitting else (
        f"curvature={asked!r} of {p:,} parameters needs about {_size(seen[0].memory)}"
    )  # fmt: skip
    parts = [f"{head}, memory_budget is {_size(memory)}"]
    if rest:
        parts.append("too large, or not possible: " + "; ".join(map(str, rest)))
    if fitting:
        parts.append("what fits: " + "; ".join(map(str, fitting)))
    most = int((memory / 24) ** 0.5)
    parts.append(
        f"raise memory_budget, or freeze layers (requires_grad_(False)); {most:,} trainable parameters are the most for the GGN"
    )
    return ". ".join(parts) + "."


def held_parameters(problem: Problem, keep: set[str]) -> str:
    """Of which modules parameters are held fixed, and how many; empty where none."""
    held = [name for name in problem.params if name not in keep]
    owners = {name.rpartition(".")[0]: None for name in held}
    kinds = sorted({type(problem.model.get_submodule(owner)).__name__ for owner in owners})
    count = sum(problem.params[name].numel() for name in held)
    return f"{count:,} parameters of {', '.join(kinds)}" if held else ""


def _size(memory: float) -> str:
    return f"{memory / 2**30:.2g} GiB" if memory >= 2**27 else f"{memory / 2**20:.2g} MiB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 0.1):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
