"""Models fitted to parts of a bag: small networks all together, anything else one after the other or on workers.

`FoldRefits` fits those that a candidate would have been part of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import _num_samples
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fullconformal.conformity import ConformityScore
from fullconformal.guarantees import APPROXIMATE, Guarantee
from fullconformal.methods.base import Bag, Config, FloatArray, IntArray, Values
from fullconformal.methods.fitting import (
    L2_NETWORK,
    check_finite,
    fit_model,
    fit_steps,
    settings_of,
    to_device,
    units_of,
)
from fullconformal.methods.outputs import LogProba, Model, Piped, Prediction
from fullconformal.models.objects import take
from fullconformal.models.requirements import (
    check_outputs,
    finite_rows,
    split_pipeline,
    to_tensor,
    transform,
)
from fullconformal.models.training import is_stackable, train_together
from fullconformal.problem import Problem
from fullconformal.runtime.files import Parts, fingerprint
from fullconformal.runtime.hashing import hashes, uniforms
from fullconformal.runtime.tasks import Progress, finished, nobody
from fullconformal.storage import LIMITS, require, savable

#: points that train, points that are scored
Part = tuple[IntArray, IntArray]
Scored = tuple[Model, FloatArray]


def fit_each(
    fit: Callable[..., Any], parts: Sequence[Part], config: Config, progress: Progress = nobody, folder: Parts | None = None,
    size: Callable[[Part], int] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """What ``fit(part, config)`` makes of each part, in order, by as many workers as were asked for.

    Where results are arrays, (size of a part,) each, an open folder keeps them as they come, and those that it has are not made again.
    """
    names = {f"part-{k}": part for k, part in enumerate(parts)}
    found: dict[str, Any] = {}
    if folder is not None and size is not None:
        found = dict(folder.read(r"part-\d+", lambda name: (size(names[name]),) if name in names else None))
    # The bar of one part shows the training itself.
    config = replace(config, progress=progress if len(parts) == 1 else nobody)
    calls = {name: (fit, part, config) for name, part in names.items() if name not in found}
    for name, result in finished(calls, folder or Parts(None, config.work.say), config.work.n_jobs):
        found[name] = result
        if len(parts) > 1:
            progress(len(found), len(parts))
    for name in names:
        yield found.pop(name)


def fit_parts(
    estimator: Any, bag: Bag | Values, parts: Sequence[Part], config: Config, progress: Progress = nobody
) -> Iterator[Scored]:
    """Models fitted to the points that train, with their log-probabilities or values of the points that are scored, part by part.

    Finished networks are kept in the checkpoint's folder, where there is one: other models have no numbers to be kept by.
    """
    final = split_pipeline(estimator)[1]
    network = isinstance(final, nn.Module) and not config.prefit and config.head is None and bag.weights is None
    if network and len(parts) > 1 and is_stackable(final, len(parts), len(bag.y), config.device):
        yield from _together(estimator, bag, parts, replace(config, progress=progress))
    elif network and config.work.checkpoint is not None:
        key = settings_of(final), config.l2, config.max_epochs, config.seed, str(config.dtype), config.loss
        arrays = hashes(bag.X), bag.y, *(train for train, _ in parts)
        header = {"fingerprint": fingerprint(repr((key, _named(estimator))), *arrays)}
        folder, p = config.work.parts("folds").open(header)[0], sum(q.numel() for q in final.parameters())
        fit = partial(_parameters, estimator, bag)
        kept = fit_each(fit, parts, config, progress, folder, lambda part: 0 if bag.part(part[0]).is_trivial else p)
        for part, theta in zip(parts, kept, strict=True):
            yield _restored(estimator, bag, part, config, theta)
    else:
        yield from fit_each(partial(_fit_and_apply, estimator, bag), parts, config, progress)


def _named(estimator: Any) -> list[tuple[str, str]]:
    """The transformers before a classifier and their settings, as text."""
    transformers = split_pipeline(estimator)[0]
    return [] if transformers is None else settings_of(transformers)


def _applied(model: Model, bag: Bag | Values, points: IntArray) -> Scored:
    """A model and its outputs (k, C) of some points."""
    if not len(points):
        return model, np.empty((0, bag.n_classes))
    return model, finite_rows(model(take(bag.X, points)), "to be calibrated with")


def _fit_and_apply(estimator: Any, bag: Bag | Values, part: Part, config: Config) -> Scored:
    return _applied(fit_model(estimator, bag.part(part[0]), config), bag, part[1])


def problem_of(model: Model) -> Any:
    """What a model's outputs are made by."""
    return (model.model if isinstance(model, Piped) else model).model


