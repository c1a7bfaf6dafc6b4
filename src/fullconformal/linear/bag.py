"""A bag of points under L2-penalised logistic regression, and its objective's derivatives for many changed bags at once.

Logits are relative to class 0, f = (0, z) with z = Θᵀx of K = C − 1 values. For two classes that is scikit-learn's
parametrisation. For more it is softmax regression with its gauge freedom (the same number added to every logit) taken out:
at the minimum the C weight rows sum to zero, and the penalty of the centred rows is Λ ⊗ (I − 11ᵀ/C). In sum form:

    F(Θ) = Σ_j ℓ(y_j, z_j) + ½ Σ_j Λ_j Θ_jᵀ T Θ_j          T = 1 (two classes), I − 11ᵀ/C (more)

A model that makes its logits in another way has another T (`linear.from_problem`).

Arrays hold one bag per column, last: Θ (d, K, B), logits (n, K, B); p = d·K. Symmetric K × K matrices are packed (…, Q, B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullconformal.linear.products import Products
from fullconformal.losses.relative import margin, residual
from fullconformal.runtime.numerics import LITTLE, blas_alone, threads
from fullconformal.runtime.tasks import Progress

if TYPE_CHECKING:
    from fullconformal.linear.hessian import Base
    from fullconformal.linear.newton import Minimum
    from fullconformal.linear.reference import Energies, Reference

EPS = torch.finfo(torch.float64).eps
FAR = 1e3  # times the training points' largest value, beyond which an object rather than the penalty is to blame


class NoMinimiser(ValueError):
    """No minimiser can be found: the objective's infimum lies at infinity, or too far out for float64."""


@dataclass(frozen=True)
class Change:
    """What each column's bag adds to and leaves out of Z: point x (d, B) with label y (B,), training index removed (B,).

    ``row`` (B,) says which object to be predicted x is, for errors. ``factors`` (d, B) multiply the bag's penalties: those of columns
    divided by s are Λs², up to the weights' units.
    """

    x: Tensor
    y: Tensor
    removed: Tensor | None = None
    row: Tensor | None = None
    factors: Tensor | None = None

    def __getitem__(self, columns: Tensor | slice) -> Change:
        """The changes of some columns."""
        removed, row = (None if part is None else part[columns] for part in (self.removed, self.row))
        factors = None if self.factors is None else self.factors[:, columns]
        return Change(self.x[:, columns], self.y[columns], removed, row, factors)


