"""Intervals of networks by one fit: a network is replaced by its tangent at the fit, a ridge regression that is solved for every candidate.

With Jacobians j of the output and the Gauss–Newton matrix 𝓗 = Σjjᵀ + Λ, h_xi = j_xᵀ𝓗⁻¹j_i stands in the formulas of `linear/ridge` (Tailor,
Correia, Nalisnick and Louizos, "Approximating full conformal prediction for neural network regression with Gauss–Newton influence", ICLR
2025). Exact for a linear module; else an approximation. Modules are trained here on y less its mean, in units of its standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullconformal.curvature.base import Factor
from fullconformal.curvature.select import hold_fixed, trainable
from fullconformal.diagnostics import Figures
from fullconformal.guarantees import APPROXIMATE
from fullconformal.linear.ridge import ALONE, Lines, lines_of
from fullconformal.methods.base import Config, FloatArray, Values
from fullconformal.methods.fitting import fit_foreign, fit_network, to_device
from fullconformal.methods.influence import choice_of
from fullconformal.methods.regression import (
    FittedLines,
    RegressionMethod,
    RegressionQuery,
    blocks,
    check_points,
)
from fullconformal.models.adapters import adapt, check_objective
from fullconformal.models.requirements import to_tensor
from fullconformal.problem import Problem, flat
from fullconformal.storage import printable, require, savable


@savable
class FittedTangent(FittedLines):
    """A network at its fit, and the half-solved Jacobians of the training points where they fit the memory."""

    method = "influence"
    guarantee = APPROXIMATE.because("the network is replaced by its tangent at the fit")

    def __init__(
        self, bag: Values, problem: Problem, factor: Factor, centre: float, scale: float, curvature: str, memory: int
    ):
        """Values are centre + scale times the network's output."""
        super().__init__(bag)
        self.problem, self.factor, self.centre, self.scale = problem, factor, centre, scale
        self.curvature, self.memory = curvature, memory
        kept = self.n * problem.p * problem.X.element_size() <= memory // 4
        parts, leverage = [], np.empty(self.n)
        for at in self._portions():
            half = self._half(problem.X[at])
            leverage[at] = (half.double() ** 2).sum(1).cpu().numpy()
            parts += [half] if kept else []
        self.half = torch.cat(parts) if kept else None
        self.leverage = leverage
        self.residual = bag.y - self.predict(bag.X)

    def _portions(self) -> Iterator[slice]:
        """Slices of the training points whose Jacobians are written out together."""
        step = max(1, min(4096, self.memory // 8 // (3 * self.problem.p * self.problem.X.element_size())))
        return (slice(start, min(start + step, self.n)) for start in range(0, self.n, step))

    def _half(self, X: Tensor) -> Tensor:
        """R⁻¹j (k, p) of objects X."""
        return self.factor.half(flat(self.problem.jacobian(X)[1]).flatten(0, 1))

    @property
    def device(self) -> torch.device:
        return self.problem.X.device

    def _inputs(self, X: Any) -> Tensor:
        return to_tensor(X, self.problem.X.device, self.problem.X.dtype)

    def predict(self, X: Any) -> FloatArray:
        f = self.problem.logits(self._inputs(X))[:, 0].double().cpu().numpy()
        return np.asarray(self.centre + self.scale * f)

    def _lines(self, X: Any, query: RegressionQuery) -> Iterator[tuple[slice, Lines]]:
        X = np.asarray(X)
        # A leverage of one or more is no leverage: the curvature is too crude there. Such points count always.
        wrong = self.leverage >= 1 - ALONE
        eps = torch.finfo(self.problem.X.dtype).eps
        tie = 32 * self.problem.p**0.5 * eps
        size = np.where(wrong, np.inf, np.abs(self.residual))
        rounding = tie * float(np.abs(self.residual).max(initial=0.0)), tie
        signs, share = np.where(self.residual < 0, -1.0, 1.0), np.where(wrong, 1.0, 1 - self.leverage)
        for at in blocks(X, self.n, query.progress, many=True):
            own = self._half(self._inputs(X[at]))
            halves = (
                (self._half(self.problem.X[part]) for part in self._portions()) if self.half is None else [self.half]
            )
            rows = [own @ half.T for half in halves]
            pairs = torch.cat(rows, 1).double().cpu().numpy() * signs
            h = (own.double() ** 2).sum(1).cpu().numpy()
            free = np.zeros(len(h), dtype=bool)
            yield at, lines_of(size, signs, share, pairs, h, self.predict(X[at]), query.q, rounding, free)

    @property
    def figures(self) -> Figures:
        facts = {
            "parameters": f"{self.problem.p:,}",
            "curvature": self.curvature,
            "damping": f"{self.factor.damping:.3g}",
        }
        gradient = float(self.problem.gradient().abs().max()) / self.n
        facts["largest mean gradient"] = f"{gradient:.2e}"
        return Figures(self.n, float(self.leverage.sum()), float(self.leverage.max()), facts)

    @property
    def warnings(self) -> list[str]:
        out = []
        if wrong := int((self.leverage >= 1 - ALONE).sum()):
            out.append(
                f"{wrong} of {self.n} points have a leverage of one or more, which curvature={self.curvature!r} is too crude for"
            )
        if (share := self.leverage.mean()) > 0.5:
            out.append(
                f"the network follows each value by {share:.0%} (mean leverage), so that its tangent may be far from it. Raise l2, or "
                "take a smaller network"
            )
        return out

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        check_points(state["bag"])
        require(state["problem"].n == len(state["bag"].y) and state["problem"].n_classes == 1, "points")
        printable(state["curvature"])


@savable
class TangentRegression(RegressionMethod):
    """ACP-GN: full CP of a network's tangent, for modules of one output, skorch nets and MLPRegressor."""

    name = "influence"

    def fit(self, bag: Values, config: Config) -> FittedTangent:
        if isinstance(self.model, nn.Module):
            problem, centre, scale = fit_network(self.model, bag, config)
        else:
            check_objective(self.model)
            centre, scale = 0.0, 1.0
            fitted = self.model if config.prefit else fit_foreign(self.model, bag.X, bag.y, config.seed)
            module, penalty = adapt(fitted, len(bag.y))
            module = to_device(module, config)
            X = to_tensor(bag.X, config.device, next(module.parameters()).dtype, training=True)
            problem = Problem(module, X, torch.as_tensor(bag.y).to(X)[:, None], penalty, loss=config.loss)
        choice = choice_of(problem, config)
        problem = hold_fixed(problem, trainable(problem, choice.name))
        factor = choice.curvature.factor(problem, config.memory // 4)
        if not factor.positive_definite:
            raise ValueError(f"curvature={choice.name!r} is not positive definite here; take 'ggn', or give a damping.")
        return FittedTangent(bag, problem, factor, centre, scale, choice.name, config.memory)
