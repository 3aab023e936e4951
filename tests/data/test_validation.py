"""The validation split: which samples it has, on any grid the same; what of a file or a folder becomes of it."""

import h5py
import numpy as np
import pytest
from dataset_toys import GRIDS, small_mnist
from fuzz import typed
from hdf5_toys import image_folder, small_hdf5
from test_cifar10 import batches, folder

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError, DataError, NotReadyError

SERIAL = nd.ProcessGrid.serial()


def opened(data, grid=SERIAL):
    data.open(grid)
    return data


def on_ranks(shape, make):
    """Return a data set of each rank, open, and its grid."""

    def body(transport):
        grid = nd.ProcessGrid(transport, *shape)
        return opened(make(), grid), grid

    return loopback.run(int(np.prod(shape)), body)


def cells(split):
    """Return the raw cells of all samples of a split."""
    return split.tiles[np.arange(len(split))]


def photographs(path, **more):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the photographs")
    for name in [] if list(path.iterdir()) else "ab":
        pixels = np.random.default_rng(ord(name)).integers(0, 256, (30, 28), np.uint8)
        image.fromarray(pixels).save(path / f"{name}.png")
    return nd.Photographs(path, crop=(12, 11), train=20, test=4, **more)


def mnist(path, **more):
    if not (path / "mnist").exists():
        small_mnist(path / "mnist", counts=(20, 5))
    return nd.MNIST(path / "mnist", serialized_path=path / "cache_{rank}.h5", **more)


def cifar10(path, **more):
    if not (path / "cifar").exists():
        folder(path / "cifar", batches())
    return nd.CIFAR10(path / "cifar", **more)


def synthetic(path, **more):
    return nd.Synthetic((9, 7, 2), train=20, test=4, **more)


class Own(nd.Dataset):
    """Without a constructor, it has the argument all the same."""

    def check(self):
        self.sample_shape, self.classes = (4, 4, 1), 3

    def load(self, grid):
        tile = (slice(None), *grid.tile_box((4, 4)).slices)
        found = np.arange(28 * 16, dtype=float).reshape(28, 4, 4, 1)
        return tuple(nd.Split(found[some][tile], np.arange(28)[some] % 3) for some in (slice(20), slice(20, 28)))


KINDS = [mnist, cifar10, synthetic, photographs, lambda path, **more: Own(**more)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("asked", "count"), [(0.25, 5), (0.01, 1), (0.999, 19), (7, 7), (19, 19)])
@pytest.mark.long
def test_the_last_training_samples(tmp_path, kind, asked, count):
    whole = opened(kind(tmp_path))  # which makes the files, once
    assert whole.validation is None
    assert list(whole.splits) == ["train", "test"]
    assert whole.selection is whole.test
    cut, plain = (lambda: kind(tmp_path, validation=asked)), (lambda: kind(tmp_path))
    pairs = []
    for shape in ((1, 1, 1), (1, 2, 2), (2, 1, 3)):
        pairs += zip(on_ranks(shape, cut), on_ranks(shape, plain), strict=True)
    for (data, _), (all_, _) in pairs:
        assert [len(split) for split in data.splits.values()] == [20 - count, count, len(whole.test)]
        assert data.selection is data.validation
        for split, numbers in ((data.train, range(20 - count)), (data.validation, range(20 - count, 20))):
            places = np.arange(len(split))[::-1]
            np.testing.assert_array_equal(split.images(places), all_.train.images(np.array(numbers)[places]))
            np.testing.assert_array_equal(split.targets(places), all_.train.targets(np.array(numbers)[places]))
        np.testing.assert_array_equal(cells(data.test), cells(all_.test))


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.0, 1.5, -0.1, float("nan"), True, [3]])
@pytest.mark.parametrize("make", [nd.MNIST, nd.Synthetic, Own, lambda **more: nd.HDF5Dataset("x.h5", **more)])
def test_what_is_no_part(wrong, make):
    with pytest.raises(ConfigError, match="validation: "):
        make(validation=wrong)


@pytest.mark.parametrize("kind", [*KINDS, lambda path, **more: hdf5(path, **more)])
@pytest.mark.parametrize("asked", [20, 10**9])
def test_some_samples_are_left_to_train_on(tmp_path, kind, asked):
    with pytest.raises(DataError, match=f"validation: {asked} of 20 training samples leave no"):
        kind(tmp_path, validation=asked).open(SERIAL)


