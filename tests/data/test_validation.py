"""Validation splits: the choice of samples, independent of the grid, and splits of files and folders."""

import h5py
import numpy as np
import pytest
from convert_runs import convert
from dataset_factories import DATASET_FACTORIES, CustomDataset, make_hdf5, open_dataset, read_raw_cells
from small_datasets import GRIDS
from small_hdf5 import write_hdf5, write_image_folder

import neondist as nd
from neondist.comm import loopback
from neondist.config import load_experiment
from neondist.config.source import add_location
from neondist.errors import ConfigError, DataError, NotReadyError

SERIAL = nd.ProcessGrid.serial()


def open_on_ranks(shape, make):
    """Return the opened dataset and the grid of each rank."""

    def body(transport):
        grid = nd.ProcessGrid(transport, *shape)
        return open_dataset(make(), grid), grid

    return loopback.run(int(np.prod(shape)), body)


@pytest.mark.parametrize("make", DATASET_FACTORIES)
@pytest.mark.parametrize(("validation", "count"), [(0.25, 5), (0.01, 1), (0.999, 19), (7, 7), (19, 19)])
@pytest.mark.long
def test_validation_takes_the_last_training_samples(tmp_path, make, validation, count):
    undivided = open_dataset(make(tmp_path))  # writes the files
    assert undivided.validation is None
    assert list(undivided.splits) == ["train", "test"]
    assert undivided.selection_split is undivided.test
    make_divided, make_undivided = (lambda: make(tmp_path, validation=validation)), (lambda: make(tmp_path))
    pairs = []
    for shape in ((1, 1, 1), (1, 2, 2), (2, 1, 3)):
        pairs += zip(open_on_ranks(shape, make_divided), open_on_ranks(shape, make_undivided), strict=True)
    for (data, _), (expected, _) in pairs:
        assert [len(split) for split in data.splits.values()] == [20 - count, count, len(undivided.test)]
        assert data.selection_split is data.validation
        for split, numbers in ((data.train, range(20 - count)), (data.validation, range(20 - count, 20))):
            positions = np.arange(len(split))[::-1]
            np.testing.assert_array_equal(split.images(positions), expected.train.images(np.array(numbers)[positions]))
            np.testing.assert_array_equal(
                split.targets(positions), expected.train.targets(np.array(numbers)[positions])
            )
        np.testing.assert_array_equal(read_raw_cells(data.test), read_raw_cells(expected.test))


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.0, 1.5, -0.1, float("nan"), True, [3]])
@pytest.mark.parametrize(
    "make", [nd.MNIST, nd.Synthetic, CustomDataset, lambda **options: nd.HDF5Dataset("x.h5", **options)]
)
def test_invalid_validation_arguments(value, make):
    with pytest.raises(ConfigError, match="validation: "):
        make(validation=value)


@pytest.mark.parametrize("make", [*DATASET_FACTORIES, make_hdf5])
@pytest.mark.parametrize("validation", [20, 10**9])
def test_validation_leaves_training_samples(tmp_path, make, validation):
    with pytest.raises(DataError, match=f"validation: holding out {validation} of 20 training samples leaves none"):
        make(tmp_path, validation=validation).open(SERIAL)


def test_unopened_dataset_has_no_validation():
    with pytest.raises(NotReadyError, match=r"has no 'validation' yet; call its open\(grid\) first"):
        _ = nd.Synthetic().validation


class CustomSplits(CustomDataset):
    """Dataset that provides the splits named by `available` itself."""

    def __init__(self, available, validation=None):
        super().__init__(validation=validation)
        self.available = available

    def open_splits(self, grid):
        train, test = super().open_splits(grid)
        return train, *(test if name in self.available else None for name in ("validation", "test"))


def test_validation_split_without_test_split():
    data = open_dataset(CustomSplits(["validation"]))
    assert list(data.splits) == ["train", "validation"]
    assert data.test is None
    assert [line.split(":")[0] for line in data.properties_equal_on_all_ranks()] == ["train split", "validation split"]
    data.close()
    assert list(open_dataset(CustomSplits(["validation", "test"])).splits) == ["train", "validation", "test"]
    assert len(open_dataset(CustomSplits(["validation"], validation=3)).train) == 20, (
        "the split of the dataset has precedence"
    )
    assert [len(split) for split in open_dataset(CustomSplits([], validation=3)).splits.values()] == [17, 3]
    data = open_dataset(CustomSplits([]))
    assert list(data.splits) == ["train"]
    assert data.selection_split is data.train


