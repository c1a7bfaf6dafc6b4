"""Newton's method for one bag or many changed bags at once; the fit on Z; fits of changed bags by its Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, Change, LinearBag, at_points, coupled, gradient, logits, objective, residuals
from fullconformal.linear.hessian import Base, Curvature, Fits, certify, curvature, inner, radius, rounding
from fullconformal.linear.steps import Steps, length
from fullconformal.losses.relative import range_of, residual, second, unpacked

# The error of a logit, by its bound, at which a fit has converged; and that at which most comparisons are decided.
CONVERGED, ROUGH = 1e-11, 1e-5
# A step that moves no logit by more leaves an error of about its square, and a shorter one that of a Hessian from farther off: 1e-9, and
# less than rounding where the fit is certified.
SMALL = 5e-5
# Residuals below which a bag without a penalty is fitted as well as can be: separable classes run away from there.
FITTED = 1e-12


class Minimum(NamedTuple):
    """Weights Θ (d, K, B), and whether Newton's method converged to them."""

    theta: Tensor
    found: bool


def minimise(bag: LinearBag, change: Change | None, theta: Tensor, iterations: int = 100) -> Minimum:
    """Minimisers of the columns' objectives from Θ (d, K, B) by Newton's method with line search."""
    steps, z, left, before = Steps(bag, change), logits(bag, theta), 3e-2, torch.inf
    for _ in range(iterations):
        r = residual(z, bag.y[:, None])
        fitted = bag.free[0] and float(r.abs().max()) < FITTED
        G = gradient(bag, change, theta, r)
        step = None if fitted else steps(theta, z, G, left)
        if step is None:
            break
        dz = logits(bag, step)
        R = range_of(dz).amax(0)
        if change is not None:
            R = torch.maximum(R, range_of(at_points(change.x, step)))
        largest = float(R.max())
        if not largest < torch.inf:  # overflow, of which no length would make a step
            break
        # As F'' grows by at most e^(tR) along a step, F surely decreases by 0.28 of its slope or more where R ≤ 1.
        if largest > 1:
            t = length(bag, change, theta, step, z, dz, R, (G * step).sum((0, 1)))
            step, dz = t * step, t * dz
        theta, z = theta - step, z - dz
        steps.moved += largest
        # Newton's steps shrink quadratically once they are small: those that no longer do are rounding.
        if steps.moved * largest <= SMALL**2 or 0.5 * before < largest < 1e-2:
            return Minimum(theta, True)
        before = largest
        left = min(max(largest**2 / 10, 1e-4), 3e-2)
    return Minimum(theta, False)


def fit(bag: LinearBag) -> Minimum:
    """The fit on Z from the bag's start, or from zero where that is better: a start may be so sure that no curvature is left."""
    n, start = len(bag.X), bag.X.new_zeros(bag.X.shape[1], bag.K, 1)
    # Nothing here is differentiated, and what autograd looks after even so is a tenth of the time of a small bag.
    with bag.few_threads(), torch.inference_mode():
        if bag.start is not None and bool(bag.start.any()):
            given = bag.start[:, :, None]
            better = objective(bag, None, given, logits(bag, given)) <= n * math.log(bag.n_classes)
            start = given if bool(better) else start
        theta, found = minimise(bag, None, start)
    return Minimum(theta.clone(), found)


def base_fit(bag: LinearBag) -> Base:
    """The fit on Z, certified."""
    with bag.few_threads():
        fits, C, kappa = _certified(bag, None, bag.fit)
    return Base(fits.theta[:, :, 0], C.hessian[0], C.inverse[0], float(kappa), float(fits.error))


