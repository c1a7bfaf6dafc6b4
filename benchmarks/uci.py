"""Intervals on seven UCI tables by the protocol of Tailor, Correia, Nalisnick and Louizos (ICLR 2025): coverage and width of every method.

    python benchmarks/uci.py                                all tables and methods; results as they come, a run goes on where it stopped
    python benchmarks/uci.py --table yacht --method split   one of each; either can be repeated
    python benchmarks/uci.py --seeds 1                      a quick look
    python benchmarks/uci.py --page                         the page from stored results, nothing computed

The tables are data/regression/NAME.csv.gz, the target in the last column. Every table is cut into 10 folds, 10 times (once for the larger
ones); each fold is predicted by methods fitted to the other nine. The network has one hidden layer of 50 GELU units. Widths are in the
units of the target. A method is one entry of METHODS.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from torch import nn

from fullconformal import CVPlusRegressor, FullConformalRegressor, JackknifePlusRegressor, SplitConformalRegressor

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
LEVELS = (0.9, 0.95, 0.99)
# By table, how often it is cut into ten folds.
TABLES = {
    "yacht": 10,
    "boston-housing": 10,
    "energy": 10,
    "concrete": 10,
    "wine-quality-red": 10,
    "kin8nm": 1,
    "power-plant": 1,
}


class Network(RegressorMixin, BaseEstimator):
    """One hidden layer of GELU units on standardised columns, by Adam on all points; of the mean, or of a quantile of y.

    The penalty is l2/2 times the squares of all weights beside the mean loss in units of the standard deviation of y.
    """

    def __init__(
        self, hidden: int = 50, l2: float = 1e-3, steps: int = 600, quantile: float | None = None, random_state: int = 0
    ):
        self.hidden, self.l2, self.steps = hidden, l2, steps
        self.quantile, self.random_state = quantile, random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> Self:
        """Train on points X (n, d), y (n,)."""
        self.scaler_ = StandardScaler().fit(X)
        self.mean_, self.scale_ = float(y.mean()), float(y.std()) or 1.0
        inputs = torch.tensor(self.scaler_.transform(X), dtype=torch.float32)
        targets = torch.tensor((y - self.mean_) / self.scale_, dtype=torch.float32)[:, None]
        with torch.random.fork_rng():
            torch.manual_seed(self.random_state)
            self.net_ = nn.Sequential(nn.Linear(X.shape[1], self.hidden), nn.GELU(), nn.Linear(self.hidden, 1))
        optimiser = torch.optim.Adam(self.net_.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
        weights = [self.net_[0].weight, self.net_[2].weight]
        for _ in range(self.steps):
            error = targets - self.net_(inputs)
            tau = self.quantile
            loss = (error**2).mean() if tau is None else torch.maximum(tau * error, (tau - 1) * error).mean()
            loss = loss + self.l2 / 2 * sum((w**2).sum() for w in weights)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Predictions (m,) in the units of y."""
        with torch.no_grad():
            out = self.net_(torch.tensor(self.scaler_.transform(X), dtype=torch.float32))
        return out[:, 0].double().numpy() * self.scale_ + self.mean_


# By name, the method for a seed. All are given objects and values standardised by the training points.
METHODS: dict[str, Callable[[int], Any]] = {
    "split, network": lambda seed: SplitConformalRegressor(Network(random_state=seed), random_state=seed),
    "CQR, network": lambda seed: SplitConformalRegressor(
        Network(quantile=0.5, random_state=seed), conformity_score="cqr", random_state=seed
    ),
    "CV+, network": lambda seed: CVPlusRegressor(Network(random_state=seed), random_state=seed),
    "split, ridge": lambda seed: SplitConformalRegressor(Ridge(), random_state=seed),
    "jackknife+, ridge": lambda _: JackknifePlusRegressor(Ridge()),
    "full CP, ridge": lambda _: FullConformalRegressor(Ridge()),
    "full CP, kernel ridge": lambda _: FullConformalRegressor(KernelRidge(alpha=0.1, kernel="rbf")),
}


