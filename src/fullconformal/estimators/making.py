"""Which engine the options of full conformal prediction ask for, and how it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fullconformal.estimators.convex import Exact, Symmetric
from fullconformal.estimators.curvatures import LAYERS, held_parameters, hold_fixed, trainable
from fullconformal.estimators.engines import Engine, Influence
from fullconformal.estimators.fitting import Settings, fit_problem
from fullconformal.estimators.large import fitted_engine, prefit_engine
from fullconformal.estimators.options import NEIGHBORS, FullOptions
from fullconformal.estimators.refits import FitScore, Neighbors, Refit, settings_of
from fullconformal.estimators.shards import Fit
from fullconformal.estimators.streams import Stream, is_mapped


def make_engine(
    options: FullOptions, method: str, classes: npt.NDArray[Any], final: Any, X: Any, y: npt.NDArray[np.int64],
    settings: Settings, memory: int,
) -> Engine:  # fmt: skip
    """The engine of a method, the model `final` fitted to objects X and label indices y (n,) where it is to be."""
    n_classes = len(classes)
    if method == "exact" and isinstance(final, NEIGHBORS):
        return Neighbors(final, X, y, n_classes, memory)
    if method == "exact" and not options._is_convex(final):
        fit_score = FitScore(final, replace(settings, progress=None), n_classes)
        return Refit(fit_score, X, y, options.n_jobs, options.checkpoint, print if options.verbose else None)
    streams = options.curvature == "last_layer_kron" or (options.curvature == "last_layer" and is_mapped(X))
    if streams and options.prefit and options.head is None and isinstance(final, nn.Module):
        return prefit_engine(options, Stream(X, y), settings.progress, n_classes)
    fit = _open_fit(options, classes, final, X, y, settings) if method == "influence" else None
    problem = (fit.problem if fit else fit_problem)(final, X, y, classes, settings)
    if method != "influence":
        return (Symmetric if method == "symmetric" else Exact)(problem, memory)
    if options.curvature == "last_layer_kron":
        return fitted_engine(options, problem)
    choice = options._choice(problem, memory)
    keep = trainable(problem, choice.name)
    held = held_parameters(problem, keep) if choice.name in LAYERS else ""
    foretold = tuple(map(str, choice.estimates))
    if options.verbose:
        print(f"curvature {choice.name}, of what was considered: {'; '.join(foretold)}")
    name = {"last_layer": "ggn of the last layer"}.get(choice.name, choice.name)
    return Influence(hold_fixed(problem, keep), choice.curvature, name, memory, options.prune, held, foretold, fit)


def _open_fit(
    options: FullOptions, classes: npt.NDArray[Any], final: Any, X: Any, y: npt.NDArray[np.int64], settings: Settings
) -> Fit | None:
    """The parts of a fit that is shared out, or None."""
    if options.curvature == "last_layer_kron" or not options._work().shared:
        return None
    if options.prefit and not isinstance(final, nn.Module):  # whose parameters do not tell what it has learned
        final = fit_problem(final, X, y, classes, settings).model
    key = (settings_of(final), settings.l2, settings.prefit, settings.max_epochs, settings.seed, settings.head)
    how = str(settings.dtype), options.curvature, options.damping, options.memory_budget
    return Fit.open(options._work(), X, y, repr((*key, *how)))
