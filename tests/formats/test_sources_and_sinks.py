"""Sources read by boxes, and sinks written by boxes from any number of ranks."""

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations

import h5py
import numpy as np
import pytest

import neondist as nd

SHAPES = {"YXC": (61, 47, 3), "ZYXC": (9, 31, 22, 1), "NYXC": (3, 41, 37, 2)}
SUFFIXES = [".npy", ".h5", ".nc", ".tif", ".zarr", ".ome.zarr", ".nii", ".nii.gz"]


def draw_image(axes, dtype="float32", seed=0):
    return (np.random.default_rng(seed).random(SHAPES[axes]) * 200).astype(dtype)


def split_into_boxes(shape, counts):
    """Return disjoint boxes of unequal sizes that cover an array."""
    spans = []
    for n, parts in zip(shape, counts, strict=False):
        spans.append([nd.part_range(n, min(parts, n), part) for part in range(min(parts, n))])
    spans += [[(0, n)] for n in shape[len(counts) :]]
    boxes = [()]
    for pairs in spans:
        boxes = [(*box, pair) for box in boxes for pair in pairs]
    return boxes


def crop(array, box):
    return array[tuple(slice(lo, hi) for lo, hi in box)]


def read_contents(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.relative_to(path): file.read_bytes() for file in files if file.is_file()}


