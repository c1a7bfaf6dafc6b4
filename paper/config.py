"""One experiment, one file of differences: what a config may say, and its defaults, which are the paper's."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Real:
    """Networks on a real data set: every model, method and seed."""

    name: str
    data: str
    models: tuple[str, ...] = ("MLP_A", "MLP_B", "MLP_C", "LR", "CNN")
    methods: tuple[str, ...] = (
        "acp_d", "acp_o", "scp", "raps", "raps_nonempty", "cv_plus", "folds", "ours", "ours_studentized", "symmetric",
    )  # fmt: skip
    seeds: tuple[int, ...] = (0, 1, 2)
    n_train: int | None = None  # the first so many points; all by default
    n_test: int | None = None
    autoencoder: bool = True  # before every model but the CNN
    max_epochs: int = 200
    cnn_epochs: int = 200
    patience: int = 10  # the paper does not say
    hold_out: float = 0.2  # of what trains, to stop it
    lam: float = 1e-5  # of λ|W|²
    calibration: float = 0.2
    folds: int = 5  # of CV+
    full_folds: int = 10  # of full CP by folds
    cnn_full_folds: int = 5  # ten networks a seed would take ten minutes of a GPU
    curvature: str = "hessian"
    cnn_curvature: str = "ggn"  # 14,048 products of a Hessian of 50,000 images with a vector are out of reach
    damping: float = 0.01
    ours_l2: float = 1e-3
    ours_epochs: int = 60
    polish: int = 300  # iterations of L-BFGS at most
    cnn_polish: int = 60
    ours_cnn_curvature: str = "ggn"
    n_symmetric: int = 1000  # test points of the exactly valid method, which fits every candidate
    cnn_n_symmetric: int = 100
    symmetric_l2: float = 1e-3
    examples: tuple[int, ...] = ()  # test points shown, by position …
    example_labels: tuple[int, ...] = ()  # … or the hardest of the first 100 with a label


@dataclass(frozen=True)
class Synthetic:
    """Logistic regression on two classes of two clusters, ACP against exact full CP."""

    name: str
    measure: str  # "scores" (distances of scores, the cone) or "p_values" (distances, errors, Kendall's tau)
    n: tuple[int, ...] = (100, 200, 400, 600, 1000, 2000, 5000, 10000)
    features: tuple[int, ...] = (30,)
    l2: tuple[float, ...] = (1e-2,)
    n_test: int = 100
    pairs: int = 50_000  # at most so many leave-one-out fits a line, by fewer test points
    seeds: tuple[int, ...] = (0, 1, 2)
    epsilon: float = 0.1


KINDS = {"real": Real, "synthetic": Synthetic}
Config = Real | Synthetic


def load(path: Path, small: bool = False) -> Config:
    """The experiment of a file; its table [small] holds what differs on reduced sizes."""
    with path.open("rb") as file:
        given = tomllib.load(file)
    reduced = given.pop("small", {})
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"{path.name}: kind={kind!r} is unknown; allowed: {', '.join(map(repr, KINDS))}.")
    return build(kind, {"name": path.stem, **given}, reduced if small else {}, path.name, reduced)


def build(kind: str, given: dict[str, Any], changes: dict[str, Any], where: str, check: dict[str, Any]) -> Config:
    """A config from its keys; unknown ones raise, those of [small] also where they are not used."""
    cls = KINDS[kind]
    known = {field.name for field in fields(cls)}
    for key in (*given, *check):
        if key not in known:
            raise ValueError(f"{where}: the key {key!r} is unknown; allowed: {', '.join(sorted(known))}.")
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in {**given, **changes}.items()}
    try:
        return cls(**frozen)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def key(config: Config, *names: str) -> str:
    """Eight letters that differ where one of the named settings, or any if none is named, differs."""
    values = asdict(replace(config))
    chosen = {name: values[name] for name in names} if names else values
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
