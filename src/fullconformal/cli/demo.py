"""`fullconformal demo` and `fullconformal data`: a demonstration on digits, and the files of data sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from fullconformal.cli.options import LEVEL, PATH, seed_option
from fullconformal.cli.tables import check_output
from fullconformal.sets import as_labels, prediction_sets


@click.command()
@click.argument("name", type=click.Choice(["digits", "synthetic", "mnist", "cifar10", "acsincome"]))
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="The folder of the files; by default the environment variable FULLCONFORMAL_DATA.")  # fmt: skip
@click.option("--download", is_flag=True, help="Download the files from their publisher first.")
def data(name: str, folder: Path | None, download: bool) -> None:
    """Check the files of a data set and describe what they hold."""
    from fullconformal import data as datasets

    if name in ("digits", "synthetic"):
        if download:
            raise click.UsageError(f"{name} needs no files; omit --download.")
        loaded = datasets.load_digits() if name == "digits" else datasets.make_synthetic()
    else:
        if download:
            click.echo(f"files in {datasets.download(name, folder)}")
        loaded = getattr(datasets, f"load_{name}")(folder)
    click.echo(str(loaded))


@click.command()
@click.option("--out", type=PATH, default=Path("fullconformal-demo.png"), show_default=True,
              help="The file for the figure; the report is written beside it, as .html.")  # fmt: skip
@click.option("--confidence", type=LEVEL, default=0.99, show_default=True, help="Confidence level of the sets.")
@seed_option
def demo(out: Path, confidence: float, seed: int) -> None:
    """Train a small network on images of digits, and compare the schemes of full CP with split CP."""
    from fullconformal.data import load_digits

    check_output(out)
    if out.suffix.lower() in (".html", ".htm"):
        raise ValueError(f"--out {out.name} is not the name of a figure; use .png, .pdf or .svg.")
    console = Console(highlight=False)
    digits = load_digits(500, seed)
    X, y, images = digits.X_test, digits.y_test, 16 * digits.X_test.reshape(-1, 8, 8)
    console.print(
        f"[bold]Digits[/]: {len(digits.y)} images to learn from, {len(y)} to predict, 10 labels, a network 64-32-10.\n"
    )
    full, p, seconds, warned = run_methods(digits.X, digits.y, X, confidence, seed)
    console.print(summary_table(p, seconds, y, confidence))
    console.print(
        "[dim]Deleted, studentized and ordinary are full CP and share one fit. "
        "Size AUC: area under set size against ε in [0, 0.2]. ±: one standard error.[/]\n"
    )
    console.print("[bold]A few sets[/] (full CP, deleted)")
    shown = interesting(p["deleted"], 6, confidence)
    sets = as_labels(prediction_sets(p["deleted"][shown], confidence), full.classes_)
    for at, labels in zip(shown, sets, strict=True):
        console.print(f"  image {at:3d}: {sentence(labels, y[at], confidence)}")
    console.print("\n[bold]Diagnostics[/]")
    console.print(str(full.diagnose()), markup=False)
    if not warned:
        console.print("No warnings.")
    draw(out, p, "deleted", shown, images, y, full.classes_, confidence)
    others = {name: values for name, values in p.items() if name != "deleted"}
    # Dark digits on light paper.
    ink = images.max() - images
    report = full.report(X, y, out.with_suffix(".html"), images=ink, others=others, title="Handwritten digits")
    show_intervals(console, seed)
    console.print(f"\nFigure: {out.resolve()}", soft_wrap=True)
    console.print(f"Report: {report.resolve()}  (open it in a browser)", soft_wrap=True)


def show_intervals(console: Console, seed: int) -> None:
    """Coverage and width of intervals of a number: full CP beside split CP, around the same ridge regression."""
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import train_test_split

    from fullconformal import FullConformalRegressor, SplitConformalRegressor, metrics

    X, X_test, y, y_test = train_test_split(*load_diabetes(return_X_y=True), test_size=142, random_state=seed)
    console.print(
        f"\n[bold]Diabetes[/]: {len(y)} patients to learn from, intervals of a score of {len(y_test)} others, 90% confidence"
    )
    for reg in (FullConformalRegressor(Ridge(0.1)), SplitConformalRegressor(Ridge(0.1), random_state=seed)):
        ends = reg.fit(X, y).predict_interval(X_test)
        figures = metrics.interval_coverage(ends, y_test), metrics.mean_width(ends)
        console.print(
            f"  {reg.display_name}: coverage {figures[0]}, width {figures[1]}; guarantee {reg.guarantee_.word}"
        )


def run_methods(
    X: Any, y: Any, X_test: Any, confidence: float, seed: int
) -> tuple[Any, dict[str, Any], dict[str, Any], bool]:
    """The predictor by full CP; p-values, and seconds of fit and prediction, by method; and whether there were warnings."""
    import torch

    from fullconformal import ConformalWarning, FullConformalClassifier, SplitConformalClassifier
    from fullconformal.models import mlp
    from fullconformal.runtime.tasks import timed

    torch.manual_seed(seed)
    network = mlp(64, (32,), 10)
    full = FullConformalClassifier(
        network, method="influence", confidence_level=confidence, random_state=seed, verbose=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConformalWarning)
        _, fit_seconds = timed(full.fit, X, y)
    p, seconds = {}, {}
    for scheme in ("deleted", "studentized", "ordinary"):
        p[scheme], predict_seconds = timed(full.set_params(scheme=scheme).predict_p, X_test)
        seconds[scheme] = fit_seconds, predict_seconds
    split, fit_seconds = timed(SplitConformalClassifier(network, random_state=seed).fit, X, y)
    p["split CP"], predict_seconds = timed(split.predict_p, X_test)
    seconds["split CP"] = fit_seconds, predict_seconds
    return full.set_params(scheme="deleted"), p, seconds, bool(caught)


def summary_table(p: dict[str, Any], seconds: dict[str, Any], y: Any, confidence: float) -> Any:
    """The metrics of the methods as a table."""
    from fullconformal import metrics

    title = f"{len(y)} test images, {confidence:.0%} confidence"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("method", "coverage", "set size", "size AUC", "fit", "predict"):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for name, values in p.items():
        found = metrics.summary(values, y, confidence)
        numbers = (str(found[k]) for k in ("coverage", "mean_size", "size_auc"))
        table.add_row(name, *numbers, *(f"{s:.1f} s" for s in seconds[name]))
    return table


def sentence(labels: npt.NDArray[Any], truth: Any, level: float) -> str:
    """A set as a sentence."""
    names = [str(label) for label in labels]
    guess = "it is " + " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "no label fits"
    return f"{guess}, with {level:.0%} confidence; it was {truth} ({'right' if truth in labels else 'wrong'})"


def interesting(p: npt.NDArray[np.float64], count: int, level: float) -> npt.NDArray[np.intp]:
    """Objects (count,) worth a look: the largest sets, then an empty one, then the surest."""
    sizes = prediction_sets(p, level).sum(axis=1)
    second = np.sort(p, axis=1)[:, -2]
    hardest = np.lexsort((-second, -sizes))[: count - 2]
    emptiest = np.lexsort((p.max(axis=1), sizes))[:1]
    surest = np.lexsort((second, -p.max(axis=1)))[:1]
    return np.concatenate([hardest, emptiest, surest])


def draw(
    path: Path, p: Mapping[str, npt.NDArray[np.float64]], name: str, objects: npt.NDArray[np.intp],
    images: npt.NDArray[Any], y: npt.NDArray[Any], classes: npt.NDArray[Any], level: float,
) -> None:  # fmt: skip
    """Draw set size against ε for every method, and six objects with their p-values by the method `name`."""
    from matplotlib.figure import Figure

    from fullconformal.report.plots import plot_p_values, plot_size_curve

    figure = Figure(figsize=(13, 5.4), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=(1, 1.25)))
    plot_size_curve(p, ax=left.subplots())
    left.suptitle("Labels in a set", fontsize=11)
    axes = right.subplots(2, 6, width_ratios=(0.8, 1) * 3)
    for k, at in enumerate(objects):
        picture, bars = axes[k // 3, 2 * (k % 3)], axes[k // 3, 2 * (k % 3) + 1]
        picture.imshow(images[at], cmap="gray_r", interpolation="nearest")
        picture.set_axis_off()
        members = classes[prediction_sets(p[name][at : at + 1], level)[0]]
        picture.set_title("{" + ", ".join(map(str, members)) + "}" + f"\ntruth {y[at]}", fontsize=10)
        plot_p_values(p[name][at], classes, level=level, truth=y[at], ax=bars)
        bars.tick_params(labelsize=7)
        bars.set_xlabel("p-value" if k // 3 else "", fontsize=8)
    right.suptitle(f"Sets at {level:.0%} confidence ({name}), the hardest objects first", fontsize=11)
    figure.savefig(path, dpi=150)
