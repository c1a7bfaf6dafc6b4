"""Which training points are above a candidate and which below, by bounds: the candidate's bag is fitted, but its Hessian is not formed.

First every point by what leaving it out can do to it at most, then the pairs of a candidate and a point that are left by the step of the
fit on Z, by energies where the Hessian has moved far, and those that are still left by a solve for each. Candidates that have moved the
Hessian far share one that is below theirs all, in place of that of the fit on Z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.linear.added import Added, conjugate, fit_below, fit_error, granted, turn
from fullconformal.linear.bag import Change, LinearBag, NoMinimiser, at_points
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


def parted(
    bag: LinearBag, change: Change, columns: Tensor, fits: Added, accuracy: float
) -> list[tuple[LinearBag, Tensor, Added]]:
    """Columns in parts, each with the bag whose Hessian bounds start from and its fits: those that moved it far have one below theirs all.

    It costs as much as solves for `few_solves` points, and bounds from it spare each of these columns some thirty.
    """
    far = fits.factors.whole < 0.3
    if 32 * int(far.sum()) <= few_solves(bag):
        return [(bag, columns, fits)]
    moved, near = (part.nonzero().squeeze(1) for part in (far, ~far))
    try:
        parts = [(*fit_below(bag, change, columns[moved], accuracy, fits[moved]), columns[moved])]
    except NoMinimiser:  # it is singular
        return [(bag, columns, fits)]
    return [(seen, columns, fits) for seen, fits, columns in [*parts, (bag, fits[near], columns[near])] if len(columns)]


@torch.no_grad()
def bounded_order(
    bag: LinearBag,
    change: Change,
    fits: Added,
    q: float,
    accuracy: float,
    left: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Order (B, n) of the training points' scores against those of candidates, 0 where it is open, by fits of some accuracy.

    For 0 < q < 1 all is open.

    A point left out of the bag moves its logits by A'r, r its residual and A' its leverage without it. That of the fit on Z, A°, is off
    by a factor that `hessian_factors` bounds, and r is 1 − π_y times a mean of e_k − e_y: its margin grows by at most m(A')(1 − π_y), m as
    in `linear.reference` of its own class, and does not decrease. Points which that leaves open have A°r, where the Hessian has moved far
    bounds on A' of their own (`linear.reference.Energies`), and where that is not enough A'r from a solve, as the candidates have.
    ``left(order)`` says which candidates (B,) are still to be decided; all of them where there is none.
    """
    dtype = fits.z.dtype
    grain = rounding(bag, change, fits.theta, dtype) + FLOOR + 2 * bag.n_classes * torch.finfo(dtype).eps
    if q < 1:
        error = fits.error + grain if q == 0 else torch.full_like(grain, torch.inf)
        tau, error = relative.margin(fits.z_added, change.y)[:, None], 2 * error[:, None]
        return torch.as_tensor(pvalues.order(relative.margin(fits.z, bag.y), tau, error))
    pairs = _Pairs(bag, change, fits, grain, accuracy, left)
    pairs.by_multiples()
    pairs.by_energies()
    pairs.by_solves()
    return pairs.order


