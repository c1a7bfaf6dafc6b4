"""Parts of the data: points that train and points that are scored, and what is fitted to each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from joblib import Parallel, delayed

from fullconformal.methods.base import Config
from fullconformal.runtime.tasks import progress_bar

IntArray = npt.NDArray[np.int64]
#: points that train, points that are scored
Part = tuple[IntArray, IntArray]
Fitted = TypeVar("Fitted")


def fit_parts(
    fit: Callable[[Part, Config], Fitted], parts: Sequence[Part], config: Config, verbose: int | None
) -> Iterator[Fitted]:
    """What `fit` makes of each part, by as many workers as were asked for, with a progress bar if verbose."""
    with progress_bar("training", verbose) as progress:
        # The bar then shows the training itself.
        alone = len(parts) == 1
        config = replace(config, progress=progress if alone else None)
        jobs = (delayed(fit)(part, config) for part in parts)
        found = Parallel(n_jobs=config.work.n_jobs, return_as="generator")(jobs)
        for done, fitted in enumerate(found, 1):
            if progress is not None and not alone:
                progress(done, len(parts))
            yield fitted


def check_folds(parts: list[Part], n: int) -> None:
    """Raise unless every one of n points is scored once, by a model that has not seen it."""
    scored = np.bincount(np.concatenate([rest for _, rest in parts]), minlength=n)
    if len(scored) > n or (scored != 1).any():
        raise ValueError(
            f"cv must put each of the {n} points into one fold, but point {int((scored != 1).argmax())} is in "
            f"{int(scored[(scored != 1).argmax()])}; give KFold, StratifiedKFold or LeaveOneOut, for instance."
        )
    for k, (train, rest) in enumerate(parts):
        if len(np.intersect1d(train, rest)):
            raise ValueError(f"cv trains on points of fold {k} that it also scores there; the two must be apart.")
