"""Ranks with other data than the rest are noticed before they train: one message, on all of them."""

import numpy as np
import pytest
from dataset_toys import small_mnist
from hdf5_toys import small_hdf5

import neondist as nd
from neondist.comm import loopback
from neondist.errors import ConfigError
from neondist.train.apply import evaluate_checkpoint


class Own(nd.Dataset):
    """A data set of a user, in memory."""

    def __init__(self, value=0, label=0, mean=0.0):
        self.value, self.label, self.mean = value, label, mean

    def check(self):
        self.sample_shape, self.classes = (4, 4, 1), 3

    def load(self, grid):
        tile = grid.tile_box((4, 4)).shape
        cells = np.full((6, *tile, 1), self.value, np.uint8)
        labels = np.full(6, self.label)
        return nd.Split(cells, labels, mean=self.mean), nd.Split(cells, labels)


class Hidden(Own):
    """The same, and its arguments do not tell: files of each machine, say."""

    def arguments(self):
        return {}


def said(make, odd=1, ranks=2, replicas=1, run=None):
    """Run on ranks of which one has another data set; return what all of them say."""

    def train(comm):
        grid = nd.ProcessGrid(comm, replicas=replicas)
        model = nd.ConvnetDist([nd.FCLayerDist(10)], backend="numpy")
        experiment = nd.FitExperiment(make(comm.rank == odd), model, batch_size=2)
        try:
            experiment.run(grid, hooks=[]) if run is None else run(experiment, grid)
        except ConfigError as error:
            return str(error) if error.agreed else f"of this rank alone: {error}"
        return "fine"

    told = loopback.run(ranks, train)
    assert len(set(told)) == 1, told
    return told[0]


ARGUMENTS = {
    "seed": (lambda odd: nd.Synthetic((8, 8, 1), train=4, test=2, seed=int(odd)), "seed: 0", "seed: 1"),
    "list": (lambda odd: nd.Synthetic([8, 8, 1], train=4 + odd, test=2), "train: 4", "train: 5"),
    "mean": (lambda odd: Own(mean=[0.25] if odd else 0.25), "mean: 0.25", "mean: [0.25]"),
    "array": (lambda odd: Own(mean=np.array([0.5 + odd])), "mean: [0.5]", "mean: [1.5]"),
    "scale": (lambda odd: Hidden(mean=float(odd)), "minus [0.0]", "minus [1.0]"),
    "labels": (lambda odd: Hidden(label=int(odd)), "train split: 6 samples", "labels"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_and_facts_are_compared(what):
    make, mine, other = ARGUMENTS[what]
    told = said(make)
    assert told.startswith("the ranks disagree: rank 0 has ")
    first, second = told.split("rank 1 has ")
    assert mine in first
    assert other in second


def test_cells_of_replicas_are_compared():
    told = said(lambda odd: Hidden(value=int(odd)), odd=3, ranks=4, replicas=2)
    assert "rank 0 has tile 1: cells of hash" in told
    assert said(lambda odd: Hidden(value=7), ranks=4, replicas=2) == "fine"


def of_hdf5(tmp_path, checked):
    def make(odd):
        path = tmp_path / ("odd.h5" if odd else "x.h5")
        if not path.exists():
            made = small_hdf5(path, (8, 8, 1))
            made["train", "images"][:, 4, 4] += odd
            if checked:
                from neondist.data.convert import convert
                from neondist.data.convert.from_arrays import npz_parts

                names = {
                    f"{kind}_{part}": f"{'images' if kind == 'x' else 'labels'}"
                    for part in ("train", "test")
                    for kind in "xy"
                }
                np.savez(tmp_path / "a.npz", **{n: made[n[2:], kind] for n, kind in names.items()})
                convert(npz_parts(tmp_path / "a.npz"), path)
            elif odd:
                import h5py

                with h5py.File(path, "r+") as file:
                    file["train/images"][...] = made["train", "images"]
        return nd.HDF5Dataset(path, mean=0, std=1)

    return make


@pytest.mark.parametrize("checked", [True, False])
def test_files_are_compared(tmp_path, checked):
    make = of_hdf5(tmp_path, checked)
    make(True), make(False)
    assert "rank 0 has data of hash" in said(make)


def test_mnist_folders_are_compared_and_may_have_different_names(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        made = small_mnist(tmp_path / name, seed=seed)
        if name == "b":  # the same labels
            for label in (tmp_path / "a").glob("*labels*"):
                (tmp_path / name / label.name).write_bytes(label.read_bytes())
    assert made
    assert "rank 0 has data of hash" in said(lambda odd: nd.MNIST(tmp_path / ("b" if odd else "a")))
    assert said(lambda odd: nd.MNIST(tmp_path / ("c" if odd else "a"))) == "fine"


def test_an_evaluation_compares_too(tmp_path):
    told = said(
        lambda odd: Own(label=int(odd)),
        run=lambda experiment, grid: evaluate_checkpoint(experiment, tmp_path / "no.h5", grid),
    )
    assert "label: 0" in told
    told = said(
        lambda odd: Hidden(label=int(odd)),
        run=lambda experiment, grid: evaluate_checkpoint(experiment, tmp_path / "no.h5", grid),
    )
    assert "train split: 6 samples" in told
