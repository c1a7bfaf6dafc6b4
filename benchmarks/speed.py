"""Speed, as ratios measured in one process: our code against the paper's per-point loop, and against curvlinops.

python benchmarks/speed.py            everything, about six minutes on two cores
python benchmarks/speed.py logistic   one part: logistic, network, growth, curvature
"""

from __future__ import annotations

import functools
import sys
import warnings

import numpy as np
import torch
from measure import console, seconds, show
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.func import hessian

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.curvature import GGN, Hessian
from fullconformal.models import mlp, train
from fullconformal.problem import Problem


def paper_loop_pair(loss_i: torch.Tensor, g_i: torch.Tensor, ghat: torch.Tensor, Hinv: torch.Tensor) -> torch.Tensor:
    """One score as the paper's Algorithm 2 writes it: two influences, each a product with the explicit inverse."""
    return loss_i - g_i @ (Hinv @ ghat) + g_i @ (Hinv @ g_i)


# Logistic regression: everything measured, nothing extrapolated -----------------------------------------------------------


def logistic() -> None:
    X, y = make_classification(1100, 50, n_informative=20, random_state=0)
    Z, labels, Xt = X[:1000], y[:1000], X[1000:]
    l2 = 1e-3
    clf = FullConformalClassifier(l2=l2, method="influence")
    clf.fit(Z, labels).predict_p(Xt)  # warm
    ours_fit = seconds(lambda: clf.fit(Z, labels), 100)
    ours_predict = seconds(lambda: clf.predict_p(Xt), 100)
    ours = clf.predict_p(Xt)

    # The same objective by scikit-learn; the fit itself is not counted.
    model = LogisticRegression(C=1 / (len(Z) * l2), tol=1e-12, max_iter=1000, solver="newton-cholesky").fit(Z, labels)
    theta = torch.as_tensor(np.append(model.coef_[0], model.intercept_))
    decay = torch.full_like(theta, len(Z) * l2)
    decay[-1] = 0
    theirs = logistic_loop(theta, decay, Z, labels, Xt)
    loop = seconds(lambda: logistic_loop(theta, decay, Z, labels, Xt), 3)
    console.print(f"p-values of both: largest difference {np.abs(ours - theirs).max():.1e}")
    total = ours_fit + ours_predict
    show(
        "Logistic regression, n = 1,000, d = 50, 100 test points, 2 labels (200,000 pairs), deleted, float64",
        [
            ("paper's loop: gradients, Hessian, inverse, all pairs", f"{loop:.2f} s", "1×"),
            ("ours: fit", f"{1e3 * ours_fit:.2f} ms", ""),
            ("ours: 100 test points", f"{1e3 * ours_predict:.2f} ms", ""),
            ("ours: fit + predict", f"{1e3 * total:.2f} ms", f"{loop / total:,.0f}×  (bar: 500×)"),
        ],
        ("", "time", "ratio"),
    )