def _parameters(estimator: Any, bag: Bag | Values, part: Part, config: Config) -> FloatArray:
    """The parameters (p,) of a network fitted to a part; none where there was nothing to learn."""
    problem = problem_of(fit_model(estimator, bag.part(part[0]), config))
    return (
        np.empty(0) if problem is None else np.asarray(parameters_to_vector(problem.model.parameters()).detach().cpu())
    )


def _restored(estimator: Any, bag: Bag | Values, part: Part, config: Config, theta: FloatArray) -> Scored:
    """What `_fit_and_apply` gives, from the parameters."""
    own, (transformers, final) = bag.part(part[0]), split_pipeline(estimator)
    if own.is_trivial:
        return _fit_and_apply(estimator, bag, part, config)
    module = to_device(copy.deepcopy(final), replace(config, device=torch.device("cpu")))
    vector_to_parameters(torch.as_tensor(theta), module.parameters())
    fitted, X = fit_steps(transformers, own.X, own.y, config)
    model = fit_model(module, replace(own, X=X), replace(config, prefit=True))
    assert not isinstance(model, Piped)
    if isinstance(own, Values):
        model = Prediction(model.model, *units_of(own.y))
    return _applied(model if fitted is None else Piped(fitted, model), bag, part[1])


def _together(estimator: Any, bag: Bag | Values, parts: Sequence[Part], config: Config) -> Iterator[Scored]:
    """Networks that are small enough, trained at once; their transformers one after the other."""
    transformers, final = split_pipeline(estimator)
    learn = [part for part in parts if not bag.part(part[0]).is_trivial]
    steps, inputs = [], []
    for train, _ in learn if transformers is not None else []:
        some = bag.part(train)
        fitted, _ = fit_steps(transformers, some.X, some.y, config)
        steps.append(fitted)
        inputs.append(transform(fitted, bag.X))
    modules = [to_device(copy.deepcopy(final), config) for _ in learn]
    models: list[Model] = []
    if learn:
        dtype = next(modules[0].parameters()).dtype
        sources = [to_tensor(part, config.device, dtype, training=True) for part in (inputs if steps else [bag.X])]
        if len(widths := {part.shape[1:] for part in sources}) > 1:
            found = " and ".join(str(tuple(shape)) for shape in sorted(widths))
            raise ValueError(
                f"the transformers give objects of shapes {found}, depending on what fold they were fitted without, and a network takes "
                "one: give OneHotEncoder its categories, or transform X before fit; or take method='influence'."
            )
        X = torch.stack(sources)
        units = [units_of(bag.y[train]) for train, _ in learn] if isinstance(bag, Values) else []
        scaled = [torch.as_tensor((bag.y - centre) / scale).to(X)[:, None] for centre, scale in units]
        y = torch.stack(scaled) if units else torch.as_tensor(bag.y, device=config.device)[None]
        check_outputs(modules[0], X[0], None if units else bag.n_classes)
        points = [torch.as_tensor(train, device=config.device) for train, _ in learn]
        l2, named = L2_NETWORK if config.l2 is None else config.l2, modules[0].named_parameters()
        ridge = {name: l2 for name, q in named if q.requires_grad}
        train_together(
            modules, X, y, points, ridge, max_epochs=config.max_epochs, seed=config.seed, progress=config.progress,
            loss=config.loss,
        )  # fmt: skip
        for k, (module, own) in enumerate(zip(modules, points, strict=True)):
            penalty = {name: len(own) * value for name, value in ridge.items()}
            problem = Problem(module, X[k % len(X)][own], y[k % len(y)][own], penalty, loss=config.loss)
            check_finite(problem)
            every = np.arange(bag.n_classes)
            model = Prediction(problem, *units[k]) if units else LogProba(problem, every, len(every))
            models.append(Piped(steps[k], model) if steps else model)
    made = iter(models)
    for part in parts:
        trivial = bag.part(part[0]).is_trivial
        yield _fit_and_apply(estimator, bag, part, config) if trivial else _applied(next(made), bag, part[1])


