"""The kernels of the last layer on a GPU: the counts of plain PyTorch, and the p-values of the CPU."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fullconformal import FullConformalClassifier
from fullconformal.last_layer.bag import Collector, kernels_run, last_layer_counts
from fullconformal.models import mlp

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore::fullconformal.ConformalWarning"),
]


def quarters(*shape, seed, top=8):
    """Random multiples of ¼: sums and products of a few are exact in float32, so ties are ties."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-4 * top, 4 * top, shape, generator=g) / 4).cuda()


@pytest.mark.parametrize("tile", [(32, 128, 1), (64, 64, 2), (32, 64, 1), (128, 128, 4), (16, 256, 2)])
@pytest.mark.parametrize("n_classes", [3, 128, 200])
@pytest.mark.parametrize("prune", [True, False])
def test_the_kernel_counts_what_its_definition_says(tile, n_classes, prune):
    from fullconformal.last_layer import kernels

    n, m = 1024, 19
    b = quarters(n, seed=0, top=200).sort().values
    b[1000:] = -torch.inf  # rows without a point
    Q, c, u = quarters(n, n_classes, seed=1), quarters(m, n, seed=2, top=2), quarters(m, n, seed=3, top=2)
    Q[1000:], c[:, 1000:], u[:, 1000:] = 0, 0, 0
    slack, tau = quarters(n, seed=4, top=1).abs(), quarters(m, n_classes, seed=5, top=200)
    w, v = quarters(n, seed=6, top=1).abs(), quarters(m, seed=7, top=1).abs()
    low, high = tau - 0.25, tau + 0.25
    alpha = b - c * u
    alpha = alpha[:, None, :] + c[:, None, :] * Q.T
    room = slack + v[:, None, None] * w
    above = (alpha - room > high[..., None]).sum(-1)
    reaching = (alpha + room >= low[..., None]).sum(-1)
    assert (above < reaching).any() and (above > 0).any()
    got = kernels.count(Q, b, slack, Q.abs().amax(1), w, c, u.clone(), v, low, high, prune, *tile)
    assert torch.equal(got[0].long(), above)
    assert torch.equal(got[1].long(), reaching)


def bags(n, m, d, n_classes, device, half):
    g = torch.Generator().manual_seed(0)
    W = torch.randn(n_classes, d + 1, generator=g)
    phi = torch.cat([torch.randn(n + m, d, generator=g), torch.ones(n + m, 1)], 1)
    logits = phi @ W.T / d**0.5 * 3
    y = torch.multinomial(torch.softmax(logits, 1), 1, generator=g)[:, 0]
    W, phi, logits, y = (part.to(device) for part in (W, phi, logits, y))
    collector = Collector(d + 1, n_classes, W.device, torch.float32, n)
    collector.add(phi[:n], logits[:n], y[:n])
    bag = collector.finish(W.double(), torch.full((d + 1,), 0.01, dtype=torch.float64, device=device), 0.0, 1.0, half)
    return bag, phi[n:], logits[n:]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_counts_are_those_of_plain_pytorch(half, q):
    bag, phi, logits = bags(5000, 200, 40, 30, "cuda", half)
    assert kernels_run(bag.Q.device, bag.Q.dtype)
    fused = [last_layer_counts(bag, phi, logits, q, prune=prune) for prune in (True, False)]
    plain = last_layer_counts(bag, phi, logits, q, fused=False)
    on_cpu = last_layer_counts(*bags(5000, 200, 40, 30, "cpu", half)[:1], phi.cpu(), logits.cpu(), q)
    assert np.array_equal(fused[0].greater, fused[1].greater) and np.array_equal(fused[0].equal, fused[1].equal)
    for other in (plain, on_cpu):
        # A score may be rounded across the edge of its slack, one in a thousand candidates at most, and by one point.
        for ours, theirs in ((fused[0].greater, other.greater), (fused[0].equal, other.equal)):
            assert np.abs(ours - theirs).max() <= 2
            assert (ours != theirs).mean() < 0.02


@pytest.mark.parametrize("half", [False, True])
def test_a_training_point_is_tied_with_itself(half):
    bag, _, _ = bags(2000, 10, 20, 5, "cuda", half)
    g = torch.Generator().manual_seed(0)
    W = torch.randn(5, 21, generator=g)
    phi = torch.cat([torch.randn(2010, 20, generator=g), torch.ones(2010, 1)], 1)
    logits = phi @ W.T / 20**0.5 * 3
    y = torch.multinomial(torch.softmax(logits, 1), 1, generator=g)[:, 0]
    out = last_layer_counts(bag, phi[:50].cuda(), logits[:50].cuda(), 1.0)
    assert (out.equal[np.arange(50), y[:50]] >= 1).all()


@pytest.mark.parametrize("options", [{}, {"class_conditional": True}, {"dtype": "float32"}, {"scheme": "ordinary"}])
def test_p_values_are_those_of_the_cpu(options):
    torch.manual_seed(0)
    net = mlp(20, (32,), 50).eval()
    X, y = torch.randn(4000, 20), torch.randint(50, (4000,))
    p = [
        FullConformalClassifier(net, prefit=True, curvature="last_layer_kron", device=device, **options)
        .fit(TensorDataset(X, y))
        .predict_p(X[:100])
        for device in ("cpu", "cuda")
    ]
    # Half precision moves a score by 1.5e-5·√(32/2048)⁻¹ of √(s ŝ), and few of the points lie that near.
    # Compared with its own class only, a candidate meets some sixty points, and two of them are more than that.
    fewest = int(torch.bincount(y).min()) if options.get("class_conditional") else 200
    assert np.abs(p[0] - p[1]).max() < 2 / fewest
    assert np.abs(p[0] - p[1]).mean() < 2e-4
