"""Damaged data files, each refused with one message or still readable."""

import importlib.util

import numpy as np
import pytest
from fuzz import check_outcomes, classify_call, classify_command, damage_copies, run_isolated
from small_cifar10 import draw_batches, write_archive, write_folder
from small_datasets import write_mnist
from small_hdf5 import write_hdf5, write_image_folder

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
def train_on(tmp_path):
    """Function that trains on a dataset given as YAML, and returns the arguments of `run` and of `evaluate`."""

    def train(dataset):
        (tmp_path / "x.yaml").write_text(EXPERIMENT.format(dataset))
        words = "run", tmp_path / "x.yaml", "--output", tmp_path / "out"
        assert classify_command(*words) == "fine"
        return words, ("evaluate", tmp_path / "x.yaml", "--checkpoint", tmp_path / "out" / "checkpoint.h5")

    return train


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.long
def test_idx(tmp_path, train_on, suffix):
    write_mnist(tmp_path / "mnist", suffix, counts=(5, 3))
    _, evaluate = train_on(f"!MNIST {{path: {tmp_path / 'mnist'}}}")
    outcomes = []
    for path in sorted((tmp_path / "mnist").iterdir()):
        raw = path.read_bytes()

        def attempt(case, path=path):
            path.write_bytes(case)
            return classify_command(*evaluate)

        outcomes += run_isolated(damage_copies(raw, 20, seed=len(raw), head=16), attempt)
        path.write_bytes(raw)
    check_outcomes(outcomes, 20)


@pytest.mark.parametrize("pack", [write_folder, write_archive])
@pytest.mark.long
def test_cifar10(tmp_path, train_on, pack):
    source = pack(tmp_path / "cifar", draw_batches(2))
    path = source / "data_batch_2.bin" if source.is_dir() else source
    _, evaluate = train_on(f"!CIFAR10 {{path: {source}}}")

    def attempt(case):
        path.write_bytes(case)
        return classify_command(*evaluate)

    check_outcomes(run_isolated(damage_copies(path.read_bytes(), 40, head=600), attempt), 5)


@pytest.mark.parametrize("libver", ["earliest", "v110"])
@pytest.mark.long
def test_hdf5(tmp_path, train_on, libver):
    """Damage files of the version that `convert` writes, with metadata checksums, and of the oldest, without."""
    path = tmp_path / "x.h5"
    write_hdf5(path, (6, 5, 2), counts=(6, 3), libver=libver if libver == "earliest" else ("v110", "v110"))
    train, evaluate = train_on(f"!HDF5Dataset {{path: {path}}}")
    words = train if libver == "earliest" else (*evaluate, "--split", "train")  # takes half the time

    def attempt(case):
        path.write_bytes(case)
        return classify_command(*words)

    check_outcomes(run_isolated(damage_copies(path.read_bytes(), 50), attempt), 15)


@pytest.mark.long
def test_images_to_predict(tmp_path, train_on):
    write_hdf5(tmp_path / "x.h5", (6, 5, 2), counts=(6, 3))
    _, evaluate = train_on(f"!HDF5Dataset {{path: {tmp_path / 'x.h5'}}}")
    np.save(tmp_path / "y.npy", np.ones((3, 6, 5, 2), "f4"))
    outcomes = []
    for name, array in (("x.h5", ":test/images"), ("y.npy", "")):
        path = tmp_path / name

        def attempt(case, path=path, array=array):
            path.write_bytes(case)
            return classify_command(
                "predict", *evaluate[1:], "--input", f"{path}{array}", "--output", tmp_path / "scores.npy"
            )

        outcomes += run_isolated(damage_copies(path.read_bytes(), 30, head=800), attempt)
    check_outcomes(outcomes, 15)


@pytest.mark.long
def test_converted_file(tmp_path):
    """Check that every flipped bit is detected, in the images too, so that no case yields different values."""
    np.save(tmp_path / "x.npy", np.arange(12 * 30, dtype="u1").reshape(12, 6, 5))
    np.save(tmp_path / "y.npy", np.arange(12) % 3)
    path = tmp_path / "x.h5"
    assert classify_command("data", "convert", tmp_path / "x.npy", tmp_path / "y.npy", "--to", path) == "fine"
    expected = read_contents(path)

    def attempt(case):
        path.write_bytes(case)
        return classify_call(lambda: None if read_contents(path) == expected else 1 / 0)

    check_outcomes(run_isolated(damage_copies(path.read_bytes(), 150), attempt), 60)


def read_contents(path):
    data = nd.HDF5Dataset(path)
    data.open(nd.ProcessGrid.serial())
    splits = (data.train, data.test)
    return [
        (split.images(np.arange(len(split))).tolist(), split.targets(np.arange(len(split))).tolist())
        for split in splits
    ]


def test_tile_cache(tmp_path):
    """Rebuild a damaged cache, or read it if the damage does not affect its content."""
    write_mnist(tmp_path / "mnist", counts=(5, 3))
    cache = tmp_path / "cache.h5"

    def images():
        data = nd.MNIST(tmp_path / "mnist", serialized_path=cache)
        data.open(nd.ProcessGrid.serial())
        return data.train.images(np.arange(5)).tolist()

    expected = images()

    def attempt(case):
        cache.write_bytes(case)
        return classify_call(lambda: None if images() == expected else 1 / 0)

    outcomes = run_isolated(damage_copies(cache.read_bytes(), 60), attempt)
    check_outcomes(outcomes, 0)


@pytest.mark.long
def test_convert_sources(tmp_path):
    """Damaged arrays and images as inputs of `convert`."""
    np.savez(tmp_path / "x.npz", images=np.ones((5, 4, 3, 1), "f4"), labels=np.arange(5))
    np.save(tmp_path / "x.npy", np.ones((5, 4, 3)))
    np.save(tmp_path / "y.npy", np.arange(5))
    sources = {"x.npz": ["x.npz"], "x.npy": ["x.npy", "y.npy"]}
    if importlib.util.find_spec("PIL"):
        for suffix in (".png", ".tif", ".jpg"):
            write_image_folder(tmp_path / suffix[1:], count=1, suffix=suffix)
            sources[f"{suffix[1:]}/dog/000{suffix}"] = [suffix[1:]]
    outcomes = []
    for name, words in sources.items():
        path = tmp_path / name
        raw = path.read_bytes()

        def attempt(case, path=path, words=words):
            path.write_bytes(case)
            return classify_command(
                "data", "convert", *(tmp_path / word for word in words), "--to", tmp_path / "out.h5"
            )

        outcomes += run_isolated(damage_copies(raw, 20, head=200), attempt)
        path.write_bytes(raw)
    check_outcomes(outcomes, 30)
    assert not list(tmp_path.glob(".*.tmp"))
