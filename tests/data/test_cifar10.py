"""CIFAR-10 from a folder and from the archive; tiles of all ranks give the whole; every fault is told."""

import io
import tarfile

import numpy as np
import pytest
from dataset_toys import GRIDS, grids, whole

import neondist as nd
from neondist.data import CIFAR10
from neondist.errors import ConfigError, DataError

NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def batches(count=4, seed=0):
    draw = np.random.default_rng(seed)
    made = {name: draw.integers(0, 256, (count, 3073), dtype=np.uint8) for name in NAMES}
    for records in made.values():
        records[:, 0] %= 10
    return made


def folder(path, made):
    path.mkdir()
    for name, records in made.items():
        (path / name).write_bytes(records.tobytes())
    return path


def archive(path, made):
    with tarfile.open(path, "w:gz") as file:
        for name, records in made.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = records.nbytes
            file.addfile(info, io.BytesIO(records.tobytes()))
    return path


@pytest.mark.parametrize("pack", [folder, archive])
@pytest.mark.parametrize("shape", GRIDS)
def test_tiles_give_the_whole(tmp_path, pack, shape):
    made = batches()
    path, tiles, boxes = pack(tmp_path / "cifar.tar.gz", made), [], []
    for grid in grids(*shape):
        data = nd.CIFAR10(path)
        data.check()
        train, test = data.load(grid)
        assert (len(train), len(test)) == (20, 4)
        tiles.append(train.images(np.arange(20), "float64"))
        boxes.append(grid.tile_box((32, 32)))
        np.testing.assert_array_equal(test.targets([3]), made["test_batch.bin"][3:, 0])
    records = np.concatenate([made[name] for name in NAMES[:5]])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    expected = (pixels / 255 - CIFAR10.mean) / CIFAR10.std
    np.testing.assert_allclose(whole(tiles, boxes, expected.shape), expected, atol=1e-12)


def test_cache(tmp_path):
    path = folder(tmp_path / "data", batches())
    grid = nd.ProcessGrid.serial()
    template = tmp_path / "cifar_{rank}_of_{size}.h5"
    first, _ = nd.CIFAR10(path, serialized_path=template).load(grid)
    assert (tmp_path / "cifar_0_of_1.h5").is_file()
    again, _ = nd.CIFAR10(path, serialized_path=template).load(grid)
    np.testing.assert_array_equal(first.images([5]), again.images([5]))
    (path / NAMES[0]).write_bytes(batches(seed=1)[NAMES[0]].tobytes())
    changed, _ = nd.CIFAR10(path, serialized_path=template).load(grid)
    assert not np.array_equal(first.images([0]), changed.images([0]))


def broken(tmp_path, fault):
    made = batches()
    if fault == "label":
        made[NAMES[2]][1, 0] = 10
    path = folder(tmp_path / "data", made)
    if fault == "missing":
        (path / NAMES[1]).unlink()
    if fault == "truncated":
        (path / NAMES[3]).write_bytes(made[NAMES[3]].tobytes()[:-1])
    if fault == "empty":
        (path / NAMES[5]).write_bytes(b"")
    if fault == "gone":
        return tmp_path / "nowhere"
    if fault == "archive cut":
        packed = archive(tmp_path / "cut.tar.gz", made)
        packed.write_bytes(packed.read_bytes()[:-2000])
        return packed
    if fault == "no archive":
        (tmp_path / "x.tar.gz").write_bytes(b"hello")
        return tmp_path / "x.tar.gz"
    if fault == "archive without batches":
        return archive(tmp_path / "y.tar.gz", {"readme.bin": made[NAMES[0]]})
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
def test_faults_are_told(tmp_path, fault):
    data = nd.CIFAR10(broken(tmp_path, fault))
    with pytest.raises(DataError, match=FAULTS[fault]):
        data.open(nd.ProcessGrid.serial())


def test_a_path_is_needed():
    with pytest.raises(ConfigError, match="path"):
        nd.CIFAR10("")


def test_the_subset(official_cifar10):
    data = nd.CIFAR10(official_cifar10)
    data.open(nd.ProcessGrid.serial())
    assert (len(data.train), len(data.test)) == (10000, 2000)
    x = data.train.images(np.arange(0, 10000, 20))
    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 1) < 0.1
    assert np.bincount(data.test.targets(np.arange(2000))).tolist() == [200] * 10