def test_before_it_is_open():
    with pytest.raises(NotReadyError, match=r"has no 'validation' yet; call its open\(grid\) first"):
        _ = nd.Synthetic().validation


class Three(Own):
    """It has splits of its own, which of them is told by the argument."""

    def __init__(self, there, validation=None):
        super().__init__(validation=validation)
        self.there = there

    def load(self, grid):
        train, test = super().load(grid)
        return train, *(test if name in self.there else None for name in ("validation", "test"))


def test_a_data_set_may_have_a_validation_split_and_no_test_split():
    data = opened(Three(["validation"]))
    assert list(data.splits) == ["train", "validation"]
    assert data.test is None
    assert [line.split(":")[0] for line in data.fingerprint()] == ["train split", "validation split"]
    data.close()
    assert list(opened(Three(["validation", "test"])).splits) == ["train", "validation", "test"]
    assert len(opened(Three(["validation"], validation=3)).train) == 20, "its own comes first"
    assert [len(split) for split in opened(Three([], validation=3)).splits.values()] == [17, 3]
    with pytest.raises(DataError, match="neither a validation nor a test split; give validation"):
        Three([]).open(SERIAL)


def hdf5(path, **more):
    small_hdf5(path / "x.h5")
    return nd.HDF5Dataset(path / "x.h5", scale=1, **more)


@pytest.mark.parametrize(("asked", "count"), [(0.25, 5), (7, 7)])
def test_hdf5_draws_once_for_all(tmp_path, asked, count):
    """Files are often sorted by class, so that the last samples would be of one."""
    whole = cells(opened(hdf5(tmp_path)).train)
    data = opened(hdf5(tmp_path, validation=asked))
    assert [len(split) for split in data.splits.values()] == [20 - count, count, 7]
    numbers = {
        name: [next(n for n in range(20) if np.array_equal(whole[n], x)) for x in cells(split)]
        for name, split in data.splits.items()
        if name != "test"
    }
    assert sorted(numbers["train"] + numbers["validation"]) == list(range(20))
    assert numbers["validation"] != list(range(20 - count, 20))
    for shape in GRIDS[:3]:
        for found, _ in on_ranks(shape, lambda: nd.HDF5Dataset(tmp_path / "x.h5", validation=asked)):
            np.testing.assert_array_equal(found.validation.tiles.numbers, numbers["validation"])
            np.testing.assert_array_equal(found.train.tiles.numbers, numbers["train"])


