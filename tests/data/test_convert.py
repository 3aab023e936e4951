"""`neondist data convert`: lossless conversion in small pieces, with a complete file or none."""

import os
import subprocess
import sys
from itertools import product
from math import prod

import h5py
import numpy as np
import pytest
from case_selection import select_cases
from convert_runs import convert, convert_and_open
from small_cifar10 import draw_batches, write_archive, write_folder
from small_datasets import encode_idx, make_grids, write_bytes, write_mnist
from small_hdf5 import write_image_folder

import neondist as nd
from neondist.data.chunks import chunk_shape, count_cells_read
from neondist.data.datasets import hdf5_tiles

SERIAL = nd.ProcessGrid.serial()
pytest.importorskip("PIL", reason="images need Pillow")


def check_equal(samples, images, labels):
    np.testing.assert_array_equal(samples[0], images)
    np.testing.assert_array_equal(samples[1], labels)


@pytest.mark.parametrize(("suffix", "mode"), [(".png", "RGB"), (".png", "L"), (".tif", "RGB"), (".bmp", "L")])
def test_image_folders(tmp_path, suffix, mode):
    arrays = {
        part: write_image_folder(tmp_path / "in" / part, mode=mode, suffix=suffix, seed=ord(part[0])) for part in PARTS
    }
    data, splits = convert_and_open(tmp_path, tmp_path / "in")
    for samples, part in zip(splits, PARTS, strict=True):
        check_equal(samples, *(np.array(array) for array in zip(*arrays[part], strict=True)))
    assert data.classes == 2
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["train/labels"].attrs["names"].tolist() == [b"cat", b"dog"]
        pixels = file["train/images"][()].reshape(-1, data.sample_shape[-1]) / 255
        np.testing.assert_allclose(file["train/images"].attrs["mean"], pixels.mean(axis=0))
        np.testing.assert_allclose(file["train/images"].attrs["std"], pixels.std(axis=0))


PARTS = ("train", "test")


def test_jpeg_single_folder(tmp_path):
    write_image_folder(tmp_path / "in", count=6, suffix=".jpg")
    _, (train, test) = convert_and_open(tmp_path, tmp_path / "in")
    assert (len(train[0]), len(test[0])) == (11, 1)
    assert set(train[1]) == {0, 1}


def test_mixed_images_are_resized_on_request(tmp_path):
    write_image_folder(tmp_path / "in", ("a",))
    write_image_folder(tmp_path / "in", ("b",), size=(20, 9), mode="L")
    output = convert(tmp_path, tmp_path / "in")
    assert (
        "b/000.png: is 20 x 9 x 1 uint8, but 000.png is 12 x 9 x 3 uint8; all images must have the same size and type"
    ) in output
    assert os.listdir(tmp_path) == ["in"]
    data, _ = convert_and_open(tmp_path, tmp_path / "in", "--size", "8", "7", "--mode", "L")
    assert data.sample_shape == (8, 7, 1)


def test_volumes_of_tiff_pages(tmp_path):
    from PIL import Image

    pages = np.random.default_rng(0).integers(0, 2**16, (2, 5, 12, 9), dtype=np.uint16)
    for name, volume in zip("ab", pages, strict=True):
        (tmp_path / "in" / name).mkdir(parents=True)
        images = [Image.fromarray(page) for page in volume]
        images[0].save(tmp_path / "in" / name / "x.tif", save_all=True, append_images=images[1:])
    data, (train, test) = convert_and_open(tmp_path, tmp_path / "in")
    volumes = dict(zip(np.concatenate([train[1], test[1]]), np.concatenate([train[0], test[0]]), strict=True))
    np.testing.assert_array_equal(np.stack([volumes[0], volumes[1]]), pages[..., None])
    assert data.sample_shape == (5, 12, 9, 1)


