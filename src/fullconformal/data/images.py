"""MNIST and CIFAR-10 from the files their publishers give."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fullconformal.data.base import Dataset, check_md5, check_size, data_folder, locate, read_bytes

# name: (bytes of the .gz, its published MD5, shape of the array)
MNIST_FILES: dict[str, tuple[int, str, tuple[int, ...]]] = {
    "train-images-idx3-ubyte": (9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", (60000, 28, 28)),
    "train-labels-idx1-ubyte": (28881, "d53e105ee54ea40749a09fcbcd1e9432", (60000,)),
    "t10k-images-idx3-ubyte": (1648877, "9fb629c4189551a2d022fa330f9573f3", (10000, 28, 28)),
    "t10k-labels-idx1-ubyte": (4542, "ec29112dd5afa0611ce80d1b7f02629c", (10000,)),
}
MNIST_HELP = (
    "Put the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte, as they are or as .gz, into FOLDER/mnist: "
    "`fullconformal data mnist --folder FOLDER --download` fetches them, or take them from http://yann.lecun.com/exdb/mnist/."
)

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_TRAIN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
CIFAR_IMAGES, CIFAR_RECORD = 10000, 1 + 3 * 32 * 32  # images a file; bytes an image: its label, then the three planes
CIFAR_HELP = (
    "Put data_batch_1.bin to data_batch_5.bin and test_batch.bin, the binary version, into FOLDER/cifar-10-batches-bin: "
    "`fullconformal data cifar10 --folder FOLDER --download` fetches them, or unpack cifar-10-binary.tar.gz from "
    "https://www.cs.toronto.edu/~kriz/cifar.html there."
)


def load_mnist(folder: str | os.PathLike[str] | None = None) -> Dataset:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, uint8 (n, 1, 28, 28).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``mnist/`` with the four idx files, packed or not; by default that of the environment variable
        FULLCONFORMAL_DATA. Packed files are compared with their published MD5.

    Examples
    --------
    >>> from fullconformal.data import load_mnist
    >>> data = load_mnist("data")  # doctest: +SKIP
    >>> data.X.shape  # doctest: +SKIP
    (60000, 1, 28, 28)
    """
    root = data_folder(folder)
    X, y, X_test, y_test = (_mnist_array(root, name) for name in MNIST_FILES)
    classes = tuple(map(str, range(10)))
    return Dataset("MNIST", X[:, None], y.astype(np.int64), X_test[:, None], y_test.astype(np.int64), classes)


def _mnist_array(root: Path, name: str) -> npt.NDArray[np.uint8]:
    """One of the four files, checked."""
    size, md5, shape = MNIST_FILES[name]
    path = locate(root, "mnist", (f"{name}.gz", name), MNIST_HELP)
    if path.suffix == ".gz":
        check_size(path, size, path.stat().st_size)
        check_md5(path, md5)
    array = read_idx(path)
    if array.shape != shape:
        raise ValueError(f"{path} holds an array of shape {array.shape}, expected {shape}; is it another data set?")
    if array.ndim == 1 and array.max(initial=0) > 9:
        raise ValueError(f"{path} is corrupted: it holds a label {array.max()}, expected 0 to 9; get the file again.")
    return array


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an idx file of bytes: two zeros, 8 (bytes), the number of dimensions, each as four bytes, the numbers."""
    data = read_bytes(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is no idx file of bytes: expected the first bytes 00 00 08, found {data[:3].hex(' ') or 'none'}."
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        check_size(path, start, len(data), "bytes of header")
    shape = tuple(int(d) for d in np.frombuffer(data, ">u4", data[3], 4))
    check_size(path, start + int(np.prod(shape)), len(data), "bytes unpacked" if path.suffix == ".gz" else "bytes")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def load_cifar10(folder: str | os.PathLike[str] | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images in colour, uint8 (n, 3, 32, 32).

    Parameters
    ----------
    folder : path, optional
        Folder that holds ``cifar-10-batches-bin/`` with the six .bin files of the binary version; by default that of the
        environment variable FULLCONFORMAL_DATA. No checksums of single files are published: sizes and labels are checked.

    Examples
    --------
    >>> from fullconformal.data import load_cifar10
    >>> data = load_cifar10("data")  # doctest: +SKIP
    >>> data.classes[data.y_test[0]]  # doctest: +SKIP
    'cat'
    """
    root = data_folder(folder)
    parts = [_cifar_batch(root, name) for name in (*CIFAR_TRAIN, "test_batch.bin")]
    X, y = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    return Dataset("CIFAR-10", X, y, *parts[-1], CIFAR_CLASSES)


def _cifar_batch(root: Path, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (10000, 3, 32, 32) and labels (10000,) of one file, checked."""
    path = locate(root, "cifar-10-batches-bin", (name,), CIFAR_HELP)
    check_size(path, CIFAR_IMAGES * CIFAR_RECORD, path.stat().st_size)
    records = np.frombuffer(path.read_bytes(), np.uint8).reshape(CIFAR_IMAGES, CIFAR_RECORD)
    labels = records[:, 0]
    if labels.max() > 9:
        at = int(labels.argmax())
        raise ValueError(
            f"{path} is corrupted: image {at} has label {labels[at]}, expected 0 to 9; get the file again."
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), labels.astype(np.int64)
