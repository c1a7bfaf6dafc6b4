"""Where influence functions lose their coverage: error rates of logistic regressions over a grid of points, parameters and penalties.

    python benchmarks/influence_errors.py [bags]

Each row is a setting: n points, p parameters, penalty C, p/n, the medians over bags of the largest and the mean leverage that
`diagnose` shows, and the error at ε = 0.1 over bags of 20 objects, with its standard error. The threshold of the warning in `diagnostics`
is taken from this table.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
from sklearn.linear_model import LogisticRegression

from fullconformal import FullConformalClassifier

OBJECTS = 20


def setting(n: int, d: int, C: float, bags: int) -> tuple[float, float, float, float, float]:
    """p/n, medians of the largest and the mean leverage, the error at 0.1 and its standard error."""
    rng, leverage, mean, errors = np.random.default_rng(0), [], [], []
    for _ in range(bags):
        X = rng.normal(size=(n + OBJECTS, d))
        y = (X[:, : min(d, 5)].sum(1) + rng.logistic(size=len(X)) > 0).astype(int)
        clf = FullConformalClassifier(LogisticRegression(C=C), method="influence").fit(X[:n], y[:n])
        told = clf.diagnose()
        leverage.append(told.largest_leverage)
        mean.append(told.mean_leverage)
        p = clf.predict_p(X[n:])[np.arange(OBJECTS), y[n:]]
        errors.append((p <= 0.1).mean())
    se = np.std(errors, ddof=1) / np.sqrt(bags)
    return (d + 1) / n, float(np.median(leverage)), float(np.median(mean)), float(np.mean(errors)), float(se)


def main(bags: int = 100) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    print(f"{'n':>5} {'p':>4} {'C':>6} {'p/n':>6} {'leverage':>9} {'mean':>7}  error at 0.1")
    for n in (50, 100, 200, 400, 1000):
        for d in (2, 4, 9, 19, 49):
            for C in (0.1, 1.0, 100.0):
                if d + 1 > n / 2 or (n == 1000 and d < 19):
                    continue
                share, leverage, mean, error, se = setting(n, d, C, bags)
                print(
                    f"{n:>5} {d + 1:>4} {C:>6g} {share:>6.3f} {leverage:>9.3f} {mean:>7.3f}  {error:.3f} ± {se:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
