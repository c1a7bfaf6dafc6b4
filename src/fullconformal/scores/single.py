"""The direct approximation of the deleted scheme from kept 𝓗⁻¹g_i, in single precision wherever that decides.

Every α_i − τ = b_i − k_i − τ is formed in float32, which takes half the time. With u = 2⁻²⁴, K the longest sum and ĝ, U_i = 𝓗⁻¹g_i cut into
the blocks of parameters (each an outer product ĝ = D ⊗ a, whose length is |D||a|), it errs by less than

    (K + …)·u·Σ |ĝ||U_i|  +  …·u·(|b_i| + |τ|)

by Cauchy–Schwarz, whatever the order of the sums. What exceeds that and the tie tolerance is decided, and the few pairs that do not are
formed again in float64: the counts are those of `count_scores`. Objects too many of whose pairs would be left go there as a whole.

Points are sorted by b and cut into blocks. Those that |k_i| ≤ |U_i||ĝ| tells from all candidates of a group of objects are not met at all.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import Rows, candidate_losses, squared_norms
from fullconformal.scores.base import Counts, Progress, Scorer, Training, candidate_gradients, count_scores

OBJECTS, POINTS = 256, 256  # of a block, so that it stays in the cache
LEAST = 2**26  # operations below which there is nothing to gain
MOST = 64  # one pair in so many may be formed again
UNIT = 2.0**-24  # of float32's rounding
TINY, HUGE = 2.0**-120, 2.0**60  # which its exponents hold with room to spare


def is_worth_it(training: Training, m: int) -> bool:
    """Whether counting in single precision is possible and pays for m objects."""
    problem = training.problem
    possible = training.solved is not None and problem.X.dtype == torch.float64 and not problem.prefix_names
    return possible and problem.X.device.type == "cpu" and 2 * m * problem.n * problem.p >= LEAST


class _Points:
    """Training points in the order of b, block by block: 𝓗⁻¹g_i (o·k, i) of each parameter block and b (k,) in float32.

    What |α_i − τ| must exceed is u + v·|ĝ| + w: u and v (n,) of points, w (m, C) of candidates, ties included.
    """

    def __init__(self, training: Training):
        assert training.solved is not None
        self.training, self.solved = training, training.solved
        n, shapes = training.problem.n, [(b.o, b.i) for b in training.problem.blocks]
        sums = sum(o for o, _ in shapes) + 2 * len(shapes) + 4
        self.own, self.product = 1.01 * UNIT * sums, 1.01 * UNIT * (max(i for _, i in shapes) + sums)
        self.b, self.order = torch.sort(training.loss + training.self_influence)
        self.slack = training.slack[self.order]
        lengths = torch.stack([torch.linalg.vector_norm(part, dim=(0, 2)) for part in self.solved])
        self.length = torch.linalg.vector_norm(lengths, dim=0)[self.order]
        self.u, self.v = self.own * self.b.abs() + self.slack, self.product * self.length
        self.step = -(-n // -(-n // POINTS))
        self.blocks = [slice(at, min(at + self.step, n)) for at in range(0, n, self.step)]
        self.U = [[U[:, self.order[at]].float().flatten(0, 1) for U in self.solved] for at in self.blocks]
        self.b32 = [self.b[at].float() for at in self.blocks]
        self.low, self.high = (torch.stack([self.b[at][end] for at in self.blocks]) for end in (0, -1))
        self.most_u, self.most_length = (
            torch.stack([v[at].max() for at in self.blocks]) for v in (self.u, self.length)
        )
        self.sizes = torch.tensor([at.stop - at.start for at in self.blocks])

    def w(self, tau: Tensor) -> Tensor:
        """The candidates' part (m, C) of the error."""
        return (self.own + self.training.rounding) * tau.abs() + TINY

    def sieve(self, tau: Tensor, norm: Tensor, w: Tensor) -> tuple[Tensor, list[bool]]:
        """Points surely above candidates (m, C), of the blocks that |k_i| ≤ |U_i||ĝ| decides for all; and which blocks it does not."""
        reach = norm[..., None] * ((1 + 2 * self.product) * self.most_length) + (w[..., None] + self.most_u)
        gap = torch.maximum(self.low - tau[..., None], tau[..., None] - self.high)
        met = (~(gap > reach)).any(0).any(0)
        return ((self.low > tau[..., None]) * self.sizes * ~met).sum(-1).double(), met.tolist()


