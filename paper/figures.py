"""Figures from the lines of a run. Nothing is computed here but means over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.tables import LABELS, MODELS, Line, printed, select

# One colour a method everywhere; of Okabe and Ito, which the colour-blind can tell apart.
COLOURS = {
    "acp_d": "#0072B2", "acp_o": "#56B4E9", "scp": "#E69F00", "raps": "#D55E00", "cv_plus": "#CC79A7",
    "folds": "#F0E442", "ours": "#009E73",
    "ours_studentized": "#66C2A5", "symmetric": "#000000", "raps_nonempty": "#F0A080",
}  # fmt: skip
SHOWN = ("acp_d", "acp_o", "scp", "raps", "cv_plus", "folds", "ours")
DATA = ("MNIST", "CIFAR-10", "ACSIncome", "digits")


def over_seeds(
    lines: Iterable[Line], group: str, value: Callable[[Line], float]
) -> dict[Any, tuple[list[int], list[float], list[float]]]:
    """Per group: the sizes n, the means over seeds and the standard deviations between seeds."""
    found: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[line[group]][line["n"]].append(value(line))
    out = {}
    for name in sorted(found):
        sizes = sorted(found[name])
        values = [np.array(found[name][n]) for n in sizes]
        out[name] = (sizes, [float(v.mean()) for v in values], [float(v.std()) for v in values])
    return out


def of(name: str, *at: int | str) -> Callable[[Line], float]:
    """What a line found, by name and place."""

    def value(line: Line) -> float:
        found = line["found"][name]
        for place in at:
            found = found[place]
        return float(found)

    return value


def curves(ax: Axes, groups: dict[Any, Any], label: str, ylabel: str, log: bool = True) -> None:
    """One line a group against n."""
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, max(len(groups), 2)))
    for shade, (name, (sizes, means, spreads)) in zip(shades, groups.items(), strict=False):
        ax.errorbar(sizes, means, spreads, marker="o", ms=3, lw=1.2, capsize=2, color=shade, label=f"{label}{name}")
    ax.set(xscale="log", xlabel="training points n", ylabel=ylabel)
    if log:
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)


def save(figure: Figure, folder: Path, name: str) -> str:
    """Write a figure; its file name."""
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110)
    plt.close(figure)
    return f"{name}.png"


def synthetic(lines: list[Line], folder: Path) -> list[tuple[str, str]]:
    """The figures on synthetic data: (file, caption)."""
    scores = [line for line in lines if line.get("measure") == "scores"]
    p_values = [line for line in lines if line.get("measure") == "p_values" and line["experiment"] != "times"]
    out = []
    if scores:
        out += _scores(scores, folder)
    if p_values:
        out += _p_values(p_values, folder)
    return out


def _scores(lines: list[Line], folder: Path) -> list[tuple[str, str]]:
    """Direct against indirect; by features; by λ; the cone."""
    by = {name: [line for line in lines if line["experiment"] == name] for name in ("features", "regularisation")}
    usual = [line for line in by["features"] if line["features"] == 30]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4))
    for name, colour in (("direct", COLOURS["acp_d"]), ("indirect", COLOURS["raps"])):
        for sizes, means, spreads in over_seeds(usual, "features", of(name, 0)).values():
            axes[0].errorbar(sizes, means, spreads, marker="o", ms=3, capsize=2, color=colour, label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="training points n", ylabel="|score − exact|")
    axes[0].set_title("direct and indirect, 30 features")
    axes[0].legend(fontsize=7)
    axes[0].grid(alpha=0.3)
    curves(axes[1], over_seeds(usual, "l2", of("direct_no_worse")), "λ = ", "share of points", log=False)
    axes[1].set(ylim=(0, 1), title="where direct is no worse")
    curves(axes[2], over_seeds(by["features"], "features", of("direct", 0)), "d = ", "|score − exact|")
    axes[2].set_title("direct, by features")
    curves(axes[3], over_seeds(by["regularisation"], "l2", of("direct", 0)), "λ = ", "|score − exact|")
    axes[3].set_title("direct, by λ")
    caption = "Distance of ACP's scores from those of exact full CP (deleted), means over test points and labels; bars: between seeds."
    out = [(save(figure, folder, "scores"), caption)]
    return out + _cone(by["regularisation"], folder) if by["regularisation"] else out


CONE = {
    "cone_lower": "direct ≤ exact",
    "cone_upper": "exact ≤ ℓ + I(zᵢ, ẑ) + g(λ)|I(zᵢ, zᵢ)|",
    "cone_as_printed": "the cone as printed",
}


def _cone(lines: list[Line], folder: Path) -> list[tuple[str, str]]:
    """How often the ends of the cone hold."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    for ax, (key, title) in zip(axes, CONE.items(), strict=True):
        curves(ax, over_seeds(lines, "l2", of(key)), "λ = ", "share of points", log=False)
        ax.set(ylim=(-0.05, 1.05), title=title)
    caption = "Theorem 2: its ends in the right order (left, middle), and as printed (right), where I(zᵢ, zᵢ) < 0 leaves the cone empty."
    return [(save(figure, folder, "cone"), caption)]


