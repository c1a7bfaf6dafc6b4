"""Our methods beside crepes and MAPIE, and full CP's whole cost beside split CP's and CV+'s: ratios measured in one process.

    python benchmarks/peers.py              everything, about three minutes on two cores
    python benchmarks/peers.py crepes       one part: crepes, mapie, cost

Times are the fastest of a few runs. Both sides of a ratio use the same classifier, the same data and, where there are some, the same folds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from crepes import WrapClassifier
from mapie import classification as mapie
from measure import console, seconds, show, worth_of_threads
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, train_test_split
from sklearn.neural_network import MLPClassifier

from fullconformal import CVPlusClassifier, FullConformalClassifier, SplitConformalClassifier


def synthetic(n: int, d: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    return make_classification(
        n, d, n_informative=d // 2, n_classes=n_classes, n_clusters_per_class=1, class_sep=0.7, random_state=0
    )


def ms(time: float) -> str:
    return f"{1e3 * time:,.1f} ms" if time < 1 else f"{time:,.2f} s"


# p-values ---------------------------------------------------------------------------------------------------------------------------


def crepes() -> None:
    X, y = synthetic(13_000, 20, 10)
    model = LogisticRegression().fit(X[:2000], y[:2000])
    cal, objects = (X[2000:12_000], y[2000:12_000]), X[12_000:]
    rows = []
    for name, conditional in (("one for all classes", False), ("class by class", True)):
        theirs = WrapClassifier(model)
        theirs.calibrate(*cal, class_cond=conditional)
        ours = SplitConformalClassifier(model, prefit=True, conformity_score="lac", class_conditional=conditional)
        ours.fit(*cal)
        same = np.array_equal(ours.predict_p(objects), theirs.predict_p(objects, smoothing=False))
        mine = seconds(lambda ours=ours: ours.predict_p(objects), 9)
        other = seconds(lambda theirs=theirs: theirs.predict_p(objects, smoothing=False), 3)
        rows.append((name, ms(mine), ms(other), f"{other / mine:,.0f}×  (bar: 30×)", "yes" if same else "NO"))
    title = "Split p-values of 1,000 objects, 10 classes, 10,000 calibration points, logistic regression's own time included"
    show(title, rows, ("calibration", "ours", "crepes", "ratio", "same p-values"))


# Sets -------------------------------------------------------------------------------------------------------------------------------


def mapie_split(X: Any, y: Any, objects: Any, level: float) -> Callable[[], Any]:
    def work() -> Any:
        seed = np.random.RandomState(0).randint(2**31)  # the split that random_state=0 gives ours
        train, rest = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed)
        clf = mapie.SplitConformalClassifier(LogisticRegression(), confidence_level=level, prefit=False)
        clf.fit(X[train], y[train]).conformalize(X[rest], y[rest])
        return clf.predict_set(objects)[1][:, :, 0]

    return work


def mapie_prefit(model: Any, X: Any, y: Any, objects: Any, level: float) -> Callable[[], Any]:
    def work() -> Any:
        clf = mapie.SplitConformalClassifier(model, confidence_level=level, prefit=True)
        return clf.conformalize(X, y).predict_set(objects)[1][:, :, 0]

    return work


def mapie_cv(X: Any, y: Any, objects: Any, level: float, cv: KFold) -> Callable[[], Any]:
    def work() -> Any:
        clf = mapie.CrossConformalClassifier(LogisticRegression(), confidence_level=level, cv=cv)
        return clf.fit_conformalize(X, y).predict_set(objects, agg_scores="crossval")[1][:, :, 0]

    return work


def ours_of(clf: Any, X: Any, y: Any, objects: Any, level: float) -> Callable[[], Any]:
    return lambda: clf.fit(X, y).predict_set(objects, level)


def against_mapie() -> None:
    level, cv = 0.9, KFold(5, shuffle=True, random_state=0)
    X, y = synthetic(6000, 20, 5)
    X, y, objects = X[:5000], y[:5000], X[5000:]
    lac, trained = {"conformity_score": "lac"}, LogisticRegression().fit(X[:1000], y[:1000])
    split, prefit = SplitConformalClassifier(LogisticRegression(), random_state=0, **lac), {"prefit": True, **lac}
    pairs = {
        "split": (split, mapie_split(X, y, objects, level)),
        "split, trained before": (
            SplitConformalClassifier(trained, **prefit),
            mapie_prefit(trained, X, y, objects, level),
        ),
        "CV+, 5 folds": (CVPlusClassifier(LogisticRegression(), cv=cv, **lac), mapie_cv(X, y, objects, level, cv)),
    }
    rows = []
    for name, (clf, theirs) in pairs.items():
        ours = ours_of(clf, X, y, objects, level)
        same = f"{(ours() == theirs()).all(axis=1).mean():.1%}"
        times = [(seconds(ours), seconds(theirs)) for _ in range(9)]  # in turns: both meet the same noise
        mine, other = (min(column) for column in zip(*times, strict=True))
        rows.append((name, ms(mine), ms(other), f"{other / mine:.2f}×  (bar: 1×)", same))
    title = "LAC sets at 90 %: fit on 5,000 points, d = 20, 5 classes, and 1,000 objects, scikit-learn's logistic regression"
    show(title, rows, ("", "ours", "MAPIE", "ratio", "same sets"))


# Full CP against its cheaper relatives ------------------------------------------------------------------------------------------------


def digits() -> tuple[Any, Any, Any]:
    X, y = load_digits(return_X_y=True)
    X, objects, y, _ = train_test_split(X / 16, y, test_size=1000, random_state=0)
    return X, y, objects


def ten_thousand(n_classes: int) -> tuple[Any, Any, Any]:
    X, y = synthetic(11_000, 30, n_classes)
    return X[:10_000], y[:10_000], X[10_000:]


def cost() -> None:
    """Fit and p-values of 1,000 objects; the same classifier for all three.

    The last column says what the machine's threads were worth meanwhile, in threads: only ACP has use for more than one.
    """
    models = {
        "Built-in logistic regression": (None, 12),
        "scikit-learn's logistic regression": (LogisticRegression(max_iter=500), 6),
        "scikit-learn's network, 16 hidden units": (MLPClassifier((16,), max_iter=60, random_state=0), 3),
    }
    data = {
        "digits, n = 797": digits(),
        "10,000 × 30, 2 classes": ten_thousand(2),
        "10,000 × 30, 10 classes": ten_thousand(10),
    }
    for name, (model, repeats) in models.items():
        rows = []
        for label, (X, y, objects) in data.items():
            methods = {
                "ACP": FullConformalClassifier(model, method="influence", random_state=0),
                "split": SplitConformalClassifier(model, random_state=0),
                "CV+": CVPlusClassifier(model, random_state=0),
            }
            fit, predict, worth = dict.fromkeys(methods, np.inf), dict.fromkeys(methods, np.inf), list[float]()
            for _ in range(repeats):  # in turns: all three meet the same noise
                worth.append(worth_of_threads())
                for kind, clf in (turn for turn in methods.items() for _ in range(3)):
                    fit[kind] = min(fit[kind], seconds(lambda clf=clf, X=X, y=y: clf.fit(X, y)))
                    # The first of a fit: what it keeps for those that follow is part of the cost.
                    work = seconds(lambda clf=clf, objects=objects: clf.predict_epsilon(objects))
                    predict[kind] = min(predict[kind], work)
            total = {kind: fit[kind] + predict[kind] for kind in methods}
            parts = (f"{ms(fit[kind])} + {ms(predict[kind])}" for kind in methods)
            ratios = (f"{total['ACP'] / total['split']:.2f}×", f"{total['ACP'] / total['CV+']:.2f}×")
            rows.append((label, *parts, *ratios, f"{np.median(worth):.1f}"))
        heads = ("", *methods, "ACP / split", "ACP / CV+", "threads")
        show(f"{name}: fit + 1,000 objects (bars: 3× split, 1× CV+)", rows, heads)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    console.width = 140
    parts = {"crepes": crepes, "mapie": against_mapie, "cost": cost}
    for chosen in sys.argv[1:] or parts:
        parts[chosen]()
