"""Saving and loading predictors, and what is checked before a loaded one is handed out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.base import clone
from sklearn.utils.validation import _num_samples, check_is_fitted

from fullconformal.estimators.base import ConformalClassifier
from fullconformal.estimators.calibrated import Calibrated, CalibratedClassifier
from fullconformal.estimators.cross import CrossConformalClassifier, CVPlusClassifier
from fullconformal.estimators.full import FullConformalClassifier
from fullconformal.estimators.jackknife import JackknifePlusClassifier
from fullconformal.estimators.options import METHODS
from fullconformal.estimators.split import AggregatedConformalClassifier, SplitConformalClassifier
from fullconformal.methods.convex import Exact, Symmetric
from fullconformal.methods.engines import Differentiable, Engine, Influence
from fullconformal.methods.keeping import ENGINE_KINDS, require
from fullconformal.methods.last_layer import LastLayer, OnFeatures
from fullconformal.methods.probability import Neighbors
from fullconformal.storage import KINDS, Factory, Kind, Packer, StorageError, Unpacker, expect, one_line, read, write

Values = dict[str, Any]

# Files ----------------------------------------------------------------------------------------------------------------


def save(clf: ConformalClassifier, path: Path | str, *, factory: Any = None, notes: Any = None) -> None:
    """Write a fitted predictor, and notes of the caller (JSON), to one file."""
    path = Path(path)
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"the folder {path.resolve().parent} does not exist; make it first.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file in it.")
    check_is_fitted(clf)
    packer = Packer(kinds(), None if factory is None else Factory(factory))
    content = {
        "device": str(device_of(getattr(clf, "_engine", None))),  # before it is packed, as this makes what was put off
        "predictor": packer.pack(clf),
        "made_with": {"scikit-learn": sklearn.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "notes": notes,
    }
    write(path, content, packer.tensors)


def load(path: Path | str, *, factory: Any = None, device: str = "auto") -> Any:
    """Read a predictor that was saved by ``clf.save(path)``.

    Nothing in the file can run: it holds numbers, and names that are looked up in lists of this package. Where the file is
    damaged, of another kind, or says anything unexpected, a `StorageError` is raised.

    Parameters
    ----------
    path : path
    factory : callable or "package.module:function", optional
        Returns the architecture, for predictors that were saved with a factory. Only what is given here is imported and called.
    device : str, default="auto"
        "auto" is the device it was saved from where there is one here, else the CPU.

    Returns
    -------
    FullConformalClassifier, SplitConformalClassifier or any of their kin
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
    made = None if factory is None else Factory(factory)
    if device != "auto" and not usable(device):
        raise ValueError(f"device={device!r} cannot be used here; give 'auto' or 'cpu'.")
    content, tensors = read(path)
    try:
        saved = expect(content["device"], str)
        place = (saved if usable(saved) else "cpu") if device == "auto" else device
        clf = Unpacker(kinds(), tensors, place, made).unpack(content["predictor"])
        if type(clf) not in CHECKS:
            raise StorageError(f"it holds a {type(clf).__name__}, which is no predictor")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[type(clf)](clf)
        return clf, content.get("notes")
    except StorageError as error:
        raise StorageError(f"{path} cannot be loaded: {one_line(error)}.") from error
    except Exception as error:  # whatever a strange file leads to, its reader is told that the file is strange
        raise StorageError(
            f"{path} cannot be loaded, what it says does not fit together: {type(error).__name__}: {one_line(error)}."
        ) from error


def device_of(engine: Any) -> Any:
    """Where an engine computes."""
    if isinstance(engine, (LastLayer, OnFeatures)):
        return engine.head.device
    return engine.problem.X.device if isinstance(engine, Differentiable) else "cpu"


def usable(device: str) -> bool:
    """Whether torch can put a tensor there; "meta" holds none."""
    try:
        return torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):
        return False


# Predictors -----------------------------------------------------------------------------------------------------------


def pack_classifier(clf: Any, _: Packer) -> Values:
    """Parameters and fitted attributes; of the estimator its fit only where it came fitted."""
    params = clf.get_params(deep=False)
    params["estimator"] = clf.estimator if params.get("prefit") else clone(clf.estimator, safe=False)
    if "checkpoint" in params:
        params["checkpoint"] = None
    for name, remedy in (("random_state", 0), ("cv", None)):
        value = params.get(name)
        if value is not None and not isinstance(value, (int, np.integer, list)):
            raise StorageError(f"{name}={value!r} cannot be saved; call clf.set_params({name}={remedy}) first.")
    fitted = {name: value for name, value in vars(clf).items() if name not in params}
    return {"params": params, "fitted": fitted}


def unpack_classifier(cls: type[Any]) -> Callable[[Values, Unpacker], Any]:
    """How a predictor is made again, not yet checked."""

    def unpack(values: Values, unpacker: Unpacker) -> Any:
        clf = cls(**expect(values["params"], dict))
        if isinstance(clf.estimator, torch.nn.Module):
            clf.estimator = clf.estimator.cpu()
        if getattr(clf, "device", "auto") != "auto" and torch.device(clf.device).type != unpacker.device.type:
            clf.device = str(unpacker.device)
        fitted = expect(values["fitted"], dict)
        for name in fitted:
            require(not name.startswith("__") and not callable(getattr(cls, name, None)), f"attribute {name[:40]!r}")
        vars(clf).update(fitted)
        return clf

    return unpack