@torch.no_grad()
def single_counts(direct: Scorer, training: Training, X: Tensor, progress: Progress | None = None) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1."""
    problem, points, formed, done = training.problem, _Points(training), 0, 0
    counts = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64)
    # Objects of which the model is as sure cannot be told from the same points.
    for at in candidate_losses(problem.logits(X)).amin(1).argsort().split(_objects(points)):
        logits, J = problem.jacobian(X[at])
        part, met = _count(points, candidate_gradients(J, logits), candidate_losses(logits))
        if part is None:
            double = count_scores(direct, training, X[at], 1.0)
            part = torch.stack([torch.as_tensor(double.greater), torch.as_tensor(double.equal)])
        counts[:, at] = part
        formed, done = formed + met * len(at), done + len(at)
        if progress is not None:
            progress(done, len(X))
    greater, equal = counts.numpy()
    return Counts(greater, equal, formed / (problem.n * len(X)))


def _objects(points: _Points) -> int:
    """How many pass together: as many as a cache likes, or an eighth of the memory holds."""
    problem = points.training.problem
    widths = [b.o for b in problem.blocks]
    met = 16 * points.step * max(problem.n_classes, *widths)  # products with a block of points, and which are near
    each = met + problem.n_classes * (
        32 * sum(widths) + 32 * len(points.blocks)
    )  # gradients, and what is known of blocks
    return max(1, min(OBJECTS, points.training.memory // 8 // each))


def _count(points: _Points, ghat: list[Rows], tau: Tensor) -> tuple[Tensor | None, int]:
    """Points above and tied (2, m, C) with candidates of gradients (m, C, o) ⊗ (m, i) and τ (m, C), and how many points they met.

    None where float64 must do it.
    """
    (m, n_classes), n = tau.shape, len(points.b)
    norm, w, tau32 = squared_norms(ghat).sqrt(), points.w(tau), tau.float()[..., None]
    if not float(points.v.max() * norm.max() + points.u.max() + w.max()) < HUGE:
        return None, n
    above, met = points.sieve(tau, norm, w)
    D, a = [rows.left.float() for rows in ghat], [rows.right.float() for rows in ghat if rows.right is not None]
    room = [torch.empty(m * points.step * max(n_classes, *(part.shape[2] for part in D))) for _ in range(2)]
    found, formed = [torch.zeros(4, 0, dtype=torch.long)], 0
    for at, b, U in compress(zip(points.blocks, points.b32, points.U, strict=True), met):
        excess = torch.sub(b, tau32, out=room[0][: m * n_classes * len(b)].view(m, n_classes, -1))
        for left, right, part in zip(D, a, U, strict=True):
            V = torch.mm(right, part.T, out=room[1][: m * len(part)].view(m, -1))
            excess.baddbmm_(left, V.view(m, -1, len(b)), alpha=-1)
        size = room[1][: excess.numel()].view_as(excess)
        bits = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        above += len(b) + bits.sum(-1, dtype=torch.int32)  # signs: three times faster than comparisons
        found.append(_near(points, at, excess, torch.abs(excess, out=size), norm, w))
        formed += len(b)
        if sum(part.shape[1] for part in found) * MOST > m * n_classes * n:
            return None, n
    return _again(points, ghat, tau, above, torch.cat(found, dim=1)), formed


def _near(points: _Points, at: slice, excess: Tensor, size: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    """Pairs that α − τ (m, C, k) and its size leave undecided: objects, labels, points and whether it counts them as above, (4, pairs)."""
    u, v = points.u[at], points.v[at]
    x, y = (~(size.amin(-1) > w + u.max() + norm * v.max())).nonzero(as_tuple=True)
    row, i = (~(size[x, y] > u + v * norm[x, y, None] + w[x, y, None])).nonzero(as_tuple=True)
    x, y = x[row], y[row]
    return torch.stack([x, y, i + at.start, (~torch.signbit(excess[x, y, i])).long()])


def _again(points: _Points, ghat: list[Rows], tau: Tensor, above: Tensor, found: Tensor) -> Tensor:
    """Counts (2, m, C) with the pairs found, as objects, labels, points and whether they were counted (4, pairs), formed in float64."""
    x, y, i, counted = found
    counts = torch.stack([above, torch.zeros_like(above)])
    if not len(x):
        return counts
    alpha = points.b[i]
    for rows, whole in zip(ghat, points.solved, strict=True):
        assert rows.right is not None  # there is no prefix
        alpha = alpha - torch.einsum("ko,oki,ki->k", rows.left[x, y], whole[:, points.order[i]], rows.right[x])
    own = tau[x, y]
    tolerance = points.slack[i, None], (points.training.rounding * own.abs())[:, None]
    greater, equal = pvalues.count(alpha[:, None], own[:, None], tolerance, axis=-1)
    counts[0].index_put_((x, y), (greater - counted).double(), accumulate=True)
    counts[1].index_put_((x, y), equal.double(), accumulate=True)
    return counts
