"""Every exact method of regression against the whole bag written out, on tables that hypothesis makes: ties, duplicates, more columns
than points, weights; at the jumps of p(y), a little beside them, and anywhere."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, Ridge, RidgeCV
from sklearn.neighbors import KNeighborsRegressor

from fullconformal import FullConformalRegressor

Q = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}


def smoothed(H, y, q):
    """|r|/(1 − h)^q of a fit that is Hy; 0 where the leverage is one."""
    share = 1 - np.diag(H)
    alone = share <= 1e-9
    # Residuals are right to 1e-15, and divided by it.
    assume((alone | (share > 1e-4)).all())
    return np.where(alone, 0.0, np.abs(y - H @ y) / np.where(alone, 1.0, share) ** q)


def hat(X, penalty, intercept=True):
    """H (n, n) of a ridge regression: least squares with a row for each penalty."""
    n, d = X.shape
    A = X - X.mean(axis=0) if intercept else X
    return A @ np.linalg.pinv(np.vstack([A, penalty**0.5 * np.eye(d)]), rcond=1e-12)[:, :n] + intercept / n


def of_kernel(K, alpha, y, q):
    return smoothed(K @ np.linalg.inv(K + alpha * np.eye(len(y))), y, q)


def chosen(X, y, q):
    """The penalty with the least leave-one-out error, if that is clear."""
    fits = [hat(X, alpha) for alpha in (0.1, 3.0, 30.0)]
    errors = [(((y - H @ y) / (1 - np.diag(H))) ** 2).sum() for H in fits]
    first, second = np.sort(errors)[:2]
    assume(second > first * (1 + 1e-6))
    return smoothed(fits[int(np.argmin(errors))], y, q)


def sparse(model, X, y, q):
    """Of a lasso, where no column is about to enter or to leave."""
    fit = clone(model).set_params(tol=1e-14, max_iter=100_000).fit(X, y)
    A, r, w = X - X.mean(axis=0), y - fit.predict(X), fit.coef_
    l1, l2 = (len(y) * model.alpha * part for part in (model.l1_ratio, 1 - model.l1_ratio))
    active = w != 0
    assume((np.abs(w[active]) > 1e-5).all() and (np.abs(A.T @ r - l2 * w)[~active] < l1 * (1 - 1e-5)).all())
    A = A[:, active]
    # The solver's w is right to 1e-7 or so: solved for again where its signs are known.
    G = A.T @ A + l2 * np.eye(A.shape[1])
    w = np.linalg.solve(G, A.T @ y - l1 * np.sign(w[active]))
    share = 1 - np.diag(A @ np.linalg.solve(G, A.T)) - 1 / len(y)
    alone = share <= 1e-9
    assume((alone | (share > 1e-4)).all())
    size = np.abs(y - y.mean() - A @ w)
    # The penalty leaves residuals to points of leverage one, too: such scores are infinite.
    return np.where(alone & (q > 0), np.inf, size / np.where(alone, 1.0, share) ** q)


def neighbours(X, y, k):
    """|y_i − the mean of the k nearest others|; those at the kth distance share the places left."""
    out = np.empty(len(y))
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        # Squares of whole numbers are exact; of others no two are equal but by duplicates.
        far, values = ((X[rest] - X[i]) ** 2).sum(axis=1), y[rest]
        last = np.sort(far)[k - 1]
        nearer, tied = far < last * (1 - 1e-12), np.abs(far - last) <= 1e-12 * last
        out[i] = abs(y[i] - (values[nearer].sum() + (k - nearer.sum()) * values[tied].mean()) / k)
    return out


RBF_KERNEL = RBF(1.5)
LASSO, NET = Lasso(alpha=0.2), ElasticNet(alpha=0.3, l1_ratio=0.5)
# A model, and the scores of all points of a bag.
CASES = {
    "ridge": (Ridge(0.5), lambda X, y, q: smoothed(hat(X, 0.5), y, q)),
    "ridge without intercept": (Ridge(2.0, fit_intercept=False), lambda X, y, q: smoothed(hat(X, 2.0, False), y, q)),
    "least squares": (LinearRegression(), lambda X, y, q: smoothed(hat(X, 0.0), y, q)),
    "chosen penalty": (RidgeCV((0.1, 3.0, 30.0)), chosen),
    "kernel ridge": (
        KernelRidge(alpha=0.5, kernel="poly", degree=2, gamma=0.2),
        lambda X, y, q: of_kernel((0.2 * X @ X.T + 1) ** 2, 0.5, y, q),
    ),
    "Gaussian process": (
        GaussianProcessRegressor(RBF_KERNEL + WhiteKernel(0.3), optimizer=None, alpha=0.1),
        lambda X, y, q: of_kernel(RBF_KERNEL(X), 0.4, y, q),
    ),
    "lasso": (LASSO, lambda X, y, q: sparse(LASSO, X, y, q)),
    "elastic net": (NET, lambda X, y, q: sparse(NET, X, y, q)),
    "k-NN": (KNeighborsRegressor(3), lambda X, y, q: neighbours(X, y, 3)),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(5, 12), d=st.integers(1, 18), whole=st.booleans(), double=st.integers(0, 3),
    scheme=st.sampled_from(list(Q)), weighted=st.booleans(),
)  # fmt: skip
def test_p_values_are_those_of_the_bag(name, seed, n, d, whole, double, scheme, weighted):
    model, scores = CASES[name]
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + 1, d))
    if whole and not isinstance(model, ElasticNet):
        # Equal columns leave a lasso more than one fit.
        X = np.round(X)
    y = np.round(2 * X[:, 0] + 2 * rng.normal(size=n + 1)) if whole else X[:, 0] + rng.normal(size=n + 1)
    for i in range(double):
        # Objects that are there twice, the new one first.
        X[n - i] = X[i]
    scheme = "deleted" if name == "k-NN" else scheme
    weights = (rng.exponential(size=n), rng.exponential(size=1)) if weighted else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reg = FullConformalRegressor(model, scheme=scheme, confidence_level=0.5).fit(X[:n], y[:n])
        jumps = next(iter(reg.predict_steps(X[n:]))).jumps(0)[0]
        size = max(1.0, np.abs(y).max())
        # A lasso of a wide table has knots very far out.
        some = rng.permutation(jumps[np.abs(jumps) < 100 * size])[:3]
        values = np.concatenate([some, some - 1e-6 * size, some + 1e-6 * size, y[[0, n]], 20 * rng.normal(size=2)])
        found = reg.predict_p(X[n:], values[None], weights=weights)[0]
    w = np.ones(n + 1) if weights is None else np.concatenate(weights)
    for value, p in zip(values, found, strict=True):
        alpha = scores(X, np.append(y[:n], value), Q[scheme])
        # Scores that differ by less may be taken for equal, and equal ones count.
        near = 1e-9 * (1 + abs(value) + alpha[np.isfinite(alpha)].max(initial=0.0))
        least, most = (w[alpha >= alpha[-1] + sign * near].sum() for sign in (1, -1))
        least += w[-1] * np.isfinite(alpha[-1])
        assert least / w.sum() - 1e-9 <= p <= most / w.sum() + 1e-9, (value, alpha)
        # Of what is equal by its own making the candidate's double is one: it counts.
        doubles = w[:-1][(X[:n] == X[n]).all(axis=1) & (y[:n] == value)].sum()
        assert p >= (doubles + w[-1]) / w.sum() - 1e-9
