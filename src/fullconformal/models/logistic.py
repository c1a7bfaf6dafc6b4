"""Newton's method for two-class logistic regression, with nothing in its loop but four products."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from fullconformal.models.fitting import NotFinite

FloatArray = npt.NDArray[np.float64]
Array = npt.NDArray[np.floating]


def fit_binary(
    a: FloatArray, target: FloatArray, penalty: FloatArray, w: FloatArray, tol: float, max_iter: int = 100
) -> FloatArray:
    """Minimise Σ softplus(∓aᵀw) + ½ Σ Λw² over w (i,) until |∇|∞ ≤ tol; inputs a (n, i), targets (n,) 0 or 1, Λ (i,).

    A step that halves the gradient is taken; another must decrease the objective, or is shortened until it does. Stops early where none
    does: without a penalty, separable data have no minimum. Hessians are summed in float32, for half of the time, until a step with one
    does not halve the gradient. NumPy, because its products of a matrix with itself cost half of torch's.
    """
    rounding = 8 * np.finfo(np.float64).eps

    def objective(z: FloatArray, w: FloatArray) -> float:
        return float(np.logaddexp(0, z).sum() - target @ z + (penalty * w) @ w / 2)

    def gradient(z: FloatArray, w: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        tanh = np.tanh(z / 2)  # π = (1 + tanh)/2 and π(1 − π) = (1 − tanh²)/4, without overflow
        g = (tanh / 2 + centre) @ a + penalty * w
        return tanh, g, float(np.abs(g).max())

    def factor(tanh: FloatArray) -> FloatArray | None:
        with np.errstate(over="ignore", invalid="ignore"):  # of float32
            np.multiply(inputs, np.sqrt((1 - tanh**2) / 4).astype(inputs.dtype)[:, None], out=root)
            H = (root.T @ root).astype(np.float64)
        H.flat[:: len(w) + 1] += penalty
        L, failed = lapack.dpotrf(H, lower=1)
        return None if failed else L

    centre = 0.5 - target
    with np.errstate(over="ignore"):
        inputs: Array = a.astype(np.float32)
    root = np.empty_like(inputs)  # fresh memory would cost as much as the product it is for
    z = a @ w
    tanh, g, size = gradient(z, w)
    L, before = None, np.inf
    for _ in range(max_iter):
        if not size < np.inf:
            raise NotFinite("the gradient of the loss is not finite; scale the features or raise l2")
        if size <= tol:
            break
        if L is None or size > before / 8:  # the last factor serves as long as a step with it gains most of a digit
            L = factor(tanh)
            if L is None:
                if inputs is a:
                    break
                inputs, root = a, np.empty_like(a)
                continue
        before = size
        d, _ = lapack.dpotrs(L, g, lower=1)
        moved, t = a @ d, 1.0
        ahead = gradient(z - moved, w - d)
        if not ahead[2] <= size / 2:
            if inputs is not a:  # perhaps for want of digits
                inputs, root, L = a, np.empty_like(a), None
                continue
            F, slope = objective(z, w), g @ d
            while not objective(z - t * moved, w - t * d) <= F - 1e-4 * t * slope + rounding * abs(F) and t > 1e-10:
                t /= 2
            if t <= 1e-10:
                break
            ahead = gradient(z - t * moved, w - t * d)
        w, z = w - t * d, z - t * moved
        tanh, g, size = ahead
    return w