def logistic_loop(theta: torch.Tensor, decay: torch.Tensor, X: np.ndarray, y: np.ndarray, Xt: np.ndarray) -> np.ndarray:
    """Algorithm 2 with autograd gradients at θ (d + 1,), of weights and an intercept, each with its penalty."""
    n = len(y)
    Z, labels, objects = torch.as_tensor(X), torch.as_tensor(y), torch.as_tensor(Xt)

    def losses_at(theta: torch.Tensor, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logit = x @ theta[:-1] + theta[-1]
        return nn.functional.softplus(torch.where(label == 1, -logit, logit))

    def gradient(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        t = theta.clone().requires_grad_()
        return torch.autograd.grad(losses_at(t, x, label), t)[0]

    def objective(theta: torch.Tensor) -> torch.Tensor:
        return losses_at(theta, Z, labels).sum() + (decay * theta**2).sum() / 2

    Hinv = torch.linalg.inv(hessian(objective)(theta))
    g = [gradient(Z[i], labels[i]) for i in range(n)]
    losses = [losses_at(theta, Z[i], labels[i]) for i in range(n)]
    p = np.zeros((len(objects), 2))
    for j, x in enumerate(objects):
        for label in range(2):
            ghat, tau = gradient(x, torch.tensor(label)), losses_at(theta, x, torch.tensor(label))
            above = 0
            for i in range(n):
                above += bool(paper_loop_pair(losses[i], g[i], ghat, Hinv) >= tau)
            p[j, label] = (1 + above) / (n + 1)
    return p


# A network: the loop is sampled -----------------------------------------------------------------------------------------------


def bag(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of ten classes around centres in 32 dimensions."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(10, 32))
    y = rng.integers(0, 10, n)
    X = centres[y] + rng.normal(size=(n, 32))
    return torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y)


@functools.cache
def trained() -> nn.Module:
    """One network for all sizes of bag: what is measured here is prediction."""
    X, y = bag(10_000)
    torch.manual_seed(0)
    net = mlp(32, (100, 50, 20), 10)
    train(net, X, y, {name: 100.0 for name, _ in net.named_parameters()}, max_epochs=20, max_iter=50)
    return net.eval()


def network_fit(n: int, **options: object) -> tuple[FullConformalClassifier, np.ndarray]:
    """A bag of n points around the network, and 100 test points."""
    X, y = bag(n + 100)
    clf = FullConformalClassifier(trained(), prefit=True, method="influence", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)
        clf.fit(X[:n].numpy(), y[:n].numpy())
    return clf, X[n:].numpy()


def network() -> None:
    clf, Xt = network_fit(2000)
    first = seconds(lambda: clf.predict_p(Xt)) / len(Xt)
    # What a fit keeps for later predictions grows with the objects predicted: after as many as there are points it is complete.
    clf.predict_p(bag(2000, seed=1)[0].numpy())
    ours = seconds(lambda: clf.predict_p(Xt), 5) / len(Xt)
    pruned = clf.set_params(prune=True)
    ours_pruned = seconds(lambda: pruned.predict_p(Xt), 3) / len(Xt)
    points, sample = 40, 60
    losses, G = network_gradients(points)
    # The time of a product does not depend on what is in the matrix: any of this size does for the inverse.
    Hinv = torch.randn(G.shape[1], G.shape[1])
    pair = (
        seconds(lambda: [paper_loop_pair(losses[k % points], G[k % points], G[7], Hinv) for k in range(sample)])
        / sample
    )
    loop = pair * 2000 * 10
    show(
        f"MLP 32-100-50-20-10, p = {G.shape[1]:,}, n = 2,000, 10 labels, deleted, float32: one test point",
        [
            (f"paper's loop, 20,000 pairs, extrapolated from {sample}", f"{loop:.0f} s", "1×"),
            ("ours, the first 100 objects", f"{1e3 * first:.2f} ms", f"{loop / first:,.0f}×"),
            ("ours, after 2,000 objects", f"{1e3 * ours:.2f} ms", f"{loop / ours:,.0f}×  (bar: 10,000×)"),
            ("ours, pruning forced", f"{1e3 * ours_pruned:.2f} ms", f"{loop / ours_pruned:,.0f}×"),
        ],
        ("", "time", "ratio"),
    )


def network_gradients(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses (count,) and gradients (count, p) of the first points, by autograd."""
    net, (X, y) = trained(), bag(2000)
    losses = nn.functional.cross_entropy(net(X[:count]), y[:count], reduction="none")
    rows = [torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for loss in losses]
    return losses.detach(), torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def growth() -> None:
    rows, first = [], None
    for n in (2_000, 5_000, 10_000, 20_000, 50_000):
        clf, Xt = network_fit(n, prune=True)
        each = seconds(lambda clf=clf, Xt=Xt: clf.predict_p(Xt), 3) / len(Xt)
        first = first or (n, each)
        rows.append((f"{n:,}", f"{1e3 * each:.2f} ms", f"{n / first[0]:.1f}×", f"{each / first[1]:.2f}×"))
    show("Pruning, the same network: time a test point", rows, ("n", "time", "n grew", "time grew"))


# Curvature -------------------------------------------------------------------------------------------------------------------------


def curvature() -> None:
    """Our whole matrix against a sample of curvlinops' matrix-vector products, extrapolated to p of them."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    X, y = bag(2000)
    torch.manual_seed(0)
    net = mlp(32, (100, 50, 20), 10).eval()
    problem = Problem(net, X, y, 1.0)
    rows = []
    for name, ours, theirs in (("exact Hessian", Hessian, HessianLinearOperator), ("GGN", GGN, GGNLinearOperator)):
        ours().matrix(problem)
        mine = seconds(lambda ours=ours: ours().matrix(problem), 3)
        operator = theirs(
            net, nn.CrossEntropyLoss(reduction="sum"), list(net.parameters()), [(X, y)], check_deterministic=False
        )
        sample = 128
        V = torch.eye(problem.p)[:, :sample]
        operator @ V
        each = seconds(lambda operator=operator, V=V: operator @ V, 2) / sample
        rows.append((name, f"{mine:.2f} s", f"{each * problem.p:.0f} s", f"{each * problem.p / mine:.0f}×  (bar: 10×)"))
    show(
        f"Curvature of the network, p = {problem.p:,}, n = 2,000, float32 (curvlinops: {sample} products, extrapolated to p)",
        rows,
        ("", "ours", "curvlinops", "ratio"),
    )


if __name__ == "__main__":
    parts = {"logistic": logistic, "network": network, "growth": growth, "curvature": curvature}
    for chosen in sys.argv[1:] or parts:
        parts[chosen]()
