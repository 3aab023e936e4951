"""Ways to sum gradients: the same numbers and bytes, in other messages."""

import numpy as np
import pytest
from gb_runs import pretrain_steps
from support import worst
from test_interleaving import built

import neondist as nd
from neondist.comm import loopback
from neondist.observer import Observer
from neondist.parallel import HEADER, Bucketed, Flag


class Early(Observer):
    """Counts the buckets that are on their way when the backward pass is over."""

    def __init__(self, model):
        self.model, self.counts = model, []

    def begin(self, what, name, direction, subject):
        if what == "sync":
            self.counts.append(sum(bucket.request is not None for bucket in getattr(self.model.sync, "early", [])))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Bucketed, "full", 200)


def steps(grid, sync, accumulate=1):
    """Losses, gradients and weights of two steps, the bytes and messages of gradients, and how many left early."""
    model, found = built("Dist", grid, batch=6, sync=sync, accumulate=accumulate), {}
    early = Early(model)
    with model.grid.observers.watched_by(early):
        for step in range(2):
            rng = np.random.default_rng(step)
            x, labels = rng.normal(size=(6, *model.input_shape)), rng.integers(0, 4, 6)
            found[f"loss {step}"] = np.array([model.train_batch(model.scatter(x), labels, 6)])
            found |= {f"{name} {step}": gradient for name, gradient in model.gradients().items()}
    sums = model.sync.reductions
    return found | model.state(), sums.bytes_reduced, sum(sums.recorded.values()), early.counts


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 1), (6, 2)], ids=str)
@pytest.mark.long
def test_buckets_travel_during_backward(small, grid):
    ranks, replicas = grid

    def job(comm, sync, accumulate=1):
        return steps(nd.ProcessGrid(comm, replicas=replicas), sync, accumulate)

    one = loopback.run(ranks, lambda comm: job(comm, "allreduce"))
    many = loopback.run(ranks, lambda comm: job(comm, "bucketed"))
    parts = loopback.run(ranks, lambda comm: job(comm, "bucketed", 2))
    for (expected, nbytes, messages, _), *others in zip(one, many, parts, strict=True):
        for found, sent, count, early in others:
            assert worst(found, expected) < 1e-10
            assert sent == nbytes
            assert count > 3 * messages or ranks == 1
            assert early[0] == early[1] > 5


@pytest.mark.parametrize("kind", ["unshared", "shared"])
@pytest.mark.parametrize("grid", [(4, 1), (6, 2)], ids=str)
@pytest.mark.long
def test_gradients_of_a_tiles_own_weights(small, kind, grid):
    ranks, replicas = grid

    def job(comm, sync):
        return pretrain_steps(kind, nd.ProcessGrid(comm, replicas=replicas), sync=sync)

    expected = loopback.run(ranks, lambda comm: job(comm, "allreduce"))
    for found, one in zip(loopback.run(ranks, lambda comm: job(comm, "bucketed")), expected, strict=True):
        assert worst(found, one) < 1e-10


@pytest.mark.parametrize("full", [1, 100, 10**6])
def test_every_gradient_and_the_flags_are_in_one_bucket(monkeypatch, full):
    monkeypatch.setattr(Bucketed, "full", full)
    numbers, spans = np.arange(HEADER + 60.0), [(0, 10), (10, 40), (40, 50), (50, 60)]
    for shared in (0, 40, 60):
        sync = Bucketed(nd.ProcessGrid.serial(), numbers, spans, shared)
        held = np.concatenate([bucket.array for bucket in (*sync.early, sync.last)])
        np.testing.assert_array_equal(np.sort(held), numbers)
        assert sync.last.array[0] == 0
        sync.begin()
        for span in spans[::-1]:
            sync.ready(span)
        assert all(bucket.request is not None for bucket in sync.early)
        sync.flags.mine[Flag.TIME] = 1
        sync.finish()
        assert sync.header[Flag.TIME] == 1
        numbers = np.arange(HEADER + 60.0)


def test_another_name_is_refused():
    with pytest.raises(nd.ConfigError, match="sync: expected 'allreduce' or 'bucketed', got the text 'ring'"):
        nd.Convnet([nd.FCLayer(4)], sync="ring")
