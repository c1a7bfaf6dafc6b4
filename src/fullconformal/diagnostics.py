"""What a user must be told about an approximation before trusting its sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fullconformal.curvature.base import smallest_eigenvalue
from fullconformal.influence.prepared import Prepared

PENALTY = "raise l2 (of scikit-learn's models: alpha, or lower C)"


@dataclass(frozen=True)
class Diagnostics:
    """Facts about the fit and its curvature; prints as a table, `warnings` says in words what is wrong.

    Attributes
    ----------
    n_points, n_parameters : int
    gradient : float
        Largest entry of ∇F/n at θ; 0 at a minimum.
    newton_decrement : float
        √(∇Fᵀ𝓗⁻¹∇F), the distance to the minimum in the metric in which points have influence √s.
    largest_influence : float
        Largest √s_i: what the decrement is to be compared with.
    damping, smallest_eigenvalue : float
        Added to the mean-form curvature; smallest eigenvalue of the damped one.
    positive_definite : bool
    largest_leverage : float
        Of a point along its own residual (`Loss.leverage`): near 1 a point decides its own prediction.
    mean_leverage : float
        Over all points: of logistic regressions of two classes the parameters that the penalty leaves free, for each point.
    negative_scores : int
        Training points whose linearised loss ℓ_i − s_i is negative, which no loss can be.
    valid : bool
        Whether the method's guarantee holds without any of this.
    caveat : str
        What the guarantee of a valid method lacks all the same.
    guarantee : str
        What is promised of the sets: "exact", "1 − 2ε" or "approximate".
    note : str
        What a valid method's sets may be larger for.
    held : str
        Parameters that the curvature does not know and that were held fixed.
    estimates : tuple of str
        Estimated memory and time of the curvatures considered, the one taken last.
    """

    n_points: int
    n_parameters: int
    curvature: str
    gradient: float
    newton_decrement: float
    largest_influence: float
    damping: float
    damping_chosen: bool
    smallest_eigenvalue: float
    positive_definite: bool
    largest_leverage: float
    negative_scores: int
    valid: bool = False
    caveat: str = ""
    guarantee: str = ""
    note: str = ""
    held: str = ""
    estimates: tuple[str, ...] = ()
    mean_leverage: float = 0.0

    @property
    def warnings(self) -> list[str]:
        """What is wrong and what to do about it, one sentence each; empty where nothing is."""
        # The guarantee of a valid method does not rest on any of the figures.
        if self.valid:
            return [self.caveat] if self.caveat else []
        out = []
        if not self.positive_definite:
            out.append(
                f"the {self.curvature} is indefinite (smallest eigenvalue {self.smallest_eigenvalue:.2g} with damping "
                f"{self.damping:g}): influences have the wrong sign along some directions; use curvature='ggn' or damping=None"
            )
        if self.damping_chosen and self.damping > 0:
            other = "use curvature='ggn', " if self.curvature.lower() == "hessian" else ""
            out.append(
                f"the {self.curvature} is not positive definite and was damped by {self.damping:.2g}; {other}{PENALTY}, or give a damping "
                "of your own"
            )
        if self.held:
            out.append(
                f"{self.held} were held fixed: {self.curvature} knows Linear and ungrouped Conv2d layers only (curvature='ggn' "
                "and 'dual' know all)"
            )
        # Of "auto" alone there are several.
        if len(self.estimates) > 1 and self.curvature not in ("ggn", "dual"):
            out.append(
                f"{self.curvature} stands in for the whole GGN, which takes more than memory_budget or ten minutes ({self.estimates[0]}): "
                "raise memory_budget, or check the coverage on held-out points"
            )
        if self.newton_decrement > self.largest_influence:
            out.append(
                f"the model is not at a minimum on these data (Newton decrement {self.newton_decrement:.2g}, largest influence "
                f"of a point {self.largest_influence:.2g}): train longer, or with prefit=True give the training data and its l2"
            )
        # Measured (`python benchmarks/influence_errors.py`, and digits): errors at 0.1 are within noise below, 0.12 at 0.12, 0.2 at 0.25.
        if self.mean_leverage > 0.09:
            out.append(
                f"{self.n_parameters} parameters for {self.n_points} points, of which a point has a share of "
                f"{self.mean_leverage:.2f} in its own prediction on average: approximate p-values may be too small here; "
                f"{PENALTY}, use fewer parameters (of networks curvature='last_layer'), or check the coverage on held-out points; "
                "of logistic regressions method='symmetric' is exactly valid"
            )
        if self.largest_leverage > 0.5:
            out.append(
                f"the largest leverage is {self.largest_leverage:.2f}: some points decide their own prediction, and removing "
                f"them is beyond a linear approximation; {PENALTY}, or of logistic regressions use method='symmetric'"
            )
        return out

    def __str__(self) -> str:
        rows = [
            ("points, parameters", f"{self.n_points}, {self.n_parameters}"),
            ("parameters / points", f"{self.n_parameters / self.n_points:.3g}"),
            ("gradient of the mean objective", f"{self.gradient:.2e}"),
            ("Newton decrement", f"{self.newton_decrement:.2e}"),
            ("largest influence of a point", f"{self.largest_influence:.2e}"),
            ("curvature", self.curvature + ("" if self.positive_definite else ", indefinite")),
            ("damping" + (" (chosen)" if self.damping_chosen else ""), f"{self.damping:.3g}"),
            ("smallest eigenvalue (mean form)", f"{self.smallest_eigenvalue:.3g}"),
            ("mean, largest leverage", f"{self.mean_leverage:.3f}, {self.largest_leverage:.3f}"),
            ("negative linearised losses", f"{self.negative_scores} of {self.n_points}"),
        ]
        rows += [("guarantee", self.guarantee)] if self.guarantee else []
        rows += [("" if k else "estimated cost", text) for k, text in enumerate(self.estimates)]
        lines = [aligned(rows)]
        if self.valid and not self.caveat:
            lines.append("The sets of this method are exactly valid, whatever these figures are.")
        lines += [self.note] if self.note else []
        return "\n".join(lines + [f"! {text}." for text in self.warnings])


@dataclass(frozen=True)
class Figures:
    """What is known of a fit that has no curvature to speak of; prints as a table.

    Attributes
    ----------
    n_points : int
    n_parameters : float
        Effective number: the sum of the leverages; NaN where there are none.
    largest_leverage : float
        One where a point decides a parameter by itself; NaN where there are none.
    facts : dict of str
        What else the method says, by name.
    """

    n_points: int
    n_parameters: float
    largest_leverage: float
    facts: dict[str, str]

    @property
    def warnings(self) -> list[str]:
        """None: what is to be known is among the facts."""
        return []

    def __str__(self) -> str:
        rows = [("training points", f"{self.n_points:,}")]
        if not math.isnan(self.n_parameters):
            rows.append(("effective parameters", f"{self.n_parameters:.4g}"))
            rows.append(("largest leverage", f"{self.largest_leverage:.4g}"))
        return aligned([*rows, *self.facts.items()])


def aligned(rows: list[tuple[str, str]]) -> str:
    """Names and values as lines, the values below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@torch.no_grad()
