"""Messages of services: round trips, and what is refused."""

import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neondist.services.message import CHUNK, HEADER, MAGIC, PROTOCOL, Message, MessageError, decode, encode

numbers = st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
plain = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u1", "u4", "?", ">f4", ">i8"])
LIMIT = 1 << 30


@settings(max_examples=25)
@given(fields=st.dictionaries(st.text(), plain, max_size=4), arrays=st.lists(st.tuples(shapes, dtypes), max_size=4))
def test_a_message_arrives_as_it_was_sent(fields, arrays):
    sent = {
        str(at): (np.arange(np.prod(shape)) % 2).reshape(shape).astype(kind) for at, (shape, kind) in enumerate(arrays)
    }
    found = decode(encode(Message(fields, sent)), LIMIT)
    assert found.fields == fields
    assert found.arrays.keys() == sent.keys()
    for name, array in sent.items():
        assert found.arrays[name].shape == array.shape
        assert found.arrays[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found.arrays[name], array)


def test_parts_arrive_as_one_array_in_chunks():
    parts = [np.random.default_rng(0).normal(size=(700, 300)), np.empty((0, 2)), np.arange(12.0).reshape(3, 4).T]
    chunks = list(encode(Message({}, {"all": parts})))
    assert max(map(len, chunks)) == CHUNK
    assert len(chunks) == 2
    np.testing.assert_array_equal(
        decode(chunks, LIMIT).array("all", "f8", [None]), np.concatenate([part.reshape(-1) for part in parts])
    )


def test_damaged_messages_are_refused():
    """Cut short at every byte, longer by some, or with a byte changed: a message, or MessageError, and nothing else."""
    whole = b"".join(encode(Message({"a": [1, None]}, {"x": np.arange(5, dtype="f4"), "y": np.ones((2, 2))})))
    for end in range(len(whole)):
        with pytest.raises(MessageError):
            decode([whole[:end]], LIMIT)
    with pytest.raises(MessageError, match="more bytes"):
        decode([whole, b"!"], LIMIT)
    draw, refused = random.Random(1), 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(whole) - 56)] = draw.randrange(256)
        try:
            decode([bytes(damaged)], LIMIT)
        except MessageError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("description", "size", "problem"),
    [
        ({"fields": {}, "arrays": [["x", "<f4", [1 << 40, 1 << 40]]]}, 16, "more bytes than it has"),
        ({"fields": {}, "arrays": [["x", "|O8", [2]]]}, 16, "invalid description of an array"),
        ({"fields": {}, "arrays": [["x", "<f4", [-2]]]}, 16, "invalid shape"),
        ({"fields": {}, "arrays": [["x", "<f4", [2]], ["x", "<f4", [2]]]}, 32, "invalid description of an array"),
        ({"fields": {}, "arrays": []}, 16, "more bytes than its arrays"),
        ({"fields": [], "arrays": []}, 0, "invalid description"),
        ({"fields": {}}, 0, "invalid description"),
        ({"fields": {"a": float("nan")}, "arrays": []}, 0, "NaN is not JSON"),
        ({"fields": {}, "arrays": []}, LIMIT + 1, "the limit is"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(description, size, problem):
    text = json.dumps(description).encode()
    head = HEADER.pack(MAGIC, PROTOCOL, 0, len(text), size)
    with pytest.raises(MessageError, match=problem):
        decode([head + text + bytes(min(size, 64))], LIMIT)


def test_another_protocol_is_named():
    head = struct.pack("<4sHHIQ", MAGIC, PROTOCOL + 1, 0, 0, 0)
    with pytest.raises(MessageError, match=f"protocol {PROTOCOL + 1}; this process has {PROTOCOL}"):
        decode([head], LIMIT)
    with pytest.raises(MessageError, match="not a neondist message"):
        decode([b"GET / HTTP/1.1\r\nHost: example\r\n"], LIMIT)


def test_fields_are_checked():
    message = Message({"n": 3, "x": 1.5, "b": True, "t": "text"}, {"a": np.ones(3)})
    assert (message.integer("n"), message.number("x"), message.flag("b"), message.text("t")) == (3, 1.5, True, "text")
    for wrong in (
        lambda: message.integer("b"),
        lambda: message.integer("n", 4),
        lambda: message.number("b"),
        lambda: message.text("none"),
        lambda: message.array("a", "f4", [3]),
        lambda: message.array("a", "f8", [None, 3]),
        lambda: message.array("c", "f8", [3]),
    ):
        with pytest.raises(MessageError):
            wrong()
    with pytest.raises(MessageError, match="cannot be sent"):
        encode(Message({}, {"a": np.array([object()])}))
