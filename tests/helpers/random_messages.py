"""Random and damaged messages to a service."""

import contextlib
import random

import grpc
import numpy as np
from parameter_servers import SHAPES, Servers, draw_arrays

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.message import HEADER, MAGIC, PROTOCOL_VERSION, Message, encode
from neondist.services.placement import EmbeddingTableSpec
from neondist.services.state import SyncPolicy
from neondist.services.wire import ServiceClient


def draw_message(rng):
    """Return chunks of bytes that are not a valid message."""
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randbytes(rng.randint(0, 60)) for _ in range(rng.randint(0, 4))]
    if kind == 1:  # a valid header with random content
        text = rng.randbytes(rng.randint(1, 40))
        return [HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, len(text), rng.randint(0, 99)) + b"\xff" + text[1:]]
    message = b"".join(encode(Message({"worker": rng.randint(0, 9)}, {"x": np.arange(rng.randint(1, 50) * 1.0)})))
    if kind == 2:
        return [message[: rng.randrange(len(message))]]
    return [message, rng.randbytes(rng.randint(1, 9))]


def send_messages(address, path, token, count, seed):
    """Send random messages, a third with a wrong token; return the number of refused ones."""
    rng, refused = random.Random(seed), 0
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)
        for _ in range(count):
            credential = rng.choice([token, token, rng.randbytes(8).hex()])
            try:
                list(call(iter(draw_message(rng)), timeout=10, metadata=(("neondist-token", credential),)))
            except grpc.RpcError as error:
                refused += error.code().name in ("INVALID_ARGUMENT", "UNAUTHENTICATED")
    return refused


SERVER_METHODS = (
    "push_model", "pull_variable", "pull_embedding_vector", "push_gradient", "join", "leave",
    "wait_for_staleness_bound", "finish_round", "finish_epoch", "credits", "hold", "release",
    "save_checkpoint", "load_checkpoint", "status",
)  # fmt: skip
"""methods of a parameter server"""
FIELD_NAMES = (
    "worker", "client", "sequence", "version", "at_least", "samples", "scale", "credit", "incarnation", "layout",
    "optimizer", "policy", "values", "name", "save", "admitted", "epoch",
)  # fmt: skip
LAYOUT = {"index": 0, "servers": 1, "pieces": [], "tables": []}
HUGE_ARRAY = ["w", "float32", [1 << 40, 1 << 40], [1 << 80], [0], [1 << 80], True, False]
HUGE_EMPTY_TABLE = ["w", "float32", [1 << 60, 0], [1 << 60, 0], [0, 0], [1 << 60, 0], True, True]
FIELD_VALUES = (
    *(None, True, False, -1, 0, 3, 1 << 62, 1 << 70, 0.5, -2.5, 1e300, "", "a", "../a", "x" * 3000),
    *([], [1, 2, 3], [[1]], {}, {"a": 1}, LAYOUT),
    LAYOUT | {"pieces": [["w", "float32", [-1], [3], [0], [3], True, False]]},
    LAYOUT | {"pieces": [HUGE_ARRAY]},
    LAYOUT | {"pieces": [HUGE_EMPTY_TABLE]},
    LAYOUT | {"tables": [["t", 9, 2, "float32", ["System", {}], 0, False]]},
    LAYOUT | {"tables": [["t", 9, 2, "float32", ["Gaussian", {"x": 1}], 0, False]]},
    {"kind": "neondist", "name": "SGD", "arguments": {"learning_rate": "x"}},
    {"kind": "neondist", "name": "SGD", "arguments": {"what": 1}},
    {"kind": "neondist", "name": "os.system", "arguments": {}},
    *({"sync": True, "grads_to_wait": 0}, {"first_tracked_epoch": 0, "applied": []}),
    {"first_tracked_epoch": 0, "applied": [[0, 0, "zz"]]},
)


def draw_request(rng):
    """Return a method of a parameter server with well-formed, mostly invalid fields and arrays."""
    fields = {name: rng.choice(FIELD_VALUES) for name in FIELD_NAMES if rng.random() < 0.8}
    names = ["dense/float32", "dense/float64", "ids/table", "rows/table", "ids", "rows/", "ids/words", "rows/words"]
    arrays = [np.zeros(3, "f4"), np.zeros(5), np.zeros((2, 2)), np.arange(2) - 1, np.full(2, np.nan), np.zeros(0, "?")]
    payload = {name: rng.choice(arrays) for name in names if rng.random() < 0.5}
    return rng.choice(SERVER_METHODS), fields | {"seconds": rng.choice([0, 0.0, "1", -1])}, payload


def change_value(rng, value):
    """Return JSON with one value replaced at any depth."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not keys or rng.random() < 0.1:
        return rng.choice(FIELD_VALUES)
    key = rng.choice(list(keys))
    value[key] = change_value(rng, value[key])
    return value if isinstance(value, (dict, list)) else {}


def check_hostile_requests(count, seed):
    """Send well-formed requests with random content, check that accepted ones are harmless, and count refused ones."""
    rng, table = random.Random(seed), EmbeddingTableSpec("table", 10, 2, "float64")
    refused = 0
    with Servers(1) as job:
        shapes = SHAPES | {"words": (5, 2)}
        layouts = job.layouts(shapes=shapes, tables=[table], sparse=["words"])
        client = job.client("0", layouts)
        client.push_initial_values(draw_arrays(0, shapes), nd.SGD(0.1), SyncPolicy(sync=False))
        values = draw_arrays(9, shapes)
        client.pull(values)
        stranger = job.stack.enter_context(ServiceClient(job.hosts[0].address, "PServer", job.token, retry_seconds=0))
        for _ in range(count):
            method, fields, payload = draw_request(rng)
            with contextlib.suppress(ServiceError):
                stranger.call(method, fields, payload)
                continue
            refused += 1
        client.finish_round()
        stranger.call("release")
        assert not client.pull(values)
        np.testing.assert_array_equal(values["fc/weights"], draw_arrays(0)["fc/weights"])
        client.push(draw_arrays(1, shapes))
        client.pull(values)
        np.testing.assert_allclose(
            values["fc/weights"], draw_arrays(0)["fc/weights"] - 0.1 * draw_arrays(1)["fc/weights"], atol=1e-15
        )
    return refused
