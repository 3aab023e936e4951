"""`ndt.loader`: this rank's part of each batch, in the order and with the numbers of one process."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import neondist as nd
import neondist.torch as ndt


class Images(Dataset):
    """Images with labels of cells, a number and a name each, drawn anew in each epoch."""

    def __init__(self, samples=7, extent=(9, 11), noise=True):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(samples, 2, *extent, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (samples, *extent), generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, labels = self.images[index], self.labels[index]
        if self.noise:
            image = image * (1 + torch.rand(1)) + np.random.normal() * random.random()
            if torch.rand(()) < 0.5:
                image, labels = image.flip(-1), labels.flip(-1)
        return image, {"cells": labels, "index": index, "name": f"sample {index}"}


class Boxes(Images):
    """The same, read by boxes."""

    extent = (9, 11)

    def __getitem__(self, index):
        raise AssertionError("a box is read")

    def read(self, index, box):
        image, labels = self.images[index], self.labels[index]
        return image[(slice(None), *box.slices)], {
            "cells": labels[box.slices],
            "index": index,
            "name": f"sample {index}",
        }


def train(dataset, world, factors=(1, 1, 1), epochs=2, **how):
    """Return the losses of all steps, and which samples each had."""
    grid = nd.ProcessGrid(world, *factors)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    model = ndt.distribute(net.double(), (3, 2, 9, 11), grid)
    optimizer, criterion, found = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), []
    loader = ndt.loader(dataset, 3, grid=grid, **how)
    for _ in range(epochs):
        for image, target in loader:
            loss = model.loss(criterion, model(image), target["cells"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append((loss.item(), model.gather(image).double().sum().item()))
            assert target["name"] == [f"sample {at}" for at in target["index"].tolist()] or not len(target["index"])
    return found


@settings(max_examples=8)
@given(
    st.integers(1, 8),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    st.fixed_dictionaries({"shuffle": st.booleans(), "drop_last": st.booleans(), "seed": st.integers(0, 3)}),
    st.sampled_from([Images, Boxes]),
)
@pytest.mark.long
def test_numbers_are_those_of_one_process(samples, factors, how, kind):
    expected = nd.loopback.run(1, lambda world: train(Images(samples, noise=kind is Images), world, **how))[0]
    assert len(expected) == 2 * (samples // 3 if how["drop_last"] else -(-samples // 3))
    for found in nd.loopback.run(int(np.prod(factors)), lambda world: train(kind(samples), world, factors, **how)):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.long
def test_worker_processes_change_nothing():
    expected = train(Images(), None, shuffle=True)
    np.testing.assert_array_equal(train(Images(), None, shuffle=True, num_workers=2), expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_process_has_the_batches_of_a_data_loader(shuffle):
    images, order = Images(noise=False), torch.Generator().manual_seed(4)
    own = ndt.loader(images, 3, shuffle, seed=4, grid=nd.ProcessGrid.serial())
    resumed = ndt.loader(images, 3, shuffle, seed=4, grid=nd.ProcessGrid.serial())
    plain = DataLoader(images, 3, shuffle, generator=order)
    for epoch in range(3):
        resumed.epoch = epoch
        for mine, again, right in zip(own, resumed, plain, strict=True):
            assert mine[1]["index"].tolist() == again[1]["index"].tolist() == right[1]["index"].tolist()
            assert torch.equal(mine[0], right[0])
            assert torch.equal(mine[1]["cells"], right[1]["cells"])


def test_global_generators_stay_as_they_were():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    list(ndt.loader(Images(), 3, grid=nd.ProcessGrid.serial()))
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert drawn == (torch.rand(1), np.random.rand(), random.random())


class Other(Images):
    """Draws with a generator of its own, which nobody has seeded."""

    def __getitem__(self, index):
        return self.images[index] + np.random.default_rng().normal(), {"cells": self.labels[index]}


class Broken(Images):
    """Fails on one rank alone."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def __getitem__(self, index):
        if index == 4 and self.rank == 1:
            raise OSError("sample 4 cannot be read")
        return super().__getitem__(index)


def batches(make, **how):
    def body(world):
        return list(ndt.loader(make(world.rank), 3, grid=nd.ProcessGrid(world), **how))

    return nd.loopback.run(2, body)


def test_samples_that_differ_on_a_rank_are_refused():
    with pytest.raises(nd.ConfigError, match="ranks of a replica read different samples"):
        batches(lambda rank: Other())


def test_an_error_of_one_rank_ends_all():
    with pytest.raises((OSError, nd.RemoteError), match="sample 4 cannot be read"):
        batches(lambda rank: Broken(rank))


def test_ranks_with_other_orders_stop():
    def body(world):
        order = [0, 1, 2] if world.rank == 0 else [2, 1, 0]
        list(ndt.loader(Images(), 3, grid=nd.ProcessGrid(world), sampler=order))

    with pytest.raises(nd.ConfigError, match=r"rank 1: its samples is \[2, 1, 0\], but \[0, 1, 2\] on rank 0"):
        nd.loopback.run(2, body)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(("dataset", "batch_size", "says"), [
    (Stream(), 3, "is a Stream; expected a map-style data set"),
    (3, 3, "is a int; expected a map-style data set"),
    (Images(), 0, "batch_size should be a positive integer"),
])  # fmt: skip
def test_wrong_arguments(dataset, batch_size, says):
    with pytest.raises(nd.ConfigError, match=says):
        ndt.loader(dataset, batch_size, grid=nd.ProcessGrid.serial())


@pytest.mark.parametrize(("options", "says"), [
    ({"batch_sampler": [[0]]}, "batch_sampler is not accepted; use sampler"),
    ({"sampler": [0, 1], "shuffle": True}, "sampler and shuffle exclude each other"),
    ({"prefetch": 3}, "unexpected keyword argument 'prefetch'"),
    ({"num_workers": -1}, "num_workers option should be non-negative"),
])  # fmt: skip
def test_wrong_options(options, says):
    with pytest.raises(nd.ConfigError, match=says):
        ndt.loader(Images(), 3, grid=nd.ProcessGrid.serial(), **options)


def test_boxes_need_the_extent():
    class Nameless:
        def read(self, index, box):
            return None

        def __len__(self):
            return 3

    with pytest.raises(nd.ConfigError, match=r"Nameless has read\(index, box\), but no attribute extent"):
        ndt.loader(Nameless(), 3, grid=nd.ProcessGrid.serial())
