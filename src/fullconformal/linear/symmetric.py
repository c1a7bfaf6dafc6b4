"""The exactly valid scores: every point of Z ∪ {ẑ} by the same function of the fit on Z ∪ {ẑ}.

    α_i = ℓ(y_i, z_i + A^½ φ_q(A^½ S A^½) A^½ r)        q = 0 ordinary, ½ studentized, 1 deleted (approximate leave-one-out)

with A, S, r of the point at the augmented fit and its own Hessian. Permuting the bag permutes the scores, so P(p ≤ ε) ≤ ε however
good the approximation is. Scores are held as margins log(e^α − 1), which order points as α does and keep their digits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, fit_added, refine
from fullconformal.linear.bag import (
    EPS,
    Change,
    Counted,
    FloatArray,
    LinearBag,
    NoMinimiser,
    as_objects,
    at_points,
    chunks,
    comparison,
    count_all,
    gradient,
    logits,
    with_labels,
)
from fullconformal.linear.bounded import (
    ACCURATE,
    BLOCK,
    COARSE,
    FINE,
    bounded_order,
    few_solves,
    order_without_fits,
    parted,
)
from fullconformal.linear.hessian import Fits, certify, curvature, rounding
from fullconformal.linear.leave_one_out import deletion, score_error
from fullconformal.linear.newton import first_step, refit
from fullconformal.losses import relative
from fullconformal.runtime.numerics import each_alone, full_precision, keep_freed
from fullconformal.runtime.tasks import Progress

Enough = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scores:
    """Margins of the training points (n, B) and of the candidates (B,), and the error of each."""

    alpha: Tensor
    tau: Tensor
    alpha_error: Tensor
    tau_error: Tensor


@torch.no_grad()
def symmetric_scores(bag: LinearBag, change: Change, q: float) -> Scores:
    """Scores of all points of the columns' augmented bags."""
    return _scores(bag, change, refit(bag, change), q)


def _scores(bag: LinearBag, change: Change, fits: Fits, q: float) -> Scores:
    """The same at given fits."""
    z, z_added, y = logits(bag, fits.theta), at_points(change.x, fits.theta), bag.y[:, None]
    grain = rounding(bag, change, fits.theta)
    if q == 0:
        error = fits.error + grain
        return Scores(relative.margin(z, y), relative.margin(z_added, change.y), error.expand(z.shape[0], -1), error)
    S = relative.second(z)
    C = curvature(bag, change, fits.theta, S)
    error = certify(bag, change, fits.theta, fits.gradient, C)[2]
    out = deletion(C.A, S, relative.residual(z, y), q)
    out_added = deletion(C.A_added, relative.second(z_added), relative.residual(z_added, change.y), q)
    return Scores(
        relative.margin(z.add_(out.shift), y),
        relative.margin(z_added + out_added.shift, change.y),
        score_error(C.spread, out, error, C.rounding) + grain,
        score_error(C.spread_added, out_added, error, C.rounding) + grain,
    )


