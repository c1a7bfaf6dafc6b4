"""The Kronecker last layer against its literal definition: gradients written out, 𝓗 written out and inverted, one pair at a time."""

import numpy as np
import pytest
import torch

from fullconformal.curvature.base import CurvatureError
from fullconformal.last_layer.bag import Collector, kronecker_factors, last_layer_counts

SCHEMES = [0.0, 0.5, 1.0]
PENALTIES = {"none": (0.0, 0.0), "all": (0.05, 0.05), "bias free": (0.05, 0.0), "bias only": (0.0, 0.1)}


def draw(n, m=7, d=4, n_classes=3, seed=0):
    """Features with a 1 appended, logits, labels, and m objects, float64."""
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(n_classes, d + 1, generator=g).double()
    phi = torch.cat([torch.randn(n + m, d, generator=g).double(), torch.ones(n + m, 1).double()], 1)
    logits = phi @ W.T
    y = torch.multinomial(torch.softmax(logits, 1), 1, generator=g)[:, 0]
    return W, phi[:n], logits[:n], y[:n], phi[n:], logits[n:]


def bag_of(W, phi, logits, y, penalty=(0.05, 0.05), q=1.0, dtype=torch.float64, half=False, sizes=(37,), expected=None):
    collector = Collector(phi.shape[1], logits.shape[1], phi.device, dtype, expected)
    at, k = 0, 0
    while at < len(y):
        part = slice(at, at + sizes[k % len(sizes)])
        collector.add(phi[part].to(dtype), logits[part], y[part])
        at, k = part.stop, k + 1
    return collector.finish(W, penalties(phi.shape[1], penalty), 0.0, q, half)


def penalties(d, penalty):
    return torch.tensor([penalty[0]] * (d - 1) + [penalty[1]], dtype=torch.float64)


def written(factor, like):
    """The matrix that a factor is of, from what it does to the identity."""
    return torch.linalg.inv(factor.solve(torch.eye(len(like)).to(like)))


def literal(phi, logits, y, phi_x, logits_x, penalty, q):
    """Scores α (m, C, n) and τ (m, C) point by point, 𝓗 = n·(A ⊗ S) written out and pseudo-inverted."""
    (n, d), n_classes = phi.shape, logits.shape[1]
    lam = penalties(d, penalty)
    A, S = torch.zeros(d, d).double(), torch.zeros(n_classes, n_classes).double()
    for i in range(n):
        pi = torch.softmax(logits[i], 0)
        A += torch.outer(phi[i], phi[i]) / n
        S += (torch.diag(pi) - torch.outer(pi, pi)) / n
    if lam.mean() > 0:
        omega = ((A.trace() / d) / (S.trace() / n_classes)) ** 0.5
        A = A + omega * torch.diag(lam) / lam.mean() ** 0.5
        S = S + lam.mean() ** 0.5 / omega * torch.eye(n_classes).double()
    inverse = torch.linalg.pinv(n * torch.kron(A, S), hermitian=True)

    def gradient(f, features, label):
        return torch.kron(features, torch.softmax(f, 0) - torch.eye(n_classes).double()[label])

    def loss(f, label):
        return -torch.log_softmax(f, 0)[label]

    alpha, tau = torch.zeros(len(phi_x), n_classes, n).double(), torch.zeros(len(phi_x), n_classes).double()
    g = [gradient(logits[i], phi[i], y[i]) for i in range(n)]
    for x in range(len(phi_x)):
        for label in range(n_classes):
            ghat = gradient(logits_x[x], phi_x[x], label)
            tau[x, label] = loss(logits_x[x], label) - (1 - q) * ghat @ inverse @ ghat
            for i in range(n):
                alpha[x, label, i] = loss(logits[i], y[i]) + q * g[i] @ inverse @ g[i] - g[i] @ inverse @ ghat
    return alpha, tau


@pytest.mark.parametrize("q", SCHEMES)
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_counts_are_the_literal_ones(q, penalty):
    W, phi, logits, y, phi_x, logits_x = draw(90)
    alpha, tau = literal(phi, logits, y, phi_x, logits_x, penalty, q)
    assert (alpha - tau[..., None]).abs().min() > 1e-9  # no ties: the counts are beyond doubt
    bag = bag_of(W, phi, logits, y, penalty, q)
    for prune in (True, False):
        out = last_layer_counts(bag, phi_x, logits_x, q, prune=prune)
        assert np.array_equal(out.greater, (alpha > tau[..., None]).sum(-1).numpy())
        assert not out.equal.any()


