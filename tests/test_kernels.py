"""The kernels' arithmetic, their source run on the CPU by a small interpreter; tests/test_cuda_last_layer.py runs them compiled."""

import numpy as np
import pytest
import torch
from interpreter import interpret

from fullconformal.last_layer import kernels
from fullconformal.last_layer.bag import Collector, last_layer_counts


def quarters(*shape, seed, top=8):
    """Random multiples of ¼: sums and products of a few are exact in float32, so ties are ties."""
    return torch.randint(-4 * top, 4 * top, shape, generator=torch.Generator().manual_seed(seed)) / 4


@pytest.mark.parametrize("n_classes", [3, 16, 21])
@pytest.mark.parametrize("prune", [True, False])
def test_counts_are_what_the_definition_says(monkeypatch, n_classes, prune):
    interpret(monkeypatch, kernels)
    n, m = 128, 5
    b = quarters(n, seed=0, top=200).sort().values
    b[120:] = -torch.inf  # rows without a point
    Q, c, u = quarters(n, n_classes, seed=1), quarters(m, n, seed=2, top=2), quarters(m, n, seed=3, top=2)
    Q[120:], c[:, 120:], u[:, 120:] = 0, 0, 0
    slack, w, v = (quarters(k, seed=seed, top=1).abs() for k, seed in ((n, 4), (n, 5), (m, 6)))
    tau = quarters(m, n_classes, seed=7, top=200)
    low, high = tau - 0.25, tau + 0.25
    alpha = (b - c * u)[:, None, :] + c[:, None, :] * Q.T
    room = slack + v[:, None, None] * w
    above, reaching = (alpha - room > high[..., None]).sum(-1), (alpha + room >= low[..., None]).sum(-1)
    assert (above < reaching).any()
    for tile in ((32, 16), (16, 8), (64, 32)):
        got = kernels.count(Q, b, slack, Q.abs().amax(1), w, c, u.clone(), v, low, high, prune, *tile)
        assert torch.equal(got[0].long(), above)
        assert torch.equal(got[1].long(), reaching)


@pytest.mark.parametrize("q", [0.0, 1.0])
def test_the_whole_path_through_the_kernels(monkeypatch, q):
    g = torch.Generator().manual_seed(0)
    phi, W = torch.randn(320, 6, generator=g), torch.randn(4, 6, generator=g)
    logits = phi @ W.T
    y = torch.multinomial(torch.softmax(logits, 1), 1, generator=g)[:, 0]
    collector = Collector(6, 4, torch.device("cpu"), torch.float32)
    collector.add(phi[:310], logits[:310], y[:310])
    bag = collector.finish(W.double(), torch.full((6,), 0.01).double(), 0.0, 1.0, False)
    plain = last_layer_counts(bag, phi[310:], logits[310:], q)
    interpret(monkeypatch, kernels)
    fused = last_layer_counts(bag, phi[310:], logits[310:], q, fused=True)
    assert np.array_equal(fused.greater, plain.greater)
    assert np.array_equal(fused.equal, plain.equal)
