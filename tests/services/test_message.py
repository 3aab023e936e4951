"""Messages of services: round trips, and rejected input."""

import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.services.message import (
    CHUNK_BYTES,
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    Message,
    MessageError,
    decode,
    encode,
)

numbers = st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
plain = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "u4", "?", ">f4", ">i8"])
MAX_ARRAY_BYTES = 1 << 30


@settings(max_examples=25)
@given(fields=st.dictionaries(st.text(), plain, max_size=4), arrays=st.lists(st.tuples(shapes, dtypes), max_size=4))
def test_round_trip(fields, arrays):
    contents = {
        str(i): (np.arange(np.prod(shape)) % 2).reshape(shape).astype(dtype) for i, (shape, dtype) in enumerate(arrays)
    }
    received = decode(encode(Message(fields, contents)), MAX_ARRAY_BYTES)
    assert received.fields == fields
    assert received.arrays.keys() == contents.keys()
    for name, array in contents.items():
        assert received.arrays[name].shape == array.shape
        assert received.arrays[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(received.arrays[name], array)


def test_parts_are_sent_as_one_array_in_chunks():
    parts = [np.random.default_rng(0).normal(size=(700, 300)), np.empty((0, 2)), np.arange(12.0).reshape(3, 4).T]
    chunks = list(encode(Message({}, {"all": parts})))
    assert max(map(len, chunks)) == CHUNK_BYTES
    assert len(chunks) == 2
    np.testing.assert_array_equal(
        decode(chunks, MAX_ARRAY_BYTES).array("all", "f8", [None]), np.concatenate([part.reshape(-1) for part in parts])
    )


def test_damaged_messages_are_rejected():
    """Truncate at every byte, append bytes, or change some: decode a message, or raise MessageError."""
    encoded = b"".join(encode(Message({"a": [1, None]}, {"x": np.arange(5, dtype="f4"), "y": np.ones((2, 2))})))
    for end in range(len(encoded)):
        with pytest.raises(MessageError):
            decode([encoded[:end]], MAX_ARRAY_BYTES)
    with pytest.raises(MessageError, match="more bytes"):
        decode([encoded, b"!"], MAX_ARRAY_BYTES)
    rng, rejected = random.Random(1), 0
    for _ in range(3000):
        damaged = bytearray(encoded)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(encoded) - 56)] = rng.randrange(256)
        try:
            decode([bytes(damaged)], MAX_ARRAY_BYTES)
        except MessageError:
            rejected += 1
    assert rejected > 1000


@pytest.mark.parametrize(
    ("description", "size", "problem"),
    [
        ({"fields": {}, "arrays": [["x", "<f4", [1 << 40, 1 << 40]]]}, 16, "more bytes than the message has"),
        ({"fields": {}, "arrays": [["x", "|O8", [2]]]}, 16, "the description of an array is invalid"),
        ({"fields": {}, "arrays": [["x", "<f4", [-2]]]}, 16, "invalid shape"),
        (
            {"fields": {}, "arrays": [["x", "<f4", [2]], ["x", "<f4", [2]]]},
            32,
            "the description of an array is invalid",
        ),
        ({"fields": {}, "arrays": []}, 16, "the message has more bytes than its arrays"),
        ({"fields": [], "arrays": []}, 0, "invalid description"),
        ({"fields": {}}, 0, "invalid description"),
        ({"fields": {"a": float("nan")}, "arrays": []}, 0, "NaN is not JSON"),
        ({"fields": {}, "arrays": []}, MAX_ARRAY_BYTES + 1, "but the limit is"),
    ],
)
def test_invalid_descriptions_are_rejected(description, size, problem):
    text = json.dumps(description).encode()
    head = HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, len(text), size)
    with pytest.raises(MessageError, match=problem):
        decode([head + text + bytes(min(size, 64))], MAX_ARRAY_BYTES)


def test_other_protocols_are_reported():
    head = struct.pack("<4sHHIQ", MAGIC, PROTOCOL_VERSION + 1, 0, 0, 0)
    with pytest.raises(MessageError, match=f"protocol {PROTOCOL_VERSION + 1}, but this process has {PROTOCOL_VERSION}"):
        decode([head], MAX_ARRAY_BYTES)
    with pytest.raises(MessageError, match="not a neondist message"):
        decode([b"GET / HTTP/1.1\r\nHost: example\r\n"], MAX_ARRAY_BYTES)


def test_fields_are_checked():
    message = Message({"n": 3, "x": 1.5, "b": True, "t": "text"}, {"a": np.ones(3)})
    assert (message.integer("n"), message.number("x"), message.flag("b"), message.text("t")) == (3, 1.5, True, "text")
    for read in (
        lambda: message.integer("b"),
        lambda: message.integer("n", 4),
        lambda: message.number("b"),
        lambda: message.text("none"),
        lambda: message.array("a", "f4", [3]),
        lambda: message.array("a", "f8", [None, 3]),
        lambda: message.array("c", "f8", [3]),
    ):
        with pytest.raises(MessageError):
            read()
    with pytest.raises(MessageError, match="cannot be sent"):
        encode(Message({}, {"a": np.array([object()])}))
