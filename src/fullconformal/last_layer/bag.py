"""The direct approximation for a softmax layer on fixed features, its curvature a Kronecker product: the bag, and its counts.

A point's gradient is φ_i ⊗ r_i, with φ_i the layer's input (d, a 1 appended for the bias) and r_i = π_i − e_{y_i}. With 𝓗/n ≈ A ⊗ S,

    A = Σφφᵀ/n + ω·diag(λ)/√λ̄        S = Σ(diag π_i − π_iπ_iᵀ)/n + (√λ̄/ω)·I        ω² = (tr A/d)/(tr S/C)

where λ (d,) is the penalty of a column of the weights in mean form plus the damping, and λ̄ its mean: the product of the two added terms
is the penalty, diag(λ) ⊗ I, and ω shares it out so that both factors are damped by the same part of their mean eigenvalue.
S is singular along 1, to which every r is orthogonal: a multiple of 11ᵀ is added, and changes no product.

    c_ix = φ_iᵀA⁻¹φ_x/n      Q = R S⁻¹ (n, C)      k_i(y) = c_ix((Qπ_x)_i − Q_iy)      s_i = c_ii·r_iᵀS⁻¹r_i
    α_i = ℓ_i + q·s_i − k_i(y)                     τ_y = ℓ̂_y − (1−q)·ŝ_y

Kept of a point: T_i = L⁻¹φ_i (A = LLᵀ), Q_i, ℓ_i, s_i, y_i; nothing of size d·C. As c_ix = T_i·T_x/n, rounding leaves an error relative to
|T_i||T_x|, that is k_i one relative to √(s_iŝ), whatever the condition of A.

Half precision. T may be kept in float16, on both sides, sums in float32. Of training points its entries are at most √n and of order 1,
of objects they are cut off at the largest number, so nothing overflows.
All formulas then hold for the rounded features, the bounds among them, and a test point equal to a training point is tied with it.
Against unrounded features c_ix has an error of about 2⁻¹¹√2·|T_i∘T_x| ≈ 2⁻¹¹√(2/d)·|T_i||T_x|: of k_i, 1.5e-5·√(s_iŝ) at d = 2,048.
Losses, Q, s and thresholds are not rounded so.

Pruning. Points are sorted by b_i = ℓ_i + q·s_i and cut into chunks of blocks. A chunk whose b differ from τ by more than √(max s·ŝ) is
decided for that candidate, and only the others are multiplied with T_x. With c_ix known, |c_ix|·max_y|Q_iy| decides blocks.

Rounding. Scores closer than their rounding error are tied: a few units in the last place of ℓ, s and the logits, and for the product
4√(d + C) of them, relative to |T_i||T_x|/n·2max_y|Q_iy|: w_i·v_x, a number of the point times one of the object.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from fullconformal.curvature.base import CurvatureError, Factor, smallest_eigenvalue
from fullconformal.curvature.dense import factorise
from fullconformal.losses import SOFTMAX
from fullconformal.pvalues import Counts
from fullconformal.runtime.numerics import full_precision
from fullconformal.runtime.tasks import Progress, nobody
from fullconformal.storage import savable

# Units in the last place that a number may be wrong by.
ULPS = 8
# Points that pass through float64 together.
PASS = 8192
# Points whose bounds are formed together, and decided where they tell.
BLOCK = 64


def kronecker_factors(A: Tensor, S: Tensor, penalty: Tensor) -> tuple[Factor, Factor]:
    """Factors of the damped A (d, d) and S (C, C), which are overwritten, at penalties λ (d,) in mean form."""
    mean_a, mean_s, mean = A.diagonal().mean(), S.diagonal().mean(), penalty.mean()
    if not (mean_a > 0 and mean_s > 0):
        raise CurvatureError(
            "the last layer has no curvature on these data: all features are zero, or all probabilities 0 or 1"
        )
    if mean > 0:
        omega = (mean_a / mean_s).sqrt()
        A.diagonal().add_(penalty * omega / mean.sqrt())
        S.diagonal().add_(mean.sqrt() / omega)
    S.add_(mean_s / len(S))
    return factorise(A, 1, None, 0.0, A.dtype), factorise(S, 1, None, 0.0, S.dtype)


@savable
@dataclass(frozen=True)
class Figures:
    """What diagnostics need: ∇F/n (C, d) of the layer, its Newton decrement, and the two factors' dampings and smallest eigenvalues."""

    gradient: Tensor
    newton_decrement: float
    damping: float
    smallest_eigenvalue: float


