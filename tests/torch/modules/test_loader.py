"""`ndt.loader`: this rank's part of each batch, with the order and values of a single process."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from case_selection import SEED, select_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_runs import check_global_generators_unchanged, train
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

import neondist as nd
import neondist.torch as ndt
from neondist.comm import loopback


class Images(Dataset):
    """Images with cell labels, each with an index and a name, randomly augmented in each epoch."""

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
    """The same images, read by boxes."""

    extent = (9, 11)

    def __getitem__(self, index):
        raise AssertionError("read() should be called instead")

    def read(self, index, box):
        image, labels = self.images[index], self.labels[index]
        return image[(slice(None), *box.slices)], {
            "cells": labels[box.slices],
            "index": index,
            "name": f"sample {index}",
        }


@settings(max_examples=8)
@given(
    st.integers(1, 8),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    st.fixed_dictionaries({"shuffle": st.booleans(), "drop_last": st.booleans(), "seed": st.integers(0, 3)}),
    st.sampled_from([Images, Boxes]),
)
@pytest.mark.long
def test_training_matches_single_process(samples, factors, options, kind):
    expected = nd.loopback.run(1, lambda world: train(Images(samples, noise=kind is Images), world, **options))[0]
    assert len(expected) == 2 * (samples // 3 if options["drop_last"] else -(-samples // 3))
    for actual in nd.loopback.run(int(np.prod(factors)), lambda world: train(kind(samples), world, factors, **options)):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.long
def test_worker_processes_change_nothing():
    expected = train(Images(), None, shuffle=True)
    np.testing.assert_array_equal(train(Images(), None, shuffle=True, num_workers=2), expected)


@pytest.mark.parametrize(
    ("shuffle", "options"), [(False, {}), (True, {}), (True, {"num_workers": 1, "persistent_workers": True})]
)
def test_batches_match_data_loader(shuffle, options):
    images, order = Images(noise=False), torch.Generator().manual_seed(4)
    loader = ndt.loader(images, 3, shuffle, seed=4, grid=nd.ProcessGrid.serial(), **options)
    resumed = ndt.loader(images, 3, shuffle, seed=4, grid=nd.ProcessGrid.serial(), **options)
    data_loader = DataLoader(images, 3, shuffle, generator=order, **options)
    for epoch in range(3):
        resumed.epoch = epoch
        for batch, resumed_batch, expected in zip(loader, resumed, data_loader, strict=True):
            assert batch[1]["index"].tolist() == resumed_batch[1]["index"].tolist() == expected[1]["index"].tolist()
            assert torch.equal(batch[0], expected[0])
            assert torch.equal(batch[1]["cells"], expected[1]["cells"])


def test_global_generators_are_unchanged():
    check_global_generators_unchanged(Images())


class UnseededImages(Images):
    """Images with noise from an unseeded generator."""

    def __getitem__(self, index):
        return self.images[index] + np.random.default_rng().normal(), {"cells": self.labels[index]}


class BrokenImages(Images):
    """Images that cannot be read on one rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def __getitem__(self, index):
        if index == 4 and self.rank == 1:
            raise OSError("sample 4 cannot be read")
        return super().__getitem__(index)


def load_batches(make_dataset, **options):
    def body(world):
        return list(ndt.loader(make_dataset(world.rank), 3, grid=nd.ProcessGrid(world), **options))

    return nd.loopback.run(2, body)


def test_different_samples_on_ranks_are_rejected():
    with pytest.raises(nd.ConfigError, match="ranks of a replica read different samples"):
        load_batches(lambda rank: UnseededImages())


def test_tiles_for_another_grid_are_rejected():
    def body(world):
        torch.manual_seed(0)
        model = ndt.distribute(nn.Conv2d(2, 2, 1).double(), (3, 2, 9, 11), nd.ProcessGrid(world, replicas=2))
        images, *_ = next(iter(ndt.loader(Images(), 3, grid=nd.ProcessGrid(world))))
        with pytest.raises(nd.ConfigError, match=r"read for a grid other than the model's; pass grid=model\.grid"):
            model(images)

    loopback.run(2, body)


class Sequences(Dataset):
    """Sequences (length, features) of different lengths, each with a label."""

    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(2)
        self.sequences = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in lengths]

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return self.sequences[index], index % 2


