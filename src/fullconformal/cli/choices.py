"""Which classifier and which method a command takes for a table, and why."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

PATIENCE = 600  # seconds that predicting a table as large as the training table may take
WIDTH = 32  # of the hidden layer
SMALL_CURVATURE = 2e11  # n·p² up to which the curvature of all layers is formed in about a minute


class Choice(NamedTuple):
    """A Pipeline to wrap, options of FullConformalClassifier, the factory to save with, and what to tell about it."""

    estimator: Any
    options: dict[str, Any]
    factory: str | None
    told: list[str]


def check_model(model: str) -> None:
    """Raise where the option names no model."""
    if model not in ("lr", "mlp") and model.count(":") != 1:
        raise ValueError(f"--model {model!r} is none; give lr, mlp, or package.module:function.")


def make_factory(name: str) -> Any:
    """The factory that the user named on the command line; modules of the working folder are found, as with `python -m`."""
    from fullconformal.storage.modules import Factory

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return Factory(name)


def classifier(model: str, width: int, n_classes: int, seed: int) -> tuple[Any, str | None]:
    """The classifier that the option names, for so many encoded columns, and the factory to save it with."""
    if model == "lr":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(max_iter=1000), None
    if model != "mlp":
        return make_factory(model)(), model
    import torch

    from fullconformal.models import mlp

    torch.manual_seed(seed)
    return mlp(width, (WIDTH,), n_classes), None


def wrapped(model: str, schema: Any, X: Any, y: Any, seed: int) -> tuple[Any, str | None, int]:
    """The classifier behind an encoder of a table, the factory to save it with, and the encoded columns."""
    from sklearn.pipeline import make_pipeline

    from fullconformal.table import encoder

    encode = encoder(schema)
    width = encode.fit(X).transform(X[:1]).shape[1]
    final, factory = classifier(model, width, len(set(y.tolist())), seed)
    return make_pipeline(encode, final), factory, width


def choose(model: str, method: str, schema: Any, X: Any, y: Any, seed: int) -> Choice:
    """The classifier for a table, and the method that suits its size."""
    n = len(y)
    estimator, factory, width = wrapped(model, schema, X, y, seed)
    if model == "lr":
        chosen, why = logistic_method(n, width + 1, len(set(y.tolist()))) if method == "auto" else (method, "")
        return Choice(estimator, {"method": chosen}, None, [why] * bool(why))
    epochs = min(200, max(20, 1_000_000 // n))
    options: dict[str, Any] = {"method": method, "max_epochs": epochs}
    told = [f"{epochs} epochs of training"]
    p = sum(q.numel() for q in estimator[-1].parameters() if q.requires_grad)
    if method in ("auto", "influence") and n * float(p) ** 2 > SMALL_CURVATURE:
        options["curvature"] = "last_layer"
        told.append(f"the curvature of the last layer only, as that of all {p:,} parameters would take long")
    return Choice(estimator, options, factory, told)


def logistic_method(n: int, d: int, n_classes: int) -> tuple[str, str]:
    """The exactly valid method where it predicts as many rows as it was fitted on in ten minutes, else influence; and why."""
    from fullconformal.methods.convex import symmetric_seconds

    seconds = symmetric_seconds(n, n, d, n_classes)
    if seconds <= PATIENCE:
        return "symmetric", "its sets are exactly valid"
    return "influence", (
        "an approximation; exactly valid sets (--method symmetric) would take "
        f"about {seconds / 60:,.0f} minutes for a table of this size"
    )
