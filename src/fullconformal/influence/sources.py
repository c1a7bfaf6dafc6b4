"""Where the rows of points and candidates come from, of which k_i = row of i · row of ĝ.

| source | points | candidates | |
|---|---|---|---|
| Kept | L⁻¹g_i | L⁻¹ĝ | n·p numbers fit the memory |
| Top | 𝓗⁻¹g_i | ĝ | points of largest b, a few or all: candidates that meet no others need no solve |
| MadeAnew | g_i | 𝓗⁻¹ĝ | in portions of points that fit the memory |
| FromLayers | R⁻¹g_i | R⁻¹ĝ | the same, where the factor makes these straight from the layers |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from fullconformal.curvature.base import Halves
from fullconformal.influence import candidates
from fullconformal.influence.candidates import HUGE, TINY, Candidates, Root, with_rows, written_rows
from fullconformal.influence.prepared import Prepared
from fullconformal.influence.sorted_points import Ranges, SortedPoints
from fullconformal.problem import Rows, flat, squared_norms
from fullconformal.runtime.numerics import whole_sums

LONGEST = 2**17  # terms up to which as many additions in float32 err by that many units
HALF_ERROR = 2.0**-9  # of a product in half precision, relative to σ_i·ρ
LENGTH = 128.0  # of rows in half precision: products stay below 2¹⁴, and entries above the smallest numbers
PART = 2**15  # terms at most that are added up one after the other; the parts of a product are summed side by side


class Source(ABC):
    """Rows of some of the points of a bag, and of candidates of objects X."""

    has_top = False  # whether the points of largest b may be solved for in place of candidates
    error = 0.0  # of a product relative to σ_i·ρ, granted to ties, besides the rounding granted to scores
    fetch = 0  # what it costs to gather a point's row, in products with it

    def __init__(self, prepared: Prepared, bag: SortedPoints, X: Tensor, q: float):
        self.prepared, self.bag, self.X, self.q = prepared, bag, X, q
        self.within = bag.within
        self.is_bounded = candidates.is_bounded(prepared)
        p, size = prepared.problem.p, X.element_size()
        self.room = max(1, prepared.memory // 16 // (4 * p * size))  # candidates whose rows are made together
        self.terms = p  # of which products are sums
        self.portion = len(bag)  # points whose rows are held together
        self.single = X.dtype == torch.float64 and p <= LONGEST
        # Labels of an object share n·p operations of their products with solved points, p² of their solves: with 1,210 parameters and 797
        # points it takes half the time, with 650 three quarters, since the lengths of rows leave few points to be met. Only where nothing
        # else bounds ŝ.
        factored = self.single and not (X.is_cuda or prepared.problem.prefix_names)
        self.shares = factored and not self.is_bounded and 2 * p > len(bag)

    def bounded(self, found: Candidates) -> Candidates:
        """Candidates with the bounds of ŝ and τ that decide which points they meet."""
        return found

    def own(self, found: Candidates) -> Tensor:
        """Rounding granted to τ (k,)."""
        size = found.tau.abs() if found.rows is not None else torch.maximum(found.tau.abs(), found.loss)
        off = 0.0 if found.error is None else 4 * (1 - self.q) * found.rho * found.error
        return self.prepared.rounding * size + off

    def ranges(self, found: Candidates, highest: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges of candidates with τ no higher than `highest` (k,) among the points."""
        # What a product errs by, what is granted for that, and the rounding of the bound itself.
        rho = found.rho * (1 + 3 * (self.error + self.prepared.rounding))
        return self.within.find(found.tau, highest, rho, self.own(found), found.y)

    def begin(self, left: Candidates) -> None:
        """Make what serves all candidates that are left."""
        return

    @abstractmethod
    def make(self, found: Candidates, single: bool) -> Candidates:
        """Candidates with their rows, in float32 where it may be and that is possible, and τ and ŝ as these have them."""

    @abstractmethod
    def hold(self, index: Tensor | None) -> None:
        """Make the rows of the points at some places of the bag, or of all."""

    @abstractmethod
    def rows(self, at: slice | Tensor, single: bool) -> Tensor:
        """Rows of some of the points held."""

    def subtract(self, excess: Tensor, at: slice, sigma: Tensor, made: Candidates, c: slice) -> None:
        """Subtract k (k, points) from an excess, for some of the points held, which have σ, and some of the candidates made."""
        excess.addmm_(written_rows(made, c), self.rows(at, made.single).T, alpha=-1)


