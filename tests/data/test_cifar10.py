"""CIFAR-10 from a folder and from the archive: tiles of all ranks, the cache, and damaged files."""

import numpy as np
import pytest
from small_cifar10 import NAMES, draw_batches, write_archive, write_folder
from small_datasets import GRIDS, assemble_image, make_grids

import neondist as nd
from neondist.data import CIFAR10
from neondist.errors import ConfigError, DataError


@pytest.mark.parametrize("pack", [write_folder, write_archive])
@pytest.mark.parametrize("shape", GRIDS)
def test_tiles_cover_the_images(tmp_path, pack, shape):
    batches = draw_batches()
    path, tiles, boxes = pack(tmp_path / "cifar.tar.gz", batches), [], []
    for grid in make_grids(*shape):
        data = nd.CIFAR10(path)
        data.check()
        train, test = data.open_splits(grid)
        assert (len(train), len(test)) == (20, 4)
        tiles.append(train.images(np.arange(20), "float64"))
        boxes.append(grid.tile_box((32, 32)))
        np.testing.assert_array_equal(test.targets([3]), batches["test_batch.bin"][3:, 0])
    records = np.concatenate([batches[name] for name in NAMES[:5]])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    expected = (pixels / 255 - CIFAR10.mean) / CIFAR10.std
    np.testing.assert_allclose(assemble_image(tiles, boxes, expected.shape), expected, atol=1e-12)


def test_cache(tmp_path):
    path = write_folder(tmp_path / "data", draw_batches())
    grid = nd.ProcessGrid.serial()
    template = tmp_path / "cifar_{rank}_of_{size}.h5"
    first, _ = nd.CIFAR10(path, serialized_path=template).open_splits(grid)
    assert (tmp_path / "cifar_0_of_1.h5").is_file()
    cached, _ = nd.CIFAR10(path, serialized_path=template).open_splits(grid)
    np.testing.assert_array_equal(first.images([5]), cached.images([5]))
    (path / NAMES[0]).write_bytes(draw_batches(seed=1)[NAMES[0]].tobytes())
    changed, _ = nd.CIFAR10(path, serialized_path=template).open_splits(grid)
    assert not np.array_equal(first.images([0]), changed.images([0]))


def write_damaged(tmp_path, fault):
    batches = draw_batches()
    if fault == "label":
        batches[NAMES[2]][1, 0] = 10
    path = write_folder(tmp_path / "data", batches)
    if fault == "missing":
        (path / NAMES[1]).unlink()
    if fault == "truncated":
        (path / NAMES[3]).write_bytes(batches[NAMES[3]].tobytes()[:-1])
    if fault == "empty":
        (path / NAMES[5]).write_bytes(b"")
    if fault == "gone":
        return tmp_path / "nowhere"
    if fault == "archive cut":
        packed = write_archive(tmp_path / "cut.tar.gz", batches)
        packed.write_bytes(packed.read_bytes()[:-2000])
        return packed
    if fault == "no archive":
        (tmp_path / "x.tar.gz").write_bytes(b"hello")
        return tmp_path / "x.tar.gz"
    if fault == "archive without batches":
        return write_archive(tmp_path / "y.tar.gz", {"readme.bin": batches[NAMES[0]]})
    return path


FAULTS = {
    "missing": r"has no data_batch_2\.bin",
    "truncated": r"data_batch_4\.bin has 12291 bytes",
    "empty": r"test_batch\.bin has 0 bytes",
    "label": "label 10 of train sample 9",
    "gone": "no folder or file",
    "archive cut": "not a valid",
    "no archive": "not a valid",
    "archive without batches": r"has no data_batch_1\.bin",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_files_are_reported(tmp_path, fault):
    data = nd.CIFAR10(write_damaged(tmp_path, fault))
    with pytest.raises(DataError, match=FAULTS[fault]):
        data.open(nd.ProcessGrid.serial())


def test_path_is_required():
    with pytest.raises(ConfigError, match="path"):
        nd.CIFAR10("")


def test_official_subset(official_cifar10):
    data = nd.CIFAR10(official_cifar10)
    data.open(nd.ProcessGrid.serial())
    assert (len(data.train), len(data.test)) == (10000, 2000)
    x = data.train.images(np.arange(0, 10000, 20))
    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 1) < 0.1
    assert np.bincount(data.test.targets(np.arange(2000))).tolist() == [200] * 10
