"""Intervals of networks by their tangents (ACP-GN) against the formulas written out, and against ridge where they are exact."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neural_network import MLPRegressor

import fullconformal
from fullconformal import FullConformalRegressor
from fullconformal.models import mlp

pytestmark = pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning")
Q = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}


def points(n=40, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + 4, d))
    y = 5 + 3 * np.sin(X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=n + 4)
    return X[:n], y[:n], X[n:]


@pytest.mark.parametrize("curvature", ["ggn", "dual"])
@pytest.mark.parametrize("scheme", Q)
def test_a_linear_module_is_a_ridge_regression(scheme, curvature):
    X, y, new = points()
    ones = [np.hstack([part, np.ones((len(part), 1))]) for part in (X, new)]
    ridge = Ridge(alpha=40 * 0.02, fit_intercept=False)
    exact = FullConformalRegressor(ridge, scheme=scheme).fit(ones[0], y)
    module = torch.nn.Sequential(torch.nn.Linear(3, 1)).double()
    coef = torch.as_tensor(ridge.fit(ones[0], y).coef_)
    with torch.no_grad():
        module[0].weight.copy_(coef[None, :3])
        module[0].bias.copy_(coef[3:])
    reg = FullConformalRegressor(module, scheme=scheme, prefit=True, l2=0.02, curvature=curvature).fit(X, y)
    assert reg.method_ == "influence" and reg.guarantee_.word == "approximate"
    levels = [0.5, 0.8, 0.9]
    np.testing.assert_allclose(reg.predict_interval(new, levels), exact.predict_interval(ones[1], levels), atol=1e-8)
    values = np.tile(np.linspace(0, 10, 7), (4, 1))
    np.testing.assert_allclose(reg.predict_p(new, values), exact.predict_p(ones[1], values), atol=1e-12)
    np.testing.assert_allclose(reg.predict_quantile(new, 0.5), exact.predict_quantile(ones[1], 0.5), atol=1e-8)


def jacobian(module, X):
    """Derivatives (n, p) of the output, a point at a time."""
    rows = []
    for x in torch.as_tensor(X):
        module.zero_grad()
        module(x[None])[0, 0].backward()
        rows.append(torch.cat([q.grad.flatten() for q in module.parameters()]))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("scheme", Q)
def test_a_network_is_its_tangent(scheme):
    """Section 9 of the mathematics, written out with the inverse of the matrix."""
    X, y, new = points()
    torch.manual_seed(0)
    module = mlp(3, (6,), 1, "tanh").double()
    reg = FullConformalRegressor(module, scheme=scheme, prefit=True, l2=0.05).fit(X, y)
    J, Jx = jacobian(module, X), jacobian(module, new)
    inverse = np.linalg.inv(J.T @ J + 40 * 0.05 * np.eye(J.shape[1]))
    with torch.no_grad():
        f, fx = (module(torch.as_tensor(part)).numpy()[:, 0] for part in (X, new))
    h, q = np.einsum("ij,jk,ik->i", J, inverse, J), Q[scheme]
    values = np.linspace(-5, 12, 23)
    found = reg.predict_p(new, np.tile(values, (4, 1)))
    for k in range(4):
        hx, hxi = Jx[k] @ inverse @ Jx[k], J @ inverse @ Jx[k]
        for value, p in zip(values, found[k], strict=True):
            t = value - fx[k]
            alpha = np.abs(y - f - hxi * t / (1 + hx)) / (1 - h + hxi**2 / (1 + hx)) ** q
            own = np.abs(t / (1 + hx)) / (1 / (1 + hx)) ** q
            assert p == pytest.approx((1 + (alpha >= own).sum()) / 41)


def test_memory_that_holds_no_jacobians_gives_the_same():
    X, y, new = points()
    torch.manual_seed(0)
    module = mlp(3, (20,), 1, "tanh").double()
    whole = FullConformalRegressor(module, prefit=True).fit(X, y)
    # 40 Jacobians of 101 numbers take 32 kB, and a quarter of 90 kB is less.
    little = FullConformalRegressor(module, prefit=True, memory_budget=9e4 / 2**30, curvature="last_layer").fit(X, y)
    last = FullConformalRegressor(module, prefit=True, curvature="last_layer").fit(X, y)
    np.testing.assert_allclose(little.predict_interval(new), last.predict_interval(new))
    assert not np.allclose(last.predict_interval(new), whole.predict_interval(new))


def test_a_trained_network_covers_and_is_saved(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(700, 3))
    y = 1e4 * (np.sin(X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=700))
    torch.manual_seed(0)
    reg = FullConformalRegressor(
        mlp(3, (10,), 1, "tanh"), method="influence", l2=1e-3, max_epochs=20, random_state=0
    ).fit(X[:200], y[:200])
    low, high = reg.predict_interval(X[200:]).T
    # The band of a binomial at 99.9 %, and three points in a hundred for the approximation and the one bag.
    assert 0.84 <= ((low <= y[200:]) & (y[200:] <= high)).mean() <= 0.96
    assert (high - low).mean() < 3 * 1.65 * 0.3e4
    reg.save(tmp_path / "net.safetensors")
    again = fullconformal.load(tmp_path / "net.safetensors")
    np.testing.assert_allclose(again.predict_interval(X[200:210]), reg.predict_interval(X[200:210]), rtol=1e-6)
    told = reg.diagnose()
    assert 0 < told.n_parameters < 51 and "curvature" in str(told)


def test_a_perceptron_of_scikit_learns():
    X, y, new = points(60)
    model = MLPRegressor(
        hidden_layer_sizes=(5,), activation="tanh", solver="lbfgs", alpha=1.0, max_iter=2000, random_state=0
    )
    reg = FullConformalRegressor(model, method="influence", confidence_level=0.8).fit(X, y)
    np.testing.assert_allclose(reg.predict(new), model.fit(X, y).predict(new), atol=1e-8)
    found = reg.audit(new, n_pairs=3, max_refits=60)
    assert found.p_distance.max() < 0.25


@pytest.mark.parametrize(
    ("module", "message"),
    [(mlp(3, (4,), 2), r"shape \(batch, 1\), but returned \(2, 2\)"), (mlp(5, (4,), 1), "does not take X of shape")],
)
def test_modules_that_do_not_fit(module, message):
    X, y, _ = points()
    with pytest.raises(ValueError, match=message):
        FullConformalRegressor(module).fit(X.astype(np.float32), y)


def test_methods_that_do_not_go_with_the_model():
    X, y, new = points()
    with pytest.raises(ValueError, match="method='influence' is for torch modules and MLPRegressor"):
        FullConformalRegressor(Ridge(), method="influence").fit(X, y)
    with pytest.raises(ValueError, match="prefit=True needs a trained network"):
        FullConformalRegressor(Ridge(), prefit=True).fit(X, y)
    with pytest.raises(ValueError, match="an audit refits models of scikit-learn's"):
        FullConformalRegressor(mlp(3, (4,), 1), method="influence", max_epochs=1).fit(X, y).audit(new)
