"""Full conformal prediction of any model from K trainings: every point is scored by the model that has not seen its fold.

    α_j = s(z_j; θ_{−k(j)})        θ_{−k} trained on the bag Z ∪ ẑ without fold k        p = #{j : α_j ≥ α_{n+1}}/(n + 1)

Why this is exact where all K models are trained honestly. Each of the n + 1 points, the candidate ẑ among them, draws its fold at random
among the K, independently of the others, of the data and of the rows' order. Training sees a bag in an order that is drawn from its
points, and its seed is the same whatever the points are. Nothing then tells ẑ from the others: whoever permutes the points permutes
folds and scores alike, the n + 1 scores are exchangeable, and P(p ≤ ε) ≤ ε for any learner, any n and any K. Folds drawn so are of about
equal size, n/K ± √(n/K). Of folds of exactly equal size, drawn for n points, only the one that lacks a point could take the
candidate; whoever puts candidates into any of them makes the candidate's fold the largest, always, and the scores are no longer
exchangeable. R repeats draw R such sets of folds, and a point is scored by its mean probabilities over them: exchangeable again.

What is not exact. The model without the candidate's fold never sees the candidate, so ẑ and its companions are scored honestly. The other
K − 1 would have seen it, and are trained without it once and for all (``update="none"``), or moved by one step (``"influence"``):

    α_j ← α_j − g_jᵀ 𝓗_k⁻¹ ĝ        k = k(j), g and ĝ the gradients of the two losses at θ_{−k}, 𝓗_k the curvature of its bag

Either way what is left out is of order 1/n in each score. No point's influence on its own score occurs anywhere, which is what influence
functions get wrong where a network fits its points closely. `parts.FoldRefits` trains the K − 1 models honestly, for audits.

With groups, a group draws one fold, and the candidate is a group of its own: no model has seen a companion of what it scores. Points are
then not exchangeable one by one, and p-values hold on average over points of new groups as far as groups are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import KFold
from sklearn.utils.validation import _num_samples
from torch import Tensor, nn

from fullconformal import pvalues
from fullconformal.conformity import ConformityScore, LogLoss
from fullconformal.curvature.select import choose, hold_fixed, trainable
from fullconformal.influence.scores import candidate_gradients
from fullconformal.methods.base import Bag, Config, Fitted, FloatArray, IntArray, Method, Query, Values, counted
from fullconformal.methods.fitting import trained_here
from fullconformal.methods.outputs import Model, Piped, first_point
from fullconformal.methods.parts import FoldModels, FoldRefits, Part, averaged, draw_folds, fit_parts, point_scores
from fullconformal.models.objects import take
from fullconformal.models.requirements import finite_rows, split_pipeline, to_tensor, transform
from fullconformal.problem import Problem, flat
from fullconformal.runtime.tasks import nobody
from fullconformal.storage import require, savable

UPDATES = ("none", "influence")


@savable
@dataclass(frozen=True)
class Step:
    """One step that adds a candidate to a model: the problem at θ_{−k}, and 𝓗⁻¹g_j (k, p) of the points of its fold."""

    problem: Problem
    solved: Tensor

    @classmethod
    def of(cls, model: Model, X: Any, y: Any, config: Config) -> Step | None:
        """For a fold's points X, y under the model without them; None where there is nothing to add to."""
        problem = (model.model if isinstance(model, Piped) else model).model
        if not isinstance(problem, Problem):
            return None
        choice = choose(problem, config.damping, config.memory, config.device)
        problem = hold_fixed(problem, trainable(problem, choice.name))
        factor = choice.curvature.factor(problem, config.memory // 4)
        rows = flat(problem.gradients(inputs(model, X, problem), torch.as_tensor(y, device=problem.X.device)))
        return cls(problem, factor.solve(rows))

    def changes(self, model: Model, X: Any) -> FloatArray:
        """−g_jᵀ𝓗⁻¹ĝ (m, C, k) of the fold's points for every label of objects X (m, ...)."""
        logits, J = self.problem.jacobian(inputs(model, X, self.problem))
        own = flat(candidate_gradients(self.problem.loss, J, logits))
        return -(own @ self.solved.mT).double().cpu().numpy()

    def state(self) -> dict[str, Any]:
        """Its fields; of the problem the first point only."""
        return {"problem": first_point(self.problem), "solved": self.solved}


def inputs(model: Model, X: Any, problem: Problem) -> Tensor:
    """Objects as a problem knows them, behind the transformers of its model."""
    X = transform(model.transformers, X) if isinstance(model, Piped) else X
    return to_tensor(X, problem.X.device, problem.X.dtype)


class ByFolds:
    """What is fitted by folds, of labels or of numbers: the models without each fold, repeat by repeat."""

    method = "folds"
    trained: FoldModels
    #: trains the models again; None of a loaded one, which has no training points
    honest: FoldRefits | None = None

    def precision(self, X: Any) -> float:
        """The unit of rounding of outputs for objects X."""
        return self.trained.precision(X)

    def refits(self) -> FoldRefits | None:
        """What scores points by honest refits."""
        found = self.trained
        return self.honest and replace(self.honest, models=found.models, candidate_folds=found.candidate_folds)

    @property
    def device(self) -> torch.device:
        """Where networks compute."""
        return self.trained.device


@savable
class FittedFolds(ByFolds, Fitted):
    """The models, and the scores of the points that they have not seen."""

    def __init__(
        self, trained: FoldModels, alpha: FloatArray, labels: IntArray, n_classes: int, score: ConformityScore,
        steps: list[Any] | None = None, grouped: bool = False,
    ):  # fmt: skip
        """Models without each fold, scores alpha (n,) of the points, steps for ``influence``."""
        super().__init__(labels, n_classes)
        self.trained, self.alpha, self.score = trained, alpha, score
        self.models, self.fold = trained.models, trained.fold
        self.steps, self.grouped = steps, grouped
        added = "are trained without it" if steps is None else "are moved by one step of influence"
        self.guarantee = self.trained.promise(added, grouped)

    def log_proba(self, X: Any) -> FloatArray:
        """Of the mean probabilities of all models."""
        return finite_rows(averaged(self.trained.outputs(X), len(self.models)))

    def _candidates(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        """Scores τ (m, C) of the candidates, and their rounding."""
        if query.q != 1:
            raise ValueError(
                "scheme must be 'deleted' with method='folds': no model has seen the point that it scores."
            )
        log_proba = finite_rows(averaged(self.trained.candidate_outputs(X), len(self.fold)))
        tau = self.score.scores(log_proba)
        return tau, self.score.rounding(tau, log_proba, self.precision(X))

    def counts(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        tau, tie = self._candidates(X, query)
        weight = self.weight(query)
        if self.steps is None:
            return pvalues.rank_weights(self.alpha, tau, tie, weight)

        def ask(at: slice) -> tuple[FloatArray, FloatArray, FloatArray]:
            """Scores of the points, and of the candidates of the objects `at` with their rounding."""
            return self._updated(take(X, np.arange(at.start, at.stop))), tau[at], tie[at]

        # Four million scores at a time.
        row = 8 * self.n_classes * self._width
        return counted(ask, len(tau), self.n_classes, row, weight, query.progress, 2**25)

    @property
    def _width(self) -> int:
        """Numbers that a candidate takes."""
        rows = [int(step.solved.shape[1]) for step in self.steps or [] if step is not None]
        return max([self.n, *rows])

    def _updated(self, X: Any) -> FloatArray:
        """Scores (m, C, n) of the training points beside every label of objects X; (1, 1, n) where they are the same."""
        if self.steps is None:
            return self.alpha[None, None]
        alpha = np.tile(self.alpha, (_num_samples(X), self.n_classes, 1))
        own = self.trained.candidate_folds(X)[0]
        for k, step in enumerate(self.steps):
            rows, members = np.flatnonzero(own != k), np.flatnonzero(self.fold[0] == k)
            if step is not None and len(rows) and len(members):
                change = step.changes(self.models[k], take(X, rows))
                alpha[np.ix_(rows, np.arange(self.n_classes), members)] += change
        return alpha

    def scores(self, X: Any, query: Query) -> tuple[FloatArray, FloatArray]:
        tau = self._candidates(X, query)[0]
        return np.broadcast_to(self._updated(X), (*tau.shape, self.n)), tau

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        trained, alpha, labels, steps = (state[name] for name in ("trained", "alpha", "labels", "steps"))
        require(alpha.shape == labels.shape and not np.isnan(alpha).any(), "scores")
        trained.verify(len(labels), state["n_classes"])
        require(steps is None or (len(steps) == trained.folds and len(trained.fold) == 1), "steps")
        for k, step in enumerate(steps or []):
            size = int((trained.fold[0] == k).sum())
            whole = step is None or (isinstance(step, Step) and step.solved.shape == (size, step.problem.p))
            require(whole and (step is None or bool(step.solved.isfinite().all())), "steps")


def cv_parts(cv: Any, n_folds: int, X: Any, y: Any, seed: int) -> list[Part]:
    """Points that train and points that are scored: for each fold that `cv` says, or of n_folds drawn at random where it is None."""
    if cv is None:
        if n_folds > len(y):
            raise ValueError(f"n_folds={n_folds!r} exceeds the {len(y)} points given; take at most as many.")
        # Not class by class: what is left out must be exchangeable with what is to come.
        cv = KFold(n_folds, shuffle=True, random_state=seed)
    pairs = cv if isinstance(cv, (list, tuple)) else cv.split(X, y)
    parts = [(np.asarray(train), np.asarray(rest)) for train, rest in pairs]
    check_folds(parts, len(y))
    return parts


def check_folds(parts: list[Part], n: int) -> None:
    """Raise unless every one of n points is scored once, by a model that has not seen it."""
    scored = np.bincount(np.concatenate([rest for _, rest in parts]), minlength=n)
    if len(scored) > n or (scored != 1).any():
        raise ValueError(
            f"cv must put each of the {n} points into one fold, but point {int((scored != 1).argmax())} is in "
            f"{int(scored[(scored != 1).argmax()])}; give KFold, StratifiedKFold or LeaveOneOut, for instance."
        )
    for k, (train, rest) in enumerate(parts):
        if len(np.intersect1d(train, rest)):
            raise ValueError(f"cv trains on points of fold {k} that it also scores there; the two must be apart.")


def check_trainings(folds: int, n: int, config: Config) -> None:
    """Raise, before any training, where a model cannot be trained without each fold of n points."""
    if config.prefit or config.head is not None:
        raise ValueError(
            "method='folds' trains the whole model anew without each fold: leave prefit and head out, or take method='influence' "
            "(of a trained network) or 'symmetric' (of a head)."
        )
    if folds > n:
        raise ValueError(f"folds={folds} exceeds the {n} points given; take at most as many.")


def train_folds(
    model: Any, bag: Bag | Values, config: Config, score: ConformityScore | None, folds: int, repeats: int, update: str = "none"
) -> tuple[FoldRefits, FloatArray, list[Model], list[Step | None]]:  # fmt: skip
    """Honest training, outputs (R, n, C) of the points by models that have not seen them, these models, and their steps."""
    fold = draw_folds(bag, folds, repeats, config.seed)
    # Who tells of progress is of this fit alone, and cannot be pickled.
    honest = FoldRefits(model, bag, fold, folds, replace(config, progress=nobody), score)
    parts = [part for own in fold for part in honest.parts(own, bag)]
    models, steps = list[Model](), list[Step | None]()
    out = np.empty((repeats, len(bag.y), bag.n_classes))
    found = fit_parts(model, bag, parts, config, config.progress)
    for (r, k), (fitted, outputs) in zip(product(range(repeats), range(folds)), found, strict=True):
        rest = parts[r * folds + k][1]
        out[r, rest] = outputs
        if update == "influence":
            steps.append(Step.of(fitted, take(bag.X, rest), bag.y[rest], config) if len(rest) else None)
        models.append(fitted.slim())
    return honest, out, models, steps


@savable
@dataclass(frozen=True)
class Folds(Method):
    """K-fold full conformal prediction, for every classifier with probabilities.

    Parameters
    ----------
    model : classifier or Pipeline
        Set by `FullConformalClassifier`.
    folds, repeats : int
        K, and how many times folds are drawn.
    update : {"none", "influence"}
        What is done about a candidate's effect on the models that would have seen it.
    score : ConformityScore
        The loss by default. Scores are not randomised, and all their parameters must be given.
    """

    folds: int = 10
    repeats: int = 1
    update: str = "none"
    score: ConformityScore = field(default_factory=LogLoss)

    name = "folds"
    takes_pipeline = True
    takes_weights = True

    def fit(self, bag: Bag, config: Config) -> FittedFolds:
        self._check(bag, config)
        honest, outputs, models, steps = train_folds(
            self.model, bag, config, self.score, self.folds, self.repeats, self.update
        )
        alpha = point_scores(self.score, outputs, bag.y)
        fitted = FittedFolds(
            FoldModels(models, honest.fold, self.folds, config.seed), alpha, bag.y, bag.n_classes, self.score,
            steps if self.update == "influence" else None, bag.groups is not None,
        )  # fmt: skip
        fitted.honest = honest
        return fitted

    def _check(self, bag: Bag, config: Config) -> None:
        """Raise, before any training, where the method is not possible."""
        n, final = len(bag.y), split_pipeline(self.model)[1]
        check_trainings(self.folds, n, config)
        if not isinstance(self.score, ConformityScore):
            raise ValueError(
                f"score={self.score!r} is not a ConformityScore; give an object, such as Folds(score=LAC())."
            )
        if not self.score.complete:
            raise ValueError(
                f"score={self.score!r} leaves parameters open, and folds keep no points to tune them on; give them all."
            )
        if self.update == "none":
            return
        if not trained_here(final):
            raise ValueError(
                f"update='influence' needs a torch.nn.Module, which is trained here; for {type(final).__name__} use update='none'."
            )
        if self.repeats > 1 or not isinstance(self.score, LogLoss):
            raise ValueError("update='influence' works only with repeats=1 and the default score, the log loss.")
        p = sum(q.numel() for q in final.parameters() if q.requires_grad) if isinstance(final, nn.Module) else 0
        if 4 * n * p > config.memory:
            raise MemoryError(
                f"update='influence' keeps a row of {p:,} numbers for each of {n:,} points, more than memory_budget; take "
                "update='none'."
            )
