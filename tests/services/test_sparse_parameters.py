"""Sparse parameters on servers: only rows with a gradient are pushed, and only changed rows are pulled."""

import os
import random
import threading

import numpy as np
import pytest
from parameter_servers import Servers, draw_arrays

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.message import Message, MessageError
from neondist.services.placement import place_parameters
from neondist.services.server import ParameterServer
from neondist.services.state import SyncPolicy
from neondist.strategies import ParameterSpec, as_builder

SHAPES = {"fc": (4, 3), "words": (20, 3), "images": (9, 2, 2), "bias": ()}
SPARSE = ["words", "images"]
STRATEGIES = [
    "PS",
    "PSLoadBalancing",
    "PartitionedPS",
    "UnevenPartitionedPS",
    "ShardedOptimizer",
    "RandomAxisPartitionAR(seed=3)",
]
OPTIMIZERS = [
    nd.SGD(0.1),
    nd.SGD(0.1, momentum=0.9, weight_decay=0.1),
    nd.Adam(0.01),
    nd.AdamW(0.01, ema=0.9),
    nd.RMSprop(0.01, centered=True),
]


class CountingServer(ParameterServer):
    """Server that counts the bytes of pushed gradients and pulled values, and can fail to answer one pull."""

    def __init__(self, folder=None):
        super().__init__(folder)
        self.pushed_bytes = self.pulled_bytes = self.failures = 0

    def push_gradient(self, request):
        self.pushed_bytes += request.nbytes
        return super().push_gradient(request)

    def pull_variable(self, request):
        if self.failures:
            self.failures -= 1
            raise MessageError("planned failure")
        reply = super().pull_variable(request)
        self.pulled_bytes += reply.nbytes if isinstance(reply, Message) else sum(map(len, reply))
        return reply


