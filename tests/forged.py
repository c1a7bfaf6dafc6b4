"""Predictors' files taken apart, changed, and put together again with a right checksum; and a fuzzer that does so by the thousand.

``python tests/forged.py 200000`` tries so many files; what gets through is printed, and is an error.
"""

import faulthandler
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fullconformal
from fullconformal.storage import StorageError, container
from fullconformal.storage.values import KINDS


def header_and_data(path):
    """The JSON header of a safetensors file and the bytes behind it."""
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def opened(path):
    """The content of a predictor's file, and its tensors."""
    text, tensors = container.read(path)
    return json.loads(text), tensors


def assembled(header, data):
    """A safetensors file of a JSON header and bytes."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def signed(content, tensors, path, version="2"):
    """A file with the given content that passes every check a reader can make of the container."""
    text = content if isinstance(content, str) else json.dumps(content)
    digest = container.checksum(text, tensors)
    header = {"__metadata__": {"format": "fullconformal", "version": version, "content": text, "checksum": digest}}
    data = b""
    for name, value in tensors.items():
        raw = container.raw_bytes(value).tobytes()
        kind = next(kind for kind, dtype in container.TYPES.items() if dtype == value.dtype)
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    Path(path).write_bytes(assembled(header, data))


def nodes(tree, path=()):
    """Paths of all values in a JSON tree."""
    yield path
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from nodes(part, (*path, key))


def found(tree, path):
    """The value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def estimator(name, params=(), fitted=()):
    """What a file says of an estimator of scikit-learn's: pairs of its parameters and of its fitted attributes."""
    return {
        "is": "scikit-learn", "class": name, "params": {"is": "dict", "items": [list(pair) for pair in params]},
        "fitted": {"is": "dict", "items": [list(pair) for pair in fitted]},
    }  # fmt: skip


# The fuzzer -----------------------------------------------------------------------------------------------------------

NAMES = [
    "memory", "checkpoint", "n_jobs", "device", "verbose", "func", "inverse_func", "__class__", "__dict__", "__init__", "transform",
    "predict_proba", "_fitted", "_sample", "estimator", "steps", "transformer_list", "degree", "metric", "metric_params", "weights",
    "_sklearn_output_config", "n_features_in_", "_n_features_outs", "classes_", "forward", "chunk", "n_classes", "k", "loss_", "dtype",
]  # fmt: skip
VALUES = [
    None, True, 0, 1, -1, 7, 2**31, 2**40, 2**63, 10**30, 0.5, -1e300, "", "x", "evil", "evil:main", "/tmp/evil", "../evil", "polars",
    "pandas", "cuda:99", "hpu", "precomputed", "euclidean", "object", "<U9999999", [], {}, {"is": "nothing"}, ["x"] * 100,
    {"is": "float", "value": "nan"}, {"is": "type", "name": "evil"}, {"is": "slice", "items": [None, None, None]},
    {"is": "objects", "dtype": "<U1000000", "shape": [40], "items": ["a"] * 40}, {"is": "dict", "items": [["transform", "polars"]]},
    {"is": "tuple", "items": [10**9, 10**9]}, {"is": "tensor", "tensor": "0", "order": [0]},
    estimator("FunctionTransformer", [("func", "evil:main")]), estimator("Pipeline", [("steps", []), ("memory", "/tmp/evil")]),
    estimator("PolynomialFeatures", [("degree", 9)], [("n_features_in_", 500)]), estimator("StandardScaler", (), [("transform", "evil")]),
    estimator("OneHotEncoder", (), [("_n_features_outs", [10**9])]),
]  # fmt: skip


def mutated(rng, content, tensors, others):
    """A copy of a file's content and tensors with one or two changes that keep the container right."""
    (content, paths), tensors = content, dict(tensors)
    content = json.loads(content)
    for _ in range(rng.choice([1, 1, 2])):
        path = paths[rng.integers(len(paths))]
        try:
            inside, key, at = found(content, path[:-1]), path[-1], rng.integers(10)
            value = inside[key]
        except (KeyError, IndexError, TypeError):  # it went with the first change
            break
        if not isinstance(inside, (dict, list)):
            break
        if at <= 2:
            inside[key] = json.loads(json.dumps(VALUES[rng.integers(len(VALUES))]))
        elif at == 3:
            other, grafts = others[rng.integers(len(others))]
            inside[key] = found(json.loads(other), grafts[rng.integers(len(grafts))])
        elif at == 4 and isinstance(value, str):
            words = [*NAMES, *KINDS, *fullconformal.storage.foreign.HOMES, *fullconformal.storage.modules.LAYERS]
            inside[key] = words[rng.integers(len(words))]
        elif at == 5 and isinstance(value, (int, float)):
            inside[key] = value * int(rng.choice([-1, 2, 1000, 10**12]))
        elif at == 6:
            inside[key] = [value] * int(rng.choice([2, 500]))
        elif at == 7 and isinstance(value, dict) and "items" in value and isinstance(value["items"], list):
            added = [NAMES[rng.integers(len(NAMES))], json.loads(json.dumps(VALUES[rng.integers(len(VALUES))]))]
            value["items"].append(added)
        elif at == 8:
            del inside[key]
        elif tensors:
            name = sorted(tensors)[rng.integers(len(tensors))]
            one = tensors[name]
            changed = [lambda t=one: t.flatten(), lambda t=one: torch.full_like(t, 99), lambda t=one: t.double() * float("nan"),
                       lambda: torch.zeros(0), lambda: torch.zeros(3, 0), lambda t=one: t.repeat(2, *[1] * (t.ndim - 1)) if t.ndim else t,
                       lambda t=one: t.long() - 5, lambda t=one: t.double() * 1e300,
                       lambda t=one: torch.full_like(t.long(), 2**63 - 1), lambda t=one: t.long() + 2**31]  # fmt: skip
            tensors[name] = changed[rng.integers(len(changed))]().clone()
    return content, tensors


