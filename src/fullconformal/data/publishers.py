"""Download data sets from their publishers."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fullconformal.data import loaders

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
    target = loaders.data_folder(folder) / subfolder
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


def fetch_mnist(url: str, partial: Path, target: Path, files: Mapping[str, Any] = loaders.MNIST_FILES) -> None:
    """The four files, each checked against its MD5."""
    for name, (_, md5, _) in files.items():
        path = fetch_file(f"{url}{name}.gz", partial / f"{name}.gz")
        loaders.check_md5(path, md5)
        path.replace(target / path.name)


def fetch_cifar10(url: str, partial: Path, target: Path, md5: str = CIFAR_MD5) -> None:
    """The six files of the archive, which is checked against its MD5."""
    archive = fetch_file(url, partial / "cifar-10-binary.tar.gz")
    loaders.check_md5(archive, md5)
    with tarfile.open(archive) as tar:
        for name in loaders.CIFAR_FILES:
            file = tar.extractfile(f"cifar-10-batches-bin/{name}")
            # The MD5 is right, so these are files.
            assert file is not None
            with (partial / name).open("wb") as copy:
                shutil.copyfileobj(file, copy)
    for name in loaders.CIFAR_FILES:
        (partial / name).replace(target / name)


def fetch_acsincome(url: str, partial: Path, target: Path) -> None:
    """The ACSIncome task of Ding et al. 2021: adults who work and earn, from the person file of New York."""
    import pandas as pd

    archive = fetch_file(url, partial / "csv_pny.zip")
    with zipfile.ZipFile(archive) as files, files.open("psam_p36.csv") as file:
        people = pd.read_csv(file, usecols=[*loaders.ACS_FEATURES, "PINCP", "PWGTP"])
    kept = people[(people.AGEP > 16) & (people.PINCP > 100) & (people.WKHP > 0) & (people.PWGTP >= 1)]
    if len(kept) != loaders.ACS_ROWS:
        raise ValueError(
            f"{url} has {len(kept):,} rows of ACSIncome, expected {loaders.ACS_ROWS:,}; nothing was written."
        )
    table = kept[[*loaders.ACS_FEATURES]].fillna(-1).astype(int)
    table[loaders.ACS_TARGET] = (kept.PINCP > 50_000).astype(int)
    path = partial / "ny_2018.csv.gz"
    table.to_csv(path, index=False)
    path.replace(target / path.name)


# By name: the subfolder, and the function that fills it.
FETCHERS: dict[str, tuple[str, Callable[[str, Path, Path], None]]] = {
    "mnist": ("mnist", fetch_mnist),
    "cifar10": ("cifar-10-batches-bin", fetch_cifar10),
    "acsincome": ("acsincome", fetch_acsincome),
}