# Folds ----------------------------------------------------------------------------------------------------------------


def draw_folds(bag: Bag | Values, folds: int, repeats: int, seed: int) -> IntArray:
    """Folds (R, n) of the training points, or of their groups: independent of one another, other numbers than the candidates'."""
    who, back = (bag.X, np.arange(len(bag.y))) if bag.groups is None else np.unique(bag.groups, return_inverse=True)
    rows = [np.floor(folds * uniforms(who, key_of(seed, r))) for r in range(repeats)]
    return np.stack(rows).astype(np.int64)[:, back]


def drawn(number: Any, folds: int) -> IntArray:
    """A fold for each number below 2⁶⁴."""
    return np.asarray(number % np.uint64(folds)).astype(np.int64)


def key_of(seed: int, repeat: int) -> int:
    """An even number for the draws of a repeat; the next odd one is for the candidates', which are independent."""
    return 2 * (seed + 2**32 * (repeat + 1))


@savable
@dataclass(frozen=True)
class FoldModels:
    """Models without each of K folds, in the order of repeats and folds; the folds (R, n) of the points, and the seed of candidates.'"""

    models: list[Any]
    fold: IntArray
    folds: int
    seed: int

    def candidate_folds(self, X: Any) -> IntArray:
        """Folds (R, m) of the candidates of objects X: functions of the object and the seed."""
        return np.stack([self._candidate_fold(X, r) for r in range(len(self.fold))])

    def _candidate_fold(self, X: Any, r: int) -> IntArray:
        return drawn(hashes(X, key_of(self.seed, r) + 1), self.folds)

    def candidate_outputs(self, X: Any) -> Iterator[FloatArray]:
        """Outputs (m, C) for objects X by the models that would not have seen their candidates, repeat by repeat."""
        for r in range(len(self.fold)):
            own = self._candidate_fold(X, r)
            out = np.empty((_num_samples(X), self.models[0].n_classes))
            for k in np.unique(own):
                at, model = np.flatnonzero(own == k), self.models[r * self.folds + k]
                try:
                    out[at] = model(take(X, at))
                except ValueError:
                    # Which names an object by its place among all.
                    model(X)
                    raise
            yield out

    def outputs(self, X: Any) -> Iterator[FloatArray]:
        """Outputs (m, C) of all models, one after the other."""
        return (model(X) for model in self.models)

    def precision(self, X: Any) -> float:
        """The unit of rounding of outputs for objects X."""
        return max(float(model.precision(X)) for model in self.models)

    def promise(self, added: str = "are trained without it", grouped: bool = False) -> Guarantee:
        """What holds of sets: a candidate's effect on the other models is left out, or `added` in part."""
        K, groups = self.folds, "; groups have one fold each, and are taken to be alike" if grouped else ""
        return APPROXIMATE.because(
            f"exact up to the candidate's own effect on {K - 1} of {K} models, which {added}{groups}"
        )

    @property
    def device(self) -> torch.device:
        """Where networks compute."""
        problems = map(problem_of, self.models)
        return next((p.X.device for p in problems if isinstance(p, Problem)), torch.device("cpu"))

    def verify(self, n: int, n_classes: int) -> None:
        """Raise where a loaded one is not whole."""
        fold = self.fold
        require(fold.ndim == 2 and fold.dtype == np.int64 and fold.shape[1] == n and 0 <= self.seed < 2**32, "folds")
        require(self.folds >= 2 and len(self.models) == len(fold) * self.folds > 0, "folds")
        # The outputs of all of them are held at a time, which few numbers in a file do not bear out.
        require(LIMITS.rows * len(self.models) * n_classes <= LIMITS.budget // 32, "number of models")
        require(bool(((fold >= 0) & (fold < self.folds)).all()), "folds")
        kind = Prediction if n_classes == 1 else LogProba
        finals = [model.model if isinstance(model, Piped) else model for model in self.models]
        require(all(type(model) is kind and model.n_classes == n_classes for model in finals), "models")


# Honest candidates ----------------------------------------------------------------------------------------------------


def point_scores(score: ConformityScore | None, outputs: FloatArray, y: Any) -> FloatArray:
    """Scores (n,) of points with labels or values y (n,) from R outputs (R, n, C) of each; absolute residuals where score is None."""
    if score is None:
        return np.asarray(np.abs(y - outputs.mean(axis=0)[:, 0]))
    return np.asarray(score.scores(averaged(outputs, len(outputs)))[np.arange(len(y)), y])


def averaged(log_proba: Iterable[FloatArray], number: int) -> FloatArray:
    """Logarithm (m, C) of the mean of so many probabilities, from logarithms (m, C) of each, which are not held together."""
    with np.errstate(invalid="ignore"):
        return np.asarray(reduce(np.logaddexp, log_proba) - np.log(number))


@dataclass(frozen=True)
class FoldRefits:
    """Honest training: the models of the folds that a candidate is not in, trained with it."""

    estimator: Any
    bag: Bag | Values
    fold: IntArray
    folds: int
    config: Config
    #: of labels; None of values, which have absolute residuals
    score: ConformityScore | None
    #: what was fitted once and for all: the models, and the folds (R, m) of candidates of objects
    models: Sequence[Model] = ()
    candidate_folds: Callable[[Any], IntArray] | None = None

    @property
    def a_pair(self) -> int:
        """Trainings for an object and a label or value."""
        return len(self.fold) * (self.folds - 1)

    def parts(self, fold: IntArray, bag: Bag | Values) -> list[Part]:
        """For each fold of assignments (n,), the points that train, in an order of their own, and those that are scored."""
        order = np.lexsort((bag.y, hashes(bag.X)))
        return [(order[fold[order] != k], np.flatnonzero(fold == k)) for k in range(self.folds)]

    def scores(
        self, X: Any, label: Any, points: IntArray, q: float, tick: Callable[[], None]
    ) -> tuple[FloatArray, float]:
        """Scores of some training points (k,) and of the candidate of object X (1, ...) where all models have seen all they may."""
        assert self.candidate_folds is not None
        # The folder keeps what was fitted without candidates.
        config = replace(self.config, work=replace(self.config.work, checkpoint=None))
        n, candidate = len(self.bag.y), self.candidate_folds(X)[:, 0]
        bag = self.bag.with_candidate(X, label)
        out = np.empty((len(self.fold), n + 1, bag.n_classes))
        for r, (fold, own) in enumerate(zip(self.fold, candidate.tolist(), strict=True)):
            parts = self.parts(np.append(fold, own), bag)
            # The model without the candidate's fold is the one there is.
            others = [part for k, part in enumerate(parts) if k != own]
            for (_, rest), (_, log_proba) in zip(others, fit_parts(self.estimator, bag, others, config), strict=True):
                out[r, rest] = log_proba
                tick()
            out[r, parts[own][1]] = self.models[r * self.folds + own](take(bag.X, parts[own][1]))
        scores = point_scores(self.score, out, bag.y)
        return scores[points], float(scores[-1])
