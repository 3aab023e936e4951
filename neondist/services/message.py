"""Messages of services: a fixed header, fields as JSON, and arrays as bytes; decoding executes no code."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

MAGIC = b"NDMS"
PROTOCOL_VERSION = 1
"""Protocol version, incremented with each incompatible change of the format."""
HEADER = struct.Struct("<4sHHIQ")
"""Fields: magic, protocol version, 0, bytes of the description, bytes of the arrays."""
CHUNK_BYTES = 1 << 20
"""Largest chunk of a message in bytes; gRPC is slower with larger chunks."""
MAX_DESCRIPTION_BYTES = 64 << 20
ALIGNMENT_BYTES = 16
_SENDABLE_DTYPE = re.compile(r"[<|][fiu][1248]|\|b1")
_PADDING = bytes(ALIGNMENT_BYTES)

T = TypeVar("T")
MessageArray = np.ndarray | Sequence[np.ndarray]
"""An array, or several of one dtype that are received as a single one-dimensional array."""


class MessageError(ValueError):
    """A message is malformed, or one of its fields is missing or invalid."""


class ProtocolVersionError(MessageError):
    """A message has another protocol version."""


@dataclass(frozen=True)
class Message:
    """A request or reply.

    Attributes
    ----------
    fields : mapping of str to JSON values
        Text, numbers, booleans, None, lists and mappings of these.
    arrays : mapping of str to array or sequence of arrays
        Arrays of real, integer or boolean dtype.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, MessageArray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(part.nbytes for value in self.arrays.values() for part in _array_parts(value))

    def integer(self, name: str, low: int = 0, high: int = 1 << 62) -> int:
        """Return an integer field within [low, high].

        Raises
        ------
        MessageError
            The field is missing, not an integer, or out of range.
        """
        value = self._typed_field(name, int)
        if not low <= value <= high:
            raise MessageError(f"field '{name}': {value} is not in [{low}, {high}]")
        return value

    def number(self, name: str, low: float = 0.0) -> float:
        """Return a finite number field of at least `low`; MessageError if it is missing or invalid."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < math.inf:
            raise MessageError(f"field '{name}': expected a number of at least {low:g}")
        return float(value)

    def text(self, name: str) -> str:
        """Return a text field; MessageError if it is missing or has another type."""
        return self._typed_field(name, str)

    def flag(self, name: str) -> bool:
        """Return a boolean field; MessageError if it is missing or has another type."""
        return self._typed_field(name, bool)

    def sequence(self, name: str) -> list[Any]:
        """Return a list field; MessageError if it is missing or has another type."""
        return self._typed_field(name, list)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a mapping field; MessageError if it is missing or has another type."""
        return self._typed_field(name, dict)

    def array(self, name: str, dtype: DTypeLike, shape: Sequence[int | None]) -> np.ndarray:
        """Return an array of a dtype and shape, where None stands for any extent.

        Raises
        ------
        MessageError
            The array is missing, or has another dtype or shape.
        """
        value = self.arrays.get(name)
        if not isinstance(value, np.ndarray):
            raise MessageError(f"array '{name}' is missing")
        shape_fits = len(shape) == value.ndim and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
        if value.dtype != np.dtype(dtype) or not shape_fits:
            expected = f"{np.dtype(dtype)} {tuple('any' if n is None else n for n in shape)}"
            raise MessageError(f"array '{name}': expected {expected}, got {value.dtype} {value.shape}")
        return value

    def _typed_field(self, name: str, kind: type[T]) -> T:
        value = self.fields.get(name)
        if type(value) is not kind:
            raise MessageError(f"field '{name}': expected {kind.__name__}, got {type(value).__name__}")
        return value


def encode(message: Message) -> Iterator[bytes]:
    """Return an iterator over a message in chunks of at most CHUNK_BYTES; arrays are copied once."""
    descriptions, buffers, payload_bytes = [], [], 0
    for name, value in message.arrays.items():
        parts = [_to_little_endian(part) for part in _array_parts(value)]
        if len({part.dtype for part in parts}) > 1:
            raise MessageError(f"array '{name}': its parts differ in dtype")
        shape = list(value.shape) if isinstance(value, np.ndarray) else [sum(part.size for part in parts)]
        dtype = parts[0].dtype.str if parts else "<f4"
        if not _SENDABLE_DTYPE.fullmatch(dtype):
            raise MessageError(f"array '{name}': dtype {parts[0].dtype} cannot be sent")
        descriptions.append([name, dtype, shape])
        buffers += [part.reshape(-1).view(np.uint8).data for part in parts if part.size]
        nbytes = sum(part.nbytes for part in parts)
        buffers.append(memoryview(_PADDING[: -nbytes % ALIGNMENT_BYTES]))
        payload_bytes += nbytes + -nbytes % ALIGNMENT_BYTES
    text = json.dumps({"fields": dict(message.fields), "arrays": descriptions}, allow_nan=False).encode()
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise MessageError(f"fields and array descriptions: {len(text)} bytes; send at most {MAX_DESCRIPTION_BYTES}")
    header = HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, len(text), payload_bytes)
    return _join_into_chunks([memoryview(header + text), *buffers])


