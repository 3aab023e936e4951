"""Cross-rank agreement: all ranks raise or none does, and all make the same call or all raise."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import errors
from .transport import Transport

CALL_KEY = "the call"
"""Key of the first value passed to `check_equal_on_ranks`: the name of the collective call."""
ROWS_PER_CHECKSUM, ROW_BYTES = 16, 8192


def raise_if_any_failed(transport: Transport, error: Exception | None) -> None:
    """Raise on every rank if any rank has an error. Collective.

    A rank with an error raises its own error. Other ranks raise the first failing rank's error: a UserError of the same
    class with the same message, so that every rank ends with exit code 2, or a RemoteError for other exceptions. Raised
    UserErrors are marked `raised_on_all_ranks`.
    """
    error_report = None if error is None else (type(error).__name__, isinstance(error, errors.UserError), str(error))
    failures = [(rank, r) for rank, r in enumerate(transport.allgather(error_report)) if r is not None]
    if error is not None:
        raise error.mark_raised_on_all_ranks() if isinstance(error, errors.UserError) else error
    if failures:
        rank, (kind, is_user_error, message) = failures[0]
        if is_user_error:
            error_class: type[errors.UserError] = getattr(errors, kind, errors.UserError)
            raise error_class(message).mark_raised_on_all_ranks()
        raise errors.RemoteError(f"rank {rank} failed: {kind}: {message}")


def checksum_of(array: np.ndarray, start: int = 0) -> int:
    """Return a checksum of an array's bits at the cost of reading it once; `start` chains checksums.

    Sixteen rows of 8 KiB are summed, 64 bits at a time, before the CRC-32; only memory bandwidth then limits the speed.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    rows = data.size // (ROWS_PER_CHECKSUM * ROW_BYTES)
    sums = np.add.reduce(
        data[: rows * ROWS_PER_CHECKSUM * ROW_BYTES].view(np.uint64).reshape(rows, ROWS_PER_CHECKSUM, ROW_BYTES // 8), 1
    )
    return zlib.crc32(data[rows * ROWS_PER_CHECKSUM * ROW_BYTES :].data, zlib.crc32(sums.data, start))


@contextmanager
def all_or_none(world: Transport, root_only: bool = False) -> Iterator[None]:
    """Run a block that does not communicate, then raise on all ranks if any rank raised. Collective.

    Parameters
    ----------
    world : Transport
    root_only : bool
        Whether only rank 0 works in the block, possibly for long; other ranks wait without occupying a core.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    if root_only:
        world.wait_for_root()
    raise_if_any_failed(world, error)


def check_equal_on_ranks(
    world: Transport, values: Mapping[str, Any], error: Exception | None = None, versions: Sequence[int] = ()
) -> bool:
    """Raise on all ranks if any rank has an error, or values that differ from rank 0's. Collective.

    A small message precedes every collective call, so that ranks that make different calls do not wait for each other.

    Parameters
    ----------
    values : dict of name to value
        Values that must be equal on all ranks, CALL_KEY first; values are compared as text.
    error : Exception, optional
        Error of this rank.
    versions : sequence of int
        Numbers that may differ between ranks; the function returns whether they are equal.
    """
    if world.size == 1:
        if error is not None:
            raise error
        return True
    texts = {name: str(value) for name, value in values.items()}
    world.begin_call(texts.get(CALL_KEY, ""))
    digest = hashlib.sha256(repr((texts, tuple(versions))).encode()).digest()
    digest_number = int.from_bytes(digest[:7], "little")
    max_and_negated_min = np.array([digest_number, -digest_number] if error is None else [2**62, 2**62])
    world.allreduce(max_and_negated_min, "max")
    if max_and_negated_min[0] == -max_and_negated_min[1]:
        return True
    raise_if_any_failed(world, error)
    first, *others = world.allgather(texts)
    for rank, other in enumerate(others, 1):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise errors.ConfigError(
                    f"rank {rank}: {name} is {_abbreviate(other.get(name))}, but"
                    f" {_abbreviate(first.get(name))} on rank 0; all ranks must make the same call"
                ).mark_raised_on_all_ranks()
    return False


def _abbreviate(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) < 120 else f"{value[:50]}...{value[-50:]}"
