"""How long work is said to take beside how long it takes, where it takes more than ten seconds.

python benchmarks/estimates.py            every case, some minutes
python benchmarks/estimates.py table      those whose names hold this

Estimates are by the pace of the work itself, so that the machine does not matter as long as it is as busy at the end as at the start.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from measure import console, show
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_digits, make_classification
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import BernoulliNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fullconformal import FullConformalClassifier

UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
LR = LogisticRegression(max_iter=1000)


def table(n: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Numbers with gaps, words with rare levels, three classes."""
    X, y = make_classification(n, 6, n_informative=5, n_redundant=0, n_classes=3, random_state=0)
    rng = np.random.default_rng(0)
    X[rng.random(X.shape) < 0.05] = np.nan
    frame = pd.DataFrame(X, columns=list("abcdef"))
    for name, levels in (("u", 4), ("v", 12), ("w", 40), ("x", 400)):
        frame[name] = [f"level {k}" for k in np.minimum(rng.geometric(4 / levels, n), levels)]
    return frame, y


def encoder() -> Any:
    gaps = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    words = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=100, sparse_output=False)
    return make_column_transformer((gaps, list("abcdef")), (words, list("uvwx")))


def predicting(model: Any, X: Any, y: Any, n: int, m: int, **options: Any) -> Callable[[], Any]:
    """The p-values of m objects."""
    clf = FullConformalClassifier(model, **options).fit(X[:n], y[:n])
    return lambda: clf.predict_p(X[n : n + m])


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and what is timed."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order] / 16, y[order]
    scaled = make_pipeline(StandardScaler(), LR)
    yield "digits, n = 1,297", predicting(LR, X, y, 1297, 500)
    yield "digits, StandardScaler, n = 200", predicting(scaled, X, y, 200, 200)
    yield "digits, StandardScaler, n = 1,297", predicting(scaled, X, y, 1297, 100)
    yield "digits, exact, n = 200", predicting(LR, X, y, 200, 60, method="exact")
    yield "digits, PCA, n = 200", predicting(make_pipeline(PCA(20), LR), X, y, 200, 100)
    yield "digits, PCA, k-NN, n = 1,000", predicting(make_pipeline(PCA(20), KNeighborsClassifier(5)), X, y, 1000, 300)
    yield "digits, refits", predicting(BernoulliNB(), X > 0.5, y, 200, 10, method="exact")
    boosting = HistGradientBoostingClassifier(max_iter=40)
    yield "digits, training of folds", lambda: FullConformalClassifier(boosting, method="folds").fit(X[:600], y[:600])
    A, b = make_classification(10_020, 30, n_informative=12, n_redundant=0, n_classes=5, n_clusters_per_class=1)
    yield (
        "10,000 × 30, C = 5",
        predicting(LR, np.vstack([A[:10_000], *[A[10_000:]] * 50]), np.append(b, b), 10_000, 1000),
    )
    frame, labels = table(3600)
    yield "table with gaps and words, n = 3,000", predicting(make_pipeline(encoder(), LR), frame, labels, 3000, 600)


def main() -> None:
    rows = []
    for name, work in cases():
        if not all(part in name for part in sys.argv[1:]):
            continue
        told = io.StringIO()
        start = time.perf_counter()
        with contextlib.redirect_stderr(told), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        took = time.perf_counter() - start
        found = re.search(r"about ([\d.,]+) (\w+)", told.getvalue())
        said = float(found[1].replace(",", "")) * UNITS[found[2]] if found else None
        rows.append((name, f"{said:.0f}" if said else "–", f"{took:.0f}", f"{said / took:.2f}" if said else "–"))
        console.print(": ".join([name, ", ".join(rows[-1][1:])]), style="dim", highlight=False)
    show("seconds that work was said to take, and took", rows, ("work", "said", "took", "said / took"))


if __name__ == "__main__":
    main()