def test_hdf5_keeps_samples_for_testing_and_for_validation_apart(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"], file["labels"] = np.arange(40, dtype="u1").reshape(40, 1, 1, 1), np.arange(40) % 4
    asked = {"train": "/", "scale": 1}
    before = opened(nd.HDF5Dataset(tmp_path / "x.h5", **asked))
    data = opened(nd.HDF5Dataset(tmp_path / "x.h5", validation=6, **asked))
    assert [len(split) for split in data.splits.values()] == [30, 6, 4]
    np.testing.assert_array_equal(cells(data.test), cells(before.test))
    seen = np.concatenate([cells(split).ravel() for split in data.splits.values()])
    assert sorted(seen) == list(range(40))


def test_hdf5_groups(tmp_path):
    made = small_hdf5(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.copy("test", "validation")
        file.copy("test", "other")
        del file["other/images"]
        file["other/images"] = made["test", "images"][::-1]
    data = opened(nd.HDF5Dataset(tmp_path / "x.h5", scale=1))
    assert list(data.splits) == ["train", "validation", "test"]
    np.testing.assert_array_equal(cells(data.validation), made["test", "images"])
    other = opened(nd.HDF5Dataset(tmp_path / "x.h5", validation="other"))
    np.testing.assert_array_equal(cells(other.validation), made["test", "images"][::-1])
    assert opened(nd.HDF5Dataset(tmp_path / "x.h5", validation=None)).validation is None
    for each in (data, other):
        each.close()
    with pytest.raises(DataError, match="has no group 'nowhere'; name yours with validation:"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation="nowhere").check()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["test"]
    left = opened(nd.HDF5Dataset(tmp_path / "x.h5"))
    assert [(name, len(split)) for name, split in left.splits.items()] == [("train", 20), ("validation", 7)]
    drawn = opened(nd.HDF5Dataset(tmp_path / "x.h5", test_share=0.1))
    assert [len(split) for split in drawn.splits.values()] == [18, 7, 2]


def test_hdf5_another_file(tmp_path):
    small_hdf5(tmp_path / "x.h5")
    made = small_hdf5(tmp_path / "y.h5", counts=(3, 4))
    file, expected = tmp_path / "y.h5", made["train", "images"]
    for asked in (str(file), {"path": file}, {"path": str(file), "group": "train"}):
        for data, grid in on_ranks((1, 2, 2), lambda a=asked: nd.HDF5Dataset(tmp_path / "x.h5", validation=a)):
            assert [len(split) for split in data.splits.values()] == [20, 3, 7]
            np.testing.assert_array_equal(
                cells(data.validation), expected[(slice(None), *grid.tile_box((13, 10)).slices)]
            )
    data = opened(nd.HDF5Dataset(tmp_path / "x.h5", validation={"path": file, "group": "test"}))
    np.testing.assert_array_equal(data.validation.targets(range(4)), made["test", "labels"])
    small_hdf5(file, (5, 10, 2))
    with pytest.raises(DataError, match=r"y\.h5: train/images \(20, 5, 10, 2\) .* differ in shape from train/images"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation=str(file)).check()
    with pytest.raises(DataError, match=r"y\.h5: test/images has changed since the run began"):
        data.validation.images([0])
    with pytest.raises(DataError, match=r"z\.h5: no such file"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation={"path": tmp_path / "z.h5"}).check()


@pytest.mark.parametrize("asked", [{}, {"file": "x"}, {"path": ""}, {"path": "y.h5", "group": ""}, ""])
def test_hdf5_what_is_no_place(asked):
    with pytest.raises(ConfigError, match="validation: "):
        nd.HDF5Dataset("x.h5", validation=asked)


def convert(path, *words):
    return typed("data", "convert", *words, "--to", path / "out.h5")


@pytest.mark.parametrize("called", ["val", "valid", "Validation"])
def test_folders(tmp_path, called):
    names = {"train": "train", "validation": called, "test": "test"}
    made = {split: image_folder(tmp_path / "in" / name, count=2, seed=len(split)) for split, name in names.items()}
    assert convert(tmp_path, tmp_path / "in") == "fine"
    data = opened(nd.HDF5Dataset(tmp_path / "out.h5"))
    for split, found in data.splits.items():
        np.testing.assert_array_equal(cells(found), [image for image, _ in made[split]])
    (tmp_path / "in" / "test").rename(tmp_path / "test")
    assert convert(tmp_path, tmp_path / "in") == "fine"
    assert [len(split) for split in opened(nd.HDF5Dataset(tmp_path / "out.h5")).splits.values()] == [4, 4]
    image_folder(tmp_path / "in" / "vali", ("cow",))
    (tmp_path / "in" / "vali").rename(tmp_path / "in" / ("val" if called != "val" else "valid"))
    assert "has several folders for one split: " in convert(tmp_path, tmp_path / "in")


def test_maps_in_folders(tmp_path):
    for name in ("train", "val"):
        image_folder(tmp_path / "in" / name, ("x",), 2)
        image_folder(tmp_path / "maps" / name, ("x",), 2, mode="L", seed=len(name))
    assert convert(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps") == "fine"
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["validation/labels"].shape == (2, 12, 9)


def test_folders_without_one_to_train_on(tmp_path):
    image_folder(tmp_path / "in" / "val")
    assert "has a folder 'val', but no training folder" in convert(tmp_path, tmp_path / "in")


def test_numpy_files(tmp_path):
    draw, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        arrays |= {f"x_{split}": draw.integers(0, 255, (count, 5, 4), "u1"), f"y_{split}": np.arange(count) % 2}
    np.savez(tmp_path / "all.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    for words in ([tmp_path / "all.npz"], [tmp_path / f"{name}.npy" for name in arrays]):
        assert convert(tmp_path, *words) == "fine"
        splits = opened(nd.HDF5Dataset(tmp_path / "out.h5")).splits
        for found, split in zip(splits.values(), ("train", "val", "test"), strict=True):
            np.testing.assert_array_equal(cells(found)[..., 0], arrays[f"x_{split}"])
    assert "four files (training, test), or six" in convert(tmp_path, *words[:3])
