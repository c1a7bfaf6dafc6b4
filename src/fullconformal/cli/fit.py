"""`fullconformal fit`: from a table to a saved predictor; and which classifier and method suit a table."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import click

from fullconformal.cli.tables import (
    LEVEL,
    Printer,
    check_output,
    drop_option,
    file_size,
    find_local_modules,
    json_option,
    missing_option,
    model_option,
    quiet_option,
    read_training,
    seed_option,
)


@click.command()
@click.argument("table", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="The column to predict.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The file to save the predictor in.")
@model_option
@click.option("--method", type=click.Choice(["auto", "influence", "symmetric", "exact"]), default="auto", show_default=True,
              help="The method of full CP; auto takes an exactly valid one if it is fast enough.")  # fmt: skip
@click.option("--confidence", type=LEVEL, default=0.9, show_default=True, help="Confidence level of the sets.")
@click.option("--class-conditional", is_flag=True, help="Make the guarantee hold for each class.")
@drop_option
@missing_option
@seed_option
@quiet_option
@json_option
def fit(
    table: Path, target: str, out: Path, model: str, method: str, confidence: float, class_conditional: bool,
    drop: tuple[str, ...], drop_missing: bool, seed: int, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Fit a predictor to all rows of TABLE (CSV or Parquet) and save it."""
    from fullconformal.table import listed, quoted

    check_output(out, table)
    check_model(model)
    printer = Printer(quiet, as_json)
    schema, X, y = read_training(table, target, drop, drop_missing, printer)
    sizes = {str(label): count for label, count in Counter(y.tolist()).most_common()}
    printer.say(
        f"{table.name}: {len(y):,} rows, {len(schema.numbers)} numeric and {len(schema.categories)} categorical columns; {target!r} has "
        f"{len(sizes)} classes ({listed([f'{label}: {count:,}' for label, count in sizes.items()], most=6, show=str)})"
    )

    # Imported now, so that errors in the table do not wait for torch.
    from fullconformal import ConformalWarning, FullConformalClassifier
    from fullconformal.estimators.saving import save

    estimator = make_pipeline(model, schema, X, y, seed)
    options, reasons = method_options(model, method, estimator, X, y)
    start = time.perf_counter()
    clf = FullConformalClassifier(
        estimator, confidence_level=confidence, class_conditional=class_conditional, random_state=seed,
        verbose=printer.verbose, **options,
    )  # fmt: skip
    with printer.warnings_as_notes(), warnings.catch_warnings():
        # They are printed below, one per line.
        warnings.simplefilter("ignore", ConformalWarning)
        clf.fit(X, y)
    seconds = time.perf_counter() - start
    printer.say(f"method {clf.method_}: {'; '.join(reasons)}" if reasons else f"method {clf.method_}")
    factory = None if model in ("lr", "mlp") else model
    notes = {"table": schema.as_json(), "source": table.name, "class_sizes": sizes, "model": model}
    save(clf.set_params(verbose=0), out, factory=factory, notes=notes)
    printer.json({
        "rows": len(y), "method": clf.method_, "model": model, "confidence_level": confidence, "classes": sizes,
        **schema.as_json(), "seconds": round(seconds, 3), "out": str(out),
    })  # fmt: skip
    printer.say(f"fitted in {seconds:.1f} s, saved in {out} ({file_size(out)})")
    if clf.method_ == "influence" and (problems := clf.diagnose().warnings):
        for text in problems:
            printer.note(f"{text}.")
        printer.note(
            f"`fullconformal compare {table} --target {quoted(target)}` measures the coverage on held-out rows."
        )
    printer.say(
        f"\nnext: fullconformal predict {out} NEW.csv -o sets.csv"
        + (f" --model {model}" if factory is not None else "")
    )


def check_model(model: str) -> None:
    """Raise if the option --model does not name a model."""
    if model not in ("lr", "mlp") and model.count(":") != 1:
        raise ValueError(f"--model {model!r} is unknown; give lr, mlp, or package.module:function.")


def make_classifier(model: str, n_features: int, n_classes: int, seed: int) -> Any:
    """The classifier that the option --model names."""
    if model == "lr":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(max_iter=1000)
    if model == "mlp":
        import torch

        from fullconformal.models import mlp

        torch.manual_seed(seed)
        return mlp(n_features, (32,), n_classes)
    from fullconformal.storage.modules import Factory

    find_local_modules()
    return Factory(model)()


def make_pipeline(model: str, schema: Any, X: Any, y: Any, seed: int) -> Any:
    """A Pipeline of an encoder, fitted to the table X, and the classifier that the option --model names."""
    from sklearn.pipeline import make_pipeline

    from fullconformal.table import encoder

    encode = encoder(schema).fit(X)
    n_features = encode.transform(X[:1]).shape[1]
    return make_pipeline(encode, make_classifier(model, n_features, len(set(y.tolist())), seed))


def method_options(model: str, method: str, estimator: Any, X: Any, y: Any) -> tuple[dict[str, Any], list[str]]:
    """Options of FullConformalClassifier that suit the model and the size of the table, and the reasons to print."""
    n = len(y)
    if model == "lr":
        from fullconformal.methods.convex import symmetric_seconds

        if method != "auto":
            return {"method": method}, []
        inputs = estimator[0].transform(X[:1]).shape[1] + 1
        seconds = symmetric_seconds(n, n, inputs, len(set(y.tolist())))
        # At most ten minutes to predict a table as large as the training table.
        if seconds <= 600:
            return {"method": "symmetric"}, ["its sets are exactly valid"]
        slow = f"exactly valid sets (--method symmetric) would take about {seconds / 60:,.0f} minutes"
        return {"method": "influence"}, [f"an approximation; {slow} for a table of this size"]
    epochs = min(200, max(20, 1_000_000 // n))
    options, reasons = {"method": method, "max_epochs": epochs}, [f"{epochs} epochs of training"]
    p = sum(q.numel() for q in estimator[-1].parameters() if q.requires_grad)
    # Up to n·p² = 2e11 the curvature of all layers takes about a minute.
    if method in ("auto", "influence") and n * float(p) ** 2 > 2e11:
        options["curvature"] = "last_layer"
        reasons.append(f"the curvature of the last layer only, because that of all {p:,} parameters would be slow")
    return options, reasons
