"""Random and damaged messages, sent to a service."""

import contextlib
import random

import grpc
import numpy as np
from parameter_servers import Servers, arrays

import neondist as nd
from neondist.errors import ServiceError
from neondist.services.message import HEADER, MAGIC, PROTOCOL, Message, encode
from neondist.services.placement import TableSpec
from neondist.services.state import UpdateRule
from neondist.services.wire import ServiceClient


def draw_message(draw):
    """Return chunks of bytes that are no message."""
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randbytes(draw.randint(0, 60)) for _ in range(draw.randint(0, 4))]
    if kind == 1:  # a header, and anything behind it
        text = draw.randbytes(draw.randint(1, 40))
        return [HEADER.pack(MAGIC, PROTOCOL, 0, len(text), draw.randint(0, 99)) + b"\xff" + text[1:]]
    whole = b"".join(encode(Message({"worker": draw.randint(0, 9)}, {"x": np.arange(draw.randint(1, 50) * 1.0)})))
    if kind == 2:
        return [whole[: draw.randrange(len(whole))]]
    return [whole, draw.randbytes(draw.randint(1, 9))]


def send(address, path, token, count, seed):
    """Send random messages, one in three without the right token; return how many were refused."""
    draw, refused = random.Random(seed), 0
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)
        for _ in range(count):
            given = draw.choice([token, token, draw.randbytes(8).hex()])
            try:
                list(call(iter(draw_message(draw)), timeout=10, metadata=(("neondist-token", given),)))
            except grpc.RpcError as error:
                refused += error.code().name in ("INVALID_ARGUMENT", "UNAUTHENTICATED")
    return refused


METHODS = (
    "push_model", "pull_variable", "pull_embedding_vector", "push_gradient", "join", "leave", "wait_turn",
    "finish_round", "finish_epoch", "credits", "hold", "release", "save_checkpoint", "load_checkpoint", "status",
)  # fmt: skip
"""Of a parameter server."""
NAMES = (
    "worker", "client", "sequence", "version", "at_least", "samples", "scale", "credit", "incarnation", "layout",
    "optimizer", "rule", "values", "name", "save", "admitted", "epoch",
)  # fmt: skip
LAYOUT = {"index": 0, "servers": 1, "pieces": [], "tables": []}
HUGE = ["w", "float32", [1 << 40, 1 << 40], [1 << 80], [0], [1 << 80], True]
VALUES = (
    *(None, True, False, -1, 0, 3, 1 << 62, 1 << 70, 0.5, -2.5, 1e300, "", "a", "../a", "x" * 3000),
    *([], [1, 2, 3], [[1]], {}, {"a": 1}, LAYOUT),
    LAYOUT | {"pieces": [["w", "float32", [-1], [3], [0], [3], True]]},
    LAYOUT | {"pieces": [HUGE]},
    LAYOUT | {"tables": [["t", 9, 2, "float32", ["System", {}], 0, False]]},
    LAYOUT | {"tables": [["t", 9, 2, "float32", ["Gaussian", {"x": 1}], 0, False]]},
    {"kind": "neondist", "name": "SGD", "arguments": {"learning_rate": "x"}},
    {"kind": "neondist", "name": "SGD", "arguments": {"what": 1}},
    {"kind": "neondist", "name": "os.system", "arguments": {}},
    *({"sync": True, "grads_to_wait": 0}, {"first_epoch": 0, "applied": []}),
    {"first_epoch": 0, "applied": [[0, 0, "zz"]]},
)


def draw_request(draw):
    """Return a method of a parameter server, and fields and arrays that are well-formed and mostly wrong."""
    fields = {name: draw.choice(VALUES) for name in NAMES if draw.random() < 0.8}
    names = ["dense/float32", "dense/float64", "ids/table", "rows/table", "ids", "rows/"]
    made = [np.zeros(3, "f4"), np.zeros(5), np.zeros((2, 2)), np.arange(2) - 1, np.full(2, np.nan), np.zeros(0, "?")]
    sent = {name: draw.choice(made) for name in names if draw.random() < 0.5}
    return draw.choice(METHODS), fields | {"seconds": draw.choice([0, 0.0, "1", -1])}, sent


def change_value(draw, value):
    """Return JSON with one value in it changed, anywhere."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inside or draw.random() < 0.1:
        return draw.choice(VALUES)
    at = draw.choice(list(inside))
    value[at] = change_value(draw, value[at])
    return value if isinstance(value, (dict, list)) else {}


def check_hostile_requests(count, seed):
    """Send well-formed requests with random content; return how many were refused. The others are harmless."""
    draw, table = random.Random(seed), TableSpec("table", 10, 2, "float64")
    refused = 0
    with Servers(1) as job:
        layouts = job.layouts(tables=[table])
        client = job.client("0", layouts)
        client.initialize(arrays(0), nd.SGD(0.1), UpdateRule(sync=False))
        values = arrays(9)
        client.pull(values)
        stranger = job.stack.enter_context(ServiceClient(job.hosts[0].address, "PServer", job.token, patience=0))
        for _ in range(count):
            method, fields, sent = draw_request(draw)
            with contextlib.suppress(ServiceError):
                stranger.call(method, fields, sent)
                continue
            refused += 1
        client.finish_round()
        stranger.call("release")
        assert not client.pull(values)
        np.testing.assert_array_equal(values["fc/weights"], arrays(0)["fc/weights"])
        client.push(arrays(1))
        client.pull(values)
        np.testing.assert_allclose(
            values["fc/weights"], arrays(0)["fc/weights"] - 0.1 * arrays(1)["fc/weights"], atol=1e-15
        )
    return refused
