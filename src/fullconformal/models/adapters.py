"""Other libraries' classifiers and regressors as a torch module with the objective they minimised.

`adapt` takes a *fitted* one and returns logits or values as a module, and Λ of the sum form by parameter name (`read` does without the fit
where it can):

- LogisticRegression minimises C·Σℓ + ½|W|²: Λ = 1/C on the weights, 0 on the intercept.
- MLPClassifier and MLPRegressor minimise the batch mean of ℓ plus ½·alpha·|W|²/batch: Λ = alpha·n/batch on the weights, 0 on the biases.
- skorch nets minimise the mean of ℓ plus the optimiser's weight decay: Λ = n·weight_decay on everything it was given. Of numbers theirs is
  the mean of r² = 2ℓ: Λ = n·weight_decay/2.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import torch
from sklearn.base import is_regressor
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import nn

from fullconformal.models.networks import mlp, zero_linear

# Solvers of the same objective, for any number of classes.
MULTINOMIAL = ("lbfgs", "newton-cg", "newton-cholesky", "sag", "saga")

# A module that returns logits, and its penalty Λ by parameter name (sum form).
Adapted = tuple[nn.Module, dict[str, float]]


class Logarithm(nn.Module):
    """Logits from a module that returns probabilities."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(self.module(x).clamp_min(torch.finfo(x.dtype).tiny))


def is_skorch(estimator: Any) -> bool:
    """Whether this is a skorch net; skorch is imported already if it is."""
    skorch = sys.modules.get("skorch")
    return skorch is not None and isinstance(estimator, skorch.NeuralNet)


def is_logistic(estimator: Any) -> bool:
    """Whether this is scikit-learn's logistic regression, and not the one that chooses its C on the data."""
    return isinstance(estimator, LogisticRegression) and not isinstance(estimator, LogisticRegressionCV)


def is_known(estimator: Any) -> bool:
    """Whether this is a logistic regression of an objective that is known here: the sum of losses plus an L2 term."""
    return is_logistic(estimator) and not objection(estimator)


def supported(estimator: Any) -> bool:
    """Whether `adapt` can take the estimator once it is fitted."""
    return is_logistic(estimator) or isinstance(estimator, MLPClassifier) or is_skorch(estimator)


def check_objective(estimator: Any) -> None:
    """Raise where the estimator minimises something other than the sum of losses plus an L2 term."""
    if isinstance(estimator, LogisticRegression):
        estimator._validate_params()
    if sentence := objection(estimator):
        raise ValueError(sentence)


def objection(estimator: Any) -> str:
    """What the estimator minimises other than the sum of losses plus an L2 term, as a sentence; empty where it is just that."""
    name = f"estimator={type(estimator).__name__}"
    if isinstance(estimator, LogisticRegression):
        if estimator.class_weight is not None:
            return f"{name}(class_weight={estimator.class_weight!r}) is not supported; use None (or class_conditional), or method='folds'."
        if estimator.penalty == "l1" or estimator.l1_ratio:
            return f"{name} has an L1 penalty, which has no Hessian; use an L2 penalty (l1_ratio=0), or method='folds'."
        if estimator.solver == "liblinear" and estimator.fit_intercept:
            return f"{name}(solver='liblinear') penalises the intercept; use solver='lbfgs', or method='folds'."
    elif isinstance(estimator, (MLPClassifier, MLPRegressor)) and estimator.early_stopping:
        return f"{name}(early_stopping=True) keeps data from training; use early_stopping=False, or method='folds'."
    elif isinstance(estimator, MLPRegressor) and getattr(estimator, "loss", "squared_error") != "squared_error":
        return f"{name}(loss={estimator.loss!r}) is not the squared loss; use loss='squared_error', or method='folds'."
    elif is_skorch(estimator):
        options = estimator.get_params(deep=False)
        odd = [key for key in ("criterion__weight", "criterion__label_smoothing") if options.get(key)]
        if odd:
            return f"estimator's {odd[0]} makes another loss than the log loss; leave it out, or take method='folds'."
        if isinstance(estimator.optimizer, type) and issubclass(estimator.optimizer, torch.optim.AdamW):
            return "estimator's optimizer is AdamW, whose decay is no penalty of the loss; use Adam or SGD, or method='folds'."
        criterion = estimator.criterion if isinstance(estimator.criterion, type) else type(estimator.criterion)
        numbers = is_regressor(estimator)
        if criterion not in ((nn.MSELoss,) if numbers else (nn.CrossEntropyLoss, nn.NLLLoss)):
            return f"estimator's criterion is {criterion.__name__}; use {'MSELoss' if numbers else 'CrossEntropyLoss or NLLLoss'}."
    return ""


