"""Saving and loading predictors, and what is checked before a loaded one is handed out."""

from __future__ import annotations

import json
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.utils.validation import check_is_fitted

from fullconformal.estimators.base import Conformal
from fullconformal.runtime.files import check_writable
from fullconformal.storage import LIMITS, StorageError, expect, one_line
from fullconformal.storage.container import parse, read, write
from fullconformal.storage.modules import Factory
from fullconformal.storage.values import Packer, Unpacker


def save(clf: Conformal, path: Path | str, *, factory: Any = None, notes: Any = None) -> None:
    """Write a fitted predictor, and notes of the caller (JSON), to one file."""
    know_everything()
    check_writable(path)
    check_is_fitted(clf)
    packer = Packer(None if factory is None else Factory(factory))
    fitted = getattr(clf, "_fitted", None)
    content = {
        "device": "cpu" if fitted is None else str(fitted.device),
        "predictor": packer.pack(clf),
        "made_with": {"scikit-learn": sklearn.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "notes": notes,
    }
    text = json.dumps(content["predictor"])
    # What a file may ask of its reader is asked for now, so that nothing is saved that cannot be loaded; of large ones it takes too long.
    if len(text) + sum(value.nbytes for value in packer.tensors.values()) <= LIMITS.tried:
        try:
            Unpacker(packer.tensors, "cpu", packer.factory, len(text)).unpack(content["predictor"])
        except StorageError as error:
            raise StorageError(
                f"it could not be loaded again: {one_line(error)}; docs/files.rst has the bounds."
            ) from error
    write(path, content, packer.tensors, packer.copies, packer.widest)


def load(path: Path | str, *, factory: Any = None, device: str = "auto") -> Any:
    """Read a predictor that was saved by ``clf.save(path)``.

    Nothing in the file can run: it holds numbers, and names that are looked up in lists of this package. Where the file is
    damaged, of another kind, asks for more memory than a file of its size may, or says anything unexpected, a `StorageError`
    is raised. Folders, workers, the device and what is printed (``checkpoint``, ``n_jobs``, ``device``, ``verbose``) are not
    the file's to say: they have their defaults.

    Parameters
    ----------
    path : path
    factory : callable or "package.module:function", optional
        Returns the architecture, for predictors that were saved with a factory. Only what is given here is imported and called.
    device : str, default="auto"
        "auto" is the device it was saved from where there is one here, else the CPU.

    Returns
    -------
    FullConformalClassifier, SplitConformalRegressor or any of their kin
        Its p-values are, on the same device, those of the predictor that was saved, to the bit.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from sklearn.datasets import load_iris
    >>> import fullconformal
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = fullconformal.FullConformalClassifier(l2=0.01).fit(X[::2], y[::2])
    >>> with TemporaryDirectory() as folder:
    ...     clf.save(Path(folder) / "iris.safetensors")
    ...     again = fullconformal.load(Path(folder) / "iris.safetensors")
    >>> bool((again.predict_p(X[1::2]) == clf.predict_p(X[1::2])).all())
    True
    """
    return load_with_notes(path, factory=factory, device=device)[0]


def load_with_notes(path: Path | str, *, factory: Any = None, device: str = "auto") -> tuple[Any, Any]:
    """A saved predictor and the notes that were saved along."""
    know_everything()
    made = None if factory is None else Factory(factory)
    if device != "auto" and not usable(device):
        raise ValueError(f"device={device!r} cannot be used here; give 'auto' or 'cpu'.")
    text, tensors = read(path)
    try:
        content = parse(path, text)
        saved = expect(content["device"], str)
        # Other kinds of device may make torch load libraries.
        known = re.fullmatch(r"(cpu|cuda|mps)(:\d{1,2})?", saved) is not None and usable(saved)
        place = (saved if known else "cpu") if device == "auto" else device
        clf = Unpacker(tensors, place, made, len(text)).unpack(content["predictor"])
        if not isinstance(clf, Conformal):
            raise StorageError(f"it holds a {type(clf).__name__}, which is no predictor")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clf.verify()
        return clf, content.get("notes")
    except StorageError as error:
        raise StorageError(f"{path} cannot be loaded: {one_line(error)}.") from error
    except Exception as error:
        # Whatever a strange file leads to, its reader is told that the file is strange.
        raise StorageError(
            f"{path} cannot be loaded, what it says does not fit together: {type(error).__name__}: {one_line(error)}."
        ) from error


def know_everything() -> None:
    """Make sure that every class a predictor may hold is on the list of what is saved and loaded."""
    # Imported when first needed, as pandas is slow and this module is imported by those it imports.
    names = ("full", "split", "cross", "full_regression", "split_regression", "cross_regression")
    for name in (*(f"estimators.{name}" for name in names), "storage.foreign"):
        import_module(f"fullconformal.{name}")


def usable(device: str) -> bool:
    """Whether torch can put a tensor there; "meta" holds none."""
    try:
        return torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):
        return False
