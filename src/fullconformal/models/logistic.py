"""Newton's method for logistic regression: for two classes with a few products a step, for more without the Hessian."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from fullconformal.losses import NotFinite

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FORCING = 1e-2  # how much of the gradient conjugate gradients may leave
PRODUCTS = 12  # with the Hessian, after which a step needs blocks of its own
MOST = 100  # products in a step


class _Objective:
    """F(w) = Σ softplus(∓aᵀw) + ½ Σ Λw², from inputs a (n, i), targets (n,) 0 or 1 and Λ (i,); z = aw (n,) is the caller's to keep.

    NumPy, because its products of a matrix with itself cost half of torch's. In float32 they cost half of that again.
    """

    def __init__(self, a: FloatArray, target: FloatArray, penalty: FloatArray):
        self.a, self.target, self.penalty = a, target, penalty
        self.centre = 0.5 - target
        with np.errstate(over="ignore"):
            self.inputs: npt.NDArray[np.floating] = a.astype(np.float32)
        self.root = np.empty_like(self.inputs)  # fresh memory would cost as much as the product it is for

    def value(self, z: FloatArray, w: FloatArray) -> float:
        return float(np.logaddexp(0, z).sum() - self.target @ z + (self.penalty * w) @ w / 2)

    def gradient(self, z: FloatArray, w: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """tanh(z/2), ∇F and |∇F|∞."""
        tanh = np.tanh(z / 2)  # π = (1 + tanh)/2 and π(1 − π) = (1 − tanh²)/4, without overflow
        g = (tanh / 2 + self.centre) @ self.a + self.penalty * w
        return tanh, g, float(np.abs(g).max())

    def length(self, z: FloatArray, w: FloatArray, moved: FloatArray, d: FloatArray) -> float:
        """How far to go along −d: one step of Newton's method from 1. Far from the minimum whole steps are too short, curvature falls."""
        tanh, there = np.tanh((z - moved) / 2), w - d
        slope = (tanh / 2 + self.centre) @ moved + (self.penalty * there) @ d
        bend = ((1 - tanh**2) / 4 * moved) @ moved + (self.penalty * d) @ d
        return float(np.clip(1 + slope / bend, 0.25, 4)) if bend > 0 else 1.0

    def factor(self, tanh: FloatArray) -> FloatArray | None:
        """L of the Hessian LLᵀ; None where it is not positive definite."""
        with np.errstate(over="ignore", invalid="ignore"):  # of float32
            np.multiply(self.inputs, np.sqrt((1 - tanh**2) / 4).astype(self.inputs.dtype)[:, None], out=self.root)
            H = (self.root.T @ self.root).astype(np.float64)
        H.flat[:: len(H) + 1] += self.penalty
        L, failed = lapack.dpotrf(H, lower=1)
        if failed:
            return self.factor(tanh) if self.sharpen() else None
        return np.asarray(L)

    def sharpen(self) -> bool:
        """Sum Hessians in float64 from now on; False where that is so already."""
        if self.inputs is self.a:
            return False
        self.inputs, self.root = self.a, np.empty_like(self.a)
        return True


def fit_binary(
    a: FloatArray, target: FloatArray, penalty: FloatArray, w: FloatArray, tol: float, max_iter: int = 100
) -> FloatArray:
    """Minimise Σ softplus(∓aᵀw) + ½ Σ Λw² over w (i,) until |∇|∞ ≤ tol; inputs a (n, i), targets (n,) 0 or 1, Λ (i,).

    A step that halves the gradient is taken; else the factor is made anew, then in float64; another step must decrease the objective, or is
    shortened until it does. Stops early where none does: without a penalty, separable data have no minimum.
    """
    F, z, rounding = _Objective(a, target, penalty), a @ w, 8 * np.finfo(np.float64).eps
    if w.any() and F.value(z, w) > len(z) * np.log(2):  # worse than nothing, and so sure that no curvature may be left
        w, z = np.zeros_like(w), np.zeros_like(z)
    tanh, g, size = F.gradient(z, w)
    L, before = None, np.inf
    for _ in range(max_iter):
        if not size < np.inf:
            raise NotFinite("the gradient of the loss is not finite; scale the features or raise l2")
        if size <= tol:
            break
        fresh = L is None or size > before / 16  # a factor serves as long as a step with it gains more than a digit
        if fresh:
            L = F.factor(tanh)
            if L is None:
                break
        before = size
        d, _ = lapack.dpotrs(L, g, lower=1)
        moved = a @ d
        t = F.length(z, w, moved, d) if fresh else 1.0
        ahead = F.gradient(z - t * moved, w - t * d)
        if not ahead[2] <= size / 2:
            if not fresh or F.sharpen():
                L = None
                continue
            here, slope = F.value(z, w), g @ d
            while not F.value(z - t * moved, w - t * d) <= here - 1e-4 * t * slope + rounding * abs(here) and t > 1e-10:
                t /= 2
            if t <= 1e-10:
                break
            ahead = F.gradient(z - t * moved, w - t * d)
        w, z = w - t * d, z - t * moved
        tanh, g, size = ahead
    return w


