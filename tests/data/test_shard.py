"""Shards of the training samples: disjoint, complete, and the same for all tiles of a replica."""

import numpy as np
import pytest
from dataset_factories import DATASET_FACTORIES, make_hdf5, open_dataset, read_raw_cells
from hypothesis import given, settings
from hypothesis import strategies as st
from small_hdf5 import write_image_folder

import neondist as nd
from neondist.comm import loopback


def make_image_files(path, validation=None):
    pytest.importorskip("PIL.Image", reason="Pillow reads the images")
    if not (path / "x").exists():
        write_image_folder(path / "x", count=6)
    return nd.ImageFiles(str(path / "x" / "*" / "*.png"), labels="folders", crop=(6, 5), validation=validation or 2)


@pytest.mark.parametrize("make", [*DATASET_FACTORIES, make_hdf5, make_image_files])
@pytest.mark.parametrize("validation", [None, 3])
def test_shards_partition_the_samples(tmp_path, make, validation):
    """Check every dataset class, with and without a validation split."""
    complete = open_dataset(make(tmp_path, validation=validation))
    shards = [open_dataset(make(tmp_path, validation=validation).shard(3, index)) for index in range(3)]
    images, targets = read_raw_cells(complete.train), complete.train.targets(np.arange(len(complete.train)))
    for index, shard in enumerate(shards):
        assert np.array_equal(read_raw_cells(shard.train), images[index::3])
        assert np.array_equal(shard.train.targets(np.arange(len(shard.train))), targets[index::3])
        assert shard.splits.keys() == complete.splits.keys()
        assert validation is None or len(shard.validation) == len(complete.validation) > 0
    assert sum(len(shard.train) for shard in shards) == len(complete.train)
    shard_of_open = complete.shard(3, 1)  # an open dataset, which does not change
    assert np.array_equal(read_raw_cells(shard_of_open.train), images[1::3])
    assert len(complete.train) == len(images)


@settings(max_examples=10, deadline=None)
@given(
    replicas=st.integers(1, 3),
    tiles=st.integers(1, 2),
    after_open=st.booleans(),
    by_rank=st.booleans(),
    n=st.integers(6, 20),
)
def test_tiles_of_a_replica_share_a_shard(replicas, tiles, after_open, by_rank, n):
    """Number shards by replica or by rank, before or after the dataset is opened."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=tiles, cols=1)
        number = (grid.size, grid.rank) if by_rank else (grid.replicas, grid.replica)
        data = nd.Synthetic((4, 3, 1), train=n, test=2)
        data = open_dataset(data, grid).shard(*number) if after_open else open_dataset(data.shard(*number), grid)
        return grid.replica, grid.row, read_raw_cells(data.train)

    images = read_raw_cells(open_dataset(nd.Synthetic((4, 3, 1), train=n, test=2)).train)
    for replica, row, tile in loopback.run(replicas * tiles, body):
        lo, hi = nd.part_range(4, tiles, row)
        assert np.array_equal(tile, images[replica::replicas, lo:hi])


def test_shards_must_agree_within_a_replica():
    def body(world):
        grid = nd.ProcessGrid(world)
        return open_dataset(nd.Synthetic((4, 3, 1), train=8, test=2).shard(3, grid.rank), grid)

    with pytest.raises(nd.ConfigError, match=r"hold tiles of the same samples, but have shards \[\(3, 0\), \(3, 1\)\]"):
        loopback.run(2, body)


def test_each_replica_trains_on_its_own_shard():
    """Train each replica on its own shard, with the same number of samples, each at most once per epoch."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=2)
        data = open_dataset(nd.Synthetic((4, 3, 1), train=9, test=2).shard(2, grid.replica), grid)
        model = nd.MLPDist([nd.FCLayerDist(4)])
        model.build(data.sample_shape, 4, grid)
        samples = []
        with nd.DistributedSession(nd.TaskSpecDef(), model, log_step_count_steps=None) as session:
            for x, y in session.batches(data, 4, epochs=2):
                session.run(model.train_batch, x, y)
                samples.append(x)
        return np.concatenate(samples), session.global_step

    images = read_raw_cells(open_dataset(nd.Synthetic((4, 3, 1), train=9, test=2)).train)
    for replica, (samples, steps) in enumerate(loopback.run(2, body)):
        assert steps == 4
        rows = {sample.tobytes(): number for number, sample in enumerate(images.astype(samples.dtype))}
        numbers = [rows[sample.tobytes()] for sample in samples]
        assert len(numbers) == 8
        for epoch in (numbers[:4], numbers[4:]):
            assert len(set(epoch)) == 4
            assert {number % 2 for number in epoch} == {replica}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_shard_of_all_replicas_is_trained_as_in_one_process(replicas):
    def body(world, replicas):
        grid = nd.ProcessGrid(world, replicas=replicas)
        data = open_dataset(nd.Synthetic((4, 3, 1), train=16, test=2).shard(2, 1), grid)
        model = nd.MLPDist([nd.FCLayerDist(4)], seed=1, dtype="float64")
        model.build(data.sample_shape, 4, grid)
        with nd.DistributedSession(nd.TaskSpecDef(), model, log_step_count_steps=None) as session:
            return [session.run(model.train_batch, x, y) for x, y in session.batches(data, 4, epochs=2)]

    (expected,) = loopback.run(1, lambda world: body(world, 1))
    assert len(expected) == 4
    for losses in loopback.run(replicas, lambda world: body(world, replicas)):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_replicas_have_their_own_shards_or_the_same_one():
    def body(world):
        grid = nd.ProcessGrid(world, replicas=4)
        data = open_dataset(nd.Synthetic((4, 3, 1), train=16, test=2).shard(2, grid.replica % 2), grid)
        model = nd.MLPDist([nd.FCLayerDist(4)])
        model.build(data.sample_shape, 4, grid)
        with nd.DistributedSession(nd.TaskSpecDef(), model) as session:
            next(session.batches(data, 4))

    with pytest.raises(nd.ConfigError, match=r"4 replicas have shards \[\(2, 0\), \(2, 1\), .* its own"):
        loopback.run(4, body)


