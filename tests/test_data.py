"""The loaders: what they read, and the errors for files that are absent, truncated, corrupted or something else."""

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner

from fullconformal import data
from fullconformal.cli import main


def idx(array):
    """An array of bytes as an idx file, written from the format's description."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_mnist(folder, n=7, m=3):
    """A tiny compressed MNIST, with the sizes, checksums and shapes to expect of it, and its arrays."""
    rng = np.random.RandomState(0)
    (folder / "mnist").mkdir()
    expected, arrays = {}, {}
    for name, (_, _, shape) in data.MNIST_FILES.items():
        shape = (n if name.startswith("train") else m, *shape[1:])
        arrays[name] = rng.randint(0, 10 if len(shape) == 1 else 256, shape).astype(np.uint8)
        content = gzip.compress(idx(arrays[name]))
        (folder / "mnist" / f"{name}.gz").write_bytes(content)
        expected[name] = (len(content), hashlib.md5(content).hexdigest(), shape)
    return expected, arrays


def write_mnist(folder):
    """An uncompressed MNIST of full size: zeros, which take no room on most disks, but for the first image and label."""
    target = folder / "mnist"
    target.mkdir()
    for name, (_, _, shape) in data.MNIST_FILES.items():
        with (target / name).open("wb") as file:
            file.write(bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + b"\x07")
            file.truncate(4 + 4 * len(shape) + int(np.prod(shape)))
    return target


def write_cifar(folder):
    """A CIFAR-10 of full size; image k of file k has pixels of its own and the label k + 1, the rest is zero."""
    target = folder / "cifar-10-batches-bin"
    target.mkdir()
    pixels = np.random.RandomState(0).randint(0, 256, (6, 3, 32, 32)).astype(np.uint8)
    for k, name in enumerate(data.CIFAR_FILES):
        with (target / name).open("wb") as file:
            file.seek(k * 3073)
            file.write(bytes([k + 1]) + pixels[k].tobytes())
            file.truncate(10_000 * 3073)
    return target, pixels


def write_acs(folder, rows=40, packed=True, header=None):
    """A tiny table of incomes."""
    target = folder / "acsincome"
    target.mkdir()
    rng = np.random.RandomState(0)
    table = np.column_stack([rng.randint(1, 90, (rows, 10)), rng.randint(0, 2, rows)])
    text = ",".join(header or (*data.ACS_FEATURES, data.ACS_TARGET)) + "\n"
    text += "".join(",".join(map(str, row)) + "\n" for row in table)
    path = target / ("ny_2018.csv" + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path, table


def test_mnist_is_read_uncompressed(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("FULLCONFORMAL_DATA", str(tmp_path))
    found = data.load_mnist()
    assert found.X.shape == (60_000, 1, 28, 28) and found.X_test.shape == (10_000, 1, 28, 28)
    assert found.X.dtype == np.uint8 and found.y.dtype == np.int64
    for values in (found.X, found.y, found.X_test, found.y_test):
        assert values.ravel()[:3].tolist() == [7, 0, 0] and values.sum() == 7


def test_mnist_is_read_compressed(tmp_path):
    expected, arrays = small_mnist(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(data.mnist_array(tmp_path, name, *expected[name]), array)


def test_files_may_lie_in_the_folder_itself(tmp_path):
    assert len(data.load_mnist(write_mnist(tmp_path)).y) == 60_000


@pytest.mark.parametrize(
    ("name", "size"), [("train-images-idx3-ubyte.gz", 9_912_422), ("train-images-idx3-ubyte", 47_040_016)]
)
def test_a_truncated_mnist_file_is_named_with_both_sizes(tmp_path, name, size):
    path = write_mnist(tmp_path) / name
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(size - 100)
    with pytest.raises(ValueError, match=rf"{name} is truncated: expected {size:,} bytes, found {size - 100:,};"):
        data.load_mnist(tmp_path)


def test_a_corrupted_mnist_file_fails_its_checksum(tmp_path):
    path = write_mnist(tmp_path) / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(bytes(4542))
    with pytest.raises(ValueError, match=r"t10k-labels.*corrupted: expected MD5 [0-9a-f]{32}, found [0-9a-f]{32}"):
        data.load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG....", "not an idx file of bytes: expected the first bytes 00 00 08, found 89 50 4e"),
        (b"", "found none"),
        (bytes([0, 0, 8, 3, 0, 0]), "truncated: expected 16 bytes of header, found 6"),
        (idx(np.zeros((2, 5, 5), np.uint8)), r"shape \(2, 5, 5\), expected \(60000, 28, 28\); is it another data set"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, content, message):
    (write_mnist(tmp_path) / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load_mnist(tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path):
    labels = np.zeros(60_000, np.uint8)
    labels[2] = 77
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(ValueError, match="label 77, expected 0 to 9"):
        data.load_mnist(tmp_path)


def test_cifar_is_read_in_order(tmp_path):
    _, pixels = write_cifar(tmp_path)
    found = data.load_cifar10(tmp_path)
    assert found.X.shape == (50_000, 3, 32, 32) and found.X_test.shape == (10_000, 3, 32, 32)
    at = 10_000 * np.arange(5) + np.arange(5)
    np.testing.assert_array_equal(np.flatnonzero(found.y), at)
    np.testing.assert_array_equal(found.y[at], np.arange(1, 6))
    np.testing.assert_array_equal(found.X[at], pixels[:5])
    np.testing.assert_array_equal(found.X_test[5], pixels[5])
    assert found.y_test[5] == 6 and found.classes[3] == "cat"


def test_truncated_and_corrupted_cifar_files_are_refused(tmp_path):
    target, _ = write_cifar(tmp_path)
    path = target / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    with pytest.raises(ValueError, match=r"data_batch_3.bin is truncated: expected 30,730,000 bytes, found 5,000"):
        data.load_cifar10(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="too long: expected 30,730,000 bytes, found 30,730,001"):
        data.load_cifar10(tmp_path)
    path.write_bytes(whole[: 2 * 3073] + b"\xff" + whole[2 * 3073 + 1 :])
    with pytest.raises(ValueError, match="corrupted: image 2 has label 255"):
        data.load_cifar10(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_incomes_are_split_and_say_what_they_lack(tmp_path, packed):
    _, table = write_acs(tmp_path, packed=packed)
    found = data.load_acsincome(tmp_path)
    assert found.X.shape == (36, 10) and found.X_test.shape == (4, 10)
    assert found.note == "40 of the 103,021 rows" and found.note in str(found)
    rows = np.vstack([np.column_stack([found.X, found.y]), np.column_stack([found.X_test, found.y_test])])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, table.astype(float)))
    np.testing.assert_array_equal(found.X, data.load_acsincome(tmp_path, random_state=0).X)
    assert not np.array_equal(found.X, data.load_acsincome(tmp_path, random_state=1).X)
    with pytest.raises(ValueError, match=r"test_size=1\.5"):
        data.load_acsincome(tmp_path, test_size=1.5)


def test_corrupted_tables_are_refused(tmp_path):
    path, _ = write_acs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"ny_2018.csv.gz is not a complete gzip file"):
        data.load_acsincome(tmp_path)
    lines = gzip.decompress(whole).decode().splitlines()
    for changed, message in [
        ([*lines[:5], "1,2,x,4,5,6,7,8,9,10,1"], r"corrupted: could not convert string 'x' .* row 4"),
        ([*lines[:5], "1,2,3"], "corrupted: the number of columns changed from 11 to 3 at row 5"),
        ([*lines[:5], "1,2,3,4,5,6,7,8,9,10,2"], "data row 4 has a label that is neither 0 nor 1"),
        ([lines[0].replace("WKHP", "HOURS"), *lines[1:]], "lacks the column WKHP; its first line is 'AGEP"),
        (lines[:1], "truncated: it has a header and no rows"),
        ([], "lacks the column AGEP"),
    ]:
        path.write_bytes(gzip.compress("\n".join(changed).encode()))
        with pytest.raises(ValueError, match=message):
            data.load_acsincome(tmp_path)


@pytest.mark.parametrize("load", [data.load_mnist, data.load_cifar10, data.load_acsincome])
def test_for_absent_files_the_error_says_where_to_get_them(tmp_path, monkeypatch, load):
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Put .* FOLDER/.* --download"):
        load(tmp_path)
    monkeypatch.delenv("FULLCONFORMAL_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="folder=, or set the environment variable FULLCONFORMAL_DATA"):
        load()


def test_digits_and_synthetic_points():
    found = data.load_digits()
    assert found.X.max() == 1 and np.bincount(found.y_test).min() >= 48
    made = data.make_synthetic(300, 7, 50, random_state=3)
    assert made.X.shape == (300, 7) and made.X_test.shape == (50, 7) and set(made.y) == {0, 1}
    np.testing.assert_array_equal(made.X, data.make_synthetic(300, 7, 50, random_state=3).X)


# Downloads, from file:// addresses --------------------------------------------------------------------------------------


def test_mnist_is_downloaded_and_checked(tmp_path):
    expected, _ = small_mnist(tmp_path)
    url, to, partial = (tmp_path / "mnist").as_uri() + "/", tmp_path / "to", tmp_path / "partial"
    to.mkdir()
    partial.mkdir()
    data.fetch_mnist(url, partial, to, expected)
    assert {path.name for path in to.iterdir()} == {f"{name}.gz" for name in expected} and not list(partial.iterdir())
    path = to / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    source = tmp_path / "mnist" / path.name
    source.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(ValueError, match="corrupted: expected MD5"):
        data.fetch_mnist(url, partial, to, expected)
    # The files before it were checked and stay; the corrupted one does not.
    assert {path.name for path in to.iterdir()} == {f"{name}.gz" for name in expected} - {path.name}
    with pytest.raises(ValueError, match=r"train-images.*corrupted: expected MD5 f68b3c2dcbeaaa9fbdd348bbdeb94873"):
        data.download("mnist", tmp_path / "again", {"mnist": url})
    assert list((tmp_path / "again" / "mnist").iterdir()) == []


def test_cifar_is_downloaded_as_an_archive(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for k, name in enumerate(data.CIFAR_FILES):
        (folder / name).write_bytes(bytes([k]) * 3073)
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-bin")
    to, partial = tmp_path / "to" / "cifar-10-batches-bin", tmp_path / "partial"
    with pytest.raises(ValueError, match="expected MD5 c32a1d4ab5d03f1284b67883e8d87530"):
        data.download("cifar10", tmp_path / "to", {"cifar10": archive.as_uri()})
    assert list(to.iterdir()) == []
    partial.mkdir()
    data.fetch_cifar10(archive.as_uri(), partial, to, hashlib.md5(archive.read_bytes()).hexdigest())
    for name in data.CIFAR_FILES:
        assert (to / name).read_bytes() == (folder / name).read_bytes()


def write_people(path, rows):
    """The Census Bureau's person file, with the columns that are needed."""
    header = ["SERIALNO", *data.ACS_FEATURES, "PINCP", "PWGTP"]
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("psam_p36.csv", "\n".join(",".join(map(str, row)) for row in [header, *rows]))
    return {"acsincome": path.as_uri()}