def diagnose(
    prepared: Prepared, curvature: str, damping_chosen: bool, valid: bool = False, held: str = "",
    estimates: tuple[str, ...] = (), search: bool = True,
) -> Diagnostics:  # fmt: skip
    """Diagnostics of a prepared bag; `valid` where the method's guarantee needs none of them.

    `search` looks for the smallest eigenvalue where it is not known, of which no warning speaks.
    """
    problem, factor, n = prepared.problem, prepared.factor, prepared.problem.n
    g, s, smallest = problem.gradient(prepared.gradients), prepared.self_influence, factor.smallest_eigenvalue
    if search and math.isnan(smallest):
        smallest = smallest_eigenvalue(factor.solve, problem.theta)
    leverage = problem.loss.leverage(prepared.loss, s)
    return Diagnostics(
        n_points=n,
        n_parameters=problem.p,
        curvature=curvature,
        gradient=float(g.abs().max()) / n,
        newton_decrement=math.sqrt(max(float(factor.influence(g[None])[0]), 0.0)),
        largest_influence=math.sqrt(max(float(s.max()), 0.0)),
        damping=factor.damping,
        damping_chosen=damping_chosen,
        smallest_eigenvalue=smallest / n,
        positive_definite=factor.positive_definite,
        largest_leverage=float(leverage.max()),
        mean_leverage=float(leverage.clamp(max=1.0).mean()),
        negative_scores=int((prepared.loss < s).sum()),
        valid=valid,
        held=held,
        estimates=estimates,
    )
