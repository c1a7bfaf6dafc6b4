"""
The idea in one picture
=======================

Four handwritten digits, the p-value of every label as a bar, and the set at 99 % confidence: the labels whose bar passes the line.
"""

import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fullconformal import ConformalWarning, FullConformalClassifier
from fullconformal.models import mlp

EPSILON = 0.01
warnings.simplefilter("ignore", ConformalWarning)  # more parameters than points: fine for a picture

digits = load_digits()
X, X_new, y, y_new, _, images = train_test_split(
    digits.data / 16, digits.target, digits.images, test_size=500, random_state=0
)
torch.manual_seed(0)
clf = FullConformalClassifier(mlp(64, (32,), 10), method="influence", confidence_level=0.99, random_state=0)
clf.fit(X, y)
p = clf.predict_p(X_new)

# %%
# Two easy images and two doubtful ones.

size = (p > EPSILON).sum(axis=1)
doubtful = np.argsort(-np.sort(p, axis=1)[:, -2])  # by the second largest p-value
chosen = [*np.flatnonzero(size == 1)[:2], *doubtful[:2]]

figure, axes = plt.subplots(2, len(chosen), figsize=(11, 4.2), height_ratios=(1, 1.5), layout="constrained")
for (top, bottom), at in zip(axes.T, chosen, strict=True):
    top.imshow(images[at], cmap="gray_r")
    top.axis("off")
    members = np.flatnonzero(p[at] > EPSILON)
    words = "{" + ", ".join(map(str, members)) + "}"
    top.set_title(f"set: {words}", fontsize=13)
    bottom.bar(range(10), p[at], color=["#0b6fb8" if k in members else "0.8" for k in range(10)])
    bottom.axhline(EPSILON, color="#d1651a", lw=1.2, ls="--")
    bottom.set(xticks=range(10), yscale="log", ylim=(5e-4, 1.3), xlabel=f"label (it was {y_new[at]})")
    bottom.spines[["top", "right"]].set_visible(False)
    bottom.minorticks_off()
axes[1, 0].set_ylabel("p-value")
for ax in axes[1, 1:]:
    ax.set_yticklabels([])
if len(sys.argv) == 2:  # python examples/plot_idea.py picture.png
    figure.savefig(sys.argv[1], dpi=130)
