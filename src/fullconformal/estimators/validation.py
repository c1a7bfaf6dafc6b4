"""Checks of the arguments users give: their kind, their size, and what goes with what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils.validation import _check_sample_weight, _num_samples, column_or_1d
from torch import nn

from fullconformal import sets
from fullconformal.conformity import APS, RAPS, SCORES, ConformityScore
from fullconformal.curvature import CURVATURES, Curvature
from fullconformal.estimators.categories import Array, as_groups, check_categories
from fullconformal.estimators.inputs import index_labels, labels, warn_frozen
from fullconformal.influence import APPROXIMATIONS
from fullconformal.losses import LOSSES, Loss
from fullconformal.methods.base import Method
from fullconformal.methods.fitting import trained_here
from fullconformal.methods.folds import UPDATES
from fullconformal.methods.gaussian import is_gaussian
from fullconformal.methods.oob import is_forest
from fullconformal.methods.select import METHODS, is_convex, is_neighbors, takes_folds
from fullconformal.models.requirements import check_estimator_kind, check_instance, split_pipeline

#: q of each scheme: whether a point's score is its loss with it, half-way, or without it
SCHEMES = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}
DTYPES = {"auto": None, "float32": torch.float32, "float64": torch.float64}


def check_option(name: str, value: Any, allowed: Sequence[str], other: str = "") -> None:
    """Raise unless value is one of the allowed words; `other` says what else may be given."""
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(
            f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}{' or ' * bool(other)}{other}."
        )


def check_number(name: str, value: Any, low: float, what: str, high: float = np.inf, *, strict: bool = False) -> None:
    """Raise unless value is a finite number ≥ low (> low where strict) and ≤ high."""
    good = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and np.isfinite(value)
    if not good or not low <= value <= high or (strict and value == low):
        raise ValueError(f"{name}={value!r} is not allowed; give {what}.")


def check_whole(name: str, value: Any, low: int, what: str) -> None:
    """Raise unless value is a whole number ≥ low."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r} is not allowed; give {what}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless value is a truth value: "no" would count as yes."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} is not allowed; give True or False.")


def check_level(level: Any) -> None:
    """Raise unless it is one confidence level."""
    if sets.check_levels(level).ndim:
        raise ValueError(f"confidence_level={level!r} must be one number; give several to predictions.")


def check_shared(clf: Any) -> None:
    """Raise if a parameter that several classifiers share is invalid."""
    sets.check_levels(clf.confidence_level)
    warn_frozen(clf.estimator, getattr(clf, "prefit", False))
    check_categories(getattr(clf, "categories", None))
    for name in ("randomized", "class_conditional", "prefit", "allow_empty", "minmax"):
        check_flag(name, getattr(clf, name, True))
    check_whole("max_epochs", getattr(clf, "max_epochs", 0), 0, "a whole number ≥ 0")
    if getattr(clf, "l2", None) is not None:
        check_number("l2", clf.l2, 0, "None or a number ≥ 0")
    jobs, folder = getattr(clf, "n_jobs", None), getattr(clf, "checkpoint", None)
    if jobs is not None and (not isinstance(jobs, (int, np.integer)) or isinstance(jobs, bool) or jobs == 0):
        raise ValueError(f"n_jobs={jobs!r} is not allowed; give None, a whole number ≥ 1, or -1 for all cores.")
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"checkpoint={folder!r} is not allowed; give None or the path of a folder.")
    if folder is not None and os.path.isfile(folder):
        raise ValueError(f"checkpoint={str(folder)!r} is a file; give the path of a folder.")
    if clf.verbose is not None and not isinstance(clf.verbose, (bool, np.bool_)):
        check_whole("verbose", clf.verbose, 0, "None, 0 or 1")


