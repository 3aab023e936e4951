import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from dataset_toys import GRIDS, grids, idx, put, small_mnist, whole

from neondist.data import MNIST
from neondist.data.datasets import mnist
from neondist.data.datasets.idx import LABELS
from neondist.errors import ConfigError, DataError

IMAGE_FILE, LABEL_FILE = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
ONE = grids(1, 1, 1)[0]


@pytest.fixture
def folder(tmp_path):
    small_mnist(tmp_path)
    return tmp_path


def fails(folder, says, in_check=True):
    """The fault is named by open, and by check too where a header shows it; the folder is in the message."""
    if in_check:
        with pytest.raises(DataError, match=says):
            MNIST(folder).check()
    else:
        MNIST(folder).check()
    with pytest.raises(DataError, match=says) as caught:
        MNIST(folder).open(ONE)
    assert str(folder) in str(caught.value)


def test_the_embedded_digits():
    data = MNIST()
    data.check()
    assert (data.sample_shape, data.classes) == ((28, 28, 1), 10)
    data.open(ONE)
    assert np.bincount(data.train.labels).tolist() == [1000] * 10
    assert np.bincount(data.test.labels).tolist() == [200] * 10
    # shuffled: no batch lacks a class
    assert all(len(set(data.train.labels[lo : lo + 128])) == 10 for lo in range(0, 9000, 128))
    x = data.train.images(range(10_000), "float64")
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02


def test_the_embedded_digits_are_real(official_mnist):
    embedded, official = MNIST(), MNIST(official_mnist)
    embedded.open(ONE)
    official.open(ONE)
    for name in ("train", "test"):
        ours, theirs = getattr(embedded, name), getattr(official, name)
        known = {tile.tobytes(): label for tile, label in zip(theirs.tiles, theirs.labels, strict=True)}
        assert all(known[tile.tobytes()] == label for tile, label in zip(ours.tiles, ours.labels, strict=True))
        assert len({tile.tobytes() for tile in ours.tiles}) == len(ours)


def test_the_official_files(official_mnist):
    data = MNIST(official_mnist)
    data.check()
    data.open(ONE)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    x = data.train.images(range(60_000))
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_plain_and_dotted_names(tmp_path, suffix):
    made = small_mnist(tmp_path, suffix)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    data = MNIST(str(tmp_path))
    data.open(ONE)
    np.testing.assert_array_equal(data.test.tiles[..., 0], made["test", "images"])
    np.testing.assert_array_equal(data.train.labels, made["train", "labels"])


@pytest.mark.parametrize("shape", GRIDS)
def test_tiles_of_all_ranks_are_the_whole(tmp_path, shape):
    made = small_mnist(tmp_path, counts=(12, 5))
    ranks = grids(*shape)
    splits = [MNIST(tmp_path).load(grid) for grid in ranks]
    boxes = [grid.tile_box((28, 28)) for grid in ranks]
    for at, name in enumerate(("train", "test")):
        chosen = [3, 0, 4]
        tiles = [split[at].images(chosen, "float64") for split in splits]
        expected = (made[name, "images"][chosen][..., None] / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(whole(tiles, boxes, (3, 28, 28, 1)), expected, rtol=0, atol=1e-14)
        for split, box in zip(splits, boxes, strict=True):
            # only the tile is kept, not a view of the whole
            assert split[at].tiles.shape == (len(split[at]), *box.shape, 1)
            assert split[at].tiles.base is None
            np.testing.assert_array_equal(split[at].labels, made[name, "labels"])


def test_a_rank_never_holds_whole_images():
    # a chunk of 1000 images is 0.8 MB, all of them 9.4 MB, a tile of one column 0.3 MB
    grid = grids(1, 1, 28)[5]
    tracemalloc.start()
    try:
        MNIST().load(grid)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def test_tilde_and_missing_places(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    MNIST(f"~/{folder.name}").check()
    fails(folder / "nowhere", r"no folder .*neondist data mnist --to")
    fails(folder / IMAGE_FILE, "is a file; give the folder")


@pytest.mark.parametrize("file", [f.name for f in mnist.ALL])
def test_a_missing_file(folder, file):
    (folder / f"{file}.gz").unlink()
    fails(folder, rf"has no {file}\[.gz\]; fetch the files with: neondist data mnist --to ")


def test_a_truncated_file(folder):
    path = folder / IMAGE_FILE
    path.write_bytes(path.read_bytes()[:5000])
    fails(folder, "train-images-idx3-ubyte.gz: damaged gzip file", in_check=False)


def test_a_wrong_magic_number(folder):
    shutil.copy(folder / LABEL_FILE, folder / IMAGE_FILE)
    fails(folder, "train-images-idx3-ubyte.gz: not an IDX file of images: magic number 2049, expected 2051")


def test_mismatched_counts(folder):
    put(folder / LABEL_FILE, idx(np.zeros(49), LABELS))
    fails(folder, "has 50 images but .*train-labels-idx1-ubyte.gz has 49 labels")


def test_other_image_sizes(folder):
    put(folder / IMAGE_FILE, idx(np.zeros((50, 32, 20))))
    fails(folder, "images of 32 x 20 pixels, MNIST has 28 x 28")


def test_a_label_that_is_no_digit(folder):
    labels = np.zeros(50)
    labels[[17, 30]] = 10
    put(folder / LABEL_FILE, idx(labels))
    fails(folder, "train-labels-idx1-ubyte.gz: label 10 of sample 17 is not a digit", in_check=False)


@pytest.mark.parametrize("pair", [mnist.TEST.images, mnist.TEST.labels])
def test_official_counts_need_official_bytes(tmp_path, pair, official_mnist):
    for file in mnist.ALL:
        shutil.copy(official_mnist / f"{file.name}.gz", tmp_path)
    path = tmp_path / f"{pair.name}.gz"
    import gzip

    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(gzip.compress(raw, 1))
    fails(tmp_path, f"{pair.name}.gz: has 10000 samples .* expected {pair.md5}", in_check=False)


@pytest.mark.parametrize(
    ("path", "says"), [("", "is not a folder"), (5, "got 5"), (["a"], "got a list"), (True, "got True")]
)
def test_a_path_that_is_none(path, says):
    with pytest.raises(ConfigError, match=f"path: .*{says}"):
        MNIST(path)


def test_the_import_is_light():
    heavy = "h5py", "mpi4py", "urllib.request", "rich"
    code = f"import sys, neondist.data; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_arguments_are_remembered():
    given = {"path": "a", "serialized_path": "b_{rank}", "validation": 0.1}
    assert MNIST(**given).arguments() == given
