"""Checks of the options users give: their kind, their size, and what goes with what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np


def check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise unless value is one of the allowed words."""
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, allowed))}.")


def check_number(name: str, value: Any, low: float, what: str, *, strict: bool = False) -> None:
    """Raise unless value is a finite number ≥ low (> low where strict)."""
    good = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and np.isfinite(value)
    if not good or value < low or (strict and value == low):
        raise ValueError(f"{name}={value!r} is not allowed; give {what}.")


def check_whole(name: str, value: Any, low: int, what: str) -> None:
    """Raise unless value is a whole number ≥ low."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name}={value!r} is not allowed; give {what}.")


def check_flag(name: str, value: Any) -> None:
    """Raise unless value is a truth value: "no" would count as yes."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} is not allowed; give True or False.")


def check_flags(options: Any, *names: str) -> None:
    """Raise unless the options of these names are truth values."""
    for name in names:
        check_flag(name, getattr(options, name))


def check_running(options: Any) -> None:
    """Raise where n_jobs, checkpoint or verbose, of those there are, cannot be meant."""
    jobs, folder = getattr(options, "n_jobs", None), getattr(options, "checkpoint", None)
    if jobs is not None and (not isinstance(jobs, (int, np.integer)) or isinstance(jobs, bool) or jobs == 0):
        raise ValueError(f"n_jobs={jobs!r} is not allowed; give None, a whole number ≥ 1, or -1 for all cores.")
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"checkpoint={folder!r} is not allowed; give None or the path of a folder.")
    if folder is not None and os.path.isfile(folder):
        raise ValueError(f"checkpoint={str(folder)!r} is a file; give the path of a folder.")
    if not isinstance(options.verbose, (bool, np.bool_)):
        check_whole("verbose", options.verbose, 0, "0 or 1")


def check_weights(weights: Any, n: int, m: int) -> tuple[Any, Any]:
    """Checked weights of the n training points (or None) and of the m candidates, (m, 1)."""
    if weights is None:
        return None, 1.0
    if not isinstance(weights, tuple) or len(weights) != 2:
        raise ValueError("weights must be a pair (weights of the training points, weights of the test points).")
    checked = [np.asarray(part, dtype=np.float64) for part in weights]
    for part, size, name in zip(checked, (n, m), ("training", "test"), strict=True):
        if part.shape != (size,) or not np.isfinite(part).all() or (part < 0).any() or not part.any():
            raise ValueError(
                f"weights of the {name} points must be {size} finite numbers ≥ 0, not all 0; got shape {part.shape}."
            )
    return checked[0], checked[1][:, None]
