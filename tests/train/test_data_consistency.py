"""Cross-rank consistency check of data sets: one message on all ranks."""

import numpy as np
import pytest
from small_datasets import write_mnist
from small_hdf5 import write_hdf5

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.train.checkpoint_evaluation import evaluate_checkpoint


class UserDataset(nd.Dataset):
    """Data set of a user, in memory."""

    def __init__(self, value=0, label=0, mean=0.0):
        self.value, self.label, self.mean = value, label, mean

    def check(self):
        self.sample_shape, self.classes = (4, 4, 1), 3

    def open_splits(self, grid):
        tile = grid.tile_box((4, 4)).shape
        cells = np.full((6, *tile, 1), self.value, np.uint8)
        labels = np.full(6, self.label)
        return nd.Split(cells, labels, mean=self.mean), nd.Split(cells, labels)


class UserDatasetWithoutArguments(UserDataset):
    """Variant whose arguments do not reveal a difference, as with local files."""

    def arguments(self):
        return {}


def collect_message(make, odd_rank=1, ranks=2, replicas=1, run=None):
    """Train with a different data set on one rank; return the message that all ranks raise."""

    def train(comm):
        grid = nd.ProcessGrid(comm, replicas=replicas)
        model = nd.ConvnetDist([nd.FCLayerDist(10)], backend="numpy")
        experiment = nd.FitExperiment(make(comm.rank == odd_rank), model, batch_size=2)
        try:
            experiment.run(grid, hooks=[]) if run is None else run(experiment, grid)
        except ConfigError as error:
            return str(error) if error.raised_on_all_ranks else f"on this rank only: {error}"
        return "no error"

    messages = loopback.run(ranks, train)
    assert len(set(messages)) == 1, messages
    return messages[0]


DATASETS_THAT_DIFFER = {
    "seed": (lambda is_odd: nd.Synthetic((8, 8, 1), train=4, test=2, seed=int(is_odd)), "seed: 0", "seed: 1"),
    "list": (lambda is_odd: nd.Synthetic([8, 8, 1], train=4 + is_odd, test=2), "train: 4", "train: 5"),
    "mean": (lambda is_odd: UserDataset(mean=[0.25] if is_odd else 0.25), "mean: 0.25", "mean: [0.25]"),
    "array": (lambda is_odd: UserDataset(mean=np.array([0.5 + is_odd])), "mean: [0.5]", "mean: [1.5]"),
    "scale": (lambda is_odd: UserDatasetWithoutArguments(mean=float(is_odd)), "minus [0.0]", "minus [1.0]"),
    "labels": (lambda is_odd: UserDatasetWithoutArguments(label=int(is_odd)), "train split: 6 samples", "labels"),
}


@pytest.mark.parametrize("case", DATASETS_THAT_DIFFER)
def test_arguments_and_facts_are_compared(case):
    make, expected_first, expected_second = DATASETS_THAT_DIFFER[case]
    message = collect_message(make)
    assert message.startswith("the ranks disagree: rank 0 has ")
    first, second = message.split("rank 1 has ")
    assert expected_first in first
    assert expected_second in second


def test_cells_of_replicas_are_compared():
    message = collect_message(
        lambda is_odd: UserDatasetWithoutArguments(value=int(is_odd)), odd_rank=3, ranks=4, replicas=2
    )
    assert "rank 0 has tile 1: cells with hash" in message
    assert collect_message(lambda is_odd: UserDatasetWithoutArguments(value=7), ranks=4, replicas=2) == "no error"


def make_hdf5_factory(tmp_path, checked):
    def make(is_odd):
        path = tmp_path / ("odd.h5" if is_odd else "x.h5")
        if not path.exists():
            arrays = write_hdf5(path, (8, 8, 1))
            arrays["train", "images"][:, 4, 4] += is_odd
            if checked:
                from neondist.data.convert import convert
                from neondist.data.convert.from_arrays import npz_splits

                names = {
                    f"{kind}_{part}": f"{'images' if kind == 'x' else 'labels'}"
                    for part in ("train", "test")
                    for kind in "xy"
                }
                np.savez(tmp_path / "a.npz", **{n: arrays[n[2:], kind] for n, kind in names.items()})
                convert(npz_splits(tmp_path / "a.npz"), path)
            elif is_odd:
                import h5py

                with h5py.File(path, "r+") as file:
                    file["train/images"][...] = arrays["train", "images"]
        return nd.HDF5Dataset(path, mean=0, std=1)

    return make


@pytest.mark.parametrize("checked", [True, False])
def test_files_are_compared(tmp_path, checked):
    make = make_hdf5_factory(tmp_path, checked)
    make(True), make(False)
    assert "rank 0 has data of hash" in collect_message(make)


def test_mnist_folders_are_compared_by_content(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        arrays = write_mnist(tmp_path / name, seed=seed)
        if name == "b":  # the same labels
            for label in (tmp_path / "a").glob("*labels*"):
                (tmp_path / name / label.name).write_bytes(label.read_bytes())
    assert arrays
    assert "rank 0 has data of hash" in collect_message(lambda is_odd: nd.MNIST(tmp_path / ("b" if is_odd else "a")))
    assert collect_message(lambda is_odd: nd.MNIST(tmp_path / ("c" if is_odd else "a"))) == "no error"


def test_evaluation_compares_data(tmp_path):
    message = collect_message(
        lambda is_odd: UserDataset(label=int(is_odd)),
        run=lambda experiment, grid: evaluate_checkpoint(experiment, tmp_path / "no.h5", grid),
    )
    assert "label: 0" in message
    message = collect_message(
        lambda is_odd: UserDatasetWithoutArguments(label=int(is_odd)),
        run=lambda experiment, grid: evaluate_checkpoint(experiment, tmp_path / "no.h5", grid),
    )
    assert "train split: 6 samples" in message
