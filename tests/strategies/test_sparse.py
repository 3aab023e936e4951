"""Sparse gradients: the numbers of dense ones under every strategy, and bytes of the rows that are used."""

import numpy as np
import pytest
from builders import SYNCHRONOUS
from hypothesis import given, settings
from hypothesis import strategies as st

import neondist as nd
from neondist.comm import Reductions
from neondist.parallel.rows import RowExchange, Table

ROWS, WIDTH = 40, 3
OPTIMIZERS = {
    "SGD": lambda: nd.SGD(0.2),
    "momentum": lambda: nd.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: nd.Adam(0.2, ema=0.9),
    "LAMB": lambda: nd.LAMB(0.05, clip_norm=0.5),
}
#: AutoDist's case c2 in small: two tables averaged, the mean over tokens, dense layers; ids of vectors and of images
SHAPES = [(5,), (5, 1), (3, 2, 2)]


def bag_of_words(dist, tables, **how):
    def make(kind, *args, **kwargs):
        return getattr(nd, f"{kind}Layer{'Dist' if dist else ''}")(*args, **kwargs)

    layers = [nd.Sum([[table(make)] for table in tables]), make("GlobalAvgPooling")]
    layers += [make("FC", 6, activation=nd.ReLU()), make("FC", 3)]
    return (nd.MLPDist if dist else nd.MLP)(layers, dtype="float64", seed=2, **how)


def steps(model, shape, grid, inputs=lambda ids: ids, rows=ROWS, numbers=4):
    """Train some steps, the last of fewer samples; return whole arrays, and the bytes of gradients of each step."""
    rng = np.random.default_rng(0)
    first = np.zeros((6, *shape))
    model.build(inputs(first).shape[1:], 6, grid)
    losses, sent = [], [0]
    for samples in [6] * (numbers - 1) + [5]:
        ids, labels = rng.integers(0, rows, (samples, *shape)).astype(float), rng.integers(0, 3, samples)
        losses.append(model.train_batch(model.scatter(inputs(ids)), labels, batch_size=samples))
        sent.append(sum(one.nbytes * count for one, count in model.ledger().items() if one.layer == "gradients"))
    return {"loss": np.array(losses)} | model.state() | model.optimizer_state(), np.diff(sent)


def embedded(model_of_grid, shape):
    def body(world, replicas, rows, cols):
        grid = nd.ProcessGrid(world, replicas=replicas, rows=rows, cols=cols)
        model = model_of_grid()
        found, sent = steps(model, shape, grid)
        plan = model.compiled
        most = sum(one(grid.rank).get("gradients", 0) for one in (plan.reduced, plan.redistributed))
        return found, sent, most

    return body


@settings(max_examples=20)
@given(
    st.sampled_from(SYNCHRONOUS), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(SHAPES),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 3, 1)]),
)  # fmt: skip
@pytest.mark.long
def test_numbers_are_those_of_one_process(strategy, optimizer, shape, grid):
    tables = [lambda make: make("Embedding", ROWS, WIDTH)] * 2
    how = {"optimizer": OPTIMIZERS[optimizer](), "strategy": strategy}
    body = embedded(lambda: bag_of_words(True, tables, **how), shape)
    expected, _ = steps(bag_of_words(False, tables, **how | {"strategy": None}), shape, None)
    tolerance = 1e-12 if optimizer in ("SGD", "momentum") else 1e-8
    for found, sent, most in nd.loopback.run(int(np.prod(grid)), lambda world: body(world, *grid)):
        assert (sent <= most).all()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def one_hot(ids):
    return np.eye(ROWS)[ids.astype(int)]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_sparse_is_dense(optimizer):
    """A table of rows is a convolution of size 1 on one-hot vectors, whose gradient is dense."""
    tables = [
        lambda make: make("Embedding", ROWS, WIDTH, name="a"),
        lambda make: make("Embedding", ROWS, WIDTH, name="b"),
    ]
    dense = [
        lambda make: make("Conv", WIDTH, 1, bias=False, name="a"),
        lambda make: make("Conv", WIDTH, 1, bias=False, name="b"),
    ]
    models = [bag_of_words(False, of, optimizer=OPTIMIZERS[optimizer]()) for of in (tables, dense)]
    models[1] = nd.Convnet(**models[1].arguments())
    rng = np.random.default_rng(3)
    first = {name: rng.normal(size=(ROWS, WIDTH)) for name in "ab"}
    results = []
    for model, inputs, shape in zip(models, (lambda ids: ids, one_hot), ((ROWS, WIDTH), (1, ROWS, WIDTH)), strict=True):
        model.build(inputs(np.zeros((6, 5))).shape[1:], 6)
        model.load_state(model.state() | {f"{name}/weights": array.reshape(shape) for name, array in first.items()})
        results.append(steps_again(model, inputs))
    for name, array in results[0].items():
        np.testing.assert_allclose(array, results[1][name].reshape(array.shape), rtol=1e-12, atol=1e-12, err_msg=name)