def decode(chunks: Iterable[bytes], max_bytes: int) -> Message:
    """Return the message in a sequence of chunks.

    Parameters
    ----------
    chunks : iterable of bytes
    max_bytes : int
        Largest total size of the arrays in bytes.

    Raises
    ------
    MessageError
        The message is malformed, truncated or too large; ProtocolVersionError for another protocol version.
    """
    stream = iter(chunks)
    first_chunk = next(stream, b"")
    if len(first_chunk) < HEADER.size:
        raise MessageError("the header is truncated")
    magic, protocol, reserved, description_bytes, payload_bytes = HEADER.unpack_from(first_chunk)
    if magic != MAGIC:
        raise MessageError("not a neondist message")
    if protocol != PROTOCOL_VERSION:
        raise ProtocolVersionError(f"the message has protocol {protocol}, but this process has {PROTOCOL_VERSION}")
    if reserved or description_bytes > MAX_DESCRIPTION_BYTES:
        raise MessageError("the header is invalid")
    if payload_bytes > max_bytes:
        raise MessageError(f"the arrays have {payload_bytes} bytes, but the limit is {max_bytes}")
    description_buffer, payload = bytearray(description_bytes), np.empty(payload_bytes, np.uint8)
    _fill_buffers([memoryview(description_buffer), payload.data], first_chunk[HEADER.size :], stream)
    return _parse_description(bytes(description_buffer), payload)


def _fill_buffers(targets: list[memoryview], first_chunk: bytes, stream: Iterator[bytes]) -> None:
    """Fill buffers in order; MessageError unless there are exactly as many bytes as they hold."""
    chunk = memoryview(first_chunk)
    for target in targets:
        while target.nbytes:
            if not chunk.nbytes:
                next_chunk = next(stream, None)
                if next_chunk is None:
                    raise MessageError("the message ends before all bytes that its header declares")
                chunk = memoryview(next_chunk)
            copied_bytes = min(target.nbytes, chunk.nbytes)
            target[:copied_bytes] = chunk[:copied_bytes]
            target, chunk = target[copied_bytes:], chunk[copied_bytes:]
    if chunk.nbytes or any(map(len, stream)):
        raise MessageError("the message has more bytes than its header declares")


def _parse_description(text: bytes, payload: np.ndarray) -> Message:
    try:
        description = json.loads(text, parse_constant=_reject_nan_constant)
        fields, descriptions = description["fields"], description["arrays"]
        if not isinstance(fields, dict) or not isinstance(descriptions, list) or len(description) != 2:
            raise MessageError("invalid description of the message")
        arrays: dict[str, MessageArray] = {}
        start = 0
        for name, dtype, shape in descriptions:
            if (
                not isinstance(name, str)
                or name in arrays
                or not _SENDABLE_DTYPE.fullmatch(dtype)
                or not isinstance(shape, list)
            ):
                raise MessageError("the description of an array is invalid")
            if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 32:
                raise MessageError(f"array '{name}': invalid shape")
            stop = start + math.prod(shape) * np.dtype(dtype).itemsize
            if stop > payload.size:
                raise MessageError(f"array '{name}': its shape needs more bytes than the message has")
            arrays[name] = payload[start:stop].view(dtype).reshape(shape)
            start = stop + -stop % ALIGNMENT_BYTES
        if start != payload.size:
            raise MessageError("the message has more bytes than its arrays need")
    except MessageError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageError(f"invalid description of the message ({type(error).__name__})") from None
    return Message(fields, arrays)


def _reject_nan_constant(text: str) -> None:
    raise MessageError(f"{text} is not JSON")


def _array_parts(value: MessageArray) -> Sequence[np.ndarray]:
    return [value] if isinstance(value, np.ndarray) else value


def _to_little_endian(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)


def _join_into_chunks(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    pending_buffers: list[memoryview] = []
    free_bytes = CHUNK_BYTES
    for buffer in buffers:
        while buffer.nbytes:
            pending_buffers.append(buffer[:free_bytes])
            free_bytes -= pending_buffers[-1].nbytes
            buffer = buffer[pending_buffers[-1].nbytes :]
            if not free_bytes:
                yield b"".join(pending_buffers)
                pending_buffers, free_bytes = [], CHUNK_BYTES
    if pending_buffers:
        yield b"".join(pending_buffers)