def adapt(estimator: Any, n: int) -> Adapted:
    """The module and penalty of a fitted estimator that was trained on n points."""
    if isinstance(estimator, LogisticRegression):
        module = zero_linear(estimator.coef_.shape[1], len(estimator.classes_), estimator.fit_intercept)
        _copy(module, [estimator.coef_], [estimator.intercept_])
        return module, {"0.weight": 0.0 if _is_free(estimator) else 1.0 / estimator.C}
    if isinstance(estimator, (MLPClassifier, MLPRegressor)):
        return _perceptron(estimator, n)
    return _skorch(estimator, n)


def read(estimator: Any, shape: tuple[int, ...], n_classes: int) -> Adapted | None:
    """What a fitted LogisticRegression would give, its weights at zero, for objects of a shape; None where it must be fitted first.

    Its objective has one minimum, and a solver more accurate than scikit-learn's does not need scikit-learn's fit as a start. Where
    there is no penalty there need not be a minimum, and a subclass may fit something else.
    """
    if len(shape) != 1 or not is_read(estimator):
        return None
    return zero_linear(shape[0], n_classes, estimator.fit_intercept), {"0.weight": 1.0 / estimator.C}


def is_read(estimator: Any) -> bool:
    """Whether `read` does without the fit: a LogisticRegression, and no subclass, with a penalty, by solvers for any number of classes."""
    plain = type(estimator) is LogisticRegression and not _is_free(estimator)
    return plain and estimator.solver in MULTINOMIAL and not estimator.dual


def penalises(estimator: Any, l2: float | None) -> bool:
    """Whether a logistic regression that is to be fitted, None the built-in one, has an L2 penalty on all its weights alike."""
    return l2 != 0 if estimator is None else is_read(estimator)


def _is_free(estimator: LogisticRegression) -> bool:
    return estimator.penalty is None or bool(np.isinf(estimator.C))


def _perceptron(estimator: MLPClassifier | MLPRegressor, n: int) -> Adapted:
    numbers = isinstance(estimator, MLPRegressor)
    if not numbers and estimator.out_activation_ == "logistic" and len(estimator.classes_) != 2:
        raise ValueError(
            "estimator=MLPClassifier was fitted to several labels a point; only one label a point is supported."
        )
    hidden = [w.shape[1] for w in estimator.coefs_[:-1]]
    n_features, n_outputs = estimator.coefs_[0].shape[0], 1 if numbers else len(estimator.classes_)
    module = mlp(n_features, hidden, n_outputs, estimator.activation, binary_as_one=not numbers).double()
    _copy(module, [w.T for w in estimator.coefs_], estimator.intercepts_)
    batch = n
    if estimator.solver != "lbfgs":
        batch = min(200, n) if estimator.batch_size == "auto" else min(int(estimator.batch_size), n)
    weights = [name for name, q in module.named_parameters() if name.endswith("weight") and q.requires_grad]
    return module, dict.fromkeys(weights, float(estimator.alpha) * n / batch)


def _skorch(estimator: Any, n: int) -> Adapted:
    module = copy.deepcopy(estimator.module_).eval()
    if isinstance(estimator.criterion_, nn.NLLLoss):  # skorch takes the logarithm of what the module returns
        module = Logarithm(module)
    decay = {
        id(q): group.get("weight_decay", 0.0) for group in estimator.optimizer_.param_groups for q in group["params"]
    }
    by_name = {name: decay.get(id(q), 0.0) for name, q in estimator.module_.named_parameters()}
    prefix = "module." if isinstance(module, Logarithm) else ""
    share = 0.5 if isinstance(estimator.criterion_, nn.MSELoss) else 1.0
    return module, {prefix + name: share * n * weight for name, weight in by_name.items()}


def _copy(module: nn.Sequential, weights: list[Any], biases: list[Any]) -> None:
    """Put weights (o, i) and biases (o,) into the trainable linear layers."""
    layers = [step for step in module if isinstance(step, nn.Linear) and step.weight.requires_grad]
    with torch.no_grad():
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            layer.weight.copy_(torch.as_tensor(np.ascontiguousarray(weight)))
            if layer.bias is not None:
                layer.bias.copy_(torch.as_tensor(np.atleast_1d(bias)))
