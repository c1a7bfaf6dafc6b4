"""Newton's method for two-class logistic regression, with nothing in its loop but a few products."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from fullconformal.models.fitting import NotFinite

FloatArray = npt.NDArray[np.float64]


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