def test_label_tables_and_label_maps(tmp_path):
    images = write_image_folder(tmp_path / "in", ("x",), 4)
    (tmp_path / "t.csv").write_text("file,label\n" + "".join(f"x/{i:03d}.png,{i * 2}\n" for i in range(4)))
    data, (train, test) = convert_and_open(tmp_path, tmp_path / "in", "--labels", tmp_path / "t.csv")
    assert sorted([*train[1], *test[1]]) == [0, 2, 4, 6]
    assert data.classes == 7
    write_image_folder(tmp_path / "maps", ("x",), 4, mode="L", suffix=".tif", seed=5)
    data, (train, test) = convert_and_open(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps")
    expected = [array for array, _ in write_image_folder(tmp_path / "again", ("x",), 4, mode="L", seed=5)]
    for x, y in zip(*(np.concatenate(splits) for splits in zip(train, test, strict=True)), strict=True):
        index = next(i for i, (array, _) in enumerate(images) if np.array_equal(array, x))
        np.testing.assert_array_equal(y, expected[index][..., 0])


@pytest.mark.parametrize(
    ("dtype", "shape"), select_cases(product(["u1", ">f4", "f8", "i2"], [(6, 5), (6, 5, 3), (4, 6, 5, 2)])), ids=str
)
@pytest.mark.long
def test_numpy_files(tmp_path, dtype, shape):
    rng = np.random.default_rng(0)
    arrays = {f"{kind}_{part}": None for part in PARTS for kind in "xy"}
    for part, count in (("train", 9), ("test", 4)):
        arrays[f"x_{part}"] = rng.integers(0, 100, (count, *shape)).astype(dtype)
        arrays[f"y_{part}"] = rng.integers(0, 3, (count, 1))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez_compressed(tmp_path / "all.npz", **arrays)
    for words in (
        [tmp_path / f"{name}.npy" for name in arrays],
        [tmp_path / "all.npz"],
        [tmp_path / "all.npz", "--compress"],
    ):
        _, splits = convert_and_open(tmp_path, *words)
        for samples, part in zip(splits, PARTS, strict=True):
            images = arrays[f"x_{part}"]
            check_equal(
                samples, images.reshape(*images.shape, 1) if len(shape) == 2 else images, arrays[f"y_{part}"][:, 0]
            )


def test_idx(tmp_path):
    arrays = write_mnist(tmp_path / "in")
    for words in ([tmp_path / "in"], sorted((tmp_path / "in").glob("train*")), sorted((tmp_path / "in").glob("t10k*"))):
        data, (train, test) = convert_and_open(tmp_path, *words)
        if words == [tmp_path / "in"]:
            check_equal(train, arrays["train", "images"][..., None], arrays["train", "labels"])
            check_equal(test, arrays["test", "images"][..., None], arrays["test", "labels"])
        assert data.sample_shape == (28, 28, 1)


@pytest.mark.parametrize("pack", [write_folder, write_archive])
def test_cifar10(tmp_path, pack):
    records = draw_batches()
    _, (train, test) = convert_and_open(tmp_path, pack(tmp_path / "cifar.tar.gz", records))
    reference = nd.CIFAR10(write_folder(tmp_path / "again", records))
    reference.open(SERIAL)
    np.testing.assert_array_equal(train[0], reference.train.tiles[np.arange(20)])
    np.testing.assert_array_equal(test[1], reference.test.targets(np.arange(4)))


FAULTS = {
    "missing": lambda p: [p / "nowhere"],
    "unknown": lambda p: [write_bytes(p / "x.txt", b"hello")],
    "no classes": lambda p: [p],
    "no image": lambda p: [
        (write_image_folder(p / "in"), write_bytes(p / "in" / "cat" / "z.png", b"hello"), p / "in")[-1]
    ],
    "cut image": lambda p: [truncate(write_image_folder(p / "in") and p / "in", "dog/001.png")],
    "object array": lambda p: [save(p / "x.npy", np.array([{}, 1])), save(p / "y.npy", np.zeros(2, int))],
    "fortran": lambda p: [save(p / "x.npy", np.ones((2, 3, 4)).T), save(p / "y.npy", np.zeros(4, int))],
    "fewer labels": lambda p: [save(p / "x.npy", np.zeros((2, 3, 4))), save(p / "y.npy", np.zeros(3, int))],
    "float labels": lambda p: [save(p / "x.npy", np.zeros((2, 3, 4))), save(p / "y.npy", np.zeros(2))],
    "one array": lambda p: [save(p / "x.npy", np.zeros((2, 3, 4)))],
    "cut array": lambda p: [
        truncate(p, save(p / "x.npy", np.zeros((9, 9, 4))).name) / "x.npy",
        save(p / "y.npy", np.zeros(9, int)),
    ],
    "npz names": lambda p: [(np.savez(p / "a.npz", first=np.zeros(3)), p / "a.npz")[1]],
    "idx order": lambda p: [
        write_bytes(p / "l", encode_idx(np.zeros(3))),
        write_bytes(p / "i", encode_idx(np.zeros((3, 4, 4)))),
    ],
    "idx counts": lambda p: [
        write_bytes(p / "i", encode_idx(np.zeros((3, 4, 4)))),
        write_bytes(p / "l", encode_idx(np.zeros(4))),
    ],
    "table": lambda p: [
        (write_image_folder(p / "in"), p / "in")[1],
        "--labels",
        write_bytes(p / "t.csv", b"cat/000.png,dog\n"),
    ],
    "table outside": lambda p: [
        (write_image_folder(p / "in"), p / "in")[1],
        "--labels",
        write_bytes(p / "t", b"../t,1\n../t,1\n"),
    ],
    "no map": lambda p: [(write_image_folder(p / "in"), p / "in")[1], "--maps", p / "in" / "cat"],
    "other class": lambda p: [
        (write_image_folder(p / "in/train"), write_image_folder(p / "in/test", ("cow",)), p / "in")[-1]
    ],
}


def save(path, array):
    np.save(path, array, allow_pickle=True)
    return path


def truncate(folder, name):
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    return folder


def test_arrays_without_a_training_split_are_listed(tmp_path):
    np.savez(tmp_path / "a.npz", x_test=np.zeros((4, 3, 3)), y_test=np.arange(4))
    assert "a.npz: has x_test, y_test; name the arrays x_train, y_train" in convert(tmp_path, tmp_path / "a.npz")


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_inputs(tmp_path, fault):
    (tmp_path / "p").mkdir()
    (tmp_path / "out.h5").write_bytes(b"")
    output = convert(tmp_path, *FAULTS[fault](tmp_path / "p"))
    assert output.startswith("refused: "), output
    assert sorted(os.listdir(tmp_path)) == ["out.h5", "p"], "a partial file is left"
    assert (tmp_path / "out.h5").stat().st_size == 0


def test_only_hdf5_files_are_replaced(tmp_path):
    write_image_folder(tmp_path / "in")
    (tmp_path / "out.h5").write_text("my diary")
    assert "exists but is not an HDF5 file, so it is not replaced" in convert(tmp_path, tmp_path / "in")
    assert (tmp_path / "out.h5").read_text() == "my diary"


@pytest.mark.parametrize("seed", range(200))
def test_chunks_limit_the_excess_reads_of_tiles(seed):
    rng = np.random.default_rng(seed)
    spatial = tuple(int(n) for n in np.exp(rng.uniform(0, 8, rng.integers(1, 4))))
    channels, itemsize = int(rng.integers(1, 5)), int(rng.choice([1, 2, 4]))
    chunk = chunk_shape(spatial, channels, itemsize)
    assert all(1 <= c <= n for c, n in zip(chunk[1:], (*spatial, channels), strict=True))
    excess = [count_cells_read(n, c, 2) / n for n, c in zip(spatial, chunk[1:], strict=False)]
    assert prod(sorted(excess)[-2:]) <= 1.2
    if prod(spatial) * channels * itemsize > 1 << 16:
        assert all(count_cells_read(n, c, 4) <= 1.2 * n for n, c in zip(spatial, chunk[1:], strict=False))
        assert prod(chunk) * itemsize < 1 << 24


class CountingFile:
    """File object for h5py that counts the bytes read."""

    def __init__(self, path):
        self.file, self.bytes = open(path, "rb", buffering=0), 0  # noqa: SIM115
        self.seek, self.tell, self.read = self.file.seek, self.file.tell, self.file.read

    def readinto(self, buffer):
        count = self.file.readinto(buffer)
        self.bytes += count
        return count


@pytest.mark.parametrize("size", [(640, 600), (501, 377), (224, 224)])
@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 4, 1)])
def test_bytes_read_by_four_tiles(tmp_path, monkeypatch, size, shape):
    count = 4
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (count, *size, 3), dtype=np.uint8))
    np.save(tmp_path / "y.npy", np.arange(count))
    assert convert(tmp_path, tmp_path / "x.npy", tmp_path / "y.npy") == "fine"
    files = []

    def open_file(path):
        files.append(CountingFile(path))
        return h5py.File(files[-1], "r")

    monkeypatch.setattr(hdf5_tiles, "open_hdf5", open_file)
    for grid in make_grids(*shape):
        train, *_ = nd.HDF5Dataset(tmp_path / "out.h5", test_share=0.25).open_splits(grid)
        for number in (2, 0, 1):
            train.images([number])
    image = prod(size) * 3
    read = sum(file.bytes for file in files)
    # besides the image data, each rank reads tables of HDF5
    assert image * 3 <= read <= 1.2 * image * 3 + 4 * 2**14, read / image / 3


@pytest.mark.long
def test_memory_stays_small(tmp_path):
    """Convert 320 MB with memory for a few images only."""
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
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    code, growth = result.stdout.splitlines()[-1].split()
    assert (int(code), int(growth) < 120_000) == (0, True), result.stdout
