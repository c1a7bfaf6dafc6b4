"""The data sets: digits, synthetic points, MNIST, CIFAR-10 and ACSIncome, from files that are checked, or from their publishers."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import datasets
from sklearn.model_selection import train_test_split

__all__ = ["Dataset", "download", "load_acsincome", "load_cifar10", "load_digits", "load_mnist", "make_synthetic"]
Array = npt.NDArray[Any]

# By name: bytes of the .gz, its published MD5, shape of the array.
MNIST_FILES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "train-images-idx3-ubyte": (9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", (60000, 28, 28)),
    "train-labels-idx1-ubyte": (28881, "d53e105ee54ea40749a09fcbcd1e9432", (60000,)),
    "t10k-images-idx3-ubyte": (1648877, "9fb629c4189551a2d022fa330f9573f3", (10000, 28, 28)),
    "t10k-labels-idx1-ubyte": (4542, "ec29112dd5afa0611ce80d1b7f02629c", (10000,)),
}
MNIST_HELP = (
    "Put the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte, as they are or as .gz, into FOLDER/mnist: "
    "`fullconformal data mnist --folder FOLDER --download` downloads them, or take them from http://yann.lecun.com/exdb/mnist/."
)

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FILES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
CIFAR_HELP = (
    "Put data_batch_1.bin to data_batch_5.bin and test_batch.bin, the binary version, into FOLDER/cifar-10-batches-bin: "
    "`fullconformal data cifar10 --folder FOLDER --download` downloads them, or unpack cifar-10-binary.tar.gz from "
    "https://www.cs.toronto.edu/~kriz/cifar.html there."
)

ACS_FEATURES = ("AGEP", "COW", "SCHL", "MAR", "OCCP", "POBP", "RELP", "WKHP", "SEX", "RAC1P")
ACS_TARGET = "PINCP_over_50000"
# Of New York in 2018.
ACS_ROWS = 103_021
ACS_HELP = (
    f"Put ny_2018.csv or ny_2018.csv.gz, with the columns {', '.join((*ACS_FEATURES, ACS_TARGET))}, into FOLDER/acsincome: "
    "`fullconformal data acsincome --folder FOLDER --download` makes it from the Census Bureau's person file."
)


@dataclass(frozen=True)
class Dataset:
    """Training and test points, with the names of classes and features.

    Attributes
    ----------
    name : str
    X, y : arrays (n, ...), (n,)
        Training objects and the positions of their labels in ``classes``.
    X_test, y_test : arrays (m, ...), (m,)
    classes : tuple of str
    features : tuple of str
        Names of the columns of X; empty for images.
    note : str
        A remark for results on these data, such as missing rows; may be empty.
    """

    name: str
    X: Array
    y: npt.NDArray[np.int64]
    X_test: Array
    y_test: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    features: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        shape = "×".join(map(str, self.X.shape[1:]))
        return (
            f"{self.name}: {len(self.X):,} training and {len(self.X_test):,} test points of {shape} {self.X.dtype}, "
            f"{len(self.classes)} classes{'. ' + self.note if self.note else ''}"
        )


def load_digits(test_size: float = 500, random_state: int = 0) -> Dataset:
    """scikit-learn's digits, 1,797 images of 8×8 as rows of 64 numbers in [0, 1], split at random, stratified by class.

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
        Seeds the clusters and the points, which differ for each n: for nested training sets, make the largest and cut it.
    **options
        Passed to make_classification. The paper uses its defaults: two informative and two redundant features, the rest noise,
        1 % of the labels at random.

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


def load_mnist(folder: str | os.PathLike[str] | None = None) -> Dataset:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, uint8 (n, 1, 28, 28).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``mnist/`` with the four idx files, compressed or not; by default that of the environment variable
        FULLCONFORMAL_DATA. Compressed files are checked against their published MD5.

    Examples
    --------
    >>> from fullconformal.data import load_mnist
    >>> data = load_mnist("data")  # doctest: +SKIP
    >>> data.X.shape  # doctest: +SKIP
    (60000, 1, 28, 28)
    """
    root = data_folder(folder)
    X, y, X_test, y_test = (mnist_array(root, name, *expected) for name, expected in MNIST_FILES.items())
    classes = tuple(map(str, range(10)))
    return Dataset("MNIST", X[:, None], y.astype(np.int64), X_test[:, None], y_test.astype(np.int64), classes)


def mnist_array(root: Path, name: str, size: int, md5: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The array of one of the four files, checked; size and MD5 are those of the .gz."""
    path = locate(root, "mnist", (f"{name}.gz", name), MNIST_HELP)
    if path.suffix == ".gz":
        check_size(path, size, path.stat().st_size)
        check_md5(path, md5)
    array = read_idx(path)
    if array.shape != shape:
        raise ValueError(f"{path} holds an array of shape {array.shape}, expected {shape}; is it another data set?")
    if array.ndim == 1 and array.max(initial=0) > 9:
        raise ValueError(f"{path} is corrupted: it holds a label {array.max()}, expected 0 to 9; download it again.")
    return array


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an idx file of bytes: 0, 0, 8 (for bytes), the number of dimensions, each as four bytes, the numbers."""
    data = read_bytes(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is not an idx file of bytes: expected the first bytes 00 00 08, found {data[:3].hex(' ') or 'none'}."
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        check_size(path, start, len(data), "bytes of header")
    shape = tuple(int(d) for d in np.frombuffer(data, ">u4", data[3], 4))
    check_size(path, start + int(np.prod(shape)), len(data), "decompressed bytes" if path.suffix == ".gz" else "bytes")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def load_cifar10(folder: str | os.PathLike[str] | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images in colour, uint8 (n, 3, 32, 32).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``cifar-10-batches-bin/`` with the six .bin files of the binary version; by default that of the
        environment variable FULLCONFORMAL_DATA. Sizes and labels are checked; checksums of single files are not published.

    Examples
    --------
    >>> from fullconformal.data import load_cifar10
    >>> data = load_cifar10("data")  # doctest: +SKIP
    >>> data.classes[data.y_test[0]]  # doctest: +SKIP
    'cat'
    """
    root = data_folder(folder)
    parts = [cifar_batch(root, name) for name in CIFAR_FILES]
    X, y = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    return Dataset("CIFAR-10", X, y, *parts[-1], CIFAR_CLASSES)


