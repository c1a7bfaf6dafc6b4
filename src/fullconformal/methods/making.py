"""Which engine the options of full conformal prediction ask for, and how it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fullconformal.curvature import DenseCurvature
from fullconformal.curvature.select import LAYERS, held_parameters, hold_fixed, trainable
from fullconformal.estimators.options import NEIGHBORS, FullOptions
from fullconformal.influence.shards import Fit
from fullconformal.last_layer.stream import Stream, is_mapped
from fullconformal.methods.convex import Exact, Symmetric
from fullconformal.methods.engines import Engine, Influence
from fullconformal.methods.fitting import Settings, fit_problem
from fullconformal.methods.last_layer import fitted_engine, prefit_engine
from fullconformal.methods.probability import FitScore, Neighbors, Refit, settings_of
from fullconformal.models.tensors import check_squares, name_of
from fullconformal.problem import in_contrasts


def make_engine(
    options: FullOptions, method: str, classes: npt.NDArray[Any], final: Any, X: Any, y: npt.NDArray[np.int64], settings: Settings
) -> Engine:  # fmt: skip
    """The engine of a method, the model `final` fitted to objects X and label indices y (n,) where it is to be."""
    span = options._span_of(final, X)
    if span is None:
        return _make_engine(options, method, classes, final, X, y, settings)
    check_squares(X, name_of(settings.dtype or torch.float64))  # whose error names a column
    engine = _make_engine(options, method, classes, final, span.coordinates(X), y, settings)
    assert isinstance(engine, Influence)
    engine.span = span
    return engine


def _make_engine(
    options: FullOptions, method: str, classes: npt.NDArray[Any], final: Any, X: Any, y: npt.NDArray[np.int64], settings: Settings
) -> Engine:  # fmt: skip
    """The same of objects in the coordinates that the model is to have."""
    n_classes, memory = len(classes), options._memory
    if method == "exact" and isinstance(final, NEIGHBORS):
        return Neighbors(final, X, y, n_classes, memory)
    if method == "exact" and not options._is_convex(final):
        fit_score = FitScore(final, replace(settings, progress=None), classes)
        return Refit(fit_score, X, y, options.n_jobs, options.checkpoint, print if options.verbose else None)
    streams = options.curvature == "last_layer_kron" or (options.curvature == "last_layer" and is_mapped(X))
    if streams and options.prefit and options.head is None and isinstance(final, nn.Module):
        return prefit_engine(options, Stream(X, y), settings.progress, n_classes)
    fit = _open_fit(options, classes, final, X, y, settings) if method == "influence" else None
    if (
        method == "influence" and fit is None
    ):  # parts that are kept or shared out, and `last_layer_kron`, know C weight vectors
        settings = replace(settings, contrasts=options.curvature != "last_layer_kron")
    problem = (fit.problem if fit else fit_problem)(final, X, y, classes, settings)
    if method != "influence":
        return (Symmetric if method == "symmetric" else Exact)(problem, memory)
    if options.curvature == "last_layer_kron":
        return fitted_engine(options, problem)
    choice = options._choice(problem)
    keep = trainable(problem, choice.name)
    held = held_parameters(problem, keep) if choice.name in LAYERS else ""
    foretold = tuple(map(str, choice.estimates))
    if options.verbose:
        print(f"curvature {choice.name}, of what was considered: {'; '.join(foretold)}")
    name = {"last_layer": "ggn of the last layer"}.get(choice.name, choice.name)
    problem = hold_fixed(problem, keep)
    problem = in_contrasts(problem) if isinstance(choice.curvature, DenseCurvature) else problem
    return Influence(problem, choice.curvature, name, memory, held, foretold, fit)


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
