"""A linear problem as a bag: its design matrix, penalty and span, and its parameters from the bag's fit.

The problem's trainable layer has outputs z = Wa (o,), frozen layers make logits f = Az of them, and relative to class 0 these are Mz with
M (K, o) the rows of A less its first. Of all W with the same Θ = MW the penalty prefers W = M⁺Θ, and is Θᵀ(MMᵀ)⁻¹Θ there. So a bag with
that matrix between classes has the same minimum, whether M takes differences of C rows or is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fullconformal.linear.bag import LinearBag
from fullconformal.linear.span import FEWER, FloatArray, Span, span_of
from fullconformal.losses import SOFTMAX
from fullconformal.problem import Problem
from fullconformal.runtime.numerics import blas_alone


@dataclass(frozen=True)
class Units:
    """Features as the solver sees them: (a − centre)/scale, (d,) each. Weights and penalties change with them, the minimum does not.

    Columns far from zero are nearly multiples of the intercept's, which costs the Hessian its digits. A free intercept absorbs the centre.
    """

    centre: Tensor
    scale: Tensor

    @classmethod
    def of(cls, a: Tensor, penalty: Tensor) -> Units:
        """Of a design matrix (n, d) with penalties (d,): centred where an intercept, the last column, is free; scales are powers of two."""
        centre, free = a.mean(0), bool(penalty[-1] == 0) and bool((a[:, -1] == 1).all())
        centre = centre if free and bool(centre.isfinite().all()) else torch.zeros_like(centre)
        centre[-1] = 0.0
        largest = (a - centre).abs_().amax(0)
        scale = torch.where(largest > 0, largest, 1.0).log2().round().clamp(-300, 300).exp2()
        scale[-1] = 1.0 if free else scale[-1]
        return cls(centre, scale)

    def points(self, a: Tensor) -> Tensor:
        """Points (k, d) as the solver sees them."""
        return (a - self.centre).mul_(self.scale.reciprocal())  # exact: scales are powers of two

    def weights(self, theta: Tensor) -> Tensor:
        """Weights (d, K) of the points as given, from those of the solver."""
        theta = theta / self.scale[:, None]
        theta[-1] -= self.centre @ theta
        return theta

    def start(self, theta: Tensor) -> Tensor:
        """The solver's weights (d, K), from those of the points as given."""
        theta = theta.clone()
        theta[-1] += self.centre @ theta
        return theta * self.scale[:, None]