class _Pairs:
    """The order (B, n) of points against candidates; and pairs (b,) of a column and a point that it leaves open, to be decided one by one.

    Of a pair, ``error`` is how far the scores and τ can be off besides what is not known of A', and ``closest`` how far they are apart.
    """

    def __init__(
        self, bag: LinearBag, change: Change, fits: Added, grain: Tensor, accuracy: float, left: Callable[[Tensor], Tensor] | None
    ) -> None:  # fmt: skip
        self.bag, self.change, self.fits, self.grain, self.accuracy = bag, change, fits, grain, accuracy
        self.left = left or (lambda order: torch.ones(len(order), dtype=torch.bool, device=order.device))
        self.tau, tau_error = _own_scores(bag, change, fits, grain, accuracy)
        at, (margin, other) = bag.reference, _margins(bag, fits)
        self.slack, self.off = tau_error + grain, torch.outer(fits.reach, at.spread.sqrt())
        # Probabilities near the least numbers of a precision are known to be small, no more.
        tiny = torch.finfo(fits.z.dtype).tiny ** 0.8
        granted = torch.where(self.tau.abs() < -math.log(tiny), self.slack, torch.inf)
        self.least = self.tau - granted
        above = margin - self.off > (self.tau + granted)[:, None]
        # The margin of a point that is left out does not decrease, and grows by no more than m(A')(1 − π_y).
        grown = (1 + 4 * at.rounding * (1 + at.odds)) * at.left_out_apart
        most = (other * grown).div_(fits.factors[:, None].least(at.rest)).mul_(torch.exp(fits.error)[:, None])
        self.order = above.to(torch.int8) - (most.add_(margin).add_(self.off) < self.least[:, None]).to(torch.int8)
        self.column, self.point = ((self.order == 0) & self.left(self.order)[:, None]).nonzero().T
        self.error, self.closest = torch.empty(2, len(self.column), dtype=self.tau.dtype, device=self.tau.device)

    def still(self) -> Tensor:
        """Which of the pairs (b,) are to be decided."""
        open_: Tensor = self.order[self.column, self.point] == 0
        return open_ & self.left(self.order)[self.column]

    def few(self, pairs: Tensor) -> Tensor:
        """Those of some pairs (b,) whose candidates have few of them."""
        few: Tensor = self.column[pairs].bincount(minlength=len(self.tau)) <= few_solves(self.bag)
        return pairs & few[self.column]

    def at(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Labels (b,), logits and residuals (K, b) of some pairs."""
        y, z = self.bag.y[self.point[part]], self.fits.z[self.column[part], :, self.point[part]].T.double()
        return y, z, relative.residual(z, y)

    def by_multiples(self) -> None:
        """Decide by multiples of A°."""
        at = self.bag.reference
        # Some 2²⁰ numbers of the pairs at a time.
        for part in torch.arange(len(self.point), device=self.point.device).split(max(1, 2**20 // (8 * self.bag.K))):
            i, far = self.point[part], self.fits.factors[self.column[part]]
            r, rest = self.at(part)[2], at.rest[i]
            low, high, s = 1 / far.most(rest), 1 / far.least(rest), _left_out(at.left_out, i, r)
            half = (high - low) / 2
            length = half.square() * (r * s).sum(0).clamp(min=0.0)
            self.compare(part, s * (low + half), length[:, None] * at.left_out_against[i], high * at.left_out_spread[i])

    def by_energies(self) -> None:
        """Decide by bounds on A' itself where the Hessian has moved far, whose factors say little there."""
        bag, fits, at = self.bag, self.fits, self.bag.energies.bag.reference
        # Solves take as little where it has not, of points that are more than parameters, or many.
        moved = (fits.factors.top.isinf() | (len(bag.X) < len(bag.base.inverse))) & (fits.error < 0.1)
        part = self.few(self.still() & moved[self.column]).nonzero().squeeze(1)
        if not len(part) or len(bag.X) * bag.n_classes**3 > 2**24:
            return
        c, i = self.column[part], self.point[part]
        low, high = bag.energies.enclose(self.change, fits.pi, relative.all_probabilities(fits.z_added), c, i)
        unit = 4 * (at.rounding + torch.finfo(torch.float32).eps)
        grow = (torch.exp(fits.error + self.grain)[c] * (1 + unit * (1 + at.odds[i])))[:, None, None]
        low, high, (y, _, r) = low / grow, high * grow, self.at(part)
        half, r = (high - low) / 2, r.T[:, :, None]
        length = (r.mT @ half @ r)[:, 0].clamp(min=0.0) * relative.against(half, y)
        spread = relative.spread(high[:, *relative.pairs(bag.K, r.device)[0]].T)
        self.compare(part, torch.bmm(high - half, r)[:, :, 0].T, length, spread)

    def compare(self, part: Tensor, shift: Tensor, length: Tensor, spread: Tensor) -> None:
        """Decide some pairs (b,) of whose A' it is known that A'r is near a shift (K, b).

        What is not known of A' moves class k against the own one by a squared ``length`` (b, C) at most; A' has at most some spread (b,).
        """
        at, c, i = self.bag.reference, self.column[part], self.point[part]
        y, z, _ = self.at(part)
        moved, lengths, tau = z + shift, length.sqrt().T, self.tau[c]
        # The margin grows with all of them.
        most, least = (relative.margin(moved + sign * (lengths[1:] - lengths[:1]), y) for sign in (1, -1))
        off, other = self.off[c, i], relative.margin(z, y).sigmoid()
        rounded = 4 * at.rounding * (1 + at.odds[i])
        error = (turned(off, other) + rounded * other) * spread + off + self.slack[c]
        above, below = least > tau + error, most < tau - error
        self.order[c, i] = above.to(self.order.dtype) - below.to(self.order.dtype)
        self.error[part], self.closest[part] = error, (relative.margin(moved, y) - tau).abs()

    def by_solves(self) -> None:
        """Decide by a solve for each."""
        # A solve would not help where nothing is known of a point or of a fit, nor for candidates of which a rough fit leaves a point open.
        unknown, fine = self.still(), self.fits.z.dtype
        if self.accuracy > ACCURATE:
            lost = torch.zeros_like(self.tau, dtype=torch.bool)
            lost[self.column[unknown & (self.error > self.closest / 2)]] = True
            unknown &= ~lost[self.column]
        part = self.few(unknown & torch.isfinite(self.error)).nonzero().squeeze(1)
        size = max(1, BLOCK // 32 // (8 * len(self.bag.X) * self.bag.K))
        for dtype in (fine,) if self.accuracy < ACCURATE else dict.fromkeys((torch.float32, fine)):
            for some in part.split(size):
                self._solve(some, dtype)
            part = part[self.order[self.column[part], self.point[part]] == 0]

    def _solve(self, part: Tensor, dtype: torch.dtype) -> None:
        """Decide some pairs (b,) by solves of some precision.

        The Hessian without the point is that of the fit on Z times factors from 1/(1 + odds) of the least to the most.
        """
        bag, fits, at, column, point = self.bag, self.fits, self.bag.reference, self.column[part], self.point[part]
        own, x, tau = replace(self.change[column], removed=point), bag.X[point][:, None], self.tau[column]
        (y, z, r), far, rest = self.at(part), fits.factors[column], at.rest[point]
        least = far.least(rest)
        low, high = 1 / far.most(rest), (1 + at.odds[point]) / least
        ahead = _Ahead(x, y, r, at.left_out[point], at.apart[point].sqrt(), low, high)
        # The Hessian of a solve is that at logits off by the error.
        other = relative.margin(z, y).sigmoid()
        fixed = self.error[part] + torch.expm1(fits.error[column]) * at.left_out_spread[point] / least * other

        def stop(pairs: Tensor, *left: Tensor) -> Tensor:
            margin, off = ahead.margin(z, pairs, *left)
            found = torch.as_tensor(pvalues.order(margin, tau[pairs], off + fixed[pairs]))
            self.order[column[pairs], point[pairs]] = found.to(self.order.dtype)
            # Where the other errors decide, more products would not.
            done: Tensor = (found != 0) | (off < 1e-2 * fixed[pairs])
            return done

        pi = fits.rough.index_select(0, column) if dtype == torch.float32 else fits.pi[column, 1:]
        conjugate(bag, own, pi, fits.theta[:, :, column], x * r.T[:, :, None], stop)


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
    r, y, whole = relative.residual(fits.z_added, change.y), change.y, fits.factors.whole
    E, x, left = fits.E.permute(2, 0, 1), change.x.T[:, None], torch.arange(len(y), device=y.device)
    root = relative.against(E, y).amax(1).sqrt()
    ahead = _Ahead(x, y, r, E, root, 1 / fits.factors.top, 1 / whole)
    (tau, off), near = torch.zeros_like(r[:1].repeat(2, 1)), min(accuracy * 10, 0.1) * root * ahead.size.sqrt()

    def small(columns: Tensor, *rest: Tensor) -> Tensor:
        at = left[columns]
        tau[at], off[at] = ahead.margin(fits.z_added, at, *rest)
        close: Tensor = off[at] <= near[at]
        return close

    for dtype in dict.fromkeys((torch.float32, fits.pi.dtype)):
        pi = fits.rough if dtype == torch.float32 else fits.pi[:, 1:]
        conjugate(bag, change[left], pi[left], None, (x * r.T[:, :, None])[left], small)
        left = (off > near).nonzero().squeeze(1)
        if not len(left):
            break
    other, moved = relative.margin(fits.z_added, y).sigmoid(), fits.spread.sqrt() * fits.reach
    return tau, off + moved + grain + fits.spread / whole * (turned(moved, other) + torch.expm1(fits.error) * other)


class _Ahead:
    """Margins of points x (b, 1, d) with labels that steps A'r move, A' = JM'Jᵀ, as far as conjugate gradients have solved for M'Jᵀr.

    M' is between ``low`` and ``high`` (b,) times the M that preconditions them, JMJᵀ at most A (b, K, K), and each class within a squared
    ``root`` of the own. With w solved for, a residual v is left: the rest of A'r is JM'v. Of what it moves class k against the own,
    u = e_k − e_y, the part along r is a multiple of rᵀJM'v = |v|²_M' + wᵀv, of second order; that of the rest of u is of first.
    """

    def __init__(self, x: Tensor, y: Tensor, r: Tensor, A: Tensor, root: Tensor, low: Tensor, high: Tensor) -> None:
        self.x, self.y, self.r, self.root, self.high = x, y, r, root, high
        self.share, self.half = (high + low) / 2, (high - low) / 2
        s = torch.bmm(A, r.T[:, :, None])[:, :, 0].T
        self.size = (r * s).sum(0).clamp(min=torch.finfo(s.dtype).tiny)
        s = torch.cat([torch.zeros_like(s[:1]), s])
        against = s - s.gather(0, y[None])
        self.along = against / self.size
        # No less than rounding leaves of a difference.
        apart = relative.against(A, y).T
        self.across = torch.maximum(apart - against * self.along, 4 * torch.finfo(s.dtype).eps * apart).sqrt()

    def margin(self, z: Tensor, at: Tensor, *left: Tensor) -> tuple[Tensor, Tensor]:
        """Margins (B,) of those of logits z (K, b) that stand at some places, and their errors, by what `conjugate` tells when to stop."""
        w, s, v, norm, lost = left
        share, half, lost = self.share[at], self.half[at], self.high[at] * lost
        x, r, y, along = self.x[at], self.r[:, at], self.y[at], self.along[:, at]
        ahead = share * (s * x).sum(2).T
        second = share * norm * norm + (w * v).sum((1, 2)) - (r * ahead).sum(0)
        moved = z[:, at] + (w * x).sum(2).T + ahead + (along[1:] - along[:1]) * second
        off = along.abs() * (half * norm + lost) * norm + self.across[:, at] * half * norm + self.root[at] * lost
        off = off.scatter(0, y[None], 0.0)
        most, least = (relative.margin(moved + sign * (off[1:] - off[:1]), y) for sign in (1, -1))
        return (most + least) / 2, (most - least) / 2


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
