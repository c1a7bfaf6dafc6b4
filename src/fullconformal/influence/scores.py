"""Gradients of candidates, and the literal loop that turns the scores of any approximation into counts.

An approximation is a function ``scorer(prepared, X, q)`` that returns the candidates' scores τ (m, C) and a function from a slice of
training points to their scores α (m, C, k). Prepared points and candidates pass in blocks; n × (m·C) scores are never held.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.curvature.base import CurvatureError
from fullconformal.influence.prepared import Prepared
from fullconformal.losses import Loss
from fullconformal.problem import Rows
from fullconformal.pvalues import Counts
from fullconformal.runtime.tasks import Progress

Alpha = Callable[[slice], Tensor]
Scorer = Callable[[Prepared, Tensor, float], tuple[Tensor, Alpha]]


def candidate_gradients(loss: Loss, J: list[Rows], logits: Tensor) -> list[Rows]:
    """Gradients ĝ_y = Jᵀr_y of every candidate as rows (m, C, o) ⊗ (m, i)."""
    return [Rows(loss.candidate_gradients(left, logits), right) for left, right in J]


@torch.no_grad()
def count_scores(
    scorer: Scorer,
    prepared: Prepared,
    X: Tensor,
    q: float,
    weight: Tensor | None = None,
    progress: Progress | None = None,
) -> Counts:
    """Counts for the candidates of every x in X (m, ...), block by block."""
    problem, n_classes = prepared.problem, prepared.problem.n_classes
    width = max([b.o for b in problem.blocks]) + 8 * n_classes
    limit = max(1, prepared.memory // 16 // (width * X.element_size()))
    # Blocks that stay in the cache; on a GPU few launches.
    most, pairs = (128, 2**18) if X.device.type == "cpu" else (2**10, 2**24 * n_classes)
    k = max(1, min(problem.n, limit, max(256, pairs // (n_classes * min(len(X), most)))))
    written = prepared.memory // 8 // (4 * n_classes * problem.p * X.element_size())  # Jacobians of so many objects
    m = max(1, min(len(X), most, limit // k, written))
    slack, eps = prepared.slack, prepared.rounding
    greater, equal = [], []
    for start in range(0, len(X), m):
        tau, alpha = scorer(prepared, X[start : start + m], q)
        tau = tau[:, :, None]
        own_slack = eps * tau.abs()
        above = tied = torch.zeros(tau.shape[:2], dtype=torch.float64, device=tau.device)
        for at in range(0, problem.n, k):
            block = slice(at, min(at + k, problem.n))
            w = None if weight is None else weight[block].T
            part = pvalues.count(alpha(block).sub_(tau), 0.0, (slack[block], own_slack), w, axis=-1)
            above, tied = above + part[0], tied + part[1]
        greater.append(above)
        equal.append(tied)
        if progress is not None:
            progress(min(start + m, len(X)), len(X))
    return Counts(torch.cat(greater).cpu().numpy(), torch.cat(equal).cpu().numpy())


@torch.no_grad()
def check_far(scorer: Scorer, prepared: Prepared, X: Tensor) -> None:
    """Raise where the scores of an object in X (m, ...) overflow; looked for where fourth powers of its values do.

    With q = 0 the score holds ŝ, the largest there is.
    """
    most = torch.finfo(X.dtype).max ** 0.25
    if max(-float((ends := torch.aminmax(X)).min), float(ends.max)) <= most:
        return
    size = X.abs().flatten(1).amax(1)
    for row in (size > most).nonzero()[:, 0].tolist():
        try:
            tau, alpha = scorer(prepared, X[row : row + 1], 0.0)
            blocks = (alpha(slice(at, at + 256)) for at in range(0, prepared.problem.n, 256))
            finite = all(bool(part.isfinite().all()) for part in chain([tau], blocks))
        except (torch.linalg.LinAlgError, CurvatureError):  # type: ignore[attr-defined]  # of what is not finite
            finite = False
        if not finite:
            raise ValueError(
                f"object {row} of those to be predicted (counted from 0) holds values up to {float(size[row]):.3g} in size, and its "
                f"scores overflow {str(X.dtype).removeprefix('torch.')}. Look for a wrong unit or a placeholder, and leave such "
                "objects out or clip them."
            )


@torch.no_grad()
def all_scores(scorer: Scorer, prepared: Prepared, X: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """All scores at once, α (m, C, n) and τ (m, C): for small problems, diagnostics and tests."""
    tau, alpha = scorer(prepared, X, q)
    return alpha(slice(0, prepared.problem.n)), tau