def load(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Objects (n, d) and targets (n,) of a table."""
    frame = pd.read_csv(folder / f"{name}.csv.gz")
    return frame.iloc[:, :-1].to_numpy(np.float64), frame.iloc[:, -1].to_numpy(np.float64)


def measure(reg: Any, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Points covered and mean width at each level of one fold, the error of the model, and the time."""
    scaler, mean, scale = StandardScaler().fit(train[0]), train[1].mean(), train[1].std()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reg.fit(scaler.transform(train[0]), (train[1] - mean) / scale)
        ends = mean + scale * reg.predict_interval(scaler.transform(test[0]), LEVELS)
        predicted = mean + scale * reg.predict(scaler.transform(test[0]))
    seconds = time.perf_counter() - start
    y = test[1][:, None]
    width = np.where(np.isnan(ends[:, 0]), 0.0, ends[:, 1] - ends[:, 0])
    return {
        "points": len(y),
        "covered": ((ends[:, 0] <= y) & (y <= ends[:, 1])).sum(axis=0).tolist(),
        "width": width.mean(axis=0).tolist(),
        "rmse": float(np.sqrt(((predicted - test[1]) ** 2).mean())),
        "seconds": round(seconds, 3),
    }


def rows(name: str) -> list[dict[str, Any]]:
    """What is stored of a table, each fold of a method once: two runs at a time may store it twice."""
    path = RESULTS / f"uci-{name}.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({(row["method"], row["seed"], row["fold"]): row for row in stored}.values())


def run(name: str, folder: Path, methods: list[str], seeds: int) -> None:
    """Measure the methods on a table, fold by fold; what is stored already is skipped."""
    X, y = load(name, folder)
    done = {(row["method"], row["seed"], row["fold"]) for row in rows(name)}
    for seed in range(min(seeds, TABLES[name])):
        for fold, (train, test) in enumerate(KFold(10, shuffle=True, random_state=seed).split(X)):
            for method in methods:
                if (method, seed, fold) in done:
                    continue
                found = measure(METHODS[method](10 * seed + fold), (X[train], y[train]), (X[test], y[test]))
                line = json.dumps({"method": method, "seed": seed, "fold": fold, **found})
                with (RESULTS / f"uci-{name}.jsonl").open("a") as file:
                    file.write(line + "\n")
        click.echo(f"{name}: seed {seed} of {min(seeds, TABLES[name])} done")


def page() -> str:
    """Coverage and width of all stored tables and methods, with standard errors over folds; the narrowest with enough coverage in bold."""
    out = [
        "# Intervals on UCI tables",
        "",
        "`python benchmarks/uci.py --page` prints this page from the stored results.",
        "",
    ]
    for name, repeats in TABLES.items():
        stored = pd.DataFrame(rows(name))
        if stored.empty:
            continue
        out += [f"## {name}", "", "| method | folds | " + " | ".join(f"coverage, width at {level:g}" for level in LEVELS)
                + " | RMSE | seconds |", "|---|---|" + "---|" * (len(LEVELS) + 2)]  # fmt: skip
        groups = {method: stored[stored.method == method] for method in METHODS if (stored.method == method).any()}
        narrowest = [best(groups, k) for k in range(len(LEVELS))]
        for method, group in groups.items():
            cells = [cell(group, k, method == narrowest[k]) for k in range(len(LEVELS))]
            whole = f"{len(group)}" + ("" if len(group) == 10 * repeats else f" of {10 * repeats}")
            out.append(
                f"| {method} | {whole} | {' | '.join(cells)} | {group.rmse.mean():.3g} | {group.seconds.median():.2g} |"
            )
        out.append("")
    return "\n".join(out)


def shares(group: pd.DataFrame, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Coverage and mean width of each fold at the k-th level."""
    covered = np.array([row[k] for row in group.covered]) / group.points.to_numpy()
    return covered, np.array([row[k] for row in group.width])


def best(groups: dict[str, pd.DataFrame], k: int) -> str:
    """The narrowest method whose coverage is at most two standard errors below the level; empty if there is none."""
    found = {}
    for method, group in groups.items():
        covered, width = shares(group, k)
        if covered.mean() >= LEVELS[k] - 2 * covered.std() / np.sqrt(len(covered)) and np.isfinite(width).all():
            found[method] = width.mean()
    return min(found, key=lambda method: found[method]) if found else ""


def cell(group: pd.DataFrame, k: int, bold: bool) -> str:
    covered, width = shares(group, k)
    wide = f"{width.mean():.4g} ± {width.std() / np.sqrt(len(width)):.2g}" if np.isfinite(width).all() else "infinite"
    return f"{covered.mean():.3f}, " + (f"**{wide}**" if bold else wide)


@click.command()
@click.option("--table", "tables", multiple=True, type=click.Choice(list(TABLES)), help="Tables; all by default.")
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)), help="Methods; all by default.")
@click.option("--seeds", default=10, show_default=True, help="Cuts into ten folds, at most.")
@click.option(
    "--data", type=click.Path(path_type=Path), default=ROOT / "data" / "regression", help="Where the tables are."
)
@click.option("--page", "only_page", is_flag=True, help="Write the page from stored results.")
def main(tables: tuple[str, ...], methods: tuple[str, ...], seeds: int, data: Path, only_page: bool) -> None:
    """Coverage and width of intervals on UCI tables."""
    torch.set_num_threads(1)
    if not only_page:
        for name in tables or TABLES:
            run(name, data, list(methods or METHODS), seeds)
    (RESULTS / "uci.md").write_text(page() + "\n")
    click.echo(page())


if __name__ == "__main__":
    main()
