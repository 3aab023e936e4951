"""Random and damaged messages, sent to a service."""

import random

import grpc
import numpy as np

from neondist.services.message import HEADER, MAGIC, PROTOCOL, Message, encode


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
