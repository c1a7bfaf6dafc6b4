"""`fullconformal demo`: digits, a small network, and the schemes of full CP beside split CP."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fullconformal.cli.common import LEVEL


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("fullconformal-demo.png"),
              show_default=True, help="Where the figure goes; the report goes beside it, as .html.")  # fmt: skip
@click.option("--confidence", type=LEVEL, default=0.99, show_default=True, help="Confidence level of the sets.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the split and of training.")
def demo(out: Path, confidence: float, seed: int) -> None:
    """Digits, a small network, and the schemes of full CP beside split CP."""
    from rich.console import Console

    from fullconformal.data import load_digits
    from fullconformal.report.demo import draw

    check_out(out)
    console = Console()
    data = load_digits(500, seed)
    X, y, Xt, yt, images = data.X, data.y, data.X_test, data.y_test, 16 * data.X_test.reshape(-1, 8, 8)
    console.print(
        f"[bold]Digits[/]: {len(y)} images to learn from, {len(yt)} to predict, 10 labels, a network 64-32-10.\n"
    )
    full, p, seconds, warned = run(X, y, Xt, confidence, seed)
    console.print(table(p, seconds, yt, confidence))
    console.print(
        "[dim]Deleted, studentized and ordinary are full CP and share one fit. "
        "Size AUC: area under set size against ε in [0, 0.2]. ±: one standard error.[/]\n"
    )
    console.print("[bold]A few sets in words[/] (full CP, deleted)")
    for line in words(p["deleted"], yt, full.classes_, confidence):
        console.print(line, highlight=False)
    console.print("\n[bold]Diagnostics[/]")
    console.print(str(full.diagnose()), highlight=False, markup=False)
    if not warned:
        console.print("Nothing to warn of.")
    draw(out, p, "deleted", images, yt, full.classes_, confidence)
    report = full.report(
        Xt,
        yt,
        out.with_suffix(".html"),
        images=images.max() - images,  # ink on paper
        others={name: values for name, values in p.items() if name != "deleted"},
        title="Handwritten digits",
    )
    console.print(f"\nFigure: {out.resolve()}", highlight=False, soft_wrap=True)
    console.print(f"Report: {report.resolve()}  (open it in a browser)", highlight=False, soft_wrap=True)


def check_out(out: Path) -> None:
    """Raise where the figure cannot be written."""
    if not out.resolve().parent.is_dir():
        raise click.BadParameter(f"the folder {out.resolve().parent} does not exist", param_hint="--out")
    if out.suffix.lower() in (".html", ".htm"):
        raise click.BadParameter(f"{out.name} is not the name of a figure; take .png, .pdf or .svg", param_hint="--out")


def run(X: Any, y: Any, Xt: Any, confidence: float, seed: int) -> tuple[Any, dict[str, Any], dict[str, Any], bool]:
    """The predictor by full CP; p-values and the seconds of fit and prediction by method; and whether anything was warned of."""
    import torch

    from fullconformal import ConformalWarning, FullConformalClassifier, SplitConformalClassifier
    from fullconformal.models import mlp

    torch.manual_seed(seed)
    network = mlp(64, (32,), 10)
    start = time.perf_counter()
    full = FullConformalClassifier(
        network, method="influence", confidence_level=confidence, random_state=seed, verbose=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConformalWarning)
        full.fit(X, y)
    fitted = time.perf_counter() - start
    p, seconds = {}, {}
    for scheme in ("deleted", "studentized", "ordinary"):
        start = time.perf_counter()
        p[scheme] = full.set_params(scheme=scheme).predict_p(Xt)
        seconds[scheme] = (fitted, time.perf_counter() - start)
    start = time.perf_counter()
    split = SplitConformalClassifier(network, random_state=seed).fit(X, y)
    halfway = time.perf_counter()
    p["split CP"] = split.predict_p(Xt)
    seconds["split CP"] = (halfway - start, time.perf_counter() - halfway)
    return full.set_params(scheme="deleted"), p, seconds, bool(caught)


def table(p: dict[str, Any], seconds: dict[str, Any], y: Any, confidence: float) -> Any:
    """The methods in numbers."""
    from rich import box
    from rich.table import Table

    from fullconformal import metrics

    title = f"{len(y)} test images, {confidence:.0%} confidence"
    out = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("method", "coverage", "set size", "size AUC", "fit", "predict"):
        out.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for name, values in p.items():
        told = metrics.summary(values, y, confidence)
        numbers = (str(told[k]) for k in ("coverage", "mean_size", "size_auc"))
        out.add_row(name, *numbers, *(f"{s:.1f} s" for s in seconds[name]))
    return out


def words(p: Any, y: Any, classes: Any, confidence: float) -> Iterator[str]:
    """A few sets, a line each."""
    from fullconformal.report.demo import in_words, interesting
    from fullconformal.sets import as_labels, prediction_sets

    chosen = interesting(p, 6, confidence)
    for at, labels in zip(chosen, as_labels(prediction_sets(p[chosen], confidence), classes), strict=True):
        yield f"  image {at:3d}: {in_words(labels, y[at], confidence)}"
