import numpy as np
import pytest
from small_datasets import make_grids

from neondist.comm import ProcessGrid, loopback
from neondist.data import Dataset, Split, Synthetic
from neondist.errors import DataError, RemoteError, ShapeError

PIXELS = np.random.RandomState(0).randint(0, 256, (7, 3, 4, 2)).astype(np.uint8)
LABELS = np.arange(7, dtype=np.uint8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_images_are_normalised(dtype, tolerance):
    split = Split(PIXELS, LABELS, mean=[0.1, 0.4], std=[0.5, 2.0])
    images = split.images([5, 0, 5], dtype)
    expected = (PIXELS[[5, 0, 5]] / 255 - [0.1, 0.4]) / [0.5, 2.0]
    np.testing.assert_allclose(images, expected, rtol=0, atol=tolerance)
    assert images.dtype == dtype
    assert images.flags.c_contiguous


def test_returned_images_are_copies():
    split = Split(PIXELS.astype(np.float32), LABELS, scale=1)
    split.images([1])[...] = -1
    np.testing.assert_array_equal(split.images([1])[0], PIXELS[1])


@pytest.mark.parametrize("indices", [[], (), np.empty(0, int), range(0)])
def test_empty_indices(indices):
    split = Split(PIXELS, LABELS)
    assert split.images(indices).shape == (0, 3, 4, 2)
    assert split.targets(indices).shape == (0,)


def test_dtypes_of_targets():
    assert Split(PIXELS, LABELS).targets([3, 1]).tolist() == [3, 1]
    assert Split(PIXELS, LABELS).targets([3]).dtype == np.int64
    maps = PIXELS[..., 0]
    split = Split(PIXELS, maps)
    np.testing.assert_array_equal(split.targets([6, 2]), maps[[6, 2]])
    assert split.targets([6]).dtype == np.uint8
    assert Split(PIXELS, LABELS / 2).targets([3]).tolist() == [1.5]


def test_empty_tile():
    split = Split(np.empty((7, 0, 4, 2), np.uint8), LABELS)
    assert split.images([1, 2]).shape == (2, 0, 4, 2)
    assert len(split) == 7


def test_label_count_must_match_samples():
    with pytest.raises(ShapeError, match="7 samples but 6 labels"):
        Split(PIXELS, LABELS[:6])


class _FailingDataset(Dataset):
    def __init__(self, error):
        self.error, self.sample_shape, self.classes = error, (3, 4, 2), 7

    def check(self):
        pass

    def open_splits(self, grid):
        if grid.rank == 1:
            raise self.error
        split = Split(PIXELS, LABELS)
        return split, split


@pytest.mark.parametrize(
    ("error", "expected_type"), [(DataError("no disk"), DataError), (KeyError("bug"), RemoteError)]
)
def test_error_on_one_rank_is_raised_on_all(error, expected_type):
    def body(transport):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            _FailingDataset(error).open(ProcessGrid(transport))
        return caught.value

    raised = loopback.run(3, body)
    assert raised[1] is error
    assert [type(raised[0]), type(raised[2])] == [expected_type, expected_type]
    assert str(error) in str(raised[0])


def test_open_loads_both_splits():
    data = _FailingDataset(None)
    data.open(make_grids(1, 1, 1)[0])
    assert len(data.train) == len(data.test) == 7
    assert data.arguments() == {"error": None}


@pytest.mark.parametrize(("train", "kept"), [(7, range(7)), (30, range(20)), (95, range(0, 75, 3))])
def test_limited_number_of_batches(train, kept):
    whole, data = (Synthetic((4, 3, 1), classes=2, train=train, test=12) for _ in range(2))
    data.limit_batches(10, 2)
    for dataset in (whole, data):
        dataset.open(ProcessGrid.serial())
    assert [len(split) for split in data.splits.values()] == [len(kept), 12]
    np.testing.assert_array_equal(data.train.images(np.arange(len(kept))), whole.train.images(list(kept)))
    np.testing.assert_array_equal(data.train.targets(np.arange(len(kept))), whole.train.targets(list(kept)))


@pytest.mark.parametrize(("dtype", "white"), [("u1", 255), ("u2", 65535), ("i4", 1), ("f4", 1), ("f8", 1), ("f2", 1)])
def test_default_scale_depends_on_the_dtype(dtype, white):
    tiles = np.full((2, 3, 3, 1), 3, dtype)
    for source in (tiles, ComputedTiles(tiles)):
        np.testing.assert_array_equal(Split(source, [0, 1]).images([1], "f8"), np.full((1, 3, 3, 1), 3 / white))
        np.testing.assert_array_equal(Split(source, [0, 1], scale=2).images([1], "f8"), np.full((1, 3, 3, 1), 1.5))


class ComputedTiles:
    def __init__(self, tiles):
        self.tiles = tiles

    def __len__(self):
        return len(self.tiles)

    def __getitem__(self, numbers):
        return self.tiles[numbers]


class SingleTiles(ComputedTiles):
    def __getitem__(self, numbers):
        return self.tiles[int(numbers[0])]


def test_tiles_computed_one_by_one_are_rejected():
    with pytest.raises(
        DataError, match=r"tiles\[\[0\]\] has shape \(3, 4, 1\); tiles must accept an array of 1 sample"
    ):
        Split(SingleTiles(np.ones((2, 3, 4, 1))), [0, 1])


def test_targets_are_in_native_byte_order():
    split = Split(np.zeros((3, 4, 1)), np.arange(3, dtype=">f4"))
    assert split.targets([2, 0]).dtype.isnative
    np.testing.assert_array_equal(split.targets([2, 0]), [2, 0])
