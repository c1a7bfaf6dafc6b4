"""The direct approximation on a logistic regression with two classes, where every gradient is a residual times an input.

    f = (0, wᵀa)      r_i = π_i − y_i      g_i = r_i a_i      𝓗 = Σ π_i(1 − π_i) a_i a_iᵀ + Λ = LLᵀ
    s_i = |r_i L⁻¹a_i|²      k_i = r̂ · (r_i L⁻¹a_i)·(L⁻¹â)      α_i = ℓ_i + q·s_i − k_i      τ = ℓ̂ − (1 − q)·ŝ

The labels of an object differ in r̂ and ℓ̂ only. In NumPy, whose functions are quicker to start: on small bags that is most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from fullconformal import pvalues
from fullconformal.scores.training import loss_rounding, rounding

FloatArray = npt.NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class TwoClassBag:
    """A bag at weights w (p,): losses and self-influences (n,), r_i L⁻¹a_i (n, p), ∇F (p,) and L⁻¹ (p, p)."""

    w: FloatArray
    loss: FloatArray
    self_influence: FloatArray
    half: FloatArray
    gradient: FloatArray
    inverse: FloatArray


def two_class_bag(a: FloatArray, y: FloatArray, penalty: FloatArray, w: FloatArray) -> TwoClassBag | None:
    """The bag of inputs a (n, p), labels y (n,) 0 or 1 and penalty Λ (p,) at weights w; None where 𝓗 is not safely positive definite."""
    z = a @ w
    sign = 1 - 2 * y
    loss, other, e = _losses(z * sign)
    r = other * sign
    root = a * np.sqrt(e / (1 + e) ** 2)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told by the factorisation
        H = root.T @ root
    H.flat[:: len(H) + 1] += penalty
    least = EPS * H.trace()
    L, failed = lapack.dpotrf(H, lower=1, overwrite_a=1)
    if failed or not L.diagonal().min() ** 2 > least:
        return None
    inverse = np.asarray(lapack.dtrtri(L, lower=1, overwrite_c=1)[0])
    half = a @ inverse.T
    half *= r[:, None]
    return TwoClassBag(w, loss, np.einsum("np,np->n", half, half), half, r @ a + penalty * w, inverse)


def two_class_counts(bag: TwoClassBag, a: FloatArray, q: float) -> tuple[FloatArray, FloatArray]:
    """Training points above and tied with each candidate, (m, 2) each, of objects with inputs a (m, p)."""
    z, V = a @ bag.w, a @ bag.inverse.T
    products, b = V @ bag.half.T, bag.loss + q * bag.self_influence
    grant = rounding(len(bag.w), EPS)
    slack = loss_rounding(len(bag.w), EPS) * bag.loss + grant * bag.self_influence
    counts, alpha = np.empty((2, len(a), 2)), np.empty_like(products)
    for label, sign in enumerate((1.0, -1.0)):
        tau, other, _ = _losses(sign * z)
        r = sign * other
        tau = tau - (1 - q) * r**2 * np.einsum("mp,mp->m", V, V) if q < 1 else tau
        np.multiply(products, -r[:, None], out=alpha)
        np.add(alpha, b, out=alpha)
        own = grant * np.abs(tau)
        surely = _number(alpha > (tau + (own + slack.max()))[:, None])
        tied = _number(alpha >= (tau - (own + slack.max()))[:, None]) - surely
        counts[0, :, label], counts[1, :, label] = surely, 0.0
        near = tied.nonzero()[0]
        if len(near):
            at = tau[near, None], (slack, own[near, None])
            counts[:, near, label] = pvalues.count(alpha[near], *at, axis=1)
    return counts[0], counts[1]


def _losses(odds: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """From the other label's log-odds (k,): log(1 + e^odds), its probability and e^−|odds|, each to full relative precision."""
    e = np.exp(-np.abs(odds))
    return np.maximum(odds, 0.0) + np.log1p(e), np.where(odds > 0, 1.0, e) / (1 + e), e


def _number(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many of each row (m, n) are chosen, bit by bit."""
    out: npt.NDArray[np.int64] = np.bitwise_count(np.packbits(chosen, axis=1)).sum(axis=1, dtype=np.int64)
    return out