class Watch:
    """Sees what Python does while a file is loaded and used: files opened, programs, processes, sockets, imports."""

    HOMES = ("fullconformal", "sklearn", "scipy", "numpy", "torch", "pandas", "joblib", "threadpoolctl", "safetensors")

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self)

    def __call__(self, event, args):
        if not self.on:
            return
        if event == "open":
            # A number is a handle, whose opening was seen.
            path, mode, flags = self.target if isinstance(args[0], int) else str(args[0]), args[1] or "", args[2] or 0
            writes = any(mark in mode for mark in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            library = any(f"{os.sep}{part}{os.sep}" in path for part in ("site-packages", "lib", "src"))
            if writes or not (library or path == self.target or path.startswith(("/proc/", "/sys/"))):
                self.seen.append((event, path, mode))
        elif event == "import":
            top = args[0].split(".")[0]
            if top not in self.HOMES and top not in sys.stdlib_module_names:
                self.seen.append((event, args[0]))
        elif event.split(".")[0] in ("subprocess", "socket", "shutil", "pty", "ftplib", "urllib") or event in (
            "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.mkdir", "os.remove", "os.rename",
            "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "ctypes.dlopen", "pickle.find_class", "os.putenv",
        ):  # fmt: skip
            self.seen.append((event, *map(str, args)))


def predictors():
    """Small fitted predictors of every kind, each with objects."""
    from sklearn.compose import ColumnTransformer
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import Lasso, LogisticRegression, QuantileRegressor, Ridge, RidgeCV
    from sklearn.naive_bayes import GaussianNB
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import FeatureUnion, make_pipeline
    from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, PolynomialFeatures, StandardScaler

    from fullconformal import (
        CVPlusClassifier,
        CVPlusRegressor,
        FullConformalClassifier,
        FullConformalRegressor,
        JackknifePlusClassifier,
        JackknifePlusRegressor,
        SplitConformalClassifier,
        SplitConformalRegressor,
    )
    from fullconformal.models import KernelDensityClassifier, mlp

    rng = np.random.default_rng(0)
    y = np.array(["a", "b"])[np.arange(24) % 2]
    X = rng.normal(size=(24, 2)) + (y == "b")[:, None]
    table = np.column_stack([X.round(2).astype(object), np.array(["u", "v", "w"])[np.arange(24) % 3]])
    columns = ColumnTransformer([("n", StandardScaler(), [0, 1]), ("w", OneHotEncoder(), [2])])
    polynomials = FeatureUnion([("p", PolynomialFeatures(2)), ("s", MinMaxScaler())])
    images = rng.normal(size=(24, 1, 3, 3))
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 2, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                                  torch.nn.Flatten(), torch.nn.Linear(2, 2))  # fmt: skip
    influence = {"method": "influence", "max_epochs": 1}
    for clf, objects in [
        (FullConformalClassifier(make_pipeline(columns, LogisticRegression()), method="influence"), table),
        (FullConformalClassifier(make_pipeline(polynomials, LogisticRegression())), X),
        (FullConformalClassifier(mlp(2, (2,), 2), **influence), X),
        (FullConformalClassifier(network, **influence), images),
        (FullConformalClassifier(mlp(2, (2,), 2), max_epochs=1, curvature="last_layer_kron"), X),
        (FullConformalClassifier(KNeighborsClassifier(2)), X),
        (FullConformalClassifier(KernelDensityClassifier()), X),
        (FullConformalClassifier(make_pipeline(columns, mlp(5, (2,), 2)), folds=2, max_epochs=1, random_state=0), table),
        (FullConformalClassifier(mlp(2, (2,), 2), update="influence", folds=2, max_epochs=1, random_state=0), X),
        (FullConformalClassifier(HistGradientBoostingClassifier(max_iter=2), folds=2, random_state=0), X),
        (SplitConformalClassifier(make_pipeline(StandardScaler(), LogisticRegression()), random_state=0), X),
        (SplitConformalClassifier(MLPClassifier((2,), max_iter=2, random_state=0), conformity_score="aps", random_state=0), X),
        (CVPlusClassifier(KNeighborsClassifier(2), n_folds=2, random_state=0), X),
        (JackknifePlusClassifier(random_state=0), X),
        (FullConformalClassifier(RandomForestClassifier(3, max_depth=2), random_state=0), X),
        (FullConformalClassifier(make_pipeline(columns, LogisticRegression())), table),
        (FullConformalRegressor(make_pipeline(StandardScaler(), Ridge())), X),
        (FullConformalRegressor(RidgeCV((0.1, 1.0))), X),
        (FullConformalRegressor(KernelRidge(kernel="rbf")), X),
        (FullConformalRegressor(Lasso(0.1)), X),
        (FullConformalRegressor(KNeighborsRegressor(2)), X),
        (FullConformalRegressor(mlp(2, (2,), 1), method="influence", max_epochs=1), X),
        (SplitConformalRegressor(QuantileRegressor(), conformity_score="cqr", random_state=0), X),
        (CVPlusRegressor(make_pipeline(StandardScaler(), Ridge()), n_folds=2, random_state=0), X),
        (JackknifePlusRegressor(KNeighborsRegressor(2), random_state=0), X),
        (FullConformalClassifier(LinearDiscriminantAnalysis()), X),
        (FullConformalClassifier(GaussianNB()), X),
        (SplitConformalRegressor(GaussianProcessRegressor(2.0 * RBF(), optimizer=None, alpha=0.1), random_state=0), X),
        (FullConformalRegressor(RandomForestRegressor(3, max_depth=2), random_state=0), X),
        (FullConformalClassifier(categories=0), np.c_[np.arange(24) % 2, X]),
    ]:  # fmt: skip
        targets = y if type(clf).__name__.endswith("Classifier") else X[:, 0] + rng.normal(size=24)
        # As many fits as points.
        few = slice(8 if type(clf).__name__.startswith("Jackknife") else None)
        yield clf.fit(objects[few], targets[few]), objects[:2]


