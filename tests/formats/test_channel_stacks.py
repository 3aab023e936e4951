"""Images whose channels are in several files."""

from itertools import chain

import numpy as np
import pytest

import neondist as nd
from neondist.formats.cache import ChunkCache

for name in ("tifffile", "zarr", "nibabel", "rasterio", "netCDF4"):
    pytest.importorskip(name, reason="makes files")

from calibrated_sources import SOURCE_WRITERS  # noqa: E402


def read_contents(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.relative_to(path): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize("write", SOURCE_WRITERS, ids=lambda write: write.__name__)
def test_stacks_keep_the_metadata_of_the_first_file(tmp_path, write):
    names = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        names.append(f"{tmp_path}/{number}/{write(tmp_path / str(number), 1)[0]}")
    with nd.open_source(",".join(names)) as stack, nd.open_source(names[0]) as first:
        count, whole = first.shape[-1], [(0, n) for n in first.shape]
        assert stack.shape == (*first.shape[:-1], 3 * count)
        np.testing.assert_array_equal(stack.read([*whole[:-1], (0, 3 * count)]), np.tile(first.read(whole), 3))
        assert stack.metadata_names() == first.metadata_names()
        assert stack.files == list(chain(*(nd.open_source(name).files for name in names)))
        for suffix in (".nii", ".tif", ".ome.tif", ".ome.zarr", ".nc", ".h5"):
            results = []
            for like in (first, stack):
                folder = tmp_path / f"{like is stack}{suffix}"
                folder.mkdir()
                try:
                    with nd.create_sink(folder / f"a{suffix}", first.shape, "float32", first.axes, like=like) as sink:
                        sink.write(whole, np.ones(first.shape, "f4"))
                        sink.commit()
                except nd.ConfigError as error:
                    results.append(str(error).partition("a.")[2])
                else:
                    results.append((sink.lost, read_contents(folder)))
            assert results[0] == results[1]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("suffix", [".npy", ".tif", ".zarr"])
def test_boxes_of_stacks(tmp_path, suffix, cached):
    rng = np.random.default_rng(0)
    parts = [rng.integers(-99, 99, (21, 17, n)).astype(dtype) for n, dtype in ((2, "i2"), (1, "u1"), (3, "f4"))]
    for number, part in enumerate(parts):
        with nd.create_sink(
            tmp_path / f"{number}{suffix}", part.shape, part.dtype, "YXC", (16, 16, part.shape[-1])
        ) as sink:
            sink.write([(0, n) for n in part.shape], part)
            sink.commit()
    whole = np.concatenate(parts, axis=-1)
    names = ",".join(f"{tmp_path}/{number}{suffix}" for number in range(3))
    with nd.open_source(names, **({"axes": "YXC"} if suffix == ".npy" else {})) as stack:
        assert (stack.shape, stack.dtype) == (whole.shape, whole.dtype)
        stack.cache = ChunkCache(1 << 20) if cached else None
        for _ in range(30):
            box = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in whole.shape]
            np.testing.assert_array_equal(stack.read(box), whole[tuple(slice(*pair) for pair in box)])
        assert stack.read([(0, 0), (0, 17), (0, 6)]).shape == (0, 17, 6)


def test_missing_files_of_stacks_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((4, 5)))
    np.save(tmp_path / "b,c.npy", np.ones((4, 5)))
    with pytest.raises(nd.DataError, match=r"/d\.npy: no such file"):
        nd.open_source(f"{tmp_path}/a.npy,{tmp_path}/d.npy")
    with nd.open_source(f"{tmp_path}/b,c.npy") as source:
        assert source.shape == (4, 5, 1)
