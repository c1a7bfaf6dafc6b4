"""
Where an approximation fails
============================

Forty points with fifteen features, again and again: how often does the set miss the true label when 10 % misses are asked for?
Influence functions approximate full conformal prediction from one fit and fail here, because removing one of so few points is no small
change. The symmetric method costs a short fit for each candidate and keeps its promise.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np

from fullconformal import ConformalWarning, FullConformalClassifier

rng = np.random.default_rng(0)
warnings.simplefilter("ignore", ConformalWarning)  # influence says that it should not be trusted here
levels = np.linspace(0.5, 0.98, 49)
direction = rng.normal(size=15)


def draw(size):
    """Points whose label follows a logistic regression."""
    X = rng.normal(size=(size, 15))
    return X, (X @ direction / 2 + rng.logistic(size=size) > 0).astype(int)


covered = {"influence": [], "symmetric": []}
for _ in range(150):
    X, y = draw(40)
    X_new, y_new = draw(10)
    for method, rows in covered.items():
        clf = FullConformalClassifier(method=method, l2=0.1 / 40).fit(X, y)
        p = clf.predict_p(X_new)[np.arange(10), y_new]
        rows.append(p[:, None] > 1 - levels)

# %%
# Below the diagonal is a broken promise.

figure, ax = plt.subplots(figsize=(5, 4.5), layout="constrained")
for (method, rows), colour in zip(covered.items(), ("#d1651a", "#0b6fb8"), strict=True):
    ax.plot(levels, np.concatenate(rows).mean(axis=0), color=colour, label=method, lw=2)
ax.plot(levels, levels, color="0.6", lw=1, ls=":")
ax.set(xlabel="confidence level asked for", ylabel="coverage", xlim=(0.5, 1), ylim=(0.5, 1), aspect="equal")
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
