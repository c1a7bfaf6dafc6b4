"""A Pipeline in two: its transformers, and the classifier at its end."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.feature_selection import SelectorMixin, VarianceThreshold
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array

from fullconformal.models.tensors import place


def split_pipeline(estimator: Any) -> tuple[Pipeline | None, Any]:
    """The transformers of a Pipeline (None where there are none) and the classifier at its end."""
    if isinstance(estimator, Pipeline):
        return (estimator[:-1] if len(estimator) > 1 else None), estimator[-1]
    return None, estimator


def fit_transformer(head: Pipeline | None, X: Any, y: Any, prefit: bool) -> tuple[Pipeline | None, Any]:
    """Fitted transformers and the transformed X."""
    if head is None:
        return None, X
    head = head if prefit else clone(head).fit(X, y)
    return head, transform(head, X)


def transform(head: Pipeline, X: Any) -> Any:
    """X through the transformers, as a dense, finite array."""
    out = head.transform(X)
    out = out.toarray() if hasattr(out, "toarray") else out
    try:
        return check_array(out, dtype="numeric", ensure_2d=False, allow_nd=True, input_name="X (transformed)")
    except ValueError as error:
        if getattr(getattr(out, "dtype", None), "kind", "") != "f" or np.isfinite(out).all():
            raise
        at = [int(i) for i in np.argwhere(~np.isfinite(out))[0]]
        raise ValueError(
            f"X holds NaN or infinity once it is transformed, first in object {at[0]}, {place(at)}: impute missing values in the "
            "Pipeline, and look for numbers so large that their squares overflow."
        ) from error


def needs_labels(step: Any) -> bool:
    """Whether a transformer learns from y: its tags say so, or it selects features by anything but their variance."""
    tags = getattr(step, "__sklearn_tags__", None)
    selects = isinstance(step, SelectorMixin) and not isinstance(step, VarianceThreshold)
    return selects or (tags is not None and bool(tags().target_tags.required))