@pytest.mark.parametrize("class_conditional", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_and_classes(class_conditional, weighted):
    W, phi, logits, y, phi_x, logits_x = draw(80, seed=1)
    alpha, tau = literal(phi, logits, y, phi_x, logits_x, (0.05, 0.05), 1.0)
    w = torch.rand(80, generator=torch.Generator().manual_seed(0)).double() if weighted else torch.ones(80).double()
    compared = (alpha > tau[..., None]) * w
    if class_conditional:
        compared = compared * (y[None, None, :] == torch.arange(3)[None, :, None])
    out = last_layer_counts(bag_of(W, phi, logits, y), phi_x, logits_x, 1.0, w if weighted else None, class_conditional)
    assert np.abs(out.greater - compared.sum(-1).numpy()).max() < 1e-12
    assert not out.equal.any()


def test_what_is_added_to_the_factors_multiplies_to_the_penalty():
    g = torch.Generator().manual_seed(0)
    B, D = torch.randn(9, 5, generator=g).double(), torch.randn(9, 4, generator=g).double()
    A, S, lam = B.T @ B, D.T @ D, torch.tensor([0.3, 0.3, 0.3, 0.3, 0.0]).double()
    a, s = kronecker_factors(A.clone(), S.clone(), lam)
    added = [written(f, M) - M for f, M in ((a, A), (s, S))]
    added[1] -= S.diagonal().mean() / 4  # the multiple of 11ᵀ
    assert torch.allclose(torch.kron(*added), torch.diag(lam.repeat_interleave(4)), atol=1e-12)
    # Both factors are damped by the same part of their mean eigenvalue.
    parts = [E.trace() / M.trace() for E, M in zip(added, (A, S), strict=True)]
    assert torch.isclose(*parts, rtol=1e-12)


@pytest.mark.parametrize("q", SCHEMES)
@pytest.mark.parametrize("sorted_for", [0.0, 1.0])
def test_pruning_changes_nothing_whatever_the_points_are_sorted_for(q, sorted_for):
    W, phi, logits, y, phi_x, logits_x = draw(1000, m=40, d=6, n_classes=7)
    bag = bag_of(W, phi, logits, y, q=sorted_for, dtype=torch.float32)
    w = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()
    for weights in (None, w):
        pruned, full = (
            last_layer_counts(bag, phi_x, logits_x, q, weights, prune=prune, chunk=128) for prune in (True, False)
        )
        assert pruned.touched < 0.5 < 1.0 <= full.touched
        assert np.abs(pruned.greater - full.greater).max() < 1e-9
        assert np.abs(pruned.equal - full.equal).max() < 1e-9


@pytest.mark.parametrize(("dtype", "half"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_less_precision_moves_only_what_is_nearly_tied(dtype, half):
    """Counts differ from float64's by no more than the number of points whose score is within the stated error of τ."""
    W, phi, logits, y, phi_x, logits_x = draw(300, m=10, d=30, n_classes=5)
    alpha, tau = literal(phi, logits, y, phi_x, logits_x, (0.05, 0.05), 1.0)
    bag = bag_of(W, phi, logits, y, dtype=dtype, half=half)
    out = last_layer_counts(bag, phi_x, logits_x, 1.0)
    x = bag.candidates(phi_x, logits_x, 1.0)
    error = 2 * bag.room(x, slice(bag.n))[:, None] + (x.high - x.low)[..., None]
    if half:  # T rounded to 11 bits on both sides: 2·2⁻¹¹ of |T_i||T_x| at the very most
        error = error + 2**-10 * (bag.self_influence[: bag.n] * x.s[..., None]).sqrt()
    back = torch.argsort(bag.order)
    near = ((alpha - tau[..., None]).abs() <= error[..., back]).sum(-1).numpy()
    exact = (alpha >= tau[..., None]).sum(-1).numpy()
    assert (np.abs(out.greater + out.equal - exact) <= near).all()
    assert near.mean() < 0.02 * bag.n


@pytest.mark.parametrize(("dtype", "half"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_a_training_point_is_tied_with_itself(dtype, half):
    """Deleted, a candidate equal to a training point has the score ℓ_i + s_i − s_i of that point."""
    W, phi, logits, y, _, _ = draw(200, d=10)
    bag = bag_of(W, phi, logits, y, dtype=dtype, half=half)
    alone = last_layer_counts(bag, phi[:30], logits[:30], 1.0)
    assert (alone.equal[np.arange(30), y[:30]] >= 1).all()
    own = last_layer_counts(bag, phi[:30], logits[:30], 1.0, class_conditional=True)
    assert (own.equal[np.arange(30), y[:30]] >= 1).all()


@pytest.mark.parametrize("far", [1e5, 1e9])
def test_an_object_that_float16_cannot_hold_is_cut_off_at_what_it_can(far):
    W, phi, logits, y, phi_x, logits_x = draw(300)
    bag = bag_of(W, phi, logits, y, dtype=torch.float32, half=True)
    phi_x[:, :-1] *= far
    T = (phi_x @ bag.root.T).clamp(-65504, 65504)
    assert (T.abs() == 65504).any()
    expected = last_layer_counts(bag, T @ torch.linalg.inv(bag.root).T, logits_x, 1.0)
    out = last_layer_counts(bag, phi_x, logits_x, 1.0)
    assert np.array_equal(out.greater + out.equal, expected.greater + expected.equal)
    assert (out.greater + out.equal).all()  # no number that is none, which is above nothing


def test_points_may_come_in_any_order_and_any_batches():
    W, phi, logits, y, phi_x, logits_x = draw(300)
    expected = last_layer_counts(bag_of(W, phi, logits, y, expected=300), phi_x, logits_x, 1.0)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    for sizes in ((1, 50), (300,), (7,)):
        bag = bag_of(W, phi[order], logits[order], y[order], sizes=sizes, expected=None if sizes[0] < 7 else 100)
        out = last_layer_counts(bag, phi_x, logits_x, 1.0)
        assert np.array_equal(out.greater, expected.greater)
        assert np.array_equal(np.sort(bag.order), np.arange(300))


def test_objects_in_blocks_under_a_small_memory_are_the_same():
    W, phi, logits, y, phi_x, logits_x = draw(300, m=9)
    bag, seen = bag_of(W, phi, logits, y), []
    small = last_layer_counts(bag, phi_x, logits_x, 1.0, memory=1, progress=lambda *at: seen.append(at))
    assert np.array_equal(small.greater, last_layer_counts(bag, phi_x, logits_x, 1.0).greater)
    assert seen == [(k, 9) for k in range(1, 10)]


def test_rounding_is_granted_to_whole_products(less_than_single):
    """In float32, whatever torch was asked for."""
    W, phi, logits, y, phi_x, logits_x = draw(300)
    asked = set()
    last_layer_counts(
        bag_of(W, phi, logits, y), phi_x, logits_x, 1.0,
        progress=lambda *at: asked.add(torch.backends.mkldnn.matmul.fp32_precision),
    )  # fmt: skip
    assert asked == {"ieee"}


def test_the_share_of_scores_formed_falls_as_n_grows():
    shares = []
    for n in (1000, 4000, 16000):
        W, phi, logits, y, phi_x, logits_x = draw(n, m=20, d=6, n_classes=5)
        shares.append(last_layer_counts(bag_of(W, phi, logits, y, sizes=(500,)), phi_x, logits_x, 1.0).touched)
    assert shares[2] < shares[1] < shares[0] < 0.2
    assert shares[2] < shares[0] / 4


def test_figures_are_those_of_the_layer():
    W, phi, logits, y, _, _ = draw(120)
    figures = bag_of(W, phi, logits, y).figures
    theta = W.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(phi @ theta.T, y) + 0.05 * (theta**2).sum() / 2
    (gradient,) = torch.autograd.grad(loss, theta)
    assert torch.allclose(figures.gradient, gradient, atol=1e-13)
    A, S = phi.T @ phi / 120, torch.zeros(3, 3).double()
    for pi in torch.softmax(logits, 1):
        S += (torch.diag(pi) - torch.outer(pi, pi)) / 120
    a, s = kronecker_factors(A.clone(), S.clone(), torch.full((5,), 0.05, dtype=torch.float64))
    H = 120 * torch.kron(written(a, A), written(s, S))
    g = 120 * gradient.T.reshape(-1)
    assert figures.newton_decrement == pytest.approx(float(g @ torch.linalg.solve(H, g)) ** 0.5, rel=1e-9)


def test_no_curvature_is_said():
    phi, logits, y = torch.zeros(4, 2), torch.tensor([[9.0, -9.0]]).expand(4, 2), torch.zeros(4, dtype=torch.long)
    with pytest.raises(CurvatureError, match="all features are zero"):
        bag_of(torch.zeros(2, 2), phi, logits, y)
