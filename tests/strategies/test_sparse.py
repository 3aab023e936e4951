"""Sparse gradients: results of dense gradients under every strategy, and bytes proportional to the rows used."""

from math import prod
from random import Random

import numpy as np
import pytest
from builders import SYNCHRONOUS_STRATEGIES, draw_strategy
from hypothesis import example, given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import Reductions
from neondist.parallel.rows import RowExchange, SparseParameterLayout

ROWS, WIDTH = 40, 3
OPTIMIZERS = {
    "SGD": lambda: nd.SGD(0.2),
    "momentum": lambda: nd.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: nd.Adam(0.2, ema=0.9),
    "LAMB": lambda: nd.LAMB(0.05, clip_norm=0.5),
}
#: reduced version of AutoDist's case c2: two averaged tables, the mean over tokens, dense layers; 1-D and image ids
SHAPES = [(5,), (5, 1), (3, 2, 2)]


def make_bag_of_words(dist, tables, **options):
    def make(kind, *args, **kwargs):
        return getattr(nd, f"{kind}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    layers = [nd.Sum([[table(make)] for table in tables]), make("GlobalAvgPooling")]
    layers += [make("FC", 6, activation=nd.ReLU()), make("FC", 3)]
    return (nd.MLPDist if dist else nd.MLP)(layers, dtype="float64", seed=2, **options)


def train_steps(model, shape, grid, inputs=lambda ids: ids, rows=ROWS, steps=4):
    """Train some steps, the last with fewer samples; return global arrays and the gradient bytes of each step."""
    rng = np.random.default_rng(0)
    example = np.zeros((6, *shape))
    model.build(inputs(example).shape[1:], 6, grid)
    losses, sent = [], [0]
    for samples in [6] * (steps - 1) + [5]:
        ids, labels = rng.integers(0, rows, (samples, *shape)).astype(float), rng.integers(0, 3, samples)
        losses.append(model.train_batch(model.scatter(inputs(ids)), labels, batch_size=samples))
        sent.append(
            sum(account.nbytes * count for account, count in model.ledger().items() if account.layer == "gradients")
        )
    return {"loss": np.array(losses)} | model.state() | model.optimizer_state(), np.diff(sent)


def make_job(make_model, shape):
    def body(world, replicas, rows, cols):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model = make_model()
        arrays, sent = train_steps(model, shape, grid)
        plan = model.compiled
        bound = sum(
            count_bytes(grid.rank).get("gradients", 0)
            for count_bytes in (plan.reduction_bytes, plan.redistribution_bytes)
        )
        return arrays, sent, bound

    return body


@settings(max_examples=20)
@given(
    st.sampled_from(SYNCHRONOUS_STRATEGIES), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(SHAPES),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 3, 1)]),
)  # fmt: skip
@pytest.mark.long
def test_results_match_one_process(strategy, optimizer, shape, grid):
    tables = [lambda make: make("Embedding", ROWS, WIDTH)] * 2
    options = {"optimizer": OPTIMIZERS[optimizer](), "strategy": strategy}
    body = make_job(lambda: make_bag_of_words(True, tables, **options), shape)
    expected, _ = train_steps(make_bag_of_words(False, tables, **options | {"strategy": None}), shape, None)
    tolerance = 1e-12 if optimizer in ("SGD", "momentum") else 1e-8
    for actual, sent, bound in nd.loopback.run(int(np.prod(grid)), lambda world: body(world, *grid)):
        assert (sent <= bound).all()
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@settings(max_examples=12)
@example(Random(12), (3, 1, 1), (1,))  # divides the rows of a table
@given(st.randoms(use_true_random=False), st.sampled_from([(2, 1, 1), (3, 1, 1)]), st.sampled_from([(1,), (3, 2, 2)]))
@pytest.mark.long
def test_edited_strategies_match_one_process(random, grid, shape):
    """Rows may be divided between owners; then whole parts are sent, as of dense parameters."""
    tables = [lambda make: make("Embedding", ROWS, WIDTH)] * 2
    serial = make_bag_of_words(False, tables, optimizer=nd.Adam(0.1))
    expected, _ = train_steps(serial, shape, None)
    strategy = draw_strategy(random, list(serial.compiled.parameters.strategy.specs.values()), prod(grid))
    body = make_job(lambda: make_bag_of_words(True, tables, optimizer=nd.Adam(0.1), strategy=strategy), shape)
    for actual, sent, bound in nd.loopback.run(prod(grid), lambda world: body(world, *grid)):
        assert (sent <= bound).all()
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=1e-8, atol=1e-8, err_msg=name)


def encode_one_hot(ids):
    return np.eye(ROWS)[ids.astype(int)]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_sparse_and_dense_training_agree(optimizer):
    """An embedding is a convolution of size 1 on one-hot vectors, whose gradient is dense."""
    tables = [
        lambda make: make("Embedding", ROWS, WIDTH, name="a"),
        lambda make: make("Embedding", ROWS, WIDTH, name="b"),
    ]
    dense = [
        lambda make: make("Conv", WIDTH, 1, bias=False, name="a"),
        lambda make: make("Conv", WIDTH, 1, bias=False, name="b"),
    ]
    models = [make_bag_of_words(False, factories, optimizer=OPTIMIZERS[optimizer]()) for factories in (tables, dense)]
    models[1] = nd.Convnet(**models[1].arguments())
    rng = np.random.default_rng(3)
    initial = {name: rng.normal(size=(ROWS, WIDTH)) for name in "ab"}
    results = []
    for model, inputs, shape in zip(
        models, (lambda ids: ids, encode_one_hot), ((ROWS, WIDTH), (1, ROWS, WIDTH)), strict=True
    ):
        model.build(inputs(np.zeros((6, 5))).shape[1:], 6)
        model.load_state(model.state() | {f"{name}/weights": array.reshape(shape) for name, array in initial.items()})
        results.append(train_again(model, inputs))
    for name, array in results[0].items():
        np.testing.assert_allclose(array, results[1][name].reshape(array.shape), rtol=1e-12, atol=1e-12, err_msg=name)


