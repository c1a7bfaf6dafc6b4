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


@pytest.mark.parametrize("curvature", ["ggn", "dual", "ekfac", "kfac", "last_layer"])
def test_every_curvature_gives_leverages(curvature):
    """The formulas of the tangent, with the inverse of whatever matrix the curvature is."""
    X, y, new = points()
    torch.manual_seed(0)
    module = mlp(3, (6,), 1, "tanh").double()
    reg = FullConformalRegressor(module, prefit=True, l2=0.05, curvature=curvature).fit(X, y)
    # Curvatures have the bias of a unit behind its weights.
    order = [*np.column_stack([np.arange(18).reshape(6, 3), np.arange(18, 24)]).ravel(), *range(24, 31)]
    order = order[-7:] if curvature == "last_layer" else order
    J, Jx = jacobian(module, X)[:, order], jacobian(module, new)[:, order]
    inverse = reg._fitted.factor.solve(torch.eye(J.shape[1], dtype=torch.float64)).numpy()
    if curvature in ("ggn", "dual", "last_layer"):
        np.testing.assert_allclose(inverse, np.linalg.inv(J.T @ J + 2 * np.eye(J.shape[1])), atol=1e-9)
    with torch.no_grad():
        r = y - module(torch.as_tensor(X)).numpy()[:, 0]
        fx = module(torch.as_tensor(new)).numpy()[:, 0]
    h, hx, hxi = np.einsum("ij,jk,ik->i", J, inverse, J), np.diag(Jx @ inverse @ Jx.T), Jx @ inverse @ J.T
    np.testing.assert_allclose(reg._fitted.leverage, h, atol=1e-9)
    t, g = np.linspace(-8, 8, 17)[:, None, None], 1 / (1 + hx[:, None])
    # Scores (17, 4, 40) of the points, and of the candidate.
    alpha, own = np.abs(r - hxi * g * t) / np.sqrt(1 - h + g * hxi**2), np.abs(t) * np.sqrt(g)
    wanted = (1 + (alpha >= own).sum(axis=2)) / 41
    np.testing.assert_allclose(reg.predict_p(new, fx[:, None] + t[:, 0, 0]), wanted.T)


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


def test_a_net_of_skorchs():
    """A linear net at the minimum of the mean of r² + (w/2)|θ|² is a ridge regression with Λ = n·w/2."""
    skorch = pytest.importorskip("skorch")
    X, y, new = points()
    ones = [np.hstack([part, np.ones((len(part), 1))]).astype(np.float32) for part in (X, new)]
    net = skorch.NeuralNetRegressor(
        torch.nn.Linear(4, 1, bias=False), optimizer=torch.optim.SGD, optimizer__weight_decay=0.5, lr=0.3, max_epochs=80,
        batch_size=-1, verbose=0,
    )  # fmt: skip
    exact = FullConformalRegressor(Ridge(40 * 0.25, fit_intercept=False)).fit(ones[0], y)
    for given in (net, net.set_params(train_split=None).fit(ones[0], y.astype(np.float32)[:, None])):
        options = {"prefit": True} if hasattr(given, "module_") else {"method": "influence"}
        reg = FullConformalRegressor(given, **options).fit(ones[0], y)
        assert reg.method_ == "influence"
        np.testing.assert_allclose(reg.predict_interval(ones[1]), exact.predict_interval(ones[1]), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"early_stopping": True}, "keeps data from training"), ({"loss": "poisson"}, "is not the squared loss")],
)
def test_objectives_that_are_not_squared_errors(options, message):
    X, y, _ = points()
    with pytest.raises(ValueError, match=message):
        FullConformalRegressor(MLPRegressor(**options), method="influence").fit(X, y)


def test_a_net_of_skorchs_with_another_loss():
    skorch = pytest.importorskip("skorch")
    net = skorch.NeuralNetRegressor(mlp(3, (4,), 1), criterion=torch.nn.L1Loss, verbose=0)
    with pytest.raises(ValueError, match="criterion is L1Loss; use MSELoss"):
        FullConformalRegressor(net, method="influence").fit(points()[0], points()[1])


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
    with pytest.raises(ValueError, match="method='influence' is for torch modules, skorch nets and MLPRegressor"):
        FullConformalRegressor(Ridge(), method="influence").fit(X, y)
    with pytest.raises(ValueError, match="prefit=True needs a trained network"):
        FullConformalRegressor(Ridge(), prefit=True).fit(X, y)
    with pytest.raises(ValueError, match="an audit refits models of scikit-learn's"):
        FullConformalRegressor(mlp(3, (4,), 1), method="influence", max_epochs=1).fit(X, y).audit(new)
