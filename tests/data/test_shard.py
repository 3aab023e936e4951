"""Shards of the training samples: disjoint, complete, and the same for all tiles of a replica."""

import numpy as np
import pytest
from hdf5_toys import image_folder, small_hdf5
from hypothesis import given, settings
from hypothesis import strategies as st
from test_validation import KINDS, cells, opened

import neondist as nd
from neondist.comm import loopback


def hdf5(path, **more):
    if not (path / "x.h5").exists():
        small_hdf5(path / "x.h5")
    return nd.HDF5Dataset(path / "x.h5", scale=1, **more)


def images(path, validation=None):
    pytest.importorskip("PIL.Image", reason="Pillow reads the images")
    if not (path / "x").exists():
        image_folder(path / "x", count=6)
    return nd.ImageFiles(str(path / "x" / "*" / "*.png"), labels="folders", crop=(6, 5), validation=validation or 2)


@pytest.mark.parametrize("make", [*KINDS, hdf5, images])
@pytest.mark.parametrize("kept", [None, 3])
def test_shards_are_disjoint_and_cover(tmp_path, make, kept):
    """Of every class of data sets, beside a validation split or not."""
    whole = opened(make(tmp_path, validation=kept))
    shards = [opened(make(tmp_path, validation=kept).shard(3, index)) for index in range(3)]
    images, targets = cells(whole.train), whole.train.targets(np.arange(len(whole.train)))
    for index, one in enumerate(shards):
        assert np.array_equal(cells(one.train), images[index::3])
        assert np.array_equal(one.train.targets(np.arange(len(one.train))), targets[index::3])
        assert one.splits.keys() == whole.splits.keys()
        assert kept is None or len(one.validation) == len(whole.validation) > 0
    assert sum(len(one.train) for one in shards) == len(whole.train)
    late = whole.shard(3, 1)  # of one that is open; that stays as it is
    assert np.array_equal(cells(late.train), images[1::3])
    assert len(whole.train) == len(images)


@settings(max_examples=10, deadline=None)
@given(
    replicas=st.integers(1, 3),
    tiles=st.integers(1, 2),
    late=st.booleans(),
    of_ranks=st.booleans(),
    n=st.integers(6, 20),
)
def test_tiles_of_a_replica_share_a_shard(replicas, tiles, late, of_ranks, n):
    """Whether shards are numbered by replicas or by ranks, before the data set is opened or after."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=tiles, cols=1)
        number = (grid.size, grid.rank) if of_ranks else (grid.replicas, grid.replica)
        data = nd.Synthetic((4, 3, 1), train=n, test=2)
        data = opened(data, grid).shard(*number) if late else opened(data.shard(*number), grid)
        return grid.replica, grid.row, cells(data.train)

    whole = cells(opened(nd.Synthetic((4, 3, 1), train=n, test=2)).train)
    for replica, row, found in loopback.run(replicas * tiles, body):
        lo, hi = nd.split(4, tiles, row)
        assert np.array_equal(found, whole[replica::replicas, lo:hi])


def test_tiles_of_different_samples_are_refused():
    def body(world):
        grid = nd.ProcessGrid(world)
        return opened(nd.Synthetic((4, 3, 1), train=8, test=2).shard(3, grid.rank), grid)

    with pytest.raises(nd.ConfigError, match=r"hold tiles of the same samples, but have shards \[\(3, 0\), \(3, 1\)\]"):
        loopback.run(2, body)


def test_each_replica_trains_on_its_own_shard():
    """A session reads the same number of samples of each shard, in an order of its own, all of them once an epoch."""

    def body(world):
        grid = nd.ProcessGrid(world, replicas=2)
        data = opened(nd.Synthetic((4, 3, 1), train=9, test=2).shard(2, grid.replica), grid)
        model = nd.MLPDist([nd.FCLayerDist(4)])
        model.build(data.sample_shape, 4, grid)
        seen = []
        with nd.DistributedSession(nd.TaskSpecDef(), model, log_step_count_steps=None) as session:
            for x, y in session.batches(data, 4, epochs=2):
                session.run(model.train_batch, x, y)
                seen.append(x)
        return np.concatenate(seen), session.global_step

    whole = cells(opened(nd.Synthetic((4, 3, 1), train=9, test=2)).train)
    for replica, (seen, steps) in enumerate(loopback.run(2, body)):
        assert steps == 4
        rows = {one.tobytes(): number for number, one in enumerate(whole.astype(seen.dtype))}
        numbers = [rows[one.tobytes()] for one in seen]
        assert len(numbers) == 8
        for epoch in (numbers[:4], numbers[4:]):
            assert len(set(epoch)) == 4
            assert {number % 2 for number in epoch} == {replica}


@pytest.mark.parametrize(("numbers", "message"), [
    ((0, 0), "num_shards"),
    ((2, 2), "index: 2, but there are 2 shards"),
    ((2, -1), "index"),
    ((2, 0.5), "index"),
])  # fmt: skip
def test_wrong_shards_are_named(numbers, message):
    with pytest.raises(nd.ConfigError, match=message):
        nd.Synthetic((4, 3, 1)).shard(*numbers)


def test_more_shards_than_samples_are_refused():
    with pytest.raises(nd.DataError, match="3 training samples for 4 shards"):
        opened(nd.Synthetic((4, 3, 1), train=3, test=2).shard(4, 0))
    with pytest.raises(nd.ConfigError, match="already a shard"):
        nd.Synthetic((4, 3, 1)).shard(2, 0).shard(2, 0)
