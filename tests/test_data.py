"""The loaders: what they read, and what they say of files that are absent, cut short, spoilt or something else."""

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
from fullconformal.data import images, publishers, tables


def idx(array):
    """An array of bytes as an idx file, written from the format's description."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, monkeypatch, packed=True, n=7, m=3):
    """A tiny MNIST; its sizes and checksums take the place of the published ones."""
    rng = np.random.RandomState(0)
    target = folder / "mnist"
    target.mkdir()
    known, arrays = {}, {}
    for name, (_, _, shape) in images.MNIST_FILES.items():
        shape = (n if name.startswith("train") else m, *shape[1:])
        arrays[name] = rng.randint(0, 10 if len(shape) == 1 else 256, shape).astype(np.uint8)
        raw = idx(arrays[name])
        content = gzip.compress(raw) if packed else raw
        (target / (name + ".gz" * packed)).write_bytes(content)
        known[name] = (len(content), hashlib.md5(content).hexdigest(), shape)
    monkeypatch.setattr(images, "MNIST_FILES", known)
    return target, arrays


def write_cifar(folder, monkeypatch, k=4):
    """A tiny CIFAR-10 of k images a file."""
    rng = np.random.RandomState(0)
    target = folder / "cifar-10-batches-bin"
    target.mkdir()
    monkeypatch.setattr(images, "CIFAR_IMAGES", k)
    pixels, labels = rng.randint(0, 256, (6, k, 3, 32, 32)), rng.randint(0, 10, (6, k))
    for batch, name in enumerate((*images.CIFAR_TRAIN, "test_batch.bin")):
        records = b"".join(bytes([labels[batch, i]]) + pixels[batch, i].astype(np.uint8).tobytes() for i in range(k))
        (target / name).write_bytes(records)
    return target, pixels, labels


def write_acs(folder, rows=40, packed=True, header=None):
    """A tiny table of incomes."""
    target = folder / "acsincome"
    target.mkdir()
    rng = np.random.RandomState(0)
    table = np.column_stack([rng.randint(1, 90, (rows, 10)), rng.randint(0, 2, rows)])
    text = ",".join(header or (*tables.ACS_FEATURES, tables.ACS_TARGET)) + "\n"
    text += "".join(",".join(map(str, row)) + "\n" for row in table)
    path = target / ("ny_2018.csv" + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path, table


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_packed_and_unpacked(tmp_path, monkeypatch, packed):
    _, arrays = write_mnist(tmp_path, monkeypatch, packed)
    monkeypatch.setenv("FULLCONFORMAL_DATA", str(tmp_path))
    found = data.load_mnist()
    assert found.X.shape == (7, 1, 28, 28) and found.X_test.shape == (3, 1, 28, 28) and found.X.dtype == np.uint8
    np.testing.assert_array_equal(found.X[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(found.y_test, arrays["t10k-labels-idx1-ubyte"])


def test_files_may_lie_in_the_folder_itself(tmp_path, monkeypatch):
    target, _ = write_mnist(tmp_path, monkeypatch)
    assert len(data.load_mnist(target).y) == 7


@pytest.mark.parametrize("packed", [True, False])
def test_a_truncated_mnist_file_is_named_with_both_sizes(tmp_path, monkeypatch, packed):
    target, _ = write_mnist(tmp_path, monkeypatch, packed)
    path = next(target.glob("train-images*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"train-images.* is truncated: expected .* bytes, found") as caught:
        data.load_mnist(tmp_path)
    assert f"{len(whole):,}" in str(caught.value) and f"{len(whole) - 100:,}" in str(caught.value)


def test_a_corrupted_mnist_file_fails_its_checksum(tmp_path, monkeypatch):
    target, _ = write_mnist(tmp_path, monkeypatch)
    path = next(target.glob("t10k-labels*"))
    spoilt = bytearray(path.read_bytes())
    spoilt[-9] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(ValueError, match=r"t10k-labels.*corrupted: expected MD5 [0-9a-f]{32}, found [0-9a-f]{32}"):
        data.load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG....", "no idx file of bytes: expected the first bytes 00 00 08, found 89 50 4e"),
        (b"", "found none"),
        (bytes([0, 0, 8, 3, 0, 0]), "truncated: expected 16 bytes of header, found 6"),
        (idx(np.zeros((2, 5, 5), np.uint8)), r"shape \(2, 5, 5\), expected \(7, 28, 28\); is it another data set"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, monkeypatch, content, message):
    target, _ = write_mnist(tmp_path, monkeypatch, packed=False)
    (target / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load_mnist(tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path, monkeypatch):
    target, arrays = write_mnist(tmp_path, monkeypatch, packed=False)
    labels = arrays["train-labels-idx1-ubyte"].copy()
    labels[2] = 77
    (target / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(ValueError, match="label 77, expected 0 to 9"):
        data.load_mnist(tmp_path)


def test_cifar_is_read_in_order(tmp_path, monkeypatch):
    _, pixels, labels = write_cifar(tmp_path, monkeypatch)
    found = data.load_cifar10(tmp_path)
    np.testing.assert_array_equal(found.X, pixels[:5].reshape(20, 3, 32, 32))
    np.testing.assert_array_equal(found.y, labels[:5].ravel())
    np.testing.assert_array_equal(found.X_test, pixels[5])
    assert found.classes[3] == "cat"


def test_cifar_files_cut_short_or_spoilt_are_refused(tmp_path, monkeypatch):
    target, _, _ = write_cifar(tmp_path, monkeypatch)
    path = target / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000])
    with pytest.raises(ValueError, match=r"data_batch_3.bin is truncated: expected 12,292 bytes, found 5,000"):
        data.load_cifar10(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="too long: expected 12,292 bytes, found 12,293"):
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


def test_spoilt_tables_are_refused(tmp_path):
    path, _ = write_acs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"ny_2018.csv.gz is no complete gzip file"):
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
def test_absent_files_are_told_where_to_get_them(tmp_path, monkeypatch, load):
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


# Fetching, from file:// addresses --------------------------------------------------------------------------------------


def test_mnist_is_fetched_checked_and_loaded(tmp_path, monkeypatch):
    source, _ = write_mnist(tmp_path, monkeypatch)
    monkeypatch.setattr(publishers, "MNIST_FILES", images.MNIST_FILES)
    to = tmp_path / "to"
    data.download("mnist", to, {"mnist": source.as_uri() + "/"})
    assert len(data.load_mnist(to).y) == 7
    path = next(source.glob("t10k-labels*"))
    path.write_bytes(path.read_bytes()[:-1])
    again = tmp_path / "again"
    with pytest.raises(ValueError, match="corrupted: expected MD5"):
        data.download("mnist", again, {"mnist": source.as_uri() + "/"})
    # The files before it were checked and stay; neither the spoilt file nor a partial one does.
    names = {path.name for path in (again / "mnist").iterdir()}
    assert names == {f"{name}.gz" for name in images.MNIST_FILES} - {"t10k-labels-idx1-ubyte.gz"}


def test_cifar_is_fetched_as_an_archive(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch)
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    to = tmp_path / "to"
    with pytest.raises(ValueError, match="expected MD5 c32a1d4ab5d03f1284b67883e8d87530"):
        data.download("cifar10", to, {"cifar10": archive.as_uri()})
    assert list((to / "cifar-10-batches-bin").iterdir()) == []
    monkeypatch.setattr(publishers, "CIFAR_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    data.download("cifar10", to, {"cifar10": archive.as_uri()})
    assert len(data.load_cifar10(to).y) == 20


def test_incomes_are_made_from_the_person_file(tmp_path, monkeypatch):
    header = ["SERIALNO", *tables.ACS_FEATURES, "PINCP", "PWGTP"]
    good = [1, 40, 1, 16, 1, 4110, 36, 0, 38, 2, 1, 60000, 10]
    rows = [
        good,
        [*good[:-2], 50000, 10],
        [*good[:1], 16, *good[2:]],
        [*good[:-2], 100, 10],
        [*good[:8], "", *good[9:]],
    ]
    rows += [[*good[:2], "", *good[3:]]]  # a class of worker that was not given is kept, as −1
    text = "\n".join(",".join(map(str, row)) for row in [header, *rows])
    archive = tmp_path / "csv_pny.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("psam_p36.csv", text)
    to = tmp_path / "to"
    with pytest.raises(ValueError, match="gives 3 rows of ACSIncome, expected 103,021; nothing was written"):
        data.download("acsincome", to, {"acsincome": archive.as_uri()})
    assert list((to / "acsincome").iterdir()) == []
    monkeypatch.setattr(publishers, "ACS_ROWS", 3)
    data.download("acsincome", to, {"acsincome": archive.as_uri()})
    found = data.load_acsincome(to, test_size=0.3)
    every = np.vstack([np.column_stack([found.X, found.y]), np.column_stack([found.X_test, found.y_test])])
    assert sorted(every[:, -1]) == [0, 1, 1] and sorted(every[:, 1]) == [-1, 1, 1]


def test_what_cannot_be_fetched_is_told(tmp_path):
    with pytest.raises(ValueError, match="name='imagenet' is unknown; allowed: 'mnist'"):
        data.download("imagenet", tmp_path)
    with pytest.raises(OSError, match="could not be fetched"):
        data.download("cifar10", tmp_path, {"cifar10": (tmp_path / "nowhere").as_uri()})


def test_the_command_tells_what_a_folder_holds(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch)
    result = CliRunner().invoke(main, ["data", "cifar10", "--folder", str(tmp_path)])
    assert result.exit_code == 0 and "20 training and 4 test points of 3×32×32 uint8" in result.output
    result = CliRunner().invoke(main, ["data", "mnist", "--folder", str(tmp_path)])
    assert result.exit_code == 2 and "does not exist. Put" in result.output
    assert "1,000 training" in CliRunner().invoke(main, ["data", "synthetic"]).output
    assert CliRunner().invoke(main, ["data", "digits", "--download"]).exit_code == 2


def test_read_bytes_of_a_gzip_file_with_another_content(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(io.BytesIO(b"not packed").getvalue())
    with pytest.raises(ValueError, match="no complete gzip file"):
        images.read_idx(path)