def test_incomes_are_made_from_the_person_file(tmp_path):
    good = [1, 40, 1, 16, 1, 4110, 36, 0, 38, 2, 1, 60000, 10]
    rows = [
        good,
        [*good[:-2], 50000, 10],
        [*good[:1], 16, *good[2:]],
        [*good[:-2], 100, 10],
        [*good[:8], "", *good[9:]],
    ]
    rows += [[*good[:2], "", *good[3:]]]  # a class of worker that was not given is kept, as −1
    to = tmp_path / "to"
    with pytest.raises(ValueError, match="has 3 rows of ACSIncome, expected 103,021; nothing was written"):
        data.download("acsincome", to, write_people(tmp_path / "few.zip", rows))
    assert list((to / "acsincome").iterdir()) == []
    data.download("acsincome", to, write_people(tmp_path / "all.zip", [*rows, *[good] * (103_021 - 3)]))
    assert [path.name for path in (to / "acsincome").iterdir()] == ["ny_2018.csv.gz"]
    found = data.load_acsincome(to)
    every = np.vstack([np.column_stack([found.X, found.y]), np.column_stack([found.X_test, found.y_test])])
    assert len(every) == 103_021 and found.note == ""
    assert (every[:, -1] == 0).sum() == 1 and sorted(every[:, 1])[:2] == [-1, 1]


def test_errors_of_downloads(tmp_path):
    with pytest.raises(ValueError, match="name='imagenet' is unknown; allowed: 'mnist'"):
        data.download("imagenet", tmp_path)
    with pytest.raises(OSError, match="could not be downloaded"):
        data.download("cifar10", tmp_path, {"cifar10": (tmp_path / "nowhere").as_uri()})


def test_the_command_describes_what_a_folder_holds(tmp_path):
    write_cifar(tmp_path)
    result = CliRunner().invoke(main, ["data", "cifar10", "--folder", str(tmp_path)])
    assert result.exit_code == 0 and "50,000 training and 10,000 test points of 3×32×32 uint8" in result.output
    result = CliRunner().invoke(main, ["data", "mnist", "--folder", str(tmp_path)])
    assert result.exit_code == 2 and "does not exist. Put" in result.output
    assert "1,000 training" in CliRunner().invoke(main, ["data", "synthetic"]).output
    assert CliRunner().invoke(main, ["data", "digits", "--download"]).exit_code == 2


def test_read_bytes_of_a_gzip_file_with_another_content(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(io.BytesIO(b"not packed").getvalue())
    with pytest.raises(ValueError, match="not a complete gzip file"):
        data.read_idx(path)
