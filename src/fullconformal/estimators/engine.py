"""What full conformal prediction shares between labels and values: how it is set up, its objects, and what its promise lacks, in words."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from fullconformal.estimators import validation
from fullconformal.estimators.base import Conformal
from fullconformal.estimators.categories import tied_at_the_top
from fullconformal.losses import Loss
from fullconformal.methods.base import Config, ConformalWarning
from fullconformal.methods.fitting import fit_steps
from fullconformal.methods.select import check_wait
from fullconformal.methods.transformed import BehindTransformers
from fullconformal.models.objects import shape_of
from fullconformal.models.requirements import transform
from fullconformal.models.transformers import is_fixed, learn_from_labels
from fullconformal.runtime.tasks import Work, progress_bar, say_nothing
from fullconformal.storage import StorageError, printable

# Parameters that a method is told of as they are, of the estimators that have them.
AS_GIVEN = ("l2", "prefit", "head", "max_epochs", "curvature", "damping", "approximation", "folds", "repeats", "update")


class FullConformal(Conformal):
    """Base of the estimators that ask a method of full CP."""

    _fitted: Any
    transformer_: Any
    _input_shape: tuple[int, ...]
    method_: str
    method_reason_: str

    def _config(self, loss: Loss) -> Config:
        """How to fit, resolved from the parameters and the machine."""
        # Fits must be the same when a killed run is started again.
        fixed = (self.method == "exact" or self.checkpoint is not None) and self.random_state is None
        return Config(
            **{name: getattr(self, name) for name in AS_GIVEN if hasattr(self, name)}, loss=loss,
            q=validation.SCHEMES[self.scheme], device=device_of(self.device, self._split()[1]),
            dtype=validation.DTYPES[self.dtype], memory=int(self.memory_budget * 2**30),
            seed=0 if fixed else int(check_random_state(self.random_state).randint(2**31)), work=self._work(),
        )  # fmt: skip

    def _work(self) -> Work:
        """Who does the work."""
        return Work(self.n_jobs, self.checkpoint, print if self.verbose else say_nothing)

    def _fit_method(
        self, method: Any, transformers: Any, bag: Any, y: Any, config: Config, in_bag: type[BehindTransformers], reason: str
    ) -> None:  # fmt: skip
        """Fit transformers to the objects of a bag as they were given, and to y (n,), and a method to what they make of the objects.

        Where the method keeps its promise without transformers and these learn, it is put behind them, by the class `in_bag`.
        """
        self.transformer_, inputs = fit_steps(transformers, bag.X, y, config)
        if self.method == "auto":
            check_wait(method, config, inputs, bag.n_classes)
        with progress_bar("training", self.verbose) as progress:
            fitted = method.fit(replace(bag, X=inputs), replace(config, progress=progress))
        learns = self.transformer_ is not None and not self.prefit and not is_fixed(self.transformer_)
        if learns and fitted.guarantee.is_exact and self.transformers == "bag" and getattr(self, "head", None) is None:
            fitted = in_bag.of(fitted, method, config, self.transformer_, bag)
        self._fitted, self.n_samples_fit_, self.method_, self.method_reason_ = fitted, fitted.n, fitted.method, reason
        # Of a stream the objects are not kept.
        self._input_shape = getattr(fitted, "input_shape", ()) or shape_of(inputs)

    @property
    def _caveat(self) -> str:
        """Why less is promised than the method alone does; empty where it is not less."""
        head, exact = getattr(self, "head", None), self._fitted.guarantee.is_exact
        # What comes trained before a head was trained on other data, transformers and all.
        if self.prefit and head:
            return ""
        if exact and head is not None:
            return (
                "the layers before the head were trained on these data, so the sets are only approximately valid; with a backbone "
                "that has not seen them (prefit=True) they are exact"
            )
        fixed = None if isinstance(self._fitted, BehindTransformers) else self.transformer_
        remedy = "leave prefit out" if self.prefit else "take transformers='bag'" if exact else "take method='folds'"
        if steps := learn_from_labels(fixed):
            return (
                f"{steps} learned from the labels and was not refitted without the points it scores, so the sets may miss the true "
                f"label far too often; {remedy}, or fit it on other data (FrozenEstimator)"
            )
        if not exact or fixed is None or is_fixed(fixed):
            return ""
        return (
            f"the transformers were fitted to the training objects only, so the sets are only approximately valid; {remedy}, and they "
            "are fitted with each object (to other data: FrozenEstimator), which makes the sets exact"
        )

    def _warnings(self) -> list[str]:
        """What must be known of the fit before sets at the confidence level are trusted."""
        tied = not getattr(self, "class_conditional", False) and hasattr(self._fitted, "alpha")
        return [*self._fitted.warnings, tied_at_the_top(self._fitted.alpha, self.confidence_level) if tied else ""]

    def _warn(self, stacklevel: int) -> None:
        """Warn of what must be known before the sets are trusted, where there is something."""
        # Whoever asks for fixed transformers knows what they do, unless these look at labels.
        severe = getattr(self, "head", None) or learn_from_labels(self.transformer_)
        caveat = self._caveat if self.transformers == "bag" or severe else ""
        if told := list(filter(None, [*self._warnings(), caveat])):
            figures = "" if self._fitted.guarantee.reason else " (clf.diagnose() shows the figures.)"
            warnings.warn(f"{'; '.join(told)}.{figures}", ConformalWarning, stacklevel=stacklevel)

    def notes(self) -> list[str]:
        fitted, caveat = self._fitted, self._caveat
        if fitted.guarantee.is_exact:
            kept = "The sets of this method are exactly valid: their guarantee rests on no approximation."
            return [f"! {sentence(caveat)}" if caveat else kept]
        told = [f"! {sentence(text)}" for text in filter(None, [*self._warnings(), caveat])]
        # A guarantee that gives a reason needs no figures of the fit.
        if fitted.guarantee.reason or (diagnosed := fitted.diagnostics) is None:
            return [*told, f"The p-values are approximate: {fitted.guarantee.reason}."]
        facts = f"influence functions on {diagnosed.n_points:,} points and {diagnosed.n_parameters:,} parameters."
        facts = f"The p-values are approximate: {facts}"
        return [*told, facts if told else f"{facts} Nothing to warn of."]

    def _prepare_inputs(self, X: Any) -> Any:
        """Checked objects as the fitted method is given them: through the transformers, unless it has these in its bag."""
        check_is_fitted(self, "n_samples_fit_")
        X = self._checked(X, reset=False)
        seen = X if self.transformer_ is None else transform(self.transformer_, X)
        if shape_of(seen) != self._input_shape:
            raise ValueError(f"X has objects of shape {shape_of(seen)}, but those of fit had {self._input_shape}.")
        return X if isinstance(self._fitted, BehindTransformers) else seen

    def _verify_transformers(self) -> None:
        """Raise where the transformers of a loaded predictor make another thing of the objects it kept."""
        printable(self.method_reason_)
        if not self._fitted.holds(self._prepare_inputs(self._sample)):
            raise StorageError(
                "its transformers give another result here than where it was saved; use the scikit-learn version it was saved with"
            )


def sentence(text: str) -> str:
    """A text that begins and ends as sentences do."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def device_of(device: str, model: Any) -> torch.device:
    """The device to compute on; "auto" is CUDA where there is one for modules, the CPU for the rest, whose products are small."""
    if device == "auto":
        module = isinstance(model, nn.Module)
        return torch.device("cuda" if module and torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=device)
        # The meta device has no values, so this fails there.
        probe.item()
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from error
