"""Fits of many changed bags at once, each with a bound on its error.

Every bound rests on one fact. For the softmax loss D³ℓ[u, u, δ] = E(u − Eu)²(δ − Eδ) ≤ range(δ)·D²ℓ[u, u], so moving all logits
of a bag by ranges ≤ R changes its Hessian by factors within e^(±R). Let H be the bag's Hessian at a reference point whose logits
are within range R of those at Θ, μ = |∇F(Θ)| in the norm of H⁻¹ and κ² = max_j spread(J_j H⁻¹ J_jᵀ). Then −∇F(Θ)ᵀδ ≥ e^(−R)
|δ|²(1 − e^(−κ|δ|))/(κ|δ|) for the way δ to the minimiser, hence |δ| ≤ −log(1 − κ e^R μ)/κ in the norm of H (`radius`), and the
logits of a point are off by a range of at most spread^½ times that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullconformal.linear.bag import EPS, Change, LinearBag, at_points, gradient, logits, objective, residuals
from fullconformal.linear.hessian import Curvature, curvature, factor, hessian
from fullconformal.losses.relative import pairs, probabilities, range_of, residual, second, spread, unpacked

# The error of a logit, by the bound above, at which a fit has converged; and that at which most comparisons are decided.
CONVERGED, ROUGH = 1e-11, 1e-5


@dataclass(frozen=True)
class Fits:
    """Fits Θ (d, K, B), the bound on the error of every logit of the bag (B,) and the gradients left (d, K, B)."""

    theta: Tensor
    error: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Base:
    """The fit on Z: Θ (d, K), its Hessian and inverse (p, p), κ, and the bound on the error of its logits."""

    theta: Tensor
    hessian: Tensor
    inverse: Tensor
    kappa: float
    error: float

    def coefficients(self) -> Tensor:
        """Weights as scikit-learn has them: (1, d) for two classes, else (C, d) whose rows sum to zero."""
        if self.theta.shape[1] == 1:
            return self.theta.T
        W = torch.cat([torch.zeros_like(self.theta[:, :1]), self.theta], 1).T
        return W - W.mean(0)

    def solve_points(self, x: Tensor) -> Tensor:
        """H⁻¹Jᵀ (p, K, B) of points x (d, B)."""
        d, K = self.theta.shape
        blocks = self.inverse.view(d * K, d, K).transpose(1, 2).reshape(d * K * K, d)
        return (blocks @ x).view(d * K, K, -1)

    def spread_at(self, x: Tensor) -> Tensor:
        """spread(J H⁻¹ Jᵀ) (B,) of points x (d, B)."""
        i, j = pairs(self.theta.shape[1], x.device)[0]
        return spread(_inner(x, self.solve_points(x))[i, j])

    def error_at(self, x: Tensor) -> Tensor:
        """The error (B,) of the logits of points x (d, B)."""
        return self.error * (self.spread_at(x).sqrt() / self.kappa).clamp(min=1.0)


def radius(mu: Tensor, R: Tensor | float, kappa: Tensor) -> Tensor:
    """How far the minimiser can be, in the norm of the reference Hessian at range R; infinite where it cannot be told."""
    x = kappa * torch.exp(torch.as_tensor(R)) * mu
    return torch.where(x < 1, -torch.log1p(-x.clamp(max=1.0)) / kappa, torch.inf)


def rounding(bag: LinearBag, change: Change | None, theta: Tensor) -> Tensor:
    """Rounding error (B,) granted to a logit at Θ (d, K, B): four units of Σ_j |x_j||θ_j|, x_j the largest there is."""
    size = bag.largest[:, None]
    if change is not None:
        size = torch.maximum(size, change.x.abs())
    return (size * theta.abs().amax(1)).sum(0).add(1).mul(4 * EPS)


def certify(
    bag: LinearBag, change: Change | None, theta: Tensor, G: Tensor, C: Curvature
) -> tuple[Tensor, Tensor, Tensor]:
    """μ, κ and the error of every logit (B,) by the bags' own curvature at Θ, where the gradients are G (d, K, B).

    The rounding of n logits passes into the gradient by at most n^½/2 of it, in the norm of H⁻¹.
    """
    g = bag.seen(G.flatten(1), C.inverse.dtype).view_as(G).flatten(0, 1).T
    solved = (C.inverse @ g[:, :, None].to(C.inverse.dtype)).squeeze(2)
    mu = (1 + C.rounding) * (g * solved).sum(1).clamp(min=0.0).sqrt()
    mu = mu + len(bag.X) ** 0.5 * rounding(bag, change, theta)
    kappa = torch.maximum(C.spread.amax(0), C.spread_added).clamp(min=torch.finfo(mu.dtype).tiny).sqrt()
    kappa = kappa * (1 + C.rounding)
    return mu, kappa, kappa * radius(mu, 0.0, kappa)


def _newton(bag: LinearBag, change: Change | None, theta: Tensor, iterations: int = 100) -> Tensor:
    """Minimisers Θ (d, K, B) by Newton's method with line search, to where a step moves no logit by more than 1e-7."""
    d, K, B = theta.shape
    for _ in range(iterations):
        z = logits(bag, theta)
        pi = probabilities(z)
        G = gradient(bag, change, theta, residual(pi, bag.y[:, None]))
        L = factor(hessian(bag, change, theta, second(pi)))
        if L is None:
            raise bag.no_minimiser(change)
        step = torch.cholesky_solve(G.flatten(0, 1).T[:, :, None], L).squeeze(2).T.reshape(d, K, B)
        dz = logits(bag, step)
        R = range_of(dz).amax(0)
        if change is not None:
            R = torch.maximum(R, range_of(at_points(change.x, step)))
        if not bool(torch.isfinite(R).all()):  # overflow, of which no length would make a step
            raise bag.no_minimiser(change)
        theta = theta - _length(bag, change, theta, step, z, dz, R, (G * step).sum((0, 1))) * step
        if not bool((R > 1e-7).any()):
            return theta
    raise bag.no_minimiser(change)


