"""Which engine the options of full conformal prediction ask for, and how it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fullconformal.curvature import DenseCurvature
from fullconformal.estimators.convex import Exact, Symmetric
from fullconformal.estimators.curvatures import LAYERS, held_parameters, hold_fixed, trainable
from fullconformal.estimators.engines import Engine, Influence
from fullconformal.estimators.fitting import L2_LINEAR, Settings, fit_problem, name_of
from fullconformal.estimators.inputs import check_squares
from fullconformal.estimators.large import fitted_engine, prefit_engine
from fullconformal.estimators.options import NEIGHBORS, FullOptions
from fullconformal.estimators.refits import FitScore, Neighbors, Refit, settings_of
from fullconformal.estimators.shards import Fit
from fullconformal.estimators.streams import Stream, is_mapped
from fullconformal.estimators.two_classes import NUMBERS, two_classes
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
    if method == "influence" and final is None and n_classes == 2 and is_small(options, X, settings):
        small = two_classes(X, y, L2_LINEAR if settings.l2 is None else settings.l2, memory, options.prune)
        if small is not None:
            return small
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
    return Influence(problem, choice.curvature, name, memory, options.prune, held, foretold, fit)


def is_small(options: FullOptions, X: Any, settings: Settings) -> bool:
    """Whether a logistic regression of two classes is done with before others have begun, and asks for nothing special."""
    usual = options.curvature in ("auto", "ggn") and options.damping is None
    plain = usual and not options.verbose and not options._work().shared
    here = settings.dtype in (None, torch.float64) and torch.device(settings.device).type == "cpu"
    return (
        plain
        and here
        and isinstance(X, np.ndarray)
        and X.ndim == 2
        and X.shape[1] * max(X.shape) <= NUMBERS
        and 64 * (X.size + X.shape[1] ** 2) <= options._memory
    )


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
