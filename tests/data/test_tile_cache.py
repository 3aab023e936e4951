import os

import h5py
import numpy as np
import pytest
from dataset_toys import grids, idx, put, small_mnist

from neondist.data import MNIST, cache
from neondist.data.cache import cache_path, check_template
from neondist.data.datasets import mnist
from neondist.errors import ConfigError, DataError

ONE = grids(1, 1, 1)[0]
NAME = "mnist_{rank}_of_{size}.h5"


class Setup:
    """A small MNIST folder, a cache, and how often the files were decoded."""

    def __init__(self, tmp_path, monkeypatch):
        self.folder, self.cache = tmp_path / "data", tmp_path / "cache"
        self.made = small_mnist(self.folder)
        self.decoded = 0
        decode = MNIST.decode

        def counted(data, grid):
            self.decoded += 1
            return decode(data, grid)

        monkeypatch.setattr(MNIST, "decode", counted)

    def load(self, grid=ONE, name=NAME):
        """Load through the cache, compare with a load without one; return whether the files were decoded."""
        before = self.decoded
        found = MNIST(self.folder, serialized_path=str(self.cache / name)).load(grid)
        rebuilt = self.decoded - before
        for mine, plain in zip(found, MNIST(self.folder).load(grid), strict=True):
            np.testing.assert_array_equal(mine.tiles, plain.tiles)
            np.testing.assert_array_equal(mine.labels, plain.labels)
            assert (mine.tiles.dtype, mine.labels.dtype) == (plain.tiles.dtype, plain.labels.dtype)
        return bool(rebuilt)

    def file(self, rank=0, size=1):
        return self.cache / NAME.format(rank=rank, size=size)


@pytest.fixture
def data(tmp_path, monkeypatch):
    return Setup(tmp_path, monkeypatch)


def test_the_second_run_reads_the_cache(data):
    assert data.load()
    assert not data.load()
    assert [p.name for p in data.cache.iterdir()] == ["mnist_0_of_1.h5"]


def test_without_it_nothing_is_written(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.folder)
    before = sorted(tmp_path.rglob("*"))
    MNIST(".").load(ONE)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (1, 1, 30)])
def test_every_rank_has_its_own_file_with_its_tile_only(data, shape):
    ranks = grids(*shape)
    assert all(data.load(grid) for grid in ranks)
    assert not any(data.load(grid) for grid in ranks)
    assert len(list(data.cache.iterdir())) == len(ranks)
    for grid in ranks:
        with h5py.File(data.file(grid.rank, grid.size)) as file:
            assert file["train/images"].shape == (50, *grid.tile_box((28, 28)).shape, 1)


def test_rebuilt_when_the_source_changes(data):
    data.load()
    labels = data.made["train", "labels"]
    path = data.folder / "train-labels-idx1-ubyte.gz"
    put(path, idx(np.roll(labels, 1)))
    assert data.load()
    assert not data.load()


def test_rebuilt_when_only_bytes_changed(tmp_path, monkeypatch):
    data = Setup(tmp_path, monkeypatch)
    small_mnist(data.folder, suffix="")
    for path in data.folder.glob("*.gz"):
        path.unlink()
    data.load()
    path = data.folder / "train-images-idx3-ubyte"
    facts = path.stat()
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert data.load()


def test_rebuilt_when_a_source_was_touched(data):
    data.load()
    os.utime(data.folder / "t10k-labels-idx1-ubyte.gz", ns=(1, 1))
    assert data.load()


def test_rebuilt_when_the_grid_changes(data):
    wide, tall, copies = grids(1, 1, 2)[1], grids(1, 2, 1)[1], grids(2, 1, 1)[1]
    assert [data.load(grid) for grid in (wide, wide, tall, tall, copies, wide)] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert data.load(ONE, "one_{rank}.h5")
    assert data.load(grids(2, 1, 1)[0], "one_{rank}.h5"), "the same tile, but of another number of ranks"


def test_rebuilt_when_the_format_changes(data, monkeypatch):
    data.load()
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert data.load()


def test_a_cache_of_another_data_set_is_not_taken(data):
    sources = list(data.folder.iterdir())
    assert cache.fingerprint("A", sources, ONE, (28, 28)) != cache.fingerprint("B", sources, ONE, (28, 28))
    left = grids(1, 1, 2)[0]
    assert left.tile_box((28, 28)) == left.tile_box((28, 27))
    assert cache.fingerprint("A", sources, left, (28, 28)) != cache.fingerprint("A", sources, left, (28, 27))


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def _empty(path):
    path.write_bytes(b"")


def _text(path):
    path.write_text("not HDF5")


def _cell(path):
    with h5py.File(path, "r+") as file:
        file["test/images"][3, 4, 5] ^= 1


def _label(path):
    with h5py.File(path, "r+") as file:
        file["train/targets"][3] += 1


def _no_array(path):
    with h5py.File(path, "r+") as file:
        del file["test/targets"]


def _shape(path):
    with h5py.File(path, "r+") as file:
        images = file["test/images"][()]
        del file["test/images"]
        file["test/images"] = images.reshape(images.shape[0], 14, 56, 1)


def _no_sums(path):
    with h5py.File(path, "r+") as file:
        del file.attrs["checksums"]


def _bytes(path):
    raw = bytearray(path.read_bytes())
    raw[: len(raw) // 2 : 97] = bytes(len(range(0, len(raw) // 2, 97)))
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [_cut, _empty, _text, _cell, _label, _no_array, _shape, _no_sums, _bytes])
def test_rebuilt_when_damaged(data, damage):
    data.load()
    damage(data.file())
    assert data.load()
    assert not data.load()


def _passwords(path):
    path.write_text("root:x:0:0\n")


