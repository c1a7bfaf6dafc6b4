"""The paper's networks: shapes, and parameters counted by hand."""

import pytest
import torch

from fullconformal.models import Autoencoder, cnn, paper_network


def count(model):
    return sum(q.numel() for q in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "p"),
    [
        ("MLP_A", (8,), 8 * 20 + 20 + 20 * 10 + 10 + 10 * 10 + 10),
        ("MLP_B", (16,), 16 * 100 + 100 + 100 * 10 + 10),
        ("MLP_C", (32,), 32 * 100 + 100 + 100 * 50 + 50 + 50 * 20 + 20 + 20 * 10 + 10),
        ("LR", (8,), 8 * 10 + 10),
        # 32 → 28 → 13 → 9 → 3 and 28 → 24 → 11 → 7 → 2: convolutions of 5 without padding, pooling of 4 every 2
        ("CNN", (3, 32, 32), 3 * 16 * 25 + 16 + 16 * 32 * 25 + 32 + 32 * 3 * 3 * 10 + 10),
        ("CNN", (1, 28, 28), 16 * 25 + 16 + 16 * 32 * 25 + 32 + 32 * 2 * 2 * 10 + 10),
    ],
)
def test_networks_of_the_paper(name, shape, p):
    model = paper_network(name, shape, 10)
    assert count(model) == p and model(torch.rand(2, *shape)).shape == (2, 10)


def test_the_cnn_has_the_known_number_of_parameters():
    assert count(cnn((3, 32, 32), 10)) == 16_938


def test_unknown_networks_and_images_too_small_are_refused():
    with pytest.raises(ValueError, match="name='MLP_D' is unknown; allowed: 'MLP_A'"):
        paper_network("MLP_D", (8,), 10)
    with pytest.raises(ValueError, match="too small"):
        cnn((1, 12, 12), 10)


def test_the_autoencoder_encodes_without_dropout_and_stays_in_its_mode():
    model = Autoencoder(12, 3)
    one_way = 12 * 128 + 128 + 128 * 64 + 64
    assert count(model) == one_way + 64 * 3 + 3 + 3 * 64 + 64 + 64 * 128 + 128 + 128 * 12 + 12
    X = torch.rand(25, 3, 4)
    assert not torch.equal(model(X.flatten(1)), model(X.flatten(1)))  # dropout
    Z = model.encode(X, chunk=10)
    assert Z.shape == (25, 3) and torch.equal(Z, model.encode(X, chunk=10)) and model.encoder.training
    steps = model.encoder
    by_hand = steps[6](torch.relu(steps[3](torch.relu(steps[0](X.flatten(1))))))
    torch.testing.assert_close(Z, by_hand)
