"""The figure and the words of the demonstration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullconformal.report.plots import plot_p_values, plot_size_curve
from fullconformal.sets import prediction_sets


def in_words(labels: npt.NDArray[Any], truth: Any, level: float) -> str:
    """A set in a sentence."""
    if len(labels) == 0:
        said = "no label fits"
    elif len(labels) == 1:
        said = f"it is {labels[0]}"
    else:
        said = "it is " + ", ".join(map(str, labels[:-1])) + f" or {labels[-1]}"
    verdict = "right" if truth in labels else "wrong"
    return f"{said}, with {level:.0%} confidence; it was {truth} ({verdict})"


def interesting(p: npt.NDArray[np.float64], count: int, level: float) -> npt.NDArray[np.intp]:
    """Objects worth a look, (count,): the largest sets, then an empty one, then the surest."""
    sizes = prediction_sets(p, level).sum(axis=1)
    second = np.sort(p, axis=1)[:, -2]
    hardest = np.lexsort((-second, -sizes))[: count - 2]
    emptiest = np.lexsort((p.max(axis=1), sizes))[:1]
    surest = np.lexsort((second, -p.max(axis=1)))[:1]
    return np.concatenate([hardest, emptiest, surest])


def draw(
    path: Path,
    p: Mapping[str, npt.NDArray[np.float64]],
    shown: str,
    images: npt.NDArray[Any],
    y: npt.NDArray[Any],
    classes: npt.NDArray[Any],
    level: float,
) -> None:
    """One figure: set size against ε for every method, and a few images with the p-values of the method `shown`."""
    from matplotlib.figure import Figure

    chosen = interesting(p[shown], 6, level)
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    left, right = np.asarray(figure.subfigures(1, 2, width_ratios=(1, 1.25)))
    plot_size_curve(p, ax=left.subplots())
    left.suptitle("How many labels it takes", fontsize=11)
    axes = right.subplots(2, 6, width_ratios=(0.8, 1) * 3)
    for k, at in enumerate(chosen):
        picture, bars = axes[k // 3, 2 * (k % 3)], axes[k // 3, 2 * (k % 3) + 1]
        picture.imshow(images[at], cmap="gray_r", interpolation="nearest")
        picture.set_axis_off()
        members = classes[prediction_sets(p[shown][at : at + 1], level)[0]]
        picture.set_title("{" + ", ".join(map(str, members)) + "}" + f"\ntruth {y[at]}", fontsize=10)
        plot_p_values(p[shown][at], classes, level=level, truth=y[at], ax=bars)
        bars.tick_params(labelsize=7)
        bars.set_xlabel("p-value" if k // 3 else "", fontsize=8)
    right.suptitle(f"Sets at {level:.0%} confidence ({shown}), the hardest objects first", fontsize=11)
    figure.savefig(path, dpi=150)
