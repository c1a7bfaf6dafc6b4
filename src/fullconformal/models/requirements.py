"""What is required: of an estimator and its outputs, before and after its fit, and of the numbers in X, whose place an error names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_array
from torch import Tensor, nn

from fullconformal.losses import NotFinite
from fullconformal.models.adapters import check_objective, is_skorch, supported
from fullconformal.models.networks import find_head
from fullconformal.models.objects import dense, take

FloatArray = npt.NDArray[np.float64]

REMEDY = "Look for a wrong unit or a placeholder, scale that feature, or leave the object out."


def to_tensor(X: Any, device: torch.device | str, dtype: torch.dtype, *, training: bool = False) -> Tensor:
    """A fresh tensor of the given device and dtype, in which finite values stay finite."""
    given = torch.as_tensor(np.array(X, copy=True))
    out = given.to(device=device, dtype=dtype)
    if given.is_floating_point() and given.element_size() > out.element_size() and bool((lost := out.isinf()).any()):
        at = lost.nonzero()[0].tolist()
        row = "" if training else f"object {at[0]}, "  # parts of a split are in an order of their own
        where = f"{row}{place(at)}"
        raise ValueError(f"X holds {float(given[tuple(at)]):.3g} in {where}, too large for {name_of(dtype)}. {REMEDY}")
    return out


def name_of(dtype: torch.dtype) -> str:
    """A dtype as NumPy calls it."""
    return str(dtype).removeprefix("torch.")


def place(at: list[int]) -> str:
    """Where in an object of X a value is, in words."""
    return f"{'column' if len(at) == 2 else 'place'} {', '.join(map(str, at[1:]))} (counted from 0)"


def check_squares(X: Any, dtype: str) -> None:
    """Raise where the squares of X (n, ...), of which curvatures are made, overflow; one product tells that none do.

    Not BLAS's, whose threads would be in the way of torch's for tens of milliseconds.
    """
    if X.dtype.kind != "f":
        return
    numbers = X.ravel(order="K")
    with np.errstate(over="ignore", invalid="ignore"):
        if np.einsum("i,i->", numbers, numbers) <= np.finfo(dtype).max:
            return
    at = [int(i) for i in np.unravel_index(int(np.abs(X).argmax()), X.shape)]
    value, most = float(X[tuple(at)]), float(np.finfo(dtype).max / X.size) ** 0.5
    if abs(value) > most:
        raise ValueError(
            f"X holds {value:.3g} in {place(at)}, too large for a fit in {dtype}: squares overflow beyond {most:.2g}. {REMEDY}"
        )


def check_distances(X: Any, order: float, training: bool) -> None:
    """Raise where Minkowski distances from values of X (n, d) overflow: they would count as no neighbour."""
    most = float(np.finfo(np.float64).max / X.shape[1]) ** (1 / order) / 2
    if (far := np.abs(X) > most).any():
        at = [int(i) for i in np.argwhere(far)[0]]
        row = "" if training else f"object {at[0]}, "
        raise ValueError(
            f"X holds {X[tuple(at)]:.3g} in {row}{place(at)}: distances overflow beyond {most:.2g}. {REMEDY}"
        )


def finite_rows(log_proba: FloatArray, what: str = "to be predicted") -> FloatArray:
    """Log-probabilities (m, C) as they are; an error where a row of them is no number."""
    if np.isnan(log_proba.sum()):
        row = int(np.isnan(log_proba).any(1).argmax())
        raise ValueError(
            f"the model's probabilities of object {row} of those {what} (counted from 0) contain NaN; leave it out, or clip it."
        )
    return log_proba


def split_pipeline(estimator: Any) -> tuple[Pipeline | None, Any]:
    """The transformers of a Pipeline (None where there are none) and the classifier at its end."""
    if isinstance(estimator, Pipeline):
        return (estimator[:-1] if len(estimator) > 1 else None), estimator[-1]
    return None, estimator


def fit_transformer(transformers: Pipeline | None, X: Any, y: Any, prefit: bool) -> tuple[Pipeline | None, Any]:
    """Fitted transformers and the transformed X."""
    if transformers is None:
        return None, X
    with naming_columns(X):
        transformers = transformers if prefit else clone(transformers).fit(X, y)
    inputs = transform(transformers, X)
    check_one_by_one(transformers, X, inputs)
    return transformers, inputs


def check_one_by_one(transformers: Pipeline, X: Any, inputs: Any) -> None:
    """Raise where an object of X (n, ...) comes out otherwise by itself than beside the others, as inputs (n, ...)."""
    alone = dense(transformers.transform(take(X, [0])))
    near = 1e-4 * float(np.abs(inputs).max(initial=0.0))
    if alone.shape[1:] != inputs.shape[1:] or not np.allclose(alone, inputs[:1], rtol=1e-4, atol=near):
        raise ValueError(
            "a transformer of the Pipeline gives another result for an object by itself than beside others: it is random, or "
            "computes with all of them (as a FunctionTransformer that subtracts a mean). Let it learn them in fit, as StandardScaler does."
        )


def transform(transformers: Pipeline, X: Any) -> Any:
    """X through the transformers, as a dense, finite array."""
    with naming_columns(X):
        return transformed(transformers.transform(X))


@contextmanager
def naming_columns(X: Any) -> Iterator[None]:
    """Errors of a Pipeline that quote a text, with the columns of a table X that hold it."""
    try:
        yield
    except ValueError as error:
        text, columns = str(error), X.items() if hasattr(X, "iloc") and X.ndim == 2 else ()
        quoted = [repr(name) for name, cells in columns if any(isinstance(c, str) and repr(c) in text for c in cells)]
        if not quoted:
            raise
        remedy = "correct or clear such cells (pandas.read_csv: na_values=), or encode the column"
        raise ValueError(f"the Pipeline does not take X: {text} (found in {', '.join(quoted)}); {remedy}.") from error


def transformed(out: Any) -> Any:
    """What transformers gave, as a dense, finite array."""
    out = out.toarray() if hasattr(out, "toarray") else out
    try:
        return check_array(out, dtype="numeric", ensure_2d=False, allow_nd=True, input_name="X (transformed)")
    except TypeError as error:
        raise ValueError(
            f"the transformers of the Pipeline leave something else than numbers ({error}); encode those columns, too, or drop them. "
            "A date becomes days by (column - pandas.Timestamp(0)) / pandas.Timedelta(days=1)."
        ) from error
    except ValueError as error:
        if getattr(getattr(out, "dtype", None), "kind", "") != "f" or np.isfinite(out).all():
            raise
        at = [int(i) for i in np.argwhere(~np.isfinite(out))[0]]
        raise ValueError(
            f"X holds NaN or infinity once it is transformed, first in object {at[0]}, {place(at)}: impute missing values in the "
            "Pipeline, and look for numbers so large that their squares overflow."
        ) from error


def unwrap(result: str) -> str:
    """Three lines of code that make a module of one array and one result of another."""
    lines = "class Logits(nn.Module):", "    def __init__(self, net): super().__init__(); self.net = net"
    return "\n    ".join(
        (" Give what has one, by another module:", *lines, f"    def forward(self, x): return {result}")
    )


COUPLES_POINTS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def check_instance(estimator: Any) -> None:
    """Raise where a class was given instead of one of its instances."""
    if isinstance(estimator, type):
        raise TypeError(
            f"estimator={estimator.__name__} is a class; give an instance of it, {estimator.__name__}(...)."
        )


def check_estimator_kind(estimator: Any, l2: float | None, head: str | None = None) -> None:
    """Raise where the estimator cannot be wrapped, before anything is fitted."""
    _, final = split_pipeline(estimator)
    check_instance(final)
    if head is not None:
        if not isinstance(final, nn.Module):
            raise ValueError(
                f"head={head!r} names a layer of a torch.nn.Module, but estimator is {type(final).__name__}."
            )
        find_head(final, head)
    if isinstance(final, nn.Module):
        check_module(final, frozen_allowed=head is not None)
    elif final is not None:
        if not supported(final):
            raise TypeError(
                f"estimator={type(final).__name__} cannot be wrapped: its loss and gradients are not known here. Take method='auto' or "
                "'folds', which train any classifier, or 'exact', by a refit for every training point and candidate, which takes long."
            )
        if l2 is not None:
            raise ValueError(f"l2={l2!r} was given, but {type(final).__name__} brings its own penalty; set it there.")
        check_objective(final)


def check_module(module: nn.Module, frozen_allowed: bool) -> None:
    """Raise for modules whose loss is not a sum over points, or that have nothing to fit."""
    if not frozen_allowed and not any(q.requires_grad for q in module.parameters()):
        raise ValueError("estimator has no trainable parameters; full conformal prediction needs a model that learns.")
    parts = [part for part in module.modules() if isinstance(part, COUPLES_POINTS) and part.training]
    # Dropout(0) changes nothing; the layers of a Transformer hold it.
    coupled = [type(part).__name__ for part in parts if getattr(part, "p", 1) > 0]
    if coupled:
        raise ValueError(
            f"estimator holds {', '.join(sorted(set(coupled)))} in training mode, where the loss of a point is random or depends "
            "on other points; call estimator.eval() first (a trained model: with prefit=True). To have it trained as it is, by folds:\n"
            "    from skorch import NeuralNetClassifier\n    model = NeuralNetClassifier(estimator, criterion=nn.CrossEntropyLoss, "
            "optimizer=torch.optim.Adam)\n    FullConformalClassifier(model).fit(X, y)"
        )


def check_outputs(module: nn.Module, X: Tensor, n_classes: int | None) -> None:
    """Raise unless the module maps X to one finite logit a class, or to one number where None, of every object by itself."""
    try:
        with torch.no_grad():
            out, single = module(X[:2]), module(X[:1])
    except RuntimeError as error:
        given = f"X of shape {tuple(X.shape)} in {name_of(X.dtype)} (of codes, an Embedding takes x.long())"
        raise ValueError(f"estimator does not take {given}: {error}") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[1] != (1 if n_classes is None else n_classes):
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if n_classes is None:
            raise ValueError(
                f"estimator must return one number an object, of shape (batch, 1), but returned {shape}; change its last layer."
            )
        raise ValueError(
            f"estimator must return logits of shape (batch, {n_classes}), one a class found in y, but returned {shape}; "
            "change its last layer, or give training labels of all its classes."
            + (
                ""
                if isinstance(out, Tensor)
                else unwrap('self.net(x)["logits"]  # of an object .logits, of a tuple [0]')
            )
        )
    if not torch.isfinite(out).all():
        raise NotFinite("estimator returns numbers that are not finite on the training data; check its weights and X.")
    if single.shape != out[:1].shape:
        raise ValueError(
            f"estimator must return outputs of shape (1, {out.shape[1]}) for a batch of one, but returned {tuple(single.shape)}; leave out "
            "squeeze(), which drops that axis."
        )
    if not torch.allclose(single, out[:1], rtol=0.0, atol=0.01 * float(out.abs().max())):
        raise ValueError(
            "estimator returns other numbers for an object by itself than beside another one: it is random, or lets objects of a batch "
            "depend on each other. Full conformal prediction needs a loss of each point alone; leave such layers out."
        )
    if n_classes is not None and bool((out >= 0).all()) and bool(((out.sum(1) - 1).abs() < 1e-5).all()):
        raise ValueError(
            "estimator returns probabilities: its outputs are positive and sum to 1; logits are needed, so leave out its last Softmax."
        )


def check_classes(fitted: Any, classes: np.ndarray) -> None:
    """Raise unless a fitted estimator knows just these classes."""
    known = getattr(fitted, "classes_", None)
    if known is None:
        raise ValueError(f"estimator={type(fitted).__name__} is not fitted; fit it first or leave prefit=False.")
    if not is_skorch(fitted) and list(known) != list(classes):
        raise ValueError(
            f"y has classes {classes.tolist()}, but the fitted estimator knows {np.asarray(known).tolist()}; give its training data."
        )