def draw_gradients(rng, dtype="float64"):
    """Return gradients with a few non-zero rows of sparse parameters, sometimes none or all."""
    gradients = draw_arrays(rng.randrange(1 << 30), SHAPES, dtype)
    for name in SPARSE:
        rows = len(gradients[name])
        unused = rng.sample(range(rows), rng.choice([0, rows // 2, rows - 2, rows]))
        gradients[name][unused] = 0
    return gradients


@pytest.mark.parametrize("case", range(12))
def test_workers_hold_the_values_of_the_servers_after_each_pull(case, tmp_path):
    """Push, pull, save and load at random times in two workers: equal to one server whose parameters are dense."""
    rng = random.Random(f"{os.environ['NEONDIST_SEED']} {case}")
    strategy, optimizer, servers = rng.choice(STRATEGIES), rng.choice(OPTIMIZERS), rng.randint(1, 3)
    dtype = rng.choice(["float64", "float32"])
    initial, policy = draw_arrays(0, SHAPES, dtype), SyncPolicy(sync=False)
    with Servers(servers, tmp_path / "sparse") as job, Servers(1, tmp_path / "dense") as dense_job:
        layouts = job.layouts(strategy, SHAPES, dtype=dtype, sparse=SPARSE)
        reference = dense_job.client("r", dense_job.layouts("PS", SHAPES, dtype=dtype))
        reference.push_initial_values(initial, optimizer, policy)
        clients = [job.client(str(index), layouts) for index in range(2)]
        values = [draw_arrays(7 + index, SHAPES, dtype) for index in range(2)]
        for client, arrays in zip(clients, values, strict=True):
            client.push_initial_values(initial, optimizer, policy)
            client.pull(arrays)
        expected = draw_arrays(6, SHAPES, dtype)
        reference.pull(expected)
        is_saved = False
        for _ in range(16):
            worker, choice = rng.randrange(2), rng.random()
            if choice < 0.2:
                for client in (clients[worker], reference):
                    client.load("saved", optimizer, policy) if is_saved else client.save("saved")
                is_saved = True
                clients[1 - worker].pull(values[1 - worker])  # joins the servers again
                reference.pull(expected)
            elif choice < 0.6:
                gradients = draw_gradients(rng, dtype)
                clients[worker].push(gradients)
                reference.push(gradients)
                reference.pull(expected)
                continue
            clients[worker].pull(values[worker])
            for name in SHAPES:
                np.testing.assert_array_equal(values[worker][name], expected[name], err_msg=name)


def test_synchronous_rounds_average_rows():
    """Average gradients of two workers that use different rows, weighted by 1 and 3 samples."""
    gradients = [draw_gradients(random.Random(index)) for index in range(2)]
    initial, values = draw_arrays(0, SHAPES), [draw_arrays(1, SHAPES) for _ in range(2)]
    with Servers(2) as job:
        layouts = job.layouts("PartitionedPS", SHAPES, sparse=SPARSE)
        clients = [job.client(str(index), layouts) for index in range(2)]
        for client, arrays in zip(clients, values, strict=True):
            client.push_initial_values(initial, nd.SGD(1.0), SyncPolicy(grads_to_wait=2))
            client.pull(arrays)
        threads = [
            threading.Thread(target=client.push, args=(gradient, samples))
            for client, gradient, samples in zip(clients, gradients, (1, 3), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client, arrays in zip(clients, values, strict=True):
            client.pull(arrays)
            for name in SHAPES:
                mean = (gradients[0][name] + 3 * gradients[1][name]) / 4
                np.testing.assert_allclose(arrays[name], initial[name] - mean, rtol=0, atol=1e-14)


def test_bytes_grow_with_the_rows_in_use():
    def count_bytes(rows, optimizer):
        shapes = {"words": (rows, 8)}
        with Servers(1, server_class=CountingServer) as job:
            client = job.client(layouts=job.layouts("PS", shapes, dtype="float32", sparse=["words"]))
            values, gradients = draw_arrays(0, shapes, "float32"), {"words": np.zeros((rows, 8), "float32")}
            client.push_initial_values(values, optimizer)
            client.pull(values)
            server = job.servers[0]
            server.pulled_bytes = 0
            gradients["words"][[3, 70]] = 1
            client.push(gradients)
            assert client.pull(values)
            return server.pushed_bytes, server.pulled_bytes

    for optimizer in (nd.SGD(0.1), nd.Adam(0.1)):
        pushed, pulled = count_bytes(100, optimizer)
        assert pushed == 2 * (8 + 8 * 4)
        assert count_bytes(20_000, optimizer) == (pushed, pulled)
        assert pulled < 500  # with the header


def test_rows_missed_by_a_failed_pull_are_pulled_later():
    """Let the first server answer and the second fail; the worker has copied the values of neither."""
    initial, values = draw_arrays(0, SHAPES), draw_arrays(1, SHAPES)
    gradients = [draw_gradients(random.Random(index)) for index in range(2)]
    with Servers(2, server_class=CountingServer) as job:
        client = job.client(layouts=job.layouts("PartitionedPS", SHAPES, sparse=SPARSE))
        client.push_initial_values(initial, nd.SGD(1.0), SyncPolicy(sync=False))
        client.pull(values)
        client.push(gradients[0])
        job.servers[1].failures = 1
        with pytest.raises(ServiceError, match="planned failure"):
            client.pull(values)
        client.push(gradients[1])
        client.pull(values)
    for name in SHAPES:
        np.testing.assert_allclose(values[name], initial[name] - gradients[0][name] - gradients[1][name], atol=1e-14)


@pytest.mark.parametrize("ids", [[-1], [20], [0, 1 << 62]])
def test_ids_outside_the_parameter_are_rejected(ids):
    specs = [ParameterSpec("words", (20, 3), "float64", True)]
    layouts = place_parameters(as_builder("PS").build(specs, 1), 1)
    with Servers(1) as job:
        client = job.client(layouts=layouts)
        client.push_initial_values({"words": np.zeros((20, 3))}, nd.SGD(0.1))
        fields = {
            "worker": "0",
            "client": "0",
            "sequence": 0,
            "version": 0,
            "samples": 1,
            "scale": 1,
            "incarnation": "",
        }
        arrays = {"dense/float64": np.zeros(0), "ids/words": np.array(ids), "rows/words": np.ones((len(ids), 3))}
        server = job.servers[0]
        with pytest.raises(MessageError, match="parameter 'words': its ids must be 0 to 19"):
            server.push_gradient(Message(fields | {"incarnation": ""}, arrays))
