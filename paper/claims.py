"""The paper's claims, each with what the lines of a run say of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paper.tables import LABELS, MODELS, Line, Mean, mean_of, printed, select, welch

PEERS = ("scp", "raps", "cv_plus")


@dataclass(frozen=True)
class Claim:
    """What the paper says, and what was found, point by point."""

    text: str
    found: list[str]


def claims(lines: list[Line]) -> list[Claim]:
    """All claims for which there are lines."""
    made = [
        direct_never_worse(lines),
        p_values_close(lines),
        faster(lines),
        larger_lambda(lines),
        cone(lines),
        tighter(lines),
        folds_tighter(lines),
        valid(lines),
    ]
    return [claim for claim in made if claim.found]


def _synthetic(lines: list[Line], measure: str) -> list[Line]:
    return [line for line in lines if line.get("measure") == measure and line["experiment"] != "times"]


def direct_never_worse(lines: list[Line]) -> Claim:
    scores = _synthetic(lines, "scores")
    found = []
    if scores:
        shares = [line["found"]["direct_no_worse"] for line in scores]
        nearer = [line["found"]["direct"][0] <= line["found"]["indirect"][0] for line in scores]
        found.append(
            f"For exactly fitted logistic regressions, direct was at least as close as indirect for {np.mean(shares):.0%} of the points "
            f"({min(shares):.0%} to {max(shares):.0%} over {len(scores)} runs), and closer on average in {sum(nearer)} of them."
        )
    return Claim("“The direct method is never worse than indirect.”", found)


def p_values_close(lines: list[Line]) -> Claim:
    found = []
    at = defaultdict(list)
    for line in _synthetic(lines, "p_values"):
        if line["features"] == 30:
            at[line["l2"], line["n"]].append(line["found"]["distance"][0])
    for (l2, n), values in sorted(at.items()):
        if n in (600, 1000, 10000):
            found.append(
                f"30 features, λ = {l2:g}, n = {n:,}: mean distance {np.mean(values):.1e} "
                f"({'below' if np.mean(values) < 1e-3 else 'not below'} 10⁻³; {len(values)} seeds, largest mean {max(values):.1e})."
            )
    return Claim("“For 10³ training points the two methods output p-values that are < 10⁻³ apart.”", found)


def faster(lines: list[Line]) -> Claim:
    timed = [line for line in lines if line.get("experiment") == "times"]
    found = []
    if timed:
        exact, acp = (np.mean([line["found"]["seconds"][name] for line in timed]) for name in ("exact", "acp"))
        hardware = timed[0]["hardware"]
        found.append(
            f"{timed[0]['n']:,} training points, {timed[0]['features']} features, {timed[0]['found']['m']} test points: exact full CP "
            f"{exact:.2f} s, ACP {acp:.3f} s, fit and p-values ({len(timed)} seeds; {hardware['cpu']}, {hardware['threads']} threads)."
        )
    return Claim(
        "“Running full CP in this setting took approximately 5 days, whereas ACP took less than 1 hour.”", found
    )


def larger_lambda(lines: list[Line]) -> Claim:
    at = defaultdict(list)
    for line in _synthetic(lines, "scores"):
        if line["experiment"] == "regularisation":
            at[line["n"], line["l2"]].append(line["found"]["direct"][0])
    found = []
    for n in sorted({n for n, _ in at}):
        row = [(l2, np.mean(at[n, l2])) for l2 in sorted(l2 for size, l2 in at if size == n)]
        falls = all(a[1] >= b[1] for a, b in pairwise(row))
        shown = ", ".join(f"λ = {l2:g}: {value:.1e}" for l2, value in row)
        found.append(f"n = {n:,}: {shown} ({'falls' if falls else 'does not fall throughout'}).")
    return Claim("“A larger λ implies better approximation.” (distance of direct scores from exact ones)", found)


def cone(lines: list[Line]) -> Claim:
    scores = [line["found"] for line in _synthetic(lines, "scores")]
    found = []
    if scores:
        low, high, printed_ = (
            np.mean([one[key] for one in scores]) for key in ("cone_lower", "cone_upper", "cone_as_printed")
        )
        found.append(
            f"As printed it held for {printed_:.1%} of the scores. With its ends exchanged, direct ≤ exact held for {low:.0%} "
            f"and exact ≤ the other end for {high:.1%}; the theorem neglects terms of order λ⁻³."
        )
    return Claim("Theorem 2: a cone around the exact score.", found)


def tighter(lines: list[Line]) -> Claim:
    """ACP (D) against each alternative, setting by setting, on all test points."""
    said = printed()["size_auc"]
    found = []
    for peer in PEERS:
        wins, sure, where, ours, theirs = 0, 0, [], 0, 0
        for data in sorted({line["data"] for line in lines if "model" in line}):
            for model in MODELS:
                a, b = (_mean(lines, data, model, method) for method in ("acp_d", peer))
                if a is None or b is None:
                    continue
                ours += 1
                wins += a.value < b.value
                sure += welch(b, a) < 0.1
                row = said.get(data, {}).get(model)
                claimed = row is not None and _value(row["acp_d"]) < _value(row[peer])
                theirs += claimed
                if claimed and not a.value < b.value:
                    significantly = " significantly" if welch(a, b) < 0.1 else ""
                    where.append(f"{data} {model} ({a.value:.3f} against {b.value:.3f}, ACP larger{significantly})")
        if ours:
            found.append(
                f"Against {LABELS[peer]}: ACP (D) has the smaller area in {wins} of {ours} settings (the paper: {theirs} of these), "
                f"significantly by Welch's test at p < 0.1 in {sure}."
                + (f" Not so, where the paper says so: {'; '.join(where)}." if where else "")
            )
    text = "“ACP attains the desired error rate with tighter prediction sets than SCP, RAPS and CV+.” (size AUC, all test points)"
    return Claim(text, found)


def folds_tighter(lines: list[Line]) -> Claim:
    """Full CP by folds against methods that train on as much or more, setting by setting, on all test points."""
    found = []
    for peer in ("scp", "cv_plus", "acp_d"):
        smaller, larger, sure, total = 0, list[str](), 0, 0
        for data in sorted({line["data"] for line in lines if "model" in line}):
            for model in MODELS:
                a, b = (_mean(lines, data, model, method) for method in ("folds", peer))
                if a is None or b is None:
                    continue
                total += 1
                smaller += a.value <= b.value
                sure += welch(b, a) < 0.1
                if a.value > b.value:
                    clearly = ", significantly" if welch(a, b) < 0.1 else ""
                    larger.append(f"{data} {model} ({a.value:.3f} against {b.value:.3f}{clearly})")
        if total:
            found.append(
                f"Against {LABELS[peer]}: an area no larger in {smaller} of {total} settings, significantly smaller in {sure}."
                + (f" Larger: {'; '.join(larger)}." if larger else "")
            )
    return Claim("Full CP by folds, which the paper does not have: is it as tight? (size AUC, all test points)", found)


def _mean(lines: list[Line], data: str, model: str, method: str) -> Mean | None:
    return mean_of([line for line in select(lines, data, model, method) if "all" in line], "all", "size_auc")


def _value(text: str) -> float:
    return float(text.rstrip("*+"))


def _on_the_same(lines: list[Line], method: str) -> str:
    """What SCP's errors were on the test points of a method that has fewer than all."""
    told = []
    for data, model in sorted({(line["data"], line["model"]) for line in lines if line.get("method") == method}):
        own, split = ([line for line in select(lines, data, model, name) if "all" in line] for name in (method, "scp"))
        if not (
            own and split and all("same" in line for line in split) and own[0]["all"]["m"] == split[0]["same"]["m"]
        ):
            continue
        mine, theirs = mean_of(own, "all", "error@0.2"), mean_of(split, "same", "error@0.2")
        assert mine is not None and theirs is not None
        if mine.value - 0.2 > 2 * mine.se:
            told.append(f"{data} {model} {mine.value:.3f}, SCP on the same {mine.m:,} points {theirs.value:.3f}")
    return f" At ε = 0.2: {'; '.join(told)}: these points are harder than the rest." if told else ""


def valid(lines: list[Line]) -> Claim:
    """How often a method errs by more than two standard errors too much."""
    found = []
    for method in LABELS:
        worst, bad, total = ("", -1.0), [], 0
        for data, model in sorted(
            {(line["data"], line["model"]) for line in lines if line.get("method") == method and "all" in line}
        ):
            chosen = [line for line in select(lines, data, model, method) if "all" in line]
            for level in (0.05, 0.1, 0.2):
                mean = mean_of(chosen, "all", f"error@{level}")
                assert mean is not None
                total += 1
                excess = mean.value - level
                if excess > 2 * mean.se:
                    bad.append(f"{data} {model}")
                if excess > worst[1]:
                    worst = (f"{data} {model} at ε = {level}: {mean.value:.3f} ± {mean.se:.3f}", excess)
        if total:
            found.append(
                f"{LABELS[method]}: error above ε by more than two standard errors in {len(bad)} of {total} cases "
                f"(settings × ε = 0.05, 0.1, 0.2); "
                f"the worst is {worst[0]}." + _on_the_same(lines, method)
            )
    return Claim("“Validity holds in practice.”", found)