class Collector:
    """Training points on their way in, a batch at a time in any order: their features and residuals, and the sums over them."""

    def __init__(self, d: int, n_classes: int, device: torch.device, dtype: torch.dtype, expected: int | None = None):
        self.d, self.n, self.dtype = d, 0, dtype
        room = max(1, PASS if expected is None else expected)
        # Widths and heights that matrix units like; what is added stays zero.
        self.phi = torch.zeros(-(-room // 128) * 128, -(-d // 16) * 16, dtype=dtype, device=device)
        self.R = self.phi.new_zeros(len(self.phi), n_classes)
        self.loss, self.y = self.phi.new_zeros(len(self.phi)), self.phi.new_zeros(len(self.phi), dtype=torch.long)
        sums = ((d, d), (n_classes, n_classes), (n_classes, d))
        self.A, self.S, self.G = (torch.zeros(size, dtype=torch.float64, device=device) for size in sums)

    def add(self, features: Tensor, logits: Tensor, y: Tensor) -> None:
        """Take in points by their features (k, d), the bias's one included, logits (k, C) and labels (k,)."""
        while self.n + len(y) > len(self.phi):
            self.phi, self.R, self.loss, self.y = (
                torch.cat([part, torch.zeros_like(part)]) for part in (self.phi, self.R, self.loss, self.y)
            )
        at = slice(self.n, self.n + len(y))
        phi, logits = features.double(), logits.double()
        r = SOFTMAX.residual(logits, y)
        self.phi[at, : self.d], self.R[at], self.loss[at], self.y[at] = phi, r, SOFTMAX.value(logits, y), y
        self.A.addmm_(phi.T, phi)
        self.S += SOFTMAX.summed_curvature(logits)
        self.G.addmm_(r.T, phi)
        self.n += len(y)

    def finish(self, weights: Tensor, penalty: Tensor, damping: float, q: float, half: bool) -> LayerBag:
        """The bag at weights W (C, d) and their penalties λ (d,) in mean form, sorted for the scheme q; the buffers go into it."""
        n, d = self.n, self.d
        rows = -(-n // 128) * 128
        self.phi, self.R, self.loss, self.y = (part[:rows] for part in (self.phi, self.R, self.loss, self.y))
        S = self.S / n
        a, s = kronecker_factors(self.A / n, S, penalty + damping)
        # L⁻¹.
        root = a.half(torch.eye(d).to(S)).T.contiguous()
        inverse = s.solve(torch.eye(len(S)).to(S))
        T = torch.zeros_like(self.phi, dtype=torch.float16) if half else self.phi
        s_self, length = torch.zeros_like(self.loss), torch.zeros_like(self.loss)
        for at in (slice(k, min(k + PASS, n)) for k in range(0, n, PASS)):
            T[at, :d] = (self.phi[at, :d].double() @ root.T).to(T.dtype)
            r = self.R[at].double()
            solved = r @ inverse
            squared = (T[at].double() ** 2).sum(1)
            self.R[at], length[at], s_self[at] = solved, squared.sqrt(), squared * (r * solved).sum(1) / n
        del self.phi
        G = self.G / n + weights * penalty
        decrement = math.sqrt(n) * float(a.half(s.half(G.T.contiguous()).T.contiguous()).norm())
        low = smallest_eigenvalue(a.solve, root[0]) * smallest_eigenvalue(s.solve, inverse[0])
        figures = Figures(G, decrement, damping + max(a.damping, s.damping), low)
        order = torch.argsort(self.loss[:n] + q * s_self[:n], stable=True)
        order = torch.cat([order, torch.arange(n, rows, device=order.device)])
        # In place, a few columns at a time.
        step = max(16, 2**24 // rows)
        for matrix in (T, self.R):
            for k in range(0, matrix.shape[1], step):
                matrix[:, k : k + step] = matrix[order, k : k + step]
        spread = torch.maximum(self.R.amax(1), -self.R.amin(1))
        w = 2 * spread * length[order] / math.sqrt(n)
        loss, s_self, y = self.loss[order], s_self[order], self.y[order]
        return LayerBag(T, self.R, loss, s_self, y, order[:n], spread, w, n, root, inverse, figures)


@dataclass(frozen=True)
class LayerCandidates:
    """Candidates of m objects: T_x (m, d), π (m, C), thresholds τ from low to high and self-influences ŝ (m, C), v_x (m, 1)."""

    T: Tensor
    pi: Tensor
    low: Tensor
    high: Tensor
    s: Tensor
    v: Tensor


@savable
@dataclass(frozen=True)
class LayerBag:
    """The training bag: T (N, D), Q (N, C), ℓ, s and labels (N,), sorted; rows from n on and columns from d on are zeros."""

    T: Tensor
    Q: Tensor
    loss: Tensor
    self_influence: Tensor
    y: Tensor
    order: Tensor  # position in the stream, (n,)
    spread: Tensor  # max_y |Q_iy| (N,)
    w: Tensor  # |T_i|/√n·2max_y|Q_iy| (N,)
    n: int
    root: Tensor  # L⁻¹ (d, d), float64
    inverse: Tensor  # S⁻¹ (C, C), float64
    figures: Figures

    @cached_property
    def slack(self) -> Tensor:
        """Rounding error (N,) of b: that of its terms."""
        return ULPS * torch.finfo(self.Q.dtype).eps * (self.loss + self.self_influence)

    def room(self, x: LayerCandidates, at: slice) -> Tensor:
        """Rounding error (m, k) granted to the scores of training points in a slice."""
        return self.slack[at] + x.v * self.w[at]

    def candidates(self, features: Tensor, logits: Tensor, q: float) -> LayerCandidates:
        """Thresholds and what the products need, from features (m, d) and logits (m, C)."""
        dtype, logits = self.Q.dtype, logits.double()
        T = self.T.new_zeros(len(features), self.T.shape[1])
        # An object far from all training points has entries that float16 cannot hold: the largest it can stand for them.
        most = torch.finfo(T.dtype).max
        T[:, : len(self.root)] = (features.double() @ self.root.T).clamp(-most, most).to(T.dtype)
        c = (T.double() ** 2).sum(1, keepdim=True) / self.n
        pi, loss, sigma = SOFTMAX.mean(logits), SOFTMAX.candidates(logits), self.inverse.diagonal()
        P = pi @ self.inverse
        s = c * ((P * pi).sum(1, keepdim=True) - 2 * P + sigma).clamp_min(0)
        tau, eps = loss - (1 - q) * s, torch.finfo(dtype).eps
        own = ULPS * eps * (loss + s + logits.abs().amax(1, keepdim=True))
        v = 4 * math.sqrt(T.shape[1] + logits.shape[1]) * eps * c.sqrt()
        return LayerCandidates(T, *(part.to(dtype) for part in (pi, tau - own, tau + own, s, v)))

    def products(self, x: LayerCandidates, at: slice) -> tuple[Tensor, Tensor]:
        """c and (Qπ_x) of training points in a slice, (m, k) each."""
        if self.T.dtype == torch.float16 and self.T.is_cuda:
            c = torch.mm(x.T, self.T[at].T, out_dtype=torch.float32)
        else:
            c = x.T.to(self.Q.dtype) @ self.T[at].to(self.Q.dtype).T
        return c.div_(self.n), x.pi @ self.Q[at].T


@torch.no_grad()
@full_precision()
def last_layer_counts(
    bag: LayerBag,
    features: Tensor,
    logits: Tensor,
    q: float,
    weights: Tensor | None = None,
    class_conditional: bool = False,
    prune: bool = True,
    memory: int = 2**30,
    progress: Progress = nobody,
    chunk: int = 4096,
    fused: bool | None = None,
) -> Counts:
    """Counts for the candidates of m objects from their features (m, d) and logits (m, C); weights (n,) of the training points.

    So many points as `chunk` says, a multiple of 128, are multiplied together; `fused` is whether a GPU's kernels count, by default where
    they run.
    """
    m, n_classes = logits.shape
    w = torch.zeros(len(bag.T), dtype=torch.float64, device=bag.T.device)
    w[: bag.n] = 1.0 if weights is None else weights[bag.order]
    count, each = _pruned, 64 * chunk + 64 * (chunk // BLOCK) * n_classes
    if class_conditional:
        count = _own_class
    elif weights is None and (kernels_run(bag.Q.device, bag.Q.dtype) if fused is None else fused):
        # Two numbers for each pair of points; the other ways go by chunks, and by blocks × candidates.
        count, each, chunk = _fused, 16 * len(bag.T), len(bag.T)
    step = max(1, min(128 if count is _fused else 512, memory // 4 // each))
    counts = torch.zeros(2, m, n_classes, dtype=torch.float64, device=bag.T.device)
    b, work = bag.loss + q * bag.self_influence, 0
    b[bag.n :] = -torch.inf
    for start in range(0, m, step):
        some = slice(start, start + step)
        x = bag.candidates(features[some], logits[some], q)
        for at in (slice(k, min(k + chunk, len(b))) for k in range(0, len(b), chunk)):
            work += count(bag, b, w, x, at, prune, counts[:, some])
        progress(min(start + step, m), m)
    greater, equal = counts.cpu().numpy()
    return Counts(greater, equal, work / max(1, m * n_classes * bag.n))


@cache
def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for scores on a device: Triton compiles them, and needs a C compiler, which not every machine has."""
    if device.type != "cuda" or dtype != torch.float32 or find_spec("triton") is None:
        return False
    from fullconformal.last_layer import kernels

    ones = torch.ones(128, 128, device=device)
    one = ones[0]
    try:
        kernels.count(ones, one, one, one, one, ones, ones.clone(), one, ones, ones)
    except Exception as error:  # whatever it is, plain PyTorch counts as well
        warnings.warn(f"the GPU kernels do not compile here, counting is slower without them: {error}", stacklevel=2)
        return False
    return True


# Three ways to add the counts (2, m, C) of the training points in a slice; each returns the number of scores that it formed.


def _fused(bag: LayerBag, b: Tensor, w: Tensor, x: LayerCandidates, at: slice, prune: bool, counts: Tensor) -> int:
    """All training points in one kernel; their weights are one."""
    from fullconformal.last_layer import kernels

    c, u = bag.products(x, at)
    v = x.v[:, 0].contiguous()
    greater, not_below = kernels.count(bag.Q, b, bag.slack, bag.spread, bag.w, c, u, v, x.low, x.high, prune)
    counts[0] += greater
    counts[1] += not_below - greater
    return x.s.numel() * bag.n


def _own_class(bag: LayerBag, b: Tensor, w: Tensor, x: LayerCandidates, at: slice, prune: bool, counts: Tensor) -> int:
    """A candidate is compared with the points of its own label: one label a point, which is less work than looking for blocks."""
    c, u = bag.products(x, at)
    y = bag.y[at]
    alpha = b[at] - c * (u - bag.Q[at].gather(1, y[:, None])[:, 0])
    for into, part in zip(counts, _compared(alpha, bag.room(x, at), x.low[:, y], x.high[:, y]), strict=True):
        into.index_add_(1, y, part * w[at])
    return alpha.numel()


def _pruned(bag: LayerBag, b: Tensor, w: Tensor, x: LayerCandidates, at: slice, prune: bool, counts: Tensor) -> int:
    """Candidates that the slice does not decide as a whole are compared block by block."""
    reach = (bag.self_influence[at].amax() * x.s).sqrt() + 2 * (bag.slack[at].amax() + bag.w[at].amax() * x.v)
    reach = reach if prune else reach.fill_(torch.inf)
    surely, never = b[at].amin() - reach > x.high, b[at].amax() + reach < x.low
    counts[0] += surely * w[at].sum()
    alive = (~(surely | never)).any(1).nonzero()[:, 0]
    if not len(alive):
        return 0
    x, done = LayerCandidates(*(part[alive] for part in vars(x).values())), (surely | never)[alive]
    c, u = bag.products(x, at)
    a, room = b[at] - c * u, bag.room(x, at)
    reach = c.abs() * bag.spread[at] + 2 * room
    reach = reach if prune else reach.fill_(torch.inf)
    m, n_classes = x.s.shape
    top, bottom = (a + reach).view(m, -1, BLOCK).amax(2), (a - reach).view(m, -1, BLOCK).amin(2)
    # Not what reaches the threshold: where nothing is pruned, rows without a point have no bounds.
    open_ = ~((top[:, :, None] < x.low[:, None]) | done[:, None])
    surely = open_ & (bottom[:, :, None] > x.high[:, None])
    open_ &= ~surely
    w = w[at].view(-1, BLOCK)
    found = torch.zeros(2, m, n_classes, dtype=torch.float64, device=w.device)
    found[0] = torch.einsum("mbc,b->mc", surely.double(), w.sum(1))
    Q, a, c, room = bag.Q[at].view(-1, BLOCK, n_classes), *(part.view(m, -1, BLOCK) for part in (a, c, room))
    for i, j, y in zip(*(part.split(2**14) for part in open_.nonzero(as_tuple=True)), strict=True):
        alpha = a[i, j] + c[i, j] * Q[j, :, y]
        parts = _compared(alpha, room[i, j], x.low[i, y][:, None], x.high[i, y][:, None])
        for into, part in zip(found, parts, strict=True):
            into.view(-1).index_add_(0, i * n_classes + y, (part * w[j]).sum(1))
    counts[:, alive] += found
    return int(open_.sum()) * BLOCK


def _compared(alpha: Tensor, room: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Which scores, that may be wrong by `room`, are above thresholds from low to high, and which are tied with them."""
    above = alpha - room > high
    return above, (alpha + room >= low) & ~above