def symmetric_counts(
    bag: LinearBag,
    X_test: Tensor,
    q: float,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
    enough: Enough | None = None,
    factors: Tensor | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Counts for the C candidates of every test point X_test (m, d); weight (n, C) as in `pvalues.count`.

    Rough scores settle most candidates; those with a point they cannot tell from the candidate are scored to full accuracy.
    Scores closer than what both may be off are tied then, so that p-values can only err upwards. ``enough(labels, surely, possibly)``
    may say of candidates with some labels (B,) that the weight surely and possibly counted (B,) need not be told apart; ``factors`` (m, d)
    are those of the penalties in the bags of each test point.
    """
    memory = memory_budget if X_test.is_cuda else min(memory_budget // torch.get_num_threads(), BLOCK)

    @torch.no_grad()
    def scored(change: Change, theta: Tensor, *known: Tensor) -> Counted:
        # The bags' own Hessians tell the errors; those of ordinary scores come with the fits.
        fits = (refit if q == 0 else refine)(bag, change, theta)
        s = _scores(bag, change, fits, q)
        order = torch.as_tensor(pvalues.order(s.alpha, s.tau, s.alpha_error + s.tau_error))
        # Bounds may know the order of scores whose errors nothing is known of, and sets have been told it.
        for bounded in known:
            order = torch.where(order == 0, bounded.T, order)
        return pvalues.count(order, 0, 0, comparison(weight, change))

    # Whether p is above a level can be told from rougher fits than p. They cost a third of accurate ones, of two classes nearly as
    # much, and pay where they decide some of the candidates: for p-values not where tens of points lie within their rounding, nor where
    # single points move so far that little is known of their Hessians.
    rough = COARSE if enough is None else 10 * COARSE
    hopeless = enough is None and (bag.K == 1 or bag.base.kappa > 10 or len(bag.X) * bag.reference.rough_error > 30)
    stages = [ACCURATE, FINE] if hopeless else [rough, ACCURATE, FINE]

    def decided(change: Change) -> Counted:
        x = change.x
        above, undecided = x.new_zeros(2, len(change.y))

        def open_after(order: Tensor, columns: Tensor) -> Tensor:
            """Count the points above some columns' candidates, and say which of these (B,) are still to be decided."""
            labels, against = change.y[columns], comparison(weight, change[columns])
            surely, between = pvalues.count(order, 0, 0, None if against is None else against.T, axis=1)
            above[columns], undecided[columns] = surely.to(x.dtype), between.to(x.dtype)
            unsure = (order == 0).any(1)
            return unsure if enough is None else unsure & ~enough(labels, surely, surely + between)

        columns, known = torch.arange(len(change.y), device=x.device), None
        if enough is not None:
            known = order_without_fits(bag, change, q)
            columns = columns[open_after(known, columns)]
        if not len(columns):
            return above, undecided

        def settle(seen: LinearBag, columns: Tensor, fits: Added) -> None:
            nonlocal known
            for accuracy in stages:
                if accuracy != stages[0]:
                    fits = fit_added(seen, change, columns, accuracy, fits)
                left = partial(open_after, columns=columns)
                order = bounded_order(seen, change[columns], fits, q, accuracy, left if enough else None)
                unsure = left(order)
                # Finer fits do not help where many points are open by what is not known of the Hessian.
                many = unsure & ((order == 0).sum(1) > few_solves(bag)) & (accuracy <= ACCURATE)
                last = unsure if accuracy == stages[-1] else many
                for at in chunks(bag, last.nonzero().squeeze(1), memory):
                    known = order_without_fits(bag, change, q) if known is None else known
                    counts = scored(change[columns[at]], fits.theta[:, :, at], order[at], known[columns[at]])
                    above[columns[at]], undecided[columns[at]] = (each.to(x.dtype) for each in counts)
                on = (unsure & ~last).nonzero().squeeze(1)
                if not len(on):
                    break
                columns, fits = columns[on], fits[on]

        dtype = torch.float64 if stages[0] <= ACCURATE else bag.reference.rough
        fits = fit_added(bag, change, columns, stages[0], None, dtype)
        # Other schemes have no bounds that leverages enter.
        for part in parted(bag, change, columns, fits, stages[0]) if q == 1 else [(bag, columns, fits)]:
            settle(*part)
        return above, undecided

    return count_objects(bag, as_objects(X_test, factors), decided, weight, memory, progress)


def count_objects(
    bag: LinearBag,
    objects: Change,
    count: Callable[[Change], Counted],
    weight: Tensor | FloatArray | None,
    memory: int,
    progress: Progress | None,
) -> tuple[FloatArray, FloatArray]:
    """Counts for all candidates of objects from those of the candidates of blocks of them.

    Where the bags of an object cannot be fitted all points are tied with it, so that its p-values are one, and a warning says so.
    """
    lost: dict[int, str] = {}
    weights = bag.base.theta.abs()  # of Z, without whose fit there is nothing
    tied = torch.full((bag.n_classes,), float(len(bag.X))) if weight is None else torch.as_tensor(weight).sum(0)

    def counted(objects: Change) -> Tensor:
        try:
            # Logits of which rounding leaves no digits behind the point need not be tried.
            if bool((objects.x.abs().T @ weights > 1e-3 / EPS).any()):
                raise bag.no_minimiser(objects)
            return torch.stack(count(with_labels(bag, objects))).view(2, -1, bag.n_classes)
        except NoMinimiser as error:
            if len(objects.y) > 1:
                halves = torch.arange(len(objects.y), device=objects.y.device).tensor_split(2)
                return torch.cat([counted(objects[half]) for half in halves], 1)
            lost[-1 if objects.row is None else int(objects.row)] = str(error)
            return torch.stack([0 * tied, tied])[:, None].to(objects.x)

    keep_freed()
    x, m, (n, C) = objects.x, len(objects.y), (len(bag.X), bag.n_classes)
    # On a CPU logits of a block stay in the cache, and every thread has blocks of its own; what they share is made before.
    bag.columns(bag.reference.rough)
    most = max(1, (memory // 32 if x.is_cuda else min(memory // 8, 2**23)) // (8 * n * bag.K * C))
    # Threads of Python hand their lock on after every small step: parts of fewer numbers take longer in two of them than in one.
    fair = max(-(-m // torch.get_num_threads()), 2**17 // (n * bag.K * C))
    width = most if x.is_cuda else max(1, min(most, fair))
    # The first of many blocks are small, so that the pace is known early.
    small = width // 8 if width == most < m else 0
    starts = [*range(0, small, max(1, width // 16)), *range(small, m, width)]
    parts, out = [slice(*ends) for ends in pairwise([*starts, m])], x.new_zeros(2, m, C)
    # Threads of torch meet at the end of every product: on a busy machine that costs a single object twenty times what they save.
    share = map if x.is_cuda or (len(parts) == 1 and n * x.shape[0] * bag.K * C > 2**28) else each_alone
    with full_precision():
        for part, found in zip(parts, share(counted, (objects[part] for part in parts)), strict=True):
            out[:, part] = found
            if progress is not None:
                progress(part.stop, m)
    if lost:
        rows = f"{', '.join(map(str, list(lost)[:10]))}{' and others' * (len(lost) > 10)}"
        warnings.warn(
            f"the p-values of {len(lost)} of {m} objects are one, their sets hold every label (objects {rows}, counted from 0): "
            f"{next(iter(lost.values()))}",
            stacklevel=6,
        )
    greater, equal = out.cpu().numpy()
    return greater, equal


@torch.no_grad()
def symmetric_bounds(
    bag: LinearBag,
    X_test: Tensor,
    weight: Tensor | FloatArray | None = None,
    progress: Progress | None = None,
    memory_budget: int = 2**30,
    factors: Tensor | None = None,
    one_step: bool = True,
) -> tuple[FloatArray, FloatArray]:
    """Weight (m, C) of the training points whose ordinary score surely, and possibly, is at least the candidate's.

    By the exact augmented fit, which one Newton step (or convergence) and its error enclose; where the bound says nothing (κμ ≥ 1) every
    training point is between them.
    """

    def counted(change: Change) -> Counted:
        theta = first_step(bag, change) if one_step else refit(bag, change).theta
        z = logits(bag, theta)
        G = gradient(bag, change, theta, relative.residual(z, bag.y[:, None]))
        C = curvature(bag, change, theta, relative.second(z))
        _, kappa, error = certify(bag, change, theta, G, C)
        reach, grain = error / kappa, rounding(bag, change, theta)
        alpha, tau = relative.margin(z, bag.y[:, None]), relative.margin(at_points(change.x, theta), change.y)
        slack, own_slack = (part.sqrt() * reach + grain for part in (C.spread, C.spread_added))
        return pvalues.count(alpha, tau, (slack, own_slack), comparison(weight, change))

    surely, between = count_all(bag, as_objects(X_test, factors), counted, memory_budget, progress)
    return surely, surely + between
