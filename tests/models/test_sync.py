"""Gradient synchronisers: equal results and bytes, in different messages."""

import numpy as np
import pytest
from common_checks import max_relative_difference
from every_layer import build_every_layer
from gb_runs import run_pretraining_steps

import neondist as nd
from neondist.comm import loopback
from neondist.observer import Observer
from neondist.parallel import FLAG_HEADER_LENGTH, Bucketed, ControlFlag


class EarlyBucketCounter(Observer):
    """Observer that counts the buckets in flight at the end of the backward pass."""

    def __init__(self, model):
        self.model, self.counts = model, []

    def on_begin(self, event, name, direction, subject):
        if event == "sync":
            self.counts.append(
                sum(bucket.request is not None for bucket in getattr(self.model.sync, "early_buckets", []))
            )


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(Bucketed, "full_bucket_bytes", 200)


def run_steps(grid, sync, accumulate=1):
    """Return the results of two steps, the bytes and messages of gradients, and the numbers of early buckets."""
    model, arrays = build_every_layer("Dist", grid, batch=6, sync=sync, accumulate=accumulate), {}
    observer = EarlyBucketCounter(model)
    with model.grid.observers.add_temporarily(observer):
        for step in range(2):
            rng = np.random.default_rng(step)
            x, labels = rng.normal(size=(6, *model.input_shape)), rng.integers(0, 4, 6)
            arrays[f"loss {step}"] = np.array([model.train_batch(model.scatter(x), labels, 6)])
            arrays |= {f"{name} {step}": gradient for name, gradient in model.gradients().items()}
    sums = model.sync.reductions
    return arrays | model.state(), sums.bytes_reduced, sum(sums.reduction_counts.values()), observer.counts


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 1), (6, 2)], ids=str)
@pytest.mark.long
def test_buckets_are_sent_during_backward(small_buckets, grid):
    ranks, replicas = grid

    def job(comm, sync, accumulate=1):
        return run_steps(nd.ProcessGrid(comm, replicas=replicas), sync, accumulate)

    reference = loopback.run(ranks, lambda comm: job(comm, "allreduce"))
    bucketed = loopback.run(ranks, lambda comm: job(comm, "bucketed"))
    micro_batch_ranges = loopback.run(ranks, lambda comm: job(comm, "bucketed", 2))
    for (expected, nbytes, messages, _), *others in zip(reference, bucketed, micro_batch_ranges, strict=True):
        for actual, sent, count, early in others:
            assert max_relative_difference(actual, expected) < 1e-10
            assert sent == nbytes
            assert count > 3 * messages or ranks == 1
            assert early[0] == early[1] > 5


@pytest.mark.parametrize("kind", ["unshared", "shared"])
@pytest.mark.parametrize("grid", [(4, 1), (6, 2)], ids=str)
@pytest.mark.long
def test_gradients_of_tile_weights(small_buckets, kind, grid):
    ranks, replicas = grid

    def job(comm, sync):
        return run_pretraining_steps(kind, nd.ProcessGrid(comm, replicas=replicas), sync=sync)

    references = loopback.run(ranks, lambda comm: job(comm, "allreduce"))
    for actual, reference in zip(loopback.run(ranks, lambda comm: job(comm, "bucketed")), references, strict=True):
        assert max_relative_difference(actual, reference) < 1e-10


@pytest.mark.parametrize("capacity", [1, 100, 10**6])
def test_buckets_cover_gradients_and_flags(monkeypatch, capacity):
    monkeypatch.setattr(Bucketed, "full_bucket_bytes", capacity)
    values, spans = np.arange(FLAG_HEADER_LENGTH + 60.0), [(0, 10), (10, 40), (40, 50), (50, 60)]
    for shared in (0, 40, 60):
        sync = Bucketed(nd.ProcessGrid.serial(), values, spans, shared, shared)
        contents = np.concatenate([bucket.array for bucket in (*sync.early_buckets, sync.last_bucket)])
        np.testing.assert_array_equal(np.sort(contents), values)
        assert sync.last_bucket.array[0] == 0
        sync.begin_step()
        for span in spans[::-1]:
            sync.mark_ready(span)
        assert all(bucket.request is not None for bucket in sync.early_buckets)
        sync.flags.own_flags[ControlFlag.TIME_LIMIT] = 1
        sync.finish_sums()
        assert sync.flag_header[ControlFlag.TIME_LIMIT] == 1
        values = np.arange(FLAG_HEADER_LENGTH + 60.0)


@pytest.mark.parametrize("ranks", [4, 6])
def test_ranks_without_weights_of_their_own_join_the_same_sums(ranks):
    """All weights belong to tiles, and some tiles are empty."""

    def job(comm, sync):
        layers = [nd.LocalFilteringLayerDist(2, (3, 2), bias=True), nd.LocalFilteringLayerDist(2, 1)]
        model = nd.ConvnetDist(layers, cost=nd.MSE(), dtype="float64", sync=sync)
        model.build((4, 2, 1), 1, nd.ProcessGrid(comm))
        loss = model.train_batch(model.scatter(np.ones((1, 4, 2, 1))), np.ones((1, 2, 1, 2)))
        return model.state() | {"loss": np.array([loss])}

    (expected,) = loopback.run(1, lambda comm: job(comm, "allreduce"))
    for actual in loopback.run(ranks, lambda comm: job(comm, "bucketed"), timeout=10):
        assert max_relative_difference(actual, expected) < 1e-12


def test_unknown_synchronisers_are_rejected():
    with pytest.raises(nd.ConfigError, match="sync: expected 'allreduce' or 'bucketed', got the text 'ring'"):
        nd.Convnet([nd.FCLayer(4)], sync="ring")
