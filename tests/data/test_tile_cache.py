import os

import h5py
import numpy as np
import pytest
from small_datasets import encode_idx, make_grids, write_bytes, write_mnist

from neondist.data import MNIST, cache
from neondist.data.cache import check_path_template, resolve_cache_path
from neondist.data.datasets import mnist
from neondist.errors import ConfigError, DataError

SERIAL_GRID = make_grids(1, 1, 1)[0]
NAME = "mnist_{rank}_of_{size}.h5"


class CachedMNIST:
    """Small MNIST folder with a cache, and the number of times it was decoded."""

    def __init__(self, tmp_path, monkeypatch):
        self.folder, self.cache = tmp_path / "data", tmp_path / "cache"
        self.arrays = write_mnist(self.folder)
        self.decode_count = 0
        decode = MNIST.decode

        def counting_decode(dataset, grid):
            self.decode_count += 1
            return decode(dataset, grid)

        monkeypatch.setattr(MNIST, "decode", counting_decode)

    def load(self, grid=SERIAL_GRID, name=NAME):
        """Load through the cache and compare with a load without it; return whether the files were decoded."""
        count_before = self.decode_count
        splits = MNIST(self.folder, serialized_path=str(self.cache / name)).open_splits(grid)
        rebuilt = self.decode_count - count_before
        for split, expected in zip(splits, MNIST(self.folder).open_splits(grid), strict=True):
            np.testing.assert_array_equal(split.tiles, expected.tiles)
            np.testing.assert_array_equal(split.labels, expected.labels)
            assert (split.tiles.dtype, split.labels.dtype) == (expected.tiles.dtype, expected.labels.dtype)
        return bool(rebuilt)

    def file(self, rank=0, size=1):
        return self.cache / NAME.format(rank=rank, size=size)


@pytest.fixture
def cached_mnist(tmp_path, monkeypatch):
    return CachedMNIST(tmp_path, monkeypatch)


def test_second_run_reads_the_cache(cached_mnist):
    assert cached_mnist.load()
    assert not cached_mnist.load()
    assert [p.name for p in cached_mnist.cache.iterdir()] == ["mnist_0_of_1.h5"]


def test_nothing_is_written_without_cache(cached_mnist, tmp_path, monkeypatch):
    monkeypatch.chdir(cached_mnist.folder)
    before = sorted(tmp_path.rglob("*"))
    MNIST(".").open_splits(SERIAL_GRID)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (1, 1, 30)])
def test_each_rank_caches_its_tile(cached_mnist, shape):
    ranks = make_grids(*shape)
    assert all(cached_mnist.load(grid) for grid in ranks)
    assert not any(cached_mnist.load(grid) for grid in ranks)
    assert len(list(cached_mnist.cache.iterdir())) == len(ranks)
    for grid in ranks:
        with h5py.File(cached_mnist.file(grid.rank, grid.size)) as file:
            assert file["train/images"].shape == (50, *grid.tile_box((28, 28)).shape, 1)


def test_rebuilt_when_the_source_changes(cached_mnist):
    cached_mnist.load()
    labels = cached_mnist.arrays["train", "labels"]
    path = cached_mnist.folder / "train-labels-idx1-ubyte.gz"
    write_bytes(path, encode_idx(np.roll(labels, 1)))
    assert cached_mnist.load()
    assert not cached_mnist.load()


def test_rebuilt_when_only_bytes_change(tmp_path, monkeypatch):
    cached_mnist = CachedMNIST(tmp_path, monkeypatch)
    write_mnist(cached_mnist.folder, suffix="")
    for path in cached_mnist.folder.glob("*.gz"):
        path.unlink()
    cached_mnist.load()
    path = cached_mnist.folder / "train-images-idx3-ubyte"
    status = path.stat()
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_mnist.load()


def test_rebuilt_when_a_source_is_touched(cached_mnist):
    cached_mnist.load()
    os.utime(cached_mnist.folder / "t10k-labels-idx1-ubyte.gz", ns=(1, 1))
    assert cached_mnist.load()


