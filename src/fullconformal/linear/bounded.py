"""Which training points are above a candidate and which below, by bounds: the candidate's bag is fitted, but its Hessian is not formed.

First every point by what leaving it out can do to it at most, then the pairs of a candidate and a point that are left by the step of the
fit on Z, by energies where the Hessian has moved far, and those that are still left by a solve for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, conjugate, fit_added, fit_error, granted, turn
from fullconformal.linear.bag import Change, LinearBag, at_points
from fullconformal.linear.hessian import inner, rounding
from fullconformal.linear.newton import ROUGH, repulled
from fullconformal.losses import relative

# Logits are granted this error beside the bounds, so that what the full accuracy calls a tie is one here.
FLOOR = 1e-9
# Errors of a logit, by their bound: the first decides most candidates, the second most of the rest, the last all but ties.
COARSE, ACCURATE, FINE = 1e-2, ROUGH, 1e-9
BLOCK = 2**27  # bytes for the candidates that go through together; on the CPU more are slower, for want of cache


@torch.no_grad()
def order_without_fits(bag: LinearBag, change: Change, q: float) -> Tensor:
    """Order (B, n) as `bounded_order` has it, of all candidates of objects, by the fit on Z alone: 0 for all points near the candidate.

    The minimiser of a bag is as close to it as the gradient there is small, which is that of the added point and of other penalties. Where
    it moves logits by ranges ≤ R, a Hessian shrinks by e^(−R) or the least factor, and A' is as much above A°.
    """
    at, base, theta, C = bag.reference, bag.base, bag.base.theta[:, :, None], bag.n_classes
    if 0 < q < 1:
        return torch.zeros(len(change.y), len(bag.X), dtype=torch.int8, device=bag.X.device)
    x, z = change.x[:, ::C], at_points(change.x, theta)
    E = inner(x, base.solve_points(x))[tuple(relative.pairs(bag.K, x.device)[0])].repeat_interleave(C, -1)
    G = change.x.T[:, None] * relative.residual(z, change.y).T[:, :, None] + turn(repulled(bag, change))
    mu = base.length(G) + base.error / base.kappa + granted(bag, change, theta)
    root, own = relative.spread(E).sqrt(), relative.margin(z, change.y)
    kappa = root.clamp(min=base.kappa)
    held = 1.0 if change.factors is None else change.factors.amin(0).clamp(max=1.0)
    R = fit_error(kappa * mu / held)
    grown, reach, slack = torch.exp(R).clamp(min=1.0 / held), R / kappa, 2 * rounding(bag, change, theta) + FLOOR
    # A point that is added becomes more likely than by the minimiser on Z, unless penalties change.
    least, most = (
        own - root * reach - slack,
        own + slack + root * (base.error / base.kappa if change.factors is None else reach),
    )
    off = torch.outer(reach, at.spread.sqrt())
    highest = at.margin + off
    if q == 1:
        most = most + grown * relative.apart(E, change.y) * most.sigmoid()
        apart = (1 + 4 * at.rounding * (1 + at.odds)) * at.left_out_apart
        highest += torch.exp(off).mul_(grown[:, None]).mul_(apart * at.margin.sigmoid())
    return (at.margin - off > most[:, None]).to(torch.int8) - (highest < least[:, None]).to(torch.int8)


@torch.no_grad()
def bounded_order(
    bag: LinearBag,
    change: Change,
    columns: Tensor,
    q: float,
    accuracy: float,
    left: Callable[[Tensor], Tensor] | None = None,
    start: Added | None = None,
) -> tuple[Tensor, Added]:
    """Order (B, n) of the training points' scores against those of candidates of objects, 0 where it is open, and the fits.

    The columns (B,) are some of the m·C changes, label fastest; logits of a fit may be off by the accuracy. For 0 < q < 1 all is open.

    A point left out of the bag moves its logits by A'r, r its residual and A' its leverage without it. That of the fit on Z, A°, is off
    by a factor that `hessian_factors` bounds, and r is 1 − π_y times a mean of e_k − e_y: its margin grows by at most m(A')(1 − π_y), m as
    in `linear.reference` of its own class, and does not decrease. Points which that leaves open have A°r, where the Hessian has moved far
    bounds on A' of their own (`linear.reference.Energies`), and where that is not enough A'r from a solve, as the candidates have.
    ``left(order)`` says which candidates (B,) are still to be decided; all of them where there is none.
    """
    dtype = torch.float64 if accuracy <= ACCURATE else bag.reference.rough
    at, fits, change = bag.reference, fit_added(bag, change, columns, accuracy, start, dtype), change[columns]
    grain = rounding(bag, change, fits.theta, dtype) + FLOOR + 2 * bag.n_classes * torch.finfo(dtype).eps
    if q < 1:
        error = fits.error + grain if q == 0 else torch.full_like(grain, torch.inf)
        tau, error = relative.margin(fits.z_added, change.y)[:, None], 2 * error[:, None]
        return torch.as_tensor(pvalues.order(relative.margin(fits.z, bag.y), tau, error)), fits
    tau, tau_error = _own_scores(bag, change, fits, grain, accuracy)
    margin, other = _margins(bag, fits)
    slack, off = tau_error + grain, torch.outer(fits.reach, at.spread.sqrt())
    # Probabilities near the least numbers of a precision are known to be small, no more.
    tiny = torch.finfo(dtype).tiny ** 0.8
    granted = torch.where(tau.abs() < -math.log(tiny), slack, torch.inf)
    above = margin - off > (tau + granted)[:, None]
    # The margin of a point that is left out does not decrease, and grows by no more than m(A')(1 − π_y).
    grown = (1 + 4 * at.rounding * (1 + at.odds)) * at.left_out_apart
    most = (other * grown).div_(fits.factors[:, None].least(at.rest)).mul_(torch.exp(fits.error)[:, None])
    order = above.to(torch.int8) - (most.add_(margin).add_(off) < (tau - granted)[:, None]).to(torch.int8)
    pairs = ((order == 0) if left is None else (order == 0) & left(order)[:, None]).nonzero()
    column, point = pairs.T
    error, closest = torch.empty_like(column, dtype=tau.dtype), torch.empty_like(column, dtype=tau.dtype)

    def still() -> Tensor:
        """Which of the pairs (b,) are open."""
        open_ = order[column, point] == 0
        return open_ if left is None else open_ & left(order)[column]

    def compare(part: Tensor, *known: Tensor) -> None:
        """Decide the order of some pairs by what is known of their A'."""
        error[part], closest[part] = _compare(bag, fits, tau, slack, pairs[part], order, *known)

    # By multiples of A°, some 2²⁰ numbers of the pairs at a time.
    for part in torch.arange(len(pairs), device=pairs.device).split(max(1, 2**20 // (8 * bag.K))):
        c, i = column[part], point[part]
        far, rest, r = fits.factors[c], at.rest[i], _at_pairs(bag, fits, c, i)[2]
        low, high, s = 1 / far.most(rest), 1 / far.least(rest), _left_out(at.left_out, i, r)
        half = (high - low) / 2
        length = half.square() * (r * s).sum(0).clamp(min=0.0)
        compare(part, s * (low + half), length[:, None] * at.left_out_against[i], high * at.left_out_spread[i])
    # Where the Hessian has moved far its factors say little; solves take as little as energies where it has not, or points are many.
    moved = (fits.factors.whole < 0.5) & (fits.error < 0.1) & (len(bag.X) * bag.n_classes**3 <= 2**24)
    many = (column[still() & moved[column]].bincount(minlength=len(tau)) > 8).nonzero().squeeze(1)
    sure = torch.exp(fits.error + grain)
    if len(many):
        _screen(bag, change[many], fits[many], off[many], (tau - granted)[many], sure[many], many, order)
    near = still() & moved[column]
    near &= (column[near].bincount(minlength=len(tau)) <= few_solves(bag))[column]
    if bool(near.any()):
        part = near.nonzero().squeeze(1)
        c, i = column[part], point[part]
        low, high = bag.energies.enclose(change, fits.pi, relative.all_probabilities(fits.z_added), c, i)
        unit = 4 * (at.rounding + torch.finfo(torch.float32).eps)
        grow = (sure[c] * (1 + unit * (1 + at.odds[i])))[:, None, None]
        low, high, (y, _, r) = low / grow, high * grow, _at_pairs(bag, fits, c, i)
        half, r = (high - low) / 2, r.T[:, :, None]
        length = (r.mT @ half @ r)[:, 0].clamp(min=0.0) * relative.against(half, y)
        spread = relative.spread(high[:, *relative.pairs(bag.K, r.device)[0]].T)
        compare(part, torch.bmm(high - half, r)[:, :, 0].T, length, spread)
    # Where nothing is known of a point, or of a fit, a solve would not help; nor for candidates of which a rough fit leaves a point open.
    unknown = still() & torch.isfinite(error)
    if accuracy > ACCURATE:
        lost = torch.zeros_like(tau, dtype=torch.bool)
        lost[column[still() & (error > closest / 2)]] = True
        unknown &= ~lost[column]
    unknown &= (torch.bincount(column[unknown], minlength=len(tau)) <= few_solves(bag))[column]
    pairs, error = pairs[unknown], error[unknown]
    for precision in (dtype,) if accuracy < ACCURATE else dict.fromkeys((bag.reference.rough, dtype)):
        size = max(1, BLOCK // 32 // (8 * len(bag.X) * bag.K))
        for part, errors in zip(pairs.split(size), error.split(size), strict=True):
            _solve(bag, change, fits, tau, errors, part, order, precision)
        left_over = order[tuple(pairs.T)] == 0
        pairs, error = pairs[left_over], error[left_over]
    return order, fits


def _screen(
    bag: LinearBag, change: Change, fits: Added, off: Tensor, tau: Tensor, sure: Tensor, columns: Tensor, order: Tensor
) -> None:
    """Put points below τ (B,) in some columns of the order by what each class can move against their own: |A'^½(e_k − e_y)| |A'^½r|."""
    points, at = bag.energies.screen[0], bag.reference
    grown = sure.square()[:, None] * (1 + 4 * at.rounding * (1 + at.odds[points]))
    length = (bag.energies.apart(fits.pi, change.factors) * grown[:, None]).sqrt()
    step = length * (fits.pi[:, :, points] * length).sum(1, keepdim=True)
    most = relative.margin(fits.z[:, :, points] + step[:, 1:] - step[:, :1], bag.y[points]) + off[:, points]
    below = (most < tau[:, None]) & (order[columns][:, points] == 0)
    order[columns[:, None], points] -= below.to(order.dtype)


def few_solves(bag: LinearBag) -> int:
    """How many points of a candidate to solve for: at about three products each, many more take as long as a Hessian of its own."""
    n, p = len(bag.X), bag.base.inverse.shape[0]
    return max(64, n * p * p // (3 * (4 * n * p + 2 * p * p)))


def _margins(bag: LinearBag, fits: Added) -> tuple[Tensor, Tensor]:
    """Margins (B, n) of the training points at the fits, and the probabilities 1 − π_y; none beyond what a precision holds."""
    if bag.K == 1:
        margin = relative.margin(fits.z, bag.y)
        return margin, margin.sigmoid()
    own = fits.pi.gather(1, bag.y.expand(len(fits.pi), 1, -1))[:, 0]
    other = torch.zeros_like(own)
    for pi, mine in zip(fits.pi.unbind(1), bag.reference.own.to(own.dtype), strict=True):
        other.addcmul_(pi, 1 - mine)
    tiny = torch.finfo(own.dtype).tiny ** 0.8
    return (other.clamp(min=tiny) / own.clamp_(min=tiny)).log_(), other


def turned(R: Tensor, other: Tensor) -> Tensor:
    """How far probabilities can be off in all where logits are off by ranges ≤ R and those of the other classes sum to 1 − π_y."""
    return torch.minimum((R / 4).clamp(max=1.0), torch.expm1(R.clamp(max=50.0)) * other)


def _own_scores(bag: LinearBag, change: Change, fits: Added, grain: Tensor, accuracy: float) -> tuple[Tensor, Tensor]:
    """Scores (B,) of the candidates, whose leverage without them is that of the points alone, and their errors."""
    r = relative.residual(fits.z_added, change.y)
    whole, root = fits.factors.whole, fits.spread.sqrt()
    apart = relative.apart(fits.E[tuple(relative.pairs(bag.K, r.device)[0])], change.y).sqrt()
    low, high = 1 / fits.factors.top, 1 / whole
    size = (r * torch.einsum("klb,lb->kb", fits.E, r)).sum(0).clamp(min=0.0).sqrt()
    shift, norms, near = torch.zeros_like(r), torch.zeros_like(size), min(accuracy * 10, 0.1)

    x, left = change.x.T[:, None], torch.arange(len(size), device=size.device)

    def small(columns: Tensor, w: Tensor, s: Tensor, norm: Tensor, lost: Tensor) -> Tensor:
        at = left[columns]
        shift[:, at] = _ahead(x[at], w, s, (low + high)[at] / 2)
        norms[at] = (high - low)[at] / 2 * norm + high[at] * lost
        return norms[at] <= near * size[at]

    for dtype in dict.fromkeys((bag.reference.rough, fits.pi.dtype)):
        pi = fits.rough if dtype == torch.float32 else fits.pi[:, 1:]
        conjugate(bag, change[left], pi[left], None, (x * r.T[:, :, None])[left], small)
        left = (norms > near * size).nonzero().squeeze(1)
        if not len(left):
            break
    other = relative.margin(fits.z_added, change.y).sigmoid()
    off = root * fits.reach
    error = apart * norms + off + grain + fits.spread * high * (turned(off, other) + torch.expm1(fits.error) * other)
    return relative.margin(fits.z_added + shift, change.y), error


def _compare(
    bag: LinearBag,
    fits: Added,
    tau: Tensor,
    slack: Tensor,
    pairs: Tensor,
    order: Tensor,
    shift: Tensor,
    length: Tensor,
    spread: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decide the order (B, n) of pairs (b, 2) of a column and a point, of whose A' it is known that A'r is near a shift (K, b).

    What is not known of A' moves class k against the own one by a squared ``length`` (b, C) at most; A' has at most some spread (b,).
    Returns how far the scores and τ can be off besides what is not known of A', and how far they are apart, (b,) each.
    """
    at, (column, point) = bag.reference, pairs.T
    y, z, _ = _at_pairs(bag, fits, column, point)
    moved, lengths = z + shift, length.sqrt().T
    # The margin grows with all of them.
    most, least = (relative.margin(moved + sign * (lengths[1:] - lengths[:1]), y) for sign in (1, -1))
    off, other = at.spread.sqrt()[point] * fits.reach[column], relative.margin(z, y).sigmoid()
    rounded = 4 * at.rounding * (1 + at.odds[point])
    error = (turned(off, other) + rounded * other) * spread + off + slack[column]
    above, below = least > tau[column] + error, most < tau[column] - error
    order[column, point] = above.to(order.dtype) - below.to(order.dtype)
    alpha = relative.margin(moved, y)
    return error, (alpha - tau[column]).abs()


def _left_out(A: Tensor, point: Tensor, r: Tensor) -> Tensor:
    """A_i r (K, b) of residuals r (K, b) of some points: each matrix of A (n, K, K) is read once for all its residuals."""
    place = point.argsort(stable=True)
    present, which, many = point[place].unique_consecutive(return_inverse=True, return_counts=True)
    within = torch.arange(len(place), device=place.device) - (many.cumsum(0) - many)[which]
    R = r.new_zeros(len(present), len(r), int(many.max()) if len(many) else 0)
    R[which, :, within] = r[:, place].T
    step = max(1, 2**20 // len(r) ** 2)
    S = torch.cat([A[present[at : at + step]] @ R[at : at + step] for at in range(0, len(present) or 1, step)])
    out = torch.empty_like(r)
    out[:, place] = S[which, :, within].T
    return out


def _at_pairs(bag: LinearBag, fits: Added, column: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels (b,), logits and residuals (K, b) of pairs of a column and a point."""
    y, z = bag.y[point], fits.z[column, :, point].T.double()
    return y, z, relative.residual(z, y)


def _solve(
    bag: LinearBag,
    change: Change,
    fits: Added,
    tau: Tensor,
    error: Tensor,
    pairs: Tensor,
    order: Tensor,
    dtype: torch.dtype,
) -> None:
    """Decide the order (B, n) of pairs (b, 2) of a column and a point, by a solve of some precision for each, errors (b,) beside it.

    The Hessian without the point is that of the fit on Z times factors from 1/(1 + odds) of the least to the most.
    """
    at, (column, point) = bag.reference, pairs.T
    own, x = replace(change[column], removed=point), bag.X[point][:, None]
    y, z, r = _at_pairs(bag, fits, column, point)
    far, rest = fits.factors[column], at.rest[point]
    least = far.least(rest)
    low, high = 1 / far.most(rest), (1 + at.odds[point]) / least
    # The Hessian of a solve is that at logits off by the error.
    other = relative.margin(z, y).sigmoid()
    fixed = error + torch.expm1(fits.error[column]) * at.left_out_spread[point] / least * other
    root = at.apart[point].sqrt()

    def stop(pairs: Tensor, w: Tensor, s: Tensor, norm: Tensor, lost: Tensor) -> Tensor:
        shifted = z[:, pairs] + _ahead(x[pairs], w, s, (low + high)[pairs] / 2)
        off = root[pairs] * ((high - low)[pairs] / 2 * norm + high[pairs] * lost)
        found = pvalues.order(relative.margin(shifted, y[pairs]), tau[column[pairs]], off + fixed[pairs])
        order[column[pairs], point[pairs]] = found.to(order.dtype)
        # Where the other errors decide, more products would not.
        decided: Tensor = found != 0
        return decided | (off < 1e-2 * fixed[pairs])

    pi = fits.rough.index_select(0, column) if dtype == torch.float32 else fits.pi[column, 1:]
    conjugate(bag, own, pi, fits.theta[:, :, column], x * r.T[:, :, None], stop)


def _ahead(x: Tensor, w: Tensor, s: Tensor, share: Tensor) -> Tensor:
    """Logits (K, B) of points x (B, 1, d) of solutions w (B, K, d) and shares (B,) of the steps s that lie ahead."""
    return torch.addcmul(w, share[:, None, None], s).mul_(x).sum(2).T