def train_again(model, inputs):
    rng, losses = np.random.default_rng(1), []
    for _ in range(5):
        ids, labels = rng.integers(0, ROWS, (6, 5)).astype(float), rng.integers(0, 3, 6)
        losses.append(model.train_batch(inputs(ids), labels))
    return {"loss": np.array(losses)} | model.state() | model.optimizer_state()


def count_gradient_bytes(strategy, table, used, optimizer):
    """Return the gradient bytes of a step on samples of `used` ids each."""

    def body(world):
        tables = [lambda make: make("Embedding", table, WIDTH)]
        model = make_bag_of_words(True, tables, strategy=strategy, optimizer=OPTIMIZERS[optimizer]())
        model.build((used,), 2, nd.ProcessGrid(world, replicas=2))
        ids = np.arange(2 * used, dtype=float).reshape(2, used) % table
        model.train_batch(model.scatter(ids), np.zeros(2, int))
        return sum(account.nbytes * count for account, count in model.ledger().items() if account.layer == "gradients")

    return sum(nd.loopback.run(2, body))


@pytest.mark.parametrize("strategy", ["AllReduce", "Parallax", "PSLoadBalancing", "PartitionedPS"])
def test_bytes_are_proportional_to_used_rows(strategy):
    bytes_of_10, bytes_of_20, bytes_of_30 = (count_gradient_bytes(strategy, 1000, used, "SGD") for used in (10, 20, 30))
    assert bytes_of_20 - bytes_of_10 == bytes_of_30 - bytes_of_20 > 0
    assert count_gradient_bytes(strategy, 100_000, 20, "SGD") == bytes_of_20  # the full table is never sent
    rows = (bytes_of_20 - bytes_of_10) / (8 + 8 * WIDTH)
    assert rows <= 40  # gradients of both ranks, and values if rows have owners


def test_owners_send_rows_moved_by_momentum():
    assert count_gradient_bytes("PS", 100_000, 20, "Adam") < 20_000


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.randoms())
def test_ranges_may_split_rows(ranks, width, rows, random):
    """Compare sums over ranks and values with those of full tables."""
    size = width * rows
    ends = sorted(random.randint(0, size) for _ in range(ranks - 1))
    ranges = list(zip([0, *ends], [*ends, size], strict=True))
    rng = np.random.default_rng(random.randint(0, 99))
    rank_gradients = rng.normal(size=(ranks, 2, rows, width)) * (rng.random((ranks, 2, rows, 1)) < 0.4)
    changes = rng.normal(size=(2, rows, width)) * (rng.random((2, rows, 1)) < 0.4)

    def body(world):
        exchange = RowExchange(
            Reductions(nd.ProcessGrid(world, replicas=ranks)),
            [SparseParameterLayout(start, width, ranges) for start in (0, size)],
        )
        gradients, values = rank_gradients[world.rank].reshape(-1).copy(), np.ones(2 * size)
        exchange.reduce_rows(gradients)
        before = exchange.copy_own_ranges(values)
        for layout in exchange.layouts:
            part, change = layout.rank_view(values, world.rank), layout.rank_view(changes.reshape(-1), world.rank)
            part += change
        exchange.broadcast_rows(values, before)
        return [layout.rank_view(gradients, world.rank) for layout in exchange.layouts], values

    parts, values = zip(*nd.loopback.run(ranks, body), strict=True)
    sums = np.stack([np.concatenate([part[index] for part in parts]) for index in (0, 1)])
    np.testing.assert_allclose(sums.reshape(-1), rank_gradients.sum(axis=0).reshape(-1), rtol=1e-13, atol=1e-15)
    for array in values:
        np.testing.assert_array_equal(array, 1 + changes.reshape(-1))


@pytest.mark.parametrize("invalid_id", [-1.0, ROWS, 0.5, np.nan])
def test_ids_outside_the_table_are_rejected(invalid_id):
    model = nd.MLP([nd.EmbeddingLayer(ROWS, WIDTH, name="words"), nd.FCLayer(3)])
    model.build((4,), 2)
    ids = np.zeros((2, 4))
    ids[1, 2] = invalid_id
    with pytest.raises(nd.DataError, match=rf"layer 'words': id {invalid_id:g} is not in the table of {ROWS} rows"):
        model.fprop(ids)


def test_embedding_shapes_and_zero_input_gradient():
    model = nd.Convnet([nd.EmbeddingLayer(ROWS, WIDTH), nd.ConvLayer(2, 3)], dtype="float64")
    model.build((6, 7, 2), 3)
    assert model.compiled[0].output_shape == (6, 7, 2 * WIDTH)
    ids = np.random.default_rng(0).integers(0, ROWS, (3, 6, 7, 2))
    y = model.fprop(ids)
    assert not model.bprop(np.ones_like(y)).any()
    table = model.state()["embedding1/weights"]
    assert np.array_equal(nd.EmbeddingLayer(ROWS, WIDTH).output_shape_for((9,)), (9, WIDTH))
    assert table.shape == (ROWS, WIDTH)
