"""Crops of photographs: tiles on any grid show the same whitened pixels."""

from importlib.util import find_spec

import numpy as np
import pytest

import neondist as nd
from neondist.comm import loopback
from neondist.data.datasets.photographs import whiten
from neondist.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image", reason="Pillow reads the photographs")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, shape in (("b.png", (40, 50)), ("a.jpg", (45, 38, 3)), ("notes.txt", None)):
        if shape is None:
            (tmp_path / name).write_text("no picture")
        else:
            Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(tmp_path / name)
    return tmp_path


def open_photographs(folder, grid=None, **overrides):
    data = nd.Photographs(folder, **{"crop": (30, 33), "train": 6, "test": 3} | overrides)
    data.open(grid or nd.ProcessGrid.serial())
    return data


def test_tiles_match_one_process(folder):
    data = open_photographs(folder)
    assert (data.sample_shape, data.classes) == ((30, 33, 1), 2)
    np.testing.assert_array_equal(data.train.targets(range(6)), [0, 1, 0, 1, 0, 1])
    images = data.train.images(range(6))
    assert len(np.unique(images[:, 0, 0, 0])) == 6

    def gather_images(comm):
        grid = nd.ProcessGrid(comm)
        rank_data = open_photographs(folder, grid)
        array = nd.GlobalArray(grid, (6, 30, 33, 1))
        return array.gather(rank_data.train.images(range(6)))

    for gathered in loopback.run(6, gather_images):
        np.testing.assert_array_equal(gathered, images)


def test_crops_differ_by_split_and_seed(folder):
    data, other = open_photographs(folder), open_photographs(folder, seed=1)
    assert not np.array_equal(data.train.images([0]), data.test.images([0]))
    assert not np.array_equal(data.train.images([0]), other.train.images([0]))


def test_whitening_flattens_natural_spectra():
    n = 128
    frequency = np.hypot(np.fft.fftfreq(n)[:, None], np.fft.rfftfreq(n)[None])
    phases = np.exp(2j * np.pi * np.random.default_rng(0).uniform(size=frequency.shape))
    natural = np.fft.irfft2(phases / np.maximum(frequency, 1 / n), s=(n, n))
    white = whiten(natural)
    assert white.dtype == np.float32
    assert [white.mean(), white.var()] == pytest.approx([0, 1], abs=1e-5)
    amplitude = np.abs(np.fft.rfft2(white))
    low, high = (amplitude[(frequency > a) & (frequency < a + 0.03)].mean() for a in (0.05, 0.2))
    assert 0.7 < low / high < 1.4
    np.testing.assert_array_equal(whiten(np.ones((9, 9))), np.zeros((9, 9)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda f: nd.Photographs(f, crop=41).check(), DataError, "45 x 38 pixels, smaller than the crop 41 x 41"),
        (lambda f: nd.Photographs(f / "none").check(), DataError, "cannot be read: No such file"),
        (lambda f: nd.Photographs(f, crop=[1, 2, 3]), ConfigError, "crop"),
        (lambda f: nd.Photographs(f, train=0), ConfigError, "train: expected an integer .*, got 0"),
    ],
)
def test_invalid_arguments(folder, make, error, message):
    with pytest.raises(error, match=message):
        make(folder)


def test_errors_name_invalid_images(folder):
    (folder / "c.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"c\.png: cannot be read as an image"):
        open_photographs(folder)


def test_photographs_of_installed_packages():
    if not (find_spec("skimage") and find_spec("sklearn")):
        with pytest.raises(DataError, match=r"neondist\[examples\]"):
            nd.Photographs().check()
        pytest.skip("scikit-image and scikit-learn provide the photographs")
    data = nd.Photographs()
    data.check()
    assert data.classes == 9
