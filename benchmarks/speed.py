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
from torch import nn
from torch.func import functional_call, hessian

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.curvature import GGN, Hessian
from fullconformal.influence.counter import direct_counts
from fullconformal.models import mlp
from fullconformal.models.training import train
from fullconformal.problem import Problem, flat


def paper_loop_pair(loss_i: torch.Tensor, g_i: torch.Tensor, ghat: torch.Tensor, Hinv: torch.Tensor) -> torch.Tensor:
    """One score as the paper's Algorithm 2 writes it: two influences, each a product with the explicit inverse."""
    return loss_i - g_i @ (Hinv @ ghat) + g_i @ (Hinv @ g_i)


# Logistic regression: everything measured, nothing extrapolated -----------------------------------------------------------


def logistic() -> None:
    X, y = make_classification(1100, 50, n_informative=20, random_state=0)
    Z, labels, Xt = X[:1000], y[:1000], X[1000:]
    clf = FullConformalClassifier(l2=1e-3, method="influence")
    clf.fit(Z, labels).predict_p(Xt)  # warm
    ours_fit = seconds(lambda: clf.fit(Z, labels), 100)
    ours_predict = seconds(lambda: clf.predict_p(Xt), 100)
    ours = clf.predict_p(Xt)

    theirs = logistic_loop(clf, Z, labels, Xt)
    loop = seconds(lambda: logistic_loop(clf, Z, labels, Xt), 3)
    console.print(f"p-values of both: largest difference {np.abs(ours - theirs).max():.1e}")
    total = ours_fit + ours_predict
    show(
        "Logistic regression, n = 1,000, d = 50, 100 test points, 2 labels (200,000 pairs), deleted, float64",
        [
            ("paper's loop: gradients, Hessian, inverse, all pairs", f"{loop:.2f} s", "1×"),
            ("ours: fit", f"{1e3 * ours_fit:.2f} ms", ""),
            ("ours: 100 test points", f"{1e3 * ours_predict:.2f} ms", ""),
            ("ours: fit + predict", f"{1e3 * total:.2f} ms", f"{loop / total:,.0f}×  (bar: 1,000×)"),
        ],
        ("", "time", "ratio"),
    )


def logistic_loop(clf: FullConformalClassifier, X: np.ndarray, y: np.ndarray, Xt: np.ndarray) -> np.ndarray:
    """Algorithm 2 with autograd gradients, at the same parameters (the fit itself is not counted)."""
    problem = clf._engine.problem
    model, penalty = problem.model, problem.unpack(problem.penalty)
    n = len(y)
    params = {name: q.detach() for name, q in model.named_parameters() if q.requires_grad}
    theta = torch.cat([q.reshape(-1) for q in params.values()])
    decay = torch.cat([penalty[name].reshape(-1) for name in params])
    Z, labels, objects = torch.as_tensor(X), torch.as_tensor(y), torch.as_tensor(Xt)

    def unpack(theta: torch.Tensor) -> dict[str, torch.Tensor]:
        out, at = {}, 0
        for name, q in params.items():
            out[name] = theta[at : at + q.numel()].view_as(q)
            at += q.numel()
        return out

    def loss(theta: torch.Tensor, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, unpack(theta), (x[None],)), label[None])

    def gradient(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        t = theta.clone().requires_grad_()
        return torch.autograd.grad(loss(t, x, label), t)[0]

    def objective(theta: torch.Tensor) -> torch.Tensor:
        f = functional_call(model, unpack(theta), (Z,))
        return nn.functional.cross_entropy(f, labels, reduction="sum") + (decay * theta**2).sum() / 2

    Hinv = torch.linalg.inv(hessian(objective)(theta))
    g = [gradient(Z[i], labels[i]) for i in range(n)]
    losses = [loss(theta, Z[i], labels[i]) for i in range(n)]
    p = np.zeros((len(objects), 2))
    for j, x in enumerate(objects):
        for label in range(2):
            ghat, tau = gradient(x, torch.tensor(label)), loss(theta, x, torch.tensor(label))
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
    problem = clf._engine.problem
    clf.predict_p(Xt)
    ours = seconds(lambda: clf.predict_p(Xt), 5) / len(Xt)
    pruned = clf.set_params(prune=True)
    ours_pruned = seconds(lambda: pruned.predict_p(Xt), 3) / len(Xt)
    with torch.no_grad():
        L = clf._engine.prepared.factor.matrix
        Hinv = torch.cholesky_inverse(L)
        G = flat(clf._engine.prepared.rows(slice(0, 40)))
        sample = 60
        pair = (
            seconds(
                lambda: [
                    paper_loop_pair(clf._engine.prepared.loss[k % 40], G[k % 40], G[7], Hinv) for k in range(sample)
                ]
            )
            / sample
        )
    loop = pair * problem.n * 10
    show(
        f"MLP 32-100-50-20-10, p = {problem.p:,}, n = 2,000, 10 labels, deleted, float32: one test point",
        [
            (f"paper's loop, 20,000 pairs, extrapolated from {sample}", f"{loop:.0f} s", "1×"),
            ("ours", f"{1e3 * ours:.2f} ms", f"{loop / ours:,.0f}×  (bar: 10,000×)"),
            ("ours, pruning forced", f"{1e3 * ours_pruned:.2f} ms", f"{loop / ours_pruned:,.0f}×"),
        ],
        ("", "time", "ratio"),
    )


def growth() -> None:
    rows, first = [], None
    for n in (2_000, 5_000, 10_000, 20_000, 50_000):
        clf, Xt = network_fit(n, prune=True)
        touched = direct_counts(clf._engine.prepared, torch.as_tensor(Xt), 1.0).touched
        each = seconds(lambda clf=clf, Xt=Xt: clf.predict_p(Xt), 3) / len(Xt)
        first = first or (n, each)
        rows.append(
            (f"{n:,}", f"{touched:.3%}", f"{1e3 * each:.2f} ms", f"{n / first[0]:.1f}×", f"{each / first[1]:.2f}×")
        )
    show(
        "Pruning, the same network: share of pairs whose product is formed (target below 1 % at 10,000), time a test point",
        rows,
        ("n", "pairs touched", "time", "n grew", "time grew"),
    )


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
