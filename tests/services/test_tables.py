"""Embedding tables on servers: sparse updates equal dense ones; bytes and memory grow with the rows in use."""

import tracemalloc

import numpy as np
import pytest
from parameter_servers import Servers

import neondist as nd
from neondist.arrays import rng
from neondist.errors import ServiceError
from neondist.services.message import Message, MessageError, encode
from neondist.services.placement import EmbeddingTableSpec
from neondist.services.state import SyncPolicy
from neondist.services.table import EmbeddingTable, initial_rows, sum_duplicates
from neondist.services.updates import describe_optimizer, make_updater

ROWS, DIM = 40, 3
TABLE = EmbeddingTableSpec(
    "embedding/weights", ROWS, DIM, "float64", nd.Gaussian(1.0), rng.key(5, "weights", "embedding", "weights")
)


def draw_minibatches(count, seed=0):
    """Yield ids, some of them repeated, and gradients of their rows."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        ids = draw.integers(0, ROWS, 7)
        yield ids, draw.normal(size=(7, DIM))


def update_densely(optimizer, table, steps):
    """Return a table after updates in one process, each with a gradient of all rows."""
    flat, updater, slots = table.copy().reshape(-1), make_updater(describe_optimizer(optimizer)), {}
    for step, (ids, rows) in enumerate(steps):
        gradient = np.zeros((ROWS, DIM))
        np.add.at(gradient, ids, rows)
        updater.update(flat, gradient.reshape(-1), slots, step, 1.0)
    return flat.reshape(ROWS, DIM)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [nd.SGD(0.1), nd.SGD(0.1, momentum=0.9), nd.Adam(0.01), nd.RMSprop(0.01, momentum=0.5), nd.RMSprop(0.01)],
    ids=["plain", "momentum", "adam", "rmsprop", "rmsprop-without-momentum"],
)
@pytest.mark.long
def test_sparse_updates_equal_dense_ones(servers, optimizer):
    initial = initial_rows(TABLE, np.arange(ROWS))
    with Servers(servers) as job:
        client = job.client(layouts=job.layouts(shapes={}, tables=[TABLE]))
        client.push_initial_values({}, optimizer)
        client.pull({})
        for ids, rows in draw_minibatches(6):
            np.testing.assert_array_equal(client.pull_rows(TABLE.name, ids).shape, (7, DIM))
            client.push({TABLE.name: (ids, rows)})
            client.pull({})
        table = client.pull_rows(TABLE.name, np.arange(ROWS))
    np.testing.assert_allclose(table, update_densely(optimizer, initial, draw_minibatches(6)), rtol=0, atol=1e-12)


def test_sparse_gradients_are_averaged_as_dense_ones():
    """Average over two workers with 1 and 3 samples, for rows as for a dense parameter."""
    with Servers(2) as job:
        layouts = job.layouts(shapes={"dense": (4,)}, tables=[TABLE])
        clients = [job.client(str(i), layouts) for i in range(2)]
        for client in clients:
            client.push_initial_values({"dense": np.zeros(4)}, nd.SGD(1.0), SyncPolicy(grads_to_wait=2))
            client.pull({"dense": np.zeros(4)})
        ids = np.array([5, 8])
        before = clients[0].pull_rows(TABLE.name, ids)
        for client, value, samples in zip(clients, (1.0, 5.0), (1, 3), strict=True):
            client.push({"dense": np.full(4, value), TABLE.name: (ids, np.full((2, DIM), value))}, samples)
        values = {"dense": np.zeros(4)}
        clients[0].pull(values)
        np.testing.assert_allclose(values["dense"], -4.0, atol=1e-15)
        np.testing.assert_allclose(clients[0].pull_rows(TABLE.name, ids) - before, -4.0, atol=1e-14)


def test_initial_rows_match_the_layer():
    """Compare with an EmbeddingLayer of the same seed and name."""
    layers = [nd.EmbeddingLayer(ROWS, DIM, name="embedding")]
    model = nd.Convnet(layers, cost=nd.MSE(), optimizer=nd.SGD(), seed=5, dtype="float64")
    model.build((2, 1, 1), 1)
    np.testing.assert_array_equal(initial_rows(TABLE, np.arange(ROWS)), model.layers[0].params["weights"])


def test_initial_rows_can_be_set():
    initial = np.random.default_rng(1).normal(size=(ROWS, DIM))
    with Servers(2) as job:
        client = job.client(layouts=job.layouts(shapes={}, tables=[TABLE]))
        client.push_initial_values({TABLE.name: initial}, nd.SGD(0.1))
        np.testing.assert_array_equal(client.pull_rows(TABLE.name, np.array([7, 3, 3, 39])), initial[[7, 3, 3, 39]])


def test_lazy_updates_change_rows_with_gradients_alone():
    table = EmbeddingTable(
        EmbeddingTableSpec("t", ROWS, DIM, "float64", lazy=True), make_updater(describe_optimizer(nd.Adam(0.1))), 0, 1
    )
    table.update(np.array([1, 2]), np.ones((2, DIM)), 0, 1.0)
    before = table.get_or_create_rows(np.array([1]))
    table.update(np.array([2]), np.ones((1, DIM)), 1, 1.0)
    np.testing.assert_array_equal(table.get_or_create_rows(np.array([1])), before)
    assert table.row_count == 2


def test_ids_of_another_server_are_rejected():
    updater = make_updater(describe_optimizer(nd.SGD(0.1)))
    table = EmbeddingTable(EmbeddingTableSpec("t", ROWS, DIM, "float64"), updater, 1, 3)
    with pytest.raises(MessageError, match="table 't': id 17 belongs to server 2 of 3, not to server 1; start all"):
        table.get_or_create_rows(np.array([4, 17]))


def test_gradients_of_repeated_ids_are_summed():
    ids, rows = sum_duplicates(np.array([3, 1, 3]), np.array([[1.0], [2.0], [4.0]]))
    assert (ids.tolist(), rows.tolist()) == ([1, 3], [[2.0], [5.0]])


def test_memory_grows_with_the_rows_in_use():
    """Use 3,000 of 20 million rows of 64 numbers, 5 GB in total, on two servers."""
    spec = EmbeddingTableSpec("huge", 20_000_000, 64)
    draw = np.random.default_rng(0)
    with Servers(2) as job:
        client = job.client(layouts=job.layouts(shapes={}, tables=[spec]))
        tracemalloc.start()
        client.push_initial_values({}, nd.Adam(0.01))
        client.pull({})
        for _ in range(3):
            ids = draw.choice(spec.rows, 1000, replace=False)
            rows = client.pull_rows("huge", ids)
            client.push({"huge": (ids, rows)})
            client.pull({})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(status["rows"]["huge"] for status in client.status()) == 3000
    in_use = 3000 * 64 * 4 * 3  # values and two slots
    assert peak < 8 * in_use


def test_messages_grow_with_the_rows_alone():
    def count_bytes(rows, count):
        ids = np.arange(count)
        values = initial_rows(EmbeddingTableSpec("t", rows, 16), ids)
        return len(b"".join(encode(Message({}, {"ids/t": ids, "rows/t": values}))))

    small, large = count_bytes(1000, 100), count_bytes(20_000_000, 100)
    assert small == large
    assert count_bytes(1000, 200) - small == 100 * (8 + 16 * 4)


def test_ids_out_of_range_are_reported():
    with Servers(2) as job:
        client = job.client(layouts=job.layouts(shapes={}, tables=[TABLE]))
        client.push_initial_values({}, nd.SGD(0.1))
        client.pull({})
        for index in (-1, ROWS):
            with pytest.raises(ServiceError, match=f"id {index} is invalid; ids must be 0 to {ROWS - 1}"):
                client.pull_rows(TABLE.name, np.array([0, index]))
            with pytest.raises(ServiceError, match=f"id {index} is not"):
                client.push({TABLE.name: (np.array([index]), np.ones((1, DIM)))})