def fit_softmax(
    a: FloatArray, y: IntArray, penalty: FloatArray, W: FloatArray, tol: float, max_iter: int = 50
) -> tuple[FloatArray, float]:
    """Minimise Σ (log Σ_c exp(w_cᵀa) − w_yᵀa) + ½ Σ ΛW² over W (C, i) until |∇|∞ ≤ tol; inputs a (n, i), labels y (n,), Λ (i,).

    Newton's method without the Hessian, whose making and factorising would be most of the work: each step is found by conjugate gradients,
    preconditioned by the Hessian's diagonal blocks, one a class. Returns W and its |∇|∞, above tol where it had to stop early: no step
    decreased the objective, or a block was singular.
    """
    rounding, rows = 8 * np.finfo(np.float64).eps, np.arange(len(y))
    W = W - np.where(penalty > 0, W.mean(axis=0), 0)  # at the minimum penalised weights sum to zero over the classes

    def at(W: FloatArray) -> tuple[FloatArray, FloatArray, float, FloatArray]:
        """Probabilities (C, n), gradient (C, i), its largest entry, losses (n,)."""
        Z = W @ a.T
        Z -= Z.max(axis=0)
        own = Z[y, rows]
        pi = np.exp(Z, out=Z)
        total = pi.sum(axis=0)
        pi /= total
        r = pi.copy()
        r[y, rows] -= 1
        g = r @ a + penalty * W
        return pi, g, float(np.abs(g).max()), np.log(total) - own

    def objective(loss: FloatArray, W: FloatArray) -> float:
        return float(loss.sum() + (penalty * W**2).sum() / 2)

    pi, g, size, loss = at(W)
    # Worse than nothing, and so sure that blocks may be singular.
    if size < np.inf and objective(loss, W) > len(y) * np.log(len(W)):
        W = np.zeros_like(W)
        pi, g, size, loss = at(W)
    inverse, products = None, 0
    for _ in range(max_iter):
        if not size < np.inf:
            raise NotFinite("the gradient of the loss is not finite; scale the features or raise l2")
        if size <= tol:
            break
        if inverse is None or products > PRODUCTS:
            inverse = _inverse_blocks(a, pi, penalty)
            if inverse is None:
                break
        d, products = _newton_step(a, pi, penalty, inverse, g, max(size * FORCING, tol / 4))
        t, ahead = 1.0, at(W - d)
        if not ahead[2] <= size / 2:
            F, slope = objective(loss, W), (g * d).sum()
            while not objective(ahead[3], W - t * d) <= F - 1e-4 * t * slope + rounding * abs(F) and t > 1e-10:
                t /= 2
                ahead = at(W - t * d)
            if t <= 1e-10:
                break
        W, (pi, g, size, loss) = W - t * d, ahead
    return W, size


def _inverse_blocks(a: FloatArray, pi: FloatArray, penalty: FloatArray) -> FloatArray | None:
    """Inverses (C, i, i) of the Hessian's diagonal blocks Σ π_c(1 − π_c) aaᵀ + Λ; None where one is singular."""
    H, root, weights = np.empty((len(pi), a.shape[1], a.shape[1])), np.empty_like(a), pi * (1 - pi)
    for c, w in enumerate(weights):
        if c and np.array_equal(w, weights[0]):  # as at the start
            H[c] = H[0]
            continue
        np.multiply(a, np.sqrt(w)[:, None], out=root)
        H[c] = root.T @ root
        H[c].flat[:: a.shape[1] + 1] += penalty
    try:
        np.linalg.cholesky(H)
        return np.asarray(np.linalg.inv(H), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None


def _newton_step(
    a: FloatArray, pi: FloatArray, penalty: FloatArray, inverse: FloatArray, g: FloatArray, goal: float
) -> tuple[FloatArray, int]:
    """Solve 𝓗d = g (C, i) to |𝓗d − g|∞ ≤ goal by conjugate gradients, and how many products with 𝓗 it took.

    Directions keep the classes' weights at their sum, along which the loss does not change and the blocks do not know it.
    """
    d, r, v, before = np.zeros_like(g), g, np.zeros_like(g), np.inf  # so that v begins as z
    for products in range(MOST):
        if np.abs(r).max() <= goal:
            return d, products
        z = np.matmul(inverse, r[:, :, None])[:, :, 0]
        z -= z.mean(axis=0)
        rz = (r * z).sum()
        if not 0 < rz < np.inf:  # rounding has the word
            break
        v = z + rz / before * v
        before = rz
        Z = v @ a.T
        Z *= pi
        Z -= pi * Z.sum(axis=0)
        Hv = Z @ a + penalty * v
        t = rz / (v * Hv).sum()
        d, r = d + t * v, r - t * Hv
    return d, MOST + 1