def _certified(bag: LinearBag, change: Change | None, minimum: Minimum) -> tuple[Fits, Curvature, Tensor]:
    """What Newton's method found, one more step by its own curvature, and its error: infinite where it found none, NoMinimiser for Z."""
    theta = minimum.theta
    z = logits(bag, theta)
    G = gradient(bag, change, theta, residual(z, bag.y[:, None]))
    C = curvature(bag, change, theta, second(z))
    step = (C.inverse @ G.flatten(0, 1).T[:, :, None]).squeeze(2).T.reshape(theta.shape)
    theta = theta - step
    G = gradient(bag, change, theta, residuals(bag, theta))
    mu, kappa, _ = certify(bag, change, theta, G, C)
    # The Hessian there is within e^R of that of which the curvature is.
    pushed = (C.hessian @ step.flatten(0, 1).T[:, :, None]).squeeze(2).T.reshape(step.shape)
    R = kappa * (step * pushed).sum((0, 1)).sqrt()
    error = kappa * radius(mu, R, kappa)
    # Further out a penalty is too weak for float64. Scores that errors leave undecided are tied.
    known = error < 1e-3
    if change is None and not bool(known.all()):
        raise bag.no_minimiser(change)
    return Fits(theta, torch.where(known, error, torch.inf), G), C, kappa


class Chord:
    """Steps with the inverse of the Hessian at the fit on Z, updated for what each column's bag adds and leaves out.

    The update is Woodbury's, H⁻¹ − V (I + DE)⁻¹D Vᵀ with V = H⁻¹Jᵀ (p, q, B), E = J V (q, q, B) and D = ±ℓ'' (q, q, B).
    """

    def __init__(self, bag: LinearBag, change: Change) -> None:
        base, K = bag.base, bag.K
        d, B = change.x.shape
        self.base = base
        points, signs = [change.x], [1.0]
        if change.removed is not None:
            points, signs = [change.x, bag.X[change.removed].T], [1.0, -1.0]
            if not bool(change.x.any()):  # points are left out only
                points, signs = points[1:], signs[1:]
        q = K * len(points)
        at_base = base.theta[:, :, None].expand(d, K, B)
        S = [s * unpacked(second(at_points(x, at_base))) for x, s in zip(points, signs, strict=True)]
        solved = [base.solve_points(x) for x in points]
        E = torch.cat([torch.cat([inner(x, V) for V in solved], 1) for x in points], 0).permute(2, 0, 1)
        D = E.new_zeros(B, q, q)
        for j, block in enumerate(S):
            D[:, j * K : (j + 1) * K, j * K : (j + 1) * K] = block.permute(2, 0, 1)
        self.V = torch.cat(solved, 1)
        core, _ = torch.linalg.solve_ex(torch.eye(q, dtype=D.dtype, device=D.device) + D @ E, D)
        self.core: Tensor = core.permute(1, 2, 0)
        self.kappa_base = base.spread_at(change.x).sqrt().clamp(min=base.kappa)
        self.kappa = self.kappa_base
        if change.removed is not None:  # leaving a point out multiplies A by at most 1/(1 − t), t its leverage
            T = torch.eye(K, dtype=D.dtype, device=D.device) + D[:, -K:, -K:] @ E[:, -K:, -K:]
            self.kappa = self.kappa_base / torch.linalg.det(T).clamp(min=EPS).sqrt()

    def step(self, columns: Tensor | slice, G: Tensor) -> Tensor:
        """H⁻¹G (p, B) of some columns, each with its own update."""
        V = self.V[:, :, columns]
        t = (V * G[:, None]).sum(0)
        t = (self.core[:, :, columns] * t).sum(1)
        return torch.mm(self.base.inverse, G) - (V * t).sum(1)


Stop = Callable[[Tensor, Tensor, Tensor], Tensor]


def repulled(bag: LinearBag, change: Change) -> Tensor:
    """By how much other penalties change the gradient at the fit on Z, (d, K, B); zeros (1, 1, 1) where there are none."""
    if change.factors is None:
        return bag.X.new_zeros(1, 1, 1)
    pull = bag.penalty[:, None] * coupled(bag, bag.base.theta[:, :, None])[:, :, 0]
    return pull[:, :, None] * (change.factors - 1)[:, None]


def quadratic(E: Tensor, z: Tensor, y: Tensor, iterations: int = 60) -> Tensor:
    """Residuals r(z̄) (K, B) where z̄ = z − E r(z̄), given E (K, K, B), z (K, B) and labels y (B,)."""
    eye, E = torch.eye(len(z), dtype=z.dtype, device=z.device), E.permute(2, 0, 1)
    now, r = z, z
    for _ in range(iterations):
        r = residual(now, y)
        left = now - z + (E @ r.T[:, :, None])[:, :, 0].T
        S = unpacked(second(now)).permute(2, 0, 1)
        found, _ = torch.linalg.solve_ex(eye + E @ S, left.T[:, :, None])
        step = found[:, :, 0].T
        R = range_of(step)
        if not float(R.max()) > 1e-3:
            break
        now = now - torch.where(R > 1, torch.log1p(R) / R, 1.0) * step
    return r