@pytest.mark.parametrize(("validation", "count"), [(0.25, 5), (7, 7)])
def test_hdf5_draws_the_same_samples_on_all_ranks(tmp_path, validation, count):
    """Draw samples at random, as files are often sorted by class."""
    images = read_raw_cells(open_dataset(make_hdf5(tmp_path)).train)
    data = open_dataset(make_hdf5(tmp_path, validation=validation))
    assert [len(split) for split in data.splits.values()] == [20 - count, count, 7]
    numbers = {
        name: [next(n for n in range(20) if np.array_equal(images[n], x)) for x in read_raw_cells(split)]
        for name, split in data.splits.items()
        if name != "test"
    }
    assert sorted(numbers["train"] + numbers["validation"]) == list(range(20))
    assert numbers["validation"] != list(range(20 - count, 20))
    for shape in GRIDS[:3]:
        for rank_data, _ in open_on_ranks(shape, lambda: nd.HDF5Dataset(tmp_path / "x.h5", validation=validation)):
            np.testing.assert_array_equal(rank_data.validation.tiles.sample_numbers, numbers["validation"])
            np.testing.assert_array_equal(rank_data.train.tiles.sample_numbers, numbers["train"])


def test_hdf5_test_and_validation_samples_are_disjoint(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"], file["labels"] = np.arange(40, dtype="u1").reshape(40, 1, 1, 1), np.arange(40) % 4
    options = {"train": "/", "scale": 1}
    undivided = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", **options))
    data = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", validation=6, **options))
    assert [len(split) for split in data.splits.values()] == [30, 6, 4]
    np.testing.assert_array_equal(read_raw_cells(data.test), read_raw_cells(undivided.test))
    values = np.concatenate([read_raw_cells(split).ravel() for split in data.splits.values()])
    assert sorted(values) == list(range(40))


def test_hdf5_groups(tmp_path):
    arrays = write_hdf5(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.copy("test", "validation")
        file.copy("test", "other")
        del file["other/images"]
        file["other/images"] = arrays["test", "images"][::-1]
    data = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", scale=1))
    assert list(data.splits) == ["train", "validation", "test"]
    np.testing.assert_array_equal(read_raw_cells(data.validation), arrays["test", "images"])
    other = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", validation="other"))
    np.testing.assert_array_equal(read_raw_cells(other.validation), arrays["test", "images"][::-1])
    assert open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", validation=None)).validation is None
    for dataset in (data, other):
        dataset.close()
    with pytest.raises(DataError, match="has no group 'nowhere'; specify the group with validation:"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation="nowhere").check()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["test"]
    without_test = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5"))
    assert [(name, len(split)) for name, split in without_test.splits.items()] == [("train", 20), ("validation", 7)]
    with_test_share = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", test_share=0.1))
    assert [len(split) for split in with_test_share.splits.values()] == [18, 7, 2]


def test_hdf5_validation_from_another_file(tmp_path):
    write_hdf5(tmp_path / "x.h5")
    arrays = write_hdf5(tmp_path / "y.h5", counts=(3, 4))
    file, expected = tmp_path / "y.h5", arrays["train", "images"]
    for validation in (str(file), {"path": file}, {"path": str(file), "group": "train"}):
        for data, grid in open_on_ranks(
            (1, 2, 2), lambda a=validation: nd.HDF5Dataset(tmp_path / "x.h5", validation=a)
        ):
            assert [len(split) for split in data.splits.values()] == [20, 3, 7]
            np.testing.assert_array_equal(
                read_raw_cells(data.validation), expected[(slice(None), *grid.tile_box((13, 10)).slices)]
            )
    data = open_dataset(nd.HDF5Dataset(tmp_path / "x.h5", validation={"path": file, "group": "test"}))
    np.testing.assert_array_equal(data.validation.targets(range(4)), arrays["test", "labels"])
    write_hdf5(file, (5, 10, 2))
    with pytest.raises(DataError, match=r"y\.h5: train/images \(20, 5, 10, 2\) .* differ in shape from train/images"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation=str(file)).check()
    with pytest.raises(DataError, match=r"y\.h5: test/images has changed since the run began"):
        data.validation.images([0])
    with pytest.raises(DataError, match=r"z\.h5: no such file"):
        nd.HDF5Dataset(tmp_path / "x.h5", validation={"path": tmp_path / "z.h5"}).check()


def test_hdf5_test_samples_from_another_file(tmp_path):
    arrays = write_hdf5(tmp_path / "a.h5")
    others = write_hdf5(tmp_path / "b.h5", counts=(5, 3))
    for test, key in [
        (str(tmp_path / "b.h5"), "train"),
        ({"path": tmp_path / "b.h5"}, "train"),
        ({"path": tmp_path / "b.h5", "group": "test"}, "test"),
    ]:
        data = open_dataset(nd.HDF5Dataset(tmp_path / "a.h5", test=test))
        np.testing.assert_array_equal(data.test.tiles[np.arange(len(data.test))], others[key, "images"])
        assert len(data.train) == len(arrays["train", "images"])
        assert data.validation is None
    for test, message in [
        ({"path": str(tmp_path / "b.h5"), "group": "none"}, "b.h5: has no group 'none'; specify the group with test"),
        ("holdout", "a.h5: has no group 'holdout'; specify the group with test"),
        (str(tmp_path / "c.h5"), "c.h5"),
        ({"group": "x"}, "test: .* is invalid; expected {path: FILE, group: NAME}"),
    ]:
        with pytest.raises(nd.UserError, match=message):
            nd.HDF5Dataset(tmp_path / "a.h5", test=test).check()


@pytest.mark.parametrize("validation", [{}, {"file": "x"}, {"path": ""}, {"path": "y.h5", "group": ""}, ""])
def test_hdf5_invalid_validation_sources(validation):
    with pytest.raises(ConfigError, match="validation: "):
        nd.HDF5Dataset("x.h5", validation=validation)


@pytest.mark.parametrize("folder_name", ["val", "valid", "Validation"])
def test_folders(tmp_path, folder_name):
    names = {"train": "train", "validation": folder_name, "test": "test"}
    samples = {
        split: write_image_folder(tmp_path / "in" / name, count=2, seed=len(split)) for split, name in names.items()
    }
    assert convert(tmp_path, tmp_path / "in") == "fine"
    data = open_dataset(nd.HDF5Dataset(tmp_path / "out.h5"))
    for split, opened_split in data.splits.items():
        np.testing.assert_array_equal(read_raw_cells(opened_split), [image for image, _ in samples[split]])
    (tmp_path / "in" / "test").rename(tmp_path / "test")
    assert convert(tmp_path, tmp_path / "in") == "fine"
    assert [len(split) for split in open_dataset(nd.HDF5Dataset(tmp_path / "out.h5")).splits.values()] == [4, 4]
    write_image_folder(tmp_path / "in" / "vali", ("cow",))
    (tmp_path / "in" / "vali").rename(tmp_path / "in" / ("val" if folder_name != "val" else "valid"))
    assert "has several folders for one split: " in convert(tmp_path, tmp_path / "in")


def test_label_maps_in_folders(tmp_path):
    for name in ("train", "val"):
        write_image_folder(tmp_path / "in" / name, ("x",), 2)
        write_image_folder(tmp_path / "maps" / name, ("x",), 2, mode="L", seed=len(name))
    assert convert(tmp_path, tmp_path / "in", "--maps", tmp_path / "maps") == "fine"
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["validation/labels"].shape == (2, 12, 9)


def test_missing_training_folder(tmp_path):
    write_image_folder(tmp_path / "in" / "val")
    assert "has a folder 'val', but no training folder" in convert(tmp_path, tmp_path / "in")


def test_numpy_files(tmp_path):
    rng, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        arrays |= {f"x_{split}": rng.integers(0, 255, (count, 5, 4), "u1"), f"y_{split}": np.arange(count) % 2}
    np.savez(tmp_path / "all.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    for words in ([tmp_path / "all.npz"], [tmp_path / f"{name}.npy" for name in arrays]):
        assert convert(tmp_path, *words) == "fine"
        splits = open_dataset(nd.HDF5Dataset(tmp_path / "out.h5")).splits
        for opened_split, split in zip(splits.values(), ("train", "val", "test"), strict=True):
            np.testing.assert_array_equal(read_raw_cells(opened_split)[..., 0], arrays[f"x_{split}"])
    assert "four files (training, test), or six" in convert(tmp_path, *words[:3])


def test_too_many_validation_samples_name_the_line(tmp_path):
    (tmp_path / "e.yaml").write_text(
        "!FitExperiment\ndataset: !Synthetic\n  shape: [4, 4, 1]\n  train: 12\n  validation: 12\n"
        "model: !Convnet {layers: [!FCLayer {out_features: 4}], cost: !CrossEntropy {}, optimizer: !SGD {}}\n"
    )
    dataset = load_experiment(tmp_path / "e.yaml").dataset
    with pytest.raises(DataError) as error:
        open_dataset(dataset)
    assert str(add_location(error.value)).endswith(
        "e.yaml:5: dataset.validation: holding out 12 of 12 training samples leaves none for training; hold out fewer"
    )
