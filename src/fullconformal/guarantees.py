"""What a predictor promises, as a word and as a number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fullconformal.storage import savable


@savable
@dataclass(frozen=True)
class Guarantee:
    """What is promised of sets at level 1 − ε, for points that are exchangeable, on average over bags.

    Attributes
    ----------
    word : str
        ``"exact"``: the error is at most ε; ``"1 − 2ε"``: at most 2ε; ``"approximate"``: near ε as far as was measured, nothing is proved.
    times : float
        The proved bound of the error as a multiple of ε; infinite where nothing is proved.
    reason : str
        Why, in words.
    """

    word: str
    times: float
    reason: str = ""

    def coverage(self, confidence_level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The coverage that is proved at each confidence level; 0 where nothing is."""
        error = 1 - np.asarray(confidence_level, dtype=np.float64)
        return np.maximum(0.0, 1 - self.times * error) if np.isfinite(self.times) else np.zeros_like(error)

    def because(self, reason: str) -> Guarantee:
        """The same with a reason."""
        return replace(self, reason=reason)

    @property
    def is_exact(self) -> bool:
        """Whether the error is at most ε, whatever the data."""
        return self.word == "exact"

    def __str__(self) -> str:
        promise = {
            "exact": "exact: sets hold the true label or value with probability 1 − ε or more",
            "1 − 2ε": "1 − 2ε: sets hold the true label or value with probability 1 − 2ε or more",
        }.get(
            self.word,
            "approximate: sets hold the true label or value with a probability near 1 − ε, which is not proved",
        )
        return f"{promise} ({self.reason})" if self.reason else promise


EXACT = Guarantee("exact", 1.0)
TWICE = Guarantee("1 − 2ε", 2.0)
APPROXIMATE = Guarantee("approximate", float("inf"))