class Kept(Source):
    """L⁻¹g_i as they are kept; of float64 in float32 too, where products in float32 are what they should be."""

    root: Root | None = None

    def __init__(self, prepared: Prepared, bag: SortedPoints, X: Tensor, q: float):
        super().__init__(prepared, bag, X, q)
        # τ must be known without ŝ, and one end of the bag be everyone's.
        self.has_top = (self.is_bounded or self.shares) and q == 1 and len(bag.stops) == 1
        self.fetch = 8 if X.dtype == torch.float64 else 0

    def begin(self, left: Candidates) -> None:
        if candidates.root_pays(self.prepared, left):
            self.root = self.bag.root = self.bag.root or candidates.written_root(self.prepared)

    def make(self, found: Candidates, single: bool) -> Candidates:
        made = self._make(found, single and self.single)
        return made if not made.single or _is_small(made, self.within) else self._make(found, False)

    def _make(self, found: Candidates, single: bool) -> Candidates:
        if found.whole is not None:
            rows, place = found.whole
            return replace(found, rows=rows[place], whole=None)
        if self.root is None:
            return candidates.solved_one_by_one(self.prepared, self.X, found, self.q, single)
        return candidates.solved_by_root(self.prepared, self.root, self.X, found, self.q, single)

    def hold(self, index: Tensor | None) -> None:
        assert index is None and self.prepared.half is not None

    def rows(self, at: slice | Tensor, single: bool) -> Tensor:
        assert self.prepared.half is not None
        if single or self.prepared.half.dtype == torch.float32:
            return self.bag.single[at]
        return self.prepared.half.index_select(0, self.bag.order[at])


