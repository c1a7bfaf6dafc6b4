"""Columns that loaded transformers make: no more than a file of its size can bear out, and none outside of their array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.base import clone

from fullconformal.storage.container import StorageError
from fullconformal.storage.values import Packer

# Those that make more columns than they are given, and where those that put columns side by side have their steps.
UNIONS = {"FeatureUnion": "transformer_list", "ColumnTransformer": "transformers_"}
MAKERS = {
    "PolynomialFeatures", "OneHotEncoder", "PCA", "TruncatedSVD", "FeatureUnion", "ColumnTransformer", "LabelBinarizer",
    "MissingIndicator", "SimpleImputer", "RoundedImputer", "KNNImputer", "KBinsDiscretizer",
    "LinearDiscriminantAnalysis",
}  # fmt: skip
GROWING = MAKERS | {"Pipeline", "FrozenEstimator"}


def learn_polynomials(estimator: Any, fitted: dict[str, Any], most: int) -> None:
    """Let PolynomialFeatures count its columns itself, if there are no more than so many."""
    degree = estimator.degree[-1] if isinstance(estimator.degree, tuple) else estimator.degree
    d = fitted["n_features_in_"]
    known = type(degree) is int and 0 <= degree <= 2**10
    if known and estimator.interaction_only:
        known = sum(math.comb(d, k) for k in range(min(degree, d) + 1)) <= most if d <= 2**10 or degree <= 2 else False
    elif known:
        known = math.comb(d + min(degree, most), degree) <= most
    if not known:
        raise StorageError(f"PolynomialFeatures of degree {degree!r} makes more columns than its file bears out")
    estimator.fit(np.zeros((1, d)))


def check_codes(encoder: Any) -> None:
    """Raise unless a OneHotEncoder has a column for every code that it gives: compiled code writes at these columns without looking."""
    codes = [len(categories) for categories in encoder.categories_]
    whole = all(in_order(categories) for categories in encoder.categories_)
    if getattr(encoder, "_infrequent_enabled", False):
        rare, mappings = encoder._infrequent_indices, encoder._default_to_infrequent_mappings
        whole &= len(codes) == len(rare) == len(mappings)
        for k, mapping in enumerate(mappings):
            whole &= (mapping is None) == (rare[k] is None)
            if mapping is not None:
                whole &= mapping.dtype.kind == "i" and mapping.shape == (codes[k],) and bool((mapping >= 0).all())
                codes[k] = int(mapping.max(initial=-1)) + 1
    dropped = encoder._drop_idx_after_grouping
    if dropped is not None:
        whole &= len(dropped) == len(codes)
        # A fraction would drop no code, and leave one code too many.
        whole &= all(
            drop is None or (isinstance(drop, (int, np.integer)) and not isinstance(drop, bool) and 0 <= drop < size)
            for drop, size in zip(dropped, codes, strict=False)
        )
        codes = [size - (drop is not None) for drop, size in zip(dropped, codes, strict=False)]
    # It may be fitted again, with the categories it is given.
    given = encoder.categories_ if isinstance(encoder.categories, str) else encoder.categories
    whole &= [np.size(categories) for categories in given] == [len(categories) for categories in encoder.categories_]
    if not whole or codes != encoder._n_features_outs:
        raise StorageError("an encoder has other columns than categories")


def check_steps(union: Any) -> None:
    """Raise unless a ColumnTransformer, if it is fitted again, fits the steps and columns that it has: no others were looked at."""
    packer, fitted = Packer(), {step[0]: step for step in union.transformers_}
    for name, step, *columns in (*union.transformers, ("remainder", union.remainder)):
        # What no column was left for was not fitted.
        if (name, name in fitted) == ("remainder", False) and type(step).__name__ not in GROWING:
            continue
        _, own, *seen = fitted.get(name, ("", "drop", None))
        alike = isinstance(step, str) or packer.pack(clone(step)) == packer.pack(clone(own, safe=False))
        if not alike or (columns and packer.pack(columns) != packer.pack(seen)):
            raise StorageError("a ColumnTransformer has fitted other steps than it was given")


def in_order(categories: Any) -> bool:
    """Whether categories (k,) that are numbers ascend, as they are looked up by that; one NaN may come last."""
    if categories.dtype.kind not in "biuf":
        return True
    numbers = categories[:-1] if np.isnan(categories[-1:]).any() else categories
    return bool((numbers[:-1] < numbers[1:]).all())


def width(estimator: Any) -> int:
    """Columns that a transformer makes; of a Pipeline, those of its widest step; 0 where it passes on those it is given."""
    name = type(estimator).__name__
    if name == "Pipeline":
        return max((width(step) for _, step in estimator.steps), default=0)
    if name in UNIONS:
        steps = getattr(estimator, UNIONS[name], [])
        if sum(passes_on(step) for step in steps) > 1:
            raise StorageError(f"{name} passes the same columns on more than once")
        given = int(getattr(estimator, "n_features_in_", 0))
        slices = [part for step in steps for part in step[2:] if isinstance(part, slice)]
        sliced = sum(len(range(*part.indices(given))) for part in slices)
        # Of tables a ColumnTransformer takes the columns that it has numbered itself.
        numbered = {at: np.size(own) for at, own in getattr(estimator, "_transformer_to_input_indices", {}).items()}
        return sliced + sum(max(width(step[1]), len(listed(step)), numbered.get(step[0], 0)) for step in steps)
    if name == "FrozenEstimator":
        return width(estimator.estimator)
    if name == "PolynomialFeatures":
        return int(getattr(estimator, "n_output_features_", 0))
    given = int(getattr(estimator, "__dict__", {}).get("n_features_in_", 0))
    if name in ("PCA", "TruncatedSVD"):
        # If it is fitted again it may make as many as it is asked for, or given.
        asked = estimator.n_components if isinstance(estimator.n_components, (int, np.integer)) else given
        return max(len(getattr(estimator, "components_", ())), int(asked))
    if name == "LinearDiscriminantAnalysis":
        return int(max(given, *np.shape(getattr(estimator, "scalings_", ()))))
    if name == "OneHotEncoder":
        return sum(getattr(estimator, "_n_features_outs", ()))
    if name == "KBinsDiscretizer":
        # Or, if it is fitted again, of each column as many as it is asked for.
        return int(np.broadcast_to(estimator.n_bins, given).sum(dtype=np.int64))
    if name in ("MissingIndicator", "LabelBinarizer"):
        return max(given, len(getattr(estimator, "features_", ())), len(getattr(estimator, "classes_", ())))
    # Imputers put marks of what was missing beside their columns.
    return given + (width(estimator.indicator_) if hasattr(estimator, "indicator_") else 0)


def longest_name(estimator: Any, given: int = 1) -> int:
    """Characters of the longest name that a transformer gives a column, if those it is given have names as long as that."""
    name = type(estimator).__name__
    if name == "FrozenEstimator":
        return longest_name(estimator.estimator, given)
    given = max([given, *(len(str(own)) for own in getattr(estimator, "feature_names_in_", ()))])
    for _, step in getattr(estimator, "steps", ()):
        given = longest_name(step, given)
    united = getattr(estimator, UNIONS.get(name, ""), ())
    prefixed = [len(str(at)) + longest_name(step, given) for at, step, *_ in united]
    if name == "PolynomialFeatures":
        given *= max(1, min(int(np.max(estimator.degree)), getattr(estimator, "n_features_in_", 1)))
    words = (len(str(word)) for known in getattr(estimator, "categories_", ()) for word in known)
    # And a number, or a word of scikit-learn's.
    return max([given, *prefixed]) + max(words, default=0) + 24


def listed(step: Any) -> Any:
    """The columns of a step of a ColumnTransformer, where they are listed: as many as it is given."""
    columns = step[2] if len(step) > 2 else ()
    return [columns] if isinstance(columns, (str, int)) else () if isinstance(columns, slice) else columns


def passes_on(step: Any) -> bool:
    """Whether a named step gives as many columns as it is given, however many these are."""
    one, name = step[1], type(step[1]).__name__
    if isinstance(one, str) or one is None or len(listed(step)):
        return one in ("passthrough", None) and not len(listed(step))
    if name == "Pipeline":
        return all(passes_on(part) for part in one.steps)
    if name in UNIONS:
        return any(passes_on(part) for part in getattr(one, UNIONS[name], []))
    if name == "FrozenEstimator":
        return passes_on(("", one.estimator))
    # These learn nothing; the others are of no use before they are fitted, and check how many columns they are given.
    unsure = name in ("Normalizer", "Binarizer", "MissingIndicator") and "n_features_in_" not in vars(one)
    return name == "FunctionTransformer" or unsure
