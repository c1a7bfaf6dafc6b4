"""Many networks of one architecture trained at once: seeds and folds as one more axis of every tensor.

A small network leaves most of a machine idle. Here the parameters of B networks are the rows of one matrix (B, p), a step is
one `torch.func.vmap` over them, and on CUDA one recorded graph. Each network has its own points, batches, validation points
and early stopping, all from its own seed, and ends where it would have ended alone, but for rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fullconformal.losses import NotFinite
from paper.recipe import Job, Loss, Progress, Recipe, Trained, cross_entropies


def train_stacked(
    factory: Callable[[], nn.Module],
    X: Tensor,
    y: Tensor,
    jobs: Sequence[Job],
    ridge: Mapping[str, float],
    recipe: Recipe | None = None,
    loss: Loss = cross_entropies,
    progress: Progress | None = None,
) -> list[Trained]:
    """Train one network a job, all at once, on the device of X.

    Parameters
    ----------
    factory : callable
        Makes the network; called once a job, with torch's generator seeded by the job's seed.
    X : Tensor (S, n, ...)
        Inputs, in S versions (another autoencoder a seed, say); one version is ``X[None]``.
    y : Tensor (n, ...)
        Labels; for an autoencoder its inputs.
    jobs : sequence of Job
    ridge : mapping
        The objective is the mean loss plus ½ Σ ridge[name] θ²; absent names: 0.
    recipe : Recipe, optional
    loss : callable
        (outputs, targets) of k points to k numbers.
    progress : callable, optional
        Told (epochs done, epochs at most).
    """
    recipe = recipe or Recipe()
    if not jobs:
        return []
    if X.ndim < 3 or X.shape[1] != len(y):
        raise ValueError(f"X has shape {tuple(X.shape)}; it must be (S, {len(y)}, ...): S versions of the inputs of y.")
    stack = _Stack(factory, X, y, jobs, ridge, recipe, loss)
    for epoch in range(recipe.max_epochs):
        if not stack.epoch(epoch):
            break
        if progress is not None:
            progress(epoch + 1, recipe.max_epochs)
    if progress is not None:
        progress(recipe.max_epochs, recipe.max_epochs)
    return stack.results()


class _Stack:
    """The networks still in training as rows of one matrix, and the best parameters of all."""

    def __init__(
        self, factory: Callable[[], nn.Module], X: Tensor, y: Tensor, jobs: Sequence[Job], ridge: Mapping[str, float],
        recipe: Recipe, loss: Loss,
    ):  # fmt: skip
        self.X, self.y, self.jobs, self.recipe, self.loss = X, y, list(jobs), recipe, loss
        self.models = [_seeded(factory, job.seed).to(device=X.device, dtype=X.dtype) for job in jobs]
        self.skeleton = copy.deepcopy(self.models[0])
        # Stacked convolutions become grouped ones, which take three times as long as one network after the other.
        self.convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in self.skeleton.modules())
        self.shapes = {name: q.shape for name, q in self.skeleton.named_parameters() if q.requires_grad}
        self.ridge = torch.cat([X.new_full((math.prod(s),), ridge.get(n, 0.0)) for n, s in self.shapes.items()])
        self.generators = [torch.Generator().manual_seed(job.seed) for job in jobs]

        rows = [
            torch.cat([dict(m.named_parameters())[n].detach().reshape(-1) for n in self.shapes]) for m in self.models
        ]
        self.best = torch.stack(rows)  # (B, p), of all networks
        self.best_loss = [math.inf] * len(jobs)
        self.epochs, self.waited, self.stopped = ([0] * len(jobs) for _ in range(3))
        self.rows = list(range(len(jobs)))  # the network in each row of the stack
        self._stack(self.best.clone(), None)

    # One step of all networks -----------------------------------------------------------------------------------------

    def _stack(self, theta: Tensor, kept: Tensor | None) -> None:
        """Make (B, p) the parameters in training; Adam's moments start anew, or are those of the rows kept."""
        B, new = len(theta), theta.new_zeros
        if kept is None:
            self.adam = [new(theta.shape), new(theta.shape), new(B, 1, dtype=torch.float64)]
        else:
            self.adam = [part[kept] for part in self.adam]
        self.theta = theta.clone()
        self.source = torch.tensor([self.jobs[b].source for b in self.rows], device=self.X.device)
        self.steps = max(math.ceil(len(self.jobs[b].train) / self.recipe.batch_size) for b in self.rows)
        self.order = torch.zeros(self.steps, B, self.recipe.batch_size, dtype=torch.long, device=self.X.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.X.device)
        self.rate = new(())
        self.graph: torch.cuda.CUDAGraph | None = None

    def _params(self, theta: Tensor) -> dict[str, Tensor]:
        """Tensors by name from one row (p,)."""
        parts = theta.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _mean_loss(self, theta: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        """Mean loss of one network on the points that are real, (k,) of booleans."""
        values = self.loss(functional_call(self.skeleton, self._params(theta), (x,)), y)
        return (values * real).sum() / real.sum().clamp_min(1)

    def _each(self, one: Callable[..., Tensor], x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        """What a function of one network and its points gives for every network."""
        if self.convolves:
            return torch.stack([one(*row) for row in zip(self.theta, x, y, real, strict=True)])
        together: Tensor = vmap(one, randomness="different")(self.theta, x, y, real)
        return together

    def _step(self) -> None:
        """One batch of every network; Adam in place. A network whose epoch is over stays as it is."""
        index = self.order.index_select(0, self.at)[0]
        real, index = index >= 0, index.clamp_min(0)
        x, y = self.X[self.source[:, None], index], self.y[index]
        g = self._each(grad(self._mean_loss), x, y, real) + self.ridge * self.theta
        m, v, t = self.adam
        moves = real[:, :1]
        t += moves
        m += torch.where(moves, (g - m) * 0.1, 0.0)
        v += torch.where(moves, (g * g - v) * 0.001, 0.0)
        first, second = ((1 - beta ** t.clamp_min(1)).to(g.dtype) for beta in (0.9, 0.999))
        step = (m / first) / ((v / second).sqrt() + 1e-8)
        self.theta -= torch.where(moves, self.rate * step, 0.0)
        self.at += 1

    def _advance(self) -> None:
        """A step, on CUDA by replaying the recorded one: small kernels cost less than their launches."""
        if self.X.device.type != "cuda":
            self._step()
            return
        if self.graph is None:
            self.graph = self._record()
        self.graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        """The step as a graph. Warming up takes steps, so what they changed is put back."""
        state = [self.theta, *self.adam, self.at]
        before = [part.clone() for part in state]
        side = torch.cuda.Stream(self.X.device)
        side.wait_stream(torch.cuda.current_stream(self.X.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self.at.zero_()
                self._step()
        torch.cuda.current_stream(self.X.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for part, old in zip(state, before, strict=True):
            part.copy_(old)
        return graph

    # One epoch --------------------------------------------------------------------------------------------------------

    def epoch(self, epoch: int) -> bool:
        """Train everything by one epoch; whether anything is left to train."""
        recipe = self.recipe
        self.skeleton.train()
        self.order.copy_(torch.stack([self._shuffled(b) for b in self.rows], 1))
        self.at.zero_()
        cosine = (1 + math.cos(math.pi * epoch / recipe.max_epochs)) / 2 if recipe.cosine else 1.0
        self.rate.fill_(recipe.learning_rate * cosine)
        for _ in range(self.steps):
            self._advance()
        if not bool(torch.isfinite(self.theta).all()):
            raise NotFinite("the training loss is not finite; standardise the features or lower the learning rate")
        self._judge(epoch)
        return not all(self.stopped)

    def _shuffled(self, b: int) -> Tensor:
        """The batches (steps, batch_size) of one network in this epoch; −1 where there is no point."""
        train, size = self.jobs[b].train, self.recipe.batch_size
        out = torch.full((self.steps * size,), -1)
        out[: len(train)] = train.cpu()[torch.randperm(len(train), generator=self.generators[b])]
        return out.view(self.steps, size)

    def _judge(self, epoch: int) -> None:
        """Keep the parameters that are the best so far, stop the networks that have waited long enough."""
        self.skeleton.eval()
        for row, (b, value) in enumerate(zip(self.rows, self._validation_losses(), strict=True)):
            if self.stopped[b]:
                continue
            self.epochs[b] = epoch + 1
            held = self.jobs[b].valid is not None
            if not held or value < self.best_loss[b]:
                self.best[b], self.best_loss[b], self.waited[b] = self.theta[row], value, 0
            else:
                self.waited[b] += 1
            self.stopped[b] = self.waited[b] >= self.recipe.patience
        kept = [row for row, b in enumerate(self.rows) if not self.stopped[b]]
        # A graph is recorded anew for every size, so on CUDA networks that have stopped go on in vain until half of them have.
        if len(kept) < len(self.rows) * (0.5 if self.X.device.type == "cuda" else 1.0):
            self.rows = [self.rows[row] for row in kept]
            if kept:
                chosen = torch.tensor(kept, device=self.X.device)
                self._stack(self.theta[chosen], chosen)

    def _validation_losses(self) -> list[float]:
        """Mean loss of each network in training on its validation points; NaN where there are none."""
        held = [self.jobs[b].valid for b in self.rows]
        most = max((len(v) for v in held if v is not None), default=0)
        if most == 0:
            return [math.nan] * len(held)
        index = torch.full((len(held), most), -1)
        for row, valid in enumerate(held):
            if valid is not None:
                index[row, : len(valid)] = valid
        total = torch.zeros(len(held), dtype=torch.float64, device=self.X.device)
        number = total.clone()
        with torch.no_grad():
            for part in index.to(self.X.device).split(2000, 1):
                real, at = part >= 0, part.clamp_min(0)
                values = self._each(self._mean_loss, self.X[self.source[:, None], at], self.y[at], real)
                total += values.double() * real.sum(1)
                number += real.sum(1)
        return [float(value) for value in total / number]

    def results(self) -> list[Trained]:
        """The networks with their best parameters, in eval mode."""
        for model, row in zip(self.models, self.best, strict=True):
            named = dict(model.named_parameters())
            with torch.no_grad():
                for name, value in self._params(row).items():
                    named[name].copy_(value)
        found = zip(self.models, self.epochs, self.best_loss, strict=True)
        return [Trained(model.eval(), epochs, loss) for model, epochs, loss in found]


def _seeded(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose weights are a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()
