"""Damaged data files: each is refused in one message, or still read."""

import importlib.util

import numpy as np
import pytest
from dataset_toys import small_mnist
from fuzz import check_outcomes, damaged, outcome, survive, typed
from hdf5_toys import image_folder, small_hdf5
from test_cifar10 import archive, batches, folder

import neondist as nd

EXPERIMENT = """
!FitExperiment
backend: numpy
dataset: {}
model: !ConvnetDist
  layers: [!MaxPoolingLayerDist {{kernel_size: 3}}, !FCLayerDist {{out_features: 10}}]
batch_size: 4
"""


@pytest.fixture
def trained(tmp_path):
    """Trains on a data set, given as YAML; returns the words of commands that read it: train, judge."""

    def make(dataset):
        (tmp_path / "x.yaml").write_text(EXPERIMENT.format(dataset))
        words = "run", tmp_path / "x.yaml", "--output", tmp_path / "out"
        assert typed(*words) == "fine"
        return words, ("evaluate", tmp_path / "x.yaml", "--checkpoint", tmp_path / "out" / "checkpoint.h5")

    return make


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.long
def test_idx(tmp_path, trained, suffix):
    small_mnist(tmp_path / "mnist", suffix, counts=(5, 3))
    _, judge = trained(f"!MNIST {{path: {tmp_path / 'mnist'}}}")
    outcomes = []
    for path in sorted((tmp_path / "mnist").iterdir()):
        raw = path.read_bytes()

        def attempt(case, path=path):
            path.write_bytes(case)
            return typed(*judge)

        outcomes += survive(damaged(raw, 20, seed=len(raw), head=16), attempt)
        path.write_bytes(raw)
    check_outcomes(outcomes, 20)


@pytest.mark.parametrize("pack", [folder, archive])
@pytest.mark.long
def test_cifar10(tmp_path, trained, pack):
    place = pack(tmp_path / "cifar", batches(2))
    path = place / "data_batch_2.bin" if place.is_dir() else place
    _, judge = trained(f"!CIFAR10 {{path: {place}}}")

    def attempt(case):
        path.write_bytes(case)
        return typed(*judge)

    check_outcomes(survive(damaged(path.read_bytes(), 40, head=600), attempt), 5)


@pytest.mark.parametrize("libver", ["earliest", "v110"])
@pytest.mark.long
def test_hdf5(tmp_path, trained, libver):
    """Of the version that convert writes, with checksums of the metadata, and of the oldest, without."""
    path = tmp_path / "x.h5"
    small_hdf5(path, (6, 5, 2), counts=(6, 3), libver=libver if libver == "earliest" else ("v110", "v110"))
    train, judge = trained(f"!HDF5Dataset {{path: {path}}}")
    words = train if libver == "earliest" else (*judge, "--split", "train")  # which takes half the time

    def attempt(case):
        path.write_bytes(case)
        return typed(*words)

    check_outcomes(survive(damaged(path.read_bytes(), 50), attempt), 15)


@pytest.mark.long
def test_images_to_predict(tmp_path, trained):
    small_hdf5(tmp_path / "x.h5", (6, 5, 2), counts=(6, 3))
    _, judge = trained(f"!HDF5Dataset {{path: {tmp_path / 'x.h5'}}}")
    np.save(tmp_path / "y.npy", np.ones((3, 6, 5, 2), "f4"))
    outcomes = []
    for name, part in (("x.h5", ":test/images"), ("y.npy", "")):
        path = tmp_path / name

        def attempt(case, path=path, part=part):
            path.write_bytes(case)
            return typed("predict", *judge[1:], "--input", f"{path}{part}", "--output", tmp_path / "scores.npy")

        outcomes += survive(damaged(path.read_bytes(), 30, head=800), attempt)
    check_outcomes(outcomes, 15)


@pytest.mark.long
def test_what_convert_writes(tmp_path):
    """Every wrong bit is found, in the images too: no case gives other numbers."""
    np.save(tmp_path / "x.npy", np.arange(12 * 30, dtype="u1").reshape(12, 6, 5))
    np.save(tmp_path / "y.npy", np.arange(12) % 3)
    path = tmp_path / "x.h5"
    assert typed("data", "convert", tmp_path / "x.npy", tmp_path / "y.npy", "--to", path) == "fine"
    expected = contents(path)

    def attempt(case):
        path.write_bytes(case)
        return outcome(lambda: None if contents(path) == expected else 1 / 0)

    check_outcomes(survive(damaged(path.read_bytes(), 150), attempt), 60)


def contents(path):
    data = nd.HDF5Dataset(path)
    data.open(nd.ProcessGrid.serial())
    splits = (data.train, data.test)
    return [
        (split.images(np.arange(len(split))).tolist(), split.targets(np.arange(len(split))).tolist())
        for split in splits
    ]


def test_tile_cache(tmp_path):
    """A damaged cache is made again, or read if the damage is beside what it holds."""
    small_mnist(tmp_path / "mnist", counts=(5, 3))
    cache = tmp_path / "cache.h5"

    def images():
        data = nd.MNIST(tmp_path / "mnist", serialized_path=cache)
        data.open(nd.ProcessGrid.serial())
        return data.train.images(np.arange(5)).tolist()

    expected = images()

    def attempt(case):
        cache.write_bytes(case)
        return outcome(lambda: None if images() == expected else 1 / 0)

    outcomes = survive(damaged(cache.read_bytes(), 60), attempt)
    check_outcomes(outcomes, 0)


@pytest.mark.long
def test_sources_of_convert(tmp_path):
    """Damaged arrays and images."""
    np.savez(tmp_path / "x.npz", images=np.ones((5, 4, 3, 1), "f4"), labels=np.arange(5))
    np.save(tmp_path / "x.npy", np.ones((5, 4, 3)))
    np.save(tmp_path / "y.npy", np.arange(5))
    sources = {"x.npz": ["x.npz"], "x.npy": ["x.npy", "y.npy"]}
    if importlib.util.find_spec("PIL"):
        for suffix in (".png", ".tif", ".jpg"):
            image_folder(tmp_path / suffix[1:], count=1, suffix=suffix)
            sources[f"{suffix[1:]}/dog/000{suffix}"] = [suffix[1:]]
    outcomes = []
    for name, words in sources.items():
        path = tmp_path / name
        raw = path.read_bytes()

        def attempt(case, path=path, words=words):
            path.write_bytes(case)
            return typed("data", "convert", *(tmp_path / word for word in words), "--to", tmp_path / "out.h5")

        outcomes += survive(damaged(raw, 20, head=200), attempt)
        path.write_bytes(raw)
    check_outcomes(outcomes, 30)
    assert not list(tmp_path.glob(".*.tmp"))