def _length(
    bag: LinearBag, change: Change | None, theta: Tensor, step: Tensor, z: Tensor, dz: Tensor, R: Tensor, slope: Tensor
) -> Tensor:
    """How far (B,) to go along −step, which moves logits by ranges ≤ R: halved until F decreases enough.

    No less than log(1 + R)/R: as F'' grows by at most e^(tR) along the step, F surely decreases up to there.
    """
    safe = torch.where(R > EPS, torch.log1p(R) / R.clamp(min=EPS), 1.0)
    t = torch.where(R > 0.1, 1.0, safe)
    F = objective(bag, change, theta, z)
    while bool((t > safe).any()):
        enough = objective(bag, change, theta - t * step, z - t * dz) <= F - 0.1 * t * slope
        if bool((enough | (t <= safe)).all()):
            break
        t = torch.where(enough, t, torch.maximum(t / 2, safe))
    return t


@torch.no_grad()
def base_fit(bag: LinearBag) -> Base:
    """The fit on Z."""
    start = bag.X.new_zeros(bag.X.shape[1], bag.K) if bag.start is None else bag.start
    theta = _newton(bag, None, start[:, :, None])
    fits, C, kappa = _certified(bag, None, theta)
    H = hessian(bag, None, theta, second(probabilities(logits(bag, theta))))
    return Base(theta[:, :, 0], H[0], C.inverse[0], float(kappa), float(fits.error))


def _certified(bag: LinearBag, change: Change | None, theta: Tensor) -> tuple[Fits, Curvature, Tensor]:
    """What Newton's method found, with its error by its own curvature."""
    pi = probabilities(logits(bag, theta))
    G = gradient(bag, change, theta, residual(pi, bag.y[:, None]))
    C = curvature(bag, change, theta, second(pi))
    _, kappa, error = certify(bag, change, theta, G, C)
    if not bool((error < 1e-6).all()):
        raise bag.no_minimiser(change)
    return Fits(theta, error, G), C, kappa


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
        S = [s * unpacked(second(probabilities(at_points(x, at_base)))) for x, s in zip(points, signs, strict=True)]
        solved = [base.solve_points(x) for x in points]
        E = torch.cat([torch.cat([_inner(x, V) for V in solved], 1) for x in points], 0).permute(2, 0, 1)
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


def _inner(x: Tensor, V: Tensor) -> Tensor:
    """J V (K, K, B) of a point x (d, B) per column, V (p, K, B)."""
    d, B = x.shape
    return torch.einsum("db,dklb->klb", x, V.view(d, -1, V.shape[1], B))


Stop = Callable[[Tensor, Tensor, Tensor], Tensor]


def first_step(bag: LinearBag, change: Change, chord: Chord | None = None) -> Tensor:
    """Θ (d, K, B) one Newton step from the fit on Z, where the gradient is that of the added point; none removed."""
    chord = Chord(bag, change) if chord is None else chord
    d, B = change.x.shape
    start = bag.base.theta[:, :, None].expand(d, bag.K, B)
    G = change.x[:, None, :] * residual(probabilities(at_points(change.x, start)), change.y)
    return start - chord.step(slice(None), G.flatten(0, 1)).view_as(G)


@torch.no_grad()
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
    columns, before, lost = torch.arange(B, device=start.device), start.new_full((B,), torch.inf), []
    while len(columns):
        at = slice(None) if len(columns) == B else columns  # no copies while all columns are on
        now, part = theta[:, :, at], change[at]
        G = gradient(bag, part, now, residuals(bag, now)).flatten(0, 1)
        step = chord.step(at, G)
        mu = (G * step).sum(0).sqrt()  # not a number, hence not converged, where rounding spoilt the update
        moved = (now - base.theta[:, :, None]).flatten(0, 1)
        R = chord.kappa_base[at] * (moved * (base.hessian @ moved)).sum(0).clamp(min=0.0).sqrt()
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
    for first in range(0, len(columns), width):
        at = columns[first : first + width]
        start = bag.base.theta[:, :, None].expand(d, K, len(at))
        part, _, _ = _certified(bag, change[at], _newton(bag, change[at], start))
        fits.theta[:, :, at], fits.error[at], fits.gradient[:, :, at] = part.theta, part.error, part.gradient
