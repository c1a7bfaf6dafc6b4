"""The options of full conformal prediction: their defaults, their checks, and what follows from them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from sklearn.feature_selection import SelectorMixin, VarianceThreshold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils import check_random_state
from torch import nn

from fullconformal.curvature import EKFAC, GGN, KFAC, Curvature, Dual, Hessian
from fullconformal.curvature.select import LAYERS, Choice, check, choose
from fullconformal.estimators.base import ConformalClassifier
from fullconformal.estimators.checks import check_flags, check_number, check_option, check_running, check_whole
from fullconformal.influence.shards import Work, say_nothing
from fullconformal.linear.span import Span, span_of
from fullconformal.methods.engines import APPROXIMATIONS
from fullconformal.methods.fitting import L2_NETWORK, Settings
from fullconformal.models.adapters import is_logistic, penalises
from fullconformal.models.density import KernelDensityClassifier
from fullconformal.models.requirements import check_estimator_kind, check_outputs, split_pipeline
from fullconformal.models.tensors import to_tensor
from fullconformal.models.training import Progress
from fullconformal.problem import Problem
from fullconformal.sets import check_levels

METHODS = ("auto", "influence", "symmetric", "exact")
SCHEMES = {"ordinary": 0.0, "studentized": 0.5, "deleted": 1.0}
CURVATURES: dict[str, type[Curvature]] = {
    "hessian": Hessian,
    "ggn": GGN,
    "kfac": KFAC,
    "ekfac": EKFAC,
    "last_layer": GGN,
    "last_layer_kron": GGN,
    "dual": Dual,
}
KRONECKER = ("kfac", "ekfac", "last_layer_kron")
NEIGHBORS = (KNeighborsClassifier, KernelDensityClassifier)
DTYPES = {"auto": None, "float32": torch.float32, "float64": torch.float64}


class FullOptions(ConformalClassifier):
    """Constructor and checks of `FullConformalClassifier`, which documents the parameters."""

    def __init__(
        self,
        estimator: Any = None,
        *,
        method: str = "auto",
        scheme: str = "deleted",
        approximation: str = "direct",
        curvature: Any = "auto",
        damping: float | None = None,
        l2: float | None = None,
        prefit: bool = False,
        head: str | None = None,
        confidence_level: float = 0.9,
        class_conditional: bool = False,
        prune: bool | str = "auto",
        max_epochs: int = 200,
        device: str = "auto",
        dtype: str = "auto",
        memory_budget: float = 4.0,
        n_jobs: int | None = None,
        checkpoint: Any = None,
        random_state: Any = None,
        verbose: int = 0,
    ):
        self.estimator = estimator
        self.method = method
        self.scheme = scheme
        self.approximation = approximation
        self.curvature = curvature
        self.damping = damping
        self.l2 = l2
        self.prefit = prefit
        self.head = head
        self.confidence_level = confidence_level
        self.class_conditional = class_conditional
        self.prune = prune
        self.max_epochs = max_epochs
        self.device = device
        self.dtype = dtype
        self.memory_budget = memory_budget
        self.n_jobs = n_jobs
        self.checkpoint = checkpoint
        self.random_state = random_state
        self.verbose = verbose

    def _check_params(self) -> None:
        check_option("method", self.method, METHODS)
        self._check_scores()
        if not isinstance(self.curvature, Curvature):
            check_option("curvature", self.curvature, ("auto", *CURVATURES))
        if self.damping is not None:
            check_number("damping", self.damping, 0, "None or a number ≥ 0")
            if isinstance(self.curvature, Curvature):
                raise ValueError("damping was given twice: a Curvature object carries its own, so leave damping=None.")
        if self.l2 is not None:
            check_number("l2", self.l2, 0, "None or a number ≥ 0")
        check_flags(self, "prefit")
        check_running(self)
        check_number("memory_budget", self.memory_budget, 0, "a number of GiB > 0", strict=True)
        check_whole("max_epochs", self.max_epochs, 0, "a whole number ≥ 0")
        check_option("dtype", self.dtype, tuple(DTYPES))
        check_levels(self.confidence_level)
        final = split_pipeline(self.estimator)[1]
        if isinstance(final, NEIGHBORS) and self.method in ("influence", "symmetric"):
            raise ValueError(
                f"method={self.method!r} needs a loss; {type(final).__name__} has method='exact', without refits."
            )
        refits = self.method == "exact" and hasattr(final, "predict_proba") and not self._is_convex(final)
        if isinstance(final, NEIGHBORS) or refits:
            if self.prefit or self.l2 is not None:
                raise ValueError(
                    f"prefit and l2 do not go with exact full CP of {type(final).__name__}; leave them out."
                )
        else:
            check_estimator_kind(self.estimator, self.l2, self.head)
        if self.prefit and self.estimator is None:
            raise ValueError("prefit=True needs a fitted estimator; estimator=None is fitted here.")
        self._device()

    def _check_scores(self) -> None:
        check_option("scheme", self.scheme, tuple(SCHEMES))
        check_flags(self, "class_conditional")
        check_option("approximation", self.approximation, tuple(APPROXIMATIONS))
        if not (isinstance(self.prune, (bool, np.bool_)) or self.prune == "auto"):
            raise ValueError(f"prune={self.prune!r} is unknown; allowed: 'auto', True, False.")

    def _device(self) -> torch.device:
        if self.device == "auto":
            module = isinstance(split_pipeline(self.estimator)[1], nn.Module)
            return torch.device("cuda" if module and torch.cuda.is_available() else "cpu")
        try:
            probe = torch.zeros(1, device=self.device)
            probe.item()  # which "meta" has none of
            return probe.device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={self.device!r} cannot be used here: {error}") from error

    def _choice(self, problem: Problem) -> Choice:
        """The curvature asked for or chosen, with estimates; a MemoryError where it does not fit."""
        memory, device = self._memory, self._device()
        if self.curvature == "auto":
            return choose(problem, self.damping, memory, device)
        if isinstance(self.curvature, Curvature):
            name = type(self.curvature).__name__
            name = name.lower() if name.lower() in LAYERS else name
            return check(name, self.curvature, {}, problem, memory, device)
        others = {
            name: kind(self.damping) for name, kind in CURVATURES.items() if name not in ("hessian", "last_layer_kron")
        }
        return check(self.curvature, CURVATURES[self.curvature](self.damping), others, problem, memory, device)

    @property
    def _memory(self) -> int:
        """Bytes that it may take."""
        return int(self.memory_budget * 2**30)

    def _settings(self, progress: Progress | None) -> Settings:
        """How the model is to be fitted."""
        # Fits must be the same when a killed run is started again.
        resumes = self.method == "exact" or self.checkpoint is not None
        fixed = resumes and self.random_state is None
        if self.estimator is None and type(self.random_state) is int and 0 <= self.random_state < 2**32:
            fixed = True  # its fit takes no random numbers
        seed = 0 if fixed else int(check_random_state(self.random_state).randint(2**31))
        device, dtype = self._device(), DTYPES[self.dtype]
        return Settings(self.l2, self.prefit, self.max_epochs, device, dtype, seed, self.head, progress)

    def _work(self) -> Work:
        """Who does the work of influence."""
        return Work(self.n_jobs, self.checkpoint, print if self.verbose else say_nothing)

    def _is_convex(self, final: Any) -> bool:
        return final is None or is_logistic(final) or self.head is not None

    def _span_of(self, final: Any, X: Any) -> Span | None:
        """The span of objects X (n, ...) where influence may take coordinates in it: for regressions fitted here, with an L2 penalty.

        Approximations by Kronecker products count the columns, and checkpoints know objects by their bytes, which coordinates that another
        machine makes need not have. The convex engines look for spans of their own.
        """
        fitted = self.method_ == "influence" and penalises(final, self.l2) and not self.prefit
        literal = isinstance(self.curvature, str) and self.curvature not in KRONECKER and self.checkpoint is None
        return span_of(X) if fitted and literal and isinstance(X, np.ndarray) and X.ndim == 2 else None

    def _method(self, final: Any) -> str:
        """The method to take; an error where the one asked for cannot be had."""
        convex = self._is_convex(final)
        if self.method == "exact" and not convex and not isinstance(final, NEIGHBORS) and self.prefit:
            raise ValueError(
                "method='exact' trains the model anew for every bag, so prefit=True cannot be had with it."
            )
        if self.method == "auto":
            if isinstance(final, NEIGHBORS):
                return "exact"
            asked = self.approximation != "direct" or self.curvature != "auto" or self.damping is not None
            return "symmetric" if convex and not asked else "influence"
        if self.method == "symmetric" and not convex:
            raise ValueError(
                f"method='symmetric' needs a convex fit, and {type(final).__name__} is not: give head= (a network's last linear "
                "layer, refitted on frozen features), or take method='influence'."
            )
        return self.method

    @property
    def _caveat(self) -> str:
        """What the guarantee of a valid method lacks, in words; empty where nothing."""
        if self.prefit:
            return ""
        head, _ = split_pipeline(self.estimator)
        steps = [type(step).__name__ for _, step in head.steps if needs_labels(step)] if head is not None else []
        if steps:
            return (
                f"{', '.join(steps)} learned from the labels and was not refitted for each candidate, so the sets are not exactly "
                "valid; fit it on other data (prefit=True), or leave it out"
            )
        if self.head is not None:
            return (
                "the layers before the head were trained on these data, so the sets are only approximately valid; with a backbone "
                "that has not seen them (prefit=True) they are exact"
            )
        return ""

    def _check_memory(self, final: Any, X: Any, n_classes: int) -> None:
        """Raise, before any training, where the curvature of a module cannot fit."""
        if not isinstance(final, nn.Module) or self.head is not None:
            return
        if self.curvature == "last_layer_kron":  # its state is checked once its size is known
            return
        module = copy.deepcopy(final).eval().cpu()
        dtype = DTYPES[self.dtype] or torch.promote_types(next(module.parameters()).dtype, torch.float32)
        x = to_tensor(X[:2], "cpu", dtype, training=True)
        check_outputs(module.to(dtype), x, n_classes)
        n, l2 = len(X), L2_NETWORK if self.l2 is None else self.l2
        one = x[:1].expand(n, *x.shape[1:])  # as many points as there are, without their memory
        self._choice(Problem(module, one, torch.zeros(1, dtype=torch.long).expand(n), n * l2))


def needs_labels(step: Any) -> bool:
    """Whether a transformer learns from y: its tags say so, or it selects features by anything but their variance."""
    tags = getattr(step, "__sklearn_tags__", None)
    selects = isinstance(step, SelectorMixin) and not isinstance(step, VarianceThreshold)
    return selects or (tags is not None and bool(tags().target_tags.required))
