"""What the commands do with a target that is a quantity: regressors, intervals and their coverage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fullconformal.cli import saved, tables
from fullconformal.cli.printing import Printer
from fullconformal.cli.schema import Schema, encoder
from fullconformal.cli.tables import Asked

FloatArray = npt.NDArray[np.float64]


def make_regressor(model: str, schema: Schema, seed: int, n: int) -> Any:
    """A Pipeline of an encoder and the regressor that the option --model names, for n rows."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.linear_model import Ridge
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Steps of a size that suits numbers near one; of few rows none are spared to tell when to stop.
    network = TransformedTargetRegressor(
        MLPRegressor(
            hidden_layer_sizes=(32,), alpha=1e-2, max_iter=500, early_stopping=n >= 200, random_state=seed
        ),
        transformer=StandardScaler(),
    )  # fmt: skip
    # 300 trees leave about 110 to score each point.
    known = {"forest": RandomForestRegressor(300), "boosting": HistGradientBoostingRegressor(), "network": network}
    if model not in ("lr", *known):
        raise ValueError(
            f"--model {model} is for classes; for a quantity give lr (ridge regression), {', '.join(known)}."
        )
    return make_pipeline(encoder(schema), known.get(model, Ridge()))


def takes_split(model: str, method: str, estimator: Any, X: pd.DataFrame) -> bool:
    """Whether split CP is taken: where it is asked for, or full CP of a ridge regression would be slow for a table as large as this one."""
    if method != "auto" or model != "lr":
        return method == "split"
    # A fit for each row, of about n·d² products, of which a core does 1e9 a second: ten minutes.
    n, d = len(X), estimator[0].fit(X).transform(X[:1]).shape[1]
    return n**2 * float(d) ** 2 > 600e9


def fit(asked: Asked, out: Path, model: str, method: str, confidence: float, printer: Printer) -> None:
    """Fit a conformal regressor to all rows of a table and save it: by full CP, or by split CP where that was asked for or is wiser."""
    if method == "symmetric":
        raise ValueError(
            "--method symmetric is for classes; for a quantity give auto, split, exact, oob, folds or influence."
        )
    schema, X, y = tables.read_training(asked, printer, quantity=True)
    table, target, seed = asked.table, asked.target, asked.seed
    spread = f"from {y.min():.6g} to {y.max():.6g}, mean {y.mean():.6g}"
    printer.say(
        f"{table.name}: {len(y):,} rows, {len(schema.numbers)} numeric and {len(schema.categories)} categorical columns; {target!r} goes "
        f"{spread}"
    )

    # Imported now, so that errors in the table do not wait for torch.
    from fullconformal import FullConformalRegressor, SplitConformalRegressor
    from fullconformal.runtime.tasks import timed

    estimator: Any = make_regressor(model, schema, seed, len(y))
    if method == "influence" and model == "network":
        # By influence functions y is as it is: what a scaler learns of it would change with every candidate.
        estimator.steps[-1] = (estimator.steps[-1][0], estimator[-1].regressor.set_params(early_stopping=False))
    if takes_split(model, method, estimator, X):
        reg: Any = SplitConformalRegressor(estimator, confidence_level=confidence, random_state=seed)
    else:
        reg = FullConformalRegressor(
            estimator, method=method, confidence_level=confidence, random_state=seed, verbose=printer.verbose
        )
    with printer.warnings_as_notes() as warned:
        _, seconds = timed(reg.fit, X, y)
    printer.say(f"method {reg.display_name}; {reg.guarantee_}")
    notes = {"source": table.name, "model": model, "warnings": warned}
    facts = {"task": "regression", "rows": len(y), "method": reg.display_name, "seconds": round(seconds, 3)}
    saved.save_predictor(reg, out, schema, X, notes, facts, printer)
    printer.say(f"\nnext: fullconformal predict {out} NEW.csv -o intervals.csv")


def predicted(
    reg: Any, X: Any, levels: list[float], frame: pd.DataFrame, target: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The columns to write, prediction and lower and upper end at each level, and the facts to print."""
    ends = reg.predict_interval(X, levels)
    columns = {"prediction": reg.predict(X)}
    for k, level in enumerate(levels):
        columns |= {f"lower_{level:g}": ends[:, 0, k], f"upper_{level:g}": ends[:, 1, k]}
    return columns, measure(ends, levels, truth(frame, target))


def truth(frame: pd.DataFrame, target: str) -> FloatArray:
    """The target (m,) where the table has it, NaN elsewhere."""
    column = frame.get(target, pd.Series(np.nan, index=frame.index))
    return np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)


def measure(ends: FloatArray, levels: list[float], y: FloatArray) -> list[dict[str, Any]]:
    """For each level the mean and median width of intervals (m, 2, L), the share of infinite ones, and the coverage."""
    from fullconformal import metrics

    facts, known = [], np.isfinite(y)
    for k, level in enumerate(levels):
        at = ends[:, :, k]
        finite = np.isfinite(at).all(axis=1)
        fact: dict[str, Any] = {"confidence_level": level, "infinite": float(np.isinf(at).any(axis=1).mean())}
        fact["mean_width"] = metrics.mean_width(at[finite]).value if finite.any() else None
        fact["median_width"] = metrics.median_width(at[finite]).value if finite.any() else None
        if known.any():
            fact |= saved.coverage_of((at[known, 0] <= y[known]) & (y[known] <= at[known, 1]))
        facts.append(fact)
    return facts


def to_compare(asked: Asked, model: str, test_size: float, printer: Printer) -> tuple[Any, list[Any]]:
    """A regressor, and two parts of a table's objects and of their values: to learn from, and to predict."""
    schema, objects, numbers = tables.read_training(asked, printer, quantity=True)

    from sklearn.model_selection import train_test_split

    parts = train_test_split(objects, numbers, test_size=test_size, random_state=asked.seed)
    y, y_test = parts[2:]
    printer.say(f"{asked.table.name}: {len(y):,} rows to learn from, {len(y_test):,} to predict\n")
    return make_regressor(model, schema, asked.seed, len(y)), parts
