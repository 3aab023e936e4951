"""Training under each strategy: results of one process, planned bytes and memory, optimiser slots on owners."""

from functools import cache

import numpy as np
import pytest
from builders import SYNCHRONOUS_STRATEGIES
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import KINDS, make_model

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
    """Train five steps, the last with fewer samples; return the model and global arrays."""
    model, shape = make_model(kind, grid is not None), KINDS[kind][0]
    model.optimizer = OPTIMIZERS[optimizer][0]()
    model.configure_execution(strategy=strategy)
    model.build(shape, 7, grid)
    rng = np.random.default_rng(4)
    losses = []
    for samples in (7, 7, 7, 7, 5):
        x, labels = rng.normal(size=(samples, *shape)), rng.integers(0, 10, (samples, *model.output_shape[:-1]))
        losses.append(model.train_batch(model.scatter(x), labels, batch_size=samples))
    return model, {"loss": np.array(losses)} | model.state() | model.optimizer_state()


@cache
def train_serial(kind, optimizer):
    return train(kind, optimizer)[1]


@settings(max_examples=24)
@given(*map(st.sampled_from, (NETWORKS, sorted(OPTIMIZERS), SYNCHRONOUS_STRATEGIES, GRIDS)))
@pytest.mark.long
def test_results_match_one_process(kind, optimizer, strategy, shape):
    replicas, rows, cols = shape

    def body(world):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model, actual = train(kind, optimizer, grid, strategy)
        plan, sent = model.compiled, 0
        for account, count in model.ledger().items():
            sent += account.nbytes * count * (account.layer == "gradients")
        planned = plan.reduction_bytes(grid.rank).get("gradients", 0) + plan.redistribution_bytes(grid.rank).get(
            "gradients", 0
        )
        return actual, sent, 5 * planned

    expected, tolerance = train_serial(kind, optimizer), OPTIMIZERS[optimizer][1]
    for actual, sent, planned in nd.loopback.run(replicas * rows * cols, body):
        assert sent == planned
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def measure_slots(strategy, ranks):
    """Return the bytes of slots on each rank, and of those of all parameters."""

    def body(world):
        model, _ = train("perceptron", "Adam", nd.ProcessGrid(world, replicas=ranks), strategy)
        return sum(slot.nbytes for slot in model.slots.values()), 3 * model.parameters.values.nbytes

    return nd.loopback.run(ranks, body)


def test_sharded_optimizer_divides_the_slots():
    assert all(local <= 0.26 * full for local, full in measure_slots("ShardedOptimizer", 4))


def test_slots_are_stored_on_owners():
    slots = measure_slots("PS", 3)
    assert [local for local, _ in slots] == [slots[0][1], 0, 0]
    balanced = measure_slots("PSLoadBalancing", 3)
    assert sum(local for local, _ in balanced) == balanced[0][1]
    assert all(local < full for local, full in balanced)


def test_bprop_gradients_are_complete_on_all_ranks():
    def compute_gradients(grid, strategy):
        model, shape = make_model("everything", grid is not None), KINDS["everything"][0]
        model.configure_execution(strategy=strategy)
        model.build(shape, 4, grid)
        y = model.gather(model.fprop(model.scatter(np.random.default_rng(1).normal(size=(4, *shape)))))
        model.bprop(model.scatter_output(np.random.default_rng(2).normal(size=y.shape)))
        return model.gradients()

    expected = compute_gradients(None, None)
    for actual in nd.loopback.run(
        4, lambda world: compute_gradients(nd.ProcessGrid(world, replicas=2), "ShardedOptimizer")
    ):
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_strategy_file_is_replayed_on_other_grids(tmp_path):
    serial_model = make_model("perceptron", False)
    serial_model.build(KINDS["perceptron"][0], 7)
    strategy = strategies.PartitionedPS().build(serial_model.compiled.parameters.strategy.specs.values(), 2)
    strategy.save(tmp_path / "strategy.yaml")
    path = str(tmp_path / "strategy.yaml")

    def body(world):
        model, actual = train("perceptron", "SGD", nd.ProcessGrid(world, replicas=2), path)
        return model.compiled.parameters.strategy, actual

    for replayed, actual in nd.loopback.run(4, body):
        assert replayed == strategy
        for name, array in train_serial("perceptron", "SGD").items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-12, atol=1e-12, err_msg=name)
    with pytest.raises(nd.ConfigError, match="no entry for parameter 'conv1/weights'"):
        train("everything", "SGD", None, path)
    with pytest.raises(nd.ConfigError, match="2 owners, but the job has 1 rank"):
        train("perceptron", "SGD", None, path)


@pytest.mark.parametrize(("strategy", "message"), [
    ("PS(staleness=2)", "parameter servers"),
    ("PSLoadBalancing(sync=False)", "parameter servers"),
    ("PSS", "did you mean 'PS'"),
])  # fmt: skip
def test_unsupported_strategies_are_rejected_before_the_build(strategy, message):
    with pytest.raises(nd.ConfigError, match=message):
        train("perceptron", "SGD", None, strategy)


@pytest.mark.parametrize("strategy", ["PS", "PSLoadBalancing", "ShardedOptimizer"])
def test_peak_memory_covers_all_replicas(strategy):
    layers = [nd.ConvLayerDist(4, 3), nd.FCLayerDist(300), nd.FCLayerDist(10)]
    plan = nd.ConvnetDist(layers, optimizer=nd.Adam(), strategy=strategy).plan((12, 12, 1), GridShape(3, 1, 2), 6)
    assert plan.needed_bytes == max(map(plan.memory, range(6)))