def test_rebuilt_when_the_grid_changes(cached_mnist):
    wide, tall, replicated = make_grids(1, 1, 2)[1], make_grids(1, 2, 1)[1], make_grids(2, 1, 1)[1]
    assert [cached_mnist.load(grid) for grid in (wide, wide, tall, tall, replicated, wide)] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    assert cached_mnist.load(SERIAL_GRID, "one_{rank}.h5")
    assert cached_mnist.load(make_grids(2, 1, 1)[0], "one_{rank}.h5"), "the same tile, but another number of ranks"


def test_rebuilt_when_the_format_changes(cached_mnist, monkeypatch):
    cached_mnist.load()
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    assert cached_mnist.load()


def test_fingerprint_depends_on_dataset_and_extent(cached_mnist):
    sources = list(cached_mnist.folder.iterdir())
    assert cache.cache_fingerprint("A", sources, SERIAL_GRID, (28, 28)) != cache.cache_fingerprint(
        "B", sources, SERIAL_GRID, (28, 28)
    )
    left = make_grids(1, 1, 2)[0]
    assert left.tile_box((28, 28)) == left.tile_box((28, 27))
    assert cache.cache_fingerprint("A", sources, left, (28, 28)) != cache.cache_fingerprint(
        "A", sources, left, (28, 27)
    )


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def clear(path):
    path.write_bytes(b"")


def write_text(path):
    path.write_text("not HDF5")


def change_pixel(path):
    with h5py.File(path, "r+") as file:
        file["test/images"][3, 4, 5] ^= 1


def change_label(path):
    with h5py.File(path, "r+") as file:
        file["train/targets"][3] += 1


def delete_array(path):
    with h5py.File(path, "r+") as file:
        del file["test/targets"]


def reshape_array(path):
    with h5py.File(path, "r+") as file:
        images = file["test/images"][()]
        del file["test/images"]
        file["test/images"] = images.reshape(images.shape[0], 14, 56, 1)


def delete_checksums(path):
    with h5py.File(path, "r+") as file:
        del file.attrs["checksums"]


def overwrite_bytes(path):
    raw = bytearray(path.read_bytes())
    raw[: len(raw) // 2 : 97] = bytes(len(range(0, len(raw) // 2, 97)))
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        clear,
        write_text,
        change_pixel,
        change_label,
        delete_array,
        reshape_array,
        delete_checksums,
        overwrite_bytes,
    ],
)
def test_rebuilt_when_damaged(cached_mnist, damage):
    cached_mnist.load()
    damage(cached_mnist.file())
    assert cached_mnist.load()
    assert not cached_mnist.load()


def write_passwords(path):
    path.write_text("root:x:0:0\n")


def write_other_arrays(path):
    with h5py.File(path, "w") as file:
        file["precious"] = np.arange(5)


