"""The problem: a model, one objective, the training bag; its losses, gradients and Jacobians at the fitted θ.

    F(θ) = Σ_j ℓ(y_j, f(x_j; θ)) + ½ Σ_k Λ_k θ_k²         ℓ the loss of the outputs f

The model is read as a *prefix* followed by a *tail* of dense layers. For a dense layer the Jacobian of the logits is an outer
product, ∂f/∂W = T ⊗ a with T = ∂f/∂z and a the layer's input, and is never written out. The trainable parameters of the
prefix get theirs written out by `torch.func`, one row a logit. The flat parameter vector is
[prefix | layer 1 | layer 2 | …], a layer being its (o, i+1) matrix with the bias as the last column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fullconformal.losses import SOFTMAX, Loss
from fullconformal.problem.chain import Trace, activate, read_model, with_one
from fullconformal.problem.rows import Rows, join, summed
from fullconformal.runtime.numerics import full_precision
from fullconformal.runtime.replicas import replica
from fullconformal.storage import expect, require, savable
from fullconformal.storage.modules import check_activations

# Points that go through the model together.
CHUNK = {"cpu": 1024, "cuda": 4096}


class Block(NamedTuple):
    """Where a parameter block lies in the flat vector: o×i numbers from `start`; `layer` is its place in the tail, −1 the prefix."""

    layer: int
    start: int
    o: int
    i: int

    @property
    def stop(self) -> int:
        return self.start + self.o * self.i


@savable
class Problem:
    """A model with its objective and training bag.

    Parameters
    ----------
    model : nn.Module
        Maps (k, ...) inputs to (k, C) logits; in eval mode. Parameters with ``requires_grad=False`` are constants.
    X, y : Tensor
        Inputs (n, ...) and label indices (n,), of the model's device and dtype.
    penalty : float or mapping
        Λ of the sum form, for all parameters or by parameter name (absent names: 0).
    chunk : int
        Points that go through the model together; by default more on a GPU.
    loss : Loss
        ℓ of the model's outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        X: Tensor,
        y: Tensor,
        penalty: float | Mapping[str, float] = 0.0,
        chunk: int | None = None,
        loss: Loss = SOFTMAX,
    ):
        self.model, self.X, self.y, self.n, self.loss = model, X, y, len(y), loss
        self.prefix, self.tail = read_model(model, X)
        named = dict(model.named_parameters())
        names = {id(q): name for name, q in named.items()}
        in_tail = {id(q) for layer in self.tail for q in layer.parameters}
        self.prefix_names = [name for name, q in named.items() if q.requires_grad and id(q) not in in_tail]
        self.tail_names = [[names[id(q)] for q in layer.parameters] for layer in self.tail if layer.trainable]
        self.params = {name: q.detach() for name, q in named.items() if q.requires_grad}

        self.blocks: list[Block] = []
        width = sum(self.params[name].numel() for name in self.prefix_names)
        if width:
            self.blocks.append(Block(-1, 0, width, 1))
        for k, layer in enumerate(self.tail):
            if layer.trainable:
                o, i = layer.linear.weight.shape
                start = self.blocks[-1].stop if self.blocks else 0
                self.blocks.append(Block(k, start, o, i + (layer.linear.bias is not None)))
        self.chunk = chunk or CHUNK["cuda" if X.is_cuda else "cpu"]
        by_name = penalty if isinstance(penalty, Mapping) else dict.fromkeys(self.params, float(penalty))
        self.penalty = self.pack({n: torch.full_like(q, by_name.get(n, 0.0)) for n, q in self.params.items()})

    # Sizes ------------------------------------------------------------------------------------------------------------

    @property
    def p(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    @cached_property
    def size(self) -> float:
        """Multiplications a point takes on its way through a chain of dense layers; infinite for others, which may take any number."""
        dense = self.tail and not list(self.prefix.children())
        return sum(layer.linear.weight.numel() for layer in self.tail) if dense else math.inf

    @cached_property
    def n_classes(self) -> int:
        return self.tail[-1].linear.out_features if self.tail else self.logits(self.X[:1]).shape[1]

    @property
    def theta(self) -> Tensor:
        return self.pack(self.params)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the logits are an affine function of the trainable parameters."""
        return len(self.blocks) == 1 and self.blocks[0].layer >= 0 and all(
            not len(layer.activation) for layer in self.tail[self.blocks[0].layer :]
        )  # fmt: skip

    # Parameters as one vector -----------------------------------------------------------------------------------------

    def pack(self, params: Mapping[str, Tensor]) -> Tensor:
        """Flat vector (p,) from tensors by name."""
        parts = [params[name].reshape(-1) for name in self.prefix_names]
        for names in self.tail_names:
            matrix = torch.cat([params[name].reshape(len(params[name]), -1) for name in names], dim=1)
            parts.append(matrix.reshape(-1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """Tensors by name from a flat vector."""
        out, start = {}, 0
        for name in self.prefix_names:
            size = self.params[name].numel()
            out[name] = theta[start : start + size].view_as(self.params[name])
            start += size
        for names, block in zip(self.tail_names, (b for b in self.blocks if b.layer >= 0), strict=True):
            matrix = theta[block.start : block.stop].view(block.o, block.i)
            out[names[0]] = matrix[:, : self.params[names[0]].shape[1]]
            if len(names) == 2:
                out[names[1]] = matrix[:, -1]
        return out

    @torch.no_grad()
    def assign(self, theta: Tensor) -> None:
        """Make θ the model's parameters, in place."""
        for name, value in self.unpack(theta).items():
            self.params[name].copy_(value)

    def gauge(self) -> Tensor:
        """Index sets (g, C) of the flat vector along which the loss is invariant and nothing is penalised.

        Adding one number to a column of the softmax layer's weights moves all logits alike. Where that column carries no
        penalty the Hessian is singular along it, and every gradient is orthogonal to it.
        """
        trained_last = bool(self.tail) and bool(self.blocks) and self.blocks[-1].layer == len(self.tail) - 1
        if not self.loss.invariant or not trained_last:
            return torch.empty(0, 0, dtype=torch.long)
        _, start, o, i = self.blocks[-1]
        index = (start + torch.arange(o * i)).view(o, i)
        free = self.penalty[start:].view(o, i).amax(0).cpu() == 0
        return index[:, free].T

    def batches(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The bag, so many points at a time; all of them as they are where they are no more."""
        if self.n <= chunk:
            return iter([(self.X, self.y)])
        return zip(self.X.split(chunk), self.y.split(chunk), strict=True)

    # At the current parameters ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, X: Tensor) -> Tensor:
        """Logits (k, C)."""
        try:
            with full_precision():
                return torch.cat([self.model(part) for part in X.split(self.chunk)])
        except IndexError as error:
            raise ValueError("X holds a code that no Embedding of the network has; raise num_embeddings.") from error

    def logits_at(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits (k, C) at other parameters; differentiable, and fit for `torch.func`."""
        out: Tensor = functional_call(replica(self.model), self.unpack(theta), (x,))
        return out

    def value(self, theta: Tensor) -> Tensor:
        """F(θ)."""
        total = (self.penalty * theta**2).sum() / 2
        for X, y in self.batches(self.chunk):
            total = total + self.loss.value(self.logits_at(theta, X), y).sum()
        return total

    @torch.no_grad()
    def gradient(self, rows: list[Rows] | None = None) -> Tensor:
        """∇F(θ), (p,); from the training points' gradients where they are known."""
        total = self.penalty * self.theta
        if rows is not None:
            return total + summed(rows)
        chunk = min(self.chunk, 512) if self.prefix_names else self.chunk  # a pass back keeps all it met on its way
        for X, y in self.batches(chunk):
            if self.prefix_names:  # whose rows, one a point, may be large
                pull = vjp(partial(self.logits_at, x=X), self.theta)[1]
                total = total + pull(self.loss.residual(self.logits(X), y))[0]
            else:
                total = total + summed(self.gradients(X, y))
        return total

    def gradients(self, X: Tensor, y: Tensor) -> list[Rows]:
        """Per-point gradients ∇ℓ(y, f(x)) as rows (k, o) ⊗ (k, i)."""
        return self.logits_and_gradients(X, y)[1]

    @torch.no_grad()
    def logits_and_gradients(self, X: Tensor, y: Tensor) -> tuple[Tensor, list[Rows]]:
        """Logits (k, C) and per-point gradients from one pass."""
        if len(X) > self.chunk:
            pairs = zip(X.split(self.chunk), y.split(self.chunk), strict=True)
            logits, parts = zip(*(self.logits_and_gradients(*part) for part in pairs), strict=True)
            return torch.cat(logits), join(list(parts))
        trace = self.trace(X)
        delta, rows = self.loss.residual(trace.logits, y), list[Rows]()
        first = [Rows(self.prefix_rows(X, delta[:, None])[:, 0], None)] if self.prefix_names else []
        for k in range(len(self.tail) - 1, -1, -1):
            if self.tail[k].trainable:
                rows.append(Rows(delta, trace.inputs[k]))
            if k:
                delta = delta @ self.tail[k].linear.weight
                delta = delta * trace.slopes[k - 1] if len(self.tail[k - 1].activation) else delta
        return trace.logits, first + rows[::-1]

    @torch.no_grad()
    def jacobian(self, X: Tensor) -> tuple[Tensor, list[Rows]]:
        """Logits (k, C) and their Jacobian as rows (k, C, o) ⊗ (k, i)."""
        out: list[Rows] = []
        if self.prefix_names:
            eye = torch.eye(self.n_classes, dtype=X.dtype, device=X.device)
            parts = [self.prefix_rows(part, eye.expand(len(part), -1, -1)) for part in X.split(self.chunk)]
            out.append(Rows(torch.cat(parts), None))
        if not self.tail:
            return self.logits(X), out
        trace, rows = self.trace(X), []
        T = torch.eye(self.n_classes, dtype=X.dtype, device=X.device)  # one for all points, up to the last activation
        for k in range(len(self.tail) - 1, -1, -1):
            if self.tail[k].trainable:
                rows.append(Rows(T.expand(len(X), -1, -1), trace.inputs[k]))
            if k:
                T = T @ self.tail[k].linear.weight
                T = T * trace.slopes[k - 1][:, None, :] if len(self.tail[k - 1].activation) else T
        return trace.logits, out + rows[::-1]

    @torch.no_grad()
    def trace(self, X: Tensor, second: bool = False, stop: int | None = None) -> Trace:
        """One pass through prefix and tail, or its layers before `stop`, with φ″ where `second` is set."""
        inputs, slopes, bends = list[Tensor](), list[Tensor](), list[Tensor | None]()
        with full_precision():
            a = self.prefix(X)
            for layer in self.tail[:stop]:
                inputs.append(with_one(layer, a))
                a, slope, bend = activate(layer, layer.linear(a), second)
                slopes.append(slope)
                bends.append(bend)
        return Trace(inputs, slopes, bends, a)

    def prefix_rows(self, X: Tensor, weights: Tensor) -> Tensor:
        """Σ_c weights[·, r, c] ∂f_c/∂(prefix parameters), (k, R, width), written out, from weights (k, R, C)."""
        model, chosen = replica(self.model), {n: self.params[n] for n in self.prefix_names}
        rest = {n: q for n, q in self.params.items() if n not in chosen}

        def rows(x: Tensor, w: Tensor) -> dict[str, Tensor]:
            pull = vjp(lambda params: functional_call(model, {**params, **rest}, (x[None],))[0], chosen)[1]
            out: dict[str, Tensor] = vmap(pull)(w)[0]
            return out

        with full_precision():
            parts = vmap(rows)(X, weights)
        return torch.cat([parts[n].flatten(2) for n in self.prefix_names], dim=2)

    # Saved ------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Model, bag, loss and penalty; the penalty is one number a parameter tensor."""
        penalty = {name: float(part.reshape(-1)[0]) for name, part in self.unpack(self.penalty).items()}
        kept = {"model": self.model, "X": self.X, "y": self.y, "penalty": penalty, "chunk": self.chunk}
        return kept | {"loss": self.loss}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The problem again, at the parameters it was kept at."""
        X, y, chunk = expect(state["X"], Tensor), expect(state["y"], Tensor), expect(state["chunk"], int)
        penalty = {expect(name, str): float(expect(value, int, float)) for name, value in state["penalty"].items()}
        # Labels (n,), or numbers (n, C).
        targets = y.ndim == (2 if y.is_floating_point() else 1) and bool(y.isfinite().all())
        require(len(X) == len(y) > 0 and targets and bool(X.isfinite().all()), "training points")
        require(1 <= chunk <= 2**20 and all(0 <= value < math.inf for value in penalty.values()), "penalty")
        model = expect(state["model"], nn.Module)
        largest = check_activations(model, tuple(X.shape[1:]), min(chunk, len(X)), X.numel())
        # No more at a time than make a quarter of a billion numbers, however many objects are predicted together.
        chunk = max(1, min(chunk, 2**28 // max(largest, 1)))
        problem = cls(model, X, y, penalty, chunk, expect(state["loss"], Loss))
        require(set(problem.params) <= set(penalty), "penalty")
        return problem