@dataclass(frozen=True)
class LinearBag:
    """Design matrix X (n, d) float64, labels y (n,) in 0 … C − 1, penalty Λ (d,), zero for a free intercept.

    ``start`` (d, K) may hold weights near those of the fit on Z, ``names()`` (d,) what errors call the features, ``between`` another
    matrix (K, K) of the penalty between classes, ``units`` (2, d) the centre and scale of features that were given as centre + scale·x.
    """

    X: Tensor
    y: Tensor
    n_classes: int
    penalty: Tensor
    start: Tensor | None = None
    names: Callable[[], Sequence[str]] | None = None
    between: Tensor | None = None
    units: Tensor | None = None

    def __post_init__(self) -> None:
        if self.X.dtype != torch.float64:
            raise ValueError(f"X has dtype {self.X.dtype}; the bounds need float64: pass X.double()")

    @property
    def K(self) -> int:
        """Logits per point."""
        return self.n_classes - 1

    @cached_property
    def coupling(self) -> Tensor:
        """The penalty's matrix T (K, K) between classes."""
        if self.between is not None:
            return self.between
        T = torch.eye(self.K, dtype=self.X.dtype, device=self.X.device)
        return T if self.K == 1 else T - 1.0 / self.n_classes

    @cached_property
    def penalty_matrix(self) -> Tensor:
        """Λ ⊗ T (p, p)."""
        return torch.kron(torch.diag(self.penalty), self.coupling)

    @cached_property
    def fit(self) -> Minimum:
        """The fit on Z as Newton's method leaves it, its error not bounded."""
        from fullconformal.linear.newton import fit

        return fit(self)

    @contextmanager
    def few_threads(self) -> Iterator[None]:
        """One thread for fits of a small bag: threads of NumPy and torch would wait for one another."""
        n, d = self.X.shape
        with blas_alone((n, d)), threads(1 if d * max(n, d) <= LITTLE else torch.get_num_threads()):
            yield

    @cached_property
    def base(self) -> Base:
        """The fit on Z with its Hessian and the bound on its error, which every other fit starts from."""
        from fullconformal.linear.newton import base_fit

        return base_fit(self)

    @cached_property
    def reference(self) -> Reference:
        """The fit on Z point by point, from which bounds start."""
        from fullconformal.linear.reference import reference

        return reference(self)

    @cached_property
    def energies(self) -> Energies:
        """Bounds on leverages where probabilities have moved far."""
        from fullconformal.linear.reference import Energies

        return Energies(self)

    @cached_property
    def largest(self) -> Tensor:
        """The largest |x_ij| of each feature (d,)."""
        return self.X.abs().amax(0)

    @cached_property
    def free(self) -> tuple[bool, bool]:
        """Whether a feature that varies, and whether a constant one (an intercept), is not penalised."""
        columns = self.X[:, self.penalty == 0]
        constant = (columns == columns[0]).all(0)
        return not bool(constant.all()), bool((constant & (columns[0] != 0)).any())

    @property
    def free_intercept(self) -> bool:
        """Whether a bag without one of the classes has no minimiser."""
        return self.free[1]

    def no_minimiser(self, change: Change | None) -> NoMinimiser:
        """The error that says why no fit of changed bags was found: there is one where all but the intercept is penalised."""
        if change is not None and (told := self.far_object(change)):
            return NoMinimiser(told)
        if self.free[0]:
            return NoMinimiser(
                "the logistic regression has no minimiser that can be found: without an l2 penalty there is none where features "
                "separate the classes of a bag (the points with one added or left out), no single one where they depend on each "
                "other linearly. Set l2 > 0 (for scikit-learn's LogisticRegression a finite C), or drop such features."
            )
        if self.free_intercept and len(self.y.unique()) < self.n_classes:
            return NoMinimiser("the logistic regression has no minimiser: a class is missing. Give each class a point.")
        if told := self._wild_feature():
            return NoMinimiser(told)
        return NoMinimiser(
            "the logistic regression has a minimiser too far out for float64: the features separate the classes of a bag (the points "
            f"with one added or left out), or nearly so, and the penalty n·l2 = {float(self.penalty.max()):.2g} is too small to hold "
            "the weights. Set a larger l2 (for scikit-learn's LogisticRegression a smaller C)."
        )

    def far_object(self, change: Change) -> str:
        """Which object lies farthest beyond the training points, in words; empty where none does."""
        distance = change.x.abs() / self.largest.clamp(min=1.0)[:, None]
        j, column = divmod(int(distance.argmax()), distance.shape[1])
        if distance[j, column] <= FAR:
            return ""
        name = "an object to be predicted"
        if change.row is not None:
            name = f"object {int(change.row[column])} of those to be predicted (counted from 0)"
        return (
            f"{name} lies too far from the training points for float64: its {self._name(j)} is "
            f"{float(self._given(j, change.x[j, column])):.3g}, in the training points at most "
            f"{float(self._given(j, self.X[:, j]).abs().max()):.3g} in size. "
            "Look for a wrong unit or a placeholder, and leave such objects out or clip them."
        )

    def _name(self, j: int) -> str:
        """A feature in words."""
        return f"feature {j} (counted from 0, as the model sees it)" if self.names is None else self.names()[j]

    def _given(self, j: int, values: Tensor) -> Tensor:
        """Values of a feature as they were given."""
        return values if self.units is None else self.units[0, j] + self.units[1, j] * values

    def _wild_feature(self) -> str:
        """Which feature reaches far beyond the distances between its values, in words; empty where none does."""
        centre = self.X.median(0).values
        apart = (self.X - centre).abs()
        typical, most = apart.median(0).values, apart.amax(0)
        # About the mean without the largest.
        rest = ((apart / most.clamp(min=EPS)).sum(0) - 1).clamp(min=0.0) * most / len(apart)
        typical = torch.where(typical > 0, typical, rest)  # of few values that are not the usual one
        # What never varies but once is compared with one, in the units it was given in.
        one = torch.ones_like(typical) if self.units is None else 1 / self.units[1]
        distance = self.largest / torch.where(typical > 0, typical, one)
        j = int(distance.argmax())
        if distance[j] <= FAR:
            return ""
        return (
            f"the logistic regression cannot be fitted in float64: {self._name(j)} is "
            f"{float(self._given(j, self.X[(i := int(self.X[:, j].abs().argmax())), j])):.3g} at training point {i}, while half its values "
            f"lie within {float(typical[j] * (1 if self.units is None else self.units[1, j])):.2g} of "
            f"{float(self._given(j, centre[j])):.2g}. Look for a wrong unit or a placeholder, or standardise the features "
            f"(StandardScaler in a Pipeline); else set a larger l2 (for scikit-learn's LogisticRegression a smaller C)."
        )

    def columns(self, dtype: torch.dtype) -> Tensor:
        """Xᵀ (d, n) in a precision, laid out so that products with many bags' weights and residuals take half the time."""
        if dtype not in self._columns:
            self._columns[dtype] = self.X.T.to(dtype).contiguous()
        return self._columns[dtype]

    @cached_property
    def _columns(self) -> dict[torch.dtype, Tensor]:
        return {}

    @cached_property
    def products(self) -> Products:
        """Sums of products of the training points' features."""
        return Products(self.X.T)


def logits(bag: LinearBag, theta: Tensor) -> Tensor:
    """Logits (n, K, B) of the training points at Θ (d, K, B)."""
    d, K, B = theta.shape
    if B == 1:  # each class by itself in memory, whose sums over classes and products are twice as fast
        return (theta[:, :, 0].T @ bag.X.T).T[:, :, None]
    return (bag.X @ theta.reshape(d, K * B)).view(-1, K, B)