def _other_arrays(path):
    with h5py.File(path, "w") as file:
        file["precious"] = np.arange(5)


@pytest.mark.parametrize(("name", "make"), [("passwd", _passwords), ("mine.h5", _other_arrays)])
def test_a_file_of_another_kind_is_never_replaced(data, tmp_path, name, make):
    make(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(DataError, match=f"{name} exists but is not a neondist cache, so it is not replaced"):
        MNIST(data.folder, serialized_path=str(tmp_path / name)).load(ONE)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_regular_file_is_neither_opened_nor_replaced(data, tmp_path):
    """A device would be, by a rename, for whoever may write to /dev."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe exists but is not a regular file"):
        MNIST(data.folder, serialized_path=str(tmp_path / "pipe")).load(ONE)
    assert (tmp_path / "pipe").is_fifo()


def test_text_of_variable_length_is_not_read(data):
    """One wrong byte in it makes libhdf5 hang."""
    data.load()
    with h5py.File(data.file(), "r+") as file:
        file.attrs["stamp"] = file.attrs["stamp"].decode()
    assert data.load()


def test_a_good_cache_is_not_written_again(data):
    data.load()
    before = data.file().stat().st_mtime_ns, data.file().stat().st_ino
    data.load()
    assert before == (data.file().stat().st_mtime_ns, data.file().stat().st_ino)


def test_a_place_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "a_{rank}.h5", data.folder.parent / "data"):
        with pytest.raises(
            DataError, match=r"serialized_path: .* cannot be written .*; choose a writable path"
        ) as caught:
            MNIST(data.folder, serialized_path=str(place)).load(ONE)
        assert str(place.parent) in str(caught.value)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(data, monkeypatch):
    data.load()
    old = data.file().read_bytes()
    put(data.folder / "train-labels-idx1-ubyte.gz", idx(np.zeros(50)))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        data.load()
    assert data.file().read_bytes() == old
    assert [p.name for p in data.cache.iterdir()] == ["mnist_0_of_1.h5"]


def test_a_missing_source_is_an_error_in_spite_of_a_cache(data):
    data.load()
    (data.folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="has no t10k-labels"):
        data.load()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("a_{rank}_{host}.h5", r"unknown field \{host\} .* only \{rank\} and \{size\} are allowed"),
        ("a_{}.h5", r"unknown field \{\}"),
        ("a_{0}.h5", r"unknown field \{0\}"),
        ("a_{rank.real}.h5", r"unknown field \{rank.real\}"),
        ("a_{rank[0]}.h5", r"unknown field \{rank\[0\]\}"),
        ("a_{rank", "is not a template"),
        ("a_}.h5", "is not a template"),
        ("a_{rank:q}.h5", "is not a template"),
        ("a_{rank:{width}}.h5", "is not a template"),
        ("a_{rank:99999999999}.h5", "is not a template"),
        ("a_{rank!r}.h5", "is not a template"),
        ("a_\0{rank}.h5", "is not a template"),
        ("", "is not a path"),
        (7, "got 7"),
        (True, "got True"),
        (["a"], "got a list"),
    ],
)
def test_templates_that_cannot_work(template, says):
    with pytest.raises(ConfigError, match=f"serialized_path: .*{says}"):
        MNIST(serialized_path=template)


def test_several_ranks_need_the_rank_in_the_name(tmp_path):
    template = str(tmp_path / "mnist_{size}.h5")
    assert cache_path(template, ONE) == tmp_path / "mnist_1.h5"
    for shape in ((1, 1, 2), (2, 1, 1)):
        with pytest.raises(ConfigError, match=r"has no \{rank\}, but each of the 2 ranks needs a file"):
            MNIST(serialized_path=template).load(grids(*shape)[0])


def test_names_are_filled_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_template(tmp_path / "a_{rank}")
    grid = grids(1, 2, 3)[4]
    assert cache_path("~/c/{rank:03d}_of_{size}.h5", grid) == tmp_path / "c" / "004_of_6.h5"


def test_empty_arrays_are_kept(tmp_path):
    arrays = {"a/b": np.empty((5, 0, 3), np.uint8), "c": np.arange(3.0)}
    cache.write(tmp_path / "x.h5", "stamp", arrays)
    found = cache.read(tmp_path / "x.h5", "stamp")
    assert found["a/b"].shape == (5, 0, 3)
    assert found["a/b"].dtype == np.uint8
    assert found["c"].tolist() == [0, 1, 2]
    assert cache.read(tmp_path / "x.h5", "other") is None


def test_the_embedded_digits_can_be_cached(tmp_path):
    data = MNIST(serialized_path=tmp_path / "x.h5")
    data.open(ONE)
    assert (tmp_path / "x.h5").stat().st_size > 9_000_000
    assert data.folder == mnist.EMBEDDED


def test_a_cache_of_another_user_is_refused(data, monkeypatch):
    """Its fingerprint is no secret: anybody can write a file that has it."""
    data.load()
    if os.geteuid() == 0:
        os.chown(data.file(), 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        DataError, match=r"belongs to another user \(uid \d+\), so it is not used; choose a folder of your own"
    ):
        data.load()


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_cache_that_others_may_write_to_is_made_again(data, mode):
    data.load()
    assert data.file().stat().st_mode & 0o777 == 0o600
    data.file().chmod(mode)
    before = data.file().stat().st_ino
    data.load()
    assert data.file().stat().st_ino != before
    assert data.file().stat().st_mode & 0o777 == 0o600


def test_zeros_in_a_cache_are_found(data):
    data.load()
    raw = bytearray(data.file().read_bytes())
    at = len(raw) // 2
    raw[at : at + 4096] = bytes(4096)
    data.file().write_bytes(raw)
    assert data.load(), "zeros were believed"
