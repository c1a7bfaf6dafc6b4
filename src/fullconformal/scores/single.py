"""The direct approximation of the deleted scheme from kept 𝓗⁻¹g_i, in single precision wherever that decides.

Every α_i − τ = b_i − k_i − τ is formed in float32, which takes half the time. With u = 2⁻²⁴, K the longest sum and ĝ, U_i = 𝓗⁻¹g_i cut into
the blocks of parameters (each an outer product ĝ = D ⊗ a, whose length is |D||a|), it errs by less than

    (K + …)·u·Σ |ĝ||U_i|  +  …·u·(|b_i| + |τ|)

by Cauchy–Schwarz, whatever the order of the sums. What exceeds that and the tie tolerance is decided, and the few pairs that do not are
formed again in float64: the counts are those of `count_scores`. Objects too many of whose pairs would be left go there as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullconformal import pvalues
from fullconformal.problem import Rows, candidate_losses, squared_norms
from fullconformal.scores.base import Counts, Progress, Scorer, Training, candidate_gradients, count_scores

OBJECTS, POINTS = 256, 256  # of a block, so that it stays in the cache
LEAST = 2**26  # operations below which there is nothing to gain
MOST = 64  # one pair in so many may be formed again
UNIT, TINY, HUGE = (
    2.0**-24,
    2.0**-120,
    2.0**60,
)  # float32: unit of rounding, and a range that its exponents hold with room to spare


def is_worth_it(training: Training, m: int) -> bool:
    """Whether counting in single precision is possible and pays for m objects."""
    problem = training.problem
    possible = training.solved is not None and problem.X.dtype == torch.float64 and not problem.prefix_names
    return possible and problem.X.device.type == "cpu" and 2 * m * problem.n * problem.p >= LEAST


class _Points:
    """Training points in float32, block by block: 𝓗⁻¹g_i (o·k, i) of each parameter block, b (k,), and what bounds the errors."""

    def __init__(self, training: Training):
        assert training.solved is not None
        self.training, self.solved = training, training.solved
        n, shapes = training.problem.n, [(b.o, b.i) for b in training.problem.blocks]
        sums = sum(o for o, _ in shapes) + 2 * len(shapes) + 4
        self.own, product = 1.01 * UNIT * sums, 1.01 * UNIT * (max(i for _, i in shapes) + sums)
        self.b, self.slack = training.loss + training.self_influence, training.slack
        lengths = [torch.linalg.vector_norm(part, dim=(0, 2)) for part in self.solved]
        length = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
        self.step = -(-n // -(-n // POINTS))
        self.blocks = [slice(at, min(at + self.step, n)) for at in range(0, n, self.step)]
        self.U = [[part[:, at].reshape(-1, part.shape[2]).float() for part in self.solved] for at in self.blocks]

        self.b32 = [self.b[at].float() for at in self.blocks]
        # What |α_i − τ| must exceed is u + v·|ĝ| + w: u and v (n,) of points, w (m, C) of candidates, ties included.
        self.u, self.v = self.own * self.b.abs() + self.slack, product * length
        self.most = [(float(self.u[at].max()), float(self.v[at].max())) for at in self.blocks]

    def w(self, tau: Tensor) -> Tensor:
        """The candidates' part (m, C) of the error."""
        return (self.own + self.training.rounding) * tau.abs() + TINY


@torch.no_grad()
def single_counts(direct: Scorer, training: Training, X: Tensor, progress: Progress | None = None) -> Counts:
    """Counts for the candidates of every x in X (m, ...), as `count_scores` gives them with the direct approximation for q = 1."""
    points, parts = _Points(training), []
    for start in range(0, len(X), OBJECTS):
        objects = X[start : start + OBJECTS]
        logits, J = training.problem.jacobian(objects)
        part = _count(points, candidate_gradients(J, logits), candidate_losses(logits))
        if part is None:
            counts = count_scores(direct, training, objects, 1.0)
            part = torch.stack([torch.as_tensor(counts.greater), torch.as_tensor(counts.equal)])
        parts.append(part)
        if progress is not None:
            progress(min(start + OBJECTS, len(X)), len(X))
    greater, equal = torch.cat(parts, dim=1).numpy()
    return Counts(greater, equal, 1.0)


def _count(points: _Points, ghat: list[Rows], tau: Tensor) -> Tensor | None:
    """Points above and tied (2, m, C) with candidates of gradients (m, C, o) ⊗ (m, i) and τ (m, C); None where float64 must do it."""
    (m, n_classes), n = tau.shape, points.training.problem.n
    norm, w, tau32 = squared_norms(ghat).sqrt(), points.w(tau), tau.float()[..., None]
    if not float(points.v.max() * norm.max() + points.u.max() + w.max()) < HUGE:
        return None
    D, a = [rows.left.float() for rows in ghat], [rows.right.float() for rows in ghat if rows.right is not None]
    room = [torch.empty(m * points.step * max(n_classes, *(part.shape[2] for part in D))) for _ in range(2)]
    above = torch.zeros(m, n_classes, dtype=torch.float64)
    found = [torch.zeros(4, 0, dtype=torch.long)]
    for at, b, U, (u, v) in zip(points.blocks, points.b32, points.U, points.most, strict=True):
        excess = torch.sub(b, tau32, out=room[0][: m * n_classes * len(b)].view(m, n_classes, -1))
        for left, right, part in zip(D, a, U, strict=True):
            V = torch.mm(right, part.T, out=room[1][: m * len(part)].view(m, -1))
            excess.baddbmm_(left, V.view(m, -1, len(b)), alpha=-1)
        size = room[1][: excess.numel()].view_as(excess)
        bits = torch.bitwise_right_shift(excess.view(torch.int32), 31, out=size.view(torch.int32))
        above += len(b) + bits.sum(-1, dtype=torch.int32)  # signs: three times faster than comparisons
        x, y = (~(torch.abs(excess, out=size).amin(-1) > torch.add(w + u, norm, alpha=v))).nonzero(as_tuple=True)
        if len(x):
            near = ~(size[x, y] > points.u[at] + points.v[at] * norm[x, y, None] + w[x, y, None])
            row, i = near.nonzero(as_tuple=True)
            x, y = x[row], y[row]
            found.append(torch.stack([x, y, i + at.start, (~torch.signbit(excess[x, y, i])).long()]))
        if sum(part.shape[1] for part in found) * MOST > m * n_classes * n:
            return None
    return _again(points, ghat, tau, above, torch.cat(found, dim=1))


def _again(points: _Points, ghat: list[Rows], tau: Tensor, above: Tensor, found: Tensor) -> Tensor:
    """Counts (2, m, C) with the pairs found, as objects, labels, points and whether they were counted (4, pairs), formed in float64."""
    x, y, i, counted = found
    counts = torch.stack([above, torch.zeros_like(above)])
    if not len(x):
        return counts
    alpha = points.b[i]
    for rows, whole in zip(ghat, points.solved, strict=True):
        assert rows.right is not None  # there is no prefix
        alpha = alpha - torch.einsum("ko,oki,ki->k", rows.left[x, y], whole[:, i], rows.right[x])
    own = tau[x, y]
    tolerance = points.slack[i, None], (points.training.rounding * own.abs())[:, None]
    greater, equal = pvalues.count(alpha[:, None], own[:, None], tolerance, axis=-1)
    counts[0].index_put_((x, y), (greater - counted).double(), accumulate=True)
    counts[1].index_put_((x, y), equal.double(), accumulate=True)
    return counts