class Top(Source):
    """𝓗⁻¹g_i of so many points of largest b that solves for them and for the candidates that meet others are fewest.

    Points' are kept. As many of them as candidates have been solved for count nothing: however many predictions follow, no more than twice
    the fewest solves are made.
    """

    def __init__(self, prepared: Prepared, bag: SortedPoints, X: Tensor, q: float, low: Tensor):
        """`low` (k,) is the first point that each candidate meets."""
        super().__init__(prepared, bag, X, q)
        n, low, kept = len(bag), low.sort().values, 0 if bag.top is None else len(bag.top.rows)
        first = torch.cat([low.unique(), low.new_tensor([n])])
        first = first[(n - first) * prepared.problem.p * X.element_size() <= prepared.memory // 16]
        more = (n - first - kept - bag.spent).clamp_min(0)
        self.first = min(n - kept, int(first[(more + torch.searchsorted(low, first)).argmin()]))
        if self.shares:
            self.terms = sum(b.o + 1 for b in prepared.problem.blocks) + max(b.i for b in prepared.problem.blocks)

    def make(self, found: Candidates, single: bool) -> Candidates:
        problem = self.prepared.problem
        if self.shares and single:
            at, every = candidates.by_object(problem, self.X, found)
            rows = [Rows(left[at, found.y], None if right is None else right[at]) for left, right in every]
        else:
            rows = problem.gradients(self.X[found.x], found.y)
        made = replace(found, rows=rows, influence=squared_norms(rows))
        if self.X.is_cuda:
            # Written out once: tile by tile a GPU would wait for many small kernels.
            return replace(made, rows=flat(rows))
        if not (single and self.single and _is_small(made, self.within)):
            return made
        # What is lost where factors of an outer product vanish.
        sizes = sorted(1 + float(part.abs().max()) for block in rows for part in block if part is not None)
        error = problem.p * TINY * math.prod(sizes[-2:])
        short = [Rows(left.float(), None if right is None else right.float()) for left, right in rows]
        return replace(made, rows=short, error=torch.full_like(found.tau, error)) if error < 1 else made

    def ranges(self, found: Candidates, highest: Tensor) -> tuple[Tensor, Tensor]:
        """The same; where labels share products, those that meet half of the points that their object's labels meet meet all of these.

        Alike, they come into one tile, and their object meets a point once.
        """
        low, high = super().ranges(found, highest)
        if not self.shares:
            return low, high
        some, m = high > low, len(self.X)
        first = low.new_full((m,), len(self.bag)).scatter_reduce_(0, found.x[some], low[some], "amin")[found.x]
        last = high.new_zeros(m).scatter_reduce_(0, found.x[some], high[some], "amax")[found.x]
        alike = some & (2 * (high - low) >= last - first)
        return torch.where(alike, first, low), torch.where(alike, last, high)

    def hold(self, index: Tensor | None) -> None:
        self.solved = self.bag.solved(len(self.bag) - self.first)
        # There may be more of them than this prediction asked for.
        self.first = len(self.bag) - len(self.solved.rows)
        self.within = self.solved.within

    def rows(self, at: slice | Tensor, single: bool) -> Tensor:
        return (self.solved.single if single else self.solved.rows)[at]

    def subtract(self, excess: Tensor, at: slice, sigma: Tensor, made: Candidates, c: slice) -> None:
        """With ĝ = D ⊗ a and U_i = 𝓗⁻¹g_i k is D·V with V = U·a, which all labels of an object share."""
        if not (self.shares and made.single and isinstance(made.rows, list)):
            return super().subtract(excess, at, sigma, made, c)
        _, place, labels = torch.unique_consecutive(made.x[c], return_inverse=True, return_counts=True)
        first, most = labels.cumsum(0) - labels, int(labels.max())
        # Places of candidates among as many labels of each object.
        at_label = torch.arange(len(place)) + (most * torch.arange(len(first)) - first)[place]
        k = excess.new_zeros(len(first), most, excess.shape[1])
        for (left, right), U in zip(made.rows, self.solved.blocks, strict=True):
            assert right is not None  # there is no prefix
            V = (right[c][first] @ U[at].flatten(0, 1).T).view(len(first), -1, U.shape[1])
            D = left.new_zeros(len(first) * most, U.shape[1]).index_copy_(0, at_label, left[c])
            k.baddbmm_(D.view(len(first), most, -1), V.mT)
        excess.sub_(k.flatten(0, 1).index_select(0, at_label))


class MadeAnew(Source):
    """g_i written out, a portion of the points at a time."""

    def __init__(self, prepared: Prepared, bag: SortedPoints, X: Tensor, q: float):
        super().__init__(prepared, bag, X, q)
        self.portion = max(1, prepared.memory // 8 // (prepared.problem.p * X.element_size()))

    def make(self, found: Candidates, single: bool) -> Candidates:
        ghat = candidates.written(self.prepared, self.X, found)
        solved = self.prepared.factor.solve(ghat)
        return with_rows(found, solved, (ghat * solved).sum(1).clamp_min_(0), self.q)

    def hold(self, index: Tensor | None) -> None:
        at = self.bag.order if index is None else self.bag.order[index]
        self.held = flat(self.prepared.rows(at))

    def rows(self, at: slice | Tensor, single: bool) -> Tensor:
        return self.held[at]


class FromLayers(Source):
    """R⁻¹g_i from the layers, a portion at a time that takes half of the memory; ŝ of all candidates comes first, without their rows.

    A GPU keeps rows in half precision, all of one length. A product then errs by less than 2⁻⁹·σ_i·ρ: an entry is rounded by 2⁻¹¹ of itself
    in either factor, and Σ_j |x_j y_j| ≤ |x||y|; 2⁻¹¹ more for the results of the parts in which it is summed, and at most 2⁻¹² for adding
    up a part in float32: matrix units cut off what is below the last place, 2⁻²³, once for every 16 of its 2¹⁵ terms. That is granted to
    the ranges and to ties, which count upwards. Rows themselves are made in float32: the turn into the basis spreads rounding over
    directions of small λ, where (λ+1)^-½ leaves it as it is and shrinks the gradient, so ten bits would not do.
    """

    def __init__(
        self,
        prepared: Prepared,
        bag: SortedPoints,
        X: Tensor,
        q: float,
        halves: Halves,
        low: bool | None,
        part: int = PART,
    ):
        super().__init__(prepared, bag, X, q)
        p = prepared.problem.p
        self.halves, self.is_bounded = halves, True
        self.low = X.is_cuda and X.dtype == torch.float32 if low is None else low
        self.dtype = torch.float16 if self.low else X.dtype
        self.parts = -(-p // part)
        self.width = p + (-p % (8 * self.parts) if self.low else 0)
        self.error = prepared.rounding + (HALF_ERROR if self.low else 0.0)
        nbytes = self.width * self.dtype.itemsize
        self.portion = max(1, min(8192, prepared.memory // 2 // nbytes))
        self.room = max(1, prepared.memory // 8 // nbytes)

    def bounded(self, found: Candidates) -> Candidates:
        labels = found.y.view(len(self.X), -1)
        return with_rows(found, None, self.halves.influences(self.X, labels).flatten(), self.q)

    def own(self, found: Candidates) -> Tensor:
        """That of ℓ̂ and of ŝ, which is known: for many parameters in float32 it is less than that of p terms of the size of τ."""
        return self.prepared.loss_rounding * found.loss + self.prepared.rounding * (1 - self.q) * found.influence

    def make(self, found: Candidates, single: bool) -> Candidates:
        """All labels of an object, which share its passes, cost about as much as three of them one by one."""
        C, like = self.prepared.problem.n_classes, found.x
        out = torch.empty(len(found), self.width, dtype=self.dtype, device=like.device)
        objects, at, count = torch.unique(found.x, return_inverse=True, return_counts=True)
        many = 3 * count > C
        place, s_hat = like.new_full((len(objects), C), -1), found.influence.new_zeros(len(objects), C)
        place[at, found.y], s_hat[at, found.y] = torch.arange(len(found), device=like.device), found.influence
        for some in many.nonzero()[:, 0].split(max(1, self.room // (2 * C))):
            rows = self._rows(
                self.X[objects[some]], torch.arange(C, device=like.device).expand(len(some), -1), s_hat[some]
            )
            asked = place[some].flatten() >= 0
            out[place[some].flatten()[asked]] = rows[asked]
            del rows  # before the next are made
        for some in (~many[at]).nonzero()[:, 0].split(max(1, self.room // 2)):
            out[some] = self._rows(self.X[found.x[some]], found.y[some, None], found.influence[some, None])
        return replace(found, rows=out)

    def _rows(self, X: Tensor, labels: Tensor, s: Tensor) -> Tensor:
        """Rows (k·R, width) of objects with each of their labels (k, R), from self-influences s (k, R)."""
        out = torch.zeros(*labels.shape, self.width, dtype=self.dtype, device=X.device)
        self.halves.half(X, labels, _lengthening(s) if self.low else torch.ones_like(s), out)
        return out.flatten(0, 1)

    def hold(self, index: Tensor | None) -> None:
        problem, at = self.prepared.problem, self.bag.order if index is None else self.bag.order[index]
        self.held = torch.empty(0)  # before the next are made
        s = self.prepared.self_influence[at, None].clamp_min(0)
        self.held = self._rows(problem.X[at], problem.y[at, None], s)

    def rows(self, at: slice | Tensor, single: bool) -> Tensor:
        return self.held[at]

    def subtract(self, excess: Tensor, at: slice, sigma: Tensor, made: Candidates, c: slice) -> None:
        if not self.low:
            return super().subtract(excess, at, sigma, made, c)
        a, b = (part.view(len(part), self.parts, -1).transpose(0, 1) for part in (self.held[at], written_rows(made, c)))
        with whole_sums():
            k = (b @ a.mT).sum(0, dtype=excess.dtype)
        excess.sub_(k / _lengthening(sigma**2) / _lengthening(made.influence[c])[:, None])


def _is_small(made: Candidates, points: Ranges) -> bool:
    """Whether the products of candidates with points stay far from the largest numbers of float32."""
    rho, own = float(made.rho.max()), float(made.tau.abs().max())
    return (1 + float(points.most_sigma.max())) * (1 + rho) + float(points.b.abs().max()) + own < HUGE


def _lengthening(s: Tensor) -> Tensor:
    """What makes half-solved gradients with self-influences s rows of one length."""
    return LENGTH / s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()


def source_of(prepared: Prepared, bag: SortedPoints, X: Tensor, q: float, half_precision: bool | None) -> Source:
    """The source for what is kept of the points."""
    if prepared.half is not None:
        return Kept(prepared, bag, X, q)
    if prepared.halves is not None:
        return FromLayers(prepared, bag, X, q, prepared.halves, half_precision)
    return MadeAnew(prepared, bag, X, q)
