"""`neondist data convert`: whatever it reads comes out as it was; in small pieces; whole or not at all."""

import os
import subprocess
import sys
from itertools import product
from math import prod

import h5py
import numpy as np
import pytest
from dataset_toys import grids, idx, put, small_mnist
from fuzz import typed
from hdf5_toys import image_folder
from test_cifar10 import archive, batches, folder
from turns import some

import neondist as nd
from neondist.data.chunks import cells_read, chunk_shape
from neondist.data.datasets import hdf5_tiles

SERIAL = nd.ProcessGrid.serial()
PIL = pytest.importorskip("PIL", reason="images need Pillow")


def convert(tmp_path, *words):
    """Run the command; return its outcome."""
    return typed("data", "convert", *words, "--to", tmp_path / "out.h5")


def converted(tmp_path, *words):
    """Run the command, open what it has written, and return the raw images and labels of both splits."""
    assert convert(tmp_path, *words) == "fine"
    data = nd.HDF5Dataset(tmp_path / "out.h5", mean=0, std=1, scale=1)
    data.open(SERIAL)
    splits = ((split, np.arange(len(split))) for split in (data.train, data.test))
    return data, [(split.images(all_, "float64"), split.targets(all_)) for split, all_ in splits]


def same(found, images, labels):
    np.testing.assert_array_equal(found[0], images)
    np.testing.assert_array_equal(found[1], labels)


@pytest.mark.parametrize(("suffix", "mode"), [(".png", "RGB"), (".png", "L"), (".tif", "RGB"), (".bmp", "L")])
def test_images(tmp_path, suffix, mode):
    made = {part: image_folder(tmp_path / "in" / part, mode=mode, suffix=suffix, seed=ord(part[0])) for part in PARTS}
    data, splits = converted(tmp_path, tmp_path / "in")
    for found, part in zip(splits, PARTS, strict=True):
        same(found, *(np.array(each) for each in zip(*made[part], strict=True)))
    assert data.classes == 2
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["train/labels"].attrs["names"].tolist() == [b"cat", b"dog"]
        cells = file["train/images"][()].reshape(-1, data.sample_shape[-1]) / 255
        np.testing.assert_allclose(file["train/images"].attrs["mean"], cells.mean(axis=0))
        np.testing.assert_allclose(file["train/images"].attrs["std"], cells.std(axis=0))


PARTS = ("train", "test")


def test_jpeg_one_folder(tmp_path):
    image_folder(tmp_path / "in", count=6, suffix=".jpg")
    _, (train, test) = converted(tmp_path, tmp_path / "in")
    assert (len(train[0]), len(test[0])) == (11, 1)
    assert set(train[1]) == {0, 1}


def test_mixed_images_are_brought_together_where_asked(tmp_path):
    image_folder(tmp_path / "in", ("a",))
    image_folder(tmp_path / "in", ("b",), size=(20, 9), mode="L")
    said = convert(tmp_path, tmp_path / "in")
    assert (
        "b/000.png: is 20 x 9 x 1 uint8, but 000.png is 12 x 9 x 3 uint8; all images of a file must have the"
        " same size and type"
    ) in said
    assert os.listdir(tmp_path) == ["in"]
    data, _ = converted(tmp_path, tmp_path / "in", "--size", "8", "7", "--mode", "L")
    assert data.sample_shape == (8, 7, 1)


def test_volumes_of_tiff_pages(tmp_path):
    from PIL import Image

    pages = np.random.default_rng(0).integers(0, 2**16, (2, 5, 12, 9), dtype=np.uint16)
    for name, volume in zip("ab", pages, strict=True):
        (tmp_path / "in" / name).mkdir(parents=True)
        images = [Image.fromarray(page) for page in volume]
        images[0].save(tmp_path / "in" / name / "x.tif", save_all=True, append_images=images[1:])
    data, (train, test) = converted(tmp_path, tmp_path / "in")
    found = dict(zip(np.concatenate([train[1], test[1]]), np.concatenate([train[0], test[0]]), strict=True))
    np.testing.assert_array_equal(np.stack([found[0], found[1]]), pages[..., None])
    assert data.sample_shape == (5, 12, 9, 1)


