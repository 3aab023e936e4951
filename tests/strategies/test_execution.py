"""Training under each strategy: the numbers of one process, bytes and memory as planned, slots on owners alone."""

from functools import cache

import numpy as np
import pytest
from builders import SYNCHRONOUS
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import KINDS, model_of

import neondist as nd
from neondist import strategies
from neondist.geometry import GridShape

GRIDS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
OPTIMIZERS = {
    "SGD": (lambda: nd.SGD(0.05, momentum=0.9, weight_decay=0.01, decay_all=False), 1e-12),
    "Adam": (lambda: nd.Adam(0.01, ema=0.9, clip_norm=0.5), 1e-8),
    "LAMB": (lambda: nd.LAMB(0.01, weight_decay=0.01), 1e-8),
}
NETWORKS = ["everything", "unshared", "normalisation", "perceptron", "segmentation"]


def train(kind, optimizer, grid=None, strategy=None):
    """Train five steps, the last of fewer samples; return the model, and whole arrays."""
    model, shape = model_of(kind, grid is not None), KINDS[kind][0]
    model.optimizer = OPTIMIZERS[optimizer][0]()
    model.execute(strategy=strategy)
    model.build(shape, 7, grid)
    rng = np.random.default_rng(4)
    losses = []
    for samples in (7, 7, 7, 7, 5):
        x, labels = rng.normal(size=(samples, *shape)), rng.integers(0, 10, (samples, *model.output_shape[:-1]))
        losses.append(model.train_batch(model.scatter(x), labels, batch_size=samples))
    return model, {"loss": np.array(losses)} | model.state() | model.optimizer_state()


@cache
def serial(kind, optimizer):
    return train(kind, optimizer)[1]


@settings(max_examples=24)
@given(*map(st.sampled_from, (NETWORKS, sorted(OPTIMIZERS), SYNCHRONOUS, GRIDS)))
@pytest.mark.long
def test_numbers_are_those_of_one_process(kind, optimizer, strategy, shape):
    replicas, rows, cols = shape

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model, found = train(kind, optimizer, grid, strategy)
        plan, sent = model.compiled, 0
        for account, count in model.ledger().items():
            sent += account.nbytes * count * (account.layer == "gradients")
        planned = plan.reduced(grid.rank).get("gradients", 0) + plan.redistributed(grid.rank).get("gradients", 0)
        return found, sent, 5 * planned

    expected, tolerance = serial(kind, optimizer), OPTIMIZERS[optimizer][1]
    for found, sent, planned in nd.loopback.run(replicas * rows * cols, body):
        assert sent == planned
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def slots_of(strategy, ranks):
    """Return the bytes of slots of each rank, and of the parameters that all have."""

    def body(world):
        model, _ = train("perceptron", "Adam", nd.ProcessGrid(world, replicas=ranks), strategy)
        return sum(slot.nbytes for slot in model.slots.values()), 3 * model.parameters.values.nbytes

    return nd.loopback.run(ranks, body)


def test_slots_of_a_sharded_optimizer_are_a_share_of_the_whole():
    assert all(mine <= 0.26 * whole for mine, whole in slots_of("ShardedOptimizer", 4))


def test_slots_live_on_owners_alone():
    found = slots_of("PS", 3)
    assert [mine for mine, _ in found] == [found[0][1], 0, 0]
    balanced = slots_of("PSLoadBalancing", 3)
    assert sum(mine for mine, _ in balanced) == balanced[0][1]
    assert all(mine < whole for mine, whole in balanced)


def test_gradients_of_bprop_are_whole_on_all_ranks():
    def gradients(grid, strategy):
        model, shape = model_of("everything", grid is not None), KINDS["everything"][0]
        model.execute(strategy=strategy)
        model.build(shape, 4, grid)
        y = model.gather(model.fprop(model.scatter(np.random.default_rng(1).normal(size=(4, *shape)))))
        model.bprop(model.scatter_output(np.random.default_rng(2).normal(size=y.shape)))
        return model.gradients()

    expected = gradients(None, None)
    for found in nd.loopback.run(4, lambda world: gradients(nd.ProcessGrid(world, replicas=2), "ShardedOptimizer")):
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_a_strategy_file_is_replayed_on_any_grid_that_has_its_owners(tmp_path):
    serial_model = model_of("perceptron", False)
    serial_model.build(KINDS["perceptron"][0], 7)
    made = strategies.PartitionedPS().build(serial_model.compiled.parameters.strategy.specs.values(), 2)
    made.save(tmp_path / "strategy.yaml")
    path = str(tmp_path / "strategy.yaml")

    def body(world):
        model, found = train("perceptron", "SGD", nd.ProcessGrid(world, replicas=2), path)
        return model.compiled.parameters.strategy, found

    for replayed, found in nd.loopback.run(4, body):
        assert replayed == made
        for name, array in serial("perceptron", "SGD").items():
            np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=1e-12, err_msg=name)
    with pytest.raises(nd.ConfigError, match="no entry for parameter 'conv1/weights'"):
        train("everything", "SGD", None, path)
    with pytest.raises(nd.ConfigError, match="2 owners, but the job has 1 ranks"):
        train("perceptron", "SGD", None, path)


@pytest.mark.parametrize(("strategy", "says"), [
    ("PS(staleness=2)", "parameter servers"),
    ("PSLoadBalancing(sync=False)", "parameter servers"),
    ("PSS", "did you mean 'PS'"),
])  # fmt: skip
def test_what_cannot_be_executed_is_refused_before_the_build(strategy, says):
    with pytest.raises(nd.ConfigError, match=says):
        train("perceptron", "SGD", None, strategy)


@pytest.mark.parametrize("strategy", ["PS", "PSLoadBalancing", "ShardedOptimizer"])
def test_the_rank_that_needs_most_may_be_of_any_replica(strategy):
    layers = [nd.ConvLayerDist(4, 3), nd.FCLayerDist(300), nd.FCLayerDist(10)]
    plan = nd.ConvnetDist(layers, optimizer=nd.Adam(), strategy=strategy).plan((12, 12, 1), GridShape(3, 1, 2), 6)
    assert plan.needed == max(map(plan.memory, range(6)))