def strange(clf, objects):
    """What a predictor gives for objects, where it is no p-values or intervals."""
    if type(clf).__name__.endswith("Classifier"):
        p = clf.predict_epsilon(objects)
        return None if ((p >= 0) & (p <= 1)).all() else p
    ends = clf.predict_interval(objects)
    return None if ends.shape == (len(objects), 2) and not (ends[:, 0] > ends[:, 1]).any() else ends


def fuzz(number, seed=0, say=print):
    """Load so many mutated files and predict with what was not refused; returns what went wrong, as text."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    faulthandler.enable()
    rng, wrong, refused, began = np.random.default_rng(seed), [], 0, time.process_time()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        watch.target = str(Path(folder) / "it")
        files = []
        for clf, objects in predictors():
            clf.save(watch.target)
            content, tensors = opened(watch.target)
            assert strange(fullconformal.load(watch.target), objects) is None
            paths = [path for path in nodes(content["predictor"], ("predictor",)) if len(path) > 1]
            files.append(((json.dumps(content), paths), tensors, objects))
        texts = [text for text, _, _ in files]
        before, most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
        for k in range(number):
            text, tensors, objects = files[k % len(files)]
            content, tensors = mutated(rng, text, tensors, texts)
            signed(content, tensors, watch.target)
            out, sys.stdout = sys.stdout, io.StringIO()
            watch.on = True
            try:
                clf = fullconformal.load(watch.target)
            except StorageError as error:
                refused += 1
                if "\n" in str(error):
                    wrong.append(f"{k}: an error of several lines")
            except BaseException:
                wrong.append(f"{k}: {traceback.format_exc(limit=-3)}")
            else:
                try:
                    if (found := strange(clf, objects)) is not None:
                        wrong.append(f"{k}: p-values or intervals {found}")
                except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, MemoryError):
                    pass  # the loader's own objects may not suit what is left of a predictor
            finally:
                watch.on = False
                sys.stdout = out
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if watch.seen:
                wrong.append(f"{k}: {watch.seen}")
                watch.seen = []
            if grown > most + 50 * 1024:
                say(f"{k}: {grown // 1024} MB")
                most = grown
            if any(Path(folder).iterdir()) and len(os.listdir(folder)) != 1:
                wrong.append(f"{k}: files {os.listdir(folder)}")
    seconds = time.process_time() - began
    say(
        f"{number:,} files in {seconds:.0f} s of processor time, {refused:,} refused, {grown // 1024} MB more memory, {len(wrong)} wrong"
    )
    # KiB: what the largest of them may take, and what the allocator keeps.
    if grown > 400 * 1024:
        wrong.append(f"{grown // 1024} MB of memory")
    if not number // 2 < refused < number:
        wrong.append(f"{refused} of {number} refused")
    return wrong


if __name__ == "__main__":
    problems = fuzz(int(sys.argv[1]), *map(int, sys.argv[2:]), say=partial(print, flush=True))
    print(*problems[:20], sep="\n")
    sys.exit(bool(problems))