def check_full(clf: FullConformalClassifier) -> None:
    """Raise unless the predictor is complete, consistent, and gives p-values of its sample."""
    clf._check_params()
    n_classes = check_labels(clf)
    engine, labels = clf._engine, clf._labels
    require(clf.method_ in METHODS[1:] and type(engine) in ENGINES[clf.method_], "method")
    require(labels.dtype == np.int64 and labels.shape == (engine.n,), "labels")
    require(bool(((labels >= 0) & (labels < n_classes)).all()), "labels")
    X, y = points(engine)
    require(np.array_equal(y, labels), "labels")
    if clf._recalibration is not None:
        settings, fresh, index = clf._recalibration
        require(
            isinstance(settings, tuple) and fresh.dtype == np.float64 and fresh.shape == index.shape, "recalibration"
        )
        require(bool(np.isfinite(fresh).all() and ((index >= 0) & (index < n_classes)).all()), "recalibration")
    sample = clf._sample = clf._sample if hasattr(clf, "_sample") else blank(clf)
    inputs = clf._prepare_inputs(sample)
    seen = engine.coordinates(inputs) if isinstance(engine, Influence) else inputs
    if X is not None and not np.allclose(seen, X[: len(inputs)], rtol=1e-5, atol=1e-6):
        raise StorageError(
            "its transformers give another result here than where it was saved; use the scikit-learn version it was saved with"
        )
    proba = clf.predict_proba(sample)
    require(proba.shape == (len(inputs), n_classes) and bool(np.isfinite(proba).all()), "model")
    if not isinstance(engine, Symmetric):  # whose base fit was checked, and whose predictions take longer
        check_p(clf, n_classes)


def blank(clf: FullConformalClassifier) -> Any:
    """An object of zeros, to try a predictor on that was fitted to a stream and kept no object."""
    require(isinstance(clf._engine, (LastLayer, OnFeatures)), "sample")
    shape = clf._input_shape
    require(all(type(size) is int and size > 0 for size in shape) and math.prod(shape) <= 2**24, "shape of objects")
    return np.zeros((1, *shape))


def points(engine: Engine) -> tuple[Any, Any]:
    """The training points X (n, ...), None where they are not kept, and labels y (n,) that an engine holds."""
    if isinstance(engine, Differentiable):
        return engine.problem.X.cpu().numpy(), engine.problem.y.cpu().numpy()
    if isinstance(engine, (LastLayer, OnFeatures)):
        return None, engine.labels
    assert isinstance(engine, Neighbors)
    return engine.bag.X, engine.bag.y


def check_calibrated(clf: CalibratedClassifier) -> None:
    """The same of a predictor whose models were calibrated on points that did not train them."""
    clf._check_params()
    n_classes, sizes = check_labels(clf), clf._sizes
    require(type(clf._seed) is int and 0 <= clf._seed < 2**32, "seed")
    require(sizes.dtype == np.int64 and sizes.shape == (n_classes if clf.class_conditional else 1,), "sizes")
    parts = [] if getattr(clf, "_linear", None) is not None else expect(clf._parts, list)
    for part in parts:
        expect(part, Calibrated)
        require(len(part.ordered) == len(sizes), "scores")
        require(all(group.ndim == 1 and bool((group[:-1] <= group[1:]).all()) for group in part.ordered), "scores")
    check_p(clf, n_classes)


def check_labels(clf: Any) -> int:
    """The number of classes, which must be distinct and in order."""
    classes = clf.classes_
    require(isinstance(classes, np.ndarray) and classes.ndim == 1 and len(classes) > 1, "classes")
    require(bool((classes[:-1] < classes[1:]).all()), "classes")
    require(isinstance(clf.confidence_level, float) and 0 < clf.confidence_level < 1, "confidence level")
    require(isinstance(clf.class_conditional, bool), "class_conditional")
    return len(classes)


def check_p(clf: Any, n_classes: int) -> None:
    """Raise unless the predictor gives p-values of its sample."""
    p = clf.predict_epsilon(clf._sample)
    require(p.shape == (_num_samples(clf._sample), n_classes) and bool(((p >= 0) & (p <= 1)).all()), "p-values")


ENGINES: dict[str, tuple[type, ...]] = {
    "influence": (Influence, LastLayer, OnFeatures),
    "symmetric": (Symmetric,),
    "exact": (Exact, Neighbors),
}
CHECKS: dict[type, Callable[[Any], None]] = {
    FullConformalClassifier: check_full,
    **dict.fromkeys((SplitConformalClassifier, AggregatedConformalClassifier), check_calibrated),
    **dict.fromkeys((CrossConformalClassifier, CVPlusClassifier, JackknifePlusClassifier), check_calibrated),
}


def kinds() -> dict[str, Kind]:
    """All that a saved predictor may hold."""
    from fullconformal.storage.inputs import INPUTS  # pandas is slow to import

    return {
        **KINDS,
        **ENGINE_KINDS,
        **INPUTS,
        **{cls.__name__: Kind(cls, pack_classifier, unpack_classifier(cls)) for cls in CHECKS},
    }
