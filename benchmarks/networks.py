"""Networks with few points: K-fold full CP beside the paper's method and those that hold points out. About half an hour of one core.

    python benchmarks/networks.py [n ...] [--seeds 20] [--first 1000] [--only METHOD] [--jobs 14] [--out FILE]
    python benchmarks/networks.py --stratified --seeds 10   bags that hold each class in its share, as training sets are often drawn
    python benchmarks/networks.py --approximations     direct, indirect and newton side by side, of the paper's method, by l2; five seeds

Digits, a network 64-16-10 trained on n points (default 100, 300 and 1,000), l2 = 1e-2. Error rate and mean labels in a set at ε = 0.1, the
labels at the ε at which a tenth of all objects err ("at equal error"), and the area under the curve of the size over ε ≤ 0.2, on 500
images left over; means of 40 seeds, each its own bag and initial weights, with the standard error between seeds. With ten bags of 100
points that error is 0.03 to 0.04 labels, more than most methods differ by: the first ten happen to be easy to cover. Bags that hold each
class in its share vary less, but the guarantee is for bags drawn at random, which the other tables use. Seconds are of fit
and prediction, as a multiple of those of training one network on all n points.

Cross-CP is CV+ too: with the loss as score they have the same sets. Its rows "at 0.05" are what is proved to err on at most a tenth.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed
from measure import size_at_error
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fullconformal import CrossConformalClassifier, FullConformalClassifier, SplitConformalClassifier
from fullconformal.metrics import size_auc
from fullconformal.models import mlp, train

SEEDS, EPOCHS, TEST, L2, EPSILON = 40, 100, 500, 1e-2, 0.1


def methods(net: torch.nn.Module, seed: int) -> dict[str, object]:
    """What is compared, unfitted."""
    options = {"l2": L2, "max_epochs": EPOCHS, "random_state": seed}
    full = {"method": "folds", **options}
    return {
        "folds, K = 10": FullConformalClassifier(net, **full),
        "folds, K = 10, two repeats": FullConformalClassifier(net, repeats=2, **full),
        "folds, K = 10, influence": FullConformalClassifier(net, update="influence", **full),
        "folds, K = 5": FullConformalClassifier(net, folds=5, **full),
        "cross-CP, K = 10": CrossConformalClassifier(net, n_folds=10, **options),
        "cross-CP, K = 5": CrossConformalClassifier(net, n_folds=5, **options),
        "split 80/20": SplitConformalClassifier(net, calibration_size=0.2, **options),
        "split 50/50": SplitConformalClassifier(net, calibration_size=0.5, **options),
        "ACP, direct": FullConformalClassifier(net, method="influence", **options),
    }


def one(n: int, seed: int, only: list[str], stratified: bool) -> dict[str, tuple[np.ndarray, np.ndarray, float, float]]:
    """Of each method, or of some: ε (m, C), the true labels' columns (m,), the time as a multiple of one training, and the ε asked for."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    X, y = load_digits(return_X_y=True)
    # Not class by class: points are to be exchangeable.
    X, Xt, y, yt = train_test_split(
        X / 16, y, train_size=n, test_size=TEST, random_state=seed, stratify=y if stratified else None
    )
    torch.manual_seed(seed)
    net = mlp(64, (16,), 10)
    alone = copy.deepcopy(net)
    penalty = {name: n * L2 for name, _ in alone.named_parameters()}
    start = time.perf_counter()
    train(alone, torch.tensor(X).float(), torch.tensor(y), penalty, max_epochs=EPOCHS, seed=seed)
    once = time.perf_counter() - start
    out = {}
    for name, clf in methods(net, seed).items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        try:
            p = clf.fit(X, y).predict_p(Xt)  # type: ignore[attr-defined]
        except ValueError:
            # What trains lacks a class.
            continue
        seconds = time.perf_counter() - start
        columns = np.searchsorted(clf.classes_, yt)  # type: ignore[attr-defined]
        out[name] = p, columns, seconds / once, EPSILON
        if name == "cross-CP, K = 5":
            # The same models, combined otherwise; and ε/2, at which an error of ε is proved.
            for rule in ("mean", "sequential"):
                p = clf.set_params(aggregation=rule).predict_p(Xt)  # type: ignore[attr-defined]
                out[f"{name}, {rule}"] = p, columns, seconds / once, EPSILON
                out[f"{name}, {rule}, at {EPSILON / 2:g}"] = p, columns, seconds / once, EPSILON / 2
    return out