def first_step(bag: LinearBag, change: Change, chord: Chord | None = None) -> Tensor:
    """Θ (d, K, B) one Newton step from the fit on Z, where the gradient is that of the added point and of other penalties; none removed."""
    chord = Chord(bag, change) if chord is None else chord
    d, B = change.x.shape
    start = bag.base.theta[:, :, None].expand(d, bag.K, B)
    G = change.x[:, None, :] * residual(at_points(change.x, start), change.y) + repulled(bag, change)
    return start - chord.step(slice(None), G.flatten(0, 1)).view_as(G)


def refit(
    bag: LinearBag, change: Change, theta: Tensor | None = None, stop: Stop | None = None, tolerance: float = CONVERGED
) -> Fits:
    """Fits of all columns' bags by chord-Newton, from Θ (d, K, B) or the first step; by Newton where that does not converge.

    ``stop(columns, theta, error)`` may say of some columns that the error already reached is small enough.
    """
    base, K = bag.base, bag.K
    d, B = change.x.shape
    chord = Chord(bag, change)
    start = first_step(bag, change, chord) if theta is None else theta
    theta, slopes, error = start.clone(), torch.empty_like(start), start.new_empty(B)
    # Smaller penalties make a Hessian smaller by no more than their factor.
    less = torch.zeros_like(error) if change.factors is None else -change.factors.amin(0).clamp(max=1.0).log()
    columns, before, lost = torch.arange(B, device=start.device), start.new_full((B,), torch.inf), []
    while len(columns):
        at = slice(None) if len(columns) == B else columns  # no copies while all columns are on
        now, part = theta[:, :, at], change[at]
        G = gradient(bag, part, now, residuals(bag, now)).flatten(0, 1)
        step = chord.step(at, G)
        mu = (G * step).sum(0).sqrt()  # not a number, hence not converged, where rounding spoilt the update
        moved = (now - base.theta[:, :, None]).flatten(0, 1)
        R = chord.kappa_base[at] * (moved * (base.hessian @ moved)).sum(0).clamp(min=0.0).sqrt()
        R = R + less[at]
        kappa = chord.kappa[at]
        error[at] = kappa * radius(mu + len(bag.X) ** 0.5 * rounding(bag, part, now), R, kappa)
        slopes[:, :, at] = G.view_as(now)
        done = kappa * radius(mu, R, kappa) < tolerance
        if stop is not None:
            done |= stop(columns, now, error[at])
        failed = ~done & ~(mu < 0.5 * before[at])
        before[at] = mu
        lost.append(columns[failed])
        on = ~(done | failed)
        theta[:, :, columns[on]] = now[:, :, on] - step[:, on].view(d, K, -1)
        columns = columns[on]
    _finish(bag, change, torch.cat(lost), Fits(theta, error, slopes))
    return Fits(theta, error, slopes)


def _finish(bag: LinearBag, change: Change, columns: Tensor, fits: Fits) -> None:
    """Fit the given columns by Newton's method from the fit on Z, in place."""
    d, K, _ = fits.theta.shape
    width = max(1, 2**26 // (8 * (d * K) ** 2 + 8 * len(bag.X) * K * K))
    for at in columns.split(width) if len(columns) else ():
        start = bag.base.theta[:, :, None].expand(d, K, len(at))
        minimum = minimise(bag, change[at], start)
        if not minimum.found and bag.far_object(change[at]):
            raise bag.no_minimiser(change[at])
        if not minimum.found and len(at) > 1:  # of one of them, perhaps
            for half in at.tensor_split(2):
                _finish(bag, change, half, fits)
            continue
        if not minimum.found:  # as for Z, a fit may be so sure that no curvature is left to start from
            minimum = minimise(bag, change[at], torch.zeros_like(start))
        part, _, _ = _certified(bag, change[at], minimum)
        fits.theta[:, :, at], fits.error[at], fits.gradient[:, :, at] = part.theta, part.error, part.gradient