def _p_values(lines: list[Line], folder: Path) -> list[tuple[str, str]]:
    """Distance of p-values, validity, Kendall's tau."""
    features = 30 if any(line["features"] == 30 for line in lines) else lines[0]["features"]
    usual = [line for line in lines if line["features"] == features]
    l2 = 0.01 if any(line["l2"] == 0.01 for line in usual) else usual[0]["l2"]
    same = [line for line in lines if line["l2"] == l2]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4))
    curves(axes[0], over_seeds(same, "features", of("distance", 0)), "d = ", "|p − exact p|")
    axes[0].axhline(1e-3, color="grey", lw=1, ls=":")
    axes[0].set_title(f"p-values, λ = {l2}")
    curves(axes[1], over_seeds(usual, "l2", of("distance", 0)), "λ = ", "|p − exact p|")
    axes[1].axhline(1e-3, color="grey", lw=1, ls=":")
    axes[1].set_title(f"p-values, {features} features")
    for name, colour in (("acp", COLOURS["acp_d"]), ("exact", "black")):
        for _, (sizes, means, spreads) in over_seeds([line for line in same if line["features"] == features], "l2",
                                                     of("errors", name, 0)).items():  # fmt: skip
            axes[2].errorbar(sizes, means, spreads, marker="o", ms=3, capsize=2, color=colour, label=name)
    axes[2].axhline(0.1, color="grey", lw=1, ls=":")
    axes[2].set(xscale="log", xlabel="training points n", ylabel="error rate", title="validity at ε = 0.1")
    axes[2].legend(fontsize=7)
    axes[2].grid(alpha=0.3)
    curves(axes[3], over_seeds(same, "features", of("tau")), "d = ", "Kendall's τ", log=False)
    axes[3].set_title("order of p-values")
    return [(save(figure, folder, "p_values"), "ACP's p-values beside those of exact full CP; dotted: 10⁻³, and ε.")]


def sizes(lines: list[Line], folder: Path) -> list[tuple[str, str]]:
    """Mean set size against ε, a row a model, full range and [0, 0.2]."""
    out = []
    grid = np.arange(101) / 100
    for data in DATA:
        models = [
            model
            for model in MODELS
            if any(line.get("model") == model and line["data"] == data and "all" in line for line in lines)
        ]
        if not models:
            continue
        figure, axes = plt.subplots(2, len(models), figsize=(3 * len(models), 5), squeeze=False)
        for column, model in enumerate(models):
            for method in SHOWN:
                chosen = [line for line in select(lines, data, model, method) if "all" in line]
                if not chosen:
                    continue
                size = np.mean([line["curve"]["size"] for line in chosen], axis=0)
                for row, stop in enumerate((101, 21)):
                    axes[row, column].plot(
                        grid[:stop], size[:stop], color=COLOURS[method], lw=1.2, label=LABELS[method]
                    )
            axes[0, column].set_title(f"{data} {model}", fontsize=9)
            for row in (0, 1):
                axes[row, column].grid(alpha=0.3)
            axes[1, column].set_xlabel("ε")
            axes[1, column].set_ylim(0, None)
        axes[0, 0].set_ylabel("mean set size")
        axes[1, 0].set_ylabel("mean set size")
        axes[0, -1].legend(fontsize=6)
        out.append(
            (
                save(figure, folder, f"sizes-{data}"),
                f"Mean set size against ε on {data}, all test points, mean of the seeds.",
            )
        )
    return out


def examples(folder: Path, figures: Path) -> list[tuple[str, str]]:
    """Images with the sets of every method, and size against ε with a star where the true label leaves the set."""
    out = []
    for path in sorted(folder.glob("examples-*.npz")):
        experiment = path.stem.removeprefix("examples-")
        with np.load(path, allow_pickle=False) as arrays:
            kept = dict(arrays)
        level = 0.01 if experiment == "mnist" else 0.2
        said = printed().get("examples", {}).get(experiment, {})
        for k, position in enumerate(kept["position"]):
            figure = _example(kept, k, level, said.get(str(position), {}))
            name = kept["classes"][kept["label"][k]]
            out.append((save(figure, figures, f"example-{experiment}-{position}"),
                        f"Test image {position} ({name}), sets at ε = {level}; ★ where the true label leaves the set."))  # fmt: skip
    return out


def _example(kept: dict[str, Any], k: int, level: float, said: dict[str, str]) -> Figure:
    """One image."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.2), width_ratios=(1, 2.4, 2))
    image = kept["image"][k]
    left.imshow(image.transpose(1, 2, 0) if len(image) == 3 else image[0], cmap=None if len(image) == 3 else "gray_r")
    left.axis("off")
    middle.axis("off")
    grid, true = np.linspace(0, 1, 501), kept["label"][k]
    for row, method in enumerate(m for m in SHOWN if f"epsilon_{m}" in kept):
        epsilon = kept[f"epsilon_{method}"][k]
        names = ", ".join(kept["classes"][epsilon > level]) or "none"
        text = f"{LABELS[method]}: {names}" + (f"\n    paper: {said[method]}" if method in said else "")
        middle.text(
            0, 0.97 - row * 0.165, text, fontsize=8, va="top", color=COLOURS[method], transform=middle.transAxes
        )
        size = (epsilon[None] > grid[:, None]).sum(1)
        right.step(grid, size, where="post", color=COLOURS[method], lw=1.2)
        right.plot(epsilon[true], (epsilon >= epsilon[true]).sum(), marker="*", ms=10, color=COLOURS[method])
    right.set(xlabel="ε", ylabel="set size")
    right.grid(alpha=0.3)
    return figure
