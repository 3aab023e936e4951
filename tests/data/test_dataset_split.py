import numpy as np
import pytest
from dataset_toys import grids

from neondist.comm import ProcessGrid, loopback
from neondist.data import Dataset, Split
from neondist.errors import DataError, RemoteError, ShapeError

PIXELS = np.random.RandomState(0).randint(0, 256, (7, 3, 4, 2)).astype(np.uint8)
LABELS = np.arange(7, dtype=np.uint8)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-6), ("float64", 1e-14)])
def test_images_are_normalised(dtype, near):
    split = Split(PIXELS, LABELS, mean=[0.1, 0.4], std=[0.5, 2.0])
    found = split.images([5, 0, 5], dtype)
    expected = (PIXELS[[5, 0, 5]] / 255 - [0.1, 0.4]) / [0.5, 2.0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=near)
    assert found.dtype == dtype
    assert found.flags.c_contiguous


def test_images_may_be_changed_by_the_caller():
    split = Split(PIXELS.astype(np.float32), LABELS, scale=1)
    split.images([1])[...] = -1
    np.testing.assert_array_equal(split.images([1])[0], PIXELS[1])


@pytest.mark.parametrize("none", [[], (), np.empty(0, int), range(0)])
def test_no_indices_give_no_samples(none):
    split = Split(PIXELS, LABELS)
    assert split.images(none).shape == (0, 3, 4, 2)
    assert split.targets(none).shape == (0,)


def test_classes_are_int64_and_target_images_stay():
    assert Split(PIXELS, LABELS).targets([3, 1]).tolist() == [3, 1]
    assert Split(PIXELS, LABELS).targets([3]).dtype == np.int64
    maps = PIXELS[..., 0]
    split = Split(PIXELS, maps)
    np.testing.assert_array_equal(split.targets([6, 2]), maps[[6, 2]])
    assert split.targets([6]).dtype == np.uint8
    assert Split(PIXELS, LABELS / 2).targets([3]).tolist() == [1.5]


def test_an_empty_tile_has_samples_without_cells():
    split = Split(np.empty((7, 0, 4, 2), np.uint8), LABELS)
    assert split.images([1, 2]).shape == (2, 0, 4, 2)
    assert len(split) == 7


def test_as_many_labels_as_samples():
    with pytest.raises(ShapeError, match="7 samples but 6 labels"):
        Split(PIXELS, LABELS[:6])


class _FailsOnRank1(Dataset):
    def __init__(self, error):
        self.error, self.sample_shape, self.classes = error, (3, 4, 2), 7

    def check(self):
        pass

    def load(self, grid):
        if grid.rank == 1:
            raise self.error
        split = Split(PIXELS, LABELS)
        return split, split


@pytest.mark.parametrize(("error", "elsewhere"), [(DataError("no disk"), DataError), (KeyError("bug"), RemoteError)])
def test_a_failure_on_one_rank_is_raised_on_all(error, elsewhere):
    def body(transport):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            _FailsOnRank1(error).open(ProcessGrid(transport))
        return caught.value

    raised = loopback.run(3, body)
    assert raised[1] is error
    assert [type(raised[0]), type(raised[2])] == [elsewhere, elsewhere]
    assert str(error) in str(raised[0])


def test_open_gives_both_splits():
    data = _FailsOnRank1(None)
    data.open(grids(1, 1, 1)[0])
    assert len(data.train) == len(data.test) == 7
    assert data.arguments() == {"error": None}