def steps_again(model, inputs):
    rng, losses = np.random.default_rng(1), []
    for _ in range(5):
        ids, labels = rng.integers(0, ROWS, (6, 5)).astype(float), rng.integers(0, 3, 6)
        losses.append(model.train_batch(inputs(ids), labels))
    return {"loss": np.array(losses)} | model.state() | model.optimizer_state()


def sent_by(strategy, table, used, optimizer):
    """Return the bytes that rank 0 sends in a step of gradients, if samples have so many ids; the rest is the same."""

    def body(world):
        tables = [lambda make: make("Embedding", table, WIDTH)]
        model = bag_of_words(True, tables, strategy=strategy, optimizer=OPTIMIZERS[optimizer]())
        model.build((used,), 2, nd.ProcessGrid(world, replicas=2))
        ids = np.arange(2 * used, dtype=float).reshape(2, used) % table
        model.train_batch(model.scatter(ids), np.zeros(2, int))
        return sum(one.nbytes * count for one, count in model.ledger().items() if one.layer == "gradients")

    return sum(nd.loopback.run(2, body))


@pytest.mark.parametrize("strategy", ["AllReduce", "Parallax", "PSLoadBalancing", "PartitionedPS"])
def test_bytes_are_proportional_to_the_rows_that_are_used(strategy):
    few, more, most = (sent_by(strategy, 1000, used, "SGD") for used in (10, 20, 30))
    assert more - few == most - more > 0
    assert sent_by(strategy, 100_000, 20, "SGD") == more  # the table never travels
    rows = (more - few) / (8 + 8 * WIDTH)
    assert rows <= 40  # of both ranks: their gradients, and with owners the values too


def test_rows_that_momentum_moves_travel_from_their_owners():
    assert sent_by("PS", 100_000, 20, "Adam") < 20_000


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.randoms())
def test_ranges_may_end_within_a_row(ranks, width, rows, random):
    """Sums over ranks, and values, are those of whole tables."""
    size = width * rows
    ends = sorted(random.randint(0, size) for _ in range(ranks - 1))
    ranges = list(zip([0, *ends], [*ends, size], strict=True))
    rng = np.random.default_rng(random.randint(0, 99))
    given = rng.normal(size=(ranks, 2, rows, width)) * (rng.random((ranks, 2, rows, 1)) < 0.4)
    changes = rng.normal(size=(2, rows, width)) * (rng.random((2, rows, 1)) < 0.4)

    def body(world):
        exchange = RowExchange(
            Reductions(nd.ProcessGrid(world, replicas=ranks)), [Table(start, width, ranges) for start in (0, size)]
        )
        gradients, values = given[world.rank].reshape(-1).copy(), np.ones(2 * size)
        exchange.reduce(gradients)
        before = exchange.before(values)
        for table in exchange.tables:
            part, change = table.part(values, world.rank), table.part(changes.reshape(-1), world.rank)
            part += change
        exchange.broadcast(values, before)
        return [table.part(gradients, world.rank) for table in exchange.tables], values

    parts, values = zip(*nd.loopback.run(ranks, body), strict=True)
    sums = np.stack([np.concatenate([part[at] for part in parts]) for at in (0, 1)])
    np.testing.assert_allclose(sums.reshape(-1), given.sum(axis=0).reshape(-1), rtol=1e-13, atol=1e-15)
    for array in values:
        np.testing.assert_array_equal(array, 1 + changes.reshape(-1))


@pytest.mark.parametrize("wrong", [-1.0, ROWS, 0.5, np.nan])
def test_ids_outside_of_the_table_are_refused(wrong):
    model = nd.MLP([nd.EmbeddingLayer(ROWS, WIDTH, name="words"), nd.FCLayer(3)])
    model.build((4,), 2)
    ids = np.zeros((2, 4))
    ids[1, 2] = wrong
    with pytest.raises(nd.DataError, match=rf"layer 'words': id {wrong:g} is not in the table of {ROWS} rows"):
        model.fprop(ids)


def test_shapes_and_gradient_of_ids():
    model = nd.Convnet([nd.EmbeddingLayer(ROWS, WIDTH), nd.ConvLayer(2, 3)], dtype="float64")
    model.build((6, 7, 2), 3)
    assert model.compiled[0].output_shape == (6, 7, 2 * WIDTH)
    ids = np.random.default_rng(0).integers(0, ROWS, (3, 6, 7, 2))
    y = model.fprop(ids)
    assert not model.bprop(np.ones_like(y)).any()
    table = model.state()["embedding1/weights"]
    assert np.array_equal(nd.EmbeddingLayer(ROWS, WIDTH).output_shape_for((9,)), (9, WIDTH))
    assert table.shape == (ROWS, WIDTH)
