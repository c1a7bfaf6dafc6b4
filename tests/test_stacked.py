"""Networks trained together are the networks trained alone."""

import copy
import math

import pytest
import torch
from torch import nn

from fullconformal.models import Autoencoder, cnn, mlp
from paper.recipe import Job, Recipe, hold_out, squared_errors, weights_only
from paper.stacked import train_stacked


def alone(factory, X, y, job, ridge, recipe, loss=None):
    """One network by torch.optim.Adam and a plain loop: the oracle."""
    torch.manual_seed(job.seed)
    model = factory().to(X.dtype)
    adam = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
    generator = torch.Generator().manual_seed(job.seed)
    loss = loss or nn.CrossEntropyLoss()
    best, best_state, waited = math.inf, None, 0
    for epoch in range(recipe.max_epochs):
        if recipe.cosine:
            adam.param_groups[0]["lr"] = recipe.learning_rate * (1 + math.cos(math.pi * epoch / recipe.max_epochs)) / 2
        for index in job.train[torch.randperm(len(job.train), generator=generator)].split(recipe.batch_size):
            adam.zero_grad()
            objective = loss(model(X[index]), y[index])
            for name, q in model.named_parameters():
                objective = objective + ridge.get(name, 0.0) / 2 * (q**2).sum()
            objective.backward()
            adam.step()
        if job.valid is None:
            best_state = copy.deepcopy(model.state_dict())
            continue
        with torch.no_grad():
            value = float(loss(model(X[job.valid]), y[job.valid]))
        waited = waited + 1
        if value < best:
            best, best_state, waited = value, copy.deepcopy(model.state_dict()), 0
        if waited >= recipe.patience:
            break
    model.load_state_dict(best_state)
    return model, epoch + 1, best


def compare(factory, X, y, jobs, ridge, recipe):
    together = train_stacked(factory, X, y, jobs, ridge, recipe)
    for job, found in zip(jobs, together, strict=True):
        model, epochs, loss = alone(factory, X[job.source], y, job, ridge, recipe)
        assert found.epochs == epochs
        if job.valid is not None:
            assert found.loss == pytest.approx(loss, rel=1e-8)
        for a, b in zip(found.model.parameters(), model.parameters(), strict=True):
            # Float64 rounding (1e-16 a step) through some hundred steps; Adam divides it by |g|, which is 1e-3 and more here.
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    return together


def bag(n=130, d=5, sources=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(sources, n, d, generator=generator).double()
    y = (X[0, :, 0] + 0.5 * torch.randn(n, generator=generator) > 0).long()
    return X, y


def test_seeds_folds_and_sources_end_where_they_would_alone():
    X, y = bag(sources=2)
    jobs = [
        Job(3, torch.arange(100), torch.arange(100, 130)),
        Job(4, torch.arange(30, 130), torch.arange(30), source=1),
        Job(5, torch.arange(77), torch.arange(90, 103)),  # fewer points: shorter epochs, a part of a batch
        Job(3, torch.arange(100)),  # no validation: all epochs
    ]
    recipe = Recipe(learning_rate=0.01, batch_size=20, max_epochs=12, patience=3)
    factory = lambda: mlp(5, (8, 4), 2)  # noqa: E731
    compare(factory, X, y, jobs, weights_only(factory(), 1e-2), recipe)


def test_networks_stop_one_by_one_and_keep_their_best():
    X, y = bag(n=80)
    y = y[
        torch.randperm(80, generator=torch.Generator().manual_seed(1))
    ]  # nothing to learn: all overfit, at different times
    jobs = [Job(seed, *hold_out(torch.arange(80), 0.2, seed)) for seed in range(5)]
    recipe = Recipe(learning_rate=0.03, batch_size=16, max_epochs=40, patience=4)
    found = compare(lambda: mlp(5, (10,), 2), X, y, jobs, {}, recipe)
    assert len({t.epochs for t in found}) > 1 and max(t.epochs for t in found) < 40


def test_the_learning_rate_follows_the_cosine():
    X, y = bag()
    compare(lambda: mlp(5, (), 2), X, y, [Job(0, torch.arange(130))], {}, Recipe(0.05, 25, 6, cosine=True))


def test_convolutions_are_stacked_too():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(1, 40, 1, 10, 10, generator=generator).double()
    y = torch.arange(40) % 3
    factory = lambda: cnn((1, 10, 10), 3, channels=(2, 3), kernel=3, pool=2, stride=1)  # noqa: E731
    jobs = [Job(seed, torch.arange(30), torch.arange(30, 40)) for seed in (0, 1)]
    compare(factory, X, y, jobs, weights_only(factory(), 1e-3), Recipe(0.01, 10, 3))


def test_a_network_does_not_depend_on_its_company():
    X, y = bag()
    X = X.float()
    jobs = [Job(seed, *hold_out(torch.arange(130), 0.2, seed)) for seed in range(3)]
    recipe = Recipe(batch_size=20, max_epochs=5)
    one = train_stacked(lambda: mlp(5, (8,), 2), X, y, jobs[1:2], {}, recipe)[0]
    many = train_stacked(lambda: mlp(5, (8,), 2), X, y, jobs, {}, recipe)[1]
    for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-5
        )  # float32: 30 steps of 1e-7, divided by gradients of 1e-2


def test_an_autoencoder_learns_to_give_back_its_inputs():
    generator = torch.Generator().manual_seed(0)
    latent = torch.rand(300, 2, generator=generator)
    X = latent @ torch.rand(2, 12, generator=generator)
    jobs = [Job(seed, *hold_out(torch.arange(300), 0.2, seed)) for seed in range(2)]
    found = train_stacked(
        lambda: Autoencoder(12, 2, (16,), 0.1), X[None], X, jobs, {}, Recipe(1e-2, 30, 40), squared_errors
    )
    assert all(t.loss < 0.2 * float(X.var()) for t in found) and not found[0].model.training


def test_the_penalty_of_the_paper_leaves_biases_alone():
    model = mlp(5, (3,), 2)
    assert weights_only(model, 1e-5) == {"0.weight": 2e-5, "2.weight": 2e-5}


def test_bad_input_is_refused():
    X, y = bag()
    with pytest.raises(ValueError, match=r"it must be \(S, 130, ...\)"):
        train_stacked(lambda: mlp(5, (), 2), X[0], y, [Job(0, torch.arange(10))], {})
    with pytest.raises(ValueError, match="not finite"):
        train_stacked(lambda: mlp(5, (), 2), X * torch.inf, y, [Job(0, torch.arange(10))], {}, Recipe(max_epochs=1))
    assert train_stacked(lambda: mlp(5, (), 2), X, y, [], {}) == []
