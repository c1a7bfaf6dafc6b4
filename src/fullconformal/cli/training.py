"""`fullconformal fit` and `fullconformal compare`: train on a table; and which classifier and method suit it."""

from __future__ import annotations

import math
import shlex
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click

from fullconformal.cli import options
from fullconformal.cli.options import LEVEL, MODELS, PATH


@click.command()
@click.argument("table", type=PATH)
@click.option("--target", required=True, help="The column to predict.")
@click.option("-o", "--out", type=PATH, required=True, help="The file to save the predictor in.")
@click.option("--method", type=click.Choice(["auto", "influence", "symmetric", "exact", "oob", "folds", "split"]),
              default="auto", show_default=True,
              help="The method of full CP, or split CP; auto takes the sharpest method that keeps its promise in minutes.")  # fmt: skip
@click.option("--confidence", type=LEVEL, default=0.9, show_default=True, help="Confidence level of the sets.")
@click.option("--class-conditional", is_flag=True, help="Make the guarantee hold for each class.")
@options.training_options
def fit(
    table: Path, target: str, out: Path, task: str, model: str, method: str, confidence: float, class_conditional: bool,
    quiet: bool, as_json: bool, **columns: Any,
) -> None:  # fmt: skip
    """Fit a predictor to all rows of TABLE (CSV, TSV, Excel or Parquet) and save it."""
    from fullconformal.cli import saved, tables
    from fullconformal.cli.printing import Printer

    tables.check_output(out, table)
    check_model(model)
    printer = Printer(quiet, as_json)
    asked = tables.Asked(table, target, **columns)
    if tables.is_quantity_wanted(asked, task, printer):
        from fullconformal.cli import regression

        regression.fit(asked, out, model, method, confidence, printer)
        return
    schema, X, y = tables.read_training(asked, printer)
    sizes = {str(label): count for label, count in Counter(y.tolist()).most_common()}
    printer.say(
        f"{table.name}: {len(y):,} rows, {len(schema.numbers)} numeric and {len(schema.categories)} categorical columns; {target!r} has "
        f"{len(sizes)} classes ({shown_sizes(sizes)})"
    )

    # Imported now, so that errors in the table do not wait for torch.
    import numpy

    from fullconformal import ConformalWarning, FullConformalClassifier, SplitConformalClassifier
    from fullconformal.runtime.tasks import timed

    estimator = make_pipeline(model, schema, X, y, asked.seed)
    chosen, reasons = method_options(model, method, estimator, X, y)
    asked_method = chosen.pop("method")
    kind: Any = (
        SplitConformalClassifier if asked_method == "split" else partial(FullConformalClassifier, method=asked_method)
    )
    clf = kind(
        estimator, confidence_level=confidence, class_conditional=class_conditional, random_state=asked.seed,
        verbose=printer.verbose, **chosen,
    )  # fmt: skip
    with printer.warnings_as_notes() as warned, warnings.catch_warnings():
        # They are printed below, one per line.
        warnings.simplefilter("ignore", ConformalWarning)
        _, seconds = timed(clf.fit, X, y)
    # Which classes are too small for a level is said by `predict` for its own.
    with printer.warnings_as_notes():
        clf.warn_unreachable(numpy.asarray(confidence))
    name = getattr(clf, "method_", asked_method)
    # An automatic choice is said by the predictor, before it is fitted.
    said = "; ".join(reasons)
    if asked_method != "auto" or said:
        printer.say(said if asked_method == "auto" else f"method {name}: {said}" if said else f"method {name}")
    printer.say(f"guarantee {clf.guarantee_}")
    factory = None if model in MODELS else model
    problems = [text.removeprefix("! ") for text in clf.notes() if text.startswith("! ")]
    notes = {"source": table.name, "model": model, "warnings": [*warned, *problems]}
    facts = {"rows": len(y), "method": name, "classes": sizes, "seconds": round(seconds, 3)}
    saved.save_predictor(clf, out, schema, X, notes, facts, printer, factory)
    if problems:
        for text in problems:
            printer.note(text)
        printer.note(f"`fullconformal compare {shlex.join(words_of(asked))}` measures the coverage on held-out rows.")
    printer.say(f"\nnext: fullconformal predict {out} NEW.csv -o sets.csv{f' --model {model}' if factory else ''}")


