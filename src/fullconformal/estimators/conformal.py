"""What all conformal predictors share: parameters kept, fits whole or not at all, checked input, what is saved."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import _num_samples, column_or_1d, validate_data
from torch import Tensor, nn

from fullconformal.estimators import inputs
from fullconformal.guarantees import Guarantee
from fullconformal.models.requirements import split_pipeline
from fullconformal.storage import StorageError, expect, require

Fit = TypeVar("Fit", bound=Callable[..., Any])

#: attributes that one fit sets and the next may not
SOMETIMES_SET = ("n_features_in_", "feature_names_in_", "_sample", "k_reg_", "lambda_reg_")


def whole_or_nothing(fit: Fit) -> Fit:
    """Let `fit` work on a copy that is taken over once it is fitted: a fit that fails or is interrupted leaves the earlier one."""

    @wraps(fit)
    def fit_a_copy(self: Conformal, *args: Any, **options: Any) -> Any:
        fresh = copy.copy(self)
        for name in SOMETIMES_SET:
            fresh.__dict__.pop(name, None)
        fit(fresh, *args, **options)
        self.__dict__ = fresh.__dict__
        return self

    return cast(Fit, fit_a_copy)


class Conformal(BaseEstimator):  # type: ignore[misc]
    """Base of all predictors."""

    estimator: Any
    n_samples_fit_: int
    confidence_level: float
    #: the first training objects as they were given
    _sample: Any

    def _keep(self, given: dict[str, Any]) -> None:
        """Keep a constructor's parameters, its `locals()`, as they are."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    @property
    @abstractmethod
    def guarantee_(self) -> Guarantee:
        """What is promised of the sets: ``word`` ("exact", "1 − 2ε", "approximate"), ``coverage(confidence_level)``, ``reason``."""

    @property
    def display_name(self) -> str:
        """What the method is called beside others."""
        family = type(self).__name__.removesuffix("Classifier").removesuffix("Regressor").removesuffix("Conformal")
        return family.replace("Plus", "+") if "Plus" in family else f"{family.lower()} CP"

    def notes(self) -> list[str]:
        """What a reader of the sets should know, a sentence each; a warning begins with "!"."""
        return []

    def save(self, path: Any, *, factory: Any = None) -> None:
        """Write the fitted predictor to one safetensors file, which `fullconformal.load` reads; whole or not at all.

        Parameters
        ----------
        path : path
            By custom it ends in ``.safetensors``. A file of that name is replaced.
        factory : str or callable, optional
            For modules that are no sequence of usual layers: ``"package.module:function"`` that returns the architecture.
            Weights are saved, code is not: whoever loads the file gives the factory again.

        Raises
        ------
        StorageError
            Where a part cannot be saved; it says which, and what to do.
        """
        # Imported here, since saving imports every estimator.
        from fullconformal.estimators.saving import save

        save(self, path, factory=factory)

    def state(self) -> dict[str, Any]:
        """What is saved: parameters and fitted attributes; of the estimator its fit only where it came fitted."""
        params = self.get_params(deep=False)
        params["estimator"] = self.estimator if params.get("prefit") else clone(self.estimator, safe=False)
        if "checkpoint" in params:
            params["checkpoint"] = None
        for name, remedy in (("random_state", 0), ("cv", None)):
            value = params.get(name)
            if value is not None and not isinstance(value, (int, np.integer, list)):
                raise StorageError(f"{name}={value!r} cannot be saved; call set_params({name}={remedy}) first.")
        return {"params": params, "fitted": {name: value for name, value in vars(self).items() if name not in params}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The predictor again, not yet verified."""
        clf = cls(**expect(state["params"], dict))
        if isinstance(clf.estimator, nn.Module):
            clf.estimator = clf.estimator.cpu()
        fitted = expect(state["fitted"], dict)
        for name in fitted:
            known = not name.startswith("__") and not callable(getattr(cls, name, None))
            require(known, f"attribute {name[:40]!r}")
        clf.__dict__.update(fitted)
        return clf

    @abstractmethod
    def verify(self) -> None:
        """Raise a StorageError where a loaded predictor is not whole."""

    def warn_unreachable(self, levels: npt.NDArray[np.float64]) -> None:
        """Warn of confidence levels at which sets hold everything, whatever the object; nothing to warn of by default."""

    @staticmethod
    @abstractmethod
    def _targets(y: Any) -> Any:
        """y (n,) as given, turned into what the predictor learns from; an error says what is wrong with it."""

    def _checked(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Checked copies of what the user gave; a Pipeline's transformers do their own checking of X."""
        X, y = (inputs.array(part) if isinstance(part, Tensor) else part for part in (X, y))
        X = inputs.unmasked("X", X)
        y = y if isinstance(y, str) and y == "no_validation" else self._targets(y)
        inputs.check_names(X)
        # CSR, because we index rows.
        X = X.tocsr() if issparse(X) else X
        transformers, final = split_pipeline(self.estimator)
        if transformers is None:
            inputs.check_columns(X)
            module = isinstance(final, nn.Module)
            # scikit-learn's wording asks for two dimensions; modules may take images.
            missing = "allow-nan" if inputs.takes_missing(final) else True
            out = inputs.validated(
                self, X, y, reset=reset, ensure_2d=not module, allow_nd=module, ensure_all_finite=missing
            )
            return (inputs.native(out[0]), out[1]) if isinstance(out, tuple) else inputs.native(out)
        inputs.check_rows(X, 0 if reset else getattr(self, "n_features_in_", 0))
        out = validate_data(self, X, y, reset=reset, skip_check_array=True)
        if not isinstance(out, tuple):
            return out
        X, y = out[0], column_or_1d(out[1], warn=True)
        if _num_samples(X) != len(y):
            raise ValueError(f"X has {_num_samples(X)} rows and y has {len(y)} labels; they must be as many.")
        return X, y
