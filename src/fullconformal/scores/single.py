"""The direct approximation of the deleted scheme from kept 𝓗⁻¹g_i, in single precision wherever that decides.

Every α_i − τ = b_i − k_i − τ is formed in float32, which takes half the time. With u = 2⁻²⁴, K the longest sum and ĝ, U_i = 𝓗⁻¹g_i cut into
the blocks of parameters (each an outer product ĝ = D ⊗ a, whose length is |D||a|), it errs by less than

    (K + …)·u·Σ |ĝ||U_i|  +  …·u·(|b_i| + |τ|)

by Cauchy–Schwarz, whatever the order of the sums. What exceeds that and the tie tolerance is decided, and the few pairs that do not are
formed again in float64: the counts are those of `count_scores`. Objects too many of whose pairs would be left go there as a whole.

Points are sorted by b and cut into blocks. An object does not meet the blocks that |k_i| ≤ |U_i||ĝ| tells from all its candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import Rows, candidate_losses, squared_norms
from fullconformal.scores.base import HUGE, TINY, UNIT, Counts, Progress, Scorer, candidate_gradients, count_scores
from fullconformal.scores.training import Training, single_is_whole

OBJECTS, ROWS, POINTS = 1024, 512, 100  # taken together; and of a cell, so that it stays in the cache
LEAST = 2**26  # operations below which there is nothing to gain
MOST = 64  # one pair in so many may be formed again


def is_worth_it(training: Training, m: int) -> bool:
    """Whether counting in single precision is possible and pays for m objects."""
    problem = training.problem
    possible = training.solved is not None and problem.X.dtype == torch.float64 and not problem.prefix_names
    possible = possible and problem.X.device.type == "cpu" and single_is_whole()
    return possible and 2 * m * problem.n * problem.p >= LEAST


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
        lengths = torch.cat([torch.linalg.vector_norm(part, dim=2) for part in self.solved])
        length = torch.linalg.vector_norm(lengths, dim=0)[self.order]
        self.u, self.v = self.own * self.b.abs() + self.slack, self.product * length
        self.step = -(-n // -(-n // POINTS))
        self.blocks = [slice(at, min(at + self.step, n)) for at in range(0, n, self.step)]
        self.U = [[U[:, self.order[at]].float().flatten(0, 1) for U in self.solved] for at in self.blocks]
        self.b32 = [self.b[at].float() for at in self.blocks]
        self.low, self.high = (torch.stack([self.b[at][end] for at in self.blocks]) for end in (0, -1))
        self.most_u, self.most_v = (torch.stack([part[at].max() for at in self.blocks]) for part in (self.u, self.v))
        self.sizes = torch.tensor([at.stop - at.start for at in self.blocks])

    def w(self, tau: Tensor) -> Tensor:
        """The candidates' part (m, C) of the error."""
        return (self.own + self.training.rounding) * tau.abs() + TINY

    def sieve(self, tau: Tensor, norm: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Points surely above candidates (m, C), of the blocks that |k_i| ≤ |U_i||ĝ| decides; and blocks it does not, (m, blocks)."""
        reach = norm[..., None] * ((2 + 1 / self.product) * self.most_v) + (w[..., None] + self.most_u)
        over = self.low - tau[..., None]
        met = (~(torch.maximum(over, tau[..., None] - self.high) > reach)).any(1)
        return ((over > 0) * (self.sizes * ~met)[:, None]).sum(-1).double(), met


@torch.no_grad()
def single_counts(direct: Scorer, training: Training, X: Tensor, progress: Progress | None = None) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1."""
    problem, points, formed, done = training.problem, _Points(training), 0, 0
    counts = torch.empty(2, len(X), problem.n_classes, dtype=torch.float64)
    step = _objects(points)
    for part, out in zip(X.split(step), counts.split(step, dim=1), strict=True):
        logits, J = problem.jacobian(part)
        found, met = _count(points, candidate_gradients(J, logits), candidate_losses(logits))
        if found is None:
            double = count_scores(direct, training, part, 1.0)
            found = torch.stack([torch.as_tensor(double.greater), torch.as_tensor(double.equal)])
        out.copy_(found)
        formed, done = formed + met, done + len(part)
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
    """Points above and tied (2, m, C) with candidates of gradients (m, C, o) ⊗ (m, i) and τ (m, C), and how many pairs met.

    None where float64 must do it.
    """
    (m, n_classes), n = tau.shape, len(points.b)
    norm, w = squared_norms(ghat).sqrt(), points.w(tau)
    if not float(points.v.max() * norm.max() + points.u.max() + w.max()) < HUGE:
        return None, m * n
    above, met = points.sieve(tau, norm, w)
    single = [(left.float(), right.float()) for left, right in ghat if right is not None]  # there is no prefix
    widest = max(n_classes, *(left.shape[2] for left, _ in single))
    room = [torch.empty(min(m, ROWS) * points.step * widest, dtype=torch.float32) for _ in range(2)]
    found, pairs, formed = [torch.zeros(4, 0, dtype=torch.long)], 0, 0
    tau32 = tau.float()[..., None]
    cells = [(k, x) for k, meets in enumerate(met.unbind(1)) for x in meets.nonzero()[:, 0].split(ROWS) if len(x)]
    for block, x in cells:
        own = [(left.index_select(0, x), right.index_select(0, x)) for left, right in single]
        excess = _excess(own, tau32[x], points.b32[block], points.U[block], room)
        size = room[1][: excess.numel()].view_as(excess)
        bits = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        # Signs: three times faster than comparisons.
        above.index_add_(0, x, (excess.shape[2] + bits.sum(-1, dtype=torch.int32)).double())
        found.append(_near(points, block, x, excess, torch.abs(excess, out=size), norm[x], w[x]))
        formed, pairs = formed + excess.shape[0] * excess.shape[2], pairs + found[-1].shape[1]
        if pairs * MOST > m * n_classes * n:
            return None, m * n
    return _again(points, ghat, tau, above, torch.cat(found, dim=1)), formed


def _excess(ghat: list[tuple[Tensor, Tensor]], tau: Tensor, b: Tensor, U: list[Tensor], room: list[Tensor]) -> Tensor:
    """α − τ (m, C, k) in float32, in the first room, from τ (m, C, 1), b (k,) and 𝓗⁻¹g (o·k, i) of a block of points."""
    m, n_classes, _ = tau.shape
    out = torch.sub(b, tau, out=room[0][: m * n_classes * len(b)].view(m, n_classes, -1))
    for (left, right), part in zip(ghat, U, strict=True):
        V = torch.mm(right, part.T, out=room[1][: m * len(part)].view(m, -1))
        out.baddbmm_(left, V.view(m, -1, len(b)), alpha=-1)
    return out


def _near(points: _Points, block: int, at: Tensor, excess: Tensor, size: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    """Pairs that α − τ (m, C, k) of objects `at` and its size leave undecided.

    Objects, labels, points and whether it counts them as above, (4, pairs).
    """
    x, y = (~(size.amin(-1) > w + points.most_u[block] + norm * points.most_v[block])).nonzero(as_tuple=True)
    if not len(x):
        return torch.zeros(4, 0, dtype=torch.long)
    own = points.blocks[block]
    row, i = (~(size[x, y] > points.u[own] + points.v[own] * norm[x, y, None] + w[x, y, None])).nonzero(as_tuple=True)
    x, y = x[row], y[row]
    return torch.stack([at[x], y, i + own.start, (~torch.signbit(excess[x, y, i])).long()])


def _again(points: _Points, ghat: list[Rows], tau: Tensor, above: Tensor, found: Tensor) -> Tensor:
    """Counts (2, m, C) with the pairs found, as objects, labels, points and whether they were counted (4, pairs), formed in float64."""
    training, counts = points.training, torch.stack([above, torch.zeros_like(above)])
    for x, y, i, counted in found.split(max(1, training.memory // 64 // training.problem.p), dim=1):
        alpha = points.b[i]
        for rows, whole in zip(ghat, points.solved, strict=True):
            assert rows.right is not None  # there is no prefix
            V = (whole[:, points.order[i]] * rows.right[x]).sum(2)
            alpha = alpha - (rows.left[x, y] * V.T).sum(1)
        own = tau[x, y]
        tolerance = points.slack[i, None], (training.rounding * own.abs())[:, None]
        greater, equal = pvalues.count(alpha[:, None], own[:, None], tolerance, axis=-1)
        counts[0].index_put_((x, y), (greater - counted).double(), accumulate=True)
        counts[1].index_put_((x, y), equal.double(), accumulate=True)
    return counts