def write(path, array, axes, ranks=1, counts=(3, 2, 2), at_write=lambda: None, **options):
    def write_boxes(grid):
        with nd.create_sink(path, array.shape, array.dtype, axes, grid=grid, **options) as sink:
            at_write()
            for box in split_into_boxes(array.shape, counts)[grid.rank :: grid.size]:
                sink.write(box, crop(array, box))
            sink.commit()

    nd.loopback.run(ranks, lambda world: write_boxes(nd.ProcessGrid(world)))


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".png"])
def test_writes_after_the_end_are_rejected(tmp_path, suffix, commits):
    axes = "ZYXC" if ".nii" in suffix else "YXC"
    array, path = np.zeros((2,) * (len(axes) - 1) + (1,), np.uint8), tmp_path / f"out{suffix}"
    with nd.create_sink(path, array.shape, array.dtype, axes) as sink:
        box = [(0, n) for n in array.shape]
        with pytest.raises(nd.ShapeError, match="has masked elements; replace them"):
            sink.write(box, np.ma.masked_equal(array, 0))
        sink.write(box, array)
        if commits:
            sink.commit()
            contents = read_contents(path)
            with pytest.raises(nd.NotReadyError, match="the sink is committed or closed; create another"):
                sink.commit()
            with pytest.raises(nd.NotReadyError, match="the sink is committed or closed; create another"):
                sink.write(box, array + 1)
    with pytest.raises(nd.NotReadyError, match="the sink is committed or closed; create another"):
        sink.write(box, array + 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name] * commits
    assert not commits or read_contents(path) == contents


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("axes", SHAPES)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "uint8"), (3, "float32"), (4, "int16")])
@pytest.mark.long
def test_ranks_write_and_read_boxes(tmp_path, suffix, axes, ranks, dtype):
    array, path = draw_image(axes, dtype), tmp_path / f"out{suffix}"
    if suffix in (".ome.zarr", ".nii", ".nii.gz"):
        axes = axes.replace("N", "T")
    write(path, array, axes, ranks)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with nd.open_source(path, axes=axes if suffix == ".npy" else None) as source:
        assert (source.shape, source.dtype, source.axes) == (array.shape, array.dtype, axes)
        for box in [*split_into_boxes(array.shape, (2, 3, 2)), [(n // 3, n // 3 + 1) for n in array.shape]]:
            values = source.read(box)
            assert values.dtype == array.dtype
            np.testing.assert_array_equal(values, crop(array, box))
        np.testing.assert_array_equal(source.read(nd.Box.of(array.shape)), array)
        slices = [slice(1, 3), *[slice(None)] * (array.ndim - 1)]
        np.testing.assert_array_equal(source.read(slices), array[1:3])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_threads_share_a_source(tmp_path, suffix):
    array, path = draw_image("YXC"), tmp_path / f"out{suffix}"
    write(path, array, "YXC")

    def read(source, seed):
        rng = np.random.default_rng(seed)
        for _ in range(60):
            box = [tuple(sorted(map(int, rng.choice(n + 1, 2, replace=False)))) for n in array.shape[:2]] + [(0, 3)]
            np.testing.assert_array_equal(source.read(box), crop(array, box))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with nd.open_source(path, axes="YXC" if suffix == ".npy" else None) as source, ThreadPoolExecutor(4) as pool:
            list(pool.map(read, [source] * 4, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_reads_of_threads_are_serialised(tmp_path, monkeypatch):
    array, path, active, overlap = draw_image("YXC"), tmp_path / "out.npy", [], threading.Event()
    write(path, array, "YXC")
    with nd.open_source(path, axes="YXC") as source, ThreadPoolExecutor(2) as pool:
        read = source._read

        def slow_read(index):
            active.append(index)
            if len(active) == 2:
                overlap.set()
            overlap.wait(0.3)
            active.pop()
            return read(index)

        monkeypatch.setattr(source, "_read", slow_read)
        for values in pool.map(source.read, [[(0, 2), (0, 3), (0, 3)]] * 2):
            np.testing.assert_array_equal(values, array[:2, :3])
    assert not overlap.is_set()


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".ome.tif"])
def test_sink_resumes_after_a_killed_process(tmp_path, suffix):
    array, path = draw_image("YXC"), tmp_path / f"out{suffix}"
    first, *rest = split_into_boxes(array.shape, (4, 2))
    killed = nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True)
    assert not killed.resumed
    killed.write(first, crop(array, first))
    with pytest.raises(nd.OutputError, match="begun with a different shape, dtype, axes, chunks or options; delete"):
        nd.create_sink(path, array.shape, "float64", "YXC", resume=True)
    with nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True) as sink:
        assert sink.resumed
        for chunk in list(sink._temp_path.rglob("0")) if sink._temp_path.is_dir() else ():
            if chunk.is_file():  # zarr's temporary name of a chunk
                (chunk.parent / "0.0123abcd.partial").write_bytes(b"half of a chunk")
    with nd.create_sink(path, array.shape, array.dtype, "YXC", resume=True) as sink:
        assert sink.resumed
        for box in rest:
            sink.write(box, crop(array, box))
        sink.commit()
    killed.close()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    write(tmp_path / "reference" / path.name, array, "YXC")
    assert read_contents(path) == read_contents(tmp_path / "reference" / path.name)
    np.testing.assert_array_equal(nd.open_source(path).read(nd.Box.of(array.shape)), array)


@pytest.mark.parametrize("suffix", [".h5", ".nc"])
def test_hdf5_objects_have_no_timestamps(tmp_path, suffix):
    """Store no timestamps, so that a resumed file is identical bit for bit."""
    h5py = pytest.importorskip("h5py")
    write(tmp_path / f"a{suffix}", draw_image("YXC"), "YXC")
    with h5py.File(tmp_path / f"a{suffix}") as file:
        assert not any(item.id.get_create_plist().get_obj_track_times() for item in file.values())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_uncommitted_sinks_keep_the_old_file(tmp_path, suffix):
    array, path = draw_image("YXC"), tmp_path / f"out{suffix}"
    write(path, array, "YXC")
    with pytest.raises(nd.OutputError, match="already exists"):
        nd.create_sink(path, (2, 2, 1), "uint8", "YXC")
    with nd.create_sink(path, (2, 2, 1), "uint8", "YXC", overwrite=True) as sink:
        sink.write([(0, 1), (0, 2), (0, 1)], np.ones((1, 2, 1), "uint8"))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with nd.open_source(path) as source:
        np.testing.assert_array_equal(source.read(nd.Box.of(array.shape)), array)
    write(path, array[:9], "YXC", overwrite=True)
    with nd.open_source(path) as source:
        assert source.shape == array[:9].shape


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_full_disk_is_one_error(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"out{suffix}"
    if "zarr" not in suffix:  # compressed
        with pytest.raises(nd.OutputError, match="needs 1 TB, but only"):
            nd.create_sink(path, (1000, 1000, 1000000), "uint8", "YXC", chunks=(1, 1, 1000000))
    array = draw_image("YXC")
    with pytest.raises(nd.OutputError, match=f"out{suffix}: cannot be written"):
        write(path, array, "YXC", at_write=lambda: fill_the_disk(monkeypatch))
    assert list(tmp_path.iterdir()) == []


def test_errors_are_raised_on_all_ranks(tmp_path):
    path = tmp_path / "a.npy"
    path.touch()
    with pytest.raises(nd.OutputError, match="already exists"):
        write(path, draw_image("YXC"), "YXC", ranks=3)


def fill_the_disk(monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    with suppress(ImportError):
        import zarr

        monkeypatch.setattr(zarr.storage.LocalStore, "set", fail)


def test_invalid_arguments(tmp_path):
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
    with pytest.raises(nd.ConfigError, match="give one extent > 0 per axis"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint8", "YXC", chunks=(2, 2))
    with pytest.raises(nd.ConfigError, match="no option 'nam'; did you mean 'name'"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint8", "YXC", nam="x")
    with pytest.raises(nd.ConfigError, match="dtype: 'uint9' is not a NumPy dtype"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint9", "YXC")
    with pytest.raises(nd.ConfigError, match="like: expected TileSource"):
        nd.create_sink(tmp_path / "a.h5", (2, 2, 1), "uint8", "YXC", like=str(tmp_path / "a.h5"))
    write(tmp_path / "b.npy", draw_image("YXC"), "YXC")
    with nd.open_source(tmp_path / "b.npy") as source, pytest.raises(nd.ShapeError, match="does not fit in"):
        source.read([(0, 62), (0, 3), (0, 3)])
    with pytest.raises(nd.DataError, match="has no level 1"):
        nd.open_source(f"{tmp_path}/b.npy#1")
    with (
        nd.create_sink(tmp_path / "c.npy", (4, 4, 1), "uint8", "YXC") as sink,
        pytest.raises(nd.ShapeError, match=r"cells of .*, got"),
    ):
        sink.write([(0, 4), (0, 4), (0, 1)], np.ones((4, 4, 1), "float32"))


@pytest.mark.parametrize("suffix", [".h5", ".nc", ".zarr"])
def test_error_for_arrays_in_groups_states_a_path(tmp_path, suffix):
    """Give a path for arrays that are only in groups, as in satellite products."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["PRODUCT/q"] = np.zeros((4, 5))
    elif suffix == ".nc":
        with pytest.importorskip("netCDF4", reason="made by netCDF4").Dataset(path, "w") as file:
            group = file.createGroup("PRODUCT")
            for name, size in (("y", 4), ("x", 5)):
                group.createDimension(name, size)
            group.createVariable("q", "f4", ("y", "x"))
    else:
        group = pytest.importorskip("zarr", reason="Zarr needs zarr").open_group(path, mode="w")
        group.create_group("PRODUCT").create_array("q", shape=(4, 5), dtype="u1")
    name = "GROUP/ARRAY" if suffix == ".zarr" else "PRODUCT/q"
    with pytest.raises(nd.DataError, match=re.escape(f"{path}:{name}")):
        nd.open_source(path)
    if suffix != ".zarr":
        with pytest.raises(nd.DataError, match=r"has no array .q.; choose .*PRODUCT/q"):
            nd.open_source(f"{path}:q")
    with nd.open_source(f"{path}:PRODUCT/q") as source:
        assert source.shape == (4, 5, 1)


DTYPES = ["bool", *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32"]
UNSUPPORTED_DTYPES = {
    ".tif": ("bool",), ".ome.tif": ("bool", "float16", "int64", "uint64"), ".nc": ("float16",),
    ".nii": ("bool", "float16"), ".nii.gz": ("bool", "float16"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "longdouble", "complex64"])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".ome.tif"])
def test_dtypes_of_formats(tmp_path, suffix, dtype):
    """Return what was written, or reject a dtype that a format does not have, without a file."""
    array = (np.random.default_rng(0).random((5, 6, 1)) * 100).astype(dtype)
    path = tmp_path / f"a{suffix}"
    if dtype in (*UNSUPPORTED_DTYPES.get(suffix, ()), "longdouble", "complex64"):
        with pytest.raises(nd.ConfigError, match="choose another dtype"):
            nd.create_sink(path, array.shape, dtype, "YXC")
        assert list(tmp_path.iterdir()) == []
        return
    with nd.create_sink(path, array.shape, dtype, "YXC") as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()
    with nd.open_source(path) as source:
        np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)).squeeze(), array.squeeze())
        assert source.dtype == array.dtype


@pytest.mark.parametrize("dtype", [">u2", ">i2", ">f4", ">f8"])
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".ome.tif", ".png"])
def test_big_endian_dtypes(tmp_path, suffix, dtype):
    array, path = (np.random.default_rng(0).random((5, 6, 1)) * 100).astype(dtype), tmp_path / f"a{suffix}"
    if suffix == ".png":
        array = array.astype(dtype := ">u2")
    with nd.create_sink(path, array.shape, dtype, "YXC") as sink:
        sink.write(nd.Box.of(array.shape), array)
        sink.commit()
    with nd.open_source(path) as source:
        assert source.dtype == sink.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(source.read(nd.Box.of(source.shape)).squeeze(), array.squeeze())


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".png"])
def test_boxes_are_new_writable_arrays(tmp_path, suffix):
    array, path = draw_image("YXC", "uint8"), tmp_path / f"out{suffix}"
    write(path, array, "YXC")
    with nd.open_source(path) as source:
        for box in ([(0, n) for n in array.shape], [(3, 40), (5, 6), (0, 2)]):
            cells = source.read(box)
            cells += 1
            np.testing.assert_array_equal(source.read(box), crop(array, box))


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".png"])
@pytest.mark.parametrize("count", range(5))
@pytest.mark.long
def test_any_axes_are_stored_or_rejected(tmp_path, suffix, count):
    for number, letters in enumerate(combinations("NTZYX", count)):
        axes = "".join([*letters, "C"])
        shape, path = (*range(2, 2 + count), 1), tmp_path / f"{number}{suffix}"
        array = np.random.default_rng(number).integers(0, 99, shape, dtype=np.uint8)
        try:
            write(path, array, axes, **({"channels": False} if suffix in (".npy", ".h5") else {}))
        except nd.ConfigError:
            assert not [*tmp_path.glob(f"{number}.*")]
            continue
        if (suffix, axes) == (".nc", "C"):  # no single variable of two or more dimensions
            path = path.with_name(f"{path.name}:predictions")
        stored_axes = axes[:-1] or axes
        with nd.open_source(path, axes=stored_axes if suffix in (".npy", ".h5") else None) as source:
            np.testing.assert_array_equal(source.read([(0, n) for n in source.shape]).ravel(), array.ravel())


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("axes", ["YXC", "ZYXC", "TYXC", "TZYXC"])
@pytest.mark.long
def test_axes_of_one_cell(tmp_path, suffix, axes):
    for number in range(2 ** len(axes)):
        shape = tuple(1 if number >> axis & 1 else n for axis, n in enumerate((3, 5, 4, 6, 2)[-len(axes) :]))
        array = np.random.default_rng(number).integers(0, 99, shape, dtype=np.int16)
        path = tmp_path / f"{number}{suffix}"
        if (suffix, shape[-2:]) == (".tif", (1, 1)) and len(axes) > 3:
            with pytest.raises(nd.ConfigError, match="cannot write pages of one column"):
                write(path, array, axes)
            assert not path.exists()
            continue
        write(path, array, axes)
        with nd.open_source(path, **({"axes": axes} if suffix in (".npy", ".h5") else {})) as source:
            cells = source.read([(0, n) for n in source.shape])
            np.testing.assert_array_equal(cells.ravel(), array.ravel())


@pytest.mark.parametrize("value", [np.bytes_("CYX"), "CYX", ["c", "y"], np.array([b"C", b"Y"]), 3, h5py.Empty("S3")])
def test_attribute_axes_of_other_programs(tmp_path, value):
    """Only text of fixed length names the axes; other values must not make a file unreadable."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = np.zeros((2, 3, 5))
        file["v"].attrs["axes"] = value
    if isinstance(value, str):
        with pytest.raises(nd.DataError, match=r"attribute axes of v is variable-length text.*np\.bytes_\('YXC'\), or"):
            nd.open_source(tmp_path / "a.h5")
    else:
        with nd.open_source(tmp_path / "a.h5") as source:
            assert source.axes == ("YXC" if isinstance(value, bytes) else "NYXC")
    with nd.open_source(tmp_path / "a.h5", axes="CYX") as source:
        assert source.shape == (3, 5, 2)
