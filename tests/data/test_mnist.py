import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from small_datasets import GRIDS, assemble_image, encode_idx, make_grids, write_bytes, write_mnist

from neondist.data import MNIST
from neondist.data.datasets import mnist
from neondist.data.datasets.idx import LABELS_MAGIC
from neondist.errors import ConfigError, DataError

IMAGE_FILE, LABEL_FILE = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
SERIAL_GRID = make_grids(1, 1, 1)[0]


@pytest.fixture
def folder(tmp_path):
    write_mnist(tmp_path)
    return tmp_path


def check_error(folder, message, in_check=True):
    """Check that `open`, and with `in_check` also `check`, raise an error that names the folder."""
    if in_check:
        with pytest.raises(DataError, match=message):
            MNIST(folder).check()
    else:
        MNIST(folder).check()
    with pytest.raises(DataError, match=message) as caught:
        MNIST(folder).open(SERIAL_GRID)
    assert str(folder) in str(caught.value)


def test_embedded_digits():
    data = MNIST()
    data.check()
    assert (data.sample_shape, data.classes) == ((28, 28, 1), 10)
    data.open(SERIAL_GRID)
    assert np.bincount(data.train.labels).tolist() == [1000] * 10
    assert np.bincount(data.test.labels).tolist() == [200] * 10
    # shuffled: no batch lacks a class
    assert all(len(set(data.train.labels[lo : lo + 128])) == 10 for lo in range(0, 9000, 128))
    x = data.train.images(range(10_000), "float64")
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02


def test_embedded_digits_are_official_ones(official_mnist):
    embedded, official = MNIST(), MNIST(official_mnist)
    embedded.open(SERIAL_GRID)
    official.open(SERIAL_GRID)
    for name in ("train", "test"):
        embedded_split, official_split = getattr(embedded, name), getattr(official, name)
        labels = {
            tile.tobytes(): label for tile, label in zip(official_split.tiles, official_split.labels, strict=True)
        }
        assert all(
            labels[tile.tobytes()] == label
            for tile, label in zip(embedded_split.tiles, embedded_split.labels, strict=True)
        )
        assert len({tile.tobytes() for tile in embedded_split.tiles}) == len(embedded_split)


def test_official_files(official_mnist):
    data = MNIST(official_mnist)
    data.check()
    data.open(SERIAL_GRID)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    x = data.train.images(range(60_000))
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_file_names(tmp_path, suffix):
    arrays = write_mnist(tmp_path, suffix)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    data = MNIST(str(tmp_path))
    data.open(SERIAL_GRID)
    np.testing.assert_array_equal(data.test.tiles[..., 0], arrays["test", "images"])
    np.testing.assert_array_equal(data.train.labels, arrays["train", "labels"])


@pytest.mark.parametrize("shape", GRIDS)
def test_tiles_cover_the_images(tmp_path, shape):
    arrays = write_mnist(tmp_path, counts=(12, 5))
    ranks = make_grids(*shape)
    splits = [MNIST(tmp_path).open_splits(grid) for grid in ranks]
    boxes = [grid.tile_box((28, 28)) for grid in ranks]
    for split_index, name in enumerate(("train", "test")):
        numbers = [3, 0, 4]
        tiles = [split[split_index].images(numbers, "float64") for split in splits]
        expected = (arrays[name, "images"][numbers][..., None] / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(assemble_image(tiles, boxes, (3, 28, 28, 1)), expected, rtol=0, atol=1e-14)
        for split, box in zip(splits, boxes, strict=True):
            # the tile is a copy, not a view of full images
            assert split[split_index].tiles.shape == (len(split[split_index]), *box.shape, 1)
            assert split[split_index].tiles.base is None
            np.testing.assert_array_equal(split[split_index].labels, arrays[name, "labels"])


def test_memory_of_one_rank():
    # a chunk of 1000 images takes 0.8 MB, all images 9.4 MB, a tile of one column 0.3 MB
    grid = make_grids(1, 1, 28)[5]
    tracemalloc.start()
    try:
        MNIST().open_splits(grid)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def test_tilde_and_missing_folders(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    MNIST(f"~/{folder.name}").check()
    check_error(folder / "nowhere", r"no folder .*neondist data mnist --to")
    check_error(folder / IMAGE_FILE, "is a file; give the folder")


@pytest.mark.parametrize("file", [f.name for f in mnist.ALL_FILES])
def test_missing_file(folder, file):
    (folder / f"{file}.gz").unlink()
    check_error(folder, rf"has no {file}\[.gz\]; fetch the files with: neondist data mnist --to ")


def test_truncated_file(folder):
    path = folder / IMAGE_FILE
    path.write_bytes(path.read_bytes()[:5000])
    check_error(folder, "train-images-idx3-ubyte.gz: damaged gzip file", in_check=False)


def test_wrong_magic_number(folder):
    shutil.copy(folder / LABEL_FILE, folder / IMAGE_FILE)
    check_error(folder, "train-images-idx3-ubyte.gz: not an IDX file of images: magic number 2049, expected 2051")


def test_mismatched_counts(folder):
    write_bytes(folder / LABEL_FILE, encode_idx(np.zeros(49), LABELS_MAGIC))
    check_error(folder, "has 50 images but .*train-labels-idx1-ubyte.gz has 49 labels")


def test_wrong_image_size(folder):
    write_bytes(folder / IMAGE_FILE, encode_idx(np.zeros((50, 32, 20))))
    check_error(folder, "images of 32 x 20 pixels instead of 28 x 28")


def test_label_out_of_range(folder):
    labels = np.zeros(50)
    labels[[17, 30]] = 10
    write_bytes(folder / LABEL_FILE, encode_idx(labels))
    check_error(folder, "train-labels-idx1-ubyte.gz: label 10 of sample 17 is not a digit", in_check=False)


@pytest.mark.parametrize("pair", [mnist.TEST.images, mnist.TEST.labels])
def test_official_counts_require_official_checksums(tmp_path, pair, official_mnist):
    for file in mnist.ALL_FILES:
        shutil.copy(official_mnist / f"{file.name}.gz", tmp_path)
    path = tmp_path / f"{pair.name}.gz"
    import gzip

    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(gzip.compress(raw, 1))
    check_error(tmp_path, f"{pair.name}.gz: has 10000 samples .* instead of {pair.md5}", in_check=False)


@pytest.mark.parametrize(
    ("path", "message"), [("", "is not a folder"), (5, "got 5"), (["a"], "got a list"), (True, "got True")]
)
def test_invalid_paths(path, message):
    with pytest.raises(ConfigError, match=f"path: .*{message}"):
        MNIST(path)


def test_import_is_lightweight():
    heavy = "h5py", "mpi4py", "urllib.request", "rich"
    code = f"import sys, neondist.data; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.strip() == "[]"


def test_arguments_are_remembered():
    arguments = {"path": "a", "serialized_path": "b_{rank}", "validation": 0.1}
    assert MNIST(**arguments).arguments() == arguments