def at_points(x: Tensor, theta: Tensor) -> Tensor:
    """Logits (K, B) of one point x (d, B) per column."""
    return (x[:, None] * theta).sum(0)  # in a twentieth of the time of einsum


def objective(bag: LinearBag, change: Change | None, theta: Tensor, z: Tensor) -> Tensor:
    """F (B,) at Θ (d, K, B), given the logits (n, K, B) of the training points there."""
    losses = without(change, softplus(margin(z, bag.y[:, None])))
    F = losses.sum(0) + 0.5 * (theta * pulled(bag, change, theta)).sum((0, 1))
    return F if change is None else F + softplus(margin(at_points(change.x, theta), change.y))


def without(change: Change | None, parts: Tensor) -> Tensor:
    """Parts (n, ..., B) of sums over the training points, in place: zero for the points that columns leave out."""
    if change is not None and change.removed is not None:
        parts[change.removed, ..., torch.arange(len(change.y), device=parts.device)] = 0.0
    return parts


def coupled(bag: LinearBag, theta: Tensor) -> Tensor:
    """TΘ (d, K, B)."""
    T = bag.coupling.to(theta.dtype)
    return T * theta if bag.K == 1 else torch.einsum("kl,dlb->dkb", T, theta)


def pulled(bag: LinearBag, change: Change | None, theta: Tensor) -> Tensor:
    """ΛTΘ (d, K, B), the gradient of the columns' penalties at Θ."""
    own = None if change is None else change.factors
    penalty = bag.penalty[:, None, None] if own is None else (bag.penalty[:, None] * own)[:, None]
    return penalty.to(theta.dtype) * coupled(bag, theta)


def gradient(bag: LinearBag, change: Change | None, theta: Tensor, r: Tensor) -> Tensor:
    """∇F (d, K, B) given the residuals (n, K, B) of the training points, of which those of removed points are set to zero."""
    d, K, B = theta.shape
    flat = without(change, r).view(-1, K * B)
    G = (flat.T @ bag.X).T.reshape(d, K, B) if B == 1 else (bag.X.T @ flat).view(d, K, B)
    G += pulled(bag, change, theta)
    if change is not None:
        G += change.x[:, None, :] * residual(at_points(change.x, theta), change.y)
    return G


def residuals(bag: LinearBag, theta: Tensor) -> Tensor:
    """Residuals (n, K, B) of the training points at Θ (d, K, B)."""
    return residual(logits(bag, theta), bag.y[:, None])


FloatArray = npt.NDArray[np.float64]


Counted = tuple[Tensor, Tensor]  # the same of some candidates, (B,) each


def as_objects(X: Tensor, factors: Tensor | None = None) -> Change:
    """Objects X (m, d) as additions with some label, and factors (m, d) of their penalties."""
    row = torch.arange(len(X), device=X.device)
    return Change(
        X.T.contiguous(), torch.zeros_like(row), None, row, None if factors is None else factors.T.contiguous()
    )


def with_labels(bag: LinearBag, objects: Change) -> Change:
    """Each of the C candidates of objects with some label each, label fastest, as additions to the bag."""
    m, C = len(objects.y), bag.n_classes
    every = objects[torch.arange(m, device=objects.y.device).repeat_interleave(C)]
    return replace(every, y=torch.arange(C, device=objects.y.device).repeat(m))


def chunks(bag: LinearBag, columns: Tensor, memory: int) -> Iterator[Tensor]:
    """Columns in chunks that fit the memory.

    A candidate is granted twelve arrays the size of the packed K × K matrices of all training points, and four Hessians.
    """
    (n, d), K = bag.X.shape, bag.K
    width = max(1, memory // (8 * (12 * n * (K * (K + 1) // 2) + 4 * (d * K) ** 2)))
    for start in range(0, len(columns), width):
        yield columns[start : start + width]


def comparison(weight: Tensor | FloatArray | None, change: Change) -> Tensor | None:
    """Weight (n, B) of each training point against each candidate, from that against each label (n, C)."""
    return None if weight is None else torch.as_tensor(weight, device=change.y.device)[:, change.y]


def count_all(
    bag: LinearBag, change: Change, count: Callable[[Change], Counted], memory: int, progress: Progress | None
) -> tuple[FloatArray, FloatArray]:
    """Counts for all candidates of objects, chunk by chunk."""
    m, C = len(change.y), bag.n_classes
    out = change.x.new_zeros(2, m * C)
    change = with_labels(bag, change)
    for columns in chunks(bag, torch.arange(m * C, device=change.y.device), memory):
        out[:, columns] = torch.stack([part.to(out.dtype) for part in count(change[columns])])
        if progress is not None:
            progress((int(columns[-1]) + 1) // C, m)
    greater, equal = out.view(2, m, C).cpu().numpy()
    return greater, equal