class SequenceClassifier(nn.Module):
    """Classifier that reads the last outputs of padded sequences."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        return self.head(self.layer(x)[0][torch.arange(len(lengths)), lengths - 1])


def pad_to_multiple(samples, multiple):
    """Return sequences padded to a multiple of a length, their lengths, and their labels."""
    sequences, labels = zip(*samples, strict=True)
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    padded = nn.functional.pad(padded, (0, 0, 0, -padded.shape[1] % multiple))
    return padded, torch.tensor(list(map(len, sequences))), torch.tensor(labels)


def train_on_sequences(lengths, multiple, world, shape=(1, 1, 1)):
    """Return the shape of each padded batch and its loss."""
    grid = nd.ProcessGrid(world, *shape)
    torch.manual_seed(1)
    net, results = SequenceClassifier().double(), []
    model = ndt.distribute(net, [(3, 5, 3), (3,)], grid, dtype=[torch.float64, torch.int64], spatial=0)
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    collate = partial(pad_to_multiple, multiple=multiple)
    for x, n, labels in ndt.loader(Sequences(lengths), 3, grid=grid, collate_fn=collate, spatial=0):
        loss = model.loss(criterion, model(x, n), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append((*model.gather(x).shape, loss.item()))
    return results


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(("shape", "multiple"), select_cases([((1, 2, 1), 1), ((2, 1, 1), 8), ((2, 1, 2), 8)]))
@pytest.mark.long
def test_sequences_of_other_lengths_match_single_process(shape, multiple):
    lengths = random.Random(SEED).choices(range(1, 9), k=4)
    expected = train_on_sequences(lengths, multiple, None)
    for actual in nd.loopback.run(
        int(np.prod(shape)), lambda world: train_on_sequences(lengths, multiple, world, shape)
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_sequences_of_different_lengths_on_replicas_are_rejected():
    message = (
        r"rank 1: the list of sample shapes \(pad to equal sizes in collate_fn\) is \[\(5, 3\), \(\), \(\)\], but"
        r" \[\(4, 3\), \(\), \(\)\] on rank 0"
    )
    with pytest.raises(nd.ConfigError, match=message):
        nd.loopback.run(2, lambda world: train_on_sequences([3, 4, 5], 1, world, (2, 1, 1)))


def test_error_on_one_rank_ends_all():
    with pytest.raises((OSError, nd.RemoteError), match="sample 4 cannot be read"):
        load_batches(lambda rank: BrokenImages(rank))


def test_different_orders_on_ranks_are_rejected():
    def body(world):
        order = [0, 1, 2] if world.rank == 0 else [2, 1, 0]
        list(ndt.loader(Images(), 3, grid=nd.ProcessGrid(world), sampler=order))

    with pytest.raises(nd.ConfigError, match=r"rank 1: the list of samples is \[2, 1, 0\], but \[0, 1, 2\] on rank 0"):
        nd.loopback.run(2, body)


@pytest.mark.parametrize(("dataset", "batch_size", "message"), [
    (3, 3, "expected a map-style data set, with __getitem__ and __len__, or an IterableDataset, got int"),
    (Images(), 0, "batch_size should be a positive integer"),
])  # fmt: skip
def test_wrong_arguments(dataset, batch_size, message):
    with pytest.raises(nd.ConfigError, match=message):
        ndt.loader(dataset, batch_size, grid=nd.ProcessGrid.serial())


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_sampler": [[0]]}, "batch_sampler is not supported; use sampler"),
    ({"sampler": [0, 1], "shuffle": True}, "sampler and shuffle are mutually exclusive"),
    ({"prefetch": 3}, "unexpected keyword argument 'prefetch'"),
    ({"num_workers": -1}, "num_workers option should be non-negative"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(nd.ConfigError, match=message):
        ndt.loader(Images(), 3, grid=nd.ProcessGrid.serial(), **options)


SPLITS = {
    "Subset": lambda data: Subset(data, [4, 1, 6, 0]),
    "random_split": lambda data: random_split(data, [4, 3], torch.Generator().manual_seed(5))[0],
    "a tensor of indices": lambda data: Subset(data, torch.tensor([5, 2, 3])),
    "ConcatDataset": lambda data: ConcatDataset([Subset(data, [3]), data, Subset(Subset(data, [6, 5, 4]), [2, 0])]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_of_a_data_set_read_boxes(name):
    data, whole = SPLITS[name](Boxes(noise=False)), SPLITS[name](Images(noise=False))

    def body(world):
        grid = nd.ProcessGrid(world, 1, 2, 1)
        tile = grid.tile_box((9, 11)).slices
        batches = list(ndt.loader(data, 2, grid=grid))
        for at, (image, target) in enumerate(batches):
            for sample in range(len(image)):
                expected, labels = whole[2 * at + sample]
                torch.testing.assert_close(image[sample], expected[(slice(None), *tile)])
                assert target["index"][sample] == labels["index"]
        return sum(len(image) for image, _ in batches)

    assert loopback.run(2, body) == [len(whole)] * 2


def test_subsets_that_change_samples_are_called():
    class Brightened(Subset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + 1

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    data = Images(noise=False)
    data.read = data.extent = None
    (image,) = ndt.loader(Brightened(data, [3]), 1, grid=nd.ProcessGrid.serial())
    torch.testing.assert_close(image[0], data.images[3] + 1)


def test_boxes_require_an_extent():
    class WithoutExtent:
        def read(self, index, box):
            return None

        def __len__(self):
            return 3

    with pytest.raises(nd.ConfigError, match=r"WithoutExtent has read\(index, box\), but no attribute extent"):
        ndt.loader(WithoutExtent(), 3, grid=nd.ProcessGrid.serial())


def test_replicas_may_have_lists_of_other_lengths():
    """As the names of an uneven batch are: one string per sample."""

    def body(world):
        with nd.ProcessGrid(world, replicas=2) as grid:
            return [y["name"] for _, y in ndt.loader(Images(3), 3, grid=grid)]

    assert nd.loopback.run(2, body) == [[["sample 0", "sample 1"]], [["sample 2"]]]