def test_labels_in_a_table_and_maps(tmp_path):
    made = image_folder(tmp_path / "in", ("x",), 4)
    (tmp_path / "t.csv").write_text("file,label\n" + "".join(f"x/{i:03d}.png,{i * 2}\n" for i in range(4)))
    data, (train, test) = converted(tmp_path, tmp_path / "in", "--labels", tmp_path / "t.csv")
    assert sorted([*train[1], *test[1]]) == [0, 2, 4, 6]
    assert data.classes == 7
    image_folder(tmp_path / "maps", ("x",), 4, mode="L", suffix=".tif", seed=5)
    data, (train, test) = converted(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps")
    expected = [array for array, _ in image_folder(tmp_path / "again", ("x",), 4, mode="L", seed=5)]
    for x, y in zip(*(np.concatenate(each) for each in zip(train, test, strict=True)), strict=True):
        at = next(i for i, (array, _) in enumerate(made) if np.array_equal(array, x))
        np.testing.assert_array_equal(y, expected[at][..., 0])


@pytest.mark.parametrize(
    ("dtype", "shape"), some(product(["u1", ">f4", "f8", "i2"], [(6, 5), (6, 5, 3), (4, 6, 5, 2)])), ids=str
)
@pytest.mark.long
def test_numpy_files(tmp_path, dtype, shape):
    draw = np.random.default_rng(0)
    arrays = {f"{kind}_{part}": None for part in PARTS for kind in "xy"}
    for part, count in (("train", 9), ("test", 4)):
        arrays[f"x_{part}"] = draw.integers(0, 100, (count, *shape)).astype(dtype)
        arrays[f"y_{part}"] = draw.integers(0, 3, (count, 1))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez_compressed(tmp_path / "all.npz", **arrays)
    for words in (
        [tmp_path / f"{name}.npy" for name in arrays],
        [tmp_path / "all.npz"],
        [tmp_path / "all.npz", "--compress"],
    ):
        _, splits = converted(tmp_path, *words)
        for found, part in zip(splits, PARTS, strict=True):
            images = arrays[f"x_{part}"]
            same(found, images.reshape(*images.shape, 1) if len(shape) == 2 else images, arrays[f"y_{part}"][:, 0])


def test_idx(tmp_path):
    made = small_mnist(tmp_path / "in")
    for words in ([tmp_path / "in"], sorted((tmp_path / "in").glob("train*")), sorted((tmp_path / "in").glob("t10k*"))):
        data, (train, test) = converted(tmp_path, *words)
        if words == [tmp_path / "in"]:
            same(train, made["train", "images"][..., None], made["train", "labels"])
            same(test, made["test", "images"][..., None], made["test", "labels"])
        assert data.sample_shape == (28, 28, 1)


@pytest.mark.parametrize("pack", [folder, archive])
def test_cifar10(tmp_path, pack):
    made = batches()
    _, (train, test) = converted(tmp_path, pack(tmp_path / "cifar.tar.gz", made))
    reference = nd.CIFAR10(folder(tmp_path / "again", made))
    reference.open(SERIAL)
    np.testing.assert_array_equal(train[0], reference.train.tiles[np.arange(20)])
    np.testing.assert_array_equal(test[1], reference.test.targets(np.arange(4)))


FAULTS = {
    "nothing there": lambda p: [p / "nowhere"],
    "unknown": lambda p: [put(p / "x.txt", b"hello")],
    "no classes": lambda p: [p],
    "no image": lambda p: [(image_folder(p / "in"), put(p / "in" / "cat" / "z.png", b"hello"), p / "in")[-1]],
    "cut image": lambda p: [_cut(image_folder(p / "in") and p / "in", "dog/001.png")],
    "object array": lambda p: [_save(p / "x.npy", np.array([{}, 1])), _save(p / "y.npy", np.zeros(2, int))],
    "fortran": lambda p: [_save(p / "x.npy", np.ones((2, 3, 4)).T), _save(p / "y.npy", np.zeros(4, int))],
    "fewer labels": lambda p: [_save(p / "x.npy", np.zeros((2, 3, 4))), _save(p / "y.npy", np.zeros(3, int))],
    "float labels": lambda p: [_save(p / "x.npy", np.zeros((2, 3, 4))), _save(p / "y.npy", np.zeros(2))],
    "one array": lambda p: [_save(p / "x.npy", np.zeros((2, 3, 4)))],
    "cut array": lambda p: [
        _cut(p, _save(p / "x.npy", np.zeros((9, 9, 4))).name) / "x.npy", _save(p / "y.npy", np.zeros(9, int))
    ],
    "npz names": lambda p: [(np.savez(p / "a.npz", first=np.zeros(3)), p / "a.npz")[1]],
    "idx order": lambda p: [put(p / "l", idx(np.zeros(3))), put(p / "i", idx(np.zeros((3, 4, 4))))],
    "idx counts": lambda p: [put(p / "i", idx(np.zeros((3, 4, 4)))), put(p / "l", idx(np.zeros(4)))],
    "table": lambda p: [(image_folder(p / "in"), p / "in")[1], "--labels", put(p / "t.csv", b"cat/000.png,dog\n")],
    "table leads out": lambda p: [(image_folder(p / "in"), p / "in")[1], "--labels", put(p / "t", b"../t,1\n../t,1\n")],
    "no map": lambda p: [(image_folder(p / "in"), p / "in")[1], "--maps", p / "in" / "cat"],
    "other class": lambda p: [(image_folder(p / "in/train"), image_folder(p / "in/test", ("cow",)), p / "in")[-1]],
    "size": lambda p: [(image_folder(p / "in"), p / "in")[1], "--size", "0", "3"],
}  # fmt: skip


def _save(path, array):
    np.save(path, array, allow_pickle=True)
    return path


def _cut(folder, name):
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told(tmp_path, fault):
    (tmp_path / "p").mkdir()
    (tmp_path / "out.h5").write_bytes(b"")
    said = convert(tmp_path, *FAULTS[fault](tmp_path / "p"))
    assert said.startswith("refused: "), said
    assert sorted(os.listdir(tmp_path)) == ["out.h5", "p"], "something half written is left"
    assert (tmp_path / "out.h5").stat().st_size == 0


def test_only_hdf5_files_are_replaced(tmp_path):
    image_folder(tmp_path / "in")
    (tmp_path / "out.h5").write_text("my diary")
    assert "exists but is not an HDF5 file, so it is not replaced" in convert(tmp_path, tmp_path / "in")
    assert (tmp_path / "out.h5").read_text() == "my diary"


@pytest.mark.parametrize("seed", range(200))
def test_four_tiles_read_little_more_than_the_image(seed):
    draw = np.random.default_rng(seed)
    spatial = tuple(int(n) for n in np.exp(draw.uniform(0, 8, draw.integers(1, 4))))
    channels, itemsize = int(draw.integers(1, 5)), int(draw.choice([1, 2, 4]))
    chunk = chunk_shape(spatial, channels, itemsize)
    assert all(1 <= c <= n for c, n in zip(chunk[1:], (*spatial, channels), strict=True))
    excess = [cells_read(n, c, 2) / n for n, c in zip(spatial, chunk[1:], strict=False)]
    assert prod(sorted(excess)[-2:]) <= 1.2
    if prod(spatial) * channels * itemsize > 1 << 16:
        assert all(cells_read(n, c, 4) <= 1.2 * n for n, c in zip(spatial, chunk[1:], strict=False))
        assert prod(chunk) * itemsize < 1 << 24


class Counted:
    """A file for h5py that counts the bytes read from it."""

    def __init__(self, path):
        self.file, self.bytes = open(path, "rb", buffering=0), 0  # noqa: SIM115
        self.seek, self.tell, self.read = self.file.seek, self.file.tell, self.file.read

    def readinto(self, buffer):
        count = self.file.readinto(buffer)
        self.bytes += count
        return count


@pytest.mark.parametrize("size", [(640, 600), (501, 377), (224, 224)])
@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 4, 1)])
def test_bytes_that_four_tiles_really_read(tmp_path, monkeypatch, size, shape):
    count = 4
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8))
    np.save(tmp_path / "y.npy", np.arange(count))
    assert convert(tmp_path, tmp_path / "x.npy", tmp_path / "y.npy") == "fine"
    files = []

    def open_file(path):
        files.append(Counted(path))
        return h5py.File(files[-1], "r")

    monkeypatch.setattr(hdf5_tiles, "open_file", open_file)
    for grid in grids(*shape):
        train, *_ = nd.HDF5Dataset(tmp_path / "out.h5", test_share=0.25).load(grid)
        for number in (2, 0, 1):
            train.images([number])
    image = prod(size) * 3
    read = sum(file.bytes for file in files)
    assert image * 3 <= read <= 1.2 * image * 3 + 4 * 2**14, read / image / 3  # the rest are tables, once for each rank


@pytest.mark.long
def test_memory_stays_small(tmp_path):
    """Converting 320 MB takes no more room than a few images."""
    with open(tmp_path / "x.npy", "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (80, 1000, 1000, 4)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 80 * 4_000_000)
    np.save(tmp_path / "y.npy", np.zeros(80, int))
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import resource
import neondist as nd
from neondist.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["data", "convert", *sys.argv[1:]])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    words = [sys.executable, "-c", code, "x.npy", "y.npy", "--to", "out.h5"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    code, grown = done.stdout.splitlines()[-1].split()
    assert (int(code), int(grown) < 120_000) == (0, True), done.stdout
