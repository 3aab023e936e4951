"""Damaged data files: each is refused in one message, or still read."""

import numpy as np
import pytest
from dataset_toys import small_mnist
from fuzz import check_outcomes, damaged, outcome, survive
from test_cifar10 import archive, batches, folder

import neondist as nd


def read_all(data):
    """Open a data set and read every sample."""
    data.open(nd.ProcessGrid.serial())
    for split in (data.train, data.test):
        assert split.images(np.arange(len(split))).shape == (len(split), *data.sample_shape)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, suffix):
    small_mnist(tmp_path / "mnist", suffix, counts=(5, 3))
    outcomes = []
    for path in sorted((tmp_path / "mnist").iterdir()):
        raw = path.read_bytes()

        def attempt(case, path=path):
            path.write_bytes(case)
            return outcome(lambda: read_all(nd.MNIST(tmp_path / "mnist")))

        outcomes += survive(damaged(raw, 50, seed=len(raw), head=16), attempt)
        path.write_bytes(raw)
    check_outcomes(outcomes, 40)


@pytest.mark.parametrize("pack", [folder, archive])
def test_cifar10(tmp_path, pack):
    place = pack(tmp_path / "cifar", batches(2))
    path = place / "data_batch_2.bin" if place.is_dir() else place

    def attempt(case):
        path.write_bytes(case)
        return outcome(lambda: read_all(nd.CIFAR10(place)))

    outcomes = survive(damaged(path.read_bytes(), 100, head=600), attempt)
    check_outcomes(outcomes, 10)
