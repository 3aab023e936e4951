"""`ndt.loader` for iterable data sets: the batches of a DataLoader on every grid, with the same random numbers."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_runs import check_global_generators_unchanged, train
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import neondist as nd
import neondist.torch as ndt


class Stream(IterableDataset):
    """Images with cell labels in random order, randomly augmented, divided among worker processes."""

    def __init__(self, samples=7, noise=True, own_part=slice(None)):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(samples, 2, 9, 11, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (samples, 9, 11), generator=generator)
        self.noise, self.own_part = noise, own_part

    def __iter__(self):
        info = get_worker_info()
        order = list(range(len(self.images)))[self.own_part]
        order = order if info is None else order[info.id :: info.num_workers]
        if self.noise:
            random.shuffle(order)
        return map(self.read_sample, order)

    def read_sample(self, index):
        image = self.images[index]
        if self.noise:
            image = image * (1 + torch.rand(1)) + np.random.normal() * random.random()
        return image, {"cells": self.labels[index], "index": index, "name": f"sample {index}"}


class SizedStream(Stream):
    def __len__(self):
        return len(self.images)


@settings(max_examples=6)
@given(
    st.integers(1, 8),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    st.fixed_dictionaries({"seed": st.integers(0, 9), "drop_last": st.booleans()}),
)
@pytest.mark.long
def test_training_matches_single_process(samples, factors, options):
    expected = nd.loopback.run(1, lambda world: train(Stream(samples), world, **options))[0]
    assert len(expected) == 2 * (samples // 3 if options["drop_last"] else -(-samples // 3))
    for actual in nd.loopback.run(
        int(np.prod(factors)), lambda world: train(Stream(samples), world, factors, **options)
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.long
def test_later_epochs_do_not_depend_on_earlier_ones(workers):
    loader, resumed = (ndt.loader(Stream(), 3, seed=4, grid=nd.ProcessGrid.serial(), num_workers=workers) for _ in "12")
    epochs = [[batch[0] for batch in loader] for _ in range(3)]
    assert not torch.equal(epochs[0][0], epochs[1][0])
    resumed.epoch = 2
    for batch, expected in zip(resumed, epochs[2], strict=True):
        assert torch.equal(batch[0], expected)


@pytest.mark.parametrize(
    ("noise", "options"),
    [
        (False, {}),
        (True, {"num_workers": 2}),
        (True, {"num_workers": 2, "persistent_workers": True}),
        (True, {"num_workers": 1, "drop_last": True}),
    ],
)
@pytest.mark.long
def test_batches_match_data_loader(noise, options):
    stream = SizedStream(noise=noise)
    loader = ndt.loader(stream, 3, seed=4, grid=nd.ProcessGrid.serial(), **options)
    data_loader = DataLoader(stream, 3, generator=torch.Generator().manual_seed(4), **options)
    assert len(loader) == len(data_loader)
    for _ in range(2):
        batches = list(loader)
        for batch, expected in zip(batches, data_loader, strict=True):
            assert batch[1]["index"].tolist() == expected[1]["index"].tolist()
            assert torch.equal(batch[0], expected[0])


def test_global_generators_are_unchanged():
    check_global_generators_unchanged(Stream())


class BrokenStream(Stream):
    def read_sample(self, index):
        if index == 4:
            raise OSError("sample 4 cannot be read")
        return super().read_sample(index)


@pytest.mark.parametrize(("make_stream", "factors", "message"), [
    (lambda rank: Stream(6, False, slice(rank, None, 2)), (2, 1, 1), "rank 1: the checksum of the samples"),
    (lambda rank: Stream(6, False, slice(rank, None, 2)), (1, 2, 1), "do not divide the data set by rank, and draw"),
    (lambda rank: Stream(6, False, slice(6 - 3 * rank)), (2, 1, 1), "rank 1: the batch is missing, but 1 on rank 0"),
    (lambda rank: Stream(6, False, slice(6 - rank)), (2, 1, 1), "rank 1: the number of samples is 2, but 3 on rank 0"),
    (lambda rank: (BrokenStream if rank else Stream)(6, False), (1, 2, 1), "sample 4 cannot be read"),
    (lambda rank: Stream(6, True), (1, 2, 1), ""),
])  # fmt: skip
def test_different_streams_on_ranks_are_rejected(make_stream, factors, message):
    def load(world):
        return len(list(ndt.loader(make_stream(world.rank), 3, grid=nd.ProcessGrid(world, *factors))))

    if not message:
        assert nd.loopback.run(2, load) == [2, 2]
        return
    with pytest.raises((OSError, nd.UserError, nd.RemoteError), match=message):
        nd.loopback.run(2, load)


@pytest.mark.parametrize(("options", "message"), [
    ({"shuffle": True}, "shuffle"),
    ({"sampler": [0, 1]}, "sampler"),
    ({"batch_size": None}, "batch_size should be a positive integer"),
    ({"num_workers": -1}, "num_workers option should be non-negative"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(nd.ConfigError, match=message):
        ndt.loader(Stream(), **{"batch_size": 3, "grid": nd.ProcessGrid.serial(), **options})


def test_streams_without_a_length():
    with pytest.raises(TypeError, match="has no len"):
        len(ndt.loader(Stream(), 3, grid=nd.ProcessGrid.serial()))