@pytest.mark.parametrize(("replicas", "warns"), [(2, False), (4, True), (1, True)])
def test_other_shards_within_an_epoch_cause_a_warning(tmp_path, capsys, replicas, warns):
    def body(world, last_step):
        grid = nd.ProcessGrid(world, replicas=world.size)
        data = open_dataset(nd.Synthetic((4, 3, 1), train=16, test=2).shard(grid.replicas, grid.replica), grid)
        model = nd.MLPDist([nd.FCLayerDist(4)])
        model.build(data.sample_shape, 4, grid)
        with nd.DistributedSession(nd.TaskSpecDef(), model, tmp_path, [nd.StopAtStepHook(last_step)]) as session:
            for x, y in session.batches(data, 4):
                session.run(model.train_batch, x, y)

    loopback.run(2, lambda world: body(world, 2))
    loopback.run(replicas, lambda world: body(world, 3))
    warning = f"warning: epoch 1 began with 2 shards and continues with {replicas}: some of its samples are repeated"
    assert capsys.readouterr().out.count(warning) == warns


def test_experiments_reject_different_shards():
    """Experiments divide each batch of a common order among the replicas."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=2)
        data = nd.Synthetic((4, 3, 1), train=16, test=2).shard(2, grid.replica)
        nd.FitExperiment(data, nd.MLPDist([nd.FCLayerDist(4)]), batch_size=4, grid={"replicas": 2}).run(grid)

    with pytest.raises(nd.ConfigError, match="rank 0 has shard 0 of 2, but rank 1 has shard 1 of 2"):
        loopback.run(2, body)


@pytest.mark.parametrize(("numbers", "message"), [
    ((0, 0), "num_shards"),
    ((2, 2), "index: 2 is out of range; give 0 to 1"),
    ((2, -1), "index"),
    ((2, 0.5), "index"),
])  # fmt: skip
def test_invalid_shards(numbers, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.Synthetic((4, 3, 1)).shard(*numbers)


def test_too_many_shards():
    with pytest.raises(nd.DataError, match="3 training samples cannot be divided into 4 shards"):
        open_dataset(nd.Synthetic((4, 3, 1), train=3, test=2).shard(4, 0))
    with pytest.raises(nd.ConfigError, match="already a shard"):
        nd.Synthetic((4, 3, 1)).shard(2, 0).shard(2, 0)
