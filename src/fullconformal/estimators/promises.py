"""What a promise lacks, in words."""

from __future__ import annotations

import warnings
from typing import Any

from fullconformal.diagnostics import Diagnostics
from fullconformal.methods.base import ConformalWarning, Fitted
from fullconformal.models.transformers import is_fixed, needs_labels, parts

REMEDY = "transformers='bag' fits them with each object, and the sets are exact"


def caveat(head: str | None, transformers: Any) -> str:
    """Why sets of an exact method are only approximately valid, of a network's head or behind fixed transformers; empty where they are."""
    if head is not None:
        return (
            "the layers before the head were trained on these data, so the sets are only approximately valid; with a backbone "
            "that has not seen them (prefit=True) they are exact"
        )
    if transformers is None or is_fixed(transformers):
        return ""
    if needs_labels(transformers):
        steps = ", ".join(dict.fromkeys(type(part).__name__ for part in parts(transformers) if needs_labels(part)))
        return (
            f"{steps} learned from the labels and was not refitted for each candidate, so the sets are not exactly valid; take "
            "transformers='bag', or fit it on other data (prefit=True)"
        )
    return (
        f"the transformers were fitted to the training objects only, so the sets are only approximately valid; {REMEDY}"
    )


def warn(fitted: Fitted, caveat: str, stacklevel: int) -> None:
    """Warn of what must be known before the sets are trusted, where there is something."""
    told = list(filter(None, [*fitted.warnings, caveat]))
    if told:
        figures = "" if fitted.guarantee.reason else " (clf.diagnose() shows the figures.)"
        warnings.warn(f"{'; '.join(told)}.{figures}", ConformalWarning, stacklevel=stacklevel)


def sentence(text: str) -> str:
    """A text that begins and ends as sentences do."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def notes(fitted: Fitted, caveat: str, diagnosed: Diagnostics | None) -> list[str]:
    """What a reader of the sets should know, a sentence each; a warning begins with "!"."""
    if fitted.guarantee.is_exact:
        kept = "The sets of this method are exactly valid: their guarantee rests on no approximation."
        return [f"! {sentence(caveat)}" if caveat else kept]
    if diagnosed is None:
        # Of an approximation they are not all that is lacking.
        warned = filter(None, [*fitted.warnings, "" if caveat.endswith(REMEDY) else caveat])
        reason = f"The p-values are approximate: {fitted.guarantee.reason}."
        return [*(f"! {sentence(text)}" for text in warned), reason]
    facts = f"influence functions on {diagnosed.n_points:,} points and {diagnosed.n_parameters:,} parameters."
    facts = f"The p-values are approximate: {facts}"
    told = [f"! {sentence(text)}" for text in diagnosed.warnings]
    return [*told, facts if told else f"{facts} Nothing to warn of."]