@pytest.mark.parametrize(("name", "make"), [("passwd", write_passwords), ("mine.h5", write_other_arrays)])
def test_other_files_are_never_replaced(cached_mnist, tmp_path, name, make):
    make(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(DataError, match=f"{name} exists but is not a neondist cache, so it is not replaced"):
        MNIST(cached_mnist.folder, serialized_path=str(tmp_path / name)).open_splits(SERIAL_GRID)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_refused(cached_mnist, tmp_path):
    """Refuse special files: a rename would replace a device for users who can write to /dev."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe exists but is not a regular file"):
        MNIST(cached_mnist.folder, serialized_path=str(tmp_path / "pipe")).open_splits(SERIAL_GRID)
    assert (tmp_path / "pipe").is_fifo()


def test_variable_length_text_is_not_read(cached_mnist):
    """Ignore variable-length text, in which a single wrong byte makes libhdf5 hang."""
    cached_mnist.load()
    with h5py.File(cached_mnist.file(), "r+") as file:
        file.attrs["stamp"] = file.attrs["stamp"].decode()
    assert cached_mnist.load()


def test_valid_cache_is_not_rewritten(cached_mnist):
    cached_mnist.load()
    before = cached_mnist.file().stat().st_mtime_ns, cached_mnist.file().stat().st_ino
    cached_mnist.load()
    assert before == (cached_mnist.file().stat().st_mtime_ns, cached_mnist.file().stat().st_ino)


def test_unwritable_path(cached_mnist, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a_{rank}.h5", cached_mnist.folder.parent / "data"):
        with pytest.raises(
            DataError, match=r"serialized_path: .* cannot be written .*; choose a writable path"
        ) as caught:
            MNIST(cached_mnist.folder, serialized_path=str(path)).open_splits(SERIAL_GRID)
        assert str(path.parent) in str(caught.value)
    assert not list(tmp_path.rglob("*.tmp"))


def test_failed_write_keeps_the_old_cache(cached_mnist, monkeypatch):
    cached_mnist.load()
    old_content = cached_mnist.file().read_bytes()
    write_bytes(cached_mnist.folder / "train-labels-idx1-ubyte.gz", encode_idx(np.zeros(50)))

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match="No space left"):
        cached_mnist.load()
    assert cached_mnist.file().read_bytes() == old_content
    assert [p.name for p in cached_mnist.cache.iterdir()] == ["mnist_0_of_1.h5"]


def test_missing_source_is_an_error_despite_the_cache(cached_mnist):
    cached_mnist.load()
    (cached_mnist.folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="has no t10k-labels"):
        cached_mnist.load()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a_{rank}_{host}.h5", r"unknown field \{host\} .* only \{rank\} and \{size\} are valid"),
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
def test_invalid_templates(template, message):
    with pytest.raises(ConfigError, match=f"serialized_path: .*{message}"):
        MNIST(serialized_path=template)


def test_template_requires_the_rank(tmp_path):
    template = str(tmp_path / "mnist_{size}.h5")
    assert resolve_cache_path(template, SERIAL_GRID) == tmp_path / "mnist_1.h5"
    for shape in ((1, 1, 2), (2, 1, 1)):
        with pytest.raises(ConfigError, match=r"has no \{rank\}, but each of the 2 ranks needs a file"):
            MNIST(serialized_path=template).open_splits(make_grids(*shape)[0])


def test_template_fields(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_path_template(tmp_path / "a_{rank}")
    grid = make_grids(1, 2, 3)[4]
    assert resolve_cache_path("~/c/{rank:03d}_of_{size}.h5", grid) == tmp_path / "c" / "004_of_6.h5"


def test_empty_arrays_are_kept(tmp_path):
    arrays = {"a/b": np.empty((5, 0, 3), np.uint8), "c": np.arange(3.0)}
    cache.write_cache(tmp_path / "x.h5", "stamp", arrays)
    cached = cache.read_cache(tmp_path / "x.h5", "stamp")
    assert cached["a/b"].shape == (5, 0, 3)
    assert cached["a/b"].dtype == np.uint8
    assert cached["c"].tolist() == [0, 1, 2]
    assert cache.read_cache(tmp_path / "x.h5", "other") is None


def test_embedded_digits_can_be_cached(tmp_path):
    data = MNIST(serialized_path=tmp_path / "x.h5")
    data.open(SERIAL_GRID)
    assert (tmp_path / "x.h5").stat().st_size > 9_000_000
    assert data.folder == mnist.EMBEDDED_FOLDER


def test_cache_of_another_user_is_refused(cached_mnist, monkeypatch):
    """Refuse caches of other users, who can write a file with the expected fingerprint."""
    cached_mnist.load()
    if os.geteuid() == 0:
        os.chown(cached_mnist.file(), 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        DataError, match=r"belongs to another user \(uid \d+\), so it is not used; choose a folder of your own"
    ):
        cached_mnist.load()


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_writable_cache_is_rebuilt(cached_mnist, mode):
    cached_mnist.load()
    assert cached_mnist.file().stat().st_mode & 0o777 == 0o600
    cached_mnist.file().chmod(mode)
    before = cached_mnist.file().stat().st_ino
    cached_mnist.load()
    assert cached_mnist.file().stat().st_ino != before
    assert cached_mnist.file().stat().st_mode & 0o777 == 0o600


def test_zeroed_cache_is_detected(cached_mnist):
    cached_mnist.load()
    raw = bytearray(cached_mnist.file().read_bytes())
    offset = len(raw) // 2
    raw[offset : offset + 4096] = bytes(4096)
    cached_mnist.file().write_bytes(raw)
    assert cached_mnist.load(), "zeros were accepted"