def cifar_batch(root: Path, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (10000, 3, 32, 32) and labels (10000,) of one file, checked."""
    path = locate(root, "cifar-10-batches-bin", (name,), CIFAR_HELP)
    # A record is the label, then the three planes of the image.
    images, record = 10_000, 1 + 3 * 32 * 32
    check_size(path, images * record, path.stat().st_size)
    records = np.frombuffer(path.read_bytes(), np.uint8).reshape(images, record)
    labels = records[:, 0]
    if labels.max() > 9:
        at = int(labels.argmax())
        raise ValueError(
            f"{path} is corrupted: image {at} has label {labels[at]}, expected 0 to 9; download the file again."
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), labels.astype(np.int64)


def load_acsincome(
    folder: str | os.PathLike[str] | None = None, *, test_size: float = 0.1, random_state: int = 0
) -> Dataset:
    """ACSIncome, New York 2018: ten attributes of a person, and whether the income is above $50,000; float64 (n, 10).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``acsincome/ny_2018.csv`` (or .csv.gz); by default that of the environment variable FULLCONFORMAL_DATA.
    test_size : float, default=0.1
        Share of the rows to test on, drawn at random; the paper takes a tenth.
    random_state : int
        Seeds the split.

    Notes
    -----
    The table of the paper has 103,021 rows. A copy with fewer rows is used as it is, and ``note`` says how many it has: the results
    in this package's documentation use a copy with 47,486 rows, 42,737 of them for training.

    Examples
    --------
    >>> from fullconformal.data import load_acsincome
    >>> load_acsincome("data").note  # doctest: +SKIP
    '47,486 of the 103,021 rows'
    """
    X, y = acs_table(data_folder(folder))
    n = int((1 - test_size) * len(y))
    if not 0 < n < len(y):
        raise ValueError(
            f"test_size={test_size!r} leaves no points to train or to test on; give a share between 0 and 1."
        )
    order = np.random.RandomState(random_state).permutation(len(y))
    train, test = order[:n], order[n:]
    note = "" if len(y) == ACS_ROWS else f"{len(y):,} of the {ACS_ROWS:,} rows"
    return Dataset("ACSIncome", X[train], y[train], X[test], y[test], ("≤ 50,000", "> 50,000"), ACS_FEATURES, note)


def acs_table(root: Path) -> tuple[Array, Array]:
    """Features (n, 10) and labels (n,) of all rows, checked."""
    path = locate(root, "acsincome", ("ny_2018.csv", "ny_2018.csv.gz"), ACS_HELP)
    lines = read_bytes(path).decode("latin-1").splitlines()
    header = lines[0].split(",") if lines else []
    missing = [name for name in (*ACS_FEATURES, ACS_TARGET) if name not in header]
    if missing:
        raise ValueError(f"{path} lacks the column {missing[0]}; its first line is {','.join(header)[:100]!r}.")
    if len(lines) < 2:
        raise ValueError(f"{path} is truncated: it has a header and no rows; download the file again.")
    try:
        table = np.loadtxt(lines[1:], delimiter=",", ndmin=2)[:, [header.index(n) for n in (*ACS_FEATURES, ACS_TARGET)]]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is corrupted: {error} (data rows from 0); download the file again.") from error
    bad = ~np.isfinite(table).all(1) | ~np.isin(table[:, -1], (0.0, 1.0))
    if bad.any():
        raise ValueError(
            f"{path} is corrupted: data row {int(bad.argmax())} has a label that is neither 0 nor 1; download the file again."
        )
    return table[:, :-1], table[:, -1].astype(np.int64)


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The given folder, else that of the environment variable FULLCONFORMAL_DATA, else an error."""
    chosen = folder if folder is not None else os.environ.get("FULLCONFORMAL_DATA")
    if not chosen:
        raise FileNotFoundError(
            "no data folder: give folder=, or set the environment variable FULLCONFORMAL_DATA to the folder."
        )
    return Path(chosen).expanduser()


def locate(folder: Path, subfolder: str, names: tuple[str, ...], help_text: str) -> Path:
    """The first file of these names in folder/subfolder or in the folder itself, else an error with `help_text`."""
    for place in (folder / subfolder, folder):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise FileNotFoundError(f"{folder / subfolder / names[0]} does not exist. {help_text}")


def check_size(path: Path, expected: int, found: int, what: str = "bytes") -> None:
    """Raise if a file is shorter or longer than expected."""
    if found != expected:
        kind = "truncated" if found < expected else "too long"
        raise ValueError(f"{path} is {kind}: expected {expected:,} {what}, found {found:,}; download the file again.")


def check_md5(path: Path, expected: str) -> None:
    """Raise if a file does not have the published MD5."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise ValueError(f"{path} is corrupted: expected MD5 {expected}, found {found}; download the file again.")


def read_bytes(path: Path) -> bytes:
    """The contents of a file, decompressed if its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}); download the file again.") from error