@click.command()
@click.argument("table", type=PATH, metavar="TABLE|digits")
@click.option("--target", default=None, help="The column to predict.")
@click.option("-o", "--out", type=PATH, default=None,
              help="A file for all figures, one per row: .csv or .parquet, or - for standard output.")  # fmt: skip
@click.option("--confidence", type=LEVEL, multiple=True, default=(0.8, 0.9, 0.95), show_default=True,
              help="A confidence level; can be repeated.")  # fmt: skip
@click.option("--test-size", type=LEVEL, default=0.25, show_default=True, help="Share of the rows to predict.")
@options.training_options
def compare(
    table: Path, target: str | None, out: Path | None, task: str, model: str, confidence: tuple[float, ...], test_size: float,
    quiet: bool, as_json: bool, **columns: Any,
) -> None:  # fmt: skip
    """Fit full CP and other methods to one part of TABLE (CSV, TSV, Excel or Parquet), and measure their sets on the rest.

    `fullconformal compare digits` uses the images of digits that come with scikit-learn.
    """
    from fullconformal.cli import tables
    from fullconformal.cli.printing import Printer, visible

    check_model(model)
    if out is not None:
        tables.check_output(out, table)
        tables.check_format(out, *tables.TABLES)
    printer = Printer(quiet, as_json, out)
    digits = str(table) == "digits" and not table.exists()
    if target is None and not digits:
        raise ValueError("name the column to predict: --target COLUMN")
    asked = tables.Asked(table, target or "", **columns)
    if not digits and tables.is_quantity_wanted(asked, task, printer):
        from fullconformal.cli import regression

        estimator, parts = regression.to_compare(asked, model, test_size, printer)
    else:
        estimator, parts = classifiers_to_compare(asked, digits, model, test_size, printer)

    from fullconformal import compare as compare_methods

    X, X_test, y, y_test = parts
    with printer.warnings_as_notes():
        comparison = compare_methods(
            None, X, y, X_test, y_test, sorted(set(confidence)), estimator=estimator, random_state=asked.seed,
            verbose=printer.verbose,
        )  # fmt: skip
    frame = comparison.to_frame()
    if out is not None:
        tables.write_table(frame, out, printer)
    # JSON has no missing and no infinite numbers: null.
    rows = frame.to_dict(orient="records")
    printer.json([{k: None if v in (math.inf, -math.inf) or v != v else v for k, v in row.items()} for row in rows])
    printer.say(comparison)
    if quiet or as_json:
        # Otherwise the table shows them.
        for name, error in comparison.errors.items():
            click.echo(visible(f"{name} failed: {type(error).__name__}: {error}"), err=True)
    if out is not None and not printer.to_stderr:
        printer.say(f"\nall figures: {out}")


def classifiers_to_compare(
    asked: Any, digits: bool, model: str, test_size: float, printer: Any
) -> tuple[Any, list[Any]]:
    """A classifier, and two parts of the objects of a table, or of digits, and of their labels: to learn from, and to predict."""
    from fullconformal.cli import tables

    seed = asked.seed
    if digits:
        from fullconformal.data import load_digits

        images = load_digits(test_size, seed)
        parts = [images.X, images.X_test, images.y, images.y_test]
        estimator = make_classifier(model, 64, 10, seed)
    else:
        schema, objects, labels = tables.read_training(asked, printer)
        parts = split(objects, labels, test_size, seed, asked.target)
        estimator = make_pipeline(model, schema, parts[0], parts[2], seed)
    y, y_test = parts[2:]
    printer.say(
        f"{asked.table.name}: {len(y):,} rows to learn from, {len(y_test):,} to predict, {len(set(y.tolist()))} classes\n"
    )
    return estimator, parts


def shown_sizes(sizes: dict[str, int], most: int = 8) -> str:
    """Classes with their numbers of rows, the largest first; of many the smallest three, which need most care, are among them."""
    each = [f"{label}: {count:,}" for label, count in sizes.items()]
    return ", ".join(each if len(each) <= most else [*each[: most - 3], f"{len(each) - most} more", *each[-3:]])