def row(runs: list[tuple[np.ndarray, np.ndarray, float, float]]) -> tuple[str, ...]:
    """Error, labels, labels at equal error, area and time of a method, over seeds."""
    own = [p[np.arange(TEST), columns] for p, columns, _, _ in runs]
    figures = []
    for mine, (p, _, _, level) in zip(own, runs, strict=True):
        figures.append(((mine <= level + 1e-12).mean(), (p > level + 1e-12).sum(1).mean(), size_auc(p).value))
    mean, spread = np.mean(figures, 0), np.std(figures, 0, ddof=1) / len(runs) ** 0.5
    equal = size_at_error(np.concatenate([p for p, *_ in runs]), np.concatenate([run[1] for run in runs]), EPSILON)
    cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(mean, spread, strict=True)]
    return (
        cells[0],
        cells[1],
        f"{equal:.3f}",
        cells[2],
        f"{np.median([times for _, _, times, _ in runs]):.1f}",
        str(len(runs)),
    )


def compare(sizes: list[int], seeds: range, only: list[str], stratified: bool, jobs: int, out: Path | None) -> None:
    """A table in Markdown, printed and, after every n, written."""
    lines = [f"Digits, network 64-16-10, ε = {EPSILON}.", ""]
    lines += ["| n | method | error | labels | at equal error | AUC | time / training | bags |", "|---|" + "---|" * 7]
    print(*lines, sep="\n", flush=True)
    with Parallel(jobs) as parallel:
        for n in sizes:
            runs = parallel(delayed(one)(n, seed, only, stratified) for seed in seeds)
            for name in dict.fromkeys(name for run in runs for name in run):
                cells = row([run[name] for run in runs if name in run])
                lines.append(f"| {n:,} | {name} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
            if out is not None:
                out.write_text("\n".join(lines) + "\n", encoding="utf-8")


APPROXIMATIONS = ("direct", "indirect", "newton")


def approximated(n: int, l2: float, seed: int) -> dict[str, tuple[float, float, float]]:
    """Error, size and seconds of each approximation of the paper's method."""
    X, y = load_digits(return_X_y=True)
    X, Xt, y, yt = train_test_split(X / 16, y, train_size=n, test_size=250, random_state=seed, stratify=y)
    torch.manual_seed(seed)
    net = mlp(64, (16,), 10)
    clf = FullConformalClassifier(net, method="influence", l2=l2, random_state=seed, max_epochs=EPOCHS).fit(X, y)
    out = {}
    for name in APPROXIMATIONS:
        start = time.perf_counter()
        p = clf.set_params(approximation=name).predict_p(Xt)
        seconds = time.perf_counter() - start
        out[name] = (float((p[np.arange(len(yt)), yt] <= 0.1).mean()), float((p > 0.1).sum(1).mean()), seconds)
    return out


def print_approximations() -> None:
    """Error rate and set size at ε = 0.1 by n and l2."""
    for n in (100, 300, 1000):
        for l2 in (1e-4, 1e-3, 1e-2):
            runs, cells = [approximated(n, l2, seed) for seed in range(5)], []
            for name in APPROXIMATIONS:
                values = np.array([run[name] for run in runs])
                error, size, seconds = values.mean(0)
                cells.append(
                    f"{name} {error:.3f} ± {values[:, 0].std(ddof=1) / 5**0.5:.3f} / {size:.2f} in {seconds:.1f} s"
                )
            print(n, l2, *cells, sep="   ", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--only", action="append", default=[], help="a method by its name in the table; can be repeated"
    )
    parser.add_argument("--stratified", action="store_true", help="every class in its share")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--approximations", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.approximations:
        print_approximations()
    else:
        seeds = range(args.first, args.first + args.seeds)
        compare(args.sizes, seeds, args.only, args.stratified, args.jobs, args.out)
