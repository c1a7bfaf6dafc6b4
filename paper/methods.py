"""The methods that are compared. Each gives, for every test point and label, the largest ε at which the label is still in the set.

For full and split CP that is the p-value; for RAPS and CV+ it is read off their rule. Sets, sizes and errors at every level follow.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin

from fullconformal import ConformalWarning, CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier, pvalues
from paper.config import Real
from paper.inputs import Inputs
from paper.training import Network, fold_roles, full_folds

Networks = dict[tuple[int, str], Network]


@dataclass(frozen=True)
class Setting:
    """What a method is given: a model's networks and inputs, for one seed."""

    config: Real
    model: str
    inputs: Inputs
    networks: Networks
    seed: int
    device: str
    memory: float
    fitted: dict[tuple[str, str], Any] = field(default_factory=dict)

    def network(self, role: str) -> Network:
        return self.networks[self.seed, role]

    @property
    def p(self) -> int:
        """Parameters of the model."""
        return sum(q.numel() for q in next(iter(self.networks.values())).model.parameters())

    @property
    def version(self) -> int:
        return self.inputs.version(self.config.seeds.index(self.seed))

    def objects(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Training objects at some positions, as arrays."""
        X = self.inputs.X[self.version]
        return (X if rows is None else X[torch.as_tensor(rows, device=X.device)]).cpu().numpy()

    def test(self, most: int | None = None) -> np.ndarray:
        return self.inputs.X_test[self.version][:most].cpu().numpy()


@dataclass(frozen=True)
class Result:
    """ε (m, C), seconds of training, of preparing and of predicting, and what else is worth a line."""

    epsilon: np.ndarray
    train: float
    fit: float
    predict: float
    more: dict[str, Any]


def full(setting: Setting, role: str, scheme: str, curvature: str, damping: float | None, l2: float) -> Result:
    """ACP by influence functions, direct. The schemes share what is prepared; its seconds count for each."""
    network = setting.network(role)
    which = role, curvature
    if which not in setting.fitted:
        clf = FullConformalClassifier(
            network.model, method="influence", curvature=curvature, damping=damping, l2=l2, prefit=True,
            device=setting.device, memory_budget=setting.memory,
        )  # fmt: skip
        start = time.perf_counter()
        told = caught(lambda: clf.fit(setting.objects(), setting.inputs.y))
        setting.fitted[which] = clf, time.perf_counter() - start, told
    clf, seconds, told = setting.fitted[which]
    start = time.perf_counter()
    p = clf.set_params(scheme=scheme).predict_p(setting.test())
    more = {"curvature": curvature, "damping": damping, "epochs": network.epochs, "warnings": told}
    return Result(p, network.seconds, seconds, time.perf_counter() - start, more)


def paper_acp(scheme: str) -> Callable[[Setting], Result]:
    """The paper's: its recipe, the exact Hessian, damping 0.01. λ|W|² has the Hessian 2λ."""

    def run(setting: Setting) -> Result:
        config = setting.config
        curvature = config.cnn_curvature if setting.model == "CNN" else config.curvature
        return full(setting, "whole", scheme, curvature, config.damping, 2 * config.lam)

    return run


def ours(scheme: str) -> Callable[[Setting], Result]:
    """Ours: all of Z to a gradient tolerance, the GGN without damping."""

    def run(setting: Setting) -> Result:
        curvature = setting.config.ours_cnn_curvature if setting.model == "CNN" else "ggn"
        return full(setting, "ours", scheme, curvature, None, setting.config.ours_l2)

    return run


def split(score: str, allow_empty: bool = True) -> Callable[[Setting], Result]:
    """Split CP with the loss, or RAPS, from the network that has not seen the calibration points."""

    def run(setting: Setting) -> Result:
        network = setting.network("split")
        clf = SplitConformalClassifier(
            network.model, conformity_score=score, prefit=True, allow_empty=allow_empty, random_state=setting.seed
        )
        start = time.perf_counter()
        clf.fit(setting.objects(network.rest), setting.inputs.y[network.rest])
        middle = time.perf_counter()
        epsilon = clf.predict_epsilon(setting.test())
        end = time.perf_counter()
        more = {"epochs": network.epochs}
        if score == "raps":
            more |= {"k_reg": int(clf.k_reg_), "lambda_reg": float(clf.lambda_reg_)}
        return Result(epsilon, network.seconds, middle - start, end - middle, more)

    return run


class Lookup(ClassifierMixin, BaseEstimator):
    """A classifier of row numbers: `fit` finds the network that was trained without the rows left out, which predicts.

    CV+ trains its own models; these are trained already, with all others of the setting.
    """

    def __init__(self, tables: Any = None, folds: Any = None):
        self.tables, self.folds = tables, folds

    def fit(self, X: np.ndarray, y: np.ndarray) -> Lookup:
        seen = set(X[:, 0].tolist())
        (self.fold_,) = [k for k, rest in enumerate(self.folds) if seen.isdisjoint(rest.tolist())]
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        table: np.ndarray = self.tables[self.fold_]
        return table[X[:, 0].astype(int)]


def tables_of(setting: Setting, folds: list[Network]) -> list[np.ndarray]:
    """Probabilities (n + m, C) of the training points and the test points by each network."""
    X = torch.cat([setting.inputs.X[setting.version], setting.inputs.X_test[setting.version]])
    found = [probabilities(fold.model.to(X.device), X) for fold in folds]
    for fold in folds:
        fold.model.cpu()
    return found


def by_folds(setting: Setting) -> Result:
    """Full CP by folds: points and candidates scored by their loss under the network that has not seen their fold.

    The candidate's fold is drawn, and the other networks, which would have seen it, are trained without it: what `method="folds"` does,
    here with networks that are trained already, with all others of the setting.
    """
    folds = [setting.network(role) for role in fold_roles(full_folds(setting.config, setting.model))]
    start, y = time.perf_counter(), setting.inputs.y
    tables, n = tables_of(setting, folds), len(y)
    # Less probable is less conforming.
    alpha = np.empty(n)
    for fold, table in zip(folds, tables, strict=True):
        alpha[fold.rest] = -table[fold.rest, y[fold.rest]]
    middle = time.perf_counter()
    own = np.random.default_rng(setting.seed).integers(len(folds), size=len(tables[0]) - n)
    tau = -np.stack(tables)[own, n + np.arange(len(own))]
    p = pvalues.p_values(*pvalues.rank_counts([np.sort(alpha)], tau), n)
    seconds = sum(fold.seconds for fold in folds)
    more = {"epochs": [fold.epochs for fold in folds], "folds": len(folds)}
    return Result(p, seconds, middle - start, time.perf_counter() - middle, more)


def cv_plus(setting: Setting) -> Result:
    """CV+ with randomised adaptive scores, five folds."""
    folds = [setting.network(role) for role in fold_roles(setting.config.folds)]
    start = time.perf_counter()
    tables, rests = tables_of(setting, folds), [fold.rest for fold in folds]
    every = np.arange(len(tables[0]), dtype=float)[:, None]
    n = len(setting.inputs.y)
    pairs = [(np.setdiff1d(np.arange(n), rest), rest) for rest in rests]
    clf = CVPlusClassifier(Lookup(tables, rests), cv=pairs, conformity_score="aps", random_state=setting.seed)
    clf.fit(every[:n], setting.inputs.y)
    middle = time.perf_counter()
    epsilon = clf.predict_epsilon(every[n:])
    end = time.perf_counter()
    seconds = sum(fold.seconds for fold in folds)
    return Result(epsilon, seconds, middle - start, end - middle, {"epochs": [fold.epochs for fold in folds]})


@torch.no_grad()
def probabilities(model: torch.nn.Module, X: torch.Tensor) -> np.ndarray:
    """Probabilities (k, C) in float64."""
    return torch.cat([torch.softmax(model(part).double(), -1) for part in X.split(10_000)]).cpu().numpy()


def n_symmetric(config: Real, model: str) -> int:
    """Test points of the exactly valid method; none where it is left out."""
    return config.cnn_n_symmetric if model == "CNN" else config.n_symmetric


def symmetric(setting: Setting) -> Result:
    """Exactly valid: the network of split CP, its last layer refitted on the points it has not seen, for every candidate.

    A logistic regression is all last layer, so every point calibrates and trains.
    """
    config, network = setting.config, setting.network("split")
    whole = setting.model == "LR"
    model, rows = (None, None) if whole else (network.model, network.rest)
    clf = FullConformalClassifier(
        model, method="symmetric", head=None if whole else "auto", prefit=not whole, l2=config.symmetric_l2,
        device=setting.device, memory_budget=setting.memory,
    )  # fmt: skip
    start = time.perf_counter()
    clf.fit(setting.objects(rows), setting.inputs.y if whole else setting.inputs.y[network.rest])
    middle = time.perf_counter()
    most = n_symmetric(config, setting.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConformalWarning)  # of the time it takes, which the config has weighed
        p = clf.predict_p(setting.test(most))
    seconds = 0.0 if whole else network.seconds
    return Result(p, seconds, middle - start, time.perf_counter() - middle, {"epochs": 0 if whole else network.epochs})


def caught(run: Callable[[], Any]) -> list[str]:
    """Run, and return what it warned of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ConformalWarning)
        run()
    return [str(one.message) for one in found if issubclass(one.category, ConformalWarning)]


METHODS: dict[str, Callable[[Setting], Result]] = {
    "acp_d": paper_acp("deleted"),
    "acp_o": paper_acp("ordinary"),
    "scp": split("loss"),
    "raps": split("raps"),
    "raps_nonempty": split("raps", allow_empty=False),
    "cv_plus": cv_plus,
    "folds": by_folds,
    "ours": ours("deleted"),
    "ours_studentized": ours("studentized"),
    "symmetric": symmetric,
}
