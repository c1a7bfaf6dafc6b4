"""
Full beside split, as labels get scarce
=======================================

The same model, the same test objects, more and more labelled points: breast tumours, 30 measurements, benign or malignant. Split conformal
prediction gives a fifth of the points away for calibration. Full conformal prediction gives none away.
"""

import warnings

import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fullconformal import ConformalWarning, CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier, compare

X, y = load_breast_cancer(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=269, random_state=0, stratify=y)
model = make_pipeline(StandardScaler(), LogisticRegression())
methods = {
    "full CP": FullConformalClassifier(model),
    "split": SplitConformalClassifier(model, random_state=0),
    "CV+": CVPlusClassifier(model, random_state=0),
}
warnings.simplefilter("ignore", ConformalWarning)  # few points cannot reach 99 %: it shows in the pictures

# %%
# ``compare`` fits all methods and measures them on the same objects.

comparison = compare(methods, X[:100], y[:100], X_test, y_test, levels=[0.9, 0.95, 0.99])
print(comparison)

# %%
# Mean set size against ε: the lower, the better. A split of 40 points leaves 8 to calibrate with, whose p-values are multiples of 1/9,
# so that sets at more than 89 % confidence hold both labels.

sizes = (40, 100, 300)
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
for n, ax in zip(sizes, axes, strict=True):
    found = comparison if n == 100 else compare(methods, X[:n], y[:n], X_test, y_test, levels=[0.9, 0.95, 0.99])
    found.plot(ax)
    ax.set_title(f"{n} labelled points")
    if n > sizes[0]:
        ax.set_ylabel("")
        ax.get_legend().remove()
plt.show()

# %%
# Is the difference chance? A one-sided Welch test over the test objects.

print(comparison.welch("full CP", "split"))