@dataclass(frozen=True)
class Regression:
    """A linear problem, the bag it is, the span or the units in which the bag has its coordinates, and M (K, o)."""

    problem: Problem
    bag: LinearBag
    span: Span | None
    outputs: Tensor
    units: Units | None = None

    @classmethod
    def of(cls, problem: Problem) -> Regression | None:
        """The regression that a problem is, started from its parameters; None if the problem is not a logistic regression."""
        M = relative_outputs(problem)
        if M is None:
            return None
        (block,) = problem.blocks
        a, penalty = design(problem, problem.X), problem.penalty[: block.i].double()
        # A look at the columns here, where they are, saves a large design matrix its way to NumPy.
        narrow = len(a) > FEWER * a.shape[1] and bool(a[:8].any(0).all() or a.abs().sum(0).all())
        span = None if narrow else span_of(a.cpu().numpy(), penalty.cpu().numpy())
        W = problem.theta.view(block.o, block.i).double()
        start = (M @ (W if span is None else by_numpy(span.start, W))).T.contiguous()
        units = Units.of(a, penalty) if span is None else None
        return cls.opened(problem, span, start if units is None else units.start(start), M, a, units)

    @classmethod
    def opened(
        cls, problem: Problem, span: Span | None, start: Tensor, M: Tensor | None = None, a: Tensor | None = None,
        units: Units | None = None,
    ) -> Regression:  # fmt: skip
        """The same from a known span, whose fit on Z starts from weights (d, K)."""
        M = relative_outputs(problem) if M is None else M
        if M is None:
            raise ValueError("the model is no logistic regression with one L2 penalty for all classes.")
        a, penalty = design(problem, problem.X) if a is None else a, problem.penalty[: problem.blocks[0].i].double()
        names = None
        if span is not None:
            a, penalty, names = by_numpy(span.coordinates, a), by_numpy(span.penalty, penalty), span.names
        else:
            units = Units.of(a, penalty) if units is None else units
            a, penalty = units.points(a), penalty / units.scale**2
        between = torch.linalg.inv(M @ M.T).contiguous()
        given = None if units is None else torch.stack([units.centre, units.scale])
        return cls(
            problem, LinearBag(a, problem.y, problem.n_classes, penalty, start, names, between, given), span, M, units
        )

    def design(self, X: Tensor) -> Tensor:
        """Inputs X of the model as the bag knows them (k, d)."""
        a = design(self.problem, X)
        if self.span is not None:
            return by_numpy(self.span.coordinates, a)
        return a if self.units is None else self.units.points(a)

    @property
    def takes_scales(self) -> bool:
        """Whether dividing inputs by scales changes penalties alone: columns are inputs, of which a free intercept absorbs the places."""
        a, block = self.problem.X, self.problem.blocks[0]
        turned = self.span is not None and self.span.basis is not None
        free = float(self.bag.penalty[-1]) == 0 and bool((self.bag.X[:, -1] == 1).all())
        return block.layer == 0 and a.dim() == 2 and a.shape[1] == block.i - 1 and free and not turned

    def scaled_design(self, X: Tensor, scales: FloatArray) -> tuple[Tensor, Tensor]:
        """Inputs X as the bag knows them, and factors (k, d) of its penalties, where each divides the inputs by scales of its own."""
        s = torch.as_tensor(np.hstack([scales, np.ones((len(scales), 1))]), device=X.device)
        if self.span is None:
            return self.design(X), s**2
        a, used = design(self.problem, X), torch.as_tensor(self.span.used, device=X.device)
        ones = s.new_ones(len(s), self.bag.X.shape[1] - self.span.r)
        # What lies beyond the span has one coordinate, in which the columns' scales are.
        return by_numpy(self.span.coordinates, torch.where(used, a, a / s)), torch.hstack([s[:, used] ** 2, ones])

    def assign(self, theta: Tensor) -> None:
        """Make weights Θ (d, K) of the bag the problem's parameters, rounded to its precision."""
        theta = theta if self.units is None else self.units.weights(theta)
        W = self.outputs.T @ (self.bag.coupling @ theta.T)
        W = W if self.span is None else by_numpy(self.span.weights, W)
        self.problem.assign(W.reshape(-1).to(self.problem.X.dtype))


def fit_linear(problem: Problem) -> None:
    """Fit a linear problem in place. One that is no `Regression` keeps the parameters it has."""
    regression = Regression.of(problem)
    if regression is not None:
        regression.assign(regression.bag.fit.theta[:, :, 0])


def relative_outputs(problem: Problem) -> Tensor | None:
    """M (K, o), float64, of a linear problem; None where no bag has its logits or its penalty."""
    (block,) = problem.blocks
    penalty, after = problem.penalty.view(block.o, block.i), problem.tail[block.layer + 1 :]
    constant = any(layer.linear.bias is not None and bool(layer.linear.bias.any()) for layer in after)
    if constant or problem.loss != SOFTMAX or not bool((penalty == penalty[0]).all()):
        return None
    start = torch.eye(block.o, dtype=torch.float64, device=problem.X.device)
    A = reduce(lambda A, layer: layer.linear.weight.double() @ A, after, start)
    M = A[1:] - A[0]
    L, failed = torch.linalg.cholesky_ex(M @ M.T)
    pivots = L.diagonal()
    return None if bool(failed) or pivots.min() < 1e-6 * pivots.max() else M


def design(problem: Problem, X: Tensor) -> Tensor:
    """Inputs (k, i) of the trainable layer, the intercept's one included, float64."""
    layer = problem.blocks[0].layer
    parts = [problem.trace(part, stop=layer + 1).inputs[layer] for part in X.split(problem.chunk)]
    return torch.cat(parts).double() if len(parts) > 1 else parts[0].double()


def by_numpy(function: Callable[[FloatArray], FloatArray], x: Tensor) -> Tensor:
    """What a function of arrays makes of a tensor, on its device."""
    # NumPy's threads, once started, are in the way of torch's for a while.
    with blas_alone((x.shape[-1], len(x))):
        return torch.as_tensor(function(x.cpu().numpy())).to(x.device)