def check_weights(weights: Any, n: int, m: int) -> tuple[Any, Any]:
    """Checked weights of the n training points (or None) and of the m candidates, (m, 1)."""
    if weights is None:
        return None, 1.0
    if not isinstance(weights, tuple) or len(weights) != 2:
        raise ValueError("weights must be a pair (weights of the training points, weights of the test points).")
    checked = [np.asarray(part, dtype=np.float64) for part in weights]
    for part, size, name in zip(checked, (n, m), ("training", "test"), strict=True):
        if part.shape != (size,) or not np.isfinite(part).all() or (part < 0).any() or not part.any():
            raise ValueError(
                f"weights of the {name} points must be {size} finite numbers ≥ 0, not all 0; got shape {part.shape}."
            )
    return checked[0], checked[1][:, None]


def check_sample_weight(est: Any, weights: Any, X: Any) -> Any:
    """Checked weights (n,) of training points in the fit, or None."""
    if weights is None:
        return None
    if getattr(est, "prefit", False):
        raise ValueError("sample_weight was given with prefit=True, where nothing is trained; leave one of them out.")
    return _check_sample_weight(weights, X, dtype=np.float64, ensure_non_negative=True)


def check_takes_weights(method: Any, weights: Any) -> None:
    """Raise where there are weights in training, and a method does not train with them."""
    if weights is not None and not method.takes_weights:
        raise ValueError(
            f"sample_weight goes with method='folds', and with 'exact' of Ridge and LinearRegression; this is {method.name!r} of another "
            "kind. Leave it out, or take folds."
        )


def check_groups(groups: Any, n: int, method: str) -> Array | None:
    """Checked groups (n,) of the training points, or None; of a method that has them."""
    if groups is None:
        return None
    if method != "folds":
        raise ValueError(f"groups go with method='folds', and this is {method!r}; leave them out, or ask for folds.")
    return as_groups(groups, n)


def check_audit(n_pairs: Any, max_refits: Any) -> None:
    """Raise if an argument of an audit is invalid, or what is audited has no refits to be compared with."""
    check_whole("n_pairs", n_pairs, 1, "a whole number ≥ 1")
    check_whole("max_refits", max_refits, n_pairs, "a whole number of at least n_pairs")


