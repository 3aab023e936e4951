"""Boxes of files, and files made box by box by any number of ranks."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import neondist as nd

SHAPES = {"YXC": (61, 47, 3), "ZYXC": (9, 31, 22, 1), "NYXC": (3, 41, 37, 2)}
SUFFIXES = [".npy", ".h5", ".nc", ".tif", ".zarr", ".ome.zarr", ".nii", ".nii.gz"]


def cells(axes, dtype="float32", seed=0):
    return (np.random.default_rng(seed).random(SHAPES[axes]) * 200).astype(dtype)


def boxes(shape, counts):
    """Return disjoint boxes that cover an array, uneven ones."""
    spans = []
    for n, parts in zip(shape, counts, strict=False):
        spans.append([nd.split(n, min(parts, n), part) for part in range(min(parts, n))])
    spans += [[(0, n)] for n in shape[len(counts) :]]
    found = [()]
    for along in spans:
        found = [(*box, pair) for box in found for pair in along]
    return found


def cut(array, box):
    return array[tuple(slice(lo, hi) for lo, hi in box)]


def contents(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.relative_to(path): file.read_bytes() for file in files if file.is_file()}


def write(path, array, axes, ranks=1, counts=(3, 2, 2), at_write=lambda: None, **options):
    def rank(grid):
        with nd.create_sink(path, array.shape, array.dtype, axes, grid=grid, **options) as sink:
            at_write()
            for box in boxes(array.shape, counts)[grid.rank :: grid.size]:
                sink.write(box, cut(array, box))
            sink.commit()

    nd.loopback.run(ranks, lambda world: rank(nd.ProcessGrid(world)))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("axes", SHAPES)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "uint8"), (3, "float32"), (4, "int16")])
@pytest.mark.long
def test_ranks_write_a_file_and_boxes_of_it_are_read(tmp_path, suffix, axes, ranks, dtype):
    array, path = cells(axes, dtype), tmp_path / f"out{suffix}"
    if suffix in (".ome.zarr", ".nii", ".nii.gz"):
        axes = axes.replace("N", "T")
    write(path, array, axes, ranks)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with nd.open_source(path, axes=axes if suffix == ".npy" else None) as source:
        assert (source.shape, source.dtype, source.axes) == (array.shape, array.dtype, axes)
        for box in [*boxes(array.shape, (2, 3, 2)), [(n // 3, n // 3 + 1) for n in array.shape]]:
            found = source.read(box)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, cut(array, box))
        np.testing.assert_array_equal(source.read(nd.Box.of(array.shape)), array)
        slices = [slice(1, 3), *[slice(None)] * (array.ndim - 1)]
        np.testing.assert_array_equal(source.read(slices), array[1:3])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_threads_share_a_source(tmp_path, suffix):
    array, path = cells("YXC"), tmp_path / f"out{suffix}"
    write(path, array, "YXC")

    def read(source, seed):
        draw = np.random.default_rng(seed)
        for _ in range(60):
            box = [tuple(sorted(map(int, draw.choice(n + 1, 2, replace=False)))) for n in array.shape[:2]] + [(0, 3)]
            np.testing.assert_array_equal(source.read(box), cut(array, box))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with nd.open_source(path, axes="YXC" if suffix == ".npy" else None) as source, ThreadPoolExecutor(4) as pool:
            list(pool.map(read, [source] * 4, range(4)))
    finally:
        sys.setswitchinterval(before)


def test_threads_read_one_after_the_other(tmp_path, monkeypatch):
    array, path, inside, together = cells("YXC"), tmp_path / "out.npy", [], threading.Event()
    write(path, array, "YXC")
    with nd.open_source(path, axes="YXC") as source, ThreadPoolExecutor(2) as pool:
        read = source._read

        def slowly(there):
            inside.append(there)
            if len(inside) == 2:
                together.set()
            together.wait(0.3)
            inside.pop()
            return read(there)

        monkeypatch.setattr(source, "_read", slowly)
        for found in pool.map(source.read, [[(0, 2), (0, 3), (0, 3)]] * 2):
            np.testing.assert_array_equal(found, array[:2, :3])
    assert not together.is_set()


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".ome.tif"])
def test_a_sink_goes_on_where_a_killed_process_ended(tmp_path, suffix):
    array, path = cells("YXC"), tmp_path / f"out{suffix}"
    first, *rest = boxes(array.shape, (4, 2))
    lost = nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True)
    assert not lost.resumed
    lost.write(first, cut(array, first))
    with pytest.raises(nd.OutputError, match="belongs to another array"):
        nd.create_sink(path, array.shape, "float64", "YXC", resume=True)
    with nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True) as sink:
        assert sink.resumed
        for chunk in list(sink._part.rglob("0")) if sink._part.is_dir() else ():
            if chunk.is_file():  # zarr writes chunks under such names first
                (chunk.parent / "0.0123abcd.partial").write_bytes(b"half of a chunk")
    with nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True) as sink:
        assert sink.resumed
        for box in rest:
            sink.write(box, cut(array, box))
        sink.commit()
    lost.close()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    write(tmp_path / "at once" / path.name, array, "YXC")
    assert contents(path) == contents(tmp_path / "at once" / path.name)
    np.testing.assert_array_equal(nd.open_source(path).read(nd.Box.of(array.shape)), array)


@pytest.mark.parametrize("suffix", [".h5", ".nc"])
def test_no_object_of_hdf5_has_a_time(tmp_path, suffix):
    """What goes on after a kill is the same file bit for bit, a second later too."""
    h5py = pytest.importorskip("h5py")
    write(tmp_path / f"a{suffix}", cells("YXC"), "YXC")
    with h5py.File(tmp_path / f"a{suffix}") as file:
        assert not any(one.id.get_create_plist().get_obj_track_times() for one in file.values())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_lost_and_nothing_is_left(tmp_path, suffix):
    array, path = cells("YXC"), tmp_path / f"out{suffix}"
    write(path, array, "YXC")
    with pytest.raises(nd.OutputError, match="exists already"):
        nd.create_sink(path, (2, 2, 1), "uint8", "YXC")
    with nd.create_sink(path, (2, 2, 1), "uint8", "YXC", overwrite=True) as sink:
        sink.write([(0, 1), (0, 2), (0, 1)], np.ones((1, 2, 1), "uint8"))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with nd.open_source(path) as source:
        np.testing.assert_array_equal(source.read(nd.Box.of(array.shape)), array)
    write(path, array[:9], "YXC", overwrite=True)
    with nd.open_source(path) as source:
        assert source.shape == array[:9].shape


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_room_is_told_in_one_message(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"out{suffix}"
    if "zarr" not in suffix:  # which packs
        with pytest.raises(nd.OutputError, match="needs 1 TB, but only"):
            nd.create_sink(path, (1000, 1000, 1000000), "uint8", "YXC", chunks=(1, 1, 1000000))
    array = cells("YXC")
    with pytest.raises(nd.OutputError, match=f"out{suffix}: cannot be written"):
        write(path, array, "YXC", at_write=lambda: fill_the_disk(monkeypatch))
    assert list(tmp_path.iterdir()) == []


def test_every_rank_is_told(tmp_path):
    path = tmp_path / "a.npy"
    path.touch()
    with pytest.raises(nd.OutputError, match="exists already"):
        write(path, cells("YXC"), "YXC", ranks=3)


def fill_the_disk(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with suppress(ImportError):
        import zarr

        monkeypatch.setattr(zarr.storage.LocalStore, "set", full)


def test_what_cannot_be_is_told(tmp_path):
    with pytest.raises(nd.ConfigError, match=r"unknown file type; choose from HDF5 \(\.h5 \.hdf5\), .*NPY"):
        nd.create_sink(tmp_path / "a.xyz", (2, 2, 1), "uint8", "YXC")
    (tmp_path / "a.xyz").touch()
    with pytest.raises(nd.DataError, match=r"unknown file type; choose from HDF5 \(\.h5 \.hdf5\), .*NPY"):
        nd.open_source(tmp_path / "a.xyz")
    with pytest.raises(nd.DataError, match="no such file"):
        nd.open_source(tmp_path / "a.npy")
    for axes in ("YX", "XYC", "YXCC", "CYX"):
        with pytest.raises(nd.ConfigError, match="axes"):
            nd.create_sink(tmp_path / "a.npy", (2, 2, 1), "uint8", axes)
    with pytest.raises(nd.ConfigError, match="is not numeric"):
        nd.create_sink(tmp_path / "a.npy", (2, 2, 1), "complex64", "YXC")
    with pytest.raises(nd.ConfigError, match="one number per axis"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint8", "YXC", chunks=(2, 2))
    with pytest.raises(nd.ConfigError, match="no option 'nam'; did you mean 'name'"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint8", "YXC", nam="x")
    write(tmp_path / "b.npy", cells("YXC"), "YXC")
    with nd.open_source(tmp_path / "b.npy") as source, pytest.raises(nd.ShapeError, match="does not fit in"):
        source.read([(0, 62), (0, 3), (0, 3)])
    with pytest.raises(nd.DataError, match="has no level 1"):
        nd.open_source(f"{tmp_path}/b.npy#1")
    with (
        nd.create_sink(tmp_path / "c.npy", (4, 4, 1), "uint8", "YXC") as sink,
        pytest.raises(nd.ShapeError, match=r"cells of .*, got"),
    ):
        sink.write([(0, 4), (0, 4), (0, 1)], np.ones((4, 4, 1), "float32"))