def words_of(asked: Any) -> list[str]:
    """What was asked of a training table, as it is typed."""
    words = [str(asked.table), "--target", asked.target, *(["--sep", asked.sep] if asked.sep else [])]
    words += [] if asked.decimal == "." else ["--decimal", asked.decimal]
    for option, names in (("--drop", asked.drop), ("--categorical", asked.categorical), ("--missing", asked.missing)):
        words += [word for name in names for word in (option, name)]
    return words + ["--drop-missing"] * asked.drop_missing


def split(X: Any, y: Any, test_size: float, seed: int, target: str) -> Any:
    """Training and test objects, training and test labels, drawn at random."""
    from sklearn.model_selection import train_test_split

    from fullconformal.cli.schema import TableError

    parts = train_test_split(X, y, test_size=test_size, random_state=seed)
    if absent := sorted(set(y.tolist()) - set(parts[2].tolist())):
        raise TableError(
            f"{', '.join(map(repr, absent[:5]))} of {target!r} has too few rows to be in both parts; leave its rows out, or lower "
            "--test-size."
        )
    return parts


def check_model(model: str) -> None:
    """Raise if the option --model names no model."""
    if model not in MODELS and model.count(":") != 1:
        raise ValueError(f"--model {model!r} is unknown; give {', '.join(MODELS)}, or package.module:function.")


def make_classifier(model: str, n_features: int, n_classes: int, seed: int) -> Any:
    """The classifier that the option --model names."""
    if model == "lr":
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(max_iter=1000)
    if model in ("forest", "boosting"):
        from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

        # 300 trees leave about 110 to score each point.
        return RandomForestClassifier(300) if model == "forest" else HistGradientBoostingClassifier()
    if model == "network":
        import torch

        from fullconformal.models import mlp

        torch.manual_seed(seed)
        return mlp(n_features, (32,), n_classes)
    from fullconformal.cli import saved
    from fullconformal.storage.modules import Factory

    saved.find_local_modules()
    return Factory(model)()


def make_pipeline(model: str, schema: Any, X: Any, y: Any, seed: int) -> Any:
    """A Pipeline of an encoder, fitted to the table X, and the classifier that the option --model names."""
    from sklearn.pipeline import make_pipeline

    from fullconformal.cli.schema import encoder

    encode = encoder(schema).fit(X)
    n_features = encode.transform(X[:1]).shape[1]
    return make_pipeline(encode, make_classifier(model, n_features, len(set(y.tolist())), seed))


def method_options(model: str, method: str, estimator: Any, X: Any, y: Any) -> tuple[dict[str, Any], list[str]]:
    """Options of the predictor that suit the model and the size of the table, the method first, and the reasons to print."""
    n = len(y)
    if method == "split":
        return {"method": method}, ["part of the rows trains the model, the others calibrate it"]
    if model == "lr":
        from fullconformal.methods.convex import symmetric_seconds

        if method != "auto":
            return {"method": method}, []
        inputs = estimator[0].transform(X[:1]).shape[1] + 1
        # At most about ten minutes to predict a table as large as the training table.
        if symmetric_seconds(n, n, inputs, len(set(y.tolist()))) <= 600:
            return {"method": "symmetric"}, ["its sets are exactly valid"]
        slow = "full CP (--method symmetric) would take many minutes for a table of this size"
        return {"method": "split"}, [f"its sets are exactly valid; {slow}"]
    if model in ("forest", "boosting"):
        return {"method": method}, []
    epochs = min(200, max(20, 1_000_000 // n))
    options, reasons = {"method": method, "max_epochs": epochs}, [f"{epochs} epochs of training"]
    p = sum(q.numel() for q in estimator[-1].parameters() if q.requires_grad)
    # Up to n·p² = 2e11 the curvature of all layers takes about a minute.
    if method == "influence" and n * float(p) ** 2 > 2e11:
        options["curvature"] = "last_layer"
        reasons.append(f"the curvature of the last layer only, because that of all {p:,} parameters would be slow")
    return options, reasons
