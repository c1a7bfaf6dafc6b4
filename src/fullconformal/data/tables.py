"""Data sets whose objects are rows of numbers: digits, synthetic points, incomes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split

from fullconformal.data.base import Array, Dataset, data_folder, locate, read_bytes

ACS_FEATURES = ("AGEP", "COW", "SCHL", "MAR", "OCCP", "POBP", "RELP", "WKHP", "SEX", "RAC1P")
ACS_TARGET = "PINCP_over_50000"
ACS_ROWS = 103_021  # of New York in 2018
ACS_HELP = (
    f"Put ny_2018.csv or ny_2018.csv.gz, with the columns {', '.join((*ACS_FEATURES, ACS_TARGET))}, into FOLDER/acsincome: "
    "`fullconformal data acsincome --folder FOLDER --download` makes it from the Census Bureau's person file."
)


def load_digits(test_size: float = 500, random_state: int = 0) -> Dataset:
    """scikit-learn's digits, 1,797 images of 8×8 as rows of 64 numbers in [0, 1], split at random, as many of each class.

    Examples
    --------
    >>> from fullconformal.data import load_digits
    >>> print(load_digits())
    digits: 1,297 training and 500 test points of 64 float64, 10 classes
    """
    X, y = datasets.load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X / 16, y, test_size=test_size, random_state=random_state, stratify=y)
    features = tuple(f"pixel_{k // 8}_{k % 8}" for k in range(64))
    return Dataset("digits", X, y.astype(np.int64), X_test, y_test.astype(np.int64), tuple("0123456789"), features)


def make_synthetic(
    n: int = 1000, n_features: int = 30, n_test: int = 100, *, random_state: int = 0, **options: Any
) -> Dataset:
    """Two classes of two Gaussian clusters each, by scikit-learn's make_classification.

    Parameters
    ----------
    n, n_features, n_test : int
        Training points, features, test points.
    random_state : int
        Seeds the clusters and the points, which differ from one n to another: for nested bags make the largest and cut it.
    **options
        Of make_classification, whose defaults (two informative and two redundant features, the rest noise; 1 % of the labels
        at random) the paper does not depart from.

    Examples
    --------
    >>> from fullconformal.data import make_synthetic
    >>> print(make_synthetic(200, n_features=5))
    synthetic: 200 training and 100 test points of 5 float64, 2 classes
    """
    X, y = datasets.make_classification(
        n + n_test, n_features, n_classes=2, n_clusters_per_class=2, random_state=random_state, **options
    )
    y = y.astype(np.int64)
    features = tuple(f"x{k}" for k in range(n_features))
    return Dataset("synthetic", X[:n], y[:n], X[n:], y[n:], ("0", "1"), features)


def load_acsincome(
    folder: str | os.PathLike[str] | None = None, *, test_size: float = 0.1, random_state: int = 0
) -> Dataset:
    """ACSIncome, New York 2018: ten attributes of a person, and whether the income is above $50,000; float64 (n, 10).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``acsincome/ny_2018.csv`` (or .csv.gz); by default that of the environment variable FULLCONFORMAL_DATA.
    test_size : float, default=0.1
        Share of the rows that test, drawn at random; the paper's is a tenth.
    random_state : int
        Seeds the split.

    Notes
    -----
    The table of the paper has 103,021 rows. A copy with fewer is taken as it is, and ``note`` says how many it has: the copy that
    the package's own figures rest on has 47,486, of which 42,737 train.

    Examples
    --------
    >>> from fullconformal.data import load_acsincome
    >>> load_acsincome("data").note  # doctest: +SKIP
    '47,486 of the 103,021 rows'
    """
    X, y = _acs_table(data_folder(folder))
    n = int((1 - test_size) * len(y))
    if not 0 < n < len(y):
        raise ValueError(f"test_size={test_size!r} leaves no points to train or to test; give a share between 0 and 1.")
    order = np.random.RandomState(random_state).permutation(len(y))
    train, test = order[:n], order[n:]
    note = "" if len(y) == ACS_ROWS else f"{len(y):,} of the {ACS_ROWS:,} rows"
    return Dataset("ACSIncome", X[train], y[train], X[test], y[test], ("≤ 50,000", "> 50,000"), ACS_FEATURES, note)


def _acs_table(root: Path) -> tuple[Array, Array]:
    """Features (n, 10) and labels (n,) of all rows, checked."""
    path = locate(root, "acsincome", ("ny_2018.csv", "ny_2018.csv.gz"), ACS_HELP)
    lines = read_bytes(path).decode("latin-1").splitlines()
    header = lines[0].split(",") if lines else []
    missing = [name for name in (*ACS_FEATURES, ACS_TARGET) if name not in header]
    if missing:
        raise ValueError(f"{path} lacks the column {missing[0]}; its first line is {','.join(header)[:100]!r}.")
    if len(lines) < 2:
        raise ValueError(f"{path} is truncated: it has a header and no rows; get the file again.")
    try:
        table = np.loadtxt(lines[1:], delimiter=",", ndmin=2)[:, [header.index(n) for n in (*ACS_FEATURES, ACS_TARGET)]]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is corrupted: {error} (data rows from 0); get the file again.") from error
    bad = ~np.isfinite(table).all(1) | ~np.isin(table[:, -1], (0.0, 1.0))
    if bad.any():
        raise ValueError(
            f"{path} is corrupted: data row {int(bad.argmax())} has a label that is neither 0 nor 1; get the file again."
        )
    return table[:, :-1], table[:, -1].astype(np.int64)