# From their publishers ------------------------------------------------------------------------------------------------

# The page of MNIST's authors sometimes refuses programs, so this is torchvision's copy.
URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "acsincome": "https://www2.census.gov/programs-surveys/acs/data/pums/2018/1-Year/csv_pny.zip",
}
# Published beside the archive.
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"


def download(name: str, folder: str | os.PathLike[str] | None = None, urls: Mapping[str, str] = URLS) -> Path:
    """Download a data set from its publisher into a folder, where the loaders find it.

    Every file is written under a temporary name, checked, then renamed: an interrupted download leaves nothing behind.

    Parameters
    ----------
    name : {"mnist", "cifar10", "acsincome"}
    folder : path, optional
        By default that of the environment variable FULLCONFORMAL_DATA. Created if it does not exist.
    urls : mapping, optional
        The address by name.

    Returns
    -------
    Path
        The folder with the files.

    Examples
    --------
    >>> from fullconformal.data import download, load_mnist
    >>> download("mnist", "data")  # doctest: +SKIP
    >>> load_mnist("data")  # doctest: +SKIP
    """
    if name not in FETCHERS:
        raise ValueError(f"name={name!r} is unknown; allowed: {', '.join(map(repr, FETCHERS))}.")
    subfolder, fetch = FETCHERS[name]
    target = data_folder(folder) / subfolder
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".download-") as partial:
        fetch(urls[name], Path(partial), target)
    return target


def fetch_file(url: str, path: Path) -> Path:
    """Download one file."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise OSError(
            f"{url} could not be downloaded ({error}); download it by other means and put it in place."
        ) from error
    return path


def fetch_mnist(url: str, partial: Path, target: Path, files: Mapping[str, Any] = MNIST_FILES) -> None:
    """The four files, each checked against its MD5."""
    for name, (_, md5, _) in files.items():
        path = fetch_file(f"{url}{name}.gz", partial / f"{name}.gz")
        check_md5(path, md5)
        path.replace(target / path.name)


def fetch_cifar10(url: str, partial: Path, target: Path, md5: str = CIFAR_MD5) -> None:
    """The six files of the archive, which is checked against its MD5."""
    archive = fetch_file(url, partial / "cifar-10-binary.tar.gz")
    check_md5(archive, md5)
    with tarfile.open(archive) as tar:
        for name in CIFAR_FILES:
            file = tar.extractfile(f"cifar-10-batches-bin/{name}")
            # The MD5 is right, so these are files.
            assert file is not None
            with (partial / name).open("wb") as copy:
                shutil.copyfileobj(file, copy)
    for name in CIFAR_FILES:
        (partial / name).replace(target / name)


def fetch_acsincome(url: str, partial: Path, target: Path) -> None:
    """The ACSIncome task of Ding et al. 2021: adults who work and earn, from the person file of New York."""
    import pandas as pd

    archive = fetch_file(url, partial / "csv_pny.zip")
    with zipfile.ZipFile(archive) as files, files.open("psam_p36.csv") as file:
        people = pd.read_csv(file, usecols=[*ACS_FEATURES, "PINCP", "PWGTP"])
    kept = people[(people.AGEP > 16) & (people.PINCP > 100) & (people.WKHP > 0) & (people.PWGTP >= 1)]
    if len(kept) != ACS_ROWS:
        raise ValueError(f"{url} has {len(kept):,} rows of ACSIncome, expected {ACS_ROWS:,}; nothing was written.")
    table = kept[[*ACS_FEATURES]].fillna(-1).astype(int)
    table[ACS_TARGET] = (kept.PINCP > 50_000).astype(int)
    path = partial / "ny_2018.csv.gz"
    table.to_csv(path, index=False)
    path.replace(target / path.name)


# By name: the subfolder, and the function that fills it.
FETCHERS: dict[str, tuple[str, Callable[[str, Path, Path], None]]] = {
    "mnist": ("mnist", fetch_mnist),
    "cifar10": ("cifar-10-batches-bin", fetch_cifar10),
    "acsincome": ("acsincome", fetch_acsincome),
}