def check_fresh(X: Any, y: Any, classes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Label indices (m,) of fresh points, which must be known labels, one for each object."""
    y = column_or_1d(labels(y))
    index = index_labels(y, classes, "unseen in training")
    if _num_samples(X) != len(y):
        raise ValueError(f"y must hold one label for each of the {_num_samples(X)} objects in X, got {len(y)}.")
    return index


def check_engine(est: Any, curvatures: tuple[str, ...]) -> None:
    """Raise if a parameter of full CP that labels and values share is invalid."""
    check_shared(est)
    check_option("transformers", est.transformers, ("bag", "fixed"))
    check_option("scheme", est.scheme, tuple(SCHEMES))
    check_whole("folds", est.folds, 2, "a whole number ≥ 2")
    check_whole("repeats", est.repeats, 1, "a whole number ≥ 1")
    if not isinstance(est.curvature, Curvature):
        check_option("curvature", est.curvature, ("auto", *curvatures))
    if est.damping is not None:
        check_number("damping", est.damping, 0, "None or a number ≥ 0")
        if isinstance(est.curvature, Curvature):
            raise ValueError("damping was given twice: a Curvature object carries its own, so leave damping=None.")
    check_number("memory_budget", est.memory_budget, 0, "a number of GiB > 0", strict=True)
    check_option("dtype", est.dtype, tuple(DTYPES))


def check_full(clf: Any) -> None:
    """Raise if a parameter of `FullConformalClassifier` is invalid, before anything long begins."""
    own_method = isinstance(clf.method, Method)
    if not own_method:
        check_option("method", clf.method, METHODS)
    elif (clf.folds, clf.repeats, clf.update) != (10, 1, "none"):
        raise ValueError(
            "folds, repeats and update apply only to method='folds'. You passed an object, "
            f"{type(clf.method).__name__}: set what it takes there, e.g. Folds(folds=3)."
        )
    check_engine(clf, (*CURVATURES, "last_layer_kron"))
    check_scores(clf)
    check_option("update", clf.update, UPDATES)
    if clf.method == "folds" and clf.scheme != "deleted":
        raise ValueError(
            f"scheme={clf.scheme!r} does not go with method='folds': no model has seen the point that it scores; take 'deleted'."
        )
    if not isinstance(clf.loss, Loss):
        check_option("loss", clf.loss, tuple(LOSSES))
    final = split_pipeline(clf.estimator)[1]
    if is_neighbors(final) and clf.method in ("influence", "symmetric"):
        raise ValueError(
            f"method={clf.method!r} needs a loss; {type(final).__name__} has method='exact', without refits."
        )
    refits = clf.method == "exact" and hasattr(final, "predict_proba") and not is_convex(final, clf.head)
    if own_method or clf.method == "oob" or (clf.method == "auto" and is_forest(final)):
        check_instance(final)
        if clf.l2 is not None and is_forest(final):
            raise ValueError(f"l2={clf.l2!r} was given, but {type(final).__name__} has no penalty; leave it out.")
    elif (clf.method == "auto" and (is_neighbors(final) or is_gaussian(final))) or refits:
        if clf.prefit or clf.l2 is not None:
            raise ValueError(f"prefit and l2 do not go with exact full CP of {type(final).__name__}; leave them out.")
    elif takes_folds(final, clf.method, clf, clf.scheme == "deleted"):
        check_trainable(clf.estimator, clf.l2)
    else:
        check_estimator_kind(clf.estimator, clf.l2, clf.head)
    if clf.prefit and clf.estimator is None:
        raise ValueError("prefit=True needs a fitted estimator; estimator=None is fitted here.")
    if clf.loss not in ("softmax", LOSSES["softmax"]) and (not isinstance(final, nn.Module) or clf.head is not None):
        raise ValueError(
            f"loss={clf.loss!r} needs a torch.nn.Module as estimator, without head=; other classifiers bring their own loss."
        )


def check_scores(clf: Any) -> None:
    """Raise if a parameter of `FullConformalClassifier` that may be changed after fit is invalid."""
    check_option("scheme", clf.scheme, tuple(SCHEMES))
    check_flag("class_conditional", clf.class_conditional)
    check_option("approximation", clf.approximation, tuple(APPROXIMATIONS))
    if not (isinstance(clf.prune, (bool, np.bool_)) or clf.prune == "auto"):
        raise ValueError(f"prune={clf.prune!r} is unknown; allowed: 'auto', True, False.")


def check_stream(clf: Any, y: Any, classes: Any = None, groups: Any = None, weights: Any = None) -> None:
    """Raise where a dataset or loader cannot be taken, before it is read."""
    transformers, final = split_pipeline(clf.estimator)
    given = "a Dataset or DataLoader as X"
    if y is not None:
        raise ValueError(f"y was given beside {given}, which yields its own labels; leave y out.")
    if classes is not None:
        raise ValueError(f"classes was given beside {given}, whose classes are the network's outputs; leave it out.")
    if groups is not None or weights is not None or clf.categories is not None:
        raise ValueError(f"groups, sample_weight or categories go with arrays, not with {given}; leave them out.")
    if not clf.prefit or transformers is not None or clf.head is not None or not isinstance(final, nn.Module):
        raise ValueError(f"{given} needs a trained torch.nn.Module as estimator, with prefit=True and without head=.")
    if clf.curvature not in ("last_layer", "last_layer_kron"):
        raise ValueError(
            f"{given} needs curvature='last_layer_kron' or 'last_layer', which keep no training objects; got {clf.curvature!r}."
        )
    if clf.method not in ("auto", "influence"):
        raise ValueError(f"{given} needs method='influence', got {clf.method!r}.")


def check_held_out(clf: Any, tunes: bool = False) -> None:
    """Raise if a parameter of a classifier that calibrates on held-out points is invalid; `tunes` if it tunes RAPS."""
    if not isinstance(clf.conformity_score, ConformityScore):
        check_option("conformity_score", clf.conformity_score, tuple(SCORES), "a ConformityScore object")
    check_shared(clf)
    if clf.k_reg is not None:
        check_whole("k_reg", clf.k_reg, 0, "None or a whole number ≥ 0")
    if clf.lambda_reg is not None:
        check_number("lambda_reg", clf.lambda_reg, 0, "None or a number ≥ 0")
    if not tunes and not score_of(clf).complete:
        raise ValueError(
            f"conformity_score='raps' needs k_reg and lambda_reg, got {clf.k_reg!r} and {clf.lambda_reg!r}; only "
            "SplitConformalClassifier tunes them, on a part of its calibration points."
        )
    check_trainable(clf.estimator, clf.l2)


def check_trainable(estimator: Any, l2: float | None) -> None:
    """Raise unless the estimator can be trained on any part of the data and has probabilities."""
    final = split_pipeline(estimator)[1]
    if trained_here(final):
        check_estimator_kind(estimator, l2)
        return
    check_instance(final)
    name = type(final).__name__
    # A stack whose last estimator is left to scikit-learn has one once it is fitted.
    if not hasattr(estimator, "predict_proba") and getattr(final, "final_estimator", estimator) is not None:
        remedy = f"for instance sklearn.calibration.CalibratedClassifierCV({name}(...)), or predict numbers by FullConformalRegressor"
        raise TypeError(f"estimator={name} has no predict_proba; give a classifier that has, {remedy}.")
    if l2 is not None:
        raise ValueError(f"l2={l2!r} was given, but {name} brings its own penalty; set it there.")


def score_of(clf: Any) -> ConformityScore:
    """The conformity score that a classifier's parameters ask for."""
    asked = clf.conformity_score
    if isinstance(asked, ConformityScore):
        return asked
    kind, never_empty = SCORES[asked], not getattr(clf, "allow_empty", True)
    if kind is RAPS:
        return RAPS(never_empty, clf.k_reg, clf.lambda_reg)
    return APS(never_empty) if kind is APS else kind()


def check_cv(est: Any) -> None:
    """Raise unless folds are a number of at least two, a splitter, or a list."""
    check_whole("n_folds", est.n_folds, 2, "a whole number ≥ 2")
    if est.cv is not None and not (hasattr(est.cv, "split") or isinstance(est.cv, (list, tuple))):
        raise ValueError(
            f"cv={est.cv!r} is not allowed; give a scikit-learn splitter or a list of pairs (train, test) of indices."
        )


def check_share(clf: Any) -> None:
    """Raise unless calibration_size is a share."""
    if not (isinstance(clf.calibration_size, (float, np.floating)) and 0 < clf.calibration_size < 1):
        raise ValueError(f"calibration_size={clf.calibration_size!r} is not allowed; give a share between 0 and 1.")


def check_regressor(estimator: Any, name: str = "estimator") -> None:
    """Raise unless it is None, or can be fitted and predicts: a regressor of scikit-learn's kind, or a Pipeline that ends in one."""
    if estimator is None:
        return
    final = split_pipeline(estimator)[1]
    check_instance(final)
    if isinstance(final, nn.Module):
        raise TypeError(
            f"{name}={type(final).__name__} is a torch module; wrap it as a regressor, skorch.NeuralNetRegressor(module), or take "
            "sklearn.neural_network.MLPRegressor."
        )
    if isinstance(estimator, BaseEstimator) and is_classifier(estimator):
        raise TypeError(
            f"{name}={type(final).__name__} is a classifier; give a regressor, or predict labels with FullConformalClassifier."
        )
    # A stack whose last estimator is left to scikit-learn predicts once it is fitted.
    predicts = hasattr(estimator, "predict") or getattr(final, "final_estimator", estimator) is None
    if not hasattr(estimator, "fit") or not predicts:
        given = type(final).__name__ if hasattr(estimator, "fit") else repr(estimator)
        raise TypeError(
            f"{name}={given} has no fit and predict; give a regressor, for example sklearn.linear_model.Ridge()."
        )
